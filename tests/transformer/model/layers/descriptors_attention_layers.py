"""Attention layers against NumPy: names and shapes of variables, values, gradients."""

from __future__ import annotations

import threading

import numpy as np

from mesh_tensorflow.transformer import transformer_layers
from mesh_tensorflow.transformer.model.attention import functions as synthetic
from tests.conformance.framework import T, op
from tests.transformer.layer_context import make_context
from tests.transformer.model.layers import numpy_attention as na

X, M = T("batch:2 length:4 d_model:4", -1, 1), T("batch:2 memory_length:2 d_model:4", -1, 1)
L = 4
DIMS = dict(num_heads=2, key_value_size=2)
# What meets inside.
SELF = ("batch:2 length:4 memory_length:4 heads:2 d_kv:2", "batch:2 length:4 d_model:4 heads:4")
SELF += ("batch:2 memory_length:4 d_model:4 heads:4",)
CROSS = ("batch:2 length:4 memory_length:2 heads:2 d_kv:2", "batch:2 length:4 d_model:4 heads:4")
CROSS += ("batch:2 memory_length:2 d_model:4 heads:4",)


def weights(dims):
  return T(dims, -0.9, 0.9)


QKVO = {name: weights("d_model:4 heads:4") for name in "qkv"} | {"o": weights("heads:4 d_model:4")}


def call(layer, **kwargs):
  return lambda x: layer.call(make_context(x, **kwargs), x)


def call_with_memory(layer, **kwargs):
  def build(x, memory):
    return layer.call(make_context(x, encoder_output=memory, **kwargs), x)

  return build


def heads(name, size=2):
  return [(name, size)]


TALKING = dict(
  key_heads_dims=heads("kh"),
  softmax_heads_dims=heads("sh", 4),
  value_heads_dims=heads("vh"),
  key_size=2,
  value_size=2,
)
TALKING_VARIABLES = {
  "q/kernel": weights("d_model:4 kh:2 d_k:2"),
  "k/kernel": weights("d_model:4 kh:2 d_k:2"),
  "v/kernel": weights("d_model:4 vh:2 d_v:2"),
  "y/kernel": weights("vh:2 d_v:2 d_model:4"),
  "logits/kernel": weights("kh:2 sh:4"),
  "weights/kernel": weights("sh:4 vh:2"),
}


def talking_together(memory):
  lengths = f"batch:2 length:4 memory_length:{memory}"
  return (
    f"{lengths} kh:2 d_k:2",
    f"{lengths} kh:2 sh:4",
    f"{lengths} sh:4 vh:2",
    f"{lengths} vh:2 d_v:2",
    "batch:2 length:4 d_model:4 kh:2 d_k:2",
    "batch:2 length:4 d_model:4 vh:2 d_v:2",
    f"batch:2 memory_length:{memory} d_model:4 kh:2 d_k:2",
    f"batch:2 memory_length:{memory} d_model:4 vh:2 d_v:2",
  )


DYNAMIC = tuple(
  f"batch:2 {length} d_model:4 {pair}"
  for length in ("length:4", "memory_length:4")
  for pair in ("kh:2 sh:4", "sh:4 vh:2")
)


def dynamic_talking(x, q, k, v, y, before, after, lx, lm, wx, wm):
  def projection(kernel, of_x, of_m):
    p = np.einsum("bld,dhg->blhg", x, of_x)[:, :, None]
    return p + np.einsum("bmd,dhg->bmhg", x, of_m)[:, None] + kernel

  before, after = projection(before, lx, lm), projection(after, wx, wm)
  return na.talking_heads(x, q, k, v, y, before, after, na.causal(L))


BILINEAR = {
  "q/kernel": weights("_d_model:4 heads:2 d_model:4"),
  "y/kernel": weights("heads:2 _d_model:4 d_model:4"),
}


def bilinear_together(memory):
  return (
    f"batch:2 length:4 memory_length:{memory} heads:2 d_model:4",
    "batch:2 length:4 heads:2 _d_model:4 d_model:4",
  )


BRANCHED = {name: weights("d_model:4 heads:2 d_kv:2") for name in "qkv"}
BRANCHED |= {"o": weights("heads:2 d_kv:2 d_model:4"), "kappa": "heads:2", "alpha": "heads:2"}
BRANCHED |= {"wi/kernel": weights("d_model:4 d_ff:4"), "wo/kernel": weights("d_ff:4 d_model:4")}


def branched_layer(cls):
  layer = cls(**DIMS)
  layer.dense_layer = transformer_layers.DenseReluDense(hidden_size=4)
  return layer


def branched_together(memory):
  return (
    f"batch:2 length:4 memory_length:{memory} heads:2 d_kv:2",
    "batch:2 length:4 heads:2 d_kv:2 d_model:4",
    "batch:2 length:4 heads:2 d_model:4 d_ff:4",
    f"batch:2 memory_length:{memory} heads:2 d_kv:2 d_model:4",
  )


# ------------------------------------------------------------------- synthesizer


# Processors build their graphs in threads.
_FIXED_LENGTH = threading.Lock()


def synthesizer(mode):
  """A Synthesizer whose tables are for 6 positions."""
  layer = transformer_layers.Synthesizer(
    synthesize_mode=mode, attention_kwargs=dict(max_length=6, factorized_dim=3), **DIMS
  )

  def build(x):
    with _FIXED_LENGTH:
      fixed, synthetic._FIXED_LENGTH = synthetic._FIXED_LENGTH, 6
      try:
        return layer.call(make_context(x), x)
      finally:
        synthetic._FIXED_LENGTH = fixed

  return build


def synthesized(x, logits, kv, o):
  v = na.heads_of(x, kv, 2)
  w = na.softmax(np.broadcast_to(logits + na.causal(L), [2, 2, L, L]))
  return np.einsum("bhlm,bmhk->blhk", w, v).reshape(2, L, 4) @ o


def products(x, q, k):
  return np.einsum("blhk,bmhk->bhlm", na.heads_of(x, q, 2), na.heads_of(x, k, 2))


def table(r):
  return r[:L, :, :L].transpose(1, 0, 2)


def dense_logits(x, q, pi):
  return np.einsum("blhk,km->bhlm", np.maximum(na.heads_of(x, q, 2), 0), pi[:, :L])


def mixed(alpha, a, b):
  a_share = na.sigmoid(alpha[0])
  return (1 - a_share) * a + a_share * b


R = weights("length:6 heads:2 memory_length:6")
FACTOR = weights("tmp:3 heads:2 memory_length:6")
PI = weights("d_kv:2 memory_length:6")
KVO = {"kv": QKVO["v"], "o": QKVO["o"]}
SYNTHETIC = SELF + ("length:6 heads:2 memory_length:6",)
SYNTHETIC += ("batch:2 length:4 heads:2 d_kv:2 memory_length:6", "length:4 heads:2 memory_length:4")

FACTORS = ("tmp:3 heads:2 memory_length:4",)

SYNTHESIZER = [
  ("random", dict(R=R) | KVO, lambda x, r, kv, o: synthesized(x, table(r), kv, o)),
  (
    "factorized",
    dict(R1=FACTOR, R2=FACTOR) | KVO,
    lambda x, a, b, kv, o: synthesized(x, np.sum(a * b, 0)[:, None, :L], kv, o),
  ),
  (
    "dense_minus",
    {"q": QKVO["q"], "pi/kernel": PI} | KVO,
    lambda x, q, pi, kv, o: synthesized(x, dense_logits(x, q, pi), kv, o),
  ),
  (
    "random_plus",
    QKVO | dict(R=R),
    lambda x, q, k, v, o, r: synthesized(x, products(x, q, k) + table(r), v, o),
  ),
  (
    "random_plus_alpha",
    QKVO | dict(R=R, alpha="alpha:1"),
    lambda x, q, k, v, o, r, a: synthesized(x, mixed(a, products(x, q, k), table(r)), v, o),
  ),
  (
    "dense_plus",
    QKVO | {"pi/kernel": PI},
    lambda x, q, k, v, o, p: synthesized(x, products(x, q, k) + dense_logits(x, q, p), v, o),
  ),
  (
    "dense_plus_alpha",
    QKVO | {"pi/kernel": PI, "alpha": "alpha:1"},
    lambda x, q, k, v, o, p, a: synthesized(
      x, mixed(a, products(x, q, k), dense_logits(x, q, p)), v, o
    ),
  ),
]


def hybrid(x, q, k, v, o, c):
  q, k, v = (na.heads_of(x, w, 2) for w in (q, k, v))
  logits = np.einsum("blhk,bmhk->bhlm", q, k) + na.causal(L)
  doubly = na.softmax(np.log(na.softmax(logits, axis=2) + 1e-300))
  c = np.clip(c, 0.0, 1.0)
  w = c * doubly + (1 - c) * na.softmax(logits)
  return np.einsum("bhlm,bmhk->blhk", w, v).reshape(2, L, 4) @ o


# ------------------------------------------------------------ transparent attention

TRANSPARENT = transformer_layers.TransparentEncDecAttention(
  layers_per_encoder_module=2,
  layers_per_decoder_module=1,
  encoder_num_modules=2,
  decoder_num_modules=2,
  **DIMS,
)


def transparent(x, m0, m1, m2):
  """The second decoder layer of two; of five encoder outputs the second and fourth do not count."""
  context = make_context(
    x, encoder_output=m2, encoder_layer_outputs=[m0, m0 * 7.0, m1, m1 * 7.0, m2]
  )
  context.layer_index = 1
  return TRANSPARENT.call(context, x)


def transparent_mirror(x, m0, m1, m2, mixture, q, k, v, o):
  share = na.softmax(mixture, axis=0)[:, 1]
  memory = share[0] * m0 + share[1] * m1 + share[2] * m2
  return na.self_attention(x, q, k, v, o, 2, 0.0, memory)


DESCRIPTORS = [
  op(
    "local_self_attention",
    call(transformer_layers.LocalSelfAttention(radius=2, **DIMS)),
    lambda x, *w: na.self_attention(x, *w, 2, na.window(L, 2)),
    X,
    variables=QKVO,
    together=SELF,
  ),
  op(
    "local_self_attention_to_both_sides",
    call(transformer_layers.LocalSelfAttention(radius=2, shared_kv=True, **DIMS), causal=False),
    lambda x, q, kv, o: na.self_attention(x, q, kv, kv, o, 2, na.window(L, 2, right=2)),
    X,
    variables={"q": QKVO["q"]} | KVO,
    together=SELF,
  ),
  op(
    "talking_heads",
    call(
      transformer_layers.TalkingHeadsSelfAttention(
        relative_attention_type="bias", relative_attention_num_buckets=4, **TALKING
      )
    ),
    lambda x, *w: na.talking_heads(x, *w[:-1], na.causal(L) + na.relative_bias(w[-1], L)),
    X,
    variables=TALKING_VARIABLES | {"relative_attention_bias": "sh:4 buckets:4"},
    together=talking_together(4) + ("batch:2 length:4 memory_length:4 sh:4 buckets:4",),
  ),
  op(
    "talking_heads_with_dynamic_projections",
    call(
      transformer_layers.TalkingHeadsSelfAttention(
        dynamic_projections=["m2w", "x2l", "m2l", "x2w"], **TALKING
      )
    ),
    dynamic_talking,
    X,
    variables=TALKING_VARIABLES
    | {f"logits/logits_dynamic_{i}/kernel": weights("d_model:4 kh:2 sh:4") for i in range(2)}
    | {f"weights/weights_dynamic_{i}/kernel": weights("d_model:4 sh:4 vh:2") for i in range(2)},
    together=talking_together(4) + DYNAMIC,
  ),
  op(
    "talking_heads_of_an_encoder",
    call_with_memory(transformer_layers.TalkingHeadsEncDecAttention(**TALKING)),
    lambda x, m, *w: na.talking_heads(x, *w, memory=m),
    X,
    M,
    variables=TALKING_VARIABLES,
    together=talking_together(2),
  ),
  op(
    "general_bilinear",
    call(transformer_layers.GeneralBilinearSelfAttention(heads_dims=heads("heads"))),
    lambda x, *w: na.bilinear(x, *w, na.causal(L)),
    X,
    variables=BILINEAR,
    together=bilinear_together(4),
  ),
  op(
    "general_bilinear_of_an_encoder",
    call_with_memory(transformer_layers.GeneralBilinearEncDecAttention(heads_dims=heads("heads"))),
    lambda x, m, *w: na.bilinear(x, *w, memory=m),
    X,
    M,
    variables=BILINEAR,
    together=bilinear_together(2),
  ),
  op(
    "branched_attention",
    call(branched_layer(transformer_layers.BranchedSelfAttention)),
    lambda x, *w: na.branched(x, *w, na.causal(L)),
    X,
    variables=BRANCHED,
    together=branched_together(4),
  ),
  op(
    "branched_attention_of_an_encoder",
    call_with_memory(branched_layer(transformer_layers.BranchedEncDecAttention)),
    lambda x, m, *w: na.branched(x, *w, memory=m),
    X,
    M,
    variables=BRANCHED,
    together=branched_together(2),
  ),
  op(
    "transparent_attention",
    transparent,
    transparent_mirror,
    X,
    M,
    M,
    M,
    variables={"w": "encoder_module_outputs:3 decoder_module_inputs:2"} | QKVO,
    together=CROSS + ("batch:2 memory_length:2 d_model:4 encoder_module_outputs:3",),
    unsplit=("encoder_module_outputs", "decoder_module_inputs"),
  ),
  op(
    "hybrid_attention",
    call(transformer_layers.SelfAttention(attention_func="hybrid", z_loss_coeff=1e-3, **DIMS)),
    hybrid,
    X,
    variables=QKVO | {"doubly_coeff": T("", 0.3, 0.7)},
    together=SELF,
  ),
  *(
    op(
      f"synthesizer_{mode}",
      synthesizer(mode),
      mirror,
      X,
      variables=variables,
      together=SYNTHETIC + FACTORS * (mode == "factorized"),
    )
    for mode, variables, mirror in SYNTHESIZER
  ),
]
