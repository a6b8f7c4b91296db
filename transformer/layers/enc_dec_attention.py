"""Attention of a decoder to the output of an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.layers.relative_position import relative_position_bucket
from mesh_tensorflow.transformer.layers.self_attention import SelfAttention
from mesh_tensorflow.transformer.models.context import Context

_MODULE = "mesh_tensorflow.transformer.transformer_layers"


@gin.configurable(module=_MODULE)
@takes(num_sentinels=COUNT)
def relative_position_spans(context: Context, num_sentinels: int = gin.REQUIRED) -> mtf.Tensor:
  """Relative positions between a decoder and an encoder that sees masked spans.

  Both texts are divided by sentinels, the last ids of the vocabulary. A decoder position is
  taken to stand at the start of the encoder's span of the same number.

  Args:
    context: a `Context` with `encoder_inputs` and `inputs`; in incremental decoding also with
      `decoded_ids`, without which the position stands at the encoder's start.
    num_sentinels: number of sentinel ids.

  Returns:
    An int32 tensor `[<batch_dims>, length, memory_length]`, without length in incremental
    decoding.

  Raises:
    GraphError: the context has no inputs or no encoder_inputs.
  """
  first_sentinel = context.model.input_vocab_size_unpadded - num_sentinels
  encoder_length, length = context.encoder_length_dim, context.length_dim
  encoder_position = mtf.range(context.mesh, encoder_length, tf.int32)
  packed = context.encoder_sequence_id is not None

  def is_sentinel(ids: mtf.Tensor) -> mtf.Tensor:
    return mtf.to_int32(mtf.greater_equal(ids, first_sentinel))

  def spans(number: mtf.Tensor, sequence_id: Any) -> mtf.Tensor:
    if not packed or sequence_id is None:
      return number
    # Larger than any number of sentinels: spans of another packed sequence are all before, or
    # all after.
    offset: mtf.Tensor = sequence_id * max(encoder_length.size, length.size)
    return number + offset

  def encoder_spans() -> mtf.Tensor:
    number = mtf.cumsum(is_sentinel(encoder_inputs), encoder_length)
    return spans(number, context.encoder_sequence_id)

  if context.inputs is None or context.encoder_inputs is None:
    raise errors.GraphError(
      "relative_position_spans: the context has no inputs or no encoder_inputs, among which the "
      "sentinels are sought; make the Context with both, ids of the decoder and of the encoder"
    )
  encoder_inputs = context.encoder_inputs
  if length in context.inputs.shape.dims:
    number = mtf.cumsum(is_sentinel(context.inputs), length)
  elif context.decoded_ids is not None:
    number = _sentinels_before(context.position, is_sentinel(context.decoded_ids), length)
  else:
    # One position, and nothing is known of those before.
    return -encoder_position
  span = spans(number, context.sequence_id)
  encoder_span = context.cached(
    ("encoder_spans", context.encoder_inputs, context.encoder_sequence_id, num_sentinels),
    encoder_spans,
  )
  before = mtf.less(encoder_span, span, output_shape=mtf.Shape(span.shape.dims + [encoder_length]))
  start = mtf.reduce_sum(mtf.to_int32(before), reduced_dim=encoder_length)
  # Query minus memory, where self-attention has memory minus query.
  return mtf.sub(
    start, encoder_position, output_shape=mtf.Shape(start.shape.dims + [encoder_length])
  )


def _sentinels_before(
  position: mtf.Tensor, is_sentinel: mtf.Tensor, length: mtf.Dimension
) -> mtf.Tensor:
  """Number of sentinels among the ids before a position, whose input is the id before it."""
  positions = mtf.range(is_sentinel.mesh, length, tf.int32)
  # Ids from the position on are what is given, or zeros: they are not inputs yet.
  known = mtf.less(positions, position, output_shape=mtf.Shape([*position.shape.dims, length]))
  return mtf.reduce_sum(is_sentinel * mtf.to_int32(known), reduced_dim=length)


@gin.configurable(module=_MODULE)
def enc_dec_attention_bias(
  layer: SelfAttention,
  context: Context,
  heads_dims: list[mtf.Dimension],
  relative_position_fn: Callable[[Context], mtf.Tensor] = relative_position_spans,
) -> mtf.Tensor | None:
  """Bias of the encoder-decoder attention logits: mask and relative position bias.

  Args:
    layer: gives `relative_attention_type` and `relative_attention_num_buckets`.
    context: a `Context`.
    heads_dims: dims of query heads.
    relative_position_fn: makes the relative positions from the context.

  Returns:
    A tensor, or None: -1e9 where the sequence ids differ, plus the relative bias.

  Raises:
    ConfigError: a relative_attention_type other than None, "bias" and "bias_shared".
  """
  kind = layer.relative_attention_type
  if kind not in (None, "bias", "bias_shared"):
    raise errors.ConfigError(
      f'{type(layer).__name__}.relative_attention_type must be None, "bias" or "bias_shared", '
      f"got {kind!r}"
    )
  biases = []
  # The sequence id is a tensor, or 1 while decoding; without it nothing is known to be padding.
  if context.encoder_sequence_id is not None and context.sequence_id:
    biases.append(_segment_bias(context))
  if kind:

    def relative_bias() -> mtf.Tensor:
      return _relative_bias(layer, context, heads_dims, relative_position_fn)

    shared = kind == "bias_shared"
    key = ("enc_dec_relative_attention_bias", tuple(heads_dims))
    biases.append(context.cached(key, relative_bias) if shared else relative_bias())
  return mtf.add_n(biases) if biases else None


def _segment_bias(context: Context) -> mtf.Tensor:
  """-1e9 where decoder and encoder positions are of different sequences."""
  ids, encoder_ids = context.sequence_id, context.encoder_sequence_id

  def compute() -> mtf.Tensor:
    if isinstance(ids, mtf.Tensor):
      dims = ids.shape.dims + [d for d in encoder_ids.shape if d not in ids.shape]
      visible = mtf.equal(ids, encoder_ids, output_shape=mtf.Shape(dims))
    else:
      visible = mtf.equal(encoder_ids, ids)
    return attention.visibility_mask_to_attention_bias(visible, context.activation_dtype)

  return context.cached(("enc_dec_attention_mask", ids, encoder_ids), compute)


def _relative_bias(
  layer: SelfAttention,
  context: Context,
  heads_dims: list[mtf.Dimension],
  relative_position_fn: Callable[[Context], mtf.Tensor],
) -> mtf.Tensor:
  buckets_dim = mtf.Dimension("buckets", layer.relative_attention_num_buckets)
  bucket = relative_position_bucket(
    relative_position_fn(context), bidirectional=True, num_buckets=buckets_dim.size
  )
  values = mtf.get_variable(
    context.mesh,
    "enc_dec_relative_attention_bias",
    mtf.Shape(context.model.ensemble_dims + heads_dims + [buckets_dim]),
    dtype=context.variable_dtype,
  )
  return mtf.gather(values, bucket, buckets_dim)


@gin.configurable(module=_MODULE)
@affects(training="z_loss_coeff")
def enc_dec_attention(
  self_attention_layer: SelfAttention,
  memory_antecedent: mtf.Tensor,
  context: Context,
  x: mtf.Tensor,
  losses: Any,
  attention_fn: Callable[..., mtf.Tensor] = attention.attention,
  z_loss_coeff: float | None = None,
) -> mtf.Tensor:
  """Attention of x to another sequence.

  Args:
    self_attention_layer: gives the variables and the arguments of attention.
    memory_antecedent: `[<batch_dims>, memory_length, d_model]`.
    context: a `Context`.
    x: `[<batch_dims>, length, d_model]`, without length in incremental decoding.
    losses: kept for compatibility.
    attention_fn: as `attention.attention`.
    z_loss_coeff: see `attention.attention`.

  Returns:
    A tensor of the dims of x.

  Raises:
    UnsupportedError: the memory's vectors are not of the model's size.
  """
  model_dim = context.model.model_dim
  memory_input_dim = memory_antecedent.shape[-1]
  if memory_input_dim != model_dim:
    raise errors.UnsupportedError(
      f"enc_dec_attention: {memory_antecedent} must end in the decoder's dimension "
      f"{model_dim.name}={model_dim.size}; encoder and decoder need one d_model"
    )
  layer = self_attention_layer
  params = layer.make_params(context)
  q = params.compute_q(x)
  if context.mode == "incremental":
    # The encoder's output does not change: its keys and values were computed in the first part.
    k, v, memory_length = context.get_constant_state()
  else:
    m = memory_antecedent
    if layer.shared_kv:
      k = v = params.compute_kv(m)
    else:
      k, v = params.compute_k(m), params.compute_v(m)
    (memory_length,) = [d for d in m.shape.dims if d.name == "memory_length"]
    if context.mode == "first_part":
      context.record_constant_state((k, v, memory_length))
  bias = enc_dec_attention_bias(layer, context, params.query_heads_dims)
  a = attention_fn(
    q,
    k,
    v,
    memory_length,
    layer.kv_dim,
    layer.kv_dim,
    bias,
    context=context,
    z_loss_coeff=z_loss_coeff,
    **layer.attention_kwargs_from_context(context),
  )
  output = params.compute_output(a, output_shape=layer.expected_attention_output_shape(x, params))
  return layer.layer_output_from_attention_output(context, output, losses)


class AttendsToEncoder(SelfAttention):
  """Mixin: what a decoder's kinds of attention to the encoder's output have in common.

  It stands before the kind of self-attention in the list of base classes. Passing on
  `relative_attention_type` in any case keeps gin's bindings of that parameter of the self-attention
  apart: positions of two sequences have other relative positions.

  Args:
    relative_attention_type: None, "bias" or "bias_shared"; see `enc_dec_attention_bias`.
    **kwargs: arguments of the kind of self-attention.
  """

  def __init__(self, relative_attention_type: str | None = None, **kwargs: Any):
    super().__init__(relative_attention_type=relative_attention_type, **kwargs)

  def _get_memory_antecedent(self, context: Context) -> mtf.Tensor:
    """The memory antecedent: the encoder's output."""
    return context.encoder_output

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    return enc_dec_attention(
      self,
      self._get_memory_antecedent(context),
      context,
      x,
      losses,
      z_loss_coeff=self.z_loss_coeff,
    )


@gin.configurable(module=_MODULE)
class EncDecAttention(AttendsToEncoder):
  """Attention of a decoder to the output of an encoder.

  Args:
    relative_attention_type: None, "bias" or "bias_shared"; see `enc_dec_attention_bias`.
    **kwargs: arguments of `SelfAttention`, whose gin bindings hold here too.
  """

  @property
  def attention_fn(self) -> Callable[..., mtf.Tensor]:
    """Always `attention.attention`: hybrid attention needs as many queries as keys."""
    return attention.attention
