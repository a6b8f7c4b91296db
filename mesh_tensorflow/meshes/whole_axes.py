"""Plans the collectives that gather each of some tensor axes, moving the fewest bytes.

An operation along an axis (a Fourier transform, a sort) needs the axis whole on each processor.
Where the mesh splits it, the mesh axis moves to another tensor axis for that time (an alltoall:
of a slice of s elements over n processors each receives s (n - 1) / n), or, where none is free,
the axis is gathered. `plan` finds the cheapest order of such moves and of the operations from the
layout of the input to that of the output. For a field [x, y, z] whose x and y are split it is the
pencil decomposition: z, an exchange, y, an exchange, x. No TensorFlow here.

A tensor axis may be split over several mesh axes on the way: `Holds` has for each tensor axis the
mesh axes that split it, the outermost first. Only the innermost can leave.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator
from typing import TypeAlias

Holds: TypeAlias = tuple[tuple[int, ...], ...]

# Bytes received; elements that the operations go through (those of a gathered axis are gone
# through, and held, by several processors at once); collectives.
_Cost: TypeAlias = tuple[int, int, int]

# Maximum number of spare axes: tensor axes, neither split nor operated on, to which mesh axes can
# be moved in between. Only the largest are tried: the search grows with a power of their number.
MAX_SPARE_AXES = 3


@dataclasses.dataclass(frozen=True)
class Step:
  """One step on the slices.

  Attributes:
    kind: "alltoall", "allconcat", "allsplit", or "apply": the operation along `axis`.
    mesh_axes: the mesh axes that move, increasing; of an allconcat or allsplit one.
    split_axis: the tensor axis that is cut into parts (alltoall, allsplit).
    axis: the tensor axis whose parts are joined (alltoall, allconcat); or that of "apply".
  """

  kind: str
  mesh_axes: tuple[int, ...] = ()
  split_axis: int | None = None
  axis: int | None = None


@dataclasses.dataclass(frozen=True)
class Task:
  """Redistribution problem: layouts before and after an operation along some axes.

  Attributes:
    before: sizes of the tensor axes.
    after: sizes afterwards: those of the axes of `along` may change.
    mesh: sizes of the mesh axes.
    source: the layout before.
    target: the layout afterwards.
    along: the tensor axes along which the operation is done.
    first: the one of them that must come before all others, or None.
    last: the one that must come last, or None.
    weight_before: bytes of an element before the operation along the axis `first`, or `last`.
    weight_after: bytes of an element after it. Where there is no such axis: of all.
  """

  before: tuple[int, ...]
  after: tuple[int, ...]
  mesh: tuple[int, ...]
  source: Holds
  target: Holds
  along: tuple[int, ...]
  first: int | None = None
  last: int | None = None
  weight_before: int = 1
  weight_after: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
  """The steps, and the bytes that each processor receives in them."""

  steps: tuple[Step, ...]
  received: int


@functools.cache
def plan(task: Task) -> Plan:
  """The cheapest way, by bytes received, then by work, then by the number of collectives.

  Args:
    task: a `Task`. Its mesh axes of size 1 stand nowhere.

  Returns:
    A `Plan`. There always is one: gathering everything, and cutting it again.
  """
  return _Search(task).run()


_State: TypeAlias = tuple[Holds, frozenset[int]]


class _Search:
  """Dijkstra's algorithm over layouts and the axes that are done."""

  def __init__(self, task: Task):
    self.task = task
    split = {a for h in (task.source, task.target) for a, ms in enumerate(h) if ms}
    spare = [a for a in range(len(task.before)) if a not in split and a not in task.along]
    spare.sort(key=lambda a: -task.before[a])
    self.rooms = sorted(split | set(task.along) | set(spare[:MAX_SPARE_AXES]))

  def run(self) -> Plan:
    task = self.task
    start: _State = (task.source, frozenset())
    end: _State = (task.target, frozenset(task.along))
    best: dict[_State, _Cost] = {start: (0, 0, 0)}
    came_from: dict[_State, tuple[_State, Step]] = {}
    order = itertools.count()
    queue = [(best[start], next(order), start)]
    while queue:
      cost, _, state = heapq.heappop(queue)
      if state == end:
        break
      if cost > best[state]:
        continue  # It was reached on a cheaper way since.
      for step, after, added in self._successors(state):
        reached = (cost[0] + added[0], cost[1] + added[1], cost[2] + added[2])
        if after not in best or reached < best[after]:
          best[after] = reached
          came_from[after] = (state, step)
          heapq.heappush(queue, (reached, next(order), after))
    steps = []
    state = end
    while state != start:
      state, step = came_from[state]
      steps.append(step)
    return Plan(tuple(reversed(steps)), best[end][0])

  def _slice(self, state: _State) -> list[int]:
    """Sizes of a slice."""
    task, (holds, done) = self.task, state
    return [
      (task.after[a] if a in done else task.before[a]) // math.prod(task.mesh[m] for m in ms)
      for a, ms in enumerate(holds)
    ]

  def _weight(self, done: frozenset[int]) -> int:
    pivot = self.task.last if self.task.first is None else self.task.first
    return self.task.weight_before if pivot not in done else self.task.weight_after

  def _ready(self, done: frozenset[int]) -> list[int]:
    """The axes along which the operation may be done next."""
    task = self.task
    left = [a for a in task.along if a not in done]
    if task.first in left:
      return [task.first]
    return [a for a in left if a != task.last] or left

  def _successors(self, state: _State) -> Iterator[tuple[Step, _State, _Cost]]:
    holds, done = state
    mesh = self.task.mesh
    sizes = self._slice(state)
    size = math.prod(sizes)
    weight = self._weight(done)
    for a in self._ready(done):
      if not holds[a]:
        yield Step("apply", axis=a), (holds, done | {a}), (0, size, 0)
    for m in range(len(mesh)):
      if mesh[m] > 1 and not any(m in ms for ms in holds):
        for b in self.rooms:
          if sizes[b] % mesh[m] == 0:
            after = (_with(holds, {b: (*holds[b], m)}), done)
            yield Step("allsplit", (m,), split_axis=b), after, (0, 0, 0)
    for a, ms in enumerate(holds):
      if not ms:
        continue
      after = (_with(holds, {a: ms[:-1]}), done)
      n = mesh[ms[-1]]
      yield Step("allconcat", ms[-1:], axis=a), after, ((n - 1) * size * weight, 0, 1)
      for k in range(1, len(ms) + 1):
        moved = ms[-k:]
        if list(moved) != sorted(moved):
          break  # A collective takes its mesh axes in their order.
        n = math.prod(mesh[m] for m in moved)
        for b in self.rooms:
          if b != a and sizes[b] % n == 0:
            after = (_with(holds, {a: ms[:-k], b: holds[b] + moved}), done)
            cost = (size // n * (n - 1) * weight, 0, 1)
            yield Step("alltoall", moved, split_axis=b, axis=a), after, cost


def _with(holds: Holds, changed: dict[int, tuple[int, ...]]) -> Holds:
  return tuple(changed.get(a, ms) for a, ms in enumerate(holds))
