"""The largest elements along a dimension, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.slices import transpose_to
from mesh_tensorflow.numerics import kernels, padding
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.elementwise import negative
from mesh_tensorflow.operations.indexing import GatherOperation, ScatterAddOperation
from mesh_tensorflow.program.argument_kinds import CastableTensor, RealTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = [
  "TopKOperation",
  "argmax",
  "nth_largest_element",
  "nth_smallest_element",
  "top_1",
  "top_k",
]


class _LargestOperation(Operation):
  """Base class: values (the first output, if there is one) and positions (the last)."""

  def __init__(self, x: Tensor, reduced_dim: DimensionLike, name: str):
    super().__init__([x], name=name)
    self._reduced_dim = convert_to_dimension(reduced_dim)
    if self._reduced_dim not in x.shape:
      raise no_such_dimension(self.name, self._reduced_dim, x)
    self._axis = x.shape.dims.index(self._reduced_dim)

  def _set_outputs(self, *outputs: Tensor) -> None:
    self._outputs = list(outputs)
    # Positions of these cannot be out of range: a gather by them checks nothing.
    self._outputs[-1].index_bound = self._reduced_dim.size

  def gradient(self, grad_ys: list[Tensor | None]) -> Sequence[Tensor | None]:
    if grad_ys[0] is None:
      return [None]
    return ScatterAddOperation(
      grad_ys[0], self._outputs[1], self._inputs[0].shape, self._reduced_dim, in_range=True
    ).outputs

  def suits_uneven_slices(self, mesh_impl: MeshImpl) -> bool:
    # Results may have a dimension of the name and size of the reduced one.
    new = [d for y in self._outputs for d in y.shape if d not in self._inputs[0].shape]
    alike = self._reduced_dim in self._outputs[-1].shape
    return not alike and not any(map(mesh_impl.is_uneven, new))

  def _slices(self, lowering: LoweringInProgress) -> LaidOut:
    """The slices of the input; padding behind the last position is no larger than any element."""
    x = self._inputs[0]
    return lowering.mesh_impl(self).without_padding(
      lowering.tensors[x], x.shape, padding.lowest, [self._reduced_dim]
    )

  def _mesh_axis(self, impl: MeshImpl) -> int | None:
    """The mesh axis over which the reduced dimension is split, if any."""
    axis = impl.tensor_dimension_to_mesh_axis(self._reduced_dim)
    return None if axis is None or impl.shape[axis].size == 1 else axis

  def _begin(self, impl: MeshImpl) -> Any:
    return impl.laid_out_slice_begin(self._inputs[0].shape)[self._axis]


class TopKOperation(_LargestOperation):
  """The k largest elements in descending order; see `top_k`."""

  def __init__(
    self, x: RealTensor, reduced_dim: DimensionLike, k_dim: DimensionLike, name: str | None = None
  ):
    super().__init__(x, reduced_dim, name or "top_k")
    self._k_dim = convert_to_dimension(k_dim)
    if not 1 <= self._k_dim.size <= self._reduced_dim.size:
      raise ShapeError(
        f"{self.name}: {self._k_dim.name}={self._k_dim.size} elements cannot be taken from "
        f"{self._reduced_dim.name}={self._reduced_dim.size} of {x}"
      )
    shape = x.shape - self._reduced_dim + self._k_dim
    self._set_outputs(Tensor(self, shape, x.dtype), Tensor(self, shape, tf.int32, index=1))
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims("splittable", [self._k_dim.name])
    )

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    self._require_unsplit(mesh_impl, self._k_dim, "its positions are ordered by value")
    super().verify_layout(mesh_impl)

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    x = self._inputs[0].shape
    # The dimension goes last: kernels.top_k looks along the last axis only.
    order = (x - self._reduced_dim + self._reduced_dim).dims
    block = impl.slice_shape(x)[self._axis]
    # At most k elements of a block are among the k largest of all; it may have fewer elements.
    k = min(self._k_dim.size, block)
    mesh_axis = self._mesh_axis(impl)

    def local(t: tf.Tensor, begin: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      values, indices = kernels.top_k(transpose_to(t, x.dims, order), k)
      return values, indices if isinstance(begin, int) and begin == 0 else indices + begin

    values, indices = impl.slicewise(
      local, self._slices(lowering), self._begin(impl) if mesh_axis is not None else 0
    )
    if mesh_axis is not None:
      # Candidates stand in the order of their blocks, so equal ones keep the order of positions.
      last = x.ndims - 1
      values, indices = impl.slicewise(
        self._best_candidates,
        impl.allconcat(values, mesh_axis, last),
        impl.allconcat(indices, mesh_axis, last),
      )
    lowering.set_tensor_lowering(self._outputs[0], values)
    lowering.set_tensor_lowering(self._outputs[1], indices)

  def _best_candidates(self, values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    values, at = kernels.top_k(values, self._k_dim.size)
    return values, tf.gather(indices, at, axis=-1, batch_dims=indices.shape.ndims - 1)


def top_k(
  x: RealTensor, reduced_dim: DimensionLike, k_dim: DimensionLike, name: str | None = None
) -> tuple[Tensor, Tensor]:
  """The largest elements along a dimension, in descending order; of equal ones the first first.

  Args:
    x: a `Tensor`.
    reduced_dim: a dimension of x. If it is split, only the largest of each block are exchanged.
    k_dim: the new, last dimension; must not be split.
    name: of the operation.

  Returns:
    Values, and their int32 positions, of shape x.shape - reduced_dim + k_dim. A gradient
    flows through the values.

  Raises:
    DimensionError: x has no such dimension.
    ShapeError: k_dim is larger than the dimension.
  """
  values, indices = TopKOperation(x, reduced_dim, k_dim, name=name).outputs
  return values, indices


class ArgmaxOperation(_LargestOperation):
  """The position of the largest element, the first of equal ones; see `argmax`."""

  def __init__(self, x: Tensor, reduced_dim: DimensionLike, name: str | None = None):
    super().__init__(x, reduced_dim, name or "argmax")
    self._set_outputs(Tensor(self, x.shape - self._reduced_dim, tf.int32))

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    _, indices = _largest(self, impl, self._slices(lowering), with_values=False)
    lowering.set_tensor_lowering(self._outputs[0], indices)


class Top1Operation(_LargestOperation):
  """The largest element and its position; see `top_1`."""

  def __init__(self, x: Tensor, reduced_dim: DimensionLike, name: str | None = None):
    super().__init__(x, reduced_dim, name or "top_1")
    shape = x.shape - self._reduced_dim
    self._set_outputs(Tensor(self, shape, x.dtype), Tensor(self, shape, tf.int32, index=1))

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    values, indices = _largest(self, impl, self._slices(lowering), with_values=True)
    lowering.set_tensor_lowering(self._outputs[0], values)
    lowering.set_tensor_lowering(self._outputs[1], indices)


def _largest(
  op: _LargestOperation, impl: MeshImpl, x: LaidOut, with_values: bool
) -> tuple[Any, Any]:
  """The largest values (None, unless asked for or needed on the way) and their positions."""
  axis, mesh_axis = op._axis, op._mesh_axis(impl)

  def local(t: tf.Tensor, begin: int | tf.Tensor) -> tf.Tensor:
    indices = kernels.argmax(t, axis)
    return indices if isinstance(begin, int) and begin == 0 else indices + begin

  indices = impl.slicewise(local, x, 0 if mesh_axis is None else op._begin(impl))
  if mesh_axis is None and not with_values:
    return None, indices
  values = impl.slicewise(lambda t: tf.reduce_max(t, axis), x)
  if mesh_axis is None:
    return values, indices

  def best_block(v: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    block = kernels.argmax(v, 0)
    n = block.shape.ndims
    # A sum over one element each: a gather would need the blocks as the last axis.
    numbers = tf.reshape(tf.range(v.shape[0]), [-1] + [1] * n)
    chosen = kernels.where(tf.equal(numbers, block), i, tf.zeros([], i.dtype))
    return tf.reduce_max(v, 0), tf.reduce_sum(chosen, 0)

  stacked = [impl.allconcat(t, mesh_axis, 0, stack=True) for t in (values, indices)]
  values, indices = impl.slicewise(best_block, *stacked)
  return values, indices


def top_1(
  x: RealTensor, reduced_dim: DimensionLike, name: str | None = None
) -> tuple[Tensor, Tensor]:
  """The largest element along a dimension and its int32 position, the first of equal ones.

  Args:
    x: a `Tensor`.
    reduced_dim: a dimension of x, which the results do not have.
    name: of the operation.
  """
  value, index = Top1Operation(x, reduced_dim, name=name).outputs
  return value, index


def argmax(x: CastableTensor, reduced_dim: DimensionLike, name: str | None = None) -> Tensor:
  """The int32 position of the largest element along a dimension, the first of equal ones.

  Args:
    x: a `Tensor`.
    reduced_dim: a dimension of x, which the result does not have.
    name: of the operation.

  Raises:
    DimensionError: x has no such dimension.
  """
  return ArgmaxOperation(x, reduced_dim, name=name).outputs[0]


def nth_largest_element(
  x: RealTensor, n: int, reduced_dim: DimensionLike, name: str | None = None
) -> Tensor:
  """The n-th largest element along a dimension; n = 0 is the largest.

  Args:
    x: a `Tensor`.
    n: rank, from 0.
    reduced_dim: a dimension of x, which the result does not have.
    name: of the operation.

  Raises:
    ShapeError: n is not below the size of the dimension.
  """
  reduced_dim = convert_to_dimension(reduced_dim)
  if not 0 <= n < reduced_dim.size:
    raise ShapeError(
      f"nth_largest_element of {x}: n = {n} is not in 0 to {reduced_dim.size - 1}, the positions "
      f"of {reduced_dim.name}={reduced_dim.size}"
    )
  # A name that no layout splits, as `top_k` requires.
  k_dim = Dimension("_top_k_", n + 1)
  values = top_k(x, reduced_dim, k_dim, name=name)[0]
  rank = constant(x.mesh, n, shape=[], dtype=tf.int32)
  return GatherOperation(values, rank, k_dim, in_range=True).outputs[0]


def nth_smallest_element(
  x: RealTensor, n: int, reduced_dim: DimensionLike, name: str | None = None
) -> Tensor:
  """The n-th smallest element along a dimension; n = 0 is the smallest.

  Args:
    x: a `Tensor`.
    n: which one, from 0.
    reduced_dim: the dimension to look along.
    name: of the operation.
  """
  return negative(nth_largest_element(negative(x), n, reduced_dim, name=name))
