"""A small language model with experts, for the tests of mixtures of experts."""

from __future__ import annotations

import functools
from typing import Any

from mesh_tensorflow.transformer import moe, transformer, transformer_layers
from tests.transformer import lm_program as lm


def make_model(
  experts: dict[str, Any] | None = None,
  cls: Any = moe.MoE1D,
  num_layers: int = 2,
  num_heads: int = 2,
  d_kv: int = 3,
  recompute_grads: bool = False,
  **kwargs: Any,
) -> transformer.Unitransformer:
  """The language model of the golden values of mixtures of experts, with changes.

  Args:
    experts: arguments of the layer of experts, besides those of the golden values.
    cls: its class.
    num_layers: number of blocks.
    num_heads: of self-attention.
    d_kv: of self-attention.
    recompute_grads: whether layers are computed again in the backward pass.
    **kwargs: arguments of the model.
  """
  layers = [
    [transformer_layers.SelfAttention, dict(num_heads=num_heads, key_value_size=d_kv)],
    [cls, dict(hidden_size=5) | (experts or {})],
  ]
  options = dict(
    d_model=4,
    input_vocab_size=11,
    output_vocab_size=11,
    autoregressive=True,
    max_length=16,
    vocab_divisor=1,
    shared_embedding_and_softmax_weights=True,
    layout="batch:batch",
    mesh_shape="batch:1",
  )
  stack = functools.partial(transformer.LayerStack, recompute_grads=recompute_grads, **lm.SUBLAYERS)
  return transformer.Unitransformer(
    transformer.make_layer_stack(layers, stack, num_layers=num_layers),
    **(options | kwargs),
  )
