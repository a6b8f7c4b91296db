"""Constants that a traced graph has once."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.numerics import constants

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 6), mtf.Dimension("c", 2)
X = np.arange(24, dtype=np.float32).reshape(4, 6)


def nodes(function, *args):
  """All nodes of the trace of an mtf.function, those of functions in it too."""
  traced = tf.function(lambda *xs: function(*xs), autograph=False)
  definition = traced.get_concrete_function(*map(tf.constant, args)).graph.as_graph_def()
  return [*definition.node, *(n for f in definition.library.function for n in f.node_def)]


def impls(devices):
  return [
    mtf.PlacementMeshImpl("rows:2", "a:rows", devices[:2]),
    mtf.SimdMeshImpl("rows:2", "a:rows", devices[:2]),
  ]


@pytest.mark.parametrize("kind", [0, 1])
def test_a_shape_is_one_constant_on_each_device(kind, cpu_devices):
  impl = impls(cpu_devices)[kind]

  def program(times):
    @mtf.function(impl, [mtf.TensorSpec([A, B])])
    def run(x):
      for _ in range(times):
        x = mtf.reshape(mtf.reshape(x * 2.0, [A, mtf.Dimension("d", 3), C]), [A, B])
      return x

    return run

  counts = [sum(n.op == "Const" for n in nodes(program(times), X)) for times in (2, 5)]
  assert counts[0] == counts[1]
  np.testing.assert_array_equal(program(3)(X), 8 * X)


@pytest.mark.parametrize("kind", [0, 1])
def test_loops_and_what_is_around_them_have_constants_of_their_own(kind, cpu_devices):
  impl = impls(cpu_devices)[kind]

  @mtf.function(impl, [mtf.TensorSpec([A, B])])
  def run(x):
    def twice(x):
      return mtf.reshape(mtf.reshape(x, [A, mtf.Dimension("d", 3), C]) * 2.0, [A, B])

    zero = mtf.zeros(x.mesh, [], tf.int32)
    _, y = mtf.while_loop(lambda i, _: mtf.less(i, 3), lambda i, y: [i + 1, twice(y)], [zero, x])
    return twice(y)

  np.testing.assert_array_equal(run(X), 16 * X)


@pytest.mark.parametrize("kind", [0, 1])
def test_loops_in_loops_that_draw_have_constants_of_their_own(kind, cpu_devices):
  """Keys of random numbers are made of numbers of iterations, outside of what is lowered inside."""

  def run_on(impl):
    @mtf.function(impl, [mtf.TensorSpec([A, B])])
    def run(x):
      def repeat(x, body):
        zero = mtf.zeros(x.mesh, [], tf.int32)
        results = mtf.while_loop(
          lambda i, _: mtf.less(i, 2), lambda i, y: [i + 1, body(y)], [zero, x]
        )
        return results[1]

      return repeat(x, lambda y: repeat(y, lambda z: mtf.dropout(z, True, rate=0.5) + 1.0))

    return run(X, seed=3)

  one = mtf.PlacementMeshImpl("rows:1", "", [""])
  np.testing.assert_array_equal(run_on(impls(cpu_devices)[kind]), run_on(one))


def test_numbers_that_are_equal_may_be_different_constants(cpu_devices):
  @mtf.function(impls(cpu_devices)[0], [mtf.TensorSpec([A])])
  def run(x):
    return x * 0.0, x * -0.0

  signs = [np.signbit(y) for y in run(np.ones(4, np.float32))]
  np.testing.assert_array_equal(signs, [[False] * 4, [True] * 4])


def test_constants_do_not_wait_for_what_their_first_use_waits_for():
  @tf.function(autograph=False)
  def run(x):
    with constants.of_one_graph(), constants.on_device(""):
      with tf.control_dependencies([tf.identity(x)]):
        first = constants.sizes([2, 2])
      assert constants.sizes([2, 2]) is first
      assert not first.op.control_inputs
      with constants.on_device("CPU:0"):
        assert constants.sizes([2, 2]) is not first
      with constants.of_one_graph():
        assert constants.sizes([2, 2]) == [2, 2]
    return tf.reshape(x, first)

  np.testing.assert_array_equal(run(tf.range(4)), [[0, 1], [2, 3]])
  with constants.of_one_graph(), constants.on_device(""):
    assert constants.sizes([2]) == [2]


@pytest.mark.parametrize("kind", [0, 1])
def test_slots_that_only_their_update_reads_are_not_read(kind, cpu_devices):
  impl = impls(cpu_devices)[kind]

  @mtf.function(impl, [mtf.TensorSpec([A, B])])
  def step(x):
    w = mtf.get_variable(x.mesh, "w", [B], initializer=tf.ones_initializer())
    loss = mtf.reduce_sum(mtf.square(x * w))
    mtf.optimize.AdamWOptimizer(0.5, weight_decay_rate=0.0).minimize(loss)
    return loss

  losses = [float(step(X)) for _ in range(2)]
  np.testing.assert_allclose(losses[0], np.sum(X * X))
  # Adam's first step moves each weight by the learning rate, against the gradient's sign.
  np.testing.assert_allclose(losses[1], np.sum(X * X) * 0.25, rtol=1e-5)
  read = [n.name for n in nodes(step, X) if n.op == "ReadVariableOp"]
  assert not [name for name in read if "adam_m" in name or "adam_v" in name]
