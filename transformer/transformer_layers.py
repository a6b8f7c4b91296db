"""The layers of a Transformer, under one name: `mesh_tensorflow.transformer.transformer_layers`."""

from mesh_tensorflow.transformer.dense_relu_dense import DenseReluDense
from mesh_tensorflow.transformer.enc_dec_attention import (
  EncDecAttention,
  enc_dec_attention,
  enc_dec_attention_bias,
  relative_position_spans,
)
from mesh_tensorflow.transformer.later_layers import (
  GeneralBilinearSelfAttention,
  LocalSelfAttention,
  TalkingHeadsSelfAttention,
)
from mesh_tensorflow.transformer.relative_position import (
  relative_position_bucket as _relative_position_bucket,
)
from mesh_tensorflow.transformer.self_attention import SelfAttention, attention_params

__all__ = [
  "DenseReluDense",
  "EncDecAttention",
  "GeneralBilinearSelfAttention",
  "LocalSelfAttention",
  "SelfAttention",
  "TalkingHeadsSelfAttention",
  "_relative_position_bucket",
  "attention_params",
  "enc_dec_attention",
  "enc_dec_attention_bias",
  "relative_position_spans",
]
