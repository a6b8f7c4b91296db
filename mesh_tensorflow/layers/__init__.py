"""Layers: functions of `mtf.Tensor`s that own variables, losses, masks and norms."""

from mesh_tensorflow.arguments import checking
from mesh_tensorflow.environment import autograph
from mesh_tensorflow.layers.attention import (
  dot_product_attention,
  multihead_attention,
  multihead_self_attention_memory_compressed,
)
from mesh_tensorflow.layers.attention_params import (
  multihead_attention_params,
  multihead_attention_vars,
)
from mesh_tensorflow.layers.clip_activation_gradient import (
  clip_activation_gradient,
  summary_for_clip_activation_gradient,
)
from mesh_tensorflow.layers.convolution import (
  conv1d,
  conv2d,
  conv2d_transpose,
  conv3d,
  conv3d_transpose,
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
from mesh_tensorflow.layers.local_attention import (
  masked_local_attention_1d,
  masked_local_attention_1d_incremental,
)
from mesh_tensorflow.layers.losses import (
  sigmoid_cross_entropy_with_logits,
  softmax_cross_entropy_with_logits,
  weights_nonzero,
)
from mesh_tensorflow.layers.masks import (
  attention_bias_local_2d_block,
  attention_bias_local_block,
  attention_mask_autoregressive,
  attention_mask_ignore_padding,
  attention_mask_same_segment,
  rename_length_to_memory_length,
)
from mesh_tensorflow.layers.noise import annealed_dropout, multiplicative_jitter
from mesh_tensorflow.layers.norm import batch_norm, layer_norm
from mesh_tensorflow.layers.pooling import avg_pool2d, avg_pool3d, max_pool2d, max_pool3d
from mesh_tensorflow.layers.reversible import reversible_half_residual_and_swap
from mesh_tensorflow.layers.scaling import unit_scaling_convention, us_einsum
from mesh_tensorflow.layers.separable_conv import (
  _depthwise_conv1d_hack as _depthwise_conv1d_hack,  # Used by clients.
)
from mesh_tensorflow.layers.separable_conv import separable_conv1d
from mesh_tensorflow.layers.spatial_attention import (
  local_1d_halo_exchange,
  local_2d_halo_exchange,
  local_2d_self_attention_spatial_blocks,
  local_self_attention_spatial_blocks,
)
from mesh_tensorflow.layers.spatial_convolution import (
  conv2d_transpose_with_blocks,
  conv2d_with_blocks,
  conv3d_transpose_with_blocks,
  conv3d_with_blocks,
)
from mesh_tensorflow.layers.statistics import compress_mean, corr
from mesh_tensorflow.operations.norms import rms_normalize, standardize

checking.check_functions(globals())
autograph.exempt(globals())

__all__ = [
  "DenseInitializer",
  "VarianceScalingInitializer",
  "annealed_dropout",
  "attention_bias_local_2d_block",
  "attention_bias_local_block",
  "attention_mask_autoregressive",
  "attention_mask_ignore_padding",
  "attention_mask_same_segment",
  "avg_pool2d",
  "avg_pool3d",
  "batch_norm",
  "clip_activation_gradient",
  "compress_mean",
  "conv1d",
  "conv2d",
  "conv2d_transpose",
  "conv2d_transpose_with_blocks",
  "conv2d_with_blocks",
  "conv3d",
  "conv3d_transpose",
  "conv3d_transpose_with_blocks",
  "conv3d_with_blocks",
  "corr",
  "dense",
  "dense_product",
  "dense_relu_dense",
  "dot_product_attention",
  "embedding",
  "embedding_weights",
  "get_dense_kernel_weights",
  "layer_norm",
  "local_1d_halo_exchange",
  "local_2d_halo_exchange",
  "local_2d_self_attention_spatial_blocks",
  "local_self_attention_spatial_blocks",
  "masked_local_attention_1d",
  "masked_local_attention_1d_incremental",
  "max_pool2d",
  "max_pool3d",
  "multihead_attention",
  "multihead_attention_params",
  "multihead_attention_vars",
  "multihead_encdec_attention_incremental",
  "multihead_self_attention_incremental",
  "multihead_self_attention_memory_compressed",
  "multiplicative_jitter",
  "rename_length_to_memory_length",
  "reversible_half_residual_and_swap",
  "separable_conv1d",
  "rms_normalize",
  "sigmoid_cross_entropy_with_logits",
  "softmax_cross_entropy_with_logits",
  "standardize",
  "summary_for_clip_activation_gradient",
  "unit_scaling_convention",
  "us_einsum",
  "weights_nonzero",
]
