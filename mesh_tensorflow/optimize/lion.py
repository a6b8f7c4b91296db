"""Lion: steps of one size, in the direction of the sign of a momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import BELOW_ONE, NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.base import Optimizer
from mesh_tensorflow.optimize.scalars import ScalarLike, check_at_least, check_below_one
from mesh_tensorflow.optimize.update import UpdateOperation, subtract
from mesh_tensorflow.optimize.weight_decay import WeightDecay
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["LionOptimizer"]


class LionUpdateOperation(UpdateOperation):
  """The update of `LionOptimizer`. Slots: m; tensors: the gradient; scalars: lr."""

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
  ):
    super().__init__(variable, slots, [grad], [lr], name=f"{variable.full_name}/lion")
    self._weight_decay_rate = weight_decay_rate
    self._beta_1 = beta_1
    self._beta_2 = beta_2

  def step(
    self, w: tf.Variable, m: tf.Tensor, g: tf.Tensor, lr: tf.Tensor
  ) -> tuple[list[Any], tf.Tensor]:
    g = tf.cast(g, tf.float32)
    step = tf.sign(self._beta_1 * m + (1.0 - self._beta_1) * g)
    if self._weight_decay_rate:
      step += self._weight_decay_rate * tf.cast(w.read_value(), tf.float32)
    return [subtract(w, lr * step)], self._beta_2 * m + (1.0 - self._beta_2) * g


@gin.configurable(module="mesh_tensorflow.optimize")
@affects("training")
@takes(beta_1=BELOW_ONE, beta_2=BELOW_ONE, weight_decay_rate=NOT_BELOW_ZERO)
class LionOptimizer(Optimizer):
  """Lion (Chen et al., 2023; arXiv:2302.06675).

  In float32, with g the gradient and w the weight:

    w <- w - lr * (sign(beta_1 * m + (1 - beta_1) * g) + weight_decay_rate * w)
    m <- beta_2 * m + (1 - beta_2) * g

  Each element moves by lr. The paper takes rates 3 to 10 times smaller than AdamW's, with
  `weight_decay_rate` larger by the same factor.

  Slot: `{weight}/lion_m`, float32, of the weight's shape: half of the memory of Adam's.

  Args:
    learning_rate: lr, a `ScalarLike`.
    weight_decay_rate: decoupled weight decay, which is multiplied by lr; 0: none.
    beta_1: share of m in the direction of the step; at least 0, below 1.
    beta_2: decay rate of the gradient's moving average m; at least 0, below 1.
    exclude_from_weight_decay: see `AdamWOptimizer`.

  Raises:
    ConfigError: a number is out of its range.
  """

  @checked
  def __init__(
    self,
    learning_rate: ScalarLike,
    weight_decay_rate: float = 0.0,
    beta_1: float = 0.9,
    beta_2: float = 0.99,
    exclude_from_weight_decay: Sequence[str] | None = None,
  ):
    owner = type(self).__name__
    check_at_least(owner, 0, weight_decay_rate=weight_decay_rate)
    check_below_one(owner, beta_1=beta_1, beta_2=beta_2)
    self._learning_rate = learning_rate
    self._beta_1 = beta_1
    self._beta_2 = beta_2
    self._weight_decay = WeightDecay(owner, weight_decay_rate, exclude_from_weight_decay)

  @checked
  def apply_grad(self, grad: CastableTensor | None, var: Variable) -> list[Operation]:
    if not self._has_gradient(grad, var):
      return []
    m = self._slot(var, "/lion_m")
    return [
      LionUpdateOperation(
        var,
        [m],
        grad,
        self._scalar(self._learning_rate, var.mesh, "learning_rate"),
        weight_decay_rate=self._weight_decay.rate_of(var),
        beta_1=self._beta_1,
        beta_2=self._beta_2,
      )
    ]
