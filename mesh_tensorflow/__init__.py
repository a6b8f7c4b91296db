"""Mesh TensorFlow: named-dimension tensor programs, split over a mesh of devices.

What a program needs is right here, as `mtf.einsum`, `mtf.Lowering` or `mtf.function`. The rooms:

    program       a program before any layout: dimensions, graphs, operations, tensors
    operations    one file for each family; `ops` has all their names
    layers, optimize, decoding, sparse   what is made of them
    meshes        layouts, slices of tensors and of variables; the three implementations of a mesh,
                  `placement`, `simd` and `tpu`, and their `collectives`
    workers       several processes as one mesh
    running       from a program and a layout to TensorFlow: `mtf.Lowering`, `mtf.function`;
                  operations that run when they are made: `mtf.eager`
    importing     models of TensorFlow and Keras on named dimensions: `mtf.from_tensorflow`
    planning      what a layout matches and costs: `mtf.describe`, and the best: `mtf.auto_layout`
    auto_mtf      the archived package's search for a layout, by memory alone
    checkpoint    state that survives
    training      the training loop around a program: signals, saving, reports
    numerics, arguments, environment   plain TensorFlow, checks of arguments, the process
    transformer   a gin-configured Transformer, on top of all this
    bert          BERT and its programs, on top of that

Files beside the rooms, but for errors and versions, are module names of the archived package.
"""

from mesh_tensorflow.environment import start  # noqa: F401, I001 - before anything imports TensorFlow

import typing as _typing

from mesh_tensorflow import (
  auto_mtf,
  beam_search,
  initializers,
  layers,
  ops,
  optimize,
  placement_mesh_impl,
  removed_names,
  simd_mesh_impl,
  sparse,
  tpu_variables,
  utils,
)
from mesh_tensorflow.importing.imported import Imported as Imported
from mesh_tensorflow.importing.imported import from_tensorflow as from_tensorflow
from mesh_tensorflow.running.eager_session import eager as eager
from mesh_tensorflow.running.eager_tensor import EagerTensor as EagerTensor
from mesh_tensorflow.planning.auto_layout import LayoutChoice as LayoutChoice
from mesh_tensorflow.planning.auto_layout import auto_layout as auto_layout
from mesh_tensorflow.planning.describe import Report as Report
from mesh_tensorflow.planning.describe import describe as describe
from mesh_tensorflow.running.function import Function as Function
from mesh_tensorflow.running.function import TensorSpec as TensorSpec
from mesh_tensorflow.running.function import function as function
from mesh_tensorflow.ops_with_redefined_builtins import *  # noqa: F403
from mesh_tensorflow.meshes.placement.mesh_impl import PlacementMeshImpl as PlacementMeshImpl
from mesh_tensorflow.meshes.simd.mesh_impl import SimdMeshImpl as SimdMeshImpl
from mesh_tensorflow.meshes.store import StoredVariable as StoredVariable
from mesh_tensorflow.meshes.store import VariableStore as VariableStore
from mesh_tensorflow.meshes.tpu.mesh_impl import StrategyMeshImpl as StrategyMeshImpl
from mesh_tensorflow.training.trainer import Trainer as Trainer
from mesh_tensorflow.version import __version__ as __version__
from mesh_tensorflow.environment.virtual_devices import virtual_cpu_devices as virtual_cpu_devices

# Packages that are imported when they are asked for first.
_LATE = ("bert", "checkpoint", "keras", "transformer")

if _typing.TYPE_CHECKING:
  from mesh_tensorflow import bert as bert
  from mesh_tensorflow import checkpoint as checkpoint
  from mesh_tensorflow import keras as keras
  from mesh_tensorflow import transformer as transformer
else:  # A type checker would take every name for one that is there.
  __getattr__ = removed_names.attribute_hook(__name__, late=_LATE)


# What programs need, for who looks around: `dir(mtf)` and completion. All else of the API is
# reachable, too, and in the reference.
_FACE = """
  Dimension Shape LayoutRules Graph Mesh Tensor Variable VariableDType Operation
  Lowering MeshImpl PlacementMeshImpl SimdMeshImpl StrategyMeshImpl VariableStore
  function TensorSpec Trainer eager describe auto_layout from_tensorflow virtual_cpu_devices
  get_variable variable_scope import_tf_tensor gradients recompute_grad stop_gradient
  reshard stage serialize_training_step
  slicewise cwise einsum reshape transpose rename_dimension cast slice split concat stack unstack
  pad gather one_hot where while_loop cond reduce_sum reduce_mean reduce_max add multiply square
  softmax relu dropout constant zeros ones range random_uniform random_normal
  layers optimize initializers keras sparse checkpoint planning beam_search transformer bert errors
""".split()


def __dir__() -> list[str]:
  return sorted([*_FACE, "__version__"])
