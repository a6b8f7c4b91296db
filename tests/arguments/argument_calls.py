"""One valid call of every public function, class and method of the language, by name.

Of each call the arguments are then replaced, one at a time, by wrong ones: wrong_arguments.py.
A name of the package that is neither here nor in `NOT_CALLED` makes the test fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers, optimize

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)
N, D, H, W = (
  mtf.Dimension("n", 2),
  mtf.Dimension("d", 4),
  mtf.Dimension("h", 4),
  mtf.Dimension("w", 4),
)
HEADS, KV, MEM = mtf.Dimension("heads", 2), mtf.Dimension("kv", 3), mtf.Dimension("memory", 4)
BH, BW = mtf.Dimension("blocks_h", 2), mtf.Dimension("blocks_w", 2)
MH, MW = mtf.Dimension("memory_h", 4), mtf.Dimension("memory_w", 4)
BEAM, LEN, VOCAB = mtf.Dimension("beam", 2), mtf.Dimension("length", 4), mtf.Dimension("vocab", 8)
F32 = tf.float32
VAR_DTYPE = mtf.VariableDType(tf.float32)


class World:
  """A graph, and tensors on it that are made when they are asked for."""

  def __init__(self):
    self.graph = mtf.Graph()
    self.mesh = mtf.Mesh(self.graph, "world")

  def of(self, *dims: mtf.Dimension, dtype: Any = tf.float32) -> mtf.Tensor:
    """A tensor of zeros (false)."""
    return mtf.import_tf_tensor(
      self.mesh, np.zeros([d.size for d in dims], dtype.as_numpy_dtype), dims
    )

  @functools.cached_property
  def x(self) -> mtf.Tensor:
    """[a, b], floats."""
    return mtf.import_tf_tensor(self.mesh, np.ones([4, 8], np.float32), [A, B], name="x")

  @functools.cached_property
  def y(self) -> mtf.Tensor:
    """[b, c], floats."""
    return self.of(B, C)

  @functools.cached_property
  def i(self) -> mtf.Tensor:
    """[a], integers."""
    return self.of(A, dtype=tf.int32)

  @functools.cached_property
  def t(self) -> mtf.Tensor:
    """[a, b], bools."""
    return self.of(A, B, dtype=tf.bool)

  @functools.cached_property
  def one(self) -> mtf.Tensor:
    """A scalar integer."""
    return self.of(dtype=tf.int32)

  @functools.cached_property
  def v(self) -> mtf.Tensor:
    """[a, b], the value of a variable."""
    return mtf.get_variable(self.mesh, "v", [A, B], initializer=tf.zeros_initializer())

  @functools.cached_property
  def impl(self) -> mtf.MeshImpl:
    """One device."""
    return mesh_impl()

  @functools.cached_property
  def lowering(self) -> mtf.Lowering:
    """Of x."""
    _ = self.x
    return mtf.Lowering(self.graph, {self.mesh: self.impl})


def mesh_impl() -> mtf.MeshImpl:
  """A mesh of one device."""
  return mtf.PlacementMeshImpl("all:1", "", ["/device:CPU:0"])


Arguments = Callable[[World], dict[str, Any]]
CALLS: dict[str, Arguments] = {}


def call(names: str, **arguments: Any) -> None:
  """Registers a call of each of the functions; arguments that are functions take the `World`."""

  def make(k: World) -> dict[str, Any]:
    return {
      name: value.make(k) if isinstance(value, k_) else value for name, value in arguments.items()
    }

  for name in names.split():
    assert name not in CALLS, name
    CALLS[name] = make


class k_:  # noqa: N801
  """An argument that is made in the world of the call."""

  def __init__(self, make: Callable[[World], Any]):
    self.make = make


def of(*dims: mtf.Dimension, dtype: Any = tf.float32) -> k_:
  """A tensor of these dimensions."""
  return k_(lambda k: k.of(*dims, dtype=dtype))


X, Y, I, T = (k_(lambda k, n=n: getattr(k, n)) for n in "xyit")  # noqa: E741
MESH, ONE = k_(lambda k: k.mesh), k_(lambda k: k.one)
XX, XI = k_(lambda k: [k.x, k.x]), k_(lambda k: [k.x, k.i])
VARIABLE = k_(lambda k: k.v.operation)
INTS = functools.partial(of, dtype=tf.int32)

# ----------------------------------------------------------------- element-wise functions

call(
  "identity sin cos square sqrt rsqrt log exp sigmoid tanh negative reciprocal relu elu selu"
  " softplus sign to_float to_bfloat16 to_int32 mtf_abs swish gelu squared_relu stop_gradient"
  " anonymize",
  x=X,
)
call("logical_not", x=T)
call("leaky_relu", x=X, alpha=0.1)
call("cast", x=X, dtype=tf.int32)
call("mtf_pow", x=X, y=2.0)
call(
  "add sub multiply divide maximum minimum mod floordiv less greater less_equal greater_equal equal"
  " not_equal binary_arguments_to_tensors",
  x1=X,
  x2=X,
)
call("logical_and logical_or", x1=T, x2=T)
FIRST = lambda x, *others: tf.identity(x)  # noqa: E731
call("binary_op_with_broadcasting", tf_fn=FIRST, x1=X, x2=X)
call("where", condition=T, if_true=X, if_false=X)
call("cwise", tf_fn=FIRST, xs=XX)
call("slicewise", tf_fn=FIRST, xs=XX, splittable_dims=[A])
call("ones_like zeros_like", t=X)

# --------------------------------------------------------- reductions, shapes, contractions

call("reduce_sum reduce_max reduce_min reduce_mean", x=X, reduced_dim=B)
call("reduce_all reduce_any", x=T, reduced_dim=B)
call("reduce_first", tensor=X, reduced_dim=B)
call("reduction_fn binary_reduction_fn", reduction_fn_string="SUM")
call("softmax log_softmax reduce_logsumexp argmax top_1", x=X, reduced_dim=B)
call("nth_largest_element nth_smallest_element", x=X, n=1, reduced_dim=B)
call("top_k", x=X, reduced_dim=B, k_dim=("k", 2))
call("broadcast", x=X, new_shape=[A, B, C])
call("transpose reshape", x=X, new_shape=[B, A])
call("rename_dimension", x=X, old_name="a", new_name="z")
call(
  "replace_dimensions", tensor_or_shape=X, old_dim_or_dims=B, new_dim_or_dims=mtf.Dimension("z", 8)
)
call("einsum", xs=k_(lambda k: [k.x, k.y]), output_shape=[A, C])
call("matmul", a=X, b=Y, output_shape=[A, C])
call("add_n", xs=XX)
call("cumsum", x=X, dim=B)

# ------------------------------------------------------------------------ positions

call("concat", xs=XX, concat_dim_name="a")
call("stack", xs=XX, dim_name="z", axis=1)
call("unstack", x=X, dim=A)
call("split", x=X, split_dim=A, num_or_size_splits=2)
call("mtf_slice", x=X, begin=1, size=2, slice_dim_name="a")
call("pad", x=X, paddings=[1, 2], dim_name="a")
call("shift", x=X, offset=1, dim=B, wrap=False)
call("dynamic_shift", x=X, offset=ONE, dim=B, wrap=False)
call("halo_exchange left_halo_exchange", x=X, blocks_dim=A, block_size_dim=B, halo_size=2)
call("gather", weights=X, indices=INTS(C), dim=B)
call("one_hot", indices=I, output_dim=C)
call("stride_tensor_1d pool_tensor_1d", tensor=X, pool_dim=B)

# ------------------------------------------------- constants, variables, random, control

call("import_tf_tensor import_fully_replicated", mesh=MESH, tf_tensor=tf.ones([4]), shape=[A])
call(
  "import_laid_out_tensor",
  mesh=MESH,
  laid_out_tensor=k_(lambda k: k.impl.LaidOutTensor([tf.ones([4])])),
  shape=[A],
)
call("constant", mesh=MESH, value=1.0, shape=[A])
call("zeros ones random_uniform random_normal", mesh=MESH, shape=[A])
call("mtf_range", mesh=MESH, dim=A, dtype=tf.int32)
call("get_variable", mesh=MESH, name="w", shape=[A, B])
call("read_variable", var=VARIABLE)
call("variable_scope", name_or_scope="s", graph=k_(lambda k: k.graph))
call("get_variable_scope")
call("reshard Reshard", x=X, mesh=k_(lambda k: mtf.Mesh(k.graph, "moon")))
call("stage", mesh=MESH)
call("assign assign_add assign_sub", var=k_(lambda k: k.v), new_val=X)
call("depend", x=X, dependencies=k_(lambda k: [k.i]))
call("dropout", x=X, is_training=True, rate=0.5)
call("sample_with_temperature", logits=X, dim=B)
call("Print", x=X, data=k_(lambda k: [k.i]), message="m")
call("scalar_summary", name="s", x=k_(lambda k: mtf.reduce_sum(k.x)))
call("gradients", ys=k_(lambda k: [k.x * 2.0]), xs=k_(lambda k: [k.x]))
call(
  "custom_gradient",
  fn=lambda x: x * 2.0,
  grad_fn=lambda x, y, dy: [dy],
  explicit_inputs=k_(lambda k: [k.x]),
)
call("recompute_grad", fn=lambda x: x * 2.0, explicit_inputs=k_(lambda k: [k.x]))
call(
  "while_loop",
  cond_fn=lambda i, x: mtf.less(i, 2),
  body_fn=lambda i, x: [i + 1, x * 2.0],
  inputs=k_(lambda k: [k.one, k.x]),
)
call(
  "cond ConditionalOperation",
  pred=k_(lambda k: mtf.less(k.one, 2)),
  true_fn=k_(lambda k: functools.partial(mtf.square, k.x)),
  false_fn=k_(lambda k: functools.partial(mtf.negative, k.x)),
)
call(
  "serialize_training_step",
  features=k_(lambda k: {"x": k.x}),
  model_fn=k_(lambda k: lambda features: {"loss": mtf.reduce_sum(features["x"] * weight(k))}),
  batch_dim=A,
  num_splits=2,
)


def weight(k: World) -> mtf.Tensor:
  """A variable [b]."""
  return mtf.get_variable(k.mesh, "w", [B])


# ------------------------------------------------------------- convolutions and pooling

E = mtf.Dimension("e", 4)
IMAGE, VIDEO = of(N, H, W, D), of(N, E, H, W, D)
FH, FW, OUT = mtf.Dimension("fh", 3), mtf.Dimension("fw", 3), mtf.Dimension("out", 2)
FE = mtf.Dimension("fe", 3)
KERNEL, KERNEL3 = of(FH, FW, D, OUT), of(FE, FH, FW, D, OUT)
TKERNEL, TKERNEL3 = of(FH, FW, OUT, D), of(FE, FH, FW, OUT, D)
DY, DY3 = of(N, H, W, OUT), of(N, E, H, W, OUT)
SAME = dict(strides=[1, 1, 1, 1], padding="SAME")
SAME3 = dict(strides=[1, 1, 1, 1, 1], padding="SAME")
call("Conv2dOperation", conv_input=IMAGE, conv_filter=KERNEL, **SAME)
call("Conv3dOperation", conv_input=VIDEO, conv_filter=KERNEL3, **SAME3)
call("Conv2dTransposeOperation", conv_input=IMAGE, conv_filter=TKERNEL, **SAME)
call("Conv3dTransposeOperation", conv_input=VIDEO, conv_filter=TKERNEL3, **SAME3)
call(
  "conv2d_backprop_input",
  input_shape=[N, H, W, D],
  conv_filter=KERNEL,
  dy=DY,
  **SAME,
)
call("conv2d_backprop_filter", conv_input=IMAGE, filter_shape=[FH, FW, D, OUT], dy=DY, **SAME)
call(
  "conv2d_transpose_backprop_input",
  input_shape=[N, H, W, D],
  conv_filter=TKERNEL,
  dy=DY,
  **SAME,
)
call(
  "conv2d_transpose_backprop_filter",
  conv_input=IMAGE,
  filter_shape=[FH, FW, OUT, D],
  dy=DY,
  **SAME,
)
call("conv3d_backprop_input", input_shape=[N, E, H, W, D], conv_filter=KERNEL3, dy=DY3, **SAME3)
call("conv3d_backprop_filter", conv_input=VIDEO, filter_shape=[FE, FH, FW, D, OUT], dy=DY3, **SAME3)
call(
  "conv3d_transpose_backprop_input",
  input_shape=[N, E, H, W, D],
  conv_filter=TKERNEL3,
  dy=DY3,
  **SAME3,
)
call(
  "conv3d_transpose_backprop_filter",
  conv_input=VIDEO,
  filter_shape=[FE, FH, FW, OUT, D],
  dy=DY3,
  **SAME3,
)
BACK2 = dict(conv_dimension=2, is_transpose=False, dy=DY, **SAME)
call(
  "Conv2or3dBackpropInputOperation",
  input_shape=mtf.Shape([N, H, W, D]),
  conv_filter=KERNEL,
  **BACK2,
)
call(
  "Conv2or3dBackpropFilterOperation",
  conv_input=IMAGE,
  filter_shape=mtf.Shape([FH, FW, D, OUT]),
  **BACK2,
)
POOL = dict(ksize=[2, 2], strides=[2, 2], pool_fn_string="MAX_2D")
HALF = of(N, mtf.Dimension("h", 2), mtf.Dimension("w", 2), D)
call("pool_fn", pool_fn_string="MAX_2D")
call("PoolOperation", x=IMAGE, **POOL)
call("pool_backprop PoolBackPropOperation", x=IMAGE, y=HALF, dy=HALF, **POOL)

# ------------------------------------------------------------------ operation classes

AB, SCALAR = mtf.Shape([A, B]), mtf.Shape([])
call("Operation", inputs=k_(lambda k: [k.x]), name="op")
call("AddOperation", x1=X, x2=X, output_shape=AB)
call("BinaryOpWithBroadcasting", tf_fn=FIRST, x1=X, x2=X, output_shape=AB, output_dtype=F32)
call("MinMaxOperation", tf_fn=tf.minimum, x1=X, x2=X, output_shape=AB)
call("BroadcastOperation", x=X, output_shape=mtf.Shape([A, B, C]))
call("ReduceOperation", x=X, output_shape=mtf.Shape([A]), reduction_fn_string="SUM")
call("EinsumOperation", inputs=k_(lambda k: [k.x, k.y]), output_shape=mtf.Shape([A, C]))
call("ReshapeOperation", x=X, new_shape=mtf.Shape([B, A]))
call("ScalarAddOperation ScalarMultiplyOperation", x=X, scalar=2.0)
call("ScalarSummaryOperation", name="s", x=k_(lambda k: mtf.reduce_sum(k.x)))
call("StopGradient", x=X)
call("ConcatOperation", xs=XX, concat_dim_name="a")
call("StackOperation", xs=XX, dim_name="z", axis=0)
call("UnstackOperation", x=X, dim=A)
call("SplitOperation", x=X, split_dim=A, num_or_size_splits=2)
call("SliceOperation", x=X, begin=1, size=2, slice_dim_name="a")
call("PadOperation", x=X, paddings=[1, 2], pad_dim_name="a")
call("ShiftOperation", x=X, offset=1, dim=B, wrap=False)
call("TopKOperation", x=X, reduced_dim=B, k_dim=("k", 2))
call("OneHotOperation", indices=I, output_dim=C, on_value=1.0, off_value=0.0, dtype=F32)
call("RangeOperation", mesh=MESH, dim=A, dtype=tf.int32)
call("RandomOperation", mesh=MESH, shape=AB, tf_fn=tf.random.uniform)
call("Constant", mesh=MESH, value=1.0, shape=AB, dtype=F32)
call("ImportOperation", mesh=MESH, tf_tensor=tf.ones([4, 8]), shape=AB)
call(
  "ImportLaidOutTensorOperation",
  mesh=MESH,
  laid_out_tensor=k_(lambda k: k.impl.LaidOutTensor([tf.ones([4, 8])])),
  shape=AB,
)
call("Variable", mesh=MESH, name="w", shape=AB, dtype=VAR_DTYPE, initializer=None, trainable=True)
call("ReadVariable", var=VARIABLE)
call("StackedVariable", vs=k_(lambda k: [k.v.operation]))
call("Assign", variables=k_(lambda k: [k.v.operation]), new_values=k_(lambda k: [k.x]))
call("Depend", x=X, dependencies=k_(lambda k: [k.i]))
call("PrintOperation", x=X, data=k_(lambda k: [k.i]), message="m")
call(
  "SlicewiseOperation",
  tf_fn=tf.identity,
  inputs=k_(lambda k: [k.x]),
  output_shapes=[AB],
  output_dtypes=[F32],
  splittable_dims=[A],
)
call(
  "WhileLoopOperation",
  cond_fn=lambda i: mtf.less(i, 2),
  body_fn=lambda i: [i + 1],
  inputs=k_(lambda k: [k.one]),
)

# ------------------------------------------------------------------------------ layers

ATTENTION = of(N, LEN, D)
call("layers.dense", x=X, new_dims=[C], name="dense")
call("layers.dense_product", x=X, reduced_dims=[B], new_dims=[C], activation_functions=["relu"])
call("layers.dense_relu_dense", x=X, hidden_channels=C, is_training=True)
call(
  "layers.get_dense_kernel_weights",
  x=X,
  new_dims=[C],
  reduced_dims=[B],
  expert_dims=[],
  kernel_initializer=None,
)
call("layers.conv1d", x=of(N, LEN, D), output_dim=OUT)
call("layers.conv2d layers.conv2d_transpose", x=IMAGE, output_dim=OUT)
call("layers.conv3d layers.conv3d_transpose", x=VIDEO, output_dim=OUT)
call(
  "layers.conv2d_with_blocks layers.conv2d_transpose_with_blocks",
  x=of(N, BH, BW, H, W, D),
  output_dim=OUT,
  h_blocks_dim=BH,
  w_blocks_dim=BW,
)
call(
  "layers.conv3d_with_blocks layers.conv3d_transpose_with_blocks",
  x=of(N, BH, BW, H, W, E, D),
  output_dim=OUT,
  d_blocks_dim=BH,
  h_blocks_dim=BW,
)
call("layers.separable_conv1d", x=of(N, LEN, D), output_dim=OUT)
call("layers.max_pool2d layers.avg_pool2d", x=IMAGE)
call("layers.max_pool3d layers.avg_pool3d", x=VIDEO)
call("layers.layer_norm layers.rms_normalize layers.standardize", x=X, dim=B)
call("layers.batch_norm", x=X, is_training=True, momentum=0.9)
call("layers.corr", x=X, dim=B)
call("layers.compress_mean", x=X, dim=B, compression_factor=2)
call("layers.embedding", indices=I, vocab_dim=VOCAB, output_dim=D, variable_dtype=F32)
call("layers.embedding_weights", mesh=MESH, vocab_dim=VOCAB, output_dim=D, variable_dtype=F32)
call("layers.softmax_cross_entropy_with_logits", logits=X, targets=X, vocab_dim=B)
call("layers.sigmoid_cross_entropy_with_logits", logits=X, targets=X)
call("layers.weights_nonzero", targets=I)
call("layers.annealed_dropout", x=X, is_training=True, start_step=0, end_step=2, init_rate=0.5)
call("layers.multiplicative_jitter", x=X)
call("layers.clip_activation_gradient", x=X, clip_rms_norm=1.0)
call("layers.summary_for_clip_activation_gradient", t=X)
call("layers.unit_scaling_convention")
call("layers.us_einsum", xs=k_(lambda k: [k.x, k.y]))
call("layers.attention_mask_autoregressive", query_pos=INTS(N, LEN))
call("layers.attention_mask_ignore_padding", inputs=INTS(N, LEN))
call("layers.attention_mask_same_segment", query_segment=INTS(N, LEN))
call("layers.attention_bias_local_block", mesh=MESH, block_length=LEN, memory_length=MEM)
call(
  "layers.attention_bias_local_2d_block",
  mesh=MESH,
  h_dim=H,
  w_dim=W,
  memory_h_dim=MH,
  memory_w_dim=MW,
)
call("layers.rename_length_to_memory_length", x=of(N, LEN, D))
call(
  "layers.dot_product_attention",
  q=of(N, HEADS, LEN, KV),
  k=of(N, HEADS, MEM, KV),
  v=of(N, HEADS, MEM, KV),
  mask=None,
  is_training=True,
)
MULTIHEAD = dict(kv_channels=KV, heads=HEADS, is_training=True)
call(
  "layers.multihead_attention",
  query_antecedent=ATTENTION,
  memory_antecedent=None,
  mask=None,
  **MULTIHEAD,
)
call(
  "layers.multihead_self_attention_memory_compressed",
  x=ATTENTION,
  mask_right=True,
  compression_factor=2,
  **MULTIHEAD,
)
call(
  "layers.multihead_attention_vars",
  mesh=MESH,
  heads=HEADS,
  io_channels=D,
  kv_channels=KV,
  master_dtype=F32,
  slice_dtype=F32,
  activation_dtype=F32,
)
call(
  "layers.multihead_attention_params",
  mesh=MESH,
  heads=HEADS,
  io_channels=D,
  kv_channels=KV,
  variable_dtype=VAR_DTYPE,
)
call(
  "layers.multihead_self_attention_incremental",
  query_antecedent=of(N, D),
  prev_k=of(N, HEADS, MEM, KV),
  prev_v=of(N, HEADS, MEM, KV),
  step_num=ONE,
  master_dtype=F32,
  slice_dtype=F32,
)
call(
  "layers.multihead_encdec_attention_incremental",
  query_antecedent=of(N, D),
  wq=of(HEADS, D, KV),
  wo=of(HEADS, D, KV),
  k=of(N, HEADS, MEM, KV),
  v=of(N, HEADS, MEM, KV),
  mask=None,
)
call("layers.masked_local_attention_1d", x=ATTENTION, window_size=2, **MULTIHEAD)
call(
  "layers.masked_local_attention_1d_incremental",
  x=of(N, D),
  prev_k=of(N, HEADS, MEM, KV),
  prev_v=of(N, HEADS, MEM, KV),
  step_num=ONE,
)
call("layers.local_self_attention_spatial_blocks", query_antecedent=of(N, BW, W, D), **MULTIHEAD)
call(
  "layers.local_2d_self_attention_spatial_blocks",
  query_antecedent=of(N, BH, BW, H, W, D),
  **MULTIHEAD,
)
call(
  "layers.local_3d_self_attention_spatial_blocks",
  query_antecedent=of(N, A, BH, BW, B, H, W, D),
  kv_channels=KV,
  heads=HEADS,
  is_training=False,
)
ROW, GRID = of(N, BW, W, KV), of(N, BH, BW, H, W, KV)
call("layers.local_1d_halo_exchange", k=ROW, v=ROW, num_w_blocks=BW, w_dim=W, mask_right=True)
call(
  "layers.local_2d_halo_exchange",
  k=GRID,
  v=GRID,
  num_h_blocks=BH,
  h_dim=H,
  num_w_blocks=BW,
  w_dim=W,
  mask_right=True,
)
call(
  "layers.reversible_half_residual_and_swap",
  x1=X,
  x1_backwards=None,
  x2=X,
  x2_backwards=None,
  f=mtf.tanh,
)
call("layers.VarianceScalingInitializer")

# ------------------------------------------------- optimizers, beam search, initializers

call("optimize.SgdOptimizer", learning_rate=0.1)
call("optimize.MomentumOptimizer", learning_rate=0.1, momentum=0.9)
call("optimize.AdamWeightDecayOptimizer", learning_rate=0.1)
call("optimize.AdafactorOptimizer")
call("optimize.AdamWOptimizer", learning_rate=0.1)
call("optimize.LionOptimizer", learning_rate=0.1)
call("optimize.MuonOptimizer", learning_rate=0.1)
call("optimize.global_norm", xs=k_(lambda k: [k.x]))
call("optimize.clip_by_global_norm", xs=k_(lambda k: [k.x]), clip_norm=1.0)
call("optimize.average_weights", variables=k_(lambda k: [k.v.operation]), decay=0.5)
call("optimize.averaged_name", name="w")
call("optimize.orthogonalize", x=X, rows=[A], columns=[B])
call("optimize.AdamWithMultiLRSchedule", learning_rate=0.1)
call("optimize.AdafactorWithMultiLRSchedule")
call("optimize.adafactor_decay_rate_adam", beta2=0.9)
call("optimize.adafactor_decay_rate_pow", exponent=0.8)
call("optimize.compute_lr_for_step", schedules=[], learning_rate=0.1)
call("optimize.product_learning_rate", step=1.0, total_train_steps=10, factors=[])
call("optimize.get_global_step", mesh=MESH)
# On an operation's graph: an empty one has no mesh for the variable.
call("optimize.count_global_step", graph=k_(lambda k: k.x.graph))
call("optimize.reduce_rms", x=X)
LOSS = k_(lambda k: mtf.reduce_sum(k.v))
OPTIMIZER = k_(lambda k: optimize.SgdOptimizer(0.1))
call("optimize.SgdOptimizer.minimize", self=OPTIMIZER, loss=LOSS)
LISTS = dict(grads=k_(lambda k: [k.x]), variables=k_(lambda k: [k.v.operation]))
call("optimize.SgdOptimizer.apply_grads", self=OPTIMIZER, **LISTS)
call("optimize.SgdOptimizer.apply_grad", self=OPTIMIZER, grad=X, var=VARIABLE)
IDS = INTS(N, BEAM, LEN)


def logits_fn(step: mtf.Tensor, ids: mtf.Tensor, states: list[mtf.Tensor]) -> Any:
  """Zeros for every word."""
  del step
  return mtf.zeros(ids.mesh, [*ids.shape.dims[:-1], VOCAB]), states


call("beam_search.beam_search", logits_fn=logits_fn, initial_ids=IDS, alpha=0.6)
call("beam_search.greedy_decode", logits_fn=logits_fn, initial_ids=INTS(N, LEN))
call(
  "beam_search.compute_topk_scores_and_seq",
  sequences=INTS(N, mtf.Dimension("candidates", 4), LEN),
  scores=of(N, mtf.Dimension("candidates", 4)),
  scores_to_gather=of(N, mtf.Dimension("candidates", 4)),
  flags=of(N, mtf.Dimension("candidates", 4), dtype=tf.bool),
  beam_dim=BEAM,
)
call("initializers.Constant", value=1.0)
call("initializers.Zeros")
call("initializers.Ones")
call("initializers.RandomNormal initializers.TruncatedNormal initializers.RandomUniform")
call("initializers.GlorotUniform")
call("initializers.FromFunction", fn=lambda shape, dtype: tf.zeros(shape, dtype))
call("initializers.default_initializer", dtype=F32)
call("initializers.convert_to_initializer", x=None, dtype=F32)
call("initializers.check_initializer", x=None, what="w", size=4)

# ------------------------------------------------------------- dimensions and layouts

call("convert_to_dimension", d=A)
call("convert_to_shape", x=[A, B])
call("anonymous_shape", shape=[A, B])
call("combined_dimension", dims=[A, B])
call("verify_no_new_dims", input_shapes=[AB], output_shape=AB)
call("is_subsequence", short_seq=[A], long_seq=[A, B])
call("list_product", l=[2, 3])
call("convert_to_layout_rules", x="a:all")
call(
  "tensor_dim_to_mesh_dim_size tensor_dim_to_size_per_split",
  layout="a:all",
  mesh_shape="all:2",
  tensor_dim=A,
)
call("Shape", dims=[A, B])
SHAPE = dict(self=AB)
call("Shape.get_dim_by_name", name="a", **SHAPE)
call("Shape.rename_dimension", old_name="a", new_name="z", **SHAPE)
call("Shape.resize_dimension", name="a", new_size=3, **SHAPE)
call("Shape.cumprod_to_tensor_axis", cumprod=4, **SHAPE)
call("Shape.__add__", other=C, **SHAPE)
call("Shape.__sub__", other=B, **SHAPE)
call("LayoutRules", pairs=[("a", "all")])
RULES = dict(self=mtf.LayoutRules([("a", "all")]))
call("LayoutRules.tensor_dimension_to_mesh_axis", tensor_dimension=A, mesh_shape=AB, **RULES)
call("LayoutRules.tensor_layout", tensor_shape=AB, mesh_shape=mtf.Shape([("all", 2)]), **RULES)
call(
  "LayoutRules.mesh_dimension_name_to_tensor_dimension_names", mesh_dimension_name="all", **RULES
)
call("LayoutRules.check_mesh", mesh_shape=AB, **RULES)
call("TensorLayout", tensor_axis_to_mesh_axis=[0, None])
call("TensorLayout.mesh_axis_to_tensor_axis", self=mtf.TensorLayout([0, None]), mesh_ndims=2)
call("pnum_to_processor_coordinates", mesh_shape=[2, 3], pnum=1)
call("processor_coordinates_to_pnum", mesh_shape=[2, 3], coord=[1, 2])
call("pnum_to_group", mesh_shape=[2, 3], group_dims=[0], pnum=1)
call("processor_groups", mesh_shape=[2, 3], group_dims=[0])
call("VariableDType", master_dtype=F32)
call("transpose_list_of_lists", lol=[[1, 2], [3, 4]])
call("pretty_print_counters", counters=[("a", 1.0)])
call("log_variable_sizes", var_list=k_(lambda k: [k.v.operation]), tag="tag")

# --------------------------------------------------------- graphs, meshes and lowerings

GRAPH = k_(lambda k: k.graph)
call("Mesh", graph=GRAPH, name="moon")
call("Graph.unique_name", self=GRAPH, name="op")
call("Graph.combine_assignments", self=GRAPH, assignments=k_(lambda k: [mtf.assign(k.v, k.x)]))
call("Graph.make_variables_untrainable", self=GRAPH, variables=k_(lambda k: [k.v.operation]))
call(
  "Graph.clone_operations",
  self=GRAPH,
  ops=k_(lambda k: [mtf.square(k.x).operation]),
  input_mapping=k_(lambda k: {k.x: k.x * 2.0}),
)
call("Graph.capture_operations", self=GRAPH, fn=lambda: None)
call("Graph.rewrite_stack_variables", self=GRAPH)
call("Tensor", operation=k_(lambda k: k.x.operation), shape=AB, dtype=F32)
for operator in "add sub mul truediv floordiv mod".split():
  call(f"Tensor.__{operator}__ Tensor.__r{operator}__", self=X, other=X)
LOWERING = k_(lambda k: k.lowering)
call("Lowering", graph=GRAPH, mesh_to_impl=k_(lambda k: {k.mesh: k.impl}))
call("Lowering.export_to_tf_tensor", self=LOWERING, x=X)
call("Lowering.add_counter", self=LOWERING, key="k", value=1)
call("Lowering.mesh_impl", self=LOWERING, m=MESH)
call("Lowering.laid_out_size", self=LOWERING, tensor=X)
call(
  "Lowering.set_tensor_lowering Lowering.verify_slice_shapes",
  self=LOWERING,
  tensor=X,
  laid_out_tensor=k_(lambda k: k.lowering.tensors[k.x]),
)
call(
  "Lowering.lowered_operation", self=k_(lambda k: assigned(k)[1]), op=k_(lambda k: assigned(k)[0])
)


def assigned(k: World) -> tuple[mtf.Operation, mtf.Lowering]:
  """An assignment, and the lowering that did it."""
  if "assigned" not in vars(k):
    k.assigned = mtf.assign(k.v, k.x)
  return k.assigned, k.lowering


IMPL = dict(shape="all:1", layout="a:all", devices=["/device:CPU:0"])
call("MeshImpl", shape="all:1", layout_rules="a:all")
call("PlacementMeshImpl SimdMeshImpl", **IMPL)
ONE_DEVICE = k_(lambda k: k.impl)
call("PlacementMeshImpl.slice_shape", self=ONE_DEVICE, tensor_shape=AB)
call("PlacementMeshImpl.tensor_layout", self=ONE_DEVICE, arg=AB)
call("PlacementMeshImpl.tensor_dimension_to_mesh_axis", self=ONE_DEVICE, tensor_dimension=A)
call("PlacementMeshImpl.import_tf_tensor", self=ONE_DEVICE, x=X, tf_x=tf.ones([4, 8]))
call("VariableStore")
call("TensorSpec", shape=[A, B])
call("function", mesh_impl=ONE_DEVICE)
call("Function", fn=lambda x: x, mesh_impl=ONE_DEVICE, input_signature=None, mesh_name="mesh")
call("describe", graph_or_function=k_(lambda k: k.x.graph), layout="a:all", mesh_shape="all:2")
call("MtfRestoreHook MtfCheckpointSaverListener", lowering=LOWERING)
call("virtual_cpu_devices", count=8)
call("eager", mesh_impl=ONE_DEVICE, seed=1)
call("from_tensorflow", fn=tf.nn.relu, input_signature=[tf.TensorSpec([2])], fallback="error")
call("utils.create_host_call", model_dir="logs", lowering=LOWERING)
call("utils.BalancedVariablePlacer", devices=["/device:CPU:0"])

# What no valid call is given for, and why.
NOT_CALLED = {
  "Dimension": "a named tuple; every function checks those it is given",
  "Graph": "takes nothing",
  "layers.DenseInitializer": "takes nothing",
  "optimize.Optimizer": "takes nothing",
  "initializers.Initializer": "takes nothing",
  "assign_slice assign_add_slice assign_sub_slice": "run on the slices of a variable",
  "LazyAllreduceSum LazyLaidOutTensor": "are made by operations when they are lowered",
  "compatible_lazy_allreduce_sums convert_args_to_laid_out_tensors": "take laid-out tensors",
  "CustomGradientOperation GenericGradOperation": "are made by mtf.custom_gradient and slicewise",
  "pnum_to_processor_coordinates_nd processor_coordinates_to_pnum_map_nd": "take TPU topologies",
  "parallel": "calls what it is given",
  "optimize.adafactor_optimizer_from_hparams optimize.make_optimizer": "take tensor2tensor hparams",
  "utils.outside_all_rewrites utils.remove_summaries utils.topology_rank": "TPU helpers",
  "StrategyMeshImpl": "takes a tf.distribute.Strategy; its arguments are those of SimdMeshImpl",
  "Report StoredVariable LayoutChoice Imported EagerTensor": "are results",
  "Trainer": "makes a store and a folder; its wrong arguments are tested in tests/training",
  "auto_layout": "searches for seconds; its wrong arguments are tested in tests/planning",
}
del layers
