"""Multihead attention: variables, values, incremental decoding equal to the whole sequence."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.errors import DimensionError, ShapeError

B, L, D = mtf.Dimension("b", 2), mtf.Dimension("length", 6), mtf.Dimension("d", 8)
H, KV = mtf.Dimension("heads", 4), mtf.Dimension("kv", 2)
M = mtf.Dimension("memory_length", 6)
X = np.random.default_rng(0).normal(size=[2, 6, 8]).astype("f")


@pytest.fixture
def mesh():
  return mtf.Mesh(mtf.Graph(), "m")


def make_impl(store=None, shape="all:1", layout=""):
  n = mtf.convert_to_shape(shape).size
  return mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, [""] * n, variable_store=store)


def values(mesh, *tensors, impl=None):
  lowering = mtf.Lowering(mesh.graph, {mesh: impl or make_impl()})
  return [lowering.export_to_tf_tensor(t).numpy() for t in tensors]


def imported(mesh, array=X, dims=(B, L, D)):
  return mtf.import_tf_tensor(mesh, array, list(dims))


def reference(x, memory, weights, mask=0.0, extra=False):
  wq, wk, wv, wo = weights
  q = np.einsum("bld,hdk->bhlk", x, wq)
  k, v = (np.einsum("bmd,hdk->bhmk", memory, w) for w in (wk, wv))
  e = np.exp(np.einsum("bhlk,bhmk->bhlm", q, k) + mask)
  weights = e / (e.sum(-1, keepdims=True) + extra)
  return np.einsum("bhlm,bhmk,hdk->bld", weights, v, wo)


CAUSAL = np.where(np.arange(6)[:, None] < np.arange(6), -1e9, 0.0)


def test_params_separate(mesh):
  params = layers.multihead_attention_params(mesh, H, D, KV, tf.float32)
  assert [v.full_name for v in mesh.graph.all_variables] == ["q", "k", "v", "o"]
  assert all(p.shape == mtf.Shape([H, D, KV]) for p in params)


@pytest.mark.parametrize("combine", [False, True])
def test_params_standard_deviations(mesh, combine):
  h, io, kv = mtf.Dimension("heads", 16), mtf.Dimension("d", 256), mtf.Dimension("kv", 64)
  params = values(mesh, *layers.multihead_attention_params(mesh, h, io, kv, tf.float32, combine))
  expected = [256**-0.5 * 64**-0.25] * 2 + [256**-0.5, (256 * 16) ** -0.5]
  np.testing.assert_allclose([p.std() for p in params], expected, rtol=0.01)
  # Normal, not truncated: a few values beyond three standard deviations.
  assert all(np.abs(p).max() > 3.5 * s for p, s in zip(params, expected))


def test_vars_are_one_variable_in_the_order_q_k_v_o(mesh):
  params = layers.multihead_attention_vars(mesh, H, D, KV, tf.float32, tf.float32, tf.bfloat16)
  assert [v.full_name for v in mesh.graph.all_variables] == ["qkvo"]
  assert mesh.graph.all_variables[0].shape == mtf.Shape([mtf.Dimension("qkvo", 4), H, D, KV])
  assert all(p.dtype == tf.bfloat16 for p in params)


def test_initial_values_do_not_depend_on_the_layout():
  whole = []
  for layout in ("", "heads:r,d:s", "kv:r,qkvo:s"):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    layers.multihead_attention_vars(mesh, H, D, KV, tf.float32, tf.float32, tf.float32)
    variable = mesh.graph.all_variables[0].outputs[0]
    if "qkvo" in layout:
      mesh.graph.operations[:] = [variable.operation]  # Unstacking a split dimension is illegal.
    whole.append(values(mesh, variable, impl=make_impl(None, "r:2,s:2", layout))[0])
  for other in whole[1:]:
    np.testing.assert_array_equal(other, whole[0])


@pytest.mark.parametrize("layout", ["", "b:r,heads:s", "length:r,heads:s", "d:r,kv:s"])
def test_self_attention(mesh, layout):
  x = imported(mesh)
  mask = layers.attention_mask_autoregressive(mtf.range(mesh, L, tf.int32))
  y = layers.multihead_attention(x, None, mask, KV, H, False)
  impl = make_impl(None, "r:2,s:2", layout)
  (y,) = values(mesh, y, impl=impl)
  assert impl.variable_store.names == ["multihead_attention/qkvo"]
  weights = impl.variable_store["multihead_attention/qkvo"].numpy()
  np.testing.assert_allclose(y, reference(X, X, weights, CAUSAL), rtol=1e-4, atol=1e-5)


def test_attention_to_a_memory(mesh):
  m = mtf.Dimension("m", 3)
  memory = X[:, :3] * 2
  y = layers.multihead_attention(
    imported(mesh), imported(mesh, memory, [B, m, D]), None, KV, H, False, name="encdec"
  )
  impl = make_impl()
  (y,) = values(mesh, y, impl=impl)
  weights = impl.variable_store["encdec/qkvo"].numpy()
  np.testing.assert_allclose(y, reference(X, memory, weights), rtol=1e-4, atol=1e-5)


def test_memory_that_does_not_fit(mesh):
  x = imported(mesh)
  with pytest.raises(ShapeError, match="before the length"):
    layers.multihead_attention(x, mtf.zeros(mesh, "c:2 m:3 d:8"), None, KV, H, False)
  with pytest.raises(ShapeError, match="same last dimension, got d=8 and e=8"):
    layers.multihead_attention(x, mtf.zeros(mesh, "b:2 m:3 e:8"), None, KV, H, False)


def test_dropout_of_attention_weights(mesh):
  q = mtf.zeros(mesh, "b:2 l:50 k:1")
  k, v = mtf.zeros(mesh, "b:2 m:40 k:1"), mtf.ones(mesh, "b:2 m:40 k:1")
  arguments = dict(dropout=0.5, dropout_broadcast_dims=[mtf.Dimension("l", 50)])
  y = layers.dot_product_attention(q, k, v, None, True, **arguments)
  certain = layers.dot_product_attention(q, k, v, None, False, **arguments)
  y, certain = values(mesh, y, certain)
  np.testing.assert_allclose(certain, np.ones([2, 50, 1]), rtol=1e-6)
  assert y.mean() == pytest.approx(1.0, abs=0.3) and np.std(y[:, 0]) > 0.0
  np.testing.assert_allclose(y, np.tile(y[:, :1], [1, 50, 1]), rtol=1e-6)


def test_incremental_equals_whole_sequence():
  store = mtf.VariableStore()
  mesh = mtf.Mesh(mtf.Graph(), "m")
  mask = layers.attention_mask_autoregressive(mtf.range(mesh, L, tf.int32))
  whole = layers.multihead_attention(imported(mesh), None, mask, KV, H, False)
  (whole,) = values(mesh, whole, impl=make_impl(store))
  k = v = np.zeros([2, 4, 6, 2], "f")
  for step in range(6):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    y, k, v = layers.multihead_self_attention_incremental(
      imported(mesh, X[:, step], [B, D]),
      imported(mesh, k, [B, H, M, KV]),
      imported(mesh, v, [B, H, M, KV]),
      mtf.constant(mesh, step, dtype=tf.int32),
      tf.float32,
      tf.float32,
    )
    y, k, v = values(mesh, y, k, v, impl=make_impl(store))
    np.testing.assert_allclose(y, whole[:, step], rtol=1e-4, atol=1e-5)
  assert store.names == ["multihead_attention/qkvo"]


def test_encdec_incremental(mesh):
  wq, wk, wv, wo = layers.multihead_attention_params(mesh, H, D, KV, tf.float32)
  memory = mtf.rename_dimension(imported(mesh), "length", "memory_length")
  k, v = (mtf.einsum([memory, w], output_shape=[B, H, M, KV]) for w in (wk, wv))
  count = len(mesh.graph.all_variables)
  x = imported(mesh, X[:, 1], [B, D])
  y = layers.multihead_encdec_attention_incremental(x, wq, wo, k, v, None)
  assert (y.shape, len(mesh.graph.all_variables)) == (x.shape, count)
  y, *weights = values(mesh, y, wq, wk, wv, wo)
  np.testing.assert_allclose(y, reference(X, X, weights)[:, 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask_right", [True, False])
def test_memory_compressed(mesh, mask_right):
  y = layers.multihead_self_attention_memory_compressed(
    imported(mesh), mask_right, 3, KV, H, False, name=None
  )
  impl = make_impl()
  (y,) = values(mesh, y, impl=impl)
  weights = impl.variable_store["compressed_attention/qkvo"].numpy()
  last = np.array([2, 5])
  mask = np.where(last > np.arange(6)[:, None], -1e9, 0.0) if mask_right else 0.0
  expected = reference(X, X.reshape(2, 2, 3, 8).mean(2), weights, mask, extra=True)
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
  if mask_right:
    np.testing.assert_array_equal(y[:, :2], np.zeros([2, 2, 8]))


def test_memory_compressed_needs_length(mesh):
  with pytest.raises(DimensionError, match="no dimension 'length'"):
    layers.multihead_self_attention_memory_compressed(
      mtf.zeros(mesh, "b:2 l:6 d:8"), True, 3, KV, H, False
    )
