"""Padding of slices: places behind the end of a dimension that its mesh axis does not divide.

No value depends on what is in them. Here it is zero, unless a test fills it with something that it
would find again: `filled_with(float("nan"))`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from mesh_tensorflow.numerics import kernels

# What tensors that are padded get; of integers a large number if it is not zero.
_fill: float = 0.0


@contextlib.contextmanager
def filled_with(value: float) -> Iterator[None]:
  """Context manager: new padding has a value, where the dtype allows it, in place of zero.

  Args:
    value: NaN, say.
  """
  global _fill
  before, _fill = _fill, value
  try:
    yield
  finally:
    _fill = before


def is_filled() -> bool:
  """True inside `filled_with`."""
  return _fill != 0.0


def fill_of(dtype: tf.DType) -> tf.Tensor:
  """The scalar that new padding is filled with.

  Args:
    dtype: of the padded tensor.
  """
  if not is_filled() or dtype in (tf.bool, tf.string):
    return tf.zeros([], dtype)
  if dtype.is_integer:
    return tf.constant(dtype.max // 2, dtype)
  return tf.cast(tf.constant(_fill, tf.float64), dtype)


def zero(dtype: tf.DType) -> tf.Tensor:
  """Zero of a dtype."""
  return tf.zeros([], dtype)


def lowest(dtype: tf.DType) -> tf.Tensor:
  """The number that is no larger than any other of a dtype, minus infinity if it has that."""
  return tf.constant(float("-inf") if dtype.is_floating else dtype.min, dtype)


def highest(dtype: tf.DType) -> tf.Tensor:
  """The number that is no smaller than any other of a dtype, infinity if it has that."""
  return tf.constant(float("inf") if dtype.is_floating else dtype.max, dtype)


def padded(x: tf.Tensor, axis: int, size: int) -> tf.Tensor:
  """x with padding behind its end along an axis.

  Args:
    x: a tensor.
    axis: number of the axis.
    size: its size in the result.
  """
  n = x.shape[axis]
  if n == size:
    return x
  sizes = x.shape.as_list()
  sizes[axis] = size - n
  return tf.concat([x, tf.fill(sizes, fill_of(x.dtype))], axis)


def replaced(
  x: tf.Tensor, axes: Sequence[int], extents: Sequence[int | tf.Tensor], value: tf.Tensor
) -> tf.Tensor:
  """x with another value in its padding.

  Args:
    x: a slice.
    axes: the axes along which it may have padding.
    extents: for each how many places are not padding; Python ints, or int32 scalars.
    value: a scalar of x's dtype.
  """
  inside = inside_of(x.shape.as_list(), axes, extents)
  return x if inside is None else kernels.where(inside, x, value)


def inside_of(
  sizes: Sequence[int], axes: Sequence[int], extents: Sequence[int | tf.Tensor]
) -> tf.Tensor | None:
  """A mask of the places of a slice that are not padding, which broadcasts to the slice.

  Args:
    sizes: of the slice.
    axes: the axes along which it may have padding.
    extents: for each how many places are not padding; Python ints, or int32 scalars.

  Returns:
    A bool tensor; None if the slice is known to have no padding.
  """
  inside = None
  for axis, extent in zip(axes, extents):
    if isinstance(extent, int) and extent >= sizes[axis]:
      continue
    along = tf.reshape(tf.range(sizes[axis]) < extent, [-1] + [1] * (len(sizes) - axis - 1))
    inside = along if inside is None else kernels.elementwise(tf.logical_and, inside, along)
  return inside
