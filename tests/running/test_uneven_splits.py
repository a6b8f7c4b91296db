"""Uneven splits in an `mtf.function`, under a tape, and in eager programs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.numerics import padding

N, D = mtf.Dimension("n", 5), mtf.Dimension("d", 3)
X = np.arange(15, dtype=np.float32).reshape([5, 3]) / 7.0


@pytest.mark.parametrize("cls", [mtf.PlacementMeshImpl, mtf.SimdMeshImpl])
def test_gradients_of_a_tape_have_no_padding(cls, cpu_devices):
  impl = cls("m:4", "n:m~", cpu_devices[:4])

  @mtf.function(impl, [mtf.TensorSpec([N, D])])
  def f(x):
    w = mtf.get_variable(x.mesh, "w", [N, D], initializer=mtf.initializers.Constant(X))
    return mtf.reduce_sum(mtf.log(x + 1.0) * w * w), w

  x = tf.constant(X)
  with padding.filled_with(float("nan")):
    f(x)
    slices = {name: v.slices for name, v in f.stored_variables.items()}
    with tf.GradientTape() as tape:
      tape.watch(x)
      loss, w = f(x)
    dx, dw = tape.gradient(loss, [x, slices["w"]])
  np.testing.assert_array_equal(w, X)
  np.testing.assert_allclose(loss, np.sum(np.log(X + 1.0) * X * X), rtol=1e-5)
  np.testing.assert_allclose(dx, X * X / (X + 1.0), rtol=1e-5)
  whole = np.concatenate([g.numpy() for g in dw])
  np.testing.assert_allclose(whole[:5], 2.0 * np.log(X + 1.0) * X, rtol=1e-5)
  np.testing.assert_array_equal(whole[5:], np.zeros([3, 3]))


@pytest.mark.parametrize("cls", [mtf.PlacementMeshImpl, mtf.SimdMeshImpl])
def test_slices_of_eager_tensors_have_no_padding(cls, cpu_devices):
  with padding.filled_with(float("nan")), mtf.eager(cls("m:4", "n:m~", cpu_devices[:4])) as mesh:
    x = mtf.import_tf_tensor(mesh, X, [N, D])
    y, total = x * 2.0, mtf.reduce_sum(x)
    np.testing.assert_array_equal(y.numpy(), X * 2.0)
    np.testing.assert_allclose(total.numpy(), X.sum(), rtol=1e-6)
    assert [s.where["n"] for s in y.slices] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    np.testing.assert_array_equal(np.concatenate([s.value for s in y.slices]), X * 2.0)
