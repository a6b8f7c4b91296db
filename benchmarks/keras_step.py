"""A training step of a Keras model on one device: the mesh's program against Keras' own.

  python -m benchmarks.keras_step [--rounds 8] [transformer] [resnet50]

Both get the same batches by `fit`, in one process: the model itself, whose `train_function` Keras
compiles, and the same on a mesh of one device. Short rounds alternate; the ratio is that of the
medians of all steps, by the clock and by the time of the processors, which tells on a machine that
does other things, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import keras
import numpy as np
import tensorflow as tf
from keras import layers

STEPS, FIRST = 8, 2  # Of a round, and how many of them are not counted.
BATCH, LENGTH, VOCABULARY, WIDTH = 16, 64, 512, 128
IMAGES, SIZE, CLASSES = 8, 64, 10


class Seconds(NamedTuple):
  """What steps took.

  Attributes:
    clock: of each step, by the clock.
    processors: likewise, of all threads of this process.
  """

  clock: list[float]
  processors: list[float]


def transformer() -> tuple[keras.Model, tf.data.Dataset]:
  """Two blocks of attention and dense layers, on tokens."""
  tokens = keras.Input([LENGTH], dtype="int32")
  x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
  for _ in range(2):
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "gelu")(y))
  model = keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))
  ids = np.random.default_rng(0).integers(0, VOCABULARY, [BATCH, LENGTH]).astype(np.int32)
  return model, tf.data.Dataset.from_tensors((ids, np.roll(ids, -1, 1)))


def resnet50() -> tuple[keras.Model, tf.data.Dataset]:
  """ResNet50 of keras.applications, on images of 64x64."""
  model = keras.applications.ResNet50(
    weights=None, input_shape=(SIZE, SIZE, 3), classes=CLASSES, classifier_activation=None
  )
  rng = np.random.default_rng(0)
  images = rng.normal(size=[IMAGES, SIZE, SIZE, 3]).astype(np.float32)
  return model, tf.data.Dataset.from_tensors((images, rng.integers(0, CLASSES, IMAGES)))


MODELS: dict[str, Callable[[], tuple[keras.Model, tf.data.Dataset]]] = {
  "transformer": transformer,
  "resnet50": resnet50,
}


def made(name: str) -> tuple[keras.Model, tf.data.Dataset]:
  """A model, compiled, with the same weights each time, and batches without end."""
  keras.utils.set_random_seed(0)
  model, data = MODELS[name]()
  model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  return model, data.repeat()


def add_round(fitted: Any, data: tf.data.Dataset, seconds: Seconds) -> None:
  """A short `fit`; adds what its steps took, but for the first ones.

  Args:
    fitted: has `fit`.
    data: batches without end.
    seconds: is added to.
  """
  stamps: list[tuple[float, float]] = []

  def stamp(batch: int, logs: Any) -> None:
    del batch
    float(logs["loss"])  # Waits for the step.
    stamps.append((time.perf_counter(), time.process_time()))

  callback = keras.callbacks.LambdaCallback(on_train_batch_end=stamp)
  fitted.fit(data, steps_per_epoch=STEPS, verbose=0, callbacks=[callback])
  for before, after in zip(stamps[FIRST - 1 :], stamps[FIRST:]):
    seconds.clock.append(after[0] - before[0])
    seconds.processors.append(after[1] - before[1])


def compare(name: str, rounds: int) -> None:
  """Prints the medians and their ratios for a model."""
  (keras_model, data), (other, _) = made(name), made(name)
  fitted = {"Keras": keras_model, "mesh": mtf.keras.parallelize(other, "all:1", "")}
  for one in fitted.values():
    add_round(one, data, Seconds([], []))
  times = {which: Seconds([], []) for which in fitted}
  for _ in range(rounds):
    for which, one in fitted.items():
      add_round(one, data, times[which])
  medians = {which: [statistics.median(t) for t in seconds] for which, seconds in times.items()}
  print(f"{name}: {len(times['mesh'].clock)} steps of each, medians in ms")
  for which, (clock, processors) in medians.items():
    print(f"  {which:6} clock {1e3 * clock:8.1f}  processors {1e3 * processors:8.1f}")
  ratios = [m / k for k, m in zip(medians["Keras"], medians["mesh"])]
  print(f"  ratio  clock {ratios[0]:8.3f}  processors {ratios[1]:8.3f}", flush=True)


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; by default all")
  parser.add_argument("--rounds", type=int, default=8)
  flags = parser.parse_args()
  unknown = set(flags.models) - set(MODELS)
  if unknown:
    parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
  for name in flags.models or MODELS:
    compare(name, flags.rounds)


if __name__ == "__main__":
  main()
