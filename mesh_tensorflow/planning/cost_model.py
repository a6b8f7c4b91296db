"""Cost model: work of TensorFlow nodes, and the seconds that work and exchanges take on a machine.

A step takes what its operations take one after the other. An operation takes, for each product,
the longer of computing it and of reading and writing its operands (the roofline model); for all
else the time of its bytes in memory; and what launching costs. An exchange takes its messages'
latency and the time of its bytes on the link of each mesh dimension (the alpha-beta model); the
part of it that the link's `overlap` allows is hidden behind the computing. Where devices share a
host, their works add up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from mesh_tensorflow.planning.machine import Link, Machine
from mesh_tensorflow.program.dimensions import Shape

# An allreduce is a reduce-scatter and an all-gather.
_PHASES = {"allreduce": 2}

# Nodes that start nothing: they name, describe or hand on what is there.
_FREE = frozenset(
  "Placeholder Const Identity IdentityN Reshape Squeeze ExpandDims StopGradient EnsureShape NoOp"
  " VarHandleOp ReadVariableOp Shape ShapeN Size Rank PreventGradient StatelessWhile While If"
  " StatelessIf StatefulPartitionedCall PartitionedCall BroadcastGradientArgs".split()
)
# Nodes that read only as much of their first input as they write.
_PARTIAL = frozenset(
  "GatherV2 GatherNd ResourceGather Slice StridedSlice Split SplitV DynamicStitch".split()
)


class Product(NamedTuple):
  """A matrix product or convolution.

  Attributes:
    flops: two for each multiply-add.
    dtype: name of the dtype of its result.
    bytes: of its operands and its result.
    channels: of a convolution, see `flops.convolution_channels`; 0 of other products.
  """

  flops: int
  dtype: str
  bytes: int
  channels: float = 0.0


@dataclasses.dataclass
class Work:
  """Work of one processor: products, memory traffic and kernel launches.

  Attributes:
    products: its matrix products and convolutions.
    traffic: bytes that everything else reads and writes, each node on its own.
    launches: nodes that are not products.
  """

  products: list[Product] = dataclasses.field(default_factory=list)
  traffic: int = 0
  launches: int = 0

  @property
  def flops(self) -> int:
    """FLOPs of its products."""
    return sum(p.flops for p in self.products)

  def add(self, other: Work) -> None:
    """Adds other work of the same processor."""
    self.products += other.products
    self.traffic += other.traffic
    self.launches += other.launches

  def add_node(self, node: tf.Operation) -> None:
    """Adds a TensorFlow node, as far as its shapes are static.

    Args:
      node: an operation of a TensorFlow graph.
    """
    if node.type in _FREE:
      return
    written = sum(_bytes(x) for x in node.outputs)
    read = written if node.type in _PARTIAL else sum(_bytes(x) for x in node.inputs)
    flops = node_flops(node)
    if flops:
      dtype = node.outputs[0].dtype.name
      self.products.append(Product(flops, dtype, read + written, convolution_channels(node)))
    else:
      self.traffic += read + written
      self.launches += 1


def _bytes(x: tf.Tensor) -> int:
  if not x.shape.is_fully_defined() or x.dtype in (tf.resource, tf.variant, tf.string):
    return 0
  return int(x.shape.num_elements()) * int(x.dtype.size)


def node_flops(node: tf.Operation) -> int:
  """FLOPs of a matrix product or convolution, two for each multiply-add; 0 for other nodes.

  Args:
    node: an operation of a TensorFlow graph. If a shape is not static, it counts as 0.
  """
  count = _COUNTS.get(node.type)
  if count is None:
    return 0
  tensors = list(node.inputs) + list(node.outputs)
  if not all(x.shape.is_fully_defined() for x in tensors):
    return 0
  return 2 * count(node)


def _matmul(transpose: str) -> Callable[[Any], int]:
  def count(node: tf.Operation) -> int:
    a = node.inputs[0].shape.as_list()
    return _size(node.outputs[0]) * int(a[-2 if node.get_attr(transpose) else -1])

  return count


def _einsum(node: tf.Operation) -> int:
  terms = node.get_attr("equation").decode().split("->")[0].split(",")
  sizes: dict[str, int] = {}
  batch = 1
  for term, x in zip(terms, node.inputs):
    shape = x.shape.as_list()
    before, dots, after = term.partition("...")
    if dots:
      broadcast = shape[len(before) : len(shape) - len(after)]
      batch = max(batch, math.prod(broadcast))
      shape = shape[: len(before)] + shape[len(shape) - len(after) :]
    sizes.update(zip(before + after, shape))
  return math.prod(sizes.values()) * batch if len(terms) > 1 else 0


def _convolution(kernel_axes_left: int, maps: int, kernel: int) -> Callable[[Any], int]:
  """Elements of the maps on the output side, times the kernel elements for each of them.

  Args:
    kernel_axes_left: number of last kernel axes that make new channels.
    maps: number of the input that is the maps; -1 for the output.
    kernel: number of the input that is the kernel; -1 for the output.
  """

  def count(node: tf.Operation) -> int:
    def tensor(i: int) -> tf.Tensor:
      return node.outputs[0] if i < 0 else node.inputs[i]

    return _size(tensor(maps)) * int(math.prod(tensor(kernel).shape.as_list()[:-kernel_axes_left]))

  return count


def _size(x: tf.Tensor) -> int:
  return math.prod(x.shape.as_list())


def convolution_channels(node: tf.Operation) -> float:
  """Channels of a convolution or one of its gradients; 0 for other nodes.

  The geometric mean of the channels that one position of the filter reads and makes: what they
  are few of, processors compute slowly. A depthwise filter reads one.

  Args:
    node: an operation of a TensorFlow graph, with static shapes if it is a convolution.
  """
  kernel = _KERNELS.get(node.type)
  if kernel is None:
    return 0.0
  shape = (node.outputs[0] if kernel < 0 else node.inputs[kernel]).shape.as_list()
  reads = 1 if str(node.type).startswith("Depthwise") else shape[-2]
  return math.sqrt(reads * shape[-1])


_COUNTS: dict[str, Callable[[Any], int]] = {
  "MatMul": _matmul("transpose_a"),
  "BatchMatMul": _matmul("adj_x"),
  "BatchMatMulV2": _matmul("adj_x"),
  "BatchMatMulV3": _matmul("adj_x"),
  "Einsum": _einsum,
}
# The input that is a convolution's kernel; -1 for the output.
_KERNELS: dict[str, int] = {}
# In the gradients the maps on the output side are the incoming gradient, the third input.
for _name, _version, _left in (
  ("Conv2D", "", 1),
  ("Conv3D", "V2", 1),
  ("DepthwiseConv2dNative", "", 2),
):
  _COUNTS[_name] = _convolution(_left, -1, 1)
  _COUNTS[f"{_name}BackpropInput{_version}"] = _convolution(_left, 2, 1)
  _COUNTS[f"{_name}BackpropFilter{_version}"] = _convolution(_left, 2, -1)
  _KERNELS |= {_name: 1, f"{_name}BackpropInput{_version}": 1}
  _KERNELS[f"{_name}BackpropFilter{_version}"] = -1


@dataclasses.dataclass
class WorkSeconds:
  """The time of some work on one device.

  Attributes:
    products: seconds of products, by dtype and by the next power of ten of their FLOPs.
    flops: FLOPs of the same.
    traffic: seconds of reading and writing memory outside products.
    launches: seconds of starting operations.
  """

  products: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
  flops: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
  traffic: float = 0.0
  launches: float = 0.0

  @property
  def seconds(self) -> float:
    return sum(self.products.values()) + self.traffic + self.launches

  def add(self, other: WorkSeconds, times: float = 1) -> None:
    """Adds other work.

    Args:
      other: the other.
      times: number of times that it is done.
    """
    for key, value in other.products.items():
      self.products[key] = self.products.get(key, 0.0) + value * times
      self.flops[key] = self.flops.get(key, 0.0) + other.flops[key] * times
    self.traffic += other.traffic * times
    self.launches += other.launches * times


def work_seconds(work: Work, machine: Machine, devices: int) -> WorkSeconds:
  """The time of some work on one device.

  Args:
    work: of one device.
    machine: the machine.
    devices: number of devices that do the same at the same time.
  """
  device, share = machine.device, devices if machine.shared else 1
  result = WorkSeconds()
  for p in work.products:
    key = (p.dtype, math.ceil(math.log10(p.flops)))
    if p.channels:
      rate = device.convolution_rate(p.dtype, p.flops, p.channels)
    else:
      rate = device.rate(p.dtype, p.flops)
    seconds = max(p.flops / rate, p.bytes / device.memory_bandwidth)
    result.products[key] = result.products.get(key, 0.0) + seconds * share
    result.flops[key] = result.flops.get(key, 0.0) + p.flops
    result.launches += device.launch_seconds * share
  fused = device.operations_per_kernel
  result.traffic = work.traffic / fused / device.memory_bandwidth * share
  result.launches += work.launches / fused * device.launch_seconds * share
  return result


@dataclasses.dataclass(frozen=True)
class ExchangeSeconds:
  """The time of an exchange along one mesh axis.

  Attributes:
    axis: number of the mesh axis.
    latency: seconds of its messages.
    transfer: seconds of its bytes.
    hidden: the part of the sum that may pass while the devices compute.
  """

  axis: int
  latency: float
  transfer: float
  hidden: float

  @property
  def seconds(self) -> float:
    return self.latency + self.transfer


def exchange_seconds(
  kind: str, bytes_over: Mapping[int, int], machine: Machine, mesh_shape: Shape
) -> list[ExchangeSeconds]:
  """The time of an exchange, for each mesh axis it goes over.

  Args:
    kind: see `planning.mesh_impl.Collective`.
    bytes_over: for each mesh axis the bytes that one device sends along it.
    machine: the machine.
    mesh_shape: the mesh shape.
  """
  share = mesh_shape.size if machine.shared else 1
  result = []
  for axis, sent in bytes_over.items():
    link, n = machine.link(mesh_shape, axis), mesh_shape[axis].size
    speed = link.speed(kind)
    latency = messages(kind, n, link.topology) * speed.latency * share
    transfer = sent * _detour(kind, n, link) / speed.bandwidth * share
    hidden = link.overlap * (latency + transfer)
    result.append(ExchangeSeconds(axis, latency, transfer, hidden))
  return result


def messages(kind: str, n: int, topology: str) -> int:
  """Number of sequential messages of an exchange: around half a ring, or in a tree.

  Args:
    kind: see `planning.mesh_impl.Collective`.
    n: the size of the mesh axis.
    topology: of the link.
  """
  if kind == "receive":
    return 1
  around = -(-n // 2) if topology == "torus" else math.ceil(math.log2(n))
  return _PHASES.get(kind, 1) * around


def _detour(kind: str, n: int, link: Link) -> float:
  """Factor for all-to-alls in a torus: the mean number of links that a byte passes."""
  # Around a ring both ways, n/4 links lie between two devices on average.
  return max(1.0, n / 4) if kind == "alltoall" and link.topology == "torus" else 1.0


@dataclasses.dataclass(frozen=True)
class Seconds:
  """Seconds of a program or of a part of it.

  Attributes:
    computing: of products, memory traffic and launches.
    exchanging: of exchanges.
    overlappable: the part of these that may pass while the devices compute.
  """

  computing: float = 0.0
  exchanging: float = 0.0
  overlappable: float = 0.0

  @property
  def hidden(self) -> float:
    """Seconds of exchanges that overlap with computing."""
    return min(self.overlappable, self.computing)

  @property
  def total(self) -> float:
    return self.computing + self.exchanging - self.hidden

  @property
  def lower_bound(self) -> float:
    """Seconds if other parts of the program hide every exchange that can overlap."""
    return self.computing + self.exchanging - self.overlappable

  def __add__(self, other: Seconds) -> Seconds:
    return Seconds(
      self.computing + other.computing,
      self.exchanging + other.exchanging,
      self.overlappable + other.overlappable,
    )

  def __mul__(self, factor: float) -> Seconds:
    return Seconds(self.computing * factor, self.exchanging * factor, self.overlappable * factor)


@dataclasses.dataclass
class StepTime:
  """Breakdown of the predicted seconds of a step.

  Attributes:
    machine: the machine.
    work: of one device.
    exchanges: seconds by kind of exchange and name of the mesh dimension.
    latency: the part of these that is the latency of messages.
    overlappable: the part of these that may pass while the devices compute.
    devices: number of devices.
  """

  machine: Machine
  work: WorkSeconds
  exchanges: dict[tuple[str, str], float]
  latency: float
  overlappable: float
  devices: int

  @property
  def sums(self) -> Seconds:
    """Seconds of computing and of exchanging."""
    return Seconds(self.work.seconds, sum(self.exchanges.values()), self.overlappable)

  @property
  def seconds(self) -> float:
    """Seconds of a step."""
    return self.sums.total

  @property
  def hidden(self) -> float:
    """Seconds of exchanges that pass while the devices compute."""
    return self.sums.hidden

  @property
  def ideal_seconds(self) -> float:
    """Seconds that the products of one device would take at peak FLOP/s."""
    share = self.devices if self.machine.shared else 1
    peak = self.machine.device.peak
    return sum(n / peak(dtype) * share for (dtype, _), n in self.work.flops.items())

  def parts(self) -> dict[str, float]:
    """Seconds by part; they add up to `seconds`."""
    result = {f"products {dtype}": 0.0 for dtype, _ in self.work.products}
    for (dtype, _), seconds in self.work.products.items():
      result[f"products {dtype}"] += seconds
    result["memory traffic"] = self.work.traffic
    result["launches"] = self.work.launches
    for (kind, axis), seconds in self.exchanges.items():
      result[f"{kind} over {axis}"] = seconds
    if self.hidden:
      result["hidden behind computing"] = -self.hidden
    return {name: seconds for name, seconds in result.items() if seconds}


def step_time(
  operations: Iterable[tuple[Work, Sequence[tuple[str, Mapping[int, int]]], int]],
  machine: Machine,
  mesh_shape: Shape,
) -> StepTime:
  """The time of a step.

  Args:
    operations: for each the work of one device, the exchanges as (kind, bytes over each mesh
      axis), and how often it runs.
    machine: the machine.
    mesh_shape: the mesh shape.
  """
  work = WorkSeconds()
  exchanges: dict[tuple[str, str], float] = {}
  latency = overlappable = 0.0
  for done, collectives, times in operations:
    work.add(work_seconds(done, machine, mesh_shape.size), times)
    for kind, bytes_over in collectives:
      for x in exchange_seconds(kind, bytes_over, machine, mesh_shape):
        key = (kind, mesh_shape[x.axis].name)
        exchanges[key] = exchanges.get(key, 0.0) + x.seconds * times
        latency += x.latency * times
        overlappable += x.hidden * times
  return StepTime(machine, work, exchanges, latency, overlappable, mesh_shape.size)
