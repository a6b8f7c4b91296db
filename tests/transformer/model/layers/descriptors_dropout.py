"""Layers in training with dropout: the values of one device, on drawn layouts."""

from __future__ import annotations

import functools

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import (
  evolved_transformer,
  fixup_layers,
  heterogeneous_moe,
  transformer_layers,
  universal_transformer,
  vocab_embeddings,
)
from tests.conformance.framework import ONE_DEVICE, T, op
from tests.transformer.layer_context import FLOATS, make_context
from tests.transformer.model.layers import descriptors_attention_layers as attention
from tests.transformer.model.layers import descriptors_basic_layers as basic
from tests.transformer.model.layers import descriptors_smaller_layers as smaller

X, M = basic.X, basic.M
OPTIONS = dict(dropout_rate=0.4, **attention.DIMS)
FEED_FORWARD = "batch:2 length:4 d_model:4 d_ff:8"


def branched():
  layer = transformer_layers.BranchedSelfAttention(**OPTIONS)
  layer.dense_layer = transformer_layers.DenseReluDense(hidden_size=4, dropout_rate=0.4)
  return layer


def transparent(x, *memories):
  layer = transformer_layers.TransparentEncDecAttention(
    layers_per_encoder_module=1,
    layers_per_decoder_module=1,
    encoder_num_modules=1,
    decoder_num_modules=1,
    **OPTIONS,
  )
  context = make_context(x, encoder_output=memories[-1], encoder_layer_outputs=list(memories))
  return layer.call(context, x)


def convolve(cls, x, ids):
  return cls(d_model=4, dropout_rate=0.4).call(make_context(x, inputs=ids), x)


def universal(x):
  layer = transformer_layers.DenseReluDense(hidden_size=8, dropout_rate=0.4)
  layer.set_name("layer")
  options = smaller.UNIVERSAL | dict(dropout_rate=0.4)
  return universal_transformer.UTLayerStack([layer], **options).call(make_context(x), x)


def deep_experts(x):
  gin.bind_parameter("transformer.sublayer_dropout.dropout_rate", 0.4)
  options = dict(num_experts=2, hidden_size=4, moe_num_layers=2, moe_gating="switch")
  layer = heterogeneous_moe.HeterogeneousMoE1D(**options, **basic.SWITCH)
  return layer.call(make_context(x), x)


def mixtape(x):
  vocab, d = mtf.Dimension("vocab", 16), x.shape.dims[-1]
  embedding = vocab_embeddings.Mixtape(
    x.mesh, vocab, d, FLOATS, "embedding", None, gate_embedding_size=2, dropout_rate=0.4
  )
  return embedding.hidden_to_logits(x, make_context(x))


def described(name, build, *inputs, **kwargs):
  # Values of the variables are those of the initializers; the float sums differ by the layout.
  return op(f"{name}_dropout", build, ONE_DEVICE, *(inputs or (X,)), tolerance=3e-5, **kwargs)


def self_attention(cls, **kwargs):
  return basic.call(cls(**OPTIONS, **kwargs))


DESCRIPTORS = [
  described(
    "self_attention", self_attention(transformer_layers.SelfAttention), together=attention.SELF
  ),
  described(
    "hybrid_attention",
    self_attention(transformer_layers.SelfAttention, attention_func="hybrid"),
    together=attention.SELF,
  ),
  described(
    "local_self_attention",
    self_attention(transformer_layers.LocalSelfAttention, radius=2),
    together=attention.SELF,
  ),
  described(
    "enc_dec_attention",
    basic.call_with_memory(transformer_layers.EncDecAttention(**OPTIONS)),
    X,
    M,
    together=attention.SELF,
  ),
  described(
    "transparent_attention",
    transparent,
    X,
    M,
    M,
    together=(*attention.SELF, "batch:2 memory_length:4 d_model:4 encoder_module_outputs:2"),
    unsplit=("encoder_module_outputs", "decoder_module_inputs"),
  ),
  described(
    "talking_heads",
    basic.call(transformer_layers.TalkingHeadsSelfAttention(dropout_rate=0.4, **attention.TALKING)),
    together=attention.talking_together(4),
  ),
  described(
    "general_bilinear",
    basic.call(
      transformer_layers.GeneralBilinearSelfAttention(
        heads_dims=attention.heads("heads"), dropout_rate=0.4
      )
    ),
    together=attention.bilinear_together(4),
  ),
  described("branched", basic.call(branched()), together=attention.branched_together(4)),
  described(
    "synthesizer",
    self_attention(transformer_layers.Synthesizer, synthesize_mode="random"),
    together=(
      *attention.SELF,
      "length:512 heads:2 memory_length:512",
      "length:4 heads:2 memory_length:4",
    ),
  ),
  described(
    "dense_relu_dense",
    basic.call(transformer_layers.DenseReluDense(hidden_size=8, dropout_rate=0.4)),
    together=FEED_FORWARD,
  ),
  described(
    "dense_relu_dense_fixup",
    basic.call(fixup_layers.DenseReluDenseFixup(hidden_size=8, dropout_rate=0.4, num_blocks=2)),
    together=FEED_FORWARD,
  ),
  described(
    "evolved_encoder",
    functools.partial(convolve, evolved_transformer.EncoderConvolutionalLayer),
    X,
    basic.IDS,
    unsplit=("d_model", "length", "fh", "fw"),
    together="batch:2 length:4 input_dim:4",
  ),
  described(
    "evolved_decoder",
    functools.partial(convolve, evolved_transformer.DecoderConvolutionalLayer),
    X,
    basic.IDS,
    unsplit=("d_model",),
  ),
  described("universal", universal, together=FEED_FORWARD),
  described(
    "deep_experts",
    deep_experts,
    T("batch:2 length:4 d_model:4", 0.3, 1),
    together=basic.EXPERTS_MEETING,
  ),
  described(
    "mixtape",
    mixtape,
    unsplit=("gates",),
    together=(
      "batch:2 length:4 _d_model_copy:4 d_model:4",
      "batch:2 length:4 gate_embedding:2 d_model:4",
      "batch:2 length:4 d_model:4 vocab:16",
    ),
  ),
]
