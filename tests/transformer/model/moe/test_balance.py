"""Balance of experts by a bias: its rule, in layers, in steps, with microbatches and on meshes."""

from __future__ import annotations

import functools

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import moe
from mesh_tensorflow.transformer.model import model_steps, step_sums
from tests.transformer import lm_program as lm
from tests.transformer import moe_program

OPTIONS = dict(moe_gating="top_k", top_n_num_experts_per_token=2, balance_rate=0.125, dropless=True)
BIAS = "transformer/block_000/layer_001/MoE1D/top_k_gating/balance_bias"


def test_the_rule():
  """A step up where an expert got less than the mean of tokens, down where it got more."""
  rng = np.random.default_rng(0)
  x, kernel = rng.normal(size=[4, 8, 4]), rng.normal(size=[4, 4])
  nonpadding = np.arange(8) < [[8], [5], [1], [8]]
  impl = lm.one_device()

  def step(x, nonpadding):
    bag = moe.HParams(
      **{f"moe_{k}": v for k, v in OPTIONS.items()}, moe_num_experts=4, moe_hidden_size=4
    )
    bag.add_hparam("moe_gating", "top_k")
    loads = []
    moe.transformer_moe_layer_v1(
      x, x.shape.dims[-1], bag, True, mtf.VariableDType(), nonpadding=nonpadding, loads=loads
    )
    step_sums.record(x.graph, loads)
    sums = step_sums.take(x.graph)
    (variable,) = [load.variable for load in loads]
    step_sums.update(x.graph, sums)
    assert not step_sums.take(x.graph)
    return [*sums.values(), mtf.identity(variable)]

  dims = [("batch", 4), ("length", 8), ("d_model", 4)]
  signature = [mtf.TensorSpec(dims, "float32"), mtf.TensorSpec(dims[:2], "float32")]
  function = mtf.function(impl, input_signature=signature)(step)
  bias = np.zeros(4)
  with lm.eagerly():
    function(x, nonpadding)
    impl.variable_store["top_k_gating/kernel"].assign(kernel.astype(np.float32))
    impl.variable_store["top_k_gating/balance_bias"].assign(bias.astype(np.float32))
    p = np.exp(x @ kernel)
    p /= p.sum(-1, keepdims=True)
    counts = set()
    for _ in range(3):
      chosen = np.argsort(-(p + bias), axis=-1)[..., :2][nonpadding]
      expected = np.bincount(chosen.ravel(), minlength=4)
      count, before = function(x, nonpadding)
      np.testing.assert_array_equal(count, expected)
      counts.add(tuple(expected))
      np.testing.assert_allclose(before, bias)
      bias += 0.125 * np.sign(expected.mean() - expected)
      np.testing.assert_allclose(impl.variable_store["top_k_gating/balance_bias"].numpy(), bias)
  assert len(counts) > 1, "the bias changed no choice"


def trained(mesh, layout, devices, microbatches=1, recompute=False, steps=3):
  """Biases and losses of a model after steps of the trainer's program."""
  gin.clear_config()
  tokens = 32 // microbatches
  gin.bind_parameter("serialize_num_microbatches.tokens_per_microbatch_per_replica", tokens)
  impl = mtf.PlacementMeshImpl(mesh, layout, devices[: mtf.convert_to_shape(mesh).size])
  model = moe_program.make_model(
    dict(num_experts=4, hidden_size=8, group_size=8, **OPTIONS),
    num_layers=1, layout=layout, mesh_shape=mesh, recompute_grads=recompute,
  )  # fmt: skip
  program = model_steps.ModelSteps(model, impl, "lm", 4, {"targets": 8})
  optimizer = functools.partial(mtf.optimize.SgdOptimizer)
  step = program.train_step(["targets"], optimizer)
  tokens = np.random.default_rng(1).integers(1, 11, [steps, 4, 8]).astype(np.int32)
  with lm.eagerly():
    losses = [float(step(t, 0.05, np.int64(i))) for i, t in enumerate(tokens)]
    bias = impl.variable_store[BIAS].numpy()
    if microbatches == 1 and not recompute:
      evaluation = program.eval_step(["targets"])
      evaluation(tokens[0])
      np.testing.assert_array_equal(impl.variable_store[BIAS].numpy(), bias)
  return losses, bias


@functools.cache
def on_one_device(device):
  return trained("all:1", "", [device])


@pytest.mark.parametrize(
  "mesh,layout,options",
  [
    ("all:1", "", dict(microbatches=2)),
    ("all:1", "", dict(recompute=True)),
    ("rows:2", "batch:rows,experts:rows", {}),
  ],
)
def test_one_bias_whatever_steps_are_made_of(mesh, layout, options, cpu_devices):
  want_losses, want = on_one_device(cpu_devices[0])
  losses, bias = trained(mesh, layout, cpu_devices, **options)
  np.testing.assert_allclose(losses, want_losses, rtol=1e-4)
  # Whole steps of the rate: exactly these.
  np.testing.assert_allclose(bias, want, atol=1e-6)
  assert np.abs(want).max() >= 0.125


def test_the_bias_is_no_trained_variable(cpu_devices):
  model = moe_program.make_model(dict(num_experts=4, hidden_size=8, **OPTIONS), num_layers=1)
  graph = mtf.Graph()
  targets = mtf.ones(mtf.Mesh(graph, "m"), [("batch", 2), ("length", 4)], "int32")
  model.call_simple(targets, targets, compute_loss=True)
  (bias,) = [v for v in graph.all_variables if v.full_name == BIAS]
  assert bias not in graph.trainable_variables and bias.dtype.slice_dtype == "float32"


@pytest.mark.parametrize(
  "options,says",
  [
    (dict(router_scores="tanh"), "router_scores 'tanh' is none of softmax, sigmoid"),
    (dict(balance_rate=0.0), "balance_rate must be positive, or None"),
    (dict(top_n_num_experts_per_token=5), "must be 1 to 4, the number of experts, got 5"),
    (
      dict(moe_gating="expert_selection", allow_noncausal=True),
      "'expert_selection' lets experts choose tokens",
    ),
  ],
)
def test_wrong_options(options, says):
  model = moe_program.make_model(
    dict(num_experts=4, hidden_size=8) | OPTIONS | options, num_layers=1
  )
  targets = mtf.ones(mtf.Mesh(mtf.Graph(), "m"), [("batch", 2), ("length", 4)], "int32")
  with pytest.raises(errors.ConfigError, match=says):
    model.call_simple(targets, targets, compute_loss=True)
