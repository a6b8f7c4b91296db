"""Attention functions and their parameters: `mesh_tensorflow.transformer.attention`."""

from mesh_tensorflow.transformer.attention.bias import visibility_mask_to_attention_bias
from mesh_tensorflow.transformer.attention.functions import (
  attention,
  hybrid_attention,
  synthetic_attention,
)
from mesh_tensorflow.transformer.attention.local import local_attention_1d
from mesh_tensorflow.transformer.attention.params import (
  AttentionParams,
  ExpertsAttentionParams,
  attention_params_simple,
)
from mesh_tensorflow.transformer.attention.prompts import (
  concat_hyper_prompts_kv,
  make_params_hyperprompt,
  make_params_mtlprompt,
)
from mesh_tensorflow.transformer.attention.sharding import (
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
