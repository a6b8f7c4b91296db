"""Attention functions, under one name: `mesh_tensorflow.transformer.attention`."""

from mesh_tensorflow.transformer.model.attention import (
  AttentionParams,
  ExpertsAttentionParams,
  attention,
  attention_params_simple,
  concat_hyper_prompts_kv,
  hybrid_attention,
  local_attention_1d,
  make_params_hyperprompt,
  make_params_mtlprompt,
  maybe_reshape_attention_input_for_2d_sharding,
  synthetic_attention,
  visibility_mask_to_attention_bias,
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
