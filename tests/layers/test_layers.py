"""Single facts about norms, losses, embeddings, masks, noise and statistics."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.errors import ArgumentError, DimensionError, DTypeError, ShapeError

B, L, V = mtf.Dimension("b", 2), mtf.Dimension("length", 6), mtf.Dimension("v", 5)


@pytest.fixture
def mesh():
  return mtf.Mesh(mtf.Graph(), "m")


def tensor(mesh, value, dims, dtype="f"):
  return mtf.import_tf_tensor(mesh, np.asarray(value, dtype), dims)


def make_impl(store=None):
  return mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""], variable_store=store)


def values(mesh, *tensors, impl=None):
  lowering = mtf.Lowering(mesh.graph, {mesh: impl or make_impl()})
  return [lowering.export_to_tf_tensor(t).numpy() for t in tensors]


def names(mesh):
  return [v.full_name for v in mesh.graph.all_variables]


# --------------------------------------------------------------------------------- losses


def logits_and_targets(mesh):
  return mtf.zeros(mesh, [B, V]), tensor(mesh, [1, 2], [B], "i")


def test_cross_entropy_of_ids_makes_no_one_hot(mesh):
  logits, targets = logits_and_targets(mesh)
  loss = layers.softmax_cross_entropy_with_logits(logits, targets, V)
  mtf.gradients([loss], [logits])
  assert not any("OneHot" in type(op).__name__ for op in mesh.graph.operations)
  np.testing.assert_allclose(values(mesh, loss)[0], np.log([5.0, 5.0]), rtol=1e-6)


def test_ids_out_of_range_cost_only_the_z_loss(mesh):
  logits = mtf.zeros(mesh, [mtf.Dimension("b", 4), V])
  targets = tensor(mesh, [-1, 5, 2**31 - 1, -(2**31)], "b:4", "i")
  loss = layers.softmax_cross_entropy_with_logits(logits, targets, V)
  with_z = layers.softmax_cross_entropy_with_logits(logits, targets, V, z_loss=0.5)
  loss, with_z, gradient = values(mesh, loss, with_z, mtf.gradients([loss], [logits])[0])
  np.testing.assert_array_equal(loss, np.zeros(4))
  np.testing.assert_allclose(with_z, np.full(4, 0.5 * np.log(5.0) ** 2), rtol=1e-6)
  np.testing.assert_array_equal(gradient, np.zeros([4, 5]))


def test_cross_entropy_of_far_apart_logits(mesh):
  logits = tensor(mesh, [[1e4, -1e4, 0, 0, 0], [-1e9, 0, -1e9, -1e9, -1e9]], [B, V])
  targets = tensor(mesh, [1, 1], [B], "i")
  loss = layers.softmax_cross_entropy_with_logits(logits, targets, V)
  gradient = mtf.gradients([loss], [logits])[0]
  loss, gradient = values(mesh, loss, gradient)
  np.testing.assert_allclose(loss, [2e4, 0.0])
  np.testing.assert_allclose(gradient, [[1, -1, 0, 0, 0], [0, 0, 0, 0, 0]])


def test_a_part_of_the_vocabulary_that_is_minus_infinity(mesh):
  """Split in four, whole parts of the vocabulary may be hidden."""
  v = mtf.Dimension("v", 8)
  array = np.full([2, 8], -np.inf, "f")
  array[:, 2:4] = [[0.0, 1.0], [2.0, 0.0]]
  logits = tensor(mesh, array, [B, v])
  loss = layers.softmax_cross_entropy_with_logits(logits, tensor(mesh, [2, 3], [B], "i"), v, 0.1)
  gradient = mtf.gradients([loss], [logits])[0]
  alone = values(mesh, loss, gradient)
  impl = mtf.placement_mesh_impl.PlacementMeshImpl("r:4", "v:r", [""] * 4)
  split = values(mesh, loss, gradient, impl=impl)
  assert np.all(np.isfinite(alone[0]))
  for a, s in zip(alone, split):
    np.testing.assert_allclose(s, a, rtol=1e-5)


def test_cross_entropy_errors(mesh):
  logits, targets = logits_and_targets(mesh)
  with pytest.raises(DimensionError, match="vocab_dim: there is no dimension v=7 in"):
    layers.softmax_cross_entropy_with_logits(logits, targets, ("v", 7))
  with pytest.raises(DimensionError, match="vocab_dim: there is no dimension v=7 in"):
    layers.softmax_cross_entropy_with_logits(logits, logits, ("v", 7))
  with pytest.raises(ShapeError, match="integer targets must have the dimensions.*b=2"):
    layers.softmax_cross_entropy_with_logits(logits, mtf.zeros(mesh, [L], tf.int32), V)
  with pytest.raises(ShapeError, match="probabilities must have the dimensions"):
    layers.softmax_cross_entropy_with_logits(logits, mtf.zeros(mesh, [B]), V)
  with pytest.raises(DTypeError, match="on_value, off_value and num_classes are for integer"):
    layers.softmax_cross_entropy_with_logits(logits, logits, V, off_value=0.1)
  with pytest.raises(DTypeError, match="logits must be floating"):
    layers.softmax_cross_entropy_with_logits(mtf.cast(logits, tf.int32), targets, V)
  with pytest.raises(ShapeError, match="one shape"):
    layers.sigmoid_cross_entropy_with_logits(logits, mtf.transpose(logits, [V, B]))


def test_weights_nonzero(mesh):
  y = layers.weights_nonzero(tensor(mesh, [3, 0, -1], "x:3", "i"))
  np.testing.assert_array_equal(values(mesh, y)[0], [1.0, 0.0, 1.0])


# ---------------------------------------------------------------------------------- norms


def test_layer_norm_variables(mesh):
  x = mtf.zeros(mesh, [B, V], tf.bfloat16)
  assert layers.layer_norm(x, V, name="norm").dtype == tf.bfloat16
  layers.layer_norm(x, V)
  assert names(mesh) == [
    "norm/layer_norm/layer_norm_scale",
    "norm/layer_norm/layer_norm_bias",
    "layer_prepostprocess/layer_norm/layer_norm_scale",
    "layer_prepostprocess/layer_norm/layer_norm_bias",
  ]
  scale = mesh.graph.all_variables[0]
  assert scale.dtype == mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)


def test_layer_norm_without_the_dimension(mesh):
  with pytest.raises(DimensionError, match="no dimension v=5 in"):
    layers.layer_norm(mtf.zeros(mesh, [B]), V)


def test_layer_norm_gradient_of_the_scale(mesh):
  x = tensor(mesh, np.random.default_rng(0).normal(size=[2, 5]), [B, V])
  y = layers.layer_norm(x, V)
  scale, bias = (v.outputs[0] for v in mesh.graph.trainable_variables)
  dscale, dbias, y = values(mesh, *mtf.gradients([y], [scale, bias]), y)
  np.testing.assert_allclose(dscale, y.sum(0), rtol=1e-5)
  np.testing.assert_allclose(dbias, [2.0] * 5)


def test_batch_norm():
  array = np.random.default_rng(0).normal(2.0, 3.0, [2, 6, 5]).astype("f")
  store = mtf.VariableStore()

  def run(is_training):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    y, updates = layers.batch_norm(tensor(mesh, array, [B, L, V]), is_training, 0.75, name="bn")
    assert names(mesh) == [
      "bn/batch_norm_scale", "bn/batch_norm_bias", "bn/bn_moving_mean", "bn/bn_moving_variance",
    ]  # fmt: skip
    assert [v.full_name for v in mesh.graph.trainable_variables] == names(mesh)[:2]
    (y,) = values(mesh, y, impl=make_impl(store))
    return y, updates

  mesh = mtf.Mesh(mtf.Graph(), "m")
  layers.batch_norm(tensor(mesh, array, [B, L, V]), False, 0.75, name="bn")
  values(mesh, impl=make_impl(store))
  before = store["bn/bn_moving_mean"].numpy()
  assert np.std(before) > 0.1  # Random, as in the old library.
  y, updates = run(True)
  assert [u.name.split("/")[-1] for u in updates] == ["bn_mean_update", "bn_var_update"]
  mean, variance = array.mean((0, 1)), array.var((0, 1))
  np.testing.assert_allclose(y, (array - mean) / variance**0.5, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(
    store["bn/bn_moving_mean"].numpy(), 0.75 * before + 0.25 * mean, rtol=1e-5
  )
  np.testing.assert_allclose(
    store["bn/bn_moving_variance"].numpy(), 0.75 + 0.25 * variance, rtol=1e-5
  )
  y, updates = run(False)
  assert updates == []
  moving_mean, moving_variance = (store[f"bn/bn_moving_{n}"].numpy() for n in ("mean", "variance"))
  np.testing.assert_allclose(
    y, (array - moving_mean) / np.sqrt(moving_variance + 1e-9), rtol=1e-4, atol=1e-5
  )


def test_batch_norm_gradient(mesh):
  array = np.random.default_rng(0).normal(size=[2, 6, 5]).astype("f")
  dy = np.random.default_rng(1).normal(size=[2, 6, 5]).astype("f")
  x = tensor(mesh, array, [B, L, V])
  y, _ = layers.batch_norm(x, True, 0.75)
  (dx,) = mtf.gradients([y], [x], [tensor(mesh, dy, [B, L, V])])
  impl = mtf.placement_mesh_impl.PlacementMeshImpl("r:2,s:3", "b:r,length:s", [""] * 6)
  tf_x = tf.constant(array)
  with tf.GradientTape() as tape:
    tape.watch(tf_x)
    mean, variance = tf.nn.moments(tf_x, [0, 1])
    expected = (tf_x - mean) * tf.math.rsqrt(variance + 1e-9)
  np.testing.assert_allclose(
    values(mesh, dx, impl=impl)[0], tape.gradient(expected, tf_x, dy), rtol=1e-4, atol=1e-5
  )


def test_batch_norm_options(mesh):
  x = mtf.ones(mesh, [B, L, V])
  y, _ = layers.batch_norm(x, True, 0.9, dims_idx_start=1, dims_idx_end=None, init_zero=True)
  assert mesh.graph.all_variables[0].shape == mtf.Shape([B])
  assert names(mesh)[0] == "batch_norm/batch_norm_scale"
  np.testing.assert_array_equal(values(mesh, y)[0], np.zeros([2, 6, 5]))
  with pytest.raises(DimensionError, match=r"\[0:0\] selects no dimension"):
    layers.batch_norm(x, True, 0.9, dims_idx_end=0)


# ------------------------------------------------------------------------------ embedding


def test_embedding(mesh):
  ids = tensor(mesh, [[1, 4], [7, -1]], [B, mtf.Dimension("n", 2)], "i")
  d = mtf.Dimension("d", 3)
  y = layers.embedding(ids, V, d, tf.float32, name="table")
  assert names(mesh) == ["table"]
  assert y.shape == mtf.Shape([B, mtf.Dimension("n", 2), d])
  impl = make_impl()
  (y,) = values(mesh, y, impl=impl)
  table = impl.variable_store["table"].numpy()
  np.testing.assert_array_equal(y, [[table[1], table[4]], [[0.0] * 3] * 2])


def test_embedding_weights_options(mesh):
  d, e = mtf.Dimension("d", 300), mtf.Dimension("e", 2)
  weights = layers.embedding_weights(mesh, V, d, tf.float32, ensemble_dim=e)
  assert weights.shape == mtf.Shape([e, V, d])
  ones = layers.embedding_weights(
    mesh, V, d, tf.float32, name="ones", initializer=mtf.initializers.Ones()
  )
  weights, ones = values(mesh, weights, ones)
  assert np.std(weights) == pytest.approx(1.0, abs=0.05)
  assert np.all(ones == 1.0)


# ---------------------------------------------------------------------------------- masks


def test_local_block_mask(mesh):
  block, memory = mtf.Dimension("block", 3), mtf.Dimension("memory", 6)
  mask = layers.attention_bias_local_block(mesh, block, memory)
  assert mask.dtype == tf.float32
  visible = values(mesh, mask)[0] == 0.0
  np.testing.assert_array_equal(
    visible, np.concatenate([np.ones([3, 3], bool), np.tril(np.ones([3, 3], bool))], 1)
  )


def test_mask_dtype(mesh):
  ids = tensor(mesh, [0, 1, 1, 2, 2, 0], [L], "i")
  for mask in (
    layers.attention_mask_ignore_padding(ids, dtype=tf.bfloat16),
    layers.attention_mask_autoregressive(ids, dtype=tf.bfloat16),
    layers.attention_mask_same_segment(ids, dtype=tf.bfloat16),
  ):
    assert mask.dtype == tf.bfloat16


# ----------------------------------------------------------------------- noise, statistics


def test_multiplicative_jitter(mesh):
  x = mtf.ones(mesh, "x:10000")
  assert layers.multiplicative_jitter(x, 0.0) is x
  (y,) = values(mesh, layers.multiplicative_jitter(x, 0.25))
  assert y.min() >= 0.75 and y.max() <= 1.25
  assert np.std(y) == pytest.approx(0.5 / 12**0.5, rel=0.02)


@pytest.mark.parametrize("step, keep", [(-5, 0.25), (0, 0.5), (5, 0.75), (10, 1.0), (20, 1.0)])
def test_annealed_dropout(mesh, step, keep):
  mesh.graph.global_step = mtf.constant(mesh, step, dtype=tf.int64)
  x = mtf.ones(mesh, "x:20000")
  (y,) = values(mesh, layers.annealed_dropout(x, True, 0, 10, init_rate=0.5))
  assert np.mean(y > 0) == pytest.approx(keep, abs=0.02)
  np.testing.assert_allclose(y[y > 0], 1.0 / keep, rtol=1e-5)


def test_annealed_dropout_options(mesh):
  x = mtf.ones(mesh, "x:200 y:3")
  assert layers.annealed_dropout(x, False, 0, 10, init_rate=0.5) is x
  with pytest.raises(ArgumentError, match="init_rate is required"):
    layers.annealed_dropout(x, True, 0, 10)
  (y,) = values(mesh, layers.annealed_dropout(x, True, 0, 10, init_rate=0.5, noise_shape="x:200"))
  np.testing.assert_array_equal(y[:, 0], y[:, 2])
  assert set(np.unique(y)) == {0.0, 2.0}


def test_corr_of_any_dimension(mesh):
  array = np.random.default_rng(0).normal(size=[4, 3, 6]).astype("f")
  x = tensor(mesh, array, "a:4 b:3 c:6")
  for i, name in enumerate("abc"):
    y = layers.corr(x, x.shape.dims[i])
    assert y.shape.dimension_names == [f"{name}_1", f"{name}_2"]
    expected = np.corrcoef(np.moveaxis(array, i, 0).reshape(array.shape[i], -1))
    np.testing.assert_allclose(values(mesh, y)[0], expected, rtol=1e-4, atol=1e-5)
  with pytest.raises(DimensionError, match="no dimension d=4 in"):
    layers.corr(x, ("d", 4))


def test_compress_mean(mesh):
  x = mtf.to_float(mtf.range(mesh, L, tf.int32))
  y = layers.compress_mean(x, L, 3)
  assert y.shape == mtf.convert_to_shape("length:2")
  np.testing.assert_array_equal(values(mesh, y)[0], [1.0, 4.0])
  with pytest.raises(ShapeError, match="length=6.*factor 4"):
    layers.compress_mean(x, L, 4)
