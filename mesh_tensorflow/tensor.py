"""Tensors with named dimensions, and their operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from mesh_tensorflow.dimensions import Shape
from mesh_tensorflow.errors import ArgumentError, DTypeError, GraphError, ShapeError
from mesh_tensorflow.missing_operators import MissingOperators

if TYPE_CHECKING:  # These import this module.
  from mesh_tensorflow.graph import Graph, Mesh
  from mesh_tensorflow.operation import Operation


class Tensor(MissingOperators):
  """A symbolic tensor with named dimensions.

  Args:
    operation: the `Operation` that makes it.
    shape: a `Shape`.
    dtype: a `tf.DType`.
    name: for messages; `<operation.name>:<index>` by default.
    index: position among the operation's outputs.
  """

  def __init__(
    self,
    operation: Operation,
    shape: Shape,
    dtype: tf.DType,
    name: str | None = None,
    index: int = 0,
  ):
    if not hasattr(operation, "mesh"):
      raise ArgumentError(f"a Tensor is made by an mtf.Operation, got {operation!r}")
    if not isinstance(shape, Shape):
      raise ShapeError(f"{operation.name}: the shape of a Tensor must be a Shape, got {shape!r}")
    if not isinstance(dtype, tf.DType):
      raise DTypeError(f"{operation.name}: the dtype of a Tensor must be a tf.DType, got {dtype!r}")
    self._mesh = operation.mesh
    self._operation = operation
    self._shape = shape
    self._dtype = dtype
    self._name = f"{operation.name}:{index}" if name is None else name
    self.usable = True

  @property
  def shape(self) -> Shape:
    """Its `Shape`: names and sizes of its dimensions."""
    return self._shape

  @property
  def size(self) -> int:
    """Number of elements of the whole tensor."""
    return self._shape.size

  @property
  def mesh(self) -> Mesh:
    """The `Mesh` on which it lives."""
    return self._mesh

  @property
  def graph(self) -> Graph:
    """The `Graph` to which it belongs."""
    return self._mesh.graph

  @property
  def operation(self) -> Operation:
    """The `Operation` that makes it."""
    return self._operation

  @property
  def dtype(self) -> tf.DType:
    """Its tf.DType."""
    return self._dtype

  @property
  def name(self) -> str:
    """Its name, for messages."""
    return self._name

  @property
  def to_string(self) -> str:
    """Its name, shape and dtype as text."""
    return f"Tensor[{self._name}, {self._shape.to_string}, {self._dtype!r}]"

  def __repr__(self) -> str:
    return self.to_string

  # NumPy scalars on the left hand side shall ask us, not iterate over us.
  __array_priority__ = 1000

  def __add__(self, other):
    return _ops().add(self, other)

  __radd__ = __add__

  def __sub__(self, other):
    return _ops().sub(self, other)

  def __rsub__(self, other):
    return _ops().sub(other, self)

  def __mul__(self, other):
    return _ops().multiply(self, other)

  __rmul__ = __mul__

  def __neg__(self):
    return _ops().negative(self)

  def __truediv__(self, other):
    return _ops().divide(self, other)

  def __rtruediv__(self, other):
    return _ops().divide(other, self)

  def __floordiv__(self, other):
    return _ops().floordiv(self, other)

  def __rfloordiv__(self, other):
    return _ops().floordiv(other, self)

  def __mod__(self, other):
    return _ops().mod(self, other)

  def __rmod__(self, other):
    return _ops().mod(other, self)


def _ops():
  from mesh_tensorflow import ops  # operations import this module

  return ops


def check_tensors(what: str, xs: Iterable[Any]) -> None:
  """Raises `ArgumentError` unless all are `Tensor`s; `what` is the operation, for the message."""
  for x in xs:
    if not isinstance(x, Tensor):
      shape = f" of shape {x.shape}" if hasattr(x, "shape") else ""
      raise ArgumentError(
        f"{what}: inputs must be mtf.Tensors, got {type(x).__name__}{shape}; "
        "use mtf.import_tf_tensor to bring a tf.Tensor or an array into the graph"
      )


def check_one_graph(what: str, x: Tensor, others: Iterable[Any]) -> None:
  """Raises `GraphError` unless the others, which have a graph, too, are in that of x."""
  for other in others:
    if other.graph is not x.graph:
      raise GraphError(
        f"{what} of {x}: {other} belongs to another graph; make both in one graph, or export the "
        "one (lowering.export_to_tf_tensor) and import it here"
      )
