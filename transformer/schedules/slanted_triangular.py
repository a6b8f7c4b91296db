"""The slanted triangular schedule."""

from __future__ import annotations

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import FRACTION, NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.transformer.schedules.base import MODULE, Step, as_float


@gin.configurable(module=MODULE)
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
  step = as_float(step) - start_step
  # p of the paper's equation 3; at its ends the rate is max_learning_rate / ratio.
  rising = step / cut
  falling = 1.0 - (step - cut) / (cut * (1.0 / cut_fraction - 1.0))
  p = tf.where(step < cut, rising, falling)
  return max_learning_rate * (1.0 + p * (ratio - 1.0)) / ratio
