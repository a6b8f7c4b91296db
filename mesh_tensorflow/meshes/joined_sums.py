"""Pending sums that meet in one exchange, though each is of a tensor of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.program.dimensions import list_product


class JoinedSums:
  """Buckets of pending sums, each of one dtype over the same mesh axes.

  A bucket is exchanged as one vector as soon as it has `MeshImpl.joined_sum_bytes`, or when one of
  its sums is asked for. So messages are few; and of sums that are added in the order in which they
  are computed, as those of a backward pass, the first are exchanged while others are computed.
  """

  def __init__(self) -> None:
    self._buckets: dict[Any, _Bucket] = {}

  def add(self, x: LazyAllreduceSum, impl: MeshImpl) -> None:
    """Adds a sum that is pending, and that the program will ask for; at most once.

    Args:
      x: the sum.
      impl: its mesh implementation.
    """
    most = impl.joined_sum_bytes(x.mesh_axes)
    if not most or x.is_reduced or x.exchange_with_others is not None:
      return
    t = tf.convert_to_tensor(x.laid_out_input.one_slice)
    size = list_product(x.slice_shape) * t.dtype.size
    if size >= most:  # It is better off without the copies.
      x.to_laid_out_tensor()
      return
    key = impl, tuple(x.mesh_axes), t.dtype
    bucket = self._buckets.setdefault(key, _Bucket(impl, x.mesh_axes))
    bucket.add(x, size)
    if bucket.size >= most:
      bucket.exchange()

  def exchange(self) -> None:
    """Exchanges what has been added."""
    for bucket in self._buckets.values():
      bucket.exchange()


class _Bucket:
  """Sums that wait for each other.

  Attributes:
    size: in bytes.
  """

  def __init__(self, impl: MeshImpl, mesh_axes: Sequence[int]):
    self._impl = impl
    self._mesh_axes = list(mesh_axes)
    self._sums: list[LazyAllreduceSum] = []
    self.size = 0

  def add(self, x: LazyAllreduceSum, size: int) -> None:
    self._sums.append(x)
    self.size += size
    x.exchange_with_others = self.exchange

  def exchange(self) -> None:
    sums, self._sums, self.size = self._sums, [], 0
    for x in sums:
      x.exchange_with_others = None
    if len(sums) < 2:
      for x in sums:
        x.to_laid_out_tensor()
      return
    shapes = [x.slice_shape for x in sums]
    sizes = [list_product(shape) for shape in shapes]
    with tf.name_scope("joined_sums"):
      joined = self._impl.slicewise(
        lambda *slices: tf.concat([tf.reshape(t, [-1]) for t in slices], 0),
        *[x.laid_out_input for x in sums],
      )
      total = self._impl.allreduce(joined, self._mesh_axes, "SUM")
      parts = self._impl.slicewise(
        lambda t: tuple(tf.reshape(p, s) for p, s in zip(tf.split(t, sizes), shapes)), total
      )
    for x, part in zip(sums, parts):
      x.set_sum(part)
      if x.add_counter_fn:
        x.add_counter_fn()
