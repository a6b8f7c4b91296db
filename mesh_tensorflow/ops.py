"""Every operation and name of the language, flat: `mesh_tensorflow.ops`.

A family of operations is a file of `operations`; what stands in its `__all__` is public by its line
here.
"""

from mesh_tensorflow import removed_names
from mesh_tensorflow.arguments import checking
from mesh_tensorflow.environment import autograph
from mesh_tensorflow.errors import *  # noqa: F403
from mesh_tensorflow.meshes.devices import parallel, transpose_list_of_lists
from mesh_tensorflow.meshes.laid_out import (
  LazyAllreduceSum,
  LazyLaidOutTensor,
  compatible_lazy_allreduce_sums,
  convert_args_to_laid_out_tensors,
)
from mesh_tensorflow.meshes.layout import (
  LayoutRules,
  TensorLayout,
  convert_to_layout_rules,
  tensor_dim_to_mesh_dim_size,
  tensor_dim_to_size_per_split,
)
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.processors import (
  pnum_to_group,
  pnum_to_processor_coordinates,
  pnum_to_processor_coordinates_nd,
  processor_coordinates_to_pnum,
  processor_coordinates_to_pnum_map_nd,
  processor_groups,
)
from mesh_tensorflow.operations import extremes  # noqa: F401 - it adds gradients
from mesh_tensorflow.operations.assignments import *
from mesh_tensorflow.operations.binary import *
from mesh_tensorflow.operations.broadcasting import *
from mesh_tensorflow.operations.comparison import *
from mesh_tensorflow.operations.constants import *
from mesh_tensorflow.operations.control import *
from mesh_tensorflow.operations.convolution import (
  Conv2dOperation,
  Conv2dTransposeOperation,
  Conv3dOperation,
  Conv3dTransposeOperation,
)
from mesh_tensorflow.operations.convolution_gradients import (
  Conv2or3dBackpropFilterOperation,
  Conv2or3dBackpropInputOperation,
  conv2d_backprop_filter,
  conv2d_backprop_input,
  conv2d_transpose_backprop_filter,
  conv2d_transpose_backprop_input,
  conv3d_backprop_filter,
  conv3d_backprop_input,
  conv3d_transpose_backprop_filter,
  conv3d_transpose_backprop_input,
)
from mesh_tensorflow.operations.custom_gradient import *
from mesh_tensorflow.operations.einsum import *
from mesh_tensorflow.operations.elementwise import *
from mesh_tensorflow.operations.gradients import *
from mesh_tensorflow.operations.indexing import *
from mesh_tensorflow.operations.loops import *
from mesh_tensorflow.operations.microbatches import *
from mesh_tensorflow.operations.one_hot import *
from mesh_tensorflow.operations.pooling import *
from mesh_tensorflow.operations.random import *
from mesh_tensorflow.operations.ranges import *
from mesh_tensorflow.operations.reduction import *
from mesh_tensorflow.operations.reshape import *
from mesh_tensorflow.operations.scalar import *
from mesh_tensorflow.operations.shift import *
from mesh_tensorflow.operations.slicewise import *
from mesh_tensorflow.operations.slicing import *
from mesh_tensorflow.operations.softmax import *
from mesh_tensorflow.operations.stacked_variable import *
from mesh_tensorflow.operations.stacking import *
from mesh_tensorflow.operations.top_k import *
from mesh_tensorflow.operations.variables import *
from mesh_tensorflow.operations.where import *
from mesh_tensorflow.program.dimensions import (
  Dimension,
  Shape,
  anonymous_shape,
  combined_dimension,
  convert_to_dimension,
  convert_to_shape,
  is_subsequence,
  list_product,
  verify_no_new_dims,
)
from mesh_tensorflow.program.graph import Graph, Mesh, Operation, Tensor
from mesh_tensorflow.program.scope import get_variable_scope, variable_scope
from mesh_tensorflow.running.hooks import MtfCheckpointSaverListener, MtfRestoreHook
from mesh_tensorflow.running.lowering import Lowering
from mesh_tensorflow.running.report import log_variable_sizes, pretty_print_counters

# They take slices of variables, and are compared by identity.
_OF_SLICES = ("assign_slice", "assign_add_slice", "assign_sub_slice")
checking.check_functions(globals(), left_alone=_OF_SLICES)
autograph.exempt(globals(), left_alone=_OF_SLICES)

__all__ = [n for n, value in [*globals().items()] if callable(value) and not n.startswith("_")]
__getattr__ = removed_names.attribute_hook(__name__)
