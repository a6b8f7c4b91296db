"""The layers of a Transformer, one file each; `transformer_layers.py` has the old names.

    attention_bias, model_attention_params, relative_position   what layers of attention share

To add one, copy `dense_relu_dense.py` and name the file below: gin knows a layer when its file is
imported. Norm, dropout and residual are not a layer's: see `models/sublayers.py`.
"""

from mesh_tensorflow.transformer.layers import (
  branched_attention,
  conv_layers,
  dense_relu_dense,
  enc_dec_attention,
  evolved_transformer,
  experts_attention,
  general_bilinear,
  grouped_query_attention,
  local_conv_attention,
  local_self_attention,
  parallel_layer,
  product_key_memory,
  rotary,
  self_attention,
  synthesizer,
  talking_heads,
  transparent_attention,
)
