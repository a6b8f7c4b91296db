"""The layers of the Evolved Transformer: `mesh_tensorflow.transformer.evolved_transformer`."""

from mesh_tensorflow.transformer.model.layers.evolved_transformer import (
  DecoderAttentionLayer,
  DecoderConvolutionalLayer,
  EncoderConvolutionalLayer,
  GatedLinearUnitLayer,
)

__all__ = [
  "DecoderAttentionLayer",
  "DecoderConvolutionalLayer",
  "EncoderConvolutionalLayer",
  "GatedLinearUnitLayer",
]
