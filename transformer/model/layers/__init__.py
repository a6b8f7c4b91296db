"""The layers of a Transformer, one file each; `transformer_layers.py` has the old names.

Attention functions, masks, position biases and variables of attention are in `attention`.

To add one, copy `dense_relu_dense.py` and name the file below: gin knows a layer when its file is
imported. Norm, dropout and residual are not a layer's: see `model/sublayers.py`.
"""

from mesh_tensorflow.transformer.model.layers import (
  attention_kinds,
  conv_layers,
  dense_relu_dense,
  enc_dec_attention,
  evolved_transformer,
  grouped_query_attention,
  local_conv_attention,
  parallel_layer,
  product_key_memory,
  rotary,
  self_attention,
)
