"""The Adafactor optimizer: its decay rates, its update, its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import BELOW_ONE, NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.layers.scaling import unit_scaling_convention
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import bodies, padding
from mesh_tensorflow.operations.variables import Variable, grouped
from mesh_tensorflow.optimize.base import Optimizer
from mesh_tensorflow.optimize.scalars import ScalarLike, function_of_step
from mesh_tensorflow.optimize.update import laid_out_scalar, subtract, write_rounded
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["AdafactorOptimizer", "adafactor_decay_rate_adam", "adafactor_decay_rate_pow"]


@gin.configurable(module="mesh_tensorflow.optimize")
@checked
@affects("training")
def adafactor_decay_rate_pow(exponent: float = 0.8, offset: float = 0) -> Callable[[Any], Any]:
  """1 - (t - offset + 1) ** -exponent (Shazeer and Stern, 2018).

  Args:
    exponent: power by which 1 minus the rate falls with the step.
    offset: a step; before it the result is not finite.

  Returns:
    A function of the step t (a number, a tf.Tensor or an mtf.Tensor).
  """
  # 0 at the first step: averages that begin with zeros take its squares as they are.
  return function_of_step(lambda t: 1.0 - tf.pow(t + float(1 - offset), -exponent))


@checked
def adafactor_decay_rate_adam(beta2: float) -> Callable[[Any], Any]:
  """Adam's running average with its bias correction: b (1 - b^(T - 1)) / (1 - b^T), T = t + 1.

  Args:
    beta2: b.

  Returns:
    A function of the step t (a number, a tf.Tensor or an mtf.Tensor).
  """
  return function_of_step(
    lambda t: beta2 * (1.0 - tf.pow(beta2, t)) / (1.0 - tf.pow(beta2, t + 1.0))
  )


class AdafactorUpdateOperation(Operation):
  """The update of `AdafactorOptimizer`; formula and notation are there.

  Args:
    variable: the `Variable` operation.
    slots: `Variable` operations by name: vr and vc, or v; m.
    grad: the gradient.
    lr: learning rate, a number or a scalar `Tensor`.
    decay_rate: rho, a number or a scalar `Tensor`.
    factored_dims: (d0, d1), or None.
    scale_dims: the dimensions that the RMS of the weight is taken over; None for no
      parameter scaling.
    beta1: momentum; 0 for none.
    clipping_threshold: None for no clipping.
    epsilon1: added to squared gradients.
    epsilon2: lower bound of the RMS of the weight.
  """

  lowers_uneven_slices = True
  is_cloneable = False
  reads_shards = True

  def __init__(
    self,
    variable: Variable,
    slots: dict[str, Variable],
    grad: Tensor,
    lr: float | Tensor,
    decay_rate: float | Tensor,
    *,
    factored_dims: tuple[Dimension, Dimension] | None,
    scale_dims: Sequence[Dimension] | None,
    beta1: float,
    clipping_threshold: float | None,
    epsilon1: float,
    epsilon2: float,
  ):
    scalars = [s for s in (lr, decay_rate) if isinstance(s, Tensor)]
    super().__init__(
      [grad, variable.value, *scalars], variable.mesh, name=f"{variable.full_name}/adafactor"
    )
    self._variable = variable
    self._slots = slots
    self._lr = lr
    self._decay_rate = decay_rate
    self._factored_dims = factored_dims
    self._scale_dims = scale_dims
    self._beta1 = beta1
    self._clipping_threshold = clipping_threshold
    self._epsilon1 = epsilon1
    self._epsilon2 = epsilon2
    self._dims = variable.shape.dims

  @property
  def variables(self) -> list[Variable]:
    """The variables that it changes."""
    return [self._variable, *self._slots.values()]

  @property
  def has_gradient(self) -> bool:
    return False

  @property
  def draws_random_numbers(self) -> bool:
    """True if slots, or the weight, are rounded stochastically."""
    return any(v.compact for v in self.variables)

  def lower(self, lowering: LoweringInProgress) -> None:
    laid_out = lowering.variables[self._variable]
    # All that follows is in the layout in which the variable is stored, in shards perhaps.
    impl = laid_out.stored_impl
    done: list[Any] = []
    grad = impl.slicewise(
      lambda g: tf.cast(g, tf.float32), laid_out.to_shards(lowering.tensors[self._inputs[0]])
    )
    # Of the weight before this update.
    scale = self._scale(lowering, impl)
    if self._factored_dims is None:
      # The slots are written on the way; what follows has their new values, as the formula says.
      x = self._normalized(lowering, impl, grad, done)
    else:
      x = self._normalized_factored(lowering, impl, grad, done, *self._factored_dims)
    x = impl.without_padding(x, self._variable.shape, padding.zero)

    if self._clipping_threshold is not None:
      everything = tuple(range(len(self._dims)))
      mean_square = self._means(
        impl,
        impl.slicewise(lambda t: bodies.shared(_mean_square, everything, False, t), x),
        self._dims,
      )
      scale = impl.slicewise(
        lambda s, ms: bodies.shared(_clipped, float(self._clipping_threshold), s, ms),
        scale,
        mean_square,
      )

    delta = impl.slicewise(tf.multiply, x, scale)
    if "m" in self._slots:
      m = self._slots["m"]
      delta = impl.slicewise(
        lambda m, x: self._beta1 * m + (1.0 - self._beta1) * x,
        lowering.variables[m].read_shards(tf.float32),
        delta,
      )
      delta = impl.without_padding(delta, self._variable.shape, padding.zero)
      done += write_rounded(lowering, self, m, delta)
    if self._variable.compact is None:
      laid_out.update(lambda w, x: done.append(subtract(w, x)), delta)
    else:
      new = impl.slicewise(tf.subtract, laid_out.read_shards(tf.float32), delta)
      done += write_rounded(lowering, self, self._variable, new)
    lowering.operations[self] = grouped(done)

  def _means(self, impl: MeshImpl, local_means: LaidOut, dims: Sequence[Dimension]) -> Any:
    """Means over whole dimensions, of the means over the processors' parts of them.

    Padding of the parts is zero; the means count it, which is undone here.
    """
    over = [impl.tensor_dimension_to_mesh_axis(d) for d in dims]
    axes = [a for a in over if a is not None and impl.shape[a].size > 1]
    if not axes:
      return local_means
    # The parts are of one size, so the mean of their means is the mean of all.
    parts: float = impl.group_size(axes)
    if impl.uneven_axes(dims):
      size = list_product(d.size for d in dims)
      parts = size / list_product(impl.slice_shape(dims))
    return impl.slicewise(lambda t: t / parts, impl.allreduce(local_means, axes, "SUM"))

  def _scale(self, lowering: LoweringInProgress, impl: MeshImpl) -> Any:
    """lr, or lr * max(RMS(w), epsilon2), of size 1 along the reduced dimensions."""
    lr = laid_out_scalar(lowering, self._lr)
    if self._scale_dims is None:
      return impl.slicewise(lambda r: tf.convert_to_tensor(r, tf.float32), lr)
    axes = tuple(self._dims.index(d) for d in self._scale_dims)
    mean_square = self._means(
      impl,
      impl.slicewise(
        lambda w: bodies.shared(_mean_square, axes, True, w),
        lowering.variables[self._variable].to_shards(lowering.tensors[self._variable.value]),
      ),
      self._scale_dims,
    )
    return impl.slicewise(
      lambda ms, r: bodies.shared(_scaled_rate, float(self._epsilon2), ms, r), mean_square, lr
    )

  def _decay(
    self,
    lowering: LoweringInProgress,
    impl: MeshImpl,
    name: str,
    new: LaidOut,
    done: list[tf.Operation],
  ) -> Any:
    """Sets a slot to rho * slot + (1 - rho) * (new + epsilon1), and returns it."""
    slot = self._slots[name]
    result = impl.slicewise(
      lambda old, new, rho: bodies.shared(_decayed, float(self._epsilon1), old, new, rho),
      lowering.variables[slot].read_shards(tf.float32),
      new,
      laid_out_scalar(lowering, self._decay_rate),
    )
    done += write_rounded(lowering, self, slot, result)
    return result

  def _normalized(
    self, lowering: LoweringInProgress, impl: MeshImpl, grad: LaidOut, done: list[tf.Operation]
  ) -> Any:
    v = self._decay(lowering, impl, "v", impl.slicewise(tf.square, grad), done)
    return impl.slicewise(lambda g, v: g * tf.math.rsqrt(v), grad, v)

  def _normalized_factored(
    self,
    lowering: LoweringInProgress,
    impl: MeshImpl,
    grad: LaidOut,
    done: list[tf.Operation],
    d0: Dimension,
    d1: Dimension,
  ) -> Any:
    axis0, axis1 = self._dims.index(d0), self._dims.index(d1)

    rows, columns = impl.slicewise(
      lambda g: bodies.shared(_means_of_squares, axis0, axis1, g), grad
    )
    vr = self._decay(lowering, impl, "vr", self._means(impl, rows, [d0]), done)
    vc = self._decay(lowering, impl, "vc", self._means(impl, columns, [d1]), done)
    # vr has no d0: what stood behind it has moved up.
    axis1_of_vr = axis1 - 1 if axis0 < axis1 else axis1
    mean_vr = self._means(
      impl,
      impl.slicewise(
        lambda t: tf.reduce_mean(t, axis1_of_vr, keepdims=True),
        impl.without_padding(vr, self._slots["vr"].shape, padding.zero, [d1]),
      ),
      [d1],
    )
    return impl.slicewise(
      lambda *xs: bodies.shared(_normalized, axis0, axis1, *xs), grad, vr, mean_vr, vc
    )


# What each weight's update computes of slices, traced once for all weights of one shape.


def _mean_square(axes: tuple[int, ...], keepdims: bool, x: tf.Tensor) -> tf.Tensor:
  return tf.reduce_mean(tf.square(tf.cast(x, tf.float32)), axes, keepdims=keepdims)


def _scaled_rate(epsilon2: float, mean_square: tf.Tensor, lr: float | tf.Tensor) -> tf.Tensor:
  return lr * tf.maximum(tf.sqrt(mean_square), epsilon2)


def _clipped(threshold: float, scale: tf.Tensor, mean_square: tf.Tensor) -> tf.Tensor:
  return scale / tf.maximum(1.0, tf.sqrt(mean_square) / threshold)


def _decayed(epsilon1: float, old: tf.Tensor, new: tf.Tensor, rho: float | tf.Tensor) -> tf.Tensor:
  # `new` is a mean of squares: epsilon1 added to it is epsilon1 added to each.
  return rho * old + (1.0 - rho) * (new + epsilon1)


def _means_of_squares(axis0: int, axis1: int, g: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  q = tf.square(g)
  return tf.reduce_mean(q, axis0), tf.reduce_mean(q, axis1)


def _normalized(
  axis0: int, axis1: int, g: tf.Tensor, vr: tf.Tensor, mean_vr: tf.Tensor, vc: tf.Tensor
) -> tf.Tensor:
  # The paper's estimate R C / (1^T R) of the squares, with means for sums. Root by root: where
  # gradients are zero vr * vc is epsilon1 ** 2, which float32 does not have.
  row_factor = tf.expand_dims(tf.math.rsqrt(vr / mean_vr), axis0)
  column_factor = tf.expand_dims(tf.math.rsqrt(vc), axis1)
  return g * row_factor * column_factor


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

  def _learning_rate_for(self, var: Variable | None) -> ScalarLike:
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
      slots = {"v": self._slot(var, "_slot_v", nonnegative=True)}
    else:
      slots = {
        name: self._slot(var, f"_slot_{name}", shape=var.shape - d)
        for name, d in zip(("vr", "vc"), factored_dims)
      }
    if self._beta1:
      slots["m"] = self._slot(var, "_slot_m")
    return slots


def default_learning_rate(multiply_by_parameter_scale: bool) -> ScalarLike:
  """The schedule of `AdafactorOptimizer` without a learning rate, as a function of the step."""
  # The relative step size that the paper proposes; without a scale it would be a step of that size.
  factor = 1.0 if multiply_by_parameter_scale or unit_scaling_convention() else 0.05
  return function_of_step(lambda t: factor * tf.minimum(tf.math.rsqrt(t + 1.0), 0.01))
