"""Experts that drop nothing, further tokens, a cap on logits, against NumPy."""

from __future__ import annotations

import functools

import numpy as np

from mesh_tensorflow.transformer import moe, transformer, transformer_layers
from tests.conformance.framework import T, op
from tests.transformer import numpy_moe
from tests.transformer.model.layers import descriptors_basic_layers as basic
from tests.transformer.numpy_lm import rms_norm

X = T("batch:2 length:4 d_model:4", -1, 1)
IDS = [[1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 2, 2, 3, 0, 0]]
TARGETS = [[5, 2, 3, 1, 4, 7, 6, 1], [3, 6, 1, 2, 1, 1, 0, 0]]


def experts(name, wi, reference, **options):
  """A layer of experts that drops nothing: the same whether tokens come at once or one by one."""
  layer = moe.MoE1D(
    num_experts=4, hidden_size=4, moe_gating="top_k", top_n_num_experts_per_token=2, dropless=True,
    num_shared_experts=1, loss_coef=0.0, **options,
  )  # fmt: skip
  variables = {"top_k_gating/kernel": T("d_model:4 expert_unsplit:4", -2, 2)}
  if options.get("balance_rate"):
    variables["top_k_gating/balance_bias"] = T("expert_unsplit:4", values=[0.5, -0.5, 0.25, 0.0])
  variables |= {n: "experts:4 d_model:4 expert_hidden:4" for n in wi}
  variables |= {"wo/kernel": "experts:4 expert_hidden:4 d_model:4"}
  variables |= {f"shared/{n}": "d_model:4 d_ff:4" for n in wi}
  variables |= {"shared/wo/kernel": "d_ff:4 d_model:4"}
  return op(
    name,
    basic.call(layer),
    reference,
    X,
    variables=variables,
    untrained=("top_k_gating/balance_bias",),
    together=(
      "batch:2 length:4 d_model:4 expert_unsplit:4",
      "experts:4 d_model:4 expert_hidden:4",
      "batch:2 length:4 d_model:4 d_ff:4",
    ),
  )


def balanced(x, gate, bias, wi, wo, *shared):
  return numpy_moe.moe(
    "top_k", x, gate, wi, wo, groups=1, capacity=8, n=2, scores="sigmoid", bias=bias, shared=shared
  )[0]


def gated(x, gate, wi_0, wi_1, wo, shared_0, shared_1, shared_out):
  """SwiGLU experts; the logits of the chosen make the gates."""
  swish = lambda x: x / (1 + np.exp(-x))  # noqa: E731
  logits = x @ gate
  order = np.argsort(-logits, axis=-1)[..., :2]
  gates = numpy_moe.softmax(np.take_along_axis(logits, order, -1))
  h = swish(np.einsum("bld,edh->bleh", x, wi_0)) * np.einsum("bld,edh->bleh", x, wi_1)
  y = np.take_along_axis(np.einsum("bleh,ehd->bled", h, wo), order[..., None], 2)
  y = np.einsum("blk,blkd->bld", gates, y)
  return y + (swish(x @ shared_0) * (x @ shared_1)) @ shared_out


# ------------------------------------------------------------------- further tokens


def model(tied, multi_token=True):
  """Embeddings and logits, and two further tokens by a feed-forward layer each."""
  stack = functools.partial(
    transformer.LayerStack,
    sublayers_initial=[],
    sublayers_per_layer=[transformer.sublayer_call_layer, transformer.sublayer_residual],
    sublayers_final=[],
  )
  dense = functools.partial(transformer_layers.DenseReluDense, hidden_size=4, activation="tanh")
  further = transformer.MultiTokenPrediction(2, 0.5, [dense], stack) if multi_token else None
  return transformer.Unitransformer(
    transformer.make_layer_stack([], stack, num_layers=0),
    d_model=4,
    input_vocab_size=8,
    output_vocab_size=8,
    autoregressive=True,
    max_length=8,
    vocab_divisor=1,
    z_loss=0.0,
    positional_embedding=False,
    shared_embedding_and_softmax_weights=tied,
    final_logit_soft_cap=1.5,
    multi_token=further,
  )


def ahead(a, k):
  return np.concatenate([a[:, k:], np.zeros_like(a[:, :k])], 1)


def further_tokens(name, tied):
  def build(targets, ids):
    inputs = transformer.autoregressive_inputs(targets, sequence_id=ids)
    logits, loss = model(tied).call_simple(inputs, targets, True, sequence_id=ids)
    return [logits, loss]

  variables = {"embedding": T("vocab:8 d_model:4", -1, 1)}
  if not tied:
    variables["logits/kernel"] = "d_model:4 vocab:8"
  for k in (1, 2):
    variables |= {
      f"future_token_{k}/hidden_norm/scale": T("d_model:4", 0.5, 1.5),
      f"future_token_{k}/embedding_norm/scale": T("d_model:4", 0.5, 1.5),
      # Small enough for tanh not to be flat.
      f"future_token_{k}/hidden/kernel": T("_d_model:4 d_model:4", -0.4, 0.4),
      f"future_token_{k}/embedding/kernel": T("_d_model:4 d_model:4", -0.4, 0.4),
      f"future_token_{k}/block_000/layer_000/DenseReluDense/wi/kernel": T(
        "d_model:4 d_ff:4", -0.8, 0.8
      ),
      f"future_token_{k}/block_000/layer_000/DenseReluDense/wo/kernel": "d_ff:4 d_model:4",
    }

  def reference(targets, ids, table, *w):
    kernel = table.T * 0.5 if tied else w[0]  # d_model ** -0.5
    w = w if tied else w[1:]
    first = np.concatenate([np.zeros_like(ids[:, :1]), ids[:, :-1]], 1) != ids
    shifted = np.concatenate([np.zeros_like(targets[:, :1]), targets[:, :-1]], 1)
    inputs = np.where(first, 0, shifted)
    nonpadding = (ids != 0)[..., None]

    def loss(logits, targets, counted):
      p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
      return -(np.take_along_axis(p, targets[..., None], -1)[..., 0] * counted).sum() / targets.size

    cap = lambda x: 1.5 * np.tanh(x / 1.5)  # noqa: E731
    # The stack zeroes padding.
    h = table[inputs] * nonpadding
    logits = cap(h @ kernel)
    total = loss(logits, targets, targets > 0)
    for k in (1, 2):
      s_h, s_e, a, b, wi, wo = w[6 * k - 6 : 6 * k]
      h = rms_norm(h, s_h) @ a + rms_norm(table[ahead(inputs, k)], s_e) @ b
      h = (h + np.tanh((h * nonpadding) @ wi) @ wo) * nonpadding
      counted = (ahead(targets, k) > 0) & (ahead(ids, k) == ids)
      total += 0.25 * loss(cap(h @ kernel), ahead(targets, k), counted)
    return [logits, total]

  return op(
    name,
    build,
    reference,
    T("batch:2 length:8", dtype="int32", values=TARGETS),
    T("batch:2 length:8", dtype="int32", values=IDS),
    variables={f"transformer/{n}": v for n, v in variables.items()},
    together=(
      "batch:2 length:8 d_model:4 d_ff:4",
      "batch:2 length:8 vocab:8",
      "batch:2 length:8 _d_model:4",
    ),
  )


DESCRIPTORS = [
  experts(
    "moe_layer_without_dropping", ["wi/kernel"], balanced, router_scores="sigmoid", balance_rate=0.1
  ),
  experts(
    "moe_layer_of_swiglu_experts",
    ["wi_0/kernel", "wi_1/kernel"],
    gated,
    activation=["swish", "linear"],
  ),
  further_tokens("further_tokens_of_tied_embeddings", True),
  further_tokens("further_tokens_of_untied_embeddings", False),
]
