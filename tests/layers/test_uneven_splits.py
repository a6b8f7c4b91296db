"""A small model whose dimensions no mesh axis divides equals itself on one device."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers, optimize
from mesh_tensorflow.numerics import padding
from tests.kinds import kept

BATCH, LENGTH = mtf.Dimension("batch", 3), mtf.Dimension("length", 5)
VOCAB, MODEL = mtf.Dimension("vocab", 65), mtf.Dimension("d_model", 6)
HEADS, KV = mtf.Dimension("heads", 3), mtf.Dimension("d_kv", 4)
IDS = np.random.default_rng(0).integers(0, 65, [3, 5]).astype(np.int32)

LAYOUTS = [
  ("model:2", "vocab:model~,heads:model~"),
  ("model:4", "vocab:model~,heads:model~"),
  ("model:4", "d_model:model~"),
  ("batch:2,model:4", "batch:batch~,vocab:model~,heads:model~"),
  ("batch:2,model:2", "batch:batch~,length:model~"),
]
OPTIMIZERS = {
  "sgd": lambda: optimize.SgdOptimizer(0.1),
  "momentum": lambda: optimize.MomentumOptimizer(0.1, 0.9),
  "adam": lambda: optimize.AdamWeightDecayOptimizer(0.01, weight_decay_rate=0.1),
  "adafactor": lambda: optimize.AdafactorOptimizer(min_dim_size_to_factor=3),
  "adafactor_momentum": lambda: optimize.AdafactorOptimizer(beta1=0.9),
  "lion": lambda: optimize.LionOptimizer(0.01),
  "muon": lambda: optimize.MuonOptimizer(0.01),
}


def _memory():
  return mtf.Dimension("memory_length", LENGTH.size)


def loss_of(mesh):
  """Attention of one layer, and the cross entropy of what it says."""
  ids = mtf.import_tf_tensor(mesh, IDS, [BATCH, LENGTH])
  x = layers.embedding(ids, VOCAB, MODEL, tf.float32, name="embedding")
  x = mtf.dropout(x, True, keep_prob=0.8)
  q, k, v = (
    layers.dense(
      layers.layer_norm(x, MODEL, name=f"norm_{n}"),
      [HEADS, KV],
      reduced_dims=[MODEL],
      activation=mtf.gelu,
      name=n,
    )
    for n in "qkv"
  )
  memory = _memory()
  k, v = (mtf.rename_dimension(t, "length", "memory_length") for t in (k, v))
  logits = mtf.einsum([q, k], [BATCH, HEADS, LENGTH, memory])
  near = mtf.greater_equal(
    mtf.range(mesh, LENGTH, tf.int32), mtf.range(mesh, memory, tf.int32), [LENGTH, memory]
  )
  logits = mtf.where(near, logits, -1e9)
  y = mtf.einsum([mtf.softmax(logits, memory), v], [BATCH, LENGTH, HEADS, KV])
  y = x + layers.dense(y, [MODEL], reduced_dims=[HEADS, KV], name="o")
  logits = layers.dense(y, [VOCAB], reduced_dims=[MODEL], name="logits")
  targets = mtf.shift(ids, -1, LENGTH, wrap=True)
  loss = layers.softmax_cross_entropy_with_logits(logits, targets, VOCAB, z_loss=1e-3)
  return mtf.reduce_mean(loss), mtf.argmax(logits, VOCAB)


def train(impl, make, traced, steps=1):
  """The loss, the most likely ids, the norm of the gradients, and all variables after an update."""

  def program():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    loss, best = loss_of(mesh)
    variables = graph.trainable_variables
    grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
    grads, norm = optimize.clip_by_global_norm(grads, 0.1)
    make().apply_grads(grads, variables)
    lowering = mtf.Lowering(graph, {mesh: impl}, seed=1)
    return [lowering.export_to_tf_tensor(x) for x in (loss, best, norm)]

  def run():
    return impl.run(program)

  results = [x.numpy() for x in (tf.function(run, autograph=False) if traced else run)()]
  return results, {v.name: v.numpy() for v in impl.variable_store}


def one_device(make, devices):
  return train(mtf.PlacementMeshImpl("all:1", "", devices[:1]), make, False)


# In `make test` one layout for each optimizer, another one for the next.
CASES = [(name, i) for name in OPTIMIZERS for i in range(len(LAYOUTS))]
KEPT = [(name, n % len(LAYOUTS)) for n, name in enumerate(OPTIMIZERS)]
TRACED = KEPT[1::3]  # Small meshes of both implementations. The others are run eagerly.
ONE_DEVICE = {}


@pytest.mark.parametrize(("name", "number"), kept(CASES, KEPT))
def test_an_update_equals_that_of_one_device(name, number, cpu_devices):
  make = OPTIMIZERS[name]
  if name not in ONE_DEVICE:
    ONE_DEVICE[name] = one_device(make, cpu_devices)
  expected, variables = ONE_DEVICE[name]
  mesh, layout = LAYOUTS[number]
  cls = [mtf.PlacementMeshImpl, mtf.simd_mesh_impl.SimdMeshImpl][number % 2]
  with padding.filled_with(float("nan")):
    impl = cls(mesh, layout, cpu_devices[: mtf.convert_to_shape(mesh).size])
    results, found = train(impl, make, traced=(name, number) in TRACED)
  for got, want in zip(results, expected):
    np.testing.assert_allclose(got, want, rtol=1e-5)
  assert found.keys() == variables.keys()
  for variable, want in variables.items():
    # A first step of 0.01 is nearly a sign, of gradients that may be as small as their rounding.
    np.testing.assert_allclose(found[variable], want, rtol=1e-5, atol=2e-5, err_msg=variable)
  for v in impl.variable_store:
    assert all(np.all(np.isfinite(s.numpy())) for s in v.slices), v.name


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_what_is_gathered(mesh, layout, cpu_devices):
  """Of this model nothing is lowered on gathered inputs, but for what is shifted along a split."""
  graph_mesh = mtf.Mesh(mtf.Graph(), "m")
  loss, _ = loss_of(graph_mesh)
  graph = graph_mesh.graph
  mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
  impl = mtf.PlacementMeshImpl(mesh, layout, cpu_devices[: mtf.convert_to_shape(mesh).size])
  gathered = {
    type(op).__name__ for op in graph.operations if op.layout_to_lower_on(impl) is not impl
  }
  assert gathered <= ({"ShiftOperation"} if "length" in layout else set())


def test_describe(cpu_devices):
  graph_mesh = mtf.Mesh(mtf.Graph(), "m")
  loss_of(graph_mesh)
  report = mtf.describe(graph_mesh.graph, "vocab:model~,batch:batch~", "batch:2,model:4")
  embedding = next(v for v in report.variables if v.name.startswith("embedding"))
  assert embedding.bytes_per_device == 17 * 6 * 4
  assert report.to_dict()["layout"] == [["batch", "batch~"], ["vocab", "model~"]]
  assert "vocab:model~" in report.to_text()
