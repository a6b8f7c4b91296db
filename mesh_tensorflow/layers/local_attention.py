"""Causal self-attention to a window of positions."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import DTypeError, ShapeError
from mesh_tensorflow.layers.attention import dot_product_attention
from mesh_tensorflow.layers.attention_params import cached_dims, multihead_attention_vars
from mesh_tensorflow.layers.masks import MASKED
from mesh_tensorflow.operations.binary import mod
from mesh_tensorflow.operations.broadcasting import binary_op_with_broadcasting
from mesh_tensorflow.operations.comparison import equal
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reshape import replace_dimensions
from mesh_tensorflow.operations.shift import left_halo_exchange
from mesh_tensorflow.operations.where import where
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import FloatTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Mesh, Tensor

__all__ = ["masked_local_attention_1d", "masked_local_attention_1d_incremental"]

_SCOPE = "masked_local_attention_1d"
# Blocks are not made smaller than this for the sake of a smaller window.
_MIN_BLOCK = 128


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
  *batch_dims, length, io_channels = x.shape.dims
  block_size = _block_size(x, length, window_size, length_per_split)
  with scope.variable_scope(name, default_name=_SCOPE, graph=x.graph):
    if params is None:
      params = multihead_attention_vars(
        x.mesh, heads, io_channels, kv_channels, master_dtype, slice_dtype, x.dtype
      )
    wq, wk, wv, wo = _checked_params(x, params)
    whole = Shape([*batch_dims, heads, length, kv_channels])
    q, k, v = (einsum([x, w], output_shape=whole) for w in (wq, wk, wv))
    if return_kv is not None:
      return_kv.extend([k, v])

    # The blocks keep the name of the length, and so its layout; positions within them get names of
    # their own, and queries other ones than keys, or the products would pair equal positions only.
    blocks = Dimension(length.name, length.size // block_size)
    query_block = Dimension("query_block_length", block_size)
    memory_block = Dimension("memory_block_length", block_size)
    # All that one block can see is in the window before it, and in the sequence.
    halo = min(window_size, length.size - block_size)
    q = replace_dimensions(q, length, [blocks, query_block])
    k, v = (
      left_halo_exchange(
        replace_dimensions(t, length, [blocks, memory_block]), blocks, memory_block, halo
      )
      for t in (k, v)
    )
    mask = _window_mask(x.mesh, q.shape.dims[-3:-1], k.shape.dims[-2], window_size, x.dtype)
    o = dot_product_attention(q, k, v, mask, is_training=False)
    o = replace_dimensions(o, [blocks, query_block], length)
    return einsum([o, wo], output_shape=x.shape)


def _checked_params(x: Tensor, params: Sequence[Tensor]) -> Sequence[Tensor]:
  if len(params) != 4:
    raise ShapeError(f"{_SCOPE} of {x}: params must be (wq, wk, wv, wo), got {len(params)}")
  return params


def _block_size(
  x: Tensor, length: Dimension, window_size: int, length_per_split: int | None
) -> int:
  if window_size < 1:
    raise ShapeError(f"{_SCOPE} of {x}: window_size must be at least 1, got {window_size}")
  if length_per_split is None:
    length_per_split = length.size
  if length_per_split < 1 or length.size % length_per_split:
    raise ShapeError(
      f"{_SCOPE} of {x}: length_per_split {length_per_split} must be a divisor of "
      f"{length.name}={length.size}"
    )
  largest = min(max(window_size, _MIN_BLOCK), length_per_split)
  return next(n for n in range(largest, 0, -1) if length_per_split % n == 0)


def _window_mask(
  mesh: Mesh,
  query_dims: Sequence[Dimension],
  memory_dim: Dimension,
  window_size: int,
  dtype: tf.DType,
) -> Tensor:
  """[blocks, query, memory]: hides what is not in the window, or before the sequence."""
  blocks, query_dim = query_dims
  begin = mtf_range(mesh, blocks, tf.int32) * query_dim.size
  query_pos = begin + mtf_range(mesh, query_dim, tf.int32)
  halo = memory_dim.size - query_dim.size
  # The memory begins a halo before its block; before the sequence the halo holds zeros.
  memory_pos = begin + (mtf_range(mesh, memory_dim, tf.int32) - halo)

  def additive(query: tf.Tensor, memory: tf.Tensor) -> tf.Tensor:
    visible = (memory >= 0) & (memory <= query) & (memory > query - window_size)
    return tf.where(visible, tf.constant(0.0, dtype), tf.constant(MASKED, dtype))

  return binary_op_with_broadcasting(
    additive,
    query_pos,
    memory_pos,
    output_shape=Shape([blocks, query_dim, memory_dim]),
    output_dtype=dtype,
  )


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
  *batch_dims, io_channels = x.shape.dims
  heads, window, kv_channels = cached_dims(f"{_SCOPE}_incremental", prev_k)
  with scope.variable_scope(name, default_name=_SCOPE, graph=x.graph):
    if params is None:
      master_dtype = tf.float32 if master_dtype is None else master_dtype
      slice_dtype = master_dtype if slice_dtype is None else slice_dtype
      params = multihead_attention_vars(
        x.mesh, heads, io_channels, kv_channels, master_dtype, slice_dtype, x.dtype
      )
    wq, wk, wv, wo = _checked_params(x, params)
    one_position = Shape([*batch_dims, heads, kv_channels])
    q, new_k, new_v = (einsum([x, w], output_shape=one_position) for w in (wq, wk, wv))
    # The order of the slots does not matter: attention itself knows no positions.
    slots = mtf_range(x.mesh, window, step_num.dtype)
    here = equal(slots, mod(step_num, window.size))
    k = where(here, new_k, prev_k, output_shape=prev_k.shape)
    v = where(here, new_v, prev_v, output_shape=prev_v.shape)
    # Only in the first steps: from step window - 1 on no slot is above it.
    mask = binary_op_with_broadcasting(
      lambda slot, step: tf.where(
        slot > step, tf.constant(MASKED, x.dtype), tf.constant(0.0, x.dtype)
      ),
      slots,
      step_num,
      output_dtype=x.dtype,
    )
    o = dot_product_attention(q, k, v, mask, is_training=False)
    return einsum([o, wo], output_shape=x.shape), k, v
