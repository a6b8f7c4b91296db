"""Bodies that are traced once: as often as their arguments differ, and with the right values."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow.numerics import bodies

CALLS: list[tuple[object, ...]] = []
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def scaled(factor, x, *more):
  CALLS.append((factor, x.shape))
  return factor * x + sum(more)


def both(x, y):
  return x + y, x - y


@pytest.fixture(autouse=True)
def _nothing_traced():
  CALLS.clear()
  bodies._bodies.clear()


def in_function(call, *args):
  return tf.function(call, autograph=False)(*map(tf.constant, args))


def types_in(call, *args):
  specs = [tf.TensorSpec(x.shape, x.dtype) for x in args]
  function = tf.function(call, autograph=False).get_concrete_function(*specs)
  return [op.type for op in function.graph.get_operations()]


def test_a_body_is_traced_once_for_arguments_that_are_alike():
  def call(x, y):
    return [bodies.shared(scaled, 2.0, a) for a in (x, y, x + y)]

  for y in (X, X + 1):
    for found, expected in zip(in_function(call, X, y), (2 * X, 2 * y, 2 * (X + y))):
      np.testing.assert_array_equal(found, expected)
  # As it is in each of two graphs, and in a body.
  assert len(CALLS) == 3
  types = types_in(call, X, X)
  assert types.count("PartitionedCall") == 2
  assert types.count("Mul") == 1


def test_other_values_types_shapes_and_dtypes_have_other_bodies():
  def call(x):
    return [
      bodies.shared(scaled, 2.0, x),
      bodies.shared(scaled, 2, x),
      bodies.shared(scaled, 3.0, x),
      bodies.shared(scaled, 2.0, x[:1]),
      bodies.shared(scaled, 2.0, tf.cast(x, tf.float64)),
      bodies.shared(scaled, 2.0, x, 1.0),
      bodies.shared(scaled, 2.0, x, x),
    ]

  for found in in_function(lambda x: [call(x), call(x)], X):
    for x, expected in zip(found, [2 * X, 2 * X, 3 * X, 2 * X[:1], 2 * X, 2 * X + 1, 3 * X]):
      np.testing.assert_array_equal(x, expected)
  assert len(bodies._bodies) == 7


def test_several_outputs_keep_their_structure_and_shapes():
  def call(x, y):
    found = []
    for _ in range(2):
      total, difference = bodies.shared(both, x, y)
      assert total.shape == [2, 3]
      found.append(total * difference)
    return found

  for found in in_function(call, X, X + 1):
    np.testing.assert_array_equal(found, -(2 * X + 1))
  assert len(bodies._bodies) == 1


def test_nothing_is_traced_eagerly_or_where_operations_are_counted():
  np.testing.assert_array_equal(bodies.shared(scaled, 2.0, tf.constant(X)), 2 * X)

  def call(x):
    with bodies.inlined():
      return [bodies.shared(scaled, 2.0, x) for _ in range(3)]

  assert "PartitionedCall" not in types_in(call, X)
  assert not bodies._bodies


def test_eager_tensors_that_a_function_captures():
  eager = tf.constant(X)

  def call(x):
    return [bodies.shared(scaled, 2.0, y, z) for y in (eager, x) for z in (eager, x) * 2]

  for found in in_function(call, X):
    np.testing.assert_array_equal(found, 3 * X)
  assert len(bodies._bodies) == 1


def test_inside_of_loops_branches_and_on_any_device(cpu_devices):
  def four_times(x):
    return bodies.shared(scaled, 2.0, bodies.shared(scaled, 2.0, x))

  def call(x):
    with tf.device(cpu_devices[1]):
      first = bodies.shared(scaled, 2.0, x)
    with tf.device(cpu_devices[2]):
      second = bodies.shared(scaled, 2.0, x)
    (looped,) = tf.while_loop(lambda y: tf.reduce_sum(y) < 1000.0, lambda y: [four_times(y)], [x])
    return first + second, looped, tf.cond(x[0, 0] > -1.0, lambda: four_times(x), lambda: x)

  total, looped, branch = in_function(call, X)
  np.testing.assert_array_equal(total, 4 * X)
  np.testing.assert_array_equal(looped, 256 * X)
  np.testing.assert_array_equal(branch, 4 * X)
  (body,) = bodies._bodies.values()
  assert not any(op.device for op in body.graph.get_operations())


def test_a_body_that_is_no_longer_kept_is_traced_again(monkeypatch):
  monkeypatch.setattr(bodies, "_MOST", 2)

  def call(x):
    factors = [1.0, 2.0, 3.0] * 2 + [1.0, 1.0]
    return [bodies.shared(scaled, f, x) / f for f in factors]

  for found in in_function(call, X):
    np.testing.assert_allclose(found, X, rtol=1e-6)
  assert [kinds[0][1] for _, kinds in bodies._bodies] == [3.0, 1.0]


def test_it_is_saved_with_the_function_that_calls_it(tmp_path):
  module = tf.Module()
  module.call = tf.function(
    lambda x: bodies.shared(scaled, 2.0, x) + bodies.shared(scaled, 2.0, x),
    [tf.TensorSpec([2, 3])],
    autograph=False,
  )
  tf.saved_model.save(module, str(tmp_path))
  np.testing.assert_array_equal(tf.saved_model.load(str(tmp_path)).call(X), 4 * X)


def test_threads_trace_it_once():
  def call(x):
    return bodies.shared(scaled, 2.0, x) + bodies.shared(scaled, 2.0, x)

  with concurrent.futures.ThreadPoolExecutor(4) as threads:
    made = [threads.submit(in_function, call, X) for _ in range(4)]
    for future in made:
      np.testing.assert_array_equal(future.result(60), 4 * X)
  assert len(bodies._bodies) == 1
