"""The best layouts of a program, by branch and bound over the names of dimensions.

A layout's time is the sum of its chains' (`planning.evaluation`). With some dimensions decided, a
chain all of whose dimensions are is exact; another takes at least its whole work divided by the
most parts that are still possible. What is at least as slow as the worst of those to be kept, or
cannot fit, is left out. So what is found is the best, unless time runs out.

Variables in shards (`Sharding`) need less memory, and are predicted to take no less time: their
layouts are bounded by the time that they take unsharded.

On a pipeline of S stages a layout is that of each stage. A stage does at least the S-th part of the
work, and waits while the pipeline fills and drains: that bounds its layouts, of which those that
may be among the best are predicted as `planning.pipeline` does.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mesh_settings.hints import did_you_mean
from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.meshes.layout import LayoutRules
from mesh_tensorflow.planning.cost_model import Seconds, Work, step_time, work_seconds
from mesh_tensorflow.planning.evaluation import (
  Chain,
  Evaluator,
  Memory,
  Step,
  bytes_of_variable,
  most_parts,
)
from mesh_tensorflow.planning.lowering import OperationCost, inner_operations
from mesh_tensorflow.planning.machine import Link, Machine
from mesh_tensorflow.planning.pipeline import Blocks
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor

# Layouts that differ by less, in time and in memory, and only by rules that one has besides, are
# one: these rules match nothing of weight.
_ALIKE = 1e-3
# In place of a mesh axis: of a dimension that is not decided.
_FREE = -1


class BranchAndBound:
  """Depth-first search over the mesh axes, or none, of dimensions, one after the other.

  A subclass says what may be chosen, bounds what follows, and evaluates whole layouts.

  Args:
    order: the names of the dimensions.
    deadline: of `time.thread_time`, or None.

  Attributes:
    complete: False if the deadline has ended the search.
  """

  def __init__(self, order: Sequence[str], deadline: float | None = None):
    self.order, self.deadline = order, deadline
    self.complete = True

  @property
  def limit(self) -> float:
    """Pruning bound: branches whose lower bound is not below it are left out."""
    raise NotImplementedError

  def choices(self, d: str, layout: Mapping[str, int | None]) -> Iterable[int | None]:
    """The mesh axes that a dimension may be split over, with None, besides what is decided."""
    raise NotImplementedError

  def bound(self, d: str, layout: dict[str, int | None], state: Any) -> tuple[float, Any] | None:
    """Bounds the layouts that extend a partial one, whose last decision is that of `d`.

    Returns:
      The lower bound, and the state that goes with it; None if there is no such layout.
    """
    raise NotImplementedError

  def consider(self, layout: Mapping[str, int | None]) -> None:
    """Evaluates a layout."""
    raise NotImplementedError

  def ranked(self, children: list[tuple[float, int | None, Any]]) -> Iterable[Any]:
    """(bound, choice, state) of the branches, in the order in which they are followed."""
    return sorted(children, key=lambda c: (c[0], -1 if c[1] is None else c[1]))

  def descend(self, layout: dict[str, int | None], state: Any, depth: int = 0) -> None:
    """Searches the layouts that extend a partial one.

    Args:
      layout: mesh axis by dimension name, or None for whole.
      state: that of `bound` for it.
      depth: number of the dimensions of `order` that it decides.
    """
    if self.deadline is not None and time.thread_time() > self.deadline:
      self.complete = False
      return
    if depth == len(self.order):
      self.consider(layout)
      return
    d = self.order[depth]
    children = []
    for axis in self.choices(d, layout):
      layout[d] = axis
      child = self.bound(d, layout, state)
      if child is not None:
        children.append((child[0], axis, child[1]))
      del layout[d]
    for bound, axis, after in self.ranked(children):
      if bound < self.limit:
        layout[d] = axis
        self.descend(layout, after, depth + 1)
        del layout[d]


@dataclasses.dataclass(frozen=True)
class Sharding:
  """Storage of variables in shards; see `MeshImpl.with_sharded_state`.

  Attributes:
    mesh_dims: names of mesh dimensions, as far as the mesh has them; None: all of the mesh.
    reshard_after_forward: whether weights are gathered anew before each use.
  """

  mesh_dims: tuple[str, ...] | None = ()
  reshard_after_forward: bool = True

  def over(self, mesh_shape: Shape) -> tuple[str, ...]:
    """The dimensions of a mesh over which variables are in shards.

    Args:
      mesh_shape: the mesh shape.
    """
    sizes = {m.name: m.size for m in mesh_shape}
    names = sizes if self.mesh_dims is None else self.mesh_dims
    return tuple(n for n in names if sizes.get(n, 1) > 1)


@dataclasses.dataclass
class Found:
  """A layout that was found.

  Attributes:
    seconds: of a step.
    memory: bytes of one device.
    layout: mesh axis by dimension name.
    mesh_shape: the mesh shape.
    settings: which of several programs.
    sharding: how variables are stored in shards.
    stages: number of stages, each on such a mesh.
    cut: number of the program's meshes in each stage; () if there is one stage.
  """

  seconds: float
  memory: Memory
  layout: dict[str, int]
  mesh_shape: Shape
  settings: str = ""
  sharding: Sharding = Sharding()
  stages: int = 1
  cut: tuple[int, ...] = ()

  def is_like(self, other: Found) -> bool:
    """True if the two differ at most by rules that change neither time nor memory."""
    if self.built_as() != other.built_as():
      return False
    mine, others = set(self.layout.items()), set(other.layout.items())
    return (mine <= others or mine >= others) and all(
      math.isclose(a, b, rel_tol=_ALIKE)
      for a, b in [(self.seconds, other.seconds), (self.memory.total, other.memory.total)]
    )

  def built_as(self) -> tuple[Shape, str, Sharding, int]:
    """All that it is but the layout."""
    return self.mesh_shape, self.settings, self.sharding, self.stages

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


@dataclasses.dataclass(frozen=True)
class Group:
  """Chains of the same dimensions, which a layout assigns alike.

  Attributes:
    dims: names of their dimensions.
    chains: the chains, those with most work first.
    left: at i, for the chains from the i-th on, unsplit on one device, the seconds of work that
      splitting divides, and of launches, which it does not.
    in_loop: whether they run in a loop.
    everywhere: whether they exchange over mesh axes that split nothing of them, too.
  """

  dims: tuple[str, ...]
  chains: list[Chain]
  left: list[tuple[float, float]]
  in_loop: bool
  everywhere: bool

  @property
  def weight(self) -> float:
    """Seconds of all work."""
    return sum(self.left[0])

  def least(self, parts: int, first: int = 0) -> float:
    """Lower bound of the seconds of the chains from `first` on, in at most so many parts."""
    dividing, fixed = self.left[first]
    return dividing / parts + fixed


def _group(
  dims: tuple[str, ...],
  members: Sequence[tuple[Chain, tuple[float, float]]],
  in_loop: bool,
  everywhere: bool,
) -> Group:
  """A group of chains, each with its seconds, unsplit, of work and of launches."""
  ordered = sorted(members, key=lambda member: -sum(member[1]))
  left = [(0.0, 0.0)]
  for _, (dividing, fixed) in reversed(ordered):
    left.append((left[-1][0] + dividing, left[-1][1] + fixed))
  return Group(dims, [chain for chain, _ in ordered], left[::-1], in_loop, everywhere)


class ChainTimes:
  """Seconds of the chains of a program on a machine.

  Args:
    evaluator: the program.
    machine: the machine.

  Attributes:
    groups: all chains.
    weights: by name of a dimension the seconds of work, unsplit, of all chains that have it.
  """

  def __init__(self, evaluator: Evaluator, machine: Machine):
    self.evaluator, self.machine = evaluator, machine
    self._seconds: dict[Hashable, Seconds | None] = {}
    self._links: dict[Link, int] = {}
    self.weights: dict[str, float] = dict.fromkeys(evaluator.dims, 0.0)
    groups: dict[tuple[tuple[str, ...], bool, bool], list[tuple[Chain, tuple[float, float]]]] = {}
    for chain in evaluator.chains:
      whole = self._whole(chain)
      for d in chain.dims:
        self.weights[d] = self.weights.get(d, 0.0) + sum(whole)
      in_loop = any(evaluator.units[i].block for i in chain.units)
      everywhere = any(evaluator.kinds[i].on_all_axes for i in chain.units)
      groups.setdefault((tuple(chain.dims), in_loop, everywhere), []).append((chain, whole))
    self.groups = [
      _group(dims, members, in_loop, everywhere)
      for (dims, in_loop, everywhere), members in groups.items()
    ]

  def _whole(self, chain: Chain) -> tuple[float, float]:
    dividing = fixed = 0.0
    for step in self.evaluator.walk(chain.units, {}, []):
      for cost in step.piece.costs:
        seconds = work_seconds(self._work(step, cost, {}), self.machine, 1)
        runs = cost.times * self.evaluator.units[step.index].times
        dividing += (seconds.seconds - seconds.launches) * runs
        fixed += seconds.launches * runs
    return dividing * chain.count, fixed * chain.count

  def _work(self, step: Step, cost: OperationCost, parts: Mapping[str, int]) -> Work:
    fuses = self.machine.device.fuses_elementwise
    return self.evaluator.fused(step, cost.work, parts) if fuses else cost.work

  def axes(self, mesh_shape: Shape) -> list[tuple[int, int]]:
    """Of each mesh axis its size and the number of its link: what times depend on.

    Args:
      mesh_shape: the mesh shape.
    """
    links = [self.machine.link(mesh_shape, a) for a in range(mesh_shape.ndims)]
    return [
      (m.size, self._links.setdefault(x, len(self._links))) for m, x in zip(mesh_shape, links)
    ]

  def chain(
    self,
    group: Group,
    number: int,
    own: Sequence[int | None],
    mesh_shape: Shape,
    axes: Sequence[tuple[int, int]],
  ) -> Seconds | None:
    """The time of all chains like one; None if the layout does not suit it.

    Args:
      group: its group.
      number: its number there.
      own: the mesh axis, or None for whole, of each dimension.
      mesh_shape: the mesh shape.
      axes: of the mesh, by `axes`.
    """
    # On meshes that differ in other axes it is the same.
    used = sorted({a for a in own if a is not None})
    if group.everywhere:
      used = list(range(len(axes)))
    chain = group.chains[number]
    key = (
      id(chain),
      tuple(None if a is None else used.index(a) for a in own),
      tuple(axes[a] for a in used),
      mesh_shape.size,
    )
    if key not in self._seconds:
      layout = {d: a for d, a in zip(group.dims, own) if a is not None}
      self._seconds[key] = self._time(chain, layout, mesh_shape)
    return self._seconds[key]

  def _time(self, chain: Chain, layout: dict[str, int], mesh_shape: Shape) -> Seconds | None:
    sizes = mesh_shape.to_integer_list
    parts = {d: sizes[a] for d, a in layout.items()}
    operations = []
    for step in self.evaluator.walk(chain.units, layout, sizes):
      if step.piece.problem is not None:
        return None
      runs = self.evaluator.units[step.index].times * chain.count
      for cost in step.piece.costs:
        exchanges = [(c.kind, c.bytes_over) for c in cost.collectives]
        operations.append((self._work(step, cost, parts), exchanges, cost.times * runs))
      exchanges = [(c.kind, c.bytes_over) for c in (s.exchange(sizes) for s in step.sums)]
      operations.append((Work(), exchanges, runs))
    return step_time(operations, self.machine, mesh_shape).sums


@dataclasses.dataclass
class SearchedMesh:
  """A mesh shape with what may be split over it.

  Attributes:
    shape: the mesh shape.
    domains: mesh axes that may split each dimension.
    fixed: mesh axis, or None for whole, of dimensions that are not free.
  """

  shape: Shape
  domains: dict[str, set[int]]
  fixed: dict[str, int | None]


@dataclasses.dataclass(frozen=True)
class InStages:
  """A program in stages, each for neighbouring meshes of it.

  Attributes:
    blocks: the meshes.
    count: number of stages.
  """

  blocks: Blocks
  count: int

  def share(self, group: Group, machine: Machine) -> float:
    """The least part of the time of some chains, all work of all stages, in that of a step.

    Args:
      group: the chains.
      machine: the machine.
    """
    part = 1.0 if machine.shared else 1 / self.count
    if not group.in_loop:
      return part
    # While the pipeline fills and drains a stage waits for the others.
    waits = (self.count - 1) / self.blocks.microbatches
    if self.blocks.schedule == "zero_bubble":
      waits *= 2 / 3
    return part * (1 + waits)

  def least_memory(self, layout: Mapping[str, int], sizes: Sequence[int]) -> float:
    """Lower bound of the bytes per device: the mean of variables and gradients of the stages.

    Args:
      layout: mesh axis by dimension name.
      sizes: of the mesh axes.
    """
    total = 0.0
    for names, size in self.blocks.bytes_of_weights.items():
      total += size / math.prod(sizes[layout[n]] for n in names if n in layout)
    return total / self.count


class Search(BranchAndBound):
  """A search on one mesh.

  Args:
    times: of the chains.
    mesh: the mesh.
    memory_limit: bytes that a device has, or None.
    best: collects the layouts that are found.
    deadline: of `time.thread_time`, or None.
    for_memory: whether the least memory is looked for, in place of the least time.
    most_idle: most mesh axes that may split nothing, or None for any number. (If the mesh shape is
      free, layouts with two idle axes are found on a mesh that has their product.)
    settings: which of several programs it is.
    sharding: how variables are stored in shards.
    stages: the stages, if there are several, of which each has such a mesh.

  Attributes:
    short_of_memory: whether a layout was left out as it does not fit.
  """

  def __init__(
    self,
    times: ChainTimes,
    mesh: SearchedMesh,
    memory_limit: float | None,
    best: Best,
    deadline: float | None = None,
    for_memory: bool = False,
    most_idle: int | None = None,
    settings: str = "",
    sharding: Sharding = Sharding(),
    stages: InStages | None = None,
  ):
    self.times, self.evaluator = times, times.evaluator
    self.stages = stages
    self._parts = 1 if stages is None else stages.count
    self.sharding, self._sharded = sharding, bool(sharding.over(mesh.shape))
    self.short_of_memory = False
    self.mesh_shape, self.domains, self.fixed = mesh.shape, mesh.domains, mesh.fixed
    self.sizes = mesh.shape.to_integer_list
    self.memory_limit, self.best, self.for_memory = memory_limit, best, for_memory
    self.most_idle, self.settings = most_idle, settings
    self._share = mesh.shape.size if times.machine.shared else 1
    self._axes = times.axes(mesh.shape)
    self._groups = times.groups
    # The part of the time of each group in that of a step.
    self._shares = [1.0 if stages is None else stages.share(g, times.machine) for g in self._groups]
    # By group and mesh axes: lower bounds of its time, and times.
    self._bounds: dict[tuple[int, tuple[int | None, ...]], float] = {}
    self._times: dict[tuple[int, tuple[int | None, ...]], Seconds | None] = {}
    free = [
      d
      for d in mesh.domains
      if mesh.domains[d] and d not in mesh.fixed and d not in self.evaluator.of_seeds
    ]
    # The dimensions that most of the work has first: they decide most.
    super().__init__(sorted(free, key=lambda d: (-times.weights[d], d)), deadline)
    self._touching = {
      d: sorted(
        (i for i, group in enumerate(self._groups) if d in group.dims),
        key=lambda i: -self._groups[i].weight,
      )
      for d in self.order
    }

  def run(self) -> None:
    """Searches; whatever the deadline, at least the simplest layouts are looked at."""
    free = set(self.order)
    layout: dict[str, int | None] = {d: None for d in self.evaluator.dims if d not in free}
    layout.update(self.fixed)
    values = [self._value(i, layout) for i in range(len(self._groups))]
    least = sum(v for v in values if v is not None)
    if None not in values and not self.for_memory and least >= self.limit:
      return
    for simple in self._simplest():
      self.consider(simple)
    if not self.for_memory:
      for good in self._climbed():
        self.consider(good)
    if None not in values:
      self.descend(layout, (values, least, self._split_of(layout)))

  def _simplest(self) -> Iterator[dict[str, int | None]]:
    """Yields the layout of the fixed rules, and it with the costliest dimension split, too.

    That is mostly the batch, over the largest mesh axis that no fixed rule uses.
    """
    yield dict(self.fixed)
    idle = set(range(len(self.sizes))) - set(self.fixed.values())
    for d in self.order[:1]:
      if axes := self.domains[d] & idle:
        yield {**self.fixed, d: max(axes, key=lambda a: (self.sizes[a], -a))}

  def _climbed(self) -> list[dict[str, int | None]]:
    """Good layouts: each dimension in turn gets the mesh axis, or none, that is the best then.

    With them at hand the search leaves out more, and has something if time runs out.

    Returns:
      The last one, and the one before.
    """
    layout: dict[str, int | None] = dict(self.fixed)
    steps, least = [], self._seconds(layout)
    for d in self.order:
      if self.deadline is not None and time.thread_time() > self.deadline:
        break
      best: int | None = None
      for axis in self.choices(d, layout):
        seconds = None if axis is None else self._seconds({**layout, d: axis})
        if seconds is not None and (least is None or seconds.total < least.total):
          least, best = seconds, axis
      if best is not None:
        layout[d] = best
        steps.append(dict(layout))
    return steps[-1:-3:-1]

  def _seconds(self, layout: Mapping[str, int | None]) -> Seconds | None:
    """The time of a layout, in which what is not decided is whole; None if it does not suit."""
    total = Seconds()
    for i, group in enumerate(self._groups):
      seconds = self._time(i, tuple([layout.get(d) for d in group.dims]))
      if seconds is None:
        return None
      total += seconds
    return total

  def _time(self, i: int, own: tuple[int | None, ...], room: float = math.inf) -> Seconds | None:
    """The time of a group whose dimensions are decided; None if the layout does not suit it.

    Args:
      i: number of the group.
      own: the mesh axis of each dimension.
      room: seconds above which nobody asks for the time, which is then a part of it.
    """
    if (i, own) in self._times:
      return self._times[i, own]
    group, total, result = self._groups[i], Seconds(), None
    parts = math.prod(self.sizes[a] for a in {*own} if a is not None)
    for number in range(len(group.chains)):
      seconds = self.times.chain(group, number, own, self.mesh_shape, self._axes)
      if seconds is None:
        break
      total += seconds * self._shares[i]
      rest = group.least(parts, number + 1) * self._share * self._shares[i]
      if total.lower_bound + rest >= room:
        return total + Seconds(rest)
    else:
      result = total
    self._times[i, own] = result
    return result

  def _value(
    self, i: int, layout: Mapping[str, int | None], room: float = math.inf
  ) -> float | None:
    """Lower bound of the cost of a group; None if the layout does not suit it.

    Args:
      i: number of the group.
      layout: mesh axis by dimension name, or None for whole.
      room: see `_time`.
    """
    group = self._groups[i]
    own = tuple([layout.get(d, _FREE) for d in group.dims])
    if not self.for_memory and _FREE not in own:
      seconds = self._time(i, own, room)
      return None if seconds is None else seconds.lower_bound
    if (i, own) not in self._bounds:
      parts = most_parts(group.dims, layout, self.domains, self.sizes)
      self._bounds[i, own] = group.least(parts) * self._share * self._shares[i]
    return self._bounds[i, own]

  @property
  def limit(self) -> float:
    return self.best.bound

  def bound(self, d: str, layout: dict[str, int | None], state: Any) -> tuple[float, Any] | None:
    before, total, parts = state
    parts = self._split_of(layout, d, parts)
    least = self._least_memory(parts)
    if self.for_memory:
      return least, (before, total, parts)
    if self.memory_limit is not None and least / self._parts > self.memory_limit:
      self.short_of_memory = True
      return None
    values = list(before)
    for i in self._touching[d]:
      value = self._value(i, layout, self.best.bound - total + values[i])
      if value is None:
        return None
      total += value - values[i]
      if total >= self.best.bound:
        return None
      values[i] = value
    return total, (values, total, parts)

  def _split_of(
    self, layout: Mapping[str, int | None], d: str | None = None, before: np.ndarray | None = None
  ) -> np.ndarray:
    """Most parts of tensors of each set of dimensions of `Evaluator.bound_amounts`.

    Args:
      layout: mesh axis by dimension name, or None for whole, of those that are decided.
      d: what has been decided since `before`; None: all.
      before: the parts before that.
    """
    sets, _ = self.evaluator.bound_amounts
    parts = np.ones([len(sets)]) if before is None else before.copy()
    for i, names in enumerate(sets):
      if d is None or d in names:
        parts[i] = most_parts(names, layout, self.domains, self.sizes)
    return parts

  def _least_memory(self, parts: np.ndarray) -> float:
    """Lower bound of the bytes per device, of tensors in at most so many parts."""
    if self._sharded:
      # Variables, and gradients of them, may be in shards over all mesh axes.
      return sum(map(bytes_of_variable, self.evaluator.variables)) / math.prod(self.sizes)
    _, amounts = self.evaluator.bound_amounts
    return float((amounts / parts).sum(axis=1).max()) if len(parts) else 0.0

  def choices(self, d: str, layout: Mapping[str, int | None]) -> Iterable[int | None]:
    conflicts = self.evaluator.conflicts
    taken = {a for e, a in layout.items() if a is not None and frozenset((d, e)) in conflicts}
    used = {a for a in layout.values() if a is not None}
    named = any(a is not None for a in self.fixed.values())
    yield None
    seen: set[tuple[int, int]] = set()
    for axis in sorted(self.domains[d] - taken):
      # Symmetry: of equivalent idle mesh axes only the first is tried.
      alike = self._axes[axis]
      if axis not in used and not named:
        if alike in seen:
          continue
        seen.add(alike)
      yield axis

  def consider(self, layout: Mapping[str, int | None]) -> None:
    """Evaluates a layout; keeps it if it suits the program, fits, and is among the best.

    Args:
      layout: mesh axis by dimension name, or None for whole.
    """
    chosen = {d: a for d, a in layout.items() if a is not None}
    idle = sum(n > 1 for n in self.sizes) - len(set(chosen.values()))
    if self.most_idle is not None and idle > self.most_idle:
      return
    total = self._seconds(chosen)
    if total is None:
      return
    seconds = total.total
    if not self.for_memory and seconds >= self.best.bound:
      return
    if self.stages is not None and self.memory_limit is not None and not self._sharded:
      # Most layouts of a large model do not fit, and a prediction takes its time.
      if self.stages.least_memory(chosen, self.sizes) > self.memory_limit:
        self.short_of_memory = True
        return
    cut: tuple[int, ...] = ()
    if self._sharded or self.stages is not None:
      seconds, memory, cut = self._evaluated(chosen)
    else:
      memory = self.evaluator.memory(chosen, self.sizes)
    fits = self.memory_limit is None or memory.total <= self.memory_limit
    self.short_of_memory = self.short_of_memory or not fits
    # The order of `Best` is by the first figure.
    order = float(memory.total) if self.for_memory else seconds
    if self.for_memory or (order < self.best.bound and fits):
      of = (self.mesh_shape, self.settings, self.sharding, self._parts)
      self.best.add(Found(order, memory, chosen, *of, cut=cut))

  def _evaluated(self, layout: Mapping[str, int]) -> tuple[float, Memory, tuple[int, ...]]:
    """Seconds and memory of a layout, with variables in shards or in stages; the cut of these."""
    shape = self.mesh_shape
    evaluation = self.evaluator.evaluate(
      shape,
      LayoutRules([(d, shape[a].name) for d, a in layout.items()]),
      self.sharding.over(shape),
      self.sharding.reshard_after_forward,
    )
    machine = self.times.machine
    if self.stages is None:
      return evaluation.time(machine).sums.total, evaluation.memory, ()
    blocks, count = self.stages.blocks, self.stages.count
    costs = evaluation.costs_on(machine)
    plan = blocks.plan(evaluation.mesh_impl, costs, machine, count, self.memory_limit)
    assert plan.seconds is not None
    stage = plan.largest
    rest = stage.memory - stage.variables
    memory = Memory(stage.variables, 0, rest, f"{stage.name} of {count}")
    return plan.seconds, memory, plan.cut


class Task:
  """Search problem: a program, a machine, the given rules and a memory limit.

  Args:
    evaluator: the program.
    machine: the machine.
    rules: that the layout must have.
    limit: bytes that a device may hold.
    settings: which of several programs it is.
    sharding: how its variables are stored in shards.

  Attributes:
    stages: its stages, if there are several; the meshes are then those of each.
    meshes: those that are searched.
    short_of_memory: whether the search has left out a layout as it does not fit.

  Raises:
    LayoutError: the rules contradict the program, or each other.
  """

  def __init__(
    self,
    evaluator: Evaluator,
    machine: Machine,
    rules: LayoutRules,
    limit: float,
    settings: str = "",
    sharding: Sharding = Sharding(),
  ):
    self.evaluator, self.machine, self.rules, self.limit = evaluator, machine, rules, limit
    self.settings, self.sharding, self.short_of_memory = settings, sharding, False
    self.stages: InStages | None = None
    self.free = False  # Whether the mesh shape is.
    self.meshes: list[SearchedMesh] = []
    self._times = ChainTimes(evaluator, machine)
    for name, _ in rules.pairs:
      if name not in evaluator.dims:
        there = f"; it has {', '.join(sorted(evaluator.dims))}"
        hint = did_you_mean(name, evaluator.dims, 1, shown=repr) or there
        raise LayoutError(f"fixed names {name!r}, a dimension that the program has not{hint}")
    for (d, m), (e, n) in itertools.combinations(rules.pairs, 2):
      if d == e and m != n:
        raise LayoutError(
          f"fixed contradicts itself: {d}:{m} and {e}:{n} split one dimension twice"
        )
      if m == n and frozenset((d, e)) in evaluator.conflicts:
        raise LayoutError(
          f"fixed contradicts the program: {d}:{m} and {e}:{n} split {self._with_both(d, e)} over "
          f"mesh dimension {m} twice"
        )

  def in_shards(self, reshard_after_forward: bool) -> Task:
    """The same task, with variables in shards over all dimensions of each mesh.

    Args:
      reshard_after_forward: whether weights are gathered anew before each use.
    """
    other = copy.copy(self)
    other.sharding = Sharding(None, reshard_after_forward)
    return other

  def in_stages(self, stages: InStages) -> Task:
    """The same task on a pipeline; the meshes are still to be given.

    Args:
      stages: its stages.
    """
    other = copy.copy(self)
    other.stages, other.meshes = stages, []
    return other

  @property
  def built_as(self) -> tuple[str, Sharding, int]:
    """Program, storage and stages: all that it is but mesh shape and layout."""
    return self.settings, self.sharding, 1 if self.stages is None else self.stages.count

  def _with_both(self, d: str, e: str) -> Tensor:
    return next(
      x
      for op in self.evaluator.graph.operations
      for one in [op, *inner_operations(op)]
      for x in one.inputs + one.outputs
      if {d, e} <= set(x.shape.dimension_names)
    )

  def on_given(self, shape: Shape) -> None:
    """Restricts the search to one mesh shape.

    Args:
      shape: the mesh shape.

    Raises:
      LayoutError: see `auto_layout`.
    """
    self.meshes = [self._on(shape)]

  def _on(self, shape: Shape) -> SearchedMesh:
    """Builds the search space on a mesh shape, checked against the rules.

    Raises:
      LayoutError: see `auto_layout`.
    """
    axes = {m.name: i for i, m in enumerate(shape)}
    domains = {
      name: {
        i
        for i, m in enumerate(shape)
        if m.size > 1 and name not in self.evaluator.forbidden and self._divides(name, int(m.size))
      }
      for name in self.evaluator.dims
    }
    fixed: dict[str, int | None] = {}
    for name, mesh_name in self.rules.pairs:
      if mesh_name not in axes:
        raise LayoutError(
          f"fixed rule {name}:{mesh_name}: the mesh {shape.to_string} has no such dimension"
        )
      axis = axes[mesh_name]
      if shape[axis].size > 1 and axis not in domains[name]:
        sizes = ", ".join(map(str, sorted(self.evaluator.dims[name])))
        why = self.evaluator.forbidden.get(name)
        raise LayoutError(
          f"fixed rule {name}:{mesh_name}: "
          + (
            why or f"{name} has size {sizes}, which {mesh_name}:{shape[axis].size} does not divide"
          )
        )
      fixed[name] = axis
    for i, m in enumerate(shape):
      if m.size > 1 and not any(i in axes_of for axes_of in domains.values()):
        raise LayoutError(
          f"mesh dimension {m.name}:{m.size} divides no dimension of the program that may be "
          "split: "
          + ", ".join(
            f"{name}:{'/'.join(map(str, sorted(sizes)))}"
            for name, sizes in sorted(self.evaluator.dims.items())
            if name not in self.evaluator.forbidden
          )
        )
    return SearchedMesh(shape, domains, fixed)

  def _divides(self, name: str, parts: int) -> bool:
    return all(n % parts == 0 for n in self.evaluator.dims[name])

  def on_any(self, devices: int) -> None:
    """Sets the search to all mesh shapes of `devices` devices, fewest dimensions first.

    Of these the most even first: where both the batch and the weights are split far, most programs
    take the least, and with a good layout at hand other meshes need few pieces.

    Args:
      devices: number of devices.

    Raises:
      LayoutError: the rules suit none of them.
    """
    self.free = True
    found = self.meshes = []
    error: LayoutError | None = None
    for shape in self._shapes(devices):
      try:
        found.append(self._on(shape))
      except LayoutError as e:
        error = error or e
    found.sort(key=lambda mesh: (mesh.shape.ndims, max(mesh.shape.to_integer_list)))
    if error is None and not found:
      names = ", ".join(sorted({m for _, m in self.rules.pairs}))
      raise LayoutError(
        f"no mesh of {devices} devices has a dimension of size 2 or more for each that fixed names "
        f"({names}), and at most three; fixed may name fewer, or give mesh_shape"
      )
    if not found:
      raise LayoutError(f"no mesh of {devices} devices suits the program: {error}") from error

  def _shapes(self, devices: int) -> Iterator[Shape]:
    names = list(dict.fromkeys(m for _, m in self.rules.pairs))
    if devices == 1:
      yield Shape([Dimension(n, 1) for n in names or ["mesh_0"]])
    # Over links that differ, and with names, it matters which dimension is which.
    ordered = len(self.machine.links) > 1 or bool(names)
    # Stages are one dimension more.
    for count in range(max(1, len(names)), 4 if self.stages is None else 3):
      for sizes in _factorizations(devices, count):
        if not ordered and list(sizes) != sorted(sizes, reverse=True):
          continue
        for order in _places(names, count, len(self.machine.links) > 1):
          yield Shape([Dimension(n, s) for n, s in zip(order, sizes)])

  def search(self, best: Best, deadline: float, for_memory: bool = False) -> bool:
    """Searches all meshes.

    Args:
      best: takes what is found.
      deadline: of `time.thread_time`.
      for_memory: whether the least memory is looked for, whatever the limit.

    Returns:
      Whether the search was complete.
    """
    complete = True
    for mesh in self.meshes:
      search = self._search(mesh, best, deadline, for_memory)
      search.run()
      complete = complete and search.complete
      self.short_of_memory = self.short_of_memory or search.short_of_memory
    return complete

  def consider(self, best: Best, found: Found) -> None:
    """Evaluates one layout, if it is one of this program.

    Args:
      best: takes it.
      found: the layout.
    """
    for mesh in self.meshes:
      if (mesh.shape, *self.built_as) == found.built_as():
        search = self._search(mesh, best)
        search.most_idle = None
        search.consider(found.layout)

  def _search(
    self, mesh: SearchedMesh, best: Best, deadline: float | None = None, for_memory: bool = False
  ) -> Search:
    return Search(
      self._times,
      mesh,
      None if for_memory else self.limit,
      best,
      deadline,
      for_memory=for_memory,
      most_idle=1 if self.free and not for_memory else None,
      settings=self.settings,
      sharding=self.sharding,
      stages=self.stages,
    )


def _factorizations(n: int, count: int) -> Iterator[tuple[int, ...]]:
  """Yields the ordered factorizations of `n` into `count` factors above 1."""
  if count == 1:
    if n > 1:
      yield (n,)
    return
  for first in range(n, 1, -1):
    if n % first == 0:
      for rest in _factorizations(n // first, count - 1):
        yield (first, *rest)


def _places(names: Sequence[str], count: int, anywhere: bool) -> Iterator[list[str]]:
  """Yields names of `count` mesh dimensions: the given ones in any places, or first; others."""
  others = [f"mesh_{i}" for i in range(count + len(names)) if f"mesh_{i}" not in names]
  for places in itertools.permutations(range(count), len(names)):
    if not anywhere and list(places) != list(range(len(names))):
      continue
    spare = iter(others)
    given: Mapping[int, str] = dict(zip(places, names))
    yield [given[i] if i in given else next(spare) for i in range(count)]
