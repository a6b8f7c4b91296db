"""Reversible stacks, and layers that are computed again: the gradients of plain ones."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import transformer, transformer_layers
from tests.kinds import kept
from tests.transformer import bi_program as bi
from tests.transformer import lm_program as lm

WITHOUT_RESIDUAL = [
  transformer.sublayer_rms_norm,
  transformer.sublayer_call_layer,
  transformer.sublayer_dropout,
]
BIAS = dict(relative_attention_type="bias_shared", dropout_rate=0.3)
RNG = np.random.default_rng(0)
TARGETS = RNG.integers(1, 11, [4, 6]).astype(np.int32)
TARGETS[1, 4:] = 0


def make_model(cls=transformer.ReversibleLayerStack, layers=None, recompute=False, **sublayers):
  """A language model whose attention has a bias that all layers share, and dropout."""
  if cls is transformer.ReversibleLayerStack:
    sublayers = {"sublayers_per_layer": WITHOUT_RESIDUAL} | sublayers
  layers = layers or [
    [transformer_layers.SelfAttention, dict(num_heads=2, key_value_size=3) | BIAS],
    [transformer_layers.DenseReluDense, dict(hidden_size=6, dropout_rate=0.3)],
  ]
  return transformer.Unitransformer(
    transformer.make_layer_stack(
      layers,
      lambda made: cls(made, **(lm.SUBLAYERS | sublayers), recompute_grads=recompute),
      num_layers=3,
    ),
    d_model=4,
    input_vocab_size=11,
    output_vocab_size=11,
    autoregressive=True,
    max_length=8,
    vocab_divisor=1,
  )


def program_of(model, mode="train"):
  """From targets to (loss, logits, gradients by name)."""

  def program(targets):
    ids = mtf.minimum(targets, 1)
    logits, loss = model.call_simple(
      transformer.autoregressive_inputs(targets), targets, True, mode=mode, sequence_id=ids
    )
    variables = targets.graph.trainable_variables
    grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
    return loss, logits, dict(zip([v.full_name for v in variables], grads))

  return program


def values(impl, model, mode="train", traced=False):
  return lm.run(impl, program_of(model, mode), TARGETS, seed=5, traced=traced)


def check_equal(actual, expected, **tolerance):
  tolerance = dict(rtol=1e-4, atol=1e-5) | tolerance
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
  np.testing.assert_allclose(actual[1], expected[1], **tolerance)
  assert set(actual[2]) == set(expected[2])
  for name, grad in expected[2].items():
    np.testing.assert_allclose(actual[2][name], grad, err_msg=name, **tolerance)
    assert np.abs(grad).max() > 1e-6, name


@pytest.fixture(scope="module")
def plain():
  """Of both classes of stacks, activations kept: values on one device."""
  return {
    cls: values(lm.one_device(), make_model(cls))
    for cls in (transformer.LayerStack, transformer.ReversibleLayerStack)
  }


STACKS = [transformer.LayerStack, transformer.ReversibleLayerStack]
MESHES = {
  "one device": ("all:1", "", "placement"),
  "2x2": ("rows:2,cols:2", "batch:rows,heads:cols,d_ff:cols", "placement"),
  "d_model, simd": ("rows:2,cols:2", "batch:rows,d_model:cols", "simd"),
}


STACKS_ON_MESHES = list(itertools.product(STACKS, MESHES))


@pytest.mark.parametrize(("cls", "mesh"), kept(STACKS_ON_MESHES, STACKS_ON_MESHES[1::2]))
def test_recomputation_gives_the_same_gradients(cls, mesh, plain, cpu_devices):
  """With dropout; also of the bias, which the first layer makes and all use."""
  shape, layout, kind = MESHES[mesh]
  kind = mtf.PlacementMeshImpl if kind == "placement" else mtf.SimdMeshImpl
  impl = kind(shape, layout, cpu_devices[: mtf.convert_to_shape(shape).size])
  actual = values(impl, make_model(cls, recompute=True), traced=mesh == "one device")
  check_equal(actual, plain[cls])
  assert [n for n in actual[2] if "relative" in n] == [
    "transformer/block_000/layer_000/SelfAttention/relative_attention_bias"
  ]


class Scale(transformer.TransformerLayer):
  """Multiplies by the number of its place in the stack, plus 2."""

  def call(self, context, x):
    return x * (2.0 + context.layer_index)


def test_two_streams():
  seen = []
  model = make_model(
    layers=[[Scale]],
    sublayers_initial=[],
    sublayers_per_layer=[transformer.sublayer_call_layer],
    sublayers_final=[lambda x, stack, context: seen.append((context.layer_outputs, x)) or x],
  )

  def program(targets):
    model.call_simple(targets, targets, False, mode="eval")
    (outputs, last) = seen[-1]
    return [*outputs, last]

  outputs = lm.run(lm.one_device(), program, TARGETS)
  x = outputs[0]
  pair = (x, x)
  sums = []
  for i in range(3):
    pair = (pair[1], pair[0] + (2.0 + i) * pair[1])
    sums.append(pair[0] + pair[1])
  # After the initial sublayers, after each layer but the last, and at the end.
  expected = [x, *sums[:-1], sums[-1], sums[-1]]
  assert len(outputs) == len(expected)
  for actual, wanted in zip(outputs, expected):
    np.testing.assert_allclose(actual, wanted, rtol=1e-5)


def test_nothing_is_computed_again_outside_of_training():
  """And there, each layer once: the backward pass has a copy of each."""

  def count(mode):
    graph = mtf.Graph()
    ids = mtf.zeros(mtf.Mesh(graph, "mesh"), [("batch", 2), ("length", 4)], np.int32)
    program_of(make_model(recompute=True), mode)(ids)
    return len([op for op in graph.operations if type(op).__name__ == "SoftmaxOperation"])

  assert (count("eval"), count("train")) == (3, 6)


def test_auxiliary_losses():
  class HasLoss(transformer.TransformerLayer):
    def call(self, context, x):
      if context.losses is not None:
        context.losses.append(mtf.reduce_mean(mtf.square(x)))
      return x

  kept = values(lm.one_device(), make_model(layers=[[HasLoss]]))
  assert np.isfinite(kept[0])
  with pytest.raises(errors.UnsupportedError, match="HasLoss.*recompute_grads = False"):
    values(lm.one_device(), make_model(layers=[[HasLoss]], recompute=True))
  # The usual stack can do it.
  usual = values(lm.one_device(), make_model(transformer.LayerStack, layers=[[HasLoss]]))
  again = make_model(transformer.LayerStack, layers=[[HasLoss]], recompute=True)
  check_equal(values(lm.one_device(), again), usual)


def test_a_residual_sublayer_is_told(caplog):
  model = make_model(sublayers_per_layer=lm.SUBLAYERS["sublayers_per_layer"])
  with caplog.at_level(logging.WARNING, "mesh_tensorflow"):
    values(lm.one_device(), model)
  assert "take sublayer_residual out" in caplog.text


def test_decoding_equals_the_forward_pass():
  impl, model = lm.one_device(), make_model()
  bi.random_weights(lm.initialize(impl, model), 1)
  partial = np.array([[5, 6, 0, 0, 0, 0]], np.int32)
  ids = lm.run(impl, lambda p: model.sample_autoregressive(p, stop_at_token=None), partial)

  def logits(ids):
    inputs = transformer.autoregressive_inputs(ids)
    return model.call_simple(inputs, ids, compute_loss=False, mode="eval")[0]

  np.testing.assert_array_equal(ids[0, 2:], lm.run(impl, logits, ids).argmax(-1)[0, 2:])


class UsesEncoder(transformer.TransformerLayer):
  """Caches a list of two tensors made of a variable, as a transparent decoder does."""

  def call(self, context, x):
    weights = context.cached("mix", lambda: self._make(context))
    return x * weights[context.layer_index % 2]

  def _make(self, context):
    w = mtf.get_variable(
      context.mesh, "w", [("two", 2), context.model.model_dim], initializer=tf.ones_initializer()
    )
    return mtf.unstack(mtf.square(w), mtf.Dimension("two", 2))


@pytest.mark.parametrize("cls", STACKS)
def test_lists_that_layers_share(cls):
  layers = [[UsesEncoder], [UsesEncoder]]
  expected = values(lm.one_device(), make_model(cls, layers))
  assert [n for n in expected[2] if n.endswith("/w")] == [
    "transformer/block_000/layer_000/UsesEncoder/w"
  ]
  check_equal(values(lm.one_device(), make_model(cls, layers, recompute=True)), expected)
