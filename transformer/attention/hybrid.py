"""Attention normalized along queries and memory, mixed with attention normalized along memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.layers import us_einsum
from mesh_tensorflow.transformer.attention.dot_product import weights_dropout


def hybrid_attention(
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  context: Any,
  memory_length_dim: mtf.Dimension,
  key_dim: mtf.Dimension,
  value_dim: mtf.Dimension,
  bias: mtf.Tensor | None = None,
  dropout_rate: float = 0.0,
  dropout_broadcast_dims: Sequence[mtf.Dimension] | None = None,
  extra_logit: Any = None,
  *,
  z_loss_coeff: float | None = None,
) -> mtf.Tensor:
  """Doubly normalized attention (Ding et al., 2020) mixed with the usual one.

  The weights are c softmax(log_softmax(logits over queries) over memory) + (1 - c) softmax(logits
  over memory). Variable: `doubly_coeff` [], whose value, limited to [0, 1], is c.

  Args:
    q: `[..., length, ..., key_dim]`.
    k: `[..., memory_length_dim, key_dim]`; its other dims are among those of q.
    v: `[..., memory_length_dim, value_dim]`; its other dims are among those of q.
    context: a `Context`.
    memory_length_dim: the dimension of what is attended to, as long as `length`.
    key_dim: the dimension of products.
    value_dim: the dimension of values.
    bias: added to the products; its dims are among theirs.
    dropout_rate: rate at which weights become 0; the caller says 0 outside training.
    dropout_broadcast_dims: dims along which weights share one dropout mask.
    extra_logit: a number or tensor: the logit of attending to nothing.
    z_loss_coeff: not used; taken because the layers pass it to any attention function.

  Returns:
    The dims of q without key_dim, then value_dim.

  Raises:
    UnsupportedError: q has no dimension `length` of the size of memory_length_dim: in decoding one
      position at a time there are no other queries to normalize over.
  """
  del z_loss_coeff
  query_length = mtf.Dimension("length", memory_length_dim.size)
  if query_length not in q.shape:
    raise errors.UnsupportedError(
      f"hybrid_attention: the queries {q} need the dimension length={memory_length_dim.size}, over "
      "which weights are normalized too; it cannot decode one position at a time"
    )
  output_shape = q.shape - key_dim + value_dim
  shared = [d for d in q.shape if d in k.shape and d != key_dim]
  queries = [d for d in q.shape if d not in k.shape]
  logits = us_einsum(
    [q, k], output_shape=mtf.Shape(shared + queries + [memory_length_dim]), reduced_dims=[key_dim]
  )
  if bias is not None:
    logits += bias
  coefficient = mtf.get_variable(
    q.mesh,
    "doubly_coeff",
    mtf.Shape([]),
    dtype=context.variable_dtype,
    initializer=tf.constant_initializer(0.5),
  )
  # Limited, not a sigmoid: checkpoints hold the coefficient itself. Outside it has no gradient.
  coefficient = mtf.cast(mtf.maximum(mtf.minimum(coefficient, 1.0), 0.0), logits.dtype)
  upper = mtf.softmax(logits, memory_length_dim, extra_logit=extra_logit)
  # The inner one normalizes over queries, the outer one over memory; between them logarithms, so
  # that no exponential overflows.
  doubly = mtf.softmax(
    mtf.log_softmax(logits, query_length), memory_length_dim, extra_logit=extra_logit
  )
  # c doubly + (1 - c) upper, with one product less.
  weights = mtf.cast(upper + (doubly - upper) * coefficient, v.dtype)
  weights = weights_dropout(weights, dropout_rate, dropout_broadcast_dims)
  return mtf.einsum([weights, v], output_shape=output_shape)
