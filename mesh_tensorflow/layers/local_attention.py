"""Self-attention to a window of positions, and of blocks to the blocks around them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import DTypeError, ShapeError
from mesh_tensorflow.layers.attention import Projections, cached_dims, dot_product_attention
from mesh_tensorflow.layers.masks import (
  attention_bias_local_2d_block,
  attention_bias_local_block,
  mask_where,
)
from mesh_tensorflow.operations.binary import add, mod
from mesh_tensorflow.operations.comparison import equal
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reshape import replace_dimensions
from mesh_tensorflow.operations.shift import halo_exchange, left_halo_exchange
from mesh_tensorflow.operations.slicing import pad
from mesh_tensorflow.operations.where import where
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import FloatTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Mesh, Tensor

__all__ = [
  "local_1d_halo_exchange",
  "local_2d_halo_exchange",
  "local_2d_self_attention_spatial_blocks",
  "local_3d_self_attention_spatial_blocks",
  "local_self_attention_spatial_blocks",
  "masked_local_attention_1d",
  "masked_local_attention_1d_incremental",
]

_SCOPE = "masked_local_attention_1d"
# Blocks are not made smaller than this for the sake of a smaller window.
_MIN_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class SequenceBlocks:
  """The division of a sequence into blocks, of which each attends to its neighbours' ends, too.

  Attributes:
    length: the dimension of positions.
    blocks: the blocks; of its name, so that it is split as the positions are.
    block_length: number of positions of a block.
    halo: how many positions a block gets of its neighbours, on each side.
    window: how many positions one sees to the left, itself included.
    to_the_left: whether no position sees a later one.
  """

  length: Dimension
  blocks: Dimension
  block_length: int
  halo: int
  window: int
  to_the_left: bool

  @classmethod
  def of(
    cls, length: Dimension, length_per_split: int, window: int, halo: int, to_the_left: bool
  ) -> SequenceBlocks:
    """Blocks as long as the window if possible; each within `length_per_split` positions."""
    largest = min(max(window, _MIN_BLOCK), length_per_split)
    # The largest divisor up to that: blocks have one size, for they are a dimension.
    block_length = next(n for n in range(largest, 0, -1) if length_per_split % n == 0)
    # What one block can see is in the sequence.
    halo = min(halo, length.size - block_length)
    blocks = Dimension(length.name, length.size // block_length)
    return cls(length, blocks, block_length, halo, window, to_the_left)

  # Positions within blocks have names of their own, and queries other ones than memory, or products
  # would pair equal positions only.

  @property
  def query_block(self) -> Dimension:
    return Dimension("query_block_length", self.block_length)

  @property
  def memory_length(self) -> Dimension:
    sides = 1 if self.to_the_left else 2
    return Dimension("memory_block_length", self.block_length + self.halo * sides)

  def queries(self, x: Tensor) -> Tensor:
    """Cuts x into blocks, if it has positions."""
    if self.length not in x.shape:
      return x
    return replace_dimensions(x, self.length, [self.blocks, self.query_block])

  def memory(self, x: Tensor) -> Tensor:
    """Cuts x into blocks with the ends of their neighbours, if it has positions."""
    if self.length not in x.shape:
      return x
    block = Dimension("memory_block_length", self.block_length)
    x = replace_dimensions(x, self.length, [self.blocks, block])
    exchange = left_halo_exchange if self.to_the_left else halo_exchange
    return exchange(x, self.blocks, block, self.halo)

  def whole(self, x: Tensor) -> Tensor:
    """Puts queries in blocks together again."""
    return replace_dimensions(x, [self.blocks, self.query_block], self.length)


def masked_local_attention_1d(
  x: FloatTensor,
  kv_channels: Dimension,
  heads: Dimension,
  is_training: bool,
  window_size: int = 128,
  master_dtype: tf.DType = tf.float32,
  slice_dtype: tf.DType | None = tf.float32,
  length_per_split: int | None = None,
  return_kv: list[Tensor] | None = None,
  params: Sequence[Tensor] | None = None,
  name: str | None = None,
) -> Tensor:
  """Multihead self-attention of each position to the last `window_size`, itself included.

  Position i attends to the positions max(0, i - window_size + 1) to i. The sequence is cut
  into blocks, whose size does not change values: the largest divisor of `length_per_split`
  that is at most max(window_size, 128). Each block gets the end of the sequence before it by
  a halo exchange, so that memory grows with length * (block + window). Variable
  `{name}/qkvo`, unless `params` is given.

  Args:
    x: [batch..., length, io_channels].
    kv_channels: dimension of keys and values.
    heads: dimension of the heads.
    is_training: not used.
    window_size: number of positions.
    master_dtype: dtype of the variable in checkpoints.
    slice_dtype: dtype in which slices of the variable are kept and updated.
    length_per_split: the part of the length that one processor holds, if the layout splits
      it: a block must lie on one processor. All of the length by default.
    return_kv: a list that keys and values [batch..., heads, length, kv_channels] are
      appended to.
    params: (wq, wk, wv, wo), each [heads, io_channels, kv_channels].
    name: name of the scope; `masked_local_attention_1d`, made unique, by default.

  Returns:
    A `Tensor` of x's shape.

  Raises:
    ShapeError: the window is empty, or `length_per_split` does not divide the length.
  """
  del is_training
  length = x.shape.dims[-2]
  blocks = _window_blocks(x, length, window_size, length_per_split)
  with scope.variable_scope(name, default_name=_SCOPE, graph=x.graph):
    weights = _weights(x, params, heads, kv_channels, master_dtype, slice_dtype)
    q, k, v = weights.queries_keys_values(x, x)
    if return_kv is not None:
      return_kv.extend([k, v])
    q, k, v = blocks.queries(q), blocks.memory(k), blocks.memory(v)
    mask = _window_mask(x.mesh, blocks, x.dtype)
    o = dot_product_attention(q, k, v, mask, is_training=False)
    return weights.output(blocks.whole(o), x.shape)


def _weights(
  x: Tensor,
  params: Sequence[Tensor] | None,
  heads: Dimension,
  kv_channels: Dimension,
  master_dtype: tf.DType,
  slice_dtype: tf.DType | None,
) -> Projections:
  """The given weights (wq, wk, wv, wo), or those of the open scope."""
  if params is None:
    return Projections.of(x, heads, kv_channels, master_dtype, slice_dtype)
  if len(params) != 4:
    raise ShapeError(f"{_SCOPE} of {x}: params must be (wq, wk, wv, wo), got {len(params)}")
  return Projections(*params)


def _window_blocks(
  x: Tensor, length: Dimension, window_size: int, length_per_split: int | None
) -> SequenceBlocks:
  if window_size < 1:
    raise ShapeError(f"{_SCOPE} of {x}: window_size must be at least 1, got {window_size}")
  if length_per_split is None:
    length_per_split = length.size
  if length_per_split < 1 or length.size % length_per_split:
    raise ShapeError(
      f"{_SCOPE} of {x}: length_per_split {length_per_split} must be a divisor of "
      f"{length.name}={length.size}"
    )
  return SequenceBlocks.of(length, length_per_split, window_size, window_size, to_the_left=True)


def _window_mask(mesh: Mesh, blocks: SequenceBlocks, dtype: tf.DType) -> Tensor:
  """[blocks, query, memory]: hides what is not in the window, or before the sequence."""
  query_dim, memory_dim = blocks.query_block, blocks.memory_length
  begin = mtf_range(mesh, blocks.blocks, tf.int32) * blocks.block_length
  query_pos = begin + mtf_range(mesh, query_dim, tf.int32)
  # The memory begins a halo before its block; before the sequence the halo holds zeros.
  memory_pos = begin + (mtf_range(mesh, memory_dim, tf.int32) - blocks.halo)

  def hidden(query: tf.Tensor, memory: tf.Tensor) -> tf.Tensor:
    return (memory < 0) | (memory > query) | (memory <= query - blocks.window)

  shape = Shape([blocks.blocks, query_dim, memory_dim])
  return mask_where(hidden, query_pos, memory_pos, dtype, shape)


def masked_local_attention_1d_incremental(
  x: FloatTensor,
  prev_k: Tensor,
  prev_v: Tensor,
  step_num: Tensor,
  master_dtype: tf.DType | None = None,
  slice_dtype: tf.DType | None = None,
  params: Sequence[Tensor] | None = None,
  name: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
  """One step of `masked_local_attention_1d`, with a ring buffer of keys and values.

  Step t writes slot t mod window. Slots that no step has written yet are hidden, whatever
  they hold. Variable `{name}/qkvo`, unless `params` is given.

  Args:
    x: [batch..., io_channels], the position `step_num`.
    prev_k: keys [batch..., heads, window, kv_channels] of the last steps; the size of its
      second-last dimension is the window size.
    prev_v: values of the last steps, of the shape of `prev_k`.
    step_num: an integer `Tensor`: a scalar, or of some batch dimensions.
    master_dtype: dtype of the variable in checkpoints; float32 by default.
    slice_dtype: dtype in which it is kept and updated; the master's by default.
    params: (wq, wk, wv, wo), each [heads, io_channels, kv_channels].
    name: name of the scope; `masked_local_attention_1d`, made unique, by default.

  Returns:
    The output (of x's shape), and keys and values with this position's.

  Raises:
    DTypeError: `step_num` is not an integer.
  """
  if not step_num.dtype.is_integer:
    raise DTypeError(f"{_SCOPE}_incremental: step_num must be an integer, got {step_num}")
  heads, window, kv_channels = cached_dims(f"{_SCOPE}_incremental", prev_k)
  master_dtype = tf.float32 if master_dtype is None else master_dtype
  slice_dtype = master_dtype if slice_dtype is None else slice_dtype
  with scope.variable_scope(name, default_name=_SCOPE, graph=x.graph):
    weights = _weights(x, params, heads, kv_channels, master_dtype, slice_dtype)
    # The order of the slots does not matter: attention itself knows no positions. Only in the first
    # steps are some hidden: from step window - 1 on no slot is above the step.
    slots = mtf_range(x.mesh, window, step_num.dtype)
    here = equal(slots, mod(step_num, window.size))
    return weights.decode(
      x,
      prev_k,
      prev_v,
      lambda cache, new: where(here, new, cache, output_shape=cache.shape),
      slots,
      step_num,
    )


def local_self_attention_spatial_blocks(
  query_antecedent: FloatTensor,
  kv_channels: Dimension,
  heads: Dimension,
  is_training: bool,
  memory_w_dim: Dimension | None = None,
  mask_right: bool = False,
  master_dtype: tf.DType = tf.float32,
  slice_dtype: tf.DType | None = tf.float32,
  name: str | None = None,
) -> Tensor:
  """Multihead self-attention within a block and to the block on either side.

  With `mask_right` a position attends to the block on the left and, in its own block, to
  the positions up to and including itself. Blocks beyond the ends take no part. Variable
  `{name}/qkvo`.

  Args:
    query_antecedent: [batch..., num_w_blocks, w, io_channels].
    kv_channels: dimension of keys and values.
    heads: dimension of the heads.
    is_training: not used.
    memory_w_dim: only its name counts, for the dimension of the memory; `memory_` and the
      name of w by default.
    mask_right: whether attention is causal, as above; False: all of these blocks are attended to.
    master_dtype: dtype of the variable in checkpoints.
    slice_dtype: dtype in which slices of the variable are kept and updated.
    name: name of the scope; `multihead_attention`, made unique, by default.

  Returns:
    A `Tensor` of the shape of `query_antecedent`.

  Raises:
    ShapeError: there are too few dimensions, or a name of a memory dimension is in use.
  """
  del is_training
  return _attention_in_blocks(
    "local_self_attention_spatial_blocks",
    query_antecedent,
    kv_channels,
    heads,
    [memory_w_dim],
    mask_right,
    master_dtype,
    slice_dtype,
    name,
  )


def local_2d_self_attention_spatial_blocks(
  query_antecedent: FloatTensor,
  kv_channels: Dimension,
  heads: Dimension,
  is_training: bool,
  memory_h_dim: Dimension | None = None,
  memory_w_dim: Dimension | None = None,
  mask_right: bool = False,
  master_dtype: tf.DType = tf.float32,
  slice_dtype: tf.DType | None = tf.float32,
  name: str | None = None,
) -> Tensor:
  """Multihead self-attention within a block and to the eight blocks around it.

  The softmax runs over all positions of these blocks together. With `mask_right` a position
  attends to the three blocks above, on the left and between them and, in its own block, to
  the positions up to and including itself, row by row. Blocks beyond the image take no part.
  Variable `{name}/qkvo`.

  Arguments as `local_self_attention_spatial_blocks`. `query_antecedent` is [batch...,
  num_h_blocks, num_w_blocks, h, w, io_channels]; `memory_h_dim` and `memory_w_dim` give names to
  the rows and columns of the memory.
  """
  del is_training
  return _attention_in_blocks(
    "local_2d_self_attention_spatial_blocks",
    query_antecedent,
    kv_channels,
    heads,
    [memory_h_dim, memory_w_dim],
    mask_right,
    master_dtype,
    slice_dtype,
    name,
  )


def local_3d_self_attention_spatial_blocks(
  query_antecedent: FloatTensor,
  kv_channels: Dimension,
  heads: Dimension,
  is_training: bool,
  master_dtype: tf.DType = tf.float32,
  slice_dtype: tf.DType | None = tf.float32,
  name: str | None = None,
) -> Tensor:
  """Multihead self-attention within a block of a volume and to the 26 blocks around it.

  The softmax runs over all positions of these blocks together. Blocks beyond the volume take no
  part. Variable `{name}/qkvo`. The dimensions of the memory are called `memory_` and the names of
  those of the positions.

  Arguments as `local_self_attention_spatial_blocks`. `query_antecedent` is [batch...,
  num_d_blocks, num_h_blocks, num_w_blocks, d, h, w, io_channels]; blocks may be split, positions
  may not.
  """
  del is_training
  return _attention_in_blocks(
    "local_3d_self_attention_spatial_blocks",
    query_antecedent,
    kv_channels,
    heads,
    [None, None, None],
    False,
    master_dtype,
    slice_dtype,
    name,
  )


def _attention_in_blocks(
  layer: str,
  x: Tensor,
  kv_channels: Dimension,
  heads: Dimension,
  memory_dims: Sequence[Dimension | None],
  mask_right: bool,
  master_dtype: tf.DType,
  slice_dtype: tf.DType | None,
  name: str | None,
) -> Tensor:
  """Self-attention of x, [batch..., <blocks>, <positions>, io_channels], in any number of axes.

  For each axis `memory_dims` has a dimension whose name the memory's gets; None: `memory_` and that
  of x. For the other arguments see the three functions above.
  """
  n, mesh = len(memory_dims), x.mesh
  axes = "dhw"[-n:]
  if x.shape.ndims < 2 * n + 1:
    expected = ", ".join([*(f"num_{a}_blocks" for a in axes), *axes, "io_channels"])
    raise ShapeError(f"{layer}: the input must have the dimensions [..., {expected}], got {x}")
  blocks, space = x.shape.dims[-2 * n - 1 : -n - 1], x.shape.dims[-n - 1 : -1]
  memory = [_memory_dim(layer, x, d, given) for d, given in zip(space, memory_dims)]
  with scope.variable_scope(name, default_name="multihead_attention", graph=x.graph):
    weights = Projections.of(x, heads, kv_channels, master_dtype, slice_dtype)
    antecedent = replace_dimensions(x, space, memory)
    q, k, v = weights.queries_keys_values(x, antecedent, num_positions=n, num_blocks=n)
    k, v = (_with_surroundings(t, blocks, memory, mask_right) for t in (k, v))
    memory = k.shape.dims[-n - 1 : -1]
    # A sum of masks hides what any of them hides: twice -1e9 is as good.
    masks = [_outside_mask(mesh, b, d, m) for b, d, m in zip(blocks, space, memory)]
    mask = functools.reduce(add, masks[1:-1], masks[0])
    if n > 1:
      mask = add(mask, masks[-1], output_shape=Shape([*blocks, *memory]))
    if mask_right:
      bias_of_block = attention_bias_local_block if n == 1 else attention_bias_local_2d_block
      causal = bias_of_block(mesh, *space, *memory)
      mask = add(mask, causal, output_shape=Shape([*blocks, *space, *memory]))
    mask = cast(mask, x.dtype)
    if n > 1:  # The memory as one dimension, over which the softmax runs.
      whole = Dimension("_".join(d.name for d in memory), Shape(memory).size)
      k, v, mask = (replace_dimensions(t, memory, whole) for t in (k, v, mask))
    return weights.output(dot_product_attention(q, k, v, mask, is_training=False), x.shape)


def _with_surroundings(
  x: Tensor, blocks: Sequence[Dimension | None], dims: Sequence[Dimension], left_only: bool
) -> Tensor:
  """Gives each block of keys or values those on its left and, unless `left_only`, right.

  For each axis there are the dimension of blocks (None: one block) and that of positions in it.
  """
  # One axis after the other: the later exchanges carry edges and corners along.
  for blocks_dim, dim in zip(blocks, dims):
    if blocks_dim is None:
      x = pad(x, [dim.size, 0 if left_only else dim.size], dim.name)
    else:
      x = (left_halo_exchange if left_only else halo_exchange)(x, blocks_dim, dim, dim.size)
  return x


def local_1d_halo_exchange(
  k: Tensor,
  v: Tensor,
  num_w_blocks: Dimension | None,
  w_dim: Dimension,
  mask_right: bool,
) -> tuple[Tensor, Tensor]:
  """Gives each block of keys and values the block on its left and, without mask, right.

  Args:
    k: keys, a `Tensor` with `w_dim` and, unless it is None, `num_w_blocks`.
    v: values, a `Tensor` with the same of them.
    num_w_blocks: the blocks; may be split. None if there is one block only.
    w_dim: the positions in a block; must not be split.
    mask_right: whether only the block on the left is added.

  Returns:
    k and v with `w_dim` of two or three times the size; zeros where no block is.
  """
  k, v = (_with_surroundings(x, [num_w_blocks], [w_dim], mask_right) for x in (k, v))
  return k, v


def local_2d_halo_exchange(
  k: Tensor,
  v: Tensor,
  num_h_blocks: Dimension | None,
  h_dim: Dimension,
  num_w_blocks: Dimension | None,
  w_dim: Dimension,
  mask_right: bool,
) -> tuple[Tensor, Tensor]:
  """Gives each block of keys and values the blocks around it, also at the corners.

  Args:
    k: keys, a `Tensor` with the four dimensions, unless they are None.
    v: values, a `Tensor` with the same of them.
    num_h_blocks: the rows of blocks; may be split. None if there is one only.
    h_dim: the rows in a block; must not be split.
    num_w_blocks: the columns of blocks; may be split. None if there is one only.
    w_dim: the columns in a block; must not be split.
    mask_right: whether only the blocks above, on the left and between them are added.

  Returns:
    k and v with `h_dim` and `w_dim` of two or three times the size; zeros where no block is.
  """
  blocks, dims = [num_h_blocks, num_w_blocks], [h_dim, w_dim]
  k, v = (_with_surroundings(x, blocks, dims, mask_right) for x in (k, v))
  return k, v


def _outside_mask(
  mesh: Mesh, blocks_dim: Dimension, dim: Dimension, memory_dim: Dimension
) -> Tensor:
  """[blocks, memory]: hides positions beyond the first and the last block."""
  end = blocks_dim.size * dim.size
  # The memory of a block begins one block before it.
  begin = mtf_range(mesh, blocks_dim, tf.int32) * dim.size - dim.size

  def hidden(begin: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
    position += begin
    return (position < 0) | (position >= end)

  return mask_where(hidden, begin, mtf_range(mesh, memory_dim, tf.int32), tf.float32)


def _memory_dim(layer: str, x: Tensor, dim: Dimension, given: Dimension | None) -> Dimension:
  """The dimension that stands for `dim` in the memory."""
  name = f"memory_{dim.name}" if given is None else given.name
  if name in x.shape.dimension_names:
    raise ShapeError(
      f"{layer}: the dimension {dim.name}={dim.size} of {x} cannot be called {name} in the "
      "memory, because the input has a dimension of that name; give another memory dimension"
    )
  return Dimension(name, dim.size)
