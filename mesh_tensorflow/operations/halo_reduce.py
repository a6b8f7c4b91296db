"""Halo reduction: what was written into the halos is added to the blocks that own it."""

from __future__ import annotations

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.operations.binary import add_n
from mesh_tensorflow.operations.shift import shift
from mesh_tensorflow.operations.slicing import PadOperation, SliceOperation
from mesh_tensorflow.program.argument_kinds import NumberTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Tensor

__all__ = ["halo_reduce"]


def halo_reduce(
  x: NumberTensor,
  blocks_dim: Dimension,
  block_size_dim: Dimension,
  halo_size: int,
  wrap: bool = False,
) -> Tensor:
  """Adds the halos of each block to the blocks that own them: the adjoint of `halo_exchange`.

  Block j of x stands for the positions j * b - halo_size to (j + 1) * b + halo_size of one long
  axis. Blocks overlap; the result has, at each position of the axis, the sum of all of them.
  Its gradient is the halo exchange of the gradient, and the other way round. Particles painted
  into a block and its halo, for example, become a density so.

  Processors exchange only halos. A halo may be wider than a block: it then reaches beyond the
  next one.

  Args:
    x: a `Tensor`.
    blocks_dim: the blocks; may be split over the mesh.
    block_size_dim: the positions in a block with its two halos, b + 2 * halo_size; must not be
      split.
    halo_size: positions of the halo on each side, any number.
    wrap: whether the axis is a ring; else what lies beyond its ends is dropped.

  Returns:
    A `Tensor` whose block_size_dim is smaller by 2 * halo_size; x itself for 0.

  Raises:
    DimensionError: x has no such dimension.
    ShapeError: the halos leave nothing of a block, or their size is negative.
  """
  blocks_dim = convert_to_dimension(blocks_dim)
  block_size_dim = convert_to_dimension(block_size_dim)
  for d in (blocks_dim, block_size_dim):
    if d not in x.shape:
      raise no_such_dimension("halo_reduce", d, x)
  block = block_size_dim.size - 2 * halo_size
  if halo_size < 0 or block < 1:
    raise ShapeError(
      f"halo_reduce of {x}: {block_size_dim.name}={block_size_dim.size} must be larger than two "
      f"halos, which are 0 or more; got halo_size {halo_size}"
    )
  if halo_size == 0:
    return x
  # Seen from a block, its halos are parts of the blocks k before and after it: whole ones, and of
  # the farthest only the margin.
  parts = [_cut(x, halo_size, block, block_size_dim)]
  for k in range(1, -(-halo_size // block) + 1):
    width = min(block, halo_size - (k - 1) * block)
    left = _cut(x, halo_size - (k - 1) * block - width, width, block_size_dim)
    right = _cut(x, halo_size + k * block, width, block_size_dim)
    # The margin is sent, and padded where it arrives.
    for part, offset, before in ((left, -k, block - width), (right, k, 0)):
      part = shift(part, offset, blocks_dim, wrap)
      if width < block:
        after = block - width - before
        part = PadOperation(part, [before, after], block_size_dim.name).outputs[0]
      parts.append(part)
  total: Tensor = add_n(parts)
  return total


def _cut(x: Tensor, begin: int, size: int, dim: Dimension) -> Tensor:
  return SliceOperation(x, begin, size, dim).outputs[0]
