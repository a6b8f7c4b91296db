"""Backbones of keras-hub, unmodified and tiny: results and all gradients on layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tests.importing import comparing

RNG = np.random.default_rng(0)
IDS = RNG.integers(1, 30, (4, 8)).astype(np.int32)
ALL = np.ones((4, 8), np.int32)
PADDED = np.where(np.arange(8) < 6, ALL, 0).astype(np.int32)
SIZES = {"vocabulary_size": 32, "hidden_dim": 8, "intermediate_dim": 16}
TEXT = {**SIZES, "num_layers": 2, "num_heads": 2, "dropout": 0.0}


def _bert(models: Any) -> Any:
  inputs = {"token_ids": IDS, "segment_ids": 0 * ALL, "padding_mask": PADDED}
  return models.BertBackbone(max_sequence_length=8, **TEXT), inputs


def _gpt2(models: Any) -> Any:
  inputs = {"token_ids": IDS, "padding_mask": PADDED}
  return models.GPT2Backbone(max_sequence_length=8, **TEXT), inputs


def _t5(models: Any) -> Any:
  inputs = {f"encoder_{k}": v for k, v in (("token_ids", IDS), ("padding_mask", PADDED))}
  inputs |= {f"decoder_{k}": v for k, v in (("token_ids", IDS), ("padding_mask", ALL))}
  return models.T5Backbone(**TEXT), inputs


def _gemma(models: Any) -> Any:
  heads = {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_layers": 2}
  return models.GemmaBackbone(**SIZES, **heads), {"token_ids": IDS, "padding_mask": PADDED}


def _vit(models: Any) -> Any:
  sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16}
  model = models.ViTBackbone(
    image_shape=(8, 8, 3), patch_size=4, dropout_rate=0.0, attention_dropout=0.0, **sizes
  )
  return model, RNG.uniform(size=(4, 8, 8, 3)).astype(np.float32)


MODELS: dict[str, Callable[[Any], Any]] = {
  "bert": _bert,
  "gemma": _gemma,
  "gpt2": _gpt2,
  "t5": _t5,
  "vit": _vit,
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_backbone_on_layouts(name: str, cpu_devices: list[str]) -> None:
  keras_hub = pytest.importorskip("keras_hub", reason="keras-hub is an extra for tests")
  keras.utils.set_random_seed(1)
  model, inputs = MODELS[name](keras_hub.models)
  for v in model.trainable_variables:
    v.assign(v + 0.05 * RNG.normal(size=v.shape))
  names = sorted(inputs) if isinstance(inputs, dict) else []
  args = [inputs[k] for k in names] if names else [inputs]

  def fn(*xs: Any) -> Any:
    return model(dict(zip(names, xs, strict=True)) if names else xs[0], training=True)

  imported = comparing.imported_of(fn, args)
  assert not imported.fallbacks
  batch = next(d for d in imported.dimensions if imported.dimensions.places(d)[0].endswith("[0]"))
  others = [n for n, d in imported.dimensions.items() if d.size % 2 == 0 and n != batch]
  for i in range(0, len(others), max(1, len(others) // 4)):
    layout = [(batch, "r"), (others[i], "c")]
    both = comparing.compare(fn, args, layout, cpu_devices[:4], imported=imported)
    assert both.difference < 2e-5, layout
