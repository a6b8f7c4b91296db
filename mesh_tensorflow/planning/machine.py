"""Machines: compute rate, memory and interconnect of devices.

A machine is a JSON file: shipped ones are in `machines/`, and the command
`python -m mesh_tensorflow.planning.measure` writes one of the machine that it runs on. Times are in
seconds, sizes in bytes, rates per second.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_settings.hints import did_you_mean
from mesh_tensorflow.environment import untrusted_files
from mesh_tensorflow.errors import ConfigError, MeshShapeError
from mesh_tensorflow.program.dimensions import Shape
from mesh_transformer_cli import untrusted

_FOLDER = pathlib.Path(__file__).parent / "machines"

_LOG = logging.getLogger("mesh_tensorflow")

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
    fuses_elementwise: whether chains of elementwise operations are compiled into kernels, as by XLA
      or NVRTC: see `planning.fusion`. `operations_per_kernel` is then of what is left.
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
  fuses_elementwise: bool = False
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
    return self.peak(dtype) * _interpolate(self.efficiency, flops)

  def convolution_rate(self, dtype: str, flops: float, channels: float) -> float:
    """The FLOP/s of a convolution.

    Args:
      dtype: name of a dtype.
      flops: of one convolution.
      channels: geometric mean of the filter's input and output channels.
    """
    return self.rate(dtype, flops) * _interpolate(self.convolution, channels)

  def bundle(self, n: float) -> Device:
    """One device equivalent to n of these.

    Args:
      n: number of them; need not be an integer.
    """
    return dataclasses.replace(
      self,
      flops={dtype: flops * n for dtype, flops in self.flops.items()},
      memory=self.memory * n,
      memory_bandwidth=self.memory_bandwidth * n,
      launch_seconds=self.launch_seconds / n,
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

  def bundle(self, n: float) -> Link:
    """One link equivalent to n of these in parallel.

    Args:
      n: number of them; need not be an integer.
    """
    return dataclasses.replace(
      self,
      bandwidth=self.bandwidth * n,
      latency=self.latency / n,
      kinds={k: Speed(s.bandwidth * n, s.latency / n) for k, s in self.kinds.items()},
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


def _links_within(links: tuple[Link, ...], devices: int) -> tuple[Link, ...]:
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


def _interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
  """Interpolates y at x, linearly in log(x); constant outside the given range."""
  if x <= points[0][0]:
    return points[0][1]
  for (before, low), (after, high) in zip(points, points[1:]):
    if x <= after:
      return low + (high - low) * math.log(x / before) / math.log(after / before)
  return points[-1][1]


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
    workers: what connects worker processes; None: nobody has measured it.
    spread: whether the figures are those of given workers, as `over_workers` makes them.
    speeds: of devices that are not equally fast, the part of the figures of `device` that each
      reaches alone: 1.0 for the fastest, unless they are `shared`. () of equal ones.
    pairs: of links that are not equally fast, the speed of sums of each device and the next one;
      the last is paired with the first. () of equal ones.
  """

  name: str
  device: Device
  links: tuple[Link, ...]
  shared: bool = False
  variants: Mapping[str, tuple[Device, tuple[Link, ...]]] = dataclasses.field(default_factory=dict)
  sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
  workers: Workers | None = None
  spread: bool = False
  speeds: tuple[float, ...] = ()
  pairs: tuple[Speed, ...] = ()

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
        hint = did_you_mean(name, shipped_machines(), 1, shown=repr)
        raise ConfigError(
          f"there is no machine {name!r}{hint} Shipped are {', '.join(shipped_machines())}; of "
          "another one give the name of its .json file, which "
          "python -m mesh_tensorflow.planning.measure writes"
        )
    try:
      fields = untrusted_files.read_json(path)
    except tf.errors.OpError as e:
      reason = "No such file or directory" if isinstance(e, tf.errors.NotFoundError) else e.message
      raise ConfigError(f"machine file {name}: {reason}") from e
    except ValueError as e:
      raise ConfigError(f"machine file {name} is no JSON: {e}") from e
    return Machine.from_dict(fields, f"machine file {name}")

  @staticmethod
  def from_dict(fields: Mapping[str, Any], what: str = "machine") -> Machine:
    """Builds a machine from parsed JSON.

    Args:
      fields: a dict, as `to_dict` makes it.
      what: for messages.

    Raises:
      ConfigError: a field is missing, unknown or wrong.
    """
    read = _Fields(what, "", fields)
    # First what is unknown: a misspelled field is one, and missing as well.
    read.check_names(Machine)
    device, links = _read_device(read.part("device")), _read_links(read)
    variants = {}
    for name, part in read.parts_by_name("variants").items():
      part.check_names(("device", "links"))
      variants[name] = (
        _read_device(part.part("device")) if "device" in part else device,
        _read_links(part) if "links" in part else links,
      )
    sources = read.texts("sources")
    shared = read.boolean("shared", False)
    workers = _read_workers(read.part("workers")) if "workers" in read else None
    spread = read.boolean("spread", False)
    name = read.text("name")
    speeds, pairs = _read_speeds(read), _read_pairs(read)
    return Machine(name, device, links, shared, variants, sources, workers, spread, speeds, pairs)

  def to_dict(self) -> dict[str, Any]:
    """The machine as a dict that JSON can hold."""

    def parts(device: Device, links: Sequence[Link]) -> dict[str, Any]:
      return {
        "device": dataclasses.asdict(device),
        "links": [_link_fields(link) for link in links],
      }

    fields = {
      "name": self.name,
      "shared": self.shared,
      **parts(self.device, self.links),
      "variants": {name: parts(*figures) for name, figures in self.variants.items()},
      "sources": dict(self.sources),
    }
    if self.workers is not None:
      link = _link_fields(self.workers.link)
      fields["workers"] = {**dataclasses.asdict(self.workers), "link": link}
    if self.spread:
      fields["spread"] = True
    if self.speeds:
      fields["speeds"] = list(self.speeds)
    if self.pairs:
      fields["pairs"] = [dataclasses.asdict(p) for p in self.pairs]
    return fields

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
    """The machine with the figures for a mesh implementation.

    Args:
      implementation: "placement", "simd", or None.
    """
    if implementation is None or implementation not in self.variants:
      return self
    device, links = self.variants[implementation]
    return dataclasses.replace(self, device=device, links=links)

  def over_workers(self, workers: int, devices: int, hosts: int = 1) -> Machine:
    """The machine of a mesh that spans several worker processes.

    What is exchanged inside a worker takes the links of the variant "simd", what goes across
    workers the link of `workers`. Where that is not known, a machine of several links (nodes) has
    its own, with no more devices in a node than a host has; of a machine of one link it is assumed
    that it joins workers as well: a warning says so, and so does the name.

    Args:
      workers: number of processes.
      devices: of all of them together.
      hosts: how many hosts they are on; of `shared` figures each host has its own.

    Returns:
      The machine; itself for one worker, and if it is spread already.

    Raises:
      MeshShapeError: the workers cannot have equally many devices.
    """
    if self.spread or workers == 1:
      return self
    if workers < 1 or hosts < 1 or devices % workers:
      raise MeshShapeError(
        f"{devices} devices on {_hosts(hosts)} cannot be shared evenly by {workers} workers"
      )
    simd, name, sources = self.variant("simd"), f"{self.name}, {workers} workers", self.sources
    if self.workers is not None:
      links = (*_links_within(simd.links, devices // workers), self.workers.link)
      if self.workers.hosts != hosts:
        measured = _hosts(self.workers.hosts)
        _warn_once(
          f"machine {self.name!r}: what workers exchange was measured on {measured}, and these are "
          f"on {_hosts(hosts)}; the same speed is assumed. Measure it there: "
          "python -m mesh_tensorflow.planning.measure, on each host, with TF_CONFIG"
        )
    elif len(simd.links) > 1:
      links = (*_links_within(simd.links[:-1], devices // hosts), simd.links[-1])
    else:
      links = (*_links_within(simd.links, devices // workers), simd.links[-1])
      name += " (their link is assumed)"
      assumed = (
        f"the exchange between workers was not measured; assumed is that of the link "
        f"{links[-1].name!r}, which joins the devices of one worker"
      )
      sources = {**sources, "workers": f"assumed: {assumed}"}
      _warn_once(
        f"machine {self.name!r}: {assumed}. Measure it: "
        f"python -m mesh_tensorflow.planning.measure --workers {workers}"
      )
    n = hosts if self.shared else 1
    return dataclasses.replace(
      self,
      name=name,
      device=simd.device.bundle(n),
      links=tuple(link.bundle(n) for link in links),
      variants={},
      sources=sources,
      spread=True,
    )

  def with_loads(self, loads: Sequence[int]) -> Machine:
    """The machine as processors see it of which some share a device, or have a slow one.

    All processors do the same work and wait for each other. A device does that of its processors
    one after the other, so the step takes the time of the device with the largest load for its
    speed. Devices that share a host add up to the work of all processors anyway; there such a
    device counts if it alone takes longer. Exchanges go at the speed of the slowest link; those of
    processors of one device count as if they were sent, and what these compute alike (updates of
    weights, say) as if each did: the prediction is an upper bound.

    Args:
      loads: number of processors of each device, of the first ones of `speeds`.

    Returns:
      The machine, with devices that are equally fast.

    Raises:
      ConfigError: there are more devices than `speeds`.
    """
    count = len(loads)
    if self.speeds and count > len(self.speeds):
      raise ConfigError(
        f"machine {self.name!r} says how fast {len(self.speeds)} devices are, and the mesh has "
        f"{count}: measure it with --devices={count}, or leave out its `speeds`"
      )
    speeds = self.speeds[:count] or (1.0,) * count
    longest = max((n / speed for n, speed in zip(loads, speeds)), default=1.0)
    if self.shared:
      longest = max(1.0, longest / max(sum(loads), 1))
    slower = 1.0
    if self.pairs and 1 < count < len(self.pairs):
      slowest = min(p.bandwidth for p in self.pairs)
      slower = min(p.bandwidth for p in self.pairs[: count - 1]) / slowest
    alike = dataclasses.replace(self, speeds=(), pairs=())
    if longest == 1.0 and slower == 1.0:
      return alike

    def loaded(device: Device) -> Device:
      memory = self.device.memory / (1 if self.shared else max(loads))
      return dataclasses.replace(device.bundle(1 / longest), memory=memory)

    def linked(links: Sequence[Link]) -> tuple[Link, ...]:
      return tuple(link.bundle(slower) for link in links)

    return dataclasses.replace(
      alike,
      device=loaded(self.device),
      links=linked(self.links),
      variants={name: (loaded(d), linked(found)) for name, (d, found) in self.variants.items()},
    )

  def memory_of_each(self, devices: int) -> float:
    """Bytes available to each of `devices` devices; those of one host share its memory."""
    return self.device.memory / (devices if self.shared else 1)

  def link(self, mesh_shape: Shape, axis: int) -> Link:
    """The link of a mesh axis: the smallest that joins all devices that differ along it.

    The last mesh axis joins devices with consecutive numbers, each axis before it some that are
    farther apart. If one of the groups along an axis lies in two groups of a link, all take the
    next one.

    Args:
      mesh_shape: a mesh shape.
      axis: number of a mesh axis.
    """
    spanned = math.prod(mesh_shape.to_integer_list[axis:])
    for link in self.links:
      if link.devices is None or mesh_shape.size <= link.devices or not link.devices % spanned:
        return link
    return self.links[-1]


@functools.cache
def _warn_once(text: str) -> None:
  _LOG.warning("%s", text)


def _hosts(count: int) -> str:
  return "one host" if count == 1 else f"{count} hosts"


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


# ------------------------------------------------------------------------- machine files


class _Fields:
  """An object of a machine file; each field is read with its check."""

  def __init__(self, what: str, path: str, fields: Mapping[str, Any]):
    self.what, self.path = what, path
    if not isinstance(fields, dict):
      shown = untrusted.shortened(repr(fields), 200)
      raise ConfigError(f"{what}: {path or 'it'} must be an object with fields, got {shown}")
    self.fields: dict[str, Any] = fields

  def __contains__(self, key: str) -> bool:
    return key in self.fields

  def name(self, key: str) -> str:
    return f"{self.path}.{key}" if self.path else key

  def get(self, key: str) -> Any:
    if key not in self.fields:
      raise ConfigError(f"{self.what}: field {self.name(key)} is missing")
    return self.fields[key]

  def wrong(self, key: str, wanted: str) -> ConfigError:
    shown = untrusted.shortened(repr(self.fields[key]), 200)
    return ConfigError(f"{self.what}: field {self.name(key)} must be {wanted}, got {shown}")

  def number(self, key: str, default: float | None = None, low: float = 0.0) -> float:
    """A number of at least `low`; without a default above 0."""
    if default is not None and key not in self.fields:
      return default
    value = self.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
      raise self.wrong(key, "a number")
    if value < low or (value == 0 and default is None):
      raise self.wrong(key, f"at least {low:g}" if default is not None else "a number above 0")
    return float(value)

  def not_negative(self, key: str) -> float:
    self.get(key)
    return self.number(key, 0.0)

  def whole(self, key: str, default: int, low: int) -> int:
    value = self.fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
      raise self.wrong(key, f"a whole number of at least {low}")
    return value

  def text(self, key: str) -> str:
    value = self.get(key)
    if not isinstance(value, str) or not value:
      raise self.wrong(key, "a text")
    return value

  def boolean(self, key: str, default: bool) -> bool:
    value = self.fields.get(key, default)
    if not isinstance(value, bool):
      raise self.wrong(key, "true or false")
    return value

  def points(self, key: str, wanted: str, most: float) -> tuple[tuple[float, float], ...]:
    """Pairs, both numbers increasing, the second ones at most `most`."""
    points = self.get(key)
    try:
      pairs = tuple((float(x), float(y)) for x, y in points)
    except (TypeError, ValueError):
      raise self.wrong(key, wanted) from None
    increasing = all(a[0] < b[0] and a[1] <= b[1] for a, b in zip(pairs, pairs[1:]))
    if not pairs or not increasing or not all(x > 0 and 0 < y <= most for x, y in pairs):
      raise self.wrong(key, wanted)
    return pairs

  def part(self, key: str) -> _Fields:
    return _Fields(self.what, self.name(key), self.get(key))

  def parts(self, key: str) -> list[_Fields]:
    value = self.get(key)
    if not isinstance(value, list) or not value:
      raise self.wrong(key, "a list with at least one object")
    return [_Fields(self.what, f"{self.name(key)}[{i}]", v) for i, v in enumerate(value)]

  def parts_by_name(self, key: str) -> dict[str, _Fields]:
    """The objects of an object by their names; none if the field is missing."""
    if key not in self.fields:
      return {}
    whole = self.part(key)
    return {k: whole.part(k) for k in whole.fields}

  def texts(self, key: str) -> dict[str, str]:
    if key not in self.fields:
      return {}
    whole = self.part(key)
    return {k: whole.text(k) for k in whole.fields}

  def check_names(self, known: type | Sequence[str]) -> None:
    """Raises `ConfigError` for a field that a dataclass (or a list of names) does not have."""
    names = [f.name for f in dataclasses.fields(known)] if isinstance(known, type) else known
    for key in self.fields:
      if key not in names:
        raise ConfigError(
          f"{self.what}: field {self.name(key)} is unknown; there are {', '.join(names)}"
        )


def _is_finite(number: float) -> bool:
  try:
    return math.isfinite(number)
  except OverflowError:  # A whole number beyond all floats.
    return False


def _read_device(read: _Fields) -> Device:
  read.check_names(Device)
  flops = read.part("flops")
  if not flops.fields:
    raise read.wrong("flops", "an object from dtype to FLOP/s")
  for dtype in flops.fields:
    try:
      tf.as_dtype(dtype)
    except TypeError:
      raise ConfigError(f"{read.what}: field {flops.name(dtype)}: there is no such dtype") from None
  convolution: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
  if isinstance(read.fields.get("convolution"), list):
    wanted = "a number, or a list of [channels, part of a product's rate], both increasing"
    convolution = read.points("convolution", wanted, math.inf)
  elif "convolution" in read:
    convolution = ((1.0, read.number("convolution")),)
  wanted = "a list of [FLOPs, part of the peak above 0 and at most 1], both increasing"
  return Device(
    flops={dtype: flops.number(dtype) for dtype in flops.fields},
    efficiency=read.points("efficiency", wanted, 1.0),
    memory=read.number("memory"),
    memory_bandwidth=read.number("memory_bandwidth"),
    launch_seconds=read.not_negative("launch_seconds"),
    operations_per_kernel=read.number("operations_per_kernel", 1.0, 1.0),
    fuses_elementwise=read.boolean("fuses_elementwise", False),
    convolution=convolution,
  )


def _read_links(read: _Fields) -> tuple[Link, ...]:
  links: list[Link] = []
  for part in read.parts("links"):
    part.get("devices")
    link = _read_link(part)
    if links and (links[-1].devices is None or (link.devices or math.inf) <= links[-1].devices):
      raise part.wrong("devices", "more than those of the link before it")
    links.append(link)
  if links[-1].devices is not None:
    raise ConfigError(
      f"{read.what}: field {read.name('links')}: the last link must join all devices "
      f'("devices": null), got {links[-1].devices}'
    )
  return tuple(links)


def _read_workers(read: _Fields) -> Workers:
  read.check_names(Workers)
  part = read.part("link")
  link = _read_link(part)
  if link.devices is not None:
    raise part.wrong("devices", "null: it joins all workers")
  return Workers(link, read.whole("count", 2, 2), read.whole("hosts", 1, 1))


def _read_speeds(read: _Fields) -> tuple[float, ...]:
  """Reads the relative speed of each device; () of equal ones."""
  if "speeds" not in read:
    return ()
  speeds = read.get("speeds")
  listed = isinstance(speeds, list) and speeds
  if not listed or not all(_is_number(s) and 0 < s <= 1 for s in speeds):
    raise read.wrong("speeds", "a list of numbers above 0 and at most 1")
  return tuple(map(float, speeds))


def _is_number(x: object) -> bool:
  return isinstance(x, (int, float)) and not isinstance(x, bool)


def _read_pairs(read: _Fields) -> tuple[Speed, ...]:
  """Reads the speed of the link from each device to the next one; () of equal ones."""
  if "pairs" not in read:
    return ()
  found = []
  for part in read.parts("pairs"):
    part.check_names(Speed)
    found.append(_read_speed(part))
  return tuple(found)


def _read_link(part: _Fields) -> Link:
  part.check_names(Link)
  devices = part.fields.get("devices")
  if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int)):
    raise part.wrong("devices", "a whole number, or null for all")
  if part.text("topology") not in TOPOLOGIES:
    raise part.wrong("topology", f"one of {', '.join(TOPOLOGIES)}")
  overlap = part.number("overlap", 0.0)
  if overlap > 1:
    raise part.wrong("overlap", "a number from 0 to 1")
  kinds = part.parts_by_name("kinds")
  if kinds:
    part.part("kinds").check_names(KINDS)
  speed = _read_speed(part)
  for fields in kinds.values():
    fields.check_names(Speed)
  return Link(
    name=part.text("name"),
    devices=devices,
    topology=part.text("topology"),
    bandwidth=speed.bandwidth,
    latency=speed.latency,
    overlap=overlap,
    kinds={kind: _read_speed(fields) for kind, fields in kinds.items()},
  )


def _read_speed(part: _Fields) -> Speed:
  return Speed(part.number("bandwidth"), part.not_negative("latency"))


def _link_fields(link: Link) -> dict[str, Any]:
  """A link as JSON has it."""
  fields = dataclasses.asdict(link)
  if not link.kinds:
    del fields["kinds"]
  return fields
