"""The prediction of a pipeline: time of each task, bubble, memory of each stage, bytes sent.

The operations of all stages have been evaluated on the mesh of one stage, whose shape and layout
all have. Here they are put together stage by stage: the tasks of a microbatch, with their seconds
on a machine, give the table of the schedule (`meshes.schedules`), and that the time of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mesh_tensorflow.meshes import schedules
from mesh_tensorflow.operations.cross_mesh import Reshard
from mesh_tensorflow.operations.loops import WhileLoopOperation
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.planning.cost_model import step_time
from mesh_tensorflow.planning.lowering import OperationCost, trips
from mesh_tensorflow.planning.machine import Machine
from mesh_tensorflow.planning.mesh_impl import PlanMeshImpl
from mesh_tensorflow.program.graph import Graph, Operation, Tensor, reads
from mesh_tensorflow.running.pipeline import Stages, divided
from mesh_tensorflow.running.segments import Segment, is_pipeline


@dataclasses.dataclass(frozen=True)
class StagePlan:
  """The prediction for one stage.

  Attributes:
    name: of its mesh.
    variables: bytes of its variables on each device, those of the optimizer included.
    kept: bytes of activations on each device that a microbatch keeps for its way back.
    transient: the most bytes of activations on each device that a task has besides, at any time.
    under_way: the most microbatches of which it keeps activations.
    sent: bytes that each device sends to other stages in a step.
    forward: seconds of its forward tasks for a microbatch; 0 without a machine.
    backward: those of the backward tasks; on the last stage both are one task, which counts here.
    outside: seconds of what it does outside of the pipeline, updates say.
  """

  name: str
  variables: int
  kept: int
  transient: int
  under_way: int
  sent: int
  forward: float = 0.0
  backward: float = 0.0
  outside: float = 0.0

  @property
  def memory(self) -> int:
    """Bytes on each device, at most: variables, kept activations, and what the running task has."""
    return self.variables + self.kept * self.under_way + self.transient


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
  """The prediction for a pipeline.

  Attributes:
    schedule: name of the schedule.
    table: the schedule, in seconds; without a machine in units of a forward task.
    stages: its stages, in the order of their first tasks.
    is_timed: whether there is a machine.
  """

  schedule: str
  table: schedules.Table
  stages: list[StagePlan]
  is_timed: bool

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

  def mesh_of(x: Any) -> Any:
    return x.mesh

  loops = [op for op in graph.operations if is_pipeline(op, mesh_of)]
  if not loops or not isinstance(loops[0], WhileLoopOperation):
    return None
  loop = loops[0]
  seed = graph.random_seed if isinstance(graph.random_seed, Tensor) else None
  parts = divided(loop, mesh_of, seed)
  planned = _Planned(graph, impl, costs, machine, loop, parts)
  tasks = planned.tasks()
  table = schedules.table(tasks, trips(loop) or 1, loop.schedule)
  return PipelinePlan(loop.schedule, table, planned.stages(table), machine is not None)


@dataclasses.dataclass
class _Planned:
  graph: Graph
  impl: PlanMeshImpl
  costs: Mapping[Operation, OperationCost]
  machine: Machine | None
  loop: WhileLoopOperation
  parts: Stages

  def __post_init__(self) -> None:
    self.segments = self.parts.segments
    # Of a program that is only planned a mesh stands for its own implementation.
    self.meshes: list[Any] = list(dict.fromkeys(s.impl for s in self.segments))
    self.times = trips(self.loop) or 1

  def seconds(self, operations: Sequence[Operation], per: int = 1) -> float:
    """Predicted seconds of operations, of which each runs `times / per` times."""
    if self.machine is None:
      return 0.0
    found = [self.costs[op] for op in operations if op in self.costs]
    return step_time(
      (
        (c.work, [(x.kind, x.bytes_over) for x in c.collectives], max(c.times // per, 1))
        for c in found
      ),
      self.machine,
      self.impl.shape,
    ).seconds

  def tasks(self) -> list[schedules.Task]:
    """The tasks of a microbatch with their seconds, those of what comes from other stages too."""
    if self.machine is None:
      return list(self.parts.tasks)
    result = []
    for s, task in zip(self.segments, self.parts.tasks):
      received = [x for x in s.inputs if isinstance(x.operation, Reshard)]
      received = [x for x in received if x.operation in self.parts.order]
      seconds = self.seconds(s.operations, self.times) + self.transfer(received)
      result.append(dataclasses.replace(task, seconds=max(seconds, 1e-9)))
    return result

  def transfer(self, received: Sequence[Tensor]) -> float:
    """Seconds of bringing tensors from one stage to another."""
    if self.machine is None or not received:
      return 0.0
    both = 2 * self.impl.size
    link = next(
      (x for x in self.machine.links if x.devices is None or x.devices >= both),
      self.machine.links[-1],
    )
    speed, share = link.speed("receive"), both if self.machine.shared else 1
    sent = sum(map(self.bytes_crossing, received))
    return (speed.latency * len(received) + sent / speed.bandwidth) * share

  def bytes_crossing(self, x: Tensor) -> int:
    """Bytes that each device sends: the replicas of a slice share them."""
    return -(-x.size * int(x.dtype.size) // self.impl.size)

  def bytes_of(self, x: Tensor) -> int:
    return int(self.impl.slice_size(x.shape)) * int(x.dtype.size)

  def stages(self, table: schedules.Table) -> list[StagePlan]:
    """The stages, by the table of their schedule."""
    inside = set(self.loop.inner_operations)
    crossings = [r for r in self.parts.order if isinstance(r, Reshard)]
    result = []
    for i, mesh in enumerate(self.meshes):
      own = [s for s in self.segments if s.impl is mesh]
      variables = [v for v in self.graph.operations if isinstance(v, Variable) and v.mesh is mesh]
      outside = [op for op in self.costs if op.mesh is mesh and op not in inside]
      kinds = [table.tasks[self.segments.index(s)] for s in own]
      result.append(
        StagePlan(
          name=mesh.name,
          variables=sum(
            v.stored_impl(self.impl).slice_size(v.shape) * v.slice_dtype.size for v in variables
          ),
          kept=self.kept(own),
          transient=max(self.transient(s) for s in own),
          under_way=table.under_way(i),
          sent=self.times
          * sum(self.bytes_crossing(r.outputs[0]) for r in crossings if r.inputs[0].mesh is mesh),
          forward=sum(t.seconds for t in kinds if t.kind == "F") if self.machine else 0.0,
          backward=sum(t.seconds for t in kinds if t.kind != "F") if self.machine else 0.0,
          outside=self.seconds([op for op in outside if op is not self.loop]),
        )
      )
    return result

  def kept(self, own: Sequence[Segment]) -> int:
    """Bytes that segments of a mesh leave for later ones of the same microbatch there."""
    made = {x: s for s in own for x in s.outputs}
    later = {x for s in own for x in s.inputs if x in made and made[x] is not s}
    # What comes from another mesh and is used by several is kept, too.
    uses: dict[Tensor, int] = {}
    for s in own:
      for x in s.inputs:
        if isinstance(x.operation, Reshard) and x.operation in self.parts.order:
          uses[x] = uses.get(x, 0) + 1
    again = [x for x, n in uses.items() if n > 1]
    return sum(self.bytes_of(x) for x in [*later, *again])

  def transient(self, s: Segment) -> int:
    """The most bytes of what a segment makes, and does not leave, at any time."""
    left = set(s.outputs)
    last: dict[Tensor, int] = {}
    for i, op in enumerate(s.operations):
      for x in reads(op):
        last[x] = i
    now = most = 0
    live: dict[int, list[Tensor]] = {}
    for i, op in enumerate(s.operations):
      if isinstance(op, Variable):
        continue
      for x in op.outputs:
        now += self.bytes_of(x)
        if x not in left:
          live.setdefault(max(last.get(x, i), i), []).append(x)
      most = max(most, now)
      now -= sum(self.bytes_of(x) for x in live.pop(i, ()))
    return max(most - sum(self.bytes_of(x) for x in left), 0)
