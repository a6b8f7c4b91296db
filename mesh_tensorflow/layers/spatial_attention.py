"""Self-attention of an image's blocks to themselves and to the blocks around them."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.layers.attention import dot_product_attention
from mesh_tensorflow.layers.attention_params import multihead_attention_vars
from mesh_tensorflow.layers.masks import (
  MASKED,
  attention_bias_local_2d_block,
  attention_bias_local_block,
)
from mesh_tensorflow.operations.binary import add
from mesh_tensorflow.operations.broadcasting import binary_op_with_broadcasting
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reshape import rename_dimension, replace_dimensions
from mesh_tensorflow.operations.shift import halo_exchange, left_halo_exchange
from mesh_tensorflow.operations.slicing import pad
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
]


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
  x, mesh = query_antecedent, query_antecedent.mesh
  _check_rank("local_self_attention_spatial_blocks", x, 3, "[..., num_w_blocks, w, io_channels]")
  *batch_dims, num_w_blocks, w_dim, io_channels = x.shape.dims
  memory = _memory_dim("local_self_attention_spatial_blocks", x, w_dim, memory_w_dim)
  with scope.variable_scope(name, default_name="multihead_attention", graph=x.graph):
    wq, wk, wv, wo = multihead_attention_vars(
      mesh, heads, io_channels, kv_channels, master_dtype, slice_dtype, x.dtype
    )
    outer = [*batch_dims, heads, num_w_blocks]
    antecedent = rename_dimension(x, w_dim.name, memory.name)
    q = einsum([x, wq], output_shape=Shape([*outer, w_dim, kv_channels]))
    k, v = (
      einsum([antecedent, w], output_shape=Shape([*outer, memory, kv_channels])) for w in (wk, wv)
    )
    k, v = local_1d_halo_exchange(k, v, num_w_blocks, memory, mask_right)
    memory = k.shape.dims[-2]
    mask = _outside_mask(mesh, num_w_blocks, w_dim, memory)
    if mask_right:
      mask = add(
        mask,
        attention_bias_local_block(mesh, w_dim, memory),
        output_shape=Shape([num_w_blocks, w_dim, memory]),
      )
    o = dot_product_attention(q, k, v, cast(mask, x.dtype), is_training=False)
    return einsum([o, wo], output_shape=x.shape)


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

  Args:
    query_antecedent: [batch..., num_h_blocks, num_w_blocks, h, w, io_channels].
    kv_channels: dimension of keys and values.
    heads: dimension of the heads.
    is_training: not used.
    memory_h_dim: only its name counts, for the rows of the memory; `memory_` and the name of
      h by default.
    memory_w_dim: the same for the columns; `memory_` and the name of w by default.
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
  layer = "local_2d_self_attention_spatial_blocks"
  x, mesh = query_antecedent, query_antecedent.mesh
  _check_rank(layer, x, 5, "[..., num_h_blocks, num_w_blocks, h, w, io_channels]")
  *batch_dims, num_h_blocks, num_w_blocks, h_dim, w_dim, io_channels = x.shape.dims
  memory_h = _memory_dim(layer, x, h_dim, memory_h_dim)
  memory_w = _memory_dim(layer, x, w_dim, memory_w_dim)
  with scope.variable_scope(name, default_name="multihead_attention", graph=x.graph):
    wq, wk, wv, wo = multihead_attention_vars(
      mesh, heads, io_channels, kv_channels, master_dtype, slice_dtype, x.dtype
    )
    blocks = [num_h_blocks, num_w_blocks]
    outer = [*batch_dims, heads, *blocks]
    antecedent = replace_dimensions(x, [h_dim, w_dim], [memory_h, memory_w])
    q = einsum([x, wq], output_shape=Shape([*outer, h_dim, w_dim, kv_channels]))
    k, v = (
      einsum([antecedent, w], output_shape=Shape([*outer, memory_h, memory_w, kv_channels]))
      for w in (wk, wv)
    )
    k, v = local_2d_halo_exchange(k, v, num_h_blocks, memory_h, num_w_blocks, memory_w, mask_right)
    memory_h, memory_w = k.shape.dims[-3:-1]
    mask = add(
      # A sum of masks hides what either hides: twice MASKED is as good.
      _outside_mask(mesh, num_h_blocks, h_dim, memory_h),
      _outside_mask(mesh, num_w_blocks, w_dim, memory_w),
      output_shape=Shape([*blocks, memory_h, memory_w]),
    )
    if mask_right:
      mask = add(
        mask,
        attention_bias_local_2d_block(mesh, h_dim, w_dim, memory_h, memory_w),
        output_shape=Shape([*blocks, h_dim, w_dim, memory_h, memory_w]),
      )
    # As one dimension, over which the softmax runs.
    memory = Dimension(f"{memory_h.name}_{memory_w.name}", memory_h.size * memory_w.size)
    k, v, mask = (
      replace_dimensions(t, [memory_h, memory_w], memory) for t in (k, v, cast(mask, x.dtype))
    )
    o = dot_product_attention(q, k, v, mask, is_training=False)
    return einsum([o, wo], output_shape=x.shape)


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

  Args:
    query_antecedent: [batch..., num_d_blocks, num_h_blocks, num_w_blocks, d, h, w, io_channels];
      blocks may be split, positions may not.
    kv_channels: dimension of keys and values.
    heads: dimension of the heads.
    is_training: not used.
    master_dtype: dtype of the variable in checkpoints.
    slice_dtype: dtype in which slices of the variable are kept and updated.
    name: name of the scope; `multihead_attention`, made unique, by default.

  Returns:
    A `Tensor` of the shape of `query_antecedent`.

  Raises:
    ShapeError: there are too few dimensions, or a name of a memory dimension is in use.
  """
  del is_training
  layer = "local_3d_self_attention_spatial_blocks"
  x, mesh = query_antecedent, query_antecedent.mesh
  _check_rank(layer, x, 7, "[..., num_d_blocks, num_h_blocks, num_w_blocks, d, h, w, io_channels]")
  batch_dims, blocks, space = x.shape.dims[:-7], x.shape.dims[-7:-4], x.shape.dims[-4:-1]
  io_channels = x.shape.dims[-1]
  memory = [_memory_dim(layer, x, d, None) for d in space]
  with scope.variable_scope(name, default_name="multihead_attention", graph=x.graph):
    wq, wk, wv, wo = multihead_attention_vars(
      mesh, heads, io_channels, kv_channels, master_dtype, slice_dtype, x.dtype
    )
    outer = [*batch_dims, heads, *blocks]
    antecedent = replace_dimensions(x, space, memory)
    q = einsum([x, wq], output_shape=Shape([*outer, *space, kv_channels]))
    k, v = (
      einsum([antecedent, w], output_shape=Shape([*outer, *memory, kv_channels])) for w in (wk, wv)
    )
    masks = []
    # One axis after the other: the later exchanges carry edges and corners along.
    for i, (b, d) in enumerate(zip(blocks, space)):
      k, v = local_1d_halo_exchange(k, v, b, memory[i], False)
      memory[i] = k.shape.dims[len(outer) + i]
      masks.append(_outside_mask(mesh, b, d, memory[i]))
    hidden = Shape([*blocks, *memory])
    mask = add(add(masks[0], masks[1]), masks[2], output_shape=hidden)
    # As one dimension, over which the softmax runs.
    whole = Dimension("_".join(d.name for d in memory), Shape(memory).size)
    k, v, mask = (replace_dimensions(t, memory, whole) for t in (k, v, cast(mask, x.dtype)))
    o = dot_product_attention(q, k, v, mask, is_training=False)
    return einsum([o, wo], output_shape=x.shape)


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
  return (
    _with_neighbours(k, num_w_blocks, w_dim, mask_right),
    _with_neighbours(v, num_w_blocks, w_dim, mask_right),
  )


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
  # One axis after the other: the second exchange carries the corners along.
  k, v = local_1d_halo_exchange(k, v, num_h_blocks, h_dim, mask_right)
  return local_1d_halo_exchange(k, v, num_w_blocks, w_dim, mask_right)


def _with_neighbours(
  x: Tensor, blocks_dim: Dimension | None, dim: Dimension, left_only: bool
) -> Tensor:
  if blocks_dim is None:
    return pad(x, [dim.size, 0 if left_only else dim.size], dim.name)
  exchange = left_halo_exchange if left_only else halo_exchange
  return exchange(x, blocks_dim, dim, dim.size)


def _outside_mask(
  mesh: Mesh, blocks_dim: Dimension, dim: Dimension, memory_dim: Dimension
) -> Tensor:
  """[blocks, memory]: hides positions beyond the first and the last block."""
  end = blocks_dim.size * dim.size
  # The memory of a block begins one block before it.
  begin = mtf_range(mesh, blocks_dim, tf.int32) * dim.size - dim.size

  def additive(begin: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
    position += begin
    return tf.where((position >= 0) & (position < end), 0.0, MASKED)

  return binary_op_with_broadcasting(
    additive, begin, mtf_range(mesh, memory_dim, tf.int32), output_dtype=tf.float32
  )


def _check_rank(layer: str, x: Tensor, rank: int, expected: str) -> None:
  if x.shape.ndims < rank:
    raise ShapeError(f"{layer}: the input must have the dimensions {expected}, got {x}")


def _memory_dim(layer: str, x: Tensor, dim: Dimension, given: Dimension | None) -> Dimension:
  """The dimension that stands for `dim` in the memory."""
  name = f"memory_{dim.name}" if given is None else given.name
  if name in x.shape.dimension_names:
    raise ShapeError(
      f"{layer}: the dimension {dim.name}={dim.size} of {x} cannot be called {name} in the "
      "memory, because the input has a dimension of that name; give another memory dimension"
    )
  return Dimension(name, dim.size)
