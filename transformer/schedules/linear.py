"""Schedules that rise or fall linearly."""

from __future__ import annotations

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.transformer.schedules.base import MODULE, Step, as_float, as_steps


@gin.configurable(module=MODULE)
@affects("training")
def linear_decay(step: Step, total_train_steps: int, steps_or_fraction: float = 0.1) -> tf.Tensor:
  """1, then linearly to 0 at the end.

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    steps_or_fraction: how long it decays: a number of steps if above 1, else a fraction of
      `total_train_steps`.
  """
  steps = as_steps(steps_or_fraction, total_train_steps)
  return tf.minimum(1.0, (total_train_steps - as_float(step)) / steps)


@gin.configurable(module=MODULE)
@affects("training")
def linear_warmup(
  step: Step, total_train_steps: int, steps_or_fraction: float = 10000
) -> tf.Tensor:
  """From 0 at step 0 linearly to 1.

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    steps_or_fraction: how long it rises; see `linear_decay`.
  """
  return tf.minimum(1.0, as_float(step) / as_steps(steps_or_fraction, total_train_steps))


@gin.configurable(module=MODULE)
@affects("training")
@takes(initial_lr=NOT_BELOW_ZERO)
def linear_decay_learning_rate(
  step: Step, total_train_steps: int, initial_lr: float = 0.1, offset: int = 0
) -> tf.Tensor:
  """`initial_lr` up to step `offset`, then linearly to 0 at the end; see `linear_decay`.

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    initial_lr: the value at the start.
    offset: the step at which it starts to fall.
  """
  left = (total_train_steps - as_float(step)) / float(total_train_steps - offset)
  return initial_lr * tf.minimum(1.0, left)
