"""Models with experts: training, decoding, the packaged gin files."""

from __future__ import annotations

import functools

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import (
  moe,
  transformer,
)
from mesh_tensorflow.transformer.gin_paths import gin_dir
from mesh_tensorflow.transformer.model import model_building
from tests.kinds import kept
from tests.transformer import lm_program as lm
from tests.transformer import moe_program


def train(mesh, layout, devices, steps=3, recompute=False, **experts):
  """Losses of some training steps, and the weights after them."""
  impl = mtf.PlacementMeshImpl(mesh, layout, devices[: mtf.convert_to_shape(mesh).size])
  options = dict(num_experts=4, hidden_size=8, group_size=8) | experts
  model = moe_program.make_model(
    options, num_layers=1, layout=layout, mesh_shape=mesh, d_model=8, recompute_grads=recompute
  )

  @mtf.function(impl, input_signature=[mtf.TensorSpec([("batch", 4), ("length", 8)], tf.int32)])
  def step(targets):
    inputs = transformer.autoregressive_inputs(targets)
    sequence_id = mtf.minimum(targets, 1)
    _, loss = model.call_simple(inputs, targets, compute_loss=True, sequence_id=sequence_id)
    mtf.optimize.AdamWeightDecayOptimizer(learning_rate=1e-2).minimize(loss)
    return loss

  rng = np.random.default_rng(0)
  rows = rng.integers(1, 11, [steps, 4, 8]) * (np.arange(8) < [[8], [8], [5], [7]])
  losses = [float(step(r.astype(np.int32), seed=i)) for i, r in enumerate(rows)]
  return losses, {v.name: v.numpy() for v in impl.variable_store}


@functools.cache
def trained_on_one_device(device):
  return train("all:1", "", [device], dropout_rate=0.2, z_loss=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", kept(["all:2", "all:4"], ["all:2"]))
def test_training_with_experts_split_is_that_of_one_device(mesh, cpu_devices):
  """With random second choices and dropout, which must not depend on the layout."""
  want, weights = trained_on_one_device(cpu_devices[0])
  got, got_weights = train(
    mesh, "batch:all,experts:all", cpu_devices, dropout_rate=0.2, z_loss=1e-2
  )
  np.testing.assert_allclose(got, want, rtol=1e-4)
  for name, value in weights.items():
    np.testing.assert_allclose(got_weights[name], value, atol=2e-3, err_msg=name)
  assert len(set(want)) == len(want)


def test_recomputation_keeps_the_auxiliary_loss(cpu_devices):
  plain, _ = train("all:1", "", cpu_devices, loss_coef=1.0, steps=2)
  again, _ = train("all:1", "", cpu_devices, loss_coef=1.0, steps=2, recompute=True)
  np.testing.assert_allclose(again, plain, rtol=1e-5)
  without, _ = train("all:1", "", cpu_devices, loss_coef=0.0, steps=1)
  assert plain[0] > without[0] + 0.1


@pytest.mark.parametrize("cls", [moe.MoE1D, moe.MoE2D])
def test_decoding_step_by_step_is_the_full_forward_pass(cls, cpu_devices):
  """With a slot for every token, a token's result does not depend on the others'."""
  options = dict(capacity_factor_train=8.0, capacity_factor_eval=8.0)
  for mode in ("train", "eval"):
    options[f"second_policy_{mode}"] = "all"
  if cls is moe.MoE2D:
    options |= dict(expert_x=2, expert_y=2, capacity_factor_second_level=8.0)
  else:
    options |= dict(num_experts=4)
  split = mtf.PlacementMeshImpl("all:2", "batch:all,experts:all,expert_x:all", cpu_devices[:2])
  partial = np.array([[5, 6, 0, 0, 0, 0], [3, 4, 2, 0, 0, 0]], np.int32)
  sampled = []
  for impl in (lm.one_device(), split):
    model = moe_program.make_model(
      options, cls, num_layers=1, layout=impl.layout_rules, mesh_shape=impl.shape
    )
    lm.set_golden_weights(lm.initialize(impl, model))

    def sample(partial, model=model):
      return model.sample_autoregressive(partial, stop_at_token=None)

    sampled.append(lm.run(impl, sample, partial))
  ids = sampled[0]
  np.testing.assert_array_equal(sampled[1], ids)

  def forward(ids):
    inputs = transformer.autoregressive_inputs(ids)
    return model.call_simple(inputs, None, compute_loss=False, mode="eval")[0]

  best = lm.run(impl, forward, ids).argmax(-1)
  new = np.arange(6) >= [[2], [3]]
  np.testing.assert_array_equal(ids, np.where(new, best, partial))


SIZES = """
  num_layers = 1
  d_model = 8
  d_ff = 16
  num_heads = 2
  d_kv = 4
  Unitransformer.max_length = 8
  Unitransformer.vocab_divisor = 8
  MoE1D.hidden_size = 8
  MoE1D.num_experts = 4
  MoE1D.group_size = 8
  get_variable_dtype.master_dtype = "float32"
"""


def model_of_files(files, model_type, bindings="", layout="", mesh="all:1"):
  gin.clear_config()
  gin.add_config_file_search_path(gin_dir())
  gin.parse_config_files_and_bindings(["defaults.gin", *files], [bindings], skip_unknown=False)
  return model_building.build_model(model_type, 16, 16, layout, mesh)


def test_gin_file_of_the_language_model(cpu_devices):
  """models/lm_moe.gin, made small, has one loss on all meshes; full size, its shapes."""
  targets = np.random.default_rng(1).integers(1, 16, [4, 8]).astype(np.int32)
  results = []
  for mesh, layout in [("all:1", ""), ("rows:2,cols:2", "batch:rows,experts:rows,heads:cols")]:
    impl = mtf.PlacementMeshImpl(mesh, layout, cpu_devices[: mtf.convert_to_shape(mesh).size])
    model = model_of_files(["models/lm_moe.gin"], "lm", SIZES, layout, mesh)
    results.append(lm.run(impl, lm.loss_program(model), targets, seed=2))
  for one, split in zip(*results):
    np.testing.assert_allclose(split, one, rtol=1e-4, atol=1e-5)

  model = model_of_files(["models/lm_moe.gin"], "lm")
  inputs = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), [("batch", 2), ("length", 8)], tf.int32)
  model.call_simple(inputs, inputs, compute_loss=False, mode="eval")
  shapes = {v.full_name: v.shape.to_integer_list for v in inputs.graph.all_variables}
  experts = {name: s for name, s in shapes.items() if "/MoE1D/" in name}
  for block in range(3):
    prefix = f"transformer/block_{block:03d}/layer_001/MoE1D/"
    assert experts.pop(prefix + "top_2_gating/kernel") == [1024, 32]
    assert experts.pop(prefix + "wi/kernel") == [32, 1024, 4096]
    assert experts.pop(prefix + "wo/kernel") == [32, 4096, 1024]
  assert not experts


def test_gin_file_of_the_encoder_decoder():
  """models/bi_moe.gin with the sizes of models/tiny.gin."""
  model = model_of_files(["models/bi_moe.gin", "models/tiny.gin"], "bitransformer")
  inputs = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), [("batch", 2), ("length", 8)], tf.int32)
  model.call_simple(inputs, inputs, compute_loss=True, mode="train")
  shapes = {v.full_name: v.shape.to_integer_list for v in inputs.graph.all_variables}
  for place in ("encoder/block_000/layer_001", "decoder/block_001/layer_002"):
    assert shapes[f"{place}/MoE1D/wi/kernel"] == [8, 128, 512]
