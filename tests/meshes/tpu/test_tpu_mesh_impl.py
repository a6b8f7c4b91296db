"""The per-device program under a distribution strategy: on CPUs, in place of TPU cores."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.checkpoint import Checkpointer
from mesh_tensorflow.errors import (
  ConfigError,
  GraphError,
  MeshShapeError,
  UnsupportedError,
  VariableError,
)
from mesh_tensorflow.meshes.tpu.mesh_impl import StrategyMeshImpl
from tests.kinds import kept
from tests.meshes.tpu import tpu_rewrite
from tests.transformer import lm_program

LAYOUT = "batch:rows,hidden:cols"
BATCH, IO, HIDDEN = mtf.Dimension("batch", 4), mtf.Dimension("io", 6), mtf.Dimension("hidden", 8)
X = np.random.default_rng(0).normal(size=[4, 6]).astype(np.float32)


@pytest.fixture(scope="module")
def strategy(cpu_devices):
  return tf.distribute.MirroredStrategy(cpu_devices[:4])


def placement(shape="rows:2,cols:2"):
  size = mtf.convert_to_shape(shape).size
  return mtf.PlacementMeshImpl(shape, LAYOUT, [""] * size)


def make_impl(strategy, **kwargs):
  return StrategyMeshImpl("rows:2,cols:2", LAYOUT, strategy, timeout_seconds=60, **kwargs)


def loss_of(x, dropout=True):
  """Two dense layers; the variables are updated by Adam."""
  h = mtf.relu(mtf.layers.dense(x, HIDDEN, reduced_dims=[IO], name="up"))
  if dropout:
    h = mtf.dropout(h, True, rate=0.3)
  y = mtf.layers.dense(h, IO, reduced_dims=[HIDDEN], name="down")
  loss = mtf.reduce_mean(mtf.square(y - x))
  variables = x.graph.trainable_variables
  grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
  mtf.optimize.AdamWeightDecayOptimizer(learning_rate=0.01).apply_grads(grads, variables)
  return loss, y


def train_step(impl):
  calls = []

  @mtf.function(impl, [mtf.TensorSpec([BATCH, IO])])
  def step(x):
    calls.append(1)
    return loss_of(x)

  step.calls = calls
  return step


def values_of(impl):
  return {v.name: v.numpy() for v in impl.variable_store}


def assert_close(actual, expected):
  assert actual.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def reference():
  """Losses, outputs and variables of three steps on a placement mesh."""
  impl = placement()
  step = train_step(impl)
  results = [step(X) for _ in range(3)]
  return [r[0].numpy() for r in results], results[-1][1].numpy(), values_of(impl)


ORDER = [2, 0, 3, 1]


@pytest.mark.parametrize(
  ("collectives", "order"),
  kept(
    [("queues", None), ("queues", ORDER), ("runtime", None), ("runtime", ORDER)],
    [("queues", ORDER), ("runtime", None)],
  ),
)
@pytest.mark.slow
def test_training_equals_a_placement_mesh(collectives, order, strategy, reference):
  impl = make_impl(strategy, collectives=collectives, logical_to_physical=order)
  step = train_step(impl)
  results = [step(X) for _ in range(3)]
  np.testing.assert_allclose([r[0] for r in results], reference[0], rtol=1e-5)
  np.testing.assert_allclose(results[-1][1], reference[1], rtol=1e-4, atol=1e-6)
  assert_close(values_of(impl), reference[2])
  assert len(step.calls) == 1, "the program is traced once, for all replicas and runs"


def test_each_replica_holds_its_own_slice(strategy):
  order = [2, 0, 3, 1]
  impl = make_impl(strategy, logical_to_physical=order)
  train_step(impl)(X)
  stored = impl.variable_store["up/kernel"]
  assert stored.slices.variable.synchronization == tf.VariableSynchronization.ON_READ
  assert [v.shape.as_list() for v in stored.slices] == [[6, 4]] * 4
  assert stored.begins == ((0, 0), (0, 4), (0, 0), (0, 4))
  local = strategy.experimental_local_results(stored.slices.variable)
  for p, v in enumerate(stored.slices):
    assert v is local[order[p]]
    assert tf.DeviceSpec.from_string(v.device).device_index == order[p]
    np.testing.assert_array_equal(v, stored.numpy()[:, 4 * (p % 2) : 4 * (p % 2) + 4])


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_of_another_mesh(strategy, reference, tmp_path):
  first = placement("rows:4,cols:1")
  step = train_step(first)
  step(X)
  Checkpointer(str(tmp_path), first.variable_store).save(1, asynchronous=False)
  impl = make_impl(strategy)
  step = train_step(impl)
  step(0 * X)
  checkpointer = Checkpointer(str(tmp_path), impl.variable_store)
  assert checkpointer.restore().step == 1
  step(X)
  result = step(X)
  np.testing.assert_allclose(result[0], reference[0][2], rtol=1e-5)
  assert_close(values_of(impl), reference[2])
  checkpointer.save(3)
  checkpointer.wait()
  reader = tf.train.load_checkpoint(str(tmp_path))
  np.testing.assert_allclose(reader.get_tensor("up/kernel"), reference[2]["up/kernel"], rtol=1e-5)


@pytest.mark.slow
def test_steps_in_a_loop_of_the_host(strategy, reference):
  step = train_step(make_impl(strategy))

  @tf.function(autograph=False)
  def three(x):
    body = lambda i, losses: (i + 1, losses.write(i, step(x)[0]))  # noqa: E731
    losses = tf.TensorArray(tf.float32, 3, element_shape=[])
    return tf.while_loop(lambda i, _: i < 3, body, [0, losses])[1].stack()

  np.testing.assert_allclose(three(X), reference[0], rtol=1e-5)


def test_run_gives_the_results_of_each_processor(strategy):
  impl = make_impl(strategy, logical_to_physical=[2, 0, 3, 1])

  def program(x, offset):
    part = impl.import_tf_tensor(mtf.Shape([BATCH, HIDDEN]), x)
    coordinates = [impl.laid_out_pcoord(a).one_slice for a in (0, 1)]
    return {"pnum": impl.pnum_tensor + offset, "at": coordinates, "part": part.one_slice, "n": "k"}

  x = np.arange(32, dtype=np.float32).reshape(4, 8)
  for results in (
    impl.run_per_device(program, [tf.constant(x)], {"offset": 10}),
    tf.function(lambda v: impl.run_per_device(program, [v], {"offset": 10}))(x),
  ):
    for p, r in enumerate(results):
      assert int(r["pnum"]) == 10 + p
      assert [int(c) for c in r["at"]] == [p // 2, p % 2]
      np.testing.assert_array_equal(
        r["part"], x[2 * (p // 2) : 2 * (p // 2) + 2, 4 * (p % 2) : 4 * (p % 2) + 4]
      )
  assert impl.run(program, [tf.constant(x), 0])["n"] == "k"


def test_a_variable_of_the_caller_is_shared(strategy):
  impl = make_impl(strategy)
  total = tf.Variable(0.0)

  @tf.function(autograph=False)
  def run():
    impl.run(lambda: total.assign_add(tf.cast(impl.pnum_tensor, tf.float32)))
    return total.read_value()

  assert float(run()) == 6.0


def test_in_the_scope_of_the_strategy(strategy, reference):
  with strategy.scope():
    step = train_step(make_impl(strategy))
    np.testing.assert_allclose([step(X)[0] for _ in range(3)], reference[0], rtol=1e-5)


def test_not_in_a_replica(strategy):
  impl = make_impl(strategy)
  with pytest.raises(GraphError, match="calls strategy.run by itself"):
    strategy.run(lambda: impl.run(lambda: tf.constant(1)))


def test_one_replica():
  strategy = tf.distribute.OneDeviceStrategy("CPU:1")
  impl = StrategyMeshImpl("rows:1,cols:1", LAYOUT, strategy)
  other = placement("rows:1,cols:1")
  for _ in range(2):
    losses = [train_step(i)(X)[0].numpy() for i in (impl, other)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
  assert_close(values_of(impl), values_of(other))


def test_wrong_use(strategy):
  with pytest.raises(MeshShapeError, match="has 8 processors, but the MirroredStrategy has 4"):
    StrategyMeshImpl("rows:8", "", strategy)
  with pytest.raises(ConfigError, match=r"needs a tf.distribute.Strategy, got \['CPU:0'\]"):
    StrategyMeshImpl("rows:1", "", ["CPU:0"])
  with pytest.raises(ConfigError, match="collectives='ring' is not"):
    make_impl(strategy, collectives="ring")
  with pytest.raises(MeshShapeError, match="must be a permutation of 0 to 3"):
    make_impl(strategy, logical_to_physical=[0, 0, 1, 2])
  impl = make_impl(strategy)
  with pytest.raises(GraphError, match="inside a per-device program"):
    impl.run(lambda: impl.run(lambda: tf.constant(1)))
  other = mtf.SimdMeshImpl("rows:2,cols:2", LAYOUT)
  train_step(other)(X)
  mixed = make_impl(strategy, variable_store=other.variable_store)
  with pytest.raises(VariableError, match="was made by a mesh without the strategy"):
    train_step(mixed)(X)


def test_what_a_tpu_core_does_not_have(strategy, monkeypatch, caplog):
  impl = make_impl(strategy, collectives="tpu")
  monkeypatch.setattr(impl, "_on_tpu", True)
  total = tf.Variable(0.0, name="total")
  with pytest.raises(UnsupportedError, match=r"what TPU cores do not have: .* \(resource\)"):
    impl.run(lambda: total.assign_add(1.0))
  with pytest.raises(UnsupportedError, match=r"\(string\); on a TPU use mtf variables"):
    tf.function(lambda s: impl.run(lambda: tf.strings.length(s)))(tf.constant(["a"]))

  def program():
    x = impl.LaidOutTensor([tf.zeros([2])])
    return impl.Print(x, [x], "values").one_slice

  trace = impl.trace(program)
  assert all(op.type != "PrintV2" for op in trace.function.graph.get_operations())
  assert "nothing is printed" in caplog.text


# -------------------------------------------------- what a TPU would be given


def training_program(x):
  """One step as a per-device program."""

  def program(impl):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    loss, y = loss_of(mtf.import_tf_tensor(mesh, x, [BATCH, IO]))
    lowering = mtf.Lowering(graph, {mesh: impl})
    return lowering.export_to_tf_tensor(loss), lowering.export_to_tf_tensor(y)

  return program


def test_training_with_tpu_collectives_equals_a_placement_mesh(strategy, cpu_devices, reference):
  """The GraphDef for TPU cores, with its exchanges rewritten to those of CPUs."""
  impl = make_impl(strategy, collectives="tpu", logical_to_physical=[2, 0, 3, 1])
  trace = impl.trace(training_program(tf.constant(X)), [impl])
  counts = tpu_rewrite.counts(trace)
  assert counts["CrossReplicaSum"] > 0
  assert_static(trace.function.graph)
  runs = tpu_rewrite.run(impl, trace, cpu_devices, times=3)
  for p, outputs in enumerate(runs):
    loss, y, pnum = outputs
    assert int(pnum) == p
    np.testing.assert_allclose(loss, reference[0][2], rtol=1e-5)
    np.testing.assert_allclose(y, reference[1], rtol=1e-4, atol=1e-6)
  assert_close(values_of(impl), reference[2])


def assert_static(graph):
  """Every tensor of numbers has a shape that is known before it runs, as XLA needs."""
  unknown = [
    f"{t.name} {t.dtype.name} {t.shape}"
    for op in graph.get_operations()
    for t in op.outputs
    if t.dtype not in (tf.resource, tf.variant) and not t.shape.is_fully_defined()
  ]
  assert not unknown, unknown


def transformer_program(tokens):
  """A training step of a small language model with the sublayers of the packaged defaults."""

  def program(impl):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    targets = mtf.import_tf_tensor(
      mesh, tokens, [mtf.Dimension("batch", 4), mtf.Dimension("length", 6)]
    )
    model = lm_program.make_model(d_ff=8, d_kv=4, output_vocab_size=12, input_vocab_size=12)
    loss, _, _ = lm_program.loss_program(model)(targets)
    variables = graph.trainable_variables
    grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
    mtf.optimize.AdafactorOptimizer(learning_rate=0.01).apply_grads(grads, variables)
    return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(loss)

  return program


TOKENS = np.random.default_rng(1).integers(1, 11, [4, 6]).astype(np.int32)
MODEL_LAYOUT = "batch:rows,heads:cols,d_ff:cols,vocab:cols"


def test_a_transformer_has_static_shapes_and_xla_compiles_it(strategy):
  """XLA knows the collectives of a TPU on TPUs only: on a CPU each keeps its own data."""
  impl = StrategyMeshImpl("rows:2,cols:2", MODEL_LAYOUT, strategy, collectives="tpu")
  trace = impl.trace(transformer_program(tf.constant(TOKENS)), [impl])
  assert_static(trace.function.graph)
  assert tpu_rewrite.counts(trace)["CrossReplicaSum"] > 10
  graph_def = trace.function.graph.as_graph_def()
  tpu_rewrite.rewrite(graph_def, tpu_rewrite.alone)
  step = tpu_rewrite.compiled(trace, graph_def, jit_compile=True)
  with tf.device(impl.devices[3]):
    loss, pnum = step(*tpu_rewrite.inputs_of(trace, 3))
  assert np.isfinite(loss) and int(pnum) == 3


@pytest.mark.parametrize(("make", "data"), [(training_program, X), (transformer_program, TOKENS)])
def test_xla_computes_what_tensorflow_does(make, data):
  """On a mesh of one device there are no collectives: the whole program goes through XLA."""
  results = []
  for jit_compile in (False, True):
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    impl = StrategyMeshImpl("rows:1,cols:1", MODEL_LAYOUT, strategy, collectives="tpu")
    trace = impl.trace(make(tf.constant(data)), [impl])
    assert sum(tpu_rewrite.counts(trace).values()) == 0
    graph_def = trace.function.graph.as_graph_def()
    step = tpu_rewrite.compiled(trace, graph_def, jit_compile=jit_compile)
    losses = [step(*tpu_rewrite.inputs_of(trace, 0))[0].numpy() for _ in range(2)]
    results.append((losses, values_of(impl)))
  np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-4)
  for name, value in results[0][1].items():
    np.testing.assert_allclose(results[1][1][name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def test_xla_compiles_sampling():
  """A loop, with its state of keys and values, whose every step makes one token of each row."""
  prompts = np.array([[3, 4, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]], np.int32)
  strategy = tf.distribute.OneDeviceStrategy("CPU:0")
  impl = StrategyMeshImpl("rows:1,cols:1", MODEL_LAYOUT, strategy, collectives="tpu")

  def program():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dims = [mtf.Dimension("batch", 2), mtf.Dimension("length", 6)]
    model = lm_program.make_model(d_ff=8, d_kv=4, output_vocab_size=12, input_vocab_size=12)
    tokens = model.sample_autoregressive(
      mtf.import_tf_tensor(mesh, tf.constant(prompts), dims), temperature=0.0
    )
    return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(tokens)

  trace = impl.trace(program)
  assert_static(trace.function.graph)
  graph_def = trace.function.graph.as_graph_def()
  samples = [
    tpu_rewrite.compiled(trace, graph_def, jit_compile=j)(*tpu_rewrite.inputs_of(trace, 0))[0]
    for j in (False, True)
  ]
  np.testing.assert_array_equal(*samples)
  np.testing.assert_array_equal(samples[0][:, 0], [3, 5])


def test_a_plan(strategy):
  """What a layout costs is told for a mesh of a strategy as for any other."""
  impl = make_impl(strategy)
  text = str(mtf.function(impl, [mtf.TensorSpec([BATCH, IO])])(loss_of).plan())
  assert text == str(mtf.function(placement(), [mtf.TensorSpec([BATCH, IO])])(loss_of).plan())
  assert "up/kernel" in text
