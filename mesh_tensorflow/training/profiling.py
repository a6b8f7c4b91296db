"""A TensorFlow profile of some steps of a training, and its table of operations."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from mesh_tensorflow.checkpoint import folder as folder_lib
from mesh_tensorflow.environment.protobuf import fields
from mesh_tensorflow.training import model_files

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
  for number, plane in fields(profile):
    if number != 1:
      continue
    names: dict[int, str] = {}
    lines = []
    for field, value in fields(plane):
      if field == 3:
        lines.append(value)
      elif field == 4:
        entry = dict(fields(value))
        names[entry.get(1, 0)] = bytes(dict(fields(entry[2])).get(2, b"")).decode(errors="replace")
    for line in lines:
      for field, value in fields(line):
        if field == 4:
          event = dict(fields(value))
          yield names.get(event.get(1, 0), ""), event.get(3, 0) * 1e-12


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


_LOG = logging.getLogger("mesh_tensorflow")

_ROWS = 10
# Where TensorFlow's profiler writes in the folder that it is given.
_FOLDER = os.path.join("plugins", "profile")
# Reading is Python's work: a second for ten megabytes.
_MOST_BYTES = 300_000_000
# The loop of steps, which all operations of a step are in; and what TensorFlow puts behind a name.
_LOOP = re.compile(r"^(Func/)?while/body/(_\d+/)?(while/)?|(/_\d+)+$")
# They hand tensors on; how long they wait for them is no work.
_BETWEEN = re.compile(r"_?(Host)?(Send|Recv)|LoopCond|Enter|Exit|NextIteration|Merge|Switch")


class StepsProfile:
  """The profile of the steps behind `first`, up to `last`.

  Args:
    steps: (first, last), in numbers of steps done; None: there is no profile.
    model_dir: the folder of the model, in which TensorBoard looks for profiles; None: no profile.
    say: gets the table.
  """

  def __init__(
    self, steps: tuple[int, int] | None, model_dir: str | None, say: Callable[[str], None]
  ):
    self._steps = steps if model_dir else None
    self._folder = model_dir or ""
    self._say = say
    self._began: int | None = None

  @property
  def ends(self) -> tuple[int, ...]:
    """Step numbers at which calls of the program must end."""
    return self._steps or ()

  def before_call(self, step: int) -> None:
    """Starts the profile, if it is time.

    Args:
      step: number of steps done.
    """
    if self._steps is None or self._began is not None or not self._within(step):
      return
    started: list[bool] = []
    with self._told():
      folder_lib.inside(self._folder, os.path.join(self._folder, _FOLDER, "any"))
      tf.profiler.experimental.start(self._folder)
      started.append(True)
    if started:
      self._began = step
    else:
      self._steps = None

  def after_call(self, step: int) -> None:
    """Ends the profile, if it is time, and tells what is in it.

    Args:
      step: number of steps done.
    """
    if self._began is not None and self._steps is not None and step >= self._steps[1]:
      self._end(step)

  def close(self, step: int) -> None:
    """Ends a running profile.

    Args:
      step: number of steps done.
    """
    if self._began is not None:
      self._end(step)

  def _within(self, step: int) -> bool:
    return self._steps is not None and self._steps[0] <= step < self._steps[1]

  def _end(self, step: int) -> None:
    began, self._began, self._steps = self._began or 0, None, None
    with self._told():
      tf.profiler.experimental.stop()
      self._say(self._table(began, step))

  def _table(self, began: int, step: int) -> str:
    where = f"profile of steps {began + 1} to {step} in {os.path.join(self._folder, _FOLDER)}"
    local = folder_lib.local_path(self._folder)
    path = find_profile(pathlib.Path(local, _FOLDER)) if local else None
    if step <= began or path is None or path.stat().st_size > _MOST_BYTES:
      return where
    try:
      by_name, _ = read(path)
    except ProfileError as e:
      return f"{where} ({e})"
    found = [_named(e) for e in by_name if not _BETWEEN.match(e.kind)]
    return f"{where}\n{table('operations', found, step - began, _ROWS)}"

  @contextlib.contextmanager
  def _told(self) -> Iterator[None]:
    """Inside it, what goes wrong is told, and training goes on."""
    try:
      with model_files.errors_of_writing(self._folder, "a profile"):
        yield
    except Exception as e:  # noqa: BLE001 - of a profiler that runs already, a full disk, a link.
      _LOG.warning("run.profile_steps: no profile: %s", e)


def _named(entry: Entry) -> Entry:
  """An entry under the name that the operation has in a step, with its type."""
  return dataclasses.replace(entry, name=f"{_LOOP.sub('', entry.name)} ({entry.kind})")
