"""Table of the costliest operations of a TensorFlow profile, under their mtf names."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

# "in/einsum/MatMul:MatMul": a name in the graph, and the type of the operation.
_OPERATION = re.compile(r"^([\w./>\-]+):(\w+)$")
# They run others, whose time would count twice.
_CALLS = re.compile(r"PartitionedCall|^(Stateless)?(While|If|Case)$|RemoteCall$")


@dataclasses.dataclass(frozen=True)
class Entry:
  """Number of runs and total time of an operation, or of a type of operation.

  Attributes:
    name: name of the operation, or its type.
    count: number of runs.
    seconds: total time, summed over all threads and devices.
    kind: type of the operation, where `name` is not it.
  """

  name: str
  count: int
  seconds: float
  kind: str = ""


def find_profile(path: pathlib.Path) -> pathlib.Path | None:
  """The newest `.xplane.pb` file in a folder, or the file itself; None if there is none."""
  if path.is_file():
    return path
  found = sorted(path.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
  return found[-1] if found else None


def read(path: pathlib.Path) -> tuple[list[Entry], list[Entry]]:
  """The operations of a profile, the costliest first: by name, and by type.

  Args:
    path: an `.xplane.pb` file.

  Raises:
    ProfileError: it is no such file, or is cut.
  """
  seconds: dict[Any, float] = collections.defaultdict(float)
  counts: collections.Counter[Any] = collections.Counter()
  try:
    for name, duration in _events(memoryview(path.read_bytes())):
      operation = _OPERATION.match(name)
      if operation and not _CALLS.search(operation[2]):
        seconds[operation[1], operation[2]] += duration
        counts[operation[1], operation[2]] += 1
  except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
    raise ProfileError(
      f"{path} is no profile of TensorFlow's (an .xplane.pb file), or is cut"
    ) from e
  type_seconds: dict[Any, float] = collections.defaultdict(float)
  type_counts: collections.Counter[Any] = collections.Counter()
  for (name, kind), duration in seconds.items():
    type_seconds[kind] += duration
    type_counts[kind] += counts[name, kind]
  by_type = [Entry(kind, type_counts[kind], s) for kind, s in type_seconds.items()]
  by_name = [Entry(name, counts[name, kind], s, kind) for (name, kind), s in seconds.items()]
  return _sorted(by_name), _sorted(by_type)


class ProfileError(ValueError):
  """A file is no profile."""


def _sorted(entries: Any) -> list[Entry]:
  return sorted(entries, key=lambda e: (-e.seconds, e.name))


def _events(profile: memoryview) -> Iterator[tuple[str, float]]:
  """Names and durations (in seconds) of all events: an XSpace of planes, lines, and events.

  The fields are those of tsl/profiler/protobuf/xplane.proto: XSpace.planes 1; XPlane.lines 3,
  event_metadata 4; XLine.events 4; XEvent.metadata_id 1, duration_ps 3; XEventMetadata.name 2.
  """
  for number, plane in _fields(profile):
    if number != 1:
      continue
    names: dict[int, str] = {}
    lines = []
    for field, value in _fields(plane):
      if field == 3:
        lines.append(value)
      elif field == 4:
        entry = dict(_fields(value))
        names[entry.get(1, 0)] = bytes(dict(_fields(entry[2])).get(2, b"")).decode(errors="replace")
    for line in lines:
      for field, value in _fields(line):
        if field == 4:
          event = dict(_fields(value))
          yield names.get(event.get(1, 0), ""), event.get(3, 0) * 1e-12


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
  """Number and value of each field of a protocol buffer, as it is encoded."""
  i = 0
  while i < len(message):
    key, i = _varint(message, i)
    kind = key & 7
    if kind == 0:
      value, i = _varint(message, i)
    else:
      size, i = _varint(message, i) if kind == 2 else ({1: 8, 5: 4}[kind], i)
      value, i = message[i : i + size], i + size
    yield key >> 3, value


def _varint(message: Any, i: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    byte = message[i]
    value, i, shift = value | (byte & 127) << shift, i + 1, shift + 7
    if byte < 128:
      return value, i


def table(title: str, entries: list[Entry], steps: int, rows: int) -> str:
  """A table of the costliest entries, in milliseconds of each step.

  Args:
    title: of the table.
    entries: all of them, the costliest first.
    steps: how many steps are in the profile.
    rows: how many entries are shown.
  """
  whole = sum(e.seconds for e in entries) or 1.0
  lines = [f"{title}: {whole * 1000 / steps:.2f} ms in each step, on all threads together"]
  for e in entries[:rows]:
    share = 100 * e.seconds / whole
    lines.append(
      f"{e.seconds * 1000 / steps:9.3f} ms {share:5.1f}%  {e.count / steps:7g} x  {e.name}"
    )
  return "\n".join(lines)
