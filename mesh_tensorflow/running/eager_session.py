"""`mtf.eager`: operations run when they are made.

The operations, their layouts and their gradients are those of every program. A session is told of
each operation that is made, and lowers it; what a staged program does at its end, for the whole
graph, happens here step by step. On a SIMD mesh of one process the session uses the slices of its
variables and its devices as a placement mesh does: one thread, which hands slices from device to
device, so that a debugger can stop between any two operations.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.environment.tensorflow_mode import check_tensorflow2
from mesh_tensorflow.errors import (
  ArgumentError,
  GradientError,
  GraphError,
  NotLoweredError,
  UnsupportedError,
)
from mesh_tensorflow.meshes.contract import LaidOutVariable
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.placement.mesh_impl import PlacementMeshImpl
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.graph import Graph, Mesh, Operation, Tensor, reads, watched
from mesh_tensorflow.running.eager_tensor import as_eager
from mesh_tensorflow.running.lowering import Lowering, Seed, assigned_variables

# When a graph has made so many operations since it last forgot, or tensors of so many bytes, and as
# many as it kept then, it forgets what nobody can reach any more.
_OPERATIONS_BETWEEN = 1000
_BYTES_BETWEEN = 2**27
_SUMMARIES = 1000


class EagerGraph(Graph):
  """A graph whose operations have run: a session makes a `Graph` this.

  A tensor has its value as long as somebody holds it, or what was computed from it.
  """

  _eager: EagerLowering
  _counts: dict[str, int]
  _changed: set[str]

  @classmethod
  def of(cls, graph: Graph, mesh_impl: MeshImpl, seed: int | None) -> EagerGraph:
    """The graph itself, from now on one whose operations run at once."""
    graph.__class__ = cls
    assert isinstance(graph, cls)
    graph._eager = EagerLowering(graph, mesh_impl, seed)
    graph._counts, graph._changed = {}, set()
    return graph

  @property
  def mesh_impl(self) -> MeshImpl:
    """The mesh implementation that its operations run on."""
    return self._eager.impl

  def run_new(self) -> None:
    """Runs the operations that have not run yet, the last ones."""
    operations, done = self.operations, self._eager.done
    new = []
    for op in reversed(operations):
      if op in done:
        break
      new.append(op)
    for op in reversed(new):
      try:
        self._eager.run(op)
      except BaseException:
        # Remove the operation that failed, and those after it.
        operations[:] = [o for o in operations if o in done]
        raise
      for v in getattr(op, "variables", ()):
        self._is_changed(v)
    if self._eager.is_full(len(operations)):
      self.forget()

  def forget(self) -> None:
    """Drops operations whose outputs are unreachable, as is everything computed from them."""
    references = [weakref.ref(op) for op in self.operations]
    self.operations.clear()
    gc.collect()  # An operation and its outputs refer to each other.
    self.operations[:] = [op for r in references if (op := r()) is not None]
    self._eager.forgot(len(self.operations))

  def laid_out(self, tensor: Tensor) -> Any:
    """The slices of a tensor."""
    if tensor not in self._eager.tensors:
      self.run_new()
    if tensor not in self._eager.tensors:
      raise NotLoweredError(f"{tensor.to_string} has no value: it is inside a loop")
    return self._eager.tensors[tensor]

  def _is_changed(self, variable: Variable) -> None:
    """Lets `get_variable` read a variable anew: the value of a tensor never changes."""
    self._changed.add(variable.full_name)
    if self.name_to_variable.get(variable.full_name) is variable:
      del self.name_to_variable[variable.full_name]
      for variables in (self._all_variables, self._trainable_variables):
        variables[:] = [v for v in variables if v is not variable]

  def unique_name(self, name: str, mark_as_used: bool = True) -> str:
    """As `Graph.unique_name`, in memory that does not grow with the number of operations."""
    prefix = scope.current_scope_name()
    full = f"{prefix}/{name}" if prefix else name
    # Names of gradients begin with their forward operations', so there is no end to them. They are
    # for messages only: no gradient draws random numbers, which would depend on them.
    if "/gradients" in full:
      return full
    key = full.lower()
    i = self._counts.get(key, 0)
    while i and f"{key}_{i}" in self._counts:
      i += 1
    if mark_as_used:
      self._counts[key] = i + 1
    return f"{full}_{i}" if i else full

  def combine_assignments(self, assignments: Sequence[Operation]) -> list[Operation]:
    """The assignments as they are: they have run."""
    return list(assignments)

  def run_function(self, fn: Callable[..., object], inputs: Sequence[Tensor], seed: Seed) -> Any:
    """Calls the function of an `mtf.function` as the program of its own that it is.

    Names, on which variables and random numbers depend, are as in a graph of its own, and it sees
    its own variables only.
    """
    outer = dict(vars(self))
    self._counts, self._changed = {}, set()
    self.root_scope, self.name_to_variable = scope.VariableScope(""), {}
    self._all_variables, self._trainable_variables = [], []
    self.captured_variable_scope = scope.get_variable_scope()
    self.random_seed = self.global_step = None
    try:
      with self._eager.seeded(seed):
        return fn(*inputs)
    finally:
      changed = self._changed
      vars(self).update(outer)
      for v in [v for v in self._all_variables if v.full_name in changed]:
        self._is_changed(v)
      self._changed |= changed


class _Variables(dict[Any, LaidOutVariable]):
  """Variables as a lowering sees them, made when asked for: kept, they would never be forgotten."""

  def __init__(self, impl: MeshImpl):
    super().__init__()
    self._impl = impl

  def __setitem__(self, variable: Variable, laid_out: LaidOutVariable) -> None:
    del variable, laid_out

  def __missing__(self, variable: Variable) -> LaidOutVariable:
    return LaidOutVariable(self._impl, variable.get_master(), variable)


class EagerLowering(Lowering):
  """Lowers operations one by one; keeps the slices of tensors that somebody holds.

  Args:
    graph: an `EagerGraph`.
    impl: a placement mesh.
    seed: seed of random operations; see `Lowering`.
  """

  def __init__(self, graph: EagerGraph, impl: MeshImpl, seed: int | None):
    super().__init__(Graph(), {}, autostack=False, seed=_as_staged(seed))
    self.impl, self.graph = impl, graph
    self.mesh_to_impl = {}
    self.done: weakref.WeakSet[Operation] = weakref.WeakSet()
    tensors: Any = weakref.WeakKeyDictionary()
    operations: Any = weakref.WeakKeyDictionary()
    self.tensors, self.operations, self.variables = tensors, operations, _Variables(impl)
    self._kept_operations = self._kept_bytes = self._bytes = 0

  def add_counter(self, key: str, value: int) -> None:
    """Does nothing: there is no report at the end."""

  def run(self, op: Operation) -> None:
    """Runs an operation."""
    if not tf.executing_eagerly():
      raise GraphError(
        f"{op.name}: an operation of mtf.eager inside a tf.function, which runs later; use an "
        "mtf.function there"
      )
    self.mesh_to_impl.setdefault(op.mesh, self.impl)
    op.check_layout(self.impl)
    for x in reads(op):
      if x not in self.tensors and x.operation in self.done:
        # A loop, of which its gradient wants what each iteration computed.
        self._run_again(x.operation)
    self.lower_operations([op])
    self.done.add(op)
    for x in op.outputs:
      as_eager(x)
      self._bytes += _bytes(x)

  def _run_again(self, op: Operation) -> None:
    changed = [v.full_name for v in assigned_variables([op])]
    if changed:
      raise GradientError(
        f"gradients of {op.name}, which assigns to {', '.join(changed)}: mtf.eager would have to "
        "run it a second time; take them in an mtf.function"
      )
    self.lower_operations([op])
    for x in op.outputs:
      as_eager(x)

  @contextlib.contextmanager
  def seeded(self, seed: Seed) -> Iterator[None]:
    """While it is open, random operations draw as in a run of its own with this seed."""
    outer = self._seed, self._base_keys
    self._seed, self._base_keys = _as_staged(seed), {}
    try:
      yield
    finally:
      self._seed, self._base_keys = outer

  def is_full(self, operations: int) -> bool:
    """True if operations or bytes exceed twice those last kept, plus a margin.

    Args:
      operations: number of operations in the graph.
    """
    return (
      operations > 2 * self._kept_operations + _OPERATIONS_BETWEEN
      or self._bytes > 2 * self._kept_bytes + _BYTES_BETWEEN
    )

  def forgot(self, operations: int) -> None:
    """Records the number of operations left after `forget`, and the bytes of their tensors."""
    self._kept_operations = operations
    self._kept_bytes = self._bytes = _total_bytes(self.tensors)
    del self.scalar_summaries[:-_SUMMARIES]


def _as_staged(seed: Seed) -> Any:
  """The seed as an mtf.function gives it to its lowering: of a Python int others are drawn."""
  return seed if seed is None or tf.is_tensor(seed) else tf.constant(seed, tf.int64)


def _bytes(x: Tensor) -> int:
  return int(x.size * max(x.dtype.size, 1))


def _total_bytes(tensors: Iterable[Tensor]) -> int:
  return sum(_bytes(x) for x in list(tensors))


@checked
@contextlib.contextmanager
def eager(mesh_impl: MeshImpl, *, seed: int | None = None) -> Iterator[Mesh]:
  """While it is open, mtf operations run at once, and an `mtf.Tensor` has a value.

  ```
  with mtf.eager(mesh_impl) as mesh:
    x = mtf.import_tf_tensor(mesh, array, [batch, hidden])
    y = mtf.softmax(x, hidden)
    print(y)                        # value, dimensions, where its slices lie
    y["batch", 0].numpy()
  ```

  Tensors are `EagerTensor`s: `numpy()`, `slices`, `x[{"batch": 0}]`, comparisons, `float(x)`. A
  wrong layout or shape is an error where the operation stands. Variables are those of the mesh
  implementation, and `mtf.gradients` goes back over what was run. A tensor keeps what it was
  computed from, for gradients; all else is forgotten, so that a session may go on without end
  (`x.detach()` has no past). A variable's tensor has the value that it had when it was read; after
  an assignment `get_variable` reads anew.

  An `mtf.function` that is given tensors of the session runs at once, too, as a program of its own:
  with the same numbers, random ones included, as staged with that seed.

  Args:
    mesh_impl: a `PlacementMeshImpl`, or a `SimdMeshImpl` of one process, on whose devices the
      operations run one after another.
    seed: what random operations outside of functions depend on; drawn anew by default.

  Yields:
    A `Mesh`. Tensors of other graphs on which operations are made run at once, too.

  Raises:
    GraphError: it stands in a tf.function.
    UnsupportedError: the mesh spans several processes, or is of a TPUStrategy.
  """
  check_tensorflow2()
  if not tf.executing_eagerly():
    raise GraphError("mtf.eager inside a tf.function, which runs later; use an mtf.function there")
  if isinstance(seed, bool):
    raise ArgumentError(f"mtf.eager: seed must be an integer, got {seed!r}")
  impl = _of_one_thread(mesh_impl)

  def run_new(graph: Graph) -> None:
    if not isinstance(graph, EagerGraph):
      graph = EagerGraph.of(graph, impl, seed)
    graph.run_new()

  mesh = Mesh(EagerGraph.of(Graph(), impl, seed), "eager")
  with watched(run_new):
    yield mesh


def _of_one_thread(impl: MeshImpl) -> MeshImpl:
  """A mesh implementation of the same variables and devices that one thread runs."""
  if isinstance(impl, PlacementMeshImpl):
    return impl
  if getattr(impl, "strategy", None) is not None or len(impl.local_processors) < impl.size:
    raise UnsupportedError(
      f"mtf.eager on {type(impl).__name__} {impl.shape}: all its devices must be of this process, "
      "and of no strategy; debug on a PlacementMeshImpl of virtual CPU devices"
    )
  devices = [impl.processor_device(p) or "" for p in range(impl.size)]
  return PlacementMeshImpl(
    impl.shape, impl.layout_rules, devices, variable_store=impl.variable_store
  )
