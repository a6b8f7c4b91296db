"""Layer stacks, sublayers and embeddings, against NumPy on drawn layouts."""

from __future__ import annotations

import functools
import types

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import funnel_transformer, transformer, transformer_layers
from tests.conformance.framework import ONE_DEVICE, T, op
from tests.transformer import lm_program
from tests.transformer.layer_context import FLOATS, make_context
from tests.transformer.model.layers import numpy_attention as na
from tests.transformer.model.layers.descriptors_attention_layers import DIMS, QKVO, SELF, L, weights
from tests.transformer.numpy_lm import rms_norm

X = T("batch:2 length:4 d_model:4", -1, 1)
IDS = T("batch:2 length:4", dtype="int32", values=[[1, 1, 2, 2], [1, 1, 1, 0]])
SCALE = T("d_model:4", 0.5, 1.5)


def named(layer, name):
  layer.set_name(name)
  return layer


def layers():
  return [
    named(transformer_layers.SelfAttention(**DIMS), "a"),
    named(transformer_layers.DenseReluDense(hidden_size=8), "b"),
  ]


def call(stack):
  return lambda x: stack.call(make_context(x), x)


FEED_FORWARD = {"wi/kernel": "d_model:4 d_ff:8", "wo/kernel": "d_ff:8 d_model:4"}
STACK = {
  "a/rms_norm/scale": SCALE,
  **{f"a/SelfAttention/{n}": d for n, d in QKVO.items()},
  "b/rms_norm/scale": SCALE,
  **{f"b/DenseReluDense/{n}": weights(d) for n, d in FEED_FORWARD.items()},
  "rms_norm/scale": SCALE,
}
MEETING = SELF + ("batch:2 length:4 d_model:4 d_ff:8",)


def branches(sa, q, k, v, o, sb, wi, wo):
  """What the two layers add."""
  return (
    lambda x: na.self_attention(rms_norm(x, sa), q, k, v, o, 2, na.causal(L)),
    lambda x: np.maximum(rms_norm(x, sb) @ wi, 0) @ wo,
  )


def stack_mirror(x, *w):
  first, second = branches(*w[:-1])
  x = x + first(x)
  return rms_norm(x + second(x), w[-1])


def reversible_mirror(x, *w):
  one = two = x
  for branch in branches(*w[:-1]):
    one, two = two, one + branch(two)
  return rms_norm(one + two, w[-1])


WITHOUT_RESIDUAL = lm_program.SUBLAYERS | dict(
  sublayers_per_layer=[transformer.sublayer_rms_norm, transformer.sublayer_call_layer]
)


def funnel():
  return funnel_transformer.FunnelTransformerLayerStack(
    [transformer_layers.DenseReluDense(hidden_size=4) for _ in range(4)],
    n_blocks=2,
    block_param_size=[1, 1],
    block_repeat_size=[1, 1],
    sublayers_initial=[],
    sublayers_per_layer=[transformer.sublayer_call_layer, transformer.sublayer_residual],
    sublayers_final=[],
  )


def funnel_mirror(x, ids, *w):
  for n in range(4):
    x = x + np.maximum(x * (ids != 0)[..., None] @ w[2 * n], 0) @ w[2 * n + 1]
    if n == 2:
      x, ids = x.reshape(2, 2, 2, 4).mean(2), ids[:, ::2]
  return x * (ids != 0)[..., None]


FUNNEL = {
  f"funnel_block_{b:03d}/param_idx_000/submodule_{s:03d}/DenseReluDense/{n}/kernel": weights(d)
  for b in range(2)
  for s in range(2)
  for n, d in (("wi", "d_model:4 d_ff:4"), ("wo", "d_ff:4 d_model:4"))
}

# ---------------------------------------------------------------------- sublayers


def sublayer(name, layer_stack=None, **kwargs):
  return lambda x: getattr(transformer, f"sublayer_{name}")(
    x, layer_stack, make_context(x), **kwargs
  )


def subsampled(x, scale):
  return x / np.sqrt((x[..., :2] ** 2).mean(-1, keepdims=True) + 1e-6) * scale


def layer_norm(x, scale, bias):
  centered = x - x.mean(-1, keepdims=True)
  return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def residual(x, y):
  context = make_context(x)
  context.current_layer_input = y
  return transformer.sublayer_residual(x, None, context)


def clipped(arrays, cotangents):
  """The gradient, of a root mean square of at most 0.3."""
  (g,) = cotangents
  return g / max(1.0, np.sqrt((g**2).mean()) / 0.3)


NORM = "true_layer_norm/layer_prepostprocess/layer_norm/layer_norm_"
# Not near zero, where norms are steep.
AWAY = T("batch:2 length:4 d_model:4", 0.3, 1)

# --------------------------------------------------------------------- embeddings

D, VOCAB = mtf.Dimension("d_model", 4), mtf.Dimension("vocab", 8)
TOKENS = T("batch:2 length:4", -1, 8, "int32")
TABLE = {"embedding": "vocab:8 d_model:4"}
VECTORS = "batch:2 length:4 vocab:8 d_model:4"


def embedding(mesh, scaled):
  return transformer.VocabEmbedding(mesh, VOCAB, D, FLOATS, "embedding", None, scaled)


def embed(ids, scaled):
  return embedding(ids.mesh, scaled).ids_to_embedding(ids, None)


def logits(hidden, scaled):
  return embedding(hidden.mesh, scaled).hidden_to_logits(hidden, make_context(hidden))


def rows(ids, table):
  return np.where((ids >= 0)[..., None], table[np.maximum(ids, 0)], 0.0)


def reduced(name, **kwargs):
  def build(x):
    ensemble, vocab = x.shape[0], x.shape[-1]
    return getattr(transformer, f"reduce_ensemble_logits{name}")(x, ensemble, vocab, **kwargs)

  return build


MEMBERS = "ensemble:2 batch:2 length:4 vocab:8"

DESCRIPTORS = [
  op(
    "layer_stack",
    call(transformer.LayerStack(layers(), **lm_program.SUBLAYERS)),
    stack_mirror,
    AWAY,
    variables=STACK,
    together=MEETING,
    tolerance=3e-5,
  ),
  op(
    "layer_stack_computed_again",
    call(transformer.LayerStack(layers(), recompute_grads=True, **lm_program.SUBLAYERS)),
    stack_mirror,
    AWAY,
    variables=STACK,
    together=MEETING,
    tolerance=3e-5,
  ),
  op(
    "reversible_layer_stack",
    call(transformer.ReversibleLayerStack(layers(), recompute_grads=True, **WITHOUT_RESIDUAL)),
    reversible_mirror,
    AWAY,
    variables=STACK,
    together=MEETING,
    tolerance=3e-5,
  ),
  op(
    "funnel_layer_stack",
    lambda x, ids: funnel().call(make_context(x, causal=False, sequence_id=ids), x),
    funnel_mirror,
    X,
    IDS,
    variables=FUNNEL,
    together=("batch:2 length:4 d_model:4 d_ff:4", "length:2"),
  ),
  op("rms_norm", sublayer("rms_norm"), rms_norm, AWAY, variables={"rms_norm/scale": SCALE}),
  op(
    "legacy_rms_norm",
    sublayer("legacy_rms_norm"),
    rms_norm,
    AWAY,
    variables={"layer_norm/scale": SCALE},
  ),
  op(
    "legacy_final_rms_norm",
    sublayer("legacy_final_rms_norm"),
    rms_norm,
    AWAY,
    variables={"final_layer_norm/scale": SCALE},
  ),
  op(
    "rms_norm_subsampled",
    sublayer("rms_norm_subsampled", percentage=40.0),
    subsampled,
    AWAY,
    variables={"layer_norm_subsampled/scale": SCALE},
  ),
  op(
    "scale_norm",
    sublayer("scale_norm"),
    rms_norm,
    AWAY,
    variables={"scale_norm/scale": T("", 0.5, 1.5)},
  ),
  op(
    "true_layer_norm",
    sublayer("true_layer_norm"),
    layer_norm,
    AWAY,
    variables={f"{NORM}scale": SCALE, f"{NORM}bias": "d_model:4"},
    tolerance=3e-5,
  ),
  op("rezero", sublayer("rezero"), lambda x, w: x * w, X, variables={"rezero_weight": ""}),
  op("residual", residual, np.add, X, X, variables={}),
  op(
    "mask_padding",
    lambda x, ids: transformer.sublayer_mask_padding(x, None, make_context(x, sequence_id=ids)),
    lambda x, ids: x * (ids != 0)[..., None],
    X,
    IDS,
    variables={},
  ),
  op(
    "clip_activation_gradient",
    sublayer("clip_activation_gradient", rms_norm=0.3),
    lambda x: x,
    X,
    gradient=clipped,
    variables={},
  ),
  op("dropout", sublayer("dropout", dropout_rate=0.4), ONE_DEVICE, X),
  op(
    "legacy_dropout",
    sublayer("legacy_dropout", types.SimpleNamespace(dropout_rate=0.4)),
    ONE_DEVICE,
    X,
  ),
  op(
    "annealed_dropout",
    sublayer("annealed_dropout", init_dropout_rate=0.4, start_step=-5, end_step=10),
    ONE_DEVICE,
    X,
  ),
  op(
    "vocab_embedding",
    functools.partial(embed, scaled=False),
    rows,
    TOKENS,
    variables=TABLE,
    together=VECTORS,
  ),
  op(
    "vocab_embedding_scaled",
    functools.partial(embed, scaled=True),
    lambda ids, table: rows(ids, table) * 2,
    TOKENS,
    variables=TABLE,
    together=VECTORS,
  ),
  op(
    "vocab_logits",
    functools.partial(logits, scaled=False),
    lambda h, table: h @ table.T / 2,
    X,
    variables=TABLE,
    together=VECTORS,
  ),
  op(
    "vocab_logits_scaled",
    functools.partial(logits, scaled=True),
    lambda h, table: h @ table.T,
    X,
    variables=TABLE,
    together=VECTORS,
  ),
  op("ensemble_of_one_member", reduced("_select", model_id=3), lambda x: x[1], MEMBERS),
  op(
    "ensemble_mean_probability",
    reduced(""),
    lambda x: np.log(na.softmax(x).mean(0)),
    MEMBERS,
  ),
  op("ensemble_mean_logit", reduced("_mean_logit"), lambda x: x.mean(0), MEMBERS),
]
