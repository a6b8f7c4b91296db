"""Pipelines: microbatches through layers on several meshes, by every schedule."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.meshes import cross_mesh, schedules
from tests.kinds import kept

BATCH, IO, HIDDEN = mtf.Dimension("batch", 16), mtf.Dimension("io", 8), mtf.Dimension("h", 12)
VOCAB = mtf.Dimension("vocab", 6)
LAYERS = 4
IDS = np.random.default_rng(0).integers(0, 6, [16]).astype(np.int32)


def model(features, stages):
  """A tied embedding; layers with dropout; an auxiliary loss of each stage."""
  ids = features["ids"]
  table = mtf.get_variable(
    ids.mesh, "table", [VOCAB, IO], initializer=tf.random_normal_initializer()
  )
  x, losses = mtf.gather(table, ids, VOCAB), []
  for i in range(LAYERS):
    with mtf.stage(stages[i * len(stages) // LAYERS]):
      y = mtf.layers.dense(x, [HIDDEN], reduced_dims=[IO], activation=mtf.relu, name=f"in{i}")
      y = mtf.dropout(y, True, rate=0.2)
      x = x + mtf.layers.dense(y, [IO], reduced_dims=[HIDDEN], name=f"out{i}")
      losses.append(mtf.to_float(mtf.reduce_mean(mtf.square(x))) * 0.01)
  with mtf.stage(stages[-1]):
    logits = mtf.einsum([x, table], output_shape=[*x.shape.dims[:1], VOCAB])
    targets = mtf.one_hot(ids, VOCAB, dtype=logits.dtype)
    losses.append(
      mtf.to_float(
        mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, targets, VOCAB))
      )
    )
    loss = mtf.add_n(losses) * 0.25
  return {"loss": loss, "logits": logits}


def train(impl, stages, schedule="1f1b", microbatches=4, steps=3, clip=0.5, precision=None):
  """Losses of some steps, logits of the last, and the variables after them."""

  @mtf.function(impl, [mtf.TensorSpec([BATCH], tf.int32)], precision=precision)
  def step(ids):
    grads, outputs = mtf.serialize_training_step(
      {"ids": ids}, lambda f: model(f, stages), BATCH, microbatches, schedule=schedule
    )
    variables = ids.graph.trainable_variables
    grads, norm = mtf.optimize.clip_by_global_norm(grads, clip)
    mtf.optimize.AdamWeightDecayOptimizer(0.01).apply_grads(grads, variables)
    return outputs["loss"], norm, outputs["logits"]

  losses = []
  for _ in range(steps):
    loss, norm, logits = step(IDS)
    losses.append((float(loss), float(norm)))
  return losses, logits.numpy(), {v.name: v.numpy() for v in step.mesh_impl.variable_store}


def meshes(kinds, shape, layout, devices):
  """A mesh for each stage, of one store: "placement" or "simd" in turns."""
  store, size = mtf.VariableStore(seed=1), mtf.convert_to_shape(shape).size
  found = []
  for i, kind in enumerate(kinds):
    cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
    own = devices[i * size : (i + 1) * size]
    found.append(cls(shape, layout, own, variable_store=store))
  return {f"stage{i}": impl for i, impl in enumerate(found)}


@pytest.fixture(scope="module")
def alone(cpu_devices):
  """The same on one device, in microbatches: the layout and the stages must not matter."""
  one = mtf.PlacementMeshImpl(
    "all:1", "", cpu_devices[:1], variable_store=mtf.VariableStore(seed=1)
  )
  return train({"stage0": one}, ["stage0"])


def check(found, expected):
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-5)
  assert set(found[2]) == set(expected[2])
  for name, value in expected[2].items():
    np.testing.assert_allclose(found[2][name], value, rtol=1e-3, atol=1e-5, err_msg=name)


CASES = [
  (schedule, kinds, *layout)
  for schedule in schedules.SCHEDULES
  for kinds, layouts in [
    (["placement"] * 2, [("all:1", ""), ("all:2", "batch:all"), ("r:2", "h:r,vocab:r")]),
    (["simd"] * 2, [("all:2", "batch:all"), ("r:2", "io:r"), ("r:2,s:2", "batch:r,h:s")]),
    (["placement", "simd"], [("all:2", "batch:all")]),
    (["placement"] * 4, [("all:1", ""), ("r:2", "batch:r")]),
    (["simd"] * 4, [("r:2", "batch:r")]),
  ]
  for layout in layouts
]
KEPT = [
  ("gpipe", ["placement"] * 2, "r:2", "h:r,vocab:r"),
  ("1f1b", ["simd"] * 2, "r:2,s:2", "batch:r,h:s"),
  ("zero_bubble", ["placement"] * 4, "r:2", "batch:r"),
]


@pytest.mark.parametrize("schedule,kinds,shape,layout", kept(CASES, KEPT))
def test_it_is_the_training_of_one_device(schedule, kinds, shape, layout, cpu_devices, alone):
  impls = meshes(kinds, shape, layout, cpu_devices)
  check(train(impls, list(impls), schedule), alone)


@pytest.mark.parametrize("schedule", kept(list(schedules.SCHEDULES), ["1f1b"]))
def test_several_stages_on_a_mesh(schedule, cpu_devices, alone):
  impls = meshes(["placement"] * 2, "all:1", "", cpu_devices)
  check(train(impls, ["stage0", "stage1"] * 2, schedule), alone)


def test_all_stages_on_one_mesh(cpu_devices, alone):
  """A program that was written for several meshes runs on one of them."""
  one = meshes(["simd"], "r:2", "batch:r", cpu_devices)["stage0"]
  check(train(dict.fromkeys(["stage0", "stage1"], one), ["stage0", "stage1"]), alone)


def test_what_only_passes_through_a_stage(cpu_devices):
  """What is made on the first mesh goes by the second to the third."""

  def gradient(impls):
    names = list(impls)

    @mtf.function(impls, [mtf.TensorSpec([BATCH, IO])])
    def f(x):
      def model(features):
        y = features["x"] * mtf.get_variable(x.mesh, "v", [IO])
        for name in names[1:]:
          y = mtf.reshard(y, name)
        return {"loss": mtf.reduce_sum(mtf.square(y)), "y": y}

      grads, outputs = mtf.serialize_training_step({"x": x}, model, BATCH, 4)
      return grads, outputs["y"]

    return f(np.arange(128.0).reshape(16, 8))

  found = gradient(meshes(["placement", "simd", "placement"], "all:2", "batch:all", cpu_devices))
  expected = gradient(meshes(["placement"], "all:1", "", cpu_devices))
  for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("kind", kept(["placement", "simd"], ["simd"]))
def test_state_in_shards(kind, cpu_devices, alone):
  impls = meshes([kind] * 2, "all:2", "batch:all", cpu_devices)
  sharded = {name: impl.with_sharded_state("all") for name, impl in impls.items()}
  check(train(sharded, list(sharded)), alone)


def test_with_stages(cpu_devices, alone):
  first, second = meshes(["placement"] * 2, "all:2", "batch:all", cpu_devices).values()
  impl = first.with_stages([second], "gpipe")
  assert list(impl.stages) == ["stage0", "stage1"]
  assert impl.schedule == "gpipe"
  check(train(impl, list(impl.stages)), alone)


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_the_schedule_is_that_of_the_mesh(schedule, cpu_devices):
  """Unless the program names another one."""
  first, second = meshes(["placement"] * 2, "all:1", "", cpu_devices).values()

  def found(**given):
    @mtf.function(first.with_stages([second], schedule), [mtf.TensorSpec([BATCH, IO])])
    def step(x):
      def double(features):
        y = mtf.reshard(features["x"] * mtf.get_variable(x.mesh, "v", [IO]), "stage1")
        return {"loss": mtf.reduce_sum(y)}

      return mtf.serialize_training_step({"x": x}, double, BATCH, 2, **given)[0]

    operations = step.build_graph()[0].operations
    return [op.schedule for op in operations if isinstance(op, mtf.WhileLoopOperation)]

  assert found() == [schedule]
  other = "1f1b" if schedule == "gpipe" else "gpipe"
  assert found(schedule=other) == [other]


def test_eager(cpu_devices, alone):
  impls = meshes(["placement", "simd"], "all:2", "batch:all", cpu_devices)
  tf.config.run_functions_eagerly(True)
  try:
    losses, _, _ = train(impls, list(impls), steps=1)
  finally:
    tf.config.run_functions_eagerly(False)
  np.testing.assert_allclose(losses, alone[0][:1], rtol=1e-5)


def test_each_part_is_traced_once(cpu_devices):
  """The number of TensorFlow functions does not grow with the number of microbatches."""

  def functions(microbatches):
    impls = meshes(["placement"] * 2, "all:1", "", cpu_devices)

    @mtf.function(impls, [mtf.TensorSpec([BATCH], tf.int32)])
    def step(ids):
      grads, outputs = mtf.serialize_training_step(
        {"ids": ids}, lambda f: model(f, list(impls)), BATCH, microbatches
      )
      return outputs["loss"], grads

    concrete = tf.function(lambda ids: step(ids), autograph=False).get_concrete_function(IDS)
    nodes = concrete.graph.as_graph_def().node
    calls = [n for n in nodes if n.op == "StatefulPartitionedCall"]
    called = {n.attr["f"].func.name for n in calls}
    return len(calls), len(called)

  few, many = functions(2), functions(8)
  assert many[0] > few[0]
  assert many[1] == few[1]


@pytest.mark.parametrize("microbatches,precision", [(2, None), (8, None), (4, "bfloat16")])
def test_a_tied_table_and_its_gradient_cross_once(
  microbatches, precision, cpu_devices, monkeypatch
):
  """What the last stage adds to the gradient is summed there over the microbatches."""
  crossed, plain = [], cross_mesh.reshard

  def reshard(source, target, shape, *args):
    crossed.append(shape)
    return plain(source, target, shape, *args)

  monkeypatch.setattr(cross_mesh, "reshard", reshard)
  impls = meshes(["placement"] * 2, "all:2", "batch:all", cpu_devices)
  train(impls, list(impls), microbatches=microbatches, steps=1, precision=precision)
  sizes = [set(shape.dimension_names) for shape in crossed]
  assert sizes.count({"vocab", "io"}) == 2
  # Activations and their gradients cross in each microbatch.
  assert sizes.count({"batch", "io"}) == 2 * microbatches


def test_a_loop_that_is_no_pipeline(cpu_devices):
  """Decoding, say: iterations one after the other, through both meshes."""
  impls = meshes(["placement", "simd"], "all:2", "io:all", cpu_devices)

  @mtf.function(impls, [mtf.TensorSpec([IO])])
  def f(x):
    w = mtf.get_variable(x.mesh, "w", [IO], initializer=tf.constant_initializer(2.0))

    def body(i, x):
      with mtf.stage("stage1"):
        v = mtf.get_variable(x.mesh, "v", [IO], initializer=tf.constant_initializer(3.0))
        y = x * v
      return [i + 1, mtf.reshard(y, x.mesh) - w]

    start = mtf.constant(x.mesh, 0, dtype=tf.int32)
    return mtf.while_loop(lambda i, x: mtf.less(i, 3), body, [start, x])[1]

  expected = np.arange(8.0)
  for _ in range(3):
    expected = expected * 3 - 2
  np.testing.assert_allclose(f(np.arange(8.0)), expected, rtol=1e-6)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_a_loop_in_a_stage_of_another_size(sizes, cpu_devices):
  """Its random numbers are of the microbatch and of the iteration, on each mesh."""

  def run(impls):
    @mtf.function(impls, [mtf.TensorSpec([BATCH, IO])])
    def f(x):
      def model(features):
        x = features["x"] * mtf.get_variable(features["x"].mesh, "w", [IO])
        with mtf.stage("stage1"):
          start = mtf.constant(x.mesh, 0, dtype=tf.int32)
          body = lambda i, y: [i + 1, mtf.dropout(y, True, rate=0.25) * y]  # noqa: E731
          y = mtf.while_loop(lambda i, y: mtf.less(i, 2), body, [start, x])[1]
          return {"loss": mtf.reduce_mean(y), "y": y}

      gradients, outputs = mtf.serialize_training_step({"x": x}, model, BATCH, 2)
      return outputs["y"], gradients[0]

    return f(np.random.default_rng(0).uniform(0.5, 1, [16, 8]), seed=5)

  store, (m, n) = mtf.VariableStore(seed=1), sizes
  first = mtf.PlacementMeshImpl(f"r:{m}", "batch:r", cpu_devices[:m], variable_store=store)
  second = mtf.SimdMeshImpl(f"r:{n}", "batch:r", cpu_devices[m : m + n], variable_store=store)
  one = meshes(["placement"], "all:1", "", cpu_devices)["stage0"]
  expected = run({"stage0": one, "stage1": one})
  for got, value in zip(run({"stage0": first, "stage1": second}), expected, strict=True):
    np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------- wrong use


def test_stages_that_share_devices(cpu_devices):
  first, _ = meshes(["placement"] * 2, "all:2", "", cpu_devices).values()
  other = mtf.PlacementMeshImpl("all:2", "", cpu_devices[1:3])
  with pytest.raises(mtf.errors.MeshShapeError, match="stages 0 and 1 .*CPU:1 in common"):
    first.with_stages([other])


def test_other_stages_that_are_none(cpu_devices):
  first, second = meshes(["placement"] * 2, "all:2", "", cpu_devices).values()
  with pytest.raises(mtf.errors.ArgumentError, match="with_stages: others must be a list"):
    first.with_stages(second)
  third = mtf.PlacementMeshImpl("all:2", "", cpu_devices[4:6])
  with pytest.raises(mtf.errors.ArgumentError, match="stage 1 is a pipeline of 2 stages itself"):
    first.with_stages([second.with_stages([third])])


def test_microbatches_that_do_not_divide(cpu_devices):
  impls = meshes(["placement"] * 2, "all:1", "", cpu_devices)
  with pytest.raises(mtf.errors.ShapeError, match="3 microbatches, which does not divide it"):
    train(impls, list(impls), microbatches=3)


def test_an_unknown_schedule(cpu_devices):
  impls = meshes(["placement"] * 2, "all:1", "", cpu_devices)
  with pytest.raises(mtf.errors.ArgumentError, match="gpipe, 1f1b, zero_bubble"):
    train(impls, list(impls), "fast")


def test_accumulators_of_a_loop_that_is_no_pipeline(cpu_devices):
  impls = meshes(["placement"] * 2, "all:1", "", cpu_devices)

  @mtf.function(impls, [mtf.TensorSpec([IO])])
  def f(x):
    def body(i):
      return [i + 1, mtf.reshard(x, "stage1") * 2.0]

    start = mtf.constant(x.mesh, 0, dtype=tf.int32)
    return mtf.while_loop(lambda i: mtf.less(i, 3), body, [start], has_accumulators=True)[1]

  with pytest.raises(mtf.errors.UnsupportedError, match="mtf.serialize_training_step"):
    f(np.arange(8.0))


def test_changes_that_do_not_depend_on_the_pipeline_come_after_it(cpu_devices: list[str]) -> None:
  """A weight that decays, whatever its gradient is: microbatches see it as it was."""
  store = mtf.VariableStore()
  first, second = (
    mtf.PlacementMeshImpl("all:1", "", [d], variable_store=store) for d in cpu_devices[:2]
  )

  @mtf.function(first.with_stages([second]), [mtf.TensorSpec([("batch", 8), ("width", 4)])])
  def step(x: mtf.Tensor) -> mtf.Tensor:
    batch, width = x.shape.dims

    def model(features: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
      y = features["x"]
      for name in ("stage0", "stage1"):
        with mtf.stage(name):
          y = y * mtf.get_variable(y.mesh, name, [width], initializer=tf.ones_initializer())
      with mtf.stage("stage1"):
        return {"loss": mtf.reduce_sum(y)}

    _, outputs = mtf.serialize_training_step({"x": x}, model, batch, 4)
    for v in x.graph.trainable_variables:
      mtf.assign(v, v.value * 0.5)
    return outputs["loss"]

  losses = [float(step(np.ones([8, 4], np.float32))) for _ in range(3)]
  assert losses == [32.0, 8.0, 2.0]
