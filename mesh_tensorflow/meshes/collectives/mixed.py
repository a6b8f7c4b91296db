"""Collectives of a mesh that spans workers: queues inside a worker, TensorFlow's between them."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.meshes.collectives.base import Collectives, Groups


class MixedCollectives(Collectives):
  """Takes the cheapest backend that reaches all members of the groups.

  Args:
    inside: the backend inside a worker.
    across: the backend between workers.
    worker_of: the worker of every processor.
  """

  def __init__(self, inside: Collectives, across: Collectives, worker_of: Sequence[int]):
    super().__init__(inside.pnum)
    self._inside = inside
    self._across = across
    self._worker_of = list(worker_of)

  def _backend(self, groups: Groups) -> Collectives:
    # One choice for all groups: the program is traced once for the processors of a worker.
    stays = all(len({self._worker_of[p] for p in group}) == 1 for group in groups.members)
    return self._inside if stays else self._across

  def joined_bytes(self, groups: Groups) -> int:
    return self._backend(groups).joined_bytes(groups)

  def all_reduce(self, x: tf.Tensor, groups: Groups, reduction: str) -> tf.Tensor:
    return self._backend(groups).all_reduce(x, groups, reduction)

  def all_gather(self, x: tf.Tensor, groups: Groups) -> list[tf.Tensor]:
    return self._backend(groups).all_gather(x, groups)

  def all_to_all(self, parts: Sequence[tf.Tensor], groups: Groups) -> list[tf.Tensor]:
    return self._backend(groups).all_to_all(parts, groups)

  def reduce_scatter(self, x: tf.Tensor, groups: Groups, axis: int) -> tf.Tensor:
    return self._backend(groups).reduce_scatter(x, groups, axis)

  def permute(self, x: tf.Tensor, groups: Groups, source: Sequence[int | None]) -> tf.Tensor:
    return self._backend(groups).permute(x, groups, source)
