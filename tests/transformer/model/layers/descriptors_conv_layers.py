"""Convolutional and other layers against NumPy: variables, values, gradients."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer_layers
from mesh_tensorflow.transformer.model.attention.prompts import concat_hyper_prompts_kv
from tests.conformance.framework import T, op
from tests.transformer.layer_context import make_context
from tests.transformer.model.layers import numpy_attention as na

X = T("batch:2 length:4 d_model:4", -1, 1)
INPUTS = T("batch:2 length:4", dtype="int32", values=[[0, 5, 3, 2], [4, 1, 0, 0]])
MASK = (np.asarray(INPUTS.values) != 0)[..., None].astype(np.float64)
DENSE = "batch:2 length:4 _d_model:4 d_model:4"


def weights(dims):
  return T(dims, -0.9, 0.9)


def call(layer, **kwargs):
  return lambda x, inputs: layer.call(make_context(x, inputs=inputs, **kwargs), x)


# Below the layer's scope, dense layers without ensembles.
HACK = "separable_conv1d/depthwise_conv_hack/depthwise_dense_"


def pointwise(size):
  """The variables after the depthwise kernels, to an output of `size`."""
  reduced = "_d_model:4" if size == 4 else "d_model:4"
  return {
    f"{HACK}0/bias": "d_model:4",
    "separable_conv1d/pointwise_dense/kernel": weights(f"{reduced} d_model:{size}"),
    "separable_conv1d/pointwise_dense/bias": f"d_model:{size}",
  }


def taps(name, count, dims):
  return {f"{name}{i}/kernel": weights(dims) for i in range(count)}


def separable_mirror(first, count):
  def mirror(x, inputs, *w):
    kernels, (bias, kernel, out_bias) = w[:count], w[count:]
    return na.separable(x * MASK, kernels, first, bias, kernel, out_bias)

  return mirror


def lightweight(x, inputs, *w):
  """Three taps from -2, two groups of channels with the same filters."""
  kernels = np.tile(na.softmax(np.stack(w[:3]), axis=0), 2)
  return na.separable(x * MASK, kernels, -2, *w[3:])


def dynamic(x, inputs, *w):
  """Two taps from -1, computed from the input."""
  kernels, biases, rest = w[0:4:2], w[1:4:2], w[4:]
  logits = np.stack([x @ k + b for k, b in zip(kernels, biases)])
  return na.separable(x * MASK, na.softmax(logits, axis=0), -1, *rest)


def block(x, inputs, k0, b0, k1, b1, *w):
  *inner, k2, b2 = w
  gated = (x @ k0 + b0) * na.sigmoid(x @ k1 + b1)
  return dynamic(gated, inputs, *inner) @ k2 + b2


LIGHTWEIGHT = taps("lightwt_depthwise_dense_", 3, "repeated_kernel_dim:2") | pointwise(4)
DYNAMIC = {}
for _i in range(2):
  DYNAMIC[f"dyn_conv_depthwise_dense_{_i}/kernel"] = weights("d_model:4 repeated_kernel_dim:4")
  DYNAMIC[f"dyn_conv_depthwise_dense_{_i}/bias"] = "repeated_kernel_dim:4"
DYNAMIC |= pointwise(4)


def dense(name):
  return {f"{name}/kernel": weights("_d_model:4 d_model:4"), f"{name}/bias": "d_model:4"}


MEETING = (DENSE, "batch:2 length:4 d_model:4 repeated_kernel_dim:4")
QKVO = {name: weights("d_model:4 heads:4") for name in "qkv"} | {"o": weights("heads:4 d_model:4")}
SELF = ("batch:2 length:4 memory_length:4 heads:2 d_kv:2", "batch:2 length:4 d_model:4 heads:4")
SELF += ("batch:2 memory_length:4 d_model:4 heads:4",)
DIMS = dict(num_heads=2, key_value_size=2)


def parallel():
  return transformer_layers.ParallelLayer(
    [
      lambda: transformer_layers.DenseReluDense(hidden_size=4),
      lambda: transformer_layers.SelfAttention(**DIMS),
    ]
  )


def parallel_mirror(x, inputs, wi, wo, *qkvo):
  dense_part = np.maximum(x @ wi, 0) @ wo
  return (dense_part + na.self_attention(x, *qkvo, 2, na.causal(4))) * 0.5**0.5


# ------------------------------------------------------------------------ prompts

PROMPTS = T("task:3 memory_length:2 d_model:4", -1, 1)
TASKS = T("batch:2 one:1", dtype="int32", values=[[2], [0]])
KV = T("batch:2 memory_length:3 heads:2 d_kv:2")
D_KV = mtf.Dimension("d_kv", 2)
NORM = {
  f"prompts_layernorm/layer_norm/layer_norm_{name}": "d_model:4" for name in ("scale", "bias")
}


def prompted(k, v, prompts, task, *parameters, share=True, **kwargs):
  """Keys and values with prompts in front, of the tasks of the rows."""
  x = mtf.zeros(k.mesh, mtf.Shape([k.shape[0], ("length", 3), ("d_model", 4)]))
  shared = {"prompts": prompts} | dict(zip(HYPER_NAMES, parameters))
  scope = mtf.get_variable_scope().name.split("/")[0]
  context = make_context(x, shared_params={scope: shared})
  context.cache["task-id"] = task
  arguments = (k, v, scope, bool(parameters), k.shape[1], 3, 2, 3, D_KV, context, share, 0.0, 2)
  if not parameters:
    return concat_hyper_prompts_kv(*arguments)[:3]
  with mtf.variable_scope("block_001"):
    return concat_hyper_prompts_kv(*arguments)[:3]


def normalized(x, scale, bias):
  centered = x - x.mean(-1, keepdims=True)
  return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def network(p, up, down, task):
  """The prompts of the rows' tasks; weights with a leading dimension of tasks."""
  h = np.maximum(np.einsum("tpd,tdh->tph", p, up), 0)
  return np.einsum("tph,thnk->tpnk", h, down)[task[:, 0]]


def shared_network(k, v, prompts, task, k_up, v_up, k_down, v_down, scale, bias):
  p = normalized(prompts, scale, bias)
  k_up, v_up, k_down, v_down = (np.stack([w] * 3) for w in (k_up, v_up, k_down, v_down))
  return separate_network(k, v, p, task, k_up, v_up, k_down, v_down)


def separate_network(k, v, p, task, k_up, v_up, k_down, v_down, *norm):
  p = normalized(p, *norm) if norm else p
  return (
    np.concatenate([network(p, k_up, k_down, task), k], 1),
    np.concatenate([network(p, v_up, v_down, task), v], 1),
    np.arange(5),
  )


HYPER_NAMES = ["task_raw_embedding", "layer_embedding", "task_projector_layer_one"]
HYPER_NAMES += ["task_projector_layer_two"]
HYPER_NAMES += [f"hypernet_w_{a}_{b}" for a in "kv" for b in ("up", "down")]
HYPER = [
  weights("task:3 raw:2"),
  weights("layers:2 layer_embedding:1"),
  weights("embedding:3 projected:4"),
  weights("projected:4 hyper:4"),
  *[weights("hyper:4 d_model:4 hidden:3"), weights("hyper:4 hidden:3 heads:2 d_kv:2")] * 2,
]


def hyper_network(k, v, prompts, task, raw, layers, one, two, ku, kd, vu, vd, *norms):
  """In the block of number 1."""
  e = np.concatenate([raw, np.broadcast_to(layers[1], [3, 1])], 1)
  e = normalized(np.maximum(e @ one, 0) @ two, *norms[:2])
  ku, kd, vu, vd = (np.tensordot(e, w, 1) for w in (ku, kd, vu, vd))
  return separate_network(k, v, normalized(prompts, *norms[2:]), task, ku, vu, kd, vd)


def network_variables(leading=""):
  up, down = f"{leading}d_model:4 prefix_hidden:3", f"{leading}prefix_hidden:3 heads:2 d_kv:2"
  return {
    "prompt/w_k_up": weights(up),
    "prompt/w_v_up": weights(up),
    "prompt/w_k_down": weights(down),
    "prompt/w_v_down": weights(down),
  }


PROMPTED = dict(
  unsplit=("memory_length",),
  together=(
    "batch:2 task:3 heads:2 d_kv:2",
    "task:3 d_model:4 prefix_hidden:3",
    "task:3 prefix_hidden:3 heads:2 d_kv:2",
    "batch:2 length:3 d_model:4",
  ),
)

DESCRIPTORS = [
  op(
    "conv1d_layer",
    call(transformer_layers.Conv1DLayer(filter_size=3, output_size=2, activation="tanh")),
    lambda x, inputs, kernel: np.tanh(na.convolution(x * MASK, kernel)),
    X,
    INPUTS,
    variables={"conv2d/kernel": weights("fh:1 fw:3 input_dim:4 d_model:2")},
    unsplit=("length",),
    together="batch:2 length:4 input_dim:4 d_model:2",
  ),
  op(
    "separable_conv1d_layer",
    call(transformer_layers.SeparableConv1DLayer(-1, 2, output_size=2)),
    separable_mirror(-1, 4),
    X,
    INPUTS,
    variables=taps(HACK, 4, "d_model:4") | pointwise(2),
    together="batch:2 length:4 d_model:4",
  ),
  op(
    "lightweight_convolution",
    call(transformer_layers.LightweightConv1DLocalAttn(-2, 0, 4, num_unique_depth_filters=2)),
    lightweight,
    X,
    INPUTS,
    variables=LIGHTWEIGHT,
    together=(DENSE, "_taps:3 _unique_depth_filters:2 repeated_kernel_dim:2"),
  ),
  op(
    "dynamic_convolution",
    call(transformer_layers.DynamicConv1DLocalAttn(-1, 0, 4)),
    dynamic,
    X,
    INPUTS,
    variables=DYNAMIC,
    unsplit="_taps",
    together=MEETING,
  ),
  op(
    "local_convolution_block",
    call(transformer_layers.LocalConvAttnBlock(-1, 0, 4, attention_type="dynamic_conv")),
    block,
    X,
    INPUTS,
    variables=dense("local_conv_inp_0")
    | dense("local_conv_inp_1")
    | DYNAMIC
    | dense("local_conv_attn_op_projection"),
    unsplit="_taps",
    together=MEETING,
  ),
  op(
    "parallel_layer",
    call(parallel()),
    parallel_mirror,
    X,
    INPUTS,
    variables={
      "parallel_layer_0/wi/kernel": weights("d_model:4 d_ff:4"),
      "parallel_layer_0/wo/kernel": weights("d_ff:4 d_model:4"),
    }
    | {f"parallel_layer_1/{name}": dims for name, dims in QKVO.items()},
    together=SELF + ("batch:2 length:4 d_model:4 d_ff:4",),
  ),
  op(
    "prompts_of_a_shared_network",
    prompted,
    shared_network,
    KV,
    KV,
    PROMPTS,
    TASKS,
    variables=network_variables() | NORM,
    **PROMPTED,
  ),
  op(
    "prompts_of_each_task",
    lambda *args: prompted(*args, share=False),
    separate_network,
    KV,
    KV,
    PROMPTS,
    TASKS,
    variables=network_variables("task:3 ") | NORM,
    **PROMPTED,
  ),
  op(
    "prompts_of_a_hyper_network",
    prompted,
    hyper_network,
    KV,
    KV,
    PROMPTS,
    TASKS,
    *HYPER,
    variables={
      f"block_001/prompt_task_embed_layernorm/layer_norm/layer_norm_{name}": "hyper:4"
      for name in ("scale", "bias")
    }
    | {f"block_001/{name}": dims for name, dims in NORM.items()},
    unsplit=("memory_length", "raw"),
    together=(
      "batch:2 task:3 heads:2 d_kv:2",
      "task:3 hyper:4 d_model:4 hidden:3",
      "task:3 hyper:4 hidden:3 heads:2 d_kv:2",
      "task:3 embedding:3 projected:4",
      "task:3 projected:4 hyper:4",
      "batch:2 length:3 d_model:4",
    ),
  ),
]
