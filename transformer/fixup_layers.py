"""Fixup: layers that start so that deep stacks train without norms.

Zhang, Dauphin and Ma, 2019: "Fixup Initialization" (arXiv:1901.09321).
"""

from mesh_tensorflow.transformer.model.layers.fixup import (
  DenseReluDenseFixup,
  dense_product_fixup,
  get_single_scalar_bias,
  sublayer_fixup_scale,
  sublayer_fixup_shift,
)
from mesh_tensorflow.transformer.model.layers.fixup_attention import (
  AttentionParamsFixup,
  EncDecAttentionFixup,
  SelfAttentionFixup,
)

__all__ = [
  "AttentionParamsFixup",
  "DenseReluDenseFixup",
  "EncDecAttentionFixup",
  "SelfAttentionFixup",
  "dense_product_fixup",
  "get_single_scalar_bias",
  "sublayer_fixup_scale",
  "sublayer_fixup_shift",
]
