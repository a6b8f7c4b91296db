"""Universal Transformer: the same layers again and again (Dehghani et al., 2018; 1807.03819)."""

from mesh_tensorflow.transformer.model.universal_stack import UTLayerStack

__all__ = ["UTLayerStack"]
