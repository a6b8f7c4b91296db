"""The prediction of a pipeline: time of each task, bubble, memory of each stage, bytes sent.

The operations of all stages have been evaluated on the mesh of one stage, whose shape and layout
all have. Here they are put together stage by stage: the tasks of a microbatch, with their seconds
on a machine, give the table of the schedule (`meshes.schedules`), and that the time of the step.

A program with a mesh for each layer is predicted for fewer stages, too: `Blocks.plan` takes
neighbouring meshes for one stage, cut so that the longest stage is as short as can be.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mesh_tensorflow.meshes import schedules
from mesh_tensorflow.operations.cross_mesh import Reshard
from mesh_tensorflow.operations.loops import WhileLoopOperation
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.planning.cost_model import step_time
from mesh_tensorflow.planning.lowering import OperationCost, trips
from mesh_tensorflow.planning.machine import Link, Machine
from mesh_tensorflow.planning.mesh_impl import PlanMeshImpl
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Graph, Operation, Tensor, reads
from mesh_tensorflow.running.pipeline import Stages, divided
from mesh_tensorflow.running.segments import Segment, is_pipeline

# Number of elements of a slice of a shape.
_SizeOf = Callable[[Shape], int]

# Cuts whose longest stages differ by less take the same time.
_SAME = 1e-9
# A cut that is not into equal numbers must make the longest stage shorter by this part: less is
# below what a prediction can tell.
_GAIN = 0.01


@dataclasses.dataclass(frozen=True)
class StagePlan:
  """The prediction for one stage.

  Attributes:
    name: of its mesh.
    variables: bytes of its variables on each device, those of the optimizer included.
    gradients: bytes of the sums of its gradients on each device.
    kept: bytes of activations on each device that a microbatch keeps for its way back.
    activations: the most bytes on each device, at any time, of what microbatches keep, of what has
      come from other stages and waits for its task, and of what the running task makes besides.
    under_way: the most microbatches of which it keeps activations; of a stage of several runs of
      layers each keeps a part of them.
    sent: bytes that each device sends to other stages in a step.
    forward: seconds of its forward tasks for a microbatch; 0 without a machine.
    backward: those of the backward tasks; on the last stage both are one task, which counts here.
    outside: seconds of what it does outside of the pipeline, updates say.
  """

  name: str
  variables: int
  gradients: int
  kept: int
  activations: int
  under_way: float
  sent: int
  forward: float = 0.0
  backward: float = 0.0
  outside: float = 0.0

  @property
  def memory(self) -> int:
    """Bytes on each device, at most: variables, sums and one more of gradients, activations."""
    return self.variables + 2 * self.gradients + self.activations


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
  """The prediction for a pipeline.

  Attributes:
    schedule: name of the schedule.
    table: the schedule, in seconds; without a machine in units of a forward task.
    stages: its stages, in the order of the program's meshes.
    is_timed: whether there is a machine.
    cut: how many meshes of the program each stage stands for: one, but in a plan of
      `Blocks.plan`.
  """

  schedule: str
  table: schedules.Table
  stages: list[StagePlan]
  is_timed: bool
  cut: tuple[int, ...] = ()

  @property
  def microbatches(self) -> int:
    """Number of microbatches of a step."""
    return self.table.microbatches

  @property
  def bubble(self) -> float:
    """The part of the time of the pipeline in which a stage is idle, the mean of all stages."""
    return self.table.bubble

  @property
  def seconds(self) -> float | None:
    """Predicted seconds of a step; None without a machine."""
    if not self.is_timed:
      return None
    return self.table.seconds + max(s.outside for s in self.stages)

  @property
  def memory(self) -> int:
    """Bytes on each device of the stage that needs most."""
    return max(s.memory for s in self.stages)

  @property
  def largest(self) -> StagePlan:
    """The stage that needs most memory."""
    return max(self.stages, key=lambda s: s.memory)

  def drawn(self, width: int = 84) -> str:
    """The schedule as text; see `schedules.drawn`."""
    names = {i: s.name for i, s in enumerate(self.stages)}
    return schedules.drawn(self.table, names, width)

  def to_dict(self) -> dict[str, Any]:
    """Numbers, strings, lists and dicts."""
    return {
      "schedule": self.schedule,
      "microbatches": self.microbatches,
      "bubble": self.bubble,
      "seconds": self.seconds,
      "stages": [{**dataclasses.asdict(s), "memory": s.memory} for s in self.stages],
    }


class Crossing(NamedTuple):
  """A tensor that goes from one mesh to another, for each microbatch.

  Attributes:
    key: equal for what is sent once to a mesh: the tensor; of a gradient its shape, as those of
      layers on one mesh are added up before they are sent.
    source: number of the mesh that makes it.
    target: number of the mesh that needs it.
    bytes: that each device sends.
    size: bytes on each device that gets it.
    is_backward: whether it is a gradient.
  """

  key: Any
  source: int
  target: int
  bytes: int
  size: int
  is_backward: bool


@dataclasses.dataclass(frozen=True)
class Block:
  """Cost of the operations of one mesh of a pipeline, without transfers from other meshes.

  Attributes:
    name: of the mesh.
    forward: seconds of its forward tasks for a microbatch.
    backward: of its backward tasks; of the last mesh of both, which are one task.
    weights: of gradients of weights, where these are tasks of their own.
    outside: seconds of a step outside of the pipeline.
    variables: see `StagePlan`.
    gradients: likewise.
    spans: bytes on each device of a microbatch from one task of the program to another one.
    running: bytes that a task makes besides, without gradients of weights, by its number.
  """

  name: str
  forward: float
  backward: float
  weights: float
  outside: float
  variables: int
  gradients: int
  spans: list[schedules.Span]
  running: dict[int, int]

  @property
  def kept(self) -> int:
    """See `StagePlan`."""
    return sum(span.bytes for span in self.spans)

  @property
  def seconds(self) -> float:
    """Seconds of a microbatch, forward and backward."""
    return self.forward + self.backward + self.weights


# ------------------------------------------------------------------------------- cuts


def equal_cut(count: int, stages: int) -> list[int]:
  """Cuts layers into runs of equal number, or nearly.

  Args:
    count: number of layers.
    stages: number of stages, at most as many.

  Returns:
    The number of layers of each stage.
  """
  # Layer i is on stage i * stages // count.
  ends = [-(-count * (s + 1) // stages) for s in range(stages)]
  return [end - begin for begin, end in zip([0, *ends], ends)]


def balanced_cut(
  seconds: Sequence[float],
  stages: int,
  fits: Callable[[int, int, int], bool] | None = None,
) -> list[int]:
  """Cuts layers into runs so that the longest stage is as short as can be, by dynamic programming.

  Of several such cuts it is the one that is next to equal numbers of layers.

  Args:
    seconds: of each layer.
    stages: number of stages, at most as many.
    fits: whether stage `s` may have the layers from `begin` to before `end`, called as
      `fits(s, begin, end)`; None: it may have any.

  Returns:
    The number of layers of each stage; of equal numbers if no cut fits.
  """
  count = len(seconds)
  equal = equal_cut(count, stages)
  until = [0.0, *itertools.accumulate(seconds)]
  ends = list(itertools.accumulate(equal))

  def lasts(begin: int, end: int) -> float:
    return until[end] - until[begin]

  def may(s: int, begin: int, end: int) -> bool:
    return fits is None or fits(s, begin, end)

  runs = list(zip([0, *ends], ends))
  limit = math.inf
  if all(may(s, begin, end) for s, (begin, end) in enumerate(runs)):
    limit = max(lasts(begin, end) for begin, end in runs)
  # The least time of the longest of the first stages, by the layer at which they end.
  least = _cheapest(count, stages, lasts, may, max, lambda s, end, value: value, limit)
  if least is None:
    return equal
  shortest = max(lasts(b, e) for b, e in least)
  # Of the cuts that are as short the one next to equal numbers.
  best = _cheapest(
    count,
    stages,
    lasts,
    may,
    lambda before, _: before,
    lambda s, end, value: value + (end - ends[s]) ** 2,
    shortest * (1 + _SAME),
  )
  assert best is not None
  return [end - begin for begin, end in best]


def _cheapest(
  count: int,
  stages: int,
  lasts: Callable[[int, int], float],
  may: Callable[[int, int, int], bool],
  join: Callable[[float, float], float],
  weigh: Callable[[int, int, float], float],
  limit: float,
) -> list[tuple[int, int]] | None:
  """The cut of least cost, all of whose stages last at most `limit`: of each stage begin and end.

  Args:
    count: number of layers.
    stages: number of stages.
    lasts: seconds of layers from begin to before end.
    may: whether a stage may have them.
    join: the cost so far with the seconds of one more stage.
    weigh: the cost with what the end of stage s adds to it.
    limit: seconds.
  """
  slack = limit * (1 + _SAME) if limit < math.inf else limit
  costs: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
  for s in range(stages):
    row: dict[int, tuple[float, int]] = {}
    for begin, (before, _) in sorted(costs[-1].items()):
      last = s == stages - 1
      for end in range(count if last else begin + 1, count - (stages - 1 - s) + 1):
        long = lasts(begin, end)
        if long > slack or end <= begin:
          break
        if not may(s, begin, end):
          continue
        cost = weigh(s, end, join(before, long))
        if end not in row or cost < row[end][0]:
          row[end] = (cost, begin)
    costs.append(row)
  if count not in costs[-1]:
    return None
  found, end = [], count
  for row in reversed(costs[1:]):
    begin = row[end][1]
    found.append((begin, end))
    end = begin
  return found[::-1]


# ------------------------------------------------------------------------- predictions


def plan_pipeline(
  graph: Graph,
  impl: PlanMeshImpl,
  costs: Mapping[Operation, OperationCost],
  machine: Machine | None,
) -> PipelinePlan | None:
  """The prediction for the pipeline of a graph; None if it has none.

  Args:
    graph: the graph.
    impl: mesh shape and layout of every stage.
    costs: of its operations on such a mesh.
    machine: the machine, or None.
  """
  blocks = Blocks.of(graph)
  return None if blocks is None else blocks.as_built(impl, costs, machine)


class Blocks:
  """The meshes of a graph's pipeline, each a stage or one of several layers of a stage.

  Args:
    graph: the graph.
    loop: over its microbatches.

  Attributes:
    graph: the graph.
    meshes: in the order of the graph.
    microbatches: number of microbatches of a step.
    schedule: name of the schedule.
  """

  def __init__(self, graph: Graph, loop: WhileLoopOperation):
    self.graph, self._loop = graph, loop
    seed = graph.random_seed if isinstance(graph.random_seed, Tensor) else None
    self._parts: Stages = divided(loop, _mesh_of, seed)
    # Of a program that is only planned a mesh stands for its own implementation.
    used = {s.impl for s in self._parts.segments}
    order = {mesh: i for i, mesh in enumerate(graph.meshes.values())}
    self.meshes: list[Any] = sorted(used, key=lambda mesh: order.get(mesh, len(order)))
    self._number = {mesh: i for i, mesh in enumerate(self.meshes)}
    self.microbatches = trips(loop) or 1
    self.schedule = str(loop.schedule)

  @classmethod
  def of(cls, graph: Graph) -> Blocks | None:
    """The meshes of the pipeline of a graph; None if it has none.

    Args:
      graph: the graph.
    """
    for op in graph.operations:
      if is_pipeline(op, _mesh_of) and isinstance(op, WhileLoopOperation):
        return cls(graph, op)
    return None

  def __len__(self) -> int:
    return len(self.meshes)

  @functools.cached_property
  def _own(self) -> list[list[Segment]]:
    """The segments of each mesh."""
    own: list[list[Segment]] = [[] for _ in self.meshes]
    for s in self._parts.segments:
      own[self._number[s.impl]].append(s)
    return own

  @functools.cached_property
  def _held(self) -> list[tuple[list[Tensor], dict[Tensor, tuple[int, int]]]]:
    """Finds what the segments of each mesh add up over the microbatches, and what they keep."""
    return [(self._summed(own), self._kept(own)) for own in self._own]

  @functools.cached_property
  def _task_of(self) -> dict[Segment, int]:
    """The number of the task that each segment is."""
    return {s: i for i, s in enumerate(self._parts.segments)}

  @functools.cached_property
  def _outside(self) -> list[list[Operation]]:
    """The operations of each mesh outside of the pipeline."""
    inside = set(self._loop.inner_operations)
    found: list[list[Operation]] = [[] for _ in self.meshes]
    for op in self.graph.operations:
      if op not in inside and op is not self._loop and op.mesh in self._number:
        found[self._number[op.mesh]].append(op)
    return found

  @functools.cached_property
  def _variables(self) -> list[list[Variable]]:
    found: list[list[Variable]] = [[] for _ in self.meshes]
    for op in self.graph.operations:
      if isinstance(op, Variable) and op.mesh in self._number:
        found[self._number[op.mesh]].append(op)
    return found

  @functools.cached_property
  def bytes_of_weights(self) -> dict[tuple[str, ...], int]:
    """Bytes of variables, of sums of gradients and of one microbatch's, by their dimensions."""
    found: dict[tuple[str, ...], int] = {}
    for variables, own in zip(self._variables, self._own):
      sizes = [(v.shape, int(v.size) * int(v.slice_dtype.size)) for v in variables]
      sizes += [(x.shape, 2 * int(x.size) * int(x.dtype.size)) for x in self._summed(own)]
      for shape, size in sizes:
        names = tuple(shape.dimension_names)
        found[names] = found.get(names, 0) + size
    return found

  def crossings(self, impl: PlanMeshImpl) -> list[Crossing]:
    """Transfers from mesh to mesh for each microbatch.

    Args:
      impl: mesh shape and layout of every stage.
    """
    source: dict[Tensor, Tensor] = {}
    found = []
    for r in self._parts.order:
      if not isinstance(r, Reshard):
        continue
      x, y = r.inputs[0], r.outputs[0]
      root = source[y] = source.get(x, x)
      # The replicas of a slice share what is sent.
      sent = -(-x.size * int(x.dtype.size) // impl.size)
      key = x.shape if r.is_backward else root
      numbers = self._number[root.mesh], self._number[y.mesh]
      size = _bytes(y, impl.slice_size)
      found.append(Crossing(key, *numbers, sent, size, bool(r.is_backward)))
    return found

  def measured(
    self,
    impl: PlanMeshImpl,
    costs: Mapping[Operation, OperationCost],
    machine: Machine | None,
  ) -> list[Block]:
    """The cost of each mesh.

    Args:
      impl: mesh shape and layout of every stage.
      costs: of the operations on such a mesh.
      machine: the machine, or None.
    """
    size_of: _SizeOf = functools.cache(impl.slice_size)
    result = []
    for mesh, own, outside, variables, (summed, kept) in zip(
      self.meshes, self._own, self._outside, self._variables, self._held
    ):
      seconds = {"F": 0.0, "B": 0.0, "W": 0.0}
      for s in own:
        kind = self._parts.tasks[self._task_of[s]].kind
        seconds["B" if kind == "FB" else kind] += self._seconds(
          s.operations, impl, costs, machine, self.microbatches
        )
      result.append(
        Block(
          name=mesh.name,
          forward=seconds["F"],
          backward=seconds["B"],
          weights=seconds["W"],
          outside=self._seconds(outside, impl, costs, machine),
          variables=sum(
            v.stored_impl(impl).slice_size(v.shape) * v.slice_dtype.size for v in variables
          ),
          gradients=sum(_bytes(x, size_of) for x in summed),
          spans=[schedules.Span(*tasks, _bytes(x, size_of)) for x, tasks in kept.items()],
          running={
            self._task_of[s]: self._transient(s, {*summed, *kept}, size_of)
            + sum(_bytes(x, size_of) for x in {*self._came(s)} - {*kept})
            for s in own
          },
        )
      )
    return result

  def as_built(
    self,
    impl: PlanMeshImpl,
    costs: Mapping[Operation, OperationCost],
    machine: Machine | None,
  ) -> PipelinePlan:
    """The prediction for the program with each of its meshes as a stage.

    Args:
      impl: mesh shape and layout of every stage.
      costs: of the operations on such a mesh.
      machine: the machine, or None.
    """
    blocks = self.measured(impl, costs, machine)
    tasks = [dataclasses.replace(t, mesh=self._number[s.impl]) for s, t in self._tasks()]
    together = 1 if machine is None else _at_once(machine, len(self))
    made = {x: i for i, (s, _) in enumerate(self._tasks()) for x in s.outputs}
    for r in self._parts.order:
      if isinstance(r, Reshard):
        made[r.outputs[0]] = made[r.inputs[0]]
    came: set[Tensor] = set()
    spans = [span for block in blocks for span in block.spans]
    for i, (s, _) in enumerate(self._tasks()):
      # What a later task reads again is there.
      new = [x for x in self._came(s) if x not in came]
      came.update(new)
      spans += [schedules.Span(made[x], i, _bytes(x, impl.slice_size)) for x in new]
      if machine is not None:
        seconds = self._seconds(s.operations, impl, costs, machine, self.microbatches)
        for x in new:
          a, b = self._number[x.operation.inputs[0].mesh], self._number[s.impl]
          sent = -(-x.size * int(x.dtype.size) // impl.size)
          seconds += _transfer(sent, a, b, len(self), impl.shape, machine)
        tasks[i] = dataclasses.replace(tasks[i], seconds=max(seconds * together, 1e-9))
    table = schedules.table(tasks, self.microbatches, self.schedule)
    ones = [1] * len(self)
    running = {task: n for block in blocks for task, n in block.running.items()}
    sends, held = self._sent(ones, self.crossings(impl)), table.most_held(spans, running)
    stages = [self._stage([b], table, i, held[i], sends[i], together) for i, b in enumerate(blocks)]
    return PipelinePlan(self.schedule, table, stages, machine is not None, tuple(ones))

  def plan(
    self,
    impl: PlanMeshImpl,
    costs: Mapping[Operation, OperationCost],
    machine: Machine,
    stages: int,
    memory_limit: float | None = None,
    cut: Sequence[int] | None = None,
  ) -> PipelinePlan:
    """The prediction for the program on fewer stages, each for neighbouring meshes of it.

    Args:
      impl: mesh shape and layout of every stage.
      costs: of the operations on such a mesh.
      machine: the machine.
      stages: number of stages, at least 2 and at most that of the meshes.
      memory_limit: bytes that a device has; None: any number.
      cut: number of meshes of each stage; by default the cut with the shortest longest stage whose
        stages fit, if that is a gain, or else equal numbers.
    """
    blocks = self.measured(impl, costs, machine)
    if cut is None:
      cut = self.cut(blocks, stages, memory_limit)
    return self._merged(blocks, cut, self.crossings(impl), impl, machine)

  def cut(self, blocks: Sequence[Block], stages: int, memory_limit: float | None) -> list[int]:
    """The number of meshes of each stage; see `plan`.

    Args:
      blocks: as `measured` returns them.
      stages: number of stages.
      memory_limit: bytes that a device has, or None.
    """
    equal = equal_cut(len(blocks), stages)
    # One microbatch goes through the stages one after the other, however they are cut.
    if self.microbatches == 1:
      return equal
    fits = None
    if memory_limit is not None:
      held = _Held(blocks, stages, self.microbatches, self.schedule)

      def fits(s: int, begin: int, end: int) -> bool:
        return held.memory(s, begin, end) <= memory_limit

    seconds = [b.seconds for b in blocks]
    best = balanced_cut(seconds, stages, fits)
    runs = list(itertools.accumulate(equal))
    if fits is None or all(fits(s, b, e) for s, (b, e) in enumerate(zip([0, *runs], runs))):
      if longest(seconds, best) > (1 - _GAIN) * longest(seconds, equal):
        return equal
    return best

  def _merged(
    self,
    blocks: Sequence[Block],
    cut: Sequence[int],
    crossings: Sequence[Crossing],
    impl: PlanMeshImpl,
    machine: Machine,
  ) -> PipelinePlan:
    stages = len(cut)
    ends = list(itertools.accumulate(cut))
    parts = [blocks[begin:end] for begin, end in zip([0, *ends], ends)]
    together = _at_once(machine, stages)
    came = {False: [0.0] * stages, True: [0.0] * stages}
    between = _between(cut, crossings)
    for c, a, b in between:
      came[c.is_backward][b] += _transfer(c.bytes, a, b, stages, impl.shape, machine)
    tasks: list[schedules.Task] = []

    def add(s: int, kind: str, after: Sequence[int], seconds: float) -> int:
      tasks.append(schedules.Task(s, kind, tuple(after), max(seconds * together, 1e-9)))
      return len(tasks) - 1

    forward = [sum(b.forward for b in part) + came[False][s] for s, part in enumerate(parts)]
    backward = [sum(b.backward for b in part) + came[True][s] for s, part in enumerate(parts)]
    weights = [sum(b.weights for b in part) for part in parts]
    made: list[int] = []
    for s in range(stages - 1):
      made.append(add(s, "F", made[-1:], forward[s]))
    last = add(stages - 1, "FB", made[-1:], forward[-1] + backward[-1])
    made.append(last)
    back, weighing = {stages - 1: last}, {}
    for s in range(stages - 1, -1, -1):
      if s < stages - 1:
        back[s] = last = add(s, "B", [made[s], last], backward[s])
      weighing[s] = add(s, "W", [last], weights[s]) if weights[s] else back[s]
    table = schedules.table(tasks, self.microbatches, self.schedule)
    spans, running = [], collections.Counter[int]()
    for c, a, b in between:
      of = back if c.is_backward else made
      spans.append(schedules.Span(of[a], of[b], c.size))
    for s, part in enumerate(parts):
      # The task of the stage that a task of the program is a part of.
      of_kind = {"F": made[s], "FB": made[s], "B": back[s], "W": weighing[s]}
      number = {i: of_kind[t.kind] for i, (_, t) in enumerate(self._tasks())}
      for block in part:
        spans += [schedules.Span(number[i], number[j], n) for i, j, n in block.spans]
        for i, n in block.running.items():
          running[number[i]] = max(running[number[i]], n)
    sent, held = self._sent(cut, crossings), table.most_held(spans, running)
    found = []
    for s, part in enumerate(parts):
      one = self._stage(part, table, s, held[s], sent[s], together)
      found.append(dataclasses.replace(one, name=f"stage{s}"))
    return PipelinePlan(self.schedule, table, found, True, tuple(cut))

  def _stage(
    self,
    part: Sequence[Block],
    table: schedules.Table,
    number: int,
    held: int,
    sent: int,
    together: int,
  ) -> StagePlan:
    own = [t for t in table.tasks if t.mesh == number]
    is_timed = any(b.seconds for b in part)
    gradients = sum(b.gradients for b in part)
    return StagePlan(
      name=part[0].name,
      variables=sum(b.variables for b in part),
      gradients=gradients,
      kept=sum(b.kept for b in part),
      activations=held,
      under_way=table.under_way(number),
      sent=sent,
      forward=sum(t.seconds for t in own if t.kind == "F") if is_timed else 0.0,
      backward=sum(t.seconds for t in own if t.kind != "F") if is_timed else 0.0,
      outside=sum(b.outside for b in part) * together,
    )

  def _sent(self, cut: Sequence[int], crossings: Sequence[Crossing]) -> list[int]:
    """Bytes that each device of each stage sends in a step."""
    sent = [0] * len(cut)
    for c, a, _ in _between(cut, crossings):
      sent[a] += c.bytes * self.microbatches
    return sent

  def _tasks(self) -> list[tuple[Segment, schedules.Task]]:
    return list(zip(self._parts.segments, self._parts.tasks))

  @staticmethod
  def _seconds(
    operations: Sequence[Operation],
    impl: PlanMeshImpl,
    costs: Mapping[Operation, OperationCost],
    machine: Machine | None,
    per: int = 1,
  ) -> float:
    """Predicted seconds of operations, of which each runs `times / per` times."""
    if machine is None:
      return 0.0
    found = [costs[op] for op in operations if op in costs]
    return step_time(
      (
        (c.work, [(x.kind, x.bytes_over) for x in c.collectives], max(c.times // per, 1))
        for c in found
      ),
      machine,
      impl.shape,
    ).seconds

  def _summed(self, own: Sequence[Segment]) -> list[Tensor]:
    """Tensors that segments of a mesh add up over the microbatches."""
    made = {x for s in own for x in s.outputs}
    return [x for x in dict.fromkeys(self._parts.summed) if x in made]

  def _kept(self, own: Sequence[Segment]) -> dict[Tensor, tuple[int, int]]:
    """Tensors that segments of a mesh leave for later ones, with their first and last task.

    What comes from another mesh and is read by several is kept, too, from the first of them.
    """
    first = {x: self._task_of[s] for s in own for x in s.outputs}
    kept: dict[Tensor, tuple[int, int]] = {}
    for s in own:
      came = set(self._came(s))
      for x in s.inputs:
        task = self._task_of[s]
        if x in first or x in came:
          begin = first.setdefault(x, task)
          if begin != task:
            kept[x] = begin, task
    return kept

  def _came(self, s: Segment) -> list[Tensor]:
    """The tensors of other meshes that a segment reads."""
    return [x for x in s.inputs if x.operation in self._crossing]

  @functools.cached_property
  def _crossing(self) -> set[Operation]:
    return {r for r in self._parts.order if isinstance(r, Reshard)}

  @staticmethod
  def _transient(s: Segment, others: set[Tensor], size_of: _SizeOf) -> int:
    """The most bytes at any time of what a segment makes, without `others`."""
    last: dict[Tensor, int] = {}
    for i, op in enumerate(s.operations):
      for x in reads(op):
        last[x] = i
    end = len(s.operations) - 1
    last.update(dict.fromkeys(s.outputs, end))
    now = most = 0
    live: dict[int, list[Tensor]] = {}
    for i, op in enumerate(s.operations):
      if isinstance(op, Variable):
        continue
      for x in op.outputs:
        if x not in others:
          now += _bytes(x, size_of)
          live.setdefault(max(last.get(x, i), i), []).append(x)
      most = max(most, now)
      now -= sum(_bytes(x, size_of) for x in live.pop(i, ()))
    return most


class _Held:
  """Bytes of stages of neighbouring blocks."""

  def __init__(self, blocks: Sequence[Block], stages: int, microbatches: int, schedule: str):
    self._stages, self._all = stages, schedule == "gpipe"
    self._microbatches = microbatches
    self._fixed = [0, *itertools.accumulate(b.variables + 2 * b.gradients for b in blocks)]
    self._kept = [0, *itertools.accumulate(b.kept for b in blocks)]
    self._transient = [max(b.running.values()) for b in blocks]

  def memory(self, s: int, begin: int, end: int) -> int:
    """Bytes of stage `s` with blocks from `begin` to before `end`."""
    under_way = self._microbatches
    if s == self._stages - 1:
      under_way = 1
    elif not self._all:
      under_way = min(under_way, self._stages - s)
    kept = (self._kept[end] - self._kept[begin]) * under_way
    return self._fixed[end] - self._fixed[begin] + kept + max(self._transient[begin:end])


def longest(seconds: Sequence[float], cut: Sequence[int]) -> float:
  """Seconds of the longest stage of a cut.

  Args:
    seconds: of each layer.
    cut: number of layers of each stage.
  """
  ends = list(itertools.accumulate(cut))
  return max(sum(seconds[begin:end]) for begin, end in zip([0, *ends], ends))


def _mesh_of(x: Any) -> Any:
  return x.mesh


def _bytes(x: Tensor, size_of: _SizeOf) -> int:
  return int(size_of(x.shape)) * int(x.dtype.size)


def _at_once(machine: Machine, stages: int) -> int:
  """How many stages share the figures of a machine: all, or each has devices of its own."""
  return stages if machine.shared else 1


def _between(cut: Sequence[int], crossings: Sequence[Crossing]) -> list[tuple[Crossing, int, int]]:
  """What goes from stage to stage, with the numbers of the two; each is sent once to a stage."""
  ends = list(itertools.accumulate(cut))
  found: dict[Any, tuple[Crossing, int, int]] = {}
  for c in crossings:
    a, b = bisect.bisect_right(ends, c.source), bisect.bisect_right(ends, c.target)
    if a != b:
      found.setdefault((c.key, a, b, c.is_backward), (c, a, b))
  return list(found.values())


def _transfer(
  sent: int, source: int, target: int, stages: int, mesh_shape: Shape, machine: Machine
) -> float:
  """Seconds of bringing a tensor from one stage to another, whose devices are consecutive.

  Args:
    sent: bytes that each device sends.
    source: number of the stage that has it.
    target: number of the stage that needs it.
    stages: number of stages.
    mesh_shape: of each stage.
    machine: the machine.
  """
  n = int(mesh_shape.size)
  first, last = min(source, target) * n, (max(source, target) + 1) * n - 1

  def joins(link: Link) -> bool:
    return link.devices is None or first // link.devices == last // link.devices

  link = next(filter(joins, machine.links), machine.links[-1])
  speed = link.speed("receive")
  share = n if machine.shared else 1
  return (speed.latency + sent / speed.bandwidth) * share
