"""The layers of a Transformer, under one name: `mesh_tensorflow.transformer.transformer_layers`."""

from mesh_tensorflow.transformer.layers.branched_attention import (
  BranchedEncDecAttention,
  BranchedSelfAttention,
)
from mesh_tensorflow.transformer.layers.conv_layers import Conv1D, Conv1DLayer, SeparableConv1DLayer
from mesh_tensorflow.transformer.layers.dense_relu_dense import DenseReluDense
from mesh_tensorflow.transformer.layers.enc_dec_attention import (
  EncDecAttention,
  enc_dec_attention,
  enc_dec_attention_bias,
  relative_position_spans,
)
from mesh_tensorflow.transformer.layers.experts_attention import (
  ExpertsEncDecAttention,
  ExpertsSelfAttention,
)
from mesh_tensorflow.transformer.layers.general_bilinear import (
  GeneralBilinearEncDecAttention,
  GeneralBilinearSelfAttention,
)
from mesh_tensorflow.transformer.layers.grouped_query_attention import (
  GroupedQueryAttention,
  LocalGroupedQueryAttention,
)
from mesh_tensorflow.transformer.layers.local_conv_attention import (
  Conv1DLocalAttn,
  DynamicConv1DLocalAttn,
  LightweightConv1DLocalAttn,
  LocalConvAttnBlock,
)
from mesh_tensorflow.transformer.layers.local_self_attention import LocalSelfAttention
from mesh_tensorflow.transformer.layers.model_attention_params import attention_params
from mesh_tensorflow.transformer.layers.parallel_layer import ParallelLayer
from mesh_tensorflow.transformer.layers.relative_position import (
  relative_position_bucket as _relative_position_bucket,
)
from mesh_tensorflow.transformer.layers.rotary import Rotary
from mesh_tensorflow.transformer.layers.self_attention import SelfAttention
from mesh_tensorflow.transformer.layers.synthesizer import Synthesizer
from mesh_tensorflow.transformer.layers.talking_heads import (
  TalkingHeadsEncDecAttention,
  TalkingHeadsSelfAttention,
)
from mesh_tensorflow.transformer.layers.transparent_attention import TransparentEncDecAttention

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
