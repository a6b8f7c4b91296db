"""Attention with projections between heads (Shazeer et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.layers import VarianceScalingInitializer, unit_scaling_convention, us_einsum
from mesh_tensorflow.transformer.attention.dot_product import weights_dropout
from mesh_tensorflow.transformer.layers.enc_dec_attention import (
  AttendsToEncoder,
  enc_dec_attention_bias,
)
from mesh_tensorflow.transformer.layers.self_attention import SelfAttention
from mesh_tensorflow.transformer.models.context import Context

_MODULE = "mesh_tensorflow.transformer.transformer_layers"
_Heads = Sequence[tuple[str, int]]
_PROJECTIONS = ("x2l", "m2l", "x2w", "m2w")


@gin.configurable(module=_MODULE)
@affects(training="dropout_rate dynamic_projections_init_scale")
@takes(
  key_size=COUNT, value_size=COUNT, dropout_rate=BELOW_ONE, relative_attention_num_buckets=COUNT
)
class TalkingHeadsSelfAttention(SelfAttention):
  """Self-attention with projections between heads, before and after the softmax.

  Variables: `q/kernel`, `k/kernel` [d_model, <key heads>, d_k]; `v/kernel` [d_model, <value heads>,
  d_v]; `y/kernel` [<value heads>, d_v, d_model]; `logits/kernel` and `weights/kernel`, between the
  heads, where they differ. The decoding states are keys and values, `[<batch_dims>, memory_length,
  <heads>, d_k or d_v]`, and with "m2l" or "m2w" the inputs `[<batch_dims>, memory_length,
  d_model]`.

  Args:
    key_heads_dims: (name, size) pairs: heads of queries and keys.
    softmax_heads_dims: heads of the softmax.
    value_heads_dims: heads of values.
    key_size: size of a key.
    value_size: size of a value.
    dropout_rate: rate at which attention weights become 0 in training.
    relative_attention_type: None, "bias" or "bias_shared"; see `SelfAttention`.
    relative_attention_num_buckets: see `SelfAttention`.
    dynamic_projections: some of "x2l", "m2l", "x2w", "m2w": what the projections between heads
      are computed from besides, the query's input (x) or the memory's (m), and which one, of the
      logits (l) or of the weights (w).
    dynamic_projections_init_scale: the initial scale of those.

  Raises:
    ConfigError: relative_attention_type or a dynamic projection is not known.
  """

  def __init__(
    self,
    key_heads_dims: _Heads = (("heads", 12),),
    softmax_heads_dims: _Heads = (("heads", 12),),
    value_heads_dims: _Heads = (("heads", 12),),
    key_size: int = 64,
    value_size: int = 64,
    dropout_rate: float = 0.0,
    relative_attention_type: str | None = None,
    relative_attention_num_buckets: int = 32,
    dynamic_projections: Sequence[str] | None = None,
    dynamic_projections_init_scale: float = 1e-2,
  ):
    # The arguments of SelfAttention and their bindings do not hold here.
    check_relative_attention_type(self, relative_attention_type)
    self.key_heads_dims = [mtf.Dimension(*d) for d in key_heads_dims]
    self.softmax_heads_dims = [mtf.Dimension(*d) for d in softmax_heads_dims]
    self.value_heads_dims = [mtf.Dimension(*d) for d in value_heads_dims]
    self.key_dim = mtf.Dimension("d_k", key_size)
    self.value_dim = mtf.Dimension("d_v", value_size)
    self.dropout_rate = dropout_rate
    self.relative_attention_type = relative_attention_type
    self.relative_attention_num_buckets = relative_attention_num_buckets
    self.dynamic_projections = list(dynamic_projections or [])
    self.dynamic_projections_init_scale = dynamic_projections_init_scale
    for name in self.dynamic_projections:
      if name not in _PROJECTIONS:
        raise errors.ConfigError(
          f"{type(self).__name__}.dynamic_projections must be some of {', '.join(_PROJECTIONS)}, "
          f"got {name!r}"
        )

  def _dense(
    self,
    context: Context,
    x: mtf.Tensor,
    reduced_dims: list[mtf.Dimension],
    new_dims: list[mtf.Dimension],
    name: str,
    initializer: Any = None,
  ) -> mtf.Tensor:
    return mtf.layers.dense(
      x,
      new_dims,
      reduced_dims=reduced_dims,
      expert_dims=context.model.ensemble_dims,
      use_bias=False,
      variable_dtype=context.variable_dtype,
      kernel_initializer=initializer,
      name=name,
    )

  def compute_q(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Queries `[..., <key heads>, d_k]` of x, `[..., d_model]`."""
    # The factor key_size ** -0.5 is part of the initial value.
    scale = 1.0 if unit_scaling_convention() else 1.0 / self.key_dim.size
    new_dims = self.key_heads_dims + [self.key_dim]
    initializer = VarianceScalingInitializer(scale=scale)
    return self._dense(context, x, [context.model.model_dim], new_dims, "q", initializer)

  def compute_k(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Keys `[..., <key heads>, d_k]` of x, `[..., d_model]`."""
    new_dims = self.key_heads_dims + [self.key_dim]
    return self._dense(context, x, [context.model.model_dim], new_dims, "k")

  def compute_v(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Values `[..., <value heads>, d_v]` of x, `[..., d_model]`."""
    new_dims = self.value_heads_dims + [self.value_dim]
    return self._dense(context, x, [context.model.model_dim], new_dims, "v")

  def compute_y(self, context: Context, u: mtf.Tensor) -> mtf.Tensor:
    """The output `[..., d_model]` of u, `[..., <value heads>, d_v]`."""
    reduced_dims = self.value_heads_dims + [self.value_dim]
    return self._dense(context, u, reduced_dims, [context.model.model_dim], "y")

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    del losses
    q = self.compute_q(context, x)
    m = self.as_memory(context, x)
    memory = [self.compute_k(context, m), self.compute_v(context, m)]
    if any(name.startswith("m") for name in self.dynamic_projections):
      memory.append(m)
    memory, memory_position = self.with_earlier(context, memory)
    k, v, *inputs = memory
    bias = self.compute_bias(context, memory_position, x, self.softmax_heads_dims, q)
    # While decoding, dynamic projections need the inputs of all positions of memory.
    m = inputs[0] if inputs else m
    memory_length = self.memory_length(context)
    return self.attention_internal(context, x, m, q, k, v, memory_length, bias)

  def attention_internal(
    self,
    context: Context,
    x: mtf.Tensor,
    m: mtf.Tensor,
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    memory_length: mtf.Dimension,
    bias: mtf.Tensor | None,
  ) -> mtf.Tensor:
    """Attention with talking heads.

    Args:
      context: a `Context`.
      x: `[..., d_model]`, what queries are computed from.
      m: `[..., memory_length, d_model]`, what keys and values are computed from.
      q: `[..., <key heads>, d_k]`.
      k: `[..., memory_length, <key heads>, d_k]`.
      v: `[..., memory_length, <value heads>, d_v]`.
      memory_length: the dimension of what is attended to.
      bias: added to the logits, or None.

    Returns:
      `[..., d_model]`.
    """
    queries = [d for d in x.shape.dims[:-1] if d not in k.shape]
    batch = [d for d in x.shape.dims[:-1] if d in k.shape]
    # The heads stand before the lengths, as in the bias and in batched matrix products.
    order = mtf.Shape([*batch, *self.key_heads_dims, *queries, memory_length])
    logits = us_einsum([q, k], output_shape=order, reduced_dims=[self.key_dim])
    sources = {"x": x, "m": m}

    def dynamic(suffix: str) -> list[mtf.Tensor]:
      names = [name for name in _PROJECTIONS if name in self.dynamic_projections]
      return [sources[name[0]] for name in names if name.endswith(suffix)]

    logits = self.talking_heads(
      context, logits, "logits", self.key_heads_dims, self.softmax_heads_dims, dynamic("2l")
    )
    if bias is not None:
      logits += mtf.cast(bias, logits.dtype)
    weights = self.talking_heads(
      context,
      mtf.softmax(logits, memory_length),
      "weights",
      self.softmax_heads_dims,
      self.value_heads_dims,
      dynamic("2w"),
    )
    rate = self.dropout_rate if context.train else 0.0
    weights = weights_dropout(weights, rate, [context.length_dim])
    shape = mtf.Shape(x.shape.dims[:-1] + self.value_heads_dims + [self.value_dim])
    u = mtf.einsum([weights, v], output_shape=shape)
    return self.compute_y(context, u)

  def talking_heads(
    self,
    context: Context,
    inp: mtf.Tensor,
    name: str,
    input_heads_dims: list[mtf.Dimension],
    output_heads_dims: list[mtf.Dimension],
    dynamic_projections_from: list[mtf.Tensor] | None = None,
  ) -> mtf.Tensor:
    """Projects heads to other heads.

    Variables: `{name}/kernel` [shared, removed, added heads], and for the n-th dynamic projection
    `{name}/{name}_dynamic_{n}/kernel` [d_model, shared, removed, added heads].

    Args:
      context: a `Context`.
      inp: a tensor with input_heads_dims.
      name: of the variable scope.
      input_heads_dims: dims of heads.
      output_heads_dims: dims of heads.
      dynamic_projections_from: `[..., d_model]` tensors of which projections are computed that are
        added to the trained one.

    Returns:
      A tensor with output_heads_dims, in the place of input_heads_dims; inp if they are the same.
    """
    shared = [d for d in input_heads_dims if d in output_heads_dims]
    reduced = [d for d in input_heads_dims if d not in output_heads_dims]
    new = [d for d in output_heads_dims if d not in input_heads_dims]
    if not reduced and not new:
      return inp
    expert_dims = context.model.ensemble_dims + shared
    kernel = mtf.layers.get_dense_kernel_weights(
      inp, new, reduced, expert_dims, None, name=name, variable_dtype=context.variable_dtype
    )
    i = next(i for i, d in enumerate(inp.shape) if d in input_heads_dims)
    others = [d for d in inp.shape if d not in input_heads_dims]
    output_shape = mtf.Shape(others[:i] + output_heads_dims + others[i:])
    projections = []
    # By default small: training begins near the projections that are the same for all positions.
    scale = self.dynamic_projections_init_scale / mtf.Shape(reduced).size
    with mtf.variable_scope(name):
      for n, source in enumerate(dynamic_projections_from or []):
        projections.append(
          self._dense(
            context,
            source,
            [context.model.model_dim],
            shared + reduced + new,
            f"{name}_dynamic_{n}",
            VarianceScalingInitializer(scale=scale),
          )
        )
    # Added to a projection, not to its result: kernels are small, results have two lengths.
    if projections:
      projections[0] += kernel
    else:
      projections = [kernel]
    products = [us_einsum([inp, p], output_shape=output_shape) for p in projections]
    result: mtf.Tensor = mtf.add_n(products)
    return result


@gin.configurable(module=_MODULE)
class TalkingHeadsEncDecAttention(AttendsToEncoder, TalkingHeadsSelfAttention):
  """Attention of a decoder to an encoder's output, with projections between heads.

  Args:
    relative_attention_type: None, "bias" or "bias_shared"; see `enc_dec_attention_bias`.
    **kwargs: arguments of `TalkingHeadsSelfAttention`.
  """

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    del losses
    m = context.encoder_output
    if context.mode == "incremental":
      k, v, memory_length = context.get_constant_state()
    else:
      k, v = self.compute_k(context, m), self.compute_v(context, m)
      memory_length = context.encoder_length_dim
      if context.mode == "first_part":
        context.record_constant_state((k, v, memory_length))
    q = self.compute_q(context, x)
    bias = enc_dec_attention_bias(self, context, self.softmax_heads_dims)
    return self.attention_internal(context, x, m, q, k, v, memory_length, bias)


def check_relative_attention_type(layer: Any, relative_attention_type: str | None) -> None:
  """Raises ConfigError for a type that needs queries of one size d_kv."""
  if relative_attention_type not in (None, "bias", "bias_shared"):
    raise errors.ConfigError(
      f'{type(layer).__name__}.relative_attention_type must be None, "bias" or "bias_shared", got '
      f"{relative_attention_type!r}"
    )
