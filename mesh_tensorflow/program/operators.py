"""Python operators of a `Tensor`: `x + y` makes an operation, as `mtf.add` does.

Operations are made of what is in this room, so the files that define them hand in their functions
when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mesh_tensorflow.program.missing_operators import MissingOperators

_T = TypeVar("_T", bound="Operators")

_provided: dict[str, Callable[..., Any]] = {}


def provide(**functions: Callable[..., Any]) -> None:
  """Registers the functions that implement operators and methods of a graph.

  Args:
    **functions: functions by name: add, sub, multiply, ...
  """
  _provided.update(functions)


def provided(name: str) -> Callable[..., Any]:
  """Returns the function registered under a name."""
  return _provided[name]


def _result(like: _T, name: str, *operands: Any) -> _T:
  result: _T = _provided[name](*operands)
  return result


class Operators(MissingOperators):
  """Base class of `Tensor`: the operators that it has, and errors about those it has not."""

  # NumPy scalars on the left hand side shall ask us, not iterate over us.
  __array_priority__ = 1000

  def __add__(self: _T, other: Any) -> _T:
    return _result(self, "add", self, other)

  __radd__ = __add__

  def __sub__(self: _T, other: Any) -> _T:
    return _result(self, "sub", self, other)

  def __rsub__(self: _T, other: Any) -> _T:
    return _result(self, "sub", other, self)

  def __mul__(self: _T, other: Any) -> _T:
    return _result(self, "multiply", self, other)

  __rmul__ = __mul__

  def __neg__(self: _T) -> _T:
    return _result(self, "negative", self)

  def __truediv__(self: _T, other: Any) -> _T:
    return _result(self, "divide", self, other)

  def __rtruediv__(self: _T, other: Any) -> _T:
    return _result(self, "divide", other, self)

  def __floordiv__(self: _T, other: Any) -> _T:
    return _result(self, "floordiv", self, other)

  def __rfloordiv__(self: _T, other: Any) -> _T:
    return _result(self, "floordiv", other, self)

  def __mod__(self: _T, other: Any) -> _T:
    return _result(self, "mod", self, other)

  def __rmod__(self: _T, other: Any) -> _T:
    return _result(self, "mod", other, self)
