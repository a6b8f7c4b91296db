"""Plans of the collectives that redistribute a tensor and move the fewest bytes.

No TensorFlow here. There are two problems, and one search for both.

`plan` goes from one layout to another, as a reshape needs it. The elements of a tensor are numbered
row-major from 0 to `total` - 1. Under a layout a mesh axis of size n *stands at place* p when its
coordinate is the digit `element // (total // (p * n)) % n` of that number: the tensor axis split
over it has p elements before it. `Places` has the place of every mesh axis, or None for one that
splits nothing. No processor can receive less than the part of its new slice that it does not hold.
The plan is the shortest sequence of collectives that moves no more than this, or, where a mesh is
so large that it would take too many messages, the sequence that moves the least.

`plan_along` goes from one layout to another by way of an operation along some tensor axes (a
Fourier transform, a sort), which needs each of them whole on each processor for its turn. Where the
mesh splits it, the mesh axis moves to another tensor axis for that time (an alltoall: of a slice of
s elements over n processors each receives s (n - 1) / n), or, where none is free, the axis is
gathered. For a field [x, y, z] whose x and y are split it is the pencil decomposition: z, an
exchange, y, an exchange, x. Here a tensor axis may be split over several mesh axes on the way:
`Holds` has for each tensor axis the mesh axes that split it, the outermost first. Only the
innermost can leave.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from mesh_tensorflow.meshes.exchange import Exchange, count_units, find_exchange

Places: TypeAlias = tuple[int | None, ...]
Holds: TypeAlias = tuple[tuple[int, ...], ...]

# Costs are compared lexicographically.
_Costs: TypeAlias = tuple[int, ...]

# Elements received; collectives; exchanges of several rounds (what has a name of its own comes
# first); elements of all slices on the way; messages sent by a processor.
_Cost: TypeAlias = tuple[int, int, int, int, int]

# Maximum number of permutations in a redistribution by permutations of parts of the slices: many
# small messages cost more than the bytes that they save.
MAX_ROUNDS = 16

# Number of parts of all slices together from which on no permutations are searched for.
MAX_UNITS = 1 << 12

# Maximum number of spare axes: tensor axes, neither split nor operated on, to which mesh axes can
# be moved in between. Only the largest are tried: the search grows with a power of their number.
MAX_SPARE_AXES = 3

_S = TypeVar("_S")
_A = TypeVar("_A")


@dataclasses.dataclass(frozen=True)
class Move:
  """One step: a collective along mesh axes, or a local split.

  Attributes:
    kind: "allsplit" (no communication), "allconcat" or "alltoall".
    mesh_axes: the mesh axes; several only for an alltoall in their product.
    split_axes: the axis that is cut into parts (allsplit, alltoall): one for all mesh axes, or
      one for each.
    concat_axes: the axis along which the parts are joined (allconcat, alltoall), likewise.
    view: shape in which the slice is looked at, before the step; None: as it is.
  """

  kind: str
  mesh_axes: tuple[int, ...]
  split_axes: tuple[int, ...] = ()
  concat_axes: tuple[int, ...] = ()
  view: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Apply:
  """The operation along a tensor axis, which is whole by then."""

  axis: int

  kind = "apply"


Step: TypeAlias = Move | Exchange | Apply


@dataclasses.dataclass(frozen=True)
class Plan:
  """Steps that redistribute a tensor from one layout to another.

  Attributes:
    steps: in order.
    received: elements (of `plan_along`: bytes) that one processor receives, at most, in all.
    bound: elements that some processor lacks of its new slice, so has to receive in any case; of
      `plan_along` this is not known, and 0.
    collectives: number of steps that communicate; each permutation of an exchange is one.
  """

  steps: tuple[Step, ...]
  received: int
  bound: int
  collectives: int


def _cheapest(
  start: _S,
  goal: _S,
  successors: Callable[[_S], Iterable[tuple[_S, _A, _Costs]]],
  at_least: Callable[[_S, _Costs], _Costs],
  zero: _Costs,
  limit: tuple[float, ...] = (math.inf,),
) -> tuple[_Costs, list[tuple[_S, _A, _S]]] | None:
  """A*: the cheapest path between two states; None if all cost as much as a limit, or more.

  Args:
    start: a state.
    goal: another.
    successors: yields (state, step, cost) of what one step leads to.
    at_least: a lower bound of the cost of a path through a state, which has cost so much so far.
    zero: the cost of no step.
    limit: what costs as much is not followed.

  Returns:
    The cost, and for each step the state before it, the step, and the state after it.
  """
  best: dict[_S, _Costs] = {start: zero}
  came_from: dict[_S, tuple[_S, _A]] = {}
  order = itertools.count(1)
  queue = [(at_least(start, zero), 0, start)]
  while queue:
    estimate, _, state = heapq.heappop(queue)
    cost = best[state]
    if state == goal:
      path = []
      while state != start:
        before, step = came_from[state]
        path.append((before, step, state))
        state = before
      return cost, path[::-1]
    if estimate > at_least(state, cost):
      continue  # It was reached on a cheaper way since.
    for after, step, added in successors(state):
      reached = tuple(map(operator.add, cost, added))
      if reached < best.get(after, (math.inf,)):
        estimate = at_least(after, reached)
        if estimate < limit:
          best[after] = reached
          came_from[after] = (state, step)
          heapq.heappush(queue, (estimate, next(order), after))
  return None


# ------------------------------------------------------------------ from layout to layout


@functools.cache
def plan(total: int, mesh: tuple[int, ...], source: Places, target: Places) -> Plan:
  """The cheapest way from one layout to another.

  Args:
    total: number of elements of the tensor.
    mesh: sizes of the mesh axes.
    source: place of each mesh axis before; None also for mesh axes of size 1.
    target: place of each mesh axis after, or None.

  Returns:
    The `Plan` with the fewest elements received by a processor, among those with the fewest
    collectives, among those with the fewest messages.
  """
  return _Search(total, mesh, source, target).run()


class _Search:
  """Search over the places of the mesh axes; the bound of what is left to receive leads it."""

  def __init__(self, total: int, mesh: tuple[int, ...], source: Places, target: Places):
    self.total, self.mesh, self.source, self.target = total, mesh, source, target
    self.moving = [m for m in range(len(mesh)) if source[m] != target[m]]
    self.candidates = self._candidates()
    self._lacking: dict[Places, int] = {}

  def run(self) -> Plan:
    if not self.moving:
      return Plan((), 0, 0, 0)
    direct = self._direct()
    # Ways that cost as much as the direct one, or more, are not followed.
    limit = (math.inf,) if direct is None else self._cost_of(direct)
    zero = (0, 0, 0, 0, 0)
    found = _cheapest(self.source, self.target, self._successors, self._at_least, zero, limit)
    if found is not None:
      cost, path = found
      bound = direct.received if direct else self.lacking(self.source)
      return Plan(tuple(self._step(*step) for step in path), cost[0], bound, cost[1])
    # Nothing is cheaper. (Without a limit, gathering and splitting leads to the target.)
    assert direct is not None
    return Plan((direct,), direct.received, direct.received, len(direct.rounds))

  def _cost_of(self, direct: Exchange) -> _Cost:
    n = len(direct.rounds)
    is_permutation = n == len(direct.all_rounds) == 1
    return (direct.received, n, not is_permutation, self.slice_size(self.target), n)

  def _at_least(self, state: Places, cost: _Costs) -> _Costs:
    """A lower bound of the cost of a way through a state."""
    lacking = self.lacking(state)
    # Who lacks something needs one more collective at least. Never too high: A* finds the cheapest.
    return (cost[0] + lacking, cost[1] + (lacking > 0), *cost[2:])

  def _direct(self) -> Exchange | None:
    """The one exchange that does it all, if it takes few enough permutations."""
    units = count_units(self.total, self.mesh, self.source, self.target)
    processors = math.prod(self.mesh[m] for m in self.moving)
    if units > MAX_ROUNDS and units * processors > MAX_UNITS:
      return None
    exchange = find_exchange(self.total, self.mesh, self.source, self.target)
    return exchange if len(exchange.rounds) <= MAX_ROUNDS else None

  # ---------------------------------------------------------------- states

  def _candidates(self) -> list[list[int]]:
    """The places that each moving mesh axis may take on the way."""
    cuts = {1, self.total}
    for places in (self.source, self.target):
      for m in self.moving:
        p = places[m]
        if p is not None:
          cuts |= {p, p * self.mesh[m]}
    return [sorted(c for c in cuts if self.total % (c * self.mesh[m]) == 0) for m in self.moving]

  @functools.cached_property
  def _states(self) -> list[Places]:
    """Every combination of places that makes a layout."""
    states = []
    for choice in itertools.product(*[[None, *c] for c in self.candidates]):
      state = list(self.source)
      for m, p in zip(self.moving, choice):
        state[m] = p
      if self._is_layout(self._intervals(state)):
        states.append(tuple(state))
    return states

  def _is_layout(self, intervals: Sequence[tuple[int, int]]) -> bool:
    return _are_apart(intervals, self.total)

  def _intervals(self, state: Sequence[int | None]) -> list[tuple[int, int]]:
    return [(p, p * n) for p, n in zip(state, self.mesh) if p is not None]

  def slice_size(self, state: Places) -> int:
    """Elements of a processor's slice."""
    return self.total // math.prod(n for p, n in zip(state, self.mesh) if p is not None)

  def lacking(self, state: Places) -> int:
    """A bound of the elements that some processor has to receive to reach the target."""
    if state not in self._lacking:
      self._lacking[state] = self._find_lacking(state)
    return self._lacking[state]

  def _find_lacking(self, state: Places) -> int:
    wanted = self.slice_size(self.target)
    here, there = self._intervals(state), self._intervals(self.target)
    if not _chain([c for i in here + there for c in i]):
      # Digits that overlap askew: no processor holds more than its whole slice.
      return max(0, wanted - self.slice_size(state))
    union = 1
    for m, n in enumerate(self.mesh):
      if state[m] is not None and state[m] == self.target[m]:
        union *= n
        continue
      for p, others in ((state[m], there), (self.target[m], here)):
        if p is not None:
          if any(a < p * n and p < b for a, b in others):
            return wanted  # Two coordinates claim the same digit: some processor has nothing.
          union *= n
    # All digits are apart: of its new slice a processor holds what has its coordinates as digits in
    # both layouts.
    return wanted - self.total // union

  # ---------------------------------------------------------------- moves

  def _successors(
    self, state: Places
  ) -> Iterator[tuple[Places, tuple[str, tuple[int, ...]], _Cost]]:
    """Yields the (state, (kind, mesh axes), cost) that one step leads to."""
    size = self.slice_size(state)
    for m, candidates in zip(self.moving, self.candidates):
      n, here = self.mesh[m], state[m]
      if here is not None:
        yield _put(state, m, None), ("allconcat", (m,)), ((n - 1) * size, 1, 0, n * size, n - 1)
      for p in candidates:
        after = _put(state, m, p)
        if p == here or not self._is_layout(self._intervals(after)):
          continue
        if here is None:
          yield after, ("allsplit", (m,)), (0, 0, 0, size // n, 0)
        elif self._is_layout(self._intervals(state) + [(p, p * n)]):
          yield after, ("alltoall", (m,)), (size // n * (n - 1), 1, 0, size, n - 1)
    yield from self._joint_alltoalls(state, size)
    for after in self._states:
      if after != state and self._is_rearrangement(state, after):
        kept = self.slice_size(after)
        yield after, ("permute", ()), (kept, 1, 0, kept, 1)

  def _joint_alltoalls(
    self, state: Places, size: int
  ) -> Iterator[tuple[Places, tuple[str, tuple[int, ...]], _Cost]]:
    """Alltoalls in the product of several mesh axes, each from its place to its target."""
    ready = [
      m
      for m in self.moving
      if None not in (state[m], self.target[m]) and state[m] != self.target[m]
    ]
    # One after the other, each receives nearly a whole slice; together they receive one.
    for k in range(2, len(ready) + 1):
      for axes in itertools.combinations(ready, k):
        after = tuple(self.target[m] if m in axes else p for m, p in enumerate(state))
        new = self._intervals([self.target[m] if m in axes else None for m in range(len(state))])
        fits = self._is_layout(self._intervals(after))
        if fits and self._is_layout(self._intervals(state) + new):
          n = math.prod(self.mesh[m] for m in axes)
          yield after, ("alltoall", axes), (size // n * (n - 1), 1, 0, size, n - 1)

  def _is_rearrangement(self, state: Places, after: Places) -> bool:
    """True if every slice of `after` is part of a slice of `state`, maybe on other processors."""
    # All that `state` fixes of an element's number must be fixed by `after`, too.
    merged: list[list[int]] = []
    for a, b in sorted(self._intervals(after)):
      if merged and merged[-1][1] == a:
        merged[-1][1] = b
      else:
        merged.append([a, b])
    return all(
      any(c <= a and b <= d and a % c == 0 and d % b == 0 for c, d in merged)
      for a, b in self._intervals(state)
    )

  # ---------------------------------------------------------------- the result

  def _step(
    self, before: Places, what: tuple[str, tuple[int, ...]], after: Places
  ) -> Move | Exchange:
    kind, axes = what
    if kind == "permute":
      return find_exchange(self.total, self.mesh, before, after)
    moved = [
      self._intervals([p if m in axes else None for m, p in enumerate(places)])
      for places in (before, after)
    ]
    cuts = sorted({1, self.total, *(c for digits in moved for digit in digits for c in digit)})
    view = [b // a for a, b in zip(cuts, cuts[1:])]
    for p, n in zip(before, self.mesh):
      if p is not None:
        # The axis of the view that holds the digit of this mesh axis.
        view[max(i for i, c in enumerate(cuts[:-1]) if c <= p)] //= n
    at = {c: i for i, c in enumerate(cuts)}
    return Move(
      kind=kind,
      mesh_axes=axes,
      # Before an allsplit the mesh axis has no place, and after an allconcat.
      split_axes=tuple(at[p] for p in (after[m] for m in axes) if p is not None),
      concat_axes=tuple(at[p] for p in (before[m] for m in axes) if p is not None),
      view=tuple(view),
    )


def is_layout(total: int, mesh: Sequence[int], places: Places) -> bool:
  """True if the mesh axes can take these places of a tensor at the same time.

  Args:
    total: number of elements of the tensor.
    mesh: sizes of the mesh axes.
    places: place of each mesh axis, or None.
  """
  return _are_apart([(p, p * n) for p, n in zip(places, mesh) if p is not None], total)


def _are_apart(intervals: Sequence[tuple[int, int]], total: int) -> bool:
  """True if the intervals of digits are disjoint and divide the tensor evenly."""
  end = 1
  for a, b in sorted(intervals):
    if a % end:
      return False
    end = b
  return total % end == 0


def _put(state: Places, m: int, place: int | None) -> Places:
  return (*state[:m], place, *state[m + 1 :])


def _chain(cuts: Sequence[int]) -> bool:
  """True if each of the numbers divides the next larger one."""
  ordered = sorted(set(cuts))
  return all(b % a == 0 for a, b in zip(ordered, ordered[1:]))


# ------------------------------------------------------------ by way of whole tensor axes


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


@functools.cache
def plan_along(task: Task) -> Plan:
  """The cheapest way, by bytes received, then by work, then by the number of collectives.

  Args:
    task: a `Task`. Its mesh axes of size 1 stand nowhere.

  Returns:
    A `Plan`. There always is one: gathering everything, and cutting it again.
  """
  return _AlongSearch(task).run()


_State: TypeAlias = tuple[Holds, frozenset[int]]


class _AlongSearch:
  """Search over layouts and the axes that are done."""

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
    found = _cheapest(start, end, self._successors, lambda _, cost: cost, (0, 0, 0))
    # Gathering everything, doing the operation, and cutting it again always leads there.
    assert found is not None
    cost, path = found
    return Plan(tuple(step for _, step, _ in path), cost[0], 0, cost[2])

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

  def _successors(self, state: _State) -> Iterator[tuple[_State, Move | Apply, _Costs]]:
    """Yields (state, step, cost) of what one step leads to.

    The cost is bytes received; elements that the operation goes through (those of a gathered axis
    are gone through, and held, by several processors at once); collectives.
    """
    holds, done = state
    mesh = self.task.mesh
    sizes = self._slice(state)
    size = math.prod(sizes)
    weight = self._weight(done)
    for a in self._ready(done):
      if not holds[a]:
        yield (holds, done | {a}), Apply(a), (0, size, 0)
    for m in range(len(mesh)):
      if mesh[m] > 1 and not any(m in ms for ms in holds):
        for b in self.rooms:
          if sizes[b] % mesh[m] == 0:
            after = (_with(holds, {b: (*holds[b], m)}), done)
            yield after, Move("allsplit", (m,), split_axes=(b,)), (0, 0, 0)
    for a, ms in enumerate(holds):
      if not ms:
        continue
      after = (_with(holds, {a: ms[:-1]}), done)
      n = mesh[ms[-1]]
      yield after, Move("allconcat", ms[-1:], concat_axes=(a,)), ((n - 1) * size * weight, 0, 1)
      for k in range(1, len(ms) + 1):
        moved = ms[-k:]
        if list(moved) != sorted(moved):
          break  # A collective takes its mesh axes in their order.
        n = math.prod(mesh[m] for m in moved)
        for b in self.rooms:
          if b != a and sizes[b] % n == 0:
            after = (_with(holds, {a: ms[:-k], b: holds[b] + moved}), done)
            cost = (size // n * (n - 1) * weight, 0, 1)
            yield after, Move("alltoall", moved, (b,), (a,)), cost


def _with(holds: Holds, changed: dict[int, tuple[int, ...]]) -> Holds:
  return tuple(changed.get(a, ms) for a, ms in enumerate(holds))
