"""Standardization: mean 0 and variance 1 along a dimension, with a fused gradient."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.dimensions import Dimension
from mesh_tensorflow.errors import DimensionError
from mesh_tensorflow.graph import Operation, Tensor
from mesh_tensorflow.operations.norms import mean_along


class StandardizeOperation(Operation):
  """(x - mean) / sqrt(variance + epsilon) along one dimension.

  The second output is 1 / sqrt(variance + epsilon), without the dimension; only the gradient
  uses it. The statistics of half-precision tensors are computed in float32.

  Args:
    x: a floating `Tensor`.
    dim: the dimension.
    epsilon: added to the (population) variance.
    name: of the operation.
  """

  def __init__(self, x: Tensor, dim: Dimension, epsilon: float, name: str | None = None):
    super().__init__([x], name=name or "standardize")
    if dim not in x.shape:
      raise DimensionError(f"{self.name}: dimension {dim.name}={dim.size} is not in {x}")
    self._dim = dim
    self._epsilon = epsilon
    exact = x.dtype if x.dtype.size >= 4 else tf.float32
    self._outputs = [
      Tensor(self, x.shape, x.dtype, index=0),
      Tensor(self, x.shape - dim, exact, index=1),
    ]

  def gradient(self, grad_ys):
    if grad_ys[0] is None:
      return [None]
    y, factor = self._outputs
    return [StandardizeGradOperation(grad_ys[0], y, factor, self._dim).outputs[0]]

  def lower(self, lowering):
    impl = lowering.mesh_impl(self)
    y, factor = self._outputs
    axis = y.shape.dims.index(self._dim)
    x = lowering.tensors[self._inputs[0]].to_laid_out_tensor()
    if y.dtype != factor.dtype:
      x = impl.slicewise(lambda t: tf.cast(t, factor.dtype), x)
    mean = mean_along(impl, self._dim, axis, lambda t: t, x)
    centered = impl.slicewise(tf.subtract, x, mean)
    variance = mean_along(impl, self._dim, axis, tf.square, centered)

    def finish(centered, variance):
      f = tf.math.rsqrt(variance + self._epsilon)
      return tf.cast(centered * f, y.dtype), tf.squeeze(f, axis)

    for out, laid_out in zip(self._outputs, impl.slicewise(finish, centered, variance)):
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

  def __init__(
    self, dy: Tensor, y: Tensor, factor: Tensor, dim: Dimension, name: str | None = None
  ):
    super().__init__([dy, y, factor], name=name or "standardize_grad")
    self._dim = dim
    self._outputs = [Tensor(self, y.shape, y.dtype)]

  def lower(self, lowering):
    impl = lowering.mesh_impl(self)
    out = self._outputs[0]
    axis = out.shape.dims.index(self._dim)
    exact = self._inputs[2].dtype
    dy, y, factor = (lowering.tensors[x].to_laid_out_tensor() for x in self._inputs)
    if out.dtype != exact:
      dy, y = (impl.slicewise(lambda t: tf.cast(t, exact), t) for t in (dy, y))
    mean_dy = mean_along(impl, self._dim, axis, lambda t: t, dy)
    mean_dy_y = mean_along(impl, self._dim, axis, tf.multiply, dy, y)

    def gradient(dy, y, factor, mean_dy, mean_dy_y):
      dx = tf.expand_dims(factor, axis) * (dy - mean_dy - y * mean_dy_y)
      return tf.cast(dx, out.dtype)

    lowering.set_tensor_lowering(out, impl.slicewise(gradient, dy, y, factor, mean_dy, mean_dy_y))


def standardize(x: Tensor, dim: Dimension, epsilon: float = 1e-6) -> Tensor:
  """(x - mean) / sqrt(variance + epsilon) along a dimension.

  Args:
    x: a floating `Tensor`.
    dim: the dimension; may be split.
    epsilon: added to the (population) variance.

  Returns:
    A `Tensor` of x's shape.

  Raises:
    DimensionError: `dim` is not in x.
  """
  return StandardizeOperation(x, dim, epsilon).outputs[0]
