"""The learning rate of a step, from `run.learning_rate_schedule`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


class LearningRate:
  """A schedule, a number or nothing, as the training program and its reports take it.

  Args:
    schedule: a function of `step` (a float32 scalar tf.Tensor), a number, or None.
  """

  def __init__(self, schedule: Any):
    self._schedule = schedule

  def of(self, step: tf.Tensor) -> tf.Tensor:
    """The rate of a step, a float32 scalar; 0 without a schedule: the optimizer has its own."""
    if callable(self._schedule):
      return tf.cast(self._schedule(step=tf.cast(step, tf.float32)), tf.float32)
    return tf.constant(0.0 if self._schedule is None else float(self._schedule), tf.float32)

  def at(self, step: int) -> float | None:
    """The rate of a step, for a report; None without a schedule."""
    if self._schedule is None:
      return None
    # Not of a Python number: TensorFlow keeps the tensors of these, for ever.
    return float(self.of(tf.constant(np.array(step, np.int64))))
