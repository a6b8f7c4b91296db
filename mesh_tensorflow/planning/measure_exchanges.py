"""Measures exchanges: by kind and size, between devices and between workers.

What is fitted is what `planning.seconds` predicts by: the messages and the bytes of an exchange are
counted here as they are there.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.laid_out import LaidOutTensor
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.planning.machine_parts import Link, Speed
from mesh_tensorflow.planning.mesh_impl import PlanMeshImpl
from mesh_tensorflow.planning.seconds import messages
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Operation, Tensor
from mesh_tensorflow.running.function import TensorSpec, function

_TOPOLOGY = "switch"
# Maximum bytes of the exchanges that are timed in one call.
_MOST_BYTES = 2**24
# Fraction of the time of a call; smaller differences between calls are noise.
_LEAST_PART = 0.02


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes and repetitions of the measurements.

  Attributes:
    products: sides of the square matrices.
    channels: of convolutions.
    memory: bytes of the array of a device whose reading and writing is timed. It does not shrink
      where more devices share a host: their arrays together are what its caches do not hold.
    launches: elementwise operations one after the other.
    exchanges: bytes of the slices that are exchanged: small ones, for the latency, and large ones.
      Those of devices that share a host must be too large for its caches, as gradients are.
    repeats: times of each; the median counts.
  """

  products: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024)
  channels: Sequence[int] = (2, 8, 32, 128)
  memory: int = 2**24
  launches: int = 200
  exchanges: tuple[int, int] = (2**10, 2**24)
  repeats: int = 5


def median_seconds(fn: Callable[[], Any], repeats: int) -> float:
  """The median time of a call that returns a scalar; the first call is not counted.

  Args:
    fn: the function.
    repeats: number of timed calls.
  """
  float(fn())
  return statistics.median(_seconds(fn) for _ in range(repeats))


def _seconds(fn: Callable[[], Any]) -> float:
  start = time.perf_counter()
  float(fn())
  return time.perf_counter() - start


def measured_link(
  name: str, kind: str, impls: Sequence[MeshImpl], sizes: Sizes, hosts: int | None
) -> Link:
  """A link whose latency and bandwidth are those of exchanges over the first mesh axis.

  Args:
    name: of the link.
    kind: of the exchanges.
    impls: meshes; the mean of what they say is taken.
    sizes: sizes and repetitions of the measurements.
    hosts: on how many hosts the devices are, if those of a host share it; else None.
  """
  speeds = [_speed(kind, impl, sizes, hosts) for impl in impls]
  return Link(
    name=name,
    devices=None,
    topology=_TOPOLOGY,
    bandwidth=statistics.geometric_mean([s.bandwidth for s in speeds]),
    latency=statistics.geometric_mean([s.latency for s in speeds]),
  )


def _speed(kind: str, impl: MeshImpl, sizes: Sizes, hosts: int | None) -> Speed:
  """Latency and bandwidth, from small and large exchanges."""
  small, large = (exchange_time(kind, impl, size, sizes.repeats) for size in sizes.exchanges)
  few, many = (_sent(kind, impl.shape, size) for size in sizes.exchanges)
  share = impl.shape.size / hosts if hosts else 1
  # A large one that is not slower than a small one was only disturbed less.
  longer = max(large - small, 0.01 * large)
  return Speed(
    bandwidth=(many - few) * share / longer,
    latency=small / share / messages(kind, impl.shape[0].size, _TOPOLOGY),
  )


def _sent(kind: str, shape: Shape, slice_bytes: int) -> int:
  """The bytes that a device sends in one exchange, as plans count them."""
  impl = PlanMeshImpl(shape, "")
  with tf.Graph().as_default():
    value = LaidOutTensor([tf.zeros(_slice_shape(shape, slice_bytes))])
    _exchanged(kind, impl, value)
  return sum(impl.collectives[0].bytes_over.values())


def _slice_shape(shape: Shape, slice_bytes: int) -> list[int]:
  """Shape of a float32 slice of about `slice_bytes`; the first mesh axis divides its rows."""
  n = int(shape[0].size)
  return [n, max(1, slice_bytes // 4 // n)]


def _exchanged(kind: str, impl: MeshImpl, value: LaidOutTensor) -> LaidOutTensor:
  """The result of one exchange over the first mesh axis."""
  if kind == "allreduce":
    return impl.allreduce(value, [0], "SUM")
  if kind == "reduce_scatter":
    return impl.reduce_scatter(value, 0, 0)
  if kind == "allconcat":
    return impl.allconcat(value, 0, 0)
  if kind == "alltoall":
    return impl.alltoall(value, 0, 0, 0)
  n = impl.shape[0].size
  return impl.receive(value, 0, [(i - 1) % n for i in range(n)])


class _Exchanges(Operation):
  """`count` exchanges over the first mesh axis, one after the other; results in a scalar."""

  def __init__(self, x: Tensor, kind: str, slice_bytes: int, count: int):
    super().__init__([x], name="exchanges")
    self._kind, self._slice_bytes, self._count = kind, slice_bytes, count
    self._outputs = [Tensor(self, Shape([]), x.dtype)]

  def lower(self, lowering: Any) -> None:
    impl: MeshImpl = lowering.mesh_impl(self)
    x: LaidOutTensor = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
    shape = _slice_shape(impl.shape, self._slice_bytes)
    value = given = impl.slicewise(lambda v: tf.fill(shape, v), x)
    for _ in range(self._count):
      value = impl.slicewise(_next, given, _exchanged(self._kind, impl, value))
    value = impl.slicewise(tf.reduce_max, value)
    value = impl.allreduce(value, list(range(impl.shape.ndims)), "MAX")
    lowering.set_tensor_lowering(self.outputs[0], value)


def _next(given: tf.Tensor, result: tf.Tensor) -> tf.Tensor:
  """Operand of the next exchange: the result if its shape is unchanged, else `given` again.

  A control dependency keeps the exchanges in order in the second case.
  """
  if given.shape == result.shape:
    return result
  with tf.control_dependencies([result]):
    return tf.identity(given)


def exchange_time(kind: str, impl: MeshImpl, slice_bytes: int, repeats: int) -> float:
  """The time of one exchange over the first mesh axis.

  Args:
    kind: of the exchange.
    impl: the mesh.
    slice_bytes: of the slice that a processor gives.
    repeats: how often it is timed; the median counts.
  """
  count = max(2, min(20, _MOST_BYTES // slice_bytes))
  one, many = (_call(kind, impl, slice_bytes, n) for n in (1, 1 + count))
  # By turns, as what else the machine does comes and goes.
  times = [(_seconds(one), _seconds(many)) for _ in range(repeats)]
  short, long = (statistics.median(of_one) for of_one in zip(*times))
  # The difference cancels the overhead of the call, which both include; a difference below the
  # noise is replaced by the noise level.
  return float(max(long - short, _LEAST_PART * long) / count)


def _call(kind: str, impl: MeshImpl, slice_bytes: int, count: int) -> Callable[[], Any]:
  """Returns a function that runs `count` exchanges; it has been traced by a first call."""

  @function(impl, [TensorSpec([])])
  def exchanges(x: Tensor) -> Tensor:
    return _Exchanges(x, kind, slice_bytes, count).outputs[0]

  x = tf.zeros([])
  float(exchanges(x))
  return lambda: exchanges(x)
