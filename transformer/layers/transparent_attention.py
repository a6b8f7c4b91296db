"""Encoder-decoder attention to mixtures of the encoder's layers (Bapna et al., 2018)."""

from __future__ import annotations

from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.layers import unit_scaling_convention
from mesh_tensorflow.transformer.layers.enc_dec_attention import EncDecAttention
from mesh_tensorflow.transformer.models.context import Context


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
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
