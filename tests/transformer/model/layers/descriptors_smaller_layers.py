"""Memory, Fixup, Evolved and Universal Transformer layers against NumPy, on drawn layouts."""

from __future__ import annotations

import functools

import numpy as np

from mesh_tensorflow.transformer import (
  evolved_transformer,
  fixup_layers,
  memory_layers,
  universal_transformer,
)
from mesh_tensorflow.transformer.model.layers import dense_relu_dense
from tests.conformance.framework import T, op
from tests.transformer.layer_context import make_context
from tests.transformer.model.layers import numpy_smaller as mirror

X = T("batch:4 length:4 d_model:4", -1, 1)
IDS = T(
  "batch:4 length:4", values=[[1, 1, 1, 1], [1, 1, 1, 0], [2, 2, 0, 0], [1, 2, 2, 0]], dtype="int32"
)
NORM = "layer_prepostprocess/layer_norm/layer_norm_"
QUARTER = T("d_model:4", 0.5, 1.5)


def call(layer, x, *, mode="eval", **kwargs):
  return layer.call(make_context(x, mode=mode, **kwargs), x)


def attend(x):
  return call(fixup_layers.SelfAttentionFixup(num_blocks=2, num_heads=2, key_value_size=2), x)


def convolve(layer, x, ids):
  return call(layer(d_model=4, dropout_rate=0.0), x, inputs=ids)


def masked(x, ids):
  return x * (ids != 0)[..., None]


def encoder_mirror(x, ids, dense, kernel, scale, bias, *separable):
  right = sum(
    mirror.convolution(masked(x, ids), [1.0], [tap - 1]) @ kernel[0, tap] for tap in range(3)
  )
  hidden = mirror.relu(x @ dense) + mirror.pad(mirror.relu(right), 16)
  hidden = mirror.layer_norm(hidden, scale, bias)
  return mirror.pad(mirror.separable(masked(hidden, ids), range(-4, 5), separable), 4)


def decoder_mirror(x, ids, *weights):
  first, second, (scale, bias), third = weights[:14], weights[14:24], weights[24:26], weights[26:]
  left = mirror.relu(mirror.separable(masked(x, ids), range(-10, 1), first))
  right = mirror.separable(masked(x, ids), range(-6, 1), second)
  hidden = mirror.layer_norm(left + mirror.pad(right, 8), scale, bias)
  return mirror.separable(masked(hidden, ids), range(-6, 1), third)


def separable(scope, taps, size, output):
  """Variables of a separable convolution."""
  prefix = f"{scope}/separable_conv1d/"
  made = {}
  for i in range(taps):
    made[f"{prefix}depthwise_conv_hack/depthwise_dense_{i}/kernel"] = f"d_model:{size}"
    if i == 0:
      made[f"{prefix}depthwise_conv_hack/depthwise_dense_0/bias"] = f"d_model:{size}"
  # A dense layer to the size it comes from renames its input.
  name = "_d_model" if size == output else "d_model"
  made[f"{prefix}pointwise_dense/kernel"] = f"{name}:{size} d_model:{output}"
  made[f"{prefix}pointwise_dense/bias"] = f"d_model:{output}"
  return made


UNIVERSAL = dict(
  act_type="basic",
  recurrence_type="basic",
  act_max_steps=2,
  act_epsilon=0.1,
  num_rec_steps=2,
  num_inrecurrence_layers=1,
  position_start_index=0,
  add_or_concat_timing_signal="add",
  step_timing_signal_type="learned",
  add_position_timing_signal=False,
  add_step_timing_signal=False,
  mix_with_transformer_before_ut=False,
  mix_with_transformer_after_ut=False,
  gates_inputs="sti",
  gate_ffn_layer="dense",
  use_gated_transformer=False,
  gating_type="highway",
)


def universal(x, ids=None, **kwargs):
  layer = dense_relu_dense.DenseReluDense(hidden_size=8)
  layer.set_name("layer")
  stack = universal_transformer.UTLayerStack([layer], **(UNIVERSAL | kwargs))
  return stack.call(make_context(x, mode="eval", sequence_id=ids), x)


FEED_FORWARD = {
  f"layer/{NORM}scale": QUARTER,
  f"layer/{NORM}bias": "d_model:4",
  "layer/DenseReluDense/wi/kernel": T("d_model:4 d_ff:8", -1, 1),
  "layer/DenseReluDense/wo/kernel": T("d_ff:8 d_model:4", -1, 1),
  f"{NORM}scale": QUARTER,
  f"{NORM}bias": "d_model:4",
}
PONDERING = {
  "sigmoid_activation_for_pondering/dense/kernel": T("d_model:4 d_model:1", -0.5, 0.5),
  "sigmoid_activation_for_pondering/dense_1/bias": T("d_model:1", -0.5, 0.5),
  "layer_embedding": T("layer:2 d_model:4", -0.5, 0.5),
}


def act_mirror(x, ids, s, b, wi, wo, fs, fb, kernel, bias, table, *, accumulated):
  stack = mirror.Universal((s, b), wi, wo, (fs, fb), mask=ids != 0)
  return stack.final(mirror.act(stack, x, kernel, bias, table, 0.1, accumulated))


def basic_mirror(x, ids, s, b, wi, wo, fs, fb):
  stack = mirror.Universal((s, b), wi, wo, (fs, fb), passes=2, mask=ids != 0)
  # A pass before, two steps of two passes with sinusoids, and a pass after.
  before = mirror.Universal((s, b), wi, wo, (fs, fb), passes=1, mask=ids != 0)
  x = before.step(x)
  for step in range(2):
    signal = [np.sin(step), np.sin(step * 1e-4), np.cos(step), np.cos(step * 1e-4)]
    x = stack.step(x + np.array(signal))
  return stack.final(before.step(x))


def highway_mirror(x, s, b, wi, wo, fs, fb, *gates):
  stack = mirror.Universal((s, b), wi, wo, (fs, fb))
  state = x
  for step in range(2):
    new = stack.step(state)
    inputs = np.concatenate([state, new, x], -1)
    transform, carry = (
      mirror.sigmoid(inputs @ kernel + bias)
      for kernel, bias in (gates[4 * step : 4 * step + 2], gates[4 * step + 2 : 4 * step + 4])
    )
    state = state * carry + new * transform
  return stack.final(state)


def gru_mirror(x, ids, s, b, wi, wo, *rest):
  *gates, fs, fb = rest
  mask = (ids != 0)[..., None]

  def norm(y):
    return mirror.layer_norm(y * mask, s, b)

  def gate(x, y, kernel, bias):
    return mirror.sigmoid(np.concatenate([x, y], -1) @ kernel + bias)

  def gated(x, y):
    once = norm(x), norm(y)
    update = gate(*once, *gates[:2])
    # The second gate normalizes what is normalized.
    reset = gate(*map(norm, once), *gates[2:4])
    candidate = gate(norm(reset * x), norm(y), *gates[4:])
    return (1 - update) * y + update * candidate

  stack = mirror.Universal((s, b), wi, wo, (fs, fb), mask=ids != 0, gate=gated)
  return stack.final(stack.step(stack.step(x)))


def gates(prefix, count, inputs):
  """Variables of dense layers without names."""
  made = {}
  for i in range(0, 2 * count, 2):
    made[f"{prefix}dense_{i}/kernel" if i else f"{prefix}dense/kernel"] = T(
      f"d_model:{4 * inputs} d_model:4", -0.5, 0.5
    )
    made[f"{prefix}dense_{i + 1}/bias"] = T("d_model:4", -0.5, 0.5)
  return made


HIGHWAY = FEED_FORWARD | gates("", 4, 3)
GRU = (
  dict(list(FEED_FORWARD.items())[:4])
  | gates("layer/", 3, 2)
  | dict(list(FEED_FORWARD.items())[4:])
)
MEETING = ("batch:4 length:4 d_model:4 d_ff:8",)

DESCRIPTORS = [
  op(
    "product_key_value_memory",
    functools.partial(
      call, memory_layers.ProductKeyValueMemory(key_size=8, n_keys=4, n_heads=2, knn=3)
    ),
    functools.partial(mirror.product_key_memory, knn=3),
    X,
    variables={
      "keys": "n_heads:2 product_key:2 n_keys:4 key:4",
      "values": "n_values:16 d_model:4",
      "query/kernel": "d_model:4 n_heads:2 product_key:2 key:4",
      "query/bias": "n_heads:2 product_key:2 key:4",
      f"{NORM}scale": "key:4",
      f"{NORM}bias": "key:4",
    },
    unsplit=("product_key", "knn", "knn2", "knn_square_dim"),
    together=(
      "batch:4 length:4 n_heads:2 key:4 d_model:4",
      "batch:4 length:4 n_heads:2 key:4 n_keys:4",
      "batch:4 length:4 n_heads:2 n_values:16 d_model:4",
      "knn:3 knn_square_dim:9",
      "knn:3 knn2:3",
    ),
    tolerance=3e-5,
  ),
  op(
    "dense_relu_dense_fixup",
    functools.partial(call, fixup_layers.DenseReluDenseFixup(hidden_size=8, num_blocks=3)),
    lambda x, wi, shift, wo: (mirror.relu(x @ wi) + shift) @ wo,
    X,
    variables={
      "wi/kernel": "d_model:4 d_ff:8",
      "shift": "single_bias:1",
      "wo/kernel": "d_ff:8 d_model:4",
    },
    together=MEETING,
  ),
  op(
    "self_attention_fixup",
    attend,
    functools.partial(mirror.self_attention, heads=2),
    X,
    variables={
      "q_fixup": "d_model:4 heads:4",
      "k_fixup": "d_model:4 heads:4",
      "v_fixup": "d_model:4 heads:4",
      "o_fixup": "heads:4 d_model:4",
    },
    together=(
      "batch:4 length:4 d_model:4 heads:4",
      "batch:4 memory_length:4 d_model:4 heads:4",
      "batch:4 length:4 memory_length:4 heads:2 d_kv:2",
    ),
    tolerance=3e-5,
  ),
  op(
    "fixup_sublayers",
    lambda x: fixup_layers.sublayer_fixup_shift(
      fixup_layers.sublayer_fixup_scale(x, None, make_context(x)), None, None
    ),
    lambda x, scale, shift: x * scale + shift,
    X,
    variables={"fixup_scale_weight": "single_scale:1", "fixup_bias": "single_bias:1"},
  ),
  op(
    "gated_linear_unit_layer",
    functools.partial(call, evolved_transformer.GatedLinearUnitLayer()),
    lambda x, w, b, u, c: (x @ w + b) * mirror.sigmoid(x @ u + c),
    X,
    variables={
      "glu_0/kernel": "_d_model:4 d_model:4",
      "glu_0/bias": "d_model:4",
      "glu_1/kernel": "_d_model:4 d_model:4",
      "glu_1/bias": "d_model:4",
    },
    together="batch:4 length:4 _d_model:4 d_model:4",
  ),
  op(
    "evolved_encoder_convolutional_layer",
    functools.partial(convolve, evolved_transformer.EncoderConvolutionalLayer),
    encoder_mirror,
    X,
    IDS,
    variables={
      "conv1x1/dense/kernel": "d_model:4 d_model:16",
      "conv3x1/conv2d/kernel": "fh:1 fw:3 input_dim:4 d_model:2",
      f"{NORM}scale": "d_model:16",
      f"{NORM}bias": "d_model:16",
      **separable("sep_conv9x1", 9, 16, 2),
    },
    unsplit=("d_model", "fh", "fw"),
    together="batch:4 length:4 input_dim:4",
    tolerance=3e-5,
  ),
  op(
    "evolved_decoder_convolutional_layer",
    functools.partial(convolve, evolved_transformer.DecoderConvolutionalLayer),
    decoder_mirror,
    X,
    IDS,
    variables={
      **separable("sep_conv11x1", 11, 4, 8),
      **separable("sep_conv7x1_1", 7, 4, 2),
      f"{NORM}scale": "d_model:8",
      f"{NORM}bias": "d_model:8",
      **separable("sep_conv7x1_2", 7, 8, 4),
    },
    unsplit=("d_model",),
    tolerance=3e-5,
  ),
  *(
    op(
      f"universal_act_{act_type}",
      functools.partial(
        universal, recurrence_type="act", act_type=act_type, add_step_timing_signal=True
      ),
      functools.partial(act_mirror, accumulated=act_type == "accumulated"),
      X,
      IDS,
      variables=FEED_FORWARD | PONDERING,
      together=MEETING,
      tolerance=3e-5,
    )
    for act_type in ("basic", "accumulated")
  ),
  op(
    "universal_basic",
    functools.partial(
      universal,
      num_inrecurrence_layers=2,
      num_vanilla_transformer_layers=1,
      mix_with_transformer_before_ut=True,
      mix_with_transformer_after_ut=True,
      add_step_timing_signal=True,
      step_timing_signal_type="sinusoid",
    ),
    basic_mirror,
    X,
    IDS,
    variables=FEED_FORWARD,
    together=MEETING,
    tolerance=3e-5,
  ),
  op(
    "universal_highway",
    functools.partial(universal, recurrence_type="highway", couple_carry_transform_gates=False),
    highway_mirror,
    X,
    variables=HIGHWAY,
    unsplit=("d_model",),
    together=MEETING,
    tolerance=3e-5,
  ),
  op(
    "universal_gru",
    functools.partial(universal, use_gated_transformer=True, gating_type="gru"),
    gru_mirror,
    X,
    IDS,
    variables=GRU,
    unsplit=("d_model",),
    together=MEETING,
    tolerance=3e-5,
  ),
]
