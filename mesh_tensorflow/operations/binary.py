"""Arithmetic of two tensors, or of a tensor and a scalar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import Scalar
from mesh_tensorflow.errors import DivisionError, DTypeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.broadcasting import (
  BinaryOpWithBroadcasting,
  binary_arguments_to_tensors,
  binary_op_with_broadcasting,
  infer_binary_broadcast_shape,
  no_tensor,
)
from mesh_tensorflow.operations.comparison import equal
from mesh_tensorflow.operations.complex import conj
from mesh_tensorflow.operations.einsum import check_sizes, einsum
from mesh_tensorflow.operations.elementwise import negative
from mesh_tensorflow.operations.reduction import reduce_sum
from mesh_tensorflow.operations.scalar import ScalarAddOperation, ScalarMultiplyOperation
from mesh_tensorflow.operations.where import where
from mesh_tensorflow.program.argument_kinds import (
  NumberOrScalar,
  NumberOrTextTensor,
  NumberTensor,
  RealOrScalar,
  RealTensor,
  TensorOrScalar,
)
from mesh_tensorflow.program.dimensions import Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Tensor, is_differentiable
from mesh_tensorflow.program.operators import provide

__all__ = [
  "AddOperation",
  "MinMaxOperation",
  "add",
  "add_n",
  "divide",
  "floordiv",
  "maximum",
  "minimum",
  "mod",
  "multiply",
  "sub",
]


class _LinearOperation(BinaryOpWithBroadcasting):
  """x1 + x2 or x1 - x2: sums that are pending stay pending."""

  lowers_uneven_slices = True

  def lower(self, lowering: LoweringInProgress) -> None:
    x1, x2 = self._inputs
    out = self.outputs[0]
    # Below the slices are added as they are, without being aligned.
    if not x1.shape == x2.shape == out.shape:
      super().lower(lowering)
      return
    lowering.set_tensor_lowering(
      out,
      lowering.mesh_impl(self).slicewise_delay_allreduce(
        kernels.of_its_own(self._tf_fn), lowering.tensors[x1], lowering.tensors[x2]
      ),
    )


class AddOperation(_LinearOperation):
  """The sum of two tensors, whose sums over the mesh may be pending.

  Args:
    x1: a `Tensor`.
    x2: a `Tensor`.
    output_shape: a `Shape`.
    name: of the operation.
  """

  def __init__(
    self, x1: NumberOrTextTensor, x2: Tensor, output_shape: Shape, name: str | None = None
  ):
    super().__init__(tf.add, x1, x2, output_shape, x1.dtype, name=name or "add")

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy = grad_ys[0]
    return [reduce_sum(dy, output_shape=x.shape) for x in self.inputs]


class SubOperation(_LinearOperation):
  """x1 - x2."""

  def __init__(self, x1: NumberTensor, x2: Tensor, output_shape: Shape, name: str | None = None):
    super().__init__(tf.subtract, x1, x2, output_shape, x1.dtype, name=name or "sub")

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy = grad_ys[0]
    return [
      reduce_sum(dy, output_shape=self.inputs[0].shape),
      negative(reduce_sum(dy, output_shape=self.inputs[1].shape)),
    ]


class DivideOperation(BinaryOpWithBroadcasting):
  """x1 / x2 of floating or complex tensors."""

  def __init__(self, x1: Tensor, x2: Tensor, output_shape: Shape, name: str | None = None):
    super().__init__(tf.divide, x1, x2, output_shape, x1.dtype, name=name or "divide")
    if not is_differentiable(x1.dtype):
      raise DTypeError(f"{self.name}: divide needs floating tensors, got {x1}; use mtf.floordiv")

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    x1, x2 = self.inputs
    # d y / d x1 = 1 / x2, and d y / d x2 = -x1 / x2 ** 2 = -y / x2, conjugate if complex.
    dx = divide(grad_ys[0], conj(x2), output_shape=self.outputs[0].shape)
    return [
      reduce_sum(dx, output_shape=x1.shape),
      negative(einsum([dx, conj(self.outputs[0])], output_shape=x2.shape)),
    ]


class MinMaxOperation(BinaryOpWithBroadcasting):
  """Elementwise minimum or maximum; at a tie both operands get the whole gradient.

  Args:
    tf_fn: tf.minimum or tf.maximum. The others: see `AddOperation`.
  """

  lowers_uneven_slices = True

  def __init__(
    self,
    tf_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    x1: RealTensor,
    x2: Tensor,
    output_shape: Shape,
    name: str | None = None,
  ):
    super().__init__(tf_fn, x1, x2, output_shape, x1.dtype, name=name or "min_max")

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy, y = grad_ys[0], self.outputs[0]
    return [
      reduce_sum(where(equal(x, y, output_shape=y.shape), dy, 0.0), output_shape=x.shape)
      for x in self.inputs
    ]


def floordiv(x1: RealOrScalar, x2: RealOrScalar, output_shape: ShapeLike | None = None) -> Tensor:
  """Quotient rounded down; no gradient; arguments as `add`."""
  if isinstance(x1, Tensor) and x1.dtype.is_integer:
    _check_divisor("floordiv", x1, x2)
  return binary_op_with_broadcasting(tf.math.floordiv, x1, x2, output_shape)


def mod(x1: RealOrScalar, x2: RealOrScalar, output_shape: ShapeLike | None = None) -> Tensor:
  """Remainder with the sign of the divisor; no gradient; arguments as `add`."""
  if isinstance(x1, Tensor) and x1.dtype.is_integer:
    _check_divisor("mod", x1, x2)
  return binary_op_with_broadcasting(tf.math.floormod, x1, x2, output_shape)


def minimum(
  x1: RealOrScalar, x2: RealOrScalar, output_shape: ShapeLike | None = None, name: str | None = None
) -> Tensor:
  """The smaller one, elementwise; arguments as `add`."""
  return _min_max(tf.minimum, x1, x2, output_shape, name, "minimum")


def maximum(
  x1: RealOrScalar, x2: RealOrScalar, output_shape: ShapeLike | None = None, name: str | None = None
) -> Tensor:
  """The larger one, elementwise; arguments as `add`."""
  return _min_max(tf.maximum, x1, x2, output_shape, name, "maximum")


def _min_max(
  tf_fn: Callable[..., tf.Tensor],
  x1: TensorOrScalar,
  x2: TensorOrScalar,
  output_shape: ShapeLike | None,
  name: str | None,
  what: str,
) -> Tensor:
  x1, x2 = binary_arguments_to_tensors(x1, x2, name=name or what)
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  return MinMaxOperation(tf_fn, x1, x2, shape, name=name).outputs[0]


def add(
  x1: NumberOrTextTensor | Scalar,
  x2: NumberOrTextTensor | Scalar,
  output_shape: ShapeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """x1 + x2; one of them may be a scalar.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
    name: of the operation.
  """
  if not isinstance(x2, Tensor):
    return ScalarAddOperation(_tensor(name or "add", x1, x2), x2, name=name).outputs[0]
  if not isinstance(x1, Tensor):
    return ScalarAddOperation(x2, x1, name=name).outputs[0]
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  return AddOperation(x1, x2, shape, name=name).outputs[0]


def _check_divisor(name: str, x1: object, x2: object) -> None:
  """Raises `DivisionError` if the number x2 is zero; of a symbolic tf.Tensor nothing is known."""
  if isinstance(x2, (int, float, np.generic, np.ndarray)) and np.ndim(x2) == 0 and x2 == 0:
    raise DivisionError(f"{name}: {x1} divided by the number {x2!r}")


def _tensor(name: str, x1: object, x2: object) -> Tensor:
  if not isinstance(x1, Tensor):
    raise no_tensor(name, x1, x2)
  return x1


def add_n(xs: Sequence[NumberOrTextTensor | Scalar]) -> Any:
  """The sum of a list of tensors; 0 for none.

  Args:
    xs: a list of `Tensor`s.
  """
  if not xs:
    return 0
  total = xs[0]
  for x in xs[1:]:
    total = add(total, x)
  return total


def sub(
  x1: NumberOrScalar,
  x2: NumberOrScalar,
  output_shape: ShapeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """x1 - x2; one of them may be a scalar; arguments as `add`."""
  if not isinstance(x2, Tensor):
    return ScalarAddOperation(_tensor(name or "sub", x1, x2), -x2, name=name).outputs[0]
  x1, x2 = binary_arguments_to_tensors(x1, x2, name=name or "sub")
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  return SubOperation(x1, x2, shape, name=name).outputs[0]


def multiply(
  x1: NumberOrScalar,
  x2: NumberOrScalar,
  output_shape: ShapeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """x1 * x2; one of them may be a scalar; arguments as `add`.

  An output shape may leave dimensions out (they are summed) or add some (broadcast).
  """
  if not isinstance(x2, Tensor):
    return ScalarMultiplyOperation(_tensor(name or "multiply", x1, x2), x2, name=name).outputs[0]
  if not isinstance(x1, Tensor):
    return ScalarMultiplyOperation(x2, x1, name=name).outputs[0]
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  check_sizes(name or "multiply", [x1, x2], convert_to_shape(output_shape))
  return einsum([x1, x2], output_shape=shape, name=name or "multiply")


def divide(
  x1: NumberOrScalar,
  x2: NumberOrScalar,
  output_shape: ShapeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """x1 / x2 of floating or complex tensors; one of them may be a scalar; arguments as `add`."""
  if not isinstance(x2, Tensor):
    x1 = _tensor(name or "divide", x1, x2)
    _check_divisor(name or "divide", x1, x2)
    # As a product, behind which a sum may stay pending.
    return ScalarMultiplyOperation(x1, 1.0 / x2, name=name).outputs[0]
  x1, x2 = binary_arguments_to_tensors(x1, x2, name=name or "divide")
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  return DivideOperation(x1, x2, shape, name=name).outputs[0]


provide(
  add=checked(add),
  sub=checked(sub),
  multiply=checked(multiply),
  divide=checked(divide),
  floordiv=checked(floordiv),
  mod=checked(mod),
)
