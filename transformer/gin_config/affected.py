"""Declared effects (model, precision, training, report) and legal values of configurables."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from mesh_tensorflow.arguments.declared import Rule, declaration
from mesh_tensorflow.transformer.gin_config import names as gin_names

_PACKAGE = "mesh_tensorflow"


def is_of_package(selector: str) -> bool:
  """True if a configurable is defined in this package, under whatever module gin registers it."""
  return _is_ours(gin_names.configurable_of(selector)) if _is_known(selector) else False


def whole(selector: str) -> str:
  """Default effect of a configurable's arguments, for those without a declared effect."""
  return _whole(gin_names.configurable_of(selector)) if _is_known(selector) else "model"


def _whole(target: Any) -> str:
  # A class of the package is of its base class's kind; one of a user need not be.
  owners = inspect.getmro(target) if inspect.isclass(target) and _is_ours(target) else (target,)
  return next(filter(None, (declaration(o).affects for o in owners)), "model")


def argument(selector: str, name: str) -> str:
  """Effect of an argument: "model", "precision", "training" or "report".

  Arguments of a user's class affect the model, except those that it inherits from or passes on to
  constructors which declare them.
  """
  found = _declaring(selector, name)
  if found is None:
    return whole(selector)
  return declaration(found).arguments.get(name) or _whole(found)


def values(selector: str, name: str) -> Rule | None:
  """The declared rule for an argument's values; None if there is none."""
  return declaration(_declaring(selector, name)).values.get(name)


def parameter(selector: str, name: str) -> inspect.Parameter | None:
  """The parameter of a configurable, or of the base class whose constructor declares it."""
  found = _declaring(selector, name)
  return None if found is None else inspect.signature(found).parameters.get(name)


def values_of(target: Any, name: str) -> Rule | None:
  """Like `values`, for a class or function instead of a selector."""
  return declaration(inspect.unwrap(target)).values.get(name)


def _declaring(selector: str, name: str) -> Any:
  """The function, or the class in the MRO, that declares the argument; None if there is none."""
  # Gin wraps inherited constructors, too: the last class that has one has written it.
  written = {}
  for owner in _owners(selector):
    function = vars(owner).get("__init__") if inspect.isclass(owner) else owner
    if inspect.isroutine(function):
      written[inspect.unwrap(function)] = owner
  for function, owner in written.items():
    try:
      parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
      continue
    if name in parameters:
      return owner
  return None


def _owners(selector: str) -> Iterator[Any]:
  """Yields a configurable function, or a configurable class and its base classes."""
  if not _is_known(selector):
    return
  configurable = gin_names.configurable_of(selector)
  yield from inspect.getmro(configurable) if inspect.isclass(configurable) else (configurable,)


def _is_known(selector: str) -> bool:
  return bool(gin_names.whole_selectors(selector))


def _is_ours(target: Any) -> bool:
  return f"{getattr(target, '__module__', '')}.".startswith(f"{_PACKAGE}.")
