"""The Transformer models, under one name: `mesh_tensorflow.transformer.transformer`."""

from mesh_tensorflow.transformer.model.bitransformer import Bitransformer, make_bitransformer
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer
from mesh_tensorflow.transformer.model.dropout import dropout_broadcast_dims
from mesh_tensorflow.transformer.model.layer_stack import (
  LayerStack,
  ReversibleLayerStack,
  make_layer_stack,
)
from mesh_tensorflow.transformer.model.sequence_utils import (
  autoregressive_inputs,
  delimited_lm_inputs_mask,
  shift_targets,
  sinusoid_positional_embedding_weights,
)
from mesh_tensorflow.transformer.model.sequence_utils import (
  round_up_to_multiple as _round_up_to_multiple,
)
from mesh_tensorflow.transformer.model.student_teacher import (
  StudentTeacher,
  make_bi_student_teacher,
)
from mesh_tensorflow.transformer.model.sublayers import (
  sublayer_annealed_dropout,
  sublayer_call_layer,
  sublayer_clip_activation_gradient,
  sublayer_dropout,
  sublayer_legacy_dropout,
  sublayer_legacy_final_rms_norm,
  sublayer_legacy_rms_norm,
  sublayer_mask_padding,
  sublayer_output_rms_norm,
  sublayer_residual,
  sublayer_rezero,
  sublayer_rms_norm,
  sublayer_rms_norm_subsampled,
  sublayer_scale_norm,
  sublayer_scaled_residual,
  sublayer_true_layer_norm,
)
from mesh_tensorflow.transformer.model.token_loss import MultiTokenPrediction
from mesh_tensorflow.transformer.model.unitransformer import Unitransformer
from mesh_tensorflow.transformer.model.vocab_embedding import (
  VocabEmbedding,
  get_vocab_embedding_cls,
  reduce_ensemble_logits,
  reduce_ensemble_logits_mean_logit,
  reduce_ensemble_logits_mean_prob,
  reduce_ensemble_logits_select,
)

__all__ = [
  "Bitransformer",
  "Context",
  "LayerStack",
  "MultiTokenPrediction",
  "ReversibleLayerStack",
  "StudentTeacher",
  "TransformerLayer",
  "Unitransformer",
  "VocabEmbedding",
  "_round_up_to_multiple",
  "autoregressive_inputs",
  "delimited_lm_inputs_mask",
  "dropout_broadcast_dims",
  "get_vocab_embedding_cls",
  "make_bi_student_teacher",
  "make_bitransformer",
  "make_layer_stack",
  "reduce_ensemble_logits",
  "reduce_ensemble_logits_mean_logit",
  "reduce_ensemble_logits_mean_prob",
  "reduce_ensemble_logits_select",
  "shift_targets",
  "sinusoid_positional_embedding_weights",
  "sublayer_annealed_dropout",
  "sublayer_call_layer",
  "sublayer_clip_activation_gradient",
  "sublayer_dropout",
  "sublayer_legacy_dropout",
  "sublayer_legacy_final_rms_norm",
  "sublayer_legacy_rms_norm",
  "sublayer_mask_padding",
  "sublayer_output_rms_norm",
  "sublayer_residual",
  "sublayer_rezero",
  "sublayer_rms_norm",
  "sublayer_rms_norm_subsampled",
  "sublayer_scale_norm",
  "sublayer_scaled_residual",
  "sublayer_true_layer_norm",
]
