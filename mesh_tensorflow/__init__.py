"""Mesh TensorFlow: named-dimension tensor programs, split over a mesh of devices."""

from mesh_tensorflow import quiet  # noqa: F401, I001 - before anything imports TensorFlow

from mesh_tensorflow import (
  beam_search,
  initializers,
  layers,
  ops,
  optimize,
  placement_mesh_impl,
  removed_names,
  simd_mesh_impl,
  tpu_variables,
  utils,
)
from mesh_tensorflow.describe import Report, describe
from mesh_tensorflow.function import Function, TensorSpec, function
from mesh_tensorflow.ops_with_redefined_builtins import *  # noqa: F403
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl
from mesh_tensorflow.store import StoredVariable, VariableStore
from mesh_tensorflow.tpu_mesh_impl import StrategyMeshImpl
from mesh_tensorflow.virtual_devices import virtual_cpu_devices

__getattr__ = removed_names.attribute_hook(__name__)
