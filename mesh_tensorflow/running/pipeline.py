"""Pipelines: a loop over microbatches whose body is of several meshes.

The body is divided into segments (see `segments`): the forward pass of each stage, its backward
pass. Each becomes a TensorFlow function, traced once, and is called for each microbatch in the
order that the table of a schedule says (`meshes.schedules`). On a mesh one call waits for the
other; from mesh to mesh there is only the flow of data, so that meshes work side by side. What the
body adds up, gradients of weights say, is added up where it is made, and exchanged once, after the
last microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.meshes import cross_mesh, schedules
from mesh_tensorflow.meshes.laid_out import LaidOutTensor, LazyAllreduceSum
from mesh_tensorflow.numerics import constants
from mesh_tensorflow.operations.control import ScalarSummaryOperation
from mesh_tensorflow.operations.cross_mesh import Reshard
from mesh_tensorflow.operations.loops import WhileLoopOperation
from mesh_tensorflow.program.graph import Operation, Tensor, needed_operations, reads
from mesh_tensorflow.running.segments import (
  Around,
  ImplOf,
  Segment,
  SegmentsLowering,
  changed,
  connect,
  in_program,
  read_again,
  segments_of,
)


@dataclasses.dataclass
class Stages:
  """The body of a pipeline, divided.

  Attributes:
    once: operations on what is the same for all microbatches, weights say, `Reshard`s among them;
      they run before these.
    counters: `Reshard`s of the number of the microbatch.
    order: the segments, and the `Reshard`s between them.
    summed: the outputs of the body but the first, which are added up over the microbatches.
    tasks: for each segment its `schedules.Task`.
  """

  once: list[Operation]
  counters: list[Reshard]
  order: list[Segment | Operation]
  summed: list[Tensor]
  tasks: list[schedules.Task]

  @property
  def segments(self) -> list[Segment]:
    """The segments, in order."""
    return [s for s in self.order if isinstance(s, Segment)]


def divided(loop: WhileLoopOperation, impl_of: ImplOf, seed: Tensor | None) -> Stages:
  """Divides the body of a pipeline into segments, and those into tasks.

  Args:
    loop: the loop.
    impl_of: returns the mesh implementation of an operation or a tensor.
    seed: what random operations read, besides their inputs.

  Raises:
    UnsupportedError: the loop is not one over microbatches, or its body changes variables.
  """
  body = loop.body
  what = f"{type(loop).__name__} {loop.name}: its body is of several meshes"
  if loop.num_variables != 1 or not isinstance(loop.maximum_iterations, int):
    raise UnsupportedError(
      f"{what}; only a loop over microbatches can be, that of mtf.serialize_training_step"
    )
  if loop.is_differentiated:
    raise UnsupportedError(
      f"{what}, and it has a gradient; mtf.serialize_training_step returns those of its loop"
    )
  for op in body.operations:
    for v in changed(op):
      raise UnsupportedError(f"{what}, and {op.name} in it changes {v.name}; assign after it")
  number = body.placeholders[0]
  outputs = body.outputs[1:]
  needed = needed_operations(body.operations, outputs)
  # What depends on the microbatch.
  varies, numbers = {number}, {number}
  once: list[Operation] = []
  counters: list[Reshard] = []
  inner: list[Operation] = []
  for op in body.operations:
    if op not in needed:
      continue
    if isinstance(op, Reshard) and op.inputs[0] in numbers:
      counters.append(op)
      numbers.update(op.outputs)
      varies.update(op.outputs)
    elif _is_invariant(op, varies, impl_of):
      once.append(op)
    else:
      # What is made of gradients, their casts before they are added up, is of the backward pass.
      op.is_backward |= any(x.operation.is_backward for x in op.inputs)
      inner.append(op)
      varies.update(op.outputs)
  order = _in_as_few(segments_of(inner, impl_of, outputs, seed))
  for s in order:
    if isinstance(s, Segment):
      read_again(s, None, seed)
    elif not isinstance(s, Reshard):
      raise UnsupportedError(f"{what}, and so is that of {s.name} in it")
  if loop.schedule == "zero_bubble":
    order = [part for s in order for part in _split(s, order)]
  connect(order, outputs, seed)
  return Stages(once, counters, order, outputs, _tasks(order, impl_of, outputs))


def _is_invariant(op: Operation, varies: set[Tensor], impl_of: ImplOf) -> bool:
  """True if an operation in the body has the same result for all microbatches."""
  if getattr(op, "draws_random_numbers", False) or hasattr(op, "inner_operations"):
    return False
  if (
    not op.outputs or isinstance(op, ScalarSummaryOperation) or any(x in varies for x in reads(op))
  ):
    return False
  # Weights that are stored in shards are gathered where they are used, and not kept.
  gathered = getattr(impl_of(op), "state_dims", ()) and op.inputs
  return isinstance(op, Reshard) or not gathered


def _crossing(order: Sequence[Segment | Operation]) -> set[Tensor]:
  """The tensors that go from mesh to mesh."""
  return {x for r in order if isinstance(r, Reshard) for x in r.inputs}


def _sends_activations(s: Segment, crossing: set[Tensor]) -> bool:
  """True if other meshes go on forward from a segment; gradients in it are of auxiliary losses."""
  return any(x in crossing for op in s.operations if not op.is_backward for x in op.outputs)


def _in_as_few(order: Sequence[Segment | Operation]) -> list[Segment | Operation]:
  """Joins segments that no other mesh waits for with those of their mesh that need them.

  What a stage computes of the features alone, the masks of the last one say, could run before the
  activations come. As a task of its own it would have more microbatches under way.
  """
  crossing = _crossing(order)
  left = list(order)
  for s in order:
    if not isinstance(s, Segment) or not crossing.isdisjoint(s.outputs):
      continue
    made = set(s.outputs)
    for later in left[left.index(s) + 1 :]:
      if isinstance(later, Segment) and later.impl is s.impl and not made.isdisjoint(later.inputs):
        later.operations = list(dict.fromkeys([*s.operations, *later.operations]))
        left.remove(s)
        break
  return left


def _split(s: Segment | Operation, order: Sequence[Segment | Operation]) -> list[Any]:
  """Divides a backward segment into what other meshes wait for, and the rest."""
  if not isinstance(s, Segment):
    return [s]
  crossing = _crossing(order)
  if _sends_activations(s, crossing):
    return [s]
  own = {x for op in s.operations for x in op.outputs}
  later = {
    x for other in order if isinstance(other, Segment) and other is not s for x in other.inputs
  }
  wanted = [x for x in own if x in crossing or x in later]
  first = needed_operations(s.operations, wanted)
  # The forward pass of the last stage, too.
  first |= {op for op in s.operations if not op.is_backward}
  rest = [op for op in s.operations if op not in first]
  if not wanted or not rest or not any(op.is_backward for op in first):
    return [s]
  weights = Segment(s.impl, s.level, rest)
  s.operations = [op for op in s.operations if op in first]
  read_again(weights, None, None)
  return [s, weights]


def _tasks(
  order: Sequence[Segment | Operation], impl_of: ImplOf, outputs: Sequence[Tensor]
) -> list[schedules.Task]:
  """The task of each segment.

  Args:
    order: the segments, and what is between them.
    impl_of: returns the mesh implementation of an operation or a tensor.
    outputs: what is added up over the microbatches.
  """
  # What a gradient is made of and no activation is needed for, the weights of a loss say, may be in
  # the forward segment of any run of layers on its mesh.
  crossing = _crossing(order)
  of_backward = {*outputs, *crossing}
  impls: dict[Any, int] = {}
  segments = [s for s in order if isinstance(s, Segment)]
  maker = {x: i for i, s in enumerate(segments) for x in s.outputs}
  source: dict[Tensor, Tensor] = {}
  for r in order:
    if isinstance(r, Reshard):
      source[r.outputs[0]] = source.get(r.inputs[0], r.inputs[0])
  tasks: list[schedules.Task] = []
  for s in segments:
    before = {maker[source.get(x, x)] for x in s.inputs if source.get(x, x) in maker}
    backward = any(op.is_backward and not of_backward.isdisjoint(op.outputs) for op in s.operations)
    kind = "F"
    if backward and any(tasks[i].kind != "F" for i in before):
      kind = "B"
    elif backward and not _sends_activations(s, crossing):
      kind = "FB"
    if kind == "B" and any(
      segments[i].impl is s.impl and segments[i].level == s.level for i in before
    ):
      kind = "W"
    mesh = impls.setdefault(s.impl, len(impls))
    seconds = {"F": 1.0, "B": 2.0, "FB": 3.0, "W": 1.0}[kind]
    tasks.append(schedules.Task(mesh, kind, tuple(sorted(before)), seconds))
  split = {t.mesh for t in tasks if t.kind == "W"}
  return [
    dataclasses.replace(t, seconds=t.seconds - 1.0) if t.mesh in split and "B" in t.kind else t
    for t in tasks
  ]


def lower_between(running: SegmentsLowering, loop: WhileLoopOperation) -> None:
  """Lowers a loop of several meshes in the program around them.

  Args:
    running: lowers what is around the loop.
    loop: over microbatches, which is a pipeline; or another one, decoding say, whose iterations run
      one after the other.
  """
  if len(loop.body.outputs) > loop.num_variables:
    _LoweredPipeline(running, loop).run()
  else:
    loop.lower(running.lowering)


class _LoweredPipeline:
  """One lowering of a pipeline."""

  def __init__(self, running: SegmentsLowering, loop: WhileLoopOperation):
    self.running, self.loop, self.lowering = running, loop, running.lowering
    self.impl_of: ImplOf = self.lowering.mesh_impl
    self.stages = divided(loop, self.impl_of, running.seed)
    self.count = int(loop.maximum_iterations or 0)  # A number, as `divided` has checked.
    self.table = schedules.table(self.stages.tasks, self.count, loop.schedule)
    self.made = {x for s in self.stages.order for x in s.outputs}
    self.functions = [_Stage(self, s) for s in self.stages.segments]
    self.crossings: dict[Segment, list[Reshard]] = {}
    maker = {x: s for s in self.stages.segments for x in s.outputs}
    for r in self.stages.order:
      if isinstance(r, Reshard):  # Also of what another one has brought.
        made = maker[r.outputs[0]] = maker[r.inputs[0]]
        self.crossings.setdefault(made, []).append(r)

  def run(self) -> None:
    lowering, loop = self.lowering, self.loop
    # A pending sum from outside is executed once.
    for x in loop.captured:
      if x in lowering.tensors:
        lowering.tensors[x].to_laid_out_tensor()
    read = {x for s in self.stages.order for x in s.inputs} | set(self.stages.summed)
    lowering.lower_block(
      self.stages.once, [x for op in self.stages.once for x in op.outputs if x in read]
    )
    # The seed goes to the meshes that read it, in all workers at this place.
    seed = self.running.seed
    for segment in self.stages.segments:
      if seed is not None and seed in segment.inputs:
        self.running.value(seed, segment.impl)
    values: list[dict[Tensor, list[Any]]] = [{} for _ in range(self.count)]
    sums: dict[Tensor, list[Any]] = {}
    wanted = set(self.stages.summed)
    reads = {x: 0 for x in self.made}
    for s in self.stages.order:
      for x in s.inputs:
        if x in reads:
          reads[x] += 1
    left = [dict(reads) for _ in values]
    before: dict[int, list[tf.Tensor]] = {}
    transfers: dict[Reshard, list[cross_mesh.Assembly]] = {}
    for mesh, action in self.table.in_order:
      m, stage = action.microbatch, self.functions[action.task]
      with tf.control_dependencies(before.get(mesh, [])):
        outputs, done = stage(m, values[m])
      before[mesh] = done
      for x, slices in outputs.items():
        if x in wanted:
          sums[x] = slices if x not in sums else _added(stage.impl, sums[x], slices)
      values[m].update(outputs)
      for r in self.crossings.get(stage.segment, ()):
        source, target = self.impl_of(r.inputs[0]), self.impl_of(r)
        shape = r.inputs[0].shape
        if r not in transfers:  # The same for all microbatches.
          transfers[r] = cross_mesh.plan_transfers(source, target, shape)
        values[m][r.outputs[0]] = cross_mesh.reshard(
          source, target, shape, r.inputs[0].dtype, values[m][r.inputs[0]], transfers[r]
        )
        left[m][r.inputs[0]] -= 1
      # What nobody reads any more is let go, so that it can be freed.
      for x in stage.segment.inputs:
        if x in left[m]:
          left[m][x] -= 1
      values[m] = {x: v for x, v in values[m].items() if left[m][x] > 0}
    self._set_outputs(sums)

  def _set_outputs(self, sums: dict[Tensor, list[Any]]) -> None:
    lowering, loop = self.lowering, self.loop
    impl = self.impl_of(loop.outputs[0])
    count = tf.constant(self.count)
    counts = LaidOutTensor([count] * len(impl.local_processors))
    lowering.set_tensor_lowering(loop.outputs[0], counts)
    axes = {x: a for f in self.functions for x, a in f.pending.items()}
    for out, x in zip(loop.outputs[1:], self.stages.summed):
      lowering.set_tensor_lowering(out, self._total(x, sums, axes))

  def _total(
    self, x: Tensor, sums: Mapping[Tensor, list[Any]], axes: Mapping[Tensor, list[int]]
  ) -> Any:
    """The sum of a tensor over the microbatches.

    Args:
      x: the tensor.
      sums: the slices of sums that were made microbatch by microbatch.
      axes: of those that are pending sums of the mesh the mesh axes.
    """
    impl = self.impl_of(x)
    if x not in sums:  # The same for all microbatches.
      n = self.count
      slices = self.running.value(x, impl).tensor_list
      return LaidOutTensor([t * tf.cast(n, t.dtype) for t in slices])
    value: Any = LaidOutTensor(sums[x])
    if x in axes:
      around: Any = Around(impl)
      value = LazyAllreduceSum(around, value, axes[x])
    return value


def _added(impl: Any, totals: Sequence[Any], slices: Sequence[Any]) -> list[Any]:
  added = []
  for p, a, b in zip(impl.local_processors, totals, slices):
    with tf.device(impl.processor_device(p)):
      added.append(tf.add(a, b))
  return added


class _Stage:
  """A segment as a function of the number of the microbatch, and of what was made for it before.

  Args:
    pipeline: the pipeline.
    segment: the segment.

  Attributes:
    pending: of the outputs that are pending sums the mesh axes.
  """

  def __init__(self, pipeline: _LoweredPipeline, segment: Segment):
    self.pipeline, self.segment, self.impl = pipeline, segment, segment.impl
    self.pending: dict[Tensor, list[int]] = {}
    # What comes with each call; the rest is the same in all of them.
    self.dynamic = [x for x in segment.inputs if x in pipeline.made]
    stages = pipeline.stages
    read = {x for s in stages.order for x in s.inputs}
    self.only_summed = {x for x in stages.summed if x not in read}
    self._concrete: Any = None

  def __call__(
    self, m: int, values: dict[Tensor, list[Any]]
  ) -> tuple[dict[Tensor, list[Any]], list[tf.Tensor]]:
    """Calls it for a microbatch.

    Args:
      m: its number.
      values: what was made for it before: of each tensor the slices.

    Returns:
      The slices of each output, and tensors that are there when the call has ended.
    """
    if self.impl.is_elsewhere:
      return {x: [] for x in self.segment.outputs}, []
    arguments = [tf.constant(m), *(t for x in self.dynamic for t in values[x])]
    if tf.executing_eagerly():
      flat = self._program(*arguments)
    else:
      if self._concrete is None:
        signature = [tf.TensorSpec(t.shape, t.dtype) for t in arguments]
        # Not inlined: it is optimized once, and not for each microbatch.
        function = tf.function(
          self._program, autograph=False, experimental_attributes={"_noinline": True}
        )
        self._concrete = function.get_concrete_function(*signature)
      flat = self._concrete(*arguments)
    outputs, n = {}, len(self.impl.local_processors)
    for i, x in enumerate(self.segment.outputs):
      outputs[x] = list(flat[i * n : (i + 1) * n])
    return outputs, list(flat[n * len(self.segment.outputs) :])

  @constants.of_one_graph()
  def _program(self, m: tf.Tensor, *flat: tf.Tensor) -> list[tf.Tensor]:
    """The slices of all outputs, one output after the other, then what says that it has run."""
    running, impl, segment = self.pipeline.running, self.impl, self.segment
    n = len(impl.local_processors)
    mine = {x: LaidOutTensor(flat[i * n : (i + 1) * n]) for i, x in enumerate(self.dynamic)}
    loop, stages = self.pipeline.loop, self.pipeline.stages
    number = LaidOutTensor([m] * n)
    numbers = [loop.body.placeholders[0], *(r.outputs[0] for r in stages.counters)]
    given = {
      x: number if x in numbers else mine[x] if x in mine else running.value(self._outside(x), impl)
      for x in segment.inputs
    }

    def program() -> Any:
      tensors = {x: in_program(impl, value) for x, value in given.items()}
      own = self.pipeline.lowering.of_segment(tensors, loop_key=impl.in_program([m] * n))
      own.lower_operations(segment.operations)
      return [self._slices(x, own.tensors[x]) for x in segment.outputs], tf.constant(0)

    per_processor = impl.run_per_device(program)
    outputs = [t for i in range(len(segment.outputs)) for r in per_processor for t in r[0][i]]
    return [tf.identity(t) for t in outputs] + [r[1] for r in per_processor]

  def _outside(self, x: Tensor) -> Tensor:
    """The tensor of the program around the loop for one that the body knows it by."""
    return self.pipeline.loop.known_by.get(x, x)

  def _slices(self, x: Tensor, value: Any) -> list[Any]:
    if x in self.only_summed and isinstance(value, LazyAllreduceSum) and not value.is_reduced:
      self.pending[x] = list(value.mesh_axes)
      value = value.laid_out_input
    slices: list[Any] = value.to_laid_out_tensor().tensor_list
    return slices
