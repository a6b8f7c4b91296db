"""Scatter-add: sums at positions that indices give, wherever indices and positions are split.

`gather` and its adjoint refuse a layout that splits the indexed dimension over the mesh axis of
the indices: each processor would need rows that others hold. Here they are exchanged. Two ways
lead there, and the one that moves fewer bytes is taken:

  the table travels: each processor adds up its own values in all positions, and a reduce-scatter
    gives each the sums of its block (for the gradient: an allconcat, then a local gather);
  the values travel: each processor gets all values and indices, and adds up what lies in its
    block (for the gradient: it gets all indices, and a reduce-scatter gives each its values).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut, LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.binary import divide, maximum
from mesh_tensorflow.operations.constants import ones
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.indexing import GatherOperation, ScatterAddOperation
from mesh_tensorflow.operations.reduction import broadcast
from mesh_tensorflow.program.argument_kinds import FloatOrComplexTensor, IntTensor, NumberTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  ShapeLike,
  convert_to_dimension,
  convert_to_shape,
  list_product,
  shape_union,
)
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["gather_split", "scatter_add", "segment_mean", "segment_sum"]


class _Exchanging(Operation):
  """Base class of the gather and the scatter-add that take any layout."""

  _dim: Dimension

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    Operation.verify_layout(self, mesh_impl)

  def suits_uneven_slices(self, mesh_impl: MeshImpl) -> bool:
    del mesh_impl
    return False

  def _shared(self, impl: MeshImpl, indices: Tensor, batch: Shape) -> tuple[int, Dimension] | None:
    """The mesh axis that splits the indexed dimension, and that of the indices it splits too."""
    m = impl.tensor_dimension_to_mesh_axis(self._dim)
    if m is None or impl.shape[m].size == 1:
      return None
    for d in indices.shape:
      if d not in batch and impl.tensor_dimension_to_mesh_axis(d) == m:
        return m, d
    return None

  def _lowered(
    self,
    lowering: LoweringInProgress,
    dim: Dimension,
    inputs: Sequence[tuple[Shape, LaidOut]],
    output: Shape,
  ) -> Any:
    """Lowers a copy of this operation on inputs whose split dimension has been gathered."""
    alike = copy.copy(self)
    alike._dim = dim
    alike._inputs = [Tensor(self, s, x.dtype) for (s, _), x in zip(inputs, self._inputs)]
    alike._outputs = [Tensor(self, output, self._outputs[0].dtype)]
    inner = lowering.child()
    inner.tensors.update((x, slices) for x, (_, slices) in zip(alike._inputs, inputs))
    alike._lower_unshared(inner)
    return inner.tensors[alike._outputs[0]]

  def _lower_unshared(self, lowering: LoweringInProgress) -> None:
    raise NotImplementedError


class SplitGatherOperation(_Exchanging, GatherOperation):
  """A gather on any layout; see `gather_split`. Arguments as `GatherOperation`."""

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    weights, indices = self._inputs
    op = SplitScatterAddOperation(
      grad_ys[0], indices, weights.shape, self._dim, in_range=self._in_range
    )
    return [op.outputs[0], None]

  def _lower_unshared(self, lowering: LoweringInProgress) -> None:
    GatherOperation.lower(self, lowering)

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    (weights, indices), out = self._inputs, self._outputs[0]
    shared = self._shared(impl, indices, weights.shape - self._dim)
    if shared is None:
      self._lower_unshared(lowering)
      return
    m, d = shared
    w, i = (lowering.tensors[x].to_laid_out_tensor() for x in self._inputs)
    table = _bytes(weights, w)
    values = _bytes(indices, i) + impl.slice_size(out.shape) * out.dtype.size
    # `reduce_scatter` takes numbers only.
    if table <= values or out.dtype == tf.bool:
      dim, shape = _whole(weights.shape, self._dim)
      w = _allconcat(lowering, impl, w, m, weights.shape.dims.index(self._dim), "gather_op")
      result = self._lowered(lowering, dim, [(shape, w), (indices.shape, i)], out.shape)
    else:
      _, shape = _whole(indices.shape, d)
      i = _allconcat(lowering, impl, i, m, indices.shape.dims.index(d), "gather_op")
      _, partial = _whole(out.shape, d)
      result = self._lowered(lowering, self._dim, [(weights.shape, w), (shape, i)], partial)
      result = _scatter_sum(lowering, impl, result, m, out.shape.dims.index(d), "gather_op")
    lowering.set_tensor_lowering(out, result)


class SplitScatterAddOperation(_Exchanging, ScatterAddOperation):
  """A scatter-add on any layout; see `scatter_add`. Arguments as `ScatterAddOperation`."""

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    y, indices = self._inputs
    op = SplitGatherOperation(grad_ys[0], indices, self._dim, y.shape, in_range=self._in_range)
    return [op.outputs[0], None]

  def _lower_unshared(self, lowering: LoweringInProgress) -> None:
    ScatterAddOperation.lower(self, lowering)

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    (y, indices), out = self._inputs, self._outputs[0]
    shared = self._shared(impl, indices, out.shape - self._dim)
    if shared is None:
      self._lower_unshared(lowering)
      return
    m, d = shared
    t, i = (lowering.tensors[x].to_laid_out_tensor() for x in self._inputs)
    table = impl.slice_size(out.shape) * out.dtype.size
    if table <= _bytes(y, t) + _bytes(indices, i):
      dim, shape = _whole(out.shape, self._dim)
      result = self._lowered(lowering, dim, [(y.shape, t), (indices.shape, i)], shape)
      axis = out.shape.dims.index(self._dim)
      result = _scatter_sum(lowering, impl, result, m, axis, "scatter_add_op")
    else:
      inputs = []
      for x, slices in ((y, t), (indices, i)):
        axis = x.shape.dims.index(d)
        whole = _allconcat(lowering, impl, slices, m, axis, "scatter_add_op")
        inputs.append((_whole(x.shape, d)[1], whole))
      result = self._lowered(lowering, self._dim, inputs, out.shape)
    lowering.set_tensor_lowering(out, result)


def _bytes(x: Tensor, slices: LaidOut) -> int:
  size: int = list_product(slices.slice_shape) * x.dtype.size
  return size


def _whole(shape: Shape, dim: Dimension) -> tuple[Dimension, Shape]:
  """Renames a dimension so that no layout splits it; returns it and the shape with it."""
  whole = Dimension(f"_whole_{dim.name}", dim.size)
  return whole, Shape([whole if d == dim else d for d in shape])


def _allconcat(
  lowering: LoweringInProgress, impl: MeshImpl, slices: LaidOut, m: int, axis: int, what: str
) -> Any:
  slices = impl.allconcat(slices, m, axis)
  lowering.add_counter(f"allconcat/{m}/{what}", list_product(slices.slice_shape) * impl.size)
  return slices


def _scatter_sum(
  lowering: LoweringInProgress,
  impl: MeshImpl,
  pending: LazyAllreduceSum,
  m: int,
  axis: int,
  what: str,
) -> Any:
  """The sum along a mesh axis, of which each processor gets its part; the others stay pending."""
  slices = impl.reduce_scatter(pending.laid_out_input, m, axis)
  lowering.add_counter(f"reduce_scatter/{m}/{what}", list_product(slices.slice_shape) * impl.size)
  others = [a for a in pending.mesh_axes if a != m]
  if not others:
    return slices
  return LazyAllreduceSum(impl, slices, others, pending.add_counter_fn)


def gather_split(
  weights: NumberTensor,
  indices: IntTensor,
  dim: DimensionLike,
  output_shape: ShapeLike | None = None,
) -> Tensor:
  """`gather`, on layouts too that split `dim` over the mesh axis of a dimension of the indices.

  There rows are exchanged: the table, or indices and values, whichever are fewer bytes.

  Args:
    weights: a `Tensor` of numbers.
    indices: an integer `Tensor`. Dimensions that both have are aligned. An index out of range
      gives zeros.
    dim: a dimension of the weights.
    output_shape: a permutation of the dimensions of the result, which has those of the indices,
      then those of the weights without `dim`.

  Raises:
    DimensionError: the weights have no such dimension.
    DTypeError: the indices are not integers.
    ShapeError: `output_shape` has other dimensions, or the indices have `dim`.
  """
  dim = convert_to_dimension(dim)
  _check_indices("gather_split", indices, dim)
  return SplitGatherOperation(
    weights, indices, dim, convert_to_shape(output_shape), name="gather_split"
  ).outputs[0]


def scatter_add(
  updates: NumberTensor,
  indices: IntTensor,
  dim: DimensionLike,
  output_shape: ShapeLike | None = None,
  name: str = "scatter_add",
) -> Tensor:
  """Zeros of a new dimension, to which updates are added at the positions of the indices.

  y[indices[i], ...] += updates[i, ...] for all i. Indices and positions may be split, over the
  same mesh axis too. What meets at one position is added up in an order that depends on the
  layout: of floats the last bits may differ.

  Args:
    updates: a `Tensor` of numbers; it is repeated along dimensions of the indices that it does not
      have.
    indices: an integer `Tensor`. An update whose index is out of range is dropped.
    dim: the new dimension, which is indexed.
    output_shape: `dim` and other dimensions of the updates, in any order; those of the indices
      among them are aligned (each of their positions has sums of its own), the others are added up.
      By default `dim` and all that the indices do not have.
    name: of the operation.

  Returns:
    A `Tensor` of the dtype of the updates.

  Raises:
    DTypeError: the indices are not integers.
    ShapeError: `output_shape` lacks `dim` or a dimension that only the updates have, or has one
      that they do not have; or `dim` is a dimension of the inputs.
  """
  dim = convert_to_dimension(dim)
  _check_indices(name, indices, dim)
  own = updates.shape.dims
  free = [d for d in own if d not in indices.shape]
  if dim in own:
    raise ShapeError(
      f"{name}: the updates {updates} have the dimension {dim.name}={dim.size} that is indexed, "
      "which only the result shall have; rename it (mtf.rename_dimension)"
    )
  shape = Shape([dim, *free]) if output_shape is None else convert_to_shape(output_shape)
  legal = [dim, *shape_union([updates.shape, indices.shape])]
  missing = [d for d in [dim, *free] if d not in shape]
  foreign = [d for d in shape if d not in legal]
  if missing or foreign:
    raise ShapeError(
      f"{name} of {updates} by {indices}: the output shape {shape} must have the new dimension "
      f"{dim.name}={dim.size}, all of {Shape(free)}, and of "
      f"{indices.shape} what is to be aligned"
    )
  union = shape_union([updates.shape, indices.shape])
  return SplitScatterAddOperation(
    broadcast(updates, union) if len(union) > len(own) else updates, indices, shape, dim, name=name
  ).outputs[0]


def _check_indices(name: str, indices: Tensor, dim: Dimension) -> None:
  if dim in indices.shape:
    raise ShapeError(
      f"{name}: the indices {indices} have the dimension {dim.name}={dim.size} that is indexed; "
      "rename it (mtf.rename_dimension)"
    )


def segment_sum(
  x: NumberTensor,
  segment_ids: IntTensor,
  segments_dim: DimensionLike,
  output_shape: ShapeLike | None = None,
  name: str = "segment_sum",
) -> Tensor:
  """Sums of the elements of each segment, as `tf.math.unsorted_segment_sum`.

  Elements, segments or both may be split, over the same mesh axis too.

  Args:
    x: a `Tensor` of numbers.
    segment_ids: an integer `Tensor`: for each element its segment, in any order. An element whose
      id is out of range counts nowhere.
    segments_dim: the dimension of the segments.
    output_shape: as of `scatter_add`; by default the segments, and the dimensions of x that the ids
      do not have.
    name: of the operation.

  Returns:
    A `Tensor`; 0 for a segment without elements.
  """
  return scatter_add(x, segment_ids, segments_dim, output_shape, name=name)


def segment_mean(
  x: FloatOrComplexTensor,
  segment_ids: IntTensor,
  segments_dim: DimensionLike,
  output_shape: ShapeLike | None = None,
  name: str = "segment_mean",
) -> Tensor:
  """Means of the elements of each segment, 0 for one without; arguments as `segment_sum`."""
  total = scatter_add(x, segment_ids, segments_dim, output_shape, name=name)
  dim = convert_to_dimension(segments_dim)
  counted = Shape([d for d in total.shape if d == dim or d in segment_ids.shape])
  one = ones(x.mesh, segment_ids.shape)  # float32: a short float counts to 256 only.
  count = maximum(scatter_add(one, segment_ids, dim, counted, name=f"{name}_count"), 1.0)
  return divide(total, cast(count, x.dtype), output_shape=total.shape)
