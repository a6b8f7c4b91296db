"""Elementwise functions of two tensors that are aligned by dimension name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.kinds import Scalar
from mesh_tensorflow.errors import ArgumentError, DTypeError, GradientError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.slices import align
from mesh_tensorflow.numerics.kernels import elementwise
from mesh_tensorflow.operations.constants import import_tf_tensor
from mesh_tensorflow.operations.einsum import check_sizes
from mesh_tensorflow.operations.scalar import checked_scalar
from mesh_tensorflow.program.argument_kinds import TensorOrScalar
from mesh_tensorflow.program.dimensions import Shape, ShapeLike, convert_to_shape, is_subsequence
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = [
  "BinaryOpWithBroadcasting",
  "binary_arguments_to_tensors",
  "binary_op_with_broadcasting",
]


def infer_binary_broadcast_shape(
  shape1: Shape, shape2: Shape, given_output_shape: ShapeLike | None = None
) -> Shape:
  """The output shape of a binary operation.

  The given shape; else the longer one if the other's dimensions are a subsequence
  of it; else the first one's dimensions and then the second's missing ones.
  """
  if given_output_shape is not None:
    return convert_to_shape(given_output_shape)
  if is_subsequence(shape1.dims, shape2.dims):
    return shape2
  if is_subsequence(shape2.dims, shape1.dims):
    return shape1
  return Shape(shape1.dims + [d for d in shape2 if d not in shape1])


def binary_arguments_to_tensors(
  x1: TensorOrScalar, x2: TensorOrScalar, *, name: str = "binary operation"
) -> tuple[Tensor, Tensor]:
  """Turns the one of two arguments that is a scalar into a `Tensor`.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    name: of the operation, for messages.

  Raises:
    GraphError: neither is a `Tensor`.
  """
  if not isinstance(x1, Tensor) and not isinstance(x2, Tensor):
    raise no_tensor(name, x1, x2)
  if isinstance(x1, Tensor) and isinstance(x2, Tensor):
    return x1, x2
  if isinstance(x1, Tensor):
    return x1, _scalar_to_tensor(x2, x1, name)
  return _scalar_to_tensor(x1, x2, name), x2


def no_tensor(name: str, x1: TensorOrScalar, x2: TensorOrScalar) -> ArgumentError:
  """The error of an operation of which no operand is a `Tensor`."""
  return ArgumentError(
    f"{name}: at least one of {x1!r} and {x2!r} must be an mtf.Tensor; use mtf.import_tf_tensor"
  )


def _scalar_to_tensor(scalar: Scalar, like: Tensor, name: str) -> Tensor:
  if like.dtype != tf.bool:
    scalar = checked_scalar(scalar, like, name)
  elif not isinstance(scalar, (bool, np.bool_)) and getattr(scalar, "dtype", None) != tf.bool:
    raise DTypeError(f"{name}: {scalar!r} with the bool tensor {like}; use True or False")
  return import_tf_tensor(like.mesh, tf.convert_to_tensor(scalar, dtype=like.dtype), Shape([]))


def _check_operands(name: str, x1: Tensor, x2: Tensor, output_shape: Shape) -> None:
  """Raises a typed error if two tensors cannot be combined to the output shape."""
  if x1.dtype != x2.dtype:
    raise DTypeError(f"{name}: {x1} and {x2} have different dtypes; cast one of them (mtf.cast)")
  for x in (x1, x2):
    for d in x.shape:
      if d not in output_shape:
        same_name = [o for o in output_shape if o.name == d.name]
        hint = f"; {output_shape} has {same_name[0].name}={same_name[0].size}" if same_name else ""
        raise ShapeError(
          f"{name}: dimension {d.name}={d.size} of {x} is not in the output shape "
          f"{output_shape}{hint}"
        )
  for d in output_shape:
    if d not in x1.shape and d not in x2.shape:
      raise ShapeError(
        f"{name}: output dimension {d.name}={d.size} is neither in {x1} nor in {x2}; "
        "use mtf.broadcast to add dimensions"
      )
  check_sizes(name, [x1, x2])


class BinaryOpWithBroadcasting(Operation):
  """An elementwise function of two tensors, aligned by dimension name.

  Args:
    tf_fn: function of two slices.
    x1: a `Tensor`.
    x2: a `Tensor` of the same dtype.
    output_shape: a `Shape` of dimensions of x1 and x2.
    output_dtype: of the result.
    name: of the operation.
  """

  def __init__(
    self,
    tf_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    x1: Tensor,
    x2: Tensor,
    output_shape: Shape,
    output_dtype: tf.DType,
    name: str | None = None,
  ):
    super().__init__([x1, x2], name=name or "binary_op")
    _check_operands(self.name, x1, x2, output_shape)
    if not isinstance(output_dtype, tf.DType):
      raise DTypeError(f"{self.name}: output_dtype must be a tf.DType, got {output_dtype!r}")
    self._tf_fn = tf_fn
    self._outputs = [Tensor(self, output_shape, output_dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    raise GradientError(
      f"{self.name} of {self._inputs[0]} and {self._inputs[1]}: this function has no gradient; use "
      "mtf.stop_gradient"
    )

  def suits_uneven_slices(self, mesh_impl: MeshImpl) -> bool:
    # Padding may be any integer: TensorFlow raises an error if a divisor is 0.
    divides = self._inputs[0].dtype.is_integer and self._outputs[0].dtype.is_integer
    return self.lowers_uneven_slices or not divides

  def lower(self, lowering: LoweringInProgress) -> None:
    x1, x2 = self._inputs
    out = self.outputs[0]
    lowering.set_tensor_lowering(
      out,
      lowering.mesh_impl(self).slicewise(
        lambda a, b: elementwise(
          self._tf_fn,
          align(a, x1.shape.dims, out.shape.dims),
          align(b, x2.shape.dims, out.shape.dims),
        ),
        lowering.tensors[x1],
        lowering.tensors[x2],
      ),
    )


def binary_op_with_broadcasting(
  tf_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
  x1: TensorOrScalar,
  x2: TensorOrScalar,
  output_shape: ShapeLike | None = None,
  output_dtype: Any = None,
) -> Tensor:
  """An elementwise function of two tensors, one of which may be a scalar.

  Args:
    tf_fn: function of two slices.
    x1: a `Tensor`, or a scalar if x2 is a `Tensor`.
    x2: a `Tensor`, or a scalar if x1 is a `Tensor`.
    output_shape: `Shape` of the result; by default that of the operand with all dimensions, or
      else the union of both.
    output_dtype: x1's by default.
  """
  what = getattr(tf_fn, "__name__", "binary operation")
  x1, x2 = binary_arguments_to_tensors(x1, x2, name=what)
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  return BinaryOpWithBroadcasting(
    tf_fn, x1, x2, shape, x1.dtype if output_dtype is None else output_dtype
  ).outputs[0]
