"""Sums that grow by one position at a time: a list of rows, which a loop changes in place.

The gradient of a gather at one position is a scatter there, zeros elsewhere. To add up such tensors
in a loop would cost, over all iterations, the square of their number; and a tensor that a loop
writes into is copied in each iteration, as TensorFlow's loops have it. A `TensorList` is not.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.slices import transpose_to
from mesh_tensorflow.operations.indexing import (
  ScatterAddOperation,
  begin_of,
  is_split,
  keep_where,
)
from mesh_tensorflow.program.dimensions import Shape


def has_one_position(op: ScatterAddOperation) -> bool:
  """True if the index of a scatter is a scalar, so that it adds to one row."""
  return not op.inputs[1].shape.ndims


def _indexed_first(op: ScatterAddOperation) -> Shape:
  return Shape([op.dim, *(op.outputs[0].shape - op.dim)])


def empty_rows(op: ScatterAddOperation, lowering: LoweringInProgress) -> Any:
  """Creates each processor's list of rows of the scatter's output, along the indexed dimension.

  Args:
    op: the scatter.
    lowering: the lowering in which the loop is lowered.
  """
  impl = lowering.mesh_impl(op)
  size, *sizes = impl.slice_shape(_indexed_first(op))
  return impl.slicewise(
    lambda: tf.raw_ops.TensorListReserve(
      element_shape=tf.constant(sizes, tf.int32),
      num_elements=size,
      element_dtype=op.outputs[0].dtype,
    )
  )


def add_to_row(op: ScatterAddOperation, lowering: LoweringInProgress, rows: Any) -> Any:
  """Adds the scatter's update to its row; returns the new list.

  Args:
    op: the scatter.
    lowering: the lowering that has its inputs.
    rows: the list, from `empty_rows` or an earlier call.
  """
  impl = lowering.mesh_impl(op)
  y, indices = op.inputs
  rest = _indexed_first(op).dims[1:]
  size, *sizes = impl.slice_shape(_indexed_first(op))
  checked = is_split(impl, op.dim) or not op.in_range

  def add_row(handle: tf.Tensor, row: tf.Tensor, i: tf.Tensor, begin: Any) -> tf.Tensor:
    row = transpose_to(row, y.shape.dims, rest)
    i = tf.cast(i, tf.int32)
    if checked:
      i = i - tf.cast(begin, i.dtype)
      safe = tf.clip_by_value(i, 0, size - 1)
      row = keep_where(row, tf.equal(safe, i))
      i = safe
    # Rows without a value are read as zeros.
    before = tf.raw_ops.TensorListGetItem(
      input_handle=handle,
      index=i,
      element_shape=tf.constant(sizes, tf.int32),
      element_dtype=row.dtype,
    )
    total = tf.add(tf.ensure_shape(before, sizes), row)
    return tf.raw_ops.TensorListSetItem(input_handle=handle, index=i, item=total)

  return impl.slicewise(
    add_row,
    rows,
    lowering.tensors[y].to_laid_out_tensor(),
    lowering.tensors[indices],
    begin_of(impl, op.dim),
  )


def from_rows(op: ScatterAddOperation, lowering: LoweringInProgress, rows: Any) -> Any:
  """Stacks the rows to the slices of the sum.

  Args:
    op: the scatter.
    lowering: the lowering in which the loop is lowered.
    rows: the list.
  """
  impl = lowering.mesh_impl(op)
  shape, out = _indexed_first(op), op.outputs[0]
  size, *sizes = impl.slice_shape(shape)

  def stack(handle: tf.Tensor) -> tf.Tensor:
    t = tf.raw_ops.TensorListStack(
      input_handle=handle,
      element_shape=tf.constant(sizes, tf.int32),
      element_dtype=out.dtype,
      num_elements=size,
    )
    return transpose_to(tf.ensure_shape(t, [size, *sizes]), shape.dims, out.shape.dims)

  return impl.slicewise(stack, rows)
