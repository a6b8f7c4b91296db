"""AdamW: Adam with bias correction and decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import BELOW_ONE, NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.operations.binary import multiply
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.base import Optimizer, slot_variable
from mesh_tensorflow.optimize.scalars import ScalarLike, check_at_least, check_below_one
from mesh_tensorflow.optimize.update import UpdateOperation, is_float32, subtract
from mesh_tensorflow.optimize.update_count import update_count
from mesh_tensorflow.optimize.weight_decay import NOT_DECAYED, check_patterns, found_in
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor

__all__ = ["AdamWOptimizer"]


class AdamWUpdateOperation(UpdateOperation):
  """The update of `AdamWOptimizer`.

  Slots: m, v; tensors: the gradient; scalars: lr, lr * root / (1 - beta_1 ** t) and
  root = sqrt(1 - beta_2 ** t).
  """

  def __init__(
    self,
    variable: Variable,
    slots: Sequence[Variable],
    grad: Tensor,
    scalars: Sequence[float | Tensor],
    *,
    weight_decay_rate: float,
    beta_1: float,
    beta_2: float,
    epsilon: float,
  ):
    super().__init__(variable, slots, [grad], scalars, name=f"{variable.full_name}/adamw")
    self._weight_decay_rate = weight_decay_rate
    self._beta_1 = beta_1
    self._beta_2 = beta_2
    self._epsilon = epsilon

  def update(
    self, w: tf.Variable, m: tf.Variable, v: tf.Variable, g: tf.Tensor, *scalars: Any
  ) -> list[Any]:
    lr, rate, root = scalars
    g = tf.cast(g, tf.float32)
    # m_hat / (sqrt(v_hat) + epsilon), with the corrections on the side of the scalars.
    epsilon = self._epsilon * root
    shrink = lr * self._weight_decay_rate
    if is_float32(w):
      done = []
      if self._weight_decay_rate:
        # Before the step, as the formula says: of the old weight.
        done.append(w.assign_sub(shrink * w.read_value(), read_value=False))
      # Powers of 0 switch the operation's own correction off: ours is in lr and epsilon, so that
      # epsilon is added to the corrected root, as in the formula.
      fused = tf.raw_ops.ResourceApplyAdam(
        var=w.handle,
        m=m.handle,
        v=v.handle,
        beta1_power=0.0,
        beta2_power=0.0,
        lr=rate,
        beta1=self._beta_1,
        beta2=self._beta_2,
        epsilon=epsilon,
        grad=g,
      )
      return [*done, fused]
    new_m = self._beta_1 * m.read_value() + (1.0 - self._beta_1) * g
    new_v = self._beta_2 * v.read_value() + (1.0 - self._beta_2) * tf.square(g)
    delta = rate * new_m / (tf.sqrt(new_v) + epsilon)
    if self._weight_decay_rate:
      # One difference: each is rounded to the dtype of the weight.
      delta += shrink * tf.cast(w.read_value(), tf.float32)
    return [
      subtract(w, delta),
      m.assign(new_m, read_value=False),
      v.assign(new_v, read_value=False),
    ]


@gin.configurable(module="mesh_tensorflow.optimize")
@affects("training")
@takes(beta_1=BELOW_ONE, beta_2=BELOW_ONE, epsilon=NOT_BELOW_ZERO)
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
    self._weight_decay_rate = weight_decay_rate
    # As float32, in which the averages are taken: 1 - 0.999 is another number there, by its fifth
    # digit, and a correction by the powers of the exact beta would miss it in the first steps.
    self._beta_1 = float(np.float32(beta_1))
    self._beta_2 = float(np.float32(beta_2))
    self._epsilon = epsilon
    self._bias_correction = bias_correction
    excluded = NOT_DECAYED if exclude_from_weight_decay is None else exclude_from_weight_decay
    self._not_decayed = check_patterns(owner, "exclude_from_weight_decay", excluded)

  @checked
  def apply_grad(self, grad: CastableTensor | None, var: Variable) -> list[Operation]:
    if not self._has_gradient(grad, var):
      return []
    slots = [
      slot_variable(var, f"{var.full_name}/{name}", var.shape, tf.float32)
      for name in ("adam_m", "adam_v")
    ]
    scalars, counting = self._scalars(var.mesh)
    update = AdamWUpdateOperation(
      var,
      slots,
      grad,
      scalars,
      weight_decay_rate=0.0 if found_in(self._not_decayed, var) else self._weight_decay_rate,
      beta_1=self._beta_1,
      beta_2=self._beta_2,
      epsilon=self._epsilon,
    )
    return [update, *counting]

  def _scalars(self, mesh: Mesh) -> tuple[list[float | Tensor], list[Operation]]:
    """The scalars of the update, and the operations that count it."""
    lr = self._scalar(self._learning_rate, mesh, "learning_rate")
    if not self._bias_correction:
      return [lr, lr, 1.0], []
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
    return [lr, self._once(("rate", id(self), count), lambda: multiply(factor, lr)), root], counting


def _scalar_of(count: Tensor, fn: Any) -> Tensor:
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
