"""Dense layers: names and shapes of variables, initial values, products."""

from __future__ import annotations

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.errors import ConfigError, DTypeError, ShapeError
from mesh_tensorflow.operations.random import RandomOperation

B, D, F = mtf.Dimension("b", 2), mtf.Dimension("d", 3), mtf.Dimension("f", 4)


@pytest.fixture
def mesh():
  return mtf.Mesh(mtf.Graph(), "m")


@pytest.fixture
def x(mesh):
  return mtf.import_tf_tensor(mesh, np.arange(6, dtype="f").reshape(2, 3), [B, D])


def values(mesh, *tensors):
  impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""])
  lowering = mtf.Lowering(mesh.graph, {mesh: impl})
  return [lowering.export_to_tf_tensor(t).numpy() for t in tensors], impl.variable_store


def names(mesh):
  return [v.full_name for v in mesh.graph.all_variables]


def test_named(mesh, x):
  y = layers.dense(x, F, reduced_dims=[D], name="wi")
  assert names(mesh) == ["wi/kernel", "wi/bias"]
  assert y.shape == mtf.Shape([B, F])
  kernel, bias = mesh.graph.all_variables
  assert kernel.shape == mtf.Shape([D, F])
  assert bias.shape == mtf.Shape([F])


def test_named_twice_shares(mesh, x):
  layers.dense(x, F, reduced_dims=[D], name="wi")
  layers.dense(x, F, reduced_dims=[D], name="wi")
  assert names(mesh) == ["wi/kernel", "wi/bias"]


def test_unnamed_layers_have_the_names_of_old_checkpoints(mesh, x):
  layers.dense(x, F, reduced_dims=[D])
  layers.dense(x, F, reduced_dims=[D], use_bias=False)
  layers.dense(x, F, reduced_dims=[D])
  assert names(mesh) == [
    "dense/kernel", "dense_1/bias", "dense_2/kernel", "dense_4/kernel", "dense_5/bias",
  ]  # fmt: skip


def test_unnamed_within_a_scope(mesh, x):
  with mtf.variable_scope("block", graph=mesh.graph):
    layers.dense(x, F, reduced_dims=[D])
  assert names(mesh) == ["block/dense/kernel", "block/dense_1/bias"]


def test_default_reduced_dim_warns(x, caplog):
  with caplog.at_level("WARNING", "mesh_tensorflow"):
    assert layers.dense(x, F).shape == mtf.Shape([B, F])
  assert "reduced_dims" in caplog.text


def test_new_dim_equal_to_reduced_dim(mesh, x):
  y = layers.dense(x, D, reduced_dims=[D], name="l")
  assert y.shape == mtf.Shape([B, D])
  assert mesh.graph.all_variables[0].shape == mtf.Shape([mtf.Dimension("_d", 3), D])
  (y, x), store = values(mesh, y, x)
  np.testing.assert_allclose(y, x @ store["l/kernel"].numpy(), rtol=1e-6)


def test_several_dims_and_experts(mesh):
  e = mtf.Dimension("e", 2)
  x = mtf.import_tf_tensor(mesh, np.ones([2, 2, 3], "f"), [B, e, D])
  y = layers.dense(x, [F, mtf.Dimension("g", 5)], reduced_dims=[B, D], expert_dims=[e], name="l")
  assert y.shape == mtf.convert_to_shape("e:2 f:4 g:5")
  kernel, bias = mesh.graph.all_variables
  assert kernel.shape == mtf.convert_to_shape("e:2 b:2 d:3 f:4 g:5")
  assert bias.shape == mtf.convert_to_shape("e:2 f:4 g:5")


def test_missing_dims(x):
  with pytest.raises(ShapeError, match="dense wi: reduced dimension f=4 is not in"):
    layers.dense(x, D, reduced_dims=[F], name="wi")
  with pytest.raises(ShapeError, match="expert dimension f=4 is not in"):
    layers.dense(x, D, reduced_dims=[D], expert_dims=[F], name="wi")


def test_bias_of_another_dtype(x):
  with pytest.raises(DTypeError):
    layers.dense(x, F, reduced_dims=[D], variable_dtype=mtf.VariableDType(tf.bfloat16))


def test_kernel_is_cast_to_the_dtype_of_x(mesh, x):
  y = layers.dense(
    x, F, reduced_dims=[D], use_bias=False, variable_dtype=mtf.VariableDType(tf.bfloat16)
  )
  assert y.dtype == tf.float32


def test_product_names_and_value(mesh, x):
  y = layers.dense_product(x, [D], F, ["linear", "relu", tf_like_square], name="wi", use_bias=False)
  assert names(mesh) == ["wi_0/kernel", "wi_1/kernel", "wi_2/kernel"]
  (y, x), store = values(mesh, y, x)
  a, b, c = (x @ store[n].numpy() for n in store.names)
  np.testing.assert_allclose(y, a * np.maximum(b, 0) * c**2, rtol=1e-5, atol=1e-6)


def tf_like_square(t):
  return mtf.square(t)


def test_product_of_one(mesh, x):
  layers.dense_product(x, [D], F, "gelu", name="wi", use_bias=False)
  assert names(mesh) == ["wi/kernel"]


def test_unknown_activation(x):
  with pytest.raises(ConfigError, match="'rellu'"):
    layers.dense_product(x, [D], F, ["rellu"])


def test_dense_relu_dense(mesh, x):
  y = layers.dense_relu_dense(x, F, False, name="ffn")
  assert names(mesh) == ["ffn/wi/kernel", "ffn/wo/kernel"]
  (y, x), store = values(mesh, y, x)
  wi, wo = (store[n].numpy() for n in store.names)
  np.testing.assert_allclose(y, np.maximum(x @ wi, 0) @ wo, rtol=1e-5, atol=1e-6)


def test_dense_relu_dense_dropout(mesh):
  x = mtf.ones(mesh, [mtf.Dimension("b", 64), D])
  f = mtf.Dimension("f", 512)
  y = layers.dense_relu_dense(x, f, True, dropout=0.5, dropout_broadcast_dims=[x.shape.dims[0]])
  drawn = [op for op in mesh.graph.operations if isinstance(op, RandomOperation)]
  assert [op.outputs[0].shape for op in drawn] == [mtf.Shape([f])]
  assert names(mesh) == ["dense_relu_dense/wi/kernel", "dense_relu_dense/wo/kernel"]
  (y,), _ = values(mesh, y)
  np.testing.assert_allclose(y, np.tile(y[:1], [64, 1]), rtol=1e-5)


# ---------------------------------------------------------------------- initial values


def stddev(initializer, shape=(64, 4096)):
  return float(np.std(initializer(shape, tf.float32)))


@pytest.mark.parametrize(
  "mode, variance",
  [("fan_in", 1 / 64), ("FAN_OUT", 1 / 4096), ("fan_avg", 1 / 2080)],
)
def test_variance_scaling_modes(mode, variance):
  dims = [mtf.Dimension("i", 64)], [mtf.Dimension("o", 4096)]
  normal = layers.VarianceScalingInitializer(mode=mode)(*dims)
  # Truncation at two standard deviations is not compensated: 0.88 of the nominal one.
  assert stddev(normal) == pytest.approx(0.8796 * variance**0.5, rel=0.01)
  uniform = layers.VarianceScalingInitializer(4.0, mode, "Uniform")(*dims)
  assert stddev(uniform) == pytest.approx(2 * variance**0.5, rel=0.01)
  values = np.abs(uniform((64, 4096), tf.float32))
  assert values.max() == pytest.approx(2 * (3 * variance) ** 0.5, rel=1e-3)


def test_golden_stddev_of_fan_in_64():
  initializer = layers.VarianceScalingInitializer()([mtf.Dimension("i", 64)], [])
  assert stddev(initializer) == pytest.approx(0.110, abs=1e-3)


def test_variance_scaling_errors():
  with pytest.raises(ConfigError, match="'fan_on' is not one of fan_in, fan_out, fan_avg"):
    layers.VarianceScalingInitializer(mode="fan_on")([D], [F])
  with pytest.raises(ConfigError, match="'cauchy' is not one of normal, uniform"):
    layers.VarianceScalingInitializer(distribution="cauchy")([D], [F])


def test_own_dense_initializer(mesh, x):
  class Ids(layers.DenseInitializer):
    def __call__(self, reduced_dims, new_dims):
      return mtf.initializers.Constant(10.0 * reduced_dims[0].size + new_dims[0].size)

  y = layers.dense(x, F, reduced_dims=[D], kernel_initializer=Ids(), name="l")
  _, store = values(mesh, y)
  assert np.all(store["l/kernel"].numpy() == 34.0)


def test_tensorflow_initializer(mesh, x):
  y = layers.dense(
    x, F, reduced_dims=[D], kernel_initializer=tf.ones_initializer(), name="l", use_bias=False
  )
  (y, x), _ = values(mesh, y, x)
  np.testing.assert_allclose(y, np.tile(x.sum(1, keepdims=True), [1, 4]))


# ------------------------------------------------------------------------ unit scaling


def test_unit_scaling(mesh, x):
  gin.bind_parameter("mesh_tensorflow.layers.unit_scaling_convention.value", True)
  y = layers.dense(
    x, F, reduced_dims=[D], kernel_initializer=mtf.initializers.Ones(), use_bias=False
  )
  (y, x), _ = values(mesh, y, x)
  np.testing.assert_allclose(y, np.tile(x.sum(1, keepdims=True), [1, 4]) * 3**-0.5, rtol=1e-6)
  initializer = layers.VarianceScalingInitializer()([mtf.Dimension("i", 64)], [])
  assert stddev(initializer) == pytest.approx(0.88, abs=0.01)
  with pytest.raises(ConfigError, match="fan_in"):
    layers.VarianceScalingInitializer(mode="fan_out")([D], [F])


def test_us_einsum_counts_each_contracted_dim_once(mesh):
  gin.bind_parameter("mesh_tensorflow.layers.unit_scaling_convention.value", True)
  a = mtf.ones(mesh, [B, D])
  y = layers.us_einsum([a, a, a], output_shape=[B])
  (y,), _ = values(mesh, y)
  np.testing.assert_allclose(y, [3**0.5] * 2, rtol=1e-6)


@pytest.mark.parametrize("name", ["unit_scaling_convention", "VarianceScalingInitializer"])
def test_gin_names(name):
  assert gin.get_configurable(f"mesh_tensorflow.layers.{name}")


def test_gin_configures_the_default_initializer(mesh, x):
  gin.bind_parameter("mesh_tensorflow.layers.VarianceScalingInitializer.scale", 0.0)
  y = layers.dense(x, F, reduced_dims=[D], name="l")
  _, store = values(mesh, y)
  assert np.all(store["l/kernel"].numpy() == 0.0)
