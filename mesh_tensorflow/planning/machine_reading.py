"""The parts of machines as machine files have them: reading with checks, and writing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.planning.fields import Fields
from mesh_tensorflow.planning.machine_parts import (
  KINDS,
  TOPOLOGIES,
  Device,
  Link,
  Speed,
  Workers,
)


def read_device(read: Fields) -> Device:
  """A device.

  Args:
    read: its fields.

  Raises:
    ConfigError: a field is missing, unknown or wrong.
  """
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


def read_links(read: Fields) -> tuple[Link, ...]:
  """The links of a machine, in its field "links".

  Args:
    read: the fields of a machine, or of a variant.

  Raises:
    ConfigError: a field is missing, unknown or wrong.
  """
  links: list[Link] = []
  for part in read.parts("links"):
    part.get("devices")
    link = _link(part)
    if links and (links[-1].devices is None or (link.devices or math.inf) <= links[-1].devices):
      raise part.wrong("devices", "more than those of the link before it")
    links.append(link)
  if links[-1].devices is not None:
    raise ConfigError(
      f"{read.what}: field {read.name('links')}: the last link must join all devices "
      f'("devices": null), got {links[-1].devices}'
    )
  return tuple(links)


def read_workers(read: Fields) -> Workers:
  """Reads the interconnect between worker processes.

  Args:
    read: its fields.

  Raises:
    ConfigError: a field is missing, unknown or wrong.
  """
  read.done([f.name for f in dataclasses.fields(Workers)])
  part = read.part("link")
  link = _link(part)
  if link.devices is not None:
    raise part.wrong("devices", "null: it joins all workers")
  return Workers(link, read.whole("count", 2, 2), read.whole("hosts", 1, 1))


def _link(part: Fields) -> Link:
  part.done([f.name for f in dataclasses.fields(Link)])
  devices = part.fields.get("devices")
  if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int)):
    raise part.wrong("devices", "a whole number, or null for all")
  if part.text("topology") not in TOPOLOGIES:
    raise part.wrong("topology", f"one of {', '.join(TOPOLOGIES)}")
  overlap = part.number("overlap", 0.0)
  if overlap > 1:
    raise part.wrong("overlap", "a number from 0 to 1")
  kinds = part.parts_by_name("kinds") if "kinds" in part.fields else {}
  if kinds:
    part.part("kinds").done(KINDS)
  speed = _speed(part)
  return Link(
    name=part.text("name"),
    devices=devices,
    topology=part.text("topology"),
    bandwidth=speed.bandwidth,
    latency=speed.latency,
    overlap=overlap,
    kinds={kind: _speed_alone(fields) for kind, fields in kinds.items()},
  )


def _speed(part: Fields) -> Speed:
  return Speed(part.number("bandwidth"), _not_negative(part, "latency"))


def _speed_alone(part: Fields) -> Speed:
  part.done([f.name for f in dataclasses.fields(Speed)])
  return _speed(part)


def link_fields(link: Link) -> dict[str, Any]:
  """A link as JSON has it.

  Args:
    link: the link.
  """
  fields = dataclasses.asdict(link)
  if not link.kinds:
    del fields["kinds"]
  return fields
