"""Attention over idle mesh axes, hyper prompts in a model, experts, and errors."""

from __future__ import annotations

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import attention, transformer_layers
from tests.transformer import lm_program as lm
from tests.transformer.layer_context import make_context
from tests.transformer.model.layers import numpy_attention as na

RNG = np.random.default_rng(3)
DIMS = dict(num_heads=2, key_value_size=2)
X = RNG.normal(size=[2, 4, 4]).astype(np.float32)
MEMORY = RNG.normal(size=[2, 3, 4]).astype(np.float32)
X_SPEC = mtf.TensorSpec([("batch", 2), ("length", 4), ("d_model", 4)])
MEMORY_SPEC = mtf.TensorSpec([("batch", 2), ("memory_length", 3), ("d_model", 4)])
LAYOUT, MESH = "batch:rows,d_ff:cols", "rows:2,cols:2"


def on_mesh(fn, cpu_devices, kind=mtf.PlacementMeshImpl):
  """The values of `fn(x)` and of the gradients to all variables; the names of dimensions."""
  impl = kind(MESH, LAYOUT, cpu_devices[:4])
  names = set()

  @mtf.function(impl, input_signature=[X_SPEC])
  def program(x):
    y = fn(x)
    names.update(n for o in x.graph.operations for t in o.outputs for n in t.shape.dimension_names)
    return [y, *mtf.gradients([y], [v.value for v in x.graph.trainable_variables])]

  program(X)
  lm.set_golden_weights(impl.variable_store)
  return [t.numpy() for t in program(X)], names


@pytest.mark.parametrize("kind", [mtf.PlacementMeshImpl, mtf.SimdMeshImpl])
@pytest.mark.parametrize("z_loss", [None, 0.1])
def test_idle_axes_divide_the_heads(kind, z_loss, cpu_devices):
  layer = transformer_layers.SelfAttention(z_loss_coeff=z_loss, **DIMS)

  def fn(layout, mesh_shape):
    def build(x):
      ids = mtf.ones(x.mesh, x.shape.dims[:2], dtype=np.int32)
      context = make_context(x, layout=layout, mesh_shape=mesh_shape, sequence_id=ids)
      y = layer.call(context, x)
      return mtf.add_n([y, *context.losses])

    return build

  got, names = on_mesh(fn(LAYOUT, MESH), cpu_devices, kind)
  want, without = on_mesh(fn(None, None), cpu_devices, kind)
  assert "d_ff" in names - without
  for g, w in zip(got, want):
    np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)


def test_what_is_divided():
  mesh = mtf.Mesh(mtf.Graph(), "m")

  def reshaped(layout, mesh_shape, bias=None, unsplittable=("d_kv",)):
    x = mtf.zeros(mesh, [("batch", 4), ("length", 4), ("d_model", 4)])
    context = make_context(x, layout=layout, mesh_shape=mesh_shape)
    q = mtf.zeros(mesh, [("batch", 4), ("length", 4), ("heads", 2), ("d_kv", 4)])
    k = mtf.zeros(mesh, [("batch", 4), ("memory_length", 4), ("heads", 2), ("d_kv", 4)])
    dims = [mtf.Dimension(n, 4) for n in unsplittable]
    args = attention.maybe_reshape_attention_input_for_2d_sharding(context, q, k, k, bias, dims)
    return [None if t is None else str(t.shape) for t in args]

  assert reshaped(None, None) == reshaped("batch:rows,heads:cols", MESH)
  bias = mtf.zeros(mesh, [("heads", 2), ("length", 4), ("memory_length", 4)])
  q, k, v, b = reshaped(LAYOUT, MESH, bias)
  # 4 rows of the batch are two parts, and each part two for the free axis.
  assert "d_ff" in q and "d_ff" in k and k == v and "d_ff" not in b
  q, _, _, b = reshaped("batch:rows,d_ff:cols", "rows:4,cols:2", bias)
  assert "d_ff" in q and "d_ff" in b
  assert "d_ff" not in reshaped("batch:rows,d_ff:cols", "rows:4,cols:8")[0]


def routed(x, gating, wi):
  """The chosen expert of each token, its share, and its hidden layer."""
  share = na.softmax(x @ gating)
  best = share.argmax(-1)
  h = np.maximum(np.einsum("bld,bldh->blh", x, wi[best]), 0)
  return best, np.take_along_axis(share, best[..., None], -1), h


EXPERTS = dict(
  num_experts=2,
  hidden_size=5,
  shared_kv=True,
  switch_policy_train="argmax",
  switch_policy_eval="argmax",
  capacity_factor_train=8.0,
  capacity_factor_eval=8.0,
  **DIMS,
)


def expected_experts(w, computation, memory=None):
  m = X if memory is None else memory
  wi, o = w["wi/kernel"], w["o"]

  def by_experts(x, name):
    best, share, h = routed(x, w["switch_gating/kernel"], wi)
    y = share * np.einsum("blh,blhk->blk", h, w[f"{name}/kernel"][best])
    return y.reshape(*x.shape[:2], 2, 2)

  q_name, k_name = ("q_wo", "k_wo") if computation == "qkv" else ("wo", "wo")
  q = by_experts(X, q_name) if "q" in computation else na.heads_of(X, w["q"], 2)
  k = by_experts(m, k_name) if "kv" in computation else na.heads_of(m, w["kv"], 2)
  bias = na.causal(4) if memory is None else 0.0
  return na.attend(q * 2**-0.5, k, k, bias).reshape(2, 4, 4) @ o


@pytest.mark.parametrize("computation", ["qkv", "q", "kv"])
@pytest.mark.parametrize("with_encoder", [False, True])
def test_experts_compute_queries_and_keys(computation, with_encoder):
  """Positions see each other, and a decoder sees the encoder."""
  classes = [transformer_layers.ExpertsSelfAttention, transformer_layers.ExpertsEncDecAttention]
  layer = classes[with_encoder](expert_computation=computation, **EXPERTS)
  impl = lm.one_device()

  @mtf.function(impl, input_signature=[X_SPEC, MEMORY_SPEC])
  def program(x, memory):
    context = make_context(x, mode="eval", encoder_output=memory)
    y = layer.call(context, x)
    assert len(context.losses) == (2 if with_encoder and computation == "qkv" else 1)
    return y

  program(X, MEMORY)
  lm.set_golden_weights(impl.variable_store)
  w = {s.name: s.numpy().astype(np.float64) for s in impl.variable_store}
  variables = {
    "qkv": {"o", "q_wo/kernel", "k_wo/kernel"},
    "q": {"o", "kv", "wo/kernel"},
    "kv": {"o", "q", "wo/kernel"},
  }[computation]
  assert set(w) == variables | {"wi/kernel", "switch_gating/kernel"}
  want = expected_experts(w, computation, MEMORY if with_encoder else None)
  np.testing.assert_allclose(program(X, MEMORY).numpy(), want, rtol=1e-4, atol=1e-5)


def test_prompts_in_front_of_a_layer():
  """All positions see the prompts; relative positions count from the sequence's start."""
  layer = transformer_layers.SelfAttention(
    hyperprompt_mtlshare=True,
    hyperprompt_length_encoder=2,
    hyperprompt_hidden_dim=3,
    hyperprompt_task_num=2,
    relative_attention_type="bias",
    relative_attention_num_buckets=8,
    **DIMS,
  )
  impl = lm.one_device()
  prompts = RNG.normal(size=[2, 2, 4]).astype(np.float32)

  @mtf.function(
    impl,
    input_signature=[X_SPEC, mtf.TensorSpec([("task", 2), ("memory_length", 2), ("d_model", 4)])],
  )
  def program(x, prompts):
    context = make_context(x, shared_params={"encoder": {"prompts": prompts}})
    tasks = [x.shape[0], mtf.Dimension("one", 1)]
    context.cache["task-id"] = mtf.import_tf_tensor(x.mesh, [[1], [0]], tasks)
    with mtf.variable_scope("encoder"), mtf.variable_scope("block_000"):
      first = layer.call(context, x)
    with mtf.variable_scope("decoder"):
      return first, layer.call(context, x)

  program(X, prompts)
  lm.set_golden_weights(impl.variable_store)
  y, without = program(X, prompts)
  w = {s.name: s.numpy().astype(np.float64) for s in impl.variable_store}

  def expected(scope, p):
    q, k, v = (na.heads_of(X, w[f"{scope}/{n}"], 2) for n in "qkv")
    n = 0
    if p is not None:
      norm = [w[f"{scope}/prompts_layernorm/layer_norm/layer_norm_{s}"] for s in ("scale", "bias")]
      p = (p - p.mean(-1, keepdims=True)) / np.sqrt(p.var(-1, keepdims=True) + 1e-6)
      p, n = p * norm[0] + norm[1], 2

      def front(which):
        h = np.maximum(p @ w[f"{scope}/prompt/w_{which}_up"], 0)
        return np.einsum("tph,hnk->tpnk", h, w[f"{scope}/prompt/w_{which}_down"])[[1, 0]]

      k, v = np.concatenate([front("k"), k], 1), np.concatenate([front("v"), v], 1)
    relative = na.relative(4, 4 + n) - n
    bias = w[f"{scope}/relative_attention_bias"][:, na.bucket(relative, False, 8)]
    return (
      na.attend(q, k, v, bias + np.where(relative > 0, -1e9, 0)).reshape(2, 4, 4) @ w[f"{scope}/o"]
    )

  np.testing.assert_allclose(y, expected("encoder/block_000", prompts), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(without, expected("decoder", None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("given", "taken"), [(None, "encoder"), ("decoder", "decoder")])
def test_parameters_of_prompts_are_of_the_open_scope_or_the_given_one(given, taken):
  x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), X_SPEC.shape)
  d_kv = mtf.Dimension("d_kv", 2)
  with mtf.variable_scope("encoder"), mtf.variable_scope("block_000"):
    with pytest.raises(errors.ConfigError, match=f'shared_params."{taken}".."prompts". is missing'):
      attention.make_params_hyperprompt(
        2, 2, 3, d_kv, make_context(x, shared_params={}), True, 0.0, 2, scope=given
      )


def calls(layer, **kwargs):
  x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), X_SPEC.shape)
  return layer.call(make_context(x, **kwargs), x)


@pytest.mark.parametrize("order", ["length batch heads d_kv", "batch heads length d_kv"])
def test_results_have_the_order_of_queries_and_products_that_of_matrices(order):
  sizes = {"batch": 2, "heads": 2, "length": 4, "memory_length": 3, "d_kv": 5, "d_v": 6}
  mesh = mtf.Mesh(mtf.Graph(), "m")
  names = (order, "memory_length batch heads d_kv", "memory_length batch heads d_v")
  q, k, v = (mtf.zeros(mesh, [(n, sizes[n]) for n in of.split()]) for of in names)
  y = attention.attention(q, k, v, k.shape[0], k.shape[-1], v.shape[-1])
  assert y.shape == q.shape - k.shape[-1] + v.shape[-1]
  # The matrices are the last two dims of each factor; what is in order already is left as it is.
  einsums = [op for op in mesh.graph.operations if isinstance(op, mtf.EinsumOperation)]
  logits = next(op for op in einsums if len(op.inputs) == 2)
  shared = [n for n in order.split() if n in ("batch", "heads")]
  assert [x.shape.dimension_names for x in logits.inputs] == [
    [*shared, "length", "d_kv"], [*shared, "memory_length", "d_kv"]
  ]  # fmt: skip
  assert sum(len(op.inputs) == 1 for op in einsums) == (4 if order.startswith("length") else 2)


def test_errors_tell_what_would_be_legal():
  layers = transformer_layers
  with pytest.raises(errors.ConfigError, match="synthesize_mode must be one of random, fac"):
    calls(layers.Synthesizer(synthesize_mode="sparse", **DIMS))
  with pytest.raises(errors.ShapeError, match="length=4 is longer than the tables"):
    calls(layers.Synthesizer(synthesize_mode="random", attention_kwargs=dict(max_length=3), **DIMS))
  with pytest.raises(errors.ConfigError, match="\"bias_shared\", got 'contextual'"):
    layers.TalkingHeadsSelfAttention(relative_attention_type="contextual")
  with pytest.raises(errors.ConfigError, match="\"bias_shared\", got 'contextual'"):
    layers.GeneralBilinearSelfAttention(relative_attention_type="contextual")
  with pytest.raises(errors.ConfigError, match="x2l, m2l, x2w, m2w"):
    layers.TalkingHeadsSelfAttention(dynamic_projections=["x2y"])
  with pytest.raises(errors.ConfigError, match="num_memory_heads must be 0"):
    layers.BranchedSelfAttention(num_memory_heads=1)
  with pytest.raises(errors.ConfigError, match="shared_kv=True"):
    calls(layers.ExpertsSelfAttention(**DIMS))
  with pytest.raises(errors.ConfigError, match='"qkv", "q" or "kv"'):
    calls(layers.ExpertsSelfAttention(expert_computation="v", shared_kv=True, **DIMS))
  with pytest.raises(errors.ConfigError, match="must divide output_size"):
    layers.LightweightConv1DLocalAttn(0, 1, 4, num_unique_depth_filters=3)
  with pytest.raises(errors.UnsupportedError, match="lightweight_conv, dynamic_conv"):
    layers.LocalConvAttnBlock(0, 1, 4, attention_type="sparse_conv")
  with pytest.raises(errors.ConfigError, match="no such mtf function"):
    calls(layers.SeparableConv1DLayer(0, 1, 4, activation="nothing"))
  with pytest.raises(errors.ConfigError, match="task-id"):
    layer = layers.SelfAttention(
      hyperprompt_length_encoder=2, hyperprompt_hidden_dim=3, hyperprompt_task_num=2, **DIMS
    )
    mesh = mtf.Mesh(mtf.Graph(), "m")
    x = mtf.zeros(mesh, X_SPEC.shape)
    prompts = mtf.zeros(mesh, [("task", 2), ("memory_length", 2), ("d_model", 4)])
    with mtf.variable_scope("encoder"):
      layer.call(make_context(x, shared_params={"encoder": {"prompts": prompts}}), x)
  hybrid = layers.SelfAttention(attention_func="hybrid", **DIMS)
  with pytest.raises(errors.UnsupportedError, match="one position at a time"):
    x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), [("batch", 2), ("d_model", 4)])
    dim = mtf.Dimension("memory_length", 4)
    attention.hybrid_attention(x, x, x, None, dim, x.shape[1], x.shape[1])
  assert hybrid.attention_fn is attention.hybrid_attention
  with pytest.raises(errors.ConfigError, match="encoder_num_modules"):
    layer = layers.TransparentEncDecAttention(2, 1, 2, 2, **DIMS)
    mesh = mtf.Mesh(mtf.Graph(), "m")
    x, m = mtf.zeros(mesh, X_SPEC.shape), mtf.zeros(mesh, MEMORY_SPEC.shape)
    layer.call(make_context(x, encoder_output=m, encoder_layer_outputs=[m, m]), x)


def test_gin_names_and_inherited_bindings():
  gin.parse_config("""
    SelfAttention.num_heads = 3
    SelfAttention.relative_attention_type = 'bias'
    SelfAttention.dropout_rate = 0.5
    BranchedEncDecAttention.key_value_size = 7
    LocalSelfAttention.radius = 5
    mesh_tensorflow.transformer.transformer_layers.Conv1DLayer.filter_size = 4
    ParallelLayer.layer_classes = [@DenseReluDense, @LocalSelfAttention]
  """)
  layers = transformer_layers
  branched = layers.BranchedEncDecAttention()
  assert (branched.num_heads, branched.key_value_size) == (3, 7)
  assert branched.relative_attention_type is None
  assert branched.keep_query_heads_dims and not branched.combine_dims
  local = layers.LocalSelfAttention()
  # What the constructor passes on is its own; the rest comes from SelfAttention's bindings.
  assert (local.radius, local.num_heads, local.relative_attention_type) == (5, 8, "bias")
  assert layers.Synthesizer().dropout_rate == 0.0 and layers.Synthesizer().num_heads == 8
  assert layers.ExpertsSelfAttention().num_heads == 3
  assert layers.Conv1DLayer(output_size=2).filter_size == 4
  assert [type(x) for x in layers.ParallelLayer().layers] == [
    layers.DenseReluDense,
    layers.LocalSelfAttention,
  ]
