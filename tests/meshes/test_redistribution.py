"""The planned collectives give the right slices, and none could move fewer bytes.

Everything is checked on explicit element numbers, cut by NumPy, not on digits of them.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_tensorflow.meshes import redistribution
from mesh_tensorflow.meshes.exchange import Exchange
from mesh_tensorflow.meshes.redistribution import plan

# ------------------------------------------------------------------ layouts and slices


def layouts(sizes, mesh):
  """Every legal layout: for each tensor axis a mesh axis or None."""
  for axes in itertools.product([None, *range(len(mesh))], repeat=len(sizes)):
    used = [m for m in axes if m is not None]
    divides = all(m is None or n % mesh[m] == 0 for n, m in zip(sizes, axes))
    if len(set(used)) == len(used) and divides:
      yield axes


def processors(mesh):
  """Coordinates of all processors, row-major."""
  return list(itertools.product(*map(range, mesh)))


@functools.cache
def slices(sizes, layout, mesh):
  """The element numbers that each processor holds, in its order."""
  whole = np.arange(math.prod(sizes)).reshape(sizes)
  result = []
  for coordinates in processors(mesh):
    part = whole
    for axis, m in enumerate(layout):
      if m is not None:
        part = np.split(part, mesh[m], axis)[coordinates[m]]
    result.append(part.ravel())
  return result


def places(sizes, layout, mesh):
  result = [None] * len(mesh)
  for axis, m in enumerate(layout):
    if m is not None and mesh[m] > 1:
      result[m] = math.prod(sizes[:axis])
  return tuple(result)


def plan_between(mesh, old, before, new, after):
  assert math.prod(old) == math.prod(new)
  return plan(math.prod(old), mesh, places(old, before, mesh), places(new, after, mesh))


def lacking(held, wanted):
  """What some processor has to receive, whatever the collectives."""
  return max(len(set(w) - set(h)) for h, w in zip(held, wanted))


# ------------------------------------------------------------------ a plan, run in NumPy


class Simulation:
  """Slices of all processors, and how many elements each has received."""

  def __init__(self, mesh, values):
    self.mesh = mesh
    self.coordinates = processors(mesh)
    self.values = [np.array(v) for v in values]
    self.received = np.zeros(len(self.values), int)

  def rank(self, p, axes):
    rank = 0
    for m in axes:
      rank = rank * self.mesh[m] + self.coordinates[p][m]
    return rank

  def group(self, p, axes):
    """The processors that differ from p only along the axes, in order of rank."""
    mine = self.coordinates[p]
    others = [
      q
      for q, c in enumerate(self.coordinates)
      if all(c[m] == mine[m] for m in range(len(mine)) if m not in axes)
    ]
    return sorted(others, key=lambda q: self.rank(q, axes))

  def run(self, steps):
    for step in steps:
      if isinstance(step, Exchange):
        self.exchange(step)
      else:
        self.values = getattr(self, step.kind)(step, [v.reshape(step.view) for v in self.values])
    return [v.ravel() for v in self.values]

  def allsplit(self, step, views):
    ((m,), (axis,)) = step.mesh_axes, step.split_axes
    return [np.split(v, self.mesh[m], axis)[c[m]] for v, c in zip(views, self.coordinates)]

  def allconcat(self, step, views):
    (axis,) = step.concat_axes
    result = []
    for p in range(len(views)):
      group = self.group(p, step.mesh_axes)
      self.received[p] += sum(views[q].size for q in group if q != p)
      result.append(np.concatenate([views[q] for q in group], axis))
    return result

  def alltoall(self, step, views):
    """One axis after the other cuts each slice; the parts are joined likewise."""
    result = []
    for p in range(len(views)):
      parts = {}
      for q in self.group(p, step.mesh_axes):
        part = views[q]
        for m, axis in zip(step.mesh_axes, step.split_axes):
          part = np.split(part, self.mesh[m], axis)[self.coordinates[p][m]]
        parts[tuple(self.coordinates[q][m] for m in step.mesh_axes)] = part
        self.received[p] += part.size * (q != p)
      for i in reversed(range(len(step.mesh_axes))):
        n, axis = self.mesh[step.mesh_axes[i]], step.concat_axes[i]
        heads = {key[:i] for key in parts}
        parts = {h: np.concatenate([parts[(*h, k)] for k in range(n)], axis) for h in heads}
      result.append(parts[()])
    return result

  def exchange(self, step):
    axes = step.mesh_axes
    units = []
    for v in self.values:
      v = np.moveaxis(v.reshape(step.view), step.unit_axes, range(len(step.unit_axes)))
      units.append(v.reshape(-1, *v.shape[len(step.unit_axes) :]))
    brought = [[] for _ in self.values]
    for r in step.all_rounds:
      assert sorted(r.source) == list(range(len(r.source))), "everyone sends once"
      for p in range(len(self.values)):
        q = self.group(p, axes)[r.source[self.rank(p, axes)]]
        sent = units[q][list(r.pick[self.rank(q, axes)])]
        self.received[p] += sent.size * (q != p)
        brought[p].extend(sent)
    self.values = []
    for p, parts in enumerate(brought):
      v = np.stack([parts[k] for k in step.order[self.rank(p, axes)]])
      counts = [step.new_view[i] for i in step.unit_axes]
      v = v.reshape(*counts, *v.shape[1:])
      self.values.append(np.moveaxis(v, range(len(counts)), step.unit_axes))


def check(mesh, old, before, new, after):
  """Right slices, as many elements received as the plan says, and no way with fewer."""
  what = f"mesh {mesh}: {old} {before} -> {new} {after}"
  held, wanted = slices(old, before, mesh), slices(new, after, mesh)
  found = plan_between(mesh, old, before, new, after)
  simulation = Simulation(mesh, held)
  for actual, expected in zip(simulation.run(found.steps), wanted):
    np.testing.assert_array_equal(actual, expected, what)
  least = lacking(held, wanted)
  assert found.received == found.bound == least, (what, found)
  assert simulation.received.max() == least, (what, found)
  steps = [s.rounds if isinstance(s, Exchange) else [s] for s in found.steps]
  assert found.collectives == sum(len(s) for s in steps) - sum(
    s.kind == "allsplit" for s in found.steps
  )
  return found


MESHES = [(2,), (4,), (2, 2), (2, 3), (2, 4), (2, 2, 2), (2, 3, 2), (1, 4), (2, 1, 3), (1,)]


def reshapes(mesh):
  """Pairs of shapes: kept, merged, split, of other sizes, sizes swapped, moved cuts."""
  n = math.lcm(*mesh)
  if len(mesh) < 3:
    return [
      ((n * 2, n), (n * 2, n)),
      ((n, n), (n * n,)),
      ((n * n,), (n, n)),
      ((n, n * 2, 2), (n, n * 2, 2)),
      ((n, n, 3), (3, n, n)),
      ((n * 2, n * 3), (n * 3, n * 2)),
      ((n, 2, n), (2 * n, n)),
      ((n, n, n), (n * n, n)),
    ]
  return [((n, n), (n, n)), ((n, n, 2), (n * n * 2,)), ((n, n), (2, n, n // 2))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_pair_of_layouts(mesh):
  for old, new in reshapes(mesh):
    for before, after in itertools.product(layouts(old, mesh), layouts(new, mesh)):
      check(mesh, old, before, new, after)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (2, 3, 2)], ids=str)
def test_three_axes_of_a_cube(mesh):
  """[a, b, c] to [p, q, s]: rotations and all else, every third of the 34 x 34 transitions."""
  n = math.lcm(*mesh)
  pairs = list(itertools.product(layouts((n, n, n), mesh), repeat=2))
  assert len(pairs) == 34 * 34
  for before, after in pairs[::3]:
    check(mesh, (n, n, n), before, (n, n, n), after)


@st.composite
def transitions(draw):
  mesh = draw(st.sampled_from(MESHES))
  factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=5))
  shapes, chosen = [], []
  for order in (factors, draw(st.permutations(factors))):
    cuts = draw(st.sets(st.integers(1, len(order) - 1))) if len(order) > 1 else set()
    ends = [0, *sorted(cuts), len(order)]
    shapes.append(tuple(math.prod(order[a:b]) for a, b in zip(ends, ends[1:])))
    chosen.append(draw(st.sampled_from(list(layouts(shapes[-1], mesh)))))
  return mesh, shapes[0], chosen[0], shapes[1], chosen[1]


@settings(max_examples=400, deadline=None)
@given(transitions())
@pytest.mark.slow
def test_drawn_layouts(transition):
  check(*transition)


# ------------------------------------------------------------------ search by brute force


def brute_force(mesh, old, before, new, after, limit):
  """Fewest (elements received, collectives) of any sequence of collectives, on element sets.

  States are what each processor holds. Steps are allsplit, allconcat and alltoall along every
  mesh axis in every view of the slice as [outer, parts, inner], and every permutation of the
  processors. Only sequences that cost less than `limit` are followed; None if there is none.
  """
  coordinates = processors(mesh)
  target = tuple(frozenset(s.tolist()) for s in slices(new, after, mesh))
  start = tuple(frozenset(s.tolist()) for s in slices(old, before, mesh))
  permutations = list(itertools.permutations(range(len(coordinates))))[1:]

  def groups(m):
    return [
      [q for q, d in enumerate(coordinates) if d[:m] + d[m + 1 :] == c[:m] + c[m + 1 :]]
      for c in coordinates
    ]

  def cut(part, n, k):
    """Part k of n of a slice, in each of its views."""
    elements = np.array(sorted(part))
    for inner in range(1, len(elements) // n + 1):
      if len(elements) % (n * inner) == 0:
        yield frozenset(elements.reshape(-1, n, inner)[:, k].ravel().tolist())

  def successors(state):
    for m, n in enumerate(mesh):
      if n == 1:
        continue
      split = [list(cut(s, n, c[m])) for s, c in zip(state, coordinates)]
      for choice in zip(*split):
        yield choice, 0
      for g in {tuple(map(tuple, groups(m)))}:
        joined = tuple(frozenset().union(*[state[q] for q in members]) for members in g)
        yield joined, (n - 1) * len(state[0])
        pieces = [[list(cut(s, n, k)) for k in range(n)] for s in state]
        for view in range(len(pieces[0][0])):
          yield (
            tuple(
              frozenset().union(*[pieces[q][coordinates[p][m]][view] for q in members])
              for p, members in enumerate(g)
            ),
            len(state[0]) // n * (n - 1),
          )
    for order in permutations:
      yield tuple(state[q] for q in order), len(state[0])

  def at_least(state):
    """What is still to be received in any case, and whether by another collective."""
    left = max(len(t - s) for s, t in zip(state, target))
    return left, int(left > 0)

  queue, best, count = [((0, 0), 0, start)], {start: (0, 0)}, itertools.count(1)
  while queue:
    cost, _, state = heapq.heappop(queue)
    if state == target:
      return cost if cost < limit else None
    if cost > best[state]:
      continue
    for following, received in successors(state):
      reached = (cost[0] + received, cost[1] + (received > 0))
      if len({len(s) for s in following}) > 1:
        continue  # Slices of one shape, on all processors.
      left = at_least(following)
      if (reached[0] + left[0], reached[1] + left[1]) < limit and reached < best.get(
        following, (math.inf,)
      ):
        best[following] = reached
        heapq.heappush(queue, (reached, next(count), following))
  return None


SMALL = [
  ((2, 2), (4, 4), (4, 4)),
  ((2, 2), (4, 4), (16,)),
  ((2, 2), (2, 4, 2), (4, 4)),
  ((4,), (4, 4), (4, 4)),
  ((2,), (2, 6), (6, 2)),
  ((2, 3), (6, 6), (6, 6)),
]


@pytest.mark.parametrize(
  ("mesh", "old", "new", "max_rounds"),
  [(*s, redistribution.MAX_ROUNDS) for s in SMALL] + [(*s, 0) for s in SMALL[:-1]],
  ids=str,
)
def test_no_sequence_is_cheaper(mesh, old, new, max_rounds, monkeypatch):
  """Not in elements received; nor is any that receives as many shorter.

  Also where a large mesh rules out exchanges of many rounds, which the brute force does not have.
  """
  monkeypatch.setattr(redistribution, "MAX_ROUNDS", max_rounds)
  for before, after in itertools.product(layouts(old, mesh), layouts(new, mesh)):
    found = plan.__wrapped__(
      math.prod(old), mesh, places(old, before, mesh), places(new, after, mesh)
    )
    planned = (found.received, found.collectives)
    other = brute_force(mesh, old, before, new, after, planned)
    assert other is None, (mesh, old, before, new, after, found, other)
    values = Simulation(mesh, slices(old, before, mesh)).run(found.steps)
    np.testing.assert_array_equal(values, slices(new, after, mesh))


@pytest.mark.slow
def test_the_brute_force_search_finds_what_is_known():
  """It would find a cheaper sequence: here it finds the only ones there are."""
  mesh, shape = (2, 2), (4, 4)
  no_limit = (math.inf, 0)
  search = functools.partial(brute_force, mesh, shape)
  assert search((0, None), shape, (0, None), no_limit) == (0, 0)
  assert search((None, None), shape, (0, 1), no_limit) == (0, 0)
  assert search((0, None), shape, (None, None), no_limit) == (8, 1)
  assert search((0, None), shape, (None, 0), no_limit) == (4, 1)
  assert search((0, 1), shape, (1, 0), no_limit) == (4, 1)
  assert search((0, 1), shape, (1, 0), (4, 1)) is None


# ------------------------------------------------------------------ what is chosen


def described(found):
  """The steps as text: "allconcat 1, permute 0*1 x 2"."""
  words = []
  for s in found.steps:
    rounds = f" x {len(s.rounds)}" if isinstance(s, Exchange) and len(s.rounds) > 1 else ""
    words.append(f"{s.kind} {'*'.join(map(str, s.mesh_axes))}{rounds}")
  return ", ".join(words) or "nothing"


# Old layout of [a, b], new layout of [p, q], collectives, elements received as a part of the new
# slice. Axes of the mesh are r and s, both of size 2.
TWO_AXES = """
  -  -   -  -   nothing                   0
  -  -   -  r   allsplit 0                0
  -  -   -  s   allsplit 1                0
  -  -   r  -   allsplit 0                0
  -  -   r  s   allsplit 0, allsplit 1    0
  -  -   s  -   allsplit 1                0
  -  -   s  r   allsplit 0, allsplit 1    0
  -  r   -  -   allconcat 0               1/2
  -  r   -  r   nothing                   0
  -  r   -  s   permute 0*1               1
  -  r   r  -   alltoall 0                1/2
  -  r   r  s   permute 0*1               1
  -  r   s  -   allsplit 1, allconcat 0   1/2
  -  r   s  r   allsplit 1                0
  -  s   -  -   allconcat 1               1/2
  -  s   -  r   permute 0*1               1
  -  s   -  s   nothing                   0
  -  s   r  -   allsplit 0, allconcat 1   1/2
  -  s   r  s   allsplit 0                0
  -  s   s  -   alltoall 1                1/2
  -  s   s  r   permute 0*1               1
  r  -   -  -   allconcat 0               1/2
  r  -   -  r   alltoall 0                1/2
  r  -   -  s   allsplit 1, allconcat 0   1/2
  r  -   r  -   nothing                   0
  r  -   r  s   allsplit 1                0
  r  -   s  -   permute 0*1               1
  r  -   s  r   permute 0*1               1
  r  s   -  -   allconcat 0, allconcat 1  3/4
  r  s   -  r   permute 0*1, allconcat 1  1
  r  s   -  s   allconcat 0               1/2
  r  s   r  -   allconcat 1               1/2
  r  s   r  s   nothing                   0
  r  s   s  -   permute 0*1, allconcat 0  1
  r  s   s  r   permute 0*1               1
  s  -   -  -   allconcat 1               1/2
  s  -   -  r   allsplit 0, allconcat 1   1/2
  s  -   -  s   alltoall 1                1/2
  s  -   r  -   permute 0*1               1
  s  -   r  s   permute 0*1               1
  s  -   s  -   nothing                   0
  s  -   s  r   allsplit 0                0
  s  r   -  -   allconcat 0, allconcat 1  3/4
  s  r   -  r   allconcat 1               1/2
  s  r   -  s   permute 0*1, allconcat 0  1
  s  r   r  -   permute 0*1, allconcat 1  1
  s  r   r  s   permute 0*1               1
  s  r   s  -   allconcat 0               1/2
  s  r   s  r   nothing                   0
"""


def two_axes():
  """Rows of the table: old layout, new layout, what is chosen, part of the slice received."""
  for line in TWO_AXES.strip().splitlines():
    *axes, rest = line.split(maxsplit=4)
    chosen, part = rest.rsplit(maxsplit=1)
    layout = [{"-": None, "r": 0, "s": 1}[a] for a in axes]
    numerator, _, denominator = part.partition("/")
    yield (
      tuple(layout[:2]),
      tuple(layout[2:]),
      chosen.strip(),
      (int(numerator) / int(denominator or 1)),
    )


def test_the_table_of_all_two_axis_transitions():
  rows = list(two_axes())
  mesh, shape = (2, 2), (8, 8)
  legal = set(itertools.product(layouts(shape, mesh), repeat=2))
  assert len(legal) == 49
  assert {(before, after) for before, after, _, _ in rows} == legal and len(rows) == 49
  for before, after, chosen, part in rows:
    found = check(mesh, shape, before, shape, after)
    assert described(found) == chosen, (before, after)
    assert found.received == part * len(slices(shape, after, mesh)[0]), (before, after)


@pytest.mark.parametrize(
  ("mesh", "old", "before", "new", "after", "chosen"),
  [
    # Mesh axes of size 1 move nothing.
    ((1, 4), (4, 4), (0, 1), (4, 4), (1, 0), "alltoall 1"),
    ((1, 4), (4, 4), (0, None), (4, 4), (None, 0), "nothing"),
    # The split axis becomes the inner part of a merged one, or the outer one.
    ((2,), (4, 8), (None, 0), (32,), (0,), "alltoall 0"),
    ((2,), (4, 8), (0, None), (32,), (0,), "nothing"),
    # Mesh axes that split one axis in turn, the other way round: the same parts elsewhere.
    ((2, 3), (6, 6, 1), (0, 1, None), (2, 18, 1), (0, 1, None), "alltoall 1"),
    ((2, 3), (2, 18), (0, 1), (3, 12), (1, 0), "permute 0*1"),
    # Axes of different sizes trade places.
    ((2, 4), (8, 8), (0, 1), (8, 8), (1, 0), "permute 0*1 x 2"),
    ((2, 4), (8, 8), (0, None), (8, 8), (1, None), "permute 0*1"),
    # Three axes rotate.
    ((2, 2, 2), (4, 4, 4), (0, 1, 2), (4, 4, 4), (2, 0, 1), "permute 0*1*2"),
    # Two axes move to free places at once.
    ((2, 3), (6, 6, 6, 6), (0, 1, None, None), (6, 6, 6, 6), (None, None, 0, 1), "alltoall 0*1"),
    # What stays in its place is left alone.
    ((2, 2, 2), (4, 4, 4), (0, 1, 2), (4, 4, 4), (1, 0, 2), "permute 0*1"),
    # Cuts that do not fit together.
    ((4, 6), (4, 6), (0, None), (6, 4), (1, None), "permute 0*1, allconcat 0"),
  ],
  ids=str,
)
def test_what_is_chosen(mesh, old, before, new, after, chosen):
  assert described(check(mesh, old, before, new, after)) == chosen


@pytest.mark.parametrize(
  ("mesh", "old", "before", "new", "after"),
  [
    ((12, 10), (120, 120), (0, 1), (120, 120), (1, 0)),
    ((8, 16), (128, 128, 16), (0, 1, None), (16, 128, 128), (None, 0, 1)),
    ((6, 35), (210, 210), (0, 1), (210 * 210,), (1,)),
  ],
  ids=str,
)
def test_a_large_mesh_gets_few_messages(mesh, old, before, new, after):
  """Where one exchange would take too many messages, collectives with names do: no wrong value."""
  held, wanted = slices(old, before, mesh), slices(new, after, mesh)
  found = plan_between(mesh, old, before, new, after)
  assert found.collectives <= 4
  # Far fewer than gathering along both mesh axes, and at least what there is to receive.
  assert lacking(held, wanted) <= found.received < (math.prod(old) - len(held[0])) / 4
  simulation = Simulation(mesh, held)
  for actual, expected in zip(simulation.run(found.steps), wanted):
    np.testing.assert_array_equal(actual, expected)
  assert simulation.received.max() <= found.received


def test_a_plan_is_made_once():
  plan.cache_clear()
  for _ in range(3):
    plan_between((2, 2), (4, 4), (0, 1), (4, 4), (1, 0))
  assert plan.cache_info().misses == 1 and plan.cache_info().hits == 2


def test_nothing_to_do_on_one_processor():
  assert plan(24, (), (), ()).steps == ()
