"""Mesh TensorFlow: named-dimension tensor programs, split over a mesh of devices."""
from mesh_tensorflow import initializers, ops, placement_mesh_impl
import importlib as _i
for _m in ("layers", "optimize", "simd_mesh_impl"):  # TEMPORARY while the modules are being written
  try:
    globals()[_m] = _i.import_module("mesh_tensorflow." + _m)
  except ModuleNotFoundError as _e:
    if not _e.name.startswith("mesh_tensorflow"): raise
from mesh_tensorflow.function import Function, TensorSpec, function
from mesh_tensorflow.ops_with_redefined_builtins import *
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.store import StoredVariable, VariableStore
