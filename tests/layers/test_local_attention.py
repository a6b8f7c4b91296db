"""Attention to a window: its ends, steps equal to the whole, blocks, names, errors."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.errors import DTypeError, LayoutError, ShapeError

B, L, D = mtf.Dimension("b", 2), mtf.Dimension("length", 24), mtf.Dimension("d", 8)
H, KV = mtf.Dimension("heads", 2), mtf.Dimension("kv", 4)
X = np.random.default_rng(0).normal(size=[2, 24, 8]).astype("f")


@pytest.fixture
def mesh():
  return mtf.Mesh(mtf.Graph(), "m")


def make_impl(store=None, shape="all:1", layout=""):
  n = mtf.convert_to_shape(shape).size
  return mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, [""] * n, variable_store=store)


def values(mesh, *tensors, impl=None):
  lowering = mtf.Lowering(mesh.graph, {mesh: impl or make_impl()})
  return [lowering.export_to_tf_tensor(t).numpy() for t in tensors]


def local(mesh, array=X, window=5, impl=None, dtype=tf.float32, **kwargs):
  x = mtf.import_tf_tensor(mesh, tf.cast(array, dtype), [B, L, D])
  y = layers.masked_local_attention_1d(x, KV, H, False, window, name="local", **kwargs)
  assert (y.shape, y.dtype) == (x.shape, dtype)
  return values(mesh, y, impl=impl)[0]


def brute_force(x, qkvo, window):
  """Position by position, over a Python list of what it sees."""
  y = np.zeros_like(x)
  for b, i in np.ndindex(x.shape[:2]):
    seen = x[b, max(0, i - window + 1) : i + 1]
    for wq, wk, wv, wo in zip(*qkvo):
      e = np.exp((seen @ wk) @ (x[b, i] @ wq))
      y[b, i] += wo @ ((e / e.sum()) @ (seen @ wv))
  return y


@pytest.mark.parametrize("window", [1, 2, 5, 8, 24, 100])
def test_exactly_the_last_positions(mesh, window):
  impl = make_impl()
  y = local(mesh, window=window, impl=impl, length_per_split=8)
  assert impl.variable_store.names == ["local/qkvo"]
  weights = impl.variable_store["local/qkvo"].numpy()
  np.testing.assert_allclose(y, brute_force(X, weights, window), rtol=1e-4, atol=1e-5)


def test_first_position_sees_itself_alone(mesh):
  """Nothing stands before the sequence: no zeros that would dilute it."""
  impl = make_impl()
  y = local(mesh, impl=impl, length_per_split=4)
  _, _, wv, wo = impl.variable_store["local/qkvo"].numpy()
  alone = np.einsum("bd,hdk,hek->be", X[:, 0], wv, wo)
  np.testing.assert_allclose(y[:, 0], alone, rtol=1e-4, atol=1e-5)


def test_what_a_position_depends_on():
  store = mtf.VariableStore()
  before = local(mtf.Mesh(mtf.Graph(), "m"), impl=make_impl(store), length_per_split=6)
  changed = X.copy()
  changed[:, 9] += 1.0
  after = local(mtf.Mesh(mtf.Graph(), "m"), changed, impl=make_impl(store), length_per_split=6)
  moved = np.abs(after - before).max((0, 2)) > 1e-4
  assert np.flatnonzero(moved).tolist() == [9, 10, 11, 12, 13]


@pytest.mark.parametrize("length_per_split", [None, 12, 8, 3, 1])
def test_blocks_do_not_change_values(length_per_split):
  store = mtf.VariableStore()
  whole = local(mtf.Mesh(mtf.Graph(), "m"), impl=make_impl(store))
  other = local(
    mtf.Mesh(mtf.Graph(), "m"), impl=make_impl(store), length_per_split=length_per_split
  )
  np.testing.assert_allclose(other, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "length, per_split, window, block",
  [(512, None, 32, 128), (512, None, 200, 128), (512, None, 256, 256), (96, None, 1, 96),
   (384, 192, 128, 96), (512, 64, 128, 64), (262, None, 16, 2)],
)  # fmt: skip
def test_size_of_blocks(mesh, length, per_split, window, block):
  """The largest divisor of the length of a split that is at most max(window, 128)."""
  x = mtf.zeros(mesh, [B, mtf.Dimension("length", length), D])
  layers.masked_local_attention_1d(x, KV, H, False, window, length_per_split=per_split)
  found = {d.size for t in tensors_of(mesh) for d in t.shape if d.name == "query_block_length"}
  assert found == {block}
  blocks = [d.size for t in tensors_of(mesh) for d in t.shape if d.name == "length"]
  assert length // block in blocks


def test_memory_grows_with_the_length_not_with_its_square(mesh):
  n = 4096
  x = mtf.zeros(mesh, [mtf.Dimension("length", n), D])
  layers.masked_local_attention_1d(x, KV, H, False, 128)
  assert max(t.size for t in tensors_of(mesh)) == n * H.size * 256


def tensors_of(mesh):
  return [t for op in mesh.graph.operations for t in op.outputs]


@pytest.mark.parametrize("layout", ["length:r", "length:r,heads:s", "b:s,length:r", "kv:r,d:s"])
def test_split_length(layout):
  # Each with a store of its own: initial weights do not depend on the layout.
  whole = local(mtf.Mesh(mtf.Graph(), "m"), length_per_split=6)
  impl = make_impl(None, "r:4,s:2", layout)
  split = local(mtf.Mesh(mtf.Graph(), "m"), impl=impl, length_per_split=6)
  np.testing.assert_allclose(split, whole, rtol=1e-5, atol=1e-6)


def test_split_length_needs_blocks_that_lie_on_one_processor(mesh):
  with pytest.raises(LayoutError, match=r"length:1 .*r:4"):
    local(mesh, impl=make_impl(None, "r:4", "length:r"))


def test_keys_and_values_are_returned(mesh):
  kv = []
  x = mtf.import_tf_tensor(mesh, X, [B, L, D])
  params = layers.multihead_attention_params(mesh, H, D, KV, tf.float32)
  y = layers.masked_local_attention_1d(x, KV, H, False, 4, return_kv=kv, params=params)
  assert [v.full_name for v in mesh.graph.all_variables] == ["q", "k", "v", "o"]
  y, k, v, *weights = values(mesh, y, *kv, *params)
  np.testing.assert_allclose(k, np.einsum("bld,hdk->bhlk", X, weights[1]), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(v, np.einsum("bld,hdk->bhlk", X, weights[2]), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(y, brute_force(X, weights, 4), rtol=1e-4, atol=1e-5)


def test_names(mesh):
  x = mtf.zeros(mesh, [B, L, D])
  layers.masked_local_attention_1d(x, KV, H, False)
  layers.masked_local_attention_1d(x, KV, H, False)
  layers.masked_local_attention_1d(x, KV, H, False, name="mine")
  assert [v.full_name for v in mesh.graph.all_variables] == [
    "masked_local_attention_1d/qkvo", "masked_local_attention_1d_1/qkvo", "mine/qkvo",
  ]  # fmt: skip


def test_bfloat16():
  store = mtf.VariableStore()
  exact = local(mtf.Mesh(mtf.Graph(), "m"), impl=make_impl(store), length_per_split=8)
  short = local(
    mtf.Mesh(mtf.Graph(), "m"), impl=make_impl(store), length_per_split=8, dtype=tf.bfloat16
  )
  np.testing.assert_allclose(short.astype("f"), exact, atol=0.1)


# ------------------------------------------------------------------------------- one step


def steps(store, window, layout="", number=24):
  """Runs the positions one by one; the buffers start with garbage."""
  w = mtf.Dimension("window", window)
  k = np.full([2, 2, window, 4], 50.0, "f")
  v = np.full([2, 2, window, 4], -70.0, "f")
  outputs = []
  for step in range(number):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    y, *kv = layers.masked_local_attention_1d_incremental(
      mtf.import_tf_tensor(mesh, X[:, step], [B, D]),
      mtf.import_tf_tensor(mesh, k, [B, H, w, KV]),
      mtf.import_tf_tensor(mesh, v, [B, H, w, KV]),
      mtf.constant(mesh, step, dtype=tf.int32),
      name="local",
    )
    y, k, v = values(mesh, y, *kv, impl=make_impl(store, "r:2,s:2", layout))
    outputs.append(y)
  return np.stack(outputs, 1), k, v


@pytest.mark.parametrize("window, layout", [(1, ""), (4, "window:r"), (5, "b:r,heads:s"), (32, "")])
def test_steps_equal_the_whole_sequence(window, layout):
  whole = local(mtf.Mesh(mtf.Graph(), "m"), window=window)
  store = mtf.VariableStore()
  y, _, _ = steps(store, window, layout=layout)
  np.testing.assert_allclose(y, whole, rtol=1e-4, atol=1e-5)
  assert store.names == ["local/qkvo"]


def test_steps_write_one_slot_each():
  store = mtf.VariableStore()
  _, k, _ = steps(store, 4, number=6)
  wk = store["local/qkvo"].numpy()[1]
  # Slots 0 and 1 hold the positions 4 and 5.
  expected = np.einsum("bld,hdk->bhlk", X[:, [4, 5, 2, 3]], wk)
  np.testing.assert_allclose(k, expected, rtol=1e-4, atol=1e-5)


def test_step_has_the_variable_of_the_whole(mesh):
  w = mtf.Dimension("window", 4)
  x, k = mtf.zeros(mesh, [B, D]), mtf.zeros(mesh, [B, H, w, KV])
  step = mtf.constant(mesh, 0, dtype=tf.int32)
  layers.masked_local_attention_1d_incremental(x, k, k, step)
  (variable,) = mesh.graph.all_variables
  assert variable.full_name == "masked_local_attention_1d/qkvo"
  assert variable.dtype == mtf.VariableDType(tf.float32, tf.float32, tf.float32)
  count = len(mesh.graph.all_variables)
  params = [mtf.zeros(mesh, [H, D, KV])] * 4
  layers.masked_local_attention_1d_incremental(x, k, k, step, params=params)
  assert len(mesh.graph.all_variables) == count


def test_errors(mesh):
  x = mtf.zeros(mesh, [B, L, D])
  with pytest.raises(
    ShapeError, match=r"masked_local_attention_1d.*window_size.*at least 1, got 0"
  ):
    layers.masked_local_attention_1d(x, KV, H, False, 0)
  with pytest.raises(ShapeError, match="length_per_split 7 must be a divisor of length=24"):
    layers.masked_local_attention_1d(x, KV, H, False, length_per_split=7)
  one, k = mtf.zeros(mesh, [B, D]), mtf.zeros(mesh, [B, H, mtf.Dimension("window", 4), KV])
  with pytest.raises(DTypeError, match="step_num must be an integer"):
    layers.masked_local_attention_1d_incremental(one, k, k, mtf.constant(mesh, 0.0))
