"""mtf.function: a Python function of named tensors as one TensorFlow function on a mesh."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from tests.kinds import kept

BATCH, LENGTH, MODEL = mtf.Dimension("batch", 4), mtf.Dimension("length", 8), mtf.Dimension("d", 4)
X = np.random.default_rng(0).uniform(-1, 1, [4, 8]).astype(np.float32)
MESHES = {
  "one": ("r:1", ""),
  "2x2": ("r:2,s:2", "batch:r,length:s"),
  "2x4": ("r:2,s:4", "d:r,length:s"),
}


@pytest.fixture(params=["placement", "simd"])
def kind(request):
  return request.param


@pytest.fixture
def make_impl(kind, cpu_devices):
  def make(name="2x2"):
    shape, layout = MESHES[name]
    devices = cpu_devices[: mtf.convert_to_shape(shape).size]
    if kind == "simd":
      return mtf.simd_mesh_impl.SimdMeshImpl(shape, layout, devices)
    return mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, devices)

  return make


@pytest.fixture(params=kept(list(MESHES), ["2x2"]))
def impl(request, make_impl):
  return make_impl(request.param)


def on_mesh(impl, **kwargs):
  return mtf.function(impl, input_signature=[mtf.TensorSpec([BATCH, LENGTH])], **kwargs)


def test_value(impl):
  @on_mesh(impl)
  def f(x):
    return mtf.reduce_sum(x, reduced_dim=LENGTH) + 1.0

  np.testing.assert_allclose(f(X), X.sum(1) + 1, rtol=1e-5)


@pytest.mark.parametrize("argument", [X, tf.constant(X), X.tolist(), tf.Variable(X)])
def test_arguments_are_converted(argument, make_impl):
  @on_mesh(make_impl())
  def f(x):
    return x * 2.0

  np.testing.assert_allclose(f(argument), 2 * X)


def test_a_structure_is_returned_as_it_is(impl):
  @on_mesh(impl)
  def f(x):
    return {"sum": mtf.reduce_sum(x), "both": [x, (mtf.relu(x),)]}

  result = f(X)
  np.testing.assert_allclose(result["sum"], X.sum(), rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(result["both"][0], X)
  np.testing.assert_array_equal(result["both"][1][0], np.maximum(X, 0))


Pair = collections.namedtuple("Pair", "a b")
# What a function may return besides its tensors; each with what comes of it.
LEAVES = [
  (lambda x: x, X),
  (lambda x: mtf.greater(x, 0.0), X > 0),
  (lambda x: mtf.constant(x.mesh, 2, [], tf.int32), 2),
  (lambda x: tf.range(3) + 1, [1, 2, 3]),
  (lambda x: np.ones([2]), [1.0, 1.0]),
  (lambda x: 3, 3),
  (lambda x: None, None),
]


def drawn_structure(rng, depth=3):
  """Of places in LEAVES."""
  if not depth:
    return rng.randrange(len(LEAVES))
  a, b = drawn_structure(rng, rng.randrange(depth)), drawn_structure(rng, rng.randrange(depth))
  return rng.choice([(a, b), [a, b], {"b": a, "a": b}, Pair(a, b), (a,), []])


@pytest.mark.parametrize("seed", range(2))
def test_drawn_structures(seed, make_impl):
  wanted = [*range(len(LEAVES)), drawn_structure(random.Random(seed))]
  f = on_mesh(make_impl())(lambda x: tf.nest.map_structure(lambda i: LEAVES[i][0](x), wanted))
  for found in (f(X), tf.function(lambda x: f(x), autograph=False)(X)):
    tf.nest.assert_same_structure(found, wanted)
    for y, i in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
      expected = LEAVES[i][1]
      assert y is None if expected is None else np.array_equal(y, expected)


def test_a_tape_passes_by_tensors_of_tensorflow(make_impl):
  f = on_mesh(make_impl())(lambda x: (mtf.square(x), tf.constant(3.0)))
  x = tf.constant(X)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y, factor = f(x)
    loss = tf.reduce_sum(y) * factor
  np.testing.assert_allclose(tape.gradient(loss, x), 6 * X, rtol=1e-5)


@dataclasses.dataclass
class Both:
  a: object
  b: object


def test_what_is_no_structure_is_told(make_impl):
  f = on_mesh(make_impl())(lambda x: Both(x, x))
  with pytest.raises(errors.ArgumentError, match="<lambda> returned a Both, .*namedtuples"):
    f(X)


def test_several_arguments_of_several_dtypes(impl):
  signature = [
    mtf.TensorSpec([BATCH, LENGTH], tf.int32, name="tokens"),
    mtf.TensorSpec([], tf.float32, name="scale"),
    mtf.TensorSpec([BATCH], tf.bool),
  ]

  @mtf.function(impl, input_signature=signature)
  def f(tokens, scale, mask):
    return mtf.where(mask, mtf.to_float(tokens) * scale, 0.0)

  tokens = np.arange(32).reshape(4, 8)
  mask = np.array([True, False, True, False])
  np.testing.assert_allclose(f(tokens, 0.5, mask), np.where(mask[:, None], tokens * 0.5, 0))


def test_scalars_need_no_signature(impl):
  @mtf.function(impl)
  def f(x, y):
    return x * y

  assert f(3.0, 4.0).numpy() == 12


def test_it_is_traced_once(make_impl):
  traces = []

  @on_mesh(make_impl("one"))
  def f(x):
    traces.append(x)
    return x + 1.0

  for i in range(3):
    np.testing.assert_allclose(f(X + i), X + i + 1)
  assert len(traces) == 1


def test_assignments_run(impl):
  @on_mesh(impl)
  def count(x):
    v = mtf.get_variable(x.mesh, "count", [LENGTH], initializer=tf.zeros_initializer())
    mtf.assign_add(v, mtf.reduce_sum(x, reduced_dim=BATCH))
    return v

  ones = np.ones([4, 8], np.float32)
  for step in range(3):
    np.testing.assert_allclose(count(ones), np.full([8], 4.0 * step))
  np.testing.assert_allclose(impl.variable_store["count"].numpy(), np.full([8], 12.0))


def test_nothing_returned(impl):
  @on_mesh(impl)
  def count(x):
    v = mtf.get_variable(x.mesh, "count", [], initializer=tf.zeros_initializer())
    mtf.assign_add(v, mtf.reduce_sum(x))

  count(np.ones([4, 8], np.float32))
  count(np.ones([4, 8], np.float32))
  assert impl.variable_store["count"].numpy() == 64


def test_two_functions_share_the_variables(impl):
  @on_mesh(impl)
  def write(x):
    v = mtf.get_variable(x.mesh, "v", [BATCH, LENGTH], initializer=tf.zeros_initializer())
    mtf.assign(v, x)

  @on_mesh(impl)
  def read(x):
    return mtf.get_variable(x.mesh, "v", [BATCH, LENGTH]) - x

  write(X)
  np.testing.assert_allclose(read(np.ones([4, 8])), X - 1, rtol=1e-6)


def _train_step(impl):
  """One step of gradient descent for mean((x w - 1)^2)."""

  @on_mesh(impl)
  def step(x):
    w = mtf.get_variable(
      x.mesh, "w", [LENGTH, MODEL], initializer=tf.constant_initializer(np.eye(8, 4))
    )
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], [BATCH, MODEL]) - 1.0))
    (dw,) = mtf.gradients([loss], [v.outputs[0] for v in x.graph.trainable_variables])
    mtf.assign_sub(w, dw * 0.1)
    return loss

  return step


def _expected_losses(steps):
  w, losses = tf.Variable(np.eye(8, 4, dtype=np.float32)), []
  for _ in range(steps):
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(tf.square(X @ w - 1.0))
    w.assign_sub(tape.gradient(loss, w) * 0.1)
    losses.append(loss.numpy())
  return losses, w.numpy()


def test_gradient_steps(impl):
  step = _train_step(impl)
  losses, w = _expected_losses(5)
  np.testing.assert_allclose([step(X).numpy() for _ in range(5)], losses, rtol=1e-5)
  np.testing.assert_allclose(impl.variable_store["w"].numpy(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gradient_steps_inside_a_function_with_a_loop(impl):
  step = _train_step(impl)

  @tf.function
  def several(x, n):
    losses = tf.TensorArray(tf.float32, size=n)
    for i in tf.range(n):
      losses = losses.write(i, step(x))
    return losses.stack()

  losses, w = _expected_losses(6)
  np.testing.assert_allclose(several(X, tf.constant(4)), losses[:4], rtol=1e-5)
  np.testing.assert_allclose(several(X, tf.constant(2)), losses[4:], rtol=1e-5)
  np.testing.assert_allclose(impl.variable_store["w"].numpy(), w, rtol=1e-5, atol=1e-6)


def test_inside_a_function(impl):
  @on_mesh(impl)
  def f(x):
    return mtf.softmax(x, LENGTH)

  @tf.function
  def around(x):
    return f(x * 2.0) + 1.0

  e = np.exp(2 * X)
  np.testing.assert_allclose(around(X), e / e.sum(1, keepdims=True) + 1, rtol=1e-5)


def test_eager_equals_traced(impl):
  step = _train_step(impl)
  losses, _ = _expected_losses(3)
  tf.config.run_functions_eagerly(True)
  try:
    got = [step(X).numpy() for _ in range(3)]
  finally:
    tf.config.run_functions_eagerly(False)
  np.testing.assert_allclose(got, losses, rtol=1e-5)


def test_while_loop_inside(impl):
  @on_mesh(impl)
  def f(x):
    i = mtf.constant(x.mesh, 0, dtype=tf.int32)
    return mtf.while_loop(
      lambda i, v: mtf.less(i, 3),
      lambda i, v: [i + 1, v * 0.5 + mtf.reduce_mean(v, reduced_dim=LENGTH)],
      [i, x],
    )[1]

  y = X.astype(np.float64)
  for _ in range(3):
    y = y * 0.5 + y.mean(1, keepdims=True)
  np.testing.assert_allclose(f(X), y, rtol=1e-5, atol=1e-6)


def _noise(impl):
  return on_mesh(impl)(lambda x: x * 0.0 + mtf.random_uniform(x.mesh, x.shape))


def test_random_numbers_do_not_depend_on_the_mesh(make_impl):
  one, four, eight = (_noise(make_impl(name))(X, seed=3) for name in MESHES)
  np.testing.assert_array_equal(one, four)
  np.testing.assert_array_equal(one, eight)


def test_random_numbers_depend_on_the_seed(make_impl):
  noise = _noise(make_impl())
  np.testing.assert_array_equal(noise(X, seed=3), noise(X, seed=3))
  assert not np.array_equal(noise(X, seed=3), noise(X, seed=4))


def test_random_numbers_are_new_in_each_call(make_impl):
  noise = _noise(make_impl())
  assert not np.array_equal(noise(X), noise(X))


def test_build_graph(make_impl):
  @on_mesh(make_impl())
  def f(x):
    return mtf.relu(x)

  graph, _, y = f.build_graph()
  assert y.shape == mtf.Shape([BATCH, LENGTH])
  assert len(graph.operations) == 2


def test_it_keeps_name_and_docstring(make_impl):
  @on_mesh(make_impl())
  def f(x):
    """Doubles."""
    return x + x

  assert f.__name__ == "f"
  assert f.__doc__ == "Doubles."


def test_batches_of_a_dataset(make_impl):
  step = _train_step(make_impl())
  losses, _ = _expected_losses(3)
  dataset = tf.data.Dataset.from_tensors(X).repeat(3)
  np.testing.assert_allclose([step(x).numpy() for x in dataset], losses, rtol=1e-5)


def test_a_partial_function_has_the_name_of_its_function(cpu_devices):
  def scale(factor, x):
    return x * factor

  impl = mtf.placement_mesh_impl.PlacementMeshImpl("r:2", "a:r", cpu_devices[:2])
  double = mtf.function(impl, [mtf.TensorSpec([("a", 4)])])(functools.partial(scale, 2.0))
  assert double.__name__ == "scale"
  assert double(np.ones(4, "f")).numpy().tolist() == [2.0] * 4
