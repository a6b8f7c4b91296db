"""Wrong uses of convolutions, pooling, attention, beam search and helpers; see `error_rows`."""

from __future__ import annotations

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors as e
from tests.errors.error_layout_rows import LayoutRow
from tests.errors.error_rows import A, B, World, row

H, W, I, O = (mtf.Dimension(n, s) for n, s in [("h", 8), ("w", 6), ("in", 3), ("out", 5)])  # noqa: E741
HB, WB = mtf.Dimension("h_blocks", 2), mtf.Dimension("w_blocks", 2)
KERNEL = [("fh", 3), ("fw", 3), I, O]


def _image(k: World, *dims: mtf.Dimension) -> mtf.Tensor:
  return mtf.ones(k.mesh, [A, *(dims or (H, W, I))])


# ------------------------------------------------------------------- convolutions

row("convolution of two dtypes", e.DTypeError, "conv2d float32 bfloat16 cast h=8")(
  lambda k: mtf.Conv2dOperation(
    _image(k), mtf.ones(k.mesh, KERNEL, tf.bfloat16), [1, 1, 1, 1], "SAME"
  )
)
row("convolution with a filter of other channels", e.DimensionError, "conv2d in=3 in=4 filter")(
  lambda k: mtf.Conv2dOperation(
    _image(k), mtf.ones(k.mesh, [("fh", 3), ("fw", 3), ("in", 4), O]), [1, 1, 1, 1], "SAME"
  )
)
row("convolution with a filter of rank 3", e.ShapeError, "conv2d filter 2 fh=3")(
  lambda k: mtf.Conv2dOperation(
    _image(k), mtf.ones(k.mesh, [("fh", 3), I, O]), [1, 1, 1, 1], "SAME"
  )
)
row("convolution with another padding", e.ShapeError, "conv2d 'FULL' 'SAME' 'VALID'")(
  lambda k: mtf.Conv2dOperation(_image(k), mtf.ones(k.mesh, KERNEL), [1, 1, 1, 1], "FULL")
)
row("convolution with two strides", e.ShapeError, ["conv2d", "strides", "[2, 2]"])(
  lambda k: mtf.Conv2dOperation(_image(k), mtf.ones(k.mesh, KERNEL), [2, 2], "SAME")
)
row("convolution gradient of 4 dimensions", e.SizeError, "conv_dimension 2 3 4", AssertionError)(
  lambda k: mtf.Conv2or3dBackpropInputOperation(
    4, False, _image(k).shape, mtf.ones(k.mesh, KERNEL), _image(k), [1, 1, 1, 1], "SAME"
  )
)
row("conv2d layer to its own channels", e.DimensionError, "conv2d in=3 h=8")(
  lambda k: mtf.layers.conv2d(_image(k), I)
)
row("conv2d layer of a matrix", e.ShapeError, "conv2d x a=4")(lambda k: mtf.layers.conv2d(k.x, O))
row("conv2d layer with one filter size", e.ShapeError, "conv2d filter_size 2")(
  lambda k: mtf.layers.conv2d(_image(k), O, filter_size=(3,))
)
row("conv1d layer of a vector", e.ShapeError, "conv1d i a=4")(lambda k: mtf.layers.conv1d(k.i, O))
row("blocks with VALID", e.UnsupportedError, "conv2d_with_blocks h=8 'VALID'", NotImplementedError)(
  lambda k: mtf.layers.conv2d_with_blocks(
    _image(k, HB, H, W, I), O, padding="VALID", h_blocks_dim=HB
  )
)
row(
  "blocks with an even filter",
  e.SizeError,
  ["conv2d_with_blocks", "h=8", "odd", "[2, 2]"],
  AssertionError,
)(  # fmt: skip
  lambda k: mtf.layers.conv2d_with_blocks(
    _image(k, HB, H, W, I), O, filter_size=(2, 2), h_blocks_dim=HB
  )
)
row(
  "transposed blocks with an odd filter",
  e.SizeError,
  "conv2d_transpose_with_blocks even h=8",
  AssertionError,
)(  # fmt: skip
  lambda k: mtf.layers.conv2d_transpose_with_blocks(
    _image(k, HB, H, W, I), O, filter_size=(3, 3), h_blocks_dim=HB
  )
)
row("separable convolution of no offset", e.ShapeError, "x min_relative_pos 2 1")(
  lambda k: mtf.layers.separable_conv1d(k.x, O, min_relative_pos=2)
)

# ----------------------------------------------------------------------- pooling

row("pooling function", e.GraphError, "'SUM_2D' MAX_2D")(lambda k: mtf.pool_fn("SUM_2D"))
row(
  "pooling with other strides",
  e.SizeError,
  ["pool", "MAX_2D", "h=8", "[2, 2]", "[1, 1]"],
  AssertionError,
)(  # fmt: skip
  lambda k: mtf.PoolOperation(_image(k), [2, 2], [1, 1], "MAX_2D")
)
row("pooling of a matrix", e.ShapeError, "max_pool3d MAX_3D x a=4")(
  lambda k: mtf.layers.max_pool3d(k.x)
)
row("pooling window larger than the image", e.ShapeError, "avg_pool2d 9 h=8 w=6")(
  lambda k: mtf.layers.avg_pool2d(_image(k), (9, 2))
)
row("average pooling of integers", e.DTypeError, "avg_pool2d int32 cast")(
  lambda k: mtf.layers.avg_pool2d(mtf.to_int32(_image(k)))
)

# --------------------------------------------------- attention, reversible, beam search

HEADS, KV = mtf.Dimension("heads", 2), mtf.Dimension("kv", 4)
row("local attention of no window", e.ShapeError, "masked_local_attention_1d x window_size 0")(
  lambda k: mtf.layers.masked_local_attention_1d(k.x, KV, HEADS, True, window_size=0)
)
row("local attention with splits of no divisor", e.ShapeError, "masked_local_attention_1d x 3 a=4")(
  lambda k: mtf.layers.masked_local_attention_1d(k.x, KV, HEADS, True, length_per_split=3)
)
row("attention of other channels", e.ShapeError, "multihead_attention x y")(
  lambda k: mtf.layers.multihead_attention(k.x, k.y, None, KV, HEADS, True)
)
row("reversible layer of a number", e.ArgumentError, "reversible x 1.0")(
  lambda k: mtf.layers.reversible_half_residual_and_swap(k.x, None, k.x, None, lambda t: 1.0)
)
row("reversible layer of another shape", e.ShapeError, "reversible x y")(
  lambda k: mtf.layers.reversible_half_residual_and_swap(k.x, None, k.x, None, lambda t: k.y)
)
row("greedy decoding of floats", e.DTypeError, "greedy_decode x float32")(
  lambda k: mtf.beam_search.greedy_decode(lambda *xs: None, k.x)
)
row("beam search of a vector", e.ShapeError, "beam_search i batch beam length")(
  lambda k: mtf.beam_search.beam_search(lambda *xs: None, k.i, 0.6)
)

# ------------------------------------------------------------------------- helpers

row("placer with too few usages", e.ArgumentError, "BalancedVariablePlacer 1 2", AssertionError)(
  lambda k: mtf.utils.BalancedVariablePlacer(["cpu:0", "cpu:1"], [0])
)
row("rank of no topology", e.MeshShapeError, "topology_rank Topology int")(
  lambda k: mtf.utils.topology_rank(5)
)

_SPATIAL = [
  LayoutRow(
    f"{name} of a split image",
    build,
    "rows:2",
    "h:rows",
    [operation, "h:8", "rows:2", "rename"],
  )
  for name, operation, build in [
    ("max_pool2d", "PoolOperation", lambda k: mtf.layers.max_pool2d(_image(k), (8, 2))),
  ]
]
LAYOUT_ROWS = [
  *_SPATIAL,
  LayoutRow(
    "filter of a convolution",
    lambda k: mtf.layers.conv2d(_image(k), O, filter_size=(4, 3)),
    "rows:2",
    "fh:rows",
    ["Conv2dOperation", "fh:4", "rows:2"],
  ),
  LayoutRow(
    "positions of blocks",
    lambda k: mtf.layers.conv2d_with_blocks(
      _image(k, HB, WB, H, W, I), O, h_blocks_dim=HB, w_blocks_dim=WB
    ),
    "rows:2",
    "h:rows",
    ["h:8", "rows:2", "rename"],
  ),
]

# ----------------------------------------------------------------- dense, norms, optimizers

row("dense bias of another dtype", e.DTypeError, "dense_1/add out=5 float32 bfloat16 cast")(
  lambda k: mtf.layers.dense(
    k.x, O, reduced_dims=[B], variable_dtype=mtf.VariableDType(activation_dtype=tf.bfloat16)
  )
)
row("dense with unknown experts", e.ShapeError, "dense wi expert in=3 x")(
  lambda k: mtf.layers.dense(k.x, O, reduced_dims=[B], expert_dims=[I], name="wi")
)
row("dense product with an unknown function", e.ConfigError, "activation 'gellu' gelu")(
  lambda k: mtf.layers.dense_product(k.x, [B], [O], ["gellu"])
)
row("initializer of an unknown distribution", e.ConfigError, "distribution cauchy normal uniform")(
  lambda k: mtf.layers.VarianceScalingInitializer(distribution="cauchy")([A], [B])
)
row("fan-out under unit scaling", e.ConfigError, "unit-scaling fan_in 'fan_out'")(
  lambda k: _with_unit_scaling(
    lambda: mtf.layers.VarianceScalingInitializer(mode="fan_out")([A], [B])
  )
)
row("batch norm over nothing", e.DimensionError, ["batch_norm", "[2:1]", "x"])(
  lambda k: mtf.layers.batch_norm(k.x, True, 0.9, dims_idx_start=2, dims_idx_end=1)
)
row("compressed attention without a length", e.DimensionError, "'length' a=4 b=8")(
  lambda k: mtf.layers.multihead_self_attention_memory_compressed(k.x, True, 2, KV, HEADS, True)
)


class _HParams:
  optimizer = "Sgd"
  optimizer_adafactor_decay_type = "linear"


row("optimizer of an unknown name", e.ConfigError, "hparams.optimizer 'Sgd' SGD Adafactor")(
  lambda k: mtf.optimize.make_optimizer(_HParams, 0.1)
)
row("decay of an unknown kind", e.ConfigError, "optimizer_adafactor_decay_type 'linear' Adam pow")(
  lambda k: mtf.optimize.adafactor_optimizer_from_hparams(_HParams, 0.1)
)
row("learning rate as text", e.ConfigError, "learning_rate number 'fast'")(
  lambda k: mtf.optimize.SgdOptimizer("fast").apply_grads([k.x], [k.v.operation])
)
row("learning rate of a shape", e.ShapeError, "learning_rate scalar x")(
  lambda k: mtf.optimize.SgdOptimizer(k.x).apply_grads([k.x], [k.v.operation])
)
row("schedules that are not one for each", e.ConfigError, "variable_search 2 alt_lr_schedules 1")(
  lambda k: mtf.optimize.AdafactorWithMultiLRSchedule(["a", "b"], [["constant"]], learning_rate=0.1)
)

# -------------------------------------------------------------- meshes and their collectives


def _ones(shape: list[int]) -> mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor:
  return mtf.PlacementMeshImpl.LaidOutTensor([tf.ones(shape)] * 2)


def _pair() -> mtf.PlacementMeshImpl:
  return mtf.PlacementMeshImpl("rows:2", "", ["", ""])


row("allreduce of an unknown kind", e.GraphError, "allreduce 'MEAN' SUM")(
  lambda k: _pair().allreduce(_ones([4]), [0], "MEAN")
)
row("alltoall of an odd axis", e.ShapeError, "alltoall 3 rows:2")(
  lambda k: _pair().alltoall(_ones([3, 2]), 0, 0, 1)
)
row("receive from too few", e.ShapeError, ["receive", "[None]", "2", "rows:2"])(
  lambda k: _pair().receive(_ones([4]), 0, [None])
)
row("run inside a run", e.GraphError, "SimdMeshImpl rows=2 run")(
  lambda k: (lambda impl: impl.run(lambda: impl.run(lambda: 0)))(
    mtf.SimdMeshImpl("rows:2", "", ["/cpu:0"] * 2)
  )
)
row("unknown collectives", e.ConfigError, "collectives 'ring' 'queues'")(
  lambda k: mtf.SimdMeshImpl("rows:2", "", ["/cpu:0"] * 2, collectives="ring")
)
row("topology of three numbers", e.MeshShapeError, ["[x, y, z, core]", "[4, 4, 2]"])(
  lambda k: mtf.simd_mesh_impl.physical_shape_3d_from_topology_proto_4d([4, 4, 2])
)
row("tiling of a tuple", e.MeshShapeError, ["physical_shape", "list", "(4, 4, 1)"])(
  lambda k: mtf.simd_mesh_impl.HierarchicalTiling([("a", None)], (4, 4, 1))
)
row("tiling that does not cover", e.MeshShapeError, ["tiles", "[4, 4, 1]"])(
  lambda k: mtf.simd_mesh_impl.HierarchicalTiling([("a", [2, 2, 1]), ("b", [1, 2, 1])], [4, 4, 1])
)
row("tiling of another number", e.MeshShapeError, "tiling 9 processors")(
  lambda k: mtf.simd_mesh_impl.HierarchicalTiling.spec_to_mesh_shape([("a", [2, 2, 1])], 9)
)
row("mesh of another size than the TPU", e.MeshShapeError, ["[2, 2]", "4", "[2, 2, 2]", "8"])(
  lambda k: mtf.simd_mesh_impl.auto_logical_to_physical_tpu([2, 2], [2, 2, 2])
)
row("chips of one core without an assignment", e.MeshShapeError, "device_assignment core")(
  lambda k: _with_one_core(lambda: mtf.simd_mesh_impl.auto_logical_to_physical_tpu([4], [2, 2, 1]))
)


def _with_one_core(fn):
  """Calls `fn` with the flag logical_cores_per_chip at 1."""
  from absl import flags

  old = flags.FLAGS["logical_cores_per_chip"].value
  flags.FLAGS["logical_cores_per_chip"].value = 1
  try:
    return fn()
  finally:
    flags.FLAGS["logical_cores_per_chip"].value = old


def _with_unit_scaling(fn):
  """Calls `fn` under the unit-scaling convention."""
  gin.bind_parameter("mesh_tensorflow.layers.unit_scaling_convention.value", True)
  return fn()
