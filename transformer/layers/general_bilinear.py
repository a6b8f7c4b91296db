"""Attention by a general bilinear form of vectors of the model's size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.layers import VarianceScalingInitializer, unit_scaling_convention
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.layers.enc_dec_attention import (
  AttendsToEncoder,
  enc_dec_attention_bias,
)
from mesh_tensorflow.transformer.layers.self_attention import SelfAttention
from mesh_tensorflow.transformer.layers.talking_heads import check_relative_attention_type
from mesh_tensorflow.transformer.models.context import Context

_MODULE = "mesh_tensorflow.transformer.transformer_layers"


@gin.configurable(module=_MODULE)
@affects(training="dropout_rate")
@takes(dropout_rate=BELOW_ONE, relative_attention_num_buckets=COUNT)
class GeneralBilinearSelfAttention(SelfAttention):
  """Self-attention whose keys and values are the inputs themselves.

  Variables: `q/kernel` [_d_model, <heads>, d_model] and `y/kernel` [<heads>, _d_model, d_model].
  The decoding state is the inputs, `[<batch_dims>, memory_length, d_model]`.

  Args:
    heads_dims: (name, size) pairs.
    dropout_rate: rate at which attention weights become 0 in training.
    relative_attention_type: None, "bias" or "bias_shared"; see `SelfAttention`.
    relative_attention_num_buckets: see `SelfAttention`.

  Raises:
    ConfigError: relative_attention_type is not known.
  """

  def __init__(
    self,
    heads_dims: Sequence[tuple[str, int]] = (("heads", 12),),
    dropout_rate: float = 0.0,
    relative_attention_type: str | None = None,
    relative_attention_num_buckets: int = 32,
  ):
    # The arguments of SelfAttention and their bindings do not hold here.
    check_relative_attention_type(self, relative_attention_type)
    self.heads_dims = [mtf.Dimension(*d) for d in heads_dims]
    self.dropout_rate = dropout_rate
    self.relative_attention_type = relative_attention_type
    self.relative_attention_num_buckets = relative_attention_num_buckets

  def compute_q(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Queries `[..., <heads>, d_model]` of x, `[..., d_model]`."""
    model_dim = context.model.model_dim
    # Keys are of the size of the model: the factor d_model ** -0.5 of attention, as a variance.
    scale = 1.0 if unit_scaling_convention() else 1.0 / model_dim.size
    return mtf.layers.dense(
      x,
      self.heads_dims + [model_dim],
      reduced_dims=[model_dim],
      expert_dims=context.model.ensemble_dims,
      use_bias=False,
      variable_dtype=context.variable_dtype,
      kernel_initializer=VarianceScalingInitializer(scale=scale),
      name="q",
    )

  def compute_y(self, context: Context, u: mtf.Tensor) -> mtf.Tensor:
    """The output `[..., d_model]` of u, `[..., <heads>, d_model]`."""
    model_dim = context.model.model_dim
    return mtf.layers.dense(
      u,
      [model_dim],
      reduced_dims=self.heads_dims + [model_dim],
      expert_dims=context.model.ensemble_dims,
      use_bias=False,
      variable_dtype=context.variable_dtype,
      name="y",
    )

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    del losses
    q = self.compute_q(context, x)
    # Keys and values are the inputs: a state of d_model in place of heads times d_kv, twice.
    (m,), memory_position = self.with_earlier(context, [self.as_memory(context, x)])
    bias = self.compute_bias(context, memory_position, x, self.heads_dims, q)
    return self.attention_internal(context, q, m, self.memory_length(context), bias)

  def attention_internal(
    self,
    context: Context,
    q: mtf.Tensor,
    m: mtf.Tensor,
    memory_length: mtf.Dimension,
    bias: mtf.Tensor | None,
  ) -> mtf.Tensor:
    """Attention to m itself.

    Args:
      context: a `Context`.
      q: `[..., <heads>, d_model]`.
      m: `[..., memory_length, d_model]`.
      memory_length: the dimension of what is attended to.
      bias: added to the logits, or None.

    Returns:
      `[..., d_model]`.
    """
    model_dim = context.model.model_dim
    u = attention.attention(
      q,
      m,
      m,
      memory_length,
      model_dim,
      model_dim,
      bias,
      dropout_rate=self.dropout_rate if context.train else 0.0,
      dropout_broadcast_dims=[context.length_dim],
      context=context,
      float32_logits=False,
    )
    return self.compute_y(context, u)


@gin.configurable(module=_MODULE)
class GeneralBilinearEncDecAttention(AttendsToEncoder, GeneralBilinearSelfAttention):
  """Attention of a decoder to an encoder's output, by a general bilinear form.

  Args:
    relative_attention_type: None, "bias" or "bias_shared"; see `enc_dec_attention_bias`.
    **kwargs: arguments of `GeneralBilinearSelfAttention`.
  """

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    del losses
    q = self.compute_q(context, x)
    if context.mode == "incremental":
      m, memory_length = context.get_constant_state()
    else:
      m, memory_length = context.encoder_output, context.encoder_length_dim
      if context.mode == "first_part":
        context.record_constant_state((m, memory_length))
    bias = enc_dec_attention_bias(self, context, self.heads_dims)
    return self.attention_internal(context, q, m, memory_length, bias)
