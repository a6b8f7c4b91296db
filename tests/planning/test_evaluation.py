"""Chains of operations: a sum that is pending stays in one."""

from __future__ import annotations

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.planning.evaluation import Evaluator
from mesh_tensorflow.planning.machine import convert_to_machine
from tests.planning import whole_lowering

A, B, C = mtf.Dimension("a", 8), mtf.Dimension("b", 4), mtf.Dimension("c", 6)


@pytest.fixture
def program():
  """relu(x . v + x . w): the two products, if `b` is split, are summed after they are added."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  x, v, w = (mtf.get_variable(mesh, n, s) for n, s in (("x", [A, B]), ("v", [B, C]), ("w", [B, C])))
  products = [mtf.einsum([x, y], output_shape=[A, C]) for y in (v, w)]
  result = mtf.relu(mtf.add(*products))
  return graph, result


def chains_of(program):
  graph, result = program
  chains = Evaluator(graph, [result])
  return chains, [[chains.units[i].operation.name for i in c.units] for c in chains.chains]


def sums_of(step):
  return [(s.axes, s.bytes) for s in step.sums]


def test_a_sum_that_is_pending_is_in_one_chain_with_what_it_passes(program):
  chains, names = chains_of(program)
  assert names == [["x"], ["v"], ["einsum", "einsum_1", "add"], ["relu"]]
  assert [c.count for c in chains.chains] == [1, 2, 1, 1]
  assert [c.dims for c in chains.chains] == [["a", "b"], ["b", "c"], ["a", "b", "c"], ["a", "c"]]
  assert (chains.forbidden, chains.others) == ({}, [])


@pytest.mark.parametrize(
  ("layout", "sums"),
  # A slice of 8 by 6 numbers of 4 bytes, or of a quarter of its rows.
  [({"a": 0}, {}), ({"b": 0}, {"relu": [((0,), 192)]}), ({"b": 0, "a": 1}, {"relu": [((0,), 48)]})],
)
def test_it_is_executed_by_what_it_cannot_pass(layout, sums, program):
  chains, _ = chains_of(program)
  steps = chains.walk(range(len(chains.units)), layout, (2, 4))
  executed = {chains.units[s.index].operation.name: sums_of(s) for s in steps if s.sums}
  assert executed == sums


def test_a_chain_executes_what_goes_out_of_it(program):
  chains, names = chains_of(program)
  (alone,) = (c for c, n in zip(chains.chains, names) if "add" in n)
  steps = chains.walk(alone.units, {"b": 0}, (2, 4))
  assert [sums_of(s) for s in steps] == [[], [], [((0,), 192)]]


ROWS, WIDTH, BATCH = (
  mtf.Dimension("rows", 64),
  mtf.Dimension("width", 8),
  mtf.Dimension("batch", 16),
)


def sparse_step(ids):
  """The update of the rows takes what the look-up left in the lowering, and the table's layout."""
  table = mtf.sparse.table(ids.mesh, "table", ROWS, WIDTH, initializer=mtf.initializers.Zeros())
  y = mtf.sparse.lookup(table, ids)
  mtf.sparse.minimize(mtf.reduce_mean(mtf.square(y)), mtf.sparse.Adagrad(0.1))
  return y


class Leaves(mtf.Operation):
  """Gathers its tensor, and leaves that for another operation."""

  def __init__(self, x):
    super().__init__([x], name="leaves")
    self._outputs = []

  def lower(self, lowering):
    (x,) = self.inputs
    impl, whole = lowering.mesh_impl(self), lowering.tensors[x].to_laid_out_tensor()
    for i, d in enumerate(x.shape):
      axis = impl.tensor_dimension_to_mesh_axis(d)
      whole = whole if axis is None else impl.allconcat(whole, axis, i)
    lowering.operations[self] = (whole, x.shape)


class Takes(mtf.Operation):
  """Sums what another operation left."""

  def __init__(self, left):
    super().__init__([], mesh=left.inputs[0].mesh, name="takes")
    self._left = left
    self._outputs = [mtf.Tensor(self, mtf.Shape([]), left.inputs[0].dtype)]

  def lower(self, lowering):
    whole, _ = lowering.operations[self._left]
    total = lowering.mesh_impl(self).slicewise(tf.reduce_sum, whole)
    lowering.set_tensor_lowering(self.outputs[0], total)


def own_step(ids):
  return Takes(Leaves(mtf.to_float(ids))).outputs[0]


@pytest.mark.parametrize("step", [sparse_step, own_step])
@pytest.mark.parametrize(
  "layout",
  ["", "batch:all", "rows:all", "rows:all,batch:all", "rows:r,batch:c", "rows:r,batch:r,width:c"],
)
def test_state_that_operations_leave_for_others_costs_what_a_whole_lowering_says(step, layout):
  """Each is evaluated by itself: what it takes of an earlier one is not counted again."""
  mesh = "all:4" if "all" in layout or not layout else "r:2,c:2"
  given = dict(layout=layout, mesh_shape=mesh, machine=convert_to_machine("cpu"))
  program = mtf.function(mtf.MeshImpl(mesh, layout), [mtf.TensorSpec([BATCH], tf.int32)])(step)
  whole = whole_lowering.costs(program, **given)
  report = mtf.describe(program, **given)
  found = sorted(
    (c.kind, c.mesh_axes, sorted(c.bytes_over.items()), op.times)
    for op in report.operations
    for c in op.collectives
  )
  assert found == whole.collectives
  assert report.seconds == pytest.approx(whole.seconds, rel=1e-6)
