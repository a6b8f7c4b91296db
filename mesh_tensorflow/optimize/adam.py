"""Adam with decoupled weight decay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import BELOW_ONE, NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.base import Optimizer, slot_variable
from mesh_tensorflow.optimize.scalars import ScalarLike
from mesh_tensorflow.optimize.update import UpdateOperation, is_float32, subtract
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["AdamWeightDecayOptimizer"]


class AdamUpdateOperation(UpdateOperation):
  """The update of `AdamWeightDecayOptimizer`.

  Slots: m, v; tensors: the gradient and, with decay, the weight; scalars: lr.
  """

  def __init__(
    self,
    variable: Variable,
    slots: Sequence[Variable],
    grad: Tensor,
    lr: float | Tensor,
    *,
    weight_decay_rate: float,
    beta_1: float,
    beta_2: float,
    epsilon: float,
  ):
    tensors = [grad, variable.value] if weight_decay_rate else [grad]
    super().__init__(variable, slots, tensors, [lr], name=f"{variable.full_name}/adam")
    self._weight_decay_rate = weight_decay_rate
    self._beta_1 = beta_1
    self._beta_2 = beta_2
    self._epsilon = epsilon

  def update(
    self, w: tf.Variable, m: tf.Variable, v: tf.Variable, g: tf.Tensor, *args: Any
  ) -> list[Any]:
    lr = args[-1]
    g = tf.cast(g, tf.float32)
    done = []
    if is_float32(w):
      # Powers of 0 switch the bias correction off; what is left is our formula.
      done.append(
        tf.raw_ops.ResourceApplyAdam(
          var=w.handle,
          m=m.handle,
          v=v.handle,
          beta1_power=0.0,
          beta2_power=0.0,
          lr=lr,
          beta1=self._beta_1,
          beta2=self._beta_2,
          epsilon=self._epsilon,
          grad=g,
        )
      )
    else:
      new_m = self._beta_1 * m.read_value() + (1.0 - self._beta_1) * g
      new_v = self._beta_2 * v.read_value() + (1.0 - self._beta_2) * tf.square(g)
      done += [
        subtract(w, lr * new_m / (tf.sqrt(new_v) + self._epsilon)),
        m.assign(new_m, read_value=False),
        v.assign(new_v, read_value=False),
      ]
    # Of the weight before the step: its value is an input.
    if self._weight_decay_rate:
      done.append(subtract(w, (lr * self._weight_decay_rate) * tf.cast(args[0], tf.float32)))
    return done


@gin.configurable(module="mesh_tensorflow.optimize")
@affects("training")
@takes(beta_1=BELOW_ONE, beta_2=BELOW_ONE, epsilon=NOT_BELOW_ZERO)
class AdamWeightDecayOptimizer(Optimizer):
  """Adam (Kingma and Ba, 2015) without bias correction, with decoupled weight decay.

  In float32, with g the gradient and w the weight:

    m <- beta_1 * m + (1 - beta_1) * g
    v <- beta_2 * v + (1 - beta_2) * g ** 2
    w <- w - lr * (m / (sqrt(v) + epsilon) + weight_decay_rate * w)

  Slots: `{weight}/adam_m` and `{weight}/adam_v`, float32, of the weight's shape.

  Args:
    learning_rate: lr, a `ScalarLike`.
    weight_decay_rate: decoupled weight decay, which is multiplied by lr; 0: none.
    beta_1: decay rate of the gradient's moving average m.
    beta_2: decay rate of the squared gradient's moving average v.
    epsilon: added to sqrt(v) in the denominator.
    exclude_from_weight_decay: regular expressions; a weight in whose name one of them is
      found (`re.search`) does not decay.
  """

  @checked
  def __init__(
    self,
    learning_rate: ScalarLike,
    weight_decay_rate: float = 0.0,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-6,
    exclude_from_weight_decay: Sequence[str] | None = None,
  ):
    self.learning_rate = learning_rate
    self.weight_decay_rate = weight_decay_rate
    self.beta_1 = beta_1
    self.beta_2 = beta_2
    self.epsilon = epsilon
    self.exclude_from_weight_decay = exclude_from_weight_decay

  @checked
  def apply_grad(self, grad: CastableTensor | None, var: Variable) -> list[Operation]:
    if not self._has_gradient(grad, var):
      return []
    slots = [
      slot_variable(var, f"{var.full_name}/{name}", var.shape, tf.float32)
      for name in ("adam_m", "adam_v")
    ]
    return [
      AdamUpdateOperation(
        var,
        slots,
        grad,
        self._scalar(self._learning_rate_for(var), var.mesh, "learning_rate"),
        weight_decay_rate=self.weight_decay_rate if self._decays(var) else 0.0,
        beta_1=self.beta_1,
        beta_2=self.beta_2,
        epsilon=self.epsilon,
      )
    ]

  def _learning_rate_for(self, var: Variable) -> ScalarLike:
    del var
    return self.learning_rate

  def _decays(self, var: Variable) -> bool:
    excluded = self.exclude_from_weight_decay or ()
    return bool(self.weight_decay_rate) and not any(re.search(r, var.full_name) for r in excluded)
