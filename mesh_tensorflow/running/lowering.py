"""Lowering: a graph becomes TensorFlow operations on laid-out tensors.

`Lowering` does it; `run_on` is one run of a function of named tensors on a mesh: its graph is
built and lowered, its results are put together.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.environment.tensorflow_mode import check_tensorflow2
from mesh_tensorflow.errors import (
  ArgumentError,
  DivisionError,
  GraphError,
  LayoutError,
  NotLoweredError,
)
from mesh_tensorflow.meshes.contract import LaidOutVariable
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import (
  LaidOutTensor,
  LazyAllreduceSum,
  LazyGather,
  LazyLaidOutTensor,
)
from mesh_tensorflow.meshes.layout_names import check_tensor_names
from mesh_tensorflow.meshes.mesh_impl import GATHERED_AHEAD, MeshImpl
from mesh_tensorflow.meshes.store import StoredVariable
from mesh_tensorflow.numerics import bodies, random_bits
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import (
  Graph,
  Mesh,
  Operation,
  Tensor,
  is_of_one_shape,
  read_in_shards,
  reads,
)

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

  Raises:
    LayoutError: the layout does not suit the program; nothing has been lowered.
  """

  @checked
  def __init__(
    self,
    graph: Graph,
    mesh_to_impl: dict[Mesh, MeshImpl],
    autostack: bool = True,
    log_file: str | None = None,
    *,
    seed: Any = None,
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
    # Sums of which shards are asked for: each is scattered as soon as it can be.
    sharded = any(impl.state_dims for impl in mesh_to_impl.values())
    self._scattered = read_in_shards(graph.operations) if sharded else set[Tensor]()
    self.recent: collections.deque[Tensor] = collections.deque(maxlen=GATHERED_AHEAD)
    if autostack:
      self.autostack()
    if graph.checks_layout_names:
      self.check_layout_names()
    # All of them before the first is lowered, which already makes variables on the devices.
    for op in graph.operations:
      op.check_layout(self.mesh_impl(op))
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
    """Stores the slices of a tensor, after checking their shape."""
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
    for_operations: LoweringInProgress = self
    for op in operations:
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
    """Scatters sums of which shards are asked for, and remembers the operation for gathers."""
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

  def child(self, loop_key: LaidOutTensor | None = None) -> Lowering:
    """A lowering for the body of a loop or branch: sees this one's tensors, keeps its own.

    Args:
      loop_key: an integer scalar laid out (the iteration number), so that random
        operations draw anew in each iteration.
    """
    result = object.__new__(type(self))  # Without __init__, which would lower the graph.
    result.__dict__.update(self.__dict__)
    # Copies: what is computed in a loop has no meaning behind it.
    result.tensors = dict(self.tensors)
    result._base_keys = dict(self._base_keys)
    result.recent = collections.deque(maxlen=GATHERED_AHEAD)
    if loop_key is not None:
      if self._loop_key is not None:
        impl = next(iter(self.mesh_to_impl.values()))
        loop_key = impl.slicewise(
          lambda a, b: random_bits.fold(tf.cast(a, tf.uint32), b),
          self._loop_key,
          loop_key,
        )
      result._loop_key = loop_key
    return result

  def prepare_random(self, operations: Sequence[Operation]) -> None:
    """Reads the seed now if an operation draws random numbers; a loop would read it each time."""
    for op in operations:
      if getattr(op, "draws_random_numbers", False):
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
        "inside a loop"
      )
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


def is_division_by_zero(error: Exception) -> bool:
  """True if an error is TensorFlow's for an integer division by zero."""
  return isinstance(error, tf.errors.InvalidArgumentError) and "division by zero" in str(error)


def _next_run(impl: MeshImpl) -> tuple[Any, StoredVariable]:
  """Reads and advances the store's run counter; returns the number, laid out, and the counter."""
  stored = impl.variable_store.get(
    impl,
    RUN_COUNTER,
    Shape([]),
    master_dtype=tf.int32,
    slice_dtype=tf.int32,
    trainable=False,
  )
  counter = LaidOutVariable(impl, stored, None)
  now = counter.laid_out_tensor
  now = impl.slicewise(tf.identity, now)
  counter.update(lambda v: v.assign_add(1))
  return now, stored


def _scope_name(name: str) -> str:
  """A name that `tf.name_scope` accepts."""
  return re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name).lstrip("_/") or "op"


# Builds a function's graph of its arguments; returns (mesh, inputs, what the function returned).
Build = Callable[[Sequence[tf.Tensor]], tuple[Mesh, list[Tensor], Any]]


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
    results: tf.Tensors in the place of the mtf.Tensors of `flat`.
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


def run_on(
  impl: MeshImpl, build: Build, values: Sequence[tf.Tensor], seed: Seed, log_file: str | None
) -> Run:
  """Builds the graph of a function, and lowers it on a mesh implementation.

  Args:
    impl: the mesh implementation.
    build: see `Build`.
    values: the arguments.
    seed: see `Lowering`.
    log_file: see `Lowering`.
  """
  made: dict[str, Any] = {}

  def program(values: Sequence[tf.Tensor], seed: Seed) -> Any:
    mesh, _, result = build(values)
    graph, flat = mesh.graph, tf.nest.flatten(result)
    lowering = Lowering(graph, {mesh: impl}, log_file=log_file, seed=seed)
    trains = any(v.trainable for v in assigned_variables(graph.operations))
    made.update(graph=graph, structure=result, flat=flat, trains=trains)
    made["stored"] = {v.full_name: lowering.variables[v].stored for v in graph.all_variables}
    made["counter"] = lowering.run_counters.get(impl)
    # Values that this run may change, as they are before; not of tables, which nobody reads whole.
    at_start = {v.full_name: (v, lowering.tensors[v.value]) for v in graph.all_variables}
    kept = {
      name: (value.shards if isinstance(value, LazyGather) else value).tensor_list
      for name, (v, value) in at_start.items()
      if not (v.trainable or trains or type(value) is LazyLaidOutTensor)
    }
    # Slices, not whole tensors: they are put together outside, where it costs least.
    results = [
      impl.result_slices(lowering.tensors[t], t.shape) for t in flat if isinstance(t, Tensor)
    ]
    return results, kept, [n.tensor_list for n in lowering.run_numbers.values()]

  per_processor = impl.run_per_device(program, (values, seed))
  per_tensor = zip(*[r[0] for r in per_processor])
  results = [
    impl.combine_local_slices([s for r in next(per_tensor) for s in r], t.shape)
    if isinstance(t, Tensor)
    else t
    for t in made["flat"]
  ]
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
