"""Stochastic gradient descent, without and with momentum."""

from __future__ import annotations

from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.base import Optimizer
from mesh_tensorflow.optimize.scalars import ScalarLike
from mesh_tensorflow.optimize.update import UpdateOperation, is_float32, subtract
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.graph import Operation

__all__ = ["MomentumOptimizer", "SgdOptimizer"]

_raw = tf.raw_ops


class SgdUpdateOperation(UpdateOperation):
  """w <- w - lr * g; tensors: g, scalars: lr."""

  def step(self, w: tf.Variable, g: tf.Tensor, lr: tf.Tensor) -> tuple[list[Any]]:
    dtype = g.dtype if g.dtype.is_complex else tf.float32
    return ([subtract(w, tf.cast(lr, dtype) * tf.cast(g, dtype))],)

  def update(self, w: tf.Variable, g: tf.Tensor, lr: tf.Tensor) -> list[Any]:
    if is_float32(w):
      delta = tf.cast(g, tf.float32)
      return [_raw.ResourceApplyGradientDescent(var=w.handle, alpha=lr, delta=delta)]
    return super().update(w, g, lr)


@gin.configurable(module="mesh_tensorflow.optimize")
@affects("training")
class SgdOptimizer(Optimizer):
  """w <- w - lr * g.

  Args:
    learning_rate: lr, a `ScalarLike`.
  """

  takes_complex = True

  @checked
  def __init__(self, learning_rate: ScalarLike):
    self._lr = learning_rate

  @property
  def lr(self) -> ScalarLike:
    """The learning rate."""
    return self._lr

  @checked
  def apply_grad(self, grad: CastableTensor | None, var: Variable) -> list[Operation]:
    if not self._has_gradient(grad, var):
      return []
    lr = self._scalar(self.lr, var.mesh, "learning_rate")
    return [SgdUpdateOperation(var, [], [grad], [lr], name=f"{var.full_name}/sgd")]


class MomentumUpdateOperation(UpdateOperation):
  """v <- lr * g + momentum * v; w <- w - v. Slots: v; tensors: g; scalars: lr, momentum."""

  def step(
    self, w: tf.Variable, v: tf.Tensor, g: tf.Tensor, lr: tf.Tensor, momentum: tf.Tensor
  ) -> tuple[list[Any], tf.Tensor]:
    new_v = tf.cast(lr * tf.cast(g, tf.float32) + momentum * tf.cast(v, tf.float32), v.dtype)
    return [subtract(w, new_v)], new_v

  def update(
    self, w: tf.Variable, v: tf.Variable, g: tf.Tensor, lr: tf.Tensor, momentum: tf.Tensor
  ) -> list[Any]:
    if is_float32(w, v):
      # With a rate of 1 and lr * g as the gradient, v is what the formula says.
      return [
        _raw.ResourceApplyMomentum(
          var=w.handle,
          accum=v.handle,
          lr=1.0,
          grad=lr * tf.cast(g, tf.float32),
          momentum=momentum,
        )
      ]
    return super().update(w, v, g, lr, momentum)


@gin.configurable(module="mesh_tensorflow.optimize")
@affects("training")
class MomentumOptimizer(Optimizer):
  """Heavy ball (Polyak, 1964): v <- lr * g + momentum * v; w <- w - v, with the new v.

  Slot: `{weight}_momentum_v`, of the weight's shape and dtypes.

  Args:
    learning_rate: lr, a `ScalarLike`.
    momentum: a `ScalarLike`.
  """

  @checked
  def __init__(self, learning_rate: ScalarLike, momentum: ScalarLike):
    self._lr = learning_rate
    self._momentum = momentum

  @property
  def lr(self) -> ScalarLike:
    """The learning rate."""
    return self._lr

  @property
  def momentum(self) -> ScalarLike:
    """The momentum, the share of the old step."""
    return self._momentum

  @checked
  def apply_grad(self, grad: CastableTensor | None, var: Variable) -> list[Operation]:
    if not self._has_gradient(grad, var):
      return []
    lr = self._scalar(self.lr, var.mesh, "learning_rate")
    momentum = self._scalar(self.momentum, var.mesh, "momentum")
    v = self._slot(var, "_momentum_v", var.dtype)
    return [
      MomentumUpdateOperation(
        var, [v], [grad], [lr, momentum], name=f"{var.full_name}/sgd_momentum"
      )
    ]
