"""Lowering of one operation on symbolic slices, and what one processor does and holds in it.

The cost of a whole program is the sum of such pieces, as its lowering goes through its operations
one by one. The only thing that passes between them, besides slices, are sums that are pending.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from mesh_tensorflow.errors import MeshError
from mesh_tensorflow.meshes.contract import LaidOutVariable
from mesh_tensorflow.meshes.laid_out import LaidOut, LaidOutTensor, LazyAllreduceSum
from mesh_tensorflow.meshes.layout import UNEVEN, LayoutRules
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import constants
from mesh_tensorflow.operations.loop_lowering import scatters_of
from mesh_tensorflow.operations.loops import WhileLoopOperation
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.planning.cost_model import Product, Work
from mesh_tensorflow.planning.mesh_impl import Collective, PlanMeshImpl, placeholder
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Graph, Mesh, Operation, Tensor, reads
from mesh_tensorflow.running.lowering import Lowering, Seed

# Number of operations after which a new scratch graph is used, to free memory.
_MOST_IN_A_GRAPH = 2000

# Operations whose output is the buffer of their input.
_ALIASES = ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "EnsureShape")


class PendingSum(NamedTuple):
  """State of a tensor that is the sum of slices over mesh axes.

  Attributes:
    axes: the mesh axes.
    executed: whether it has been summed. (The slices are still there: a sum with others that are
      pending over the same axes is pending again.)
  """

  axes: tuple[int, ...]
  executed: bool = False


# The state of a tensor that an operation reads or makes: None for slices that are ready.
State = PendingSum | None


# ------------------------------------------------------------------------------- memory


class Held(NamedTuple):
  """A tensor in memory, and the bytes of its slice."""

  name: str
  bytes: int


class Lifetimes:
  """Buffers of a block of operations, each live from its creation to its last use.

  Attributes:
    inside: by program point the bytes that the operation there takes while it runs, for a body or
      for its kernels.
  """

  def __init__(self) -> None:
    self._buffers: dict[object, tuple[int, int, int, Tensor]] = {}
    self.inside: dict[int, int] = {}

  def add(self, key: object, point: int, size: int, x: Tensor) -> object:
    """Adds a buffer that a tensor is made in, if there is none of this key; returns the key."""
    self._buffers.setdefault(key, (point, point, size, x))
    return key

  def use(self, key: object, point: int) -> None:
    """Extends the lifetime of a buffer, if there is one of this key."""
    if key in self._buffers:
      first, last, size, x = self._buffers[key]
      self._buffers[key] = first, max(last, point), size, x

  def last_made(self, keys: Sequence[object], otherwise: int) -> int:
    """The program point at which the last of some buffers is made.

    An update runs then: as soon as its gradient is there, and leaves nothing of it. But gradients
    that are summed over processors first pile up (measured: benchmarks/memory.py).

    Args:
      keys: of buffers; there may be none of a key.
      otherwise: what is returned if there are none.
    """
    made = [self._buffers[key][0] for key in keys if key in self._buffers]
    return max(made, default=otherwise)

  def cut(self, key: object, point: int, left: int) -> None:
    """Leaves of a buffer a part only, behind a program point.

    Args:
      key: of the buffer; there may be none.
      point: the last one at which it is whole, if it is there.
      left: bytes of the part.
    """
    if key not in self._buffers:
      return
    first, last, size, x = self._buffers[key]
    if point < first:
      self._buffers[key] = first, last, left, x
    elif point < last:
      self._buffers[key] = first, point, size, x
      self._buffers["part", key] = point + 1, last, left, x

  def live_bytes(self, min_length: int = 0) -> list[int]:
    """Live bytes at each program point, padded to min_length points."""
    last_uses = [last for _, last, _, _ in self._buffers.values()]
    length = max([min_length, *(point + 1 for point in [*last_uses, *self.inside])])
    change = [0] * (length + 1)
    for first, last, size, _ in self._buffers.values():
      change[first] += size
      change[last + 1] -= size
    live = itertools.accumulate(change[:length])
    return [n + self.inside.get(i, 0) for i, n in enumerate(live)]

  @property
  def peak(self) -> int:
    """The most live bytes at any point."""
    return max(self.live_bytes(), default=0)

  def live_at(self, point: int) -> list[tuple[Tensor, int]]:
    """The tensors that are live at a program point, with the bytes of their buffers."""
    return [(x, n) for first, last, n, x in self._buffers.values() if first <= point <= last]


def planned_slice(lowering: Lowering, x: Tensor) -> tf.Tensor:
  """The slice of a tensor, without executing a pending sum."""
  laid_out = lowering.tensors[x]
  if isinstance(laid_out, LazyAllreduceSum):
    laid_out = laid_out.laid_out_input
  value = tf.convert_to_tensor(laid_out.to_laid_out_tensor().one_slice)
  # Slices that were imported ready may be eager; in the scratch graph they have an operation.
  return value if hasattr(value, "graph") else tf.identity(value)


def bytes_held(lowering: Lowering, x: Tensor) -> int:
  """Bytes of the buffer of a tensor's slice; of a stack, those of its elements.

  The slice tells the size, not the buffer at its base: an element taken from a stack has a shape
  only from the `EnsureShape` behind it, which, as all aliases, keeps the number of elements.

  Args:
    lowering: a lowering of the tensor onto a `PlanMeshImpl`.
    x: the tensor.
  """
  if x.stack_of is not None:
    return int(x.stack_of.bytes_of_slice(lowering.mesh_impl(x)))
  value = planned_slice(lowering, x)
  return int(value.shape.num_elements()) * int(base(value).dtype.size)


def base(x: tf.Tensor) -> tf.Tensor:
  """The tensor whose buffer x uses."""
  while x.op.type in _ALIASES:
    x = x.op.inputs[0]
  return x


def lifetimes(
  lowering: Lowering, operations: Sequence[Operation], results: Sequence[Tensor] = ()
) -> Lifetimes:
  """The buffers that lowered operations make; inputs and variables are not among them.

  Args:
    lowering: a lowering of the operations onto a `PlanMeshImpl`.
    operations: in the order in which they run.
    results: tensors that are held to the end.
  """
  held_elsewhere = {
    x.ref()
    for impl in set(lowering.mesh_to_impl.values())
    if isinstance(impl, PlanMeshImpl)
    for x in impl.inputs + impl.variable_reads
  }
  result = Lifetimes()
  for i, op in enumerate(operations):
    keys = {
      x: key
      for x in [*reads(op), *op.outputs]
      if x in lowering.tensors
      and (key := base(planned_slice(lowering, x)).ref()) not in held_elsewhere
    }
    used = [key for x, key in keys.items() if x not in op.outputs]
    last = i
    if not op.outputs and not any(_is_summed(lowering, x) for x in reads(op)):
      last = result.last_made(used, i)
    for key in used:
      result.use(key, last)
    for x in op.outputs:
      if x in keys:
        result.add(keys[x], i, bytes_held(lowering, x), x)
  for x in results:
    result.use(base(planned_slice(lowering, x)).ref(), len(operations) - 1)
  return result


def _is_summed(lowering: Lowering, x: Tensor) -> bool:
  """True if a tensor is a sum over several processors."""
  value = lowering.tensors.get(x)
  if not isinstance(value, LazyAllreduceSum):
    return False
  return any(lowering.mesh_impl(x).shape[a].size > 1 for a in value.mesh_axes)


# ------------------------------------------------------------------------------- loops


def trips(op: Operation) -> int | None:
  """Maximum number of times that the body of an operation runs; None if not known.

  Args:
    op: a loop, or another operation that has a body.
  """
  most = getattr(op, "maximum_iterations", None)
  return most if isinstance(most, int) else None


def inner_operations(op: Operation) -> list[Operation]:
  """The operations of the bodies of an operation, and of bodies in these.

  Args:
    op: an operation.
  """
  inner = list(getattr(op, "inner_operations", ()))
  return [x for one in inner for x in [one, *inner_operations(one)]]


def _accumulated_bytes(op: Operation, impl: MeshImpl) -> list[int]:
  """Bytes of each addition to an accumulator that a loop does outside of its body."""
  told = getattr(op, "accumulated_bytes", None)
  if told is not None:
    return list(told(impl))
  if not isinstance(op, WhileLoopOperation):
    return []
  added = scatters_of(op.body.operations, op.body.outputs, op.num_variables)
  sums = [x for i, x in enumerate(op.body.outputs) if i >= op.num_variables and i not in added]
  return [impl.slice_size(x.shape) * x.dtype.size for x in sums] * (trips(op) or 1)


# ------------------------------------------------------------------------------- costs


@dataclasses.dataclass
class OperationCost:
  """Cost of one operation on one processor.

  Attributes:
    name: of the operation.
    type: name of its class.
    flops: two for each multiply-add of its matrix products and convolutions.
    repeated: on how many processors each part of its work is done.
    collectives: its exchanges. That of a pending sum belongs to the operation that made the sum.
    times: how often it runs: the product of the maximum numbers of iterations of the loops
      around it. All else is for one run.
    in_unbounded_loop: whether a loop around it has no such number (counted as one iteration).
    work: its products, bytes and launches, as a machine is timed by.
  """

  name: str
  type: str
  flops: int = 0
  repeated: int = 1
  collectives: list[Collective] = dataclasses.field(default_factory=list)
  times: int = 1
  in_unbounded_loop: bool = False
  work: Work = dataclasses.field(default_factory=Work)

  def bytes_over(self) -> dict[int, int]:
    """For each mesh axis the bytes that one processor sends along it, in all runs."""
    total: dict[int, int] = {}
    for c in self.collectives:
      for axis, n in c.bytes_over.items():
        total[axis] = total.get(axis, 0) + n * self.times
    return total


class _Made(dict[Any, Any]):
  """A dict that makes missing entries: the lowerings of operations before the probed one."""

  def __init__(self, make: Any):
    super().__init__()
    self._make = make

  def __missing__(self, key: Any) -> Any:
    self[key] = self._make(key)
    return self[key]

  def copy(self) -> _Made:
    result = _Made(self._make)
    result.update(self)
    return result


class PlanLowering(Lowering):
  """A lowering that tells a recorder about every operation."""

  def __init__(
    self, graph: Graph, mesh_to_impl: dict[Mesh, MeshImpl], recorder: Recorder, seed: Seed
  ):
    self.recorder = recorder
    # Of the graph that it lowers into; a body has its own.
    self._constants: dict[Any, tf.Tensor] = {}
    super().__init__(graph, mesh_to_impl, seed=seed)

  def lower_operations(self, operations: Iterable[Operation]) -> None:
    operations = list(operations)
    for op in operations:
      self.recorder.begin(op)
      with constants.of_one_graph(self._constants):
        self._lower_operation(op)
      self.recorder.end(op, self)
    self.recorder.end_block(operations, self)

  def alone(
    self,
    mesh_to_impl: dict[Mesh, MeshImpl],
    recorder: Recorder,
    seed: Seed,
    in_loop: bool,
    made: dict[Any, tf.Tensor] | None = None,
  ) -> PlanLowering:
    """A lowering that has lowered nothing, for other meshes: cheaper than a new one.

    Args:
      mesh_to_impl: dict from each `Mesh` to a `PlanMeshImpl`.
      recorder: recorder of its operations.
      seed: what random operations depend on.
      in_loop: whether they depend on the number of an iteration, too.
      made: constants that the graph has already; see `constants.of_one_graph`.
    """
    result = self.child()
    if made is not None:
      result._constants = made
    result.mesh_to_impl, result.recorder, result._seed = mesh_to_impl, recorder, seed
    result._loop_key = _scalar(recorder.impl, tf.int32) if in_loop else None
    result.variables, result.operations, result._counters = {}, {}, []
    return result

  # A program, and an iteration of a loop, make a key of some scalars once, for all their random
  # operations: it is no part of what one of these costs, which is the same alone and among others.

  def child(
    self, loop_key: LaidOutTensor | None = None, impl: MeshImpl | None = None
  ) -> PlanLowering:
    result = super().child(loop_key, impl)
    assert isinstance(result, PlanLowering)
    result._constants = {}
    if loop_key is not None:
      result._loop_key = _scalar(self.recorder.impl, tf.int32)
    if isinstance(self.tensors, _Made):
      result.tensors = self.tensors.copy()
    return result

  def _base_key(self, impl: Any) -> Any:
    if impl not in self._base_keys:
      self._base_keys[impl] = _scalar(impl, tf.uint32)
    return self._base_keys[impl]

  def set_tensor_lowering(self, tensor: Tensor, laid_out: LaidOut) -> None:
    super().set_tensor_lowering(tensor, laid_out)
    if isinstance(laid_out, LazyAllreduceSum):
      self.recorder.add_pending(tensor.operation, laid_out, self)


def _scalar(impl: PlanMeshImpl, dtype: tf.DType) -> Any:
  return impl.slicewise(lambda: impl.placeholder([], dtype))


class Recorder:
  """Attributes exchanges, TensorFlow nodes and memory to operations.

  Attributes:
    costs: by operation, those inside of others after these.
    inside: bytes that operations take while they run: of their bodies, or kernel workspace.
  """

  def __init__(self, impl: PlanMeshImpl):
    self.impl = impl
    self.costs: dict[Operation, OperationCost] = {}
    self.inside: dict[Operation, int] = {}
    # By identity of the slices that wait for their sum: the slices, and whose sum it is.
    self._pending: dict[int, tuple[Any, Operation]] = {}
    self._executed: set[int] = set()
    self._recorded = 0
    self._seen_nodes: set[Any] = set()
    self._stack: list[Operation] = []

  def begin(self, op: Operation) -> None:
    cost = OperationCost(op.name, type(op).__name__)
    for bound in map(trips, self._stack):
      cost.times *= 1 if bound is None else bound
      cost.in_unbounded_loop |= bound is None
    self.costs.setdefault(op, cost)
    self._stack.append(op)

  def end(self, op: Operation, lowering: Lowering) -> None:
    self._stack.pop()
    self.attribute(op)
    work = self.costs[op].work
    self._add_new_nodes(work, [planned_slice(lowering, x) for x in _lowered(op.outputs, lowering)])
    # Products in a TensorFlow loop, whose number only the operation knows.
    told = getattr(op, "products_of_slice", None)
    if told is not None:
      work.products += [Product(*p) for p in told(self.impl)]
    workspace = getattr(op, "workspace_of_slice", None)
    if workspace is not None:
      self.inside[op] = self.inside.get(op, 0) + workspace(self.impl)
    # Additions in a loop are not reachable from nodes outside of it: counted here.
    for n in _accumulated_bytes(op, self.impl):
      work.traffic += 3 * n
      work.launches += 1
    if not op.outputs:
      # An assignment, which makes no nodes here: two reads and a write of each slice.
      slices = [planned_slice(lowering, x) for x in _lowered(op.inputs, lowering)]
      work.traffic += 3 * sum(map(_bytes_of, slices))
      work.launches += len(slices)

  def end_block(self, operations: Sequence[Operation], lowering: Lowering) -> None:
    """Records the peak memory of the body of an operation."""
    if self._stack:
      block = lifetimes(lowering, operations)
      block.inside = {i: self.inside[op] for i, op in enumerate(operations) if op in self.inside}
      outer = self._stack[-1]
      self.inside[outer] = max(block.peak, self.inside.get(outer, 0))

  def add_pending(self, op: Operation, pending: LazyAllreduceSum, lowering: Lowering) -> None:
    """Records which operation made a pending sum, tracing it back through local operations."""
    origin = op
    for x in op.inputs:
      source = lowering.tensors.get(x)
      if isinstance(source, LazyAllreduceSum) and id(source.laid_out_input) in self._pending:
        if id(source.laid_out_input) not in self._executed:
          origin = self._pending[id(source.laid_out_input)][1]
          break
    self._pending[id(pending.laid_out_input)] = (pending.laid_out_input, origin)

  def attribute(self, op: Operation) -> None:
    """Attributes the exchanges since the last call: to `op`, or to who made the pending sum."""
    new = self.impl.collectives[self._recorded :]
    self._recorded = len(self.impl.collectives)
    for c in new:
      self._executed.add(id(c.source))
      _, owner = self._pending.get(id(c.source), (None, op))
      self.costs[owner].collectives.append(c)
      assert c.source is not None
      self._add_new_nodes(self.costs[owner].work, [c.source.one_slice])

  def leave_out(self, roots: Sequence[tf.Tensor]) -> None:
    """Counts the TensorFlow nodes that lead to the roots for no operation."""
    self._add_new_nodes(Work(), roots)

  def _add_new_nodes(self, work: Work, roots: Sequence[tf.Tensor]) -> None:
    """Adds the TensorFlow nodes that lead to the roots and were not counted yet."""
    waiting = [x.op for x in roots if hasattr(x, "graph")]
    while waiting:
      node = waiting.pop()
      if node not in self._seen_nodes:
        self._seen_nodes.add(node)
        work.add_node(node)
        waiting += [x.op for x in node.inputs]


def _lowered(tensors: Sequence[Tensor], lowering: Lowering) -> list[Tensor]:
  return [x for x in tensors if x in lowering.tensors]


def _bytes_of(x: tf.Tensor) -> int:
  return int(x.shape.num_elements()) * int(x.dtype.size)


# ------------------------------------------------------------------------------- pieces


@dataclasses.dataclass
class Piece:
  """Cost and effects of one operation under an assignment.

  Attributes:
    problem: the error if the layout does not suit it.
    costs: of the operation, then of those inside of it; without the sums of pending inputs.
    members: for each of these its number among the operation (0) and its inner operations.
    executed: by number of the tensor read whose pending sum it executes: bytes of its slice.
    states: of its outputs.
    same: for each output the number of the tensor read that it is, pending or not, or None.
    buffers: for each output ("new", bytes), or whose memory it uses: ("input", number),
      ("reduced", number), ("output", number), ("elsewhere", 0).
    pending: for each output the bytes of its slice as a sum sends them.
    inside: bytes that it takes while it runs: of its body, or kernel workspace.
    inputs: bytes that it brings in from outside.
  """

  problem: MeshError | None = None
  costs: list[OperationCost] = dataclasses.field(default_factory=list)
  members: list[int] = dataclasses.field(default_factory=list)
  executed: dict[int, int] = dataclasses.field(default_factory=dict)
  states: list[State] = dataclasses.field(default_factory=list)
  same: list[int | None] = dataclasses.field(default_factory=list)
  buffers: list[tuple[str, int]] = dataclasses.field(default_factory=list)
  pending: list[int] = dataclasses.field(default_factory=list)
  inside: int = 0
  inputs: int = 0

  @property
  def is_local(self) -> bool:
    """True if it suits the layout and has no exchanges."""
    return self.problem is None and not any(c.collectives for c in self.costs)


class _Reader:
  """Stands for the other operations of a graph that read the inputs of the probed one."""

  def __init__(self, inputs: Sequence[Tensor]):
    self.inputs = list(inputs)


class Prober:
  """Lowers single operations in isolation."""

  def __init__(self) -> None:
    self._scratch = _Scratch()
    self._count = 0
    self.lowered = 0
    # Making a lowering anew checks the process each time; a child of one does not.
    with self._scratch.graph.as_default():
      self._lowering = PlanLowering(Graph(), {}, Recorder(PlanMeshImpl([], {})), None)

  def piece(
    self,
    op: Operation,
    mesh: Sequence[int] | Shape,
    assignment: Sequence[tuple[str, int]],
    states: Sequence[State],
    in_loop: bool = False,
    shared: bool = False,
    uneven: Collection[str] = (),
  ) -> Piece:
    """Lowers an operation.

    Args:
      op: the operation.
      mesh: sizes of the mesh axes; or the mesh shape, whose names then are in errors.
      assignment: (dimension name, mesh axis) pairs.
      states: of the tensors that it reads.
      in_loop: whether it is inside of a loop, and other random numbers are drawn each time.
      shared: whether other operations read its inputs, too.
      uneven: names of dimensions whose size the mesh axis need not divide.
    """
    self._count += 1
    self.lowered += 1
    if self._count > _MOST_IN_A_GRAPH:
      self._scratch, self._count = _Scratch(), 0
    if not isinstance(mesh, Shape):
      mesh = Shape([Dimension(f"axis{i}", n) for i, n in enumerate(mesh)])
    shape = mesh
    rules = LayoutRules(
      [(d, mesh[a].name + (UNEVEN if d in uneven else "")) for d, a in assignment]
    )
    made: list[Piece] = []

    def run(
      make: Callable[..., tf.Tensor] = placeholder, known: dict[Any, tf.Tensor] | None = None
    ) -> None:
      impl = PlanMeshImpl(shape, rules, make)
      meshes: dict[Mesh, MeshImpl] = {x.mesh: impl for x in [*reads(op), *op.outputs]}
      meshes[op.mesh] = impl
      seed = make([], tf.int64)
      lowering = self._lowering.alone(meshes, Recorder(impl), seed, in_loop, known)
      lowering.graph = Graph()
      if shared:
        reader: Any = _Reader(op.inputs)
        lowering.graph.operations.append(reader)
      made.append(_lower(lowering, impl, op, states, make))

    try:
      with self._scratch.graph.as_default():
        run(self._scratch.placeholders(), self._scratch.constants)
    except MeshError as e:
      return Piece(problem=e)
    except (RuntimeError, TypeError, ValueError):
      # Operations that capture eager tensors can only be traced in a function.
      with tf.Graph().as_default():
        try:
          tf.function(run, autograph=False).get_concrete_function()
        except MeshError as e:
          return Piece(problem=e)
    return made[-1]


class _Scratch:
  """Graph for pieces, whose constants and placeholders are used by one after the other.

  Attributes:
    graph: the graph.
    constants: see `constants.of_one_graph`.
  """

  def __init__(self) -> None:
    self.graph, self.constants = tf.Graph(), dict[Any, tf.Tensor]()
    self._made: dict[tuple[tuple[int, ...], tf.DType], list[tf.Tensor]] = {}

  def placeholders(self) -> Callable[[Sequence[int], tf.DType], tf.Tensor]:
    """A function that returns another placeholder each time, for one piece."""
    used: dict[tuple[tuple[int, ...], tf.DType], int] = {}

    def make(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
      if tf.inside_function():  # Another graph: the body of a loop.
        return placeholder(shape, dtype)
      key = tuple(shape), dtype
      made, i = self._made.setdefault(key, []), used.get(key, 0)
      used[key] = i + 1
      if i == len(made):
        made.append(placeholder(shape, dtype))
      return made[i]

    return make


def _lower(
  lowering: PlanLowering,
  impl: PlanMeshImpl,
  op: Operation,
  states: Sequence[State],
  make: Callable[..., tf.Tensor],
) -> Piece:
  """Lowers an operation on placeholders, which `make` makes; returns what it does and holds."""
  read = reads(op)
  lowering.variables = _Made(lambda v: _variable(impl, v))
  lowering.operations = _Made(lambda earlier: _left_by(lowering, impl, earlier))
  # Tensors that it does not read, but waits for.
  lowering.tensors = _Made(lambda x: LaidOutTensor([make(impl.slice_shape(x.shape), x.dtype)]))
  op.check_layout(impl)
  given: dict[Tensor, Any] = {}
  for x, state in zip(read, states):
    if x not in given:
      laid_out: Any = LaidOutTensor([make(impl.slice_shape(x.shape), x.dtype)])
      if state is not None:
        laid_out = LazyAllreduceSum(impl, laid_out, list(state.axes))
        if state.executed:
          laid_out.set_sum(LaidOutTensor([make(impl.slice_shape(x.shape), x.dtype)]))
      given[x] = laid_out
  lowering.tensors.update(given)
  lowering.lower_operations([op])
  recorder = lowering.recorder
  pending = {
    id(v.laid_out_input): read.index(x) for x, v in given.items() if isinstance(v, LazyAllreduceSum)
  }
  piece = Piece(inside=recorder.inside.get(op, 0), inputs=sum(map(_bytes_of, impl.inputs)))
  members = {x: i for i, x in enumerate([op, *inner_operations(op)])}
  for member, cost in recorder.costs.items():
    own = []
    for c in cost.collectives:
      source = pending.get(id(c.source))
      if source is not None and c.kind == "allreduce" and given[read[source]].is_reduced:
        piece.executed[source] = c.slice_bytes
      else:
        own.append(dataclasses.replace(c, source=None))
    piece.costs.append(dataclasses.replace(cost, collectives=own))
    piece.members.append(members[member])
  places: dict[Any, tuple[str, int]] = {}
  for i, x in enumerate(read):
    value = given[x]
    if isinstance(value, LazyAllreduceSum):
      if value.is_reduced:
        places.setdefault(value.one_slice.ref(), ("reduced", i))
      value = value.laid_out_input
    places.setdefault(value.one_slice.ref(), ("input", i))
  for t in impl.inputs + impl.variable_reads:
    places.setdefault(t.ref(), ("elsewhere", 0))
  for j, out in enumerate(op.outputs):
    value = lowering.tensors[out]
    lazy = isinstance(value, LazyAllreduceSum) and not value.is_reduced
    piece.states.append(PendingSum(tuple(value.mesh_axes)) if lazy else None)
    same = [i for i, x in enumerate(read) if given[x] is value]
    piece.same.append(same[0] if same else None)
    slices = planned_slice(lowering, out)
    piece.buffers.append(places.setdefault(base(slices).ref(), ("output", j)))
    if piece.buffers[-1] == ("output", j):
      piece.buffers[-1] = ("new", bytes_held(lowering, out))
    # Booleans travel as int32.
    element = 4 if slices.dtype == tf.bool else int(slices.dtype.size)
    piece.pending.append(int(slices.shape.num_elements()) * element)
  return piece


def _left_by(lowering: PlanLowering, impl: PlanMeshImpl, earlier: Operation) -> Any:
  """Returns what an earlier operation leaves in `lowering.operations`; its costs are its own."""
  exchanged, given = len(impl.collectives), len(impl.inputs)
  Lowering.lower_operations(lowering, [earlier])
  roots = [planned_slice(lowering, x) for x in _lowered(earlier.outputs, lowering)]
  roots += [c.source.one_slice for c in impl.collectives[exchanged:] if c.source is not None]
  lowering.recorder.leave_out(roots)
  del impl.collectives[exchanged:], impl.inputs[given:]
  return lowering.operations.get(earlier, tf.no_op())


def _variable(impl: PlanMeshImpl, v: Variable) -> LaidOutVariable:
  stored = impl.variable_store.get(
    v.stored_impl(impl),
    v.full_name,
    v.shape,
    master_dtype=v.master_dtype,
    slice_dtype=v.slice_dtype,
    initializer=None,
    trainable=v.trainable,
  )
  return LaidOutVariable(impl, stored, v)
