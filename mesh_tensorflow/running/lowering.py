"""Lowering: a graph becomes TensorFlow operations on laid-out tensors.

`Lowering` does it; `run_on` is one run of a function of named tensors on a mesh: its graph is
built and lowered, its results are put together.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.environment.tensorflow_mode import check_tensorflow2
from mesh_tensorflow.errors import (
  ArgumentError,
  DivisionError,
  GraphError,
  LayoutError,
  NotLoweredError,
  UnsupportedError,
  VariableError,
)
from mesh_tensorflow.meshes.contract import LaidOutVariable
from mesh_tensorflow.meshes.cross_mesh import whole_everywhere
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.joined_sums import JoinedSums
from mesh_tensorflow.meshes.laid_out import (
  LaidOutTensor,
  LazyAllreduceSum,
  LazyGather,
  LazyLaidOutTensor,
)
from mesh_tensorflow.meshes.layout_names import check_tensor_names
from mesh_tensorflow.meshes.mesh_impl import GATHERED_AHEAD, MeshImpl
from mesh_tensorflow.meshes.simd.mesh_impl import SimdMeshImpl
from mesh_tensorflow.meshes.store import StoredVariable, VariableStore
from mesh_tensorflow.meshes.worker_transfers import TRANSFERS
from mesh_tensorflow.numerics import bodies, constants, random_bits
from mesh_tensorflow.operations.cross_mesh import Reshard
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import (
  Graph,
  Mesh,
  Operation,
  Tensor,
  is_of_one_shape,
  read_by_updates,
  read_in_shards,
  reads,
)
from mesh_tensorflow.running.pipeline import lower_between
from mesh_tensorflow.running.segments import SegmentsLowering, changed, segments_of
from mesh_tensorflow.workers import agreement

_LOG = logging.getLogger("mesh_tensorflow")


def pretty_print_counters(counters: Sequence[tuple[str, float]]) -> str:
  """Sums counters over the prefixes of their slash-separated names.

  Args:
    counters: (name, number) pairs.

  Returns:
    One line for each name and prefix, sorted, indented by one blank per slash.
  """
  totals: dict[str, float] = collections.defaultdict(float)
  for name, value in counters:
    parts = name.split("/")
    for i in range(len(parts)):
      totals["/".join(parts[: i + 1])] += value
  return "\n".join(f"{' ' * k.count('/')}{k}: {totals[k]:.3g}" for k in sorted(totals))


def log_variable_sizes(
  var_list: Sequence[Variable],
  tag: str,
  verbose: bool = True,
  mesh_to_impl: dict[Mesh, MeshImpl] | None = None,
  log_file: Any = None,
) -> list[str]:
  """Logs names, sizes, slice sizes and shapes of variables, and their totals.

  Args:
    var_list: mtf `Variable`s; nothing happens if it is empty.
    tag: title of the line of totals.
    verbose: one line for each variable as well.
    mesh_to_impl: dict from mesh to `MeshImpl`, for slice sizes (else 0).
    log_file: an open file to write the lines to.

  Returns:
    The lines.
  """
  if log_file is not None and not hasattr(log_file, "write"):
    raise ArgumentError(f"log_variable_sizes: log_file must be an open file, got {log_file!r}")
  if not var_list:
    return []
  lines, total, total_slices = [], 0, 0
  for v in sorted(var_list, key=lambda v: v.full_name):
    impl = mesh_to_impl[v.mesh] if mesh_to_impl else None
    slice_size = v.stored_impl(impl).slice_size(v.shape) if impl else 0
    total += v.size
    total_slices += slice_size
    if verbose:
      lines.append(
        f"Variable {v.full_name.ljust(60)} size {str(v.size).ljust(12)} "
        f"slice_size {str(slice_size).ljust(12)} {str(v.shape).ljust(60)}"
      )
  lines.append(
    f"{tag.ljust(30)} count: {str(len(var_list)).ljust(6)}  "
    f"Total size: {str(total).ljust(15)}  Total slice_size: {str(total_slices).ljust(15)}"
  )
  for line in lines:
    _LOG.info("%s", line)
    if log_file is not None:
      log_file.write(line + "\n")
  return lines


# Name of the counter, in each variable store, of the programs that drew random numbers.
RUN_COUNTER = "_random_run_counter"
# What the names of variables begin with that are of a run, not of a model: a checkpoint may have
# them or not.
LOSS_SCALE = "_loss_scale"
OF_A_RUN = (RUN_COUNTER, LOSS_SCALE)


# What random operations depend on, besides their names.
Seed: TypeAlias = int | tf.Tensor | None


class Lowering:
  """Lowers every operation of a graph, in order.

  Called eagerly, each operation runs at once. Called inside `tf.function`, the
  operations become part of the traced function.

  Args:
    graph: a `Graph`.
    mesh_to_impl: dict from each `Mesh` of the graph to a `MeshImpl`.
    autostack: kept for compatibility; has no effect on values.
    log_file: a file to write variable sizes and counters to.
    seed: what random operations depend on, besides their names: a Python int, or
      an integer scalar tf.Tensor (the step number, say). By default `graph.random_seed`,
      and if that is None a counter in the variable store: each run draws new numbers.
    wanted: the tensors that will be exported: a variable that is not among them, and that no
      operation reads (a slot, which its update reads by itself), need not be read. By default all
      can be; with several meshes those that no operation reads. (Each mesh has programs of its own,
      and they return no more than is needed.)

  Raises:
    LayoutError: the layout does not suit the program; nothing has been lowered.
    VariableError: meshes have variable stores of their own.
  """

  # Tensors whose sums, if they are pending, are exchanged together.
  _joinable: Set[Tensor] = frozenset()

  @checked
  def __init__(
    self,
    graph: Graph,
    mesh_to_impl: dict[Mesh, MeshImpl],
    autostack: bool = True,
    log_file: str | None = None,
    *,
    seed: Any = None,
    wanted: Sequence[Tensor] | None = None,
  ):
    check_tensorflow2()
    self.graph = graph
    self.mesh_to_impl = mesh_to_impl
    self.tensors: dict[Tensor, Any] = {}
    self.operations: dict[Operation, Any] = {}
    self.variables: dict[Operation, LaidOutVariable] = {}
    self.scalar_summaries: list[tuple[str, Any]] = []
    self._counters: list[tuple[str, int]] = []
    self._seed = seed
    # Where no seed was given: the number of this run, which random operations draw from.
    self.run_numbers: dict[MeshImpl, Any] = {}
    self.run_counters: dict[MeshImpl, StoredVariable] = {}
    self._base_keys: dict[MeshImpl, Any] = {}
    self._loop_key: Any = None
    # Whether it is around the programs of several meshes.
    self._is_around = are_several(mesh_to_impl.values())
    # Sums of which shards are asked for: each is scattered as soon as it can be.
    sharded = any(impl.state_dims for impl in mesh_to_impl.values())
    self._scattered = read_in_shards(graph.operations) if sharded else set[Tensor]()
    self.recent: collections.deque[Tensor] = collections.deque(maxlen=GATHERED_AHEAD)
    if not (sharded or self._is_around or tf.executing_eagerly()):
      self._joinable = read_by_updates(graph.operations)
    self._joined = JoinedSums()
    # Segments read variables for each other.
    all_read = wanted is None or self._is_around
    self.unread = frozenset[Tensor]() if all_read else _unread_variables(graph, wanted or ())
    if autostack:
      self.autostack()
    if graph.checks_layout_names:
      self.check_layout_names()
    # All of them before the first is lowered, which already makes variables on the devices.
    for op in graph.operations:
      op.check_layout(self.mesh_impl(op))
    if self._is_around:
      _check_workers(graph, mesh_to_impl)
      self._lower_on_several_meshes(wanted)
    else:
      self.lower_operations(graph.operations)
    if log_file is not None or _LOG.isEnabledFor(logging.INFO):
      self._report(log_file)

  def check_layout_names(self) -> None:
    """Raises `LayoutError` for a layout rule of which neither graph nor variables know the name."""
    for impl in self.mesh_to_impl.values():
      of_variables = {n for v in impl.variable_store for n in v.shape.dimension_names}
      check_tensor_names(impl, self.graph, of_variables)

  # ------------------------------------------------------- used by operations

  @checked
  def mesh_impl(self, m: object) -> MeshImpl:
    """The `MeshImpl` of a mesh, or of anything that has a `mesh`."""
    mesh = m if isinstance(m, Mesh) else getattr(m, "mesh", None)
    if mesh is None:
      raise ArgumentError(f"mesh_impl: {m!r} is no mtf.Mesh, and nothing that has one")
    if mesh not in self.mesh_to_impl:
      known = ", ".join(repr(k) for k in self.mesh_to_impl) or "no mesh at all"
      what = f", the mesh of {m.name}" if isinstance(m, (Operation, Tensor)) else ""
      raise GraphError(f"Lowering was given no MeshImpl for {mesh!r}{what}; it has {known}")
    return self.mesh_to_impl[mesh]

  @checked
  def set_tensor_lowering(self, tensor: Tensor, laid_out_tensor: Any) -> None:
    """Stores the slices of a tensor, after checking their shape.

    Of a mesh that is in other workers there are none here.
    """
    if not self.mesh_impl(tensor).is_elsewhere:
      self.verify_slice_shapes(tensor, laid_out_tensor)
    self.tensors[tensor] = laid_out_tensor

  @checked
  def verify_slice_shapes(self, tensor: Tensor, laid_out_tensor: Any) -> None:
    """Raises `LayoutError` if the slices have not the shape the layout asks for."""
    expected = self.mesh_impl(tensor).slice_shape(tensor.shape)
    if not hasattr(laid_out_tensor, "slice_shape"):
      raise ArgumentError(f"{tensor} is to have the slices {laid_out_tensor!r}: no laid-out tensor")
    actual = laid_out_tensor.slice_shape
    if list(actual) != expected:
      raise LayoutError(
        f"{type(tensor.operation).__name__} {tensor.operation.name}: the slices of {tensor} have "
        f"shape {list(actual)}, the layout asks for {expected}"
      )

  @checked
  def laid_out_size(self, tensor: Tensor) -> int:
    """Number of elements of all slices of the tensor."""
    return self.mesh_impl(tensor).laid_out_size(tensor.shape)

  def add_counter(self, key: str, value: int) -> None:
    """Adds to a counter, for the report."""
    if not isinstance(value, int):
      raise ArgumentError(f"add_counter {key!r}: the value must be an int, got {value!r}")
    self._counters.append((key, value))

  @property
  def counters(self) -> list[tuple[str, int]]:
    """The list of (key, value) that `add_counter` was given."""
    return self._counters

  def random_key(self, op: Operation) -> Any:
    """The key of a random operation in this run: a Python int, or uint32 scalars laid out."""
    impl = self.mesh_impl(op)
    key = random_bits.name_key(op.name)
    base = self._base_key(impl)
    # A Python number as long as it is one: it then costs the program no operation.
    if isinstance(base, int) and self._loop_key is None:
      return random_bits.fold(key, base)
    result = (
      impl.slicewise(
        lambda b: bodies.shared(random_bits.fold, tf.constant(key, tf.uint32), b), base
      )
      if not isinstance(base, int)
      else random_bits.fold(key, base)
    )
    if self._loop_key is not None:
      result = impl.slicewise(
        lambda k, i: bodies.shared(random_bits.fold, k, i), result, self._loop_key
      )
    return result

  def lower_operations(self, operations: Iterable[Operation]) -> None:
    """Lowers operations in order."""
    with constants.of_one_graph():
      for op in operations:
        self._lower_operation(op)

  def _lower_operation(self, op: Operation) -> None:
    for_operations: LoweringInProgress = self
    if self._joinable and len(reads(op)) > len(op.inputs):
      self._joined.exchange()  # Not in the body of a loop or a branch.
    with tf.name_scope(_scope_name(op.name)):
      try:
        if not (self._lower_gathered(op) or self._lower_on_shards(op)):
          op.lower(for_operations)
      except (tf.errors.OpError, TypeError, ValueError) as e:
        if is_division_by_zero(e):
          raise DivisionError(f"{op.to_string} divides an integer by zero") from e
        if hasattr(e, "add_note"):
          e.add_note(f"while lowering {op.to_string}")
        raise
    self._keep_track(op)
    for out in op.outputs:
      self.add_counter(f"output/{type(op).__name__}", self.laid_out_size(out))
      self.add_counter(f"output_unique/{type(op).__name__}", out.size)

  def _lower_on_several_meshes(self, wanted: Sequence[Tensor] | None) -> None:
    """Lowers the graph in segments of one mesh each; see `segments`."""
    operations = self.graph.operations
    one_store(self.mesh_to_impl.values())
    if wanted is None:
      read = {x for op in operations for x in reads(op)}
      wanted = [x for op in operations for x in op.outputs if x not in read]
    seed = self.graph.random_seed if self._seed is None else None
    draws = any(getattr(op, "draws_random_numbers", False) for op in operations)
    if draws and self._seed is None and seed is None:
      # One number for all meshes, as for one; its counter is on the first.
      impl = next(iter(self.mesh_to_impl.values()))
      made: list[StoredVariable] = []

      def next_run() -> list[Any]:
        number, stored = _next_run(impl)
        made.append(stored)
        slices: list[Any] = number.to_laid_out_tensor().tensor_list
        return slices

      if impl.is_elsewhere:
        numbers, counter = [], _run_counter(impl)
      else:
        numbers, counter = [t for r in impl.run_per_device(next_run) for t in r], made[0]
      if impl.is_of_cluster:
        numbers = [whole_everywhere(impl, counter.shape, counter.slice_dtype, numbers)]
      self.run_numbers[impl], self.run_counters[impl] = LaidOutTensor(numbers), counter
      self._seed = numbers[0]
    self._lower_segments(operations, wanted)

  def lower_block(self, operations: Sequence[Operation], wanted: Sequence[Tensor]) -> None:
    """Lowers the operations of a block.

    Args:
      operations: of one mesh, or around the programs of several.
      wanted: the tensors that are asked for afterwards.
    """
    if self._is_around:
      self._lower_segments(operations, wanted)
    else:
      self.lower_operations(operations)

  def _lower_segments(self, operations: Sequence[Operation], wanted: Sequence[Tensor]) -> None:
    running = SegmentsLowering(self, lower_between)
    running.run(segments_of(operations, self.mesh_impl, wanted, running.seed))

  def leave_to_others(self, operations: Sequence[Operation], outputs: Sequence[Tensor]) -> None:
    """Takes note of operations of a mesh that is in other workers, and runs none of them.

    Args:
      operations: the operations.
      outputs: those of their outputs that others read.
    """
    done = None if tf.executing_eagerly() else tf.no_op()
    for op in operations:
      if isinstance(op, Variable) and not op.inputs:
        op.lay_out(self)
      elif list(changed(op)):
        self.operations[op] = done
    self.tensors.update((x, LaidOutTensor([])) for x in outputs)

  @property
  def has_seed(self) -> bool:
    """True if random operations draw from a seed that was given, not from that of the graph."""
    return self._seed is not None

  def of_segment(
    self, tensors: dict[Tensor, Any], loop_key: LaidOutTensor | None = None
  ) -> Lowering:
    """A lowering for a segment, which sees the given tensors only, and keeps its own.

    Args:
      tensors: laid out in the program that lowers the segment.
      loop_key: see `child`.
    """
    result = self.child(loop_key)
    # Operations know tensors that were brought to their mesh also by what these were before.
    for x, value in list(tensors.items()):
      if isinstance(x.operation, Reshard):
        tensors.setdefault(x.operation.inputs[0], value)
    result.tensors, result._base_keys, result.scalar_summaries = tensors, {}, []
    result._is_around = False
    return result

  def _lower_gathered(self, op: Operation) -> bool:
    """Lowers an operation that is not made for slices with padding, if it would get such.

    Dimensions that are split unevenly are brought together before it, and cut again behind it.
    """
    impl = self.mesh_impl(op)
    if not impl.uneven_names:
      return False
    coarser = op.layout_to_lower_on(impl)
    if coarser is impl:
      return False
    inner = self.child()
    inner.mesh_to_impl = {**self.mesh_to_impl, op.mesh: coarser}
    if getattr(op, "draws_random_numbers", False):
      inner._base_keys[coarser] = self._base_key(impl)
    for x in reads(op):
      inner.tensors[x] = impl.gathered_for(self.tensors[x], x.shape, coarser)
    op.lower(inner)
    for x in op.outputs:
      self.set_tensor_lowering(x, impl.cut_from(inner.tensors[x], x.shape, coarser))
    return True

  def _lower_on_shards(self, op: Operation) -> bool:
    """Lowers an operation, of one shape throughout, on the shards of its inputs, if they are there.

    So what updates variables in the form of operations of the graph, an optimizer of a user, say,
    computes shards of slots and weights, and no processor has the whole of them.
    """
    impl = self.mesh_impl(op)
    if not impl.state_dims or not is_of_one_shape(op) or tf.executing_eagerly():
      return False
    shape = op.outputs[0].shape
    stored = impl.stored_layout(shape)
    values = {x: self.tensors[x] for x in op.inputs}
    if not any(impl.has_shards(v, shape, stored) for x, v in values.items() if x.shape == shape):
      return False
    try:
      op.verify_layout(stored)
    except LayoutError:  # It needs a dimension whole that is cut.
      return False
    if op.layout_to_lower_on(stored) is not stored:  # It is not made for shards with padding.
      return False
    on_shards = self.child()
    on_shards.mesh_to_impl = {op.mesh: stored}
    on_shards.tensors = {
      x: impl.to_shards(v, shape, stored) if x.shape == shape else v for x, v in values.items()
    }
    op.lower(on_shards)
    for x in op.outputs:
      slices = impl.from_shards(on_shards.tensors[x], shape, stored, self.computed_before)
      self.set_tensor_lowering(x, slices)
    return True

  def _keep_track(self, op: Operation) -> None:
    """Joins or scatters sums that are asked for, and remembers the operation for gathers."""
    for x in op.outputs:
      value = self.tensors.get(x) if x in self._joinable else None
      if isinstance(value, LazyAllreduceSum):
        self._joined.add(value, self.mesh_impl(op))
    if not op.inputs or not op.outputs or not self.mesh_impl(op).state_dims:
      return
    impl = self.mesh_impl(op)
    for x in op.outputs:
      value = self.tensors.get(x)
      if x in self._scattered and isinstance(value, LazyAllreduceSum) and not value.is_reduced:
        impl.to_shards(value, x.shape, impl.stored_layout(x.shape))
    if not tf.executing_eagerly():
      self.recent.append(op.outputs[0])

  def computed_before(self) -> list[tf.Tensor]:
    """Slices of what was lowered a few operations ago.

    A variable that is gathered for each use waits for them: else all would be gathered at once.
    """
    if len(self.recent) < GATHERED_AHEAD:
      return []
    value = self.tensors.get(self.recent[0])
    if isinstance(value, LazyAllreduceSum):
      value = value.laid_out_input
    if not isinstance(value, LaidOutTensor):
      return []
    return [t for t in value.tensor_list if tf.is_tensor(t)]

  def child(self, loop_key: LaidOutTensor | None = None, impl: MeshImpl | None = None) -> Lowering:
    """A lowering for the body of a loop or branch: sees this one's tensors, keeps its own.

    Args:
      loop_key: an integer scalar, laid out or not (the iteration number), so that random
        operations draw anew in each iteration.
      impl: the mesh on which it is laid out; by default the first.
    """
    result = object.__new__(type(self))  # Without __init__, which would lower the graph.
    result.__dict__.update(self.__dict__)
    # Copies: what is computed in a loop has no meaning behind it.
    result.tensors = dict(self.tensors)
    result._base_keys = dict(self._base_keys)
    result.recent = collections.deque(maxlen=GATHERED_AHEAD)
    if loop_key is not None:
      if self._loop_key is not None:
        if self._is_around:  # Numbers, which the programs of all meshes take.
          loop_key = _fold_keys(self._loop_key, loop_key)
        else:
          impl = impl or next(iter(self.mesh_to_impl.values()))
          loop_key = impl.slicewise(_fold_keys, self._loop_key, loop_key)
      result._loop_key = loop_key
    return result

  def prepare_random(self, operations: Sequence[Operation]) -> None:
    """Reads the seed now if an operation draws random numbers; a loop would read it each time."""
    for op in operations:
      if getattr(op, "draws_random_numbers", False) and not self.mesh_impl(op).is_elsewhere:
        self._base_key(self.mesh_impl(op))

  def _base_key(self, impl: MeshImpl) -> Any:
    if impl not in self._base_keys:
      seed = self.graph.random_seed if self._seed is None else self._seed
      if isinstance(seed, Tensor):
        if seed not in self.tensors:
          raise GraphError(f"graph.random_seed {seed} is made after the first random operation")
        seed = self.tensors[seed].to_laid_out_tensor()
      if seed is None:
        seed, self.run_counters[impl] = _next_run(impl)
        self.run_numbers[impl] = seed
      if isinstance(seed, int):
        self._base_keys[impl] = random_bits.fold(impl.variable_store.noise_seed, seed)
      else:
        start = impl.variable_store.noise_seed
        # As 64 bits: a negative number is then the same as it is as a Python int.
        self._base_keys[impl] = impl.slicewise(
          lambda s: random_bits.fold(start, tf.cast(s, tf.int64)), seed
        )
    return self._base_keys[impl]

  # ----------------------------------------------------------- used by programs

  @checked
  def export_to_tf_tensor(self, x: Tensor) -> tf.Tensor:
    """The whole value of a tensor of the graph, as a tf.Tensor."""
    if x not in self.tensors:
      raise NotLoweredError(
        f"{x} was not lowered: it was added to the graph after this Lowering was made, or it is "
        "inside a loop, or it is of one of several meshes and not among the `wanted`"
      )
    if self._is_around:
      return self.mesh_impl(x).combine_local_slices(self.tensors[x].tensor_list, x.shape)
    return self.mesh_impl(x).export_to_tf_tensor(x, self.tensors[x])

  @checked
  def lowered_operation(self, op: Operation) -> Any:
    """Returns the tf.Operation that lowers an `Assign`; None eagerly, where it has run."""
    if op not in self.operations:
      what = f"{type(op).__name__} {op.name}" if isinstance(op, Operation) else repr(op)
      raise NotLoweredError(
        f"lowered_operation: {what} is not among the {len(self.operations)} assignments of this "
        "Lowering: it is of another kind, or was added to the graph afterwards"
      )
    return self.operations[op]

  def copy_masters_to_slices(self) -> Any:
    """Nothing to do: slices are the only copy."""
    return tf.no_op()

  def copy_slices_to_masters(self) -> Any:
    """Nothing to do: slices are the only copy."""
    return tf.no_op()

  def autostack(self) -> None:
    """Calls `graph.rewrite_stack_variables`, which has no effect on values."""
    self.graph.rewrite_stack_variables(mesh_to_impl=self.mesh_to_impl)

  def _report(self, log_file: str | None) -> None:
    lines: list[str] = []
    lines += log_variable_sizes(
      self.graph.trainable_variables, "Trainable Variables", mesh_to_impl=self.mesh_to_impl
    )
    lines += log_variable_sizes(
      self.graph.all_variables, "All Variables", verbose=False, mesh_to_impl=self.mesh_to_impl
    )
    lines.append("Counters:")
    lines.append(pretty_print_counters(self._counters))
    if log_file is not None:
      with tf.io.gfile.GFile(log_file, "w") as f:
        f.write("\n".join(lines) + "\n")


def are_several(impls: Iterable[MeshImpl]) -> bool:
  """True if a program is lowered around the programs of its meshes: if there are several."""
  return len(set(impls)) > 1


def cross_workers(impls: Iterable[MeshImpl]) -> bool:
  """True if tensors of a program go from worker to worker between its meshes."""
  found = set(impls)
  return len(found) > 1 and any(impl.is_of_cluster for impl in found)


def _check_workers(graph: Graph, mesh_to_impl: Mapping[Mesh, MeshImpl]) -> None:
  """Checks, in a program of which workers run parts, that all of them have the same.

  Raises:
    ConfigError: they have not.
    UnsupportedError: a mesh is one that each worker has for itself.
  """
  if not cross_workers(mesh_to_impl.values()):
    return
  lines = []
  for mesh, impl in mesh_to_impl.items():
    if not impl.is_of_cluster:
      raise UnsupportedError(
        f"{mesh!r} of {impl.shape} is a mesh that each worker has for itself, and another one of "
        "the program is of all workers together; make all of them SimdMeshImpls on devices with "
        f"job and task, such as {workers.current().devices(workers.current().size)[0]}"
      )
    devices = [impl.processor_device(p) for p in range(impl.size)]
    rules = ", ".join(f"{a}:{b}" for a, b in sorted(impl.layout_rules.written))
    lines.append(f"{mesh!r} of {impl.shape} [{rules}] on {', '.join(map(str, devices))}")
  program = hashlib.sha256()
  for op in graph.operations:
    program.update(f"{op.name} {op.mesh!r} {op.outputs}\n".encode())
  lines.append(f"a program of {len(graph.operations)} operations, {program.hexdigest()[:12]}")
  with tf.init_scope():
    agreement.check_same(lines)


def one_store(impls: Iterable[MeshImpl]) -> VariableStore:
  """The variable store of all meshes of a program.

  Raises:
    VariableError: they have several.
  """
  first, *others = impls
  for impl in others:
    if impl.variable_store is not first.variable_store:
      raise VariableError(
        f"meshes {first.shape} and {impl.shape} of one program have variable stores of their own: "
        "give all of them one, variable_store=mtf.VariableStore(), so that names, initial values "
        "and checkpoints are those of one program"
      )
  return first.variable_store


def _unread_variables(graph: Graph, wanted: Iterable[Tensor]) -> frozenset[Tensor]:
  """The values of variables that no operation reads, and that are not wanted."""
  read = {x for op in graph.operations for x in reads(op)}
  return frozenset(v.value for v in graph.all_variables) - read - frozenset(wanted)


def is_division_by_zero(error: Exception) -> bool:
  """True if an error is TensorFlow's for an integer division by zero."""
  return isinstance(error, tf.errors.InvalidArgumentError) and "division by zero" in str(error)


def _run_counter(impl: MeshImpl) -> StoredVariable:
  return impl.variable_store.get(
    impl,
    RUN_COUNTER,
    Shape([]),
    master_dtype=tf.int32,
    slice_dtype=tf.int32,
    trainable=False,
  )


def _next_run(impl: MeshImpl) -> tuple[Any, StoredVariable]:
  """Reads and advances the store's run counter; returns the number, laid out, and the counter."""
  stored = _run_counter(impl)
  counter = LaidOutVariable(impl, stored, None)
  now = counter.laid_out_tensor
  now = impl.slicewise(tf.identity, now)
  counter.update(lambda v: v.assign_add(1))
  return now, stored


def _fold_keys(outer: Any, number: Any) -> Any:
  """The key of an iteration in that of a loop around."""
  return random_bits.fold(tf.cast(outer, tf.uint32), number)


def _scope_name(name: str) -> str:
  """A name that `tf.name_scope` accepts."""
  return re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name).lstrip("_/") or "op"


# Builds a function's graph of its arguments; returns (graph, inputs, what the function returned).
Build = Callable[[Sequence[tf.Tensor]], tuple[Graph, list[Tensor], Any]]


@dataclasses.dataclass(frozen=True)
class Values:
  """The values of a variable in one run.

  Attributes:
    stored: the variable.
    slices: a tensor of each slice.
  """

  stored: StoredVariable
  slices: Sequence[tf.Tensor]

  def laid_out(self, impl: MeshImpl) -> LaidOutTensor:
    """The slices that the running program holds."""
    own = dataclasses.replace(self.stored, slices=tuple(self.slices))
    return LaidOutTensor(impl.program_slices(own))


@dataclasses.dataclass
class Run:
  """Result of a run.

  Attributes:
    graph: the function's graph.
    structure: what the function returned.
    flat: the same, flat.
    results: tf.Tensors in the place of the mtf.Tensors of `flat`, and of those of TensorFlow.
    trains: whether it changes trainable variables.
    stored: its variables, by their full names.
    counter: the counter that it drew random numbers from, or None.
    values: the values that its variables had, unless it trains.
    seed: the number it drew random numbers from, if no seed was given.
  """

  graph: Graph
  structure: Any
  flat: list[Any]
  results: list[Any]
  trains: bool
  stored: dict[str, StoredVariable]
  counter: StoredVariable | None
  values: dict[str, Values]
  seed: Any

  def packed(self) -> Any:
    """The results in the structure that the function returned."""
    return tf.nest.pack_sequence_as(self.structure, self.results)


def assigned_variables(operations: Iterable[Operation]) -> Iterator[Variable]:
  """The variables that operations change, those in loops too."""
  for op in operations:
    yield from getattr(op, "variables", ())
    yield from assigned_variables(getattr(op, "inner_operations", ()))


def meshes_of(graph: Graph, impls: Mapping[str, MeshImpl]) -> dict[Mesh, MeshImpl]:
  """The mesh implementation of each mesh of a function's graph.

  Args:
    graph: the graph.
    impls: by the name of the mesh.
  """
  return {graph.mesh(name): impl for name, impl in impls.items()}


def run_on(
  impls: Mapping[str, MeshImpl],
  build: Build,
  values: Sequence[tf.Tensor],
  seed: Seed,
  log_file: str | None,
) -> Run:
  """Builds the graph of a function, and lowers it on mesh implementations.

  Args:
    impls: the mesh implementation of each mesh, by its name.
    build: see `Build`.
    values: the arguments.
    seed: see `Lowering`.
    log_file: see `Lowering`.
  """
  made: dict[str, Any] = {}
  several = are_several(impls.values())
  across = cross_workers(impls.values())
  first = next(iter(impls.values()))

  def program(values: Sequence[tf.Tensor], seed: Seed) -> Any:
    graph, _, result = build(values)
    flat = tf.nest.flatten(result)
    trains = any(v.trainable for v in assigned_variables(graph.operations))
    # Values that this run may change, as they are before.
    kept = [] if trains else [v for v in graph.all_variables if not v.trainable]
    wanted = [*(t for t in flat if isinstance(t, Tensor)), *(v.value for v in kept)]
    meshes = meshes_of(graph, impls)
    lowering = Lowering(graph, meshes, log_file=log_file, seed=seed, wanted=wanted)
    made.update(graph=graph, structure=result, flat=flat, trains=trains, meshes=meshes)
    made["stored"] = {v.full_name: lowering.variables[v].stored for v in graph.all_variables}
    made["counter"] = next(iter(lowering.run_counters.values()), None)
    at_start = {v.full_name: lowering.tensors[v.value] for v in kept}
    before = {
      name: (value.shards if isinstance(value, LazyGather) else value).tensor_list
      for name, value in at_start.items()
      if type(value) is not LazyLaidOutTensor  # Tables, which nobody reads whole.
    }
    # Slices, not whole tensors: they are put together outside, where it costs least.
    results = [
      [t]
      if isinstance(t, tf.Tensor)
      else lowering.tensors[t].to_laid_out_tensor().tensor_list
      if several
      else first.result_slices(lowering.tensors[t], t.shape)
      for t in flat
      if isinstance(t, (Tensor, tf.Tensor))
    ]
    return results, before, [n.tensor_list for n in lowering.run_numbers.values()]

  whole_results: list[tf.Tensor] = []

  def put_together() -> None:
    per_tensor = zip(*[r[0] for r in made["per_processor"]])
    for t in made["flat"]:
      if not isinstance(t, (Tensor, tf.Tensor)):
        continue
      slices = [s for r in next(per_tensor) for s in r]
      if isinstance(t, tf.Tensor):  # TensorFlow's own: that of the first device.
        # Of a call for each device: a tape must not find its way into that.
        whole_results.append(t if slices[0] is t else tf.stop_gradient(slices[0]))
        continue
      impl = made["meshes"][t.mesh]
      if across:
        whole_results.append(whole_everywhere(impl, t.shape, t.dtype, slices))
      else:
        whole_results.append(impl.combine_local_slices(slices, t.shape))

  def run() -> list[tf.Tensor]:
    if several:  # Each mesh has programs of its own.
      made["per_processor"] = [program(values, seed)]
    else:
      made["per_processor"] = first.run_per_device(program, (values, seed))
    put_together()
    return whole_results or [tf.constant(0)]

  if across:
    limit = max(impl.timeout_seconds for impl in impls.values() if isinstance(impl, SimdMeshImpl))
    TRANSFERS.guarded(limit, run)
  else:
    run()
  del made["meshes"]
  per_processor = made.pop("per_processor")
  in_order = iter(whole_results)
  results = [next(in_order) if isinstance(t, (Tensor, tf.Tensor)) else t for t in made["flat"]]
  read = {}
  for name, stored in made["stored"].items() if not made["trains"] else ():
    if not (stored.trainable or name in per_processor[0][1]):
      continue
    # Trainable variables do not change in this run; reading one makes a tape watch it.
    slices = (
      [s.read_value() for s in stored.slices]
      if stored.trainable
      # A tape that looks for second derivatives would find its way from here into the run.
      else [tf.stop_gradient(s) for r in per_processor for s in r[1][name]]
    )
    read[name] = Values(stored, slices)
  numbers = per_processor[0][2]
  seed = tf.stop_gradient(numbers[0][0]) if numbers else None
  return Run(**made, results=results, values=read, seed=seed)
