"""Buckets of relative positions (Raffel et al., 2020)."""

from __future__ import annotations

import math

import tensorflow as tf

import mesh_tensorflow as mtf


def relative_position_bucket(
  relative_position: mtf.Tensor,
  bidirectional: bool = True,
  num_buckets: int = 32,
  max_distance: int = 128,
) -> mtf.Tensor:
  """The number of the bucket that a relative position falls into.

  Half of the buckets are for one position each, the others for ranges that grow logarithmically
  up to `max_distance`; all positions beyond share the last.

  Args:
    relative_position: int32 tensor, memory position minus query position.
    bidirectional: whether positions to the right have buckets (the upper half); else they share
      bucket 0 with relative position 0.
    num_buckets: number of buckets.
    max_distance: the distance from which on there is one bucket.

  Returns:
    An int32 tensor of the same dims, in [0, num_buckets).
  """

  def bucket(relative: tf.Tensor) -> tf.Tensor:
    n = -relative
    if bidirectional:
      buckets = num_buckets // 2
      # The second half of the buckets is for memory after the query.
      offset = tf.cast(n < 0, tf.int32) * buckets
      n = tf.abs(n)
    else:
      buckets, offset = num_buckets, 0
      n = tf.maximum(n, 0)
    exact = buckets // 2
    # Float32 products with reciprocals, in this order: at the edges of the ranges the bucket
    # depends on the rounding, and trained biases belong to these buckets.
    scale = 1.0 / math.log(max_distance / exact)
    log_ratio = tf.math.log(tf.cast(tf.maximum(n, 1), tf.float32) * (1.0 / exact))
    large = exact + tf.cast(log_ratio * scale * float(buckets - exact), tf.int32)
    return offset + tf.where(n < exact, n, tf.minimum(large, buckets - 1))

  return mtf.cwise(bucket, [relative_position], grad_function=0, name="relative_position_bucket")
