"""Experts of several sizes, under the old name: `mesh_tensorflow.transformer.heterogeneous_moe`."""

from mesh_tensorflow.transformer.model.moe.heterogeneous import (
  HeterogeneousMoE1D,
  generate_heterogeneous_expert_masks,
  transformer_moe_layer_v1,
)

__all__ = [
  "HeterogeneousMoE1D",
  "generate_heterogeneous_expert_masks",
  "transformer_moe_layer_v1",
]
