"""Attention: functions, their parameters and position biases."""

from mesh_tensorflow.transformer.model.attention.bias import visibility_mask_to_attention_bias
from mesh_tensorflow.transformer.model.attention.functions import (
  attention,
  hybrid_attention,
  synthetic_attention,
)
from mesh_tensorflow.transformer.model.attention.local import local_attention_1d
from mesh_tensorflow.transformer.model.attention.params import (
  AttentionParams,
  ExpertsAttentionParams,
  attention_params_simple,
)
from mesh_tensorflow.transformer.model.attention.prompts import (
  concat_hyper_prompts_kv,
  make_params_hyperprompt,
  make_params_mtlprompt,
)
from mesh_tensorflow.transformer.model.attention.sharding import (
  maybe_reshape_attention_input_for_2d_sharding,
)

__all__ = [
  "AttentionParams",
  "ExpertsAttentionParams",
  "attention",
  "attention_params_simple",
  "concat_hyper_prompts_kv",
  "hybrid_attention",
  "local_attention_1d",
  "make_params_hyperprompt",
  "make_params_mtlprompt",
  "maybe_reshape_attention_input_for_2d_sharding",
  "synthetic_attention",
  "visibility_mask_to_attention_bias",
]
