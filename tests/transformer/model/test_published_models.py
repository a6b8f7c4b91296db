"""Published models as gin files: counted and planned at their size, trained at a small one."""

from __future__ import annotations

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import gin_paths
from mesh_tensorflow.transformer.model import model_building
from mesh_tensorflow.transformer.model import model_steps as programs
from mesh_tensorflow.transformer.modes import plan
from tests.transformer import lm_program as lm


def gpt2(vocab, d, layers, length):
  """Radford et al., 2019: means and biases everywhere, tied embeddings."""
  norm = 2 * d
  attention = 4 * (d * d + d)
  feed_forward = d * 4 * d + 4 * d + 4 * d * d + d
  return vocab * d + length * d + layers * (2 * norm + attention + feed_forward) + norm


def llama(vocab, d, layers, kv, ff, tied, experts=0):
  """Touvron et al., 2023: keys and values of `kv` channels; Jiang et al., 2024, with experts."""
  attention = 2 * d * d + 2 * d * kv
  feed_forward = 3 * d * ff
  if experts:
    feed_forward = experts * feed_forward + experts * d
  return (1 if tied else 2) * vocab * d + layers * (attention + feed_forward + 2 * d) + d


# Name: (tokens, by the formula, as published)
MODELS = {
  "gpt2_small": (50257, gpt2(50257, 768, 12, 1024), 124_439_808),
  "llama_1b": (128256, llama(128256, 2048, 16, 512, 8192, True), 1_235_814_400),
  "llama_7b": (32000, llama(32000, 4096, 32, 4096, 11008, False), 6_738_415_616),
  "llama_8b": (128256, llama(128256, 4096, 32, 1024, 14336, False), 8_030_261_248),
  "mixtral_like": (32000, llama(32000, 4096, 32, 1024, 14336, False, 8), 46_702_792_704),
}
SMALL = """
num_layers = 2
d_model = 16
d_ff = 16
num_heads = 4
d_kv = 4
dropout_rate = 0.0
Unitransformer.max_length = 8
get_variable_dtype.activation_dtype = 'float32'
"""


def load(name, bindings):
  gin.clear_config()
  gin.add_config_file_search_path(gin_paths.gin_dir())
  gin.parse_config_files_and_bindings(["defaults.gin", f"models/{name}.gin"], bindings)


def model_steps(name, mesh_shape="batch:1", layout="", bindings=()):
  """The programs of a model at its size, on a mesh that is not there."""
  load(name, list(bindings))
  vocab = MODELS[name][0]
  model = model_building.build_model("lm", vocab, vocab, layout, mesh_shape)
  impl = mtf.MeshImpl(mesh_shape, layout)
  return programs.ModelSteps(model, impl, "lm", 2, {"inputs": 64, "targets": 64})


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name):
  _, formula, published = MODELS[name]
  assert plan.count_parameters(model_steps(name)) == formula == published


@pytest.mark.parametrize("name", ["llama_1b", "mixtral_like"])
def test_plan(name):
  """A layer of it: what a device has of the weights, and the products of a step."""
  steps = model_steps(
    name,
    "batch:2,model:4",
    "batch:batch,d_ff:model,heads:model,vocab:model,experts:model",
    ["transformer.make_layer_stack.num_layers = 1"],
  )
  report = mtf.describe(steps.train_step(steps.required_features, mtf.optimize.SgdOptimizer))
  experts = name == "mixtral_like"
  layer = "MoE1D/wi_0" if experts else "DenseReluDense/wi_0"
  kernel = next(v for v in report.variables if v.name.endswith(f"layer_001/{layer}/kernel"))
  # A quarter of it, of four bytes each.
  assert kernel.bytes_per_device == (8 * 4096 * 14336 if experts else 2048 * 8192)
  assert report.bytes_moved()["model"] > 0
  # Products of a token with what it meets, three times with those of the backward pass; those of
  # queries and keys come on top.
  met = (2 * 3 * 4096 * 14336 + 8 * 4096) if experts else 3 * 2048 * 8192
  d, kv = (4096, 1024) if experts else (2048, 512)
  met += 2 * d * d + 2 * d * kv + MODELS[name][0] * d
  assert 1.0 < report.flops_needed / (3 * 2 * 128 * met) < 1.1


@pytest.mark.parametrize("name", ["gpt2_small", "llama_1b", "mixtral_like"])
def test_a_small_one_trains(name, cpu_devices):
  """Two steps on split weights: the losses of one device, the second one lower."""
  memory_heads = [] if name == "gpt2_small" else ["num_memory_heads = 2"]
  tokens = np.random.default_rng(0).integers(1, 16, [4, 8]).astype(np.int32)
  results = []
  for mesh, layout in [
    ("all:1", ""),
    ("rows:2,cols:2", "batch:rows,heads:cols,d_ff:cols,experts:cols"),
  ]:
    load(name, [SMALL, *memory_heads])
    impl = mtf.PlacementMeshImpl(mesh, layout, cpu_devices[: mtf.convert_to_shape(mesh).size])
    model = model_building.build_model("lm", 16, 16, layout, mesh)

    @mtf.function(impl, input_signature=[mtf.TensorSpec([("batch", 4), ("length", 8)], "int32")])
    def step(targets, model=model):
      inputs = mtf.shift(targets, 1, targets.shape[1], wrap=False)
      _, loss = model.call_simple(inputs, targets, compute_loss=True)
      mtf.optimize.SgdOptimizer(learning_rate=0.1).minimize(loss)
      return loss

    with lm.eagerly():
      results.append([float(step(tokens, seed=i)) for i in range(2)])
  np.testing.assert_allclose(results[1], results[0], rtol=1e-4)
  assert results[0][1] < results[0][0]
