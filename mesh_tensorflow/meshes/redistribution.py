"""Plans the collectives from one layout of a tensor to another that move the fewest bytes.

No TensorFlow here. The elements of a tensor are numbered row-major from 0 to `total` - 1. Under
a layout a mesh axis of size n *stands at place* p when its coordinate is the digit
`element // (total // (p * n)) % n` of that number: the tensor axis split over it has p elements
before it. `Places` has the place of every mesh axis, or None for one that splits nothing.

No processor can receive less than the part of its new slice that it does not hold. `plan`
finds the shortest sequence of collectives that moves no more than this, or, where a mesh is
so large that it would take too many messages, the sequence that moves the least.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from mesh_tensorflow.meshes.exchange import Exchange, count_units, find_exchange

Places: TypeAlias = tuple[int | None, ...]

# Elements received; collectives; exchanges of several rounds (what has a name of its own comes
# first); elements of all slices on the way; messages sent by a processor.
_Cost: TypeAlias = tuple[int, int, int, int, int]

# Maximum number of permutations in a redistribution by permutations of parts of the slices: many
# small messages cost more than the bytes that they save.
MAX_ROUNDS = 16

# Number of parts of all slices together from which on no permutations are searched for.
MAX_UNITS = 1 << 12


@dataclasses.dataclass(frozen=True)
class Move:
  """One step: a collective along mesh axes, or a local split.

  Attributes:
    kind: "allsplit" (no communication), "allconcat" or "alltoall".
    mesh_axes: the mesh axes; several only for an alltoall in their product.
    view: shape in which the slice is looked at, before the step.
    split_axes: for each mesh axis the axis of the view that is cut into parts (allsplit, alltoall).
    concat_axes: for each mesh axis the axis of the view along which the parts are joined
      (allconcat, alltoall).
    received: elements that each processor receives.
  """

  kind: str
  mesh_axes: tuple[int, ...]
  view: tuple[int, ...]
  split_axes: tuple[int, ...]
  concat_axes: tuple[int, ...]
  received: int


@dataclasses.dataclass(frozen=True)
class Plan:
  """Steps that redistribute a tensor from one layout to another.

  Attributes:
    steps: `Move`s and `Exchange`s, in order.
    received: elements that one processor receives, at most, in all.
    bound: elements that some processor lacks of its new slice, so has to receive in any case.
    collectives: number of steps that communicate; each permutation of an exchange is one.
  """

  steps: tuple[Move | Exchange, ...]
  received: int
  bound: int
  collectives: int


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
  """A* over the places of the mesh axes; the bound of what is left to receive leads it."""

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
    best: dict[Places, _Cost] = {self.source: (0, 0, 0, 0, 0)}
    came_from: dict[Places, tuple[Places, str, tuple[int, ...]]] = {}
    queue = [(self._at_least(self.source, best[self.source]), 0, self.source)]
    order = itertools.count(1)
    while queue:
      estimate, _, state = heapq.heappop(queue)
      cost = best[state]
      if state == self.target:
        bound = direct.received if direct else self.lacking(self.source)
        return self._plan_of(came_from, cost, bound)
      if estimate > self._at_least(state, cost):
        continue  # It was reached on a cheaper way since.
      for after, kind, axes, added in self._successors(state):
        reached = tuple(map(operator.add, cost, added))
        if reached < best.get(after, (math.inf,)):
          estimate = self._at_least(after, reached)
          if estimate < limit:
            best[after] = reached
            came_from[after] = (state, kind, axes)
            heapq.heappush(queue, (estimate, next(order), after))
    # Nothing is cheaper. (Without a limit, gathering and splitting leads to the target.)
    assert direct is not None
    return Plan((direct,), direct.received, direct.received, len(direct.rounds))

  def _cost_of(self, direct: Exchange) -> _Cost:
    n = len(direct.rounds)
    is_permutation = n == len(direct.all_rounds) == 1
    return (direct.received, n, not is_permutation, self.slice_size(self.target), n)

  def _at_least(self, state: Places, cost: _Cost) -> _Cost:
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

  def _successors(self, state: Places) -> Iterator[tuple[Places, str, tuple[int, ...], _Cost]]:
    """Yields the (state, kind, mesh axes, cost) that one step leads to."""
    size = self.slice_size(state)
    for m, candidates in zip(self.moving, self.candidates):
      n, here = self.mesh[m], state[m]
      if here is not None:
        yield _put(state, m, None), "allconcat", (m,), ((n - 1) * size, 1, 0, n * size, n - 1)
      for p in candidates:
        after = _put(state, m, p)
        if p == here or not self._is_layout(self._intervals(after)):
          continue
        if here is None:
          yield after, "allsplit", (m,), (0, 0, 0, size // n, 0)
        elif self._is_layout(self._intervals(state) + [(p, p * n)]):
          yield after, "alltoall", (m,), (size // n * (n - 1), 1, 0, size, n - 1)
    yield from self._joint_alltoalls(state, size)
    for after in self._states:
      if after != state and self._is_rearrangement(state, after):
        kept = self.slice_size(after)
        yield after, "permute", (), (kept, 1, 0, kept, 1)

  def _joint_alltoalls(
    self, state: Places, size: int
  ) -> Iterator[tuple[Places, str, tuple[int, ...], _Cost]]:
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
          yield after, "alltoall", axes, (size // n * (n - 1), 1, 0, size, n - 1)

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

  def _plan_of(
    self,
    came_from: Mapping[Places, tuple[Places, str, tuple[int, ...]]],
    cost: _Cost,
    bound: int,
  ) -> Plan:
    steps: list[Move | Exchange] = []
    state = self.target
    while state != self.source:
      before, kind, axes = came_from[state]
      if kind == "permute":
        steps.append(find_exchange(self.total, self.mesh, before, state))
      else:
        steps.append(self._move(kind, axes, before, state))
      state = before
    return Plan(tuple(reversed(steps)), cost[0], bound, cost[1])

  def _move(self, kind: str, axes: tuple[int, ...], before: Places, after: Places) -> Move:
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
    size = self.slice_size(before)
    n = math.prod(self.mesh[m] for m in axes)
    received = {"allsplit": 0, "allconcat": (n - 1) * size, "alltoall": size // n * (n - 1)}[kind]
    at = {c: i for i, c in enumerate(cuts)}
    return Move(
      kind=kind,
      mesh_axes=axes,
      view=tuple(view),
      # Before an allsplit the mesh axis has no place, and after an allconcat.
      split_axes=tuple(at[p] for p in (after[m] for m in axes) if p is not None),
      concat_axes=tuple(at[p] for p in (before[m] for m in axes) if p is not None),
      received=received,
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
