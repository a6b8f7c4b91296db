"""Variables stored in shards: no value depends on it, whatever the optimizer, mesh and layout."""

from __future__ import annotations

import functools
import itertools
import math

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, optimize
from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.training import nonfinite
from tests.kinds import in_turns, kept

BATCH, D, F, ODD = (mtf.Dimension(n, s) for n, s in [("batch", 8), ("d", 8), ("f", 16), ("odd", 5)])
RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=[8, 8]).astype(np.float32) for _ in range(2))

OPTIMIZERS = {
  "adamw": lambda: optimize.AdamWOptimizer(0.01),
  "adam": lambda: optimize.AdamWeightDecayOptimizer(0.01, weight_decay_rate=0.1),
  "adafactor": lambda: optimize.AdafactorOptimizer(learning_rate=0.05),
  "adafactor factored": lambda: optimize.AdafactorOptimizer(
    learning_rate=0.05, min_dim_size_to_factor=4, beta1=0.9
  ),
  "muon": lambda: optimize.MuonOptimizer(0.02, exclude_from_muon=["bias"]),
  "lion": lambda: optimize.LionOptimizer(0.01),
  "sgd": lambda: optimize.SgdOptimizer(0.1),
  "momentum": lambda: optimize.MomentumOptimizer(0.1, 0.9),
}
EACH = list(itertools.product(OPTIMIZERS, ("placement", "simd")))
# 3 divides no size: the last shards have padding.
MESHES = ("x:2", "x:4", "x:2,y:2", "x:3", "x:3,y:2")
RULES = ("", "batch:x~", "batch:x~,f:y", "d:x~", "f:x~,d:y")


def make_impl(kind, devices, shape="x:1", rules="", sharding="", reshard=True, seed=1):
  devices = devices[: mtf.convert_to_shape(shape).size]
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = cls(shape, rules, devices, variable_store=mtf.VariableStore(seed=seed))
  return impl.with_sharded_state(sharding, reshard)


def weights(mesh):
  get = lambda name, *dims: mtf.get_variable(mesh, name, list(dims))  # noqa: E731
  return get("in", D, F), get("bias", F), get("out", F, D), get("odd", ODD), get("scale")


def loss_of(mesh):
  """A small network, each weight read in the forward and in the backward pass."""
  x, y = (mtf.import_tf_tensor(mesh, tf.constant(v), [BATCH, D]) for v in (X, Y))
  w_in, bias, w_out, odd, scale = weights(mesh)
  h = mtf.tanh(mtf.einsum([x, w_in], [BATCH, F]) + bias)
  out = mtf.einsum([h, w_out], [BATCH, D]) * scale * mtf.reduce_sum(mtf.square(odd))
  return mtf.reduce_mean(mtf.square(out - y))


def trained(impl, optimizer, *, clip=False, ema=False, steps=3, traced=True):
  """Losses of some steps; returns them and the variables' values."""

  def step():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    loss = loss_of(mesh)
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.outputs[0] for v in variables])
    if clip:
      gradients, _ = optimize.clip_by_global_norm(gradients, 0.05)
    optimizer.apply_grads(gradients, variables)
    if ema:
      optimize.average_weights(variables, 0.5)
    return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(loss)

  run = lambda: impl.run(step)  # noqa: E731
  fn = tf.function(run, autograph=False) if traced else run
  losses = [float(fn()) for _ in range(steps)]
  return losses, {v.name: v.numpy() for v in impl.variable_store}


_KNOWN = {}


def on_one_device(name, devices, **kwargs):
  key = (name, *kwargs.items())
  if key not in _KNOWN:
    _KNOWN[key] = trained(make_impl("placement", devices), OPTIMIZERS[name](), **kwargs)
  return _KNOWN[key]


def check_equal(found, expected):
  np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
  assert list(found[1]) == list(expected[1])
  for name, value in expected[1].items():
    np.testing.assert_allclose(found[1][name], value, atol=2e-5, err_msg=name)


@st.composite
def settings(draw):
  shape = draw(st.sampled_from(MESHES))
  names = mtf.convert_to_shape(shape).dimension_names
  rules = [r for r in RULES if all(p.split(":")[1].strip("~") in names for p in r.split(",") if p)]
  return dict(
    shape=shape,
    rules=draw(st.sampled_from(rules)),
    sharding=draw(st.lists(st.sampled_from(names), min_size=1, unique=True)),
    reshard=draw(st.booleans()),
  )


@pytest.mark.parametrize(("name", "kind"), kept(EACH, in_turns(EACH)))
@hypothesis.settings(max_examples=2)
@hypothesis.given(given=settings(), clip=st.booleans(), ema=st.booleans())
def test_every_optimizer_as_on_one_device(name, kind, given, clip, ema, cpu_devices):
  impl = make_impl(kind, cpu_devices, **given)
  found = trained(impl, OPTIMIZERS[name](), clip=clip, ema=ema)
  check_equal(found, on_one_device(name, cpu_devices, clip=clip, ema=ema))


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_both_branches_of_a_condition_cut_a_sum(kind, cpu_devices):
  impl = make_impl(kind, cpu_devices, "x:2", "batch:x", "x")

  def step():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    x = mtf.import_tf_tensor(mesh, tf.constant(X), [BATCH, D])
    w = mtf.get_variable(mesh, "w", [D], initializer=tf.zeros_initializer())
    total = mtf.reduce_sum(x, reduced_dim=BATCH)  # Over devices, and used in both branches.
    flag = mtf.import_tf_tensor(mesh, tf.constant(True), [])
    mtf.cond(
      flag,
      lambda: mtf.assign(w, w + total) and None,
      lambda: mtf.assign(w, (total + w) * 3.0) and None,
    )
    return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(total)

  tf.function(lambda: impl.run(step), autograph=False)()
  np.testing.assert_allclose(impl.variable_store["w"].numpy(), X.sum(0), rtol=1e-5)


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_eagerly(kind, cpu_devices):
  impl = make_impl(kind, cpu_devices, "x:2,y:2", "batch:x", "x,y")
  found = trained(impl, OPTIMIZERS["adamw"](), clip=True, traced=False)
  check_equal(found, on_one_device("adamw", cpu_devices, clip=True))


def test_which_dimension_is_cut(cpu_devices):
  """The first that no rule splits and that the mesh dimension divides, else the largest."""
  impl = make_impl("placement", cpu_devices, "x:2,y:2", "batch:x,f:y", "x")
  trained(impl, OPTIMIZERS["adafactor factored"](), steps=1)
  slices = {v.name: v.slice_shape for v in impl.variable_store}
  assert slices["in"] == (4, 8) and slices["out"] == (8, 4)
  assert slices["odd"] == (3,) and slices["scale"] == ()
  assert slices["bias"] == (8,)  # Its only dimension is split already.
  # Slots follow their weights: `vr` of [f, d] is without f, `vc` without d.
  assert (slices["out_slot_vr"], slices["out_slot_vc"]) == ((4,), (8,))
  assert slices["out_slot_m"] == (8, 4)


def test_a_name_that_a_variable_has_twice(cpu_devices):
  """A rule would split both: the variable is cut along another dimension, or stays whole."""
  impl = make_impl("simd", cpu_devices, "x:2", "batch:x", "x")

  twice = mtf.Shape([("d", 4), ("d", 8)])
  assert impl.shards_of(twice) == {} and impl.stored_layout(twice) is impl
  third = mtf.Shape([("d", 4), ("d", 8), ("e", 2)])
  assert impl.shards_of(third) == {"e": "x"}
  assert impl.stored_layout(third).slice_shape(third) == [4, 8, 1]


def test_a_shard_is_what_a_device_keeps(cpu_devices):
  whole = make_impl("placement", cpu_devices, "x:4", "batch:x")
  sharded = make_impl("placement", cpu_devices, "x:4", "batch:x", "x")
  numbers = []
  for impl in (whole, sharded):
    trained(impl, OPTIMIZERS["adamw"](), steps=1)
    slices = {v.name: int(np.prod(v.slice_shape)) for v in impl.variable_store}
    assert slices["odd"] == (5 if impl is whole else 2)
    numbers.append(sum(n for name, n in slices.items() if n > 1 and not name.startswith("odd")))
  assert numbers[0] == 4 * numbers[1]


@pytest.mark.parametrize("clip", [False, True])
def test_no_processor_sums_a_whole_gradient(clip, cpu_devices, monkeypatch):
  """What is reduced over the mesh besides shards are scalars, and weights that stay whole."""
  impl = make_impl("placement", cpu_devices, "x:4", "batch:x", "x")
  summed, scattered = [], []
  cls = type(impl)
  allreduce, reduce_scatter = cls.allreduce, cls.reduce_scatter

  def counted_allreduce(self, x, *args):
    summed.append(int(np.prod(x.slice_shape)))
    return allreduce(self, x, *args)

  def counted_scatter(self, x, *args):
    scattered.append(int(np.prod(x.slice_shape)))
    return reduce_scatter(self, x, *args)

  monkeypatch.setattr(cls, "allreduce", counted_allreduce)
  monkeypatch.setattr(cls, "reduce_scatter", counted_scatter)
  trained(impl, OPTIMIZERS["adamw"](), clip=clip, steps=1)
  assert max(summed) <= 1
  # `odd` has no batch: its gradient is no sum, of which each processor takes its shard.
  assert sorted(scattered) == sorted([D.size * F.size] * 2 + [F.size])


def gathers(reshard, devices):
  impl = make_impl("placement", devices, "x:4", "batch:x", "x", reshard)
  count = [0]
  cls = type(impl)
  allconcat = cls.allconcat

  def counted(self, *args, **kwargs):
    count[0] += 1
    return allconcat(self, *args, **kwargs)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cls, "allconcat", counted)
    trained(impl, OPTIMIZERS["adamw"](), steps=1)
  return count[0]


def test_weights_are_gathered_for_each_use_or_once(cpu_devices):
  # Once: four weights. For each use: `out` in the backward pass again; that of `in`, whose input
  # is data, needs no weight.
  assert (gathers(False, cpu_devices), gathers(True, cpu_devices)) == (4, 5)


def update_by_hand(mesh_impl, is_built):
  """Adam's formula, clipped and decayed, in operations of the language."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  loss = loss_of(mesh)
  variables = [v for v in graph.trainable_variables if v.shape.ndims == 2]
  gradients = mtf.gradients([loss], [v.outputs[0] for v in variables])
  for v, g in zip(variables, gradients):
    m, s = (
      mtf.get_variable(mesh, f"{v.full_name}/{n}", v.shape, trainable=False,
                       initializer=mtf.initializers.Zeros()) for n in "ms"
    )  # fmt: skip
    g = mtf.minimum(g, 0.5)
    new_m = m * 0.9 + g * 0.1
    new_s = s * 0.99 + mtf.square(g) * 0.01
    mtf.assign(m, new_m)
    mtf.assign(s, new_s)
    mtf.assign_sub(v, new_m / (mtf.sqrt(new_s) + 1e-3) * 0.01 + v.value * 0.001)
  is_built()
  return mtf.Lowering(graph, {mesh: mesh_impl}).export_to_tf_tensor(loss)


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.parametrize("layout", ["batch:x", "batch:x,f:y"])
def test_updates_in_the_language_are_of_shards(kind, layout, cpu_devices, monkeypatch):
  """No slot is gathered, and no gradient summed, whole."""
  results = []
  for sharding in ("", "x"):
    impl = make_impl(kind, cpu_devices, "x:2,y:2", layout, sharding)
    gathered, summed = [], []
    cls = type(impl)
    with monkeypatch.context() as patch:
      allconcat, allreduce = cls.allconcat, cls.allreduce

      def counted_allconcat(self, x, *args, of=gathered, run=allconcat, **kwargs):
        of.append(x.slice_shape)
        return run(self, x, *args, **kwargs)

      def counted_allreduce(self, x, *args, of=summed, run=allreduce):
        of.append(int(np.prod(x.slice_shape)))
        return run(self, x, *args)

      patch.setattr(cls, "allconcat", counted_allconcat)
      patch.setattr(cls, "allreduce", counted_allreduce)
      run = functools.partial(impl.run, update_by_hand, [impl, gathered.clear])
      step = tf.function(run, autograph=False)
      losses = [float(step()) for _ in range(3)]
    results.append((losses, {v.name: v.numpy() for v in impl.variable_store}))
    if sharding:
      # `in`, `bias`, `out` forwards and `out` backwards, and once for the gradient of `bias`.
      assert len(gathered) <= 5 and max(summed) <= D.size * F.size // 2
  check_equal(results[1], results[0])


CHOICES = [
  ("x:1", "", "", True),
  ("x:4", "batch:x", "", True),
  ("x:4", "batch:x", "x", True),
  ("x:2,y:2", "batch:x,f:y", "x,y", False),
  ("x:3", "batch:x~", "x", True),
]


# In `make test` each choice into the next one.
PAIRS = list(itertools.permutations(range(len(CHOICES)), 2))
NEXT = [(i, j) for i, j in PAIRS if j == (i + 1) % len(CHOICES)]


@pytest.mark.parametrize(("saved", "read"), kept(PAIRS, NEXT))
def test_checkpoints_of_each_choice_into_each_other(saved, read, cpu_devices, tmp_path):
  kinds = ("simd", "placement")
  first, second = (make_impl(kinds[i % 2], cpu_devices, *CHOICES[i], seed=i) for i in (saved, read))
  _, values = trained(first, OPTIMIZERS["adamw"](), steps=1)
  trained(second, OPTIMIZERS["adamw"](), steps=2)
  checkpoint.Checkpointer(str(tmp_path), first.variable_store, asynchronous=False).save(1)
  checkpoint.Checkpointer(str(tmp_path), second.variable_store).restore()
  for v in second.variable_store:
    np.testing.assert_array_equal(v.numpy(), values[v.name])


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.parametrize("reshard", [True, False])
def test_assignments_and_reads(kind, reshard, cpu_devices):
  """In their order; also of variables that are not trained, and of other dtypes."""
  impl = make_impl(kind, cpu_devices, "x:2,y:2", "f:y", "x,y", reshard)
  kept = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)

  def program():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    v = mtf.get_variable(mesh, "v", [D, F], initializer=mtf.initializers.Ones(), trainable=False)
    half = mtf.get_variable(mesh, "half", [F, D], kept, initializer=mtf.initializers.Ones())
    before = mtf.reduce_sum(v)
    mtf.assign(v, v * 3.0)
    mtf.assign_add(v, mtf.cast(mtf.transpose(half, [D, F]), tf.float32))
    after = mtf.read_variable(v.operation)
    low = mtf.Lowering(graph, {mesh: impl})
    return [low.export_to_tf_tensor(t) for t in (before, after, half)]

  before, after, half = tf.function(lambda: impl.run(program), autograph=False)()
  assert float(before) == 128
  np.testing.assert_array_equal(after, np.full([8, 16], 4.0))
  assert half.dtype == tf.bfloat16 and impl.variable_store["v"].slice_shape == (4, 8)


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_loop_reads_weights(kind, reshard, cpu_devices):
  impl = make_impl(kind, cpu_devices, "x:2", "batch:x", "x", reshard)

  @mtf.function(impl, [mtf.TensorSpec([BATCH, D])])
  def f(x):
    w = mtf.get_variable(x.mesh, "w", [D, mtf.Dimension("e", 8)])

    def body(i, y):
      y = mtf.einsum([y, w], [BATCH, mtf.Dimension("e", 8)])
      return i + 1, mtf.tanh(mtf.reshape(y, [BATCH, D]))

    _, y = mtf.while_loop(
      lambda i, y: mtf.less(i, 3), body, [mtf.constant(x.mesh, 0, dtype=tf.int32), x]
    )
    return y

  found, w = f(X), impl.variable_store["w"].numpy()
  expected = X
  for _ in range(3):
    expected = np.tanh(expected @ w)
  np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_a_tape_gives_gradients_of_shards(kind, cpu_devices):
  impl = make_impl(kind, cpu_devices, "x:2,y:2", "batch:x,f:y", "x")

  @mtf.function(impl, [mtf.TensorSpec([BATCH, D])])
  def f(x):
    w = mtf.get_variable(x.mesh, "w", [D, F])
    mean = mtf.get_variable(x.mesh, "mean", [D], trainable=False)
    return mtf.reduce_sum(mtf.square(mtf.einsum([x + mean, w], [BATCH, F])))

  with tf.GradientTape() as tape:
    loss = f(X)
  stored = f.stored_variables["w"]
  found = tape.gradient(loss, stored.slices)
  w = tf.Variable(stored.numpy())
  with tf.GradientTape() as tape:
    expected = tf.reduce_sum(tf.square((X + f.stored_variables["mean"].numpy()) @ w))
  whole = tape.gradient(expected, w).numpy()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert stored.slice_shape == (4, 8)
  for (row, column), g in zip(stored.begins, found):
    np.testing.assert_allclose(g, whole[row : row + 4, column : column + 8], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_describe_counts_shards(clip, reshard, cpu_devices):
  """Of an MLP: 1/n of its variables; what is sent is counted by hand."""
  d, f = mtf.Dimension("d", 64), mtf.Dimension("f", 128)
  impl = make_impl("placement", cpu_devices, "x:4", "batch:x")

  def report(impl):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    x = mtf.import_tf_tensor(mesh, tf.ones([8, 64]), [BATCH, d])
    w, v = mtf.get_variable(mesh, "w", [d, f]), mtf.get_variable(mesh, "v", [f, d])
    h = mtf.einsum([mtf.relu(mtf.einsum([x, w], [BATCH, f])), v], [BATCH, d])
    loss = mtf.reduce_sum(mtf.square(h))
    gradients = mtf.gradients([loss], [w, v])
    if clip:
      gradients, _ = optimize.clip_by_global_norm(gradients, 1.0)
    optimize.LionOptimizer(0.01).apply_grads(gradients, graph.trainable_variables)
    return mtf.describe(graph, mesh_impl=impl, results=[loss])

  whole, sharded = report(impl), report(impl.with_sharded_state("x", reshard))
  size = 64 * 128 * 4
  assert whole.memory.variables == 4 * size and sharded.memory.variables == size
  # Scattered and gathered, 3/4 of each; `v` once more in the backward pass.
  assert sharded.bytes_moved()["x"] - 2 * size * 6 // 4 == (size * 3 // 4 if reshard else 0) + (
    whole.bytes_moved()["x"] - 2 * size * 6 // 4
  )
  assert "state in shards over x" in str(sharded) and sharded.to_dict()["shard_state"] == ["x"]


def test_a_mesh_dimension_that_is_not_there(cpu_devices):
  impl = make_impl("placement", cpu_devices, "x:2", "batch:x")
  with pytest.raises(LayoutError, match="state cannot be sharded over 'data'.*it has x"):
    impl.with_sharded_state("data")


def test_other_layout_rules_keep_the_sharding(cpu_devices):
  impl = make_impl("placement", cpu_devices, "x:2,y:2", "batch:x", "x", False)
  other = impl.with_layout("batch:x,f:y")
  assert other.state_dims == ("x",) and not other.reshards_after_forward
  assert impl.with_sharded_state("").state_dims == ()


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_steps_that_may_be_skipped(kind, cpu_devices):
  """Each processor counts in its shards, and no whole gradient is summed."""
  found = {}
  for sharding in ("", "x"):
    impl = make_impl(kind, cpu_devices, "x:2", "batch:x", sharding, reshard=False)
    summed = []
    allreduce = type(impl).allreduce

    def spy(self, x, *args, allreduce=allreduce, summed=summed):
      summed.append(list(x.to_laid_out_tensor().slice_shape))
      return allreduce(self, x, *args)

    def step(impl=impl):
      graph = mtf.Graph()
      mesh = mtf.Mesh(graph, "m")
      loss = loss_of(mesh)
      variables = graph.trainable_variables
      gradients = mtf.gradients([loss], [v.outputs[0] for v in variables])
      optimize.AdamWOptimizer(0.01).apply_grads(gradients, variables)
      bad = nonfinite.skip_updates(graph, [loss, *gradients])
      lowering = mtf.Lowering(graph, {mesh: impl})
      return lowering.export_to_tf_tensor(loss), lowering.export_to_tf_tensor(bad)

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(type(impl), "allreduce", spy)
      fn = tf.function(lambda impl=impl, step=step: impl.run(step), autograph=False)
      for _ in range(3):
        loss, bad = fn()
    assert float(bad) == 0
    found[sharding] = [float(loss)], {v.name: v.numpy() for v in impl.variable_store}
    # Small gradients are summed together, as vectors.
    assert (sum(map(math.prod, summed)) >= 8 * 16) == (sharding == "")
  check_equal(found["x"], found[""])
