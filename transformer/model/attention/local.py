"""Attention of each position to a window, in blocks: memory grows with length times window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.layers.local_attention import SequenceBlocks
from mesh_tensorflow.transformer.model.attention.bias import (
  all_visible,
  compared,
  visibility_mask_to_attention_bias,
)
from mesh_tensorflow.transformer.model.attention.functions import attention

# A function, and what it compares of queries and of memory.
_Comparison = tuple[Callable[..., mtf.Tensor], mtf.Tensor, mtf.Tensor]


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
  sequence_id: int | mtf.Tensor | None = 1,
  write_priority: mtf.Tensor | None = None,
  read_priority: mtf.Tensor | None = None,
  attention_kwargs: dict[str, Any] | None = None,
  *,
  relative_bias_fn: Callable[[mtf.Tensor, mtf.Tensor], mtf.Tensor] | None = None,
  num_sinks: int = 0,
  sink_position: mtf.Tensor | None = None,
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
    num_sinks: how many first positions of a sequence all later ones of it see.
    sink_position: int32 `[..., length_dim]`: positions within sequences; None: there is one.

  Returns:
    The dims of q without key_dim, then value_dim.

  Raises:
    ShapeError: the radius is not positive, or length_dim_num_splits does not divide the length.
    ArgumentError: num_sinks with relative_bias_fn.
  """
  _check(q, length_dim, length_dim_num_splits, radius, num_sinks, relative_bias_fn)
  blocks = SequenceBlocks.of(
    length_dim,
    length_dim.size // length_dim_num_splits,
    radius,
    radius - 1 if fully_autoregressive else radius,
    fully_autoregressive,
  )
  sinks = _Sinks.of(blocks, num_sinks, sink_position, q.mesh) if num_sinks else None
  comparisons: list[_Comparison] = []
  if isinstance(sequence_id, mtf.Tensor) and length_dim in sequence_id.shape:
    comparisons.append((mtf.equal, sequence_id, sequence_id))
  if read_priority is not None and write_priority is not None:
    comparisons.append((mtf.greater_equal, read_priority, write_priority))
  relative_position, bias = _masks(blocks, sinks, comparisons, q.mesh, q.dtype)
  q_blocks, cut = blocks.queries(q), blocks if sinks is None else sinks
  if relative_bias_fn is not None:
    relative_bias = relative_bias_fn(relative_position, q_blocks)
    order = [d for d in q_blocks.shape if d != blocks.query_block]
    order += [blocks.query_block, blocks.memory_length]  # That of the products.
    dims = [d for d in order if d in bias.shape or d in relative_bias.shape]
    bias = mtf.add(bias, relative_bias, output_shape=mtf.Shape(dims))
  k_blocks = cut.memory(k)
  a = attention(
    q_blocks,
    k_blocks,
    k_blocks if v is None or v is k else cut.memory(v),
    cut.memory_length,
    key_dim,
    value_dim,
    bias,
    **(attention_kwargs or {}),
  )
  return blocks.whole(a)


def _check(
  q: mtf.Tensor,
  length_dim: mtf.Dimension,
  length_dim_num_splits: int,
  radius: int,
  num_sinks: int,
  relative_bias_fn: object,
) -> None:
  if radius < 1 or length_dim_num_splits < 1 or length_dim.size % length_dim_num_splits:
    raise errors.ShapeError(
      f"local_attention_1d of {q}: radius (={radius}) must be at least 1, and "
      f"length_dim_num_splits (={length_dim_num_splits}) a divisor of {length_dim.name}="
      f"{length_dim.size}"
    )
  if num_sinks and relative_bias_fn is not None:
    raise errors.ArgumentError(
      f"local_attention_1d of {q}: there is no relative bias of sinks; set num_sinks "
      f"(={num_sinks}) to 0 or relative_bias_fn to None"
    )


def _masks(
  blocks: SequenceBlocks,
  sinks: _Sinks | None,
  comparisons: list[_Comparison],
  mesh: mtf.Mesh,
  dtype: tf.DType,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """(relative positions in a block, memory minus query; the bias that masks what is not seen)."""
  query, memory = blocks.query_block, blocks.memory_length
  # The memory of a block begins a halo before it: positions are counted from the first query.
  position = mtf.range(mesh, memory, tf.int32) - blocks.halo
  relative_position = mtf.sub(
    position, mtf.range(mesh, query, tf.int32), output_shape=mtf.Shape([query, memory])
  )
  left, right = -blocks.window, 0 if blocks.to_the_left else blocks.window
  near = mtf.cwise(lambda r: (r > left) & (r <= right), [relative_position], output_dtype=tf.bool)
  if sinks is not None:
    near = sinks.or_in_memory(near, mtf.less_equal(relative_position, right))
  # The exchange puts zeros beyond the ends of the sequence: keys like any other, if not masked.
  begin = mtf.range(mesh, blocks.blocks, tf.int32) * blocks.block_length
  absolute = mtf.add(begin, position, output_shape=mtf.Shape([blocks.blocks, memory]))
  length = blocks.length.size
  inside = mtf.cwise(lambda p: (p >= 0) & (p < length), [absolute], output_dtype=tf.bool)
  visible = [near, inside]
  visible += [compared(fn, blocks.queries(x), blocks.memory(y)) for fn, x, y in comparisons]
  bias = visibility_mask_to_attention_bias(all_visible(visible, (query, memory)), dtype)
  return relative_position, bias if sinks is None else sinks.beside_bias(bias, comparisons)


@dataclasses.dataclass(frozen=True)
class _Sinks:
  """The first positions of sequences, which all later ones of the same sequence see.

  Of what a block's queries see, all but one sequence begin in the block's memory, where their sinks
  are unmasked. Only the sequence of the first query may have begun before: its sinks become further
  memory of the block.

  Attributes:
    blocks: the blocks.
    position: int32 with the dimension of positions: positions within their sequences.
    dim: the sinks of a block; called as the memory is.
    index: int32 `[..., <blocks>, dim]`, of blocks that are not split: where in the whole sequence a
      block's further sinks are; -1 if they are in its memory, or are none.
  """

  blocks: SequenceBlocks
  position: mtf.Tensor
  dim: mtf.Dimension
  index: mtf.Tensor

  @classmethod
  def of(
    cls, blocks: SequenceBlocks, num_sinks: int, position: mtf.Tensor | None, mesh: mtf.Mesh
  ) -> _Sinks:
    """The `num_sinks` first positions of sequences, of which these are the positions."""
    if position is None:
      position = mtf.range(mesh, blocks.length, tf.int32)
    dim = mtf.Dimension(blocks.memory_length.name, num_sinks)
    # Not split: a block's sinks may be with any processor.
    everywhere = mtf.Dimension("_blocks", blocks.blocks.size)
    first = mtf.gather(blocks.queries(position), 0, blocks.query_block)
    first = mtf.replace_dimensions(first, blocks.blocks, everywhere)
    begin = mtf.range(mesh, everywhere, tf.int32) * blocks.block_length
    start = mtf.sub(begin, first, output_shape=first.shape)
    shape = mtf.Shape([*first.shape, dim])
    index = mtf.add(start, mtf.range(mesh, dim, tf.int32), output_shape=shape)

    def before_memory(index: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
      return tf.where((index >= 0) & (index < begin - blocks.halo), index, -1)

    index = mtf.cwise(before_memory, [index, mtf.broadcast(begin, shape)])
    return cls(blocks, position, dim, index)

  def or_in_memory(self, near: mtf.Tensor, earlier: mtf.Tensor) -> mtf.Tensor:
    """Adds the sinks within a block's memory, if they are earlier, to the mask of the window."""
    sink = mtf.less(self.blocks.memory(self.position), self.dim.size)
    dims = [d for d in sink.shape if d not in earlier.shape]
    shape = mtf.Shape([*dims, *earlier.shape])
    return mtf.logical_or(
      near, mtf.logical_and(sink, earlier, output_shape=shape), output_shape=shape
    )

  def of_blocks(self, x: mtf.Tensor) -> mtf.Tensor:
    """x at the further sinks of blocks, `[..., blocks, dim, ...]`; zeros where there are none."""
    everywhere = self.index.shape.dims[-2]
    dims = [d for d in self.index.shape.dims[:-2] if d not in x.shape]
    for d in x.shape:
      dims += [everywhere, self.dim] if d == self.blocks.length else [d]
    y = mtf.gather(x, self.index, self.blocks.length, output_shape=mtf.Shape(dims))
    return mtf.replace_dimensions(y, everywhere, self.blocks.blocks)

  @property
  def memory_length(self) -> mtf.Dimension:
    return mtf.Dimension(self.dim.name, self.blocks.memory_length.size + self.dim.size)

  def memory(self, x: mtf.Tensor) -> mtf.Tensor:
    """x in the memory of blocks, and behind it at their further sinks."""
    return mtf.concat([self.blocks.memory(x), self.of_blocks(x)], self.dim.name)

  def beside_bias(self, bias: mtf.Tensor, comparisons: list[_Comparison]) -> mtf.Tensor:
    """The bias of the memory of blocks, and behind it that of their further sinks."""
    query = self.blocks.query_block
    there = mtf.greater_equal(self.index, 0)
    visible = [mtf.replace_dimensions(there, there.shape.dims[-2], self.blocks.blocks)]
    visible += [compared(f, self.blocks.queries(x), self.of_blocks(y)) for f, x, y in comparisons]
    sinks = visibility_mask_to_attention_bias(all_visible(visible, (query, self.dim)), bias.dtype)
    last = [query, self.blocks.memory_length, self.dim]
    dims = [d for d in dict.fromkeys([*bias.shape, *sinks.shape]) if d not in last]
    parts = [
      mtf.broadcast(x, mtf.Shape([*dims, query, memory]))
      for x, memory in ((bias, last[1]), (sinks, self.dim))
    ]
    return mtf.concat(parts, self.dim.name)
