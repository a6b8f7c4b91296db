"""Segments: a program of several meshes as programs of one mesh each, and what goes in between.

A segment is the operations of one mesh that run without waiting for another mesh in between. Their
*level* is the number of times that a tensor has gone from mesh to mesh on the way to them: segments
of one level do not depend on each other, and operations join the earliest that they can. So the
forward pass of a model whose layers are on two meshes is a segment on each, and its backward pass
is part of the second one and another one on the first.

Between segments are `Reshard`s, and loops over microbatches whose body is of several meshes: those
are pipelines (see `pipeline`), and divide their body into segments likewise.

Around the segments a tensor is the list of the slices of all processors of its mesh. A segment on a
placement mesh is lowered there; on a SIMD mesh it is a per-device program, traced once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.meshes import cross_mesh
from mesh_tensorflow.meshes.laid_out import LaidOutTensor, LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.blocks import with_inner
from mesh_tensorflow.operations.cross_mesh import Reshard
from mesh_tensorflow.operations.custom_gradient import CustomGradientOperation
from mesh_tensorflow.operations.loops import WhileLoopOperation
from mesh_tensorflow.operations.variables import Depend, ReadVariable, Variable
from mesh_tensorflow.program.graph import Operation, Tensor, reads


@dataclasses.dataclass(eq=False)
class Segment:
  """Operations of one mesh that run without waiting for another mesh in between.

  Attributes:
    impl: the mesh implementation.
    level: number of times that a tensor has gone from mesh to mesh before.
    operations: in order.
    inputs: tensors that they read and do not make.
    outputs: tensors that they make, and others read.
    after: segments that must have run, besides those that make the inputs.
  """

  impl: MeshImpl
  level: int
  operations: list[Operation] = dataclasses.field(default_factory=list)
  inputs: list[Tensor] = dataclasses.field(default_factory=list)
  outputs: list[Tensor] = dataclasses.field(default_factory=list)
  after: list[Segment] = dataclasses.field(default_factory=list)


ImplOf: TypeAlias = Callable[[Any], MeshImpl]
# What runs one after the other: segments, and operations between them.
Order: TypeAlias = Sequence["Segment | Operation"]


def is_pipeline(op: Operation, impl_of: ImplOf) -> bool:
  """True if an operation is a loop whose body is of several meshes.

  Args:
    op: an operation.
    impl_of: returns the mesh implementation of an operation or a tensor.
  """
  if not isinstance(op, WhileLoopOperation):
    return False
  return len({impl_of(inner) for inner in with_inner(op.body.operations)}) > 1


def touched(op: Operation) -> Iterable[Operation]:
  """The variables that an operation reads or changes, those in its blocks too."""
  if isinstance(op, Variable):
    yield op
  if isinstance(op, ReadVariable):
    yield op.inputs[0].operation
  yield from getattr(op, "variables", ())
  for inner in getattr(op, "inner_operations", ()):
    yield from touched(inner)


def changed(op: Operation) -> Iterable[Operation]:
  """The variables that an operation changes, those in its blocks too."""
  yield from getattr(op, "variables", ())
  for inner in getattr(op, "inner_operations", ()):
    yield from changed(inner)


def read_by(op: Operation, seed: Tensor | None) -> list[Tensor]:
  """The tensors that the lowering of an operation reads.

  Args:
    op: the operation.
    seed: what random operations read, besides their inputs.
  """
  found = op.lowered_from if isinstance(op, CustomGradientOperation) else reads(op)
  draws = seed is not None and getattr(op, "draws_random_numbers", False)
  return [*found, seed] if seed is not None and draws else found


def segments_of(
  operations: Sequence[Operation],
  impl_of: ImplOf,
  wanted: Iterable[Tensor],
  seed: Tensor | None = None,
) -> list[Segment | Operation]:
  """Divides operations into segments, in an order in which they can run.

  Args:
    operations: in order; what they read and do not make is there before.
    impl_of: returns the mesh implementation of an operation or a tensor.
    wanted: tensors that are asked for in the end.
    seed: what random operations read, besides their inputs.

  Returns:
    The segments, and the operations between them: `Reshard`s from mesh to mesh, and pipelines.

  Raises:
    UnsupportedError: a block of operations, a loop's body say, is of several meshes.
  """
  wanted = list(wanted)
  levels: dict[Operation, int] = {}
  # Of each variable the level of the last operation that had to do with it.
  last: dict[Operation, int] = {}
  # And that of its first change.
  first_change: dict[Operation, int] = {}
  found: dict[tuple[int, int], Segment] = {}
  between: dict[int, list[Operation]] = {}
  segment_of: dict[Operation, Segment] = {}

  def ready(x: Tensor, impl: MeshImpl) -> int:
    """The first level at which an operation of a mesh can read x."""
    if x.operation not in levels:
      return 0
    is_from_afar = x.operation not in segment_of or impl_of(x) is not impl
    return levels[x.operation] + is_from_afar

  used = set(wanted)
  for op in operations:
    used.update(read_by(op, seed))
  for op in operations:
    impl = impl_of(op)
    if isinstance(op, Reshard) and op.outputs[0] not in used:
      continue
    level = max([ready(x, impl) for x in read_by(op, seed)], default=0)
    variables = list(touched(op))
    level = max([level, *(last.get(v, 0) for v in variables)])
    if isinstance(op, Reshard) and impl_of(op.inputs[0]) is not impl:
      # It goes with the segment before it.
      levels[op] = levels.get(op.inputs[0].operation, 0)
      between.setdefault(levels[op], []).append(op)
      continue
    if is_pipeline(op, impl_of):
      levels[op] = level
      between.setdefault(level, []).append(op)
      # It reads variables while it runs: what changes them comes after it.
      read = [x.operation for x in read_by(op, seed) if isinstance(x.operation, Variable)]
      last.update((v, max(level + 1, last.get(v, 0))) for v in [*read, *variables])
      continue
    _check_one_mesh(op, impl, impl_of)
    waits = []
    for d in op.dependencies if isinstance(op, Depend) else ():
      other = d.operation if isinstance(d, Tensor) else d
      if other in segment_of and segment_of[other].impl is not impl:
        waits.append(segment_of[other])
        level = max(level, levels[other] + 1)
      else:
        level = max(level, levels.get(other, 0))
    last.update(dict.fromkeys(variables, level))
    for v in changed(op):
      first_change.setdefault(v, level)
    segment = found.setdefault((id(impl), level), Segment(impl, level))
    segment.operations.append(op)
    segment.after += [s for s in waits if s not in segment.after]
    levels[op], segment_of[op] = level, segment
  _sink(found, between, levels, segment_of)
  order: list[Segment | Operation] = []
  for level in sorted({s.level for s in found.values()} | set(between)):
    order += [s for s in found.values() if s.level == level]
    order += between.get(level, [])
  for s in order:
    if isinstance(s, Segment):
      level = s.level
      unchanged = {
        x.operation
        for op in s.operations
        for x in read_by(op, seed)
        if level <= first_change.get(x.operation, level)
      }
      read_again(s, unchanged, seed)
  connect(order, wanted, seed)
  return order


def _sink(
  found: dict[tuple[int, int], Segment],
  between: dict[int, list[Operation]],
  levels: dict[Operation, int],
  segment_of: dict[Operation, Segment],
) -> None:
  """Moves what is computed of constants and variables alone to where it is used."""
  first_use: dict[Operation, int] = {}

  def used(x: Tensor, level: int) -> None:
    first_use[x.operation] = min(first_use.get(x.operation, level), level)

  for level, operations in between.items():
    for op in operations:
      for x in read_by(op, None):
        used(x, level)
  for s in sorted(found.values(), key=lambda s: -s.level):
    movable: set[Operation] = set()
    for op in s.operations:
      is_free = all(x.operation in movable or x.operation not in levels for x in reads(op))
      is_pure = op.outputs and not hasattr(op, "inner_operations")
      if isinstance(op, Variable) or (is_free and is_pure and not list(touched(op))):
        movable.add(op)
    moved: set[Operation] = set()
    for op in reversed(s.operations):
      use = first_use.get(op, s.level)
      later = found.get((id(s.impl), use))
      if op in movable and not isinstance(op, Variable) and use > s.level and later is not None:
        moved.add(op)
        later.operations.insert(0, op)
        levels[op], segment_of[op] = use, later
      for x in read_by(op, None):
        used(x, levels[op])
    s.operations = [op for op in s.operations if op not in moved]
  for key in [key for key, s in found.items() if not s.operations]:
    del found[key]


def read_again(
  segment: Segment, unchanged: Container[Operation] | None, seed: Tensor | None
) -> None:
  """Has a segment read the variables that it uses by itself.

  Args:
    segment: the segment.
    unchanged: those of which this has the value that it reads; None: all.
    seed: see `read_by`.
  """
  own = set(segment.operations)
  used = dict.fromkeys(x.operation for op in segment.operations for x in read_by(op, seed))
  segment.operations[:0] = [
    v
    for v in used
    if isinstance(v, Variable) and v not in own and (unchanged is None or v in unchanged)
  ]


def _check_one_mesh(op: Operation, impl: MeshImpl, impl_of: ImplOf) -> None:
  """Raises `UnsupportedError` if an operation, or one in its blocks, is of several meshes."""
  inner_operations = with_inner(getattr(op, "inner_operations", ()))
  inside = [x for inner in inner_operations for x in (*inner.inputs, inner)]
  for x in (*read_by(op, None), *getattr(op, "variables", ()), *inside):
    if impl_of(x) is not impl:
      raise UnsupportedError(
        f"{type(op).__name__} {op.name} on {op.mesh!r} has to do with {x.name} on {x.mesh!r}: an "
        "operation and the blocks in it are of one mesh; mtf.reshard what comes from another mesh "
        "before it"
      )


def connect(order: Order, wanted: Iterable[Tensor], seed: Tensor | None) -> None:
  """Sets the inputs and outputs of segments.

  Args:
    order: the segments, and the operations between them.
    wanted: tensors that are asked for in the end.
    seed: see `read_by`.
  """
  needed = dict.fromkeys(wanted)
  made: dict[Operation, Segment] = {}
  for s in order:
    if isinstance(s, Segment):
      own = set(s.operations)
      inputs = dict.fromkeys(x for op in s.operations for x in read_by(op, seed))
      s.inputs = [x for x in inputs if x.operation not in own]
      needed.update(dict.fromkeys(s.inputs))
      for op in s.operations:
        made.setdefault(op, s)  # A variable that several read: the first.
    else:
      needed.update(dict.fromkeys(_read_between(s, seed)))
  for s in order:
    if isinstance(s, Segment):
      s.outputs = [x for x in needed if made.get(x.operation) is s]


def _read_between(op: Operation, seed: Tensor | None) -> list[Tensor]:
  """Tensors read by an operation between segments; those in a loop read variables themselves."""
  found = read_by(op, seed)
  if not isinstance(op, WhileLoopOperation):
    return found
  moved = {x for inner in op.body.operations if isinstance(inner, Reshard) for x in inner.inputs}
  return [x for x in found if x in moved or not isinstance(x.operation, Variable)]


class Around:
  """A mesh as a pending sum sees it that is executed in the program around the mesh's own.

  Args:
    impl: the mesh implementation.
  """

  def __init__(self, impl: MeshImpl):
    self._impl = impl

  def allreduce(self, x: Any, mesh_axes: Sequence[int], reduction_fn_string: str) -> LaidOutTensor:
    """As `MeshImpl.allreduce`, of the slices of all processors."""
    impl, slices = self._impl, x.tensor_list

    def program() -> list[Any]:
      total = impl.allreduce(impl.in_program(slices), mesh_axes, reduction_fn_string)
      return total.tensor_list

    return LaidOutTensor([t for r in impl.run_per_device(program) for t in r])

  def __getattr__(self, name: str) -> Any:
    raise UnsupportedError(f"{name} of a sum around the programs of mesh {self._impl.shape}")


def in_program(impl: MeshImpl, value: Any) -> Any:
  """Brings slices from around the programs of a mesh into the one that runs; sums stay pending."""
  if isinstance(value, LazyAllreduceSum) and not value.is_reduced:
    parts = impl.in_program(value.laid_out_input.tensor_list)
    return LazyAllreduceSum(impl, parts, value.mesh_axes, add_counter_fn=value.add_counter_fn)
  return impl.in_program(value.tensor_list)


class SegmentsLowering:
  """Lowers segments, each on its mesh; `lowering.tensors` gets the slices of their outputs.

  Args:
    lowering: a `Lowering`, called in the program around the meshes.
    lower_between: lowers a loop of several meshes, likewise.
  """

  def __init__(self, lowering: Any, lower_between: Callable[[SegmentsLowering, Any], None]):
    self.lowering = lowering
    self._lower_between = lower_between
    self._seeds: dict[MeshImpl, LaidOutTensor] = {}
    # Of each segment: what comes after waits for it.
    self._done: dict[Segment, list[tf.Tensor]] = {}

  @property
  def seed(self) -> Tensor | None:
    """The tensor that random operations read, if there is one."""
    seed = self.lowering.graph.random_seed if not self.lowering.has_seed else None
    return seed if isinstance(seed, Tensor) else None

  def value(self, x: Tensor, impl: MeshImpl) -> Any:
    """A tensor, laid out on a mesh that reads it; the seed is brought to each.

    Args:
      x: a tensor that is lowered.
      impl: the mesh implementation.
    """
    found = self.lowering.tensors[x]
    source = self.lowering.mesh_impl(x)
    if x is not self.seed or source is impl:
      return found
    if impl not in self._seeds:
      moved = cross_mesh.reshard(source, impl, x.shape, x.dtype, found.tensor_list)
      self._seeds[impl] = LaidOutTensor(moved)
    return self._seeds[impl]

  def run(self, order: Order) -> None:
    """Lowers everything in an order that `segments_of` returned."""
    lowering = self.lowering
    for s in order:
      if isinstance(s, Segment):
        with tf.control_dependencies([t for before in s.after for t in self._done[before]]):
          self._done[s] = self._run_segment(s)
      elif isinstance(s, Reshard):
        lowering.lower_operations([s])
      else:
        self._lower_between(self, s)

  def _run_segment(self, segment: Segment) -> list[tf.Tensor]:
    lowering, impl = self.lowering, segment.impl
    given = {x: self.value(x, impl) for x in segment.inputs}
    if impl.is_elsewhere:
      lowering.leave_to_others(segment.operations, segment.outputs)
      return []
    names: list[str] = []

    def program() -> Any:
      own = lowering.of_segment({x: in_program(impl, value) for x, value in given.items()})
      own.lower_operations(segment.operations)
      names[:] = [name for name, _ in own.scalar_summaries]
      outputs = [own.tensors[x].to_laid_out_tensor().tensor_list for x in segment.outputs]
      assigned = [own.operations[op] for op in segment.operations if op in own.operations]
      if tf.executing_eagerly():
        assigned = []
      with tf.control_dependencies([*(t for slices in outputs for t in slices), *assigned]):
        has_run = tf.identity(0)
      return outputs, [value for _, value in own.scalar_summaries], has_run

    per_processor = impl.run_per_device(program)
    for i, x in enumerate(segment.outputs):
      lowering.tensors[x] = LaidOutTensor([t for r in per_processor for t in r[0][i]])
    lowering.scalar_summaries += zip(names, per_processor[0][1])
    done = [r[2] for r in per_processor]
    if not tf.executing_eagerly():
      with tf.control_dependencies(done):
        finished = tf.no_op()
      for op in segment.operations:
        if op in lowering.operations:
          lowering.operations[op] = finished
    return done
