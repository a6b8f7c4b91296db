"""Single facts about AdamW, Lion and Muon: dtypes, masks, matrices, errors, counting, gin."""

from __future__ import annotations

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import optimize
from mesh_tensorflow.errors import ConfigError

ONE = mtf.initializers.Ones()


def program(**variables):
  """A graph with float32 variables of ones, given as name="a:4 b:8"; __ in a name is a slash."""
  mesh = mtf.Mesh(mtf.Graph(), "m")
  names = {n.replace("__", "/"): s for n, s in variables.items()}
  return mesh, {n: mtf.get_variable(mesh, n, s, initializer=ONE) for n, s in names.items()}


def lower(mesh, impl=None):
  impl = impl or mtf.PlacementMeshImpl("", "", [""])
  mtf.Lowering(mesh.graph, {mesh: impl})
  return impl


OPTIMIZERS = [
  lambda rate: optimize.AdamWOptimizer(rate, 0.0),
  lambda rate: optimize.AdamWOptimizer(rate, 0.5),
  lambda rate: optimize.LionOptimizer(rate, 0.5),
  lambda rate: optimize.MuonOptimizer(rate, 0.5, adjust_learning_rate="original"),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_bfloat16_activations_do_not_round_the_slices(make):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
  w = mtf.get_variable(mesh, "w", "a:2 b:2", dtype=dtype, initializer=ONE)
  make(2.0**-12).minimize(mtf.reduce_sum(w))
  change = 1.0 - lower(mesh).variable_store["w"].numpy()
  # In bfloat16 nothing that is smaller than 1 / 256 would change a 1.
  assert np.all((change > 2.0**-14) & (change < 2.0**-10)), change


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_bfloat16_slices_have_float32_slots(make):
  """And the step is rounded once: that of float32, to a digit of bfloat16."""
  found = []
  for dtype in (tf.bfloat16, tf.float32):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    w = mtf.get_variable(mesh, "w", "a:2 b:2", dtype=dtype, initializer=ONE)
    make(0.25).minimize(mtf.reduce_sum(w))
    store = lower(mesh).variable_store
    found.append(store["w"].numpy().astype(float))
    slots = [v for v in store if v.name.startswith("w/")]
    assert slots and all(v.slice_dtype == v.master_dtype == tf.float32 for v in slots)
  np.testing.assert_allclose(found[0], found[1], atol=2.0**-8)
  assert np.all(found[1] < 0.9)


def test_first_step_of_adamw_is_the_rate():
  """With the correction, whatever the gradient; without the digits that 1 - 0.999 loses."""
  mesh = mtf.Mesh(mtf.Graph(), "m")
  w, s = (mtf.get_variable(mesh, n, "a:4", initializer=ONE) for n in "ws")
  h = mtf.get_variable(mesh, "h", "a:4", dtype=tf.float64, initializer=ONE)
  loss = mtf.reduce_sum(w) * 1e-3 + mtf.reduce_sum(s) * 1e3 + mtf.reduce_sum(mtf.to_float(h))
  optimize.AdamWOptimizer(2.0**6, 0.0, epsilon=0.0).minimize(loss)
  store = lower(mesh).variable_store
  for name in ("w", "s", "h"):
    np.testing.assert_allclose(store[name].numpy(), 1 - 2.0**6, rtol=1e-6, err_msg=name)


def test_updates_are_counted_apart_from_the_step():
  """State that begins late, in a training that goes on, is corrected as state that begins."""
  mesh, v = program(w="a:4")
  mesh.graph.global_step = mtf.import_tf_tensor(mesh, tf.constant(10**6, tf.int64), [])
  optimize.AdamWOptimizer(2.0**-6, 0.0).minimize(mtf.reduce_sum(v["w"]))
  store = lower(mesh).variable_store
  np.testing.assert_allclose(store["w"].numpy(), 1 - 2.0**-6, rtol=1e-6)
  assert store["adam_updates"].numpy() == 1


def test_what_decays():
  names = ["layer__kernel", "embedding__embedding", "layer__bias", "layer_norm__layer_norm_scale"]
  names += ["q_norm__scale", "rezero_weight", "sink_logits", "scales"]
  for make, of_rate in [(optimize.AdamWOptimizer, 1.0), (optimize.LionOptimizer, 1.0)]:
    mesh, v = program(**dict.fromkeys(names, "a:4"))
    # Of no gradient only the decay is left.
    zeros = [mtf.zeros_like(x) for x in v.values()]
    make(0.5, 0.5).apply_grads(zeros, [x.operation for x in v.values()])
    store = lower(mesh).variable_store
    shrunk = {n for n in v if store[n].numpy()[0] < 1.0}
    assert shrunk == {"layer/kernel", "embedding/embedding", "scales"}
    assert {store[n].numpy()[0] for n in shrunk} == {1 - 0.25 * of_rate}


def test_what_is_chosen_decays():
  mesh, v = program(a="x:4", b="x:4")
  zeros = [mtf.zeros_like(x) for x in v.values()]
  optimize.AdamWOptimizer(0.5, 0.5, exclude_from_weight_decay=["^b$"]).apply_grads(
    zeros, [x.operation for x in v.values()]
  )
  store = lower(mesh).variable_store
  assert [float(store[n].numpy()[0]) for n in "ab"] == [0.75, 1.0]


# ------------------------------------------------------------------------------------- matrices


@pytest.mark.parametrize(
  ("name", "shape", "rows", "columns"),
  [
    ("layer/wi/kernel", "d_model:8 d_ff:16", ["d_model"], ["d_ff"]),
    ("attention/o", "heads:16 d_model:8", ["heads"], ["d_model"]),
    ("attention/q", "d_model:8 heads:2 d_kv:4", ["d_model"], ["heads", "d_kv"]),
    ("attention/o", "heads:2 d_kv:4 d_model:8", ["heads", "d_kv"], ["d_model"]),
    ("moe/wi", "experts:4 d_model:8 expert_hidden:16", ["d_model"], ["expert_hidden"]),
    ("layer/kernel", "ensemble:2 d_model:8 heads:2 d_kv:4", ["d_model"], ["heads", "d_kv"]),
    ("layer/kernel", "_d_model:8 d_model:8", ["_d_model"], ["d_model"]),
    ("norm/scale", "d_model:8", None, None),
    ("moe/bias", "experts:4 d_model:8", None, None),
    ("embedding", "vocab:64 d_model:8", None, None),
    ("transformer/logits/kernel", "d_model:8 vocab:64", None, None),
    ("positional_embedding", "max_length:16 d_model:8", None, None),
    ("q_bias", "heads:2 d_kv:4", None, None),
    # In the middle, or nowhere: which side the others are on is not known.
    ("conv", "window:3 d_model:8 d_out:8", None, None),
    ("conv", "window:3 a:8 b:8", None, None),
  ],
)
def test_matrices_by_rule(name, shape, rows, columns):
  _, v = program(**{name: shape})
  found = optimize.MuonOptimizer(0.1).matrix_of(v[name].operation)
  if rows is None:
    assert found is None
  else:
    assert [d.name for d in found.rows] == rows and [d.name for d in found.columns] == columns


def test_matrices_by_name():
  optimizer = optimize.MuonOptimizer(
    0.1, matrices=[("/q$", ["d_model"], ["d_kv"]), ("^conv", ["window", "a"], ["b"])]
  )
  _, v = program(x__q="d_model:8 heads:2 d_kv:4", conv="window:3 a:4 b:8", k="d_model:8 d_kv:4")
  found = {n: optimizer.matrix_of(x.operation) for n, x in v.items()}
  assert found["x/q"].sizes == (8, 4) and found["conv"].sizes == (12, 8)
  assert [d.name for d in found["k"].rows] == ["d_model"]
  with pytest.raises(ConfigError, match="names d_kv of variables '/q\\$', but y/q has"):
    _, v = program(y__q="d_model:8 heads:2")
    optimizer.matrix_of(v["y/q"].operation)


def test_muon_does_what_adamw_does_where_nothing_is_a_matrix():
  results = []
  for make in (optimize.AdamWOptimizer, optimize.MuonOptimizer):
    mesh, v = program(w="a:4", embedding="vocab:8 d_model:4")
    make(learning_rate=0.1).minimize(mtf.reduce_sum(v["w"]) + mtf.reduce_sum(v["embedding"]))
    store = lower(mesh).variable_store
    results.append({n: store[n].numpy().tolist() for n in store.names})
  assert results[0] == results[1]


# --------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (lambda: optimize.AdamWOptimizer(0.1, beta_2=1.0), r"AdamWOptimizer: beta_2 \(=1.0\) must be"),
    (lambda: optimize.AdamWOptimizer(0.1, -0.5), r"weight_decay_rate \(=-0.5\) must be at least 0"),
    (lambda: optimize.AdamWOptimizer(0.1, epsilon=float("nan")), "epsilon"),
    (
      lambda: optimize.AdamWOptimizer(0.1, exclude_from_weight_decay=["(a"]),
      r"exclude_from_weight_decay has '\(a', which is no regular expression",
    ),
    (lambda: optimize.LionOptimizer(0.1, beta_1=-0.1), r"LionOptimizer: beta_1 \(=-0.1\) must be"),
    (lambda: optimize.MuonOptimizer(0.1, momentum=1.0), r"momentum \(=1.0\) must be .* below 1"),
    (
      lambda: optimize.MuonOptimizer(0.1, adjust_learning_rate="more"),
      "'more' is not one of match_rms_adamw, original",
    ),
    (lambda: optimize.MuonOptimizer(0.1, coefficients=[1.0]), "must be three numbers"),
    (
      lambda: optimize.MuonOptimizer(0.1, product_dtype="float64"),
      "MuonOptimizer: product_dtype 'float64' is not one of float32, bfloat16",
    ),
    (lambda: optimize.MuonOptimizer(0.1, matrices=["/q$"]), "where a .regular expression, rows"),
    (
      lambda: optimize.MuonOptimizer(0.1, matrices=[("/q$", "ab", ["c"])]),
      "must each be a list of names",
    ),
    (
      lambda: optimize.MuonOptimizer(0.1, matrices=[("/q$", ["a"], ["a"])]),
      "a dimension is both",
    ),
    (lambda: optimize.MuonOptimizer(0.1, matrices=[("(q", ["a"], ["b"])]), "'\\(q'"),
  ],
)
def test_wrong_arguments(make, words):
  with pytest.raises(ConfigError, match=words):
    make()


def test_gin_makes_muon_with_others():
  gin.parse_config("""
    import mesh_tensorflow.optimize
    optimize.MuonOptimizer.others = @optimize.LionOptimizer
    optimize.MuonOptimizer.matrices = [('/q$', ['d_model'], ['d_kv'])]
    optimize.LionOptimizer.weight_decay_rate = 0.0
  """)
  mesh, v = program(w="a:4", x__q="d_model:4 d_kv:8")
  optimize.MuonOptimizer(learning_rate=0.25).minimize(
    mtf.reduce_sum(v["w"]) + mtf.reduce_sum(v["x/q"])
  )
  store = lower(mesh).variable_store
  np.testing.assert_allclose(store["w"].numpy(), 0.75)
  assert {n for n in store.names if "/" in n} == {"x/q", "w/lion_m", "x/q/muon_m"}
  gin.clear_config()


def stacked_step(mesh_shape, layout, devices, names, traced=False):
  """The weights, of equal shapes and unequal gradients, after a step of Muon; or the operations."""
  impl = mtf.PlacementMeshImpl(mesh_shape, layout, devices)

  def step():
    mesh, v = program(**dict.fromkeys(names, "x:4 y:8"), other="z:8 y:8")
    data = {n: np.random.default_rng(ord(n)).normal(size=[4, 8]) for n in names}
    grads = [
      mtf.import_tf_tensor(mesh, tf.constant(data[n], tf.float32), v[n].shape) for n in names
    ]
    grads.append(mtf.ones_like(v["other"]))
    optimize.MuonOptimizer(0.5).apply_grads(grads, [x.operation for x in v.values()])
    lower(mesh, impl)

  if traced:
    return tf.function(step, autograph=False).get_concrete_function().graph.get_operations()
  step()
  return {n: impl.variable_store[n].numpy() for n in names}


@pytest.mark.parametrize(
  ("mesh_shape", "layout", "count"), [("", "", 1), ("r:2", "x:r", 2), ("r:2", "y:r", 2)]
)
def test_matrices_of_one_shape_are_multiplied_together(
  mesh_shape, layout, count, cpu_devices, monkeypatch
):
  devices = cpu_devices[:count] if mesh_shape else [""]
  alone = {n: stacked_step(mesh_shape, layout, devices, n)[n] for n in "abc"}
  together = stacked_step(mesh_shape, layout, devices, "abc")
  monkeypatch.setattr(optimize.muon, "_STACKED_ELEMENTS", 2 * 4 * 8)
  in_parts = stacked_step(mesh_shape, layout, devices, "abc")
  for n in "abc":
    np.testing.assert_allclose(together[n], alone[n], rtol=1e-5, atol=1e-6, err_msg=n)
    np.testing.assert_allclose(in_parts[n], alone[n], rtol=1e-5, atol=1e-6, err_msg=n)


def test_more_matrices_of_one_shape_need_no_more_products():
  def products(names):
    ops = stacked_step("", "", [""], names, traced=True)
    return sum("MatMul" in op.type for op in ops)

  # Three in each of five iterations, of these matrices and of the other one.
  assert products("a") == products("abcd") == 2 * 3 * 5


def test_products_in_bfloat16():
  """Of several matrices and of one; all else is float32, and so is the weight."""
  gin.parse_config("""
    import mesh_tensorflow.optimize
    optimize.MuonOptimizer.product_dtype = 'bfloat16'
  """)
  ops = stacked_step("", "", [""], "ab", traced=True)
  step = stacked_step("", "", [""], "ab")
  gin.clear_config()
  exact = stacked_step("", "", [""], "ab")
  for n in "ab":
    assert step[n].dtype == np.float32
    change = np.abs(step[n] - exact[n]).max()
    assert 1e-5 < change < 0.02 * np.abs(exact[n] - 1).max()
  dtypes = [op.outputs[0].dtype for op in ops if "MatMul" in op.type]
  assert len(dtypes) == 2 * 3 * 5 and set(dtypes) == {tf.bfloat16}
