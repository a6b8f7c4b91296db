"""Learning-rate schedules: functions `f(step, total_train_steps, ...)` of the training step.

`step` is a number or a scalar tf.Tensor; the result is a scalar float32 tf.Tensor unless said
otherwise. Each depends on the step alone: a training that goes on from a checkpoint has the rates
that it would have had. Lengths that may be fractions are numbers of steps where they are above 1,
and fractions of all steps otherwise.

`cosine_decay`, `linear_warmup_decay`, `inverse_square_root` and `warmup_stable_decay` are `peak`
times a factor that rises from 1 / warm-up at step 0 to 1 at the last step of the warm-up, and falls
to `final_factor`. After `total_train_steps` they stay what they are there; of the others, those
with decay are negative then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import (
  COUNT_OR_ZERO,
  FRACTION,
  NOT_BELOW_ZERO,
  affects,
  takes,
)
from mesh_tensorflow.errors import ConfigError

__all__ = [
  "constant",
  "constant_learning_rate",
  "cosine_decay",
  "inverse_square_root",
  "learning_rate_schedule_noam",
  "linear_decay",
  "linear_decay_learning_rate",
  "linear_warmup",
  "linear_warmup_decay",
  "product_learning_rate",
  "slanted_triangular",
  "truncated_rsqrt",
  "warmup_stable_decay",
]

_MODULE = "mesh_tensorflow.transformer.learning_rate_schedules"

# A number, or a scalar tensor: of a step in the traced training loop.
Step = Any
Rate = Any
Schedule = Callable[..., Rate]
_SHAPES = ("linear", "sqrt", "cosine")


@gin.configurable(module=_MODULE)
@affects("training")
def constant(step: Step, total_train_steps: int, value: float = 1.0) -> float:
  """Always `value`, as it is given."""
  del step, total_train_steps
  return value


@gin.configurable(module=_MODULE)
@affects("training")
def constant_learning_rate(
  step: Step, total_train_steps: int, learning_rate: float = gin.REQUIRED
) -> tf.Tensor:
  """Always `learning_rate`; deprecated, see `constant`."""
  del step, total_train_steps
  return tf.cast(learning_rate, tf.float32)


@gin.configurable(module=_MODULE)
@affects("training")
def product_learning_rate(
  step: Step,
  total_train_steps: int,
  factors: Sequence[float | Schedule] = gin.REQUIRED,
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


def bound_schedule(schedule: Schedule, total_train_steps: int) -> Any:
  """A schedule as a function of the step alone; numbers stay numbers.

  Args:
    schedule: a function `(step, total_train_steps)`, a list of such and numbers, or a number.
    total_train_steps: number of training steps.
  """
  if isinstance(schedule, list):
    schedule = functools.partial(product_learning_rate, factors=schedule)
  if callable(schedule):
    return functools.partial(schedule, total_train_steps=total_train_steps)
  return schedule


@gin.configurable(module=_MODULE)
@affects("training")
def linear_decay(step: Step, total_train_steps: int, steps_or_fraction: float = 0.1) -> tf.Tensor:
  """1, then linearly to 0 at the end.

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    steps_or_fraction: how long it decays: a number of steps if above 1, else a fraction of
      `total_train_steps`.
  """
  steps = _as_steps(steps_or_fraction, total_train_steps)
  return tf.minimum(1.0, (total_train_steps - _as_float(step)) / steps)


@gin.configurable(module=_MODULE)
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
  return tf.minimum(1.0, _as_float(step) / _as_steps(steps_or_fraction, total_train_steps))


@gin.configurable(module=_MODULE)
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
  left = (total_train_steps - _as_float(step)) / float(total_train_steps - offset)
  return initial_lr * tf.minimum(1.0, left)


@gin.configurable(module=_MODULE)
@affects("training")
@takes(warmup_steps=COUNT_OR_ZERO)
def truncated_rsqrt(step: Step, total_train_steps: int, warmup_steps: int = 10000) -> tf.Tensor:
  """max(step, warmup_steps) ** -0.5: constant during the warm-up.

  Args:
    step: the training step.
    total_train_steps: has no influence.
    warmup_steps: the step at which it starts to fall.
  """
  del total_train_steps
  return tf.math.rsqrt(tf.maximum(_as_float(step), float(warmup_steps)))


@gin.configurable(module=_MODULE)
@affects("training")
@takes(warmup_steps=COUNT_OR_ZERO, linear_decay_fraction=FRACTION)
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
  step = _as_float(step) - offset
  # The paper's rate rises linearly up to warmup_steps; this one starts at its highest value.
  ret = multiplier * tf.math.rsqrt(tf.maximum(step, float(warmup_steps)))
  if linear_decay_fraction > 0:
    ret *= tf.minimum(1.0, (steps - step) / (steps * linear_decay_fraction))
  return ret


@gin.configurable(module=_MODULE)
@affects("training")
@takes(cut_fraction=FRACTION, max_learning_rate=NOT_BELOW_ZERO)
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
    total_train_steps: number of training steps.
    cut_fraction: the part of the training in which it rises.
    ratio: of the highest to the lowest value.
    max_learning_rate: the highest value.
    start_step: the step at which it starts to rise.
  """
  # A training of less than 1/cut_fraction steps is at its peak at step 1.
  cut = float(max(1, int(total_train_steps * cut_fraction)))
  step = _as_float(step) - start_step
  # p of the paper's equation 3; at its ends the rate is max_learning_rate / ratio.
  rising = step / cut
  falling = 1.0 - (step - cut) / (cut * (1.0 / cut_fraction - 1.0))
  p = tf.where(step < cut, rising, falling)
  return max_learning_rate * (1.0 + p * (ratio - 1.0)) / ratio


@gin.configurable(module=_MODULE)
@affects("training")
@takes(warmup=NOT_BELOW_ZERO, final_factor=FRACTION, peak=NOT_BELOW_ZERO)
def cosine_decay(
  step: Step,
  total_train_steps: int,
  warmup: float = 0.01,
  final_factor: float = 0.1,
  peak: float = 1.0,
) -> tf.Tensor:
  """A linear rise, then half a period of a cosine (Loshchilov and Hutter, 2017; arXiv:1608.03983).

  With p the share of the steps behind the warm-up that are done:
  peak * (final_factor + (1 - final_factor) * (1 + cos(pi * p)) / 2).

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    warmup: length of the rise: a number of steps, or a fraction of all where it is at most 1.
    final_factor: what is left at the end.
    peak: the highest value.
  """
  rising, warmup_steps = _warmup(step, total_train_steps, warmup)
  p = _progress(step, warmup_steps, total_train_steps)
  return peak * rising * _between(final_factor, _cosine(p))


@gin.configurable(module=_MODULE)
@affects("training")
@takes(warmup=NOT_BELOW_ZERO, final_factor=FRACTION, peak=NOT_BELOW_ZERO)
def linear_warmup_decay(
  step: Step,
  total_train_steps: int,
  warmup: float = 0.01,
  final_factor: float = 0.0,
  peak: float = 1.0,
) -> tf.Tensor:
  """A linear rise, then a linear fall: peak * (final_factor + (1 - final_factor) * (1 - p)).

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    warmup: length of the rise: a number of steps, or a fraction of all where it is at most 1.
    final_factor: what is left at the end.
    peak: the highest value.
  """
  rising, warmup_steps = _warmup(step, total_train_steps, warmup)
  p = _progress(step, warmup_steps, total_train_steps)
  return peak * rising * _between(final_factor, 1.0 - p)


@gin.configurable(module=_MODULE)
@affects("training")
@takes(warmup=NOT_BELOW_ZERO, final_factor=FRACTION, peak=NOT_BELOW_ZERO)
def inverse_square_root(
  step: Step,
  total_train_steps: int,
  warmup: float = 0.01,
  final_factor: float = 0.0,
  peak: float = 1.0,
) -> tf.Tensor:
  """A linear rise, then a fall with the root of the step (Vaswani et al., 2017; arXiv:1706.03762).

  peak * max(final_factor, sqrt(w / (step + 1))), with w steps of warm-up. It does not depend on
  the length of the training, if w does not: a training may be made longer.

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    warmup: length of the rise: a number of steps, or a fraction of all where it is at most 1.
    final_factor: it falls no lower.
    peak: the highest value.
  """
  rising, warmup_steps = _warmup(step, total_train_steps, warmup)
  start = max(1.0, warmup_steps)
  at = tf.maximum(_as_float(step) + 1.0, start)
  return peak * rising * tf.maximum(final_factor, tf.sqrt(start / at))


@gin.configurable(module=_MODULE)
@affects("training")
@takes(warmup=NOT_BELOW_ZERO, final_factor=FRACTION, peak=NOT_BELOW_ZERO)
def warmup_stable_decay(
  step: Step,
  total_train_steps: int,
  warmup: float = 0.01,
  decay: float = 0.2,
  final_factor: float = 0.0,
  peak: float = 1.0,
  decay_shape: str = "sqrt",
) -> tf.Tensor:
  """A linear rise, a long time at the peak, and a fall at the end (Hu et al., 2024; MiniCPM).

  arXiv:2404.06395. A training may be made longer from any checkpoint before its fall. With p the
  share of the fall that is done, the factor is final_factor + (1 - final_factor) * f(p), where f is
  1 - sqrt(p) for `decay_shape` "sqrt" (Haegele et al., 2024, arXiv:2405.18392, found it best),
  1 - p for "linear", and (1 + cos(pi * p)) / 2 for "cosine".

  Args:
    step: the training step.
    total_train_steps: number of training steps.
    warmup: length of the rise: a number of steps, or a fraction of all where it is at most 1.
    decay: length of the fall, likewise a number of steps or a fraction.
    final_factor: what is left at the end.
    peak: the highest value.
    decay_shape: see above.

  Raises:
    ConfigError: another shape; or rise and fall are longer than the training.
  """
  if decay_shape not in _SHAPES:
    raise ConfigError(
      f"warmup_stable_decay: decay_shape {decay_shape!r} is not one of {', '.join(_SHAPES)}"
    )
  rising, warmup_steps = _warmup(step, total_train_steps, warmup)
  decay_steps = _as_steps(decay, total_train_steps)
  start = total_train_steps - decay_steps
  if start < warmup_steps and decay_steps > 0:
    raise ConfigError(
      f"warmup_stable_decay: {warmup_steps:g} steps of warm-up and {decay_steps:g} of decay are "
      f"more than the {total_train_steps} steps of the training"
    )
  p = _progress(step, start, total_train_steps)
  left = {"linear": 1.0 - p, "sqrt": 1.0 - tf.sqrt(p), "cosine": _cosine(p)}[decay_shape]
  return peak * rising * _between(final_factor, left)


def _as_float(step: Step) -> tf.Tensor:
  """The step as a float32 scalar."""
  return tf.cast(step, tf.float32)


def _as_steps(steps_or_fraction: float, total_train_steps: int) -> float:
  """A number of steps, given as such (above 1) or as a fraction of all."""
  # 1 is a fraction: all steps.
  if steps_or_fraction > 1:
    return float(steps_or_fraction)
  return float(steps_or_fraction * total_train_steps)


def _warmup(step: Step, total_train_steps: int, warmup: float) -> tuple[tf.Tensor, float]:
  """The factor of the rise, and its number of steps."""
  steps = _as_steps(warmup, total_train_steps)
  # Not step / steps: the first step of a training would do nothing.
  return tf.minimum(1.0, (_as_float(step) + 1.0) / max(1.0, steps)), steps


def _progress(step: Step, start: float, end: float) -> tf.Tensor:
  """Progress from step `start` to step `end`, clipped to 0..1."""
  return tf.clip_by_value((_as_float(step) - start) / max(1.0, end - start), 0.0, 1.0)


def _between(lowest: float, share: tf.Tensor) -> tf.Tensor:
  return lowest + (1.0 - lowest) * share


def _cosine(p: tf.Tensor) -> tf.Tensor:
  return 0.5 * (1.0 + tf.cos(math.pi * p))
