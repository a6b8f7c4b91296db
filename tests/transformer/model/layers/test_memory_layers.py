"""Product-key memory: which values are read."""

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import memory_layers, transformer_layers
from tests.kinds import kept
from tests.transformer import bi_program, layer_program
from tests.transformer import lm_program as lm

SIZES = dict(key_size=6, n_keys=4, n_heads=2, knn=3)
LAYERS = [
  [transformer_layers.SelfAttention, dict(num_heads=2, key_value_size=3)],
  [memory_layers.ProductKeyValueMemory, SIZES],
]


def best(keys, query, knn):
  """Scores and indices for arrays [heads, 2, n_keys, key] and [batch, heads, 2, key]."""
  layer = memory_layers.ProductKeyValueMemory(2 * keys.shape[-1], keys.shape[2], len(keys), knn)
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  names = ["n_heads", "product_key", "n_keys", "key"]
  tensors = [
    mtf.import_tf_tensor(mesh, tf.constant(a, tf.float32), list(zip(n, a.shape)))
    for a, n in ((keys, names), (query, ["batch", "n_heads", "product_key", "key"]))
  ]
  outputs = layer.get_indices(*tensors)
  assert [t.shape.dimension_names for t in outputs] == [["batch", "n_heads", "knn"]] * 2
  lowering = mtf.Lowering(graph, {mesh: lm.one_device()})
  return [lowering.export_to_tf_tensor(t).numpy() for t in outputs]


def test_pairs_of_half_keys():
  # Scores of the halves: [1, 3, 2] and [10, 0, 20].
  keys = np.array([[[[1.0], [3], [2]], [[10], [0], [20]]]])
  scores, indices = best(keys, np.ones([1, 1, 2, 1]), 2)
  np.testing.assert_array_equal(scores, [[[23, 22]]])
  # (1, 2) and (2, 2) of 3 x 3.
  np.testing.assert_array_equal(indices, [[[5, 8]]])


def test_of_equal_scores_the_first_is_taken():
  scores, indices = best(np.ones([1, 2, 4, 1]), np.ones([1, 1, 2, 1]), 2)
  np.testing.assert_array_equal(scores, [[[2, 2]]])
  np.testing.assert_array_equal(indices, [[[0, 1]]])


@pytest.mark.parametrize("knn", [1, 2, 3, 4, 5])
def test_best_of_all_pairs(knn):
  rng = np.random.default_rng(knn)
  keys, query = rng.normal(size=[3, 2, 5, 4]), rng.normal(size=[6, 3, 2, 4])
  scores, indices = best(keys, query, knn)
  halves = np.einsum("bhpk,hpnk->bhpn", query, keys)
  pairs = (halves[:, :, 0, :, None] + halves[:, :, 1, None, :]).reshape(6, 3, 25)
  expected = np.argsort(-pairs, -1)[..., :knn]
  np.testing.assert_array_equal(indices, expected)
  np.testing.assert_allclose(scores, np.take_along_axis(pairs, expected, -1), rtol=1e-5, atol=1e-5)


def test_variables_and_initial_values():
  layers = [[memory_layers.ProductKeyValueMemory, dict(SIZES, n_keys=32)]]
  impl = lm.one_device()
  store = lm.initialize(impl, layer_program.make_lm(layers))
  prefix = "transformer/block_000/layer_000/ProductKeyValueMemory/"
  shapes = {
    s.name.removeprefix(prefix): store[s.name].shape.to_string
    for s in store
    if s.name.startswith(prefix)
  }
  norm = "layer_prepostprocess/layer_norm/layer_norm_"
  assert shapes == {
    "keys": "Shape[n_heads=2, product_key=2, n_keys=32, key=3]",
    "values": "Shape[n_values=1024, d_model=4]",
    "query/kernel": "Shape[d_model=4, n_heads=2, product_key=2, key=3]",
    "query/bias": "Shape[n_heads=2, product_key=2, key=3]",
    norm + "scale": "Shape[key=3]",
    norm + "bias": "Shape[key=3]",
  }
  assert np.std(store[prefix + "values"].numpy()) == pytest.approx(1, rel=0.1)
  # Glorot-uniform over the whole shape.
  limit = np.sqrt(6 / (4 * (32 + 3)))
  keys = np.abs(store[prefix + "keys"].numpy())
  assert 0.9 * limit < keys.max() <= limit


@pytest.mark.parametrize("kind", kept(["placement", "simd"], ["simd"]))
def test_training_on_a_mesh(kind, cpu_devices):
  """With the values split over the mesh."""
  targets = np.random.default_rng(1).integers(1, 11, [4, 6]).astype(np.int32)
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = cls("rows:2,cols:4", "batch:rows,n_values:cols", cpu_devices)
  model = layer_program.make_lm(LAYERS)
  actual = layer_program.losses_and_gradients(model, impl, targets)
  expected = layer_program.losses_and_gradients(model, lm.one_device(), targets)
  for a, b in zip(actual, expected):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_decoding():
  layer_program.check_decoding(layer_program.make_lm(LAYERS))


def test_a_memory_learns():
  """All weights get gradients that are not zero."""
  impl, model = lm.one_device(), layer_program.make_lm(LAYERS)
  bi_program.random_weights(lm.initialize(impl, model))

  def program(targets):
    _, loss = model.call_simple(targets, targets, compute_loss=True)
    made = [v for v in targets.graph.trainable_variables if "ProductKey" in v.full_name]
    assert len(made) == 6
    return mtf.gradients([loss], [v.outputs[0] for v in made])

  assert all(np.abs(g).max() > 0 for g in lm.run(impl, program, lm.TARGETS))


@pytest.mark.parametrize(
  "changes,message",
  [(dict(key_size=1), "at least 2"), (dict(knn=5), "1 to n_keys"), (dict(knn=0), "1 to n_keys")],
)
def test_errors(changes, message):
  with pytest.raises(errors.ConfigError, match=message):
    memory_layers.ProductKeyValueMemory(**(SIZES | changes))


def test_an_odd_key_size_is_rounded_down():
  impl = lm.one_device()
  layer = [memory_layers.ProductKeyValueMemory, SIZES | dict(key_size=5)]
  lm.initialize(impl, layer_program.make_lm([layer]))
  keys = [v.shape for v in impl.variable_store if v.name.endswith("/keys")]
  assert [shape.to_integer_list for shape in keys] == [[2, 2, 4, 2]]


def test_halves_cannot_be_split(cpu_devices):
  impl = mtf.PlacementMeshImpl("cols:2", "product_key:cols", cpu_devices[:2])
  with pytest.raises(errors.LayoutError, match="product_key"):
    lm.initialize(impl, layer_program.make_lm(LAYERS))


def test_selector():
  gin.get_configurable("mesh_tensorflow.transformer.memory_layers.ProductKeyValueMemory")
