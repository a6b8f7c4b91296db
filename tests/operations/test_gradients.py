"""mtf.gradients: the rules of the sweep. That each operation's gradient is right is tested in
tests/conformance; here are the graphs around them, against tf.GradientTape."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import GradientError
from mesh_tensorflow.operations.gating import gated

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)
VALUES = np.random.default_rng(0).uniform(0.5, 2.0, [4, 8]).astype(np.float32)
WEIGHTS = np.random.default_rng(1).uniform(-1, 1, [8, 12]).astype(np.float32)


@pytest.fixture
def mesh():
  return mtf.Mesh(mtf.Graph(), "m")


@pytest.fixture
def x(mesh):
  return mtf.import_tf_tensor(mesh, VALUES, [A, B])


def lower(mesh, *tensors, layout="a:r,b:s", shape="r:2,s:2"):
  size = mtf.convert_to_shape(shape).size
  impl = mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, [""] * size)
  lowering = mtf.Lowering(mesh.graph, {mesh: impl})
  return [lowering.export_to_tf_tensor(t).numpy() for t in tensors]


def test_default_gradient_is_one(mesh, x):
  dx = mtf.gradients([mtf.square(x)], [x])[0]
  np.testing.assert_allclose(lower(mesh, dx)[0], 2 * VALUES, rtol=1e-6)


def test_given_gradient(mesh, x):
  dx = mtf.gradients([mtf.square(x)], [x], grad_ys=[x])[0]
  np.testing.assert_allclose(lower(mesh, dx)[0], 2 * VALUES**2, rtol=1e-6)


def test_none_among_the_given_gradients(mesh, x):
  dx = mtf.gradients([mtf.square(x), x * 3.0], [x], grad_ys=[None, mtf.ones_like(x)])[0]
  np.testing.assert_allclose(lower(mesh, dx)[0], np.full([4, 8], 3.0))


def test_several_ys_add_up(mesh, x):
  dx = mtf.gradients([mtf.square(x), x * 3.0], [x])[0]
  np.testing.assert_allclose(lower(mesh, dx)[0], 2 * VALUES + 3, rtol=1e-6)


def test_no_dependence_is_none(mesh, x):
  other = mtf.ones(mesh, [A])
  assert mtf.gradients([mtf.square(x)], [other]) == [None]
  assert mtf.gradients([mtf.stop_gradient(x)], [x]) == [None]
  assert mtf.gradients([mtf.to_float(mtf.to_int32(x))], [x]) == [None]


def test_x_among_the_ys(mesh, x):
  y = mtf.square(x)
  dy = mtf.gradients([y, y * 2.0], [y])[0]
  np.testing.assert_allclose(lower(mesh, dy)[0], np.full([4, 8], 3.0))


def test_with_respect_to_what_lies_between(mesh, x):
  y = mtf.square(x)
  dy, dx = mtf.gradients([mtf.reduce_sum(y * y)], [y, x])
  got_dy, got_dx = lower(mesh, dy, dx)
  np.testing.assert_allclose(got_dy, 2 * VALUES**2, rtol=1e-5)
  np.testing.assert_allclose(got_dx, 4 * VALUES**3, rtol=1e-5)


def test_an_operation_used_often(mesh, x):
  y = mtf.exp(x)
  dx = mtf.gradients([mtf.reduce_sum(y * y + y * x + y)], [x])[0]
  e = np.exp(VALUES.astype(np.float64))
  np.testing.assert_allclose(lower(mesh, dx)[0], 2 * e * e + e * VALUES + e + e, rtol=1e-5)


def test_second_derivative(mesh, x):
  y = mtf.reduce_sum(mtf.tanh(x) * x)
  dx = mtf.gradients([y], [x])[0]
  ddx = mtf.gradients([mtf.reduce_sum(dx * dx)], [x])[0]
  v = tf.constant(VALUES)
  with tf.GradientTape() as outer:
    outer.watch(v)
    with tf.GradientTape() as inner:
      inner.watch(v)
      z = tf.reduce_sum(tf.tanh(v) * v)
    dv = inner.gradient(z, v)
    total = tf.reduce_sum(dv * dv)
  np.testing.assert_allclose(lower(mesh, ddx)[0], outer.gradient(total, v), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fn", [mtf.exp, mtf.log, mtf.sqrt, mtf.rsqrt, mtf.sigmoid, mtf.tanh,
                                mtf.square, mtf.reciprocal, mtf.swish, mtf.gelu])  # fmt: skip
def test_second_derivatives_of_functions(fn, mesh, x):
  """The gradients of gradients exist and are right, against finite differences."""
  dx = mtf.gradients([fn(x)], [x])[0]
  ddx = mtf.gradients([dx], [x])[0]
  step = 1e-2
  near = [mtf.gradients([fn(x + s)], [x])[0] for s in (step, -step)]
  got, above, below = lower(mesh, ddx, *near)
  np.testing.assert_allclose(got, (above - below) / (2 * step), rtol=2e-3, atol=2e-3)


def test_variables_and_a_network(mesh, x):
  """Two layers with tied use of a variable, against tf.GradientTape."""
  w = mtf.get_variable(mesh, "w", [B, C], initializer=tf.constant_initializer(WEIGHTS))
  scale = mtf.get_variable(mesh, "scale", [C], initializer=tf.ones_initializer())
  h = mtf.gelu(mtf.einsum([x, w], [A, C]) * scale)
  y = mtf.einsum([h, w], [A, B])
  loss = mtf.reduce_mean(mtf.square(y - x)) + mtf.reduce_logsumexp(
    mtf.reduce_sum(h, output_shape=[C]), C
  )
  grads = mtf.gradients([loss], [v.outputs[0] for v in mesh.graph.trainable_variables])
  got = lower(mesh, loss, *grads, layout="a:r,c:s")

  tf_w, tf_scale = tf.constant(WEIGHTS), tf.ones([12])
  with tf.GradientTape() as tape:
    tape.watch([tf_w, tf_scale])
    tf_h = tf.nn.gelu((VALUES @ tf_w) * tf_scale, approximate=True)
    tf_loss = tf.reduce_mean(tf.square(tf_h @ tf.transpose(tf_w) - VALUES)) + tf.reduce_logsumexp(
      tf.reduce_sum(tf_h, 0)
    )
  expected = [tf_loss, *tape.gradient(tf_loss, [tf_w, tf_scale])]
  for a, b in zip(got, expected):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_only_the_given_operations_are_gone_through(mesh, x):
  y = mtf.square(x)
  z, operations = mesh.graph.capture_operations(lambda: y * 3.0)
  assert mtf.gradients([z], [x], operations=operations) == [None]
  dy = mtf.gradients([z], [y], operations=operations)[0]
  np.testing.assert_allclose(lower(mesh, dy)[0], np.full([4, 8], 3.0))


def test_gradient_operations_are_named_after_the_forward_one(mesh, x):
  y = mtf.einsum([x, mtf.ones(mesh, [B, C])], [A, C], name="project")
  n = len(mesh.graph.operations)
  mtf.gradients([y], [x])
  names = [op.name for op in mesh.graph.operations[n:]]
  assert any(name.startswith("project/gradients/") for name in names)


def test_gradients_leave_the_open_scope(mesh):
  with mtf.variable_scope("model"):
    v = mtf.get_variable(mesh, "v", [A])
    mtf.gradients([mtf.square(v)], [v])
    assert mtf.get_variable(mesh, "w", [A]).operation.full_name == "model/w"


def test_gradient_has_the_order_of_its_tensor(mesh, x):
  y = mtf.transpose(x, [B, A]) * mtf.ones(mesh, [B, A])
  dx = mtf.gradients([mtf.reduce_sum(y)], [x])[0]
  assert dx.shape == x.shape


def test_bfloat16_gradients_are_bfloat16(mesh, x):
  dx = mtf.gradients([mtf.to_float(mtf.square(mtf.to_bfloat16(x)))], [x])[0]
  assert dx.dtype == tf.float32
  y = mtf.to_bfloat16(x)
  assert mtf.gradients([mtf.square(y)], [y])[0].dtype == tf.bfloat16


def test_unused_outputs_of_an_unstack(mesh, x):
  first, *_ = mtf.unstack(x, A)
  dx = mtf.gradients([first * 2.0], [x])[0]
  expected = np.zeros([4, 8])
  expected[0] = 2
  np.testing.assert_array_equal(lower(mesh, dx, layout="b:r")[0], expected)


def test_slicewise_with_an_unused_output(mesh, x):
  y, _ = mtf.slicewise(
    lambda t: (t * 3.0, t * 5.0),
    [x],
    output_shape=[None, None],
    output_dtype=[tf.float32, tf.float32],
    splittable_dims=[A, B],
  )
  dx = mtf.gradients([y], [x])[0]
  np.testing.assert_allclose(lower(mesh, dx)[0], np.full([4, 8], 3.0))


def test_gradient_of_a_pending_sum(mesh, x):
  """Generic gradients must force sums that are pending (the TF1 library crashed)."""
  y = mtf.sin(mtf.reduce_sum(x, reduced_dim=A))
  dx = mtf.gradients([y], [x])[0]
  expected = np.broadcast_to(np.cos(VALUES.sum(0)), [4, 8])
  np.testing.assert_allclose(lower(mesh, dx)[0], expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_function_of_a_user(mesh, x):
  y = mtf.cwise(tf.abs, [x], grad_function=lambda op, dy: [dy * 7.0])
  dx = mtf.gradients([y], [x])[0]
  np.testing.assert_allclose(lower(mesh, dx)[0], np.full([4, 8], 7.0))


def test_no_gradient_on_the_way(mesh, x):
  with pytest.raises(GradientError):
    mtf.gradients([mtf.floordiv(x, x)], [x])


def test_maximum_of_a_broadcast_operand(mesh, x):
  """The TF1 library did not reduce this gradient to the operand's shape."""
  row = mtf.import_tf_tensor(mesh, VALUES[0], [B])
  dx = mtf.gradients([mtf.maximum(x, row)], [row])[0]
  assert dx.shape.dims == [B]
  np.testing.assert_allclose(lower(mesh, dx)[0], (VALUES[0] >= VALUES).sum(0))


def test_gradients_that_nobody_asked_for_leave_no_operations(mesh):
  x = mtf.import_tf_tensor(mesh, np.ones([4, 8], "f"), "a:4 b:8")
  w = mtf.get_variable(mesh, "w", "b:8 c:2")
  y = mtf.einsum([x, w], output_shape=[("a", 4), ("c", 2)])
  (dw,), made = mesh.graph.capture_operations(lambda: mtf.gradients([y], [w]))
  products = [op for op in made if isinstance(op, mtf.EinsumOperation)]
  assert products == [dw.operation]


@pytest.mark.parametrize(
  "fn",
  [
    lambda x: mtf.cwise(lambda p, q: p * q, [x, x]),
    lambda x: mtf.slicewise(lambda p, q: p * q, [x, x], splittable_dims=x.shape.dims),
  ],
)
def test_a_function_that_is_given_one_tensor_twice(mesh, x, fn):
  """A tape gives one tf.Tensor that stands for both the gradient of both, twice."""
  dx = mtf.gradients([fn(x)], [x])[0]
  np.testing.assert_allclose(lower(mesh, dx)[0], 2 * VALUES, rtol=1e-6)


def test_a_function_that_uses_the_imported_tensor_besides(mesh):
  outside = tf.constant(VALUES)
  x = mtf.import_tf_tensor(mesh, outside, [A, B])
  dx = mtf.gradients([mtf.cwise(lambda t: t * outside, [x])], [x])[0]
  np.testing.assert_allclose(lower(mesh, dx, layout="", shape="r:1")[0], VALUES, rtol=1e-6)


def test_a_replicated_input_of_a_function_of_split_slices(mesh, x):
  """Each processor has the part of the gradient that its slices of the result make."""
  row = mtf.import_tf_tensor(mesh, VALUES[0], [B])
  y = mtf.slicewise(
    lambda s, t: s * t, [x, row], output_shape=x.shape, splittable_dims=x.shape.dims
  )
  dx = mtf.gradients([y], [row])[0]
  np.testing.assert_allclose(lower(mesh, dx)[0], VALUES.sum(0), rtol=1e-6)


SMOOTH = {
  "tanh": tf.tanh, "sigmoid": tf.sigmoid, "rsqrt": tf.math.rsqrt, "sqrt": tf.sqrt, "sin": tf.sin,
  "cos": tf.cos, "exp": tf.exp, "log": tf.math.log, "reciprocal": tf.math.reciprocal,
  "square": tf.square, "softplus": tf.math.softplus, "swish": tf.nn.silu, "elu": tf.nn.elu,
  "selu": tf.nn.selu, "relu": tf.nn.relu, "gelu": lambda v: tf.nn.gelu(v, approximate=True),
  "leaky_relu": tf.nn.leaky_relu,
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_third_derivatives_through_the_value_itself(mesh, name):
  """z = y dy/dx with the value y itself as grad_ys, and two derivatives more."""
  values = VALUES if name in ("rsqrt", "sqrt", "log", "reciprocal") else VALUES - 1.2
  x = mtf.import_tf_tensor(mesh, values, [A, B])
  y = getattr(mtf, name)(x)
  found = [mtf.gradients([y], [x], grad_ys=[y])[0]]
  for _ in range(2):
    found += mtf.gradients([found[-1]], [x])
  t = tf.constant(values, tf.float64)

  def derivative(fn):
    def of(v):
      with tf.GradientTape() as tape:
        tape.watch(v)
        value = fn(v)
      return tape.gradient(value, v, unconnected_gradients=tf.UnconnectedGradients.ZERO)

    return of

  square = derivative(lambda v: tf.square(SMOOTH[name](v)) * 0.5)
  wanted = [square(t), derivative(square)(t), derivative(derivative(square))(t)]
  for got, want in zip(
    lower(mesh, *[mtf.zeros_like(x) if f is None else f for f in found]), wanted
  ):
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_gradients_of_a_gated_swish(mesh, dtype):
  """Of both factors, where the swish is used besides, too; for large inputs; and a second time."""
  near = np.linspace(-6, 6, 32).reshape(4, 8)
  inputs = [np.where(VALUES < 0.5, near * 12, near), near[::-1], VALUES]
  inputs = [tf.cast(t, dtype) for t in inputs]
  x, gate, dp = (mtf.import_tf_tensor(mesh, t, [A, B]) for t in inputs)
  y = mtf.swish(x)
  p = gated(y, gate)
  found = mtf.gradients([p, y], [x, gate], grad_ys=[dp, dp])
  found += mtf.gradients(mtf.gradients([p], [x], grad_ys=[dp]), [x, gate])
  t, g, d = (tf.cast(v, tf.float64) for v in inputs)
  with tf.GradientTape() as outer, tf.GradientTape(persistent=True) as tape:
    for each in (outer, tape):
      each.watch([t, g])
    z = tf.nn.silu(t) * g * d
    both = z + tf.nn.silu(t) * d
    dz = tape.gradient(z, t)
  wanted = [*tape.gradient(both, [t, g]), *outer.gradient(dz, [t, g])]
  for got, want in zip(lower(mesh, *found), wanted):
    # Of the size of what is added: second derivatives of bfloat16 are computed in it.
    scale = 1e-5 if dtype == tf.float32 else 2e-2
    np.testing.assert_allclose(np.float64(got), want, rtol=scale, atol=scale * np.abs(want).max())


def test_passes_of_a_gated_swish():
  """Two forward and five backward."""

  def program(*tensors):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    x, gate, dp = (mtf.import_tf_tensor(mesh, t, [A, B]) for t in tensors)
    p = gated(mtf.swish(x), gate)
    found = [p, *mtf.gradients([p], [x, gate], grad_ys=[dp])]
    lowering = mtf.Lowering(mesh.graph, {mesh: mtf.PlacementMeshImpl("", "", [""])})
    return [lowering.export_to_tf_tensor(t) for t in found]

  traced = tf.function(program, autograph=False).get_concrete_function(*[tf.TensorSpec([4, 8])] * 3)
  types = [op.type for op in traced.graph.get_operations()]
  kernels = [t for t in types if t not in ("Placeholder", "Identity", "NoOp", "Const")]
  assert sorted(kernels) == ["AddV2", *["Mul"] * 3, *["SoftplusGrad"] * 2, "Sub"]


def test_a_function_that_cannot_be_differentiated_twice(mesh):
  x = mtf.ones(mesh, [("n", 1), ("h", 2), ("w", 2), ("c", 4)])
  y = mtf.slicewise(tf.nn.local_response_normalization, [x], splittable_dims=[], name="lrn")
  z = mtf.gradients(mtf.gradients([y], [x]), [x])[0]
  with pytest.raises(
    GradientError, match=r"lrn.*TensorFlow has no gradient.*LRNGrad.*grad_function"
  ):
    lower(mesh, z, layout="", shape="r:1")


def test_a_gradient_of_microbatches_that_are_given_one_tensor_twice(mesh, x):
  graph = x.graph
  w = mtf.get_variable(mesh, "w", [B], initializer=tf.constant_initializer(0.5))

  def model(features):
    y = mtf.reduce_sum(mtf.square(features["p"] * features["q"] * w))
    return {"loss": y}

  (dw,), _ = mtf.serialize_training_step({"p": x, "q": x}, model, A, 2)
  graph.make_variables_untrainable(list(graph.trainable_variables))
  np.testing.assert_allclose(lower(mesh, dw, layout="b:s")[0], (VALUES**4).sum(0), rtol=1e-5)


def test_stacked_variables_of_one_variable_twice(mesh):
  w = mtf.get_variable(mesh, "w", [B], initializer=tf.constant_initializer(0.5))
  both = mtf.StackedVariable([w.operation, w.operation]).outputs[0]
  weights = mtf.import_tf_tensor(mesh, [1.0, 10.0], [("stacked", 2)])
  dw = mtf.gradients([mtf.square(both) * weights], [w])[0]
  np.testing.assert_allclose(lower(mesh, dw, layout="b:s")[0], np.full([8], 11.0))
