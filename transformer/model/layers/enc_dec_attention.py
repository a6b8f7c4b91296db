"""Attention of a decoder to the output of an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.layers import unit_scaling_convention
from mesh_tensorflow.transformer.model import attention
from mesh_tensorflow.transformer.model.attention.bias import compared, relative_bias
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.layers.self_attention import SelfAttention

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

    def of_positions() -> mtf.Tensor:
      return relative_bias(
        layer,
        context,
        relative_position_fn(context),
        heads_dims,
        bidirectional=True,
        name="enc_dec_relative_attention_bias",
      )

    shared = kind == "bias_shared"
    key = ("enc_dec_relative_attention_bias", tuple(heads_dims))
    biases.append(context.cached(key, of_positions) if shared else of_positions())
  return mtf.add_n(biases) if biases else None


def _segment_bias(context: Context) -> mtf.Tensor:
  """-1e9 where decoder and encoder positions are of different sequences."""
  ids, encoder_ids = context.sequence_id, context.encoder_sequence_id

  def compute() -> mtf.Tensor:
    if isinstance(ids, mtf.Tensor):
      visible = compared(mtf.equal, ids, encoder_ids)
    else:
      visible = mtf.equal(encoder_ids, ids)
    return attention.visibility_mask_to_attention_bias(visible, context.activation_dtype)

  return context.cached(("enc_dec_attention_mask", ids, encoder_ids), compute)


def encoder_memory(
  context: Context,
  memory_antecedent: mtf.Tensor,
  keys_and_values: Callable[[mtf.Tensor], list[mtf.Tensor]],
) -> tuple[list[mtf.Tensor], mtf.Dimension]:
  """Keys and values of an encoder's output, and its length: made in prefill, kept for decoding."""
  if context.mode == "incremental":
    *memory, memory_length = context.get_constant_state()
    return memory, memory_length
  memory = keys_and_values(memory_antecedent)
  (memory_length,) = [d for d in memory_antecedent.shape.dims if d.name == "memory_length"]
  if context.mode == "first_part":
    context.record_constant_state((*memory, memory_length))
  return memory, memory_length


@gin.configurable(module=_MODULE)
@affects(training="z_loss_coeff")
def enc_dec_attention(
  self_attention_layer: SelfAttention,
  memory_antecedent: mtf.Tensor,
  context: Context,
  x: mtf.Tensor,
  losses: list[mtf.Tensor] | None,
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
  memory, memory_length = encoder_memory(context, memory_antecedent, params.keys_and_values)
  bias = enc_dec_attention_bias(layer, context, params.query_heads_dims)
  a = attention_fn(
    q,
    memory[0],
    memory[-1],
    memory_length,
    layer.kv_dim,
    layer.kv_dim,
    bias,
    context=context,
    z_loss_coeff=z_loss_coeff,
    **layer.attention_kwargs_from_context(context),
  )
  return layer.output(context, x, params, a, losses)


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

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
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


@gin.configurable(module=_MODULE)
@affects(training="dropout_rate")
@takes(
  layers_per_encoder_module=COUNT,
  layers_per_decoder_module=COUNT,
  encoder_num_modules=COUNT,
  decoder_num_modules=COUNT,
  dropout_rate=BELOW_ONE,
)
class TransparentEncDecAttention(EncDecAttention):
  """Attention of each decoder module to its own mixture of the outputs of the encoder's modules.

  Variable, made by the first such layer of a stack and used by all: `w` [encoder_module_outputs,
  decoder_module_inputs], whose softmax over the first dimension mixes.

  Args:
    layers_per_encoder_module: number of layers of an encoder module.
    layers_per_decoder_module: number of layers of a decoder module.
    encoder_num_modules: number of modules of the encoder; with its embeddings it has one more
      output.
    decoder_num_modules: number of modules of the decoder.
    dropout_rate: rate at which, in training, elements of `w` and attention weights become 0.
    **kwargs: arguments of `EncDecAttention`.
  """

  def __init__(
    self,
    layers_per_encoder_module: int = gin.REQUIRED,
    layers_per_decoder_module: int = gin.REQUIRED,
    encoder_num_modules: int = gin.REQUIRED,
    decoder_num_modules: int = gin.REQUIRED,
    dropout_rate: float = 0.0,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self.layers_per_encoder_module = layers_per_encoder_module
    self.layers_per_decoder_module = layers_per_decoder_module
    self.encoder_num_modules = encoder_num_modules
    self.decoder_num_modules = decoder_num_modules
    self.dropout_rate = dropout_rate

  def _get_memory_antecedent(self, context: Context) -> mtf.Tensor:
    """The mixture of the decoder module that calls.

    Raises:
      ConfigError: the layers and modules do not fit the stacks.
    """
    if context.mode == "incremental":
      # Keys and values are those of the first part; only the dims count.
      return context.encoder_output
    module = context.layer_index // self.layers_per_decoder_module
    if module >= self.decoder_num_modules:
      raise errors.ConfigError(
        f"{type(self).__name__}: layer number {context.layer_index} of the decoder is in module "
        f"{module}, counted from 0 by layers_per_decoder_module = "
        f"{self.layers_per_decoder_module}; set decoder_num_modules (={self.decoder_num_modules}) "
        f"to at least {module + 1}"
      )
    return context.cached(("transparent_attention",), lambda: self._mixtures(context))[module]

  def _mixtures(self, context: Context) -> list[mtf.Tensor]:
    """The memory of each decoder module: a learned mixture of the encoder modules' outputs."""
    outputs = context.encoder_layer_outputs or []
    # The embeddings come first: the paper mixes them in as another module.
    chosen = outputs[:1] + outputs[self.layers_per_encoder_module :: self.layers_per_encoder_module]
    if len(chosen) != self.encoder_num_modules + 1:
      raise errors.ConfigError(
        f"{type(self).__name__}: the encoder has {max(len(outputs) - 1, 0)} layers; with "
        f"layers_per_encoder_module = {self.layers_per_encoder_module} these are not "
        f"encoder_num_modules = {self.encoder_num_modules} modules"
      )
    memory_length = context.encoder_length_dim
    chosen = [_with_memory_length(x, context, memory_length) for x in chosen]
    from_dim = mtf.Dimension("encoder_module_outputs", len(chosen))
    to_dim = mtf.Dimension("decoder_module_inputs", self.decoder_num_modules)
    stddev = 1.0 if unit_scaling_convention() else from_dim.size**-0.5
    w = mtf.get_variable(
      context.mesh,
      "w",
      mtf.Shape([from_dim, to_dim]),
      dtype=context.variable_dtype,
      initializer=tf.random_normal_initializer(stddev=stddev),
    )
    # Dropout before the softmax, so that the weights of a mixture add up to 1 in any case.
    w = mtf.softmax(mtf.dropout(w, context.train, rate=self.dropout_rate), from_dim)
    stacked = mtf.stack(chosen, from_dim.name)
    mixed = mtf.layers.us_einsum(
      [w, stacked], output_shape=mtf.Shape([to_dim, *chosen[0].shape]), reduced_dims=[from_dim]
    )
    modules: list[mtf.Tensor] = mtf.unstack(mixed, to_dim)
    return modules


def _with_memory_length(
  x: mtf.Tensor, context: Context, memory_length: mtf.Dimension
) -> mtf.Tensor:
  """Calls the length dimension of an encoder layer's output `memory_length`."""
  if memory_length in x.shape:
    return x
  (length,) = [d for d in x.shape if d.name == context.length_dim.name]
  return mtf.replace_dimensions(x, length, memory_length)
