"""The exponential moving average of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.operations.cross_mesh import reshard
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.base import slot_variable
from mesh_tensorflow.optimize.scalars import check_below_one
from mesh_tensorflow.optimize.update import UpdateOperation, update_count
from mesh_tensorflow.program.graph import Operation

__all__ = ["average_weights", "averaged_name"]


class AverageOperation(UpdateOperation):
  """average <- average + (1 - decay) * (w - average). Slots: the average; scalars: decay."""

  def update(self, w: tf.Variable, average: tf.Variable, decay: tf.Tensor) -> list[Any]:
    # Read here, not from the graph: after the update of the weight.
    new = tf.cast(w.read_value(), tf.float32)
    change = (1.0 - decay) * (new - average.read_value())
    return [average.assign_add(change, read_value=False)]


@checked
def averaged_name(name: str) -> str:
  """The name of the moving average of a weight, `{name}/ema`.

  Args:
    name: the full name of the weight.
  """
  return f"{name}/ema"


@checked
def average_weights(variables: Sequence[Variable], decay: float) -> list[Operation]:
  """Updates the moving average of each weight, at this place of the program: after their updates.

  With n = 0, 1, ... the number of averagings before:

    d = min(decay, (1 + n) / (10 + n)), and 0 at first
    average <- d * average + (1 - d) * w

  So it begins with the weights after their first update, and forgets what was early; the bound is
  that of TensorFlow's `ExponentialMovingAverage` with `num_updates`.

  The averages, `{weight}/ema`, are float32 and split as the weights are; for all together there is
  `ema_updates`, an int64 scalar: n.

  Args:
    variables: `Variable` operations, of one mesh.
    decay: at least 0, below 1: the average is over about 1 / (1 - decay) steps.

  Returns:
    The operations.

  Raises:
    ConfigError: `decay` is out of its range.
  """
  check_below_one("average_weights", decay=decay)
  if not variables:
    return []
  count, counting = update_count(variables[0].mesh, "ema_updates")

  def decay_at(n: tf.Tensor) -> tf.Tensor:
    n = tf.cast(n, tf.float32)
    return tf.where(n > 0.0, tf.minimum(decay, (1.0 + n) / (10.0 + n)), 0.0)

  rate = cwise(decay_at, [count], output_dtype=tf.float32, grad_function=0, name="ema_decay")
  averages: list[Operation] = [
    AverageOperation(
      v,
      [slot_variable(v, averaged_name(v.full_name), v.shape, tf.float32)],
      [],
      [reshard(rate, v.mesh)],
      name=f"{v.full_name}/average",
    )
    for v in variables
  ]
  return averages + counting
