"""The loss scale of a training in float16, so that its gradients are in the range of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import ops
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.control import scalar_summary
from mesh_tensorflow.operations.cross_mesh import reshard
from mesh_tensorflow.operations.variables import Variable, assign
from mesh_tensorflow.program.graph import Mesh, Tensor
from mesh_tensorflow.running.lowering import LOSS_SCALE

# As Keras' LossScaleOptimizer: it begins with 2**15, is halved by each step whose gradients are not
# finite, and doubled after so many in a row whose are.
_FIRST = 2.0**15
_STEPS_TO_GROW = 2000


def is_scaled(settings: TrainerSettings, activation_dtype: tf.DType) -> bool:
  """True if the loss of a training is scaled: in float16, unless the settings say otherwise."""
  if settings.loss_scale == "auto":
    return bool(activation_dtype == tf.float16)
  return settings.loss_scale is not None


def skips(settings: TrainerSettings, activation_dtype: tf.DType) -> bool:
  """True if a step that is not finite updates nothing, and is counted."""
  return settings.nonfinite == "skip" or is_scaled(settings, activation_dtype)


class LossScale:
  """The scale of one training step: a number, or two variables by which it adapts.

  Args:
    settings: of the training; `loss_scale` is its own.
    mesh: of the step.
  """

  def __init__(self, settings: TrainerSettings, mesh: Mesh):
    self._variables: list[Variable] = []
    if isinstance(settings.loss_scale, (int, float)):
      self.value = ops.constant(mesh, float(settings.loss_scale), [], tf.float32)
    else:
      self._variables = [
        _scalar(mesh, LOSS_SCALE, _FIRST),
        _scalar(mesh, f"{LOSS_SCALE}_steps", 0.0),
      ]
      self.value = self._variables[0].value
    scalar_summary("loss_scale", self.value)

  def scaled(
    self, losses: Callable[[dict[str, Tensor], int], Mapping[str, Tensor]]
  ) -> Callable[[dict[str, Tensor], int], dict[str, Tensor]]:
    """A function as `Program.losses`, whose "loss" is scaled, and "reported" is not."""

    def scaled(features: dict[str, Tensor], count: int) -> dict[str, Tensor]:
      outputs = losses(features, count)
      loss = outputs["loss"]
      scaled_loss = ops.cast(loss, tf.float32) * reshard(self.value, loss.mesh)
      return {"reported": loss, **outputs, "loss": scaled_loss}

    return scaled

  def unscaled(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of the loss, float32, from those of the scaled one."""
    inverse = ops.reciprocal(self.value)
    return [
      None if g is None else ops.cast(g, tf.float32) * reshard(inverse, g.mesh) for g in gradients
    ]

  def update(self, bad: Tensor) -> None:
    """Adapts it for the next step.

    Args:
      bad: a float32 scalar: how many elements of loss and gradients were not finite.
    """
    if not self._variables:
      return
    scale, steps = (v.value for v in self._variables)

    def next_steps(steps: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
      return tf.where(bad > 0.0, 0.0, tf.math.floormod(steps + 1.0, _STEPS_TO_GROW))

    def next_scale(scale: tf.Tensor, steps: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
      grown = tf.where(steps + 1.0 >= _STEPS_TO_GROW, 2.0 * scale, scale)
      return tf.where(bad > 0.0, tf.maximum(0.5 * scale, 1.0), grown)

    new = [
      ops.cwise(next_scale, [scale, steps, bad], grad_function=0, name="next_loss_scale"),
      ops.cwise(next_steps, [steps, bad], grad_function=0, name="next_loss_scale_steps"),
    ]
    for variable, value in zip(self._variables, new):
      assign(variable, value)


def _scalar(mesh: Mesh, name: str, value: float) -> Variable:
  found = ops.get_variable(
    mesh, name, [], tf.float32, initializer=initializers.Constant(value), trainable=False
  ).operation
  assert isinstance(found, Variable)
  return found
