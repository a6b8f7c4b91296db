"""Lowers one operation in isolation, under one assignment of its own dimensions.

What a whole program costs is the sum of such pieces, as its lowering goes through its operations
one by one. The only thing that passes between them, besides slices, are sums that are pending.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import MeshError
from mesh_tensorflow.meshes.laid_out import LaidOutTensor, LazyAllreduceSum
from mesh_tensorflow.meshes.laid_out_variable import LaidOutVariable
from mesh_tensorflow.meshes.layout import LayoutRules
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.planning.costs import PlanLowering, Recorder
from mesh_tensorflow.planning.liveness import base, bytes_held, planned_slice
from mesh_tensorflow.planning.mesh_impl import PlanMeshImpl
from mesh_tensorflow.planning.variables import placeholder
from mesh_tensorflow.planning.work import Work
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Graph, Operation, Tensor
from mesh_tensorflow.program.reachability import reads

# Number of operations after which a new scratch graph is used, to free memory.
_MOST_IN_A_GRAPH = 2000

# The state of a tensor: None, or the mesh axes over which its sum is pending.
State = tuple[int, ...] | None


@dataclasses.dataclass
class Piece:
  """Cost and effects of one operation under an assignment.

  Attributes:
    problem: why the layout does not suit it, or "".
    works: what one device does, and how often.
    exchanges: (kind, bytes over each mesh axis, how often), without those of pending inputs.
    executed: by number of the tensor read whose pending sum it executes: bytes of its slice.
    states: of its outputs.
    same: for each output the number of the tensor read that it is, pending or not, or None.
    buffers: for each output ("new", bytes), or whose memory it uses: ("input", number),
      ("reduced", number), ("output", number), ("elsewhere", 0).
    pending: for each output the bytes of its slice as a sum sends them.
    inside: bytes that its body takes.
    inputs: bytes that it brings in from outside.
  """

  problem: str = ""
  works: list[tuple[Work, int]] = dataclasses.field(default_factory=list)
  exchanges: list[tuple[str, dict[int, int], int]] = dataclasses.field(default_factory=list)
  executed: dict[int, int] = dataclasses.field(default_factory=dict)
  states: list[State] = dataclasses.field(default_factory=list)
  same: list[int | None] = dataclasses.field(default_factory=list)
  buffers: list[tuple[str, int]] = dataclasses.field(default_factory=list)
  pending: list[int] = dataclasses.field(default_factory=list)
  inside: int = 0
  inputs: int = 0


class _Made(dict[Any, Any]):
  """A dict that makes missing entries: the lowerings of operations before the probed one."""

  def __init__(self, make: Any):
    super().__init__()
    self._make = make

  def __missing__(self, key: Any) -> Any:
    self[key] = self._make(key)
    return self[key]


class Prober:
  """Lowers single operations in isolation."""

  def __init__(self) -> None:
    self._graph = tf.Graph()
    self._count = 0
    self.lowered = 0
    # Making a lowering anew checks the process each time; a child of one does not.
    with self._graph.as_default():
      self._lowering = PlanLowering(Graph(), {}, Recorder(PlanMeshImpl([], {})), None)

  def piece(
    self,
    op: Operation,
    sizes: Sequence[int],
    assignment: Sequence[tuple[str, int]],
    states: Sequence[State],
    in_loop: bool = False,
  ) -> Piece:
    """Lowers an operation.

    Args:
      op: the operation.
      sizes: of the mesh axes.
      assignment: (dimension name, mesh axis) pairs.
      states: of the tensors that it reads.
      in_loop: whether it is inside of a loop, and other random numbers are drawn each time.
    """
    self._count += 1
    self.lowered += 1
    if self._count > _MOST_IN_A_GRAPH:
      self._graph, self._count = tf.Graph(), 0
    made: list[Piece] = []

    def run() -> None:
      made.append(_lower(self._lowering, op, sizes, assignment, states, in_loop))

    try:
      with self._graph.as_default():
        run()
    except MeshError as e:
      return Piece(problem=str(e))
    except (RuntimeError, TypeError, ValueError):
      # Operations that capture eager tensors can only be traced in a function.
      with tf.Graph().as_default():
        try:
          tf.function(run, autograph=False).get_concrete_function()
        except MeshError as e:
          return Piece(problem=str(e))
    return made[-1]


def _lower(
  empty: PlanLowering,
  op: Operation,
  sizes: Sequence[int],
  assignment: Sequence[tuple[str, int]],
  states: Sequence[State],
  in_loop: bool,
) -> Piece:
  mesh = Shape([Dimension(f"axis{i}", n) for i, n in enumerate(sizes)])
  impl = PlanMeshImpl(mesh, LayoutRules([(d, f"axis{a}") for d, a in assignment]))
  recorder = Recorder(impl)
  read = reads(op)
  meshes = {x.mesh: impl for x in [*read, *op.outputs]} | {op.mesh: impl}
  lowering = empty.alone(meshes, recorder, placeholder([], tf.int64), in_loop)
  lowering.variables = _Made(lambda v: _variable(impl, v))
  lowering.operations = _Made(lambda _: tf.no_op())
  op.verify_layout(impl)
  given: dict[Tensor, Any] = {}
  for x, state in zip(read, states):
    if x not in given:
      laid_out: Any = LaidOutTensor([placeholder(impl.slice_shape(x.shape), x.dtype)])
      given[x] = laid_out if state is None else LazyAllreduceSum(impl, laid_out, list(state))
  lowering.tensors.update(given)
  lowering.lower_operations([op])
  return _piece(op, read, given, lowering, recorder)


def _variable(impl: PlanMeshImpl, v: Variable) -> LaidOutVariable:
  stored = impl.variable_store.get(
    impl,
    v.full_name,
    v.shape,
    master_dtype=v.master_dtype,
    slice_dtype=v.slice_dtype,
    initializer=None,
    trainable=v.trainable,
  )
  return LaidOutVariable(impl, stored, v)


def _piece(
  op: Operation,
  read: Sequence[Tensor],
  given: dict[Tensor, Any],
  lowering: PlanLowering,
  recorder: Recorder,
) -> Piece:
  impl = recorder.impl
  pending = {
    id(v.laid_out_input): read.index(x) for x, v in given.items() if isinstance(v, LazyAllreduceSum)
  }
  piece = Piece(inside=recorder.inside.get(op, 0))
  piece.inputs = sum(int(x.shape.num_elements()) * int(x.dtype.size) for x in impl.inputs)
  for cost in recorder.costs.values():
    piece.works.append((cost.work, cost.times))
    for c in cost.collectives:
      source = pending.get(id(c.source))
      if source is not None and c.kind == "allreduce" and given[read[source]].is_reduced:
        piece.executed[source] = c.slice_bytes
      else:
        piece.exchanges.append((c.kind, c.bytes_over, cost.times))
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
    piece.states.append(tuple(value.mesh_axes) if lazy else None)
    same = [i for i, x in enumerate(read) if given[x] is value]
    piece.same.append(same[0] if same else None)
    t = base(planned_slice(lowering, out))
    piece.buffers.append(places.setdefault(t.ref(), ("output", j)))
    if piece.buffers[-1] == ("output", j):
      piece.buffers[-1] = ("new", bytes_held(lowering, out))
    slices = planned_slice(lowering, out)
    # Booleans travel as int32.
    element = 4 if slices.dtype == tf.bool else int(slices.dtype.size)
    piece.pending.append(int(slices.shape.num_elements()) * element)
  return piece
