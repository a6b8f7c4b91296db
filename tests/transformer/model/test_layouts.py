"""The model, configured by the packaged gin files, gives the same numbers on every mesh."""

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.gin_paths import gin_dir
from tests.kinds import kept
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
  gin.clear_config()
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


def mesh_impl(kind, mesh, cpu_devices):
  shape, layout = MESHES[mesh]
  devices = cpu_devices[: mtf.convert_to_shape(shape).size]
  cls = mtf.PlacementMeshImpl if kind == "placement" else mtf.SimdMeshImpl
  return cls(shape, layout, devices)


@pytest.fixture(scope="module")
def expected():
  """Loss, gradients and logits on one device, with dropout."""
  try:
    return lm.run(lm.one_device(), program_of(make_model(0.3)), TARGETS, seed=5)
  finally:
    gin.clear_config()


CASES = [("placement", mesh) for mesh in MESHES] + [("simd", "2x2"), ("simd", "2x4")]


@pytest.mark.parametrize("kind,mesh", CASES)
def test_loss_and_gradients_do_not_depend_on_the_layout(kind, mesh, expected, cpu_devices):
  impl = mesh_impl(kind, mesh, cpu_devices)
  traced = (kind, mesh) == ("simd", "2x2")
  got = lm.run(impl, program_of(make_model(0.3)), TARGETS, seed=5, traced=traced)
  check_equal(got, expected)


@pytest.mark.parametrize(("kind", "mesh"), [("placement", "length"), ("simd", "2x2")])
def test_masks_of_each_position_do_not_depend_on_the_layout(kind, mesh, cpu_devices):
  """Of the residual stream, of hidden values, and of attention weights."""
  bindings = "transformer.dropout_broadcast_dims.per_position = True"
  want = lm.run(lm.one_device(), program_of(make_model(0.3, bindings)), TARGETS, seed=5)
  impl = mesh_impl(kind, mesh, cpu_devices)
  check_equal(lm.run(impl, program_of(make_model(0.3, bindings)), TARGETS, seed=5), want)


def test_dropout_depends_on_the_seed(expected):
  other = lm.run(lm.one_device(), program_of(make_model(0.3)), TARGETS, seed=6)
  assert abs(other[0] - expected[0]) > 1e-4


@pytest.mark.long  # `test_reversible_layer_stack.py` recomputes in both stacks, on meshes.
def test_recomputation_changes_nothing_but_the_cost(expected, cpu_devices):
  model = make_model(0.3, "LayerStack.recompute_grads = True")
  impl = mesh_impl("placement", "d_model", cpu_devices)
  check_equal(lm.run(impl, program_of(model), TARGETS, seed=5, traced=True), expected)


@pytest.mark.parametrize(
  ("kind", "mesh"),
  kept([("placement", "2x2"), ("simd", "2x2"), ("simd", "2x4")], [("simd", "2x2")]),
)
def test_samples_do_not_depend_on_the_layout(kind, mesh, cpu_devices):
  model = make_model(bindings="Unitransformer.sample_autoregressive.temperature = 1.0")
  partial = np.where(np.arange(8) < [[1], [3], [0], [2]], TARGETS, 0).astype(np.int32)
  one = lm.run(lm.one_device(), model.sample_autoregressive, partial, seed=5)
  impl = mesh_impl(kind, mesh, cpu_devices)
  traced = kind == "placement"
  got = lm.run(impl, model.sample_autoregressive, partial, seed=5, traced=traced)
  np.testing.assert_array_equal(got, one)
  other = lm.run(lm.one_device(), model.sample_autoregressive, partial, seed=6)
  assert (other != one).any()
