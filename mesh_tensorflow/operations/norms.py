"""Scaling to a root mean square of one along a dimension, with a fused gradient."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mesh_tensorflow.dimensions import Dimension, Shape
from mesh_tensorflow.errors import DimensionError
from mesh_tensorflow.graph import Operation, Tensor

_ONE = Dimension("_normalized", 1)


class RmsNormalizeOperation(Operation):
  """x / sqrt(mean(x ** 2) + epsilon) along one dimension.

  The second output is 1 / sqrt(mean(x ** 2) + epsilon), with a dimension of size 1 in place of
  `dim`; only the gradient uses it. The gradient is that of the whole: it costs half of what the
  gradients of square, mean, rsqrt and product cost one by one.

  Args:
    x: a floating `Tensor`.
    dim: the dimension.
    epsilon: added to the mean square.
    name: of the operation.
  """

  def __init__(self, x: Tensor, dim: Dimension, epsilon: float, name: str | None = None):
    super().__init__([x], name=name or "rms_normalize")
    if dim not in x.shape:
      raise DimensionError(f"{self.name}: dimension {dim.name}={dim.size} is not in {x}")
    self._dim = dim
    self._epsilon = epsilon
    self._outputs = [
      Tensor(self, x.shape, x.dtype, index=0),
      Tensor(self, Shape([_ONE if d == dim else d for d in x.shape]), x.dtype, index=1),
    ]

  def gradient(self, grad_ys):
    if grad_ys[0] is None:
      return [None]
    y, factor = self._outputs
    return [RmsNormalizeGradOperation(grad_ys[0], y, factor, self._dim).outputs[0]]

  def lower(self, lowering):
    impl = lowering.mesh_impl(self)
    x = lowering.tensors[self._inputs[0]].to_laid_out_tensor()
    axis = self._inputs[0].shape.dims.index(self._dim)
    mean = mean_along(impl, self._dim, axis, tf.square, x)

    def finish(x: tf.Tensor, mean: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      factor = tf.math.rsqrt(mean + self._epsilon)
      return x * factor, factor

    for out, laid_out in zip(self._outputs, impl.slicewise(finish, x, mean)):
      lowering.set_tensor_lowering(out, laid_out)


class RmsNormalizeGradOperation(Operation):
  """Gradient of a `RmsNormalizeOperation`: factor * (dy - y * mean(dy * y)).

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
    super().__init__([dy, y, factor], name=name or "rms_normalize_grad")
    self._dim = dim
    self._outputs = [Tensor(self, y.shape, y.dtype)]

  def lower(self, lowering):
    impl = lowering.mesh_impl(self)
    dy, y, factor = (lowering.tensors[x].to_laid_out_tensor() for x in self._inputs)
    axis = self._outputs[0].shape.dims.index(self._dim)
    mean = mean_along(impl, self._dim, axis, tf.multiply, dy, y)
    lowering.set_tensor_lowering(
      self._outputs[0],
      impl.slicewise(lambda dy, y, factor, mean: (dy - y * mean) * factor, dy, y, factor, mean),
    )


def mean_along(impl: Any, dim: Dimension, axis: int, fn: Any, *laid_out: Any) -> Any:
  """Mean of `fn(slices)` along a dimension that may be split; its axis stays, with size 1.

  Args:
    impl: a `MeshImpl`.
    dim: the dimension.
    axis: where it is among the slices' axes.
    fn: takes one slice of each laid-out tensor; elementwise.
    *laid_out: laid-out tensors.
  """
  mesh_axis = impl.tensor_dimension_to_mesh_axis(dim)
  if mesh_axis is None or impl.shape[mesh_axis].size == 1:
    return impl.slicewise(lambda *xs: tf.reduce_mean(fn(*xs), axis, keepdims=True), *laid_out)
  sums = impl.slicewise(lambda *xs: tf.reduce_sum(fn(*xs), axis, keepdims=True), *laid_out)
  total = impl.allreduce(sums, [mesh_axis], "SUM")
  return impl.slicewise(lambda s: s * (1.0 / dim.size), total)


def rms_normalize(x: Tensor, dim: Dimension, epsilon: float = 1e-6) -> Tensor:
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
  return RmsNormalizeOperation(x, dim, epsilon).outputs[0]


__all__ = ["RmsNormalizeGradOperation", "RmsNormalizeOperation", "rms_normalize"]
