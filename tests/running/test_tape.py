"""A tf.GradientTape around an mtf.function, which is a tf.Module, and nests in TensorFlow's own."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.kinds import kept

BATCH, HIDDEN, OUT = (mtf.Dimension(n, s) for n, s in [("batch", 4), ("hidden", 8), ("out", 4)])
RNG = np.random.default_rng(0)
X = RNG.normal(size=[4, 8]).astype(np.float32)
# The last has weights that are whole on some processors, and split on others' axis.
LAYOUTS = {"one": ("r:1", ""), "2x2": ("r:2,s:2", "batch:r,hidden:s"), "4": ("r:4", "out:r")}


@pytest.fixture(params=["placement", "simd"])
def kind(request):
  return request.param


@pytest.fixture
def make_impl(kind, cpu_devices):
  def make(layout="2x2"):
    shape, rules = LAYOUTS[layout]
    devices = cpu_devices[: mtf.convert_to_shape(shape).size]
    cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
    return cls(shape, rules, devices)

  return make


def layer(impl, traces=None, **kwargs):
  """tanh(x w + b), with noise if there is a rate; its sum of squares, too."""
  rate = kwargs.pop("rate", 0.0)

  @mtf.function(impl, [mtf.TensorSpec([BATCH, HIDDEN])], **kwargs)
  def f(x):
    if traces is not None:
      traces.append(1)
    w = mtf.get_variable(x.mesh, "w", [HIDDEN, OUT])
    b = mtf.get_variable(x.mesh, "b", [OUT], initializer=mtf.initializers.Constant(0.1))
    y = mtf.tanh(mtf.einsum([x, w], [BATCH, OUT]) + b)
    y = mtf.dropout(y, is_training=True, rate=rate) if rate else y
    return {"loss": mtf.reduce_sum(mtf.square(y)), "y": y, "count": mtf.constant(x.mesh, 3)}

  return f


def expected(impl, y):
  """Loss and gradients of x, w, b in TensorFlow; zeros in y are of noise that keeps half."""
  values = [tf.Variable(v) for v in (X, *(impl.variable_store[n].numpy() for n in "wb"))]
  mask = np.where(np.asarray(y) == 0, 0.0, 2.0) if np.any(np.asarray(y) == 0) else 1.0
  with tf.GradientTape() as tape:
    x, w, b = values
    loss = tf.reduce_sum(tf.square(tf.tanh(x @ w + b) * mask))
  return loss, tape.gradient(loss, values)


def test_a_function_is_let_go_of(make_impl):
  """With its trace and its gradients, though TensorFlow keeps those of `tf.custom_gradient`."""
  f = layer(make_impl())
  x = tf.Variable(X)
  with tf.GradientTape() as tape:
    loss = f(x)["loss"]
  assert tape.gradient(loss, x) is not None
  held = [weakref.ref(f), weakref.ref(f.graph)]
  del f, tape, loss
  gc.collect()
  assert [ref() for ref in held] == [None, None]


def check(f, loss, y, grads):
  """Gradients of x and of the slices of w and b."""
  impl = f.mesh_impl
  want_loss, (want_x, want_w, want_b) = expected(impl, y)
  np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
  np.testing.assert_allclose(grads["x"], want_x, rtol=1e-4, atol=1e-5)
  for name, want in [("w", want_w), ("b", want_b)]:
    stored = f.stored_variables[name]
    assert len(grads[name]) == len(stored.slices)
    for begin, g in zip(stored.begins, grads[name]):
      where = tuple(slice(b, b + n) for b, n in zip(begin, stored.slice_shape))
      np.testing.assert_allclose(g, want.numpy()[where], rtol=1e-4, atol=1e-5)


def sources(f, x):
  return {"x": x, **{n: f.stored_variables[n].slices for n in "wb"}}


@pytest.mark.parametrize("layout", kept(list(LAYOUTS), ["2x2"]))
@pytest.mark.parametrize(
  "rate", [pytest.param(0.0, marks=pytest.mark.long), pytest.param(0.5, marks=pytest.mark.slow)]
)
def test_arguments_and_variables(layout, rate, make_impl):
  traces = []
  f = layer(make_impl(layout), traces, rate=rate)
  f(X)
  forward = len(traces)
  for _ in range(3):
    x = tf.Variable(X)
    with tf.GradientTape() as tape:
      result = f(x)
    check(f, result["loss"], result["y"], tape.gradient(result["loss"], sources(f, x)))
  assert len(traces) == 2 * forward  # One backward program, whatever the number of calls.


def test_in_a_tf_function(make_impl):
  f = layer(make_impl(), rate=0.5)
  f(X)

  @tf.function
  def step(x, seed):
    with tf.GradientTape() as tape:
      tape.watch(x)
      result = f(x, seed=seed)
      twice = 2.0 * result["loss"]
    return result, tape.gradient(twice, sources(f, x))

  for seed in (1, 2):
    result, grads = step(tf.constant(X), tf.constant(seed))
    check(f, result["loss"], result["y"], tf.nest.map_structure(lambda g: g / 2, grads))
  assert step.experimental_get_tracing_count() == 1


@pytest.mark.usefixtures("run_functions_eagerly")
def test_with_functions_run_eagerly(make_impl):
  f = layer(make_impl(), rate=0.5)
  x = tf.Variable(X)
  with tf.GradientTape() as tape:
    result = f(x)
  check(f, result["loss"], result["y"], tape.gradient(result["loss"], sources(f, x)))


@pytest.fixture
def run_functions_eagerly():
  tf.config.run_functions_eagerly(True)
  yield
  tf.config.run_functions_eagerly(False)


def test_values_of_the_run_count(make_impl):
  """Weights, statistics and arguments that change before the tape is asked."""

  @mtf.function(make_impl(), [mtf.TensorSpec([BATCH, HIDDEN])])
  def f(x):
    w = mtf.get_variable(x.mesh, "w", [HIDDEN])
    mean = mtf.get_variable(
      x.mesh, "mean", [], trainable=False, initializer=mtf.initializers.Constant(2.0)
    )
    mtf.assign_add(mean, mtf.ones_like(mean))
    return mtf.reduce_sum(mtf.square(x * w)) * mean

  f(X)
  stored = f.stored_variables["w"]
  w, mean = stored.numpy(), float(f.stored_variables["mean"].numpy())
  x = tf.Variable(X)
  with tf.GradientTape() as tape:
    loss = f(x)
  for v in (x, *stored.slices):
    v.assign(tf.zeros_like(v))
  np.testing.assert_allclose(tape.gradient(loss, x), 2 * mean * X * w**2, rtol=1e-4)
  assert float(f.stored_variables["mean"].numpy()) == mean + 1  # By the run, not by the gradient.


def test_what_has_no_gradient(make_impl):
  impl = make_impl()

  @mtf.function(impl, [mtf.TensorSpec([BATCH, HIDDEN]), mtf.TensorSpec([BATCH], tf.int32)])
  def f(x, ids):
    unused = mtf.get_variable(x.mesh, "unused", [HIDDEN])
    del unused
    return mtf.reduce_sum(x), mtf.reduce_max(ids)

  @mtf.function(impl, [mtf.TensorSpec([BATCH, HIDDEN])])
  def train(x):
    loss = mtf.reduce_sum(mtf.square(x * mtf.get_variable(x.mesh, "v", [HIDDEN])))
    mtf.optimize.SgdOptimizer(0.1).minimize(loss)
    return loss

  x = tf.Variable(X)
  with tf.GradientTape() as tape:
    total, largest = f(x, [1, 2, 3, 4])
  assert largest == 4
  unused = f.stored_variables["unused"].slices
  of_x, of_unused = tape.gradient(total, [x, unused])
  np.testing.assert_allclose(of_x, np.ones_like(X))
  assert of_unused == (None,) * len(unused)
  with tf.GradientTape() as tape:
    loss = train(x)
  assert tape.gradient(loss, x) is None  # Such a function takes its gradients itself.


def test_several_tapes(make_impl):
  """TensorFlow then looks for second derivatives, too: there are none."""
  f = layer(make_impl(), rate=0.5)
  x = tf.Variable(X)
  with tf.GradientTape() as outer, tf.GradientTape(persistent=True) as tape:
    result = f(x)
    f(x)
  for _ in range(2):
    check(f, result["loss"], result["y"], tape.gradient(result["loss"], sources(f, x)))
  check(f, result["loss"], result["y"], outer.gradient(result["loss"], sources(f, x)))


def test_an_operation_without_a_gradient(make_impl):
  class Own(mtf.Operation):
    def __init__(self, x):
      super().__init__([x], name="own")
      self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering):
      lowering.set_tensor_lowering(self.outputs[0], lowering.tensors[self.inputs[0]])

  @mtf.function(make_impl(), [mtf.TensorSpec([BATCH, HIDDEN])])
  def f(x):
    return Own(x).outputs[0]

  np.testing.assert_array_equal(f(X), X)
  with pytest.raises(mtf.GradientError, match="Own own has no gradient"):
    with tf.GradientTape() as tape:
      y = f(x := tf.Variable(X))
    tape.gradient(y, x)


def test_reading_after_an_assignment_is_refused(make_impl):
  @mtf.function(make_impl(), [mtf.TensorSpec([BATCH, HIDDEN])])
  def f(x):
    state = mtf.get_variable(x.mesh, "state", [], trainable=False)
    mtf.assign(state, mtf.reduce_sum(x))
    return x * mtf.read_variable(state.operation)

  f(X)
  with pytest.raises(mtf.GradientError, match="reads variable state after it was assigned"):
    with tf.GradientTape() as tape:
      y = f(x := tf.Variable(X))
    tape.gradient(y, x)


def test_module(make_impl):
  impl = make_impl()
  module = tf.Module()
  module.f, module.g = layer(impl), layer(impl)
  assert module.variables == ()
  module.f(X)
  assert {v.ref() for v in module.trainable_variables} == {
    v.ref() for name in "wb" for v in impl.variable_store[name].slices
  }
  assert set(module.f.stored_variables) == {"w", "b"}
  assert module.g.variables == ()  # Those of its own graph only.


def test_in_a_dataset(make_impl):
  f = layer(make_impl())
  want = f(X)["y"]
  data = tf.data.Dataset.from_tensors(X).repeat(2).map(lambda x: f(x)["y"])
  for got in data:
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_in_a_keras_train_step(make_impl):
  f = layer(make_impl())
  f(X)

  class Model(tf.keras.Model):
    def __init__(self):
      super().__init__()
      self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def train_step(self, data):
      with tf.GradientTape() as tape:
        loss = f(data[0] * self.scale)["loss"]
      slices = list(f.trainable_variables)
      grads = tape.gradient(loss, [*slices, self.scale.value])
      for v, g in zip(slices, grads):
        v.assign_sub(0.05 * g)
      self.optimizer.apply(grads[-1:], [self.scale])
      return {"squares": loss}

  model = Model()
  model.compile(optimizer=tf.keras.optimizers.SGD(0.01))
  losses = model.fit(X, X, batch_size=4, epochs=5, verbose=0, shuffle=False).history["squares"]
  assert losses[-1] < 0.7 * losses[0]
  replicas = f.stored_variables["b"].slices
  for v in replicas[1:]:
    np.testing.assert_array_equal(v, replicas[0])


def test_a_function_of_mtf_tensors_becomes_part_of_their_graph(make_impl):
  impl = make_impl()
  inner = layer(impl)

  @mtf.function(impl, [mtf.TensorSpec([BATCH, HIDDEN])])
  def outer(x):
    return inner(x * 2.0)["loss"]

  np.testing.assert_allclose(outer(X), inner(2 * X)["loss"], rtol=1e-5)

  @mtf.function(impl, [mtf.TensorSpec([BATCH, OUT])])
  def wrong(x):
    return inner(x)

  with pytest.raises(mtf.ShapeError, match="argument 0 of f is .*expected TensorSpec"):
    wrong(np.zeros([4, 4]))
