"""Collectives of a list of tensors, each on its device, as exchanges around a ring.

In a ring each device talks to its two neighbours only, and all links are busy at
once: that is what a machine with links of its own between neighbours is good at.
`PlacementMeshImpl` does not use them: within one host a direct exchange takes fewer
operations. They are for programs that place tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from mesh_tensorflow.errors import GraphError, MeshShapeError, ShapeError

_REDUCTIONS: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
  "SUM": tf.add,
  "MAX": tf.maximum,
  "MIN": tf.minimum,
}

# Below this number of elements one trip round the ring is cheaper than one for each shard.
_MIN_SIZE_TO_SHARD = 1024


def allreduce_ring(
  xs: Sequence[tf.Tensor], devices: Sequence[str], reduction_fn_string: str = "SUM"
) -> list[tf.Tensor]:
  """Reduces tensors elementwise; every device gets the result.

  Tensors of 1024 elements or more whose size is a multiple of their number are cut into as many
  shards: each goes round the ring from another device on, so that all links carry data.

  Args:
    xs: n tensors of equal shape and dtype.
    devices: their n device names; "" is the default device.
    reduction_fn_string: "SUM", "MAX" or "MIN".

  Returns:
    n tensors, all of the same value.

  Raises:
    MeshShapeError: there are not as many devices as tensors.
    ShapeError: the shapes differ.
    GraphError: there is no such reduction.
  """
  xs, places = _checked("allreduce_ring", xs, devices)
  _reduction(reduction_fn_string)
  n = len(xs)
  if n == 1:
    return xs
  for x in xs[1:]:
    if not x.shape.is_compatible_with(xs[0].shape):
      raise ShapeError(f"allreduce_ring: tensors of shapes {xs[0].shape} and {x.shape}")
  size = xs[0].shape.num_elements()
  if size is None or size < _MIN_SIZE_TO_SHARD or size % n:
    return allreduce_ring_single_shard(xs, devices, reduction_fn_string)
  shards = []
  for x, device in zip(xs, places):
    with tf.device(device):
      shards.append(tf.unstack(tf.reshape(x, [n, size // n])))
  reduced: list[list[tf.Tensor]] = [[] for _ in xs]
  for s in range(n):
    # Shard s begins its trip at device s + 1, and is whole at device s.
    ring = [(s + 1 + k) % n for k in range(n)]
    around = allreduce_ring_single_shard(
      [shards[i][s] for i in ring], [places[i] or "" for i in ring], reduction_fn_string
    )
    for i, x in zip(ring, around):
      reduced[i].append(x)
  results = []
  for parts, device in zip(reduced, places):
    with tf.device(device):
      results.append(tf.reshape(tf.concat(parts, 0), xs[0].shape))
  return results


def allreduce_ring_single_shard(
  xs: Sequence[tf.Tensor], devices: Sequence[str], reduction_fn_string: str = "SUM"
) -> list[tf.Tensor]:
  """Reduces whole tensors once round the ring, then passes the result round.

  Args:
    xs: n tensors of equal shape and dtype.
    devices: their n device names.
    reduction_fn_string: "SUM", "MAX" or "MIN".

  Returns:
    n tensors, all of the same value.

  Raises:
    MeshShapeError: there are not as many devices as tensors.
    GraphError: there is no such reduction.
  """
  xs, places = _checked("allreduce_ring_single_shard", xs, devices)
  combine = _reduction(reduction_fn_string)
  n = len(xs)
  if n == 1:
    return xs
  result = xs[0]
  for x, device in zip(xs[1:], places[1:]):
    with tf.device(device):
      result = combine(result, x)
  results = [result] * n
  for i in range(n - 1):  # the last device, which has it, hands it to the first
    with tf.device(places[i]):
      result = results[i] = tf.identity(result)
  return results


def allconcat_ring(
  xs: Sequence[tf.Tensor], devices: Sequence[str], concat_axis: int
) -> list[tf.Tensor]:
  """Concatenates tensors; every device gets the result.

  Args:
    xs: n tensors, of equal shape but for the axis.
    devices: their n device names.
    concat_axis: the axis along which to concatenate.

  Returns:
    n tensors, all of the same value.

  Raises:
    MeshShapeError: there are not as many devices as tensors.
  """
  xs, places = _checked("allconcat_ring", xs, devices)
  n = len(xs)
  if n == 1:
    return xs
  received = [_pass_round(x, i, places) for i, x in enumerate(xs)]
  results = []
  for i, device in enumerate(places):
    with tf.device(device):
      results.append(tf.concat([received[source][i] for source in range(n)], concat_axis))
  return results


def alltoall_pointtwise(
  xs: Sequence[tf.Tensor], devices: Sequence[str], split_axis: int, concat_axis: int
) -> list[tf.Tensor]:
  """Splits every tensor and gives each device one part of each; sent from device to device.

  (The name has been misspelt since the first release.)

  Args:
    xs: n tensors of equal shape.
    devices: their n device names.
    split_axis: the axis to split into n parts.
    concat_axis: the axis along which the parts that a device gets are concatenated.

  Returns:
    n tensors; the k-th has part k of every tensor, in their order.

  Raises:
    MeshShapeError: there are not as many devices as tensors.
    ShapeError: n does not divide the axis.
  """
  xs, places = _checked("alltoall_pointtwise", xs, devices)
  parts = _parts("alltoall_pointtwise", xs, places, split_axis)
  results = []
  for k, device in enumerate(places):
    with tf.device(device):
      results.append(tf.concat([p[k] for p in parts], concat_axis))
  return results


def alltoall_ring(
  xs: Sequence[tf.Tensor], devices: Sequence[str], split_axis: int, concat_axis: int
) -> list[tf.Tensor]:
  """As `alltoall_pointtwise`, with each part handed from neighbour to neighbour the shorter way."""
  xs, places = _checked("alltoall_ring", xs, devices)
  parts = _parts("alltoall_ring", xs, places, split_axis)
  n = len(xs)
  results = []
  for k in range(n):
    received = [_hand_on(parts[i][k], i, k, places) for i in range(n)]
    with tf.device(places[k]):
      results.append(tf.concat(received, concat_axis))
  return results


def _pass_round(x: tf.Tensor, source: int, devices: Sequence[str | None]) -> list[tf.Tensor]:
  """Copies of x on every device, handed on in both directions from device `source`."""
  n = len(devices)
  copies: list[tf.Tensor] = [x] * n
  # Both ways together they reach the n - 1 others.
  for direction, steps in ((1, n // 2), (-1, (n - 1) // 2)):
    at = x
    for step in range(1, steps + 1):
      i = (source + direction * step) % n
      with tf.device(devices[i]):
        at = copies[i] = tf.identity(at)
  return copies


def _hand_on(x: tf.Tensor, source: int, target: int, devices: Sequence[str | None]) -> tf.Tensor:
  """A copy of x on device `target`, handed on from `source` the shorter way."""
  n = len(devices)
  forward = (target - source) % n
  direction, steps = (1, forward) if forward <= n // 2 else (-1, n - forward)
  for step in range(1, steps + 1):
    with tf.device(devices[(source + direction * step) % n]):
      x = tf.identity(x)
  return x


def _parts(
  what: str, xs: Sequence[tf.Tensor], devices: Sequence[str | None], axis: int
) -> list[list[tf.Tensor]]:
  """Every tensor split on its device."""
  n = len(xs)
  parts = []
  for x, device in zip(xs, devices):
    size = x.shape[axis]
    if size is not None and size % n:
      raise ShapeError(f"{what}: axis {axis} of shape {x.shape} cannot be split into {n} parts")
    with tf.device(device):
      parts.append(tf.split(x, n, axis))
  return parts


def _checked(
  what: str, xs: Sequence[tf.Tensor], devices: Sequence[str]
) -> tuple[list[tf.Tensor], list[str | None]]:
  if not xs or len(xs) != len(devices):
    raise MeshShapeError(f"{what}: {len(xs)} tensors on {len(devices)} devices; give one for each")
  names = [d or None for d in devices]
  tensors = []
  for x, device in zip(xs, names):
    with tf.device(device):
      tensors.append(tf.convert_to_tensor(x))
  return tensors, names


def _reduction(name: str) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
  if name not in _REDUCTIONS:
    raise GraphError(f"allreduce: {name!r} is not SUM, MAX or MIN")
  return _REDUCTIONS[name]
