"""DeepNorm's numbers, and the initial weights that they make."""

from __future__ import annotations

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import attention, transformer, transformer_layers
from mesh_tensorflow.transformer.model import deepnorm
from tests.transformer import layer_program
from tests.transformer import lm_program as lm

D = mtf.Dimension("d_model", 64)


def test_numbers_of_the_paper():
  """Figure 2 of arXiv:2203.00555, for 18 layers of an encoder and 6 of a decoder."""
  alpha, beta = deepnorm.deepnorm_input_scale, deepnorm.deepnorm_initial_gain
  np.testing.assert_allclose([alpha(18), beta(18)], [36**0.25, 144**-0.25])
  np.testing.assert_allclose([alpha(6, "decoder"), beta(6, "decoder")], [18**0.25, 72**-0.25])
  product = (18.0**4 * 6) ** (1 / 16)
  np.testing.assert_allclose(
    [alpha(18, "encoder", 6), beta(18, "encoder", 6)], [0.81 * product, 0.87 / product]
  )


@pytest.mark.parametrize(
  "arguments,says",
  [
    ((0,), r"num_layers \(=0\) must be positive"),
    ((2, "both"), "stack must be .* got 'both'"),
    ((2, "encoder"), r"num_decoder_layers \(=None\)"),
  ],
)
def test_stacks_that_cannot_be(arguments, says):
  with pytest.raises(errors.ConfigError, match=says):
    deepnorm.deepnorm_input_scale(*arguments)


def spread(gain, **kwargs):
  """By variable, the standard deviation of initial values over Xavier's."""
  impl = lm.one_device()

  def program():
    mesh = mtf.Mesh(mtf.Graph(), "m")
    x = mtf.zeros(mesh, mtf.Shape([mtf.Dimension("batch", 1), mtf.Dimension("length", 2), D]))
    heads = [mtf.Dimension("heads", 4)]
    attention.AttentionParams(
      mesh, D, D, D, *[mtf.Dimension("d_kv", 32)] * 2, heads, heads, mtf.VariableDType(),
      initial_gain=gain, **kwargs,
    )  # fmt: skip
    layer = transformer_layers.DenseReluDense(hidden_size=256, initial_gain=gain)
    y = layer.call(layer_program.context(x), x)
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    return lowering.export_to_tf_tensor(y)

  impl.run(program)
  found = {}
  for v in impl.variable_store:
    value = v.numpy()
    found[v.name] = float(value.std() / np.sqrt(2.0 / sum(value.shape)))
  return found


def test_initial_weights():
  """Xavier's of what makes logits; times the gain, what values and hidden layers go through."""
  found = spread(0.25, fold_scaling_into_initializer=False)
  expected = {"q": 1, "k": 1, "v": 0.25, "o": 0.25, "wi/kernel": 0.25, "wo/kernel": 0.25}
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    assert found[name] == pytest.approx(value, rel=0.05), name


def test_folded_scale_and_keys_that_are_values():
  found = spread(0.5, shared_kv=True)
  assert found["q"] == pytest.approx(32**-0.5, rel=0.05)
  assert found["kv"] == pytest.approx(0.5, rel=0.05)


def test_gin_names():
  gin.parse_config("""
deepnorm_input_scale.num_layers = 8
deepnorm_initial_gain.num_layers = 8
sublayer_scaled_residual.input_scale = @deepnorm_input_scale()
SelfAttention.initial_gain = @deepnorm_initial_gain()
DenseReluDense.initial_gain = @deepnorm_initial_gain()
""")
  for cls in (transformer_layers.GroupedQueryAttention, transformer_layers.DenseReluDense):
    assert cls().initial_gain == pytest.approx(64**-0.25)
  x = tf.constant(0.0)  # What a sublayer computes with; mtf tensors are like numbers here.

  class Context:
    current_layer_input = tf.constant(3.0)

  assert float(transformer.sublayer_scaled_residual(x, None, Context())) == pytest.approx(6.0)
