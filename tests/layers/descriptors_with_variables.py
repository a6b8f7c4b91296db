"""Layers with the variables that they make: their names, shapes, and the gradients to them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from tests.conformance.framework import T, op

D, E, F, G = (mtf.Dimension(n, s) for n, s in (("d", 4), ("e", 4), ("f", 8), ("g", 4)))
HEADS, KV, V = mtf.Dimension("heads", 4), mtf.Dimension("kv", 4), mtf.Dimension("v", 8)
FLOATS = mtf.VariableDType()
IDS = T("b:4 length:8", -2, 10, "int32")  # Also ids out of range.
# x and the weights are small, so that softmax and finite differences are well conditioned.
X, QKVO = T("b:4 length:8 io:4", -1, 1), T("qkvo:4 heads:4 io:4 kv:4", -0.7, 0.7)
MEETING = ("b:4 heads:4 length:8 memory_length:8 kv:4", "b:4 heads:4 length:8 io:4 kv:4")
MEETING += ("b:4 heads:4 memory_length:8 io:4 kv:4",)
# The dimensions of a compressed memory.
COMPRESSED = ("b:4 heads:4 length:8 memory_length:4 kv:4", "b:4 heads:4 length:8 io:4 kv:4")
COMPRESSED += ("b:4 heads:4 memory_length:4 io:4 kv:4", "b:4 length:4 io:4")


def softmax(x):
  e = np.exp(x)
  return e / e.sum(-1, keepdims=True)


def attend(x, memory, qkvo, mask=0.0, extra=0.0):
  """Multihead attention, head by head; `extra` is added to the softmax's denominator."""
  y = np.zeros_like(x)
  for wq, wk, wv, wo in zip(*qkvo):
    e = np.exp((x @ wq) @ np.swapaxes(memory @ wk, -1, -2) + mask)
    y = y + (e / (e.sum(-1, keepdims=True) + extra)) @ (memory @ wv) @ wo.T
  return y


def causal(n):
  return np.where(np.arange(n)[:, None] < np.arange(n), -1e9, 0.0)


def causal_mask(x):
  length = x.shape.get_dim_by_name("length")
  position = mtf.range(x.mesh, length, tf.int32)
  return layers.attention_mask_autoregressive(position)


def compressed(x, qkvo, mask_right):
  groups = x.reshape(4, 4, 2, 4).mean(2)
  # Group j ends at position 2 j + 1, and is visible from there.
  hidden = np.arange(8)[:, None] < 2 * np.arange(4) + 1
  return attend(x, groups, qkvo, np.where(hidden & mask_right, -1e9, 0.0), extra=1.0)


def incremental(x, k, v, step, qkvo):
  """One position at a time, over lists of heads."""
  step, y, keys, values = int(step), np.zeros_like(x), k.copy(), v.copy()
  for h, (wq, wk, wv, wo) in enumerate(zip(*qkvo)):
    keys[:, h, step] += x @ wk
    values[:, h, step] += x @ wv
    seen = slice(0, step + 1)
    weights = softmax(np.einsum("bk,bmk->bm", x @ wq, keys[:, h, seen]))
    y = y + np.einsum("bm,bmk->bk", weights, values[:, h, seen]) @ wo.T
  return y, keys, values


def normalize(x, axis, epsilon=1e-6):
  centered = x - x.mean(axis, keepdims=True)
  return centered / np.sqrt((centered**2).mean(axis, keepdims=True) + epsilon)


def embed(ids, weights):
  inside = (ids >= 0) & (ids < len(weights))
  return np.where(inside[..., None], weights[np.where(inside, ids, 0)], 0.0)


def moving(x, scale, bias, mean, variance):
  return (x - mean) / np.sqrt(variance + 1e-9) * scale + bias


MOVING = {
  "bn/batch_norm_scale": "v:8",
  "bn/batch_norm_bias": "v:8",
  "bn/bn_moving_mean": "v:8",
  "bn/bn_moving_variance": T("v:8", 0.5, 2),
}

DESCRIPTORS = [
  op(
    "dense_with_bias",
    lambda x: layers.dense(x, F, reduced_dims=[D], activation=mtf.tanh, name="dense"),
    lambda x, w, b: np.tanh(x @ w + b),
    "b:4 d:4",
    variables={"dense/kernel": "d:4 f:8", "dense/bias": "f:8"},
    together="b:4 d:4 f:8",
  ),
  op(
    "dense_to_its_own_dimension",
    lambda x: layers.dense(x, [D], reduced_dims=[D], name="dense"),
    lambda x, w, b: x @ w + b,
    "b:4 d:4",
    variables={"dense/kernel": "_d:4 d:4", "dense/bias": "d:4"},
    together="b:4 _d:4 d:4",
  ),
  op(
    "dense_of_two_dimensions",
    lambda x: layers.dense(x, [F, G], reduced_dims=[D, E], name="dense"),
    lambda x, w, b: np.einsum("bde,defg->bfg", x, w) + b,
    "b:4 d:4 e:4",
    variables={"dense/kernel": "d:4 e:4 f:8 g:4", "dense/bias": "f:8 g:4"},
    together="b:4 d:4 e:4 f:8 g:4",
  ),
  op(
    "dense_of_experts",
    lambda x: layers.dense(x, [F], reduced_dims=[D], expert_dims=[E], name="dense"),
    lambda x, w, b: np.einsum("bed,edf->bef", x, w) + b,
    "b:4 e:4 d:4",
    variables={"dense/kernel": "e:4 d:4 f:8", "dense/bias": "e:4 f:8"},
    together="b:4 e:4 d:4 f:8",
  ),
  op(
    "dense_unnamed",
    lambda x: layers.dense(x, [F], reduced_dims=[D]),
    lambda x, w, b: x @ w + b,
    "b:4 d:4",
    # Two scopes for one layer: checkpoints of unnamed layers depend on it.
    variables={"dense/kernel": "d:4 f:8", "dense_1/bias": "f:8"},
    together="b:4 d:4 f:8",
  ),
  op(
    "get_dense_kernel_weights",
    lambda x: mtf.einsum(
      [x, layers.get_dense_kernel_weights(x, [F], [D], [], None, name="dense")], [("b", 4), F]
    ),
    lambda x, w: x @ w,
    "b:4 d:4",
    variables={"dense/kernel": "d:4 f:8"},
    together="b:4 d:4 f:8",
  ),
  op(
    "dense_product",
    lambda x: layers.dense_product(x, [D], [F], ["linear", "tanh"], name="wi", use_bias=False),
    lambda x, w, u: (x @ w) * np.tanh(x @ u),
    "b:4 d:4",
    variables={"wi_0/kernel": "d:4 f:8", "wi_1/kernel": "d:4 f:8"},
    together="b:4 d:4 f:8",
  ),
  op(
    "dense_product_swiglu",
    lambda x: layers.dense_product(x, [D], [F], ["swish", "linear"], name="wi", use_bias=False),
    lambda x, w, u: (x @ w) / (1 + np.exp(-x @ w)) * (x @ u),
    "b:4 d:4",
    variables={"wi_0/kernel": "d:4 f:8", "wi_1/kernel": "d:4 f:8"},
    together="b:4 d:4 f:8",
  ),
  op(
    "dense_relu_dense",
    lambda x: layers.dense_relu_dense(x, F, False, name="ff"),
    lambda x, w, u: np.maximum(x @ w, 0.0) @ u,
    "b:4 d:4",
    variables={"ff/wi/kernel": "d:4 f:8", "ff/wo/kernel": "f:8 d:4"},
    together="b:4 d:4 f:8",
  ),
  op(
    "layer_norm_variables",
    lambda x: layers.layer_norm(x, V, name="norm"),
    lambda x, scale, bias: normalize(x, -1) * scale + bias,
    "b:4 v:8",
    variables={
      "norm/layer_norm/layer_norm_scale": "v:8",
      "norm/layer_norm/layer_norm_bias": "v:8",
    },
  ),
  op(
    "batch_norm_training",
    lambda x: layers.batch_norm(x, True, 0.9, name="bn")[0],
    lambda x, scale, bias, m, v: normalize(x, (0, 1), 1e-9) * scale + bias,
    "b:4 length:8 v:8",
    variables=MOVING,
    untrained=("bn/bn_moving_mean", "bn/bn_moving_variance"),
    tolerance=2e-5,
    replica_tolerance=1e-6,
  ),
  op(
    "batch_norm_moving",
    lambda x: layers.batch_norm(x, False, 0.9, name="bn")[0],
    moving,
    "b:4 length:8 v:8",
    variables=MOVING,
    untrained=("bn/bn_moving_mean", "bn/bn_moving_variance"),
  ),
  op(
    "embedding",
    lambda ids: layers.embedding(ids, V, D, FLOATS, name="table"),
    embed,
    IDS,
    variables={"table": "v:8 d:4"},
    together="b:4 length:8 v:8",
    gradient_together="b:4 length:8 v:8 d:4",
  ),
  op(
    "embedding_weights",
    lambda x: x * layers.embedding_weights(x.mesh, V, D, FLOATS, ensemble_dim=E),
    lambda x, w: x * w,
    "e:4 v:8 d:4",
    variables={"embedding": "e:4 v:8 d:4"},
  ),
  op(
    "multihead_attention",
    lambda x: layers.multihead_attention(x, None, causal_mask(x), KV, HEADS, False, name="att"),
    lambda x, qkvo: attend(x, x, qkvo, causal(8)),
    X,
    variables={"att/qkvo": QKVO},
    together=MEETING,
    unsplit="qkvo",
    tolerance=2e-5,
  ),
  op(
    "multihead_attention_to_memory",
    lambda x, m: layers.multihead_attention(x, m, None, KV, HEADS, False, name="att"),
    attend,
    X,
    T("b:4 memory_length:8 io:4", -1, 1),
    variables={"att/qkvo": QKVO},
    together=MEETING,
    unsplit="qkvo",
    tolerance=2e-5,
  ),
  op(
    "multihead_attention_params",
    lambda x: (
      x
      * mtf.add_n(
        layers.multihead_attention_params(x.mesh, HEADS, mtf.Dimension("io", 4), KV, FLOATS)
      )
    ),
    lambda x, q, k, v, o: (q + k + v + o) * x,
    "heads:4 io:4 kv:4",
    variables={name: "heads:4 io:4 kv:4" for name in "qkvo"},
  ),
  op(
    "memory_compressed_attention",
    lambda x: layers.multihead_self_attention_memory_compressed(
      x, True, 2, KV, HEADS, False, name="att"
    ),
    lambda x, qkvo: compressed(x, qkvo, True),
    X,
    variables={"att/qkvo": QKVO},
    together=COMPRESSED,
    unsplit="qkvo",
    tolerance=2e-5,
  ),
  op(
    "memory_compressed_attention_to_all",
    lambda x: layers.multihead_self_attention_memory_compressed(
      x, False, 2, KV, HEADS, False, name="att"
    ),
    lambda x, qkvo: compressed(x, qkvo, False),
    X,
    variables={"att/qkvo": QKVO},
    together=COMPRESSED,
    unsplit="qkvo",
    tolerance=2e-5,
  ),
  op(
    "multihead_attention_incremental",
    lambda x, k, v, step: list(
      layers.multihead_self_attention_incremental(x, k, v, step, tf.float32, tf.float32, name="att")
    ),
    incremental,
    T("b:4 io:4", -1, 1),
    T("b:4 heads:4 m:8 kv:4", -1, 1),
    T("b:4 heads:4 m:8 kv:4", -1, 1),
    T("", values=3, dtype="int32"),
    variables={"att/qkvo": QKVO},
    together=("b:4 heads:4 m:8 kv:4", "b:4 heads:4 io:4 kv:4"),
    unsplit="qkvo",
    tolerance=2e-5,
  ),
  op(
    "multihead_encdec_attention_incremental",
    lambda x, wq, wo, k, v: layers.multihead_encdec_attention_incremental(x, wq, wo, k, v, None),
    lambda x, wq, wo, k, v: sum(
      np.einsum("bm,bmk->bk", softmax(np.einsum("bk,bmk->bm", x @ q, k[:, h])), v[:, h]) @ o.T
      for h, (q, o) in enumerate(zip(wq, wo))
    ),
    T("b:4 io:4", -1, 1),
    T("heads:4 io:4 kv:4", -0.7, 0.7),
    T("heads:4 io:4 kv:4", -0.7, 0.7),
    T("b:4 heads:4 m:8 kv:4", -1, 1),
    T("b:4 heads:4 m:8 kv:4", -1, 1),
    together=("b:4 heads:4 m:8 kv:4", "b:4 heads:4 io:4 kv:4"),
    tolerance=2e-5,
  ),
]
