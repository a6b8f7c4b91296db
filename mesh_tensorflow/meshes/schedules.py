"""Schedules of pipelines: tables of what each stage does, and when. No TensorFlow here.

A step of a pipeline is a few tasks for each microbatch: the forward pass of each stage, its
backward pass, or the parts of that. A schedule is the order in which each mesh runs its tasks, and
follows from a rule of priorities and from a limit to the microbatches that are under way, by a
simulation of the step: whenever a mesh is free it takes the first of the tasks that can run. The
result is data, `Table`: what draws it, predicts the bubble or runs it need not know the rule.

- "gpipe": all microbatches forward, then all of them back (Huang et al., 2019, arXiv:1811.06965).
- "1f1b": one forward, one back; no more microbatches are under way than there are stages from a
  mesh to the end, so that few activations are held (Narayanan et al., 2021, arXiv:2104.04473).
  Several stages on a mesh are run in turns: the interleaved form.
- "zero_bubble": as 1f1b; the gradients of weights, which nobody waits for, are tasks of their own
  and fill what would be idle time (ZB-H1 of Qi et al., 2023, arXiv:2401.10241).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mesh_settings.run import PIPELINE_SCHEDULES
from mesh_tensorflow.errors import ArgumentError

SCHEDULES = PIPELINE_SCHEDULES


def check_schedule(name: str, what: str) -> None:
  """Raises `ArgumentError` unless there is a schedule of this name.

  Args:
    name: of a schedule.
    what: what asks for it, for the message.
  """
  if name not in SCHEDULES:
    raise ArgumentError(f"{what}: schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")


@dataclasses.dataclass(frozen=True)
class Task:
  """Work of a mesh for each microbatch, done without waiting for others in between.

  Attributes:
    mesh: number of the mesh.
    kind: "F": forward; "B": backward, or the gradients of inputs; "W": the gradients of weights;
      "FB": both, on the last stage.
    after: numbers of the tasks of the same microbatch whose results it needs.
    seconds: how long it takes, in any unit.
  """

  mesh: int
  kind: str
  after: tuple[int, ...] = ()
  seconds: float = 1.0


@dataclasses.dataclass(frozen=True)
class Action:
  """A task of a microbatch, at its time.

  Attributes:
    task: number of the task.
    microbatch: number of the microbatch.
    start: when it begins.
    end: when it is done.
  """

  task: int
  microbatch: int
  start: float
  end: float


class Span(NamedTuple):
  """The time for which a tensor of each microbatch is in memory on a mesh.

  Attributes:
    made: number of the task that makes it. If that is on the mesh, it is there from the beginning
      of this task to the end of `read`; if it is on another mesh, from its end, when the tensor
      comes, to the beginning of `read`.
    read: number of a task of the mesh.
    bytes: that it takes on each device.
  """

  made: int
  read: int
  bytes: int


@dataclasses.dataclass(frozen=True)
class Table:
  """A schedule.

  Attributes:
    tasks: the tasks of a microbatch.
    actions: for each mesh what it does, in order.
    microbatches: number of microbatches.
  """

  tasks: tuple[Task, ...]
  actions: tuple[tuple[Action, ...], ...]
  microbatches: int

  @property
  def seconds(self) -> float:
    """When the last action is done."""
    return max((a.end for row in self.actions for a in row), default=0.0)

  @property
  def bubble(self) -> float:
    """The part of the time in which a mesh is idle, from 0 to 1: the mean of all meshes."""
    if not self.seconds:
      return 0.0
    busy = sum(a.end - a.start for row in self.actions for a in row)
    return 1.0 - busy / (self.seconds * len(self.actions))

  @property
  def in_order(self) -> list[tuple[int, Action]]:
    """All actions with the numbers of their meshes, by the time at which they begin."""
    every = [(m, a) for m, row in enumerate(self.actions) for a in row]
    return sorted(every, key=lambda e: (e[1].start, e[1].end, e[0]))

  def under_way(self, mesh: int) -> float:
    """The most microbatches of which a mesh holds activations at a time.

    With several forward tasks, of several stages on the mesh, each holds an equal part of them.

    Args:
      mesh: number of the mesh.
    """
    own = [i for i, t in enumerate(self.tasks) if t.mesh == mesh]
    # For each task the forward task whose activations it needs.
    of: dict[int, int] = {}
    for i in own:
      before = [j for j in self.tasks[i].after if j in of]
      forward = [j for j in before if of[j] == j]
      of[i] = i if "F" in self.tasks[i].kind or not before else of[(forward or before)[-1]]
    held = {i: [j for j in own if of[j] == i] for i in own if of[i] == i}
    left = {(i, m): len(tasks) for i, tasks in held.items() for m in range(self.microbatches)}
    most = now = 0
    for a in self.actions[mesh]:
      key = of[a.task], a.microbatch
      now += left[key] == len(held[key[0]])
      most = max(most, now)
      left[key] -= 1
      now -= not left[key]
    return most if len(held) < 2 else most / len(held)

  def most_held(self, spans: Iterable[Span], running: Mapping[int, int]) -> list[int]:
    """The most bytes that each mesh holds at a time.

    Args:
      spans: of tensors.
      running: bytes that a task takes besides while it runs, by the numbers of tasks.
    """
    at = {(a.task, a.microbatch): a for row in self.actions for a in row}
    changes: list[list[tuple[float, int]]] = [
      [x for a in row for n in [running.get(a.task, 0)] for x in ((a.start, n), (a.end, -n))]
      for row in self.actions
    ]
    for made, read, size in spans:
      mesh = self.tasks[read].mesh
      stays = self.tasks[made].mesh == mesh
      for m in range(self.microbatches):
        first, last = at[made, m], at[read, m]
        begin, end = (first.start, last.end) if stays else (first.end, last.start)
        changes[mesh] += [(begin, size), (end, -size)]
    # At one time what goes is first.
    return [
      max(itertools.accumulate(n for _, n in sorted(of_mesh)), default=0) for of_mesh in changes
    ]


def table(tasks: Sequence[Task], microbatches: int, schedule: str) -> Table:
  """Makes the table of a schedule.

  Args:
    tasks: of a microbatch; what a task needs stands before it.
    microbatches: number of microbatches.
    schedule: one of `SCHEDULES`.

  Raises:
    ArgumentError: there is no such schedule.
  """
  check_schedule(schedule, "pipeline")
  return _Simulation(tuple(tasks), microbatches, schedule).run()


class _Simulation:
  """The step of a pipeline, in which each mesh takes the first of the tasks that can run."""

  def __init__(self, tasks: tuple[Task, ...], microbatches: int, schedule: str):
    self.tasks, self.microbatches, self.schedule = tasks, microbatches, schedule
    self.meshes = max((t.mesh for t in tasks), default=-1) + 1
    self.own = [[i for i, t in enumerate(tasks) if t.mesh == m] for m in range(self.meshes)]
    self.needed_by: dict[int, list[int]] = {}
    for i, t in enumerate(tasks):
      for before in t.after:
        self.needed_by.setdefault(before, []).append(i)
    # How far each task is from the end, along the longest way.
    self.left = [0.0] * len(tasks)
    for i in reversed(range(len(tasks))):
      after = [self.left[j] for j in self.needed_by.get(i, ())]
      self.left[i] = tasks[i].seconds + max(after, default=0.0)
    self.forward = [[i for i in own if "F" in tasks[i].kind] for own in self.own]
    self.limits = [self._limit(m) for m in range(self.meshes)]
    # Of each mesh the tasks that can run by rank, those that are not forward and those that are.
    self.ready: list[tuple[list[Any], list[Any]]] = [([], []) for _ in range(self.meshes)]

  def _limit(self, mesh: int) -> int:
    """The most forward tasks of a mesh whose backward tasks are not done yet."""
    forward = self.forward[mesh]
    if self.schedule == "gpipe" or not forward:
      return self.microbatches * max(1, len(forward))
    # The meshes that lie behind its first task, this one included.
    behind, waiting = set[int](), [forward[0]]
    while waiting:
      i = waiting.pop()
      behind.add(self.tasks[i].mesh)
      waiting += [
        j for j in self.needed_by.get(i, ()) if "F" in self.tasks[j].kind and j not in waiting
      ]
    if len(forward) == 1:
      return len(behind)
    return 2 * (self.meshes - 1 - mesh) + (len(forward) - 1) * self.meshes + 1

  def run(self) -> Table:
    m_of = range(self.microbatches)
    missing = {(i, m): len(t.after) for i, t in enumerate(self.tasks) for m in m_of}
    self.forward_under_way = [0] * self.meshes
    for (i, m), n in missing.items():
      if not n:
        self._add(i, m)
    rows: list[list[Action]] = [[] for _ in range(self.meshes)]
    free = [0.0] * self.meshes
    running: list[tuple[float, int, int]] = []
    now = 0.0
    while running or any(map(any, self.ready)):
      for mesh in range(self.meshes):
        if free[mesh] > now:
          continue
        chosen = self._choose(mesh)
        if chosen is not None:
          i, m = chosen
          if "F" in self.tasks[i].kind:
            self.forward_under_way[mesh] += 1
          end = now + self.tasks[i].seconds
          rows[mesh].append(Action(i, m, now, end))
          free[mesh] = end
          heapq.heappush(running, (end, i, m))
      if not running:
        # Only the limit holds them back: a task that ends nothing, of a mesh without backward.
        self.limits = [n + 1 for n in self.limits]
        continue
      now = running[0][0]
      while running and running[0][0] <= now:
        _, i, m = heapq.heappop(running)
        self._done(i)
        for j in self.needed_by.get(i, ()):
          missing[j, m] -= 1
          if not missing[j, m]:
            self._add(j, m)
    return Table(self.tasks, tuple(map(tuple, rows)), self.microbatches)

  def _done(self, i: int) -> None:
    """Counts a microbatch as no longer under way, once its activations are not needed any more."""
    mesh, kind = self.tasks[i].mesh, self.tasks[i].kind
    is_split = any(self.tasks[j].kind == "W" for j in self.own[mesh])
    if kind == "W" or ("B" in kind and not is_split):
      self.forward_under_way[mesh] -= 1

  def _add(self, i: int, m: int) -> None:
    """Has a task wait for its mesh."""
    is_forward = "F" in self.tasks[i].kind
    heapq.heappush(self.ready[self.tasks[i].mesh][is_forward], (self._rank(i, m), i, m))

  def _choose(self, mesh: int) -> tuple[int, int] | None:
    """The task and microbatch that a free mesh takes, the first by rank; None to wait."""
    others, forward = self.ready[mesh]
    may_begin = self.forward_under_way[mesh] < self.limits[mesh]
    heaps = [heap for heap in (others, forward if may_begin else []) if heap]
    if not heaps:
      return None
    _, i, m = heapq.heappop(min(heaps, key=lambda heap: heap[0]))
    return i, m

  def _rank(self, i: int, m: int) -> tuple[float, ...]:
    if self.schedule == "gpipe":
      return (i, m)
    kind, chunks = self.tasks[i].kind, self.forward[self.tasks[i].mesh]
    if kind == "W":
      return (2, m, i)
    # Several stages on a mesh: as many microbatches as there are meshes, stage by stage.
    group = self.meshes if len(chunks) > 1 else 1
    if "F" in kind:
      return (0, m // group, chunks.index(i), m)
    # The last stage first.
    return (1, m // group, -self.left[i], m)


def chain(stages: int, meshes: int | None = None, split: bool = False) -> list[Task]:
  """The tasks of a model that is cut into stages, each as long as the others.

  Args:
    stages: number of stages.
    meshes: number of meshes, over which the stages go round; as many as stages by default.
    split: whether the gradients of weights are tasks of their own; the backward pass then is two
      tasks of one unit, else one of two units.
  """
  meshes = stages if meshes is None else meshes
  tasks = [Task(s % meshes, "F", (s - 1,) if s else ()) for s in range(stages)]
  for s in reversed(range(stages)):
    before = len(tasks) - 1 if s < stages - 1 else s
    if s < stages - 1 and tasks[before].kind == "W":
      before -= 1
    tasks.append(Task(s % meshes, "B", tuple({before, s}), 1.0 if split else 2.0))
    if split:
      tasks.append(Task(s % meshes, "W", (len(tasks) - 1,)))
  return tasks


def drawn(table: Table, names: Mapping[int, str] | None = None, width: int = 96) -> str:
  """A line of text for each mesh: digits are microbatches forward, letters the same backward.

  Args:
    table: the schedule.
    names: of the meshes; "mesh 0" and so on by default.
    width: number of characters of the time axis, at most.
  """
  ticks = table.seconds
  if not ticks:
    return ""
  unit = min(a.end - a.start for row in table.actions for a in row)
  scale = min(width / ticks, 2 / unit if ticks / unit * 2 <= width else 1 / unit)
  lines = []
  for mesh, row in enumerate(table.actions):
    line = ["."] * round(ticks * scale)
    for a in row:
      kind = table.tasks[a.task].kind
      first = {"F": "0", "B": "a", "W": "A", "FB": "a"}[kind]
      at = a.microbatch % (10 if kind == "F" else 26)
      for i in range(round(a.start * scale), round(a.end * scale)):
        line[i] = chr(ord(first) + at)
    name = (names or {}).get(mesh, f"mesh {mesh}")
    lines.append(f"{name:>10} |{''.join(line)}|")
  return "\n".join(lines)
