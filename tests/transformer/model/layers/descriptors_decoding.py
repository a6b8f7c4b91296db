"""Layers one position at a time, on drawn layouts: the values of all positions at once."""

from __future__ import annotations

import numpy as np

from mesh_tensorflow.transformer import transformer_layers
from tests.conformance.framework import Descriptor, T, op
from tests.transformer.layer_context import steps
from tests.transformer.model.layers import descriptors_attention_layers as attention
from tests.transformer.model.layers import descriptors_basic_layers as basic
from tests.transformer.model.layers import descriptors_conv_layers as conv
from tests.transformer.model.layers import descriptors_grouped_query as grouped
from tests.transformer.model.layers import descriptors_smaller_layers as smaller
from tests.transformer.model.layers import descriptors_stacks as stacks
from tests.transformer.model.layers import descriptors_today as today
from tests.transformer.model.layers import numpy_attention as na

FULL: dict[str, Descriptor] = {
  d.name: d
  for module in (attention, basic, conv, grouped, smaller, stacks, today)
  for d in module.DESCRIPTORS
}
KEYS = "batch:2 memory_length:4 heads:2 d_kv:2"
INPUTS = "batch:2 memory_length:4 d_model:4"
TALKING = ["batch:2 memory_length:4 kh:2 d_k:2", "batch:2 memory_length:4 vh:2 d_v:2"]
WINDOW = "batch:2 heads:2 window:2 d_kv:2"

# Name of a descriptor, and the dims of the layer's states.
STATES = {
  "self_attention": [KEYS, KEYS],
  "self_attention_of_grouped_heads": [KEYS, KEYS],
  "enc_dec_attention_of_one_sequence": [],
  "enc_dec_attention_fixup": [],
  "evolved_decoder_attention_layer": [KEYS, KEYS],
  "dense_relu_dense": [],
  "experts_for_queries_and_keys": [KEYS],
  "experts_for_queries": [KEYS],
  "experts_for_keys": [KEYS],
  "experts_of_an_encoder": [],
  "moe_layer_of_one_choice": [],
  "moe_layer_with_room_is_dense": [],
  "moe_layer_of_deep_experts": [],
  "moe_layer_of_two_levels": [],
  "moe_layer_without_dropping": [],
  "moe_layer_of_swiglu_experts": [],
  "local_self_attention": [WINDOW, WINDOW],
  "talking_heads": TALKING,
  "talking_heads_with_dynamic_projections": [*TALKING, INPUTS],
  "talking_heads_of_an_encoder": [],
  "general_bilinear": [INPUTS],
  "general_bilinear_of_an_encoder": [],
  "branched_attention": [KEYS, KEYS],
  "branched_attention_of_an_encoder": [],
  "transparent_attention": [],
  **{f"synthesizer_{mode}": [KEYS, KEYS] for mode, *_ in attention.SYNTHESIZER},
  "lightweight_convolution": ["batch:2 length:3 d_model:4"],
  "dynamic_convolution": ["batch:2 length:2 d_model:4"],
  "local_convolution_block": ["batch:2 length:2 d_model:4"],
  "parallel_layer": [KEYS, KEYS],
  "product_key_value_memory": [],
  "dense_relu_dense_fixup": [],
  "self_attention_fixup": ["batch:4 memory_length:4 heads:2 d_kv:2"] * 2,
  "gated_linear_unit_layer": [],
  "evolved_decoder_convolutional_layer": [
    "batch:4 length:11 d_model:4",
    "batch:4 length:7 d_model:4",
    "batch:4 length:7 d_model:8",
  ],
  "universal_highway": [],
  "layer_stack": [KEYS, KEYS],
  "reversible_layer_stack": [KEYS, KEYS],
  "rotary_attention_of_groups": ["batch:2 memory_length:4 heads:2 d_kv:4"] * 2,
  "multi_query_attention_with_norm_and_soft_cap": ["batch:2 memory_length:4 d_kv:4"] * 2,
  "window_with_a_sink": ["batch:2 memory_length:4 heads:2 d_kv:4"] * 2,
  "rotary_local_attention": ["batch:2 heads:2 window:3 d_kv:4"] * 2,
  "yarn_of_groups_with_trained_sinks": ["batch:2 memory_length:4 heads:2 d_kv:4"] * 2,
  "attention_with_biases": ["batch:2 memory_length:4 heads:2 d_kv:4"] * 2,
  # A slot of the sink, two of the window.
  "local_attention_with_sinks": ["batch:2 window:3 d_kv:4"] * 2,
  "swiglu": [],
}

DESCRIPTORS = [
  *(steps(FULL[name], *states) for name, states in STATES.items()),
  steps(
    op(
      "one_head_of_keys_that_are_values",
      basic.call(
        transformer_layers.SelfAttention(
          relative_attention_type="contextual",
          relative_attention_num_buckets=4,
          num_memory_heads=1,
          shared_kv=True,
          **attention.DIMS,
        )
      ),
      basic.self_attention(
        ["q", "kv", "o", "relative_attention_ak/kernel"],
        num_memory_heads=1,
        shared_kv=True,
        relative_attention_type="contextual",
        buckets=4,
      ),
      basic.X,
      variables=basic.ONE_KEY_HEAD,
      together=basic.ONE_KEY_HEAD_MEETING,
    ),
    "batch:2 memory_length:4 d_kv:2",
  ),
  steps(
    op(
      "local_self_attention_of_one_key_head",
      attention.call(
        transformer_layers.LocalSelfAttention(
          radius=3, num_memory_heads=1, shared_kv=True, **attention.DIMS
        )
      ),
      lambda x, *w: basic.attention(
        x,
        dict(zip(["q", "kv", "o"], w)),
        na.window(4, 3)[None] == 0,
        num_memory_heads=1,
        shared_kv=True,
      ),
      basic.X,
      variables={n: d for n, d in basic.ONE_KEY_HEAD.items() if "/" not in n},
      together=basic.ONE_KEY_HEAD_MEETING,
    ),
    "batch:2 window:3 d_kv:2",
  ),
  steps(
    op(
      "conv1d_layer_of_one_position",
      conv.call(transformer_layers.Conv1DLayer(filter_size=1, output_size=2, activation="tanh")),
      lambda x, inputs, kernel: np.tanh(x * conv.MASK @ kernel[0, 0]),
      conv.X,
      conv.INPUTS,
      variables={"conv2d/kernel": T("fh:1 fw:1 input_dim:4 d_model:2", -1, 1)},
      together="batch:2 length:4 input_dim:4 d_model:2",
    ),
    "batch:2 length:1 d_model:4",
  ),
  steps(
    op(
      "separable_convolution_of_earlier_positions",
      conv.call(transformer_layers.SeparableConv1DLayer(-3, -1, output_size=2)),
      conv.separable_mirror(-3, 3),
      conv.X,
      conv.INPUTS,
      variables=conv.taps(conv.HACK, 3, "d_model:4") | conv.pointwise(2),
      together="batch:2 length:4 d_model:4",
    ),
    "batch:2 length:4 d_model:4",
  ),
]
