"""Segments: a program of several meshes as programs of one mesh each, and what goes in between.

A segment is the operations of one mesh that run without waiting for another mesh in between. Their
*level* is the number of times that a tensor has gone from mesh to mesh on the way to them: segments
of one level do not depend on each other, and operations join the earliest that they can. So the
forward pass of a model whose layers are on two meshes is a segment on each, and its backward pass
is part of the second one and another one on the first.

Around the segments a tensor is the list of the slices of all processors of its mesh. A segment on a
placement mesh is lowered there; on a SIMD mesh it is a per-device program, traced once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.meshes import cross_mesh
from mesh_tensorflow.meshes.laid_out import LaidOutTensor
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.cross_mesh import Reshard
from mesh_tensorflow.operations.variables import Depend, ReadVariable, Variable
from mesh_tensorflow.program.graph import Operation, Tensor, reads


@dataclasses.dataclass
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


def touched(op: Operation) -> Iterable[Operation]:
  """The variables that an operation reads or changes, those in its blocks too."""
  if isinstance(op, Variable):
    yield op
  if isinstance(op, ReadVariable):
    yield op.inputs[0].operation
  yield from getattr(op, "variables", ())
  for inner in getattr(op, "inner_operations", ()):
    yield from touched(inner)


def segments_of(
  operations: Sequence[Operation],
  impl_of: Callable[[Any], MeshImpl],
  wanted: Iterable[Tensor],
  seed: Tensor | None = None,
) -> list[Segment | Reshard]:
  """Divides operations into segments, in an order in which they can run.

  Args:
    operations: of a graph, in order.
    impl_of: returns the mesh implementation of an operation or a tensor.
    wanted: tensors that are asked for in the end.
    seed: what random operations read, besides their inputs.

  Returns:
    The segments, and the operations between them that go from mesh to mesh.

  Raises:
    UnsupportedError: a block of operations, a loop's body say, is of several meshes.
  """
  levels: dict[Operation, int] = {}
  # Of each variable the level of the last operation that had to do with it, and of the first change.
  last: dict[Operation, int] = {}
  changed: dict[Operation, int] = {}
  found: dict[tuple[int, int], Segment] = {}
  crossings: dict[int, list[Reshard]] = {}
  segment_of: dict[Operation, Segment] = {}
  for op in operations:
    impl = impl_of(op)
    if isinstance(op, Reshard) and impl_of(op.inputs[0]) is not impl:
      levels[op] = levels[op.inputs[0].operation]
      crossings.setdefault(levels[op], []).append(op)
      continue
    _check_one_mesh(op, impl, impl_of)
    level, waits = 0, []
    for x in _read(op, seed):
      before = levels[x.operation]
      is_from_afar = isinstance(x.operation, Reshard) and x.operation not in segment_of
      level = max(level, before + (is_from_afar or impl_of(x) is not impl))
    for d in op.dependencies if isinstance(op, Depend) else ():
      other = d.operation if isinstance(d, Tensor) else d
      if other in segment_of and segment_of[other].impl is not impl:
        waits.append(segment_of[other])
        level = max(level, levels[other] + 1)
      else:
        level = max(level, levels.get(other, 0))
    variables = list(touched(op))
    level = max([level, *(last.get(v, 0) for v in variables)])
    last.update(dict.fromkeys(variables, level))
    for v in _changed_by(op):
      changed.setdefault(v, level)
    segment = found.setdefault((id(impl), level), Segment(impl, level))
    segment.operations.append(op)
    segment.after += [s for s in waits if s not in segment.after]
    levels[op], segment_of[op] = level, segment
  order: list[Segment | Reshard] = []
  for level in sorted({s.level for s in found.values()} | set(crossings)):
    order += [s for s in found.values() if s.level == level]
    order += crossings.get(level, [])
  _read_again(order, changed, seed)
  _connect(order, segment_of, wanted, seed)
  return order


def _changed_by(op: Operation) -> Iterable[Operation]:
  """The variables that an operation changes, those in its blocks too."""
  yield from getattr(op, "variables", ())
  for inner in getattr(op, "inner_operations", ()):
    yield from _changed_by(inner)


def _read_again(
  order: Sequence[Segment | Reshard], changed: dict[Operation, int], seed: Tensor | None
) -> None:
  """Has each segment read the variables that it uses by itself, unless they have changed."""
  for s in order:
    if isinstance(s, Segment):
      own = set(s.operations)
      used = dict.fromkeys(x.operation for op in s.operations for x in _read(op, seed))
      s.operations[:0] = [
        v
        for v in used
        if isinstance(v, Variable) and v not in own and s.level <= changed.get(v, s.level)
      ]


def _read(op: Operation, seed: Tensor | None) -> list[Tensor]:
  draws = seed is not None and getattr(op, "draws_random_numbers", False)
  return [*reads(op), seed] if seed is not None and draws else reads(op)


def _check_one_mesh(op: Operation, impl: MeshImpl, impl_of: Callable[[Any], MeshImpl]) -> None:
  """Raises `UnsupportedError` if an operation, or one in its blocks, is of several meshes."""
  inside = [x for inner in getattr(op, "inner_operations", ()) for x in (*inner.inputs, inner)]
  for x in (*op.inputs, *getattr(op, "variables", ()), *inside):
    if impl_of(x) is not impl:
      raise UnsupportedError(
        f"{type(op).__name__} {op.name} on {op.mesh!r} has to do with {x.name} on {x.mesh!r}: an "
        "operation and the blocks in it are of one mesh; mtf.reshard what comes from another mesh "
        "before it"
      )


def _connect(
  order: Sequence[Segment | Reshard],
  segment_of: dict[Operation, Segment],
  wanted: Iterable[Tensor],
  seed: Tensor | None,
) -> None:
  """Sets the inputs and outputs of segments."""
  needed = dict.fromkeys(wanted)
  for s in order:
    if isinstance(s, Reshard):
      needed[s.inputs[0]] = None
      continue
    own = set(s.operations)
    inputs = dict.fromkeys(x for op in s.operations for x in _read(op, seed))
    s.inputs = [x for x in inputs if x.operation not in own]
    needed.update(dict.fromkeys(s.inputs))
  for x in needed:
    segment = segment_of.get(x.operation)
    if segment is not None:
      segment.outputs.append(x)


def lower_segments(lowering: Any, order: Sequence[Segment | Reshard]) -> None:
  """Lowers segments, each on its mesh; `lowering.tensors` gets the slices of their outputs.

  Args:
    lowering: a `Lowering`, called in the program around the meshes.
    order: what `segments_of` returned.
  """
  seed, seeds = lowering.graph.random_seed, dict[MeshImpl, LaidOutTensor]()
  done: dict[int, list[tf.Tensor]] = {}  # By the id of a segment: what comes after waits for it.
  for s in order:
    if isinstance(s, Reshard):
      lowering.lower_operations([s])
      continue
    given = {}
    for x in s.inputs:
      slices = lowering.tensors[x]
      if x is seed and lowering.mesh_impl(x) is not s.impl:
        if s.impl not in seeds:
          source = lowering.mesh_impl(x)
          moved = cross_mesh.reshard(source, s.impl, x.shape, slices.tensor_list)
          seeds[s.impl] = LaidOutTensor(moved)
        slices = seeds[s.impl]
      given[x] = slices.tensor_list
    with tf.control_dependencies([t for before in s.after for t in done[id(before)]]):
      done[id(s)] = _lower_segment(lowering, s, given)


def _lower_segment(
  lowering: Any, segment: Segment, given: dict[Tensor, list[Any]]
) -> list[tf.Tensor]:
  """Lowers a segment; returns tensors that are there when it has run."""
  impl = segment.impl
  names: list[str] = []

  def program() -> Any:
    own = lowering.of_segment({x: impl.in_program(slices) for x, slices in given.items()})
    own.lower_operations(segment.operations)
    names[:] = [name for name, _ in own.scalar_summaries]
    outputs = [own.tensors[x].to_laid_out_tensor().tensor_list for x in segment.outputs]
    return outputs, [value for _, value in own.scalar_summaries], tf.constant(0)

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
