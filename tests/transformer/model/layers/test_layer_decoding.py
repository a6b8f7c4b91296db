"""Layers in a decoder step by step, and all positions at once."""

from __future__ import annotations

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer_layers as t
from tests.transformer import decode_program as program
from tests.transformer import lm_program as lm

DIMS = dict(num_heads=2, key_value_size=2)
TALKING = dict(
  key_heads_dims=[("kh", 2)],
  softmax_heads_dims=[("sh", 4)],
  value_heads_dims=[("vh", 2)],
  key_size=3,
  value_size=3,
)
DYNAMIC = dict(dynamic_projections_init_scale=1.0, **TALKING)
EXPERTS = dict(
  num_experts=2,
  hidden_size=4,
  shared_kv=True,
  switch_policy_train="argmax",
  switch_policy_eval="argmax",
  capacity_factor_train=8.0,
  capacity_factor_eval=8.0,
  **DIMS,
)
CAUSAL = dict(min_relative_pos=-2, max_relative_pos=0, output_size=4)
SHARED_BIAS = dict(relative_attention_type="bias_shared", relative_attention_num_buckets=4)
K_AND_V = ["batch:4 memory_length:8 heads:2 d_kv:2"] * 2
WINDOW = ["batch:4 length:3 d_model:4"]


def parallel():
  return t.ParallelLayer(
    [
      lambda: t.DenseReluDense(5),
      lambda: t.SelfAttention(**DIMS),
      lambda: t.LocalSelfAttention(radius=2, **DIMS),
    ]
  )


# Name: (class, arguments, decoding states)
CASES = {
  "local": (t.LocalSelfAttention, dict(radius=3, **DIMS), ["batch:4 heads:2 window:3 d_kv:2"] * 2),
  "local_shared": (
    t.LocalSelfAttention,
    dict(radius=3, num_memory_heads=1, shared_kv=True, **DIMS),
    ["batch:4 window:3 d_kv:2"],
  ),
  "talking_heads": (
    t.TalkingHeadsSelfAttention,
    TALKING | SHARED_BIAS,
    ["batch:4 memory_length:8 kh:2 d_k:3", "batch:4 memory_length:8 vh:2 d_v:3"],
  ),
  "dynamic_talking_heads": (
    t.TalkingHeadsSelfAttention,
    dict(dynamic_projections=["x2l", "m2l", "x2w", "m2w"], **DYNAMIC),
    [
      "batch:4 memory_length:8 kh:2 d_k:3",
      "batch:4 memory_length:8 vh:2 d_v:3",
      "batch:4 memory_length:8 d_model:4",
    ],
  ),
  "bilinear": (
    t.GeneralBilinearSelfAttention,
    dict(heads_dims=[("heads", 2)]) | SHARED_BIAS,
    ["batch:4 memory_length:8 d_model:4"],
  ),
  "branched": (t.BranchedSelfAttention, DIMS, K_AND_V),
  "experts_qkv": (t.ExpertsSelfAttention, EXPERTS, K_AND_V[:1]),
  "experts_q": (t.ExpertsSelfAttention, dict(expert_computation="q", **EXPERTS), K_AND_V[:1]),
  "experts_kv": (t.ExpertsSelfAttention, dict(expert_computation="kv", **EXPERTS), K_AND_V[:1]),
  **{
    f"synthesizer_{mode}": (t.Synthesizer, dict(synthesize_mode=mode, **DIMS), K_AND_V)
    for mode in ("random", "factorized", "dense_minus", "random_plus_alpha", "dense_plus")
  },
  "separable": (t.SeparableConv1DLayer, CAUSAL, WINDOW),
  "separable_of_earlier": (
    t.SeparableConv1DLayer,
    dict(min_relative_pos=-3, max_relative_pos=-1, output_size=4, activation="relu"),
    ["batch:4 length:4 d_model:4"],
  ),
  "lightweight": (t.LightweightConv1DLocalAttn, CAUSAL | dict(num_unique_depth_filters=2), WINDOW),
  "local_conv_block": (t.LocalConvAttnBlock, CAUSAL | dict(attention_type="dynamic_conv"), WINDOW),
  "conv1d": (t.Conv1DLayer, dict(filter_size=1, output_size=4), ["batch:4 length:1 d_model:4"]),
  "parallel": (parallel, {}, K_AND_V + ["batch:4 heads:2 window:2 d_kv:2"] * 2),
}
WITH_ENCODER = {
  # Sentinels are among the tokens; the relative positions depend on those before.
  "relative": (t.EncDecAttention, DIMS | SHARED_BIAS, []),
  "talking_heads": (
    t.TalkingHeadsEncDecAttention,
    dict(dynamic_projections=["x2l", "m2w"], **DYNAMIC),
    [],
  ),
  "bilinear": (t.GeneralBilinearEncDecAttention, dict(heads_dims=[("heads", 2)]), []),
  "branched": (t.BranchedEncDecAttention, DIMS, []),
  "experts": (t.ExpertsEncDecAttention, EXPERTS, []),
  "transparent": (
    t.TransparentEncDecAttention,
    dict(
      layers_per_encoder_module=2,
      layers_per_decoder_module=2,
      encoder_num_modules=2,
      decoder_num_modules=1,
      **DIMS,
    ),
    [],
  ),
}
ALL = [(n, False) for n in CASES] + [(n, True) for n in WITH_ENCODER]


def values(program_):
  """Those of a program with the golden weights."""
  impl = lm.one_device()
  function = mtf.function(impl, input_signature=program.SIGNATURE)(program_)
  with lm.eagerly():
    function(*program.ARGUMENTS)
    lm.set_golden_weights(impl.variable_store)
    return [v.numpy() for v in function(*program.ARGUMENTS)]


def check_steps(program_):
  """Logits of steps are those of the positions; the positions' depend on all variables."""
  logits, squared, steps = values(program_)
  np.testing.assert_allclose(steps, program.expected_steps(logits), rtol=1e-4, atol=1e-5)
  assert squared > 1e-3


@pytest.mark.parametrize("name,with_encoder", ALL)
def test_steps_are_positions_of_the_whole(name, with_encoder):
  cls, kwargs, states = (WITH_ENCODER if with_encoder else CASES)[name]
  gin.bind_parameter("relative_position_spans.num_sentinels", 5)
  model = program.make_model(cls, kwargs, num_layers=1)
  forward, decode = program.forward(model, with_encoder), program.decode(model, with_encoder)

  def both(*tensors):
    logits, _, squared = forward(*tensors)
    steps, first = decode(*tensors)
    assert [s.shape for s in first] == [mtf.convert_to_shape(s) for s in states]
    return logits, squared, steps

  check_steps(both)


def test_prompts_while_decoding():
  """A decoder with prompts: the states are without them."""
  prompts = np.random.default_rng(2).normal(size=[3, 2, 4]).astype(np.float32)
  options = dict(
    hyperprompt_mtlshare=True,
    hyperprompt_length_decoder=2,
    hyperprompt_hidden_dim=3,
    hyperprompt_task_num=3,
  )
  model = program.make_model(t.SelfAttention, options | DIMS)
  model.name = "decoder"

  def both(tokens, *encoder):
    dims = [("task", 3), ("memory_length", 2), ("d_model", 4)]
    shared = {"prompts": mtf.import_tf_tensor(tokens.mesh, prompts, dims)}
    tasks = mtf.import_tf_tensor(tokens.mesh, [[2], [0], [1], [2]], [("batch", 4), ("one", 1)])
    arguments = dict(shared_params={"decoder": shared, "task-id": tasks})
    logits, _, squared = program.forward(model, **arguments)(tokens, *encoder)
    steps, first = program.decode(model, **arguments)(tokens, *encoder)
    assert [s.shape for s in first] == [mtf.convert_to_shape(s) for s in K_AND_V]
    return logits, squared, steps

  check_steps(both)
