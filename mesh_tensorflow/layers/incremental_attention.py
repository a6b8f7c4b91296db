"""Multihead attention of one decoding step, with cached keys and values."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.layers.attention import dot_product_attention
from mesh_tensorflow.layers.attention_params import cached_dims, multihead_attention_vars
from mesh_tensorflow.layers.masks import MASKED
from mesh_tensorflow.operations.broadcasting import binary_op_with_broadcasting
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.one_hot import one_hot
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import FloatTensor, TensorOrScalar
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Tensor

__all__ = ["multihead_encdec_attention_incremental", "multihead_self_attention_incremental"]


def multihead_self_attention_incremental(
  query_antecedent: FloatTensor,
  prev_k: Tensor,
  prev_v: Tensor,
  step_num: Tensor,
  master_dtype: tf.DType,
  slice_dtype: tf.DType | None,
  name: str | None = "multihead_attention",
) -> tuple[Tensor, Tensor, Tensor]:
  """One step of causal self-attention; variable `{name}/qkvo` as `multihead_attention`.

  Args:
    query_antecedent: [batch..., io_channels], the position `step_num`.
    prev_k: keys [batch..., heads, memory_length, kv_channels], 0 at `step_num`.
    prev_v: values, likewise.
    step_num: an integer scalar `Tensor`.
    master_dtype: dtype of the variable in checkpoints.
    slice_dtype: dtype in which slices of the variable are kept and updated.
    name: name of the scope.

  Returns:
    The output (of the shape of `query_antecedent`), and keys and values with this
    position's.
  """
  *batch_dims, io_channels = query_antecedent.shape.dims
  heads, memory_length, kv_channels = cached_dims("multihead_self_attention_incremental", prev_k)
  dtype = query_antecedent.dtype
  with scope.variable_scope(name, default_name="multihead_attention", graph=query_antecedent.graph):
    wq, wk, wv, wo = multihead_attention_vars(
      query_antecedent.mesh, heads, io_channels, kv_channels, master_dtype, slice_dtype, dtype
    )
    one_position = Shape([*batch_dims, heads, kv_channels])
    q, new_k, new_v = (
      einsum([query_antecedent, w], output_shape=one_position) for w in (wq, wk, wv)
    )
    # The caches are 0 at this position: adding to them is writing.
    here = one_hot(step_num, memory_length, dtype=dtype)
    k = prev_k + einsum([new_k, here], output_shape=prev_k.shape)
    v = prev_v + einsum([new_v, here], output_shape=prev_v.shape)
    mask = binary_op_with_broadcasting(
      lambda pos, step: tf.where(pos > step, tf.constant(MASKED, dtype), tf.constant(0.0, dtype)),
      mtf_range(query_antecedent.mesh, memory_length, step_num.dtype),
      step_num,
      output_dtype=dtype,
    )
    o = dot_product_attention(q, k, v, mask, is_training=False)
    return einsum([o, wo], output_shape=query_antecedent.shape), k, v


def multihead_encdec_attention_incremental(
  query_antecedent: FloatTensor,
  wq: Tensor,
  wo: Tensor,
  k: Tensor,
  v: Tensor,
  mask: TensorOrScalar | None,
  name: str | None = "multihead_attention",
) -> Tensor:
  """One step of attention to ready keys and values; makes no variables.

  Args:
    query_antecedent: [query_dims..., io_channels].
    wq: [heads, io_channels, kv_channels].
    wo: [heads, io_channels, kv_channels].
    k: [batch..., heads, memory_length, kv_channels].
    v: [batch..., heads, memory_length, kv_channels].
    mask: added to the logits [query_dims..., heads, memory_length], or None.
    name: name of the scope.

  Returns:
    A `Tensor` of the shape of `query_antecedent`.
  """
  if wq.shape.ndims != 3:
    raise ShapeError(
      f"multihead_encdec_attention_incremental: wq must be [heads, io_channels, kv_channels], "
      f"got {wq}"
    )
  heads, _, kv_channels = wq.shape.dims
  query_dims = query_antecedent.shape.dims[:-1]
  with scope.variable_scope(name, default_name="multihead_attention", graph=query_antecedent.graph):
    q = einsum([query_antecedent, wq], output_shape=Shape([*query_dims, heads, kv_channels]))
    o = dot_product_attention(q, k, v, mask, is_training=False)
    return einsum([o, wo], output_shape=query_antecedent.shape)
