"""Multihead attention over a whole sequence.

Vaswani et al., 2017 (arXiv:1706.03762). The factor 1 / sqrt(kv) of the logits lies in
the initial values of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.layers.attention_params import multihead_attention_vars
from mesh_tensorflow.layers.masks import MASKED, rename_length_to_memory_length
from mesh_tensorflow.layers.statistics import compress_mean
from mesh_tensorflow.operations.broadcasting import binary_op_with_broadcasting
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.random import dropout as dropout_fn
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reshape import rename_dimension
from mesh_tensorflow.operations.softmax import softmax
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import FloatTensor, TensorOrScalar
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor

__all__ = [
  "dot_product_attention",
  "multihead_attention",
  "multihead_self_attention_memory_compressed",
]


def dot_product_attention(
  q: FloatTensor,
  k: Tensor,
  v: Tensor,
  mask: TensorOrScalar | None,
  is_training: bool,
  dropout: float | None = 0.0,
  dropout_broadcast_dims: Sequence[Dimension] | None = None,
  extra_logit: TensorOrScalar = None,
) -> Tensor:
  """softmax(q . k + mask) . v, without a scale.

  Args:
    q: queries [..., length_q, depth_k].
    k: keys [..., length_kv, depth_k].
    v: values [..., length_kv, depth_v].
    mask: added to the logits, or None.
    is_training: whether dropout happens.
    dropout: rate, on the attention weights.
    dropout_broadcast_dims: dimensions along which the dropout mask is repeated.
    extra_logit: a number, or a `Tensor` of some dimensions of q: exp of it is added to the
      denominator of the softmax.

  Returns:
    A `Tensor` [..., length_q, depth_v].
  """
  length_kv = k.shape.dims[-2]
  logits = einsum([q, k], output_shape=Shape(q.shape.dims[:-1] + [length_kv]))
  if mask is not None:
    logits += mask
  weights = softmax(logits, length_kv, extra_logit=extra_logit)
  if dropout:
    weights = dropout_fn(
      weights,
      is_training,
      keep_prob=1.0 - dropout,
      noise_shape=weights.shape - dropout_broadcast_dims,
    )
  return einsum([weights, v], output_shape=Shape(q.shape.dims[:-1] + v.shape.dims[-1:]))


def multihead_attention(
  query_antecedent: FloatTensor,
  memory_antecedent: Tensor | None,
  mask: TensorOrScalar | None,
  kv_channels: Dimension,
  heads: Dimension,
  is_training: bool,
  dropout: float | None = 0.0,
  dropout_broadcast_dims: Sequence[Dimension] | None = None,
  master_dtype: tf.DType = tf.float32,
  slice_dtype: tf.DType | None = tf.float32,
  name: str | None = "multihead_attention",
) -> Tensor:
  """Multihead attention with its four projections; variable `{name}/qkvo`.

  Args:
    query_antecedent: [batch..., query_length, io_channels].
    memory_antecedent: [batch..., memory_length, io_channels]; None for self-attention,
      where the dimension of the memory is called `memory_length`.
    mask: added to the logits [batch..., heads, query_length, memory_length], or None.
    kv_channels: dimension of keys and values.
    heads: dimension of the heads.
    is_training: whether dropout happens.
    dropout: rate, on the attention weights.
    dropout_broadcast_dims: dimensions along which the dropout mask is repeated.
    master_dtype: dtype of the variable in checkpoints.
    slice_dtype: dtype in which slices of the variable are kept and updated.
    name: name of the scope.

  Returns:
    A `Tensor` of the shape of `query_antecedent`.

  Raises:
    ShapeError: batch dimensions or channels of query and memory differ.
  """
  *batch_dims, query_length, io_channels = query_antecedent.shape.dims
  with scope.variable_scope(name, default_name="multihead_attention", graph=query_antecedent.graph):
    wq, wk, wv, wo = multihead_attention_vars(
      query_antecedent.mesh,
      heads,
      io_channels,
      kv_channels,
      master_dtype,
      slice_dtype,
      query_antecedent.dtype,
    )
    if memory_antecedent is None:
      memory_antecedent = rename_length_to_memory_length(query_antecedent, query_length.name)
    *memory_batch_dims, memory_length, memory_channels = memory_antecedent.shape.dims
    if memory_batch_dims != batch_dims:
      raise ShapeError(
        f"multihead_attention {name}: query {query_antecedent} and memory {memory_antecedent} must "
        "have the same dimensions before the length"
      )
    if memory_channels != io_channels:
      raise ShapeError(
        f"multihead_attention {name}: query {query_antecedent} and memory {memory_antecedent} must "
        f"have the same last dimension, got {io_channels.name}={io_channels.size} and "
        f"{memory_channels.name}={memory_channels.size}"
      )
    # The memory's length has another name than the queries': the logits need both dimensions.
    q, k, v = _projected(query_antecedent, memory_antecedent, [wq, wk, wv])
    o = dot_product_attention(q, k, v, mask, is_training, dropout, dropout_broadcast_dims)
    return einsum([o, wo], output_shape=query_antecedent.shape)


def _projected(query: Tensor, memory: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
  """Queries, keys and values [batch..., heads, length, kv_channels].

  Args:
    query: [batch..., query_length, io_channels].
    memory: [batch..., memory_length, io_channels].
    weights: those of the three, [heads, io_channels, kv_channels].
  """
  *batch_dims, _, _ = query.shape.dims
  heads, _, kv_channels = weights[0].shape.dims
  return [
    einsum([x, w], output_shape=Shape([*batch_dims, heads, x.shape.dims[-2], kv_channels]))
    for x, w in zip((query, memory, memory), weights)
  ]


def multihead_self_attention_memory_compressed(
  x: FloatTensor,
  mask_right: bool,
  compression_factor: int,
  kv_channels: Dimension,
  heads: Dimension,
  is_training: bool,
  dropout: float | None = 0.0,
  dropout_broadcast_dims: Sequence[Dimension] | None = None,
  master_dtype: tf.DType = tf.float32,
  slice_dtype: tf.DType | None = tf.float32,
  name: str | None = "multihead_attention",
) -> Tensor:
  """Self-attention whose memory is the means of groups of neighbouring positions.

  A query may attend to nothing: an extra logit of 0 takes part in the softmax. With
  `mask_right` the first compression_factor - 1 positions see no group, and give 0.
  Variable `{name}/qkvo`.

  Args:
    x: [batch..., length, io_channels]; the dimension must be called `length`.
    mask_right: a group is visible from its last position on.
    compression_factor: size of a group.
    kv_channels: dimension of keys and values.
    heads: dimension of the heads.
    is_training: whether dropout happens.
    dropout: rate, on the attention weights.
    dropout_broadcast_dims: dimensions along which the dropout mask is repeated.
    master_dtype: dtype of the variable in checkpoints.
    slice_dtype: dtype in which slices of the variable are kept and updated.
    name: name of the scope; None for `compressed_attention`, made unique.

  Returns:
    A `Tensor` of x's shape.

  Raises:
    DimensionError: x has no dimension `length`.
    ShapeError: the factor does not divide the length.
  """
  length = x.shape.get_dim_by_name("length")
  io_channels = x.shape.dims[-1]
  with scope.variable_scope(name, default_name="compressed_attention", graph=x.graph):
    wq, wk, wv, wo = multihead_attention_vars(
      x.mesh, heads, io_channels, kv_channels, master_dtype, slice_dtype, x.dtype
    )
    memory = rename_dimension(
      compress_mean(x, length, compression_factor), length.name, "memory_length"
    )
    memory_length = memory.shape.get_dim_by_name("memory_length")
    q, k, v = _projected(x, memory, [wq, wk, wv])
    mask = None
    if mask_right:
      # The mean of a group knows all its positions: before the last of them it would show the
      # future.
      last = compression_factor - 1
      mask = binary_op_with_broadcasting(
        lambda pos, group: tf.where(
          pos < group * compression_factor + last,
          tf.constant(MASKED, x.dtype),
          tf.constant(0.0, x.dtype),
        ),
        mtf_range(x.mesh, length, tf.int32),
        mtf_range(x.mesh, memory_length, tf.int32),
        output_dtype=x.dtype,
      )
    o = dot_product_attention(
      q, k, v, mask, is_training, dropout, dropout_broadcast_dims, extra_logit=0.0
    )
    return einsum([o, wo], output_shape=x.shape)
