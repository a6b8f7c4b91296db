"""Every operation and name of the language, flat: `mesh_tensorflow.ops`."""

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
from mesh_tensorflow.operations.assignments import (
  Assign,
  Depend,
  assign,
  assign_add,
  assign_add_slice,
  assign_slice,
  assign_sub,
  assign_sub_slice,
  depend,
)
from mesh_tensorflow.operations.binary import (
  AddOperation,
  MinMaxOperation,
  add,
  add_n,
  divide,
  floordiv,
  maximum,
  minimum,
  mod,
  multiply,
  sub,
)
from mesh_tensorflow.operations.broadcasting import (
  BinaryOpWithBroadcasting,
  binary_arguments_to_tensors,
  binary_op_with_broadcasting,
)
from mesh_tensorflow.operations.comparison import (
  equal,
  greater,
  greater_equal,
  less,
  less_equal,
  logical_and,
  logical_or,
  not_equal,
)
from mesh_tensorflow.operations.constants import (
  Constant,
  ImportLaidOutTensorOperation,
  ImportOperation,
  constant,
  import_laid_out_tensor,
  import_tf_tensor,
  ones,
  ones_like,
  zeros,
  zeros_like,
)
from mesh_tensorflow.operations.control import (
  Print,
  PrintOperation,
  ScalarSummaryOperation,
  StopGradient,
  scalar_summary,
  stop_gradient,
)
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
from mesh_tensorflow.operations.custom_gradient import (
  CustomGradientOperation,
  custom_gradient,
  recompute_grad,
)
from mesh_tensorflow.operations.einsum import EinsumOperation, einsum, matmul, transpose
from mesh_tensorflow.operations.elementwise import (
  cast,
  cos,
  elu,
  exp,
  gelu,
  identity,
  leaky_relu,
  log,
  logical_not,
  mtf_abs,
  mtf_pow,
  negative,
  reciprocal,
  relu,
  rsqrt,
  selu,
  sigmoid,
  sign,
  sin,
  softplus,
  sqrt,
  square,
  squared_relu,
  swish,
  tanh,
  to_bfloat16,
  to_float,
  to_int32,
)
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.operations.indexing import (
  OneHotOperation,
  gather,
  one_hot,
  pool_tensor_1d,
  reduce_first,
  stride_tensor_1d,
)
from mesh_tensorflow.operations.loops import WhileLoopOperation, while_loop
from mesh_tensorflow.operations.microbatches import serialize_training_step
from mesh_tensorflow.operations.pooling import (
  PoolBackPropOperation,
  PoolOperation,
  pool_backprop,
  pool_fn,
)
from mesh_tensorflow.operations.random import (
  RandomOperation,
  dropout,
  random_normal,
  random_uniform,
  sample_with_temperature,
)
from mesh_tensorflow.operations.ranges import RangeOperation, cumsum, mtf_range
from mesh_tensorflow.operations.reduction import (
  BroadcastOperation,
  ReduceOperation,
  binary_reduction_fn,
  broadcast,
  reduce_all,
  reduce_any,
  reduce_max,
  reduce_mean,
  reduce_min,
  reduce_sum,
  reduction_fn,
)
from mesh_tensorflow.operations.reshape import (
  ReshapeOperation,
  anonymize,
  import_fully_replicated,
  rename_dimension,
  replace_dimensions,
  reshape,
)
from mesh_tensorflow.operations.scalar import ScalarAddOperation, ScalarMultiplyOperation
from mesh_tensorflow.operations.shift import (
  ShiftOperation,
  dynamic_shift,
  halo_exchange,
  left_halo_exchange,
  shift,
)
from mesh_tensorflow.operations.slicewise import (
  GenericGradOperation,
  SlicewiseOperation,
  cwise,
  slicewise,
)
from mesh_tensorflow.operations.slicing import (
  ConcatOperation,
  PadOperation,
  SliceOperation,
  SplitOperation,
  StackOperation,
  UnstackOperation,
  concat,
  mtf_slice,
  pad,
  split,
  stack,
  unstack,
)
from mesh_tensorflow.operations.softmax import log_softmax, reduce_logsumexp, softmax
from mesh_tensorflow.operations.stacked_variable import StackedVariable
from mesh_tensorflow.operations.top_k import (
  TopKOperation,
  argmax,
  nth_largest_element,
  nth_smallest_element,
  top_1,
  top_k,
)
from mesh_tensorflow.operations.variables import (
  ReadVariable,
  Variable,
  VariableDType,
  get_variable,
  read_variable,
)
from mesh_tensorflow.operations.where import where
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

_OF_SLICES = ("assign_slice", "assign_add_slice", "assign_sub_slice")
checking.check_functions(globals(), left_alone=_OF_SLICES)
autograph.exempt(globals(), left_alone=_OF_SLICES)

_MODULES = ("checking", "extremes", "autograph", "removed_names")
__all__ = [name for name in dir() if not name.startswith("_") and name not in _MODULES]
__getattr__ = removed_names.attribute_hook(__name__)
