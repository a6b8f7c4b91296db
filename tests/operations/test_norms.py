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


def expected(x, scale, axis, dtype=tf.float32):
  """x / sqrt(mean(x ** 2) + 1e-3) * scale, of TensorFlow."""
  x, scale = tf.cast(x, dtype), tf.cast(scale, dtype)
  return x * tf.math.rsqrt(tf.reduce_mean(x * x, axis, keepdims=True) + 1e-3) * scale


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("layout", ["", "batch:all", "d_model:all", "length:all"])
@pytest.mark.parametrize("scale_dims", [None, [0], [1], [2], [2, 0], []])
def test_value_and_gradients(layout, dim, scale_dims, cpu_devices):
  impl = mtf.PlacementMeshImpl("all:2", layout, cpu_devices[:2])
  shape = [DIMS[i] for i in scale_dims or ()]
  scale = RNG.normal(size=[n for _, n in shape]).astype(np.float32)

  @mtf.function(impl, input_signature=[mtf.TensorSpec(d) for d in (DIMS, shape, DIMS)])
  def program(x, scale, dy):
    y = rms_normalize(x, mtf.Dimension(*dim), 1e-3, scale=None if scale_dims is None else scale)
    return y, *mtf.gradients([y], [x] if scale_dims is None else [x, scale], grad_ys=[dy])

  axis = DIMS.index(dim)
  with tf.GradientTape() as tape:
    x, s = tf.constant(X), tf.constant(scale if scale_dims is not None else np.float32(1))
    tape.watch([x, s])
    # In the order of x's dimensions, as NumPy broadcasts.
    order = sorted(scale_dims or ())
    aligned = tf.transpose(s, [(scale_dims or ()).index(i) for i in order])
    y = expected(
      x, tf.reshape(aligned, [n if i in order else 1 for i, n in enumerate(X.shape)]), axis
    )
  wanted = [y, *tape.gradient(y, [x, s], DY)]
  for a, b in zip(program(X, scale, DY), wanted):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("layout", ["batch:all~", "d_model:all~", "length:all~"])
def test_uneven_slices(layout, cpu_devices):
  impl = mtf.PlacementMeshImpl("all:3", layout, cpu_devices[:3])
  dims = [("batch", 4), ("d_model", 7), ("length", 8)]
  x, dy = (RNG.normal(size=[4, 7, 8]).astype(np.float32) for _ in range(2))
  scale = RNG.normal(size=[7]).astype(np.float32)

  @mtf.function(impl, input_signature=[mtf.TensorSpec(d) for d in (dims, dims[1:2], dims)])
  def program(x, scale, dy):
    y = rms_normalize(x, mtf.Dimension("d_model", 7), 1e-3, scale=scale)
    return mtf.gradients([y], [x, scale], grad_ys=[dy])

  with tf.GradientTape() as tape:
    given = [tf.constant(x), tf.constant(scale)]
    tape.watch(given)
    y = expected(given[0], given[1][:, tf.newaxis], 1)
  for a, b in zip(program(x, scale, dy), tape.gradient(y, given, dy)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_half_precision_is_rounded_once(dtype):
  dtype = tf.as_dtype(dtype)
  x, dy = tf.cast(X, dtype), tf.cast(DY, dtype)
  scale = tf.cast(RNG.normal(size=[8]), dtype)
  impl = mtf.PlacementMeshImpl("", "", [""])

  @mtf.function(impl, input_signature=[mtf.TensorSpec(d, dtype) for d in (DIMS, DIMS[2:], DIMS)])
  def program(x, scale, dy):
    y = rms_normalize(x, mtf.Dimension("length", 8), 1e-3, scale=scale)
    return y, *mtf.gradients([y], [x, scale], grad_ys=[dy])

  with tf.GradientTape() as tape:
    given = [tf.cast(t, tf.float64) for t in (x, scale)]
    tape.watch(given)
    y = expected(*given, 2, tf.float64)
  wanted = [y, *tape.gradient(y, given, tf.cast(dy, tf.float64))]
  for a, b in zip(program(x, scale, dy), wanted):
    # Half a unit in the last of 8 bits.
    rtol = 2.0**-8 if dtype == tf.bfloat16 else 1e-12
    np.testing.assert_allclose(tf.cast(a, tf.float64), b, rtol=rtol, atol=1e-6)


def test_second_derivatives():
  impl = mtf.PlacementMeshImpl("", "", [""])
  scale = RNG.normal(size=[8]).astype(np.float32)
  v, w = DY[::-1], RNG.normal(size=[8]).astype(np.float32)

  @mtf.function(impl, input_signature=[mtf.TensorSpec(d) for d in (DIMS, DIMS[2:], DIMS)] * 2)
  def program(x, scale, dy, v, w, _):
    y = rms_normalize(x, mtf.Dimension("length", 8), 1e-3, scale=scale)
    first = mtf.gradients([y], [x, scale], grad_ys=[dy])
    return mtf.gradients(first, [x, scale, dy], grad_ys=[v, w])

  with tf.GradientTape() as second:
    given = [tf.constant(t) for t in (X, scale, DY)]
    second.watch(given)
    with tf.GradientTape() as tape:
      tape.watch(given[:2])
      y = expected(*given[:2], 2)
    first = tape.gradient(y, given[:2], given[2])
  for a, b in zip(program(X, scale, DY, v, w, v), second.gradient(first, given, [v, w])):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_large_and_small_numbers():
  """The factor is neither squared nor cubed by itself."""
  impl = mtf.PlacementMeshImpl("", "", [""])

  @mtf.function(impl, input_signature=[mtf.TensorSpec(DIMS)] * 2)
  def program(x, dy):
    y = rms_normalize(x, mtf.Dimension("length", 8), 0.0, scale=mtf.ones(x.mesh, DIMS[2:]))
    return mtf.gradients([y], [x], grad_ys=[dy])[0]

  for power in (-17, 17):
    dx = program(X * np.float32(10.0**power), DY) * 10.0**power
    np.testing.assert_allclose(dx, program(X, DY), rtol=1e-4, atol=1e-5)


def test_scale_of_other_dimensions():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  with pytest.raises(errors.ShapeError, match="heads=3"):
    rms_normalize(
      mtf.zeros(mesh, DIMS), mtf.Dimension("length", 8), scale=mtf.zeros(mesh, [("heads", 3)])
    )


def test_unknown_dimension():
  x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), DIMS)
  with pytest.raises(errors.DimensionError, match="heads=3"):
    rms_normalize(x, mtf.Dimension("heads", 3))
