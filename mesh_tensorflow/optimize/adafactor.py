"""The Adafactor optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import BELOW_ONE, NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.layers.scaling import unit_scaling_convention
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.adafactor_update import AdafactorUpdateOperation
from mesh_tensorflow.optimize.base import Optimizer, slot_variable
from mesh_tensorflow.optimize.decay_rates import adafactor_decay_rate_pow
from mesh_tensorflow.optimize.scalars import ScalarLike, function_of_step
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Operation

__all__ = ["AdafactorOptimizer"]


@gin.configurable(module="mesh_tensorflow.optimize")
@affects("training")
@takes(beta1=BELOW_ONE, epsilon1=NOT_BELOW_ZERO, epsilon2=NOT_BELOW_ZERO)
class AdafactorOptimizer(Optimizer):
  """Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235).

  In float32, with g the gradient, w the weight, rho the decay rate, q = g ** 2 + epsilon1:

    scale = lr * max(RMS(w), epsilon2)      over all dimensions that are not stacked
    vr <- rho * vr + (1 - rho) * mean of q over d0
    vc <- rho * vc + (1 - rho) * mean of q over d1
    x = g * rsqrt(vr / mean of vr over d1) * rsqrt(vc)
    x <- x / max(1, RMS(x) / clipping_threshold)
    m <- beta1 * m + (1 - beta1) * x * scale
    w <- w - m

  d0 and d1 are the largest and the second largest dimension. A weight with fewer than two
  dimensions of at least `min_dim_size_to_factor` is not factored: v <- rho * v +
  (1 - rho) * q; x = g * rsqrt(v). Without beta1 there is no m: w <- w - x * scale.

  Slots, float32: `{weight}_slot_vr` (without d0) and `{weight}_slot_vc` (without d1), or
  `{weight}_slot_v`; with beta1 also `{weight}_slot_m`.

  Args:
    multiply_by_parameter_scale: if false, scale = lr.
    learning_rate: lr, a `ScalarLike`; by default min(rsqrt(t + 1), 0.01) at step t, times
      0.05 without parameter scale (unless the unit-scaling convention is on).
    decay_rate: rho, a `ScalarLike`; `adafactor_decay_rate_pow()` by default.
    beta1: decay rate of the momentum m, at least 0 and below 1; 0: no momentum.
    clipping_threshold: None for no clipping.
    factored: if false, no weight is factored.
    epsilon1: added to the squared gradient.
    epsilon2: lower bound of RMS(w) in the scale.
    min_dim_size_to_factor: smallest size of d0 and d1; smaller dimensions are not factored.
    stacked_dim_names: names of dimensions that are never factored, and along which each
      index has a parameter scale of its own.
    exclude_from_parameter_scale: a weight whose name contains one of these strings is
      updated with scale = lr.
  """

  @checked
  def __init__(
    self,
    # clipping_threshold and the epsilons are those of the paper's Algorithm 6.
    multiply_by_parameter_scale: bool = True,
    learning_rate: ScalarLike | None = None,
    decay_rate: ScalarLike | None = None,
    beta1: float = 0.0,
    clipping_threshold: float | None = 1.0,
    factored: bool = True,
    epsilon1: float = 1e-30,
    epsilon2: float = 1e-3,
    min_dim_size_to_factor: float = 128,
    stacked_dim_names: Sequence[str] | None = None,
    exclude_from_parameter_scale: Sequence[str] | None = None,
  ):
    self._multiply_by_parameter_scale = multiply_by_parameter_scale
    if learning_rate is None:
      learning_rate = default_learning_rate(multiply_by_parameter_scale)
    self._learning_rate = learning_rate
    self._decay_rate = adafactor_decay_rate_pow() if decay_rate is None else decay_rate
    self._beta1 = beta1
    self._clipping_threshold = clipping_threshold
    self._factored = factored
    self._epsilon1 = epsilon1
    self._epsilon2 = epsilon2
    self._min_dim_size_to_factor = min_dim_size_to_factor
    self._stacked_dim_names = list(stacked_dim_names or ())
    self._exclude_from_parameter_scale = list(exclude_from_parameter_scale or ())

  @checked
  def apply_grad(self, grad: CastableTensor | None, var: Variable) -> list[Operation]:
    if not self._has_gradient(grad, var):
      return []
    factored_dims = self._factored_dims(var.shape)
    return [
      AdafactorUpdateOperation(
        var,
        self._make_slots(var, factored_dims),
        grad,
        self._scalar(self._learning_rate_for(var), var.mesh, "learning_rate"),
        self._scalar(self._decay_rate, var.mesh, "decay_rate"),
        factored_dims=factored_dims,
        scale_dims=self._scale_dims(var),
        beta1=self._beta1,
        clipping_threshold=self._clipping_threshold,
        epsilon1=self._epsilon1,
        epsilon2=self._epsilon2,
      )
    ]

  def _learning_rate_for(self, var: Variable) -> ScalarLike:
    del var
    return self._learning_rate

  def _factored_dims(self, shape: Shape) -> tuple[Dimension, Dimension] | None:
    """The largest and the second largest dimension to factor over, or None."""
    if not self._factored:
      return None
    dims = [d for d in shape if d.name not in self._stacked_dim_names]
    if len(dims) < 2:
      return None
    # The sort is stable: of equal sizes the first is d0, in every run and checkpoint.
    dims.sort(key=lambda d: -d.size)
    if dims[1].size < self._min_dim_size_to_factor:
      return None
    return dims[0], dims[1]

  def _scale_dims(self, var: Variable) -> list[Dimension] | None:
    """The dimensions that the RMS of the weight is taken over; None: no parameter scale."""
    if not self._multiply_by_parameter_scale:
      return None
    if any(s in var.full_name for s in self._exclude_from_parameter_scale):
      return None
    return [d for d in var.shape if d.name not in self._stacked_dim_names]

  def _make_slots(
    self, var: Variable, factored_dims: tuple[Dimension, Dimension] | None
  ) -> dict[str, Variable]:
    if factored_dims is None:
      shapes = {"v": var.shape}
    else:
      shapes = {"vr": var.shape - factored_dims[0], "vc": var.shape - factored_dims[1]}
    if self._beta1:
      shapes["m"] = var.shape
    return {
      name: slot_variable(var, f"{var.full_name}_slot_{name}", shape, tf.float32)
      for name, shape in shapes.items()
    }


def default_learning_rate(multiply_by_parameter_scale: bool) -> ScalarLike:
  """The schedule of `AdafactorOptimizer` without a learning rate, as a function of the step."""
  # The relative step size that the paper proposes; without a scale it would be a step of that size.
  factor = 1.0 if multiply_by_parameter_scale or unit_scaling_convention() else 0.05
  return function_of_step(lambda t: factor * tf.minimum(tf.math.rsqrt(t + 1.0), 0.01))
