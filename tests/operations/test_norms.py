"""`rms_normalize` and its gradient, whole and split."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.operations.norms import rms_normalize

RNG = np.random.default_rng(0)
X = RNG.normal(size=[4, 6, 8]).astype(np.float32)
DY = RNG.normal(size=X.shape).astype(np.float32)
DIMS = [("batch", 4), ("d_model", 6), ("length", 8)]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("layout", ["", "batch:all", "d_model:all", "length:all"])
def test_value_and_gradient(layout, dim, cpu_devices):
  impl = mtf.PlacementMeshImpl("all:2", layout, cpu_devices[:2])

  @mtf.function(impl, input_signature=[mtf.TensorSpec(DIMS)] * 2)
  def program(x, dy):
    y = rms_normalize(x, mtf.Dimension(*dim), 1e-3)
    return y, mtf.gradients([y], [x], grad_ys=[dy])[0]

  axis = DIMS.index(dim)
  with tf.GradientTape() as tape:
    x = tf.constant(X)
    tape.watch(x)
    y = x * tf.math.rsqrt(tf.reduce_mean(x * x, axis, keepdims=True) + 1e-3)
  expected = tape.gradient(y, x, DY)
  for a, b in zip(program(X, DY), (y, expected)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_unknown_dimension():
  x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), DIMS)
  with pytest.raises(errors.DimensionError, match="heads=3"):
    rms_normalize(x, mtf.Dimension("heads", 3))
