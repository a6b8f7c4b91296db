"""Timing signals of the Universal Transformer: which position, and which recurrent step."""

from __future__ import annotations

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.models.context import Context
from mesh_tensorflow.transformer.models.sequence_utils import sinusoid_positional_embedding_weights


def timing_signal_1d(
  context: Context,
  length: mtf.Dimension,
  channels: mtf.Dimension,
  min_timescale: float = 1.0,
  max_timescale: float = 1.0e4,
  start_index: int = 0,
) -> mtf.Tensor:
  """Sinusoids of different wavelengths.

  Args:
    context: a `Context`.
    length: dimension of positions.
    channels: dimension of the vectors, of an even size.
    min_timescale: wavelength of the first, divided by 2 pi.
    max_timescale: wavelength of the last.
    start_index: number of the first position.

  Returns:
    `[length, channels]` of the activation dtype: first all sines, then all cosines.
  """
  # Under another name the dimension is not split over the mesh, and can be cut.
  name = f"_{length.name}"
  table = sinusoid_positional_embedding_weights(
    context.mesh,
    mtf.Dimension(name, start_index + length.size),
    channels,
    context.activation_dtype,
    min_timescale,
    max_timescale,
  )
  if start_index:
    table = mtf.slice(table, start_index, length.size, name)
  return mtf.rename_dimension(table, name, length.name)


def learned_layer_timing_signal(
  context: Context, channels: mtf.Dimension, layer: int, num_layers: int
) -> mtf.Tensor:
  """A trained vector for each recurrent step: variable `layer_embedding` [layer, d_model].

  Args:
    context: a `Context`.
    channels: dimension of the vector.
    layer: number of the step; beyond the table the vector is zero.
    num_layers: number of vectors.

  Returns:
    `[channels]`.
  """
  layer_dim = mtf.Dimension("layer", num_layers)
  table = mtf.get_variable(
    context.mesh,
    "layer_embedding",
    mtf.Shape([layer_dim, channels]),
    dtype=context.variable_dtype,
    initializer=tf.random_normal_initializer(stddev=channels.size**-0.5),
  )
  # With the initial values: vectors of variance 1, as those of tokens.
  scale: float = channels.size**0.5
  return mtf.gather(table, layer, layer_dim) * scale


def sinusoid_layer_timing_signal(
  context: Context, channels: mtf.Dimension, layer: int
) -> mtf.Tensor:
  """A fixed vector for a recurrent step, as that for a position: `[channels]`."""
  layer_dim = mtf.Dimension("_layer", 1)
  signal = timing_signal_1d(context, layer_dim, channels, start_index=layer)
  return mtf.reshape(signal, mtf.Shape([channels]))
