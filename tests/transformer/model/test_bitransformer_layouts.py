"""Encoder-decoders give the same values and decode the same ids on every mesh."""

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from tests.kinds import kept
from tests.transformer import bi_program as bi
from tests.transformer import lm_program as lm

RNG = np.random.default_rng(3)
MODELS = {
  "plain": "",
  "T5 1.1": bi.T5_1_1,
  "ensemble": "Unitransformer.ensemble = 2\n" + bi.T5_1_0,
}
WIDE = """
num_layers = 1
d_model = 8
d_ff = 16
num_heads = 4
d_kv = 4
Unitransformer.vocab_divisor = 16
Unitransformer.max_length = 8
"""
MESHES = {
  "batch and model": ("rows:2,cols:2", "batch:rows,d_ff:cols,heads:cols,vocab:cols"),
  "d_model": ("rows:2,cols:2", "batch:rows,d_model:cols"),
  "members": ("rows:2,cols:2", "ensemble:rows,beam:cols"),
  "lengths": ("rows:2,cols:2", "length:rows,memory_length:cols"),
}
RUNS = [
  ("T5 1.1", "placement", "batch and model"),
  ("T5 1.1", "simd", "batch and model"),
  ("plain", "placement", "d_model"),
  ("plain", "simd", "lengths"),
  ("ensemble", "placement", "members"),
]
INPUTS = RNG.integers(2, 11, [4, 8]).astype(np.int32)
TARGETS = RNG.integers(1, 11, [4, 4]).astype(np.int32)


@pytest.fixture(scope="module")
def one_device_values():
  """By model: loss, logits, gradients; decoded ids."""
  try:
    return {name: values_on(lm.one_device(), name) for name in MODELS}
  finally:
    gin.clear_config()


def values_on(impl, name):
  model = bi.make_model(MODELS[name] + WIDE + "dropout_rate = 0.2")
  bi.random_weights(bi.initialize(impl, model, INPUTS, TARGETS))

  def program(inputs, targets):
    loss, logits, grads, _ = bi.loss_program(model)(inputs, targets)
    beam_size = 1 if name == "plain" else 2
    return loss, logits, grads, model.decode(inputs, max_decode_length=4, beam_size=beam_size)

  return lm.run(impl, program, INPUTS, TARGETS, seed=4)


@pytest.mark.slow
@pytest.mark.parametrize("name,kind,mesh", kept(RUNS, [RUNS[1], RUNS[2], RUNS[4]]))
def test_values_do_not_depend_on_the_layout(name, kind, mesh, one_device_values, cpu_devices):
  shape, layout = MESHES[mesh]
  cls = mtf.PlacementMeshImpl if kind == "placement" else mtf.SimdMeshImpl
  impl = cls(shape, layout, cpu_devices[: mtf.convert_to_shape(shape).size])
  loss, logits, grads, decoded = values_on(impl, name)
  expected = one_device_values[name]
  np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
  np.testing.assert_allclose(logits, expected[1], rtol=1e-4, atol=1e-4)
  for key, grad in expected[2].items():
    np.testing.assert_allclose(grads[key], grad, rtol=1e-3, atol=1e-4, err_msg=key)
  np.testing.assert_array_equal(decoded, expected[3])
