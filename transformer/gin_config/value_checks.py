"""Checks of values of settings: types from annotations of parameters, ranges as declared."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import (
  ABOVE_ZERO,
  FRACTION,
  NOT_BELOW_ZERO,
  Rule,
  at_least,
  is_number,
  is_whole,
  one_of,
)
from mesh_tensorflow.errors import ConfigError, MeshError
from mesh_tensorflow.training import nonfinite
from mesh_tensorflow.training.seeds import PURPOSES
from mesh_tensorflow.transformer.gin_config import affected
from mesh_tensorflow.transformer.gin_config import names as gin_names
from mesh_tensorflow.transformer.gin_config.contradictions import RUN
from mesh_tensorflow.transformer.gin_config.names import Macro, Reference, did_you_mean
from mesh_tensorflow.transformer.gin_config.settings import Setting, Settings, parts_of, short
from mesh_tensorflow.transformer.meshes import mesh_setup
from mesh_tensorflow.transformer.meshes.batching import BATCH_METHODS
from mesh_tensorflow.transformer.programs.model_building import MODEL_TYPES
from mesh_tensorflow.transformer.vocabularies import named

_OURS = "mesh_tensorflow."


WHOLE = Rule("a whole number", is_whole)
NUMBER = Rule("a number", is_number)
CALLABLE = Rule("a function or class of Python or gin (@name)", callable)
YES_OR_NO = Rule("True or False", lambda x: isinstance(x, bool) or (is_whole(x) and x in (0, 1)))
TEXT = Rule("a text in quotes", lambda x: not isinstance(x, (numbers.Number, Mapping)))


def _is_batch_size(x: Any) -> bool:
  if isinstance(x, (list, tuple)):
    return len(x) == 2 and isinstance(x[0], str) and x[0] in BATCH_METHODS and _one(x[1])
  return _one(x)


def _one(x: Any) -> bool:
  return is_whole(x) and x >= 1


def _are_lengths(x: Any) -> bool:
  if isinstance(x, Mapping):
    return bool(x) and all(isinstance(k, str) and _one(v) for k, v in x.items())
  return x is None or _one(x)


def _is_checkpoint_step(x: Any) -> bool:
  if isinstance(x, (list, tuple)):
    return bool(x) and all(is_whole(n) and n >= 0 for n in x)
  return x in (None, "all", "new", "best") or (is_whole(x) and x >= -1)


def _are_seeds(x: Any) -> bool:
  return x is None or isinstance(x, Mapping) and all(k in PURPOSES and is_whole(x[k]) for k in x)


def _is_no_number(x: Any) -> bool:
  return x is not None and not isinstance(x, numbers.Number)


def _are_rates(x: Any) -> bool:
  return isinstance(x, (list, tuple)) and all(callable(f) or is_number(f) for f in x)


def _is_dtype(x: Any) -> bool:
  try:
    return bool(tf.as_dtype(x).is_floating)
  except TypeError:
    return False


_DTYPES = ("float32", "bfloat16", "float16", "float64")
_DTYPE = Rule(f"one of {', '.join(map(repr, _DTYPES))}, or such a tf.DType", _is_dtype, _DTYPES)
_CHECKPOINT_STEP = Rule(
  "a step, a list of steps, -1 (the newest), 'best', 'all', 'new' (each as it appears) or None",
  _is_checkpoint_step,
)
_STEPS = Rule(
  "a whole number of at least 0, or a function of batch size and sequence length",
  lambda x: callable(x) or (is_whole(x) and x >= 0),
)
_RATES = Rule(
  "a schedule, a number of at least 0, or a list of such",
  lambda x: x is None or callable(x) or _are_rates(x) or NOT_BELOW_ZERO.is_legal(x),
)


def _is_vocabulary(x: Any) -> bool:
  if isinstance(x, (tuple, list)):
    return len(x) == 2 and all(v is not None and _is_vocabulary(v) for v in x)
  return named.is_name(x) if isinstance(x, str) else not isinstance(x, numbers.Number)


# Of the trainer's functions, whose values are not ranges.
_OF_OWNERS: dict[str, dict[str, Rule]] = {
  "run": {
    "model_type": one_of(*MODEL_TYPES),
    "mesh_implementation": one_of(*mesh_setup.IMPLEMENTATIONS),
    "nonfinite": one_of(*nonfinite.CHOICES),
    "eval_every_steps": at_least(0),
    "early_stopping_min_delta": NOT_BELOW_ZERO,
    "seeds": Rule(
      f"a dict from {', '.join(map(repr, PURPOSES))} to whole numbers, or None", _are_seeds
    ),
    "batch_size": Rule(
      "a whole number of sequences of at least 1, or a pair such as ('tokens_per_batch', 4096), of "
      f"one of {', '.join(BATCH_METHODS)} and such a number",
      _is_batch_size,
    ),
    "sequence_length": Rule(
      "a whole number of tokens of at least 1, or a dict such as {'inputs': 64, 'targets': 64}",
      _are_lengths,
    ),
    "train_steps": _STEPS,
    "norms_every": at_least(0).or_none(),
    "eval_checkpoint_step": _CHECKPOINT_STEP,
    "export_checkpoint_step": _CHECKPOINT_STEP,
    "learning_rate_schedule": _RATES,
    "mesh_devices": Rule(
      "a list of names of devices, or None",
      lambda x: x is None or (isinstance(x, (list, tuple)) and all(isinstance(d, str) for d in x)),
    ),
    "vocabulary": Rule(
      "a vocabulary such as @vocabulary.get_byte_vocabulary(), a name such as 'bytes', "
      "'characters' or 'sentencepiece:8000', a pair of them, or None",
      _is_vocabulary,
    ),
    "optimizer": Rule(
      "an optimizer class such as @optimize.AdamWOptimizer, or None", CALLABLE.or_none().is_legal
    ),
    "mesh_shape": Rule("a mesh shape such as 'batch:2,model:2' ('' is one device)", _is_no_number),
    "layout_rules": Rule(
      "layout rules such as 'batch:batch,d_ff:model' ('' splits nothing)", _is_no_number
    ),
  },
  "get_variable_dtype": dict.fromkeys(("master_dtype", "slice_dtype", "activation_dtype"), _DTYPE),
  "sample": {
    **dict.fromkeys(("top_k", "max_tokens"), at_least(1).or_none()),
    "top_p": Rule(
      "a number above 0 and at most 1", lambda x: is_number(x) and 0 < x <= 1
    ).or_none(),
    "min_p": FRACTION.or_none(),
    "repetition_penalty": ABOVE_ZERO.or_none(),
    "num_samples": at_least(1),
    "batch_size": at_least(1).or_none(),
  },
  "Trainer": {"nonfinite": one_of(*nonfinite.CHOICES)},
}


def register_choices(owner: str, parameter: str, choices: Iterable[str]) -> None:
  """Registers the legal texts of a parameter, such as the modes of `run`.

  Args:
    owner: the last part of the name of the configurable.
    parameter: its name.
    choices: the legal texts; they replace those registered before.
  """
  _OF_OWNERS.setdefault(owner, {})[parameter] = one_of(*choices)


# What the texts of annotations ask for.
_OF_KINDS = {"int": WHOLE, "float": NUMBER, "bool": YES_OR_NO, "str": TEXT}


def rule_of(owner: str, parameter: inspect.Parameter, declared: Rule | None = None) -> Rule | None:
  """The rule for a parameter's values, from its declaration and its annotation; None: no rule.

  Args:
    owner: the last part of the name of the configurable.
    parameter: the parameter, from the configurable's signature.
    declared: the rule that its class or function declares; see `mesh_tensorflow.arguments`.
  """
  own = _OF_OWNERS.get(owner, {}).get(parameter.name)
  if own is not None:
    return own
  annotation = str(parameter.annotation)
  if annotation.startswith("Callable["):
    may_be_none = parameter.default is None or annotation.endswith("| None")
    return CALLABLE.or_none() if may_be_none else CALLABLE
  kinds = kinds_of(parameter.annotation)
  found = [_OF_KINDS[k] for k in kinds if k in _OF_KINDS]
  # One of the kinds has no rule: what it allows is not known.
  if not kinds or len(found) + ("None" in kinds) < len(kinds):
    return None
  rule = declared or (found[0] if len(found) == 1 else None)
  may_be_none = "None" in kinds or parameter.default is None or rule is TEXT
  return rule.or_none() if rule and may_be_none and not rule.is_legal(None) else rule


def kinds_of(annotation: Any) -> list[str]:
  """Splits an annotation such as "int | None" into its parts."""
  if isinstance(annotation, type):
    return [annotation.__name__] if annotation is not inspect.Parameter.empty else []
  return [part.strip() for part in annotation.split("|")] if isinstance(annotation, str) else []


def check_settings(settings: Settings) -> None:
  """Raises an error for the first setting whose value its parameter cannot have.

  Args:
    settings: all bindings.

  Raises:
    ConfigError: it names the setting, its value, its place, and what is legal.
  """
  for setting in settings.in_force():
    key = setting.key
    if setting.is_macro or not key[1].startswith(_OURS):
      continue
    value = settings.literal(setting.value)
    if any(True for kind in (Reference, Macro) for _ in parts_of(value, kind)):
      continue  # What gin makes of it is known later.
    parameter = parameter_of(key[1], key[2])
    if parameter is None:
      continue
    # Of a function of somebody else with such a name the table says nothing.
    known = affected.is_of_package(key[1])
    owner = key[1].rsplit(".", 1)[-1] if known else ""
    declared = affected.values(key[1], key[2])
    place = f"gin: {place_of(settings, setting)}: "
    # The table's `run` is the trainer's; another function may have that name, too.
    owner = owner if key[1] == RUN or owner != "run" else ""
    _check(owner, parameter, value, place, setting.name, declared)
    if key[1:] == (RUN, "mesh_shape"):
      check_mesh_shape(value, place)


def check_arguments(owner: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
  """Raises an error for the first argument of a call that its parameter cannot have.

  Args:
    owner: name of the function, for the table and the error.
    function: for its signature.
    given: arguments by name; others than the function's are left out.

  Raises:
    ConfigError: it names the argument, its value, and what is legal.
  """
  for parameter in inspect.signature(function).parameters.values():
    if parameter.name in given:
      declared = affected.values_of(function, parameter.name)
      _check(owner, parameter, given[parameter.name], "", f"{owner}.{parameter.name}", declared)


def check_mesh_shape(value: Any, place: str = "") -> None:
  """Raises an error for a mesh dimension without processors."""
  try:
    shape = mtf.convert_to_shape(value) if isinstance(value, (str, mtf.Shape)) else None
  except MeshError:
    return  # Told with the others of its kind; see `run_checks`.
  for dim in shape or []:
    if dim.size < 1:
      raise ConfigError(
        f"{place}run.mesh_shape = {str(value)!r}: the mesh dimension {dim.name}:{dim.size} has no "
        "processors; its size must be a whole number of at least 1"
      )


def place_of(settings: Settings, setting: Setting) -> str:
  """Source locations of a setting and of the macros in its value."""
  places = [str(setting.place)]
  for macro in parts_of(setting.value, Macro):
    bound = settings.macro(macro.name)
    if bound is not None:
      places.append(f"{macro!r} of {bound.place}")
  return ", ".join(places)


def _check(
  owner: str,
  parameter: inspect.Parameter,
  value: Any,
  place: str,
  name: str,
  declared: Rule | None,
) -> None:
  rule = rule_of(owner, parameter, declared)
  if rule is None or value is parameter.default or rule.is_legal(value):
    return
  # Sizes and times are often written as 1e5.
  if isinstance(value, float) and value.is_integer() and rule.is_legal(int(value)):
    if owner != "run":
      return
    hint = f"; write {int(value)}"
  else:
    hint = _hint(value, rule)
  raise ConfigError(f"{place}{name} = {short(value)}: it must be {rule.legal}{hint}")


def _hint(value: Any, rule: Rule) -> str:
  """A "did you mean" hint for a text: a similar choice, or a similar function that gin knows."""
  if not isinstance(value, str):
    return ""
  if rule.choices or not rule.legal.startswith(CALLABLE.legal):
    return did_you_mean(value, rule.choices)
  near = [f"@{name}" for name in gin_names.similar_names(value)]
  return f"; did you mean {' or '.join(near)}?" if near else ""


def parameter_of(selector: str, argument: str) -> inspect.Parameter | None:
  """The parameter of a configurable; if a class passes it on, that of the base class."""
  try:
    configurable = gin_names.configurable_of(selector)
  except ValueError:
    return None
  for owner in inspect.getmro(configurable) if inspect.isclass(configurable) else [configurable]:
    try:
      found = inspect.signature(owner).parameters.get(argument)
    except (TypeError, ValueError):
      continue
    if found is not None:
      return found
  return None
