"""Rotary positions, query-key norm, soft caps, windows, sinks, gates and norms, against NumPy."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import attention, transformer, transformer_layers
from tests.conformance.framework import T, op
from tests.transformer.layer_context import make_context
from tests.transformer.model.layers import numpy_attention as na
from tests.transformer.numpy_lm import rms_norm

X = T("batch:2 length:4 d_model:4", -1, 1)
IDS = T("batch:2 length:4", dtype="int32", values=[[1, 1, 2, 2], [1, 1, 1, 0]])
PACKED = T("batch:2 length:4", dtype="int32", values=[[0, 1, 0, 1], [0, 1, 2, 0]])
L = 4
GROUPED = transformer_layers.GroupedQueryAttention
LOCAL = transformer_layers.LocalGroupedQueryAttention
ROTARY = transformer_layers.Rotary


def weights(dims):
  return T(dims, -0.9, 0.9)


def frequencies(base, scaling=None, factor=1.0, original_length=8, low=1.0, high=4.0, turned=2):
  """Of the two pairs of four channels."""
  if scaling == "ntk":
    base = base * factor**2.0
  f = base ** np.array([0.0, -0.5])
  if scaling == "linear":
    f = f / factor
  elif scaling == "yarn":
    # Pair of so many turns in original_length positions; `low` and `high` are betas.
    pair = [4 * np.log(original_length / (b * 2 * np.pi)) / (2 * np.log(base)) for b in (high, low)]
    first, last = max(np.floor(pair[0]), 0), min(np.ceil(pair[1]), 3)
    ramp = np.clip((np.arange(2) - first) / (last - first), 0, 1)
    f = f / factor * ramp + f * (1 - ramp)
  elif scaling == "llama3":
    wavelength = 2 * np.pi / f
    smooth = (original_length / wavelength - low) / (high - low)
    between = (1 - smooth) * f / factor + smooth * f
    f = np.where(
      wavelength > original_length / low,
      f / factor,
      np.where(wavelength < original_length / high, f, between),
    )
  return np.where(np.arange(2) < turned, f, 0.0)


def turned(x, f):
  """[batch, length, heads, 4]: complex numbers times e ** (i p f)."""
  angle = np.arange(x.shape[1])[:, None, None] * f
  z = (x[..., :2] + 1j * x[..., 2:]) * np.exp(1j * angle)
  return np.concatenate([z.real, z.imag], -1)


def grouped(x, w, heads, memory_heads, f, bias, norm=(), cap=None, factor=1.0):
  """Grouped-query attention with variables q, k, v, o and maybe scales, biases, sinks."""
  q, k, v = (na.heads_of(x, w[n], h) for n, h in zip("qkv", (heads, memory_heads, memory_heads)))
  if "q_bias" in w:
    q = q + w["q_bias"].reshape(heads, 4)
    k, v = (t + w[n].reshape(memory_heads, 4) for t, n in ((k, "k_bias"), (v, "v_bias")))
  if norm:
    q, k = rms_norm(q, w[norm[0]]) * 0.5, rms_norm(k, w[norm[1]])
  q, k = turned(q, f) * factor, turned(k, f) * factor
  k, v = (np.repeat(t, heads // memory_heads, axis=2) for t in (k, v))
  logits = np.einsum("blhk,bmhk->bhlm", q, k)
  if cap:
    logits = cap * np.tanh(logits / cap)
  logits = logits + bias
  if "sink_logits" in w:
    # One more logit, whose weight no value gets.
    sink = np.broadcast_to(w["sink_logits"].reshape(heads, 1, 1), [*logits.shape[:3], 1])
    weights = na.softmax(np.concatenate([logits, sink], -1))[..., :-1]
  else:
    weights = na.softmax(logits)
  a = np.einsum("bhlm,bmhk->blhk", weights, v)
  return a.reshape(*x.shape[:2], -1) @ w["o"] + w.get("o_bias", 0.0)


def attention_op(name, cls, options, reference, *inputs, heads=2, memory_heads=2, build=None):
  """An `op` of a layer with `heads` heads of queries, of size 4."""
  layer = cls(
    num_heads=heads,
    num_memory_heads=memory_heads if memory_heads != heads else 0,
    key_value_size=4,
    **options,
  )
  k = f"d_model:4 heads:{4 * memory_heads}" if memory_heads > 1 else "d_model:4 d_kv:4"
  variables = {"q": weights(f"d_model:4 heads:{4 * heads}"), "k": weights(k), "v": weights(k)}
  variables["o"] = weights(f"heads:{4 * heads} d_model:4")
  if options.get("query_key_norm"):
    variables |= {"q_norm/scale": "d_kv:4", "k_norm/scale": "d_kv:4"}
  groups = f"heads:{memory_heads} query_heads:{heads // memory_heads}"
  inside = groups if 1 < memory_heads < heads else f"heads:{heads}"
  if options.get("qkv_bias"):
    memory_bias = f"heads:{memory_heads} d_kv:4" if memory_heads > 1 else "d_kv:4"
    variables |= {"q_bias": f"{inside} d_kv:4", "k_bias": memory_bias, "v_bias": memory_bias}
  if options.get("output_bias"):
    variables["o_bias"] = "d_model:4"
  if options.get("sink_logits"):
    variables["sink_logits"] = inside

  def numpy(x, *rest):
    n = len(inputs)
    w = dict(zip(variables, rest[n:]))
    return reference(x, *rest[:n], w=w, heads=heads, memory_heads=memory_heads)

  return op(
    name,
    build(layer) if build else lambda x: layer.call(make_context(x), x),
    numpy,
    X,
    *inputs,
    variables=variables,
    together=(
      f"batch:2 length:4 memory_length:4 {inside} d_kv:4",
      f"batch:2 length:4 d_model:4 heads:{4 * heads}",
      # A window is taken of keys, not of what they are computed from.
      f"batch:2 {'length' if cls is LOCAL else 'memory_length'}:4 {k}",
    ),
  )


def window(size, sinks=0, both_sides=False):
  r = na.relative(L)
  near = (r > -size) & (r < (size if both_sides else 1))
  sink = (np.arange(L) < sinks)[None, :] & ((r <= 0) | both_sides)
  return np.where(near | sink, 0.0, -1e9)


def both_sides(layer):
  return lambda x: layer.call(make_context(x, causal=False), x)


def packed(layer):
  def build(x, ids, position):
    context = make_context(x, sequence_id=ids)
    context.packed_position = position
    return layer.call(context, x)

  return build


def packed_reference(x, ids, position, **kwargs):
  """One position of each sequence is a sink; a position sees itself."""
  r = na.relative(L)
  seen = (r == 0) | ((position == 0)[:, None, :] & (r < 0))
  seen = seen & (ids[:, :, None] == ids[:, None, :])
  return grouped(x, f=frequencies(9.0), bias=np.where(seen, 0.0, -1e9)[:, None], **kwargs)


def of_blocks(x, k, position, ids, num_sinks=2):
  """Local attention in blocks of 2 of 8 positions; keys are queries and values."""
  length = x.shape.dims[1]
  priority = mtf.range(x.mesh, length, tf.int32)
  d_kv = x.shape.dims[-1]
  return attention.local_attention_1d(
    x,
    k,
    None,
    length,
    d_kv,
    d_kv,
    length_dim_num_splits=4,
    radius=2,
    sequence_id=ids,
    read_priority=priority,
    write_priority=priority,
    num_sinks=num_sinks,
    sink_position=position,
  )


def numpy_of_blocks(x, k, position, ids):
  r = na.relative(8)
  position = np.broadcast_to(position, ids.shape)
  seen = (r > -2) | (position < 2)[:, None, :]
  seen = seen & (r <= 0) & (ids[:, :, None] == ids[:, None, :])
  logits = np.einsum("blk,bmk->blm", x, k) + np.where(seen, 0.0, -1e9)
  return np.einsum("blm,bmk->blk", na.softmax(logits), k)


def blocks(name, position, ids):
  """Local attention in blocks, with sinks: of two sequences, the second of which is long."""
  return op(
    name,
    of_blocks,
    numpy_of_blocks,
    *[T("batch:2 length:8 d_kv:2")] * 2,
    T("batch:2 length:8" if np.ndim(position) == 2 else "length:8", dtype="int32", values=position),
    T("batch:2 length:8", dtype="int32", values=ids),
    # A block lies on one processor: so many splits were said.
    illegal=lambda layout: layout.splits("length") and 4 % layout.axis("length").size,
    together="batch:2 length:8 d_kv:2",
  )


NORMS = ("q_norm/scale", "k_norm/scale")
LLAMA3 = dict(base=16.0, scaling="llama3", factor=3.0, original_length=8)


def swish(x):
  return x / (1 + np.exp(-x))


def gated(name, activation, function):
  layer = transformer_layers.DenseReluDense(hidden_size=8, activation=[activation, "linear"])
  return op(
    name,
    lambda x: layer.call(make_context(x), x),
    lambda x, wi, wj, wo: (function(x @ wi) * (x @ wj)) @ wo,
    X,
    variables={
      "wi_0/kernel": "d_model:4 d_ff:8",
      "wi_1/kernel": "d_model:4 d_ff:8",
      "wo/kernel": "d_ff:8 d_model:4",
    },
    together="batch:2 length:4 d_model:4 d_ff:8",
  )


def deepnorm_residual(x, stack, context):
  return transformer.sublayer_scaled_residual(x, stack, context, input_scale=2.0, output_scale=0.5)


def stacked(name, sublayers, reference, *norms):
  """A layer between sublayers; the reference is of x, the layer and the scales of the norms."""

  def build(x):
    layer = transformer_layers.DenseReluDense(hidden_size=8, activation="tanh")
    layer.set_name("layer")
    return transformer.LayerStack([layer], [], sublayers, []).call(make_context(x), x)

  dense = {
    "layer/DenseReluDense/wi/kernel": "d_model:4 d_ff:8",
    "layer/DenseReluDense/wo/kernel": "d_ff:8 d_model:4",
  }
  return op(
    name,
    build,
    lambda x, wi, wo, *scales: reference(x, lambda y: np.tanh(y @ wi) @ wo, *scales),
    X,
    variables=dense | {f"layer/{n}/scale": "d_model:4" for n in norms},
    together="batch:2 length:4 d_model:4 d_ff:8",
  )


DESCRIPTORS = [
  attention_op(
    "rotary_attention_of_groups",
    GROUPED,
    dict(rotary=ROTARY(**LLAMA3)),
    lambda x, **kw: grouped(x, f=frequencies(**LLAMA3), bias=na.causal(L), **kw),
    heads=4,
    memory_heads=2,
  ),
  attention_op(
    "multi_query_attention_with_norm_and_soft_cap",
    GROUPED,
    dict(
      rotary=ROTARY(base=9.0, fraction=0.5, scaling="linear", factor=2.0),
      query_key_norm=True,
      logit_soft_cap=1.5,
    ),
    lambda x, **kw: grouped(
      x,
      f=frequencies(9.0, "linear", 2.0, turned=1),
      bias=na.causal(L),
      norm=NORMS,
      cap=1.5,
      **kw,
    ),
    memory_heads=1,
  ),
  attention_op(
    "window_with_a_sink",
    GROUPED,
    dict(rotary=ROTARY(base=9.0), window=2, num_sinks=1),
    lambda x, **kw: grouped(x, f=frequencies(9.0), bias=window(2, 1), **kw),
  ),
  attention_op(
    "window_to_both_sides",
    GROUPED,
    dict(window=2, num_sinks=1),
    lambda x, **kw: grouped(x, f=np.zeros(2), bias=window(2, 1, both_sides=True), **kw),
    build=both_sides,
  ),
  attention_op(
    "sinks_of_packed_sequences",
    GROUPED,
    dict(rotary=ROTARY(base=9.0), window=1, num_sinks=1),
    packed_reference,
    IDS,
    PACKED,
    build=packed,
  ),
  attention_op(
    "rotary_local_attention",
    LOCAL,
    dict(
      radius=3,
      rotary=ROTARY(base=9.0, scaling="ntk", factor=2.0),
      query_key_norm=True,
      logit_soft_cap=1.5,
    ),
    lambda x, **kw: grouped(
      x, f=frequencies(9.0, "ntk", 2.0), bias=window(3), norm=NORMS, cap=1.5, **kw
    ),
  ),
  attention_op(
    "yarn_of_groups_with_trained_sinks",
    GROUPED,
    dict(
      rotary=ROTARY(base=9.0, scaling="yarn", factor=4.0, original_length=32, beta_fast=3.0),
      sink_logits=True,
    ),
    lambda x, **kw: grouped(
      x,
      f=frequencies(9.0, "yarn", 4.0, 32, low=1.0, high=3.0),
      factor=0.1 * np.log(4.0) + 1.0,
      bias=na.causal(L),
      **kw,
    ),
    heads=4,
    memory_heads=2,
  ),
  attention_op(
    "attention_with_biases",
    GROUPED,
    # Without positions the bias of keys would change nothing.
    dict(rotary=ROTARY(base=9.0), qkv_bias=True, output_bias=True),
    lambda x, **kw: grouped(x, f=frequencies(9.0), bias=na.causal(L), **kw),
  ),
  attention_op(
    "local_attention_with_sinks",
    LOCAL,
    dict(radius=2, rotary=ROTARY(base=9.0), num_sinks=1, sink_logits=True, qkv_bias=True),
    lambda x, **kw: grouped(x, f=frequencies(9.0), bias=window(2, 1), **kw),
    memory_heads=1,
  ),
  blocks("sinks_in_blocks", np.arange(8), np.ones([2, 8], int)),
  blocks(
    "sinks_of_packed_sequences_in_blocks",
    [[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6]],
    [[1, 1, 1, 2, 2, 2, 2, 2], [1, 2, 2, 2, 2, 2, 2, 2]],
  ),
  gated("swiglu", "swish", swish),
  gated("reglu", "relu", lambda x: np.maximum(x, 0)),
  stacked(
    "sandwich_norm",
    [
      transformer.sublayer_rms_norm,
      transformer.sublayer_call_layer,
      transformer.sublayer_output_rms_norm,
      transformer.sublayer_residual,
    ],
    lambda x, layer, a, b: x + rms_norm(layer(rms_norm(x, a)), b),
    "rms_norm",
    "output_rms_norm",
  ),
  stacked(
    "post_norm_with_scaled_residual",
    [
      transformer.sublayer_call_layer,
      deepnorm_residual,
      transformer.sublayer_output_rms_norm,
    ],
    lambda x, layer, a: rms_norm(2.0 * x + 0.5 * layer(x), a),
    "output_rms_norm",
  ),
]
