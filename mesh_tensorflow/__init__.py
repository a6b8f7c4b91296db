"""Mesh TensorFlow: named-dimension tensor programs, split over a mesh of devices.

What a program needs is right here, as `mtf.einsum`, `mtf.Lowering` or `mtf.function`. The rooms:

    dimensions, layout, processors   names and sizes, what is split over which axis of a mesh
    graph, tensor, operation         a program before it has a layout
    operations, layers, optimize     what it is made of; `ops` has the names of all operations
    mesh_impl, laid_out, store       what a mesh can do, slices of tensors, and of variables
    placement_mesh_impl, simd_mesh_impl, tpu_mesh_impl, with collectives, simd, tpu
    lowering, function               from a program and a layout to TensorFlow
    planning                         what a layout matches and costs: `mtf.describe`
    checkpoint, workers              state that survives, several processes
    transformer                      a gin-configured Transformer, on top of all this
"""

from mesh_tensorflow import start  # noqa: F401, I001 - before anything imports TensorFlow

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
from mesh_tensorflow.planning.describe import Report, describe
from mesh_tensorflow.function import Function, TensorSpec, function
from mesh_tensorflow.ops_with_redefined_builtins import *  # noqa: F403
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl
from mesh_tensorflow.store import StoredVariable, VariableStore
from mesh_tensorflow.tpu_mesh_impl import StrategyMeshImpl
from mesh_tensorflow.version import __version__
from mesh_tensorflow.virtual_devices import virtual_cpu_devices

__getattr__ = removed_names.attribute_hook(__name__)
