"""The product-key memory, under its old name: `mesh_tensorflow.transformer.memory_layers`."""

from mesh_tensorflow.transformer.model.layers.product_key_memory import ProductKeyValueMemory

__all__ = ["ProductKeyValueMemory"]
