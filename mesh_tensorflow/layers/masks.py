"""Attention masks: tensors to add to logits, 0 where attention may go, `masked_logit` elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from mesh_tensorflow.arguments.kinds import DTypeLike, FloatDTypeLike
from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.operations.broadcasting import binary_op_with_broadcasting
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reshape import rename_dimension
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.program.argument_kinds import NumberTensor, RealTensor, TensorOrScalar
from mesh_tensorflow.program.dimensions import Dimension, DimensionLike, Shape
from mesh_tensorflow.program.graph import Mesh, Tensor

__all__ = [
  "attention_bias_local_2d_block",
  "attention_bias_local_block",
  "attention_mask_autoregressive",
  "attention_mask_ignore_padding",
  "attention_mask_same_segment",
  "rename_length_to_memory_length",
]


def masked_logit(dtype: tf.DType) -> float:
  """Summand that hides a logit: -1e9, or in float16 half of the least number.

  It is finite: where all positions are masked, the softmax has equal weights, not NaN.

  Args:
    dtype: dtype of the logits.
  """
  return max(-1e9, float(dtype.min) / 2)


def _additive(condition: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  return tf.where(condition, tf.constant(masked_logit(dtype), dtype), tf.constant(0.0, dtype))


def mask_where(
  hidden: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
  x1: Tensor,
  x2: TensorOrScalar,
  dtype: DTypeLike,
  output_shape: Shape | None = None,
) -> Tensor:
  """`masked_logit` where `hidden(x1, x2)`, a function of slices, is true; else 0.

  Args:
    hidden: from slices of x1 and x2 to booleans.
    x1: positions or segments of queries or of memory.
    x2: those of the other one.
    dtype: dtype of the mask.
    output_shape: dims of the mask; by default the union of both.
  """
  dtype = tf.as_dtype(dtype)
  return binary_op_with_broadcasting(
    lambda a, b: _additive(hidden(a, b), dtype), x1, x2, output_shape, output_dtype=dtype
  )


def rename_length_to_memory_length(
  x: Tensor, length_name: str = "length", memory_length_name: str = "memory_length"
) -> Tensor:
  """Renames the dimension `length_name` of x.

  Args:
    x: a `Tensor`.
    length_name: name of the dimension.
    memory_length_name: its new name.
  """
  return rename_dimension(x, length_name, memory_length_name)


def attention_mask_ignore_padding(
  inputs: NumberTensor, dtype: FloatDTypeLike = tf.float32
) -> Tensor:
  """Hides memory positions whose id is 0.

  Args:
    inputs: integer ids [..., length, ...].
    dtype: dtype of the mask.

  Returns:
    A `Tensor` [..., memory_length, ...].
  """
  dtype = tf.as_dtype(dtype)
  return cwise(
    lambda t: _additive(tf.equal(t, 0), dtype),
    [rename_length_to_memory_length(inputs)],
    output_dtype=dtype,
    grad_function=0,
    name="mask_padding",
  )


def attention_mask_autoregressive(
  query_pos: RealTensor, dtype: FloatDTypeLike = tf.float32
) -> Tensor:
  """Hides memory positions after the query's.

  Args:
    query_pos: integer positions [..., length].
    dtype: dtype of the mask.

  Returns:
    A `Tensor` [..., length, memory_length].
  """
  return mask_where(tf.less, query_pos, rename_length_to_memory_length(query_pos), dtype)


def attention_mask_same_segment(
  query_segment: Tensor, memory_segment: Tensor | None = None, dtype: FloatDTypeLike = tf.float32
) -> Tensor:
  """Hides memory positions of other segments than the query's.

  Args:
    query_segment: integer segment numbers [..., length].
    memory_segment: those of the memory [..., memory_length] (or [..., length]); the
      query's by default.
    dtype: dtype of the mask.

  Returns:
    A `Tensor` [..., length, memory_length].
  """
  if memory_segment is None:
    memory_segment = query_segment
  if "length" in memory_segment.shape.dimension_names:
    memory_segment = rename_length_to_memory_length(memory_segment)
  return mask_where(tf.not_equal, query_segment, memory_segment, dtype)


def attention_bias_local_block(
  mesh: Mesh, block_length: Dimension, memory_length: DimensionLike, dtype: DTypeLike = tf.int32
) -> Tensor:
  """Causal mask of a block that attends to the block before it and to itself.

  Args:
    mesh: a `Mesh`.
    block_length: dimension of the queries.
    memory_length: dimension of the memory, twice as large.
    dtype: integer dtype to compute positions in.

  Returns:
    A float32 `Tensor` [block_length, memory_length].
  """
  # The block itself is the second half of the memory.
  query_pos = mtf_range(mesh, block_length, dtype) + block_length.size
  return mask_where(tf.less, query_pos, mtf_range(mesh, memory_length, dtype), tf.float32)


def attention_bias_local_2d_block(
  mesh: Mesh,
  h_dim: Dimension,
  w_dim: Dimension,
  memory_h_dim: Dimension,
  memory_w_dim: Dimension,
  dtype: DTypeLike = tf.int32,
) -> Tensor:
  """Causal mask of a block that attends to the blocks above and left of it and to itself.

  The block itself is the last part of the memory, of size [h_dim, w_dim]. All before it is
  free; of itself a position sees what stands up to it, row by row.

  Args:
    mesh: a `Mesh`.
    h_dim: rows of the queries.
    w_dim: columns of the queries.
    memory_h_dim: rows of the memory, usually twice as many.
    memory_w_dim: columns of the memory, usually twice as many.
    dtype: integer dtype to compute positions in.

  Returns:
    A float32 `Tensor` [h_dim, w_dim, memory_h_dim, memory_w_dim].

  Raises:
    ShapeError: the memory is smaller than the block.
  """
  for dim, memory_dim in ((h_dim, memory_h_dim), (w_dim, memory_w_dim)):
    if memory_dim.size < dim.size:
      raise ShapeError(
        f"attention_bias_local_2d_block: the memory {memory_dim.name}={memory_dim.size} must "
        f"be at least as large as the block, {dim.name}={dim.size}"
      )
  row = mtf_range(mesh, memory_h_dim, dtype) - (memory_h_dim.size - h_dim.size)
  column = mtf_range(mesh, memory_w_dim, dtype) - (memory_w_dim.size - w_dim.size)
  # Positions in the block are counted from 0; those before it stand as -1.
  memory_pos = binary_op_with_broadcasting(
    lambda r, c: tf.where(tf.minimum(r, c) < 0, tf.constant(-1, r.dtype), r * w_dim.size + c),
    row,
    column,
  )
  query_pos = mtf_range(mesh, h_dim, dtype) * w_dim.size + mtf_range(mesh, w_dim, dtype)
  return mask_where(tf.less, query_pos, memory_pos, tf.float32)
