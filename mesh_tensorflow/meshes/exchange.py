"""Redistribution by permutations: every processor gets each part it lacks from one that has it.

The parts (*units*) are the largest blocks of elements that both layouts keep together. Both
give every processor the same number of units, and every unit to the same number of
processors; so there are always rounds in which each processor sends one unit and receives one
(a regular bipartite graph is a union of perfect matchings: Kőnig, 1916). No TensorFlow here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Places: TypeAlias = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Round:
  """A permutation of units: every processor sends to one processor, and receives from one.

  That is itself where it has what it needs.

  Processors are numbered by their coordinates along the mesh axes of the exchange.

  Attributes:
    source: for each processor the one whose units it receives.
    pick: for each processor which of its units it sends: as many on each.
  """

  source: tuple[int, ...]
  pick: tuple[tuple[int, ...], ...]

  @property
  def is_local(self) -> bool:
    """True if every processor keeps its unit."""
    return self.source == tuple(range(len(self.source)))


@dataclasses.dataclass(frozen=True)
class Exchange:
  """Step that redistributes slices from one layout to another, unit by unit.

  Attributes:
    mesh_axes: the mesh axes along which units move, increasing.
    view: shape to which the old slice is reshaped; its `unit_axes` count the units.
    new_view: shape of the new slice before it is reshaped back; likewise.
    unit_axes: axes of both views.
    all_rounds: the `Round`s, also one in which every processor keeps its unit.
    order: for each processor, for each unit of its new slice, the place of this unit in what
      the rounds have brought, one after the other.
    received: elements that a processor receives, at most.
  """

  mesh_axes: tuple[int, ...]
  view: tuple[int, ...]
  new_view: tuple[int, ...]
  unit_axes: tuple[int, ...]
  all_rounds: tuple[Round, ...]
  order: tuple[tuple[int, ...], ...]
  received: int

  kind = "permute"

  @property
  def rounds(self) -> tuple[Round, ...]:
    """The rounds that communicate; each is one permutation."""
    return tuple(r for r in self.all_rounds if not r.is_local)


@dataclasses.dataclass(frozen=True)
class _Region:
  """Digits of the element number, between cuts that divide or are divided by all others.

  Attributes:
    width: product of the digits.
    units: into how many parts the two layouts cut it.
    digits: for each layout (mesh axis, divisor of its coordinate, first, last): the mesh axis
      fixes the digits of the unit number between `first` and `last` parts.
  """

  width: int
  units: int
  digits: tuple[tuple[tuple[int, int, int, int], ...], ...]

  def held_units(self, layout: int, coordinates: Sequence[Mapping[int, int]]) -> list[list[int]]:
    """For each processor its units, in order."""
    digits = self.digits[layout]
    by_digits: dict[tuple[int, ...], list[int]] = {}
    for u in range(self.units):
      key = tuple([u // (self.units // b) % (b // a) for _, _, a, b in digits])
      by_digits.setdefault(key, []).append(u)
    return [
      by_digits[tuple([c[m] // divisor % (b // a) for m, divisor, a, b in digits])]
      for c in coordinates
    ]

  def count(self, layout: int) -> int:
    """Number of units of a processor."""
    return self.units // math.prod(b // a for _, _, a, b in self.digits[layout])


def _regions(
  total: int, mesh: tuple[int, ...], source: Places, target: Places
) -> tuple[list[_Region], list[int]]:
  """The regions without those that unmoved mesh axes take, and the moving mesh axes."""
  moving = [m for m in range(len(mesh)) if source[m] != target[m]]
  cuts = {1, total}
  for places in (source, target):
    for p, n in zip(places, mesh):
      if p is not None:
        cuts |= {p, p * n}
  ordered = sorted(c for c in cuts if all(c % d == 0 or d % c == 0 for d in cuts))
  regions = []
  for low, high in zip(ordered, ordered[1:]):
    if any(
      p is not None and p < high and low < p * n
      for m, (p, n) in enumerate(zip(source, mesh))
      if m not in moving
    ):
      continue
    digits: list[tuple[tuple[int, int, int, int], ...]] = []
    for places in (source, target):
      found = []
      for m in moving:
        p, n = places[m], mesh[m]
        if p is not None and p < high and low < p * n:
          a, b = max(p, low), min(p * n, high)
          found.append((m, p * n // b, a // low, b // low))
      digits.append(tuple(found))
    # The coarsest cut on which all edges of digits lie.
    units = math.lcm(1, *(c for found in digits for _, _, a, b in found for c in (a, b)))
    regions.append(_Region(high // low, units, tuple(digits)))
  return regions, moving


def count_units(total: int, mesh: tuple[int, ...], source: Places, target: Places) -> int:
  """Number of units in a new slice."""
  regions, _ = _regions(total, mesh, source, target)
  return math.prod(r.count(1) for r in regions)


@functools.cache
def find_exchange(total: int, mesh: tuple[int, ...], source: Places, target: Places) -> Exchange:
  """The `Exchange` from one layout to another (see `redistribution`)."""
  regions, moving = _regions(total, mesh, source, target)
  processors = [dict(zip(moving, c)) for c in itertools.product(*[range(mesh[m]) for m in moving])]
  held, wanted = (_units(regions, layout, processors) for layout in (0, 1))
  rounds, order = _find_rounds(held, wanted)
  view: list[int] = []
  new_view: list[int] = []
  unit_axes: list[int] = []
  for r in regions:
    if r.units > 1:
      unit_axes.append(len(view))
      view.append(r.count(0))
      new_view.append(r.count(1))
    view.append(r.width // r.units)
    new_view.append(r.width // r.units)
  unit_size = math.prod(r.width // r.units for r in regions)
  moved = [sum((r.source[p] != p) * len(r.pick[p]) for r in rounds) for p in range(len(held))]
  return Exchange(
    mesh_axes=tuple(moving),
    view=tuple(view),
    new_view=tuple(new_view),
    unit_axes=tuple(unit_axes),
    all_rounds=tuple(rounds),
    order=tuple(tuple(o) for o in order),
    received=max(moved) * unit_size,
  )


def _units(
  regions: Sequence[_Region], layout: int, processors: Sequence[Mapping[int, int]]
) -> list[list[tuple[int, ...]]]:
  """For each processor its units, by their numbers in each region."""
  if not regions:
    return [[()] for _ in processors]
  held = [r.held_units(layout, processors) for r in regions]
  return [list(itertools.product(*units)) for units in zip(*held)]


def _find_rounds(
  held: Sequence[Sequence[tuple[int, ...]]], wanted: Sequence[Sequence[tuple[int, ...]]]
) -> tuple[list[Round], list[list[int]]]:
  """Schedules rounds that bring every processor its wanted units; also the round of each unit."""
  # Processors with the same units are one block; a round takes one unit from each of its members.
  blocks: dict[tuple[tuple[int, ...], ...], list[int]] = {}
  for p, units in enumerate(held):
    blocks.setdefault(tuple(units), []).append(p)
  members = list(blocks.values())
  block_of = {u: i for i, units in enumerate(blocks) for u in units}
  own = {p: i for i, group in enumerate(members) for p in group}
  place = [{u: i for i, u in enumerate(units)} for units in held]
  left = [list(units) for units in wanted]
  order: list[list[int]] = [[] for _ in wanted]
  # By their sources: what has the same ones is one round.
  picks: dict[tuple[int, ...], list[list[int]]] = {}
  brought: dict[tuple[int, ...], list[list[tuple[int, ...]]]] = {}
  choice: list[tuple[int, ...]] | None = None
  # All want the same number of units, and get one in each turn.
  for _ in wanted[0]:
    choice = _match(left, block_of, own, members, choice)
    source, pick = [-1] * len(held), [-1] * len(held)
    # Who has the unit keeps it; the others take from those that are left.
    keeps = [block_of[choice[p]] == own[p] for p in range(len(held))]
    free = [[q for q in group if not keeps[q]] for group in members]
    for p, unit in enumerate(choice):
      q = p if keeps[p] else free[block_of[unit]].pop()
      # A block serves as many as it has members, each member one: this is a permutation.
      source[p], pick[q] = q, place[q][unit]
    picks.setdefault(tuple(source), []).append(pick)
    brought.setdefault(tuple(source), []).append(choice)
    for p, unit in enumerate(choice):
      left[p].remove(unit)
  rounds = [Round(source, tuple(zip(*pick))) for source, pick in picks.items()]
  came = [units for turns in brought.values() for units in turns]
  for p, units in enumerate(wanted):
    at = {units_of_turn[p]: k for k, units_of_turn in enumerate(came)}
    order[p] = [at[u] for u in units]
  return rounds, order


def _match(
  left: Sequence[Sequence[tuple[int, ...]]],
  block_of: dict[tuple[int, ...], int],
  own: dict[int, int],
  members: Sequence[Sequence[int]],
  previous: Sequence[tuple[int, ...]] | None,
) -> list[tuple[int, ...]]:
  """Matches a unit to each processor, so that each block sends as many as it has members.

  Units that a processor holds itself come first, then those from the same block as the previous
  time, so that they can travel together. Augmenting paths find room for the rest.
  """
  choice: list[tuple[int, ...] | None] = [None] * len(left)
  served: list[set[int]] = [set() for _ in members]
  for p, units in enumerate(left):
    mine = [u for u in units if block_of[u] == own[p]]
    if mine:
      choice[p] = mine[0]
      served[own[p]].add(p)
  for p, units in enumerate(left):
    if choice[p] is None and previous is not None:
      i = block_of[previous[p]]
      same = [u for u in units if block_of[u] == i]
      if same and len(served[i]) < len(members[i]):
        choice[p] = same[0]
        served[i].add(p)
  for start in range(len(left)):
    if choice[start] is not None:
      continue
    # Breadth first: from a processor to the blocks of its units, from a full block to those it
    # serves, until a block has room.
    via: dict[int, tuple[int, tuple[int, ...]]] = {}
    frontier, room = [start], None
    while room is None:
      following = []
      for p in frontier:
        for u in left[p]:
          i = block_of[u]
          if i not in via:
            via[i] = (p, u)
            if room is None and len(served[i]) < len(members[i]):
              room = i
            following += sorted(served[i])
      frontier = following
    while True:
      p, u = via[room]
      given_up = choice[p]
      choice[p] = u
      served[room].add(p)
      if given_up is None:
        break
      room = block_of[given_up]
      served[room].remove(p)
  return [unit for unit in choice if unit is not None]  # Each processor has one by now.
