"""Attention of each position to a window, in blocks: memory grows with length times window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.attention.dot_product import (
  attention,
  visibility_mask_to_attention_bias,
)

# Blocks are not made smaller than this for the sake of a smaller window.
_MIN_BLOCK = 128


def local_attention_1d(
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor | None,
  length_dim: mtf.Dimension,
  key_dim: mtf.Dimension,
  value_dim: mtf.Dimension,
  fully_autoregressive: bool = True,
  length_dim_num_splits: int = 1,
  radius: int = 128,
  sequence_id: Any = 1,
  write_priority: mtf.Tensor | None = None,
  read_priority: mtf.Tensor | None = None,
  attention_kwargs: dict[str, Any] | None = None,
  *,
  relative_bias_fn: Callable[[mtf.Tensor, mtf.Tensor], mtf.Tensor] | None = None,
) -> mtf.Tensor:
  """Attention of position p to (p - radius, p], or (p - radius, p + radius] with later ones.

  The sequence is cut into blocks; each gets its neighbours' ends by a halo exchange. The size of
  the blocks does not change values.

  Args:
    q: `[<batch dims>, length_dim, <heads>, key_dim]`.
    k: `[<batch dims>, length_dim, <heads>, key_dim]`; its dims are among those of q.
    v: as k, with value_dim; None: k.
    length_dim: the dimension of positions.
    key_dim: the dimension of products.
    value_dim: the dimension of values.
    fully_autoregressive: whether no position sees a later one.
    length_dim_num_splits: over how many processors the layout splits length_dim: a block lies on
      one processor.
    radius: how far a position sees.
    sequence_id: int32 tensor of some dims of q: a position sees those of its own sequence. A number
      or None: all are of one sequence.
    write_priority: int32 tensor: a position is seen by those of at least its priority.
    read_priority: int32 tensor.
    attention_kwargs: dict of further arguments of `attention`.
    relative_bias_fn: from relative positions (memory minus query, int32 `[query_block_length,
      memory_block_length]`) and the queries in blocks to what is added to the products.

  Returns:
    The dims of q without key_dim, then value_dim.

  Raises:
    ShapeError: the radius is not positive, or length_dim_num_splits does not divide the length.
  """
  if radius < 1 or length_dim_num_splits < 1 or length_dim.size % length_dim_num_splits:
    raise errors.ShapeError(
      f"local_attention_1d of {q}: radius (={radius}) must be at least 1, and "
      f"length_dim_num_splits (={length_dim_num_splits}) a divisor of {length_dim.name}="
      f"{length_dim.size}"
    )
  blocks = _Blocks.of(length_dim, length_dim_num_splits, radius, fully_autoregressive)
  relative_position, visible = blocks.window(q.mesh)
  if isinstance(sequence_id, mtf.Tensor) and length_dim in sequence_id.shape:
    visible.append(_compared(mtf.equal, blocks.queries(sequence_id), blocks.memory(sequence_id)))
  if read_priority is not None and write_priority is not None:
    visible.append(
      _compared(mtf.greater_equal, blocks.queries(read_priority), blocks.memory(write_priority))
    )
  bias = visibility_mask_to_attention_bias(_all(visible), q.dtype)
  q_blocks, k_blocks = blocks.queries(q), blocks.memory(k)
  if relative_bias_fn is not None:
    relative_bias = relative_bias_fn(relative_position, q_blocks)
    dims = [d for d in q_blocks.shape if d != blocks.query_block]
    dims += [blocks.query_block, blocks.memory_length]  # The order of the products.
    dims = [d for d in dims if d in bias.shape or d in relative_bias.shape]
    bias = mtf.add(bias, relative_bias, output_shape=mtf.Shape(dims))
  a = attention(
    q_blocks,
    k_blocks,
    k_blocks if v is None or v is k else blocks.memory(v),
    blocks.memory_length,
    key_dim,
    value_dim,
    bias,
    **(attention_kwargs or {}),
  )
  return mtf.replace_dimensions(a, [blocks.blocks, blocks.query_block], length_dim)


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """How a sequence is cut into blocks.

  Attributes:
    length: the dimension of positions.
    blocks: the blocks; of its name, so that it is split as the positions are.
    block_length: positions of a block.
    halo: how many positions a block gets of its neighbours, on each side.
    radius: how far a position sees.
    to_the_left: whether no position sees a later one.
  """

  length: mtf.Dimension
  blocks: mtf.Dimension
  block_length: int
  halo: int
  radius: int
  to_the_left: bool

  @classmethod
  def of(
    cls, length: mtf.Dimension, num_splits: int, radius: int, fully_autoregressive: bool
  ) -> _Blocks:
    """Blocks as long as the window, if that is possible; each lies on one processor."""
    per_split = length.size // num_splits
    block_length = min(max(radius, _MIN_BLOCK), per_split)
    # The largest divisor up to that: blocks have one size, for they are a dimension.
    block_length = next(n for n in range(block_length, 0, -1) if per_split % n == 0)
    # What one block can see is in the window and in the sequence.
    halo = min(radius if not fully_autoregressive else radius - 1, length.size - block_length)
    blocks = mtf.Dimension(length.name, length.size // block_length)
    return cls(length, blocks, block_length, halo, radius, fully_autoregressive)

  @property
  def query_block(self) -> mtf.Dimension:
    return mtf.Dimension("query_block_length", self.block_length)

  @property
  def memory_length(self) -> mtf.Dimension:
    sides = 1 if self.to_the_left else 2
    return mtf.Dimension("memory_block_length", self.block_length + self.halo * sides)

  def queries(self, x: mtf.Tensor) -> mtf.Tensor:
    """x in blocks, if it has positions."""
    if self.length not in x.shape:
      return x
    return mtf.replace_dimensions(x, self.length, [self.blocks, self.query_block])

  def memory(self, x: mtf.Tensor) -> mtf.Tensor:
    """x in blocks with the ends of their neighbours, if it has positions."""
    if self.length not in x.shape:
      return x
    block = mtf.Dimension("memory_block_length", self.block_length)
    x = mtf.replace_dimensions(x, self.length, [self.blocks, block])
    exchange = mtf.left_halo_exchange if self.to_the_left else mtf.halo_exchange
    return exchange(x, self.blocks, block, self.halo)

  def window(self, mesh: mtf.Mesh) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
    """Relative positions in a block, memory minus query; and masks: in window and sequence."""
    # The memory of a block begins a halo before it: positions are counted from the first query.
    position = mtf.range(mesh, self.memory_length, tf.int32) - self.halo
    relative_position = mtf.sub(
      position,
      mtf.range(mesh, self.query_block, tf.int32),
      output_shape=mtf.Shape([self.query_block, self.memory_length]),
    )
    right = 0 if self.to_the_left else self.radius
    near = mtf.cwise(
      lambda r: (r > -self.radius) & (r <= right), [relative_position], output_dtype=tf.bool
    )
    # The exchange puts zeros beyond the ends of the sequence: keys like any other, if not masked.
    inside = _inside(position, self.blocks, self.block_length, self.length.size)
    return relative_position, [near, inside]


def _inside(
  position: mtf.Tensor, blocks: mtf.Dimension, block_length: int, length: int
) -> mtf.Tensor:
  """Whether a position of a block's memory is in the sequence: `[blocks, memory]`."""
  begin = mtf.range(position.mesh, blocks, tf.int32) * block_length
  absolute = mtf.add(begin, position, output_shape=mtf.Shape([blocks, *position.shape.dims]))
  return mtf.cwise(lambda p: (p >= 0) & (p < length), [absolute], output_dtype=tf.bool)


def _compared(
  compare: Callable[..., mtf.Tensor], query: mtf.Tensor, memory: mtf.Tensor
) -> mtf.Tensor:
  dims = query.shape.dims + [d for d in memory.shape if d not in query.shape]
  return compare(query, memory, output_shape=mtf.Shape(dims))


def _all(masks: list[mtf.Tensor]) -> mtf.Tensor:
  """The conjunction; the dims of the first mask, of one block, stand last."""
  block = masks[0].shape.dims
  result, *others = sorted(masks, key=lambda mask: -mask.shape.ndims)
  for mask in others:
    dims = dict.fromkeys([*result.shape, *mask.shape])
    shape = [d for d in dims if d not in block] + [d for d in block if d in dims]
    result = mtf.logical_and(result, mask, output_shape=mtf.Shape(shape))
  return result
