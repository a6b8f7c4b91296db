"""Automatic layouts of programs with loops: trained, nested, with conditions, without rows."""

import itertools

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.planning import Machine
from tests.kinds import kept
from tests.planning.test_auto_layout import check_against_whole

WIDTH = mtf.Dimension("width", 8)
OUT = mtf.Dimension("out", 8)


def looped(rows=8, *, nested=False, conditional=False, trained=True, known=True):
  """A graph with a loop, and its results; `known` is whether it has a number of iterations."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  x = mtf.ones(mesh, [mtf.Dimension("rows", rows), WIDTH])
  w = mtf.get_variable(mesh, "w", [WIDTH, OUT])

  def dense(x):
    y = mtf.einsum([mtf.tanh(x), w], output_shape=[x.shape.dims[0], OUT])
    return mtf.rename_dimension(y, "out", "width")

  def loop(body, times, x):
    most = {"maximum_iterations": times} if known else {}
    start = [mtf.constant(mesh, 0, dtype=tf.int32), x]
    return mtf.while_loop(lambda i, _: mtf.less(i, times), body, start, **most)[1]

  def body(i, x):
    if nested:
      x = loop(lambda j, z: (j + 1, dense(z)), 2, x)
    if conditional:
      x = mtf.cond(mtf.less(i, 1), lambda: mtf.tanh(x), lambda: x * x)
    return i + 1, dense(x)

  loss = mtf.reduce_sum(loop(body, 3, x))
  return graph, [loss, *(mtf.gradients([loss], [w]) if trained else [])]


@pytest.mark.parametrize("mesh", ["x:2,y:2", "x:4", "x:1", "x:1,y:1", "x:2,y:1", ""])
@pytest.mark.parametrize("rows", [8, 0])
def test_trained_loop_has_a_layout_on_every_mesh(mesh, rows):
  graph, results = looped(rows)
  choice = mtf.auto_layout(graph, mesh_shape=mesh, results=results)
  assert choice.proven
  check_against_whole(choice, graph, Machine.load("cpu"), results)


# In `make test` those in which any three have all their combinations.
KINDS = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize(
  "nested,conditional,trained,known", kept(KINDS, [k for k in KINDS if sum(k) % 2 == 0])
)
def test_predicted_cost_of_loops_is_the_described_one(nested, conditional, trained, known):
  graph, results = looped(nested=nested, conditional=conditional, trained=trained, known=known)
  choice = mtf.auto_layout(graph, mesh_shape="x:2,y:2", results=results)
  for c in [choice, *choice.alternatives]:
    check_against_whole(c, graph, Machine.load("cpu"), results)


def test_what_a_loop_keeps_is_held():
  graph, results = looped(conditional=True)
  held = mtf.describe(graph, "", "x:2", results=results).memory.activations
  graph, results = looped(conditional=True, trained=False)
  assert held > 3 * 8 * 8 * 4 + mtf.describe(graph, "", "x:2", results=results).memory.activations


def test_program_without_variables_or_dimensions():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  doubled = mtf.ones(mesh, [mtf.Dimension("rows", 4)]) * 2
  assert mtf.auto_layout(graph, mesh_shape="x:2,y:2", results=[doubled]).proven
  graph = mtf.Graph()
  scalar = mtf.constant(mtf.Mesh(graph, "mesh"), 1.0) * 2
  assert mtf.auto_layout(graph, mesh_shape="x:1", results=[scalar]).layout.pairs == []
