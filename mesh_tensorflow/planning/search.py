"""The best layouts on one mesh, by branch and bound over the names of dimensions.

A layout's time is the sum of its chains' (`planning.chains`). With some dimensions decided, a chain
all of whose dimensions are is exact; another takes at least its whole work divided by the most
parts that are still possible. What is at least as slow as the worst of those to be kept, or cannot
fit, is left out. So what is found is the best, unless time runs out.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mesh_tensorflow.planning.chains import Chain, Chains, sum_bytes
from mesh_tensorflow.planning.held import Holdings, most_parts
from mesh_tensorflow.planning.liveness import Memory
from mesh_tensorflow.planning.machine import Machine
from mesh_tensorflow.planning.seconds import exchange_seconds, hidden_seconds, work_seconds
from mesh_tensorflow.program.dimensions import Shape

# Layouts that differ by less, in time and in memory, and only by rules that one has besides, are
# one: these rules match nothing of weight.
_ALIKE = 1e-3


@dataclasses.dataclass(frozen=True)
class Cost:
  """Seconds of a chain, or of a program.

  Attributes:
    computing: of products, memory and launches.
    exchanging: of exchanges.
    allowed: the part of these that may be hidden behind computing.
  """

  computing: float = 0.0
  exchanging: float = 0.0
  allowed: float = 0.0

  @property
  def least(self) -> float:
    """Lower bound of its seconds: every exchange that can overlap with computation does."""
    return self.computing + self.exchanging - self.allowed


@dataclasses.dataclass
class Found:
  """A layout that was found.

  Attributes:
    seconds: of a step.
    memory: bytes of one device.
    layout: mesh axis by dimension name.
    mesh_shape: the mesh shape.
    settings: which of several programs.
  """

  seconds: float
  memory: Memory
  layout: dict[str, int]
  mesh_shape: Shape
  settings: str = ""

  def is_like(self, other: Found) -> bool:
    """True if the two differ at most by rules that change neither time nor memory."""
    if (self.mesh_shape, self.settings) != (other.mesh_shape, other.settings):
      return False
    mine, others = set(self.layout.items()), set(other.layout.items())
    return (mine <= others or mine >= others) and all(
      math.isclose(a, b, rel_tol=_ALIKE)
      for a, b in [(self.seconds, other.seconds), (self.memory.total, other.memory.total)]
    )

  def order(self) -> tuple[float, int, int, list[tuple[str, int]], str]:
    rules = sorted(self.layout.items())
    return (self.seconds, self.memory.total, len(rules), rules, self.settings)


class Best:
  """The best layouts so far.

  Args:
    count: number of layouts that are kept.
  """

  def __init__(self, count: int):
    self.count = count
    self.found: list[Found] = []

  @property
  def bound(self) -> float:
    """Pruning bound: seconds of the slowest layout kept, infinite until `count` are kept."""
    return self.found[-1].seconds if len(self.found) >= self.count else float("inf")

  def add(self, found: Found) -> None:
    """Keeps a layout if it is among the best; of those that are alike only the best is kept.

    Args:
      found: the layout.
    """
    alike = [other for other in self.found if found.is_like(other)]
    if any(other.order() <= found.order() for other in alike):
      return
    others = [other for other in self.found if other not in alike]
    self.found = sorted([*others, found], key=Found.order)[: self.count]


class Costs:
  """Costs of the chains of a program on a machine.

  Args:
    chains: the program.
    machine: the machine.
  """

  def __init__(self, chains: Chains, machine: Machine):
    self.chains, self.machine = chains, machine
    self._costs: dict[tuple[object, ...], Cost | None] = {}
    whole = Shape([])
    self.whole: list[tuple[float, float]] = []
    for chain in chains.chains:
      dividing = fixed = 0.0
      for step in chains.walk(chain.operations, {}, []):
        for work, times in step.piece.works:
          seconds, runs = work_seconds(work, machine, whole.size), times * chains.times[step.index]
          dividing += (seconds.seconds - seconds.launches) * runs
          fixed += seconds.launches * runs
      self.whole.append((dividing * chain.count, fixed * chain.count))

  def chain(self, number: int, layout: Mapping[str, int | None], mesh_shape: Shape) -> Cost | None:
    """The cost of all chains like one; None if the layout does not suit it.

    Args:
      number: of the chain.
      layout: mesh axis by dimension name, or None for whole.
      mesh_shape: the mesh shape.
    """
    chain = self.chains.chains[number]
    own = {d: a for d in chain.dims if (a := layout.get(d)) is not None}
    key = (number, tuple(sorted(own.items())), tuple(mesh_shape.to_integer_list))
    if key not in self._costs:
      self._costs[key] = self._cost(chain, own, mesh_shape)
    return self._costs[key]

  def _cost(self, chain: Chain, layout: dict[str, int], mesh_shape: Shape) -> Cost | None:
    sizes = mesh_shape.to_integer_list
    computing = exchanging = allowed = 0.0
    for step in self.chains.walk(chain.operations, layout, sizes):
      if step.piece.problem:
        return None
      runs = self.chains.times[step.index]
      for work, times in step.piece.works:
        computing += work_seconds(work, self.machine, mesh_shape.size).seconds * times * runs
      exchanges = list(step.piece.exchanges)
      exchanges += [("allreduce", sum_bytes(axes, n, sizes), 1) for axes, n in step.sums]
      for kind, over, times in exchanges:
        for x in exchange_seconds(kind, over, self.machine, mesh_shape):
          exchanging += x.seconds * times * runs
          allowed += x.hidden * times * runs
    n = chain.count
    return Cost(computing * n, exchanging * n, allowed * n)


class Search:
  """A search on one mesh.

  Args:
    costs: of the chains.
    holdings: what the program holds.
    mesh_shape: the mesh shape.
    domains: mesh axes that may split each dimension.
    fixed: mesh axis, or None for whole, of dimensions that are not free.
    memory_limit: bytes that a device has, or None.
    best: collects the layouts that are found.
    deadline: of `time.thread_time`, or None.
    for_memory: whether the least memory is looked for, in place of the least time.
    most_idle: most mesh axes that may split nothing, or None for any number. (If the mesh shape is
      free, layouts with two idle axes are found on a mesh that has their product.)
    settings: which of several programs it is.
  """

  def __init__(
    self,
    costs: Costs,
    holdings: Holdings,
    mesh_shape: Shape,
    domains: Mapping[str, set[int]],
    fixed: Mapping[str, int | None],
    memory_limit: float | None,
    best: Best,
    deadline: float | None = None,
    for_memory: bool = False,
    most_idle: int | None = None,
    settings: str = "",
  ):
    self.most_idle, self.settings = most_idle, settings
    self.costs, self.holdings, self.mesh_shape = costs, holdings, mesh_shape
    self.sizes = mesh_shape.to_integer_list
    self.domains, self.fixed = domains, fixed
    self.limit, self.best, self.deadline = memory_limit, best, deadline
    self.for_memory = for_memory
    self.complete = True
    self.nodes = 0
    self.fits = False
    chains = costs.chains
    self._share = mesh_shape.size if costs.machine.shared else 1
    self._names = [frozenset(c.dims) for c in chains.chains]
    free = [d for d in sorted(domains) if domains[d] and d not in fixed]
    weight = {
      d: sum(sum(w) for w, names in zip(costs.whole, self._names) if d in names) for d in free
    }
    # The dimensions that most of the work has first: they decide most.
    self.order = sorted(free, key=lambda d: (-weight[d], d))
    self._touching = {
      d: sorted(
        (i for i, names in enumerate(self._names) if d in names),
        key=lambda i: -sum(costs.whole[i]),
      )
      for d in self.order
    }

  def run(self) -> None:
    """Searches; whatever the deadline, at least the simplest layouts are looked at."""
    for simple in self._simplest():
      self.consider(simple)
    layout: dict[str, int | None] = {d: None for d in self.costs.chains.dims}
    for d in self.order:
      del layout[d]
    layout.update(self.fixed)
    values = []
    for i in range(len(self._names)):
      value = self._value(i, layout)
      if value is None:
        return
      values.append(value)
    self._descend(0, layout, values, sum(values))

  def _simplest(self) -> Iterator[dict[str, int | None]]:
    """Yields the layout of the fixed rules, and it with the costliest dimension split, too.

    That is mostly the batch, over the largest mesh axis that no fixed rule uses.
    """
    yield dict(self.fixed)
    idle = set(range(len(self.sizes))) - set(self.fixed.values())
    for d in self.order[:1]:
      if axes := self.domains[d] & idle:
        yield {**self.fixed, d: max(axes, key=lambda a: (self.sizes[a], -a))}

  def _value(self, i: int, layout: Mapping[str, int | None]) -> float | None:
    """Lower bound of the cost of a chain; None if the layout does not suit it."""
    names = self._names[i]
    if not self.for_memory and all(d in layout for d in names):
      cost = self.costs.chain(i, layout, self.mesh_shape)
      return None if cost is None else cost.least
    dividing, fixed = self.costs.whole[i]
    parts = most_parts(names, layout, self.domains, self.sizes)
    return (dividing / parts + fixed) * self._share

  def _descend(
    self, depth: int, layout: dict[str, int | None], values: list[float], total: float
  ) -> None:
    if self.deadline is not None and time.thread_time() > self.deadline:
      self.complete = False
      return
    self.nodes += 1
    if depth == len(self.order):
      self.consider(layout)
      return
    d = self.order[depth]
    children = []
    for axis in self._choices(d, layout):
      layout[d] = axis
      child = self._child(d, layout, values, total)
      if child is not None:
        children.append((child[1], -1 if axis is None else axis, axis, child[0]))
      del layout[d]
    for bound, _, axis, changed in sorted(children, key=lambda c: c[:2]):
      if bound >= self.best.bound:
        break
      layout[d] = axis
      old = {i: values[i] for i in changed}
      for i, value in changed.items():
        values[i] = value
      self._descend(depth + 1, layout, values, bound if not self.for_memory else total)
      for i, value in old.items():
        values[i] = value
      del layout[d]

  def _child(
    self, d: str, layout: dict[str, int | None], values: Sequence[float], total: float
  ) -> tuple[dict[int, float], float] | None:
    """Updates the lower bound after deciding dimension `d`; None if that prunes the branch.

    Returns:
      New bounds of the chains that have the dimension, and the new total.
    """
    least = self.holdings.least(layout, self.domains, self.sizes)
    if self.for_memory:
      return {}, least
    if self.limit is not None and least > self.limit:
      return None
    changed: dict[int, float] = {}
    for i in self._touching[d]:
      value = self._value(i, layout)
      if value is None:
        return None
      changed[i] = value
      total += value - values[i]
      if total >= self.best.bound:
        return None
    return changed, total

  def _choices(self, d: str, layout: Mapping[str, int | None]) -> Iterable[int | None]:
    conflicts = self.costs.chains.conflicts
    taken = {a for e, a in layout.items() if a is not None and frozenset((d, e)) in conflicts}
    used = {a for a in layout.values() if a is not None}
    yield None
    seen: set[tuple[int, object]] = set()
    for axis in sorted(self.domains[d]):
      if axis in taken:
        continue
      # Symmetry: of equivalent idle mesh axes only the first is tried.
      alike = (self.sizes[axis], self.costs.machine.link(self.mesh_shape, axis))
      if axis not in used and not self._named:
        if alike in seen:
          continue
        seen.add(alike)
      yield axis

  @property
  def _named(self) -> bool:
    return any(a is not None for a in self.fixed.values())

  def consider(self, layout: Mapping[str, int | None]) -> None:
    """Evaluates a layout; keeps it if it suits the program, fits, and is among the best.

    Args:
      layout: mesh axis by dimension name, or None for whole.
    """
    chosen = {d: a for d, a in layout.items() if a is not None}
    idle = sum(n > 1 for n in self.sizes) - len(set(chosen.values()))
    if self.most_idle is not None and idle > self.most_idle:
      return
    total = [0.0, 0.0, 0.0]
    for i in range(len(self._names)):
      cost = self.costs.chain(i, chosen, self.mesh_shape)
      if cost is None:
        return
      total = [t + c for t, c in zip(total, (cost.computing, cost.exchanging, cost.allowed))]
    computing, exchanging, allowed = total
    seconds = computing + exchanging - hidden_seconds(allowed, computing)
    memory = self.holdings.memory(chosen, self.sizes)
    if self.for_memory:
      # The order of `Best` is by the first figure.
      self._add(float(memory.total), memory, chosen)
      return
    if seconds < self.best.bound and (self.limit is None or memory.total <= self.limit):
      self._add(seconds, memory, chosen)

  def _add(self, order: float, memory: Memory, layout: dict[str, int]) -> None:
    self.best.add(Found(order, memory, layout, self.mesh_shape, self.settings))
