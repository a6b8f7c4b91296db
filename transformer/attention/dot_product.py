"""Dot-product attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.layers import us_einsum
from mesh_tensorflow.transformer.attention.sharding import (
  Replacement,
  replace_in,
  split_for_unused_axis,
)


def attention(
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  memory_length_dim: mtf.Dimension,
  key_dim: mtf.Dimension,
  value_dim: mtf.Dimension,
  bias: mtf.Tensor | None = None,
  dropout_rate: float = 0.0,
  dropout_broadcast_dims: Sequence[mtf.Dimension] | None = None,
  extra_logit: Any = None,
  context: Any = None,
  float32_logits: bool = True,
  z_loss_coeff: float | None = None,
  *,
  logit_soft_cap: float | None = None,
  sink_logits: mtf.Tensor | None = None,
) -> mtf.Tensor:
  """softmax(q k + bias) v (Vaswani et al., 2017).

  The products are not divided by sqrt(key_dim.size): see `AttentionParams`.

  Args:
    q: `[..., key_dim]`.
    k: `[..., memory_length_dim, key_dim]`; its other dims are among those of q.
    v: `[..., memory_length_dim, value_dim]`; its other dims are among those of q.
    memory_length_dim: the dimension of what is attended to.
    key_dim: the dimension of products.
    value_dim: the dimension of values.
    bias: added to the products; its dims are among theirs.
    dropout_rate: rate at which weights become 0; the caller says 0 outside training.
    dropout_broadcast_dims: dims along which weights share one dropout mask.
    extra_logit: a number or tensor: the logit of attending to nothing.
    context: a `Context`; needed for `z_loss_coeff`.
    float32_logits: whether products and softmax are computed in float32.
    z_loss_coeff: in training, coefficient of the mean square of the logarithm of the softmax's
      denominator, an auxiliary loss.
    logit_soft_cap: products become cap * tanh(product / cap), less than this, before the bias is
      added (Gemma Team, 2024; arXiv:2408.00118); None: they stay.
    sink_logits: of some dims of q, as its heads: exp of it is one more summand of the softmax's
      denominator, an `extra_logit` that is trained (OpenAI, 2025; arXiv:2508.10925). None: none.

  Returns:
    The dims of q without key_dim, then value_dim.
  """
  output_shape = whole_output_shape = q.shape - key_dim + value_dim
  replacement = split_for_unused_axis(context, q, k, v, bias, [key_dim, value_dim])
  if replacement is not None:
    k_is_v = k is v
    q, k = replace_in(q, replacement), replace_in(k, replacement)
    bias = None if bias is None else replace_in(bias, replacement)
    v = k if k_is_v else replace_in(v, replacement)
    output_shape = q.shape - key_dim + value_dim
    sink_logits = replace_in(sink_logits, replacement)
    if isinstance(extra_logit, mtf.Tensor):
      extra_logit = replace_in(extra_logit, replacement)
  if float32_logits:  # A softmax makes factors of rounding errors of its logits.
    k = mtf.cast(k, tf.float32)
    q = mtf.cast(q, tf.float32)
  shared = [d for d in q.shape if d in k.shape and d != key_dim]
  queries = [d for d in q.shape if d not in k.shape]
  memory = [d for d in k.shape if d not in q.shape]
  if queries:
    # As matrices [shared dims, rows, columns], forward and backward are batched matrix
    # multiplications without further transpositions. One query is no matrix: in incremental
    # decoding the cached keys and values are read as they are.
    q = transposed(q, shared + queries + [key_dim])
    k = transposed(k, shared + memory + [key_dim])
    v = transposed(v, [d for d in shared if d in v.shape] + memory + [value_dim])
  logits = _logits(q, k, mtf.Shape(shared + queries + memory), key_dim, bias, logit_soft_cap)
  if z_loss_coeff is not None and context.train:
    _add_z_loss(logits, memory_length_dim, context, z_loss_coeff, v.dtype, replacement)
  weights = mtf.softmax(logits, memory_length_dim, extra_logit=extra_logit)
  weights = mtf.cast(weights, v.dtype)
  weights = weights_dropout(weights, dropout_rate, dropout_broadcast_dims, replacement)
  outputs = mtf.einsum([weights, v], output_shape=mtf.Shape(shared + queries + [value_dim]))
  if sink_logits is not None:
    outputs *= mtf.cast(_share_of_memory(logits, memory_length_dim, sink_logits), outputs.dtype)
  outputs = transposed(outputs, output_shape.dims)
  return outputs if replacement is None else mtf.reshape(outputs, whole_output_shape)


def _logits(
  q: mtf.Tensor,
  k: mtf.Tensor,
  shape: mtf.Shape,
  key_dim: mtf.Dimension,
  bias: mtf.Tensor | None,
  soft_cap: float | None,
) -> mtf.Tensor:
  """Products of queries and keys, capped, plus the bias."""
  logits: mtf.Tensor = us_einsum([q, k], output_shape=shape, reduced_dims=[key_dim])
  if soft_cap is not None:  # Before the bias, of whose -1e9 it would make -soft_cap.
    logits = mtf.tanh(logits * (1.0 / soft_cap)) * soft_cap
  return logits if bias is None else logits + mtf.cast(bias, logits.dtype)


def _share_of_memory(
  logits: mtf.Tensor, memory_length_dim: mtf.Dimension, sink_logits: mtf.Tensor
) -> mtf.Tensor:
  """Share of the attention weights that memory gets: Z / (Z + exp(sink)), Z = sum exp(logits).

  No gradient flows to an extra logit of `mtf.softmax` (it never did), so it is taken here. Weights
  are multiplied by it after they are summed up: outputs have fewer elements.
  """
  log_z = mtf.reduce_logsumexp(logits, memory_length_dim)
  return mtf.sigmoid(mtf.sub(log_z, mtf.cast(sink_logits, log_z.dtype), output_shape=log_z.shape))


def weights_dropout(
  weights: mtf.Tensor,
  rate: float,
  broadcast_dims: Sequence[mtf.Dimension] | None,
  replacement: Replacement | None = None,
) -> mtf.Tensor:
  """Dropout of attention weights.

  Args:
    weights: any dims.
    rate: rate at which weights become 0; 0 returns them as they are.
    broadcast_dims: dims along which weights share one mask; those that weights lack do not count.
    replacement: what was done to the dims, if `broadcast_dims` are those before it.
  """
  if not rate:
    return weights
  shared = list(broadcast_dims or [])
  if replacement is None:
    return mtf.dropout(weights, is_training=True, rate=rate, noise_shape=weights.shape - shared)
  # Random numbers depend on the dims they are drawn for: as for the layouts that replace none.
  whole, parts = replacement
  dims = [whole if d == parts[0] else d for d in weights.shape if d != parts[1]]
  ones = mtf.ones(weights.mesh, mtf.Shape(dims) - shared, weights.dtype)
  return weights * replace_in(mtf.dropout(ones, is_training=True, rate=rate), replacement)


def transposed(x: mtf.Tensor, dims: list[mtf.Dimension]) -> mtf.Tensor:
  """Transposes x to the given order of dims; x itself if it has it."""
  return x if x.shape.dims == dims else mtf.transpose(x, mtf.Shape(dims))


def _add_z_loss(
  logits: mtf.Tensor,
  memory_length_dim: mtf.Dimension,
  context: Any,
  coefficient: float,
  dtype: tf.DType,
  replacement: Replacement | None,
) -> None:
  """Appends the z-loss of attention to `context.losses`."""
  if context.losses is None:
    return
  # Of what is masked exp(-1e9) is 0: only what is seen counts.
  log_z = mtf.reduce_logsumexp(logits, memory_length_dim)
  z_loss = mtf.square(log_z)
  if isinstance(context.nonpadding, mtf.Tensor):
    z_loss *= mtf.cast(replace_in(context.nonpadding, replacement), z_loss.dtype)
  z_loss = mtf.reduce_mean(z_loss)
  if context.num_microbatches and context.num_microbatches > 1:
    z_loss *= 1.0 / context.num_microbatches
  mtf.scalar_summary("attention_z_loss", z_loss)
  # Of the dtype of the activations, as the losses of other layers are that it is added to.
  context.losses.append(mtf.cast(z_loss * coefficient, dtype))


def visibility_mask_to_attention_bias(visible: mtf.Tensor, dtype: tf.DType) -> mtf.Tensor:
  """0 where `visible`, a bool tensor, is true; -1e9, or half of the least number, elsewhere."""
  # Finite: for a position that sees nothing, as padding may, infinities would make the softmax
  # 0 / 0. So its weights are equal, and what it gets is not used.
  return mtf.cast(mtf.logical_not(visible), dtype) * max(-1e9, float(dtype.min) / 2)
