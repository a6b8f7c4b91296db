"""Attention masks: tensors to add to logits, 0 where attention may go and -1e9 elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mesh_tensorflow.dimensions import Dimension
from mesh_tensorflow.graph import Mesh, Tensor
from mesh_tensorflow.operations.binary import binary_op_with_broadcasting
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reshape import rename_dimension
from mesh_tensorflow.operations.slicewise import cwise

MASKED = -1e9


def _additive(condition: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  return tf.where(condition, tf.constant(MASKED, dtype), tf.constant(0.0, dtype))


def _mask(
  hidden: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], x1: Tensor, x2: Any, dtype: Any
) -> Tensor:
  """MASKED where `hidden(x1, x2)`, else 0."""
  dtype = tf.as_dtype(dtype)
  return binary_op_with_broadcasting(
    lambda a, b: _additive(hidden(a, b), dtype), x1, x2, output_dtype=dtype
  )


def rename_length_to_memory_length(
  x: Tensor, length_name: str = "length", memory_length_name: str = "memory_length"
) -> Tensor:
  """Renames the dimension `length_name` of x."""
  return rename_dimension(x, length_name, memory_length_name)


def attention_mask_ignore_padding(inputs: Tensor, dtype: Any = tf.float32) -> Tensor:
  """Hides memory positions whose id is 0.

  Args:
    inputs: integer ids [..., length, ...].
    dtype: of the mask.

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


def attention_mask_autoregressive(query_pos: Tensor, dtype: Any = tf.float32) -> Tensor:
  """Hides memory positions after the query's.

  Args:
    query_pos: integer positions [..., length].
    dtype: of the mask.

  Returns:
    A `Tensor` [..., length, memory_length].
  """
  return _mask(tf.less, query_pos, rename_length_to_memory_length(query_pos), dtype)


def attention_mask_same_segment(
  query_segment: Tensor, memory_segment: Tensor | None = None, dtype: Any = tf.float32
) -> Tensor:
  """Hides memory positions of other segments than the query's.

  Args:
    query_segment: integer segment numbers [..., length].
    memory_segment: those of the memory [..., memory_length] (or [..., length]); the
      query's by default.
    dtype: of the mask.

  Returns:
    A `Tensor` [..., length, memory_length].
  """
  if memory_segment is None:
    memory_segment = query_segment
  if "length" in memory_segment.shape.dimension_names:
    memory_segment = rename_length_to_memory_length(memory_segment)
  return _mask(tf.not_equal, query_segment, memory_segment, dtype)


def attention_bias_local_block(
  mesh: Mesh, block_length: Dimension, memory_length: Dimension, dtype: Any = tf.int32
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
  query_pos = mtf_range(mesh, block_length, dtype) + block_length.size
  return _mask(tf.less, query_pos, mtf_range(mesh, memory_length, dtype), tf.float32)
