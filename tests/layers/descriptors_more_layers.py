"""Gradient tricks, noise and small layers, for the conformance suite."""

from __future__ import annotations

import gin
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from tests.conformance.framework import ONE_DEVICE, T, op

B, C, D = mtf.Dimension("b", 4), mtf.Dimension("c", 4), mtf.Dimension("d", 4)
F, HEADS, KV = mtf.Dimension("f", 8), mtf.Dimension("heads", 4), mtf.Dimension("kv", 4)
CHAIN = {
  f"layer_{i}/{n}": s for i in range(3) for n, s in (("kernel", "_d:4 d:4"), ("bias", "d:4"))
}


def chain(recompute_grads):
  """Three reversible layers, which also use a tensor from outside."""

  def build(x, outside):
    streams = (x, None, x * 0.5, None)
    for i in range(3):

      def f(t, i=i):
        return layers.dense(t, [D], [D], activation=mtf.tanh, name=f"layer_{i}") * outside

      streams = layers.reversible_half_residual_and_swap(
        *streams, f, recompute_grads=recompute_grads
      )
    return [streams[0], streams[2]]

  return build


def chain_reference(x, outside, *weights):
  x1, x2 = x, x * 0.5
  for kernel, bias in zip(weights[::2], weights[1::2]):
    x1, x2 = x2, x1 + np.tanh(x2 @ kernel + bias) * outside
  return x1, x2


def clipped(limit):
  return lambda arrays, cotangents: (
    cotangents[0] / max(1.0, np.sqrt(np.mean(cotangents[0] ** 2)) / limit)
  )


def summaries(batch_dims=None):
  return lambda x: layers.summary_for_clip_activation_gradient(x, "x", batch_dims)


def summaries_reference(axes):
  def compute(x):
    rms = np.sqrt(np.mean(x**2, axes))
    return [x.mean(), x.max(), rms.mean(), rms.max(), rms.var()]

  return compute


def unit_scaled(x, w):
  # In a gin scope, which other threads (devices) and other descriptors are not in.
  gin.bind_parameter("scaled/mesh_tensorflow.layers.unit_scaling_convention.value", True)
  with gin.config_scope("scaled"):
    return layers.us_einsum([x, w], output_shape=[B, F])


def softmax(x, axis):
  e = np.exp(x)
  return e / e.sum(axis, keepdims=True)


def attention_vars(x):
  weights = layers.multihead_attention_vars(x.mesh, HEADS, D, KV, tf.float32, tf.float32, x.dtype)
  return [x * w for w in weights]


DESCRIPTORS = [
  op(
    "reversible",
    chain(True),
    chain_reference,
    T("b:4 d:4", -1, 1),
    T("d:4", 0.5, 1.5),
    variables=CHAIN,
    together="b:4 _d:4 d:4",
    tolerance=3e-5,
  ),
  op(
    "reversible_plain",
    chain(False),
    chain_reference,
    T("b:4 d:4", -1, 1),
    T("d:4", 0.5, 1.5),
    variables=CHAIN,
    together="b:4 _d:4 d:4",
    tolerance=3e-5,
  ),
  op(
    "clip_gradient",
    lambda x: layers.clip_activation_gradient(x, 0.1),
    lambda x: x,
    "b:4 c:4 d:4",
    gradient=clipped(0.1),
  ),
  op(
    "clip_gradient_large",
    lambda x: layers.clip_activation_gradient(x, 10.0),
    lambda x: x,
    "b:4 d:4",
    gradient=clipped(10.0),
  ),
  op("clip_gradient_off", layers.clip_activation_gradient, lambda x: x, "b:4 d:4"),
  op(
    "clip_gradient_of_a_sum",
    lambda x: layers.clip_activation_gradient(mtf.reduce_sum(x, reduced_dim=C), 0.1),
    lambda x: x.sum(1),
    "b:4 c:4 d:4",
    gradient=lambda a, c: np.broadcast_to(clipped(0.1)(a, c)[:, None], a[0].shape),
  ),
  op(
    "clip_gradient_bfloat16",
    lambda x: layers.clip_activation_gradient(x, 0.1),
    lambda x: x,
    T("b:4 c:4 d:4", dtype="bfloat16"),
    gradient=clipped(0.1),
    tolerance=1e-2,
  ),
  op("summaries", summaries(), summaries_reference(2), "b:4 c:4 d:4"),
  op("summaries_of_batch", summaries([C]), summaries_reference((0, 2)), "b:4 c:4 d:4"),
  op("jitter", layers.multiplicative_jitter, ONE_DEVICE, "b:4 c:4 d:4"),
  op("jitter_off", lambda x: layers.multiplicative_jitter(x, 0.0), lambda x: x, "b:4 d:4"),
  op(
    "annealed_dropout",
    lambda x: layers.annealed_dropout(x, True, -1, 1, 0.8, noise_shape=[B, D]),
    ONE_DEVICE,
    "b:4 c:4 d:4",
  ),
  op(
    "annealed_dropout_off",
    lambda x: layers.annealed_dropout(x, False, -1, 1, 0.8),
    lambda x: x,
    "b:4 d:4",
  ),
  op(
    "rename_length",
    layers.rename_length_to_memory_length,
    lambda x: x,
    "b:4 length:8 d:4",
  ),
  op(
    "us_einsum",
    lambda x, w: layers.us_einsum([x, w], output_shape=[B, F]),
    lambda x, w: x @ w,
    "b:4 d:4",
    "d:4 f:8",
    together="b:4 d:4 f:8",
  ),
  op(
    "us_einsum_scaled",
    unit_scaled,
    lambda x, w: x @ w / 2.0,
    "b:4 d:4",
    "d:4 f:8",
    together="b:4 d:4 f:8",
  ),
  # As attention to blocks of an image has: TensorFlow's softmax takes five at most.
  op(
    "softmax_of_six_dimensions",
    lambda x: [mtf.softmax(x, D), mtf.softmax(x, C)],
    lambda x: [softmax(x, 5), softmax(x, 2)],
    "b:4 h:2 c:4 k:2 w:2 d:4",
  ),
  op(
    "multihead_attention_vars",
    attention_vars,
    lambda x, qkvo: [x * w for w in qkvo],
    "heads:4 d:4 kv:4",
    variables={"qkvo": "qkvo:4 heads:4 d:4 kv:4"},
    unsplit="qkvo",
  ),
]
