"""Collectives by TensorFlow's own collective operations, between any devices."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.meshes.collectives.base import Collectives, Groups, check_static, fold
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.program.dimensions import list_product

# From this size of a tensor (bytes) on, TensorFlow's collectives permute it through relays in
# groups of more than 4. (Measured on 8 CPUs of one host: 42 ms against 58 ms for 4 MB, and slower
# below 1 MB.)
RELAY_BYTES = 1 << 20

# Up to this size of a message (bytes) sums are exchanged as one vector. (Measured with two workers
# of one host, 33 gradients of 10 MB together, ms of a processor in each: one by one 41, in messages
# of 0.5 MB 29, of 1 MB 22, of 4 MB 20. The last message is the one that no computation hides.)
JOINED_BYTES = 1 << 21

# Wider dtypes that hold a dtype exactly, for operations that do not support it.
_WIDER = {
  tf.bool: tf.int32,
  tf.int8: tf.int32,
  tf.uint8: tf.int32,
  tf.int16: tf.int32,
  tf.uint16: tf.int32,
  tf.uint32: tf.int64,
}


# Group keys of collectives between workers and of transfers lie between the numbers of TensorFlow's
# strategies and of `workers.membership`, and those of the groups of meshes, which begin here.
FIRST_GROUP_KEY = 1_000_000
_GROUP_KEYS = 2**31 - 2**20 - FIRST_GROUP_KEY


class KeyAllocator:
  """Numbers for TensorFlow's collectives, which are named by integers in a cluster.

  Group keys are functions of the devices: whatever else a worker runs or does not run, it has the
  same as the others of the group. Instance keys are never used twice in a group.
  """

  def __init__(self) -> None:
    self._instances: dict[int, Iterator[int]] = {}

  def group_key(self, devices: Sequence[str], groups: Groups) -> int:
    """The key of group 0; group k has the key k higher."""
    text = repr((tuple(devices), groups.members))
    return FIRST_GROUP_KEY + int(hashlib.sha256(text.encode()).hexdigest(), 16) % _GROUP_KEYS

  def instance_key(self, group_key: int) -> int:
    """Returns the next number of a group.

    Args:
      group_key: the key of the group, of group 0 if there are several.
    """
    return next(self._instances.setdefault(group_key, itertools.count()))


KEYS = KeyAllocator()


def device_order(name: str) -> tuple[Any, ...]:
  """Sorts devices as TensorFlow ranks them in a group: by task, kind and number."""
  return tuple(int(t) if t.isdigit() else t for t in re.split(r"(\d+)", name))


class RuntimeCollectives(Collectives):
  """TensorFlow's collective operations.

  Args:
    devices: full device name of every processor; no device twice.
    pnum: the processor number, an int32 scalar.
    token: a resource handle of this device; it orders the device's collectives.
    show_progress: called with the result of each collective.
  """

  def __init__(
    self,
    devices: Sequence[str],
    pnum: int | tf.Tensor,
    token: tf.Tensor,
    show_progress: Callable[[tf.Tensor], None],
  ):
    super().__init__(pnum)
    self._devices = tuple(devices)
    self._token = token
    self._show_progress = show_progress

  def _run(self, op: Callable[..., tf.Tensor], groups: Groups, **kwargs: Any) -> tf.Tensor:
    first = KEYS.group_key(self._devices, groups)
    # Without timeout_seconds: each call would keep a thread sleeping for that long.
    result = op(
      group_size=groups.size,
      group_key=first + self.choose(groups.table(groups.number)),
      instance_key=KEYS.instance_key(first),
      ordering_token=[self._token],
      **kwargs,
    )
    self._show_progress(result)
    return result

  def _device_rank(self, groups: Groups, pnum: int) -> list[int]:
    """TensorFlow's rank of the device at each rank of the group of `pnum`."""
    group = groups.group(pnum)
    ordered = sorted(group, key=lambda p: device_order(self._devices[p]))
    return [ordered.index(p) for p in group]

  def _by_rank(self, rows: tf.Tensor, groups: Groups, inverse: bool = False) -> tf.Tensor:
    """Reorders rows from the order of the devices to that of the mesh, or back."""
    orders = groups.table(lambda p: self._device_rank(groups, p))
    if inverse:
      orders = [np.argsort(o).tolist() for o in orders]
    if all(o == list(range(groups.size)) for o in orders):
      return rows
    return tf.gather(rows, self.choose(orders))

  def joined_bytes(self, groups: Groups) -> int:
    return JOINED_BYTES

  def all_reduce(self, x: tf.Tensor, groups: Groups, reduction: str) -> tf.Tensor:
    check_static(x, f"allreduce over {groups.name}")
    dtype = x.dtype
    if dtype in _WIDER:
      # Sums wrap around when they are cast back, as they would have without the casts.
      reduced = self.all_reduce(tf.cast(x, _WIDER[dtype]), groups, reduction)
      return tf.cast(reduced, dtype)
    # CollectiveReduceV2 takes floats, int32 and int64.
    if dtype.is_complex or dtype == tf.uint64:
      return fold(self.all_gather(x, groups), reduction)
    merge_op = {"SUM": "Add", "MAX": "Max", "MIN": "Min"}[reduction]
    return self._run(
      tf.raw_ops.CollectiveReduceV2, groups, input=x, merge_op=merge_op, final_op="Id"
    )

  def _rows(self, x: tf.Tensor, groups: Groups) -> tf.Tensor:
    """The tensors of all members, stacked."""
    y = self._run(tf.raw_ops.CollectiveGatherV2, groups, input=tf.reshape(x, [-1]))
    return self._by_rank(tf.reshape(y, [groups.size] + x.shape.as_list()), groups)

  def all_gather(self, x: tf.Tensor, groups: Groups) -> list[tf.Tensor]:
    check_static(x, f"allconcat over {groups.name}")
    carried, restore = _as_words(x)
    return [restore(t) for t in tf.unstack(self._rows(carried, groups), groups.size)]

  def all_to_all(self, parts: Sequence[tf.Tensor], groups: Groups) -> list[tf.Tensor]:
    check_static(parts[0], f"alltoall over {groups.name}")
    words = [_as_words(p) for p in parts]
    rows = self._by_rank(kernels.stack([w for w, _ in words]), groups, inverse=True)
    rows = self._run(tf.raw_ops.CollectiveAllToAllV2, groups, input=rows)
    rows = self._by_rank(tf.reshape(rows, [groups.size] + words[0][0].shape.as_list()), groups)
    return [words[0][1](t) for t in tf.unstack(rows, groups.size)]

  def permute(self, x: tf.Tensor, groups: Groups, source: Sequence[int | None]) -> tf.Tensor:
    check_static(x, f"receive along {groups.name}")
    elements = list_product(x.shape.as_list())
    n = groups.size
    if n > 4 and elements % n == 0 and elements * x.dtype.size >= RELAY_BYTES:
      # There is no operation that sends to one member. With everyone as a relay for a part, each
      # member receives twice its tensor; by gathering, n - 1 times.
      rows = self.all_to_all(tf.split(tf.reshape(x, [-1]), n), groups)
      rows = self.all_to_all([rows[s or 0] for s in source], groups)
      y = tf.reshape(tf.concat(rows, 0), x.shape)
      return self.zeros_where_none(y, groups, source)
    carried, restore = _as_words(x)
    rows = self._rows(carried, groups)
    result = rows[self.choose(groups.table(lambda p: source[groups.rank(p)] or 0))]
    return restore(self.zeros_where_none(result, groups, source))


def _as_words(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
  """The tensor in a dtype that gathers take, and the function that turns it back."""
  dtype = x.dtype
  if dtype in _WIDER:
    return tf.cast(x, _WIDER[dtype]), lambda t: tf.cast(t, dtype)
  if dtype == tf.bfloat16:
    return tf.cast(x, tf.float32), lambda t: tf.cast(t, dtype)
  if dtype == tf.uint64:
    return tf.bitcast(x, tf.int64), lambda t: tf.bitcast(t, dtype)
  if dtype.is_complex:
    part = tf.float32 if dtype == tf.complex64 else tf.float64
    return tf.bitcast(x, part), lambda t: tf.bitcast(t, dtype)
  return x, lambda t: t
