"""The schedule that falls with the square root of the step."""

from __future__ import annotations

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.transformer.schedules.base import MODULE, Step, as_float


@gin.configurable(module=MODULE)
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
  return tf.math.rsqrt(tf.maximum(as_float(step), float(warmup_steps)))
