"""Evaluation of layouts of a program, operation by operation: work, exchanges and memory.

`Evaluator.evaluate` is the evaluation of one layout, which `mtf.describe` reports; a search
evaluates many. The bodies of loops are inlined, so that the operations in them are pieces like all
others, and layers in them that are alike are lowered once.

A sum that is pending passes from the operation that made it through others, up to the one that
executes it. These are a chain: what it costs follows from the assignment of its dimensions alone.
All other operations are chains of one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.meshes.mesh_impl import GATHERED_AHEAD, MeshImpl
from mesh_tensorflow.operations.loop_lowering import scatters_of
from mesh_tensorflow.operations.loops import WhileLoopOperation
from mesh_tensorflow.operations.stacks import is_stack
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.planning import fusion
from mesh_tensorflow.planning.cost_model import StepTime, Work, step_time
from mesh_tensorflow.planning.lowering import (
  Held,
  Lifetimes,
  OperationCost,
  PendingSum,
  Piece,
  State,
  inner_operations,
  trips,
)
from mesh_tensorflow.planning.machine import Machine
from mesh_tensorflow.planning.mesh_impl import (
  Collective,
  PlanMeshImpl,
  allreduce_bytes,
  placeholder,
)
from mesh_tensorflow.planning.pieces import Assignment, Kind, Pieces
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.program.graph import (
  Graph,
  Operation,
  Tensor,
  is_of_one_shape,
  needed_operations,
  read_in_shards,
  reads,
)

# Maximum number of program points at which the memory is bounded.
_MOST_POINTS = 8
# Numbers of a seed, or of a key and a counter.
_MOST_OF_A_SEED = 4


@dataclasses.dataclass
class Memory:
  """Bytes that one processor holds, if operations run in the order of the graph.

  Attributes:
    variables: slices of all variables.
    inputs: slices of what is brought in from outside.
    activations: the most that outputs of operations take at any time.
    peak_operation: the operation at which that is.
    largest: tensors live at the peak, largest first.
    timeline: for each operation, in order, the bytes of activations while it runs.
  """

  variables: int = 0
  inputs: int = 0
  activations: int = 0
  peak_operation: str = ""
  largest: list[Held] = dataclasses.field(default_factory=list)
  timeline: list[Held] = dataclasses.field(default_factory=list)

  @property
  def total(self) -> int:
    return self.variables + self.inputs + self.activations


@dataclasses.dataclass
class Evaluation:
  """A layout of a program, evaluated.

  Attributes:
    graph: the graph.
    mesh_impl: the mesh shape and the layout rules, as a mesh without devices.
    costs: by operation, in order, those inside of loops and branches after these. Of operations
      that no result and no assignment needs there are none.
    memory: of one processor.
    dimension_names: names of the dimensions of all tensors, needed or not.
    fused: returns the costs where elementwise operations are fused.
  """

  graph: Graph
  mesh_impl: PlanMeshImpl
  costs: dict[Operation, OperationCost]
  memory: Memory
  dimension_names: set[str]
  fused: Callable[[], dict[Operation, OperationCost]]

  def costs_on(self, machine: Machine | None) -> dict[Operation, OperationCost]:
    """The costs as a machine has them, which may fuse operations.

    Args:
      machine: the machine, or None.
    """
    fuses = machine is not None and machine.device.fuses_elementwise
    return self.fused() if fuses else self.costs

  def time(self, machine: Machine) -> StepTime:
    """The predicted time of a step on a machine."""
    return step_time(
      (
        (op.work, [(c.kind, c.bytes_over) for c in op.collectives], op.times)
        for op in self.costs_on(machine).values()
      ),
      machine,
      self.mesh_impl.shape,
    )


# -------------------------------------------------------------------------- inlined loops


@dataclasses.dataclass(frozen=True)
class Block:
  """A condition or a body of a loop, or the program.

  Attributes:
    around: number of the block around it.
    place: of its loop there.
    loop: the loop; None for the program.
    times: number of times that the loop runs.
    unbounded: whether a loop around that one has no maximum number of iterations.
  """

  around: int = -1
  place: int = -1
  loop: Operation | None = None
  times: int = 1
  unbounded: bool = False


@dataclasses.dataclass(frozen=True)
class Unit:
  """An operation of a program whose loops are inlined.

  Attributes:
    operation: the operation, or one that stands for a loop's handling of a tensor.
    outputs: its outputs.
    reported: the operation whose cost it is: for the latter the loop.
    reads: tensors that it reads; what stands for them, where they are used inside of a loop.
    times: number of times that it runs.
    unbounded: whether a loop around it has no maximum number of iterations (and counts as one).
    block: the number of the block in which it runs; that of the program is 0.
    place: its place in that block; what a loop itself does is all at the place of the loop.
    uses: whether what it reads must still be there.
    makes: whether what it makes takes room.
  """

  operation: Operation
  outputs: list[Tensor]
  reported: Operation
  reads: list[Tensor]
  times: int = 1
  unbounded: bool = False
  block: int = 0
  place: int = 0
  uses: bool = True
  makes: bool = True


class Inlined:
  """The operations of a program in one list, with those of the bodies of its loops.

  What a loop itself does to its variables and sums is here as operations of their own, in no graph,
  which do to slices what `operations.loop_lowering` does. A loop that keeps something for its
  backward pass stays whole.

  Args:
    operations: of the program, in order.

  Attributes:
    units: in the order in which they run.
    blocks: that of the program is the first.
  """

  def __init__(self, operations: Sequence[Operation]):
    self.units: list[Unit] = []
    self.blocks = [Block()]
    # Tensors that stand for captured ones inside loops.
    self._stands_for: dict[Tensor, Tensor] = {}
    self._add_all(operations, 1, False, 0)

  def _add_all(
    self, operations: Sequence[Operation], times: int, unbounded: bool, block: int
  ) -> None:
    for place, op in enumerate(operations):
      where = {"times": times, "unbounded": unbounded, "block": block, "place": place}
      if isinstance(op, WhileLoopOperation) and _can_be_inlined(op):
        self._inline(op, where)
      else:
        self._add(op, op, where)

  def _add(
    self, op: Operation, reported: Operation, where: Mapping[str, Any], **others: bool
  ) -> None:
    read = [self._stands_for.get(x, x) for x in reads(op)]
    self.units.append(Unit(op, op.outputs, reported, read, **where, **others))

  def _inline(self, loop: WhileLoopOperation, where: Mapping[str, Any]) -> None:
    # Pending sums of captured tensors are executed once, before the first iteration.
    entered = {x: _summed(x) for x in reads(loop)}
    for op in entered.values():
      self._add(op, loop, where, makes=False)
    before, n, body = dict(self._stands_for), loop.num_variables, loop.body
    # By the names under which the blocks know them.
    self._stands_for.update((k, entered[x].outputs[0]) for k, x in loop.known_by.items())
    times = where["times"] * (trips(loop) or 1)
    unbounded = where["unbounded"] or trips(loop) is None
    for part in (loop.condition, body):
      number = len(self.blocks)
      self.blocks.append(
        Block(where["block"], where["place"], loop, where["times"], where["unbounded"])
      )
      self._add_all(part.operations, times, unbounded, number)
      end = {"times": times, "unbounded": unbounded, "block": number, "place": len(part.operations)}
      # The next iteration reads its variables as sums.
      for y in dict.fromkeys(part.outputs[:n]):
        self._add(_summed(y), loop, end, uses=False, makes=False)
    self._stands_for = before
    for i, out in enumerate(loop.outputs):
      self._add(_result(loop, None if i < n else body.outputs[i], out), loop, where)


def _can_be_inlined(loop: WhileLoopOperation) -> bool:
  """True if a loop has variables and sums only: no stacks, no sums that grow row by row."""
  body = loop.body
  return not (
    loop.is_differentiated
    or any(map(is_stack, [*loop.inputs, *body.outputs]))
    or scatters_of(body.operations, body.outputs, loop.num_variables)
  )


class _OfLoop(Operation):
  """Base class of the operations that stand for a loop's handling of one tensor."""

  def __init__(self, inputs: list[Tensor], of: Tensor, out: Tensor | None):
    # Without `Operation.__init__`, which lets nobody use tensors of a body outside of it.
    self._inputs, self._mesh, self._name = inputs, of.mesh, of.name
    self._outputs = [Tensor(self, of.shape, of.dtype) if out is None else out]
    self._initialize_all_dimensions_as_splittable()


class _Summed(_OfLoop):
  """Executes a sum that is pending."""

  def lower(self, lowering: LoweringInProgress) -> None:
    value = lowering.tensors[self._inputs[0]].to_laid_out_tensor()
    lowering.set_tensor_lowering(self._outputs[0], value)


class _Result(_OfLoop):
  """Result of a loop: a variable, or a sum (a pending one if its summands are)."""

  trips = 1

  def accumulated_bytes(self, impl: MeshImpl) -> list[int]:
    """Bytes of each addition to the sum."""
    sums = self._outputs if self._inputs else []
    return [impl.slice_size(x.shape) * x.dtype.size for x in sums] * self.trips

  def lower(self, lowering: LoweringInProgress) -> None:
    impl, out = lowering.mesh_impl(self), self._outputs[0]
    shape = impl.slice_shape(out.shape)
    if not self._inputs:
      value: Any = impl.slicewise(lambda: placeholder(shape, out.dtype))
    else:
      # Sums begin with zeros, each in room of its own.
      zeros = impl.slicewise(lambda: tf.zeros(shape, out.dtype))
      value = impl.slicewise(lambda t: tf.raw_ops.IdentityN(input=[t])[0], zeros)
      summand = lowering.tensors[self._inputs[0]]
      if isinstance(summand, LazyAllreduceSum) and not summand.is_reduced:
        value = LazyAllreduceSum(impl, value, summand.mesh_axes)
    lowering.set_tensor_lowering(out, value)


# By `type.__call__`: that of `Operation` would enter them into the graph of the program.


def _summed(x: Tensor) -> Operation:
  op: Operation = type.__call__(_Summed, [x], x, None)
  return op


def _result(loop: Operation, summand: Tensor | None, out: Tensor) -> Operation:
  op: _Result = type.__call__(_Result, [] if summand is None else [summand], out, out)
  op.trips = trips(loop) or 1
  return op


# ------------------------------------------------------------------------------ evaluation


@dataclasses.dataclass
class Sum:
  """A pending sum.

  Attributes:
    axes: mesh axes.
    bytes: of a slice.
    origin: number of the unit that made it.
    executed: whether it has been executed.
    of_shards: the tensor that is summed, if of its sum only shards are asked for.
  """

  axes: tuple[int, ...]
  bytes: int
  origin: int
  executed: bool = False
  of_shards: Tensor | None = None

  def exchange(self, sizes: Sequence[int]) -> Collective:
    """The exchange that executes it, on mesh axes of these sizes."""
    axes = tuple(a for a in self.axes if sizes[a] > 1)
    over = allreduce_bytes(self.bytes, axes, sizes)
    return Collective("allreduce", "SUM", axes, self.bytes, over)

  def exchanges(self, impl: PlanMeshImpl) -> list[Collective]:
    """The exchanges that execute it, or scatter it."""
    sizes, left, found = impl.shape.to_integer_list, self, []
    cuts = () if self.of_shards is None else impl.cuts_of_shards(self.of_shards.shape)
    for axis, size in cuts:
      n = sizes[axis]
      part = left.bytes // size * -(-size // n)
      if axis in left.axes:
        over = {axis: part * (n - 1)}
        found.append(Collective("reduce_scatter", "SUM", (axis,), part * n, over))
      axes = tuple(a for a in left.axes if a != axis)
      left = dataclasses.replace(left, axes=axes, bytes=part)
    rest = left.exchange(sizes)
    return [*found, rest] if rest.mesh_axes else found


@dataclasses.dataclass
class Step:
  """An operation in the order of the program, with the pending sums that it executes.

  Attributes:
    index: number of the unit.
    piece: what it does.
    given: the states of the tensors that it reads.
    sums: the sums that it executes first.
  """

  index: int
  piece: Piece
  given: tuple[State, ...]
  sums: list[Sum]


@dataclasses.dataclass
class Chain:
  """Operations whose cost depends only on the assignment of their own dimensions.

  Attributes:
    units: numbers of the units.
    dims: names of their dimensions.
    count: number of chains of the program that are alike, this one included.
  """

  units: list[int]
  dims: list[str]
  count: int = 1


class Evaluator:
  """Evaluates layouts of a program.

  Args:
    graph: the graph.
    results: tensors that are exported, or None for those that no operation reads.
    pieces: of other programs that are alike, which must be kept meanwhile; None: new ones.

  Attributes:
    parts: numbers of parts, above 1, into which dimensions will be split, so far as they are known.
    needed: the operations of the graph that a result or an assignment needs.
    units: these, with those of loops in place of the loops.
    kinds: of each unit.
    results: the tensors that are exported.
    dims: sizes of all dimensions, by name.
    conflicts: pairs of names that one tensor has.
    of_seeds: names of dimensions of a few integers alone: states of random numbers.
    others: operations that are not needed.
  """

  def __init__(
    self,
    graph: Graph,
    results: Sequence[Tensor] | None,
    pieces: Pieces | None = None,
  ):
    self.graph, self.parts = graph, list[int]()
    operations = graph.operations
    self.results = probable_results(operations) if results is None else list(dict.fromkeys(results))
    self._results = set(self.results)
    self._in_shards = read_in_shards(operations)
    needed = needed_operations(operations, self.results)
    self.needed: list[Operation] = [op for op in operations if op in needed]
    self._inlined = Inlined(self.needed)
    self.units = self._inlined.units
    self.pieces = Pieces() if pieces is None else pieces
    uses: dict[Tensor, int] = {}
    for op in operations:
      for x in dict.fromkeys(op.inputs):
        uses[x] = uses.get(x, 0) + 1
    self.kinds: list[Kind] = [
      self.pieces.kind(
        u.operation, u.block > 0, any(uses.get(x, 0) > 1 for x in u.operation.inputs)
      )
      for u in self.units
    ]
    self.dims: dict[str, set[int]] = {}
    self.conflicts: set[frozenset[str]] = set()
    of_more: set[str] = set()
    every = (one for op in operations for one in [op, *inner_operations(op)])
    tensors = (x for one in every for x in reads(one) + one.outputs)
    for shape, dtype in dict.fromkeys((x.shape, x.dtype) for x in tensors):
      names = shape.dimension_names
      if not (dtype.is_integer and shape.size <= _MOST_OF_A_SEED):
        of_more.update(names)
      for d in shape:
        self.dims.setdefault(d.name, set()).add(int(d.size))
      self.conflicts.update(frozenset((a, b)) for a in names for b in names if a != b)
    self.of_seeds = set(self.dims) - of_more
    self._consumers: dict[Tensor, list[int]] = {}
    for i, unit in enumerate(self.units):
      for x in unit.reads:
        self._consumers.setdefault(x, []).append(i)
    # Unneeded operations are lowered all the same, so a layout has to suit them.
    self.others = [op for op in operations if op not in needed]
    self._other_kinds = [self.pieces.kind(op) for op in self.others]
    self.variables = [op for op in operations if isinstance(op, Variable)]

  def evaluate(
    self,
    mesh_shape: ShapeLike,
    layout: LayoutLike,
    shard_state: Sequence[str] = (),
    reshard_after_forward: bool = True,
  ) -> Evaluation:
    """Evaluates one layout.

    Args:
      mesh_shape: a shape, of any size.
      layout: layout rules.
      shard_state: mesh dimensions over which variables are stored in shards; see
        `MeshImpl.with_sharded_state`.
      reshard_after_forward: likewise.

    Raises:
      LayoutError: the layout does not suit the program.
    """
    impl = PlanMeshImpl(mesh_shape, layout).with_sharded_state(shard_state, reshard_after_forward)
    try:
      for kind in self._distinct:
        kind.operation.check_layout(impl)
    except LayoutError:
      for op in self.graph.operations:  # The first that it does not suit is named.
        op.check_layout(impl)
      raise
    self.pieces.uneven = impl.uneven_names
    mesh_axes = {m.name: i for i, m in enumerate(impl.shape)}
    axes = {d: mesh_axes[m] for d, m in impl.layout_rules.pairs if m in mesh_axes}
    sizes = impl.shape.to_integer_list
    for op, kind in zip(self.others, self._other_kinds):
      states: tuple[State, ...] = (None,) * len(reads(op))
      if self.pieces.piece(kind, own_part(kind, axes), sizes, states).problem is not None:
        self._fail(op, kind, axes, impl, states)
    steps = []
    for step in self.walk(range(len(self.units)), axes, sizes):
      if step.piece.problem is not None:
        unit, kind = self.units[step.index], self.kinds[step.index]
        self._fail(unit.operation, kind, axes, impl, step.given)
      steps.append(step)
    memory = self._memory(steps, axes, sizes, impl)
    costs = self._costs(steps, impl)
    parts = {d: sizes[a] for d, a in axes.items()}
    fused = functools.cache(lambda: self._costs(steps, impl, parts))
    return Evaluation(self.graph, impl, costs, memory, set(self.dims), fused)

  @functools.cached_property
  def _kernels(self) -> dict[int, list[Tensor]]:
    """See `fusion.kernels`."""
    pieces = [step.piece for step in self.walk(range(len(self.units)), {}, [])]
    return fusion.kernels(self.units, pieces, self.results)

  def fused(self, step: Step, work: Work, parts: Mapping[str, int]) -> Work:
    """The work of an operation as, or inside of, a kernel of elementwise operations.

    Args:
      step: the operation.
      work: of itself.
      parts: by name of a dimension into how many it is split.
    """
    moved = self._kernels.get(step.index)
    if moved is None or not step.piece.is_local:
      return work
    return Work([], sum(fusion.bytes_of(x, parts) for x in moved), min(work.launches, bool(moved)))

  @functools.cached_property
  def _distinct(self) -> list[Kind]:
    """The kinds of all operations, each once."""
    return list(dict.fromkeys([*self.kinds, *self._other_kinds]))

  def memory(self, layout: dict[str, int], sizes: Sequence[int]) -> Memory:
    """The memory of one device.

    Args:
      layout: mesh axis by dimension name.
      sizes: of the mesh axes.
    """
    return self._memory(self.walk(range(len(self.units)), layout, sizes), layout, sizes)

  def walk(
    self, indices: Sequence[int], layout: dict[str, int], sizes: Sequence[int]
  ) -> Iterator[Step]:
    """The operations of a chain (or of the program) under a layout, in order.

    Args:
      indices: numbers of their units.
      layout: mesh axis by dimension name.
      sizes: of the mesh axes.

    Yields:
      Steps; the last may have a piece with a `problem`.
    """
    states: dict[Tensor, Sum] = {}
    chosen = set(indices)
    # By kind and states: equal layers are looked up once.
    pieces: dict[tuple[int, tuple[State, ...]], Piece] = {}
    for i in indices:
      read, kind = self.units[i].reads, self.kinds[i]
      sums = [states.get(x) for x in read]
      given = tuple([None if s is None else PendingSum(s.axes, s.executed) for s in sums])
      piece = pieces.get((kind.number, given))
      if piece is None:
        piece = self.pieces.piece(kind, own_part(kind, layout), sizes, given)
        pieces[kind.number, given] = piece
      step = Step(i, piece, given, [])
      for j in piece.executed:
        _execute(sums[j], step, read[j] if read[j] in self._in_shards else None)
      if piece.problem is not None:
        yield step
        return
      outputs = self.units[i].outputs if any(given) or any(piece.states) else ()
      for j, out in enumerate(outputs):
        same, state = piece.same[j], piece.states[j]
        source = sums[same] if same is not None else None
        if source is not None:
          states[out] = source
        elif state is not None:
          # A sum of sums belongs to the operation that made the first; that of a loop to the loop.
          unit = self.units[i]
          origins = [s.origin for s in sums if s is not None and not s.executed]
          own = not origins or unit.reported is not unit.operation
          states[out] = Sum(state.axes, piece.pending[j], i if own else origins[0])
        # Consumers outside the chain execute the pending sums that reach them.
        if out in states and (out in self._results or self._is_read_outside(out, chosen)):
          _execute(states[out], step)
      yield step

  def _is_read_outside(self, x: Tensor, chosen: set[int]) -> bool:
    return any(c not in chosen for c in self._consumers.get(x, ()))

  def _fail(
    self,
    op: Operation,
    kind: Kind,
    layout: dict[str, int],
    impl: PlanMeshImpl,
    states: Sequence[State],
  ) -> NoReturn:
    """Raises the error of an operation that a layout does not suit, with the names of the mesh."""
    assignment = own_part(kind, layout)
    uneven = impl.uneven_names
    e = self.pieces.prober.piece(
      op, impl.shape, assignment, states, kind.in_loop, uneven=uneven
    ).problem
    assert e is not None
    raise e

  def _costs(
    self, steps: Sequence[Step], impl: PlanMeshImpl, fused_in: Mapping[str, int] | None = None
  ) -> dict[Operation, OperationCost]:
    """The costs of operations; fused, if it is given into how many parts dimensions are split."""
    costs: dict[Operation, OperationCost] = {}
    repeated: dict[Hashable, int] = {}

    def cost_of(op: Operation, times: int, unbounded: bool, alike: Hashable) -> OperationCost:
      if op not in costs:
        cost = OperationCost(op.name, type(op).__name__, times=times, in_unbounded_loop=unbounded)
        if alike not in repeated:
          repeated[alike] = _repeated(op, impl)
        cost.repeated = repeated[alike]
        costs[op] = cost
      return costs[op]

    for step in steps:
      unit = self.units[step.index]
      block = self._inlined.blocks[unit.block]
      if block.loop is not None:  # A loop comes before its operations.
        cost_of(block.loop, block.times, block.unbounded, block.loop)
      members = [unit.reported, *inner_operations(unit.operation)]
      for member, one in zip(step.piece.members, step.piece.costs):
        unbounded = unit.unbounded or one.in_unbounded_loop
        own = member or unit.reported is unit.operation
        alike = (self.kinds[step.index].number, member) if own else unit.reported
        cost = cost_of(members[member], unit.times * one.times, unbounded, alike)
        cost.collectives += one.collectives
        cost.work.add(one.work if fused_in is None else self.fused(step, one.work, fused_in))
      for s in step.sums:
        costs[self.units[s.origin].reported].collectives += s.exchanges(impl)
    for v, uses in self._gathered(impl).items():
      if v in costs:
        costs[v].collectives += _gathers(v, impl) * (
          sum(u.times for u in uses) if impl.reshards_after_forward else 1
        )
    for op, cost in costs.items():
      cost.flops = cost.work.flops or _vector_product_flops(op, cost.repeated, impl)
    return costs

  def _gathered(self, impl: PlanMeshImpl) -> dict[Variable, list[Unit]]:
    """The variables that are gathered from shards, and the units for which they are."""
    values = {v.value: v for v in self.variables if impl.cuts_of_shards(v.shape)}
    found: dict[Variable, list[Unit]] = {}
    for unit in self.units if values else ():
      for x in unit.reads:
        # What updates a weight takes its shards.
        op = unit.operation
        if x in values and not (op.reads_shards or is_of_one_shape(op)):
          found.setdefault(values[x], []).append(unit)
    return found

  def _memory(
    self,
    steps: Iterator[Step] | Sequence[Step],
    layout: dict[str, int],
    sizes: Sequence[int],
    impl: PlanMeshImpl | None = None,
  ) -> Memory:
    blocks, inputs = self._lifetimes(steps, layout, sizes, impl)
    memory, peak = Memory(inputs=inputs), 0
    for i, (op, now) in enumerate(zip(self.needed, blocks[0].live_bytes(len(self.needed)))):
      memory.timeline.append(Held(op.name, now))
      if now > memory.activations:
        memory.activations, memory.peak_operation, peak = now, op.name, i
    live = [Held(x.name, n) for x, n in self._live_at(0, peak, blocks)]
    memory.largest = sorted(live, key=lambda held: -held.bytes)
    memory.variables = sum(
      bytes_of_variable(v) // math.prod(sizes[layout[d.name]] for d in v.shape if d.name in layout)
      for v in self.variables
    )
    if impl is not None and (impl.state_dims or impl.uneven_names):
      memory.variables = sum(
        v.stored_impl(impl).slice_size(v.shape) * v.slice_dtype.size for v in self.variables
      )
    return memory

  def _lifetimes(
    self,
    steps: Iterator[Step] | Sequence[Step],
    layout: dict[str, int],
    sizes: Sequence[int],
    impl: PlanMeshImpl | None,
  ) -> tuple[list[Lifetimes], int]:
    """The buffers of each block, the program's first; and the bytes of inputs."""
    blocks = [Lifetimes() for _ in self._inlined.blocks]
    # Unused inputs take memory all the same.
    inputs = sum(
      self.pieces.piece(kind, own_part(kind, layout), sizes, ()).inputs
      for op, kind in zip(self.others, self._other_kinds)
      if not op.inputs
    )
    # By tensor: its block, and the key of its buffer there.
    place: dict[Tensor, tuple[int, object]] = {}
    scattered: list[Tensor] = []
    # Gathers of weights in the backward pass wait for what was computed before; so no sum waits.
    early = impl is not None and bool(impl.state_dims) and impl.reshards_after_forward
    waits = frozenset() if early else frozenset(a for a, n in enumerate(sizes) if n > 1)
    for step in steps:
      unit = self.units[step.index]
      inputs += step.piece.inputs
      _add_unit(unit, step, blocks[unit.block], place, waits)
      scattered += [s.of_shards for s in step.sums if s.of_shards is not None]
    for x in self.results:
      if x in place:
        blocks[0].use(place[x][1], len(self.needed) - 1)
    if impl is not None and impl.state_dims:
      self._add_shards(impl, blocks, place, scattered)
    # From the inside outwards: a body takes its room while its loop runs.
    for number in range(len(blocks) - 1, 0, -1):
      block = self._inlined.blocks[number]
      inside = blocks[block.around].inside
      inside[block.place] = max(inside.get(block.place, 0), blocks[number].peak)
    return blocks, inputs

  def _add_shards(
    self,
    impl: PlanMeshImpl,
    blocks: list[Lifetimes],
    place: Mapping[Tensor, tuple[int, object]],
    scattered: Sequence[Tensor],
  ) -> None:
    """Adds gathered weights, and leaves of sums that are scattered a shard each."""
    made = {x: u.place for u in self.units for x in u.outputs}
    # What is computed of shards is a shard.
    products = {
      x
      for u in self.units
      if is_of_one_shape(u.operation) and self._in_shards & set(u.operation.inputs)
      for x in u.outputs
      if x in self._in_shards and x not in scattered
    }
    for x in [*scattered, *products]:
      if x in place:
        block, key = place[x]
        last_whole = made[x] - (x in products)
        size = impl.stored_layout(x.shape).slice_size(x.shape) * x.dtype.size
        blocks[block].cut(key, last_whole, size)
    for v, uses in self._gathered(impl).items():
      size = impl.slice_size(v.shape) * v.activation_dtype.size
      for i, unit in enumerate(uses):
        block, first, last = unit.block, max(0, unit.place - GATHERED_AHEAD), unit.place
        if not impl.reshards_after_forward:
          # Once, outside of loops, and kept to the last use: a product of the backward pass, before
          # which the other one, which makes the gradient of the weight, may run.
          first, last = unit.place, unit.place + 1
          while block:
            block, first = self._inlined.blocks[block].around, self._inlined.blocks[block].place
          i = 0
        key = blocks[block].add(("gathered", v, i), first, size, v.value)
        blocks[block].use(key, last if block == unit.block else first)

  def _live_at(
    self, number: int, point: int, blocks: Sequence[Lifetimes]
  ) -> Iterator[tuple[Tensor, int]]:
    """Yields the live tensors and their bytes at a point of a block.

    If a loop runs at that point, those of its body at its peak are among them.
    """
    yield from blocks[number].live_at(point)
    bodies = [
      (blocks[i].peak, i)
      for i, block in enumerate(self._inlined.blocks)
      if (block.around, block.place) == (number, point)
    ]
    if bodies:
      peak, i = max(bodies)
      if peak:
        yield from self._live_at(i, blocks[i].live_bytes().index(peak), blocks)

  # ------------------------------------------------------------------------ for searches

  @functools.cached_property
  def forbidden(self) -> dict[str, str]:
    """For a dimension why no layout may split it."""
    return self._probed[0]

  @functools.cached_property
  def chains(self) -> list[Chain]:
    """The chains of the program; of those that are alike, one, with its `count`."""
    leader = list(range(len(self.units)))

    def find(i: int) -> int:
      while leader[i] != i:
        leader[i] = leader[leader[i]]
        i = leader[i]
      return i

    maker = {x: i for i, unit in enumerate(self.units) for x in unit.outputs}
    for i, unit in enumerate(self.units):
      if any(x in self._pending for x in unit.outputs):
        for x in unit.reads:
          if x in self._pending and x in maker:
            leader[find(i)] = find(maker[x])
    groups: dict[int, list[int]] = {}
    for i in range(len(self.units)):
      groups.setdefault(find(i), []).append(i)
    alike: dict[Hashable, Chain] = {}
    for indices in groups.values():
      key = self._chain_key(indices)
      if key in alike:
        alike[key].count += 1
      else:
        names = sorted({d for i in indices for d in self.kinds[i].dims})
        alike[key] = Chain(indices, names)
    return list(alike.values())

  @functools.cached_property
  def _probed(self) -> tuple[dict[str, str], dict[int, list[bool]]]:
    """Each dimension of each kind split alone: what forbids it, and which outputs are pending."""
    forbidden: dict[str, str] = {}
    made: dict[int, list[bool]] = {}
    for kind in self._distinct:
      read = reads(kind.operation)
      made[kind.number] = [False] * len(kind.operation.outputs)
      for name in sorted(kind.dims):
        # By one that will be asked for, nothing is lowered twice.
        suits = (n for n in self.parts if all(size % n == 0 for size in kind.dims[name]))
        factor = next(suits, 0) or kind.smallest_factor([name])
        if not factor:
          continue
        piece = self.pieces.piece(kind, ((name, 0),), (factor,), (None,) * len(read))
        if piece.problem is not None:
          forbidden.setdefault(name, str(piece.problem))
        else:
          made[kind.number] = [a or s is not None for a, s in zip(made[kind.number], piece.states)]
    return forbidden, made

  @functools.cached_property
  def _pending(self) -> set[Tensor]:
    """Tensors whose sum may be pending."""
    pending: set[Tensor] = set()
    for unit, kind in zip(self.units, self.kinds):
      outputs = unit.outputs
      given: tuple[State, ...] = tuple(
        PendingSum((0,)) if x in pending else None for x in unit.reads
      )
      passed = [False] * len(outputs)
      if any(given):
        piece = self.pieces.piece(kind, (), (2,), given)
        if piece.problem is None:
          passed = [s is not None for s in piece.states]
      for out, made, is_passed in zip(outputs, self._probed[1][kind.number], passed):
        if made or is_passed:
          pending.add(out)
    return pending

  def _chain_key(self, indices: Sequence[int]) -> Hashable:
    chosen = set(indices)
    places: dict[Tensor, tuple[int, int]] = {}
    key: list[Hashable] = []
    for n, i in enumerate(indices):
      inside = tuple(places.get(x) for x in self.units[i].reads)
      left = []
      for j, x in enumerate(self.units[i].outputs):
        places[x] = (n, j)
        outside = x in self._results or self._is_read_outside(x, chosen)
        left.append(x in self._pending and outside)
      key.append((self.kinds[i].number, self.units[i].times, inside, tuple(left)))
    return tuple(key)

  @functools.cached_property
  def bound_amounts(self) -> tuple[list[frozenset[str]], np.ndarray]:
    """Sets of dimensions, and live bytes by program point and set, with nothing split.

    Splitting only divides a buffer: a layout that communicates has more buffers, not fewer.
    """
    blocks, _ = self._lifetimes(self.walk(range(len(self.units)), {}, []), {}, [], None)
    count = len(self.needed)
    live = blocks[0].live_bytes(count)
    step = max(1, -(-count // _MOST_POINTS))
    points = [
      max(range(b, min(b + step, count)), key=lambda i: live[i]) for b in range(0, count, step)
    ]
    variables = [(v.value, bytes_of_variable(v)) for v in self.variables]
    rows: list[dict[frozenset[str], int]] = []
    for point in points or [-1]:
      row: dict[frozenset[str], int] = {}
      for x, size in [*variables, *self._live_at(0, point, blocks)]:
        names = frozenset(x.shape.dimension_names)
        row[names] = row.get(names, 0) + size
      rows.append(row)
    sets = list(dict.fromkeys(names for row in rows for names in row))
    return sets, np.array([[row.get(names, 0) for names in sets] for row in rows], float)


def _execute(pending: Sum | None, step: Step, of_shards: Tensor | None = None) -> None:
  if pending is not None and not pending.executed:
    pending.executed = True
    pending.of_shards = of_shards
    step.sums.append(pending)


def _gathers(v: Variable, impl: PlanMeshImpl) -> list[Collective]:
  """The exchanges that gather a variable from its shards."""
  sizes = impl.shape.to_integer_list
  size = impl.stored_layout(v.shape).slice_size(v.shape) * v.activation_dtype.size
  found = []
  for a, whole in impl.cuts_of_shards(v.shape):
    found.append(Collective("allconcat", "", (a,), size, {a: (sizes[a] - 1) * size}))
    size = size // -(-whole // sizes[a]) * whole
  return found


def _add_unit(
  unit: Unit,
  step: Step,
  block: Lifetimes,
  place: dict[Tensor, tuple[int, object]],
  waits: frozenset[int],
) -> None:
  """Adds the buffers that an operation uses and makes to its block; enters them in `place`.

  Args:
    unit: the operation.
    step: what is known of it under the layout.
    block: the buffers of its block.
    place: block and buffer of each tensor.
    waits: mesh axes sums over which are not computed as soon as they can be.
  """
  piece, now = step.piece, unit.place
  if piece.inside:
    block.inside[now] = piece.inside
  if unit.uses:
    used = [place[x][1] for x in unit.reads if x in place and place[x][0] == unit.block]
    if not unit.outputs and not any(waits & set(s.axes) for s in step.given if s):
      now = block.last_made(used, now)
    for key in used:
      block.use(key, now)
  if not unit.makes:
    return
  for j, out in enumerate(unit.outputs):
    kind, n = piece.buffers[j]
    if kind == "new":
      place[out] = unit.block, block.add((step.index, j), now, n, out)
    elif kind == "reduced":
      key = ("reduced", unit.reads[n])
      place[out] = unit.block, block.add(key, now, piece.pending[j], out)
    elif kind != "elsewhere":
      source = unit.reads[n] if kind == "input" else unit.outputs[n]
      if source in place:
        place[out] = place[source]


def probable_results(operations: Sequence[Operation]) -> list[Tensor]:
  """Tensors that no operation reads.

  If the program assigns variables, gradients that were not used are by-products.
  """
  read = {x for op in operations for x in reads(op)}
  assigns = any(not op.outputs for op in operations)
  return [
    x
    for op in operations
    if not (assigns and "/gradients/" in op.name)
    for x in op.outputs
    if x not in read
  ]


def own_part(kind: Kind, layout: dict[str, int]) -> Assignment:
  """The part of a layout that concerns an operation.

  Args:
    kind: of the operation.
    layout: mesh axis by dimension name.
  """
  return tuple((d, layout[d]) for d in kind.names if d in layout)


def bytes_of_variable(v: Variable) -> int:
  """Bytes of a whole variable."""
  return int(v.size) * int(v.slice_dtype.size)


def most_parts(
  names: Iterable[str],
  layout: Mapping[str, int | None],
  domains: Mapping[str, set[int]],
  sizes: Sequence[int],
) -> int:
  """Maximum number of parts that a tensor of these dimensions can be split into.

  Args:
    names: of its dimensions.
    layout: by name of each decided dimension the mesh axis that splits it, or None.
    domains: by name of a dimension the mesh axes that may split it.
    sizes: of the mesh axes.
  """
  axes: set[int] = set()
  for name in names:
    if name in layout:
      axis = layout[name]
      if axis is not None:
        axes.add(axis)
    else:
      axes |= domains.get(name, set())
  return math.prod(sizes[a] for a in axes)


def _repeated(op: Operation, impl: PlanMeshImpl) -> int:
  """Number of processors that compute the same part of an operation."""
  dims = {d for x in op.inputs + op.outputs for d in x.shape}
  axes = {impl.tensor_dimension_to_mesh_axis(d) for d in dims}
  return int(impl.size) // math.prod(int(impl.shape[a].size) for a in axes if a is not None)


def _vector_product_flops(op: Operation, repeated: int, impl: PlanMeshImpl) -> int:
  """FLOPs of a matrix-vector product, which is lowered to a multiply and a sum; else 0."""
  if type(op).__name__ != "EinsumOperation" or len(op.inputs) < 2:
    return 0
  dims = {d for x in op.inputs for d in x.shape}
  if not dims - {d for x in op.outputs for d in x.shape}:
    return 0
  return 2 * math.prod(d.size for d in dims) * repeated // impl.size
