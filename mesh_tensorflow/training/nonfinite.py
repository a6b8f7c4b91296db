"""NaN and infinity in training: ending it, leaving out updates, finding where they began."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import ops
from mesh_tensorflow.errors import NonFiniteError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut, LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import padding
from mesh_tensorflow.operations.cross_mesh import reshard
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Graph, Mesh, Operation, Tensor
from mesh_tensorflow.running.lowering import Lowering

_LOG = logging.getLogger("mesh_tensorflow")

# A training whose steps are all skipped does not recover.
MAX_SKIPPED_IN_A_ROW = 100

# So many steps are repeated, at most, to find out where a NaN came from.
_MAX_REPEATED = 1000


class LossCheck:
  """Takes the results of the steps of a training.

  Args:
    settings: of the training; `nonfinite` is its own.
    skips: whether steps that are not finite are skipped, see `loss_scale.skips`.

  Attributes:
    skips: whether steps that are not finite are skipped.
    skipped_steps: how many were.
  """

  def __init__(self, settings: TrainerSettings, skips: bool):
    self.skips = skips
    self._setting = f"{settings.named('nonfinite')} = 'skip'"
    # In float16 they are skipped in any case: the loss scale is found so.
    self._why = self._setting if settings.nonfinite == "skip" else "as in float16"
    self.skipped_steps = 0
    self._in_a_row = 0

  def steps_before_end(self, losses: Sequence[float]) -> int:
    """Number of steps of a call before the one whose loss ends the training, or all.

    Args:
      losses: of the steps.
    """
    ends = (i for i, loss in enumerate(losses) if not self.skips and not math.isfinite(loss))
    return next(ends, len(losses))

  def take(
    self,
    step: int,
    losses: Sequence[float],
    bad: Sequence[float],
    saved_step: int,
    find: Callable[[int, float], str | None],
  ) -> None:
    """Checks the results of one call of the program.

    Args:
      step: number of steps done before it.
      losses: of its steps.
      bad: for each, how many elements of loss and gradients were not finite, if these are skipped.
      saved_step: the step of the last checkpoint, for the error.
      find: called with a step (from 0) and its loss, which is not finite; returns words about where
        that came from.

    Raises:
      NonFiniteError: training cannot go on.
    """
    if self.skips:
      self._count(step, bad, saved_step)
      return
    i = self.steps_before_end(losses)
    if i < len(losses):
      found = find(step + i, losses[i])
      raise NonFiniteError(
        f"the loss became {losses[i]} at step {step + i + 1}{f' ({found})' if found else ''}; "
        f"training stopped, and nothing was saved after step {saved_step}. Lower the learning "
        f"rate, or look at the data of that step; {self._setting} leaves such steps out"
      )

  def _count(self, step: int, bad: Sequence[float], saved_step: int) -> None:
    for i, n in enumerate(bad):
      self._in_a_row = self._in_a_row + 1 if n else 0
      self.skipped_steps += n > 0
      if self._in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise NonFiniteError(
          f"the loss or gradients of the last {self._in_a_row} steps, up to {step + i + 1}, were "
          f"NaN or infinite; all were skipped ({self._why}), and training stopped. The "
          f"last checkpoint is that of step {saved_step}"
        )


def count(x: Tensor) -> Tensor:
  """Number of elements of a tensor that are NaN or infinite, as a float32 scalar."""
  return _CountNonFinite(x).outputs[0]


class _CountNonFinite(Operation):
  """The count; of a gradient whose update needs only shards, each processor counts in its own."""

  lowers_uneven_slices = True
  reads_shards = True

  def __init__(self, x: Tensor):
    super().__init__([x], name="count_nonfinite")
    self._outputs = [Tensor(self, Shape([]), tf.float32)]

  @property
  def has_gradient(self) -> bool:
    return False

  def lower(self, lowering: LoweringInProgress) -> None:
    x, impl = self._inputs[0], lowering.mesh_impl(self)
    stored = impl.stored_layout(x.shape)
    shards = impl.to_shards(lowering.tensors[x], x.shape, stored)
    found: LaidOut = impl.slicewise(
      lambda s: tf.reduce_sum(tf.cast(tf.logical_not(tf.math.is_finite(s)), tf.float32)),
      stored.without_padding(shards, x.shape, padding.zero),
    )
    axes = [a for a in stored.tensor_layout(x.shape) if a is not None and impl.shape[a].size > 1]
    if axes:  # Pending: the counts of many tensors are added before they are exchanged.
      found = LazyAllreduceSum(impl, found, axes)
    lowering.set_tensor_lowering(self._outputs[0], found)


def skip_updates(graph: Graph, tensors: Sequence[Tensor]) -> Tensor:
  """Makes all variable updates of a graph conditional on some tensors being finite.

  Args:
    graph: a graph that has its updates.
    tensors: the loss and the gradients.

  Returns:
    The number of elements that are not finite, a scalar: 0 if the updates are done.
  """
  counts: dict[Mesh, list[Tensor]] = {}
  for x in tensors:
    if x.dtype.is_floating:
      counts.setdefault(x.mesh, []).append(count(x))
  of_meshes = [ops.add_n(found) for found in counts.values()]
  bad: Tensor = ops.add_n([reshard(x, graph.operations[0].mesh) for x in of_meshes])
  # Updates have no outputs: nothing depends on them, so that they can go into a condition.
  updates = [op for op in graph.operations if not op.outputs and getattr(op, "variables", None)]
  graph.operations[:] = [op for op in graph.operations if op not in updates]
  for mesh in dict.fromkeys(op.mesh for op in updates):
    _UpdatesIfFinite(reshard(bad, mesh), [op for op in updates if op.mesh is mesh])
  return bad


class _UpdatesIfFinite(Operation):
  """Runs operations that update variables if a count is 0."""

  lowers_uneven_slices = True
  is_cloneable = False

  def __init__(self, bad: Tensor, updates: Sequence[Operation]):
    super().__init__([bad], name="updates_if_finite")
    self._updates = list(updates)

  @property
  def variables(self) -> list[Any]:
    """The variables that are updated."""
    return [v for op in self._updates for v in getattr(op, "variables", ())]

  @property
  def implicit_inputs(self) -> list[Tensor]:
    """Tensors that the updates read."""
    return [x for op in self._updates for x in op.inputs]

  @property
  def has_gradient(self) -> bool:
    return False

  @property
  def draws_random_numbers(self) -> bool:
    """True if an update does."""
    return any(getattr(op, "draws_random_numbers", False) for op in self._updates)

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    for op in self._updates:
      op.check_layout(mesh_impl)

  def lower(self, lowering: Lowering) -> None:
    lowering.prepare_random(self._updates)
    # A scalar is the same on all processors: the first one's decides for all.
    bad = lowering.tensors[self.inputs[0]].to_laid_out_tensor().tensor_list[0]

    def update() -> tf.Tensor:
      lowering.lower_operations(self._updates)
      return tf.constant(True)

    tf.cond(tf.equal(bad, 0.0), update, lambda: tf.constant(False))
    for op in self._updates:
      lowering.operations[op] = None  # It is inside the condition.


def watched(
  graph: Graph, gradients: Sequence[Tensor | None], variables: Sequence[Variable]
) -> tuple[list[str], list[Tensor]]:
  """Titles of a graph's tensors, in order, and the numbers of their elements that are not finite.

  Args:
    graph: a graph with forward and backward pass.
    gradients: the gradients of `variables`; None of what the loss does not depend on.
    variables: `mtf.Variable`s.
  """
  titles = {
    g: f"the gradient of {v.full_name}" for g, v in zip(gradients, variables) if g is not None
  }
  titles |= {v.outputs[0]: f"variable {v.full_name}" for v in graph.all_variables}
  # In the order in which they are computed: the first that is not finite comes from no later one.
  tensors = [x for op in graph.operations for x in op.outputs if x.dtype.is_floating]
  names = [titles.get(x, f"{x.operation.name} {x.shape}") for x in tensors]
  return names, [count(x) for x in tensors]


def find(loop: Any, source: Any, step: int, first: int, checkpoint: str | None) -> str | None:
  """Finds the first tensor that was NaN or infinite, by replaying steps from a checkpoint.

  The replay has variables of its own; those of the training are not touched.

  Args:
    loop: the `TrainingLoop`, which may be past that step.
    source: its `TrainingSource`.
    step: number of the step (from 0) whose loss is not finite.
    first: the step of the checkpoint, or the one at which training began.
    checkpoint: path of the last checkpoint; None: replay from initial values.

  Returns:
    A sentence for an error message; None if the tensor was not found.
  """
  if step - first > _MAX_REPEATED:
    return None
  try:
    return _find(loop, source, step, first, checkpoint)
  except Exception as e:  # noqa: BLE001 - there is an error to report already.
    _LOG.warning("where the loss became not finite was not found: %s: %s", type(e).__name__, e)
    return None


def _find(loop: Any, source: Any, step: int, first: int, checkpoint: str | None) -> str | None:
  again = loop.replay()
  data = dataclasses.replace(source, program=again.program).batches_from(first)
  compiled = again.compile_steps(data.names)
  again.prepare(compiled, checkpoint=checkpoint)
  titles, watch = again.watch_step(data.names)
  usual: set[int] | None = None
  for i, batches in enumerate(data.calls(step + 1 - first, 1)):
    at = first + i
    if at > step - 3:  # The gradients of the step before may have been the first.
      counts = watch(*[b[0] for b in batches], 0.0, at)
      bad = {n for n, c in enumerate(counts) if float(c)}
      # A program may have infinities that are meant.
      new = sorted(bad - (usual or set()))
      if new and (usual is not None or at == step):
        return f"{titles[new[0]]} was not finite first, in step {at + 1}"
      usual = bad if usual is None else usual & bad
    if at < step:
      compiled(batches, tf.constant(at, tf.int64))
  return None
