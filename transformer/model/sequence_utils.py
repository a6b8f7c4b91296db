"""Shifted targets, masks of delimited sequences, sinusoid positions."""

from __future__ import annotations

import logging
import math

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors

_LOG = logging.getLogger("mesh_tensorflow")


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def shift_targets(targets: mtf.Tensor, bos_id: int = 0, eos_id: int = 1) -> mtf.Tensor:
  """Targets shifted right by one, as decoder inputs; deprecated.

  Args:
    targets: int32 `[..., length]`. Use `autoregressive_inputs` with sequence ids instead.
    bos_id: the id at the start, and after each eos_id, of a sequence.
    eos_id: the id that ends a sequence.

  Returns:
    A tensor of the dims of targets: [5,6,1,7,8,1,0,0] with bos_id 7 becomes [7,5,6,7,7,8,0,0].
  """
  _LOG.warning("shift_targets is deprecated; use autoregressive_inputs")
  shifted = mtf.shift(targets, offset=1, dim=targets.shape.dims[-1], wrap=False)
  shifted *= mtf.cast(mtf.not_equal(shifted, eos_id), shifted.dtype)
  if bos_id:
    starts = mtf.logical_and(mtf.equal(shifted, 0), mtf.not_equal(targets, 0))
    shifted += mtf.cast(starts, shifted.dtype) * bos_id
  return shifted


def autoregressive_inputs(targets: mtf.Tensor, sequence_id: mtf.Tensor | None = None) -> mtf.Tensor:
  """Targets shifted right by one: what the model sees when it is to predict them.

  Negative targets, which do not count in the loss, become positive inputs.

  Args:
    targets: int32 `[..., length]`.
    sequence_id: int32 tensor of the same dims, to start each packed sequence with 0.

  Returns:
    A tensor of the dims of targets.
  """
  length_dim = targets.shape.dims[-1]
  inputs = mtf.abs(mtf.shift(targets, offset=1, dim=length_dim, wrap=False))
  if sequence_id is not None:
    # The first input of a sequence must not be the last target of its neighbour in the pack.
    before = mtf.shift(sequence_id, offset=1, dim=length_dim, wrap=False)
    inputs *= mtf.cast(mtf.equal(sequence_id, before), targets.dtype)
  return inputs


def delimited_lm_inputs_mask(ids: mtf.Tensor, eos_id: int = 1) -> mtf.Tensor:
  """Mask of the inputs in "inputs EOS targets EOS inputs EOS ...", their EOS included.

  Args:
    ids: int32 `[..., length]`.
    eos_id: the delimiter.

  Returns:
    A bool tensor of the dims of ids. Padding after complete targets is True.
  """
  ends = mtf.to_int32(mtf.equal(ids, eos_id))
  # Exclusive: an EOS belongs to what it ends.
  return mtf.equal(mtf.mod(mtf.cumsum(ends, ids.shape.dims[-1], exclusive=True), 2), 0)


def round_up_to_multiple(n: int, divisor: int) -> int:
  """The smallest multiple of `divisor` that is at least n."""
  return n + -n % divisor


def sinusoid_positional_embedding_weights(
  mesh: mtf.Mesh,
  max_length_dim: mtf.Dimension,
  model_dim: mtf.Dimension,
  dtype: tf.DType,
  min_timescale: float = 1.0,
  max_timescale: float = 1.0e4,
) -> mtf.Tensor:
  """Sines and cosines of positions (Vaswani et al., 2017).

  With n = model_dim.size / 2, row p is sin(p / t_0), ..., sin(p / t_(n-1)), cos(p / t_0), ...,
  cos(p / t_(n-1)); the timescales t_i rise geometrically from min_timescale to max_timescale.

  Args:
    mesh: an `mtf.Mesh`.
    max_length_dim: dimension of positions.
    model_dim: dimension of vectors.
    dtype: of the result; computed in float32.
    min_timescale: of the first sine.
    max_timescale: of the last sine.

  Returns:
    A tensor `[max_length_dim, model_dim]`.

  Raises:
    DimensionError: the size of model_dim is odd.
  """
  if model_dim.size % 2:
    raise errors.DimensionError(
      f"sinusoid positional embedding: {model_dim.name}={model_dim.size} must be even (half sines, "
      "half cosines)"
    )
  n = model_dim.size // 2
  # n - 1 steps between n timescales, so that the last one is max_timescale itself; the paper's
  # formula divides by n, and ends one step before it.
  log_step = math.log(max_timescale / min_timescale) / max(n - 1, 1)

  # The channel numbers are a tensor too, so that model_dim may be split.
  def rows(position: tf.Tensor, channel: tf.Tensor) -> tf.Tensor:
    i = tf.cast(channel % n, tf.float32)
    angle = tf.cast(position, tf.float32) * (min_timescale * tf.exp(i * -log_step))
    return tf.where(channel < n, tf.sin(angle), tf.cos(angle))

  shape = mtf.Shape([max_length_dim, model_dim])
  position = mtf.broadcast(mtf.range(mesh, max_length_dim, dtype=tf.int32), shape)
  channel = mtf.broadcast(mtf.range(mesh, model_dim, dtype=tf.int32), shape)
  table = mtf.cwise(
    rows, [position, channel], output_dtype=tf.float32, grad_function=0, name="sinusoid"
  )
  return mtf.cast(table, dtype)


def first_positions(x: mtf.Tensor, name: str, size: int) -> mtf.Tensor:
  """The first positions along a dimension, which the layout may split.

  Args:
    x: a tensor.
    name: of the dimension.
    size: how many positions.
  """
  if x.shape.get_dim_by_name(name).size == size:
    return x
  # A slice needs all of the dimension on each processor: under this name it is nowhere split.
  whole = mtf.rename_dimension(x, name, f"_{name}")
  return mtf.rename_dimension(mtf.slice(whole, 0, size, f"_{name}"), f"_{name}", name)
