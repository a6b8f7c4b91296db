"""Measures the machine that it runs on, and writes a machine file.

    python -m mesh_tensorflow.planning.measure --out machine.json --devices 4

Products by size and dtype, memory, launches, and sums over a mesh axis by size, under placement and
SIMD. On GPUs if there are as many, else on virtual CPU devices, which share the host. The machine
should have nothing else to do meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.environment.virtual_devices import virtual_cpu_devices
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.meshes.laid_out import LaidOutTensor
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.placement.mesh_impl import PlacementMeshImpl
from mesh_tensorflow.planning.machine import Device, Link, Machine
from mesh_tensorflow.planning.mesh_impl import allreduce_bytes
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Operation, Tensor
from mesh_tensorflow.running.function import TensorSpec, function
from mesh_tensorflow.simd.mesh_impl import SimdMeshImpl

_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Sizes:
  """How much is measured.

  Attributes:
    products: sides of the square matrices.
    channels: of convolutions.
    memory: bytes of the array whose reading and writing is timed.
    launches: elementwise operations one after the other.
    exchanges: bytes of the slices that are summed, the smallest and the largest at the ends.
    repeats: times of each; the median counts.
  """

  products: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024)
  channels: Sequence[int] = (2, 8, 32, 128)
  memory: int = 2**26
  launches: int = 200
  exchanges: Sequence[int] = (2**10, 2**14, 2**18, 2**22)
  repeats: int = 5


def measure(
  devices: Sequence[str], sizes: Sizes | None = None, memory: float | None = None
) -> Machine:
  """Measures the devices and what lies between them.

  Args:
    devices: names of at least two devices, as `mtf.PlacementMeshImpl` takes them.
    sizes: how much is measured.
    memory: bytes of a device (of the host, if they are CPU devices); needed for GPUs, of which
      TensorFlow does not tell it.

  Raises:
    ConfigError: there are fewer than two devices, or `memory` is missing.
  """
  sizes = sizes or Sizes()
  if len(devices) < 2:
    raise ConfigError(f"measuring exchanges takes at least 2 devices, got {list(devices)}")
  shared = not any("GPU" in d.upper() for d in devices)
  if memory is None:
    if not shared:
      raise ConfigError("say how many bytes a GPU has (--memory 80e9): TensorFlow does not tell")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  # Devices that share a host are timed together: what all of them do in a second.
  timed = list(devices) if shared else list(devices[:1])
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
  kind = "CPU devices of this host" if shared else "GPUs of this host"
  return Machine(
    name=f"{len(devices)} {kind}",
    device=device,
    links=links["placement"],
    shared=shared,
    variants={name: (device, found) for name, found in links.items()},
    sources={
      "device": f"measured with TensorFlow {tf.__version__}",
      "links": "measured: sums over one mesh axis",
    },
  )


def _increasing(points: dict[float, float], most: float = 1.0) -> tuple[tuple[float, float], ...]:
  """Points whose second numbers do not fall: a larger product is not taken for a slower one."""
  result: list[tuple[float, float]] = []
  for size, part in sorted(points.items()):
    result.append((size, min(most, max(part, result[-1][1] if result else 0.0))))
  return tuple(result)


def _seconds(fn: Callable[[], Any], repeats: int) -> float:
  """The median time of a call that returns a scalar; the first call is not counted."""
  float(fn())
  times = []
  for _ in range(repeats):
    start = time.perf_counter()
    float(fn())
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def _on_each(
  devices: Sequence[str], shape: Sequence[int], dtype: str, step: Callable[..., Any], count: int
) -> Callable[[], Any]:
  """A function that applies `step` so often on each device.

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

  def run(*values: tf.Tensor) -> tf.Tensor:
    results = []
    for d, array in zip(devices, values):
      value = array
      with tf.device(d):
        for _ in range(count):
          value = step(value, array)
        results.append(tf.cast(tf.reduce_max(value), tf.float32))
    return tf.add_n(results)

  compiled = tf.function(run, autograph=False, jit_compile=False)
  return lambda: compiled(*arrays)


def _product_rates(dtype: str, devices: Sequence[str], sizes: Sizes) -> dict[float, float]:
  """FLOP/s of all devices together, by the FLOPs of one product.

  A product, and its gradients in both factors: these read one of theirs by columns.
  """

  def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.matmul(y, tf.matmul(tf.matmul(x, y), y, transpose_b=True), transpose_a=True)

  rates = {}
  for n in sizes.products:
    flops = 2.0 * n**3
    count = max(1, min(20, int(2e8 / flops)))
    run = _on_each(devices, [n, n], dtype, step, count)
    rates[flops] = 3 * flops * count * len(devices) / _seconds(run, sizes.repeats)
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
  return 3 * flops * count * len(devices) / _seconds(run, repeats), flops


@contextlib.contextmanager
def _as_written() -> Iterator[None]:
  """Switches the graph optimizer off, which makes one pass of a chain of operations.

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
  count, elements = 8, max(sizes.memory // 4 // len(devices), 1)
  # The array itself stays, so that no result is written over what was read.
  run = _on_each(devices, [elements], "float32", lambda x, y: y + x[:1], count)
  moved = count * 2 * 4.0 * elements * len(devices)
  return moved / _seconds(run, sizes.repeats)


def _launch_seconds(devices: Sequence[str], sizes: Sizes) -> float:
  run = _on_each(
    devices, [4], "float32", lambda x, _: tf.nn.relu(tf.negative(x)), -(-sizes.launches // 2)
  )
  return _seconds(run, sizes.repeats) / (2 * -(-sizes.launches // 2) * len(devices))


class _Sums(Operation):
  """So many sums over the first mesh axis, one after the other."""

  def __init__(self, x: Tensor, count: int):
    super().__init__([x], name="sums")
    self._count = count
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def lower(self, lowering: Any) -> None:
    impl = lowering.mesh_impl(self)
    value: LaidOutTensor = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
    for _ in range(self._count):
      value = impl.allreduce(value, [0], "SUM")
    lowering.set_tensor_lowering(self.outputs[0], value)


def _link(
  name: str,
  implementation: Callable[..., MeshImpl],
  devices: Sequence[str],
  sizes: Sizes,
  shared: bool,
) -> Link:
  """Latency and bandwidth, from the smallest and the largest sums over axes of 2 and of all."""
  latencies, bandwidths = [], []
  for n in sorted({2, len(devices)}):
    impl = implementation(Shape([Dimension("axis", n)]), "part:axis", devices=list(devices[:n]))
    times = {size: _sum_seconds(impl, n, size, sizes.repeats) for size in sizes.exchanges}
    small, large = min(times), max(times)
    share = n if shared else 1
    latencies.append(times[small] / share / (2 * math.ceil(math.log2(n))))
    sent = {s: allreduce_bytes(s, [0], [n])[0] for s in (small, large)}
    # A large one that is not slower than a small one was only disturbed less.
    longer = max(times[large] - times[small], 0.01 * times[large])
    bandwidths.append((sent[large] - sent[small]) * share / longer)
  return Link(
    name=name,
    devices=None,
    topology="switch",
    bandwidth=statistics.geometric_mean(bandwidths),
    latency=statistics.geometric_mean(latencies),
  )


def _sum_seconds(impl: MeshImpl, n: int, slice_bytes: int, repeats: int) -> float:
  """The time of one sum of slices of so many bytes."""
  count = max(2, min(20, 2**24 // slice_bytes))
  part, rest = Dimension("part", n), Dimension("rest", slice_bytes // 4)
  times = {}
  # What the call itself costs is in both, and left out by the difference.
  for sums in (1, 1 + count):

    def program(x: Tensor, sums: int = sums) -> Tensor:
      return _Sums(x, sums).outputs[0]

    run = function(impl, [TensorSpec([part, rest])])(program)
    x = tf.zeros([n, slice_bytes // 4])
    times[sums] = _seconds(lambda run=run, x=x: run(x)[0, 0], repeats)  # type: ignore[misc]
  return max(times[1 + count] - times[1], 1e-9) / count


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
  return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
  """The command.

  Args:
    arguments: of the command line; those of the process by default.
  """
  parser = argparse.ArgumentParser(prog="python -m mesh_tensorflow.planning.measure")
  parser.add_argument("--out", default="machine.json", help="the file to write")
  parser.add_argument("--devices", type=int, default=4, help="how many devices")
  parser.add_argument("--memory", type=float, help="bytes of a device; of the host for CPUs")
  parser.add_argument("--quick", action="store_true", help="small sizes, once: a trial")
  options = parser.parse_args(arguments)
  gpus = [d.name for d in tf.config.list_logical_devices("GPU")] if _has_gpus() else []
  enough = len(gpus) >= options.devices
  devices = gpus[: options.devices] if enough else virtual_cpu_devices(options.devices)
  quick = Sizes((16, 64), (2, 8), 2**16, 8, (2**10, 2**16), 1)
  machine = measure(devices, quick if options.quick else None, options.memory)
  machine.save(options.out)
  print(report(machine))
  print(f"written to {options.out}")
  return 0


def _has_gpus() -> bool:
  return bool(tf.config.list_physical_devices("GPU"))


if __name__ == "__main__":
  sys.exit(main())
