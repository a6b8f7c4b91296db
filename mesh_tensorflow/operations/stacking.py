"""Stack and unstack: a new dimension, which must not be split, or one less."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.one_dimension import (
  OneDimensionOperation,
  check_dtypes,
  with_zeros,
)
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Tensor

__all__ = ["StackOperation", "UnstackOperation", "stack", "unstack"]


class StackOperation(OneDimensionOperation):
  """Joins tensors along a new dimension; see `stack`."""

  def __init__(self, xs: Sequence[Tensor], dim_name: str, axis: int = 0, name: str | None = None):
    if not xs:
      raise ShapeError(f"stack along a new {dim_name!r} needs at least one tensor")
    super().__init__(list(xs), name=name or "stack")
    check_dtypes(self, xs)
    for x in xs:
      if x.shape != xs[0].shape:
        raise ShapeError(f"{self.name}: inputs must have one shape, {x} does not fit {xs[0]}")
    ndims = xs[0].shape.ndims
    self._axis = axis + ndims + 1 if axis < 0 else axis
    if not 0 <= self._axis <= ndims:
      raise ShapeError(
        f"{self.name}: axis {axis} of the new dimension {dim_name}={len(xs)} is not in "
        f"{-ndims - 1} to {ndims}, the places among the dimensions of {xs[0]}"
      )
    dim = Dimension(dim_name, len(xs))
    dims = xs[0].shape.dims
    dims.insert(self._axis, dim)
    self._outputs = [Tensor(self, Shape(dims), xs[0].dtype)]
    self._set_unsplittable(dim, "tensors are stacked along it")

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return unstack(grad_ys[0], self._dim)

  def lower(self, lowering: LoweringInProgress) -> None:
    self._lower_slicewise(lowering, lambda *ts: kernels.stack(ts, self._axis))


def stack(xs: Sequence[Tensor], dim_name: str, axis: int = 0, name: str | None = None) -> Tensor:
  """Joins tensors of one shape along a new dimension of size len(xs).

  Args:
    xs: a list of `Tensor`s of the same shape.
    dim_name: name of the new dimension; it must not be split over the mesh.
    axis: where the new dimension goes; a negative one counts from the end.
    name: of the operation.

  Raises:
    ShapeError: the shapes differ.
  """
  return StackOperation(xs, dim_name, axis, name).outputs[0]


class UnstackOperation(OneDimensionOperation):
  """One tensor for each position along a dimension; see `unstack`."""

  def __init__(self, x: Tensor, dim: DimensionLike, name: str | None = None):
    super().__init__([x], name=name or "unstack")
    dim = convert_to_dimension(dim)
    if dim not in x.shape:
      raise no_such_dimension(self.name, dim, x)
    self._axis = x.shape.dims.index(dim)
    shape = x.shape - dim
    self._outputs = [Tensor(self, shape, x.dtype, index=i) for i in range(dim.size)]
    self._set_unsplittable(dim, "the tensor is unstacked along it")

  def gradient(self, grad_ys: list[Tensor | None]) -> Sequence[Tensor | None]:
    return [stack(with_zeros(grad_ys, self._outputs), self._dim.name, self._axis)]

  def lower(self, lowering: LoweringInProgress) -> None:
    self._lower_slicewise(lowering, lambda t: tuple(tf.unstack(t, axis=self._axis)))


def unstack(x: Tensor, dim: DimensionLike, name: str | None = None) -> list[Tensor]:
  """The `dim.size` tensors of shape x.shape - dim that x is a stack of.

  Args:
    x: a `Tensor`.
    dim: a `Dimension` of x; it must not be split over the mesh.
    name: of the operation.

  Raises:
    DimensionError: x has no such dimension.
  """
  return UnstackOperation(x, dim, name).outputs
