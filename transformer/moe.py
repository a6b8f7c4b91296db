"""Mixtures of experts, under one name: `mesh_tensorflow.transformer.moe`."""

from mesh_tensorflow.transformer.model.moe.groups import split_into_groups as _split_into_groups
from mesh_tensorflow.transformer.model.moe.hierarchical import MoE2D, transformer_moe_layer_v2
from mesh_tensorflow.transformer.model.moe.hparams import HParams, set_default_moe_hparams
from mesh_tensorflow.transformer.model.moe.layer import MoE1D, transformer_moe_layer_v1
from mesh_tensorflow.transformer.model.moe.router import (
  _expert_selection_gating,
  _ntlb_gating,
  _switch_gating,
  _switch_max_gating,
  _top_2_gating,
  _top_n_gating,
)
from mesh_tensorflow.transformer.model.moe.router import router_z_loss as _router_z_loss

__all__ = [
  "HParams",
  "MoE1D",
  "MoE2D",
  "_expert_selection_gating",
  "_ntlb_gating",
  "_router_z_loss",
  "_split_into_groups",
  "_switch_gating",
  "_switch_max_gating",
  "_top_2_gating",
  "_top_n_gating",
  "set_default_moe_hparams",
  "transformer_moe_layer_v1",
  "transformer_moe_layer_v2",
]
