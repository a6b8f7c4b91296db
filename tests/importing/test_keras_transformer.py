"""A Keras Transformer language model, unmodified: results and all gradients on layouts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mesh_tensorflow as mtf
from tests.importing import comparing

# On SIMD it is searched in make test.
LONG_IF_SEARCHED = (
  "test_dropout_is_the_same_on_all_layouts",
  "test_language_model_on_placement",
)

VOCABULARY, LENGTH, D_MODEL, HEADS = 16, 4, 8, 2
DIMS = {
  "inputs": ["batch", "length"],
  "targets": ["batch", "length"],
  "*_up/kernel": ["d_model", "d_ff"],
  "*query/kernel": [None, "heads", "depth"],
  "logits/kernel": [None, "vocab"],
}


class Positions(layers.Layer):
  def build(self, _: Any) -> None:
    self.table = self.add_weight(shape=(LENGTH, D_MODEL), name="positions")

  def call(self, x: Any) -> Any:
    return x + self.table


def language_model(blocks: int, dropout: float = 0.0) -> keras.Model:
  keras.utils.set_random_seed(1)
  inputs = keras.Input((LENGTH,), dtype="int32")
  x = Positions()(layers.Embedding(VOCABULARY, D_MODEL, name="embedding")(inputs))
  for i in range(blocks):
    h = layers.LayerNormalization(name=f"block_{i}_norm_1")(x)
    attention = layers.MultiHeadAttention(
      HEADS, D_MODEL // HEADS, dropout=dropout, name=f"block_{i}_attention"
    )
    x = layers.Add()([x, attention(h, h, use_causal_mask=True)])
    h = layers.LayerNormalization(name=f"block_{i}_norm_2")(x)
    h = layers.Dense(2 * D_MODEL, activation="gelu", name=f"block_{i}_up")(h)
    h = layers.Dropout(dropout)(layers.Dense(D_MODEL, name=f"block_{i}_down")(h))
    x = layers.Add()([x, h])
  model = keras.Model(inputs, layers.Dense(VOCABULARY, name="logits")(x))
  rng = np.random.default_rng(0)
  for v in model.trainable_variables:  # Biases and scales of zeros and ones would hide mistakes.
    v.assign(v + 0.1 * rng.normal(size=v.shape))
  return model


def with_loss(model: keras.Model) -> Any:
  def run(inputs: Any, targets: Any) -> Any:
    logits = model(inputs, training=True)
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
    return logits, tf.reduce_mean(entropy)

  return run


def batch() -> list[np.ndarray]:
  rng = np.random.default_rng(1)
  return [rng.integers(0, VOCABULARY, (4, LENGTH)).astype(np.int32) for _ in range(2)]


def check(blocks: int, layouts: list[tuple[str, int]], devices: list[str], simd: bool) -> None:
  fn = with_loss(language_model(blocks))
  args = batch()
  imported = comparing.imported_of(fn, args, DIMS)
  assert not imported.fallbacks
  for layout, n in layouts:
    both = comparing.compare(fn, args, layout, devices[:n], imported=imported, simd=simd)
    assert both.difference < 1e-5, layout
    assert len(both.given) == 2 + len(imported.variables)


LAYOUTS = [
  ("batch:r,d_ff:c,heads:c,vocab:c", 4),
  ("length:r,d_model:c", 4),
  ("depth:r,batch:c", 4),
  ("memory_length:c,embedding.vocabulary:r,d_ff:r", 4),
  ("heads:r,length:c,d_ff:r", 8),
]


def test_language_model_on_placement(cpu_devices: list[str]) -> None:
  check(1, LAYOUTS[1:2], cpu_devices, simd=False)


@pytest.mark.long
def test_language_model_on_all_layouts(cpu_devices: list[str]) -> None:
  check(1, LAYOUTS, cpu_devices, simd=False)


def test_language_model_on_simd(cpu_devices: list[str]) -> None:
  check(1, LAYOUTS[:1], cpu_devices, simd=True)


@pytest.mark.long
def test_deeper_language_model_on_simd(cpu_devices: list[str]) -> None:
  check(2, LAYOUTS, cpu_devices, simd=True)


def test_names_are_few_and_of_all_blocks() -> None:
  imported = comparing.imported_of(with_loss(language_model(3)), batch(), DIMS)
  assert list(imported.dimensions) == [
    "batch",
    "length",
    "embedding.vocabulary",
    "d_model",
    "heads",
    "depth",
    "block_0_attention/value.2",
    "d_ff",
    "vocab",
    "memory_length",
  ]
  assert sum("_up/kernel" in p for p in imported.dimensions.places("d_ff")) == 3


def test_share_of_operations_that_a_layout_splits() -> None:
  imported = comparing.imported_of(with_loss(language_model(2)), batch(), DIMS)
  split = {"batch", "heads", "d_ff", "vocab", "d_model"}
  operations = [op for op in imported.operations if op.dimensions]
  assert sum(bool(op.dimensions & split) for op in operations) >= 0.95 * len(operations)


def test_dropout_is_the_same_on_all_layouts(cpu_devices: list[str]) -> None:
  fn = with_loss(language_model(1, dropout=0.5))
  args = batch()
  imported = comparing.imported_of(fn, args, DIMS)
  results = []
  for layout in ("batch:r,heads:c", "length:r,d_model:c"):
    impl = mtf.PlacementMeshImpl("r:2,c:2", layout, cpu_devices[:4])
    results.append(comparing.on_mesh(imported, args, impl, traced=False))
  plain = comparing.original(fn, args, [])
  for a, b in zip(*results, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  assert np.max(np.abs(results[0][0] - plain[0])) > 0.01
