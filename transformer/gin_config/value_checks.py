"""Checks of values of settings: types from annotations of parameters, ranges as declared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import mesh_tensorflow as mtf
from mesh_settings import records
from mesh_settings.rules import CALLABLE, NUMBER, TEXT, WHOLE, YES_OR_NO, Rule
from mesh_tensorflow.errors import ConfigError, MeshError
from mesh_tensorflow.transformer.gin_config import affected
from mesh_tensorflow.transformer.gin_config import names as gin_names
from mesh_tensorflow.transformer.gin_config.contradictions import RUN
from mesh_tensorflow.transformer.gin_config.names import Macro, Reference, did_you_mean
from mesh_tensorflow.transformer.gin_config.settings import Setting, Settings, parts_of, short

_OURS = "mesh_tensorflow."


# What the texts of annotations ask for.
_OF_KINDS = {"int": WHOLE, "float": NUMBER, "bool": YES_OR_NO, "str": TEXT}


def rule_of(parameter: inspect.Parameter, declared: Rule | None = None) -> Rule | None:
  """The rule for a parameter's values, from its declaration and its annotation; None: no rule.

  Args:
    parameter: the parameter, from the configurable's signature.
    declared: the rule that its class or function declares; see `mesh_tensorflow.arguments`.
  """
  annotation = str(parameter.annotation)
  if annotation.startswith("Callable["):
    may_be_none = parameter.default is None or annotation.endswith("| None")
    return CALLABLE.or_none() if may_be_none else CALLABLE
  kinds = kinds_of(parameter.annotation)
  found = [_OF_KINDS[k] for k in kinds if k in _OF_KINDS]
  # One of the kinds has no rule: what it allows is not known.
  if declared is None and (not kinds or len(found) + ("None" in kinds) < len(kinds)):
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
    declared = affected.values(key[1], key[2])
    place = f"gin: {place_of(settings, setting)}: "
    _check(parameter, value, place, setting.name, declared, exact=key[1] == RUN)
    if key[1:] == (RUN, "mesh_shape"):
      check_mesh_shape(value, place)


def check_arguments(owner: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
  """Raises an error for the first argument of a call that its parameter cannot have.

  Args:
    owner: name of the function, for the error.
    function: for its signature.
    given: arguments by name; others than the function's are left out.

  Raises:
    ConfigError: it names the argument, its value, and what is legal.
  """
  for parameter in inspect.signature(function).parameters.values():
    if parameter.name in given:
      declared = affected.values_of(function, parameter.name)
      name = f"{owner}.{parameter.name}"
      _check(parameter, given[parameter.name], "", name, declared, exact=owner == "run")


def check_record(owner: str, record: Any) -> None:
  """Raises an error for the first setting of a record that has an illegal value.

  Args:
    owner: name of what takes the record, for the error.
    record: see `mesh_settings.records`.

  Raises:
    ConfigError: it names the setting, its value, and what is legal.
  """
  for name, parameter in records.signature(type(record)).parameters.items():
    rule = records.settings_of(record)[name].values
    _check(parameter, getattr(record, name), "", f"{owner}.{name}", rule, exact=False)


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
  parameter: inspect.Parameter,
  value: Any,
  place: str,
  name: str,
  declared: Rule | None,
  exact: bool,
) -> None:
  rule = rule_of(parameter, declared)
  if rule is None or value is parameter.default or rule.is_legal(value):
    return
  # Sizes and times are often written as 1e5.
  if isinstance(value, float) and value.is_integer() and rule.is_legal(int(value)):
    if not exact:
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
