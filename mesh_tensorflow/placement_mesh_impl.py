"""A name of the archived package for `mesh_tensorflow.meshes.placement`."""

from mesh_tensorflow.meshes.placement.collectives import (
  allconcat_ring,
  allreduce_ring,
  allreduce_ring_single_shard,
  alltoall_pointtwise,
  alltoall_ring,
)
from mesh_tensorflow.meshes.placement.mesh_impl import PlacementMeshImpl

__all__ = [
  "PlacementMeshImpl",
  "allconcat_ring",
  "allreduce_ring",
  "allreduce_ring_single_shard",
  "alltoall_pointtwise",
  "alltoall_ring",
]
