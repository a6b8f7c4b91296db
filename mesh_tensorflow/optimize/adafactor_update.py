"""The update operation of Adafactor, with means over split dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.operations.assignments import grouped
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.update import laid_out_scalar, slices_of, subtract
from mesh_tensorflow.program.dimensions import Dimension
from mesh_tensorflow.program.graph import Operation, Tensor


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

  is_cloneable = False

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

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    done: list[Any] = []
    grad = impl.slicewise(lambda g: tf.cast(g, tf.float32), lowering.tensors[self._inputs[0]])
    # Of the weight before this update.
    scale = self._scale(lowering, impl)
    if self._factored_dims is None:
      # The slots are written on the way; what follows has their new values, as the formula says.
      x = self._normalized(lowering, impl, grad, done)
    else:
      x = self._normalized_factored(lowering, impl, grad, done, *self._factored_dims)

    if self._clipping_threshold is not None:
      everything = list(range(len(self._dims)))
      mean_square = self._means(
        impl,
        impl.slicewise(lambda t: tf.reduce_mean(tf.square(t), everything), x),
        self._dims,
      )
      scale = impl.slicewise(
        lambda s, ms: s / tf.maximum(1.0, tf.sqrt(ms) / self._clipping_threshold),
        scale,
        mean_square,
      )

    def write(w: tf.Variable, x: tf.Tensor, scale: tf.Tensor, m: tf.Variable | None = None) -> None:
      delta = x * scale
      if m is not None:
        delta = self._beta1 * m.read_value() + (1.0 - self._beta1) * delta
        done.append(m.assign(delta, read_value=False))
      done.append(subtract(w, delta))

    momentum = [slices_of(lowering, self._slots["m"])] if "m" in self._slots else []
    lowering.variables[self._variable].update(write, x, scale, *momentum)
    lowering.operations[self] = grouped(done)

  def _means(self, impl: Any, local_means: Any, dims: Sequence[Dimension]) -> Any:
    """Means over whole dimensions, of the means over the processors' parts of them."""
    axes = [impl.tensor_dimension_to_mesh_axis(d) for d in dims]
    axes = [a for a in axes if a is not None and impl.shape[a].size > 1]
    if not axes:
      return local_means
    # The parts are of one size, so the mean of their means is the mean of all.
    parts = 1
    for a in axes:
      parts *= impl.shape[a].size
    return impl.slicewise(lambda t: t / parts, impl.allreduce(local_means, axes, "SUM"))

  def _scale(self, lowering: LoweringInProgress, impl: Any) -> Any:
    """lr, or lr * max(RMS(w), epsilon2), of size 1 along the reduced dimensions."""
    lr = laid_out_scalar(lowering, self._lr)
    if self._scale_dims is None:
      return impl.slicewise(lambda r: tf.convert_to_tensor(r, tf.float32), lr)
    axes = [self._dims.index(d) for d in self._scale_dims]
    mean_square = self._means(
      impl,
      impl.slicewise(
        lambda w: tf.reduce_mean(tf.square(tf.cast(w, tf.float32)), axes, keepdims=True),
        lowering.tensors[self._variable.value],
      ),
      self._scale_dims,
    )
    return impl.slicewise(
      lambda ms, r: r * tf.maximum(tf.sqrt(ms), self._epsilon2), mean_square, lr
    )

  def _decay(
    self, lowering: LoweringInProgress, impl: Any, name: str, new: Any, done: list[Any]
  ) -> Any:
    """Sets a slot to rho * slot + (1 - rho) * (new + epsilon1), and returns it."""

    def decay(slot: tf.Variable, new: tf.Tensor, rho: Any) -> tf.Tensor:
      # `new` is a mean of squares: epsilon1 added to it is epsilon1 added to each.
      result = rho * slot.read_value() + (1.0 - rho) * (new + self._epsilon1)
      done.append(slot.assign(result, read_value=False))
      return result

    rho = laid_out_scalar(lowering, self._decay_rate)
    return impl.slicewise(decay, slices_of(lowering, self._slots[name]), new, rho)

  def _normalized(self, lowering: LoweringInProgress, impl: Any, grad: Any, done: list[Any]) -> Any:
    v = self._decay(lowering, impl, "v", impl.slicewise(tf.square, grad), done)
    return impl.slicewise(lambda g, v: g * tf.math.rsqrt(v), grad, v)

  def _normalized_factored(
    self,
    lowering: LoweringInProgress,
    impl: Any,
    grad: Any,
    done: list[Any],
    d0: Dimension,
    d1: Dimension,
  ) -> Any:
    axis0, axis1 = self._dims.index(d0), self._dims.index(d1)

    def local_means(g: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      q = tf.square(g)
      return tf.reduce_mean(q, axis0), tf.reduce_mean(q, axis1)

    rows, columns = impl.slicewise(local_means, grad)
    vr = self._decay(lowering, impl, "vr", self._means(impl, rows, [d0]), done)
    vc = self._decay(lowering, impl, "vc", self._means(impl, columns, [d1]), done)
    # vr has no d0: what stood behind it has moved up.
    axis1_of_vr = axis1 - 1 if axis0 < axis1 else axis1
    mean_vr = self._means(
      impl, impl.slicewise(lambda t: tf.reduce_mean(t, axis1_of_vr, keepdims=True), vr), [d1]
    )

    def normalize(g: tf.Tensor, vr: tf.Tensor, mean_vr: tf.Tensor, vc: tf.Tensor) -> tf.Tensor:
      # The paper's estimate R C / (1^T R) of the squares, with means for sums. Root by root: where
      # gradients are zero vr * vc is epsilon1 ** 2, which float32 does not have.
      row_factor = tf.expand_dims(tf.math.rsqrt(vr / mean_vr), axis0)
      column_factor = tf.expand_dims(tf.math.rsqrt(vc), axis1)
      return g * row_factor * column_factor

    return impl.slicewise(normalize, grad, vr, mean_vr, vc)
