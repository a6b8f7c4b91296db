"""Convolutions of images whose space is split over the mesh.

An axis of such an image is two dimensions: blocks, which may be split, and the positions in a
block, which may not. Before a convolution each block gets the margins of its neighbours that
the filter reaches; then the blocks are independent, like images of a batch. The result is that
of the convolution of the whole image with "SAME" padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mesh_tensorflow.errors import ShapeError, SizeError, UnsupportedError
from mesh_tensorflow.layers.convolution import (
  conv2d,
  conv2d_transpose,
  conv3d,
  conv3d_transpose,
  spatial_numbers,
)
from mesh_tensorflow.operations.shift import halo_exchange
from mesh_tensorflow.operations.slicing import mtf_slice, pad
from mesh_tensorflow.operations.variables import VariableDTypeLike
from mesh_tensorflow.program.dimensions import Dimension, DimensionLike, convert_to_dimension
from mesh_tensorflow.program.graph import Tensor

__all__ = [
  "conv2d_transpose_with_blocks",
  "conv2d_with_blocks",
  "conv3d_transpose_with_blocks",
  "conv3d_with_blocks",
]


def conv2d_with_blocks(
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: Sequence[int] = (3, 3),
  strides: Sequence[int] = (1, 1),
  padding: str = "SAME",
  h_blocks_dim: DimensionLike | None = None,
  w_blocks_dim: DimensionLike | None = None,
  filter_initializer: Any = None,
  variable_dtype: VariableDTypeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """`conv2d` of an image that is cut into blocks, which may be split over the mesh.

  Args:
    x: a `Tensor` [batch, h_blocks, w_blocks, h, w, in]; the dimensions of blocks may stand
      anywhere before h.
    output_dim: the new last dimension.
    filter_size: (height, width), odd.
    strides: (along h, along w), divisors of the block sizes.
    padding: "SAME".
    h_blocks_dim: the blocks along h; None if h is the whole height.
    w_blocks_dim: the blocks along w; None if w is the whole width.
    filter_initializer: see `conv2d`.
    variable_dtype: see `conv2d`.
    name: name of the scope; `conv2d`, made unique, by default.

  Returns:
    A `Tensor` like x with blocks of another size, if there are strides, and the channels
    `output_dim`. Without any dimension of blocks that of `conv2d` with the given padding.

  Raises:
    UnsupportedError: there are blocks and `padding` is not "SAME".
    SizeError: there are blocks and a filter size is even.
    ShapeError: a stride does not divide a block.
    DimensionError: x has no such dimension of blocks.
  """
  return _with_blocks(
    conv2d, x, output_dim, filter_size, strides, padding, [h_blocks_dim, w_blocks_dim],
    filter_initializer, variable_dtype, name,
  )  # fmt: skip


def conv3d_with_blocks(
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: Sequence[int] = (3, 3, 3),
  strides: Sequence[int] = (1, 1, 1),
  padding: str = "SAME",
  d_blocks_dim: DimensionLike | None = None,
  h_blocks_dim: DimensionLike | None = None,
  filter_initializer: Any = None,
  variable_dtype: VariableDTypeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """`conv3d` of [batch, `d_blocks_dim`, `h_blocks_dim`, d, h, w, in]; w is whole.

  Otherwise as `conv2d_with_blocks`.
  """
  return _with_blocks(
    conv3d, x, output_dim, filter_size, strides, padding, [d_blocks_dim, h_blocks_dim, None],
    filter_initializer, variable_dtype, name,
  )  # fmt: skip


def conv2d_transpose_with_blocks(
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: Sequence[int] = (2, 2),
  strides: Sequence[int] = (2, 2),
  padding: str = "SAME",
  h_blocks_dim: DimensionLike | None = None,
  w_blocks_dim: DimensionLike | None = None,
  filter_initializer: Any = None,
  variable_dtype: VariableDTypeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """`conv2d_transpose` of an image that is cut into blocks, which may be split over the mesh.

  The block sizes h and w are multiplied by the strides. A filter that is larger than its stride
  reaches into the neighbours, from which margins are fetched.

  Args:
    x: see `conv2d_with_blocks`.
    output_dim: the new last dimension.
    filter_size: (height, width), even.
    strides: (along h, along w).
    padding: "SAME".
    h_blocks_dim: see `conv2d_with_blocks`.
    w_blocks_dim: see `conv2d_with_blocks`.
    filter_initializer: see `conv2d`.
    variable_dtype: see `conv2d`.
    name: name of the scope; `conv2d_transpose`, made unique, by default.

  Raises:
    UnsupportedError: there are blocks and `padding` is not "SAME".
    SizeError: there are blocks and a filter size is odd.
    DimensionError: x has no such dimension of blocks.
  """
  return _with_blocks(
    conv2d_transpose, x, output_dim, filter_size, strides, padding, [h_blocks_dim, w_blocks_dim],
    filter_initializer, variable_dtype, name,
  )  # fmt: skip


def conv3d_transpose_with_blocks(
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: Sequence[int] = (2, 2, 2),
  strides: Sequence[int] = (2, 2, 2),
  padding: str = "SAME",
  d_blocks_dim: DimensionLike | None = None,
  h_blocks_dim: DimensionLike | None = None,
  filter_initializer: Any = None,
  variable_dtype: VariableDTypeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """`conv3d_transpose` of [batch, `d_blocks_dim`, `h_blocks_dim`, d, h, w, in]; w is whole.

  Otherwise as `conv2d_transpose_with_blocks`.
  """
  return _with_blocks(
    conv3d_transpose, x, output_dim, filter_size, strides, padding,
    [d_blocks_dim, h_blocks_dim, None], filter_initializer, variable_dtype, name,
  )  # fmt: skip


def _with_blocks(
  layer: Callable[..., Tensor],
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: Sequence[int],
  strides: Sequence[int],
  padding: str,
  blocks: Sequence[DimensionLike | None],
  initializer: Any,
  dtype: VariableDTypeLike | None,
  name: str | None,
) -> Tensor:
  """Applies a layer to blocks: adds margins from neighbours, and crops their surplus results.

  Args:
    layer: `conv2d` and the like; it takes the other arguments but `blocks`.
    x: a `Tensor` [batch, dimensions of blocks, spatial dimensions, in]; see `conv2d_with_blocks`.
    output_dim: the new last dimension.
    filter_size: size of the filter along each spatial dimension.
    strides: stride along each spatial dimension.
    padding: "SAME" if there are blocks.
    blocks: for each spatial dimension the dimension of its blocks, or None.
    initializer: initializer of the filter.
    dtype: dtypes of the filter.
    name: name of the scope.
  """
  block_dims = [None if b is None else convert_to_dimension(b) for b in blocks]
  if not any(block_dims):
    return layer(x, output_dim, filter_size, strides, padding, initializer, dtype, name)
  transposed = layer in (conv2d_transpose, conv3d_transpose)
  remainder = 0 if transposed else 1
  space = _check(layer, x, filter_size, strides, padding, block_dims, remainder)
  axes = list(zip(space, block_dims, filter_size, strides))
  if not transposed:
    x = _with_margins(layer.__name__, x, axes)
    # The margins are the padding.
    return layer(x, output_dim, filter_size, strides, "VALID", initializer, dtype, name)
  x, cuts = _with_halos(x, axes)
  y = layer(x, output_dim, filter_size, strides, "SAME", initializer, dtype, name)
  for d, begin, size in cuts:
    y = mtf_slice(y, begin, size, d.name)
  return y


# A spatial dimension, the dimension of its blocks, its filter size and its stride.
_Axis = tuple[Dimension, Dimension | None, int, int]


def _with_margins(layer: str, x: Tensor, axes: Sequence[_Axis]) -> Tensor:
  """Blocks with the margins that a "SAME" convolution of the whole image reads, or zeros."""
  # Zeros are added last, so that processors do not exchange them.
  for d, b, k, s in sorted(axes, key=lambda axis: axis[1] is None):
    if b is not None and d.size % s:
      raise ShapeError(
        f"{layer}_with_blocks of {x}: the stride {s} does not divide the block size "
        f"{d.name}={d.size} of the blocks {b.name}={b.size}"
      )
    # TensorFlow's "SAME": the larger half of the zeros lies behind the image.
    whole = d.size if b is None else d.size * b.size
    zeros = max((-(-whole // s) - 1) * s + k - whole, 0)
    before, after = zeros // 2, zeros - zeros // 2
    if b is None:
      x = pad(x, [before, after], d.name) if zeros else x
      continue
    # Both sides get the larger half; what is too much in front is cut off.
    x = halo_exchange(x, b, d, after)
    if before < after:
      x = mtf_slice(x, after - before, d.size + zeros, d.name)
  return x


def _with_halos(
  x: Tensor, axes: Sequence[_Axis]
) -> tuple[Tensor, list[tuple[Dimension, int, int]]]:
  """Blocks with halos, and what to keep of the transposed convolution: dimension, begin, size."""
  cuts: list[tuple[Dimension, int, int]] = []
  for d, b, k, s in axes:
    # Position i of x makes the positions i * s - cut to i * s - cut + k - 1 of the output.
    cut = max(k - s, 0) // 2
    # Number of positions before a block, and behind it, that contribute to outputs in it.
    halo = max((k - 1 - cut) // s, -(-cut // s))
    if b is not None and halo:
      x = halo_exchange(x, b, d, halo)
      cuts.append((d, halo * s, d.size * s))
  return x, cuts


def _check(
  layer: Callable[..., Tensor],
  x: Tensor,
  filter_size: Sequence[int],
  strides: Sequence[int],
  padding: str,
  blocks: Sequence[Dimension | None],
  remainder: int,
) -> list[Dimension]:
  """The spatial dimensions of x, if the arguments are right."""
  what, rank = f"{layer.__name__}_with_blocks of {x}", len(blocks)
  if padding != "SAME":
    raise UnsupportedError(f"{what}: padding must be 'SAME' with blocks, got {padding!r}")
  spatial_numbers(f"{what}: strides", rank, strides)
  for k in spatial_numbers(f"{what}: filter_size", rank, filter_size):
    if k % 2 != remainder:
      raise SizeError(
        f"{what}: filter sizes must be {'odd' if remainder else 'even'} with blocks, got "
        f"{list(filter_size)}"
      )
  if x.shape.ndims < rank + 1:
    raise ShapeError(f"{what}: {rank} spatial dimensions and one of channels are needed")
  return x.shape[-rank - 1 : -1]
