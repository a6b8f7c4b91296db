"""Self-attention with synthetic weights (Tay et al., 2020)."""

from __future__ import annotations

from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import (
  BELOW_ONE,
  COUNT,
  COUNT_OR_ZERO,
  affects,
  one_of,
  takes,
)
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.layers.model_attention_params import attention_params
from mesh_tensorflow.transformer.layers.self_attention import SelfAttention
from mesh_tensorflow.transformer.models.context import Context


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
@affects(training="dropout_rate")
@takes(
  num_heads=COUNT,
  num_memory_heads=COUNT_OR_ZERO,
  key_value_size=COUNT,
  dropout_rate=BELOW_ONE,
  relative_attention_num_buckets=COUNT,
  attention_func=one_of(["hybrid"]),
)
class Synthesizer(SelfAttention):
  """Self-attention whose weights are not, or not only, made from queries and keys.

  The mode decides which variables there are: with "plus" queries, keys and values; "dense_minus"
  has queries, and keys that are values; the others have no queries. The decoding states are always
  two, keys and values.

  Args:
    num_heads: see `SelfAttention`.
    num_memory_heads: see `SelfAttention`.
    key_value_size: see `SelfAttention`.
    shared_kv: not used: the mode decides.
    dropout_rate: see `SelfAttention`.
    attention_kwargs: dict of further arguments of `attention.synthetic_attention`.
    relative_attention_type: see `SelfAttention`.
    relative_attention_num_buckets: see `SelfAttention`.
    attention_func: not used.
    combine_dims: not used: variables are matrices.
    keep_query_heads_dims: not used.
    synthesize_mode: see `attention.synthetic_attention`.
    fold_scaling_into_initializer: see `SelfAttention`.
    **kwargs: further arguments of `SelfAttention`.
  """

  def __init__(
    self,
    num_heads: int = 8,
    num_memory_heads: int = 0,
    key_value_size: int = 128,
    shared_kv: bool = False,
    dropout_rate: float = 0.0,
    attention_kwargs: dict[str, Any] | None = None,
    relative_attention_type: str | None = None,
    relative_attention_num_buckets: int = 32,
    attention_func: str | None = None,
    combine_dims: bool = True,
    keep_query_heads_dims: bool = False,
    synthesize_mode: str = "random_plus_alpha",
    fold_scaling_into_initializer: bool = True,
    **kwargs: Any,
  ):
    del shared_kv, combine_dims, keep_query_heads_dims
    # All is given, so that bindings of SelfAttention do not hold for these.
    super().__init__(
      num_heads=num_heads,
      num_memory_heads=num_memory_heads,
      key_value_size=key_value_size,
      shared_kv="plus" not in synthesize_mode,
      dropout_rate=dropout_rate,
      attention_kwargs=attention_kwargs,
      relative_attention_type=relative_attention_type,
      relative_attention_num_buckets=relative_attention_num_buckets,
      attention_func=attention_func,
      combine_dims=True,
      keep_query_heads_dims=False,
      fold_scaling_into_initializer=fold_scaling_into_initializer,
      **kwargs,
    )
    self.synthesize_mode = synthesize_mode
    self.no_query = "plus" not in synthesize_mode and "minus" not in synthesize_mode

  def make_params(self, context: Context) -> attention.AttentionParams:
    """Creates the variables, or finds them."""
    return attention_params(
      context=context,
      kv_dim=self.kv_dim,
      num_heads=self.num_heads,
      num_memory_heads=self.num_memory_heads,
      shared_kv=self.shared_kv,
      no_query=self.no_query,
      fold_scaling_into_initializer=self.fold_scaling_into_initializer,
    )

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    params = self.make_params(context)
    # Without queries only the dims of x count; see `synthetic_attention`.
    q = x if self.no_query else params.compute_q(x)
    m = self.as_memory(context, x)
    if self.shared_kv:
      k = v = params.compute_kv(m)
    else:
      k, v = params.compute_k(m), params.compute_v(m)
    # Two states in any mode, as programs that hold states of this layer count on.
    (k, v), memory_position = self.with_earlier(context, [k, v])
    o = attention.synthetic_attention(
      q,
      k,
      v,
      self.memory_length(context),
      self.kv_dim,
      self.kv_dim,
      bias=self.compute_bias(context, memory_position, x, params.query_heads_dims, q),
      synthesize_mode=self.synthesize_mode,
      context=context,
      **self.attention_kwargs_from_context(context),
    )
    output = params.compute_output(o, output_shape=self.expected_attention_output_shape(x, params))
    return self.layer_output_from_attention_output(context, output, losses)
