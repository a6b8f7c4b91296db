"""Normalization along a dimension, with a fused gradient: standardization and RMS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import padding
from mesh_tensorflow.operations.binary import add, multiply
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast, negative, square
from mesh_tensorflow.operations.reduction import broadcast, reduce_mean
from mesh_tensorflow.program.argument_kinds import FloatTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape, no_such_dimension
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["rms_normalize", "standardize"]

_ONE = Dimension("_normalized", 1)


class NormalizeOperation(Operation):
  """(x - mean) / sqrt(variance + epsilon), or x / sqrt(mean(x ** 2) + epsilon).

  The second output is the factor 1 / sqrt(...), with a dimension of size 1 in place of `dim`;
  only the gradient uses it. The gradient is that of the whole: it costs half of what the
  gradients of square, mean, rsqrt and product cost one by one. The statistics of
  half-precision tensors are computed in float32.

  Args:
    x: a floating `Tensor`.
    dim: the dimension.
    epsilon: added to the (population) variance, or to the mean square.
    centered: whether the mean is subtracted.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(
    self, x: Tensor, dim: Dimension, epsilon: float, centered: bool, name: str | None = None
  ):
    super().__init__([x], name=name or ("standardize" if centered else "rms_normalize"))
    if dim not in x.shape:
      raise no_such_dimension(self.name, dim, x)
    self._dim = dim
    self._epsilon = epsilon
    self._centered = centered
    exact = x.dtype if x.dtype.size >= 4 else tf.float32
    one = Shape([_ONE if d == dim else d for d in x.shape])
    self._outputs = [Tensor(self, x.shape, x.dtype, index=0), Tensor(self, one, exact, index=1)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    y, factor = self._outputs
    dy, d_factor = grad_ys
    dx = None
    if dy is not None:
      dx = NormalizeGradOperation(dy, y, factor, self._dim, self._centered).outputs[0]
    if d_factor is not None:  # Of a second derivative.
      # d factor / dx = -factor ** 2 * y / n.
      slope = multiply(d_factor, square(factor)) * (-1.0 / self._dim.size)
      through = cast(einsum([cast(y, factor.dtype), slope], output_shape=y.shape), y.dtype)
      dx = through if dx is None else add(dx, through)
    return [dx]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    y, factor = self._outputs
    axis = y.shape.dims.index(self._dim)
    x = lowering.tensors[self._inputs[0]].to_laid_out_tensor()
    if y.dtype != factor.dtype:
      x = impl.slicewise(lambda t: tf.cast(t, factor.dtype), x)
    if self._centered:
      means = _means(impl, self._dim, axis, lambda t: [t], x)
      x = impl.slicewise(tf.subtract, x, means)
    # Of x without its mean: mean(x ** 2) - mean(x) ** 2 would cancel where the mean is large.
    variance = _means(impl, self._dim, axis, lambda t: [tf.square(t)], x)

    def finish(x: tf.Tensor, variance: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      f = tf.math.rsqrt(variance + self._epsilon)
      return tf.cast(x * f, y.dtype), f

    for out, laid_out in zip(self._outputs, impl.slicewise(finish, x, variance)):
      lowering.set_tensor_lowering(out, laid_out)


class NormalizeGradOperation(Operation):
  """Gradient of a `NormalizeOperation`: factor * (dy - mean(dy) - y * mean(dy * y)).

  Without centering the term mean(dy) is not there.

  Args:
    dy: the gradient of its first output.
    y: its first output.
    factor: its second output.
    dim: the dimension.
    centered: whether it subtracted the mean.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(
    self,
    dy: Tensor,
    y: Tensor,
    factor: Tensor,
    dim: Dimension,
    centered: bool,
    name: str | None = None,
  ):
    super().__init__([dy, y, factor], name=name or "normalize_grad")
    self._dim = dim
    self._centered = centered
    self._outputs = [Tensor(self, y.shape, y.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    # Linear in dy, by a symmetric matrix.
    dy, y, factor = self._inputs
    to_dy = NormalizeGradOperation(grad_ys[0], y, factor, self._dim, self._centered)
    g, dy, y = (cast(t, factor.dtype) for t in (grad_ys[0], dy, y))
    rest = y.shape - self._dim
    # With <., .> the mean: the gradient with respect to y is -factor * (g <dy, y> + dy <g, y>).
    g_y, dy_y = (einsum([t, y], output_shape=rest) * (1.0 / self._dim.size) for t in (g, dy))
    to_y = negative(add(multiply(g, dy_y), multiply(dy, g_y)))
    bracket = dy - multiply(y, dy_y)
    if self._centered:
      bracket = bracket - reduce_mean(dy, output_shape=rest)
    # The result is factor * bracket.
    to_factor = broadcast(einsum([g, bracket], output_shape=rest), factor.shape)
    to_y = einsum([to_y, factor], output_shape=y.shape)
    return [to_dy.outputs[0], cast(to_y, self._inputs[1].dtype), to_factor]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    out = self._outputs[0]
    axis = out.shape.dims.index(self._dim)
    dtype = self._inputs[2].dtype
    dy, y, factor = (lowering.tensors[x].to_laid_out_tensor() for x in self._inputs)
    if out.dtype != dtype:
      dy, y = (impl.slicewise(lambda t: tf.cast(t, dtype), t) for t in (dy, y))

    def means_of(dy: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
      return [dy * y, dy] if self._centered else [dy * y]

    def gradient(dy: tf.Tensor, y: tf.Tensor, factor: tf.Tensor, *means: tf.Tensor) -> tf.Tensor:
      dx = dy - y * means[0]
      if self._centered:
        dx -= means[1]
      return tf.cast(dx * factor, out.dtype)

    means = _means(impl, self._dim, axis, means_of, dy, y)
    means = means if isinstance(means, tuple) else (means,)
    lowering.set_tensor_lowering(out, impl.slicewise(gradient, dy, y, factor, *means))


def _means(
  impl: MeshImpl, dim: Dimension, axis: int, fn: Callable[..., list[tf.Tensor]], *laid_out: Any
) -> Any:
  """Means along a dimension that may be split, also unevenly; its axis stays, with size 1.

  Args:
    impl: a `MeshImpl`.
    dim: the dimension.
    axis: where it is among the slices' axes.
    fn: takes one slice of each laid-out tensor; returns what the means are taken of.
    *laid_out: laid-out tensors.

  Returns:
    A laid-out tensor for each tensor that `fn` returns; not in a tuple if that is one.
  """
  extents = impl.laid_out_extents(Shape([dim]), [0]) if impl.is_uneven(dim) else []

  def each(reduce: Callable[..., tf.Tensor]) -> Callable[..., Any]:
    def apply(*xs: Any) -> Any:
      slices, extent = xs[: len(laid_out)], xs[len(laid_out) :]
      terms = fn(*slices)
      if extent:
        terms = [padding.replaced(t, [axis], extent, padding.zero(t.dtype)) for t in terms]
      reduced = [reduce(t, axis, keepdims=True) for t in terms]
      return tuple(reduced) if len(reduced) > 1 else reduced[0]

    return apply

  mesh_axis = impl.tensor_dimension_to_mesh_axis(dim)
  if mesh_axis is None or impl.shape[mesh_axis].size == 1:
    return impl.slicewise(each(tf.reduce_mean), *laid_out)
  sums = impl.slicewise(each(tf.reduce_sum), *laid_out, *extents)
  if not isinstance(sums, tuple):
    total = impl.allreduce(sums, [mesh_axis], "SUM")
    return impl.slicewise(lambda s: s * (1.0 / dim.size), total)
  # One exchange for all.
  joined = impl.slicewise(lambda *xs: tf.concat(xs, axis), *sums)
  total = impl.allreduce(joined, [mesh_axis], "SUM")
  return impl.slicewise(lambda s: tuple(tf.split(s * (1.0 / dim.size), len(sums), axis)), total)


def standardize(x: FloatTensor, dim: Dimension, epsilon: float = 1e-6) -> Tensor:
  """(x - mean) / sqrt(variance + epsilon) along a dimension.

  Args:
    x: a floating `Tensor`.
    dim: the dimension; may be split.
    epsilon: added to the (population) variance.

  Returns:
    A `Tensor` of x's shape and dtype.

  Raises:
    DimensionError: `dim` is not in x.
  """
  return NormalizeOperation(x, dim, epsilon, centered=True).outputs[0]


def rms_normalize(x: FloatTensor, dim: Dimension, epsilon: float = 1e-6) -> Tensor:
  """Normalizes: x / sqrt(mean(x ** 2) + epsilon) along a dimension (Zhang and Sennrich, 2019).

  Args:
    x: a floating `Tensor`.
    dim: the dimension; may be split.
    epsilon: added to the mean square.

  Returns:
    A `Tensor` of x's shape and dtype.

  Raises:
    DimensionError: `dim` is not in x.
  """
  return NormalizeOperation(x, dim, epsilon, centered=False).outputs[0]
