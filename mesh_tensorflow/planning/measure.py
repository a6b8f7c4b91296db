"""Measures the machine that it runs on, and writes a machine file.

    python -m mesh_tensorflow.planning.measure --out machine.json --devices 4
    python -m mesh_tensorflow.planning.measure --out machine.json --devices 4 --workers 2

Products by size and dtype, memory, launches, and sums over a mesh axis by size, under placement and
SIMD; how fast each device is alone, and each link from a device to the next one; with several
workers, which `--workers` starts or TF_CONFIG names, also what these exchange, by kind and size. On
GPUs if there are as many, else on virtual CPU devices, which share the host.
The machine should have nothing else to do meanwhile.

Latency and bandwidth are fitted to the cost model: the messages and the bytes of an exchange are
counted here as `planning.cost_model` counts them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow import exit_codes, workers
from mesh_tensorflow.environment.virtual_devices import virtual_cpu_devices
from mesh_tensorflow.errors import ConfigError, MeshError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOutTensor
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.placement.mesh_impl import PlacementMeshImpl
from mesh_tensorflow.meshes.simd.devices import local_devices
from mesh_tensorflow.meshes.simd.mesh_impl import SimdMeshImpl
from mesh_tensorflow.planning.cost_model import messages
from mesh_tensorflow.planning.machine import KINDS, Device, Link, Machine, Speed, Workers
from mesh_tensorflow.planning.mesh_impl import PlanMeshImpl
from mesh_tensorflow.planning.shares import best_shares, relative_time
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Operation, Tensor
from mesh_tensorflow.running.function import TensorSpec, function
from mesh_tensorflow.workers import Cluster, cluster_from_environment
from mesh_tensorflow.workers.launching import launch

_PROGRAM = "mesh_tensorflow.planning.measure"
_DTYPES = ("float32", "bfloat16")
_TOPOLOGY = "switch"
# Maximum bytes of the exchanges that are timed in one call.
_MOST_BYTES = 2**24
# Fraction of the time of a call; smaller differences between calls are noise.
_LEAST_PART = 0.02
# Devices that reach so much of the fastest are taken for equally fast. Those of one host are the
# same cores, of which other processes may have some; and links vary more.
_ALIKE, _ALIKE_ON_HOST, _ALIKE_LINKS = 0.85, 0.5, 0.5
# Side of the matrices by which devices are compared, at most.
_SIDE = 512
# Exchanges inside a worker are measured, too, so it needs two devices at least.
_FEWEST = 2


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


def measure(
  devices: Sequence[str],
  sizes: Sizes | None = None,
  memory: float | None = None,
  shared: bool | None = None,
) -> Machine:
  """Measures the devices and what lies between them.

  Args:
    devices: names of at least two devices, as `mtf.PlacementMeshImpl` takes them.
    sizes: sizes and repetitions of the measurements.
    memory: bytes of a device (of the host, if they are CPU devices); needed for GPUs, of which
      TensorFlow does not tell it.
    shared: whether the devices share the cores of the host; by default CPU devices do.

  Raises:
    ConfigError: there are fewer than two devices, or `memory` is missing.
  """
  sizes = sizes or Sizes()
  if len(devices) < 2:
    raise ConfigError(f"measuring exchanges takes at least 2 devices, got {list(devices)}")
  shared = not _on_gpus(devices) if shared is None else shared
  _check_memory(devices, memory)
  if memory is None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  speeds = device_speeds(devices, sizes)
  alike = _ALIKE_ON_HOST if shared else _ALIKE
  fast = [d for d, s in zip(devices, speeds) if s >= alike]
  timed = [devices[speeds.index(1.0)]]
  if shared:
    # Devices that share a host are timed together: what all of them do in a second. In place of
    # slow ones the others are timed twice.
    timed = [fast[i % len(fast)] for i in range(len(devices))]
    alone = _part_of_all(timed, sizes)
    speeds = tuple(s * alone for s in speeds)
  rates = {d: _product_rates(d, timed, sizes) for d in _DTYPES}
  peaks = {dtype: max(found.values()) for dtype, found in rates.items()}
  with _as_written():
    bandwidth, launch = _memory_bandwidth(timed, sizes), _launch_seconds(timed, sizes)
  device = Device(
    flops=peaks,
    efficiency=_increasing({f: r / peaks["float32"] for f, r in rates["float32"].items()}),
    memory=float(memory),
    memory_bandwidth=bandwidth,
    launch_seconds=launch,
  )
  parts = {}
  for channels in sizes.channels:
    rate, flops = _convolution_rate(timed, channels, sizes.repeats)
    parts[float(channels)] = rate / device.rate("float32", flops)
  device = dataclasses.replace(device, convolution=_increasing(parts, math.inf))
  links = {
    name: (_link(name, implementation, devices, sizes, shared),)
    for name, implementation in (("placement", PlacementMeshImpl), ("simd", SimdMeshImpl))
  }
  kind = "GPUs of this host" if _on_gpus(devices) else "CPU devices of this host"
  return Machine(
    name=f"{len(devices)} {kind}",
    device=device,
    links=links["placement"],
    shared=shared,
    speeds=() if len(fast) == len(devices) else speeds,
    pairs=_unequal_links(devices, sizes, shared),
    variants={name: (device, found) for name, found in links.items()},
    sources={
      "device": f"measured with TensorFlow {tf.__version__}",
      "links": "measured: sums over one mesh axis",
    },
  )


def _on_gpus(devices: Sequence[str]) -> bool:
  return any("GPU" in d.upper() for d in devices)


def _check_memory(devices: Sequence[str], memory: float | None) -> None:
  if memory is None and _on_gpus(devices):
    raise ConfigError("say how many bytes a GPU has (--memory 80e9): TensorFlow does not tell")


def _increasing(points: dict[float, float], most: float = 1.0) -> tuple[tuple[float, float], ...]:
  """Makes measured rates non-decreasing in the size, and at most `most`."""
  result: list[tuple[float, float]] = []
  for size, part in sorted(points.items()):
    result.append((size, min(most, max(part, result[-1][1] if result else 0.0))))
  return tuple(result)


def _on_each(
  devices: Sequence[str], shape: Sequence[int], dtype: str, step: Callable[..., object], count: int
) -> Callable[[], Any]:
  """Returns a function that applies `step` `count` times on each device.

  Args:
    devices: the devices.
    shape: of an array that each has for its own.
    dtype: of the arrays.
    step: takes a value, at first the array, and the array; returns the next value.
    count: how often it is applied, one after the other.
  """
  arrays = []
  for d in devices:
    with tf.device(d):
      # The rows of a square matrix add up to 1, so that products neither grow nor vanish.
      arrays.append(tf.random.uniform(shape, maxval=2 / shape[-1], dtype=tf.float32))
  arrays = [tf.cast(a, dtype) for a in arrays]

  impl = PlacementMeshImpl(Shape([Dimension("devices", len(devices))]), "", devices)

  def on_one(array: tf.Tensor) -> tf.Tensor:
    value = array
    for _ in range(count):
      value = step(value, array)
    return tf.cast(tf.reduce_max(value), tf.float32)

  def run(*values: tf.Tensor) -> tf.Tensor:
    return tf.add_n(impl.slicewise(on_one, LaidOutTensor(values)).tensor_list)

  compiled = tf.function(run, autograph=False, jit_compile=False)
  return lambda: compiled(*arrays)


def _products(devices: Sequence[str], n: int, dtype: str) -> tuple[Callable[[], Any], float, int]:
  """A function that multiplies n x n matrices on each device; the FLOPs of a product; how many.

  A product, and its gradients in both factors: these read one of theirs by columns.
  """

  def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.matmul(y, tf.matmul(tf.matmul(x, y), y, transpose_b=True), transpose_a=True)

  flops = 2.0 * n**3
  count = max(1, min(20, int(2e8 / flops)))
  return _on_each(devices, [n, n], dtype, step, count), flops, count


def device_speeds(devices: Sequence[str], sizes: Sizes | None = None) -> tuple[float, ...]:
  """Speeds of devices, each measured alone: those of products.

  Args:
    devices: names of devices.
    sizes: sizes and repetitions of the measurements.

  Returns:
    For each device the part of the fastest one's speed.
  """
  sizes = sizes or Sizes()
  least = _least_seconds([[d] for d in devices], sizes)
  return tuple(min(least) / t for t in least)


def _part_of_all(devices: Sequence[str], sizes: Sizes) -> float:
  """The part that the first device does alone of what all do together in the same time."""
  alone, together = _least_seconds([devices[:1], devices], sizes)
  return min(1.0, together / (len(devices) * alone))


def _least_seconds(groups: Sequence[Sequence[str]], sizes: Sizes) -> list[float]:
  """For each group of devices the least time of products on all of them."""
  n = max((n for n in sizes.products if n <= _SIDE), default=min(sizes.products))
  calls = [_products(group, n, "float32")[0] for group in groups]
  for call in calls:
    float(call())
  # By turns; the least counts, as what else the machine does only adds to it. Where they differ,
  # once more: that may have been all of the time of one.
  least = [math.inf] * len(calls)
  for _ in range(3):
    for _ in range(max(5, sizes.repeats)):
      least = [min(t, _seconds(call)) for t, call in zip(least, calls)]
    if min(least) >= _ALIKE * max(least):
      break
  return least


def _unequal_links(devices: Sequence[str], sizes: Sizes, shared: bool) -> tuple[Speed, ...]:
  """Speeds of the links from each device to the next one, measured one by one; () of equal ones."""
  if len(devices) < 3:
    return ()
  found = link_speeds(devices, sizes, shared)
  slowest = min(s.bandwidth for s in found)
  alike = slowest >= _ALIKE_LINKS * statistics.median(s.bandwidth for s in found)
  return () if alike else found


def link_speeds(devices: Sequence[str], sizes: Sizes, shared: bool) -> tuple[Speed, ...]:
  """Speeds of sums over two devices: each and the next one, the last and the first.

  Args:
    devices: names of devices.
    sizes: sizes and repetitions of the measurements.
    shared: whether they share a host.
  """
  axis = Shape([Dimension("axis", 2)])
  found = []
  for pair in zip(devices, [*devices[1:], devices[0]]):
    impl = PlacementMeshImpl(axis, "", pair)
    found.append(_speed("allreduce", impl, sizes, 1 if shared else None))
  return tuple(found)


def _product_rates(dtype: str, devices: Sequence[str], sizes: Sizes) -> dict[float, float]:
  """FLOP/s of all devices together, by the FLOPs of one product."""
  rates = {}
  for n in sizes.products:
    run, flops, count = _products(devices, n, dtype)
    rates[flops] = 3 * flops * count * len(devices) / median_seconds(run, sizes.repeats)
  return rates


def _convolution_rate(devices: Sequence[str], channels: int, repeats: int) -> tuple[float, float]:
  """FLOP/s of all devices together, and the FLOPs of one convolution.

  A convolution and its two gradients, which are slower on most devices, three by three.
  """
  side, batch, count = 16, max(2, 128 // channels), 3
  flops = 2.0 * 9 * batch * side**2 * channels**2

  def step(x: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
    kernel = tf.fill([3, 3, channels, channels], 0.1 / channels)
    with tf.GradientTape() as tape:
      tape.watch([x, kernel])
      y = tf.nn.conv2d(x, kernel, 1, "SAME")
    dx, dw = tape.gradient(y, [x, kernel], y)
    return dx + tf.reduce_mean(dw)

  run = _on_each(devices, [batch, side, side, channels], "float32", step, count)
  return 3 * flops * count * len(devices) / median_seconds(run, repeats), flops


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
  """Context manager: disables the graph optimizer, which would fuse a chain of operations.

  Programs rarely have such chains, so what one operation costs is measured without.
  """
  before = tf.config.optimizer.get_experimental_options()
  tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
  try:
    yield
  finally:
    off = before.get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": off})


def _memory_bandwidth(devices: Sequence[str], sizes: Sizes) -> float:
  """Bytes/s of operations that read one array and write another."""
  count, elements = 8, max(sizes.memory // 4, 1)
  # The array itself stays, so that no result is written over what was read.
  run = _on_each(devices, [elements], "float32", lambda x, y: y + x[:1], count)
  moved = count * 2 * 4.0 * elements * len(devices)
  return moved / median_seconds(run, sizes.repeats)


def _launch_seconds(devices: Sequence[str], sizes: Sizes) -> float:
  run = _on_each(
    devices, [4], "float32", lambda x, _: tf.nn.relu(tf.negative(x)), -(-sizes.launches // 2)
  )
  return median_seconds(run, sizes.repeats) / (2 * -(-sizes.launches // 2) * len(devices))


def _link(
  name: str,
  implementation: Callable[..., MeshImpl],
  devices: Sequence[str],
  sizes: Sizes,
  shared: bool,
) -> Link:
  """Latency and bandwidth of sums over axes of 2 and of all devices."""
  impls = [
    implementation(Shape([Dimension("axis", n)]), "", devices=list(devices[:n]))
    for n in sorted({2, len(devices)})
  ]
  return measured_link(name, "allreduce", impls, sizes, hosts=1 if shared else None)


# ------------------------------------------------------------------- exchanges


def median_seconds(fn: Callable[[], float | tf.Tensor], repeats: int) -> float:
  """The median time of a call that returns a scalar; the first call is not counted.

  Args:
    fn: the function.
    repeats: number of timed calls.
  """
  float(fn())
  return statistics.median(_seconds(fn) for _ in range(repeats))


def _seconds(fn: Callable[[], float | tf.Tensor]) -> float:
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

  def lower(self, lowering: LoweringInProgress) -> None:
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


# --------------------------------------------------------------------- workers


def _join(cluster: Cluster, devices: int) -> list[str]:
  """Joins the workers, with GPUs if all have enough, else with virtual CPU devices.

  Args:
    cluster: the workers.
    devices: of all of them together.

  Returns:
    The names of the devices.

  Raises:
    MeshShapeError: the number of workers does not divide that of the devices.
    WorkerLostError: another worker did not come.
  """
  cluster.devices(devices)  # Checks the number, before anybody waits for anybody.
  each = devices // cluster.size
  workers.join(cluster, virtual_cpu_devices=max(_FEWEST, each))
  lacking = workers.any_worker(len(tf.config.list_physical_devices("GPU")) < each)
  return cluster.devices(devices, "CPU" if lacking else "GPU")


def _own_devices(devices: list[str]) -> list[str]:
  """The devices of this worker, at least two of them if they are CPU devices.

  Args:
    devices: of all workers, as `_join` returns them.
  """
  kind = "GPU" if "GPU" in devices[0].upper() else "CPU"
  each = len(devices) // workers.current().size
  return local_devices(kind)[: max(_FEWEST, each)]


def _measured_workers(devices: list[str], sizes: Sizes) -> Workers:
  """Measures the interconnect between the workers; every worker must call it.

  Args:
    devices: of all workers, as `_join` returns them.
    sizes: sizes and repetitions of the measurements.
  """
  cluster = workers.current()
  shared = "GPU" not in devices[0].upper()
  shape = [Dimension("workers", cluster.size), Dimension("inside", len(devices) // cluster.size)]
  impl = SimdMeshImpl(Shape(shape), "", devices=devices)
  hosts = cluster.hosts if shared else None
  links = {kind: measured_link("workers", kind, [impl], sizes, hosts) for kind in KINDS}
  # Kinds that are not listed have the figures of the first kind, the sum.
  kinds = {k: Speed(x.bandwidth, x.latency) for k, x in links.items() if k != KINDS[0]}
  return Workers(dataclasses.replace(links[KINDS[0]], kinds=kinds), cluster.size, cluster.hosts)


@contextlib.contextmanager
def _ending() -> Iterator[None]:
  """Context manager: exits after the block, with the other workers; at once after an error."""
  try:
    yield
    workers.leave(_flush)
  except BaseException as e:  # noqa: BLE001 - the process ends; Python's own end waits for others.
    if isinstance(e, MeshError):
      print(f"error: {e}", file=sys.stderr)
    else:
      traceback.print_exc()
    _flush()
    os._exit(exit_codes.of_error(e))


def _flush() -> None:
  sys.stdout.flush()
  sys.stderr.flush()


# ----------------------------------------------------------------- the command


def report(machine: Machine) -> str:
  """The measured figures as text.

  Args:
    machine: a measured machine.
  """
  d = machine.device
  lines = [machine.name]
  lines += [f"  products {dtype:<10} {peak / 1e9:10.1f} GFLOP/s" for dtype, peak in d.flops.items()]
  lines += [f"    of {flops:8.2g} FLOPs  {100 * part:5.1f} %" for flops, part in d.efficiency]
  lines.append(f"  memory              {d.memory_bandwidth / 1e9:10.1f} GB/s")
  lines.append(f"  launch              {d.launch_seconds * 1e6:10.2f} us")
  lines.append("  convolutions, of a product's rate")
  lines += [
    f"    of {channels:8g} channels {100 * part:5.1f} %" for channels, part in d.convolution
  ]
  for name, (_, links) in machine.variants.items():
    for link in links:
      lines.append(
        f"  exchange {name:<10} {link.bandwidth / 1e9:10.2f} GB/s, {link.latency * 1e6:.1f} us"
      )
  lines += _report_of_devices(machine)
  if machine.workers is not None:
    where = "one host" if machine.workers.hosts == 1 else f"{machine.workers.hosts} hosts"
    lines.append(f"  exchange between {machine.workers.count} workers on {where}")
    for kind in KINDS:
      speed = machine.workers.link.speed(kind)
      lines.append(
        f"    {kind:<16} {speed.bandwidth / 1e9:11.3f} GB/s, {speed.latency * 1e6:.1f} us"
      )
  return "\n".join(lines)


def _report_of_devices(machine: Machine) -> list[str]:
  """Devices and links that are not equally fast, and the shares that such devices should have."""
  lines = []
  if machine.speeds:
    lines.append("  devices one by one, of the fastest")
    speeds = [s / max(machine.speeds) for s in machine.speeds]
    lines += [f"    device {i:<9} {100 * s:10.1f} %" for i, s in enumerate(speeds)]
    equal = (1,) * len(speeds)
    shares = best_shares(speeds)
    if shares != equal:
      gain = relative_time(shares, speeds) / relative_time(equal, speeds)
      lines.append(
        f"  shares {':'.join(map(str, shares))} of a mesh dimension over them would take "
        f"{gain:.2f} of the equal split's step"
      )
  if machine.pairs:
    lines.append("  exchange of each device and the next")
    lines += [
      f"    device {i:<9} {p.bandwidth / 1e9:10.2f} GB/s, {p.latency * 1e6:.1f} us"
      for i, p in enumerate(machine.pairs)
    ]
  return lines


def main(arguments: Sequence[str] | None = None) -> int:
  """The command.

  Args:
    arguments: of the command line; those of the process by default.
  """
  parser = argparse.ArgumentParser(
    prog=f"python -m {_PROGRAM}",
    description="Measures the machine that it runs on: products, memory, what devices exchange. "
    "It takes some seconds, in which nothing else should run. The file that it writes is taken by "
    "mtf.planning.Machine.load, and as choose_layout.machine by the trainer.",
    epilog="for example: %(prog)s --out=machine.json --devices=8",
  )
  parser.add_argument("--out", default="machine.json", help="the file to write (%(default)s)")
  parser.add_argument(
    "--devices", type=int, default=4, help="how many devices, of all workers (%(default)s)"
  )
  parser.add_argument("--memory", type=float, help="bytes of a device; of the host for CPUs")
  parser.add_argument("--quick", action="store_true", help="small sizes, once: a trial")
  parser.add_argument(
    "--workers",
    type=int,
    default=0,
    help="start so many workers here, and measure what they exchange, too; on several machines "
    "start the command on each, with TF_CONFIG, in place of this",
  )
  options = parser.parse_args(arguments)
  _check(parser, options)
  count = options.workers
  if count > 1:
    own = list(sys.argv[1:] if arguments is None else arguments)
    # The last one counts; the workers know of each other by TF_CONFIG.
    return launch([sys.executable, "-m", _PROGRAM, *own, "--workers=0"], count)
  sizes = Sizes((16, 64), (2, 8), 2**16, 8, (2**10, 2**16), 1) if options.quick else Sizes()
  cluster = Cluster() if count else cluster_from_environment()
  with _without_notices():
    try:
      return _measure_and_tell(cluster, options, sizes)
    except MeshError as e:
      print(f"{parser.prog}: {type(e).__name__}: {e}", file=sys.stderr)
      return exit_codes.of_error(e)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
  """Ends the program for flags that are wrong, before anything is measured."""
  if not options.out.endswith(".json"):
    parser.error(f"--out={options.out}: a machine is saved as .json")
  folder = os.path.dirname(options.out) or "."
  if not os.path.isdir(folder):
    parser.error(f"--out={options.out}: there is no folder {folder}")
  if options.devices < 2:
    parser.error(f"--devices={options.devices}: exchanges take at least 2")
  if options.memory is not None and not 0 < options.memory < math.inf:
    parser.error(f"--memory={options.memory}: give a number of bytes, such as 16e9")
  if options.workers < 0 or (options.workers and options.devices % options.workers):
    parser.error(f"--workers={options.workers} cannot share --devices={options.devices} evenly")


def _measure_and_tell(cluster: Cluster, options: argparse.Namespace, sizes: Sizes) -> int:
  if cluster.size > 1:
    with _ending():
      _measure_as_one_of(cluster, options, sizes)
  gpus = [d.name for d in tf.config.list_logical_devices("GPU")] if _has_gpus() else []
  enough = len(gpus) >= options.devices
  devices = gpus[: options.devices] if enough else virtual_cpu_devices(options.devices)
  _tell(measure(devices, sizes, options.memory), options.out)
  return 0


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
  """Context manager: silences TensorFlow's retracing warnings; each function is a new one."""
  logger = tf.get_logger()
  before = logger.level
  logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(before)


def _measure_as_one_of(cluster: Cluster, options: argparse.Namespace, sizes: Sizes) -> None:
  """Measures as one of several workers: exchanges together, then the rest on the chief."""
  devices = _join(cluster, options.devices)
  _check_memory(devices, options.memory)
  between = _measured_workers(devices, sizes)
  if not cluster.is_chief:
    return
  machine = measure(_own_devices(devices), sizes, options.memory)
  where = "this host" if between.hosts == 1 else f"{between.hosts} hosts"
  told = f"measured: exchanges over a mesh axis between {between.count} workers on {where}"
  machine = dataclasses.replace(
    machine,
    name=f"{len(devices)} {'GPUs' if _on_gpus(devices) else 'CPU devices'} of {where}",
    workers=between,
    sources={**machine.sources, "workers": told},
  )
  _tell(machine, options.out)


def _tell(machine: Machine, path: str) -> None:
  machine.save(path)
  print(report(machine))
  print(f"written to {path}")


def _has_gpus() -> bool:
  return bool(tf.config.list_physical_devices("GPU"))


if __name__ == "__main__":
  sys.exit(main())
