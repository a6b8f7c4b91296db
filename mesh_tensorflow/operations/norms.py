"""Normalization along a dimension, with a fused gradient: standardization and RMS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.slices import align
from mesh_tensorflow.numerics import kernels, padding
from mesh_tensorflow.operations.binary import add, multiply
from mesh_tensorflow.operations.contraction import contract
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast, identity, negative, square
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.operations.reduction import broadcast, reduce_mean
from mesh_tensorflow.program.argument_kinds import FloatTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape, no_such_dimension
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["rms_normalize", "standardize"]

_ONE = Dimension("_normalized", 1)


class StandardizeOperation(Operation):
  """(x - mean) / sqrt(variance + epsilon).

  The second output is the factor 1 / sqrt(...), with a dimension of size 1 in place of `dim`;
  only the gradient uses it. The gradient is that of the whole: it costs half of what the
  gradients of square, mean, rsqrt and product cost one by one. The statistics of
  half-precision tensors are computed in float32.

  Args:
    x: a floating `Tensor`.
    dim: the dimension.
    epsilon: added to the (population) variance.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(self, x: Tensor, dim: Dimension, epsilon: float, name: str | None = None):
    super().__init__([x], name=name or "standardize")
    _check_dim(self.name, x, dim)
    self._dim = dim
    self._epsilon = epsilon
    self._outputs = _outputs(self, x, dim)

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    y, factor = self._outputs
    dy, d_factor = grad_ys
    dx = None
    if dy is not None:
      dx = StandardizeGradOperation(dy, y, factor, self._dim).outputs[0]
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
    x = impl.slicewise(tf.subtract, x, _means(impl, self._dim, axis, lambda t: [t], x))
    # Of x without its mean: mean(x ** 2) - mean(x) ** 2 would cancel where the mean is large.
    variance = _means(impl, self._dim, axis, lambda t: [tf.square(t)], x)

    def finish(x: tf.Tensor, variance: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      f = tf.math.rsqrt(variance + self._epsilon)
      return tf.cast(x * f, y.dtype), f

    for out, laid_out in zip(self._outputs, impl.slicewise(finish, x, variance)):
      lowering.set_tensor_lowering(out, laid_out)


class StandardizeGradOperation(Operation):
  """Gradient of a `StandardizeOperation`: factor * (dy - mean(dy) - y * mean(dy * y)).

  Args:
    dy: the gradient of its first output.
    y: its first output.
    factor: its second output.
    dim: the dimension.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(
    self, dy: Tensor, y: Tensor, factor: Tensor, dim: Dimension, name: str | None = None
  ):
    super().__init__([dy, y, factor], name=name or "standardize_grad")
    self._dim = dim
    self._outputs = [Tensor(self, y.shape, y.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    # Linear in dy, by a symmetric matrix.
    dy, y, factor = self._inputs
    to_dy = StandardizeGradOperation(grad_ys[0], y, factor, self._dim)
    g, dy, y = (cast(t, factor.dtype) for t in (grad_ys[0], dy, y))
    rest = y.shape - self._dim
    # With <., .> the mean: the gradient with respect to y is -factor * (g <dy, y> + dy <g, y>).
    g_y, dy_y = (einsum([t, y], output_shape=rest) * (1.0 / self._dim.size) for t in (g, dy))
    to_y = negative(add(multiply(g, dy_y), multiply(dy, g_y)))
    bracket = dy - multiply(y, dy_y) - reduce_mean(dy, output_shape=rest)
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

    def gradient(
      dy: tf.Tensor, y: tf.Tensor, factor: tf.Tensor, dy_y: tf.Tensor, mean: tf.Tensor
    ) -> tf.Tensor:
      return tf.cast((dy - y * dy_y - mean) * factor, out.dtype)

    means = _means(impl, self._dim, axis, lambda dy, y: [dy * y, dy], dy, y)
    lowering.set_tensor_lowering(out, impl.slicewise(gradient, dy, y, factor, *means))


class RmsNormalizeOperation(Operation):
  """x / sqrt(mean(x ** 2) + epsilon), times a scale if there is one.

  The second output is the factor 1 / sqrt(...), with a dimension of size 1 in place of `dim`;
  only the gradient uses it. With half-precision tensors all is computed in float32, and rounded
  once: element-wise kernels of bfloat16 take CPUs three times as long as those of float32.

  Args:
    x: a floating `Tensor`.
    dim: the dimension.
    epsilon: added to the mean square.
    scale: a floating `Tensor` of some dimensions of x; None: none.
    name: of the operation.

  Raises:
    DimensionError: `dim` is not in x.
    ShapeError: a dimension of `scale` is not in x.
  """

  lowers_uneven_slices = True

  def __init__(
    self,
    x: Tensor,
    dim: Dimension,
    epsilon: float,
    scale: Tensor | None = None,
    name: str | None = None,
  ):
    super().__init__([x] if scale is None else [x, scale], name=name or "rms_normalize")
    _check_dim(self.name, x, dim)
    for d in [] if scale is None else scale.shape:
      if d not in x.shape:
        raise ShapeError(
          f"{self.name}: dimension {d.name}={d.size} of the scale {scale} is not in {x}"
        )
    self._dim = dim
    self._epsilon = epsilon
    self._outputs = _outputs(self, x, dim)

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    x, scale = self._inputs[0], self._inputs[1] if len(self._inputs) > 1 else None
    factor = self._outputs[1]
    dy, d_factor = grad_ys
    grads: list[Tensor | None] = [None] * len(self._inputs)
    if dy is not None:
      grads[0], products = RmsNormalizeGradOperation(dy, x, factor, self._dim, scale).outputs
      if scale is not None:
        grads[1] = cast(einsum([products, factor], output_shape=scale.shape), scale.dtype)
    if d_factor is not None:  # Of a second derivative.
      # d factor / dx = -factor ** 3 * x / n.
      slope = multiply(d_factor, multiply(square(factor), factor)) * (-1.0 / self._dim.size)
      through = cast(einsum([cast(x, factor.dtype), slope], output_shape=x.shape), x.dtype)
      grads[0] = through if grads[0] is None else add(grads[0], through)
    return grads

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    y, factor = self._outputs
    axis = y.shape.dims.index(self._dim)
    x, *scale = (lowering.tensors[t].to_laid_out_tensor() for t in self._inputs)
    if y.dtype != factor.dtype:
      x = impl.slicewise(lambda t: tf.cast(t, factor.dtype), x)
    squares = _means(impl, self._dim, axis, lambda t: [tf.square(t)], x)

    def finish(x: tf.Tensor, squares: tf.Tensor, *scale: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      f = tf.math.rsqrt(squares + self._epsilon)
      return tf.cast(_scaled(x * f, self._inputs, scale), y.dtype), f

    for out, laid_out in zip(self._outputs, impl.slicewise(finish, x, squares, *scale)):
      lowering.set_tensor_lowering(out, laid_out)


class RmsNormalizeGradOperation(Operation):
  """Gradient of an `RmsNormalizeOperation`, of its input: nothing is kept for it but that.

    dx = factor * (dy * scale - x * factor ** 2 * mean(dy * scale * x))

  The second output is dy * x, which is summed for the mean, and for the gradient of the scale.

  Args:
    dy: the gradient of its first output.
    x: its input.
    factor: its second output.
    dim: the dimension.
    scale: its scale, or None.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(
    self,
    dy: Tensor,
    x: Tensor,
    factor: Tensor,
    dim: Dimension,
    scale: Tensor | None = None,
    name: str | None = None,
  ):
    scales = [] if scale is None else [scale]
    super().__init__([dy, x, factor, *scales], name=name or "rms_normalize_grad")
    self._dim = dim
    self._outputs = [
      Tensor(self, x.shape, x.dtype, index=0),
      Tensor(self, x.shape, factor.dtype, index=1),
    ]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    # What is written as one formula is taken apart, of tensors of its own: x has made the factor.
    inputs = [identity(t) for t in self._inputs]
    dx, products = self._composed(*inputs)
    given = [(y, g) for y, g in zip((dx, products), grad_ys) if g is not None]
    return gradients([y for y, _ in given], inputs, [g for _, g in given])

  def _composed(
    self, dy: Tensor, x: Tensor, factor: Tensor, scale: Tensor | None = None
  ) -> tuple[Tensor, Tensor]:
    """Both outputs, of operations that have gradients."""
    dtype, exact = x.dtype, factor.dtype
    dy, x = cast(dy, exact), cast(x, exact)
    products = multiply(dy, x, output_shape=x.shape)
    if scale is not None:
      dy = multiply(dy, cast(scale, exact), output_shape=x.shape)
    rest = x.shape - self._dim
    mean = einsum([dy, x], output_shape=rest) * (1.0 / self._dim.size)
    mean = einsum([mean, factor, factor], output_shape=rest)
    dx = einsum([dy - multiply(x, mean, output_shape=x.shape), factor], output_shape=x.shape)
    return cast(dx, dtype), products

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    out = self._outputs[0]
    shape, axis = out.shape, out.shape.dims.index(self._dim)
    dtype = self._inputs[2].dtype
    dy, x, factor, *scale = (lowering.tensors[t].to_laid_out_tensor() for t in self._inputs)
    if out.dtype != dtype:
      dy, x = (impl.slicewise(lambda t: tf.cast(t, dtype), t) for t in (dy, x))
    scale = [impl.slicewise(lambda s: tf.cast(s, dtype), s) for s in scale]
    p = impl.without_padding(impl.slicewise(tf.multiply, dy, x), shape, padding.zero, [self._dim])
    dims = [shape.dims, *(t.shape.dims for t in self._inputs[3:])]
    # With a scale of one dimension that is the product of a matrix and a vector.
    total = impl.slicewise(
      lambda *xs: contract(xs, dims, (shape - self._dim).dims),
      p,
      *(
        impl.without_padding(s, t.shape, padding.zero, [self._dim])
        for s, t in zip(scale, self._inputs[3:])
      ),
    )
    mesh_axis = impl.tensor_dimension_to_mesh_axis(self._dim)
    if mesh_axis is not None and impl.shape[mesh_axis].size > 1:
      total = impl.allreduce(total, [mesh_axis], "SUM")

    def gradient(
      dy: tf.Tensor, x: tf.Tensor, factor: tf.Tensor, total: tf.Tensor, *scale: tf.Tensor
    ) -> tf.Tensor:
      # In this order a factor of 1e20 does not overflow.
      mean = tf.expand_dims(total, axis) * factor * (factor * (1.0 / self._dim.size))
      dx = (_scaled(dy, [out, *self._inputs[3:]], scale) - x * mean) * factor
      return tf.cast(dx, out.dtype)

    lowering.set_tensor_lowering(out, impl.slicewise(gradient, dy, x, factor, total, *scale))
    lowering.set_tensor_lowering(self._outputs[1], p)


def _check_dim(name: str, x: Tensor, dim: Dimension) -> None:
  if dim not in x.shape:
    raise no_such_dimension(name, dim, x)


def _outputs(op: Operation, x: Tensor, dim: Dimension) -> list[Tensor]:
  """The normalized tensor, and its factor."""
  exact = x.dtype if x.dtype.size >= 4 else tf.float32
  one = Shape([_ONE if d == dim else d for d in x.shape])
  return [Tensor(op, x.shape, x.dtype, index=0), Tensor(op, one, exact, index=1)]


def _scaled(x: tf.Tensor, tensors: Sequence[Tensor], scale: Sequence[tf.Tensor]) -> tf.Tensor:
  """A slice times that of the scale, if there is one.

  Args:
    x: the slice.
    tensors: what has its dimensions, and the scale.
    scale: the slice of the scale, in a list; or none.
  """
  for s in scale:
    aligned = align(tf.cast(s, x.dtype), tensors[1].shape.dims, tensors[0].shape.dims)
    x = kernels.elementwise(tf.multiply, x, aligned)
  return x


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
  return StandardizeOperation(x, dim, epsilon).outputs[0]


def rms_normalize(
  x: FloatTensor, dim: Dimension, epsilon: float = 1e-6, *, scale: FloatTensor | None = None
) -> Tensor:
  """Normalizes: x / sqrt(mean(x ** 2) + epsilon) along a dimension (Zhang and Sennrich, 2019).

  Args:
    x: a floating `Tensor`.
    dim: the dimension; may be split.
    epsilon: added to the mean square.
    scale: multiplies the result, a floating `Tensor` of some dimensions of x; None: nothing does.

  Returns:
    A `Tensor` of x's shape and dtype.

  Raises:
    DimensionError: `dim` is not in x.
    ShapeError: a dimension of `scale` is not in x.
  """
  return RmsNormalizeOperation(x, dim, epsilon, scale).outputs[0]
