"""Prediction of further tokens: there in training alone; and a cap on logits while decoding."""

from __future__ import annotations

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer import transformer_layers as t
from tests.transformer import layer_program
from tests.transformer import lm_program as lm
from tests.transformer.model.layers.descriptors_today import model as feed_forward_model

DIMS = dict(num_heads=2, key_value_size=4)


def attention_model(tied=False):
  attention = lambda: t.GroupedQueryAttention(rotary=t.Rotary(), **DIMS)  # noqa: E731
  stack = lambda layers: transformer.LayerStack(layers, **lm.SUBLAYERS)  # noqa: E731
  return layer_program.make_lm(
    [attention],
    positional_embedding=False,
    shared_embedding_and_softmax_weights=tied,
    final_logit_soft_cap=2.0,
    multi_token=transformer.MultiTokenPrediction(1, 0.3, [attention], stack),
  )


def variables(model, mode):
  targets = mtf.ones(mtf.Mesh(mtf.Graph(), "m"), [("batch", 2), ("length", 8)], "int32")
  model.call_simple(targets, targets, compute_loss=True, mode=mode)
  return {v.full_name for v in targets.graph.all_variables}


def test_evaluation_makes_no_further_tokens():
  model, plain = feed_forward_model(True), feed_forward_model(True, multi_token=False)
  assert variables(model, "eval") == variables(plain, "eval") == variables(plain, "train")
  more = variables(model, "train") - variables(model, "eval")
  assert len(more) == 12 and all("/future_token_" in name for name in more)


@pytest.mark.parametrize("tied", [False, True])
def test_sampling_is_the_whole_model(tied):
  layer_program.check_decoding(attention_model(tied))


def test_training_is_that_of_one_device(cpu_devices):
  """With attention in the modules, on split positions."""
  rows = np.random.default_rng(0).integers(1, 11, [4, 8]).astype(np.int32)
  results = []
  layouts = [("all:1", ""), ("rows:2,cols:2", "batch:rows,length:cols")]
  for mesh, layout in layouts:
    impl = mtf.PlacementMeshImpl(mesh, layout, cpu_devices[: mtf.convert_to_shape(mesh).size])
    results.append(layer_program.losses_and_gradients(attention_model(), impl, rows))
  for one, split in zip(*results):
    np.testing.assert_allclose(split, one, rtol=1e-4, atol=1e-5)


def test_gin_names():
  gin.parse_config("""
make_layer_stack.layers = [@GroupedQueryAttention, @DenseReluDense]
make_layer_stack.num_layers = 3
LayerStack.sublayers_per_layer = [@sublayer_call_layer]
Unitransformer.multi_token = @MultiTokenPrediction()
MultiTokenPrediction.num_tokens = 2
Unitransformer.final_logit_soft_cap = 30.0
""")
  model = transformer.Unitransformer(
    transformer.make_layer_stack(),
    input_vocab_size=8,
    output_vocab_size=8,
    autoregressive=True,
    max_length=8,
  )
  assert [type(x).__name__ for x in model.multi_token.blocks[1].layers] == [
    "GroupedQueryAttention",
    "DenseReluDense",
  ]
  assert len(model.multi_token.blocks) == 2 and model.final_logit_soft_cap == 30.0


@pytest.mark.parametrize(
  "options,says",
  [
    (dict(final_logit_soft_cap=0.0), "final_logit_soft_cap must be positive"),
    (dict(autoregressive=False), "multi_token needs autoregressive=True"),
  ],
)
def test_models_that_cannot_be(options, says):
  further = transformer.MultiTokenPrediction(1, 0.3, [t.DenseReluDense])
  with pytest.raises(errors.ConfigError, match=says):
    layer_program.make_lm([t.DenseReluDense], multi_token=further, **options)
  with pytest.raises(errors.ConfigError, match=r"num_tokens \(=0\) must be positive"):
    transformer.MultiTokenPrediction(0)
