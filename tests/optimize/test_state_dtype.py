"""Running averages in bfloat16 and in 8 bits: unbiased, the same on every layout, restorable.

Weights in bfloat16, which are rounded as these are, too.
"""

from __future__ import annotations

import itertools

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, optimize
from mesh_tensorflow.errors import CheckpointError, ConfigError
from mesh_tensorflow.numerics import compact, random_bits
from tests.kinds import in_turns, kept

COMPACT = ("bfloat16", "int8")
OPTIMIZERS = {
  "adamw": lambda: optimize.AdamWOptimizer(0.01),
  "adam": lambda: optimize.AdamWeightDecayOptimizer(0.01, weight_decay_rate=0.1),
  "adafactor": lambda: optimize.AdafactorOptimizer(learning_rate=0.05, beta1=0.9, factored=False),
  "adafactor factored": lambda: optimize.AdafactorOptimizer(
    learning_rate=0.05, min_dim_size_to_factor=4, beta1=0.9
  ),
  "muon": lambda: optimize.MuonOptimizer(0.02),
  "muon, others": lambda: optimize.MuonOptimizer(0.02, exclude_from_muon=["."]),
  "lion": lambda: optimize.LionOptimizer(0.01),
  "momentum": lambda: optimize.MomentumOptimizer(0.1, 0.9),
}
# Of which each element is updated by itself: bit for bit the same on every layout.
ELEMENTWISE = ("adamw", "adam", "lion", "momentum", "muon, others")
SHAPES = {"matrix": "a:64 b:96", "three": "a:8 c:6 b:96", "vector": "b:4128", "small": "a:64 d:4"}
MESHES = {"x:2": ("", "a:x", "b:x"), "x:4": ("b:x",), "x:2,y:2": ("", "a:x,b:y", "b:y", "c:x,a:y")}


def make_impl(kind, devices, shape="x:1", rules="", sharding=""):
  devices = devices[: mtf.convert_to_shape(shape).size]
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = cls(shape, rules, devices, variable_store=mtf.VariableStore(seed=1))
  return impl.with_sharded_state(sharding)


def gradient(name, i):
  """Of very different sizes in rows and columns."""
  sizes = mtf.convert_to_shape(SHAPES[name]).to_integer_list
  rng = np.random.default_rng([i, len(name)])
  g = rng.normal(size=sizes)
  for axis, n in enumerate(sizes):
    g *= np.exp(rng.normal(size=n)).reshape([n] + [1] * (len(sizes) - axis - 1))
  return np.float32(g)


def train(impl, optimizer, gradients, names=tuple(SHAPES), dtype=tf.float32):
  """One step for each item of `gradients`, a list with one for each variable."""

  def step(grads):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    variables = [mtf.get_variable(mesh, n, SHAPES[n], dtype).operation for n in names]
    imported = [mtf.import_tf_tensor(mesh, g, v.shape) for g, v in zip(grads, variables)]
    optimizer.apply_grads(imported, variables)
    lowering = mtf.Lowering(graph, {mesh: impl})
    return lowering.export_to_tf_tensor(imported[0])

  fn = tf.function(lambda grads: impl.run(step, [grads]), autograph=False)
  for grads in gradients:
    fn([tf.constant(g) for g in grads])
  return {v.name: v.numpy() for v in impl.variable_store}


def some_steps(n=3, names=tuple(SHAPES)):
  return [[gradient(name, i) for name in names] for i in range(n)]


def values_of(variables, name):
  """The values of a slot, however it is kept."""
  if name in variables:
    return np.float32(variables[name])
  scales = [v for n, v in variables.items() if n.startswith(f"{name}/scale_")]
  return compact.decode(tf.constant(variables[f"{name}/codes"]), scales).numpy()


# ----------------------------------------------------------------------- codes


@st.composite
def arrays(draw):
  sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
  rng = np.random.default_rng(draw(st.integers(0, 99)))
  x = rng.normal(size=sizes) * 10.0 ** draw(st.integers(-30, 30))
  return np.float32(np.where(rng.random(sizes) < draw(st.sampled_from([0.0, 0.5, 1.0])), 0.0, x))


def code_values(dtype):
  k = np.arange(256) if dtype == tf.uint8 else np.arange(-127, 128)
  return ((k + 1) / 256) ** 4 if dtype == tf.uint8 else np.sign(k) * (k / 127) ** 2


@pytest.mark.parametrize("dtype", [tf.int8, tf.uint8])
@hypothesis.given(x=arrays(), seed=st.integers(0, 99))
def test_codes_are_one_of_the_two_nearest(dtype, x, seed):
  x = np.abs(x) if dtype == tf.uint8 else x
  words = random_bits.half_words(seed, x.shape, [0] * x.ndim, x.shape)
  scales = [s.numpy() for s in compact.scales(tf.constant(x))]
  codes = compact.encode(tf.constant(x), scales, words, dtype)
  found = compact.decode(codes, scales).numpy()
  # In NumPy, another way.
  whole = np.full(x.shape, np.inf)
  for axis in range(x.ndim):
    others = tuple(a for a in range(x.ndim) if a != axis) if x.ndim > 1 else (0,)
    whole = np.minimum(whole, np.abs(x).max(others, keepdims=True))
  known = code_values(dtype)
  for value, scale, result in zip(x.flat, whole.flat, found.flat):
    if scale == 0:
      assert result == 0
      continue
    share = value / scale
    place = np.searchsorted(known, share - 1e-6)
    near = known[max(0, place - 1) : place + 2]
    assert np.abs(near - result / scale).min() < 1e-6, (value, scale, result)
  # What the largest are is kept as it is, so that scales are the same when they are made again.
  for a, b in zip(compact.scales(tf.constant(found)), scales):
    np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("dtype", [tf.int8, tf.uint8, tf.bfloat16])
def test_rounding_has_no_bias(dtype):
  x = np.float32(np.random.default_rng(0).normal(size=[16, 64]))
  x = np.square(x) if dtype == tf.uint8 else x
  scales = compact.scales(tf.constant(x))

  @tf.function
  def rounded(seed):
    words = random_bits.half_words(seed, x.shape, [0, 0], x.shape)
    if dtype == tf.bfloat16:
      return tf.cast(compact.round_to_bfloat16(tf.constant(x), words), tf.float32)
    return compact.decode(compact.encode(tf.constant(x), scales, words, dtype), scales)

  total = sum(rounded(tf.constant(i)).numpy() for i in range(400))
  assert np.abs(total / 400 - x).mean() < 2e-3 * np.abs(x).mean()


def test_bfloat16_of_what_is_not_finite():
  x = tf.constant([np.inf, -np.inf, np.nan, 0.0, 1.0])
  words = tf.constant([65535] * 5, tf.uint16)
  found = np.float32(compact.round_to_bfloat16(x, words))
  np.testing.assert_array_equal(found, [np.inf, -np.inf, np.nan, 0.0, 1.0])


# ------------------------------------------------------------------ optimizers


@st.composite
def layouts(draw):
  shape = draw(st.sampled_from(list(MESHES)))
  names = mtf.convert_to_shape(shape).dimension_names
  return dict(
    shape=shape,
    rules=draw(st.sampled_from(MESHES[shape])),
    sharding=draw(st.lists(st.sampled_from(names), unique=True)),
  )


_KNOWN = {}
EACH_DTYPE = list(itertools.product(COMPACT, ("placement", "simd")))


def on_one_device(name, dtype, devices):
  if (name, dtype) not in _KNOWN:
    optimizer = OPTIMIZERS[name]().with_state_dtype(dtype)
    _KNOWN[name, dtype] = train(make_impl("placement", devices), optimizer, some_steps())
  return _KNOWN[name, dtype]


@pytest.mark.parametrize(("dtype", "kind"), kept(EACH_DTYPE, in_turns(EACH_DTYPE)))
@hypothesis.settings(max_examples=3)
@hypothesis.given(name=st.sampled_from(list(OPTIMIZERS)), given=layouts())
def test_no_layout_changes_a_value(name, dtype, kind, given, cpu_devices):
  optimizer = OPTIMIZERS[name]().with_state_dtype(dtype)
  found = train(make_impl(kind, cpu_devices, **given), optimizer, some_steps())
  expected = on_one_device(name, dtype, cpu_devices)
  assert list(found) == list(expected)
  for variable, value in expected.items():
    got = np.float64(found[variable])
    if name in ELEMENTWISE:
      np.testing.assert_array_equal(got, np.float64(value), err_msg=variable)
      continue
    # Means and products differ in their last bits, and by these some numbers are rounded the other
    # way.
    assert np.mean(~np.isclose(got, np.float64(value), rtol=1e-4, atol=1e-6)) < 0.02, variable


@pytest.mark.parametrize("dtype", COMPACT)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_near_to_float32(name, dtype, cpu_devices):
  exact = on_one_device(name, "float32", cpu_devices)
  found = on_one_device(name, dtype, cpu_devices)
  for slot, value in exact.items():
    if slot.startswith("_"):
      continue
    difference = np.abs(values_of(found, slot) - value).mean()
    assert difference <= 0.04 * np.abs(value).mean() + 1e-6, slot


@pytest.mark.parametrize("dtype", COMPACT)
def test_averages_decay(dtype, cpu_devices):
  """By a thousandth a step, which rounding to the nearest would never see."""
  names = ("matrix",)
  optimizer = optimize.AdamWOptimizer(0.0, beta_2=0.99).with_state_dtype(dtype)
  first = [gradient("matrix", 0)]
  steps = [first] + [[np.zeros_like(first[0])]] * 60
  found = train(make_impl("placement", cpu_devices), optimizer, steps, names)
  v = values_of(found, "matrix/adam_v").mean()
  np.testing.assert_allclose(v, np.square(first[0]).mean() * 0.01 * 0.99**60, rtol=0.05)


def test_what_is_compact(cpu_devices):
  """Slots of the weight's shape, if it is large enough; all others are float32."""
  impl = make_impl("placement", cpu_devices)
  optimizer = OPTIMIZERS["adafactor factored"]().with_state_dtype(tf.bfloat16)
  train(impl, optimizer, some_steps(1))
  dtypes = {v.name: v.slice_dtype for v in impl.variable_store}
  assert dtypes["matrix_slot_m"] == dtypes["vector_slot_v"] == tf.bfloat16
  assert dtypes["matrix_slot_vr"] == dtypes["small_slot_m"] == dtypes["matrix"] == tf.float32


def test_bytes_of_a_parameter(cpu_devices):
  found = {}
  for dtype in ("float32", *COMPACT):
    impl = make_impl("placement", cpu_devices)
    train(
      impl, OPTIMIZERS["adamw"]().with_state_dtype(dtype), some_steps(1, ["matrix"]), ["matrix"]
    )
    slots = [v for v in impl.variable_store if v.name.startswith("matrix/")]
    found[dtype] = sum(v.shape.size * v.slice_dtype.size for v in slots) / (64 * 96)
  assert found["float32"] == 8 and found["bfloat16"] == 4
  assert found["int8"] == 2 + 2 * 4 * (64 + 96) / (64 * 96)


def test_the_optimizer_itself_stays_as_it_is(cpu_devices):
  optimizer = OPTIMIZERS["muon, others"]()
  optimizer.with_state_dtype("int8")
  found = train(make_impl("placement", cpu_devices), optimizer, some_steps(1))
  assert not any("codes" in name for name in found)


def test_one_dimension_name_twice(cpu_devices):
  """Scales are named by dimensions: such a slot is float32."""
  impl = make_impl("placement", cpu_devices)
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  w = mtf.get_variable(mesh, "w", [mtf.Dimension("a", 64), mtf.Dimension("a", 128)])
  optimizer = OPTIMIZERS["adamw"]().with_state_dtype("int8")
  optimizer.minimize(mtf.reduce_sum(mtf.square(w)), [w.operation])
  mtf.Lowering(graph, {mesh: impl})
  assert {v.slice_dtype for v in impl.variable_store if v.shape.ndims == 2} == {tf.float32}


# -------------------------------------------------------------- weights in bfloat16

BFLOAT16 = mtf.VariableDType(tf.float32, tf.bfloat16, tf.float32)
OF_WEIGHTS = {**OPTIMIZERS, "sgd": lambda: optimize.SgdOptimizer(0.1)}
EACH_OF_WEIGHTS = list(itertools.product(OF_WEIGHTS, ("placement", "simd")))
# What rounds is one function: of those that update each element by itself two, and all others.
KEPT_OF_WEIGHTS = [
  ("adamw", "placement"),
  ("adafactor", "simd"),
  ("adafactor factored", "placement"),
  ("muon", "simd"),
  ("sgd", "placement"),
]


@pytest.mark.parametrize(("name", "kind"), kept(EACH_OF_WEIGHTS, KEPT_OF_WEIGHTS))
@hypothesis.settings(max_examples=2)
@hypothesis.given(given=layouts())
def test_rounded_weights_are_the_same_on_every_layout(name, kind, given, cpu_devices):
  made = lambda: OF_WEIGHTS[name]().with_stochastic_rounding()  # noqa: E731
  found, expected = (
    train(impl, made(), some_steps(), dtype=BFLOAT16)
    for impl in (make_impl(kind, cpu_devices, **given), make_impl("placement", cpu_devices))
  )
  for variable in SHAPES:
    got, value = np.float64(found[variable]), np.float64(expected[variable])
    if name in (*ELEMENTWISE, "sgd"):
      np.testing.assert_array_equal(got, value, err_msg=variable)
    else:
      assert np.mean(got != value) < 0.02, variable


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_rounded_weights_are_near_to_float32(name, cpu_devices):
  exact = train(make_impl("placement", cpu_devices), OF_WEIGHTS[name](), some_steps())
  impl = make_impl("placement", cpu_devices)
  optimizer = OF_WEIGHTS[name]().with_stochastic_rounding()
  found = train(impl, optimizer, some_steps(), dtype=BFLOAT16)
  for variable in SHAPES:
    assert impl.variable_store[variable].slice_dtype == tf.bfloat16
    np.testing.assert_allclose(
      np.float64(found[variable]), exact[variable], rtol=0.05, atol=0.01, err_msg=variable
    )


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_small_updates_of_weights_add_up(state_dtype, cpu_devices):
  """Each is a twentieth of the distance between two numbers of bfloat16 below 1."""
  names = ("matrix",)
  start = np.ones([64, 96], np.float32)
  updates = [[np.full([64, 96], 1.0, np.float32)]] * 200
  results = {}
  for stochastic in (True, False):
    impl = make_impl("placement", cpu_devices)
    optimizer = optimize.MomentumOptimizer(2e-4, 0.0).with_state_dtype(state_dtype)
    optimizer = optimizer.with_stochastic_rounding() if stochastic else optimizer
    train(impl, optimizer, [[np.zeros_like(start)]], names, BFLOAT16)
    impl.variable_store["matrix"].assign(start)
    results[stochastic] = np.float64(train(impl, optimizer, updates, names, BFLOAT16)["matrix"])
  np.testing.assert_array_equal(results[False], start)
  np.testing.assert_allclose(results[True].mean(), 1.0 - 200 * 2e-4, atol=1e-3)


def test_wrong_dtypes():
  with pytest.raises(ConfigError, match="AdamWOptimizer: .*'int4'.*float32, bfloat16, int8"):
    OPTIMIZERS["adamw"]().with_state_dtype("int4")
  with pytest.raises(ConfigError, match="'float16'"):
    OPTIMIZERS["adamw"]().with_state_dtype(tf.float16)


# ----------------------------------------------------------------- checkpoints


FORMS = list(itertools.product(["float32", *COMPACT], repeat=2))
OTHERS = [(of, to) for of, to in FORMS if of != to]


@pytest.mark.parametrize(("of", "to"), kept(FORMS, [*OTHERS, ("int8", "int8")]))
def test_checkpoints_of_each_form_into_each_other(of, to, cpu_devices, tmp_path):
  first = make_impl("placement", cpu_devices)
  before = train(first, OPTIMIZERS["adamw"]().with_state_dtype(of), some_steps())
  checkpoint.Checkpointer(str(tmp_path), first.variable_store).save(3, asynchronous=False)
  second = make_impl("simd", cpu_devices, "x:2,y:2", "b:y", "x")
  train(second, OPTIMIZERS["adamw"]().with_state_dtype(to), some_steps(1))
  checkpoint.Checkpointer(str(tmp_path), second.variable_store).restore()
  after = {v.name: v.numpy() for v in second.variable_store}
  for slot in [f"{n}/adam_{s}" for n in SHAPES for s in "mv"]:
    expected, found = values_of(before, slot), values_of(after, slot)
    if of == to or to == "float32":
      np.testing.assert_array_equal(found, expected, err_msg=slot)
    else:
      np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())


def test_there_and_back_is_the_same(cpu_devices, tmp_path):
  """8 bits, saved as float32 in between, are the same 8 bits."""
  impls = [make_impl("placement", cpu_devices) for _ in range(3)]
  for i, (impl, dtype) in enumerate(zip(impls, ("int8", "float32", "int8"))):
    found = train(
      impl, OPTIMIZERS["adamw"]().with_state_dtype(dtype), some_steps(3 if i == 0 else 1)
    )
    if i == 0:
      first = found
    else:
      checkpoint.Checkpointer(str(tmp_path / f"{i - 1}"), impl.variable_store).restore()
    checkpoint.Checkpointer(str(tmp_path / f"{i}"), impl.variable_store).save(3, asynchronous=False)
  for v in impls[-1].variable_store:
    if "/codes" in v.name or "/scale_" in v.name:
      np.testing.assert_allclose(v.numpy(), first[v.name], rtol=1e-6, err_msg=v.name)


def test_a_checkpoint_without_the_slots(cpu_devices, tmp_path):
  """Nothing is made up of weights alone."""
  first, second = (make_impl("placement", cpu_devices) for _ in range(2))
  train(first, optimize.SgdOptimizer(0.1), some_steps(1))
  checkpoint.Checkpointer(str(tmp_path), first.variable_store).save(1, asynchronous=False)
  train(second, OPTIMIZERS["adamw"]().with_state_dtype("int8"), some_steps(1))
  with pytest.raises(CheckpointError, match="missing in the checkpoint"):
    checkpoint.Checkpointer(str(tmp_path), second.variable_store).restore()


@pytest.mark.parametrize("dtype", ["float32", *COMPACT])
def test_a_plan_counts_the_bytes(dtype, cpu_devices):
  impl = make_impl("simd", cpu_devices, "x:2,y:2", "b:y", "x")

  @mtf.function(impl, [mtf.TensorSpec("n:4 a:64")])
  def step(x):
    w = mtf.get_variable(x.mesh, "w", "a:64 b:128")
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], mtf.convert_to_shape("n:4 b:128"))))
    optimize.AdamWOptimizer(0.01).with_state_dtype(dtype).minimize(loss)
    return loss

  step(np.ones([4, 64], np.float32))
  # What a program has that draws no random numbers.
  names = [v for v in impl.variable_store if not v.name.startswith("_")]
  held = sum(int(np.prod(v.slice_shape)) * v.slice_dtype.size for v in names)
  assert mtf.describe(step).memory.variables == pytest.approx(held, abs=8)
