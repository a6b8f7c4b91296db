"""Adam with decoupled weight decay, without and with bias correction (AdamW)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import BELOW_ONE, NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.numerics import constants
from mesh_tensorflow.operations.binary import multiply
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.base import Optimizer
from mesh_tensorflow.optimize.scalars import ScalarLike, check_at_least, check_below_one
from mesh_tensorflow.optimize.update import (
  UpdateOperation,
  decay,
  is_float32,
  subtract,
  update_count,
)
from mesh_tensorflow.optimize.weight_decay import WeightDecay, found_in
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor

__all__ = ["AdamWOptimizer", "AdamWeightDecayOptimizer"]


class AdamUpdateOperation(UpdateOperation):
  """The update of both optimizers, on the slots `{weight}/adam_m` and `{weight}/adam_v`.

    m <- beta_1 * m + (1 - beta_1) * g
    v <- beta_2 * v + (1 - beta_2) * g ** 2
    w <- w - rate * m / (sqrt(v) + epsilon) - lr * weight_decay_rate * w

  Args:
    variable: the `Variable` of w.
    slots: those of m and v.
    grad: g.
    scalars: lr, rate and epsilon. With the bias corrections, where root is sqrt(1 - beta_2 ** t),
      rate is lr * root / (1 - beta_1 ** t), and epsilon is the optimizer's times root; without, lr
      and the optimizer's.
    name: suffix to the name of the weight.
    weight_decay_rate: 0 for none.
    beta_1: as above.
    beta_2: as above.
    decay_last: subtracts the decay, of the weight before the step, after the step, not before it:
      floating numbers round differently.
  """

  def __init__(
    self,
    variable: Variable,
    slots: Sequence[Variable],
    grad: Tensor,
    scalars: Sequence[float | Tensor],
    name: str,
    *,
    weight_decay_rate: float,
    beta_1: float,
    beta_2: float,
    decay_last: bool = False,
  ):
    tensors = [grad, variable.value] if weight_decay_rate and decay_last else [grad]
    super().__init__(variable, slots, tensors, scalars, name=f"{variable.full_name}/{name}")
    self._weight_decay_rate = weight_decay_rate
    self._beta_1 = beta_1
    self._beta_2 = beta_2

  def step(
    self, w: tf.Variable, m: tf.Tensor, v: tf.Tensor, g: tf.Tensor, *args: Any
  ) -> tuple[list[Any], tf.Tensor, tf.Tensor]:
    *old_weight, lr, rate, epsilon = args
    g = tf.cast(g, tf.float32)
    new_m = self._beta_1 * m + (1.0 - self._beta_1) * g
    new_v = self._beta_2 * v + (1.0 - self._beta_2) * tf.square(g)
    # m_hat / (sqrt(v_hat) + epsilon), with the corrections on the side of the scalars.
    delta = rate * new_m / (tf.sqrt(new_v) + epsilon)
    if self._weight_decay_rate and not old_weight:
      # One difference: each is rounded to the dtype of the weight.
      delta += (lr * self._weight_decay_rate) * tf.cast(w.read_value(), tf.float32)
    return [subtract(w, delta), *self._decay(w, old_weight, lr)], new_m, new_v

  def update(
    self, w: tf.Variable, m: tf.Variable, v: tf.Variable, g: tf.Tensor, *args: Any
  ) -> list[Any]:
    if not is_float32(w):
      return super().update(w, m, v, g, *args)
    *old_weight, lr, rate, epsilon = args
    done = []
    if self._weight_decay_rate and not old_weight:
      done = [decay(w, lr * self._weight_decay_rate)]
    # Powers of 0 switch the operation's own correction off: ours is in rate and epsilon, so that
    # epsilon is added to the corrected root, as in the formula.
    done.append(
      tf.raw_ops.ResourceApplyAdam(
        var=w.handle,
        m=m.handle,
        v=v.handle,
        beta1_power=_float32(0.0),
        beta2_power=_float32(0.0),
        lr=_float32(rate),
        beta1=_float32(self._beta_1),
        beta2=_float32(self._beta_2),
        epsilon=_float32(epsilon),
        grad=tf.cast(g, tf.float32),
      )
    )
    return [*done, *self._decay(w, old_weight, lr)]

  def _decay(self, w: tf.Variable, old_weight: Sequence[tf.Tensor], lr: tf.Tensor) -> list[Any]:
    """With `decay_last` the decay, of the weight before the step: its value is an input."""
    return [
      subtract(w, (lr * self._weight_decay_rate) * tf.cast(x, tf.float32)) for x in old_weight
    ]


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
    slots = [self._slot(var, "/adam_m"), self._slot(var, "/adam_v", nonnegative=True)]
    lr = self._scalar(self._learning_rate_for(var), var.mesh, "learning_rate")
    return [
      AdamUpdateOperation(
        var,
        slots,
        grad,
        [lr, lr, self.epsilon],
        "adam",
        weight_decay_rate=self.weight_decay_rate if self._decays(var) else 0.0,
        beta_1=self.beta_1,
        beta_2=self.beta_2,
        decay_last=True,
      )
    ]

  def _learning_rate_for(self, var: Variable | None) -> ScalarLike:
    return self.learning_rate

  def _decays(self, var: Variable) -> bool:
    excluded = found_in(self.exclude_from_weight_decay or (), var)
    return bool(self.weight_decay_rate) and not excluded


@gin.configurable(module="mesh_tensorflow.optimize")
@affects("training")
@takes(beta_1=BELOW_ONE, beta_2=BELOW_ONE, epsilon=NOT_BELOW_ZERO, weight_decay_rate=NOT_BELOW_ZERO)
class AdamWOptimizer(Optimizer):
  """AdamW (Loshchilov and Hutter, 2019; arXiv:1711.05101), as PyTorch has it.

  In float32, with g the gradient, w the weight and t = 1, 2, ... the number of the update:

    m <- beta_1 * m + (1 - beta_1) * g
    v <- beta_2 * v + (1 - beta_2) * g ** 2
    w <- w - lr * weight_decay_rate * w
           - lr * (m / (1 - beta_1 ** t)) / (sqrt(v / (1 - beta_2 ** t)) + epsilon)

  The decay is decoupled from the gradient and multiplied by the learning rate, schedule
  included, as in PyTorch and Optax; the paper multiplies it by the schedule alone, so a
  weight decay of the paper's is `weight_decay_rate` times the highest rate. In contrast
  `AdamWeightDecayOptimizer` has no bias correction, and decays all weights by default.

  Slots: `{weight}/adam_m` and `{weight}/adam_v`, float32, of the weight's shape; and for all
  together `adam_updates`, an int64 scalar: t - 1.

  Args:
    learning_rate: lr, a `ScalarLike`.
    weight_decay_rate: decoupled weight decay, which is multiplied by lr; 0: none.
    beta_1: decay rate of the gradient's moving average m; at least 0, below 1.
    beta_2: decay rate of the squared gradient's moving average v; at least 0, below 1.
    epsilon: added to the square root in the denominator; at least 0.
    bias_correction: if false, the two denominators 1 - beta ** t are 1, and there is no
      `adam_updates`.
    exclude_from_weight_decay: regular expressions; a weight in whose name one of them is
      found (`re.search`) does not decay. By default biases and the scales of norms:
      "bias$", "scale$", "sink_logits$" and "(rezero|fixup_scale)_weight$"; [] for none.

  Raises:
    ConfigError: a number is out of its range.
  """

  @checked
  def __init__(
    self,
    learning_rate: ScalarLike,
    weight_decay_rate: float = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    bias_correction: bool = True,
    exclude_from_weight_decay: Sequence[str] | None = None,
  ):
    owner = type(self).__name__
    check_at_least(owner, 0, weight_decay_rate=weight_decay_rate, epsilon=epsilon)
    check_below_one(owner, beta_1=beta_1, beta_2=beta_2)
    self._learning_rate = learning_rate
    # As float32, in which the averages are taken: 1 - 0.999 is another number there, by its fifth
    # digit, and a correction by the powers of the exact beta would miss it in the first steps.
    self._beta_1 = float(np.float32(beta_1))
    self._beta_2 = float(np.float32(beta_2))
    self._epsilon = epsilon
    self._bias_correction = bias_correction
    self._weight_decay = WeightDecay(owner, weight_decay_rate, exclude_from_weight_decay)

  @checked
  def apply_grad(self, grad: CastableTensor | None, var: Variable) -> list[Operation]:
    if not self._has_gradient(grad, var):
      return []
    slots = [self._slot(var, "/adam_m"), self._slot(var, "/adam_v", nonnegative=True)]
    scalars, counting = self._scalars(var.mesh)
    update = AdamUpdateOperation(
      var,
      slots,
      grad,
      scalars,
      "adamw",
      weight_decay_rate=self._weight_decay.rate_of(var),
      beta_1=self._beta_1,
      beta_2=self._beta_2,
    )
    return [update, *counting]

  def _scalars(self, mesh: Mesh) -> tuple[list[float | Tensor], list[Operation]]:
    """The scalars of the update, and the operations that count it."""
    lr = self._scalar(self._learning_rate, mesh, "learning_rate")
    if not self._bias_correction:
      return [lr, lr, self._epsilon], []
    count, counting = update_count(mesh, "adam_updates")
    root, factor = self._once(
      ("bias_correction", id(self), count),
      lambda: (
        _scalar_of(count, lambda t: tf.sqrt(_one_minus_power(self._beta_2, t))),
        _scalar_of(
          count,
          lambda t: tf.sqrt(_one_minus_power(self._beta_2, t)) / _one_minus_power(self._beta_1, t),
        ),
      ),
    )
    rate, epsilon = self._once(
      ("rate", id(self), count), lambda: (multiply(factor, lr), multiply(root, self._epsilon))
    )
    return [lr, rate, epsilon], counting


def _float32(x: float | tf.Tensor) -> Any:
  """A scalar of an update, as an operand."""
  return x if tf.is_tensor(x) else constants.constant(x, tf.float32)


def _scalar_of(count: Tensor, fn: Callable[[tf.Tensor], tf.Tensor]) -> Tensor:
  """Applies `fn` to the number of the current update, which is 1 for the first."""
  return cwise(
    lambda n: fn(tf.cast(n, tf.float32) + 1.0),
    [count],
    output_dtype=tf.float32,
    grad_function=0,
    name="bias_correction",
  )


def _one_minus_power(beta: float, t: tf.Tensor) -> tf.Tensor:
  """1 - beta ** t, computed without cancellation where the difference is small."""
  return -tf.math.expm1(t * (math.log(beta) if beta else -math.inf))
