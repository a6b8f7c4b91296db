"""`mtf.cond`: effects of branches, processors that agree, wrong use; see also the descriptors."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.operations.comparing import placement, rand, run, simd

A, B = mtf.Dimension("a", 8), mtf.Dimension("b", 4)


@pytest.mark.parametrize("impl", [placement, simd])
@pytest.mark.parametrize("in_function", [False, True])
def test_only_one_branch_assigns(impl, in_function):
  impl = impl("a:r")

  def build(m):
    v = mtf.get_variable(m, "v", [A], initializer=tf.zeros_initializer())
    i = mtf.constant(m, 3, [], tf.int32)

    def assign(value):
      mtf.assign_add(v, mtf.ones(m, [A]) * value)

    assert mtf.cond(mtf.less(i, 5), lambda: assign(1.0), lambda: assign(100.0)) is None
    return [mtf.read_variable(v.operation)]

  (value,) = run(build, impl=impl, in_function=in_function)
  assert value.tolist() == [1.0] * 8


def test_processors_agree_by_an_exchange_only_where_floats_decide():
  def sent(make_pred):
    m = mtf.Mesh(mtf.Graph(), "m")
    x = mtf.import_tf_tensor(m, rand(8), [A])
    mtf.cond(make_pred(m, x), lambda: x * 2.0, lambda: x)
    report = mtf.describe(m.graph, "", "r:2,c:2")
    return sum(len(op.collectives) for op in report.operations)

  assert sent(lambda m, x: mtf.greater(mtf.reduce_sum(x), 0.0)) == 1
  assert sent(lambda m, x: mtf.less(mtf.constant(m, 1, [], tf.int32), 2)) == 0


def test_random_numbers_and_summaries_of_the_branch_that_is_run():
  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")
  x = mtf.import_tf_tensor(m, rand(8), [A])

  def noisy():
    mtf.scalar_summary("noise", mtf.ones(m, []) * 7.0)
    return x + mtf.random_uniform(m, [A])

  def quiet():
    mtf.scalar_summary("quiet", mtf.ones(m, []))
    return x

  y = mtf.cond(mtf.less(mtf.constant(m, 1, [], tf.int32), 2), noisy, quiet)

  @tf.function(autograph=False)
  def program(layout):
    lowering = mtf.Lowering(graph, {m: placement(layout)}, seed=1)
    return lowering.export_to_tf_tensor(y), dict(lowering.scalar_summaries)

  value, summaries = program("a:r")
  np.testing.assert_array_equal(value, program("")[0])
  assert np.all(value > rand(8)) and len(set((value - rand(8)).numpy().round(5))) == 8
  assert {k: float(v) for k, v in summaries.items()} == {"noise": 7.0, "quiet": 0.0}


def test_wrong_use_is_told_when_the_graph_is_built():
  m = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.ones(m, [A])
  pred = mtf.less(mtf.reduce_sum(x), 1.0)
  with pytest.raises(mtf.GraphError, match="pred must be a bool scalar.*mtf.where"):
    mtf.cond(mtf.less(x, 1.0), lambda: x, lambda: x)
  with pytest.raises(mtf.MeshError, match="cond: pred"):
    mtf.cond(True, lambda: x, lambda: x)
  with pytest.raises(mtf.ArgumentError, match="must take no argument"):
    mtf.cond(pred, lambda v: v, lambda: x)
  with pytest.raises(mtf.GraphError, match="must return mtf.Tensors, got 3"):
    mtf.cond(pred, lambda: 3, lambda: x)
  with pytest.raises(mtf.GraphError, match="2 tensors.* 1; both"):
    mtf.cond(pred, lambda: [x, x], lambda: x)
  with pytest.raises(mtf.ShapeError, match="result 0.*one shape"):
    mtf.cond(pred, lambda: x, lambda: mtf.reduce_sum(x))
  with pytest.raises(mtf.DTypeError, match="result 0.*mtf.cast"):
    mtf.cond(pred, lambda: x, lambda: mtf.to_int32(x))
  inner = []
  mtf.cond(pred, lambda: inner.append(x * 2.0) or inner[-1], lambda: x)
  with pytest.raises(mtf.GraphError, match="inside a loop"):
    mtf.negative(inner[0])


def test_the_layouts_of_both_branches_are_verified():
  def build(m):
    x = mtf.ones(m, [A])
    pred = mtf.less(mtf.constant(m, 1, [], tf.int32), 2)
    return [
      mtf.cond(pred, lambda: mtf.ones(m, []), lambda: mtf.reduce_sum(mtf.slice(x, 0, 3, "a")))
    ]

  with pytest.raises(mtf.LayoutError, match="a:8"):
    run(build, "a:r")
