"""Cost model: from the work and exchanges of a program to seconds on a machine.

A step takes what its operations take one after the other. An operation takes, for each product,
the longer of computing it and of reading and writing its operands; for all else the time of its
bytes in memory; and what launching costs. An exchange takes its messages' latency and the time of
its bytes on the link of each mesh dimension; the part of it that the link's `overlap` allows is
hidden behind the computing. Where devices share a host, their works add up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from mesh_tensorflow.planning.machine import Machine
from mesh_tensorflow.planning.machine_parts import Link
from mesh_tensorflow.planning.work import Work
from mesh_tensorflow.program.dimensions import Shape

# An allreduce is a reduce-scatter and an all-gather.
_PHASES = {"allreduce": 2}


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


@dataclasses.dataclass
class StepTime:
  """Breakdown of the predicted seconds of a step.

  Attributes:
    machine: the machine.
    work: of one device.
    exchanges: seconds by kind of exchange and name of the mesh dimension.
    latency: the part of these that is the latency of messages.
    hidden: seconds of exchanges that pass while the devices compute.
    devices: number of devices.
  """

  machine: Machine
  work: WorkSeconds
  exchanges: dict[tuple[str, str], float]
  latency: float
  hidden: float
  devices: int

  @property
  def seconds(self) -> float:
    """Seconds of a step."""
    return self.work.seconds + sum(self.exchanges.values()) - self.hidden

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


def hidden_seconds(allowed: float, computing: float) -> float:
  """Seconds of exchanges that overlap with computation.

  Args:
    allowed: seconds of exchanges that the links allow to hide.
    computing: seconds of the step's computing.
  """
  return min(allowed, computing)


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
  latency = allowed = 0.0
  for done, collectives, times in operations:
    work.add(work_seconds(done, machine, mesh_shape.size), times)
    for kind, bytes_over in collectives:
      for x in exchange_seconds(kind, bytes_over, machine, mesh_shape):
        key = (kind, mesh_shape[x.axis].name)
        exchanges[key] = exchanges.get(key, 0.0) + x.seconds * times
        latency += x.latency * times
        allowed += x.hidden * times
  hidden = hidden_seconds(allowed, work.seconds)
  return StepTime(machine, work, exchanges, latency, hidden, mesh_shape.size)
