"""`--set NAME=VALUE`: short assignments, translated to gin bindings.

A name may be short (`steps`, `optimizer`), that of a macro of the gin files (`d_model`), a
parameter of `run` (`train_steps`) or a whole one (`decode_from_file.repeats`). A value is gin's
where gin can read it, a name where the parameter takes a function or class (`optimizer=AdamW`), and
else a text.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import logging
import tokenize
from collections.abc import Callable, Sequence
from typing import Any

from gin import config_parser

from mesh_settings import hints, rules
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.gin_config import bindings as gin_names
from mesh_tensorflow.transformer.gin_config import checks
from mesh_tensorflow.transformer.gin_config.bindings import MACRO, Macro, Place, Reference, Settings
from mesh_tensorflow.transformer.gin_config.checks import RUN
from mesh_tensorflow.transformer.gin_config.reader import SET, Reader, TextDelegate

_LOG = logging.getLogger("mesh_tensorflow")

_OPTIMIZERS = "mesh_tensorflow.optimize"
_SCHEDULES = "mesh_tensorflow.transformer.learning_rate_schedules"
_SCHEDULE = "run.learning_rate_schedule"
_RATES = ("peak", "learning_rate", "max_learning_rate", "initial_lr")
_WARMUP = "warmup"
# Schedules of at most 1, which a number beside them makes rates.
_FACTORS = ("constant", "linear_decay", "linear_warmup")
_OWN_TEXT = "dataset.own_text"
# Written as they are in YAML and on command lines; gin knows Python's only.
_WORDS = {"true": "True", "yes": "True", "false": "False", "no": "False"}


@dataclasses.dataclass(frozen=True)
class Short:
  """A short name.

  Attributes:
    meaning: for the documentation.
    names: the parameters that are bound to the value; those after the first are what has to follow
      it.
    bindings: in place of `names`: makes the bindings of the text of the value and of what is bound.
  """

  meaning: str
  names: tuple[str, ...] = ()
  bindings: Callable[[str, Settings], list[str]] | None = None


def add(reader: Reader, assignments: Sequence[str]) -> None:
  """Reads assignments, after all files and bindings.

  Args:
    reader: gets the bindings that they stand for.
    assignments: texts "NAME=VALUE".

  Raises:
    ConfigError: a name stands for nothing; the error names what resembles it.
  """
  for text in assignments:
    name, equals, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not equals or not name:
      raise ConfigError(f"{SET} {text!r}: write {SET} NAME=VALUE, such as {SET} d_model=512")
    # One after the other: what one binds decides what the next one means.
    bindings = _bindings(name, value, reader.settings, Place(SET, text=text))
    if name == "schedule" and reader.settings.macro(name) is None:
      # One name may bind several, and decides the rates.
      _LOG.warning("%s %s: %s", SET, text, "; ".join(bindings))
    reader.read_bindings(bindings, Place(SET, text=text))


def _bindings(name: str, value: str, settings: Settings, place: Place) -> list[str]:
  # What a gin file calls by this name goes before what we would.
  if settings.macro(name) is not None:
    return [f"{name} = {_value_of_macro(name, value, settings, place)}"]
  short = SHORT.get(name)
  if short is not None and short.bindings is not None:
    return _placed(short.bindings, value, settings, place)
  if short is not None:
    return [f"{n} = {_value(n, value, settings, place)}" for n in short.names]
  if "." in name or "/" in name:
    return [f"{name} = {_value(name, value, settings, place)}"]
  of_run = gin_names.parameters(RUN)
  if name in of_run:
    return [f"run.{name} = {_value(f'run.{name}', value, settings, place)}"]
  macros = [key[0] for key in settings.keys() if key[1:] == MACRO]
  legal = {*SHORT, *macros, *of_run}
  hint = gin_names.did_you_mean(name, legal) or (
    "; it is a short name (docs/commands.md lists them), a macro of the gin files, a parameter of "
    "run, or a whole name such as Unitransformer.max_length"
  )
  raise ConfigError(f"gin: {place}: nothing is called {name!r}{hint}")


def _placed(
  bindings: Callable[[str, Settings], list[str]], value: str, settings: Settings, place: Place
) -> list[str]:
  try:
    return bindings(value, settings)
  except ConfigError as e:
    raise ConfigError(f"gin: {place}: {e}") from None


# ------------------------------------------------------------------ values


def _value(name: str, text: str, settings: Settings, place: Place) -> str:
  """The value of an assignment as gin text, for the parameter with this full name."""
  if "." not in name:
    return _value_of_macro(name, text, settings, place)
  scope, _, last = name.rpartition("/")
  selector, _, argument = last.rpartition(".")
  whole = gin_names.resolve_binding(scope, selector, argument, place)
  bound = settings.find(scope, whole, argument)
  in_force = None if bound is None else settings.literal(bound.value)
  return _converted(text, _parameter(whole, argument), in_force, place)


def _value_of_macro(name: str, text: str, settings: Settings, place: Place) -> str:
  """The value of an assignment to a macro as gin text, for the parameter that uses the macro."""
  bound = settings.macro(name)
  in_force = None if bound is None else settings.literal(bound.value)
  for setting in settings.in_force():
    if setting.value == Macro(name) and not setting.is_macro:
      return _converted(text, _parameter(setting.selector, setting.argument), in_force, place)
  return _converted(text, None, in_force, place)


def _parameter(selector: str, argument: str) -> inspect.Parameter | None:
  return checks.parameter_of(selector, argument)


def _converted(text: str, parameter: inspect.Parameter | None, in_force: Any, place: Place) -> str:
  kinds = rules.kinds_of(parameter.annotation) if parameter is not None else []
  read = parsed(text)
  if read is not None:
    # "7" for a parameter that is a text: a name may be made of digits.
    is_text = "str" in kinds and not {"int", "float", "bool"} & set(kinds)
    return repr(text) if is_text and isinstance(read[0], (int, float)) else text
  word = text.lower()
  if "bool" in kinds and word in _WORDS:
    return _WORDS[word]
  if word == "none" and ("None" in kinds or "str" not in kinds):
    return "None"
  is_reference = isinstance(in_force, Reference)
  if is_reference or any(k.startswith("Callable") for k in kinds):
    call = "()" if is_reference and in_force.evaluate else ""
    # Some take the name of a function as a text, too: an activation.
    if "str" not in kinds or len(gin_names.whole_selectors(text)) == 1:
      return _reference(text, place) + call
  return repr(text)


def parsed(text: str) -> tuple[Any] | None:
  """The value that gin reads in a text, as the only one of a tuple; None if it cannot."""
  if "\n" in text:
    return None
  parser = config_parser.ConfigParser(io.StringIO(f"x = {text}\n"), TextDelegate())
  try:
    value = parser.parse_statement().value
    rest = parser.parse_statement()
  except (SyntaxError, tokenize.TokenError, AttributeError):
    return None
  # What follows a # is no comment on a command line.
  if rest is not None or ("#" in text and not isinstance(value, str)):
    return None
  return (value,)


def _reference(word: str, place: Place) -> str:
  """Returns `@name` for the configurable with this name; raises if there is none, or several."""
  found = gin_names.whole_selectors(word)
  if len(found) == 1:
    return f"@{word}"
  if found:
    raise ConfigError(f"gin: {place}: {word!r} is ambiguous; it may be {' or '.join(found)}")
  close = [f"@{n}" for n in gin_names.similar_names(word)]
  hint = hints.hint(close)
  raise ConfigError(f"gin: {place}: nothing configurable is called {word!r}{hint}")


# ------------------------------------------------------------------ short names


def _of_module(module: str, classes: bool = False, suffix: str = "") -> dict[str, str]:
  """The classes or the functions that are configurable in a module, by name without a suffix."""
  return {
    whole.rpartition(".")[2].removesuffix(suffix): gin_names.shortest(whole)
    for whole in gin_names.selectors_of(module)
    if inspect.isclass(gin_names.configurable_of(whole)) == classes
  }


def _chosen(word: str, what: str, known: dict[str, str]) -> str:
  """Returns `@name` of the configurable that matches a word, by name or by a unique prefix."""
  plain = gin_names.plain(word)
  same = [n for n in known if gin_names.plain(n) == plain]
  begins = [n for n in known if gin_names.plain(n).startswith(plain)] if plain else []
  found = same[0] if same else begins[0] if len(begins) == 1 else None
  if found is None:
    hint = gin_names.did_you_mean(word, known)
    raise ConfigError(f"there is no {what} {word!r}{hint or f'; there are {_listed(known)}'}")
  return f"@{known[found]}"


def _listed(names: dict[str, str]) -> str:
  return ", ".join(sorted(names))


def _optimizer(text: str, settings: Settings) -> list[str]:
  del settings
  if parsed(text) is None:
    suffix = "Optimizer"
    known = _of_module(_OPTIMIZERS, classes=True, suffix=suffix)
    text = _chosen(text.removesuffix(suffix), "optimizer", known)
  return [f"run.optimizer = {text}"]


def _bound_schedule(settings: Settings) -> Any:
  bound = settings.exact(("", RUN, "learning_rate_schedule"))
  return None if bound is None else settings.literal(bound.value)


def _numbers(schedule: Any) -> list[int | float]:
  """The numbers of a product of schedules."""
  factors = list(schedule) if isinstance(schedule, (list, tuple)) else [schedule]
  return [f for f in factors if isinstance(f, (int, float))]


def _learning_rate(text: str, settings: Settings) -> list[str]:
  """Bindings for a learning rate: a schedule's factor or parameter, or a constant rate."""
  read = parsed(text)
  if read is None or not isinstance(read[0], (int, float)) or isinstance(read[0], bool):
    raise ConfigError(f"{text!r} is no number; --set schedule=NAME chooses a schedule")
  schedule = _bound_schedule(settings)
  numbers = _numbers(schedule)
  if isinstance(schedule, (list, tuple)) and len(numbers) == 1:
    factors = [read[0] if isinstance(f, (int, float)) else f for f in schedule]
    return [f"{_SCHEDULE} = {factors!r}"]
  if isinstance(schedule, Reference) and schedule.selector:
    takes = gin_names.parameters(schedule.selector)
    for name in _RATES:
      if name in takes:
        scope = f"{schedule.scope}/" if schedule.scope else ""
        return [f"{scope}{schedule.selector}.{name} = {text}"]
  return [f"{_SCHEDULE} = {text}"]


def _schedule(text: str, settings: Settings) -> list[str]:
  """Bindings that replace the schedule; a constant factor beside it is kept."""
  if parsed(text) is not None:
    return [f"{_SCHEDULE} = {text}"]
  chosen = _chosen(text, "schedule", _of_module(_SCHEDULES))
  name = chosen.removeprefix("@")
  before = _bound_schedule(settings)
  kept = _kept(name, before, settings)
  numbers = _numbers(before)
  takes = gin_names.parameters(name)
  rate = next((n for n in _RATES if n in takes), None)
  if len(numbers) == 1:
    if rate is None:
      return [f"{_SCHEDULE} = [{chosen}, {numbers[0]!r}]"]
    kept[rate] = repr(numbers[0])
  elif rate is not None and rate not in kept:
    kept.update(_own_rate(name, rate, settings))
  elif name.rpartition(".")[2] in _FACTORS and "peak" in kept:
    return [f"{_SCHEDULE} = [{chosen}, {kept['peak']}]"]
  return [f"{_SCHEDULE} = {chosen}", *(f"{name}.{n} = {v}" for n, v in kept.items() if n in takes)]


def _own_rate(name: str, rate: str, settings: Settings) -> dict[str, str]:
  """The default rate of a schedule unless it is bound, so that it is shown with the others."""
  selector = gin_names.whole_selectors(name)[0]
  parameter = _parameter(selector, rate)
  default = None if parameter is None else parameter.default
  if settings.find("", selector, rate) is not None or not isinstance(default, (int, float)):
    return {}
  return {rate: repr(default)}


def _kept(name: str, before: object, settings: Settings) -> dict[str, str]:
  """Carries peak rate and warm-up of a replaced schedule over to the new one's parameters.

  Args:
    name: name of the new schedule; its existing bindings stay as they are.
    before: the value that was bound for the old schedule.
    settings: all bindings.

  Returns:
    Values as gin text, by parameter; the rate is under "peak" if the new schedule has no parameter
    for it.
  """
  if not isinstance(before, Reference) or not before.selector:
    return {}
  old = {
    n: settings.find(before.scope, before.selector, n)
    for n in (*_RATES, _WARMUP)
    if n in gin_names.parameters(before.selector)
  }
  selector = gin_names.whole_selectors(name)[0]
  takes = gin_names.parameters(selector)
  kept = {}
  for old_name, bound in old.items():
    new_name = old_name
    if old_name != _WARMUP:
      new_name = next((n for n in _RATES if n in takes), "peak")
    if bound is not None and settings.find("", selector, new_name) is None:
      kept[new_name] = repr(bound.value)
  return kept


def _data(text: str, settings: Settings) -> list[str]:
  """Bindings that replace the training data by the user's own text."""
  path = text if parsed(text) is not None and text[:1] in "'\"[(@%" else repr(text)
  if settings.macro("text_file") is not None:  # So the files of problems/ call theirs.
    return [f"text_file = {path}"]
  return [f"run.train_dataset_fn = @{_OWN_TEXT}", f"{_OWN_TEXT}.path = {path}"]


def _vocabulary(text: str, settings: Settings) -> list[str]:
  del settings
  return [f"run.vocabulary = {text if text[:1] in '@%(' else repr(text)}"]


def _length(text: str, settings: Settings) -> list[str]:
  del settings
  # Where positions are learned their table has to be as long.
  return [f"run.sequence_length = {text}", f"Unitransformer.max_length = {text}"]


SHORT: dict[str, Short] = {
  "model": Short("Type of the model: `lm`, `bitransformer`, ...", ("run.model_type",)),
  "layers": Short("Layers of a stack.", ("num_layers",)),
  "heads": Short("Heads of attention.", ("num_heads",)),
  "dropout": Short("Dropout rate.", ("dropout_rate",)),
  "length": Short("Tokens in a sequence, and the longest one of the model.", bindings=_length),
  "data": Short("Text of your own: a file, a folder, a pattern.", bindings=_data),
  "vocabulary": Short(
    "`bytes`, `characters`, `sentencepiece:8000`, `tiktoken:FILE`, or `@function()`.",
    bindings=_vocabulary,
  ),
  "batch": Short("Sequences in a batch.", ("run.batch_size",)),
  "steps": Short("Training ends at this step.", ("run.train_steps",)),
  "optimizer": Short(
    "An optimizer, `Optimizer` left out: `AdamW`, `Adafactor`, ...", bindings=_optimizer
  ),
  "learning_rate": Short(
    "The highest rate: the number beside the schedules, or a constant one.", bindings=_learning_rate
  ),
  "lr": Short("The same.", bindings=_learning_rate),
  "schedule": Short(
    "A schedule of the learning rate: `cosine`, `linear_decay`, ...; the highest rate stays that "
    "of the one before, and so does the warm-up of schedules that have one.",
    bindings=_schedule,
  ),
  "mesh": Short("Mesh of devices, such as `batch:2,model:2`.", ("run.mesh_shape",)),
  "layout": Short("Layout rules, such as `batch:batch,d_ff:model`.", ("run.layout_rules",)),
  "checkpoint": Short("The checkpoint to evaluate or decode with.", ("run.eval_checkpoint_step",)),
  **{
    name: Short(meaning, (f"sample.{name}",))
    for name, meaning in (
      ("prompt", "Text to go on with."),
      ("temperature", "Of sampling; 0 is greedy."),
      ("top_k", "Choose among the k most probable tokens."),
      ("top_p", "Choose among the most probable that have this probability together."),
      ("min_p", "Leave out tokens less probable than this part of the best one's."),
      ("repetition_penalty", "Above 1: less of what is there already."),
      ("num_samples", "Samples for each prompt."),
      ("max_tokens", "New tokens at most."),
      ("stop", "A sample ends before this text."),
    )
  },
}
