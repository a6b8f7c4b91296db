"""Gather and scatter, and their uses: positions along a dimension given by indices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, DTypeError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut, LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.slices import align, transpose_to
from mesh_tensorflow.numerics import padding
from mesh_tensorflow.numerics.kernels import elementwise, where
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.reduction import broadcast, mesh_axes_of, reduce_mean
from mesh_tensorflow.operations.reshape import replace_dimensions
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  ShapeLike,
  convert_to_dimension,
  convert_to_shape,
  list_product,
  no_such_dimension,
  shape_union,
)
from mesh_tensorflow.program.graph import Operation, Tensor, is_differentiable

__all__ = [
  "gather",
  "pool_tensor_1d",
  "reduce_first",
  "stride_tensor_1d",
]

# Index dtypes of tf.gather and tf.one_hot; others are cast to int32.
_INDEX_DTYPES = (tf.int32, tf.int64)


def as_index(t: tf.Tensor) -> tf.Tensor:
  """Casts indices to a dtype that TensorFlow's kernels accept."""
  return t if t.dtype in _INDEX_DTYPES else tf.cast(t, tf.int32)


def check_integer(op: Operation, indices: Tensor) -> None:
  """Raises `DTypeError` unless the indices are integers."""
  if not indices.dtype.is_integer:
    raise DTypeError(f"{op.name}: indices must be integers, got {indices}; cast them (mtf.cast)")


def begin_of(impl: MeshImpl, dim: Dimension) -> Any:
  """Position of the processor's first element along a dimension: 0, or laid out."""
  return impl.laid_out_slice_begin(Shape([dim]))[0]


def is_split(impl: MeshImpl, dim: Dimension) -> bool:
  axis = impl.tensor_dimension_to_mesh_axis(dim)
  return axis is not None and impl.shape[axis].size > 1


class GatherOperation(Operation):
  """Values at given positions along a dimension; see `gather`.

  Args:
    weights: a `Tensor`.
    indices: an integer `Tensor`.
    dim: a dimension of `weights`.
    output_shape: a permutation of the default one, which it replaces.
    in_range: the caller's word that no index is out of range, so nothing is masked.
    name: of the operation.
  """

  def __init__(
    self,
    weights: Tensor,
    indices: Tensor,
    dim: DimensionLike,
    output_shape: Shape | None = None,
    *,
    in_range: bool = False,
    name: str | None = None,
  ):
    super().__init__([weights, indices], name=name or "gather")
    check_integer(self, indices)
    self._dim = convert_to_dimension(dim)
    bound = indices.index_bound
    self._in_range = in_range or (bound is not None and bound <= self._dim.size)
    default = _gather_shape(self.name, weights, indices, self._dim)
    if not self._dim.size and indices.size:
      raise ShapeError(f"{self.name}: {weights} has no position along {self._dim.name}=0")
    if output_shape is not None and set(output_shape) != set(default):
      raise ShapeError(
        f"{self.name}: the output shape {output_shape} has not the dimensions of {default}"
      )
    self._outputs = [Tensor(self, output_shape or default, weights.dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    op = ScatterAddOperation(
      grad_ys[0], self._inputs[1], self._inputs[0].shape, self._dim, in_range=self._in_range
    )
    return [op.outputs[0], None]

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    super().verify_layout(mesh_impl)
    _verify_positions(self, mesh_impl, self._outputs[0].shape, self._dim)

  def suits_uneven_slices(self, mesh_impl: MeshImpl) -> bool:
    # Indices along the indexed dimension itself are of other positions than the processor has.
    return self._dim not in self._inputs[1].shape or not mesh_impl.is_uneven(self._dim)

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    weights, indices = self._inputs
    out = self._outputs[0].shape.dims
    size = impl.slice_shape(Shape([self._dim]))[0]
    split = is_split(impl, self._dim)
    extents = impl.laid_out_extents(Shape([self._dim]), [0]) if impl.is_uneven(self._dim) else []
    # Indices in padding may be any number.
    in_range = self._in_range and not impl.uneven_axes(indices.shape)
    # Dimensions of both are batch dimensions; the indices' own replace `dim`.
    batch = [d for d in weights.shape - self._dim if d in indices.shape]
    own = [d for d in indices.shape if d not in batch]
    if batch:
      w_order = batch + [self._dim] + [d for d in weights.shape - self._dim if d not in batch]
    else:
      w_order = weights.shape.dims
    axis = w_order.index(self._dim)
    got = w_order[:axis] + own + w_order[axis + 1 :]

    def read(
      w: tf.Tensor, i: tf.Tensor, begin: int | tf.Tensor, *extent: int | tf.Tensor
    ) -> tf.Tensor:
      w = transpose_to(w, weights.shape.dims, w_order)
      i = transpose_to(as_index(i), indices.shape.dims, batch + own)
      if split:
        i = i - tf.cast(begin, i.dtype)
      # TensorFlow refuses an index out of range on CPUs, and reads zeros there on GPUs: it reads
      # another row, which `keep_where` then hides.
      safe = i
      if split or not in_range:
        safe = tf.clip_by_value(i, tf.zeros([], i.dtype), tf.constant(size - 1, i.dtype))
      y = tf.gather(w, safe, axis=axis, batch_dims=len(batch))
      y = transpose_to(y, got, out)
      if safe is i:
        return y
      found = tf.equal(safe, i)
      if extent:  # What is behind them is padding.
        found = tf.logical_and(found, i < tf.cast(extent[0], i.dtype))
      return keep_where(y, align(found, batch + own, out))

    begin = begin_of(impl, self._dim)
    laid_out = impl.slicewise(
      read, lowering.tensors[weights], lowering.tensors[indices], begin, *extents
    )
    if split:
      laid_out = _pending_sum(lowering, impl, laid_out, [self._dim], "gather_op")
    lowering.set_tensor_lowering(self._outputs[0], laid_out)


def _gather_shape(name: str, weights: Tensor, indices: Tensor, dim: Dimension) -> Shape:
  """The dimensions of the indices, then those of the weights without `dim`."""
  if dim not in weights.shape:
    raise no_such_dimension(f"{name}: weights", dim, weights)
  return shape_union([indices.shape, weights.shape - dim])


def _verify_positions(op: Operation, mesh_impl: MeshImpl, shape: Shape, dim: Dimension) -> None:
  """Checks that no dimension of `shape` is split over the mesh axis of the indexed one."""
  mesh_impl.verify_layout(
    shape_union([shape, Shape([dim])]),
    f"{type(op).__name__} {op.name}: the indexed dimension with those of the result",
  )


def keep_where(y: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
  """The values where the mask is true, else zero, also in place of NaN and infinity."""
  if y.dtype == tf.bool:
    return elementwise(tf.logical_and, y, mask)
  mask = tf.cast(mask, y.dtype)
  no_nan = is_differentiable(y.dtype)
  return elementwise(tf.math.multiply_no_nan if no_nan else tf.multiply, y, mask)


def _pending_sum(
  lowering: LoweringInProgress, impl: MeshImpl, laid_out: LaidOut, dims: list[Dimension], what: str
) -> LazyAllreduceSum:
  """Pending sum over the mesh axes that split the given dimensions."""
  mesh_axes = mesh_axes_of(impl, dims)
  size = list_product(laid_out.slice_shape) * impl.size
  return LazyAllreduceSum(
    impl,
    laid_out,
    mesh_axes,
    lambda: lowering.add_counter(f"allreduce/{mesh_axes}/{what}", size),
  )


class ScatterAddOperation(Operation):
  """Adds up `y` at the positions given by indices: the transpose of `GatherOperation`.

  Args:
    y: a `Tensor` of the dimensions of the indices and of `shape` without `dim`.
    indices: an integer `Tensor`. What is out of range is dropped.
    shape: the output shape.
    dim: the dimension of it that is indexed.
    in_range: the caller's word that no index is out of range.
    name: of the operation.
  """

  def __init__(
    self,
    y: Tensor,
    indices: Tensor,
    shape: Shape,
    dim: Dimension,
    *,
    in_range: bool = False,
    name: str | None = None,
  ):
    super().__init__([y, indices], name=name or "scatter_add")
    check_integer(self, indices)
    self._dim, self._in_range = dim, in_range
    expected = shape_union([indices.shape, shape - dim])
    if set(y.shape) != set(expected):
      raise ShapeError(f"{self.name}: {y} has not the dimensions of {expected}")
    self._outputs = [Tensor(self, shape, y.dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    y, indices = self._inputs
    op = GatherOperation(grad_ys[0], indices, self._dim, y.shape, in_range=self._in_range)
    return [op.outputs[0], None]

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    super().verify_layout(mesh_impl)
    _verify_positions(self, mesh_impl, self._inputs[0].shape, self._dim)

  def suits_uneven_slices(self, mesh_impl: MeshImpl) -> bool:
    # Indices along the indexed dimension itself are of other positions than the processor has.
    return self._dim not in self._inputs[1].shape or not mesh_impl.is_uneven(self._dim)

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    y, indices = self._inputs
    out = self._outputs[0].shape
    size = impl.slice_shape(Shape([self._dim]))[0]
    split = is_split(impl, self._dim)
    # The indices may have a dimension of the name and size of the indexed one (`top_k`): of theirs
    # each position is added up, of the output it is the one that is indexed.
    batch = [d for d in out - self._dim if d in indices.shape]
    own = [d for d in indices.shape if d not in batch]
    rest = [d for d in out - self._dim if d not in batch]
    batch_sizes, rest_sizes = impl.slice_shape(Shape(batch)), impl.slice_shape(Shape(rest))
    rows = list_product(batch_sizes)
    # Rows of padding are left out; their indices may be any number.
    padded = [i for i, d in enumerate(batch + own) if impl.is_uneven(d)]
    extents = impl.laid_out_extents(Shape(batch + own), padded) if padded else []
    in_range = self._in_range and not padded
    # Short floats are added up in float32.
    dtype = tf.float32 if y.dtype in (tf.bfloat16, tf.float16) else y.dtype

    def add_up(
      t: tf.Tensor, i: tf.Tensor, begin: int | tf.Tensor, *extents: int | tf.Tensor
    ) -> tf.Tensor:
      t = tf.cast(transpose_to(t, y.shape.dims, batch + own + rest), dtype)
      i = transpose_to(as_index(i), indices.shape.dims, batch + own)
      if split:
        i = i - tf.cast(begin, i.dtype)
      i = padding.replaced(i, padded, extents, tf.constant(-1, i.dtype))
      # Segments are the cells of a matrix [rows, size], of which there may be more than int32 has.
      if rows * size >= 2**31:
        i = tf.cast(i, tf.int64)
      segment = i
      if rows > 1:
        row = tf.reshape(tf.range(rows, dtype=i.dtype) * size, batch_sizes + [1] * len(own))
        segment = i + row
      if split or not in_range:
        # Negative segments are dropped, too large ones are an error.
        valid = i < size if rows == 1 else tf.logical_and(i >= 0, i < size)
        segment = where(valid, segment, tf.constant(-1, i.dtype))
      t = tf.math.unsorted_segment_sum(t, segment, rows * size)
      t = tf.cast(tf.reshape(t, batch_sizes + [size] + rest_sizes), y.dtype)
      return transpose_to(t, batch + [self._dim] + rest, out.dims)

    begin = begin_of(impl, self._dim)
    laid_out = impl.slicewise(
      add_up, lowering.tensors[y], lowering.tensors[indices], begin, *extents
    )
    # Where the indices are split, each processor has added up its own. A split `dim` needs no sum:
    # each has the positions that lie in its block.
    if mesh_axes_of(impl, own):
      laid_out = _pending_sum(lowering, impl, laid_out, own, "scatter_add_op")
    lowering.set_tensor_lowering(self._outputs[0], laid_out)

  @property
  def dim(self) -> Dimension:
    """The dimension of the output that is indexed."""
    return self._dim

  @property
  def in_range(self) -> bool:
    """True if every index is known to be in range."""
    return self._in_range


def gather(
  weights: CastableTensor,
  indices: Tensor | int,
  dim: DimensionLike,
  output_shape: ShapeLike | None = None,
) -> Tensor:
  """Values of `weights` at positions along a dimension.

  Dimensions that the weights and the indices share are aligned: each of their
  positions has its own indices. An index out of range gives zeros.

  Args:
    weights: a `Tensor` of any dtype.
    indices: an integer `Tensor`, or a number.
    dim: a dimension of the weights. If it is split, every processor looks up what
      it holds and the results are added up.
    output_shape: dimensions of the result in another order, or more of them; by
      default those of the indices, then those of the weights without `dim`.

  Returns:
    A `Tensor` of the dtype of the weights.

  Raises:
    DimensionError: the weights have no such dimension.
    DTypeError: the indices are not integers.
    ShapeError: `output_shape` leaves a dimension out, or the indices have `dim`.
  """
  dim = convert_to_dimension(dim)
  if not isinstance(indices, Tensor):
    try:
      indices = constant(weights.mesh, operator.index(indices), Shape([]), tf.int32)
    except TypeError:
      raise ArgumentError(
        f"gather from {weights}: indices must be an integer mtf.Tensor or an integer, got "
        f"{indices!r}"
      ) from None
  if dim in weights.shape and dim in indices.shape:
    # The operation would take it for a new dimension; who writes this may as well mean an old one.
    raise ShapeError(
      f"gather: the indices {indices} have the dimension {dim.name}={dim.size} that is indexed; "
      "rename it (mtf.rename_dimension)"
    )
  output_shape = convert_to_shape(output_shape)
  if output_shape is None:
    return GatherOperation(weights, indices, dim).outputs[0]
  expected = _gather_shape("gather", weights, indices, dim)
  for d in expected:
    if d not in output_shape:
      raise ShapeError(
        f"gather: the output shape {output_shape} leaves out {d.name}={d.size}; the result has "
        f"the dimensions {expected}"
      )
  kept = Shape([d for d in output_shape if d in expected])
  return broadcast(GatherOperation(weights, indices, dim, kept).outputs[0], output_shape)


def reduce_first(tensor: Tensor, reduced_dim: DimensionLike) -> Tensor:
  """The values at position 0 of a dimension.

  Args:
    tensor: a `Tensor`.
    reduced_dim: a dimension of it, which the result does not have.
  """
  zero = constant(tensor.mesh, 0, Shape([]), tf.int32)
  return GatherOperation(tensor, zero, reduced_dim, in_range=True, name="reduce_first").outputs[0]


def pool_tensor_1d(
  tensor: Tensor,
  pool_dim: DimensionLike,
  reduce_fn: Callable[..., Tensor] = reduce_mean,
  pool_size: int = 2,
) -> Tensor:
  """Reduces each `pool_size` neighbours along a dimension to one value.

  Args:
    tensor: a `Tensor`.
    pool_dim: a dimension of it; it keeps its name and gets the size divided by `pool_size`.
    reduce_fn: `mtf.reduce_mean`, `mtf.reduce_max`, ...: takes (tensor, reduced_dim=...).
    pool_size: a divisor of the size.

  Raises:
    ShapeError: `pool_size` does not divide the dimension.
  """
  pool_dim = convert_to_dimension(pool_dim)
  if pool_size < 1 or pool_dim.size % pool_size:
    raise ShapeError(
      f"pool_tensor_1d: {pool_dim.name}={pool_dim.size} of {tensor} cannot be pooled by "
      f"{pool_size}, which does not divide it"
    )
  # No layout splits a group; the groups keep the name, and so the layout.
  low = Dimension("_low", pool_size)
  high = Dimension(pool_dim.name, pool_dim.size // pool_size)
  return reduce_fn(replace_dimensions(tensor, pool_dim, [high, low]), reduced_dim=low)


def stride_tensor_1d(tensor: Tensor, pool_dim: DimensionLike, pool_size: int = 2) -> Tensor:
  """Every `pool_size`-th position along a dimension, from the first; see `pool_tensor_1d`.

  Args:
    tensor: a `Tensor`.
    pool_dim: a dimension of it.
    pool_size: a divisor of its size.
  """
  return pool_tensor_1d(tensor, pool_dim, reduce_fn=reduce_first, pool_size=pool_size)
