"""Schedules that do not change."""

from __future__ import annotations

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.transformer.schedules.base import MODULE, Step


@gin.configurable(module=MODULE)
@affects("training")
def constant(step: Step, total_train_steps: int, value: float = 1.0) -> float:
  """Always `value`, as it is given."""
  del step, total_train_steps
  return value


@gin.configurable(module=MODULE)
@affects("training")
def constant_learning_rate(
  step: Step, total_train_steps: int, learning_rate: float = gin.REQUIRED
) -> tf.Tensor:
  """Always `learning_rate`; deprecated, see `constant`."""
  del step, total_train_steps
  return tf.cast(learning_rate, tf.float32)
