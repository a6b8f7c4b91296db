"""Blocks of a variable: what is large is computed, set, read and written a part at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.numerics import initializers

# Bytes of initial values that are computed at a time; computing them takes several times as much.
_COMPUTED_AT_ONCE = 16 * 2**20

# Of TensorFlow's ResourceStridedSliceAssign.
_MOST_AXES_OF_A_BLOCK = 8


def split_block(
  size: Sequence[int], item_bytes: int, limit: int
) -> list[tuple[list[int], list[int]]]:
  """Cuts a block of values into parts of at most `limit` bytes each, or of one row.

  Args:
    size: shape of the block.
    item_bytes: bytes of a value.
    limit: bytes. What TensorFlow sets no part of (more than eight axes) is one part.

  Returns:
    (offset, size) of each part.
  """
  axis = next((i for i, n in enumerate(size) if n > 1), None)
  total = math.prod(size) * item_bytes
  if axis is None or total <= limit or len(size) > _MOST_AXES_OF_A_BLOCK:
    return [([0] * len(size), list(size))]
  rows = max(1, limit * size[axis] // total)
  parts = []
  for start in range(0, size[axis], rows):
    offset, part = [0] * len(size), list(size)
    offset[axis], part[axis] = start, min(rows, size[axis] - start)
    parts.append((offset, part))
  return parts


def assign_block(variable: tf.Variable, offset: Sequence[int], value: tf.Tensor) -> None:
  """Writes a block of a variable in place, without a copy.

  Args:
    variable: the variable.
    offset: of the block.
    value: its values.
  """
  if value.shape.ndims > _MOST_AXES_OF_A_BLOCK:  # It is the whole.
    variable.assign(value)
    return
  # Not variable[...].assign, which reads the variable: it would have to be copied then.
  tf.raw_ops.ResourceStridedSliceAssign(
    ref=variable.handle,
    begin=offset,
    end=[o + n for o, n in zip(offset, value.shape)],
    strides=[1] * len(offset),
    value=value,
  )
  # After a partial write TensorFlow copies the variable at each read, unless this is called.
  tf.raw_ops.DisableCopyOnRead(resource=variable.handle)


def computed_in_parts(
  init: initializers.Initializer,
  key: int,
  full: Sequence[int],
  begin: tuple[int, ...],
  part: Sequence[int],
  dtype: tf.DType,
) -> tf.Tensor:
  """Computes the initial values of a slice in blocks, with bounded temporary memory."""

  def values(begin: Sequence[int], size: Sequence[int]) -> tf.Tensor:
    return tf.cast(init.slice_values(key, full, list(begin), list(size), dtype), dtype)

  parts = split_block(part, dtype.size, _COMPUTED_AT_ONCE)
  # The first computes the whole for each part; the second takes no more than its result.
  if len(parts) == 1 or isinstance(init, (initializers.FromFunction, initializers.Constant)):
    return values(begin, part)
  result = tf.Variable(tf.zeros(part, dtype), trainable=False)
  for offset, size in parts:
    assign_block(result, offset, values([b + o for b, o in zip(begin, offset)], size))
  return result.read_value()  # The variable that gets it takes over the memory.
