"""Comparisons, and logical functions of two bool tensors; see `elementwise.logical_not`."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.operations.broadcasting import binary_op_with_broadcasting
from mesh_tensorflow.program.argument_kinds import RealOrScalar, TensorOrScalar
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.program.graph import Tensor

__all__ = [
  "equal",
  "greater",
  "greater_equal",
  "less",
  "less_equal",
  "logical_and",
  "logical_or",
  "not_equal",
]


def less(x1: RealOrScalar, x2: RealOrScalar, output_shape: ShapeLike | None = None) -> Tensor:
  """x1 < x2, elementwise, as a bool tensor.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
  """
  return binary_op_with_broadcasting(tf.less, x1, x2, output_shape, tf.bool)


def greater(x1: RealOrScalar, x2: RealOrScalar, output_shape: ShapeLike | None = None) -> Tensor:
  """x1 > x2, elementwise, as a bool tensor; arguments as `less`."""
  return binary_op_with_broadcasting(tf.greater, x1, x2, output_shape, tf.bool)


def less_equal(x1: RealOrScalar, x2: RealOrScalar, output_shape: ShapeLike | None = None) -> Tensor:
  """x1 <= x2, elementwise, as a bool tensor; arguments as `less`."""
  return binary_op_with_broadcasting(tf.less_equal, x1, x2, output_shape, tf.bool)


def greater_equal(
  x1: RealOrScalar, x2: RealOrScalar, output_shape: ShapeLike | None = None
) -> Tensor:
  """x1 >= x2, elementwise, as a bool tensor; arguments as `less`."""
  return binary_op_with_broadcasting(tf.greater_equal, x1, x2, output_shape, tf.bool)


def equal(x1: TensorOrScalar, x2: TensorOrScalar, output_shape: ShapeLike | None = None) -> Tensor:
  """x1 == x2, elementwise (the operator == compares identity); arguments as `less`."""
  return binary_op_with_broadcasting(tf.equal, x1, x2, output_shape, tf.bool)


def not_equal(
  x1: TensorOrScalar, x2: TensorOrScalar, output_shape: ShapeLike | None = None
) -> Tensor:
  """x1 != x2, elementwise; arguments as `less`."""
  return binary_op_with_broadcasting(tf.not_equal, x1, x2, output_shape, tf.bool)


def logical_and(
  x1: TensorOrScalar, x2: TensorOrScalar, output_shape: ShapeLike | None = None
) -> Tensor:
  """x1 and x2, elementwise; arguments as `less`."""
  return binary_op_with_broadcasting(tf.logical_and, x1, x2, output_shape, tf.bool)


def logical_or(
  x1: TensorOrScalar, x2: TensorOrScalar, output_shape: ShapeLike | None = None
) -> Tensor:
  """x1 or x2, elementwise; arguments as `less`."""
  return binary_op_with_broadcasting(tf.logical_or, x1, x2, output_shape, tf.bool)
