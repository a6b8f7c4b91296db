"""Clipping of gradients: formula, cost, summaries, gin."""

from __future__ import annotations

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers

A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 8)
X = np.random.default_rng(0).normal(size=[4, 8]).astype("f")
DY = np.random.default_rng(1).normal(size=[4, 8]).astype("f")


@pytest.fixture
def mesh():
  return mtf.Mesh(mtf.Graph(), "m")


def lower(mesh, layout=""):
  impl = mtf.placement_mesh_impl.PlacementMeshImpl("r:2,s:2", layout, [""] * 4)
  return mtf.Lowering(mesh.graph, {mesh: impl})


def clip(mesh, dy, limit, layout=""):
  """The gradient of x for a gradient of the result."""
  x = mtf.import_tf_tensor(mesh, tf.cast(X, dy.dtype), [A, B])
  y = layers.clip_activation_gradient(x, limit)
  (dx,) = mtf.gradients([y], [x], [mtf.import_tf_tensor(mesh, dy, [A, B])])
  lowering = lower(mesh, layout)
  np.testing.assert_array_equal(lowering.export_to_tf_tensor(y), tf.cast(X, dy.dtype))
  return lowering.export_to_tf_tensor(dx).numpy()


@pytest.mark.parametrize("layout", ["", "a:r", "a:r,b:s"])
@pytest.mark.parametrize("limit", [0.01, 0.5, 3.0])
def test_formula(mesh, limit, layout):
  rms = np.sqrt(np.mean(np.square(DY)))
  got = clip(mesh, tf.constant(DY), limit, layout)
  np.testing.assert_allclose(got, DY / max(1.0, rms / limit), rtol=1e-5)
  if limit < rms:
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(got))), limit, rtol=1e-5)
  else:
    np.testing.assert_array_equal(got, DY)


@pytest.mark.parametrize("limit", [None, 0, 0.0])
def test_without_a_limit_nothing_is_added(mesh, limit):
  x = mtf.import_tf_tensor(mesh, X, [A, B])
  count = len(mesh.graph.operations)
  assert layers.clip_activation_gradient(x, limit) is x
  assert len(mesh.graph.operations) == count


def test_forwards_costs_no_operation_of_tensorflow(mesh):
  x = mtf.reduce_sum(mtf.import_tf_tensor(mesh, X, [A, B]), reduced_dim=B)
  y = layers.clip_activation_gradient(x, 1.0)
  lowering = lower(mesh, "b:r")
  assert lowering.tensors[y] is lowering.tensors[x]
  assert isinstance(lowering.tensors[y], mtf.LazyAllreduceSum)
  assert lowering.scalar_summaries == []


def test_extreme_gradients(mesh):
  np.testing.assert_array_equal(clip(mesh, tf.zeros([4, 8]), 0.5), np.zeros([4, 8]))
  tiny = np.full([4, 8], 1e-30, "f")
  np.testing.assert_array_equal(clip(mesh, tf.constant(tiny), 0.5), tiny)
  large = clip(mesh, tf.constant(DY * 1e15), 0.5)
  np.testing.assert_allclose(np.sqrt(np.mean(np.square(large))), 0.5, rtol=1e-5)
  wrong = DY.copy()
  wrong[0, 0] = np.nan
  assert np.all(np.isnan(clip(mesh, tf.constant(wrong), 0.5)))


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_squares_are_added_up_in_float32(mesh, dtype):
  """In float16 the square of 300 is infinite."""
  got = clip(mesh, tf.fill([4, 8], tf.constant(300.0, dtype)), 0.5)
  assert got.dtype == dtype.as_numpy_dtype
  np.testing.assert_allclose(got.astype("f"), np.full([4, 8], 0.5), rtol=1e-2)


@pytest.mark.parametrize("layout", ["", "a:r,b:s"])
def test_summaries(mesh, layout):
  x = mtf.import_tf_tensor(mesh, X, [A, B])
  layers.clip_activation_gradient(x, 1.0, summaries=True)
  found = {name: float(value) for name, value in lower(mesh, layout).scalar_summaries}
  rms = np.sqrt(np.mean(np.square(X), 1))
  expected = {
    "mean/": X.mean(),
    "max/": X.max(),
    "rms_mean/forward_act": rms.mean(),
    "rms_max/forward_act": rms.max(),
    "rms_var/forward_act": rms.var(),
  }
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)


def test_summaries_of_given_dimensions_under_a_name(mesh):
  x = mtf.import_tf_tensor(mesh, X, [A, B])
  summaries = layers.summary_for_clip_activation_gradient(x, "h", [B])
  assert [s.name for s in summaries] == ["mean/h", "max/h", "rms_mean/h", "rms_max/h", "rms_var/h"]
  lowering = lower(mesh)
  rms = np.sqrt(np.mean(np.square(X), 0))
  np.testing.assert_allclose(lowering.export_to_tf_tensor(summaries[3]), rms.max(), rtol=1e-5)


def test_gin(mesh):
  gin.parse_config("""
    mesh_tensorflow.layers.clip_activation_gradient.clip_rms_norm = 0.25
    mesh_tensorflow.layers.clip_activation_gradient.summaries = True
  """)
  x = mtf.import_tf_tensor(mesh, X, [A, B])
  (dx,) = mtf.gradients([layers.clip_activation_gradient(x)], [x])
  lowering = lower(mesh)
  np.testing.assert_allclose(lowering.export_to_tf_tensor(dx), np.full([4, 8], 0.25), rtol=1e-5)
  assert len(lowering.scalar_summaries) == 5
