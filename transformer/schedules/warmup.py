"""Schedules that rise linearly, and fall: as a cosine, linearly, with a root, or at the end only.

All are `peak` times a factor that rises from 1 / warm-up at step 0 to 1 at the last step of the
warm-up, and falls to `final_factor`. Lengths are numbers of steps, or fractions of all steps where
they are at most 1. After `total_train_steps` a schedule stays what it is there.

Each depends on the step alone: a training that goes on from a checkpoint has the rates that it
would have had.
"""

from __future__ import annotations

import math

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import FRACTION, NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.schedules.base import MODULE, Step, as_float, as_steps

_SHAPES = ("linear", "sqrt", "cosine")


@gin.configurable(module=MODULE)
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


@gin.configurable(module=MODULE)
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


@gin.configurable(module=MODULE)
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
  at = tf.maximum(as_float(step) + 1.0, start)
  return peak * rising * tf.maximum(final_factor, tf.sqrt(start / at))


@gin.configurable(module=MODULE)
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
  decay_steps = as_steps(decay, total_train_steps)
  start = total_train_steps - decay_steps
  if start < warmup_steps and decay_steps > 0:
    raise ConfigError(
      f"warmup_stable_decay: {warmup_steps:g} steps of warm-up and {decay_steps:g} of decay are "
      f"more than the {total_train_steps} steps of the training"
    )
  p = _progress(step, start, total_train_steps)
  left = {"linear": 1.0 - p, "sqrt": 1.0 - tf.sqrt(p), "cosine": _cosine(p)}[decay_shape]
  return peak * rising * _between(final_factor, left)


def _warmup(step: Step, total_train_steps: int, warmup: float) -> tuple[tf.Tensor, float]:
  """The factor of the rise, and its number of steps."""
  steps = as_steps(warmup, total_train_steps)
  # Not step / steps: the first step of a training would do nothing.
  return tf.minimum(1.0, (as_float(step) + 1.0) / max(1.0, steps)), steps


def _progress(step: Step, start: float, end: float) -> tf.Tensor:
  """Progress from step `start` to step `end`, clipped to 0..1."""
  return tf.clip_by_value((as_float(step) - start) / max(1.0, end - start), 0.0, 1.0)


def _between(lowest: float, share: tf.Tensor) -> tf.Tensor:
  return lowest + (1.0 - lowest) * share


def _cosine(p: tf.Tensor) -> tf.Tensor:
  return 0.5 * (1.0 + tf.cos(math.pi * p))
