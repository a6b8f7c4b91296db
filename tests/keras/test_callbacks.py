"""Keras' callbacks and kinds of data, on a mesh beside Keras alone."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.keras.models import (
  X,
  Y,
  assert_same_history,
  assert_same_variables,
  compiled,
  placement,
  single,
)

# TensorFlow comes without it, and Keras' callback needs it.
HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
pytestmark = pytest.mark.long
SEARCHED_TOO = True
LAYOUT = "batch:rows,net/down.units:cols"
FIT = {"batch_size": 8, "epochs": 4, "shuffle": False, "verbose": 0}


def _pair(**kwargs: Any) -> tuple[keras.Model, keras.Model, Any]:
  """The same model twice, and the second one on a mesh."""
  theirs, ours = (compiled(make=single, **kwargs) for _ in range(2))
  return theirs, ours, mtf.keras.parallelize(ours, placement(layout=LAYOUT))


def test_callbacks_of_keras(tmp_path: pathlib.Path) -> None:
  c = keras.callbacks
  theirs, ours, parallel = _pair()

  def of(name: str) -> list[Any]:
    folder = tmp_path / name
    folder.mkdir()
    board = [c.TensorBoard(str(folder / "board"), histogram_freq=1, update_freq=1)]
    return [
      *(board if HAS_TENSORBOARD else []),
      c.BackupAndRestore(str(folder / "backup")),
      c.ModelCheckpoint(str(folder / "best.keras"), "loss", save_best_only=True),
      c.ModelCheckpoint(str(folder / "{batch}.weights.h5"), save_weights_only=True, save_freq=3),
      c.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
      c.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=10.0),
      c.CSVLogger(str(folder / "log.csv")),
      c.TerminateOnNaN(),
      c.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
    ]

  kwargs = {**FIT, "validation_split": 0.25}
  expected = theirs.fit(X[:20], Y[:20], callbacks=of("theirs"), **kwargs)
  assert_same_history(parallel.fit(X[:20], Y[:20], callbacks=of("ours"), **kwargs), expected)
  assert_same_variables(ours, theirs)
  logs = [
    np.loadtxt(tmp_path / n / "log.csv", delimiter=",", skiprows=1) for n in ("ours", "theirs")
  ]
  np.testing.assert_allclose(*logs, rtol=1e-4)
  files = [
    sorted(p.name for p in (tmp_path / n).rglob("*") if "tfevents" not in p.name)
    for n in ("ours", "theirs")
  ]
  assert files[0] == files[1]
  best = [keras.models.load_model(tmp_path / n / "best.keras") for n in ("ours", "theirs")]
  assert_same_variables(*best)
  if HAS_TENSORBOARD:
    assert list((tmp_path / "ours/board").rglob("*tfevents*"))


def test_a_backup_is_gone_on_with(tmp_path: pathlib.Path) -> None:
  class Stops(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
      if epoch == 2:
        raise KeyboardInterrupt

  theirs, ours, parallel = _pair()
  backup = keras.callbacks.BackupAndRestore(str(tmp_path))
  with pytest.raises(KeyboardInterrupt):
    parallel.fit(X[:16], Y[:16], callbacks=[backup, Stops()], **FIT)
  theirs.fit(X[:16], Y[:16], **FIT)
  again = compiled(make=single)
  backup = keras.callbacks.BackupAndRestore(str(tmp_path))
  history = mtf.keras.parallelize(again, placement(layout=LAYOUT)).fit(
    X[:16], Y[:16], callbacks=[backup], **FIT
  )
  assert history.epoch == [2, 3]
  assert_same_variables(again, theirs)


class Batches(keras.utils.PyDataset):
  """Batches by number, with weights of the examples."""

  def __len__(self) -> int:
    return 3

  def __getitem__(self, i: int) -> Any:
    rows = slice(8 * i, 8 * i + 8)
    return X[rows], Y[rows], np.arange(len(Y[rows]), dtype=np.float32)


def _generator() -> Iterator[Any]:
  for i in range(2):
    yield X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8]


def _unequal() -> tf.data.Dataset:
  return tf.data.Dataset.from_tensor_slices((X[:21], Y[:21], np.linspace(0, 1, 21))).batch(8)


DATA: dict[str, Callable[[], Any]] = {
  "numbered": lambda: Batches(),
  "generator": _generator,
  "unequal": _unequal,
}


@pytest.mark.parametrize("kind", DATA)
def test_data(kind: str) -> None:
  theirs, ours, parallel = _pair(weighted_metrics=["accuracy"])
  kwargs = {"epochs": 1 if kind == "generator" else 2, "shuffle": False, "verbose": 0}
  expected = theirs.fit(DATA[kind](), **kwargs)
  assert_same_history(parallel.fit(DATA[kind](), **kwargs), expected)
  # Not the optimizer's: Keras alone counts the step that finds a generator at its end.
  for u, v in zip(ours.weights, theirs.weights, strict=True):
    np.testing.assert_allclose(u.numpy(), v.numpy(), rtol=1e-4, atol=1e-5, err_msg=u.path)


def test_dicts_and_several_outputs() -> None:
  def make() -> keras.Model:
    keras.utils.set_random_seed(1)
    a, b = keras.Input((8,), name="a"), keras.Input((4,), name="b")
    both = keras.layers.Concatenate()([a, b])
    outputs = {
      "kind": keras.layers.Dense(4, name="kind")(both),
      "size": keras.layers.Dense(1, name="size")(both),
    }
    model = keras.Model({"a": a, "b": b}, outputs, name="net")
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    model.compile("sgd", losses, metrics={"size": ["mae"]}, loss_weights={"kind": 1.0, "size": 0.5})
    return model

  theirs, ours = make(), make()
  parallel = mtf.keras.parallelize(ours, placement("rows:2", "batch:rows"))
  x, y = {"a": X[:16], "b": X[:16, :4]}, {"kind": Y[:16], "size": X[:16, :1]}
  kwargs = {**FIT, "epochs": 3, "initial_epoch": 1, "validation_data": (x, y)}
  assert_same_history(parallel.fit(x, y, **kwargs), theirs.fit(x, y, **kwargs))
  assert_same_variables(ours, theirs)
  predicted = [m.predict(x, verbose=0) for m in (parallel, theirs)]
  for name in y:
    np.testing.assert_allclose(predicted[0][name], predicted[1][name], atol=1e-5)
  # A last batch that is smaller: the total is Keras', and the losses of the outputs add up to it.
  found, expected = (
    m.evaluate(x, y, batch_size=10, return_dict=True, verbose=0) for m in (parallel, theirs)
  )
  np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
  np.testing.assert_allclose(
    found["kind_loss"] + 0.5 * found["size_loss"], found["loss"], rtol=1e-5
  )
