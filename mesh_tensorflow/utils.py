"""A name of the archived package: summaries, variable placement and topologies of TPUs."""

from mesh_tensorflow.meshes.topology import topology_rank
from mesh_tensorflow.meshes.variable_placer import BalancedVariablePlacer
from mesh_tensorflow.running.host_call import (
  SCALAR_SUMMARIES_COLLECTION_KEY,
  create_host_call,
  outside_all_rewrites,
  remove_summaries,
)

__all__ = [
  "SCALAR_SUMMARIES_COLLECTION_KEY",
  "BalancedVariablePlacer",
  "create_host_call",
  "outside_all_rewrites",
  "remove_summaries",
  "topology_rank",
]
