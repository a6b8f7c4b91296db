"""Mixtures of experts on meshes: one value on every layout, and what is exchanged."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import moe
from mesh_tensorflow.transformer.model.moe import router as moe_gating

D = mtf.Dimension("d_model", 4)
FLOATS = mtf.VariableDType()
ROUTERS = list(moe_gating.ROUTERS)


def hparams(**kwargs):
  return moe.HParams(**{f"moe_{k}": v for k, v in kwargs.items()})


X = np.random.default_rng(2).normal(size=[8, 8, 8]).astype(np.float32)
NONPADDING = (np.arange(8) < np.array([8, 8, 5, 3, 8, 1, 7, 8])[:, None]).astype(np.float32)
# Mesh, layout, and kinds of collectives that bring tokens to experts and back.
LAYOUTS = [
  ("all:4", "batch:all,experts:all", {"alltoall"}),
  ("all:2", "batch:all,experts:all", {"alltoall"}),
  ("rows:2,cols:2", "batch:rows,experts:rows,expert_hidden:cols", {"alltoall"}),
  ("rows:2,cols:2", "batch:rows,experts:rows,d_model:cols", {"alltoall"}),
  # Each processor computes its part of the exchange alone.
  ("rows:2,cols:2", "batch:rows,experts:rows,d_model_split:cols", {"alltoall", "allconcat"}),
  # No exchange to the experts: each row of processors keeps its groups.
  ("rows:2,cols:2", "batch:rows,experts:cols", {"allconcat"}),
  ("all:4", "batch:all", set()),
  ("all:4", "batch:all,expert_hidden:all", {"allconcat"}),
  ("all:4", "experts:all", {"allconcat"}),
]


def on_mesh(
  mesh, layout, devices, group_size, gating="top_2", kind="placement", traced=False, **options
):
  """Outputs and gradients of the layer that is told its layout, and the counters."""
  cls = mtf.PlacementMeshImpl if kind == "placement" else mtf.SimdMeshImpl
  impl = cls(mesh, layout, devices[: mtf.convert_to_shape(mesh).size])
  counters = {}

  def program():
    graph = mtf.Graph()
    graph.random_seed = 3
    m = mtf.Mesh(graph, "m")
    dims = [("batch", 8), ("length", 8), ("d_model", 8)]
    x = mtf.import_tf_tensor(m, X, dims)
    bag = hparams(
      num_experts=4, hidden_size=8, group_size=group_size, gating=gating, dropout_rate=0.2,
      **options,
    )  # fmt: skip
    y, loss = moe.transformer_moe_layer_v1(
      x, mtf.Dimension("d_model", 8), bag, True, FLOATS, layout=layout, mesh_shape=mesh,
      nonpadding=mtf.import_tf_tensor(m, NONPADDING, dims[:2]),
    )  # fmt: skip
    total = mtf.reduce_sum(mtf.square(y)) + loss
    sources = [x, *(v.value for v in graph.trainable_variables)]
    results = [y, loss, *mtf.gradients([total], sources)]
    lowering = mtf.Lowering(graph, {m: impl})
    counters.update(lowering.counters)
    return [lowering.export_to_tf_tensor(t) for t in results]

  run = functools.partial(impl.run, program)
  values = (tf.function(run, autograph=False) if traced else run)()
  return [np.asarray(v) for v in values], counters


@functools.cache
def on_one_device(group_size, gating):
  return on_mesh("all:1", "", ["CPU:0"], group_size, gating)[0]


def check_equal(got, want):
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def moved(counters):
  return {key.split("/")[0] for key in counters if key.endswith("/reshape_op")}


@pytest.mark.parametrize("mesh,layout,kinds", LAYOUTS)
def test_tokens_are_exchanged_as_the_layout_asks_for(mesh, layout, kinds, cpu_devices):
  got, counters = on_mesh(mesh, layout, cpu_devices, 16)
  check_equal(got, on_one_device(16, "top_2"))
  assert moved(counters) == kinds


@pytest.mark.parametrize("mesh,layout,kinds", LAYOUTS[:1] + LAYOUTS[5:])
def test_parts_of_one_large_group_on_each_processor(mesh, layout, kinds, cpu_devices):
  """With fewer groups than processors, positions in the group go on from one to the next."""
  del kinds
  check_equal(on_mesh(mesh, layout, cpu_devices, 1024)[0], on_one_device(1024, "top_2"))


def two_levels_on_mesh(mesh, layout, devices):
  """Outputs and gradients of a layer of two levels, and the counters."""
  impl = mtf.PlacementMeshImpl(mesh, layout, devices[: mtf.convert_to_shape(mesh).size])
  graph = mtf.Graph()
  graph.random_seed = 3
  m = mtf.Mesh(graph, "m")
  dims = [("outer_batch", 4), ("batch", 2), ("length", 8), ("d_model", 8)]
  x = mtf.import_tf_tensor(m, X.reshape(4, 2, 8, 8), dims)
  nonpadding = mtf.import_tf_tensor(m, NONPADDING.reshape(4, 2, 8), dims[:3])
  bag = hparams(expert_x=2, expert_y=4, hidden_size=8, group_size=8)
  y, loss = moe.transformer_moe_layer_v2(
    x, mtf.Dimension("d_model", 8), bag, True, FLOATS, layout, mesh, nonpadding
  )
  sources = [x, *(v.value for v in graph.trainable_variables)]
  results = [y, loss, *mtf.gradients([mtf.reduce_sum(mtf.square(y)) + loss], sources)]
  lowering = mtf.Lowering(graph, {m: impl})
  return [lowering.export_to_tf_tensor(t).numpy() for t in results], dict(lowering.counters)


@pytest.mark.parametrize("mesh,layout,exchanges", [
  ("a:2,b:4", "batch:a,expert_x:a,outer_batch:b,expert_y:b", {"alltoall/0", "alltoall/1"}),
  ("b:4", "outer_batch:b,expert_y:b", {"alltoall/0"}),
])  # fmt: skip
def test_two_levels_exchange_along_two_mesh_axes(mesh, layout, exchanges, cpu_devices):
  want, _ = two_levels_on_mesh("a:1", "", cpu_devices)
  got, counters = two_levels_on_mesh(mesh, layout, cpu_devices)
  check_equal(got, want)
  assert {k.removesuffix("/reshape_op") for k in counters if k.endswith("reshape_op")} == exchanges


@pytest.mark.parametrize("gating", ROUTERS)
def test_every_router_with_experts_split(gating, cpu_devices):
  want = on_one_device(16, gating)
  got, counters = on_mesh("all:4", "batch:all,experts:all", cpu_devices, 16, gating)
  check_equal(got, want)
  assert moved(counters) == {"alltoall"}


@pytest.mark.parametrize("kind,traced", [("simd", False), ("simd", True), ("placement", True)])
def test_implementations(kind, traced, cpu_devices):
  layout = "batch:rows,experts:rows,expert_hidden:cols"
  got, _ = on_mesh("rows:2,cols:2", layout, cpu_devices, 16, "top_2", kind, traced)
  check_equal(got, on_one_device(16, "top_2"))


def test_bfloat16_activations(cpu_devices):
  """Results in bfloat16 are near those in float32, on one device and on two."""
  results = {}
  rng = np.random.default_rng(0)
  x = tf.cast(rng.normal(size=[2, 8, 4]), tf.bfloat16)
  for dtype, mesh, layout in (
    (tf.float32, "all:1", ""),
    (tf.bfloat16, "all:1", ""),
    (tf.bfloat16, "all:2", "batch:all,experts:all"),
  ):
    impl = mtf.PlacementMeshImpl(mesh, layout, cpu_devices[: mtf.convert_to_shape(mesh).size])
    m = mtf.Mesh(mtf.Graph(), "m")
    t = mtf.import_tf_tensor(m, tf.cast(x, dtype), [("batch", 2), ("length", 8), D])
    outputs = []
    for name, dropless in [(name, False) for name in ROUTERS] + [("top_k", True)]:
      bag = hparams(
        num_experts=2, hidden_size=4, group_size=8, gating=name, second_policy_train="all",
        switch_policy_train="argmax", ntlb_top_k=2, top_n_num_experts_per_token=2,
        dropless=dropless,
      )  # fmt: skip
      with mtf.variable_scope(f"{name}_{dropless}"):
        y, loss = moe.transformer_moe_layer_v1(
          t, D, bag, True, mtf.VariableDType(activation_dtype=dtype), layout=layout, mesh_shape=mesh
        )
      assert y.dtype == loss.dtype == dtype
      outputs += [y, loss]
    lowering = mtf.Lowering(m.graph, {m: impl})
    results[dtype, mesh] = [
      tf.cast(lowering.export_to_tf_tensor(o), tf.float32).numpy() for o in outputs
    ]
  want = results[tf.float32, "all:1"]
  for got in (results[tf.bfloat16, "all:1"], results[tf.bfloat16, "all:2"]):
    for a, b in zip(got, want):
      np.testing.assert_allclose(a, b, atol=0.05 * np.abs(b).max())


DROPLESS = dict(dropless=True, top_n_num_experts_per_token=2, num_shared_experts=1)


@functools.cache
def without_dropping_on_one_device(gating):
  return on_mesh("all:1", "", ["CPU:0"], 16, gating, **DROPLESS)[0]


@pytest.mark.parametrize("mesh,layout,_", LAYOUTS[:1] + LAYOUTS[2:4] + LAYOUTS[5:])
def test_without_dropping(mesh, layout, _, cpu_devices):
  got, counters = on_mesh(mesh, layout, cpu_devices, 16, "top_k", **DROPLESS)
  check_equal(got, without_dropping_on_one_device("top_k"))
  if layout in ("batch:all,experts:all", "experts:all"):
    # What is exchanged behind experts are tokens: all, once on each processor. Hidden values, of
    # which there are as many for each choice, stay where their experts are.
    assert counters["allreduce/[0]/expert_products"] == 4 * X.size


@pytest.mark.parametrize("gating", ["top_2", "ntlb"])
def test_other_routers_without_dropping(gating, cpu_devices):
  got, _ = on_mesh("all:4", "batch:all,experts:all", cpu_devices, 16, gating, **DROPLESS)
  check_equal(got, without_dropping_on_one_device(gating))


@pytest.mark.parametrize("kind,traced", [("simd", False), ("simd", True), ("placement", True)])
def test_implementations_without_dropping(kind, traced, cpu_devices):
  mesh, layout, _ = LAYOUTS[2]
  got, _ = on_mesh(mesh, layout, cpu_devices, 16, "top_k", kind, traced, **DROPLESS)
  check_equal(got, without_dropping_on_one_device("top_k"))
