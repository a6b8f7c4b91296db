"""Common parts of the schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# The gin names of all schedules are of the module that the archived package had them in.
MODULE = "mesh_tensorflow.transformer.learning_rate_schedules"

# A number, or a scalar tensor: of a step in the traced training loop.
Step = Any
Rate = Any
Schedule = Callable[..., Rate]


def as_float(step: Step) -> tf.Tensor:
  """The step as a float32 scalar."""
  return tf.cast(step, tf.float32)


def as_steps(steps_or_fraction: float, total_train_steps: int) -> float:
  """A number of steps, given as such (above 1) or as a fraction of all."""
  # 1 is a fraction: all steps.
  if steps_or_fraction > 1:
    return float(steps_or_fraction)
  return float(steps_or_fraction * total_train_steps)
