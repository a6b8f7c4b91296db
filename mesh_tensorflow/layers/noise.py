"""Multiplicative noise: jitter, and dropout whose rate changes during training."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError
from mesh_tensorflow.operations.broadcasting import binary_op_with_broadcasting
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.global_step import get_global_step
from mesh_tensorflow.operations.random import random_uniform
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import NumberTensor
from mesh_tensorflow.program.dimensions import ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Tensor

__all__ = ["annealed_dropout", "multiplicative_jitter"]


def multiplicative_jitter(x: NumberTensor, epsilon: float | None = 1e-2) -> Tensor:
  """Multiplies by random numbers from 1 - epsilon to 1 + epsilon (also when not training).

  Args:
    x: a floating `Tensor`.
    epsilon: with 0, x itself is returned.
  """
  if not epsilon:
    return x
  return x * random_uniform(
    x.mesh, x.shape, minval=1.0 - epsilon, maxval=1.0 + epsilon, dtype=x.dtype
  )


def annealed_dropout(
  x: NumberTensor,
  is_training: bool,
  start_step: float,
  end_step: float,
  init_rate: float | None = None,
  noise_shape: ShapeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Dropout whose rate falls linearly from `init_rate` at start_step to 0 at end_step.

  keep = min(1, (1 - init_rate) + f * init_rate), with f = (step - start_step) /
  (end_step - start_step) and step the global step (`get_global_step`). Before start_step
  the rate is above `init_rate`. What is kept is divided by keep.

  Args:
    x: a floating `Tensor`.
    is_training: if false, x is returned.
    start_step: global step at which the rate is `init_rate`.
    end_step: global step from which on the rate is 0.
    init_rate: dropout rate at start_step. Required.
    noise_shape: dimensions of the mask; it is repeated along the others. x's by default.
    name: name of the scope; `annealed_dropout`, made unique, by default.

  Returns:
    A `Tensor` of x's shape.

  Raises:
    ArgumentError: `init_rate` is missing.
  """
  if init_rate is None:
    raise ArgumentError(f"{name or 'annealed_dropout'} of {x}: init_rate is required")
  if not is_training:
    return x
  noise_shape = x.shape if noise_shape is None else convert_to_shape(noise_shape)

  def keep_probability(step: tf.Tensor) -> tf.Tensor:
    fraction = (tf.cast(step, tf.float32) - start_step) / (end_step - start_step)
    return tf.minimum(1.0, (1.0 - init_rate) + fraction * init_rate)

  def noise(u: tf.Tensor, keep: tf.Tensor) -> tf.Tensor:
    # Long before start_step keep is 0 or less: all is dropped.
    return tf.math.divide_no_nan(tf.cast(u < keep, tf.float32), keep)

  with scope.variable_scope(name, default_name="annealed_dropout", graph=x.graph):
    step = get_global_step(x.mesh)
    keep = cwise(keep_probability, [step], output_dtype=tf.float32, grad_function=0)
    uniform = random_uniform(x.mesh, noise_shape, dtype=tf.float32)
    mask = cast(binary_op_with_broadcasting(noise, uniform, keep), x.dtype)
  return x * mask
