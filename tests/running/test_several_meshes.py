"""Programs of several meshes: tensors that go from one to another, gradients, random numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from docs.tools.resharding import SOURCES, TARGETS
from tests.kinds import kept
from tests.running.drawn_reshards import drawn

KINDS = ["placement", "simd", "placement to simd", "simd to placement"]
X = np.random.default_rng(0).uniform(-1, 1, [8, 16]).astype(np.float32)
BATCH, IO, HIDDEN = mtf.Dimension("batch", 8), mtf.Dimension("io", 16), mtf.Dimension("h", 32)


def implementation(kind, shape, layout, devices, store):
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  size = mtf.convert_to_shape(shape).size
  return cls(shape, layout, devices[:size], variable_store=store)


def pair(kind, source, target, devices, first=0):
  """Two meshes of one store: {"a": ..., "b": ...}, each given as (shape, layout)."""
  store = mtf.VariableStore(seed=3)
  kinds = kind.split(" to ") if " to " in kind else [kind, kind]
  a = implementation(kinds[0], *source, devices, store)
  return {"a": a, "b": implementation(kinds[1], *target, devices[first:], store)}


def on_one(devices):
  one = mtf.PlacementMeshImpl("all:1", "", devices[:1], variable_store=mtf.VariableStore(seed=3))
  return {"a": one, "b": one}


MESH_PAIRS = list(itertools.product(KINDS, SOURCES, TARGETS, [True]))
FEW = [(kind, "s:2,t:2", "u:2,v:2", False) for kind in KINDS[:3]]


@pytest.mark.parametrize("kind,source,target,every", kept([*MESH_PAIRS, *FEW], FEW))
def test_values_and_gradients_of_drawn_layouts(
  kind, source, target, every, cpu_devices, record_property
):
  tensors = drawn(source, target, every)
  of = (source, tensors.source), (target, tensors.target)
  checked = tensors.check(pair(kind, *of, cpu_devices))
  assert checked == (144 if every else 12)
  record_property("conformance_cases", 2 * checked)


@pytest.mark.parametrize("source", kept(SOURCES, ["s:2,t:2"]))
@pytest.mark.parametrize("target", kept(TARGETS[:3], ["u:2,v:2"]))
def test_each_element_goes_from_mesh_to_mesh_once(source, target, cpu_devices):
  """By the edges of the traced graph: what TensorFlow copies from device to device."""
  tensors = drawn(source, target, every=False)
  of = (source, tensors.source), (target, tensors.target)
  impls = pair("placement", *of, cpu_devices, first=4)
  f = tensors.function(impls)
  graph = (
    tf.function(lambda *xs: f(*xs), autograph=False)
    .get_concrete_function(*(tf.TensorSpec(v.shape) for v in tensors.values()))
    .graph
  )
  mesh_of = {d[-5:]: name for name, impl in impls.items() for d in impl.devices}
  copied = {}
  for op in graph.get_operations():
    for x in op.inputs:
      meshes = tuple(mesh_of.get(d[-5:], "") for d in (x.device, op.device))
      copied.setdefault(meshes, {})[x.ref(), op.device] = math.prod(x.shape)
  for way in (("a", "b"), ("b", "a")):
    assert sum(copied[way].values()) == tensors.elements


def model(x):
  """Two layers on two meshes, dropout on both; x comes to the second mesh twice."""
  y = mtf.layers.dense(x, [HIDDEN], reduced_dims=[IO], activation=mtf.relu, name="one")
  y = mtf.reshard(mtf.dropout(y, True, rate=0.2), "b")
  y = mtf.layers.dense(y, [IO], reduced_dims=[HIDDEN], name="two")
  y = mtf.dropout(y, True, rate=0.2) - mtf.reshard(x, "b")
  back = mtf.reshard(y, "a") * 0.5 + x
  return mtf.reduce_mean(mtf.square(back))


def train(impls, steps=4, seed=None):
  @mtf.function(impls, [mtf.TensorSpec([BATCH, IO])])
  def step(x):
    x.graph.random_seed = seed
    loss = model(x)
    variables = x.graph.trainable_variables
    for v, g in zip(variables, mtf.gradients([loss], [v.value for v in variables])):
      mtf.assign_sub(v, g * 0.1)
    return loss

  return [float(step(X)) for _ in range(steps)], step


LAYOUTS = [
  (("s:2", "batch:s"), ("u:2,v:2", "batch:u,h:v")),
  (("s:2,t:2", "io:s,h:t"), ("u:4", "io:u")),
  (("s:4", ""), ("u:2", "h:u")),
]


@pytest.fixture(scope="module")
def alone(cpu_devices):
  losses, step = train(on_one(cpu_devices))
  return losses, {v.name: v.numpy() for v in step.mesh_impl.variable_store}


TRAININGS = [(kind, *layout) for kind in KINDS for layout in LAYOUTS]
KEPT = [TRAININGS[0], TRAININGS[4], TRAININGS[6], TRAININGS[11]]


@pytest.mark.parametrize("kind,source,target", kept(TRAININGS, KEPT))
def test_training_is_that_of_one_device(kind, source, target, cpu_devices, alone):
  layout = (source, target)
  losses, step = train(pair(kind, *layout, cpu_devices, first=4))
  np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
  store = step.mesh_impl.variable_store
  assert set(store.names) == set(alone[1])
  for v in store:
    np.testing.assert_allclose(v.numpy(), alone[1][v.name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", kept(KINDS, ["simd to placement"]))
def test_eager(kind, cpu_devices, alone, run_functions_eagerly):
  losses, _ = train(pair(kind, *LAYOUTS[0], cpu_devices, first=4), steps=2)
  np.testing.assert_allclose(losses, alone[0][:2], rtol=1e-5)


@pytest.fixture
def run_functions_eagerly(alone):  # `alone` is made before.
  tf.config.run_functions_eagerly(True)
  yield
  tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_a_seed_in_the_graph(kind, cpu_devices):
  """A tensor of the first mesh that random operations of both draw from."""

  def losses(impls):
    @mtf.function(impls, [mtf.TensorSpec([BATCH, IO]), mtf.TensorSpec([], tf.int32)])
    def f(x, seed):
      x.graph.random_seed = seed
      return model(x)

    return [float(f(X, i)) for i in (1, 2, 1)]

  found = losses(pair(kind, *LAYOUTS[0], cpu_devices, first=4))
  np.testing.assert_allclose(found, losses(on_one(cpu_devices)), rtol=1e-5)
  assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_a_tape_around_it(kind, cpu_devices):
  def gradients(impls):
    f = mtf.function(impls, [mtf.TensorSpec([BATCH, IO])])(model)
    f.create_variables()
    x = tf.constant(X)
    with tf.GradientTape() as tape:
      tape.watch(x)
      loss = f(x, seed=5)
    store = f.mesh_impl.variable_store
    names = [v.name for v in store if v.trainable]
    found = tape.gradient(loss, [x, *(store[n].slices for n in names)])
    whole = {}
    for n, slices in zip(names, found[1:], strict=True):
      v = store[n]
      value = np.zeros(v.shape.to_integer_list, np.float32)
      for begin, g in zip(v.begins, slices, strict=True):
        value[tuple(slice(b, b + k) for b, k in zip(begin, v.slice_shape))] = g
      whole[n] = value
    return found[0].numpy(), whole

  x, of_variables = gradients(pair(kind, *LAYOUTS[0], cpu_devices, first=4))
  expected_x, expected = gradients(on_one(cpu_devices))
  np.testing.assert_allclose(x, expected_x, rtol=1e-5, atol=1e-7)
  for n, value in expected.items():
    np.testing.assert_allclose(of_variables[n], value, rtol=1e-5, atol=1e-7)


def test_a_lowering_by_hand(cpu_devices):
  """As programs of the TF1 library have it: a Lowering is given a mesh implementation of each."""
  impls = pair("placement to simd", *LAYOUTS[0], cpu_devices, first=4)

  @tf.function(autograph=False)
  def f():
    graph = mtf.Graph()
    a, b = mtf.Mesh(graph, "a"), mtf.Mesh(graph, "b")
    x = mtf.import_tf_tensor(a, X, [BATCH, IO])
    y = mtf.exp(mtf.reshard(x, b))
    lowering = mtf.Lowering(graph, {a: impls["a"], b: impls["b"]}, wanted=[x, y])
    return lowering.export_to_tf_tensor(x), lowering.export_to_tf_tensor(y)

  x, y = f()
  np.testing.assert_array_equal(x, X)
  np.testing.assert_allclose(y, np.exp(X), rtol=1e-6)


def test_variables_are_read_after_they_changed_on_another_mesh(cpu_devices):
  impls = pair("simd", *LAYOUTS[0], cpu_devices, first=4)

  @mtf.function(impls, [mtf.TensorSpec([], tf.float32)])
  def f(x):
    v = mtf.get_variable(x.mesh, "v", [], initializer=tf.zeros_initializer())
    y = mtf.reshard(v + x, "b") * 2.0
    mtf.assign(v, mtf.reshard(y, "a"))
    z = mtf.read_variable(v.operation)
    return mtf.reshard(v, "b"), mtf.reshard(z, "b") + y

  assert [float(t) for t in f(1.0)] == [0.0, 4.0]
  assert [float(t) for t in f(1.0)] == [2.0, 12.0]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_loop_and_a_condition_in_a_stage(kind, cpu_devices):
  """What they begin with and take is brought there: they have gradients, as on one mesh."""

  def run(impls):
    @mtf.function(impls, [mtf.TensorSpec([BATCH, IO]), mtf.TensorSpec([BATCH, IO], mesh="b")])
    def f(x, y):
      with mtf.stage("b"):
        start = mtf.constant(x.mesh, 0, dtype=tf.int32)
        body = lambda i, z: [i + 1, mtf.tanh(z * x) + y]  # noqa: E731
        z = mtf.while_loop(lambda i, z: mtf.less(i, 3), body, [start, x])[1]
        is_positive = mtf.greater(mtf.reduce_sum(mtf.square(x)), 0.0)
      with mtf.stage("a"):
        z = mtf.cond(is_positive, lambda: mtf.sin(z) * x, lambda: x)
        same = mtf.cond(is_positive, lambda: y, lambda: x)
        loss = mtf.reduce_sum(mtf.square(z + same))
      assert z.mesh is same.mesh is x.mesh
      return [z, *mtf.gradients([loss], [x, y])]

    return [t.numpy() for t in f(X, X[::-1].copy())]

  for got, expected in zip(
    run(pair(kind, *LAYOUTS[0], cpu_devices, first=4)), run(on_one(cpu_devices)), strict=True
  ):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_variables_in_a_stage_of_another_mesh(kind, cpu_devices):
  """They are read and changed where they are."""
  impls = pair(kind, *LAYOUTS[0], cpu_devices, first=4)

  @mtf.function(impls, [mtf.TensorSpec([BATCH])])
  def f(x):
    v = mtf.get_variable(x.mesh, "v", [BATCH], initializer=tf.ones_initializer())
    with mtf.stage("b"):
      mtf.assign_add(v, x * 2.0)
      after = mtf.read_variable(v.operation)
      return v * 1.0, after + x

  before, after = f(np.arange(8))
  np.testing.assert_array_equal(before, np.ones(8))
  np.testing.assert_array_equal(after, 1 + 3 * np.arange(8))


def test_random_numbers_in_loops_of_several_meshes(cpu_devices):
  """A loop in a loop, each of both meshes, as large as they may be."""

  def run(impls):
    @mtf.function(impls, [mtf.TensorSpec([IO])])
    def f(x):
      def inner(i, x):
        with mtf.stage("b"):
          y = x + mtf.random_uniform(x.mesh, [IO])
        y = mtf.reshard(y, x.mesh)
        return [i + 1, y + mtf.random_uniform(x.mesh, [IO])]

      def loop(body, x):
        start = mtf.constant(x.mesh, 0, dtype=tf.int32)
        return mtf.while_loop(lambda i, x: mtf.less(i, 2), body, [start, x])[1]

      return loop(lambda i, x: [i + 1, loop(inner, x)], x)

    return f(np.zeros(16), seed=5).numpy()

  found = run(pair("placement to simd", ("s:2", "io:s"), ("u:4", ""), cpu_devices, first=4))
  np.testing.assert_allclose(found, run(on_one(cpu_devices)), rtol=1e-5)


def test_an_argument_on_its_mesh(cpu_devices):
  impls = pair("simd", *LAYOUTS[0], cpu_devices, first=4)

  @mtf.function(impls, [mtf.TensorSpec([BATCH]), mtf.TensorSpec([BATCH], mesh="b")])
  def f(x, y):
    return mtf.reshard(x, y.mesh) + y

  np.testing.assert_array_equal(f(np.arange(8), np.ones(8)), np.arange(8) + 1)


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_checkpoints_have_all_meshes_and_go_into_others(kind, cpu_devices, tmp_path):
  _, step = train(pair(kind, *LAYOUTS[0], cpu_devices, first=4), steps=2)
  store = step.mesh_impl.variable_store
  mtf.checkpoint.Checkpointer(str(tmp_path), store, asynchronous=False).save(2)
  values = {v.name: v.numpy() for v in store}
  reader = tf.train.load_checkpoint(str(tmp_path))
  assert set(values) <= set(reader.get_variable_to_shape_map())
  for others in (on_one(cpu_devices), pair(kind, *LAYOUTS[1], cpu_devices, first=4)):
    f = mtf.function(others, [mtf.TensorSpec([BATCH, IO])])(model)
    f.create_variables()
    found = f.mesh_impl.variable_store
    mtf.checkpoint.Checkpointer(str(tmp_path), found).restore()
    for name, value in values.items():
      np.testing.assert_array_equal(found[name].numpy(), value)


# ------------------------------------------------------------------------------- wrong use


def test_two_stores(cpu_devices):
  a = mtf.PlacementMeshImpl("s:1", "", cpu_devices[:1])
  b = mtf.PlacementMeshImpl("s:1", "", cpu_devices[1:2])
  with pytest.raises(mtf.errors.VariableError, match="variable_store=mtf.VariableStore()"):
    mtf.function({"a": a, "b": b}, [mtf.TensorSpec([BATCH])])(lambda x: mtf.reshard(x, "b"))


def test_an_unknown_mesh(cpu_devices):
  impls = pair("placement", *LAYOUTS[0], cpu_devices, first=4)
  f = mtf.function(impls, [mtf.TensorSpec([BATCH])])(lambda x: mtf.reshard(x, "c"))
  with pytest.raises(mtf.errors.GraphError, match="no mesh 'c'; it has 'a', 'b'"):
    f(np.ones(8))
  with pytest.raises(mtf.errors.GraphError, match="mesh 'c'; the meshes are 'a', 'b'"):
    mtf.function(impls, [mtf.TensorSpec([BATCH], mesh="c")])(lambda x: x)


def test_no_mesh_at_all():
  with pytest.raises(mtf.errors.ArgumentError, match="a dict of their names"):
    mtf.function({}, [mtf.TensorSpec([BATCH])])(lambda x: x)


def test_an_operation_on_tensors_of_two_meshes(cpu_devices):
  impls = pair("placement", *LAYOUTS[0], cpu_devices, first=4)
  f = mtf.function(impls, [mtf.TensorSpec([BATCH])])(lambda x: x + mtf.reshard(x, "b"))
  with pytest.raises(mtf.errors.GraphError, match="mtf.reshard"):
    f(np.ones(8))


def test_a_condition_with_a_loop_of_another_mesh(cpu_devices):
  """Also what is in a block of a block has to be of its mesh."""
  impls = pair("placement", *LAYOUTS[0], cpu_devices, first=4)

  @mtf.function(impls, [mtf.TensorSpec([BATCH])])
  def f(x):
    def branch():
      start = mtf.constant(x.mesh, 0, dtype=tf.int32)
      body = lambda i, y: [i + 1, mtf.reshard(mtf.exp(mtf.reshard(y, "b")), "a")]  # noqa: E731
      return mtf.while_loop(lambda i, y: mtf.less(i, 2), body, [start, x])[1]

    return mtf.cond(mtf.greater(mtf.reduce_sum(x), 0.0), branch, lambda: x)

  with pytest.raises(mtf.errors.UnsupportedError, match="ConditionalOperation cond .* mtf.reshard"):
    f(np.ones(8))


def test_what_was_not_asked_for(cpu_devices):
  impls = pair("placement to simd", *LAYOUTS[0], cpu_devices, first=4)

  @tf.function(autograph=False)
  def f():
    graph = mtf.Graph()
    a, b = mtf.Mesh(graph, "a"), mtf.Mesh(graph, "b")
    x = mtf.reshard(mtf.import_tf_tensor(a, X, [BATCH, IO]), b)
    y = mtf.exp(x * 2.0)
    lowering = mtf.Lowering(graph, {a: impls["a"], b: impls["b"]})
    with pytest.raises(mtf.errors.NotLoweredError, match="wanted"):
      lowering.export_to_tf_tensor(y.operation.inputs[0])
    return lowering.export_to_tf_tensor(y)

  np.testing.assert_allclose(f(), np.exp(2 * X), rtol=1e-5)
