"""Learning-rate schedules: functions `f(step, total_train_steps, ...)` of the training step.

`step` is a number or a scalar tf.Tensor; the result is a scalar float32 tf.Tensor unless said
otherwise. Nothing is cut off at 0: a schedule with decay is negative after `total_train_steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import tensorflow as tf

Step = Any
Rate = Any

_MODULE = "mesh_tensorflow.transformer.learning_rate_schedules"


@gin.configurable(module=_MODULE)
def product_learning_rate(
  step: Step,
  total_train_steps: int,
  factors: Sequence[float | Callable[..., Rate]] = gin.REQUIRED,
  offset: int = 0,
) -> Rate:
  """The product of several schedules and numbers.

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    factors: numbers, and schedules `f(step, total_train_steps)`.
    offset: the schedules start at this step.

  Returns:
    A scalar tensor, or a float if all factors are numbers.
  """
  ret = 1.0
  for f in factors:
    ret *= f(step - offset, total_train_steps - offset) if callable(f) else f
  return ret


@gin.configurable(module=_MODULE)
def linear_decay(step: Step, total_train_steps: int, steps_or_fraction: float = 0.1) -> tf.Tensor:
  """1, then linearly to 0 at the end.

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    steps_or_fraction: how long it decays: a number of steps if above 1, else a fraction of
      `total_train_steps`.
  """
  steps = _steps(steps_or_fraction, total_train_steps)
  return tf.minimum(1.0, (total_train_steps - _float(step)) / steps)


@gin.configurable(module=_MODULE)
def linear_warmup(
  step: Step, total_train_steps: int, steps_or_fraction: float = 10000
) -> tf.Tensor:
  """From 0 at step 0 linearly to 1.

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    steps_or_fraction: how long it rises; see `linear_decay`.
  """
  return tf.minimum(1.0, _float(step) / _steps(steps_or_fraction, total_train_steps))


@gin.configurable(module=_MODULE)
def truncated_rsqrt(step: Step, total_train_steps: int, warmup_steps: int = 10000) -> tf.Tensor:
  """max(step, warmup_steps) ** -0.5: constant during the warm-up.

  Args:
    step: the training step.
    total_train_steps: has no influence.
    warmup_steps: the step at which it starts to fall.
  """
  del total_train_steps
  return tf.math.rsqrt(tf.maximum(_float(step), float(warmup_steps)))


@gin.configurable(module=_MODULE)
def constant(step: Step, total_train_steps: int, value: float = 1.0) -> float:
  """Always `value`, as it is given."""
  del step, total_train_steps
  return value


@gin.configurable(module=_MODULE)
def constant_learning_rate(
  step: Step, total_train_steps: int, learning_rate: float = gin.REQUIRED
) -> tf.Tensor:
  """Always `learning_rate`; deprecated, see `constant`."""
  del step, total_train_steps
  return tf.cast(learning_rate, tf.float32)


@gin.configurable(module=_MODULE)
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
  left = (total_train_steps - _float(step)) / float(total_train_steps - offset)
  return initial_lr * tf.minimum(1.0, left)


@gin.configurable(module=_MODULE)
def learning_rate_schedule_noam(
  step: Step,
  total_train_steps: int,
  warmup_steps: int = 10000,
  linear_decay_fraction: float = 0.1,
  multiplier: float = 1.0,
  offset: int = 0,
) -> tf.Tensor:
  """Falls as multiplier * max(step, warmup_steps) ** -0.5, with a linear decay to 0 at the end.

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    warmup_steps: the step (from `offset` on) at which it starts to fall.
    linear_decay_fraction: the part of the training that the decay takes; 0: none.
    multiplier: a factor.
    offset: the schedule starts at this step.
  """
  steps = float(total_train_steps - offset)
  step = _float(step) - offset
  ret = multiplier * tf.math.rsqrt(tf.maximum(step, float(warmup_steps)))
  if linear_decay_fraction > 0:
    ret *= tf.minimum(1.0, (steps - step) / (steps * linear_decay_fraction))
  return ret


@gin.configurable(module=_MODULE)
def slanted_triangular(
  step: Step,
  total_train_steps: int,
  cut_fraction: float = 0.1,
  ratio: float = 32,
  max_learning_rate: float = 0.01,
  start_step: int = 0,
) -> tf.Tensor:
  """A short rise and a long fall (Howard and Ruder, 2018).

  Args:
    step: the training step.
    total_train_steps: number of training steps, of which there must be at least 1/cut_fraction.
    cut_fraction: the part of the training in which it rises.
    ratio: of the highest to the lowest value.
    max_learning_rate: the highest value.
    start_step: the step at which it starts to rise.
  """
  cut = float(int(total_train_steps * cut_fraction))
  step = _float(step) - start_step
  rising = step / cut
  falling = 1.0 - (step - cut) / (cut * (1.0 / cut_fraction - 1.0))
  p = tf.where(step < cut, rising, falling)
  return max_learning_rate * (1.0 + p * (ratio - 1.0)) / ratio


def _float(step: Step) -> tf.Tensor:
  return tf.cast(step, tf.float32)


def _steps(steps_or_fraction: float, total_train_steps: int) -> float:
  """A number of steps, given as such (above 1) or as a fraction of all."""
  if steps_or_fraction > 1:
    return float(steps_or_fraction)
  return float(steps_or_fraction * total_train_steps)
