"""Softmax, log-softmax and log-sum-exp over a dimension, also a split one.

Those of half-precision tensors are computed in float32, and rounded once; so are their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.slices import align
from mesh_tensorflow.numerics import kernels, padding
from mesh_tensorflow.operations.broadcasting import binary_arguments_to_tensors
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast, exp
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

  A subclass says what the result is, from the slices alone and from maxima and sums over all.

  Args:
    x: logits.
    reduced_dim: the dimension to normalize over.
    extra_logit: None, or a `Tensor` of some of the other dimensions of x. No gradient
      flows to it.
    name: of the operation.
  """

  lowers_uneven_slices = True

  _default_name: str
  # Whether the result is without the dimension.
  _is_reduced = False

  def __init__(
    self,
    x: Tensor,
    reduced_dim: Dimension,
    extra_logit: Tensor | None = None,
    name: str | None = None,
  ):
    inputs = [x] if extra_logit is None else [x, extra_logit]
    super().__init__(inputs, name=name or self._default_name)
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
    self._outputs = [Tensor(self, self._reduced_shape if self._is_reduced else x.shape, x.dtype)]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl, dtype = lowering.mesh_impl(self), self.outputs[0].dtype
    x, *extra = (lowering.tensors[t].to_laid_out_tensor() for t in self.inputs)
    if dtype.size < 4:
      x, *extra = (impl.slicewise(lambda t: tf.cast(t, tf.float32), t) for t in (x, *extra))
    shape = self._inputs[0].shape
    x = impl.without_padding(x, shape, padding.lowest, [self._dim]).to_laid_out_tensor()
    if not self._is_reduced and self._is_local(lowering):
      result = impl.slicewise(self._of_whole, x)
    else:
      result = impl.slicewise(self._of_part, x, *self._max_and_sum(impl, x, *extra))
    if dtype.size < 4:
      result = impl.slicewise(lambda t: tf.cast(t, dtype), result)
    lowering.set_tensor_lowering(self.outputs[0], result)

  def _of_whole(self, x: tf.Tensor) -> tf.Tensor:
    """Computes the result from slices that hold the whole dimension."""
    raise NotImplementedError

  def _of_part(self, x: tf.Tensor, maximum: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Computes the result from slices, the global maximum, and the sum of exp(x - maximum)."""
    raise NotImplementedError

  def _max_and_sum(self, impl: Any, laid_out: Any, extra_logit: Any = None) -> tuple[Any, Any]:
    """Per slice with the reduced axis kept at size 1: the maximum, and sum exp(x - max)."""
    axis = self._axis
    maximum = impl.slicewise(lambda x: tf.reduce_max(x, axis, keepdims=True), laid_out)
    mesh_axis = impl.tensor_dimension_to_mesh_axis(self._dim)
    mesh_axes = [] if mesh_axis is None else [mesh_axis]
    maximum = impl.allreduce(maximum, mesh_axes, "MAX")
    extra = None
    if extra_logit is not None:
      kept, dims = (x.shape.dims for x in self.inputs)
      extra = impl.slicewise(lambda e: align(e, dims, kept), extra_logit)
      maximum = impl.slicewise(lambda m, e: kernels.elementwise(tf.maximum, m, e), maximum, extra)
    total = impl.slicewise(
      lambda x, m: tf.reduce_sum(tf.exp(x - m), axis, keepdims=True), laid_out, maximum
    )
    total = impl.allreduce(total, mesh_axes, "SUM")
    if extra is not None:
      # After the exchange: before it, every processor along the axis would add it once.
      total = impl.slicewise(
        lambda s, e, m: s + tf.exp(kernels.elementwise(tf.subtract, e, m)), total, extra, maximum
      )
    return maximum, total

  def _is_local(self, lowering: LoweringInProgress) -> bool:
    impl = lowering.mesh_impl(self)
    axis = impl.tensor_dimension_to_mesh_axis(self._dim)
    return len(self.inputs) == 1 and (axis is None or impl.shape[axis].size == 1)

  def _gradients(self, dx: Tensor) -> list[Tensor | None]:
    return [_as(self.inputs[0].dtype, dx)] + [None] * (len(self.inputs) - 1)

  def _softmax(self) -> Tensor:
    """That of the input, in float32 at least, from the input: half a result is too coarse."""
    x, *extra = self.inputs
    return _wide(SoftmaxOperation(x, self._dim, extra[0] if extra else None).outputs[0])

  @property
  def _is_half(self) -> bool:
    return bool(self.outputs[0].dtype.size < 4)


class SoftmaxOperation(_NormalizedExpOperation):
  """exp(x) / sum exp(x)."""

  _default_name = "softmax"

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy, y = _wide(grad_ys[0]), _wide(self.outputs[0])
    # Also right with an extra logit, when y sums to less than 1: dy_i/dx_j = y_i (d_ij - y_j).
    inner = einsum([dy, y], output_shape=self._reduced_shape)
    return self._gradients((dy - inner) * y)

  def _of_whole(self, x: tf.Tensor) -> tf.Tensor:
    return kernels.softmax(x, self._axis)

  def _of_part(self, x: tf.Tensor, maximum: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    return tf.exp(x - maximum) / total


class LogSoftmaxOperation(_NormalizedExpOperation):
  """x - log sum exp(x)."""

  _default_name = "log_softmax"

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy = _wide(grad_ys[0])
    probabilities = self._softmax() if self._is_half else exp(self.outputs[0])
    return self._gradients(dy - probabilities * reduce_sum(dy, output_shape=self._reduced_shape))

  def _of_whole(self, x: tf.Tensor) -> tf.Tensor:
    return tf.nn.log_softmax(x, self._axis)

  def _of_part(self, x: tf.Tensor, maximum: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    return (x - maximum) - tf.math.log(total)


class LogSumExpOperation(_NormalizedExpOperation):
  """log sum exp(x), without the reduced dimension."""

  _default_name = "reduce_logsumexp"
  _is_reduced = True

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy, x = _wide(grad_ys[0]), self.inputs[0]
    # exp(x - log sum exp(x)) is the softmax.
    probabilities = self._softmax() if self._is_half else exp(x - self.outputs[0])
    return self._gradients(probabilities * dy)

  def _of_part(self, x: tf.Tensor, maximum: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    del x
    return tf.squeeze(maximum + tf.math.log(total), self._axis)


def _wide(x: Tensor) -> Tensor:
  return _as(tf.float32, x) if x.dtype.size < 4 else x


def _as(dtype: tf.DType, x: Tensor) -> Tensor:
  return x if x.dtype == dtype else cast(x, dtype)


def _extra(x: Tensor, extra_logit: object) -> Tensor | None:
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
