"""A training step of a Keras Transformer on one device: the mesh's program against Keras' own.

  python -m benchmarks.keras_step

Both get the same batches by `fit`: the model itself, whose `train_function` Keras compiles, and
the same on a mesh of one device. Rounds alternate; the ratio is that of the medians of all steps.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import keras
import numpy as np
import tensorflow as tf
from keras import layers

ROUNDS, STEPS = 4, 12
BATCH, LENGTH, VOCABULARY, WIDTH = 16, 64, 512, 128


def model() -> keras.Model:
  """Two blocks of attention and dense layers."""
  keras.utils.set_random_seed(0)
  tokens = keras.Input([LENGTH], dtype="int32")
  x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
  for _ in range(2):
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "gelu")(y))
  made = keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))
  made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  return made


def seconds(fitted: Any, data: tf.data.Dataset) -> list[float]:
  """Seconds of each step of a `fit`, but for the first ones.

  Args:
    fitted: has `fit`.
    data: batches without end.
  """
  stamps: list[float] = []

  def stamp(batch: int, logs: Any) -> None:
    del batch
    float(logs["loss"])  # Waits for the step.
    stamps.append(time.perf_counter())

  callback = keras.callbacks.LambdaCallback(on_train_batch_end=stamp)
  fitted.fit(data, steps_per_epoch=STEPS, verbose=0, callbacks=[callback])
  return [b - a for a, b in zip(stamps[2:], stamps[3:])]


def main() -> None:
  ids = np.random.default_rng(0).integers(0, VOCABULARY, [BATCH, LENGTH]).astype(np.int32)
  data = tf.data.Dataset.from_tensors((ids, np.roll(ids, -1, 1))).repeat()
  fitted = {"Keras": model(), "mesh": mtf.keras.parallelize(model(), "all:1", "")}
  times: dict[str, list[float]] = {name: [] for name in fitted}
  for _ in range(ROUNDS):
    for name, one in fitted.items():
      times[name] += seconds(one, data)
  medians = {name: statistics.median(t) for name, t in times.items()}
  for name, median in medians.items():
    print(f"{name:6} {1e3 * median:8.1f} ms a step")
  print(f"ratio  {medians['mesh'] / medians['Keras']:8.2f}")


if __name__ == "__main__":
  main()
