"""Names and shapes of the variables of all kinds of layers in models, as in TF1 checkpoints."""

from __future__ import annotations

import functools

import gin
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.transformer import (
  adaptive_softmax,
  evolved_transformer,
  fixup_layers,
  heterogeneous_moe,
  memory_layers,
  moe,
  transformer,
  vocab_embeddings,
)
from mesh_tensorflow.transformer import transformer_layers as t
from mesh_tensorflow.transformer.model.moe.router import NONCAUSAL
from tests.transformer import lm_program

# Two heads of three: `heads` is their product where matrices are combined.
from tests.transformer.model import test_inventories

# Two heads of three: `heads` is their product where matrices are combined.
DIMS = dict(num_heads=2, key_value_size=3)
QKVO = {**dict.fromkeys("qkv", "d_model:4 heads:6"), "o": "heads:6 d_model:4"}
KVO = {"kv": "d_model:4 heads:6", "o": "heads:6 d_model:4"}
NORM = "layer_prepostprocess/layer_norm/layer_norm_"


def build(layers, num_layers=2, sublayers=None, dtype=None, **kwargs):
  """The graph of a decoder of blocks of the layers (classes and their arguments)."""
  stack = functools.partial(transformer.LayerStack, **(sublayers or lm_program.SUBLAYERS))
  options = dict(
    d_model=4,
    input_vocab_size=12,
    output_vocab_size=12,
    autoregressive=True,
    max_length=16,
    vocab_divisor=1,
    shared_embedding_and_softmax_weights=True,
    positional_embedding=False,
  )
  model = transformer.Unitransformer(
    transformer.make_layer_stack(layers, stack, num_layers=num_layers), **(options | kwargs)
  )
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  ids = mtf.zeros(mesh, [("batch", 2), ("length", 8)], tf.int32)
  memory = mtf.zeros(mesh, [("batch", 2), ("memory_length", 4), ("d_model", 4)])
  model.call_simple(
    ids,
    ids,
    compute_loss=True,
    variable_dtype=dtype or mtf.VariableDType(),
    encoder_output=memory,
    encoder_sequence_id=mtf.zeros(mesh, memory.shape[:2], tf.int32),
    encoder_layer_outputs=[memory] * 5,
    sequence_id=ids,
  )
  return mesh.graph


def inventory(layers, **kwargs):
  """Dims of the variables by name."""
  return {v.full_name: v.shape for v in build(layers, **kwargs).all_variables}


def shapes(expected):
  return {name: mtf.convert_to_shape(dims) for name, dims in expected.items()}


def model_of(scope, variables, first_only=()):
  """What a model of two blocks of a layer has; some variables are in the first alone."""
  expected = {"transformer/embedding": "vocab:12 d_model:4"}
  expected["transformer/rms_norm/scale"] = "d_model:4"
  for block in range(2):
    prefix = f"transformer/block_{block:03d}/layer_000/"
    expected[f"{prefix}rms_norm/scale"] = "d_model:4"
    for name, dims in variables.items():
      if not block or name not in first_only:
        expected[f"{prefix}{scope}/{name}"] = dims
  return shapes(expected)


def taps(count, channels="d_model:4", output="_d_model:4 d_model:4", kernels=True):
  """The variables of a separable convolution."""
  hack = "separable_conv1d/depthwise_conv_hack/depthwise_dense_"
  made = {f"{hack}{i}/kernel": channels for i in range(count)} if kernels else {}
  return made | {
    f"{hack}0/bias": channels,
    "separable_conv1d/pointwise_dense/kernel": output,
    "separable_conv1d/pointwise_dense/bias": output.split()[1],
  }


def dense(*names):
  made = {f"{name}/kernel": "_d_model:4 d_model:4" for name in names}
  return made | {f"{name}/bias": "d_model:4" for name in names}


EXPERTS = dict(num_experts=3, hidden_size=5)
WI = {"wi/kernel": "experts:3 d_model:4 expert_hidden:5"}
WO = {"wo/kernel": "experts:3 expert_hidden:5 d_model:4"}
GATINGS = {
  "top_2": "top_2_gating",
  "top_n": "top_n_gating",
  "switch": "switch_gating",
  "ntlb": "ntlb_gating",
  "switch_max": "switch_max_gating",
  "expert_selection": "expert_selection_gating",
}


def gate(name, size=4):
  return {f"{name}/kernel": f"d_model:{size} expert_unsplit:3"}


TALKING = dict(
  key_heads_dims=[("a", 2), ("b", 2)],
  softmax_heads_dims=[("a", 2), ("c", 3)],
  value_heads_dims=[("v", 5)],
  key_size=3,
  value_size=6,
)
TALKING_VARIABLES = {
  **dict.fromkeys(["q/kernel", "k/kernel"], "d_model:4 a:2 b:2 d_k:3"),
  "v/kernel": "d_model:4 v:5 d_v:6",
  "y/kernel": "v:5 d_v:6 d_model:4",
  # Heads of both sides, removed ones, added ones.
  "logits/kernel": "a:2 b:2 c:3",
  "weights/kernel": "a:2 c:3 v:5",
}
PLAIN_TALKING = {
  **{f"{n}/kernel": "d_model:4 heads:12 d_k:64" for n in "qk"},
  "v/kernel": "d_model:4 heads:12 d_v:64",
  "y/kernel": "heads:12 d_v:64 d_model:4",
}
BILINEAR = {
  "q/kernel": "_d_model:4 heads:3 d_model:4",
  "y/kernel": "heads:3 _d_model:4 d_model:4",
}
BRANCHED = {
  **dict.fromkeys("qkv", "d_model:4 heads:2 d_kv:3"),
  "o": "heads:2 d_kv:3 d_model:4",
  "kappa": "heads:2",
  "alpha": "heads:2",
  "wi/kernel": "d_model:4 d_ff:4096",
  "wo/kernel": "d_ff:4096 d_model:4",
}
R = {"R": "length:512 heads:2 memory_length:512"}
PI = {"pi/kernel": "d_kv:3 memory_length:512"}
ALPHA = {"alpha": "alpha:1"}
SYNTHESIZER = {
  "random": KVO | R,
  "factorized": KVO | {n: "tmp:16 heads:2 memory_length:512" for n in ("R1", "R2")},
  "dense_minus": KVO | {"q": QKVO["q"]} | PI,
  "random_plus": QKVO | R,
  "random_plus_alpha": QKVO | R | ALPHA,
  "dense_plus": QKVO | PI,
  "dense_plus_alpha": QKVO | PI | ALPHA,
}
CAUSAL = dict(min_relative_pos=-2, max_relative_pos=0, output_size=4)
DYNAMIC = {
  f"dyn_conv_depthwise_dense_{i}/kernel": "d_model:4 repeated_kernel_dim:4" for i in range(3)
}
DYNAMIC |= {f"dyn_conv_depthwise_dense_{i}/bias": "repeated_kernel_dim:4" for i in range(3)}
FEED_FORWARD = {"wi/kernel": "d_model:4 d_ff:5", "wo/kernel": "d_ff:5 d_model:4"}
BRANCHES = [lambda: t.DenseReluDense(5), lambda: t.SelfAttention(**DIMS)]
SELF_EXPERTS = dict(shared_kv=True, **EXPERTS, **DIMS)
Q_WO = "experts:3 expert_hidden:5 d_model:6"

# Class, arguments, variables.
LAYERS = [
  *[
    (
      moe.MoE1D,
      dict(moe_gating=gating, allow_noncausal=gating in NONCAUSAL, **EXPERTS),
      gate(name) | WI | WO,
    )
    for gating, name in GATINGS.items()
  ],
  *[
    (moe.MoE1D, dict(word_embed_mode=mode, **EXPERTS), gate("top_2_gating", size) | WI | WO)
    for mode, size in (("concat", 8), ("concat_stop_grad", 8), ("add", 4), ("embed_only", 4))
  ],
  (
    moe.MoE1D,
    dict(activation=["gelu", "linear"], **EXPERTS),
    gate("top_2_gating") | {f"wi_{i}/kernel": WI["wi/kernel"] for i in range(2)} | WO,
  ),
  (
    heterogeneous_moe.HeterogeneousMoE1D,
    dict(moe_num_layers=2, moe_gating="switch", **EXPERTS),
    gate("switch_gating")
    | {f"expert_layer_{i}/{n}": dims for i in range(2) for n, dims in (WI | WO).items()}
    | {"expert_layer_1/rms_norm/scale": "d_model:4"},
  ),
  (
    moe.MoE2D,
    dict(expert_x=2, expert_y=3, hidden_size=5),
    {
      "outer_gating/kernel": "d_model:4 expert_x_unsplit:2",
      "inner_gating/kernel": "expert_x:2 d_model:4 expert_y_unsplit:3",
      "wi/kernel": "expert_y:3 expert_x:2 d_model:4 expert_hidden:5",
      "wo/kernel": "expert_y:3 expert_x:2 expert_hidden:5 d_model:4",
    },
  ),
  (
    t.ExpertsSelfAttention,
    SELF_EXPERTS,
    {"o": QKVO["o"]} | gate("switch_gating") | WI | {"q_wo/kernel": Q_WO, "k_wo/kernel": Q_WO},
  ),
  *[
    (
      t.ExpertsSelfAttention,
      dict(expert_computation=computation, **SELF_EXPERTS),
      {"o": QKVO["o"], other: QKVO["k"]} | gate("switch_gating") | WI | {"wo/kernel": Q_WO},
    )
    for computation, other in (("q", "kv"), ("kv", "q"))
  ],
  (
    t.TransparentEncDecAttention,
    dict(
      layers_per_encoder_module=2,
      layers_per_decoder_module=1,
      encoder_num_modules=2,
      decoder_num_modules=2,
      **DIMS,
    ),
    QKVO | {"w": "encoder_module_outputs:3 decoder_module_inputs:2"},
  ),
  (t.TalkingHeadsSelfAttention, {}, PLAIN_TALKING),
  (
    t.TalkingHeadsSelfAttention,
    dict(relative_attention_type="bias", **TALKING),
    TALKING_VARIABLES | {"relative_attention_bias": "a:2 c:3 buckets:32"},
  ),
  (
    t.TalkingHeadsSelfAttention,
    dict(dynamic_projections=["x2l", "m2l", "x2w"], **TALKING),
    TALKING_VARIABLES
    | {f"logits/logits_dynamic_{i}/kernel": "d_model:4 a:2 b:2 c:3" for i in range(2)}
    | {"weights/weights_dynamic_0/kernel": "d_model:4 a:2 c:3 v:5"},
  ),
  (t.TalkingHeadsEncDecAttention, TALKING, TALKING_VARIABLES),
  (t.GeneralBilinearSelfAttention, dict(heads_dims=[("heads", 3)]), BILINEAR),
  (t.GeneralBilinearEncDecAttention, dict(heads_dims=[("heads", 3)]), BILINEAR),
  (t.BranchedSelfAttention, DIMS, BRANCHED),
  (t.BranchedEncDecAttention, DIMS, BRANCHED),
  *[(t.Synthesizer, dict(synthesize_mode=m, **DIMS), v) for m, v in SYNTHESIZER.items()],
  (t.LocalSelfAttention, dict(radius=2, **DIMS), QKVO),
  (
    t.Conv1DLayer,
    dict(filter_size=3, output_size=4),
    {"conv2d/kernel": "fh:1 fw:3 input_dim:4 d_model:4"},
  ),
  (t.SeparableConv1DLayer, CAUSAL, taps(3)),
  (
    t.LightweightConv1DLocalAttn,
    dict(num_unique_depth_filters=2, **CAUSAL),
    {f"lightwt_depthwise_dense_{i}/kernel": "repeated_kernel_dim:2" for i in range(3)}
    | taps(3, kernels=False),
  ),
  (t.DynamicConv1DLocalAttn, CAUSAL, DYNAMIC | taps(3, kernels=False)),
  (
    t.LocalConvAttnBlock,
    # It has one group of filters, whatever it is given.
    dict(attention_type="dynamic_conv", num_unique_depth_filters=2, **CAUSAL),
    dense("local_conv_inp_0", "local_conv_inp_1", "local_conv_attn_op_projection")
    | DYNAMIC
    | taps(3, kernels=False),
  ),
  (
    t.ParallelLayer,
    dict(layer_classes=BRANCHES),
    {f"parallel_layer_0/{n}": d for n, d in FEED_FORWARD.items()}
    | {f"parallel_layer_1/{n}": d for n, d in QKVO.items()},
  ),
  (t.ParallelLayer, dict(layer_classes=BRANCHES, use_scope=False), FEED_FORWARD | QKVO),
  (
    memory_layers.ProductKeyValueMemory,
    dict(key_size=8, n_keys=3, n_heads=2, knn=2),
    {
      "keys": "n_heads:2 product_key:2 n_keys:3 key:4",
      "values": "n_values:9 d_model:4",
      "query/kernel": "d_model:4 n_heads:2 product_key:2 key:4",
      "query/bias": "n_heads:2 product_key:2 key:4",
      f"{NORM}scale": "key:4",
      f"{NORM}bias": "key:4",
    },
  ),
  (
    fixup_layers.DenseReluDenseFixup,
    dict(hidden_size=5, num_blocks=2),
    FEED_FORWARD | {"shift": "single_bias:1"},
  ),
  (
    fixup_layers.SelfAttentionFixup,
    dict(num_blocks=2, **DIMS),
    {f"{n}_fixup": dims for n, dims in QKVO.items()},
  ),
  (
    fixup_layers.SelfAttentionFixup,
    dict(num_blocks=2, shared_kv=True, **DIMS),
    {"q_fixup": QKVO["q"]} | {f"{n}_fixup": dims for n, dims in KVO.items()},
  ),
  (fixup_layers.EncDecAttentionFixup, DIMS, QKVO),
  (evolved_transformer.GatedLinearUnitLayer, {}, dense("glu_0", "glu_1")),
]


def _name(case):
  return f"{case[0].__name__}-{'-'.join(str(v) for v in case[1].values() if isinstance(v, str))}"


@pytest.mark.parametrize("cls,kwargs,variables", LAYERS, ids=map(_name, LAYERS))
def test_layers(cls, kwargs, variables):
  first_only = ["w"] if cls is t.TransparentEncDecAttention else []
  assert inventory([[cls, kwargs]]) == model_of(cls.__name__, variables, first_only)


def test_gated_linear_units_of_an_ensemble():
  made = inventory([[evolved_transformer.GatedLinearUnitLayer, {}]], ensemble=3)
  expected = model_of("GatedLinearUnitLayer", dense("glu_0", "glu_1"))
  assert made == {name: mtf.Shape([("ensemble", 3), *s.dims]) for name, s in expected.items()}


def test_layers_that_are_named_and_layers_without_blocks():
  layers = [[t.SelfAttention, "attention", DIMS], [t.DenseReluDense, dict(hidden_size=5)]]
  made = {name.split("/")[2] for name in inventory(layers) if "block" in name}
  assert made == {"attention", "layer_001"}
  gin.bind_parameter("make_layer_stack.block_scope", False)
  made = {name.split("/")[1] for name in inventory(layers)}
  # The blocks' layers of one name have the same variables.
  assert made == {"embedding", "rms_norm", "attention", "layer_001", "layer_003"}


def test_sublayers():
  per_layer = [
    "rms_norm", "scale_norm", "rms_norm_subsampled", "rezero", "true_layer_norm", "legacy_rms_norm",
  ]  # fmt: skip
  sublayers = [getattr(transformer, f"sublayer_{name}") for name in per_layer]
  sublayers += [fixup_layers.sublayer_fixup_scale, fixup_layers.sublayer_fixup_shift]
  made = inventory(
    [[t.DenseReluDense, dict(hidden_size=5)]],
    num_layers=1,
    sublayers=dict(
      sublayers_initial=[],
      sublayers_per_layer=[*sublayers, transformer.sublayer_call_layer],
      sublayers_final=[transformer.sublayer_legacy_final_rms_norm],
    ),
  )
  here = {
    "rms_norm/scale": "d_model:4",
    "scale_norm/scale": "",
    "layer_norm_subsampled/scale": "d_model:4",
    "rezero_weight": "",
    f"true_layer_norm/{NORM}scale": "d_model:4",
    f"true_layer_norm/{NORM}bias": "d_model:4",
    "layer_norm/scale": "d_model:4",
    "fixup_scale_weight": "single_scale:1",
    "fixup_bias": "single_bias:1",
  } | {f"DenseReluDense/{n}": d for n, d in FEED_FORWARD.items()}
  expected = {f"transformer/block_000/layer_000/{n}": d for n, d in here.items()}
  expected["transformer/embedding"] = "vocab:12 d_model:4"
  expected["transformer/final_layer_norm/scale"] = "d_model:4"
  assert made == shapes(expected)


def test_funnel_encoder():
  made = test_inventories.inventory(
    bindings="""
    import mesh_tensorflow.transformer.funnel_transformer
    make_bitransformer.bitransformer_cls = @BitransformerFunnel
    encoder/make_layer_stack.layer_stack_cls = @FunnelTransformerLayerStack
    FunnelTransformerLayerStack.n_blocks = 2
    FunnelTransformerLayerStack.block_param_size = [1, 2]
    FunnelTransformerLayerStack.block_repeat_size = [1, 2]
    FunnelTransformerLayerStack.sublayers_initial = []
    FunnelTransformerLayerStack.sublayers_per_layer = [
      @sublayer_rms_norm, @sublayer_call_layer, @sublayer_residual]
    FunnelTransformerLayerStack.sublayers_final = [@sublayer_rms_norm]
    encoder/make_layer_stack.num_layers = 3
    """,
    length=8,
  )
  model = [("d_model", test_inventories.D)]
  expected = {"encoder/rms_norm/scale": model}
  for block, params in ((0, 1), (1, 2)):
    for param in range(params):
      scope = f"encoder/funnel_block_{block:03d}/param_idx_{param:03d}/submodule_00"
      expected |= {f"{scope}{s}/rms_norm/scale": model for s in range(2)}
      expected |= test_inventories.attention(f"{scope}0/SelfAttention")
      expected |= test_inventories.dense(f"{scope}1/DenseReluDense")
  assert {n: d for n, d in made.items() if n.startswith("encoder/")} == expected


CLUSTERS = [dict(token_count=4, embedding_size=4), dict(token_count=8, embedding_size=2)]
# Class, arguments, variables (after "embedding").
EMBEDDINGS = [
  (
    vocab_embeddings.FactorizedVocabEmbedding,
    dict(inner_dimension_size=3),
    {"1": "vocab:12 inner_vocab:3", "2": "inner_vocab:3 d_model:4"},
  ),
  (
    vocab_embeddings.AdaptiveVocabEmbedding,
    dict(clusters=CLUSTERS),
    {
      "_0": "vocab:4 d_model:4",
      "_11": "vocab:8 inner_vocab:2",
      "_12": "inner_vocab:2 d_model:4",
    },
  ),
  (
    adaptive_softmax.AdaptiveSoftmaxVocabEmbedding,
    dict(clusters=[dict(token_count=3), *CLUSTERS[1:], dict(token_count=1)]),
    # The head has a row for each other cluster.
    {
      "_0": "vocab:5 d_model:4",
      "_11": "vocab:8 inner_vocab:2",
      "_12": "inner_vocab:2 d_model:4",
      "_2": "vocab:1 d_model:4",
    },
  ),
  (
    vocab_embeddings.MixtureOfSoftmaxes,
    dict(num_softmaxes=3),
    {
      "_embedding_weights": "vocab:12 d_model:4",
      "_mixture_weights": "softmax_components:3 d_model:4",
      "_context_weights": "softmax_components:3 _d_model_copy:4 d_model:4",
    },
  ),
  (
    vocab_embeddings.Mixtape,
    dict(gate_embedding_size=2, frequent_token_fraction=0.25),
    {
      "_embedding_weights": "vocab:12 d_model:4",
      "_context_weights": "gates:4 _d_model_copy:4 d_model:4",
      "_context_weights_bias": "gates:4 d_model:4",
      "_prior_weights": "gates:3 gate_embedding:2 d_model:4",
      "_prior_weights_bias": "gates:3 gate_embedding:2",
      "_prior_vocab_vector": "vocab:3 gate_embedding:2",
      "_prior_gates_vector": "gates:3 d_model:4",
      "_prior_bias": "vocab:3 gates:3",
    },
  ),
]


@pytest.mark.parametrize("cls,kwargs,variables", EMBEDDINGS)
def test_embeddings(cls, kwargs, variables):
  gin.bind_parameter("get_vocab_embedding_cls.cls", cls)
  for key, value in kwargs.items():
    gin.bind_parameter(f"{cls.__name__}.{key}", value)
  mean = lambda _, __, logits, *more: mtf.reduce_mean(logits)  # noqa: E731
  made = inventory([[t.DenseReluDense, dict(hidden_size=5)]], loss_fn=mean)
  found = {n: s for n, s in made.items() if n.startswith("transformer/embedding")}
  assert found == shapes({f"transformer/embedding{n}": d for n, d in variables.items()})


def test_initial_values_of_experts():
  """The experts dimension does not count for the fan-in."""
  gates = {"experts": 4, "outer_gating": 4, "inner_gating": 4}
  for cls, kwargs in (
    (moe.MoE1D, EXPERTS),
    (moe.MoE2D, dict(expert_x=2, expert_y=3, hidden_size=5)),
  ):
    for v in build([[cls, kwargs]], num_layers=1).all_variables:
      if cls.__name__ not in v.full_name:
        continue
      made = initializers.convert_to_initializer(v.initializer, tf.float32)
      assert type(made) is initializers.TruncatedNormal, v
      fan_in = 5 if v.full_name.endswith("wo/kernel") else gates["experts"]
      stddev = made.arguments(v.shape.to_integer_list)["stddev"]
      assert stddev == pytest.approx(fan_in**-0.5), v


def test_master_dtypes():
  """Some variables are float32 in whatever dtype the model keeps its variables."""
  dtype = mtf.VariableDType(tf.bfloat16, tf.bfloat16, tf.bfloat16)
  layers = [
    [t.SelfAttention, DIMS],
    [t.Conv1DLayer, dict(filter_size=3, output_size=4)],
    [t.LightweightConv1DLocalAttn, CAUSAL],
    [t.Synthesizer, dict(synthesize_mode="dense_plus", **DIMS)],
    [memory_layers.ProductKeyValueMemory, dict(key_size=8, n_keys=3, n_heads=2, knn=2)],
    [fixup_layers.DenseReluDenseFixup, dict(hidden_size=5, num_blocks=2)],
  ]
  variables = build(layers, num_layers=1, dtype=dtype).all_variables
  found = {v.full_name.split("/", 3)[-1] for v in variables if v.master_dtype == tf.float32}
  assert found == {
    "Conv1DLayer/conv2d/kernel",
    *(f"LightweightConv1DLocalAttn/{n}" for n in taps(3, kernels=False)),
    "Synthesizer/pi/kernel",
    f"ProductKeyValueMemory/{NORM}scale",
    f"ProductKeyValueMemory/{NORM}bias",
  }
