"""Families of public functions: one method implements them all, a row of a table says each.

A subclass of `Family` has as its fields what distinguishes the functions, and a method with their
signature, whose docstring is a template of theirs. `member` makes a function of the method.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass(frozen=True)
class Family:
  """Properties that distinguish a function from the others of its family.

  Attributes:
    name: of the function.
  """

  name: str

  @property
  def words(self) -> Mapping[str, str]:
    """Texts for the docstring, by their name in the template."""
    return {}

  @property
  def defaults(self) -> Mapping[str, Any]:
    """Default values that differ from those of the method, by parameter."""
    return {}


def member(method: Callable[_P, _R]) -> Callable[_P, _R]:
  """A public function that calls a method of a `Family`, with its signature.

  Args:
    method: a bound method.
  """
  family = cast(Any, method).__self__
  shared, defaults = inspect.signature(method), family.defaults
  signature = shared.replace(
    parameters=[
      p.replace(default=defaults.get(p.name, p.default)) for p in shared.parameters.values()
    ]
  )

  def function(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    try:
      bound = signature.bind(*args, **kwargs)
    except TypeError as e:
      e.args = (f"{family.name}() {e}",)  # As Python's own: with the name of the function.
      raise
    bound.apply_defaults()
    return method(*bound.args, **bound.kwargs)

  function.__name__ = function.__qualname__ = family.name
  function.__module__, function.__annotations__ = method.__module__, method.__annotations__
  function.__doc__ = inspect.cleandoc(method.__doc__ or "").format(**family.words)
  cast(Any, function).__signature__ = signature
  return function
