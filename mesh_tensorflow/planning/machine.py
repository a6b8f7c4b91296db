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
import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from mesh_tensorflow.environment import untrusted_files
from mesh_tensorflow.errors import ConfigError, MeshShapeError
from mesh_tensorflow.planning.fields import Fields
from mesh_tensorflow.planning.machine_parts import Device, Link, Workers, inside
from mesh_tensorflow.planning.machine_reading import (
  link_fields,
  read_device,
  read_links,
  read_workers,
)
from mesh_tensorflow.program.dimensions import Shape

_FOLDER = pathlib.Path(__file__).parent / "machines"

_LOG = logging.getLogger("mesh_tensorflow")


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
  """

  name: str
  device: Device
  links: tuple[Link, ...]
  shared: bool = False
  variants: Mapping[str, tuple[Device, tuple[Link, ...]]] = dataclasses.field(default_factory=dict)
  sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
  workers: Workers | None = None
  spread: bool = False

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
      fields = untrusted_files.read_json(path)
    except tf.errors.OpError as e:
      reason = "No such file or directory" if isinstance(e, tf.errors.NotFoundError) else e.message
      raise ConfigError(f"machine file {name}: {reason}") from e
    except ValueError as e:
      raise ConfigError(f"machine file {name} is no JSON: {e}") from e
    return Machine.from_dict(fields, f"machine file {name}")

  @staticmethod
  def from_dict(fields: Any, what: str = "machine") -> Machine:
    """Builds a machine from parsed JSON.

    Args:
      fields: a dict, as `to_dict` makes it.
      what: for messages.

    Raises:
      ConfigError: a field is missing, unknown or wrong.
    """
    read = Fields(what, "", fields)
    # First what is unknown: a misspelled field is one, and missing as well.
    read.done(tuple(f.name for f in dataclasses.fields(Machine)))
    device, links = read_device(read.part("device")), read_links(read)
    variants = {}
    for name, part in (read.parts_by_name("variants") if "variants" in fields else {}).items():
      part.done(("device", "links"))
      variants[name] = (
        read_device(part.part("device")) if "device" in part.fields else device,
        read_links(part) if "links" in part.fields else links,
      )
    sources = read.texts("sources") if "sources" in fields else {}
    shared = read.boolean("shared", False)
    workers = read_workers(read.part("workers")) if "workers" in fields else None
    spread = read.boolean("spread", False)
    name = read.text("name")
    return Machine(name, device, links, shared, variants, sources, workers, spread)

  def to_dict(self) -> dict[str, Any]:
    """The machine as a dict that JSON can hold."""
    fields = {
      "name": self.name,
      "shared": self.shared,
      "device": dataclasses.asdict(self.device),
      "links": [link_fields(link) for link in self.links],
      "variants": {
        name: {
          "device": dataclasses.asdict(device),
          "links": [link_fields(link) for link in links],
        }
        for name, (device, links) in self.variants.items()
      },
      "sources": dict(self.sources),
    }
    if self.workers is not None:
      link = link_fields(self.workers.link)
      fields["workers"] = {**dataclasses.asdict(self.workers), "link": link}
    if self.spread:
      fields["spread"] = True
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
      links = (*inside(simd.links, devices // workers), self.workers.link)
      if self.workers.hosts != hosts:
        measured = _hosts(self.workers.hosts)
        _say(
          f"machine {self.name!r}: what workers exchange was measured on {measured}, and these are "
          f"on {_hosts(hosts)}; the same speed is assumed. Measure it there: "
          "python -m mesh_tensorflow.planning.measure, on each host, with TF_CONFIG"
        )
    elif len(simd.links) > 1:
      links = (*inside(simd.links[:-1], devices // hosts), simd.links[-1])
    else:
      links = (*inside(simd.links, devices // workers), simd.links[-1])
      name += " (their link is assumed)"
      assumed = (
        f"the exchange between workers was not measured; assumed is that of the link "
        f"{links[-1].name!r}, which joins the devices of one worker"
      )
      sources = {**sources, "workers": f"assumed: {assumed}"}
      _say(
        f"machine {self.name!r}: {assumed}. Measure it: "
        f"python -m mesh_tensorflow.planning.measure --workers {workers}"
      )
    factor = hosts if self.shared else 1
    return dataclasses.replace(
      self,
      name=name,
      device=simd.device.times(factor),
      links=tuple(link.times(factor) for link in links),
      variants={},
      sources=sources,
      spread=True,
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
def _say(text: str) -> None:
  """Warns, once."""
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
