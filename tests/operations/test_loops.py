"""While loops, and training steps in microbatches."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.kinds import kept
from tests.operations.comparing import placement, rand, run, simd

A, B = mtf.Dimension("a", 8), mtf.Dimension("b", 4)
MODES = ["eager", "function", "simd", "simd eager"]
EVERY_MODE = pytest.mark.parametrize("mode", MODES)
LAYOUTS = ["", "a:r", "b:c", "a:r,b:c"]


def mesh_impl(mode, layout):
  return simd(layout) if mode.startswith("simd") else placement(layout)


def run_in(mode, build, layout="", **kwargs):
  impl = kwargs.pop("impl", None) or mesh_impl(mode, layout)
  return run(build, impl=impl, in_function=mode in ("function", "simd"), **kwargs)


def counter(m):
  return mtf.constant(m, 0, [], tf.int32)


@EVERY_MODE
def test_loop_variables(mode):
  x = rand(8, 4)

  def build(m):
    t = mtf.import_tf_tensor(m, x, [A, B])
    return mtf.while_loop(
      lambda i, y: mtf.less(i, 3), lambda i, y: [i + 1, y * 2.0 + t], [counter(m), t]
    )

  for layout in LAYOUTS:
    i, y = run_in(mode, build, layout)
    assert i == 3
    np.testing.assert_allclose(y, 15 * x, rtol=1e-5)


@EVERY_MODE
def test_a_sum_over_the_mesh_is_reduced_before_the_next_iteration(mode):
  def build(m):
    x = mtf.ones(m, [A])
    return mtf.while_loop(
      lambda i, s: mtf.less(i, 2),
      lambda i, s: [i + 1, mtf.reduce_sum(x * s)],
      [counter(m), mtf.ones(m, [])],
    )

  assert run_in(mode, build, "a:r")[1] == 64


@pytest.mark.parametrize("in_function", [False, True])
def test_accumulators_are_exchanged_once_after_the_loop(in_function):
  x = np.arange(32, dtype=np.float32).reshape(8, 4)
  counters = []

  def program(layout, steps):
    graph = mtf.Graph()
    m = mtf.Mesh(graph, "m")
    t = mtf.import_tf_tensor(m, x, [A, B])
    outputs = mtf.while_loop(
      lambda i: mtf.less(i, steps),
      lambda i: [i + 1, mtf.reduce_sum(t, reduced_dim=A), t],
      [counter(m)],
      has_accumulators=True,
    )
    lowering = mtf.Lowering(graph, {m: placement(layout)})
    counters.append([k for k, _ in lowering.counters if k.startswith("allreduce")])
    pending = isinstance(lowering.tensors[outputs[1]], mtf.LazyAllreduceSum)
    assert pending == ("a:r" in layout and (steps > 0 or in_function))
    values = [lowering.export_to_tf_tensor(y) for y in outputs]
    counters.append([k for k, _ in lowering.counters if k.startswith("allreduce")])
    return values

  for steps in (3, 0):
    for layout in LAYOUTS:
      fn = tf.function(program, autograph=False) if in_function else program
      _, total, all_of_them = fn(layout, steps)
      np.testing.assert_allclose(total, steps * x.sum(0))
      np.testing.assert_allclose(all_of_them, steps * x)
      before, after = counters[-2:]
      assert not before
      if steps:
        assert after == (["allreduce/[0]/reduce_op"] if "a:r" in layout else [])


@EVERY_MODE
def test_a_pending_sum_from_outside_is_usable_inside_and_after(mode):
  x = rand(8)

  def build(m):
    t = mtf.import_tf_tensor(m, x, [A])
    total = mtf.reduce_sum(t)
    later = mtf.reduce_sum(mtf.square(t))
    _, y = mtf.while_loop(
      lambda i, y: mtf.less(i, 2), lambda i, y: [i + 1, y + total], [counter(m), total]
    )
    return [y, total * 2.0, later]

  y, twice, squares = run_in(mode, build, "a:r")
  np.testing.assert_allclose(y, 3 * x.sum(), rtol=1e-5)
  np.testing.assert_allclose(twice, 2 * x.sum(), rtol=1e-5)
  np.testing.assert_allclose(squares, (x * x).sum(), rtol=1e-5)


@pytest.mark.parametrize("mode", kept(MODES, ["eager", "simd"]))
@pytest.mark.slow
def test_random_operations_draw_anew_in_each_iteration(mode):
  def build(m):
    def inner(j, x):
      return [j + 1, x + mtf.random_uniform(m, [A, B])]

    def body(i, x):
      n = mtf.Dimension("n", 3)
      row = mtf.random_uniform(m, [A, B]) * mtf.one_hot(i, n)
      _, nested = mtf.while_loop(
        lambda j, y: mtf.less(j, 2), inner, [counter(m), mtf.zeros(m, [A, B])]
      )
      return [i + 1, x + row, nested]

    start = mtf.zeros(m, [("n", 3), A, B])
    return mtf.while_loop(
      lambda i, x: mtf.less(i, 3), body, [counter(m), start], has_accumulators=True
    )

  expected = run(build, "", "")
  rows = expected[1]
  assert len({r.tobytes() for r in rows}) == 3 and len(np.unique(rows)) > 90
  # Six draws of [0, 1): neither equal, nor few.
  assert abs(expected[2].mean() - 3.0) < 0.5
  for layout in LAYOUTS:
    for value, want in zip(run_in(mode, build, layout), expected):
      np.testing.assert_allclose(value, want, rtol=1e-6)


@EVERY_MODE
def test_assignments_in_the_body_run(mode):
  impl = mesh_impl(mode, "a:r")

  def build(m):
    def body(i):
      v = mtf.get_variable(m, "v", [A], initializer=tf.ones_initializer())
      mtf.assign_add(v, mtf.ones(m, [A]) * mtf.to_float(i))
      return [i + 1]

    final = mtf.while_loop(lambda i: mtf.less(i, 4), body, [counter(m)])
    assert [v.full_name for v in m.graph.all_variables] == ["v"]
    return final

  run_in(mode, build, impl=impl)
  assert impl.variable_store["v"].numpy().tolist() == [7.0] * 8


def test_lowered_operation_of_an_assignment_in_a_loop():
  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")
  made = []

  def body(i):
    v = mtf.get_variable(m, "v", [A])
    made.append(mtf.assign(v, mtf.zeros(m, [A])))
    return [i + 1]

  mtf.while_loop(lambda i: mtf.less(i, 1), body, [counter(m)])

  impl = placement("")

  @tf.function(autograph=False)
  def program():
    lowering = mtf.Lowering(graph, {m: impl})
    assert isinstance(lowering.lowered_operation(made[0]), tf.Operation)
    return tf.constant(0)

  program()


@pytest.mark.parametrize("in_function", [False, True])
def test_scalar_summaries_of_the_last_iteration(in_function):
  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")

  def body(i):
    mtf.scalar_summary("number", mtf.to_float(i))
    return [i + 1]

  mtf.while_loop(lambda i: mtf.less(i, 5), body, [counter(m)])
  mtf.scalar_summary("outside", mtf.ones(m, [])) * 2.0

  def program():
    return dict(mtf.Lowering(graph, {m: placement("")}).scalar_summaries)

  found = tf.function(program, autograph=False)() if in_function else program()
  assert {k: float(v) for k, v in found.items()} == {"number": 4.0, "outside": 1.0}


def test_num_loop_vars_returns_the_first_ones():
  def build(m):
    outputs = mtf.while_loop(
      lambda i, s: mtf.less(i, 3),
      lambda i, s: [i + 1, s + 1.0],
      [counter(m), mtf.ones(m, [])],
      num_loop_vars=1,
    )
    assert not m.graph.all_variables
    return outputs

  assert [int(v) for v in run(build)] == [3]


@EVERY_MODE
def test_keyword_arguments_of_tf_while_loop(mode):
  build = lambda m: mtf.while_loop(  # noqa: E731
    lambda i: mtf.less(i, 100),
    lambda i: [i + 1],
    [counter(m)],
    maximum_iterations=7,
    parallel_iterations=2,
    back_prop=False,
  )
  assert run_in(mode, build) == [7]


def test_wrong_use_is_told_when_the_graph_is_built():
  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")
  i, x = counter(m), mtf.ones(m, [A])
  more = lambda i, *_: mtf.less(i, 3)  # noqa: E731
  with pytest.raises(mtf.GraphError, match="bool scalar"):
    mtf.while_loop(lambda i: i, lambda i: [i], [i])
  with pytest.raises(mtf.GraphError, match="returned 1 tensors for 2"):
    mtf.while_loop(more, lambda i, x: [i], [i, x])
  with pytest.raises(mtf.GraphError, match="has_accumulators"):
    mtf.while_loop(more, lambda i: [i, i], [i])
  with pytest.raises(mtf.ShapeError, match="loop variable 1"):
    mtf.while_loop(more, lambda i, x: [i, mtf.reduce_sum(x)], [i, x])
  with pytest.raises(mtf.DTypeError, match="loop variable 1"):
    mtf.while_loop(more, lambda i, x: [i, mtf.to_int32(x)], [i, x])
  with pytest.raises(mtf.GraphError, match="num_loop_vars"):
    mtf.while_loop(more, lambda i: [i], [i], num_loop_vars=0)
  inner = []
  _, y = mtf.while_loop(
    more, lambda i, x: [i + 1, inner.append(x * 2.0) or inner[-1]], [i, x], back_prop=False
  )
  with pytest.raises(mtf.GraphError, match="inside a loop"):
    mtf.negative(inner[0])
  with pytest.raises(mtf.GradientError, match="while_loop.* back_prop=False"):
    mtf.gradients([mtf.reduce_sum(y)], [x])


def test_the_layout_of_the_body_is_verified_before_anything_runs():
  def build(m):
    x = mtf.ones(m, [A])
    return mtf.while_loop(
      lambda i: mtf.less(i, 3),
      lambda i: [i + 1, mtf.slice(x, 0, 3, "a")],
      [counter(m)],
      has_accumulators=True,
    )

  with pytest.raises(mtf.LayoutError, match="a:8"):
    run(build, "a:r")


SPLITS = list(itertools.product([1, 2, 4], MODES))


class TestSerializeTrainingStep:
  @pytest.mark.parametrize(
    ("num_splits", "mode"), kept(SPLITS, [SPLITS[i] for i in (0, 5, 10, 11)])
  )
  def test_equals_the_whole_batch(self, num_splits, mode):
    x, w = rand(8, 4), rand(4, seed=1)

    def model(features):
      t = features["x"]
      weights = mtf.get_variable(t.mesh, "w", [B], initializer=lambda s, dtype: tf.constant(w))
      z = mtf.reduce_sum(t * weights, reduced_dim=B)
      loss = mtf.reduce_sum(mtf.square(z))
      return {"loss": loss, "z": z, "mean": mtf.reduce_mean(t), "rows": t, "id": features["id"]}

    def build(m):
      features = {
        "x": mtf.import_tf_tensor(m, x, [A, B]),
        "id": mtf.import_tf_tensor(m, np.arange(8), [A]),
      }
      (grad,), out = mtf.serialize_training_step(features, model, A, num_splits)
      assert out["z"].shape == mtf.Shape([A]) and out["rows"].shape == mtf.Shape([A, B])
      return [grad, out["loss"], out["z"], out["mean"], out["rows"], out["id"]]

    for layout in ["", "a:r", "a:r,b:c"]:
      grad, loss, z, mean, rows, ids = run_in(mode, build, layout)
      np.testing.assert_allclose(z, x @ w, rtol=1e-5)
      np.testing.assert_allclose(loss, np.square(x @ w).sum(), rtol=1e-5)
      np.testing.assert_allclose(grad, 2 * x.T @ (x @ w), rtol=1e-5)
      np.testing.assert_allclose(mean, num_splits * x.mean(), rtol=1e-4)
      np.testing.assert_array_equal(rows, x)
      np.testing.assert_array_equal(ids, np.arange(8))

  def test_microbatches_take_every_nth_example_without_communication(self):
    seen = []

    def model(features):
      v = mtf.get_variable(features["x"].mesh, "v", [], initializer=1.0)
      seen.append(features["x"].shape)
      first = mtf.reduce_first(mtf.anonymize(features["x"]), ("_anonymous_0", 2))
      return {"loss": v * mtf.reduce_sum(features["x"]), "first": first}

    def build(m):
      x = mtf.import_tf_tensor(m, np.arange(8, dtype=np.float32), [A])
      _, out = mtf.serialize_training_step({"x": x}, model, A, 4)
      return [out["loss"], out["first"]]

    # Microbatch i begins with example i: 0 + 1 + 2 + 3.
    assert [float(v) for v in run(build, "a:r")] == [28.0, 6.0]
    assert seen == [mtf.Shape([("a", 2)])]

  def test_gradients_are_exchanged_once(self):
    graph = mtf.Graph()
    m = mtf.Mesh(graph, "m")
    x = mtf.import_tf_tensor(m, rand(8, 4), [A, B])

    def model(features):
      w = mtf.get_variable(m, "w", [B])
      return {"loss": mtf.reduce_sum(features["x"] * w)}

    (grad,), out = mtf.serialize_training_step({"x": x}, model, A, 2)
    lowering = mtf.Lowering(graph, {m: placement("a:r")})
    assert isinstance(lowering.tensors[grad], mtf.LazyAllreduceSum)
    assert isinstance(lowering.tensors[out["loss"]], mtf.LazyAllreduceSum)
    assert not [k for k, _ in lowering.counters if k.startswith(("allreduce", "all"))]

  def test_with_recomputation_under_autograph(self):
    x, w = rand(8, 4), rand(4, 6, seed=1)
    h = mtf.Dimension("h", 6)
    impl = placement("a:r,b:c")

    @tf.function
    def program():
      m = mtf.Mesh(mtf.Graph(), "m")

      def model(features):
        weights = mtf.get_variable(m, "w", [B, h], initializer=lambda s, dtype: tf.constant(w))
        y = mtf.recompute_grad(
          lambda t: mtf.sin(mtf.einsum([t, weights], output_shape=[("a", 2), h])), [features["x"]]
        )
        return {"loss": mtf.reduce_sum(mtf.square(y))}

      features = {"x": mtf.import_tf_tensor(m, x, [A, B])}
      (grad,), _ = mtf.serialize_training_step(features, model, A, 4)
      return mtf.Lowering(m.graph, {m: impl}).export_to_tf_tensor(grad)

    y = x @ w
    np.testing.assert_allclose(program(), x.T @ (2 * np.sin(y) * np.cos(y)), rtol=1e-4)

  def test_wrong_use_is_told(self):
    m = mtf.Mesh(mtf.Graph(), "m")
    x = mtf.ones(m, [A])
    with pytest.raises(mtf.ShapeError, match="a=8 cannot be cut into 3"):
      mtf.serialize_training_step({"x": x}, lambda f: f, A, 3)
    with pytest.raises(mtf.DimensionError, match="feature 'x'"):
      mtf.serialize_training_step({"x": x}, lambda f: f, B, 2)

    def model(features):
      mtf.get_variable(m, "unused", [A])
      return {"loss": mtf.reduce_sum(features["x"])}

    with pytest.raises(mtf.GradientError, match="unused"):
      mtf.serialize_training_step({"x": x}, model, A, 2)


@pytest.mark.parametrize("in_function", [False, True])
def test_on_devices_of_their_own(cpu_devices, in_function):
  """The slices of variables, loop state and assignments stay on their devices."""
  impl = mtf.PlacementMeshImpl("r:2,c:2", "a:r,b:c", cpu_devices[:4])
  x = rand(8, 4)

  def build(m):
    t = mtf.import_tf_tensor(m, x, [A, B])

    def body(i, y):
      v = mtf.get_variable(m, "v", [A, B], initializer=tf.zeros_initializer())
      mtf.assign_add(v, y)
      again = mtf.read_variable(v.operation)
      z = mtf.dropout(y + t, True, 0.5)
      return [i + 1, mtf.shift(y, 1, A, True), mtf.reduce_sum(again, reduced_dim=A), z]

    return mtf.while_loop(lambda i, y: mtf.less(i, 3), body, [counter(m), t], has_accumulators=True)

  i, y, total, z = run(build, impl=impl, in_function=in_function)
  assert i == 3
  np.testing.assert_array_equal(y, np.roll(x, 3, 0))
  np.testing.assert_allclose(total, 6 * x.sum(0), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(
    impl.variable_store["v"].numpy(), x + np.roll(x, 1, 0) + np.roll(x, 2, 0), rtol=1e-5
  )
  np.testing.assert_allclose(z, run(build, "", "")[3], rtol=1e-5)


class TestGradients:
  """Beside the descriptors: what is kept, what is exchanged, and what cannot be differentiated."""

  @staticmethod
  def _program(steps, **kwargs):
    m = mtf.Mesh(mtf.Graph(), "m")
    x = mtf.import_tf_tensor(m, rand(8, 4), [A, B])
    w = mtf.get_variable(m, "w", [B], initializer=tf.ones_initializer())
    _, y = mtf.while_loop(
      lambda i, y: mtf.less(i, steps),
      lambda i, y: [i + 1, mtf.sin(y * w)],
      [counter(m), x],
      **kwargs,
    )
    return m, x, w, y

  def test_of_weights_are_exchanged_once_after_the_loop(self):
    m, _, w, y = self._program(5)
    (grad,) = mtf.gradients([mtf.reduce_sum(y)], [w])
    lowering = mtf.Lowering(m.graph, {m: placement("a:r")})
    assert isinstance(lowering.tensors[grad], mtf.LazyAllreduceSum)
    assert not [k for k, _ in lowering.counters if k.startswith("allreduce")]
    lowering.export_to_tf_tensor(grad)
    assert len([k for k, _ in lowering.counters if k.startswith("allreduce")]) == 1

  def test_only_what_is_wanted_is_computed(self):
    m, x, w, y = self._program(5)
    before = len(m.graph.operations)
    assert mtf.gradients([mtf.reduce_sum(y)], [w])[0].shape == w.shape
    (loop,) = [op for op in m.graph.operations[before:] if isinstance(op, mtf.WhileLoopOperation)]
    sums = [t for t in loop.outputs if t.shape == w.shape]
    assert len(sums) == 1

  def test_the_plan_counts_what_is_kept(self):
    def activations(steps):
      m, x, _, y = self._program(steps, maximum_iterations=steps)
      mtf.gradients([mtf.reduce_sum(y)], [x])
      return mtf.describe(m.graph, "a:r", "r:2").memory.activations

    # y * w and y, of a slice of 4 x 4 floats, in each of 100 iterations more.
    more = activations(200) - activations(100)
    assert 100 * 4 * 16 <= more <= 100 * (3 * 4 * 16 + 8)

  def test_with_the_body_recomputed_only_the_state_is_kept(self):
    def stacks(body):
      m = mtf.Mesh(mtf.Graph(), "m")
      x = mtf.import_tf_tensor(m, rand(8), [A])
      (_, y) = mtf.while_loop(
        lambda i, y: mtf.less(i, 3), lambda i, y: [i + 1, body(y)], [counter(m), x]
      )
      mtf.gradients([mtf.reduce_sum(y)], [x])
      return [t for t in y.operation.saved if t.shape == x.shape]

    body = lambda y: mtf.sin(mtf.tanh(mtf.sin(y)))  # noqa: E731
    assert len(stacks(body)) > 1
    assert len(stacks(lambda y: mtf.recompute_grad(body, [y]))) == 1

  @pytest.mark.parametrize("mode", ["eager", "simd"])
  def test_in_microbatches(self, mode):
    x, w = rand(8, 4), rand(4, seed=1)

    def model(features):
      weights = mtf.get_variable(
        features["x"].mesh, "w", [B], initializer=lambda s, dtype: tf.constant(w)
      )
      t = features["x"]
      _, y = mtf.while_loop(
        lambda i, y: mtf.less(i, 3),
        lambda i, y: [i + 1, mtf.sin(y * weights)],
        [counter(t.mesh), t],
      )
      return {"loss": mtf.reduce_sum(mtf.square(y))}

    def build(m):
      features = {"x": mtf.import_tf_tensor(m, x, [A, B])}
      return mtf.serialize_training_step(features, model, A, 2)[0]

    weights = tf.constant(w)
    with tf.GradientTape() as tape:
      tape.watch(weights)
      y = tf.constant(x)
      for _ in range(3):
        y = tf.sin(y * weights)
      loss = tf.reduce_sum(y * y)
    want = tape.gradient(loss, weights)
    np.testing.assert_allclose(run_in(mode, build, "a:r")[0], want, rtol=1e-4)

  def test_a_thousand_steps_back(self):
    """An explicit solver, and its adjoint: the gradient of a linear map is its transpose."""
    n = mtf.Dimension("n", 16)

    def build(m):
      x = mtf.import_tf_tensor(m, rand(16), [n])

      def body(i, u):
        near = mtf.shift(u, 1, n, True) + mtf.shift(u, -1, n, True)
        return [i + 1, u + 0.1 * (near - 2.0 * u)]

      _, y = mtf.while_loop(lambda i, u: mtf.less(i, 1000), body, [counter(m), x])
      v = mtf.import_tf_tensor(m, rand(16, seed=1), [n])
      (adjoint,) = mtf.gradients([y], [x], grad_ys=[v])
      # <A x, v> = <x, A' v>, and A is symmetric.
      _, forward = mtf.while_loop(lambda i, u: mtf.less(i, 1000), body, [counter(m), v])
      return [mtf.reduce_sum(y * v), mtf.reduce_sum(x * adjoint), adjoint, forward]

    one, other, adjoint, forward = run_in("function", build, "n:r", impl=placement("n:r"))
    np.testing.assert_allclose(one, other, rtol=1e-4)
    np.testing.assert_allclose(adjoint, forward, rtol=1e-4, atol=1e-6)
