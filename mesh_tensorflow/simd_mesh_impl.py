"""A name of the archived package, for `meshes.simd.mesh_impl` and `meshes.topology`."""

from mesh_tensorflow.meshes.simd.mesh_impl import SimdMeshImpl
from mesh_tensorflow.meshes.topology import (
  HierarchicalTiling,
  _logical_1d_to_physical_subspace_auto,
  _logical_to_physical_v1,
  _ring_2d,
  auto_logical_to_physical_tpu,
  physical_shape_3d_from_topology_proto_4d,
)

__all__ = [
  "HierarchicalTiling",
  "SimdMeshImpl",
  "_logical_1d_to_physical_subspace_auto",
  "_logical_to_physical_v1",
  "_ring_2d",
  "auto_logical_to_physical_tpu",
  "physical_shape_3d_from_topology_proto_4d",
]
