"""Backbones of keras-hub (an extra of the tests), at tiny sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

NAMES = ("Bert", "GPT2", "Gemma", "Llama", "T5", "ViT")
BATCH, LENGTH, VOCABULARY = 4, 8, 32


def backbone(hub: Any, name: str) -> tuple[Callable[..., Any], list[np.ndarray]]:
  """A backbone as a function of arrays, and arrays for it; the last two positions are padding.

  Args:
    hub: the module `keras_hub`.
    name: one of `NAMES`.
  """
  rng = np.random.default_rng(6)
  tokens = rng.integers(1, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
  mask = (np.arange(LENGTH) < LENGTH - 2).astype(np.int32) * np.ones_like(tokens)
  sizes = {"num_layers": 2, "hidden_dim": 16}
  text = {**sizes, "vocabulary_size": VOCABULARY, "intermediate_dim": 32}
  heads = {"num_query_heads": 4, "num_key_value_heads": 2}
  settings: dict[str, dict[str, Any]] = {
    "Bert": {**text, "num_heads": 2, "max_sequence_length": 16},
    "GPT2": {**text, "num_heads": 2, "max_sequence_length": 16},
    "Gemma": {**text, **heads, "head_dim": 8},
    "Llama": {**text, **heads},
    "T5": {**text, "num_heads": 2, "key_value_dim": 8},
    "ViT": {**sizes, "num_heads": 2, "mlp_dim": 32, "image_shape": (16, 16, 3), "patch_size": 8},
  }
  model = getattr(hub.models, f"{name}Backbone")(**settings[name])
  if name == "ViT":
    images = rng.normal(size=(BATCH, 16, 16, 3)).astype(np.float32)
    return lambda x: model(x, training=False), [images]
  named = {"token_ids": tokens, "padding_mask": mask}
  if name == "Bert":
    named["segment_ids"] = np.zeros_like(tokens)
  if name == "T5":
    named = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in named.items()}

  def call(*xs: Any) -> Any:
    return model(dict(zip(named, xs)), training=False)

  return call, list(named.values())
