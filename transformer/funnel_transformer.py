"""The Funnel-Transformer, under its old name: `mesh_tensorflow.transformer.funnel_transformer`."""

from mesh_tensorflow.transformer.model.funnel_transformer import (
  BitransformerFunnel,
  FunnelTransformerLayerStack,
)

__all__ = ["BitransformerFunnel", "FunnelTransformerLayerStack"]
