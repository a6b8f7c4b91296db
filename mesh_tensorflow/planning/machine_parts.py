"""Parts of machines: devices, links between them, and links between worker processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

TOPOLOGIES = ("switch", "torus")

# The kinds of exchanges, as `planning.mesh_impl.Collective` has them.
KINDS = ("allreduce", "reduce_scatter", "allconcat", "alltoall", "receive")


@dataclasses.dataclass(frozen=True)
class Device:
  """Performance figures of one device.

  Attributes:
    flops: by dtype name the most FLOP/s of matrix products.
    efficiency: (FLOPs of a product, fraction of `flops` that it reaches), increasing; interpolated
      linearly in the logarithm of the FLOPs, constant beyond the ends.
    memory: bytes.
    memory_bandwidth: bytes/s of reading and writing together.
    launch_seconds: overhead of launching one operation.
    operations_per_kernel: how many elementwise operations run as one kernel, so that only the
      first reads and the last writes: 1 where nothing is fused.
    convolution: (channels, fraction of the rate of a matrix product of as many FLOPs that a
      convolution reaches), increasing in both, interpolated as `efficiency`. Channels are the
      geometric mean of the filter's input and output channels.
  """

  flops: Mapping[str, float]
  efficiency: tuple[tuple[float, float], ...]
  memory: float
  memory_bandwidth: float
  launch_seconds: float
  operations_per_kernel: float = 1.0
  convolution: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

  def peak(self, dtype: str) -> float:
    """Peak FLOP/s of products of a dtype; that of the slowest dtype if it is not listed.

    Args:
      dtype: name of a dtype.
    """
    return self.flops.get(dtype, min(self.flops.values()))

  def rate(self, dtype: str, flops: float) -> float:
    """FLOP/s of a product, by its size in FLOPs.

    Args:
      dtype: name of a dtype.
      flops: of one product.
    """
    return self.peak(dtype) * _at(self.efficiency, flops)

  def convolution_rate(self, dtype: str, flops: float, channels: float) -> float:
    """The FLOP/s of a convolution.

    Args:
      dtype: name of a dtype.
      flops: of one convolution.
      channels: geometric mean of the filter's input and output channels.
    """
    return self.rate(dtype, flops) * _at(self.convolution, channels)

  def times(self, factor: float) -> Device:
    """One device equivalent to `factor` of these.

    Args:
      factor: number of them; need not be an integer.
    """
    return dataclasses.replace(
      self,
      flops={dtype: flops * factor for dtype, flops in self.flops.items()},
      memory=self.memory * factor,
      memory_bandwidth=self.memory_bandwidth * factor,
      launch_seconds=self.launch_seconds / factor,
    )


@dataclasses.dataclass(frozen=True)
class Speed:
  """Bandwidth and latency of one kind of exchange.

  Attributes:
    bandwidth: bytes/s that one device sends along one mesh dimension.
    latency: seconds of one message.
  """

  bandwidth: float
  latency: float


@dataclasses.dataclass(frozen=True)
class Link:
  """Interconnect between groups of consecutive devices.

  Attributes:
    name: for reports.
    devices: number of consecutive devices that it joins; None for all.
    topology: "switch" (every pair at full speed) or "torus" (neighbours along each mesh dimension).
    bandwidth: bytes/s that one device sends along one mesh dimension.
    latency: seconds of one message.
    overlap: the part of an exchange's time in which the devices can compute.
    kinds: the `Speed` of kinds of exchanges (`KINDS`) for which it is another one.
  """

  name: str
  devices: int | None
  topology: str
  bandwidth: float
  latency: float
  overlap: float = 0.0
  # Searches put links into sets.
  kinds: Mapping[str, Speed] = dataclasses.field(default_factory=dict, hash=False)

  def speed(self, kind: str) -> Speed:
    """Bandwidth and latency of a kind of exchange over this link.

    Args:
      kind: one of `KINDS`.
    """
    return self.kinds.get(kind) or Speed(self.bandwidth, self.latency)

  def times(self, factor: float) -> Link:
    """One link equivalent to `factor` of these in parallel.

    Args:
      factor: number of them; need not be an integer.
    """
    return dataclasses.replace(
      self,
      bandwidth=self.bandwidth * factor,
      latency=self.latency / factor,
      kinds={k: Speed(s.bandwidth * factor, s.latency / factor) for k, s in self.kinds.items()},
    )


@dataclasses.dataclass(frozen=True)
class Workers:
  """Interconnect between worker processes.

  Attributes:
    link: between them.
    count: number of workers when it was measured.
    hosts: number of their hosts; between workers on one host messages use no network.
  """

  link: Link
  count: int = 2
  hosts: int = 1


def inside(links: tuple[Link, ...], devices: int) -> tuple[Link, ...]:
  """Links inside a group of consecutive devices; the last one joins all of the group.

  Args:
    links: from the smallest groups to the largest.
    devices: number of devices in the group.
  """
  found: list[Link] = []
  for link in links:
    if link.devices is None or link.devices >= devices:
      return (*found, dataclasses.replace(link, devices=devices))
    found.append(link)
  return tuple(found)


def _at(points: tuple[tuple[float, float], ...], x: float) -> float:
  """Interpolates y at x, linearly in log(x); constant outside the given range."""
  if x <= points[0][0]:
    return points[0][1]
  for (before, low), (after, high) in zip(points, points[1:]):
    if x <= after:
      return low + (high - low) * math.log(x / before) / math.log(after / before)
  return points[-1][1]
