"""Cost of a program on a mesh, found by lowering it onto a `PlanMeshImpl`.

`trace` lowers a graph in a scratch TensorFlow graph and measures every operation:
the bytes it exchanges, the FLOPs of the matrix products and convolutions that its
lowering made, and how long its outputs are needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.planning.liveness import (
  Memory,
  activation_memory,
  planned_slice,
  probable_results,
)
from mesh_tensorflow.planning.loops import added_bytes, trips
from mesh_tensorflow.planning.mesh_impl import Collective, PlanMeshImpl
from mesh_tensorflow.planning.variables import placeholder
from mesh_tensorflow.planning.work import Product, Work
from mesh_tensorflow.program.graph import Graph, Operation, Tensor
from mesh_tensorflow.program.reachability import needed_operations
from mesh_tensorflow.running.lowering import Lowering


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


@dataclasses.dataclass
class Trace:
  """A lowered program and what it costs.

  Attributes:
    graph: the `Graph`.
    mesh_impl: the `PlanMeshImpl`.
    operations: one `OperationCost` for each operation that a result or an assignment needs
      (a tf.function leaves the others out), and for those inside loops.
    memory: of one processor.
    tensors: the outputs of those operations, in order.
    dimension_names: names of the dimensions of all tensors, needed or not.
  """

  graph: Graph
  mesh_impl: PlanMeshImpl
  operations: list[OperationCost]
  memory: Memory
  tensors: list[Tensor]
  dimension_names: set[str]


def trace(
  program: Callable[[], tuple[Graph, Sequence[Tensor] | None]], mesh_shape: Any, layout: LayoutLike
) -> Trace:
  """Lowers a program symbolically; no tensor is computed or allocated.

  Args:
    program: called in a scratch TensorFlow graph; returns a graph and its results, or None
      in their place for the tensors that no operation reads.
    mesh_shape: a shape, of any size.
    layout: layout rules.

  Raises:
    LayoutError: the layout does not suit the program.
  """
  made: list[Trace] = []

  def run() -> None:
    graph, results = program()
    impl = PlanMeshImpl(mesh_shape, layout)
    recorder = Recorder(impl)
    seed = tf.raw_ops.Placeholder(dtype=tf.int64, shape=[])
    meshes = {op.mesh: impl for op in graph.operations}
    lowering = PlanLowering(graph, meshes, recorder, seed)
    names = {d.name for op in recorder.costs for x in op.outputs for d in x.shape}
    recorder.finish_results(lowering, results)
    tensors = [x for op in recorder.costs for x in op.outputs]
    costs = list(recorder.costs.values())
    made.append(Trace(graph, impl, costs, recorder.memory, tensors, names))

  # The function inside captures eager tensors that the program holds; the graph around it
  # is where it would create variables, so that these are symbolic as well.
  with tf.Graph().as_default():
    tf.function(run, autograph=False).get_concrete_function()
  return made[0]


class PlanLowering(Lowering):
  """A lowering that tells a recorder about every operation."""

  def __init__(self, graph: Graph, mesh_to_impl: dict[Any, Any], recorder: Recorder, seed: Any):
    self.recorder = recorder
    super().__init__(graph, mesh_to_impl, seed=seed)

  def check_layout_names(self) -> None:
    """Does nothing: a report lists the rules that match no dimension."""

  def lower_operations(self, operations: Iterable[Operation]) -> None:
    operations = list(operations)
    for op in operations:
      self.recorder.begin(op)
      super().lower_operations([op])
      self.recorder.end(op, self)
    self.recorder.end_block(operations, self)

  def alone(
    self, mesh_to_impl: dict[Any, Any], recorder: Recorder, seed: Any, in_loop: bool
  ) -> PlanLowering:
    """A lowering that has lowered nothing, for other meshes: cheaper than a new one.

    Args:
      mesh_to_impl: dict from each `Mesh` to a `PlanMeshImpl`.
      recorder: recorder of its operations.
      seed: what random operations depend on.
      in_loop: whether they depend on the number of an iteration, too.
    """
    result = self.child()
    result.mesh_to_impl, result.recorder, result._seed = mesh_to_impl, recorder, seed
    result._loop_key = _scalar(recorder.impl, tf.int32) if in_loop else None
    result.variables, result.operations, result._counters = {}, {}, []
    return result

  # A program, and an iteration of a loop, make a key of some scalars once, for all their random
  # operations: it is no part of what one of these costs, which is the same alone and among others.

  def child(self, loop_key: Any = None) -> PlanLowering:
    result = super().child(loop_key)
    assert isinstance(result, PlanLowering)
    if loop_key is not None:
      result._loop_key = _scalar(self.recorder.impl, tf.int32)
    return result

  def _base_key(self, impl: Any) -> Any:
    if impl not in self._base_keys:
      self._base_keys[impl] = _scalar(impl, tf.uint32)
    return self._base_keys[impl]

  def set_tensor_lowering(self, tensor: Tensor, laid_out: Any) -> None:
    super().set_tensor_lowering(tensor, laid_out)
    if isinstance(laid_out, LazyAllreduceSum):
      self.recorder.add_pending(tensor.operation, laid_out, self)


def _scalar(impl: PlanMeshImpl, dtype: tf.DType) -> Any:
  return impl.slicewise(lambda: placeholder([], dtype))


class Recorder:
  """Attributes exchanges, TensorFlow nodes and memory to operations."""

  def __init__(self, impl: PlanMeshImpl):
    self.impl = impl
    self.costs: dict[Operation, OperationCost] = {}
    self.memory = Memory()
    # By identity of the slices that wait for their sum: the slices, and whose sum it is.
    self._pending: dict[int, tuple[Any, Operation]] = {}
    self._executed: set[int] = set()
    self._recorded = 0
    self._seen_nodes: set[Any] = set()
    self._stack: list[Operation] = []
    # Bytes that operations take while they run: of their bodies, or kernel workspace.
    self.inside: dict[Operation, int] = {}

  def begin(self, op: Operation) -> None:
    bounds = [trips(outer) for outer in self._stack]
    cost = OperationCost(op.name, type(op).__name__, repeated=self._repeated(op))
    for bound in bounds:
      cost.times *= 1 if bound is None else bound
    cost.in_unbounded_loop = None in bounds
    self.costs.setdefault(op, cost)
    self._stack.append(op)

  def end(self, op: Operation, lowering: Lowering) -> None:
    self._stack.pop()
    self._attribute(op)
    roots = [planned_slice(lowering, x) for x in op.outputs if x in lowering.tensors]
    self._add_new_nodes(self.costs[op], roots)
    self._flops_of_vector_product(op)
    self._add_told_products(op)
    room = getattr(op, "room_of_slice", None)
    if room is not None:
      self.inside[op] = self.inside.get(op, 0) + room(self.impl)
    # Additions in a loop are not reachable from nodes outside of it: counted here.
    for n in added_bytes(op, self.impl):
      self.costs[op].work.traffic += 3 * n
      self.costs[op].work.launches += 1
    if not op.outputs:
      self._count_assignment(op, lowering)

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

  def finish_results(self, lowering: Lowering, results: Sequence[Tensor] | None) -> None:
    """Executes sums that are still pending in the results, as exporting them does."""
    operations = lowering.graph.operations
    results = probable_results(operations) if results is None else list(results)
    needed = needed_operations(operations, results)
    for op in operations:
      if op not in needed:
        del self.costs[op]
    operations = [op for op in operations if op in needed]
    for x in results:
      lowering.tensors[x].to_laid_out_tensor()
      self._attribute(x.operation)
    self.memory = activation_memory(lowering, operations, results, self.inside)
    self.memory.variables = sum(
      v.shape.num_elements() * v.dtype.size for s in self.impl.variable_store for v in s.slices
    )
    self.memory.inputs = sum(x.shape.num_elements() * x.dtype.size for x in self.impl.inputs)

  def end_block(self, operations: Sequence[Operation], lowering: Lowering) -> None:
    """Records the peak memory of the body of an operation."""
    if self._stack:
      outer = self._stack[-1]
      inside = activation_memory(lowering, operations, [], self.inside).activations
      self.inside[outer] = max(inside, self.inside.get(outer, 0))

  def _repeated(self, op: Operation) -> int:
    """Number of processors that compute the same part of the operation."""
    dims = {d for x in op.inputs + op.outputs for d in x.shape}
    axes = {self.impl.tensor_dimension_to_mesh_axis(d) for d in dims}
    parts = 1
    for axis in axes:
      parts *= 1 if axis is None else self.impl.shape[axis].size
    return self.impl.size // parts

  def _attribute(self, op: Operation) -> None:
    new = self.impl.collectives[self._recorded :]
    self._recorded = len(self.impl.collectives)
    for c in new:
      self._executed.add(id(c.source))
      _, owner = self._pending.get(id(c.source), (None, op))
      self.costs[owner].collectives.append(c)
      self._add_new_nodes(self.costs[owner], [c.source.one_slice])

  def _add_new_nodes(self, cost: OperationCost, roots: Sequence[Any]) -> None:
    """Adds the TensorFlow nodes that lead to the roots and were not counted yet."""
    before = cost.work.flops
    waiting = [x.op for x in roots if hasattr(x, "graph")]
    while waiting:
      node = waiting.pop()
      if node not in self._seen_nodes:
        self._seen_nodes.add(node)
        cost.work.add_node(node)
        waiting += [x.op for x in node.inputs]
    cost.flops += cost.work.flops - before

  def _count_assignment(self, op: Operation, lowering: Lowering) -> None:
    """Counts an assignment, which makes no nodes here: two reads and a write of each slice."""
    slices = [planned_slice(lowering, x) for x in op.inputs if x in lowering.tensors]
    size = sum(x.shape.num_elements() * x.dtype.size for x in slices)
    self.costs[op].work.traffic += 3 * size
    self.costs[op].work.launches += len(slices)

  def _add_told_products(self, op: Operation) -> None:
    """Adds the products in a TensorFlow loop, whose number only the operation knows."""
    told = getattr(op, "products_of_slice", None)
    if told is not None:
      products = [Product(*p) for p in told(self.impl)]
      self.costs[op].work.products += products
      self.costs[op].flops += sum(p.flops for p in products)

  def _flops_of_vector_product(self, op: Operation) -> None:
    """Counts the FLOPs of a matrix-vector product, which is lowered to a multiply and a sum."""
    cost = self.costs[op]
    reduced = {d for x in op.inputs for d in x.shape} - {d for x in op.outputs for d in x.shape}
    if cost.flops == 0 and reduced and cost.type == "EinsumOperation" and len(op.inputs) > 1:
      union = {d for x in op.inputs for d in x.shape}
      size = 2
      for d in union:
        size *= d.size
      cost.flops = size * cost.repeated // self.impl.size
