"""The Evolved Transformer as a model; its layers against NumPy are in the descriptors."""

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.model import decoding
from mesh_tensorflow.transformer.model.layers import evolved_transformer
from tests.kinds import kept
from tests.transformer import bi_program, layer_program
from tests.transformer import lm_program as lm

# The cells of the paper, for an encoder and a decoder.
EVOLVED = """
import mesh_tensorflow.transformer.evolved_transformer
num_layers = 1
encoder/make_layer_stack.layers = [
  @GatedLinearUnitLayer, @EncoderConvolutionalLayer, @SelfAttention, @DenseReluDense]
decoder/make_layer_stack.layers = [
  @DecoderAttentionLayer, @DecoderConvolutionalLayer, @SelfAttention, @EncDecAttention,
  @DenseReluDense]
EncoderConvolutionalLayer.d_model = 4
EncoderConvolutionalLayer.dropout_rate = 0.2
DecoderConvolutionalLayer.d_model = 4
DecoderConvolutionalLayer.dropout_rate = 0.2
DecoderAttentionLayer.base_num_heads = 2
"""


def convolutional_lm(**kwargs):
  options = dict(d_model=4, dropout_rate=0.0)
  return layer_program.make_lm([[evolved_transformer.DecoderConvolutionalLayer, options]], **kwargs)


@pytest.mark.slow
def test_decoding():
  targets = np.random.default_rng(0).integers(1, 11, [2, 14]).astype(np.int32)
  layer_program.check_decoding(convolutional_lm(), targets)


def test_decoding_states():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  ids = mtf.zeros(mesh, [("batch", 2), ("length", 6)], tf.int32)
  decoder = decoding.IncrementalModel(
    convolutional_lm(),
    ids,
    mtf.zeros(mesh, mtf.Shape([]), tf.int32),
    mtf.range(mesh, ids.shape[1], tf.int32),
    layer_program.FLOATS,
  )
  sizes = [s.shape.to_integer_list for s in decoder.states]
  assert sizes == [[2, 11, 4], [2, 7, 4], [2, 7, 8]]


def test_encoder_decoder():
  model = bi_program.make_model(EVOLVED)
  impl = lm.one_device()
  bi_program.random_weights(bi_program.initialize(impl, model), scale=0.4)
  made = bi_program.names(impl)
  for name in (
    "encoder/block_000/layer_000/GatedLinearUnitLayer/glu_1/kernel",
    "encoder/block_000/layer_001/EncoderConvolutionalLayer/conv1x1/dense/kernel",
    "decoder/block_000/layer_000/DecoderAttentionLayer/self_attention/q",
    "decoder/block_000/layer_000/DecoderAttentionLayer/enc_dec_attention/q",
    "decoder/block_000/layer_001/DecoderConvolutionalLayer/sep_conv11x1/separable_conv1d/"
    "pointwise_dense/kernel",
  ):
    assert name in made
  store = impl.variable_store
  prefix = "decoder/block_000/layer_000/DecoderAttentionLayer/"
  # d_kv is 3, and self-attention has twice the heads.
  assert store[prefix + "self_attention/q"].shape.to_integer_list == [4, 12]
  assert store[prefix + "enc_dec_attention/q"].shape.to_integer_list == [4, 6]
  arrays = bi_program.INPUTS, bi_program.TARGETS
  _, logits = lm.run(impl, bi_program.loss_program(model, "eval"), *arrays)
  stepwise = lm.run(impl, bi_program.stepwise_program(model), *arrays)
  tokens = arrays[1] > 0
  np.testing.assert_allclose(stepwise[tokens], logits[tokens], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", kept(["placement", "simd"], ["placement"]))
def test_training_on_a_mesh(kind, cpu_devices):
  """With dropout: the masks do not depend on the mesh."""
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = cls("rows:2,cols:2", "batch:rows,heads:cols", cpu_devices[:4])

  def train(impl):
    model = bi_program.make_model(EVOLVED)
    bi_program.random_weights(bi_program.initialize(impl, model), scale=0.4)
    arrays = bi_program.INPUTS, bi_program.TARGETS
    results = lm.run(impl, bi_program.loss_program(model), *arrays, seed=3)
    return results[0], results[3]

  np.testing.assert_allclose(train(impl), train(lm.one_device()), rtol=1e-4)


def test_dropout_has_one_mask_for_all_positions():
  x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), [("batch", 2), ("length", 3), ("d_model", 4)])
  layer = evolved_transformer.DecoderConvolutionalLayer(4, 0.5)
  layer.call(layer_program.context(x, mode="train"), x)
  noise = [op.outputs[0].shape.to_integer_list for op in x.graph.operations if "random" in op.name]
  assert noise == [[2, 8], [2, 2], [2, 4]]


def test_channels_cannot_be_padded_to_fewer():
  x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), [("batch", 2), ("length", 3), ("d_model", 8)])
  layer = evolved_transformer.EncoderConvolutionalLayer(d_model=4, dropout_rate=0.0)
  assert layer.call(layer_program.context(x), x).shape[-1] == mtf.Dimension("d_model", 4)
  with pytest.raises(errors.ShapeError, match="smaller"):
    evolved_transformer._pad_channels_dim(x, 4)


def test_selectors():
  for name in ("GatedLinearUnitLayer", "EncoderConvolutionalLayer", "DecoderAttentionLayer",
               "DecoderConvolutionalLayer"):  # fmt: skip
    gin.get_configurable("mesh_tensorflow.transformer.evolved_transformer." + name)
