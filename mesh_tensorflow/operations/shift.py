"""Shift along a dimension, by a static or a dynamic offset, and halo exchange."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import DTypeError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.slices import align, transpose_to
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.elementwise import negative
from mesh_tensorflow.operations.slicing import ConcatOperation, SliceOperation
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  convert_to_dimension,
  list_product,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["ShiftOperation", "dynamic_shift", "halo_exchange", "left_halo_exchange", "shift"]


class ShiftOperation(Operation):
  """y[i] = x[i - offset] along a dimension; see `shift`."""

  def __init__(
    self, x: Tensor, offset: int, dim: DimensionLike, wrap: bool, name: str | None = None
  ):
    super().__init__([x], name=name or "shift")
    self._dim = convert_to_dimension(dim)
    if self._dim not in x.shape:
      raise no_such_dimension(self.name, self._dim, x)
    self._axis = x.shape.dims.index(self._dim)
    self._offset, self._wrap = operator.index(offset), bool(wrap)
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return [ShiftOperation(grad_ys[0], -self._offset, self._dim, self._wrap).outputs[0]]

  def suits_uneven_slices(self, mesh_impl: MeshImpl) -> bool:
    return not mesh_impl.is_uneven(self._dim)

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    x = lowering.tensors[self._inputs[0]]
    mesh_axis = impl.tensor_dimension_to_mesh_axis(self._dim)
    if self._offset == 0:
      laid_out = x
    elif mesh_axis is None or impl.shape[mesh_axis].size == 1:
      laid_out = impl.slicewise(self._shift_slice, x)
    else:
      laid_out = self._exchange(lowering, impl, x.to_laid_out_tensor(), mesh_axis)
    lowering.set_tensor_lowering(self._outputs[0], laid_out)

  def _shift_slice(self, t: tf.Tensor) -> tf.Tensor:
    """The shift, where no other processor holds a part of the dimension."""
    if self._wrap:
      return tf.roll(t, self._offset, self._axis)
    n, offset = self._dim.size, self._offset
    if abs(offset) >= n:
      return tf.zeros_like(t)
    kept = self._part(t, max(-offset, 0), n - abs(offset))
    return kernels.pad(kept, self._axis, max(offset, 0), max(-offset, 0))

  def _part(self, t: tf.Tensor, begin: int, size: int) -> tf.Tensor:
    """Positions `begin` to `begin + size` of a slice."""
    return kernels.cut_axis(t, self._axis, begin, size)

  def _exchange(
    self, lowering: LoweringInProgress, impl: MeshImpl, x: LaidOut, mesh_axis: int
  ) -> Any:
    """Receives the two parts that make up each processor's block from two others."""
    n = impl.shape[mesh_axis].size
    block = self._dim.size // n
    # divmod rounds down, so 0 <= rest < block for negative offsets too: a block is made of the end
    # of the one far + 1 processors before it, and of the beginning of the next.
    far, rest = divmod(self._offset, block)

    def receive(begin: int, size: int, distance: int) -> Any:
      if self._wrap:
        distance %= n
      part = x if size == block else impl.slicewise(lambda t: self._part(t, begin, size), x)
      if distance == 0:
        return part
      if abs(distance) >= n:
        return impl.slicewise(tf.zeros_like, part)
      lowering.add_counter(f"shift[{distance}]", list_product(part.slice_shape) * impl.size)
      return impl.shift_by_n_processors(part, mesh_axis, distance, self._wrap)

    if rest == 0:
      return receive(0, block, far)
    return impl.slicewise(
      lambda a, b: tf.concat([a, b], self._axis),
      receive(block - rest, rest, far + 1),
      receive(0, block - rest, far),
    )


def shift(
  x: Tensor, offset: int, dim: DimensionLike, wrap: bool, name: str | None = None
) -> Tensor:
  """Moves values along a dimension: y[i] = x[i - offset].

  Args:
    x: a `Tensor`.
    offset: positions to move by; towards higher positions if positive.
    dim: a `Dimension` of x. If it is split, processors exchange only what moves.
    wrap: whether what leaves at one end enters at the other; else zeros enter.
    name: of the operation.

  Raises:
    DimensionError: x has no such dimension.
  """
  return ShiftOperation(x, offset, dim, wrap, name=name).outputs[0]


class DynamicShiftOperation(Operation):
  """y[i] = x[i - offset] along a dimension, for a tensor of offsets; see `dynamic_shift`."""

  def __init__(
    self, x: Tensor, offset: Tensor, dim: DimensionLike, wrap: bool, name: str | None = None
  ):
    super().__init__([x, offset], name=name or "dynamic_shift")
    self._dim = convert_to_dimension(dim)
    self._wrap = bool(wrap)
    if self._dim not in x.shape:
      raise no_such_dimension(self.name, self._dim, x)
    if not offset.dtype.is_integer:
      raise DTypeError(f"{self.name} of {x}: offsets must be integers, got {offset}")
    for d in offset.shape:
      if d == self._dim or d not in x.shape:
        legal = ", ".join(f"{d.name}={d.size}" for d in x.shape - self._dim)
        raise ShapeError(
          f"{self.name}: dimension {d.name}={d.size} of the offsets {offset} is not one of those "
          f"of {x} without {self._dim.name}={self._dim.size}: {legal or 'none'}"
        )
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dx = DynamicShiftOperation(grad_ys[0], negative(self._inputs[1]), self._dim, self._wrap)
    return [dx.outputs[0], None]

  def suits_uneven_slices(self, mesh_impl: MeshImpl) -> bool:
    return not mesh_impl.is_uneven(self._dim)

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    x, offset = self._inputs
    whole = lowering.tensors[x].to_laid_out_tensor()
    axis = x.shape.dims.index(self._dim)
    begin = impl.laid_out_slice_begin(x.shape)[axis]
    block = impl.slice_shape(x.shape)[axis]
    mesh_axis = impl.tensor_dimension_to_mesh_axis(self._dim)
    if mesh_axis is not None:
      whole = impl.allconcat(whole, mesh_axis, axis)
    # Each row of offsets reads its own positions: those dimensions become batch dimensions.
    batch = [d for d in x.shape if d in offset.shape]
    order = batch + [self._dim] + [d for d in x.shape if d not in batch and d != self._dim]

    def read(t: tf.Tensor, off: tf.Tensor, first: int | tf.Tensor) -> tf.Tensor:
      off = tf.cast(transpose_to(off, offset.shape.dims, batch), tf.int32)
      source = tf.range(block) + first - off[..., None]
      t = transpose_to(t, x.shape.dims, order)
      n = self._dim.size
      index = source % n if self._wrap else tf.clip_by_value(source, 0, n - 1)
      y = tf.gather(t, index, axis=len(batch), batch_dims=len(batch))
      if not self._wrap:
        valid = align(tf.equal(index, source), batch + [self._dim], order)
        y = kernels.where(valid, y, tf.zeros([], y.dtype))
      return transpose_to(y, order, x.shape.dims)

    lowering.set_tensor_lowering(
      self._outputs[0], impl.slicewise(read, whole, lowering.tensors[offset], begin)
    )


def dynamic_shift(x: Tensor, offset: Tensor, dim: DimensionLike, wrap: bool) -> Tensor:
  """Moves values along a dimension by offsets that are computed: y[i] = x[i - offset].

  Args:
    x: a `Tensor`.
    offset: an integer `Tensor`; its dimensions are some of x's other dimensions.
    dim: a `Dimension` of x. If it is split, each processor first gets all of it.
    wrap: whether what leaves at one end enters at the other; else zeros enter.

  Raises:
    DimensionError: x has no such dimension.
    ShapeError: the offsets have other dimensions.
    DTypeError: the offsets are not integers.
  """
  return DynamicShiftOperation(x, offset, dim, wrap).outputs[0]


def halo_exchange(
  x: Tensor,
  blocks_dim: Dimension,
  block_size_dim: Dimension,
  halo_size: int,
  wrap: bool = False,
) -> Tensor:
  """Gives each block the `halo_size` positions before and after it.

  The dimensions (blocks_dim, block_size_dim) of x make up one long axis. In the result
  block j holds its positions j * b - halo_size to (j + 1) * b + halo_size.

  Args:
    x: a `Tensor`.
    blocks_dim: the blocks; may be split over the mesh.
    block_size_dim: the positions in a block, b; must not be split.
    halo_size: positions to add on each side, any number.
    wrap: whether the axis is a ring; else zeros lie beyond its ends.

  Returns:
    A `Tensor` whose block_size_dim is larger by 2 * halo_size; x itself for 0.
  """
  return _with_halos(x, blocks_dim, block_size_dim, halo_size, halo_size, wrap)


def left_halo_exchange(
  x: Tensor,
  blocks_dim: Dimension,
  block_size_dim: Dimension,
  halo_size: int,
  wrap: bool = False,
) -> Tensor:
  """Gives each block the `halo_size` positions before it; see `halo_exchange`.

  Args:
    x: a `Tensor`.
    blocks_dim: the blocks; may be split over the mesh.
    block_size_dim: the positions in a block; must not be split.
    halo_size: positions to add.
    wrap: whether the axis is a ring; else zeros lie beyond its ends.
  """
  return _with_halos(x, blocks_dim, block_size_dim, halo_size, 0, wrap)


def _with_halos(
  x: Tensor,
  blocks_dim: DimensionLike,
  block_size_dim: DimensionLike,
  left: int,
  right: int,
  wrap: bool,
) -> Tensor:
  blocks_dim = convert_to_dimension(blocks_dim)
  block_size_dim = convert_to_dimension(block_size_dim)
  for d in (blocks_dim, block_size_dim):
    if d not in x.shape:
      raise no_such_dimension("halo_exchange", d, x)
  if left < 0 or right < 0:
    raise ShapeError(f"halo_exchange of {x}: the halo size must be at least 0, got {left}")
  if left == right == 0:
    return x
  size, axis = block_size_dim.size, x.shape.dims.index(block_size_dim)
  # A halo longer than a block takes whole neighbours, and of the farthest only the margin.
  parts = [x]
  whole, rest = divmod(left, size)
  for i in range(1, whole + 1):
    parts.insert(0, shift(x, i, blocks_dim, wrap))
  if rest:
    margin = SliceOperation(x, size - rest, rest, block_size_dim).outputs[0]
    parts.insert(0, shift(margin, whole + 1, blocks_dim, wrap))
  whole, rest = divmod(right, size)
  for i in range(1, whole + 1):
    parts.append(shift(x, -i, blocks_dim, wrap))
  if rest:
    margin = SliceOperation(x, 0, rest, block_size_dim).outputs[0]
    parts.append(shift(margin, -whole - 1, blocks_dim, wrap))
  return ConcatOperation(parts, parts[0].shape[axis]).outputs[0]
