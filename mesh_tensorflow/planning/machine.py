"""Machines: what a device computes, moves and holds in a second, and how devices are connected.

A machine is a JSON file: shipped ones are in `machines/`, and the command
`python -m mesh_tensorflow.planning.measure` writes one of the machine that it runs on. Times are in
seconds, sizes in bytes, rates per second.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.planning.fields import Fields
from mesh_tensorflow.program.dimensions import Shape

_FOLDER = pathlib.Path(__file__).parent / "machines"

TOPOLOGIES = ("switch", "torus")


@dataclasses.dataclass(frozen=True)
class Device:
  """What one device does.

  Attributes:
    flops: by dtype name the most FLOP/s of matrix products.
    efficiency: (FLOPs of a product, part of `flops` that it reaches), increasing; between two
      points it is interpolated over the logarithm, beyond the ends it stays.
    memory: bytes.
    memory_bandwidth: bytes/s of reading and writing together.
    launch_seconds: what starting one operation costs.
    operations_per_kernel: how many elementwise operations run as one kernel, so that only the
      first reads and the last writes: 1 where nothing is fused.
    convolution: (channels, part of a matrix product's rate that a convolution of as many FLOPs
      reaches), increasing in both, in between and beyond as `efficiency`. Channels are the
      geometric mean of those that the filter reads and makes.
  """

  flops: Mapping[str, float]
  efficiency: tuple[tuple[float, float], ...]
  memory: float
  memory_bandwidth: float
  launch_seconds: float
  operations_per_kernel: float = 1.0
  convolution: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

  def peak(self, dtype: str) -> float:
    """The most FLOP/s of products of a dtype; of one that is not listed, the slowest.

    Args:
      dtype: name of a dtype.
    """
    return self.flops.get(dtype, min(self.flops.values()))

  def rate(self, dtype: str, flops: float) -> float:
    """The FLOP/s of a product of so many FLOPs.

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
      channels: see `convolution`.
    """
    return self.rate(dtype, flops) * _at(self.convolution, channels)


@dataclasses.dataclass(frozen=True)
class Link:
  """What connects groups of consecutive devices.

  Attributes:
    name: for reports.
    devices: how many consecutive devices it joins; None: all.
    topology: "switch" (every pair at full speed) or "torus" (neighbours along each mesh dimension).
    bandwidth: bytes/s that one device sends along one mesh dimension.
    latency: seconds of one message.
    overlap: the part of an exchange's time in which the devices can compute.
  """

  name: str
  devices: int | None
  topology: str
  bandwidth: float
  latency: float
  overlap: float = 0.0


@dataclasses.dataclass(frozen=True)
class Machine:
  """A kind of machine: its devices, and the links between them.

  Attributes:
    name: of the machine.
    device: what one device does; what all of them do together if they are `shared`.
    links: from the smallest groups of devices to the largest, the last of which joins all.
    shared: whether the devices are shares of one (virtual CPU devices of a host), so that the
      figures of `device` and `links` are for all together.
    variants: by mesh implementation ("placement", "simd") the `Device` and `Link`s that
      differ with it.
    sources: by field where its figure comes from.
  """

  name: str
  device: Device
  links: tuple[Link, ...]
  shared: bool = False
  variants: Mapping[str, tuple[Device, tuple[Link, ...]]] = dataclasses.field(default_factory=dict)
  sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @staticmethod
  def load(name: str) -> Machine:
    """A machine from a JSON file.

    Args:
      name: a file name, or the name of a shipped machine (`shipped_machines()`).

    Raises:
      ConfigError: there is no such file, or a field of it is missing, unknown or wrong.
    """
    path = pathlib.Path(name)
    if not name.endswith(".json"):
      path = _FOLDER / f"{name}.json"
      if not path.exists():
        close = difflib.get_close_matches(name, shipped_machines(), 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
          f"there is no machine {name!r}{hint} Shipped are {', '.join(shipped_machines())}; of "
          "another one give the name of its .json file, which "
          "python -m mesh_tensorflow.planning.measure writes"
        )
    try:
      text = path.read_text(encoding="utf-8")
    except OSError as e:
      raise ConfigError(f"machine file {name}: {e.strerror}") from e
    try:
      fields = json.loads(text)
    except ValueError as e:
      raise ConfigError(f"machine file {name} is no JSON: {e}") from e
    return Machine.from_dict(fields, f"machine file {name}")

  @staticmethod
  def from_dict(fields: Any, what: str = "machine") -> Machine:
    """A machine from what JSON says.

    Args:
      fields: a dict, as `to_dict` makes it.
      what: for messages.

    Raises:
      ConfigError: a field is missing, unknown or wrong.
    """
    read = Fields(what, "", fields)
    # First what is unknown: a misspelled field is one, and missing as well.
    read.done(("name", "device", "links", "shared", "variants", "sources"))
    device, links = _device(read.part("device")), _links(read)
    variants = {}
    for name, part in (read.parts_by_name("variants") if "variants" in fields else {}).items():
      part.done(("device", "links"))
      variants[name] = (
        _device(part.part("device")) if "device" in part.fields else device,
        _links(part) if "links" in part.fields else links,
      )
    sources = read.texts("sources") if "sources" in fields else {}
    shared = read.boolean("shared", False)
    name = read.text("name")
    return Machine(name, device, links, shared, variants, sources)

  def to_dict(self) -> dict[str, Any]:
    """The machine as JSON has it."""
    return {
      "name": self.name,
      "shared": self.shared,
      "device": dataclasses.asdict(self.device),
      "links": [dataclasses.asdict(link) for link in self.links],
      "variants": {
        name: {
          "device": dataclasses.asdict(device),
          "links": [dataclasses.asdict(link) for link in links],
        }
        for name, (device, links) in self.variants.items()
      },
      "sources": dict(self.sources),
    }

  def save(self, path: str) -> None:
    """Writes the machine as JSON.

    Args:
      path: a file name that ends in .json.

    Raises:
      ConfigError: it does not, or the file cannot be written.
    """
    if not path.endswith(".json"):
      raise ConfigError(f"a machine is saved as .json, got {path!r}")
    try:
      pathlib.Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as e:
      raise ConfigError(f"machine file {path}: {e.strerror}") from e

  def variant(self, implementation: str | None) -> Machine:
    """The machine as a mesh implementation sees it.

    Args:
      implementation: "placement", "simd", or None.
    """
    if implementation is None or implementation not in self.variants:
      return self
    device, links = self.variants[implementation]
    return dataclasses.replace(self, device=device, links=links)

  def memory_of_each(self, devices: int) -> float:
    """Bytes that each of so many devices may hold: those of one host share its memory."""
    return self.device.memory / (devices if self.shared else 1)

  def link(self, mesh_shape: Shape, axis: int) -> Link:
    """The link of a mesh axis: the smallest that joins all devices that differ along it.

    The last mesh axis joins devices with consecutive numbers, each axis before it some that are
    farther apart.

    Args:
      mesh_shape: a mesh shape.
      axis: number of a mesh axis.
    """
    spanned = math.prod(mesh_shape.to_integer_list[axis:])
    for link in self.links:
      if link.devices is None or spanned <= link.devices:
        return link
    return self.links[-1]


def shipped_machines() -> list[str]:
  """Names of the machines whose files come with the package."""
  return sorted(p.stem for p in _FOLDER.glob("*.json"))


@functools.cache
def _shipped(name: str) -> Machine:
  return Machine.load(name)


def convert_to_machine(machine: Machine | str | None) -> Machine | None:
  """A machine from itself, the name of a shipped one, or the name of a file.

  Args:
    machine: any of these; None stays None.

  Raises:
    ConfigError: it is something else, or its file is wrong.
  """
  if machine is None or isinstance(machine, Machine):
    return machine
  if not isinstance(machine, str):
    raise ConfigError(
      f"machine must be an mtf.planning.Machine, the name of a .json file, or one of "
      f"{', '.join(shipped_machines())}; got {machine!r}"
    )
  return Machine.load(machine) if machine.endswith(".json") else _shipped(machine)


def _device(read: Fields) -> Device:
  read.done([f.name for f in dataclasses.fields(Device)])
  flops = read.part("flops")
  if not flops.fields:
    raise read.wrong("flops", "an object from dtype to FLOP/s")
  for dtype in flops.fields:
    try:
      tf.as_dtype(dtype)
    except TypeError:
      raise ConfigError(f"{read.what}: field {flops.name(dtype)}: there is no such dtype") from None
  return Device(
    flops={dtype: flops.number(dtype) for dtype in flops.fields},
    efficiency=_efficiency(read),
    memory=read.number("memory"),
    memory_bandwidth=read.number("memory_bandwidth"),
    launch_seconds=_not_negative(read, "launch_seconds"),
    operations_per_kernel=read.number("operations_per_kernel", 1.0, 1.0),
    convolution=_convolution(read),
  )


def _at(points: tuple[tuple[float, float], ...], x: float) -> float:
  """The second number at `x`: over the logarithm of the first ones; as at the ends beyond them."""
  if x <= points[0][0]:
    return points[0][1]
  for (before, low), (after, high) in zip(points, points[1:]):
    if x <= after:
      return low + (high - low) * math.log(x / before) / math.log(after / before)
  return points[-1][1]


def _convolution(read: Fields) -> tuple[tuple[float, float], ...]:
  if "convolution" not in read.fields:
    return ((1.0, 1.0),)
  if not isinstance(read.fields["convolution"], list):
    return ((1.0, read.number("convolution")),)
  wanted = "a number, or a list of [channels, part of a product's rate], both increasing"
  return _points(read, "convolution", wanted, math.inf)


def _efficiency(read: Fields) -> tuple[tuple[float, float], ...]:
  wanted = "a list of [FLOPs, part of the peak above 0 and at most 1], both increasing"
  return _points(read, "efficiency", wanted, 1.0)


def _points(read: Fields, key: str, wanted: str, most: float) -> tuple[tuple[float, float], ...]:
  points = read.get(key)
  try:
    pairs = tuple((float(x), float(y)) for x, y in points)
  except (TypeError, ValueError):
    raise read.wrong(key, wanted) from None
  increasing = all(a[0] < b[0] and a[1] <= b[1] for a, b in zip(pairs, pairs[1:]))
  if not pairs or not increasing or not all(x > 0 and 0 < y <= most for x, y in pairs):
    raise read.wrong(key, wanted)
  return pairs


def _not_negative(read: Fields, key: str) -> float:
  read.get(key)
  return read.number(key, 0.0)


def _links(read: Fields) -> tuple[Link, ...]:
  links: list[Link] = []
  for part in read.parts("links"):
    part.done([f.name for f in dataclasses.fields(Link)])
    devices = part.get("devices")
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int)):
      raise part.wrong("devices", "a whole number, or null for all")
    if links and (links[-1].devices is None or (devices or math.inf) <= links[-1].devices):
      raise part.wrong("devices", "more than those of the link before it")
    if part.text("topology") not in TOPOLOGIES:
      raise part.wrong("topology", f"one of {', '.join(TOPOLOGIES)}")
    overlap = part.number("overlap", 0.0)
    if overlap > 1:
      raise part.wrong("overlap", "a number from 0 to 1")
    links.append(
      Link(
        name=part.text("name"),
        devices=devices,
        topology=part.text("topology"),
        bandwidth=part.number("bandwidth"),
        latency=_not_negative(part, "latency"),
        overlap=overlap,
      )
    )
  if links[-1].devices is not None:
    raise ConfigError(
      f"{read.what}: field {read.name('links')}: the last link must join all devices "
      f'("devices": null), got {links[-1].devices}'
    )
  return tuple(links)
