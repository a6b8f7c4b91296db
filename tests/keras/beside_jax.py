"""Programs of Keras' guide to `keras.distribution`, under JAX and under TensorFlow.

`python -m tests.keras.beside_jax` runs each program twice, in processes of their own: under JAX,
which serves the API, and under TensorFlow with `mtf.keras.enable()`; and prints a table. Both have
four virtual CPU devices, and the weights that Keras has drawn under JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import mesh_tensorflow as mtf

DEVICES, EXAMPLES, FEATURES, CLASSES, LENGTH = 4, 32, 16, 8, 12
ROOT = pathlib.Path(__file__).parents[2]
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
  """A program.

  Attributes:
    name: what it shows.
    distribution: makes the distribution.
    model: makes the model.
    optimizer: makes the optimizer.
    only_built: whether the distribution is set while the model is built, and not afterwards.
  """

  name: str
  distribution: Callable[[], Any]
  model: Callable[[], keras.Model]
  optimizer: Callable[[], Any]
  only_built: bool = False


def _dense() -> keras.Model:
  inputs = keras.Input([FEATURES])
  x = keras.layers.Dense(32, activation="relu", name="d1")(inputs)
  x = keras.layers.Dense(32, activation="gelu", name="d2")(x)
  return keras.Model(inputs, keras.layers.Dense(CLASSES, name="d3")(x))


class _Distributed(keras.layers.Layer):  # type: ignore[misc]
  """Gives its input a layout, as a layer of the guide does."""

  def call(self, x: Any) -> Any:
    mesh = keras.distribution.DeviceMesh(
      (2, 2), ("data", "model"), keras.distribution.list_devices("cpu")
    )
    layout = keras.distribution.TensorLayout(("data", "model"), mesh)
    return keras.distribution.distribute_tensor(x, layout)


def _distributed() -> keras.Model:
  inputs = keras.Input([FEATURES])
  x = _Distributed()(keras.layers.Dense(32, activation="relu", name="d1")(inputs))
  return keras.Model(inputs, keras.layers.Dense(CLASSES, name="d3")(x))


def _images() -> keras.Model:
  inputs = keras.Input([8, 8, 3])
  # The gradient of a bias here would be rounding errors, of which Adam makes steps.
  x = keras.layers.Conv2D(16, 3, padding="same", use_bias=False, name="conv")(inputs)
  x = keras.layers.ReLU()(keras.layers.BatchNormalization(name="norm")(x))
  x = keras.layers.GlobalAveragePooling2D()(keras.layers.MaxPooling2D()(x))
  return keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(x))


def _text() -> keras.Model:
  inputs = keras.Input([LENGTH], dtype="int32")
  x = keras.layers.Embedding(32, 16, name="embedding")(inputs)
  attention = keras.layers.MultiHeadAttention(4, 8, name="attention")
  x = keras.layers.LayerNormalization(name="norm")(x + attention(x, x, use_causal_mask=True))
  x = x + keras.layers.Dense(16, name="down")(keras.layers.Dense(64, "gelu", name="up")(x))
  x = keras.layers.GlobalAveragePooling1D()(x)
  return keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(x))


def _data_parallel() -> Any:
  return keras.distribution.DataParallel(devices=keras.distribution.list_devices("cpu"))


def _model_parallel(**layouts: tuple[str | None, ...]) -> Callable[[], Any]:
  """A mesh of 2x2 with a map; "_" in its keys stand for "/"."""

  def make() -> Any:
    devices = keras.distribution.list_devices("cpu")
    mesh = keras.distribution.DeviceMesh((2, 2), ("data", "model"), devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    for key, axes in layouts.items():
      layout_map[key.replace("_", "/")] = axes
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")

  return make


_OF_DENSE: dict[str, tuple[str | None, ...]] = {
  "d1_kernel": (None, "model"),
  "d1_bias": ("model",),
  "d2_kernel": ("model", None),
}
_OF_TEXT: dict[str, tuple[str | None, ...]] = {
  "embedding_embeddings": ("model", "data"),
  "attention_(query|key|value)_kernel": (None, "model", None),
  "attention_attention.output_kernel": ("model", None, None),
  "up_kernel": ("data", "model"),
  "down_kernel": ("model", "data"),
}


def _sgd() -> Any:
  return keras.optimizers.SGD(0.1, momentum=0.9)


def _adam() -> Any:
  return keras.optimizers.Adam(0.01)


def _adamw() -> Any:
  return keras.optimizers.AdamW(0.01, global_clipnorm=1.0)


CASES = (
  Case("data parallel", _data_parallel, _dense, _sgd),
  Case("data parallel, batch statistics", _data_parallel, _images, _sgd),
  Case("model parallel", _model_parallel(**_OF_DENSE), _dense, _adam),
  Case("with an output", _model_parallel(**_OF_DENSE, d2_output=("data", None)), _dense, _adam),
  Case("distribute_tensor", _model_parallel(d1_kernel=(None, "model")), _distributed, _sgd),
  Case("in a scope", _model_parallel(**_OF_DENSE), _dense, _adamw, only_built=True),
  Case(
    "split weights of convolutions",
    _model_parallel(conv_kernel=(None, None, None, "model")),
    _images,
    _adam,
  ),
  Case("attention, fully sharded", _model_parallel(**_OF_TEXT), _text, _adamw),
  Case("ids twice in a batch", _model_parallel(**_OF_TEXT), _text, _adam),
)


def _batches(model: keras.Model) -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(0)
  shape = (EXAMPLES, *model.input.shape[1:])
  if model.input.dtype == "int32":
    x = rng.integers(0, 32, shape).astype(np.int32)
  else:
    x = rng.normal(size=shape).astype(np.float32)
  return x, rng.integers(0, CLASSES, EXAMPLES)


def run(case: Case, weights: str, writes: bool) -> dict[str, np.ndarray]:
  """Runs a program; the same under any backend.

  Args:
    case: the program.
    weights: file of the initial weights.
    writes: whether the file is written, not read.
  """
  mtf.virtual_cpu_devices(DEVICES)
  mtf.keras.enable()
  keras.utils.set_random_seed(0)
  distribution = case.distribution()
  with contextlib.ExitStack() as stack:
    stack.enter_context(distribution.scope())
    model = case.model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(case.optimizer(), loss, metrics=["accuracy"])
    if case.only_built:
      stack.close()
    if writes:
      np.savez(weights, *model.get_weights())
    with np.load(weights) as file:
      model.set_weights([file[f"arr_{i}"] for i in range(len(file.files))])
    x, y = _batches(model)
    history = model.fit(
      *(x, y),
      **{"batch_size": 16, "epochs": 6, "shuffle": False, "verbose": 0},
      validation_data=(x[::2], y[::2]),
    )
    predicted = model.predict(x, batch_size=16, verbose=0)
    trained = model.get_weights()
  mtf.keras.disable()
  found = {k: np.asarray(v) for k, v in history.history.items()}
  return {**found, "predicted": predicted, "weights": np.concatenate([w.ravel() for w in trained])}


@dataclasses.dataclass(frozen=True)
class Beside:
  """The same program under both.

  Attributes:
    jax: losses of the epochs under JAX.
    losses: the largest difference of losses, of training and of validation, as a part of them.
    predictions: that of predictions, as a part of the largest.
    weights: that of weights in the end, which have been changed by gradients, likewise.
    accuracies: that of accuracies.
  """

  jax: np.ndarray
  losses: float
  predictions: float
  weights: float
  accuracies: float


def both(cases: Sequence[Case]) -> list[Beside]:
  """Runs programs under JAX and under TensorFlow.

  Args:
    cases: the programs.

  Raises:
    RuntimeError: one of them fails; with what it printed.
  """
  with tempfile.TemporaryDirectory() as folder:
    found = [_in_a_process(cases, backend, folder) for backend in ("jax", "tensorflow")]
  return [_beside(*results) for results in zip(*found)]


def _beside(jax: dict[str, np.ndarray], ours: dict[str, np.ndarray]) -> Beside:
  losses = [np.max(np.abs(ours[k] / jax[k] - 1.0)) for k in ("loss", "val_loss")]
  accuracies = [np.max(np.abs(ours[k] - jax[k])) for k in ("accuracy", "val_accuracy")]
  others = {
    k: np.max(np.abs(ours[k] - jax[k])) / np.max(np.abs(jax[k])) for k in ("predicted", "weights")
  }
  return Beside(jax["loss"], max(losses), *others.values(), max(accuracies))


def _in_a_process(cases: Sequence[Case], backend: str, folder: str) -> list[dict[str, np.ndarray]]:
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
  env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
  env |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-m", "tests.keras.beside_jax", *[c.name for c in cases]]
  command += ["--results", folder]
  ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
  if ended.returncode:
    raise RuntimeError(f"under {backend}: {ended.stderr[-4000:]}")
  return [dict(np.load(_file(folder, c, backend))) for c in cases]


def _file(folder: str, case: Case, what: str) -> str:
  return os.path.join(folder, f"{case.name} {what}.npz")


def main(arguments: Sequence[str]) -> int:
  """Prints the table; 1 if losses differ."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("cases", nargs="*", default=[c.name for c in CASES])
  parser.add_argument("--results", help="run under the backend of this process, into this folder")
  flags = parser.parse_args(arguments)
  cases = [c for c in CASES if c.name in flags.cases]
  if flags.results:
    backend = keras.config.backend()
    for case in cases:
      weights = _file(flags.results, case, "weights")
      found = run(case, weights, writes=backend == "jax")
      np.savez(_file(flags.results, case, backend), **found)
      keras.backend.clear_session()
    return 0
  results = both(cases)
  print("| program | loss under JAX, first and last epoch ", end="")
  print("| largest difference of losses | of predictions | of weights |\n|---|---|---|---|---|")
  for case, beside in zip(cases, results):
    first, last = beside.jax[0], beside.jax[-1]
    differences = (beside.losses, beside.predictions, beside.weights)
    print(f"| {case.name} | {first:.3f}, {last:.3f} | ", end="")
    print(" | ".join(f"{d:.1e}" for d in differences), "|")
  return int(any(beside.losses > TOLERANCE for beside in results))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
