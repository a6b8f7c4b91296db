"""Python operators of a `Tensor`, such as `x + y` for `mtf.add`, and errors for those it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mesh_tensorflow.errors import ArgumentError


def _missing(expression: str, instead: str) -> Callable[..., Any]:
  def method(self: Any, *unused: Any) -> Any:
    del unused
    raise ArgumentError(f"{expression} is not defined for x = {self}; use {instead}")

  return method


class MissingOperators:
  """Base class of `Tensor`: each operator here raises an `ArgumentError`, which is a TypeError.

  `==` and `!=` compare identity, so that tensors can be keys of a dict.
  """

  __pow__ = __rpow__ = _missing("x ** y", "mtf.pow(x, y)")
  __abs__ = _missing("abs(x)", "mtf.abs(x)")
  __matmul__ = __rmatmul__ = _missing("x @ y", "mtf.einsum([x, y], output_shape=...)")
  __lt__ = _missing("x < y", "mtf.less(x, y)")
  __le__ = _missing("x <= y", "mtf.less_equal(x, y)")
  __gt__ = _missing("x > y", "mtf.greater(x, y)")
  __ge__ = _missing("x >= y", "mtf.greater_equal(x, y)")
  __and__ = __rand__ = _missing("x & y", "mtf.logical_and(x, y)")
  __or__ = __ror__ = _missing("x | y", "mtf.logical_or(x, y)")
  __invert__ = _missing("~x", "mtf.logical_not(x)")
  __getitem__ = _missing(
    "x[i]", "mtf.slice(x, begin, size, name) for a range, mtf.gather(x, i, dim) for a position"
  )
  __iter__ = _missing("iteration over x", "mtf.unstack(x, dim)")
  __len__ = _missing("len(x)", "x.shape.ndims, or the size of a dimension of x.shape")

  # TensorFlow calls it where a tf.Tensor is needed.
  __tf_tensor__ = _missing(
    "a TensorFlow function of x", "an mtf function, or lowering.export_to_tf_tensor(x)"
  )

  def __bool__(self) -> bool:
    # As any object; without it Python would ask __len__.
    return True


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

  def __add__(self: _T, other: object) -> _T:
    return _result(self, "add", self, other)

  __radd__ = __add__

  def __sub__(self: _T, other: object) -> _T:
    return _result(self, "sub", self, other)

  def __rsub__(self: _T, other: object) -> _T:
    return _result(self, "sub", other, self)

  def __mul__(self: _T, other: object) -> _T:
    return _result(self, "multiply", self, other)

  __rmul__ = __mul__

  def __neg__(self: _T) -> _T:
    return _result(self, "negative", self)

  def __truediv__(self: _T, other: object) -> _T:
    return _result(self, "divide", self, other)

  def __rtruediv__(self: _T, other: object) -> _T:
    return _result(self, "divide", other, self)

  def __floordiv__(self: _T, other: object) -> _T:
    return _result(self, "floordiv", self, other)

  def __rfloordiv__(self: _T, other: object) -> _T:
    return _result(self, "floordiv", other, self)

  def __mod__(self: _T, other: object) -> _T:
    return _result(self, "mod", self, other)

  def __rmod__(self: _T, other: object) -> _T:
    return _result(self, "mod", other, self)
