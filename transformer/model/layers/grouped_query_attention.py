"""Self-attention as the decoders of the last years have it."""

from __future__ import annotations

from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.operations.norms import rms_normalize
from mesh_tensorflow.transformer.model.attention.params import attention_heads_dims
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.layers.rotary import Rotary
from mesh_tensorflow.transformer.model.layers.self_attention import (
  LocalSelfAttention,
  SelfAttention,
)
from mesh_tensorflow.transformer.model.sublayers import ones_variable, zeros_variable

_MODULE = "mesh_tensorflow.transformer.transformer_layers"


class QueryKeyOptions(SelfAttention):
  """Mixin: what may be done to queries and keys, and to their products.

  It stands before the kind of self-attention in the list of base classes. Variables besides those
  of the self-attention, with query_key_norm: `q_norm/scale` and `k_norm/scale` [d_kv]; with
  sink_logits: `sink_logits` [<heads of queries>]; with qkv_bias: `q_bias`, `k_bias` and `v_bias`
  [<heads>, d_kv], or `kv_bias`; with output_bias: `o_bias` [d_model]. Those start as zeros.

  Args:
    rotary: a `Rotary`, which turns queries and keys by their positions; or None.
    query_key_norm: whether queries and keys are normalized to a root mean square of 1, times a
      trained scale (Henry et al., 2020, arXiv:2010.04245, with RMS norm), before they are turned.
      Queries are then multiplied by d_kv ** -0.5, also with fold_scaling_into_initializer: a norm
      forgets how small queries started.
    query_key_norm_epsilon: added to the mean square.
    logit_soft_cap: see `attention.attention`.
    num_sinks: how many first positions of a sequence are seen from everywhere (attention sinks).
    sink_logits: whether each head has a trained logit of attending to nothing; see
      `attention.attention`.
    qkv_bias: whether queries, keys and values have biases, added before all else.
    output_bias: whether the result has one.
    **kwargs: arguments of the kind of self-attention.

  Raises:
    ConfigError: rotary or query_key_norm with shared_kv; logit_soft_cap or sink_logits with hybrid
      attention; or num_sinks is negative.
  """

  def __init__(
    self,
    rotary: Rotary | None = None,
    query_key_norm: bool = False,
    query_key_norm_epsilon: float = 1e-6,
    logit_soft_cap: float | None = None,
    *,
    num_sinks: int = 0,
    sink_logits: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.num_sinks = num_sinks
    self.sink_logits = sink_logits
    self.qkv_bias = qkv_bias
    self.output_bias = output_bias
    self.rotary = rotary
    self.query_key_norm = query_key_norm
    self.query_key_norm_epsilon = query_key_norm_epsilon
    self.logit_soft_cap = logit_soft_cap
    if self.shared_kv and (rotary or query_key_norm):
      raise errors.ConfigError(
        f"{type(self).__name__}: with shared_kv keys are the values, which are neither turned nor "
        "normalized; set shared_kv = False, or rotary = None and query_key_norm = False"
      )
    if logit_soft_cap is not None and self.attention_func == "hybrid":
      raise errors.ConfigError(
        f"{type(self).__name__}: hybrid attention has no logit_soft_cap (={logit_soft_cap}); set "
        "one of attention_func and logit_soft_cap to None"
      )
    if sink_logits and self.attention_func == "hybrid":
      raise errors.ConfigError(
        f"{type(self).__name__}: hybrid attention has no sink_logits; set attention_func = None or "
        "sink_logits = False"
      )
    if num_sinks < 0:
      raise errors.ConfigError(
        f"{type(self).__name__}: num_sinks (={num_sinks}) must not be negative"
      )

  def attention_kwargs_from_context(self, context: Context) -> dict[str, Any]:
    """Further arguments of `attention`."""
    kwargs = super().attention_kwargs_from_context(context)
    if self.logit_soft_cap is not None:
      kwargs["logit_soft_cap"] = self.logit_soft_cap
    if self.sink_logits:
      heads, _ = attention_heads_dims(self.num_heads, self.num_memory_heads)
      kwargs["sink_logits"] = self._bias(context, "sink_logits", heads)
    return kwargs

  def positioned(
    self, context: Context, q: mtf.Tensor, memory: list[mtf.Tensor]
  ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
    """Queries and keys with biases, normalized, and turned by their positions."""
    if self.qkv_bias:
      heads, memory_heads = attention_heads_dims(self.num_heads, self.num_memory_heads)
      q = self._plus_bias(context, q, "q_bias", heads + [self.kv_dim])
      names = ["k_bias", "v_bias"] if len(memory) == 2 else ["kv_bias"]
      memory = [
        self._plus_bias(context, m, name, memory_heads + [self.kv_dim])
        for m, name in zip(memory, names)
      ]
    k, *v = memory
    if self.query_key_norm:
      # The norm takes away the scale of the queries, wherever it was: in the weights or a factor.
      q = self._normalized(context, q, "q_norm", self.kv_dim.size**-0.5)
      k = self._normalized(context, k, "k_norm")
    if self.rotary is not None:
      memory_position = context.position
      if context.length_dim not in k.shape:
        memory_position = self.rename_length_to_memory_length(memory_position, context)
      q = self.rotary(context, q, context.position, self.kv_dim)
      # The cache holds keys that are turned: each is turned once, not in each later step.
      k = self.rotary(context, k, memory_position, self.kv_dim)
    return q, [k, *v]

  def layer_output_from_attention_output(
    self, context: Context, attention_output: mtf.Tensor, losses: list[mtf.Tensor] | None
  ) -> mtf.Tensor:
    """The output of attention, with its bias."""
    if self.output_bias:
      attention_output = self._plus_bias(
        context, attention_output, "o_bias", [context.model.model_dim]
      )
    return super().layer_output_from_attention_output(context, attention_output, losses)

  def _bias(self, context: Context, name: str, dims: list[mtf.Dimension]) -> mtf.Tensor:
    return zeros_variable(context, name, mtf.Shape(context.model.ensemble_dims + dims))

  def _plus_bias(
    self, context: Context, x: mtf.Tensor, name: str, dims: list[mtf.Dimension]
  ) -> mtf.Tensor:
    return mtf.add(x, self._bias(context, name, dims), output_shape=x.shape)

  def _normalized(
    self, context: Context, x: mtf.Tensor, name: str, factor: float = 1.0
  ) -> mtf.Tensor:
    with mtf.variable_scope(name):
      shape = mtf.Shape(context.model.ensemble_dims + [self.kv_dim])
      scale = ones_variable(context, "scale", shape)
    if factor != 1.0:
      scale *= factor  # Of few numbers, where x has many.
    return rms_normalize(x, self.kv_dim, self.query_key_norm_epsilon, scale=scale)


@gin.configurable(module=_MODULE)
class GroupedQueryAttention(QueryKeyOptions, SelfAttention):
  """`SelfAttention` with rotary positions, query-key norm, a cap on logits, a window and sinks.

  Each is off by default; then this is `SelfAttention`, variables included. With `num_memory_heads`
  fewer heads of keys and values than of queries, a group of queries shares one (Ainslie et al.,
  2023, arXiv:2305.13245; 1: multi-query attention, Shazeer, 2019, arXiv:1911.02150). Bindings of
  `SelfAttention` hold here too.

  Args:
    rotary: a `Rotary`, which turns queries and keys by their positions; or None.
    query_key_norm: whether queries and keys have a norm; see `QueryKeyOptions`.
    query_key_norm_epsilon: of that norm.
    logit_soft_cap: see `attention.attention`.
    window: how many positions one sees, itself included: position p sees (p - window, p], or
      (p - window, p + window) in a model that is not fully autoregressive; None: all. Decoding
      keeps the keys of all positions; `LocalGroupedQueryAttention` keeps a window of them.
    num_sinks: how many first positions of a sequence are seen from everywhere, though they are
      outside of the window (Xiao et al., 2023, arXiv:2309.17453).
    sink_logits: see `QueryKeyOptions`.
    qkv_bias: see `QueryKeyOptions`.
    output_bias: see `QueryKeyOptions`.
    **kwargs: arguments of `SelfAttention`.

  Raises:
    ConfigError: see `QueryKeyOptions`; window is not positive; num_sinks without window; or window
      together with prompts.
  """

  def __init__(
    self,
    rotary: Rotary | None = None,
    query_key_norm: bool = False,
    query_key_norm_epsilon: float = 1e-6,
    logit_soft_cap: float | None = None,
    window: int | None = None,
    num_sinks: int = 0,
    *,
    sink_logits: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
    **kwargs: Any,
  ):
    super().__init__(
      rotary,
      query_key_norm,
      query_key_norm_epsilon,
      logit_soft_cap,
      num_sinks=num_sinks,
      sink_logits=sink_logits,
      qkv_bias=qkv_bias,
      output_bias=output_bias,
      **kwargs,
    )
    self.window = window
    if (window is not None and window < 1) or (num_sinks and window is None):
      raise errors.ConfigError(
        f"{type(self).__name__}: window (={window}) must be None or at least 1, and num_sinks "
        f"(={num_sinks}) 0 without a window"
      )
    if window is not None and (self.hyperprompt_length_encoder or self.hyperprompt_length_decoder):
      raise errors.ConfigError(
        f"{type(self).__name__}: prompts would be outside of the window (={window}); set window = "
        "None, or both hyperprompt_length_encoder and hyperprompt_length_decoder to None"
      )

  def min_relative_position(self, context: Context) -> int | None:
    """The relative position of the leftmost memory that is seen, but for sinks; or None."""
    return None if self.window is None else 1 - self.window

  def max_relative_position(self, context: Context) -> int | None:
    """The relative position of the rightmost memory that is seen, or None: masks say it."""
    if self.window is None or context.model.fully_autoregressive:
      return None
    return self.window - 1


@gin.configurable(module=_MODULE)
class LocalGroupedQueryAttention(QueryKeyOptions, LocalSelfAttention):
  """`LocalSelfAttention` with rotary positions, query-key norm, a cap on logits, and sinks.

  Work and decoding states grow with the window (`radius`), not with the sequence. Bindings of
  `LocalSelfAttention` hold here too.

  Args:
    rotary: see `GroupedQueryAttention`.
    query_key_norm: see `GroupedQueryAttention`.
    query_key_norm_epsilon: see `GroupedQueryAttention`.
    logit_soft_cap: see `GroupedQueryAttention`.
    num_sinks: see `GroupedQueryAttention`; their keys are kept beside those of the window.
    sink_logits: see `GroupedQueryAttention`.
    qkv_bias: see `GroupedQueryAttention`.
    output_bias: see `GroupedQueryAttention`.
    **kwargs: arguments of `LocalSelfAttention`.

  Raises:
    ConfigError: see `QueryKeyOptions`.
  """
