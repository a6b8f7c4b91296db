"""`tpu_mesh`: finds a TPU and makes meshes of its cores, from `mesh_tensorflow.meshes.tpu`."""

from mesh_tensorflow.meshes.tpu.mesh import (
  TilingSpec,
  Tpu,
  connect,
  device_assignment,
  make_mesh_impl,
  physical_coordinates,
)

__all__ = [
  "TilingSpec",
  "Tpu",
  "connect",
  "device_assignment",
  "make_mesh_impl",
  "physical_coordinates",
]
