"""The schedule of the first Transformer (Vaswani et al., 2017; arXiv:1706.03762)."""

from __future__ import annotations

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT_OR_ZERO, FRACTION, affects, takes
from mesh_tensorflow.transformer.schedules.base import MODULE, Step, as_float


@gin.configurable(module=MODULE)
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
  step = as_float(step) - offset
  # The paper's rate rises linearly up to warmup_steps; this one starts at its highest value.
  ret = multiplier * tf.math.rsqrt(tf.maximum(step, float(warmup_steps)))
  if linear_decay_fraction > 0:
    ret *= tf.minimum(1.0, (steps - step) / (steps * linear_decay_fraction))
  return ret
