"""The model's configuration: saved with each checkpoint, and compared when one is read.

Weights say little of the model that they belong to: 8 heads of 16 and 4 of 32, relu and gelu have
the same shapes. So a checkpoint has a record of all that its program was built from: gin's
operative configuration, defaults included, and the vocabulary. It is JSON, in the file
`model.ckpt-<step>.with-config-00000.json`:

    model       decides what is computed from the weights in evaluation; a difference is refused
    precision   dtypes, and how an ensemble is read: a difference is told
    training    dropout, initial values, losses, optimizer, schedules, data
    other       all else: layout, mode, files, decoding

Which part a parameter belongs to is declared where it is (`mesh_tensorflow.arguments.declared`). Of
classes and functions of others, all belongs to the model that the model refers to. And two more:

    vocabulary  class, size and SHA-256 of each
    found       what the run has found where "auto" was bound, by the names of arguments of `run`
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.environment import untrusted_files
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.data.vocabularies import kept
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies
from mesh_tensorflow.transformer.gin_config import bindings as gin_names
from mesh_tensorflow.transformer.gin_config import checks, operative, parsing
from mesh_tensorflow.transformer.gin_config.bindings import Key, Macro, Reference, parts_of, short
from mesh_tensorflow.transformer.gin_config.checks import MODEL_TYPE

_LOG = logging.getLogger("mesh_tensorflow")

ATTACHMENT = "config"
_FORMAT = 1
_PACKAGE = "mesh_tensorflow."
_T = f"{_PACKAGE}transformer."
_SHOWN, _LONGEST = 6, 120  # Differences in one message, and characters of a value.

# Only the sequences are others.
_SAME_MODEL = {"delimited_lm": "lm"}
# Sizes of tables that a model has only if another argument is true.
_ONLY_WITH = {"max_length": "positional_embedding"}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The configuration from which a model's program was built in this process.

  Attributes:
    record: JSON-like values that are saved with a checkpoint; see the module.
    keys: gin's (scope, selector, argument) of each name in the record.
  """

  record: dict[str, Any]
  keys: dict[str, Key]

  def write(self, path: str) -> None:
    """Writes the record, for `Checkpointer.save(attachments={ATTACHMENT: ...})`."""
    with tf.io.gfile.GFile(f"{path}.json", "w") as f:
      f.write(json.dumps(self.record, indent=1, sort_keys=True) + "\n")


def capture(model_type: str, vocabulary: Vocabularies | None, variable_dtype: Any) -> ModelConfig:
  """The configuration of the model whose program was built last.

  Args:
    model_type: see `build_model`.
    vocabulary: a vocabulary, an (inputs, targets) tuple, or None.
    variable_dtype: an `mtf.VariableDType`.
  """
  values, called = operative.operative_values()
  values = {**_defaults(called, values), **values}
  of_model = _of_model(values)
  vocabularies = vocabulary if isinstance(vocabulary, tuple) else (vocabulary,)
  record: dict[str, Any] = {
    "format": _FORMAT,
    "model": {_name(MODEL_TYPE): _SAME_MODEL.get(model_type, model_type)},
    "precision": {
      kind: tf.as_dtype(getattr(variable_dtype, kind)).name
      for kind in ("master_dtype", "slice_dtype", "activation_dtype")
    },
    "training": {},
    "other": {},
    "vocabulary": [kept.describe(v) for v in vocabularies if v is not None],
    "found": operative.found_values(),
  }
  keys = {_name(MODEL_TYPE): MODEL_TYPE}
  for key, value in values.items():
    name = _name(key)
    if name in keys:
      continue
    record[_kind(key, values, of_model)][name] = _plain(value)
    keys[name] = key
  return ModelConfig(record, keys)


def compare(
  path: str, now: ModelConfig, allow: bool = False, *, fits: Callable[[], bool] = lambda: True
) -> list[str]:
  """Compares a checkpoint's configuration with that of the model that is to read it.

  Args:
    path: a checkpoint.
    now: of the model.
    allow: whether another model is allowed.
    fits: tells whether the model has the variables of the checkpoint, of their shapes; for the
      advice of the error.

  Returns:
    Lines to say: what differs in precision, and what was not compared. Of what is allowed a warning
    tells.

  Raises:
    ConfigError: the checkpoint is of another model, in something that its variables' shapes need
      not show.
  """
  name = os.path.basename(path)
  then = _read(path)
  if then is None:
    return [f"{name} has no record of its configuration (an older one?): it is not compared"]
  told = [
    f"{what} was {short(old)}, now {short(new)}"
    for what, old, new in _changes(then["precision"], now.record["precision"])
  ]
  lines = [f"{name}: {'; '.join(told)}"] if told else []
  differences = _differences(then, now)
  if not differences:
    return lines
  text = f"{path} is of another model: {_joined(differences)}"
  if not allow:
    otherwise = "use another model_dir: the weights have other names or shapes"
    if fits():
      otherwise = (
        "to go on with the new ones, give --allow_config_change (in programs: "
        "run.allow_config_change = True)"
      )
    raise ConfigError(f"{text}. Give the old values; or, {otherwise}")
  _LOG.warning("%s (allow_config_change)", text)
  return lines


def found_in(path: str) -> dict[str, Any]:
  """Reads the values found for "auto" by the run that wrote a checkpoint.

  Args:
    path: a checkpoint.

  Returns:
    A dict by the names of arguments of `run`; empty if nothing was found, or there is no record.
  """
  record = _read(path) or {}
  found = record.get("found", {})
  return found if isinstance(found, dict) else {}


def compare_with_initial(path: str, now: ModelConfig) -> list[str]:
  """Like `compare`, for an initial checkpoint, whose model may differ by design."""
  then = _read(path)
  differences = _differences(then, now) if then is not None else []
  return [f"{path} is of another model: {_joined(differences)}"] if differences else []


# ------------------------------------------------------------------- what decides the model


def _of_model(values: Mapping[Key, object]) -> set[str]:
  """Selectors that are part of the model: those of this package, and those they refer to."""
  found = {s for _, s, _ in values if checks.is_of_package(s) and checks.whole_effect(s) == "model"}
  new = found
  # References of references, until there are no more: a user's class belongs to the model if a
  # layer has it.
  while new:
    references = {
      r.selector
      for (_, selector, argument), value in values.items()
      if selector in new and checks.effect_of(selector, argument) != "training"
      for r in parts_of(value, Reference)
    }
    new = {s for s in references - found if not checks.is_of_package(s)}
    found |= new
  return found


def _kind(key: Key, values: Mapping[Key, object], of_model: set[str]) -> str:
  """The section of the record that a parameter belongs to."""
  scope, selector, argument = key
  if selector not in of_model and not checks.is_of_package(selector):
    return "other"
  condition = _ONLY_WITH.get(argument)
  if condition and not values.get((scope, selector, condition), True):
    return "other"
  kind = checks.effect_of(selector, argument)
  return "other" if kind == "report" else kind


def _defaults(called: Iterable[tuple[str, str]], values: Mapping[Key, object]) -> dict[Key, Any]:
  """Defaults that are classes or functions, which gin's operative configuration leaves out."""
  found = {}
  for scope, selector in called:
    if not gin_names.whole_selectors(selector):
      continue
    for p in inspect.signature(gin_names.configurable_of(selector)).parameters.values():
      value = None if p.default is inspect.Parameter.empty else _as_bound(p.default)
      if (scope, selector, p.name) not in values and any(parts_of(value, Reference)):
        found[scope, selector, p.name] = value
  return found


def _as_bound(default: object) -> Any:
  """A default value, with classes and functions in it replaced by gin references to them."""
  if isinstance(default, (list, tuple)):
    return [_as_bound(d) for d in default]
  if not inspect.isclass(default) and not inspect.isroutine(default):
    return default
  name = default.__name__
  for selector in gin_names.whole_selectors(name):
    found = gin_names.configurable_of(selector)
    if found is default or found is getattr(default, "__wrapped__", None):
      return Reference(name, False, "", selector)
  return Reference(name, False, "", f"{default.__module__}.{name}")


# -------------------------------------------------------------------------- as plain values


def _name(key: Key) -> str:
  """The name of a parameter in a record, the same wherever it was bound."""
  scope, selector, argument = key
  return f"{scope}/{_selector(selector)}.{argument}".lstrip("/")


def _selector(selector: str) -> str:
  # The module of a user's class is another one where it is the main program.
  return selector if selector.startswith(_PACKAGE) else selector.rpartition(".")[2]


def _plain(value: object) -> Any:
  """Converts a value of gin to JSON-like values."""
  if isinstance(value, Reference):
    name = "/".join(p for p in (value.scope, _selector(value.selector or value.name)) if p)
    return f"@{name}{'()' if value.evaluate else ''}"
  if isinstance(value, Macro):
    return f"%{value.name}"
  if isinstance(value, dict):
    return {"dict": sorted(([_plain(k), _plain(v)] for k, v in value.items()), key=repr)}
  if isinstance(value, (list, tuple)):
    if len(value) == 2 and isinstance(value[0], Reference) and isinstance(value[1], dict):
      # A class and arguments for it.
      selector, given = value[0].selector, value[1]
      of_model = [k for k in given if checks.effect_of(selector, str(k)) == "model"]
      value = [value[0], {k: given[k] for k in of_model}]
    # Lists of sublayers with and without what evaluation does not see are the same model.
    return [_plain(v) for v in value if not _is_of_training(v)]
  return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def _is_of_training(value: object) -> bool:
  return isinstance(value, Reference) and checks.whole_effect(value.selector) == "training"


# ------------------------------------------------------------------------------- comparison


# What is read of a record; see `untrusted.expect`.
_FORM = {
  "format": object,
  "model": dict,
  "precision": dict,
  "vocabulary": [{"class": str, "size": int, "digest": (str, None)}],
}


def _read(path: str) -> dict[str, Any] | None:
  """The record of a checkpoint; None if there is none that can be read."""
  file = f"{checkpoint_lib.attachment(path, ATTACHMENT)}.json"
  try:
    # Settings may be infinite.
    record = untrusted_files.read_json(file, _FORM, finite=False)
  except (tf.errors.OpError, ValueError):
    return None
  known = isinstance(record, dict) and record.get("format") == _FORMAT
  return record if known else None


def _changes(then: Mapping[str, object], now: Mapping[str, object]) -> list[tuple[str, Any, Any]]:
  """Lists (name, old value, new value) of the names in both whose values differ."""
  return [(k, then[k], now[k]) for k in now if k in then and then[k] != now[k]]


def _differences(then: Mapping[str, Any], now: ModelConfig) -> list[str]:
  """Describes each difference between two model configurations.

  Configurables called in only one of the programs do not count: another difference, or the mode, is
  the reason for that. Nor does a parameter that only one version of a function has, unless it is
  bound.
  """
  # What an older version took for a part of the training may be known to decide the model.
  old = {k: v for part in _PARTS for k, v in then[part].items() if part != "precision"}
  new = now.record["model"]
  changes = [(k, _text(was)) for k, was, _ in _changes(old, new)]
  called = {_owner(k) for k in then["model"]}
  added = [k for k in new if _owner(k) in called and not any(k in then[p] for p in _PARTS)]
  changes += [(k, "its default") for k in added if _is_bound(now.keys[k], new[k])]
  places = parsing.places_of([now.keys[k] for k, _ in changes])
  found = [
    f"{_shown(now.keys[k])} was {was}, now {_text(new[k])} ({places[now.keys[k]]})"
    for k, was in changes
  ]
  return found + _vocabulary_differences(then["vocabulary"], now.record["vocabulary"])


_PARTS = ("model", "precision", "training", "other")


def _owner(name: str) -> str:
  return name.rpartition(".")[0]


def _is_bound(key: Key, value: object) -> bool:
  """True if a value differs from the default of its parameter."""
  _, selector, argument = key
  parameter = checks.declared_parameter(selector, argument)
  if parameter is None:
    return True  # It goes to **kwargs, and is there because it is bound.
  if parameter.default in (gin.REQUIRED, inspect.Parameter.empty):
    return False
  return bool(_plain(_as_bound(parameter.default)) != value)


def _vocabulary_differences(then: list[Any], now: list[Any]) -> list[str]:
  if not then or not now:
    return []
  # A pair of equal ones is one.
  sides = ("",) if len(then) == len(now) == 1 else (" of inputs", " of targets")
  then, now = (v * 2 if len(v) < len(sides) else v for v in (then, now))
  found = []
  for side, was, is_now in zip(sides, then, now):
    known = was["digest"] and is_now["digest"]
    same_class = was["class"] == is_now["class"]
    if was["size"] != is_now["size"] or (
      known and same_class and was["digest"] != is_now["digest"]
    ):
      found.append(
        f"the vocabulary{side} was {_vocabulary_text(was)}, now {_vocabulary_text(is_now)}"
      )
  return found


def _vocabulary_text(described: Mapping[str, Any]) -> str:
  digest = f", SHA-256 {described['digest'][:8]}" if described["digest"] else ""
  return f"{described['class']} of {described['size']:,} ids{digest}"


def _shown(key: Key) -> str:
  """A parameter as gin files name it."""
  scope, selector, argument = key
  return f"{scope}/{gin_names.shortest(selector)}.{argument}".lstrip("/")


def _text(value: object) -> str:
  """A value of a record, for an error."""
  # Names without the package, as gin files have them.
  return short(json.loads(json.dumps(value).replace(_T, "").replace(_PACKAGE, "")), _LONGEST)


def _joined(differences: list[str]) -> str:
  more = len(differences) - _SHOWN
  return "; ".join(differences[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
