"""Values that a training step returns for reports, and the steps that are reported."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.tpu.mesh_impl import StrategyMeshImpl
from mesh_tensorflow.operations.blocks import BlockOperation
from mesh_tensorflow.operations.control import ScalarSummaryOperation
from mesh_tensorflow.operations.cross_mesh import reshard
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.stacking import stack
from mesh_tensorflow.operations.variables import Variable, read_variable
from mesh_tensorflow.optimize import global_norm
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Graph, Mesh, Operation, Tensor


@dataclasses.dataclass(frozen=True)
class ReportSteps:
  """The steps of which a report tells: the first of a run, each multiple, and the last.

  Steps are numbered by how many are done after them, from 1.

  Attributes:
    first: number of steps done when the run begins.
    last: number of steps done when it ends.
    every: steps between reports.
    norms_every: steps between norms; None: those of the reports; 0: no norms.
    ends: further steps after which a call has to end.
  """

  first: int
  last: int
  every: int
  norms_every: int | None = None
  ends: tuple[int, ...] = ()

  def between(self, before: int, step: int) -> list[int]:
    """The reported steps behind `before`, up to `step`."""
    multiples = range((before // self.every + 1) * self.every, step + 1, self.every)
    found = {n for n in (self.first + 1, self.last) if before < n <= step}
    return sorted(found.union(multiples))

  def steps_of_call(self, step: int, most: int) -> int:
    """Number of steps of the next call, chosen so that it ends at a reported step if possible.

    Args:
      step: number of steps done.
      most: maximum number of steps of the call.
    """
    if step == self.first:
      return 1  # The user waits for the first report.
    ends = [n for n in self.ends if step < n < step + most]
    most = min(ends) - step if ends else most
    last = (step + most) // self.every * self.every
    return last - step if last > step else most

  def norms_wanted(self, at: tf.Tensor) -> tf.Tensor:
    """Returns a bool scalar: True if the step computes norms.

    Args:
      at: number of the step, from 0, an int64 scalar.
    """
    done = at + 1
    every = self.norms_every or self.every
    wanted = tf.equal(done % every, 0)
    for n in {self.first + 1, self.last}:
      wanted |= tf.equal(done, n)
    if every != self.every:
      wanted |= tf.equal(done % self.every, 0)
    return wanted


GRADIENT_NORM, PARAMETER_NORM, UPDATE_NORM = "gradient_norm", "parameter_norm", "update_norm"


class ReportedValues:
  """The values of one training step that reports show.

  The norms are global L2 norms over all trained variables: of the gradients (before an optimizer
  clips them), of the variables after the step, and of the updates. Steps that are not asked for
  norms return 0 for them and do not compute them.

  Args:
    norms: True if the step has an argument that asks for norms.
    of_updates: True if the norm of updates is among them. Under XLA this would keep the old values
      of all variables in each step, whether norms are asked for or not.

  Attributes:
    norms: True if the step has an argument that asks for norms.
    names: of the values, when the step was traced; each is made once.
  """

  def __init__(self, norms: bool = True, *, of_updates: bool = True):
    self.norms = norms
    self._of_updates = of_updates
    self.names: list[str] = []
    self._before: _BeforeUpdates | None = None
    # Of a program of several meshes.
    self._gradient_norm: Tensor | None = None
    self._updated: list[Variable] = []

  def before_updates(
    self, wanted: Tensor, trained: Sequence[tuple[Tensor | None, Variable]]
  ) -> None:
    """Adds operations before the updates; call it when the graph has gradients and no updates.

    Args:
      wanted: a bool scalar: whether norms are asked for.
      trained: (gradient or None, variable) of each variable that is trained.
    """
    pairs = [(g, v) for g, v in trained if g is not None]
    if len({v.mesh for _, v in pairs}) > 1:
      # Before and after the updates are programs of their own.
      self._gradient_norm = global_norm([g for g, _ in pairs])
      self._updated = [v for _, v in pairs]
      return
    self._before = _BeforeUpdates(wanted, pairs, self._of_updates) if pairs else None

  def after_updates(self, graph: Graph) -> list[Tensor]:
    """Adds the operation that computes the values; call it when the graph is complete.

    Returns:
      One float32 tensor [values], in the order of `names`; none if there is nothing to report.
    """
    if self._gradient_norm is not None:
      return self._of_several_meshes(graph)
    before, summaries = self._before, _summaries(graph)
    self._before = None
    self.names[:] = [*(before.names if before else ()), *[name for _, name in summaries]]
    if not self.names:
      return []
    places = [place for place, _ in summaries]
    return _Reported(before, places, graph.operations[0].mesh).outputs

  def _of_several_meshes(self, graph: Graph) -> list[Tensor]:
    """As `after_updates`, of a program of several meshes: computed in each step, of plain values.

    Of scalar summaries those in the bodies of loops are left out, and of norms that of updates.
    """
    assert self._gradient_norm is not None
    after = global_norm([read_variable(v) for v in self._updated])
    summaries = [op for op in graph.operations if isinstance(op, ScalarSummaryOperation)]
    values = {GRADIENT_NORM: self._gradient_norm, PARAMETER_NORM: after}
    values |= {op.name: cast(op, tf.float32) for op in reversed(summaries)}
    self._gradient_norm, self._updated = None, []
    self.names[:] = list(values)
    mesh = graph.operations[0].mesh
    return [stack([reshard(x, mesh) for x in values.values()], "reported")]


class _BeforeUpdates(Operation):
  """Sums the squared gradients and copies the variables before the update, if norms are wanted.

  There are two conditionals: copying the variables must not wait for the gradients, or all updates
  would wait for the last gradient. The copies are one vector for all variables: a conditional costs
  the start of a program some ten operations for each value that it returns. Steps without norms
  hold no gradients and no variables.
  """

  lowers_uneven_slices = True
  is_cloneable = False
  reads_shards = True

  def __init__(
    self,
    wanted: Tensor,
    pairs: Sequence[tuple[Tensor, Variable]],
    of_updates: bool,
  ):
    super().__init__([wanted, *[g for g, _ in pairs]], name="before_updates")
    self.of = [v for _, v in pairs]
    self._keeps = of_updates

  @property
  def names(self) -> list[str]:
    """Names of the norms that will be computed."""
    return [GRADIENT_NORM, PARAMETER_NORM, *([UPDATE_NORM] if self._keeps else [])]

  @property
  def wanted(self) -> Tensor:
    """The bool scalar that is True in steps that compute norms."""
    return self.inputs[0]

  @property
  def has_gradient(self) -> bool:
    return False

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    wanted, *sums = [lowering.tensors[x] for x in self.inputs]
    variables = [lowering.variables[v] for v in self.of]
    gradients = [v.to_shards(g) for v, g in zip(variables, sums)]
    parts = [_part(v.stored_impl, g.shape) for v, g in zip(variables, self.inputs[1:])]
    squares = impl.slicewise(
      lambda asked, *slices: tf.cond(
        asked, lambda: _sum_of_squares(slices, parts), lambda: tf.constant(0.0)
      ),
      wanted,
      *gradients,
    )
    kept: Any = ()
    if self._keeps:
      kept = impl.slicewise(
        _kept([_part(v.stored_impl, x.shape) for v, x in zip(variables, self.of)]),
        wanted,
        *_slices(lowering, impl, self.of),
      )
    lowering.operations[self] = (squares, kept)


class _Reported(Operation):
  """The vector of all reported values of a step, computed after the variables are updated.

  Args:
    before: what was kept; None: without norms.
    summaries: places of scalar summaries among those of the lowering.
    mesh: of the program.
  """

  is_cloneable = False

  def __init__(self, before: _BeforeUpdates | None, summaries: Sequence[int], mesh: Mesh):
    super().__init__([before.wanted] if before else [], mesh, name="reported")
    self._before = before
    # A plan lowers this by itself, on the axes that split its variables, and on all others, too.
    self._variables = list(before.of) if before else []
    self.exchanges_over_whole_mesh = before is not None
    self._summaries = summaries
    count = len(summaries) + (len(before.names) if before else 0)
    self._outputs = [Tensor(self, Shape([Dimension("reported", count)]), tf.float32)]

  @property
  def has_gradient(self) -> bool:
    return False

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    values = [self._norms(lowering, impl)] if self._before else []
    found = [tf.cast(lowering.scalar_summaries[i][1], tf.float32) for i in self._summaries]
    values += [tf.stack(found)] if found else []
    # A scalar is the same on all processors, and the first one's is what leaves the program.
    vector = tf.concat(values, 0)
    count = len(impl.laid_out_pnum().tensor_list)
    lowering.set_tensor_lowering(
      self.outputs[0], impl.LaidOutTensor.from_tensor_list([vector] * count)
    )

  def _norms(self, lowering: LoweringInProgress, impl: MeshImpl) -> tf.Tensor:
    before = self._before
    assert before is not None
    squares, kept = lowering.operations[before]
    wanted = lowering.tensors[before.wanted]
    parts = [_part(lowering.variables[v].stored_impl, v.shape) for v in before.of]
    local = impl.slicewise(
      _squares_after(parts, len(kept)), wanted, squares, *kept, *_slices(lowering, impl, before.of)
    )
    axes = [i for i, d in enumerate(impl.shape) if d.size > 1]
    if axes and isinstance(impl, StrategyMeshImpl):
      # XLA's compiler for TPUs would have to prove that all cores take the same branch.
      total = impl.allreduce(local, axes, "SUM").one_slice
    elif axes:
      asked = wanted.to_laid_out_tensor().one_slice
      total = tf.cond(
        asked, lambda: impl.allreduce(local, axes, "SUM").one_slice, lambda: local.one_slice
      )
    else:
      total = local.one_slice
    return tf.sqrt(total)


def _slices(
  lowering: LoweringInProgress, impl: MeshImpl, variables: Sequence[Variable]
) -> list[Any]:
  """The variables' tf.Variables, as laid-out tensors."""
  return [impl.LaidOutTensor(lowering.variables[v].slices) for v in variables]


def _groups(parts: Sequence[float], variables: Sequence[Any]) -> list[tuple[float, list[Any]]]:
  """The variables by the weight of their squares and their dtype."""
  found: dict[Any, tuple[float, list[Any]]] = {}
  for part, v in zip(parts, variables):
    found.setdefault((part, v.dtype), (part, []))[1].append(v)
  return list(found.values())


def _joined(variables: Sequence[Any]) -> tf.Tensor:
  """The values of variables of one dtype, as a vector."""
  row = tf.constant([-1])
  return tf.concat([tf.reshape(v.value(), row) for v in variables], 0)


def _kept(parts: Sequence[float]) -> Callable[..., tuple[tf.Tensor, ...]]:
  """A function of slices that returns copies of variables if asked, else empty vectors."""

  def kept(asked: tf.Tensor, *variables: tf.Variable) -> tuple[tf.Tensor, ...]:
    groups = [found for _, found in _groups(parts, variables)]
    result = tf.cond(
      asked,
      lambda: tuple(map(_joined, groups)),
      lambda: tuple(tf.zeros([0], found[0].dtype) for found in groups),
    )
    return tuple(result)

  return kept


def _squares_after(parts: Sequence[float], kept: int) -> Callable[..., tf.Tensor]:
  """A function of slices that returns this processor's part of the sums of squares.

  Args:
    parts: see `_part`, of each variable.
    kept: number of vectors that `_kept` has returned.
  """

  def sums(asked: tf.Tensor, gradients: tf.Tensor, *slices: Any) -> tf.Tensor:
    groups = _groups(parts, slices[kept:])
    weights = [part for part, _ in groups]

    def compute() -> tf.Tensor:
      if not kept:
        return tf.stack([gradients, _sum_of_squares([v.value() for v in slices], parts)])
      now = [_joined(found) for _, found in groups]
      change = [_float32(x) - _float32(y) for x, y in zip(now, slices[:kept])]
      return tf.stack([gradients, *(_sum_of_squares(xs, weights) for xs in (now, change))])

    return tf.cond(asked, compute, lambda: tf.zeros([3 if kept else 2]))

  return sums


def _float32(x: tf.Tensor) -> tf.Tensor:
  return tf.cast(x, tf.float32)


def _sum_of_squares(slices: Sequence[Any], parts: Sequence[float]) -> tf.Tensor:
  """A processor's part of the sum of squares, of slices that count by their parts."""
  by_part: dict[float, list[tf.Tensor]] = {}
  for x, part in zip(slices, parts):
    by_part.setdefault(part, []).append(tf.nn.l2_loss(_float32(x)))
  return tf.add_n([(2.0 * part) * tf.add_n(halves) for part, halves in by_part.items()])


def _part(impl: MeshImpl, shape: Shape) -> float:
  """Weight of a processor's sum of squares: 1 / number of replicas of its slice.

  So each element counts once, and one all-reduce over the whole mesh is right for all tensors,
  whatever mesh axes they are split over.
  """
  axes = {impl.tensor_dimension_to_mesh_axis(d) for d in shape}
  copies = math.prod([d.size for i, d in enumerate(impl.shape.dims) if i not in axes])
  return 1.0 / float(copies)


def _summaries(graph: Graph) -> list[tuple[int, str]]:
  """The scalar summaries of a graph: their places among those of its lowering, and their names."""
  names: list[str] = []
  for op in graph.operations:
    if isinstance(op, ScalarSummaryOperation):
      names.append(op.name)
    elif isinstance(op, BlockOperation):
      names += [s.name for s in op.scalar_summaries]
  # Recomputation makes each once more, of the same name.
  first = {name: i for i, name in reversed(list(enumerate(names)))}
  return sorted((i, name) for name, i in first.items())
