"""Training steps, and the first `fit`, of Keras models: on a mesh against Keras' own.

  python -m benchmarks.keras_step [--rounds 8] [mlp] [cnn] [transformer] [resnet50]

Steps: all sides get the same batches by `fit`, in one process: the model itself, whose
`train_function` Keras compiles; the same on a mesh of one device, by `parallelize`; and under
`keras.distribution.DataParallel` of that device, served by `mtf.keras.enable`. Short rounds
alternate; a ratio is that of the medians of all steps, by the clock and by the time of the
processors, which tells on a machine that does other things, too.

The first `fit`: from the model's construction to the end of its first step, in a process of its
own each time, in turns: Keras; the mesh of one device; four devices with the batch split by hand;
and four with a layout that is searched.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
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


def mlp() -> tuple[keras.Model, tf.data.Dataset]:
  """Three dense layers, on vectors."""
  widths = (256, 256)
  model = keras.Sequential(
    [keras.Input([64]), *(layers.Dense(n, "relu") for n in widths), layers.Dense(CLASSES)]
  )
  rng = np.random.default_rng(0)
  x = rng.normal(size=[128, 64]).astype(np.float32)
  return model, tf.data.Dataset.from_tensors((x, rng.integers(0, CLASSES, 128)))


def cnn() -> tuple[keras.Model, tf.data.Dataset]:
  """Convolutions with batch normalization and pooling, on images of 32x32."""
  x = images = keras.Input([32, 32, 3])
  for filters in (32, 64):
    for _ in range(2):
      x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
      x = layers.Activation("relu")(layers.BatchNormalization()(x))
    x = layers.MaxPooling2D()(x)
  x = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x))
  rng = np.random.default_rng(0)
  data = rng.normal(size=[32, 32, 32, 3]).astype(np.float32)
  return keras.Model(images, x), tf.data.Dataset.from_tensors((data, rng.integers(0, CLASSES, 32)))


def resnet50() -> tuple[keras.Model, tf.data.Dataset]:
  """ResNet50 of keras.applications, on images of 64x64."""
  model = keras.applications.ResNet50(
    weights=None, input_shape=(SIZE, SIZE, 3), classes=CLASSES, classifier_activation=None
  )
  rng = np.random.default_rng(0)
  images = rng.normal(size=[IMAGES, SIZE, SIZE, 3]).astype(np.float32)
  return model, tf.data.Dataset.from_tensors((images, rng.integers(0, CLASSES, IMAGES)))


MODELS: dict[str, Callable[[], tuple[keras.Model, tf.data.Dataset]]] = {
  "mlp": mlp,
  "cnn": cnn,
  "transformer": transformer,
  "resnet50": resnet50,
}
# Of the first fit. The batch is split by hand, and nothing is split on one device.
FIRST_FITS = {"Keras": "", "one": "all:1", "four by hand": "all:4", "four by auto": "all:4"}


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


def served(name: str) -> tuple[Any, tf.data.Dataset]:
  """A model under `keras.distribution`, of one device, and its batches."""
  mtf.keras.enable()
  distribution = keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:1])
  with distribution.scope():
    return made(name)


def compare(name: str, rounds: int) -> None:
  """Prints the medians of steps, and their ratios, for a model."""
  (keras_model, data), (other, _), (own, _) = made(name), made(name), served(name)
  fitted = {
    "Keras": keras_model,
    "parallelize": mtf.keras.parallelize(other, "all:1", ""),
    "enable": own,
  }
  for one in fitted.values():
    add_round(one, data, Seconds([], []))
  times = {which: Seconds([], []) for which in fitted}
  for _ in range(rounds):
    for which, one in fitted.items():
      add_round(one, data, times[which])
  medians = {which: [statistics.median(t) for t in seconds] for which, seconds in times.items()}
  print(f"{name}: {len(times['Keras'].clock)} steps of each, medians in ms")
  for which, (clock, processors) in medians.items():
    ratio, of_processors = (m / k for k, m in zip(medians["Keras"], medians[which]))
    print(
      f"  {which:12} clock {1e3 * clock:8.2f}  processors {1e3 * processors:8.2f}"
      f"  of Keras {ratio:.3f} {of_processors:.3f}",
      flush=True,
    )


def first_fit(name: str, which: str) -> float:
  """Seconds of a model's construction and first step, in this process."""
  if which != "Keras":
    mtf.virtual_cpu_devices(int(FIRST_FITS[which].partition(":")[2]))
  tf.zeros([]).numpy()  # The runtime has started.
  start = time.perf_counter()
  model, data = made(name)
  fitted: Any = model
  if which != "Keras":
    layout = "auto" if which.endswith("auto") else "batch:all"
    fitted = mtf.keras.parallelize(model, FIRST_FITS[which], layout)
    fitted.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  fitted.fit(data, steps_per_epoch=1, verbose=0)
  return time.perf_counter() - start


def compare_first_fits(name: str, rounds: int) -> None:
  """Prints the medians of first fits, and their ratios to Keras', for a model."""
  command = [sys.executable, "-m", "benchmarks.keras_step", name, "--first"]
  times: dict[str, list[float]] = {which: [] for which in FIRST_FITS}
  for _ in range(rounds):
    for which in FIRST_FITS:
      run = subprocess.run([*command, which], capture_output=True, text=True, check=True)
      times[which].append(float(run.stdout))
  print(f"{name}: the first fit, median of {rounds}, in s")
  medians = {which: statistics.median(t) for which, t in times.items()}
  for which, median in medians.items():
    print(f"  {which:12} {median:6.2f}  of Keras {median / medians['Keras']:.2f}", flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; by default all")
  parser.add_argument("--rounds", type=int, default=8, help="of steps; the first fits have 3")
  parser.add_argument("--first", choices=FIRST_FITS, help="print the seconds of one first fit")
  flags = parser.parse_args()
  unknown = set(flags.models) - set(MODELS)
  if unknown:
    parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
  if flags.first:
    print(first_fit(flags.models[0], flags.first))
    return
  for name in flags.models or MODELS:
    compare(name, flags.rounds)
    compare_first_fits(name, 3)


if __name__ == "__main__":
  main()
