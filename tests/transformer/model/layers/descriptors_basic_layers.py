"""Self-attention, attention to an encoder, feed-forward layers and experts, against NumPy."""

from __future__ import annotations

import gin
import numpy as np

from mesh_tensorflow.transformer import (
  evolved_transformer,
  fixup_layers,
  heterogeneous_moe,
  moe,
  transformer_layers,
)
from tests.conformance.framework import T, op
from tests.transformer import numpy_lm, numpy_moe
from tests.transformer.layer_context import make_context
from tests.transformer.model.layers import numpy_attention as na
from tests.transformer.model.layers.descriptors_attention_layers import (
  CROSS,
  DIMS,
  QKVO,
  SELF,
  L,
  weights,
)

X, M = T("batch:2 length:4 d_model:4", -1, 1), T("batch:2 memory_length:4 d_model:4", -1, 1)
IDS = T("batch:2 length:4", dtype="int32", values=[[1, 1, 2, 2], [1, 1, 1, 0]])
CAUSAL = np.tri(L, dtype=bool)[None]
ONE_KEY_HEAD = {
  "q": QKVO["q"],
  "kv": weights("d_model:4 d_kv:2"),
  "o": QKVO["o"],
  "relative_attention_ak/kernel": "heads:2 d_kv:2 buckets:4",
}
ONE_KEY_HEAD_MEETING = (
  *SELF,
  "batch:2 memory_length:4 d_model:4 d_kv:2",
  "batch:2 length:4 heads:2 d_kv:2 buckets:4",
)
TABLE = T("heads:2 buckets:4", -2, 2)


def call(layer, **kwargs):
  return lambda x: layer.call(make_context(x, **kwargs), x)


def with_ids(layer):
  return lambda x, ids: layer.call(make_context(x, sequence_id=ids), x)


def attention(x, w, allowed=CAUSAL, num_heads=2, **options):
  return numpy_lm.self_attention(x, w, allowed, dict(num_heads=num_heads, d_kv=2, **options))


def self_attention(names, **options):
  return lambda x, *w: attention(x, dict(zip(names, w)), **options)


def segments(ids):
  return CAUSAL & (ids[:, :, None] == ids[:, None, :])


# ------------------------------------------------------------- attention to an encoder

SENTINELS = 4  # The ids from 7 on, of 11.
INPUTS = T("batch:2 length:4", dtype="int32", values=[[0, 8, 3, 7], [0, 2, 9, 9]])
ENCODER_INPUTS = T("batch:2 memory_length:4", dtype="int32", values=[[3, 9, 2, 8], [10, 4, 7, 0]])
ONES = T("batch:2 length:4", dtype="int32", values=np.ones([2, 4]))
ENCODER_IDS = T("batch:2 memory_length:4", dtype="int32", values=[[1, 1, 1, 1], [1, 1, 1, 0]])
PACKED_IDS = T("batch:2 memory_length:4", dtype="int32", values=[[1, 1, 1, 2], [1, 2, 2, 0]])
TO_ENCODER = (X, M, INPUTS, IDS, ENCODER_INPUTS, PACKED_IDS)


def to_encoder(layer):
  def build(x, memory, inputs, ids, encoder_inputs, encoder_ids):
    gin.bind_parameter("relative_position_spans.num_sentinels", SENTINELS)
    context = make_context(
      x,
      encoder_output=memory,
      inputs=inputs,
      sequence_id=ids,
      encoder_inputs=encoder_inputs,
      encoder_sequence_id=encoder_ids,
    )
    return layer.call(context, x)

  return build


def spans_bias(table, inputs, ids, encoder_inputs, encoder_ids):
  """The bias of the position that stands at the start of the span of the same number."""
  first, length = 11 - SENTINELS, inputs.shape[1]
  span = np.cumsum(inputs >= first, 1) + ids * length
  encoder_span = np.cumsum(encoder_inputs >= first, 1) + encoder_ids * length
  start = np.array([[(e < s).sum() for s in row] for row, e in zip(span, encoder_span)])
  buckets = numpy_lm.bucket(start[..., None] - np.arange(length), True, table.shape[-1])
  return np.moveaxis(table[:, buckets], 0, 1)


def enc_dec(x, memory, inputs, ids, encoder_inputs, encoder_ids, q, k, v, o, table):
  bias = spans_bias(table, inputs, ids, encoder_inputs, encoder_ids)
  same = (ids[:, :, None] == encoder_ids[:, None, :])[:, None]
  return na.self_attention(x, q, k, v, o, 2, np.where(same, bias, -1e9), memory)


RELATIVE = dict(relative_attention_type="bias_shared", relative_attention_num_buckets=4)
ENC_DEC = QKVO | {"enc_dec_relative_attention_bias": TABLE}
SELF_CROSS = SELF + CROSS[1:]


def decoder_attention():
  layer = evolved_transformer.DecoderAttentionLayer(base_num_heads=1)
  layer._self_attention.key_value_size = layer._enc_dec_attention.key_value_size = 2
  return layer


def both_attentions(x, memory, q, k, v, o, *cross):
  return na.self_attention(x, q, k, v, o, 2, na.causal(L)) + na.self_attention(
    x, *cross, 1, 0.0, memory
  )


def call_with_memory(layer):
  return lambda x, memory: layer.call(make_context(x, encoder_output=memory), x)


# ------------------------------------------------------------------------ experts

# No token is left out.
ROOM = dict(capacity_factor_train=8.0, capacity_factor_eval=8.0)
SWITCH = dict(switch_policy_train="argmax", switch_policy_eval="argmax", **ROOM)
EXPERTS = dict(num_experts=2, hidden_size=4, shared_kv=True, **SWITCH, **DIMS)
GATE = T("d_model:4 expert_unsplit:2", -2, 2)
HIDDEN = weights("experts:2 d_model:4 expert_hidden:4")
OUT = weights("experts:2 expert_hidden:4 d_model:4")
EXPERTS_MEETING = ("batch:2 d_model:4 expert_unsplit:2", "experts:2 d_model:4 expert_hidden:4")


def expert(x, gate, wi, *wos):
  """The outputs of the most probable expert, times its probability."""
  p = numpy_moe.softmax(x @ gate)
  chosen = (p == p.max(-1, keepdims=True)) * p
  return [np.einsum("ble,bled->bld", chosen, numpy_moe.feed_forward(x, wi, wo)) for wo in wos]


def split(y):
  return y.reshape(*y.shape[:2], 2, 2)


def attend(q, kv, o, bias):
  return na.attend(split(q) * 2**-0.5, split(kv), split(kv), bias).reshape(2, L, 4) @ o


def experts_for_both(x, o, gate, wi, q_wo, k_wo):
  return attend(*expert(x, gate, wi, q_wo, k_wo), o, na.causal(L))


def experts_for_queries(x, o, kv, gate, wi, wo):
  return attend(expert(x, gate, wi, wo)[0], x @ kv, o, na.causal(L))


def experts_for_keys(x, o, q, gate, wi, wo):
  return attend(x @ q, expert(x, gate, wi, wo)[0], o, na.causal(L))


def experts_of_an_encoder(x, memory, o, gate, wi, q_wo, k_wo):
  return attend(expert(x, gate, wi, q_wo)[0], expert(memory, gate, wi, k_wo)[0], o, 0.0)


def top_2_dense(x, gate, wi, wo):
  """All experts on all tokens; the two largest gates, to a sum of 1, weigh their outputs."""
  p = numpy_moe.softmax(x @ gate)
  second = np.sort(p, -1)[..., -2:-1]
  gates = np.where(p >= second, p, 0.0)
  gates = gates / gates.sum(-1, keepdims=True)
  return np.einsum("ble,bled->bld", gates, numpy_moe.feed_forward(x, wi, wo))


def two_levels(x, outer, inner, wi, wo):
  y, _ = numpy_moe.moe_2d(x, outer, inner, wi, wo, groups=1, capacity=8, groups_y=1, capacity_y=8)
  return y


def deep_experts(x, gate, wi_0, wo_0, scale, wi_1, wo_1):
  p = numpy_moe.softmax(x @ gate)
  chosen = (p == p.max(-1, keepdims=True)) * p
  layers = [(wi_0, wo_0), (wi_1, wo_1, scale)]
  return np.einsum("ble,bled->bld", chosen, numpy_moe.deep_experts(x, layers, np.ones([4, 2, 2])))


EXPERT_MATRICES = {"wi/kernel": HIDDEN, "wo/kernel": OUT}


def gelu(x):
  return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


DESCRIPTORS = [
  op(
    "self_attention",
    call(
      transformer_layers.SelfAttention(
        relative_attention_type="bias", relative_attention_num_buckets=4, **DIMS
      )
    ),
    self_attention([*"qkvo", "relative_attention_bias"], relative_attention_type="bias", buckets=4),
    X,
    variables=QKVO | {"relative_attention_bias": TABLE},
    together=(*SELF, "length:4 memory_length:4 heads:2 buckets:4"),
  ),
  op(
    "self_attention_to_both_sides",
    call(transformer_layers.SelfAttention(**RELATIVE, **DIMS), causal=False),
    lambda x, *w: na.self_attention(x, *w[:4], 2, na.relative_bias(w[4], L, bidirectional=True)),
    X,
    variables=QKVO | {"relative_attention_bias": TABLE},
    together=(*SELF, "length:4 memory_length:4 heads:2 buckets:4"),
  ),
  op(
    "self_attention_of_packed_sequences",
    with_ids(
      transformer_layers.SelfAttention(
        relative_attention_type="contextual",
        relative_attention_num_buckets=4,
        num_memory_heads=1,
        shared_kv=True,
        **DIMS,
      )
    ),
    lambda x, ids, *w: attention(
      x,
      dict(zip(["q", "kv", "o", "relative_attention_ak/kernel"], w)),
      segments(ids),
      num_memory_heads=1,
      shared_kv=True,
      relative_attention_type="contextual",
      buckets=4,
    ),
    X,
    IDS,
    variables=ONE_KEY_HEAD,
    together=ONE_KEY_HEAD_MEETING,
  ),
  op(
    "self_attention_of_grouped_heads",
    call(
      transformer_layers.SelfAttention(
        num_heads=4,
        num_memory_heads=2,
        key_value_size=2,
        combine_dims=False,
        fold_scaling_into_initializer=False,
      )
    ),
    self_attention("qkvo", num_heads=4, num_memory_heads=2, fold_scaling_into_initializer=False),
    X,
    variables={
      "q": weights("d_model:4 heads:2 query_heads:2 d_kv:2"),
      "k": weights("d_model:4 heads:2 d_kv:2"),
      "v": weights("d_model:4 heads:2 d_kv:2"),
      "o": weights("heads:2 query_heads:2 d_kv:2 d_model:4"),
    },
    together=(
      "batch:2 length:4 memory_length:4 heads:2 query_heads:2 d_kv:2",
      "batch:2 length:4 d_model:4 heads:2 query_heads:2 d_kv:2",
      "batch:2 memory_length:4 d_model:4 heads:2 d_kv:2",
    ),
  ),
  op(
    "enc_dec_attention",
    to_encoder(transformer_layers.EncDecAttention(**RELATIVE, **DIMS)),
    enc_dec,
    *TO_ENCODER,
    variables=ENC_DEC,
    together=(*SELF, "batch:2 length:4 memory_length:4 heads:2 buckets:4"),
  ),
  op(
    "enc_dec_attention_of_one_sequence",
    to_encoder(transformer_layers.EncDecAttention(**RELATIVE, **DIMS)),
    enc_dec,
    *(X, M, INPUTS, ONES, ENCODER_INPUTS, ENCODER_IDS),
    variables=ENC_DEC,
    together=(*SELF, "batch:2 length:4 memory_length:4 heads:2 buckets:4"),
  ),
  op(
    "enc_dec_attention_fixup",
    call_with_memory(fixup_layers.EncDecAttentionFixup(**DIMS)),
    lambda x, memory, *w: na.self_attention(x, *w, 2, 0.0, memory),
    X,
    M,
    variables=QKVO,
    together=SELF,
  ),
  op(
    "evolved_decoder_attention_layer",
    call_with_memory(decoder_attention()),
    both_attentions,
    X,
    M,
    variables={f"self_attention/{n}": d for n, d in QKVO.items()}
    | {f"enc_dec_attention/{n}": weights("d_model:4 d_kv:2") for n in "qkv"}
    | {"enc_dec_attention/o": weights("d_kv:2 d_model:4")},
    together=(
      *SELF,
      "batch:2 length:4 d_model:4 d_kv:2",
      "batch:2 memory_length:4 d_model:4 d_kv:2",
    ),
  ),
  op(
    "dense_relu_dense",
    call(
      transformer_layers.DenseReluDense(hidden_size=8, activation=["gelu", "linear"], use_bias=True)
    ),
    lambda x, wi, bi, wj, bj, wo, bo: (gelu(x @ wi + bi) * (x @ wj + bj)) @ wo + bo,
    X,
    variables={
      "wi_0/kernel": "d_model:4 d_ff:8",
      "wi_0/bias": "d_ff:8",
      "wi_1/kernel": "d_model:4 d_ff:8",
      "wi_1/bias": "d_ff:8",
      "wo/kernel": "d_ff:8 d_model:4",
      "wo/bias": "d_model:4",
    },
    together="batch:2 length:4 d_model:4 d_ff:8",
  ),
  op(
    "experts_for_queries_and_keys",
    call(transformer_layers.ExpertsSelfAttention(**EXPERTS)),
    experts_for_both,
    X,
    variables={
      "o": QKVO["o"],
      "switch_gating/kernel": GATE,
      "wi/kernel": HIDDEN,
      "q_wo/kernel": OUT,
      "k_wo/kernel": OUT,
    },
    together=SELF + EXPERTS_MEETING,
  ),
  op(
    "experts_for_queries",
    call(transformer_layers.ExpertsSelfAttention(expert_computation="q", **EXPERTS)),
    experts_for_queries,
    X,
    variables={"o": QKVO["o"], "kv": QKVO["k"], "switch_gating/kernel": GATE} | EXPERT_MATRICES,
    together=SELF + EXPERTS_MEETING,
  ),
  op(
    "experts_for_keys",
    call(transformer_layers.ExpertsSelfAttention(expert_computation="kv", **EXPERTS)),
    experts_for_keys,
    X,
    variables={"o": QKVO["o"], "q": QKVO["q"], "switch_gating/kernel": GATE} | EXPERT_MATRICES,
    together=SELF + EXPERTS_MEETING,
  ),
  op(
    "experts_of_an_encoder",
    call_with_memory(transformer_layers.ExpertsEncDecAttention(**EXPERTS)),
    experts_of_an_encoder,
    X,
    M,
    variables={
      "o": QKVO["o"],
      "switch_gating/kernel": GATE,
      "wi/kernel": HIDDEN,
      "q_wo/kernel": OUT,
      "k_wo/kernel": OUT,
    },
    together=SELF + EXPERTS_MEETING,
  ),
  op(
    "moe_layer_of_one_choice",
    call(moe.MoE1D(num_experts=2, hidden_size=4, moe_gating="switch", **SWITCH)),
    lambda x, *w: expert(x, *w)[0],
    X,
    variables={"switch_gating/kernel": GATE} | EXPERT_MATRICES,
    together=EXPERTS_MEETING,
  ),
  op(
    "moe_layer_with_room_is_dense",
    call(
      moe.MoE1D(
        num_experts=4,
        hidden_size=4,
        second_policy_train="all",
        second_policy_eval="all",
        **ROOM,
      )
    ),
    top_2_dense,
    X,
    variables={
      "top_2_gating/kernel": T("d_model:4 expert_unsplit:4", -2, 2),
      "wi/kernel": weights("experts:4 d_model:4 expert_hidden:4"),
      "wo/kernel": weights("experts:4 expert_hidden:4 d_model:4"),
    },
    together=("batch:2 d_model:4 expert_unsplit:4", "experts:4 d_model:4 expert_hidden:4"),
  ),
  op(
    "moe_layer_of_deep_experts",
    call(
      heterogeneous_moe.HeterogeneousMoE1D(
        num_experts=2, hidden_size=4, moe_num_layers=2, moe_gating="switch", **SWITCH
      )
    ),
    deep_experts,
    # Not near zero, where the norm is steep.
    T("batch:2 length:4 d_model:4", 0.3, 1),
    variables={
      "switch_gating/kernel": GATE,
      "expert_layer_0/wi/kernel": T("experts:2 d_model:4 expert_hidden:4", 0.1, 0.9),
      "expert_layer_0/wo/kernel": OUT,
      "expert_layer_1/rms_norm/scale": T("d_model:4", 0.5, 1.5),
      "expert_layer_1/wi/kernel": HIDDEN,
      "expert_layer_1/wo/kernel": OUT,
    },
    together=EXPERTS_MEETING,
  ),
  op(
    "moe_layer_of_two_levels",
    call(
      moe.MoE2D(
        expert_x=2,
        expert_y=2,
        hidden_size=4,
        capacity_factor_second_level=8.0,
        second_policy_train="all",
        second_policy_eval="all",
        **ROOM,
      )
    ),
    two_levels,
    X,
    variables={
      "outer_gating/kernel": T("d_model:4 expert_x_unsplit:2", -2, 2),
      "inner_gating/kernel": T("expert_x:2 d_model:4 expert_y_unsplit:2", -2, 2),
      "wi/kernel": weights("expert_y:2 expert_x:2 d_model:4 expert_hidden:4"),
      "wo/kernel": weights("expert_y:2 expert_x:2 expert_hidden:4 d_model:4"),
    },
    together=(
      "batch:2 d_model:4 expert_x_unsplit:2",
      "expert_x:2 d_model:4 expert_y_unsplit:2",
    ),
  ),
]
