"""The layers of a Transformer, under one name: `mesh_tensorflow.transformer.transformer_layers`."""

from mesh_tensorflow.transformer.model.attention.bias import (
  relative_position_bucket as _relative_position_bucket,
)
from mesh_tensorflow.transformer.model.attention.params import attention_params
from mesh_tensorflow.transformer.model.layers.attention_kinds import (
  BranchedEncDecAttention,
  BranchedSelfAttention,
  ExpertsEncDecAttention,
  ExpertsSelfAttention,
  GeneralBilinearEncDecAttention,
  GeneralBilinearSelfAttention,
  Synthesizer,
  TalkingHeadsEncDecAttention,
  TalkingHeadsSelfAttention,
)
from mesh_tensorflow.transformer.model.layers.conv_layers import (
  Conv1D,
  Conv1DLayer,
  SeparableConv1DLayer,
)
from mesh_tensorflow.transformer.model.layers.dense_relu_dense import DenseReluDense
from mesh_tensorflow.transformer.model.layers.enc_dec_attention import (
  EncDecAttention,
  TransparentEncDecAttention,
  enc_dec_attention,
  enc_dec_attention_bias,
  relative_position_spans,
)
from mesh_tensorflow.transformer.model.layers.grouped_query_attention import (
  GroupedQueryAttention,
  LocalGroupedQueryAttention,
)
from mesh_tensorflow.transformer.model.layers.local_conv_attention import (
  Conv1DLocalAttn,
  DynamicConv1DLocalAttn,
  LightweightConv1DLocalAttn,
  LocalConvAttnBlock,
)
from mesh_tensorflow.transformer.model.layers.parallel_layer import ParallelLayer
from mesh_tensorflow.transformer.model.layers.rotary import Rotary
from mesh_tensorflow.transformer.model.layers.self_attention import (
  LocalSelfAttention,
  SelfAttention,
)

__all__ = [
  "BranchedEncDecAttention",
  "BranchedSelfAttention",
  "Conv1D",
  "Conv1DLayer",
  "Conv1DLocalAttn",
  "DenseReluDense",
  "DynamicConv1DLocalAttn",
  "EncDecAttention",
  "ExpertsEncDecAttention",
  "ExpertsSelfAttention",
  "GeneralBilinearEncDecAttention",
  "GeneralBilinearSelfAttention",
  "GroupedQueryAttention",
  "LightweightConv1DLocalAttn",
  "LocalConvAttnBlock",
  "LocalGroupedQueryAttention",
  "LocalSelfAttention",
  "ParallelLayer",
  "Rotary",
  "SelfAttention",
  "SeparableConv1DLayer",
  "Synthesizer",
  "TalkingHeadsEncDecAttention",
  "TalkingHeadsSelfAttention",
  "TransparentEncDecAttention",
  "_relative_position_bucket",
  "attention_params",
  "enc_dec_attention",
  "enc_dec_attention_bias",
  "relative_position_spans",
]
