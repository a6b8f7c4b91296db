"""Ranges, and running sums along a dimension."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.numerics import kernels, padding
from mesh_tensorflow.program.argument_kinds import NumberTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor

__all__ = ["RangeOperation", "cumsum", "mtf_range"]


class RangeOperation(Operation):
  """The positions along a dimension; see `mtf_range`."""

  lowers_uneven_slices = True

  def __init__(self, mesh: Mesh, dim: DimensionLike, dtype: DTypeLike, name: str | None = None):
    super().__init__([], mesh, name=name or "range")
    self._dim = convert_to_dimension(dim)
    self._outputs = [Tensor(self, Shape([self._dim]), tf.as_dtype(dtype))]
    self._outputs[0].index_bound = self._dim.size

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    out = self._outputs[0]
    size = impl.slice_shape(out.shape)[0]

    def positions(begin: int | tf.Tensor) -> tf.Tensor:
      if isinstance(begin, int):
        return tf.cast(tf.range(begin, begin + size), out.dtype)
      return tf.cast(tf.range(size) + begin, out.dtype)

    begin = impl.laid_out_slice_begin(out.shape)[0]
    lowering.set_tensor_lowering(out, impl.slicewise(positions, begin))


def mtf_range(mesh: Mesh, dim: DimensionLike, dtype: DTypeLike, name: str | None = None) -> Tensor:
  """A one-dimensional tensor of the positions 0, 1, ..., dim.size - 1.

  Args:
    mesh: a `Mesh`.
    dim: its dimension.
    dtype: of the result.
    name: of the operation.
  """
  return RangeOperation(mesh, dim, dtype, name=name).outputs[0]


class CumsumOperation(Operation):
  """Running sums along a dimension; see `cumsum`."""

  lowers_uneven_slices = True

  def __init__(
    self,
    x: Tensor,
    dim: Dimension,
    exclusive: bool = False,
    reverse: bool = False,
    name: str | None = None,
  ):
    super().__init__([x], name=name or "cumsum")
    if dim not in x.shape:
      raise no_such_dimension(self.name, dim, x)
    self._dim, self._axis = dim, x.shape.dims.index(dim)
    self._exclusive, self._reverse = bool(exclusive), bool(reverse)
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    # An element is in every sum from its position on: its gradient is the sum of theirs, backwards.
    return CumsumOperation(grad_ys[0], self._dim, self._exclusive, not self._reverse).outputs

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    shape = self._outputs[0].shape
    x = impl.without_padding(
      lowering.tensors[self._inputs[0]].to_laid_out_tensor(), shape, padding.zero, [self._dim]
    )
    axis, reverse = self._axis, self._reverse

    def run(t: tf.Tensor) -> tf.Tensor:
      return tf.cumsum(t, axis, exclusive=self._exclusive, reverse=reverse)

    mesh_axis = impl.tensor_dimension_to_mesh_axis(self._dim)
    if mesh_axis is None or impl.shape[mesh_axis].size == 1:
      laid_out = impl.slicewise(run, x)
    else:
      # Local running sums, plus the totals of the blocks before.
      totals = impl.slicewise(lambda t: tf.reduce_sum(t, axis, keepdims=True), x)
      totals = impl.allconcat(totals, mesh_axis, axis)

      def add_blocks_before(
        t: tf.Tensor, total: tf.Tensor, coordinate: int | tf.Tensor
      ) -> tf.Tensor:
        before = tf.cumsum(total, axis, exclusive=True, reverse=reverse)
        return run(t) + kernels.cut_axis(before, axis, coordinate, 1)

      laid_out = impl.slicewise(add_blocks_before, x, totals, impl.laid_out_pcoord(mesh_axis))
    lowering.set_tensor_lowering(self._outputs[0], laid_out)


def cumsum(x: NumberTensor, dim: DimensionLike, exclusive: bool = False) -> Tensor:
  """Running sums along a dimension: y[i] = x[0] + ... + x[i].

  Args:
    x: a `Tensor`.
    dim: a dimension of x. If it is split, processors exchange the totals of their blocks.
    exclusive: leave out x[i] itself.

  Raises:
    DimensionError: x has no such dimension.
  """
  return CumsumOperation(x, convert_to_dimension(dim), exclusive).outputs[0]
