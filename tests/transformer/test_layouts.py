"""The model, configured by the packaged gin files, gives the same numbers on every mesh."""

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.gin_paths import gin_dir
from tests.transformer import lm_program as lm

LAYOUT = "batch:rows,d_ff:cols,heads:cols,vocab:cols"
MESHES = {
  "2x2": ("rows:2,cols:2", LAYOUT),
  "2x4": ("rows:2,cols:4", LAYOUT),
  "d_model": ("rows:2,cols:2", "batch:rows,d_model:cols"),
  "length": ("cols:2", "length:cols"),
}
BINDINGS = """
num_layers = 2
d_model = 8
d_ff = 16
num_heads = 4
d_kv = 4
dropout_rate = {dropout}
Unitransformer.max_length = 8
Unitransformer.vocab_divisor = 8
"""
TARGETS = np.random.default_rng(1).integers(1, 16, [4, 8]).astype(np.int32)


def make_model(dropout=0.0, bindings=""):
  """The decoder-only model of defaults.gin, small."""
  gin.add_config_file_search_path(gin_dir())
  gin.parse_config_files_and_bindings(
    ["defaults.gin"], [BINDINGS.format(dropout=dropout), bindings], skip_unknown=True
  )
  return transformer.Unitransformer(
    layer_stack=transformer.make_layer_stack(),
    input_vocab_size=16,
    output_vocab_size=16,
    autoregressive=True,
  )


def program_of(model):
  """From targets to the loss, all gradients, and the logits."""

  def program(targets):
    logits, loss = model.call_simple(
      transformer.autoregressive_inputs(targets), targets, compute_loss=True
    )
    variables = targets.graph.trainable_variables
    grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
    return loss, dict(zip([v.full_name for v in variables], grads)), logits

  return program


def check_equal(actual, expected):
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
  np.testing.assert_allclose(actual[2], expected[2], rtol=1e-4, atol=1e-5)
  assert set(actual[1]) == set(expected[1])
  for name, grad in expected[1].items():
    np.testing.assert_allclose(actual[1][name], grad, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_loss_and_gradients_do_not_depend_on_the_layout(dropout, mesh, kind, cpu_devices):
  model = make_model(dropout)
  shape, layout = MESHES[mesh]
  devices = cpu_devices[: mtf.convert_to_shape(shape).size]
  cls = mtf.PlacementMeshImpl if kind == "placement" else mtf.SimdMeshImpl
  expected = lm.run(lm.one_device(), program_of(model), TARGETS, seed=5)
  actual = lm.run(cls(shape, layout, devices), program_of(model), TARGETS, seed=5)
  check_equal(actual, expected)
  if dropout:
    other = lm.run(lm.one_device(), program_of(model), TARGETS, seed=6)
    assert abs(other[0] - expected[0]) > 1e-4


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.parametrize("mesh", ["2x2", "2x4"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_do_not_depend_on_the_layout(temperature, mesh, kind, cpu_devices):
  model = make_model(bindings=f"Unitransformer.sample_autoregressive.temperature = {temperature}")
  shape, layout = MESHES[mesh]
  devices = cpu_devices[: mtf.convert_to_shape(shape).size]
  cls = mtf.PlacementMeshImpl if kind == "placement" else mtf.SimdMeshImpl
  partial = np.where(np.arange(8) < [[1], [3], [0], [2]], TARGETS, 0).astype(np.int32)
  expected = lm.run(lm.one_device(), model.sample_autoregressive, partial, seed=5)
  actual = lm.run(cls(shape, layout, devices), model.sample_autoregressive, partial, seed=5)
  np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("mesh", ["2x2", "d_model"])
def test_recomputation_changes_nothing_but_the_cost(mesh, cpu_devices):
  model = make_model(0.3)
  expected = lm.run(lm.one_device(), program_of(model), TARGETS, seed=5)
  gin.bind_parameter("LayerStack.recompute_grads", True)
  model = make_model(0.3)
  shape, layout = MESHES[mesh]
  devices = cpu_devices[: mtf.convert_to_shape(shape).size]
  actual = lm.run(
    mtf.PlacementMeshImpl(shape, layout, devices), program_of(model), TARGETS, seed=5
  )
  check_equal(actual, expected)
