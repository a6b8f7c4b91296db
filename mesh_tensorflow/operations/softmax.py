"""Softmax, log-softmax and log-sum-exp over a dimension, also a split one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.meshes.slices import align
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.broadcasting import binary_arguments_to_tensors
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import exp
from mesh_tensorflow.operations.reduction import reduce_sum
from mesh_tensorflow.program.argument_kinds import FloatTensor, TensorOrScalar
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["log_softmax", "reduce_logsumexp", "softmax"]


class _NormalizedExpOperation(Operation):
  """Common part: finds the dimension; an extra logit takes part in the denominator only.

  Args:
    x: logits.
    reduced_dim: the dimension to normalize over.
    extra_logit: None, or a `Tensor` of some of the other dimensions of x. No gradient
      flows to it.
    name: of the operation.
  """

  def __init__(
    self,
    x: Tensor,
    reduced_dim: Dimension,
    extra_logit: Tensor | None,
    name: str,
  ):
    inputs = [x] if extra_logit is None else [x, extra_logit]
    super().__init__(inputs, name=name)
    if reduced_dim not in x.shape:
      raise no_such_dimension(self.name, reduced_dim, x)
    self._dim = reduced_dim
    self._axis = x.shape.dims.index(reduced_dim)
    self._reduced_shape = x.shape - reduced_dim
    if extra_logit is not None:
      for d in extra_logit.shape:
        if d not in self._reduced_shape:
          raise ShapeError(
            f"{self.name}: dimension {d.name}={d.size} of the extra logit {extra_logit} is not "
            f"among the others of {x}, {self._reduced_shape}"
          )

  def _max_and_sum(self, lowering: Any) -> tuple[Any, Any]:
    """Per slice with the reduced axis kept at size 1: the maximum, and sum exp(x - max)."""
    impl = lowering.mesh_impl(self)
    laid_out = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
    axis = self._axis
    maximum = impl.slicewise(lambda x: tf.reduce_max(x, axis, keepdims=True), laid_out)
    mesh_axis = impl.tensor_dimension_to_mesh_axis(self._dim)
    mesh_axes = [] if mesh_axis is None else [mesh_axis]
    maximum = impl.allreduce(maximum, mesh_axes, "MAX")
    extra = None
    if len(self.inputs) == 2:
      kept = [Dimension(d.name, d.size) for d in self.inputs[0].shape]
      dims = self.inputs[1].shape.dims
      extra = impl.slicewise(lambda e: align(e, dims, kept), lowering.tensors[self.inputs[1]])
      maximum = impl.slicewise(lambda m, e: kernels.elementwise(tf.maximum, m, e), maximum, extra)
    total = impl.slicewise(
      lambda x, m: tf.reduce_sum(tf.exp(x - m), axis, keepdims=True), laid_out, maximum
    )
    total = impl.allreduce(total, mesh_axes, "SUM")
    if extra is not None:
      total = impl.slicewise(
        lambda s, e, m: s + tf.exp(kernels.elementwise(tf.subtract, e, m)), total, extra, maximum
      )
    return maximum, total

  def _is_local(self, lowering: Any) -> bool:
    impl = lowering.mesh_impl(self)
    axis = impl.tensor_dimension_to_mesh_axis(self._dim)
    return len(self.inputs) == 1 and (axis is None or impl.shape[axis].size == 1)

  def _gradients(self, dx: Tensor) -> list[Tensor | None]:
    return [dx] + [None] * (len(self.inputs) - 1)


class SoftmaxOperation(_NormalizedExpOperation):
  """exp(x) / sum exp(x)."""

  def __init__(
    self,
    x: Tensor,
    reduced_dim: Dimension,
    extra_logit: Tensor | None = None,
    name: str | None = None,
  ):
    super().__init__(x, reduced_dim, extra_logit, name or "softmax")
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy, y = grad_ys[0], self.outputs[0]
    inner = einsum([dy, y], output_shape=self._reduced_shape)
    return self._gradients((dy - inner) * y)

  def lower(self, lowering: Any) -> None:
    impl = lowering.mesh_impl(self)
    x = lowering.tensors[self.inputs[0]]
    if self._is_local(lowering):
      result = impl.slicewise(lambda t: kernels.softmax(t, self._axis), x)
    else:
      maximum, total = self._max_and_sum(lowering)
      result = impl.slicewise(lambda t, m, s: tf.exp(t - m) / s, x, maximum, total)
    lowering.set_tensor_lowering(self.outputs[0], result)


class LogSoftmaxOperation(_NormalizedExpOperation):
  """x - log sum exp(x)."""

  def __init__(
    self,
    x: Tensor,
    reduced_dim: Dimension,
    extra_logit: Tensor | None = None,
    name: str | None = None,
  ):
    super().__init__(x, reduced_dim, extra_logit, name or "log_softmax")
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy, y = grad_ys[0], self.outputs[0]
    return self._gradients(dy - exp(y) * reduce_sum(dy, output_shape=self._reduced_shape))

  def lower(self, lowering: Any) -> None:
    impl = lowering.mesh_impl(self)
    x = lowering.tensors[self.inputs[0]]
    if self._is_local(lowering):
      result = impl.slicewise(lambda t: tf.nn.log_softmax(t, self._axis), x)
    else:
      maximum, total = self._max_and_sum(lowering)
      result = impl.slicewise(lambda t, m, s: (t - m) - tf.math.log(s), x, maximum, total)
    lowering.set_tensor_lowering(self.outputs[0], result)


class LogSumExpOperation(_NormalizedExpOperation):
  """log sum exp(x), without the reduced dimension."""

  def __init__(
    self,
    x: Tensor,
    reduced_dim: Dimension,
    extra_logit: Tensor | None = None,
    name: str | None = None,
  ):
    super().__init__(x, reduced_dim, extra_logit, name or "reduce_logsumexp")
    self._outputs = [Tensor(self, self._reduced_shape, x.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy, x = grad_ys[0], self.inputs[0]
    return self._gradients(exp(x - self.outputs[0]) * dy)

  def lower(self, lowering: Any) -> None:
    maximum, total = self._max_and_sum(lowering)
    lowering.set_tensor_lowering(
      self.outputs[0],
      lowering.mesh_impl(self).slicewise(
        lambda m, s: tf.squeeze(m + tf.math.log(s), self._axis), maximum, total
      ),
    )


def _extra(x: Tensor, extra_logit: Any) -> Tensor | None:
  if extra_logit is None:
    return None
  return binary_arguments_to_tensors(x, extra_logit)[1]


def reduce_logsumexp(
  x: FloatTensor,
  reduced_dim: DimensionLike,
  extra_logit: TensorOrScalar = None,
  name: str | None = None,
) -> Tensor:
  """log(sum(exp(x))) over a dimension, without overflow.

  Args:
    x: a floating `Tensor`.
    reduced_dim: the dimension to sum over.
    extra_logit: a number, or a `Tensor` of some of the other dimensions: one more
      summand. No gradient flows to it.
    name: of the operation.

  Returns:
    A `Tensor` of x's dimensions but `reduced_dim`.
  """
  op = LogSumExpOperation(x, convert_to_dimension(reduced_dim), _extra(x, extra_logit), name)
  return op.outputs[0]


def log_softmax(
  x: FloatTensor,
  reduced_dim: DimensionLike,
  extra_logit: TensorOrScalar = None,
  name: str | None = None,
) -> Tensor:
  """X - `reduce_logsumexp`(x), of the shape of x; arguments as `reduce_logsumexp`."""
  op = LogSoftmaxOperation(x, convert_to_dimension(reduced_dim), _extra(x, extra_logit), name)
  return op.outputs[0]


def softmax(
  x: FloatTensor,
  reduced_dim: DimensionLike,
  extra_logit: TensorOrScalar = None,
  name: str | None = None,
) -> Tensor:
  """exp(x) / sum(exp(x)), of the shape of x; arguments as `reduce_logsumexp`.

  With an extra logit the sum stays below 1.
  """
  op = SoftmaxOperation(x, convert_to_dimension(reduced_dim), _extra(x, extra_logit), name)
  return op.outputs[0]
