"""Every callback of Keras in one `fit`: what each reads, assigns and writes, beside one device."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import io
import json
import pathlib
import re
import threading
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import h5py
import keras
import numpy as np
import pytest

import mesh_tensorflow as mtf
from tests.keras.models import X, Y, assert_same_history, small

# TensorFlow comes without them, and Keras' callbacks need them.
MISSING = {
  name
  for name, package in {"TensorBoard": "tensorboard", "OrbaxCheckpoint": "orbax"}.items()
  if importlib.util.find_spec(package) is None
}
BASES = {"Callback", "CallbackList"}
Seen = list[tuple[str, Any]]


class Looks(keras.callbacks.Callback):
  """A callback of one's own: it reads and assigns everything, and uses the model.

  Args:
    seen: gets what it has read.
    folder: for a file.
  """

  def __init__(self, seen: Seen, folder: pathlib.Path):
    super().__init__()
    self.seen, self.folder = seen, folder

  def _state(self, when: str) -> None:
    model = self.model
    for what, variables in (
      ("weight", model.weights),
      ("slot", model.optimizer.variables),
      ("metric", model.metrics_variables),
    ):
      self.seen += [(f"{when}: {what} {i} {v.path}", v.numpy()) for i, v in enumerate(variables)]

  def on_train_begin(self, logs: Any = None) -> None:
    self.model.layers[0].kernel.assign(0.9 * self.model.layers[0].kernel)

  def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
    self.model.optimizer.learning_rate = 0.05 / (batch + 1)

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    self._state(f"batch {batch}")
    self.seen.append((f"batch {batch}: loss", logs["loss"]))
    slot = self.model.optimizer.variables[2]
    slot.assign(0.5 * slot)
    loss = self.model.metrics[0].variables[0]
    loss.assign(loss + 1.0)

  def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
    self._state(f"test batch {batch}")

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    self._state(f"epoch {epoch}")
    self.seen += [(f"epoch {epoch}: {name}", value) for name, value in logs.items()]
    if epoch == 1:
      path = self.folder / "own.weights.h5"
      self.model.save_weights(path)
      self.model.layers[1].bias.assign(self.model.layers[1].bias + 1.0)
      self.seen.append(("evaluate", self.model.evaluate(X[:8], Y[:8], verbose=0)))
      self.seen.append(("predict", self.model.predict(X[:8], verbose=0)))
      self.seen.append(("call", self.model(X[:8]).numpy()))
      self.model.load_weights(path)
      self.seen += _contents(self.folder / "backup").items()


@contextlib.contextmanager
def _server(posts: list[Any]) -> Iterator[str]:
  """A server on a free port of this machine, which keeps what is posted; gives its address."""

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
      body = self.rfile.read(int(self.headers["Content-Length"]))
      posts.append((self.path, json.loads(body)))
      self.send_response(200)
      self.end_headers()

    def log_message(self, *args: Any) -> None:
      """Says nothing."""

  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try:
    yield f"http://127.0.0.1:{server.server_port}"
  finally:
    server.shutdown()
    server.server_close()
    thread.join()


def _contents(path: pathlib.Path) -> dict[str, Any]:
  """What the files of a folder hold: arrays by name; of other files the text and its numbers."""
  found: dict[str, Any] = {}

  def arrays(name: str, file: Any) -> None:
    def enter(key: str, item: Any) -> None:
      if isinstance(item, h5py.Dataset):
        found[f"{name}/{key}"] = item[()]

    with h5py.File(file) as opened:
      opened.visititems(enter)

  for file in sorted(p for p in path.rglob("*") if p.is_file()):
    name = str(file.relative_to(path))
    if file.suffix == ".h5":
      arrays(name, file)
    elif file.suffix == ".keras":
      with zipfile.ZipFile(file) as archive:
        arrays(name, io.BytesIO(archive.read("model.weights.h5")))
        config = archive.read("config.json").decode()
        found.update(_text(f"{name} config", re.sub(r'(_id": )\d+', r"\1#", config)))
    elif "tfevents" in name:
      found[name.rpartition("/")[0]] = "events"
    else:
      found.update(_text(name, file.read_text()))
  return found


def _text(name: str, text: str) -> dict[str, Any]:
  """A text without its numbers and times, and the numbers."""
  number = r"-?\d+\.\d+(?:e[-+]?\d+)?"
  words = re.sub(r"\d+m?s\b", "time", re.sub(number, "#", text))
  return {f"{name}: text": words, f"{name}: numbers": [float(n) for n in re.findall(number, text)]}


def _callbacks(folder: pathlib.Path, address: str, seen: Seen) -> dict[str, list[Any]]:
  """By the name of its class, each callback that one may give to `fit`."""
  c = keras.callbacks
  best, last = str(folder / "best.keras"), str(folder / "{epoch}-{batch}.weights.h5")
  made: dict[str, Callable[[], list[Any]]] = {
    "SwapEMAWeights": lambda: [c.SwapEMAWeights(swap_on_epoch=True)],
    "TensorBoard": lambda: [c.TensorBoard(str(folder / "board"), histogram_freq=1, update_freq=1)],
    "OrbaxCheckpoint": lambda: [c.OrbaxCheckpoint(str(folder / "orbax"))],
    "BackupAndRestore": lambda: [c.BackupAndRestore(str(folder / "backup"))],
    "ModelCheckpoint": lambda: [
      c.ModelCheckpoint(best, "val_loss", save_best_only=True),
      c.ModelCheckpoint(last, save_weights_only=True, save_freq=3),
    ],
    "LearningRateScheduler": lambda: [
      c.LearningRateScheduler(lambda epoch, rate: seen.append(("rate", rate)) or 0.9 * rate)
    ],
    "ReduceLROnPlateau": lambda: [c.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=10.0)],
    "CSVLogger": lambda: [c.CSVLogger(str(folder / "log.csv"))],
    "TerminateOnNaN": lambda: [c.TerminateOnNaN()],
    "RemoteMonitor": lambda: [c.RemoteMonitor(address, send_as_json=True)],
    "LambdaCallback": lambda: [
      c.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(("logs", logs["loss"])))
    ],
    "Looks": lambda: [Looks(seen, folder)],
    "EarlyStopping": lambda: [
      c.EarlyStopping("accuracy", patience=1, baseline=2.0, restore_best_weights=True)
    ],
    # Those that `fit` adds itself.
    "History": lambda: [],
    "ProgbarLogger": lambda: [],
  }
  return {name: make() for name, make in made.items() if name not in MISSING}


def _fitted(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> tuple[Any, Seen]:
  """Trains the model; returns the history, and all that was read, written, posted and printed."""
  seen: Seen = []
  posts: list[Any] = []
  folder.mkdir()
  model = small()
  averaging = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(averaging, loss, metrics=["accuracy"], jit_compile=False)
  capsys.readouterr()
  with _server(posts) as address:
    callbacks = _callbacks(folder, address, seen)
    known = {name for name, kind in vars(keras.callbacks).items() if isinstance(kind, type)}
    assert known - BASES - MISSING == set(callbacks) - {"Looks"}
    history = model.fit(
      *(X[:16], Y[:16]),
      batch_size=8,
      epochs=4,
      shuffle=False,
      verbose=2,
      validation_data=(X[16:], Y[16:]),
      callbacks=[one for some in callbacks.values() for one in some],
    )
  seen += _text("printed", capsys.readouterr().out).items()
  seen += [(f"end: weight {v.path}", v.numpy()) for v in model.weights]
  seen += [(f"end: slot {v.path}", v.numpy()) for v in model.optimizer.variables]
  seen += [(f"posted to {path}: {n}", body[n]) for path, body in posts for n in sorted(body)]
  seen += _contents(folder).items()
  return history, seen


def test_every_callback(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], cpu_devices: list[str]
) -> None:
  keras.utils.clear_session()  # Which numbers the names of optimizers.
  expected_history, expected = _fitted(tmp_path / "theirs", capsys)
  mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), cpu_devices[:4])
  layouts = keras.distribution.LayoutMap(mesh)
  layouts[".*up/kernel"] = (None, "model")
  layouts[".*down/kernel"] = ("model", None)
  keras.utils.clear_session()
  mtf.keras.enable()
  try:
    with keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch").scope():
      history, seen = _fitted(tmp_path / "ours", capsys)
  finally:
    mtf.keras.disable()
  assert_same_history(history, expected_history, 1e-5)
  assert 1 < len(history.epoch) < 4  # It was stopped.
  assert [name for name, _ in seen] == [name for name, _ in expected]
  for (name, ours), (_, theirs) in zip(seen, expected):
    if isinstance(theirs, (str, bytes)):
      assert ours == theirs, name
    else:
      np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6, err_msg=name)
