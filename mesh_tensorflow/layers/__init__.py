"""Layers: functions of `mtf.Tensor`s that own variables, losses, masks and norms."""

from mesh_tensorflow import autograph
from mesh_tensorflow.layers.attention import (
  dot_product_attention,
  multihead_attention,
  multihead_self_attention_memory_compressed,
)
from mesh_tensorflow.layers.attention_params import (
  multihead_attention_params,
  multihead_attention_vars,
)
from mesh_tensorflow.layers.dense import (
  dense,
  dense_product,
  dense_relu_dense,
  get_dense_kernel_weights,
)
from mesh_tensorflow.layers.dense_initializers import (
  DenseInitializer,
  VarianceScalingInitializer,
)
from mesh_tensorflow.layers.embedding import embedding, embedding_weights
from mesh_tensorflow.layers.incremental_attention import (
  multihead_encdec_attention_incremental,
  multihead_self_attention_incremental,
)
from mesh_tensorflow.layers.losses import (
  sigmoid_cross_entropy_with_logits,
  softmax_cross_entropy_with_logits,
  weights_nonzero,
)
from mesh_tensorflow.layers.masks import (
  attention_bias_local_block,
  attention_mask_autoregressive,
  attention_mask_ignore_padding,
  attention_mask_same_segment,
  rename_length_to_memory_length,
)
from mesh_tensorflow.layers.noise import annealed_dropout, multiplicative_jitter
from mesh_tensorflow.layers.norm import batch_norm, layer_norm
from mesh_tensorflow.layers.scaling import unit_scaling_convention, us_einsum
from mesh_tensorflow.layers.standardize import standardize
from mesh_tensorflow.layers.statistics import compress_mean, corr

autograph.exempt(globals())

__all__ = [
  "DenseInitializer",
  "VarianceScalingInitializer",
  "annealed_dropout",
  "attention_bias_local_block",
  "attention_mask_autoregressive",
  "attention_mask_ignore_padding",
  "attention_mask_same_segment",
  "batch_norm",
  "compress_mean",
  "corr",
  "dense",
  "dense_product",
  "dense_relu_dense",
  "dot_product_attention",
  "embedding",
  "embedding_weights",
  "get_dense_kernel_weights",
  "layer_norm",
  "multihead_attention",
  "multihead_attention_params",
  "multihead_attention_vars",
  "multihead_encdec_attention_incremental",
  "multihead_self_attention_incremental",
  "multihead_self_attention_memory_compressed",
  "multiplicative_jitter",
  "rename_length_to_memory_length",
  "sigmoid_cross_entropy_with_logits",
  "softmax_cross_entropy_with_logits",
  "standardize",
  "unit_scaling_convention",
  "us_einsum",
  "weights_nonzero",
]
