"""A Keras program that one process runs, or several together; run by test_processes.py.

Each process prints a line of JSON for each thing that it is told to do. Arguments: how it joins the
others ("arguments", "variables", "config", or "alone": not at all), devices of a process, a folder,
and what to do.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pathlib
import random
import signal
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors, workers
from mesh_tensorflow.keras import mirror, processes, spilling
from mesh_tensorflow.meshes import store

EPOCHS = 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(36, 8)).astype(np.float32)
Y = RNG.integers(0, 4, 36)


def main(how: str, devices: str, folder: str, *things: str) -> None:
  """Joins and does one thing after the other."""
  mtf.keras.enable()
  tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * int(devices),
  )
  random.seed(os.getpid())  # Forks of one process have its state.
  if how != "alone":
    join(how)
  for thing in things:
    keras.utils.clear_session()
    keras.distribution.set_distribution(None)
    result = globals()[thing](pathlib.Path(folder))
    if result is not None:
      print(json.dumps(result), flush=True)


def join(how: str) -> None:
  """Joins the others, whose addresses are in TF_CONFIG."""
  given: dict[str, Any] = {}
  if how != "config":
    config = json.loads(os.environ.pop("TF_CONFIG"))
    addresses = config["cluster"]["worker"]
    given = {
      "job_addresses": ",".join(addresses),
      "num_processes": len(addresses),
      "process_id": config["task"]["index"],
    }
  if how == "variables":
    for name, value in given.items():
      os.environ[f"KERAS_DISTRIBUTION_{name.upper()}"] = str(value)
    given = {}
  keras.distribution.initialize(**given)


def build() -> keras.Model:
  """A model with metrics, and slots of the optimizer."""
  layers = [
    keras.Input((8,)),
    keras.layers.Dense(16, "gelu", name="up"),
    keras.layers.Dropout(0.0),
    keras.layers.Dense(4, name="down"),
  ]
  model = keras.Sequential(layers, name="mlp")
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
  return model


def distribution(kind: str) -> Any:
  """Over all devices of all processes."""
  api = keras.distribution
  if kind == "data":
    return api.DataParallel()
  if kind == "searched":
    return mtf.keras.AutoParallel(mesh_shape="rows:2,cols:2")
  # The first axis goes across the processes.
  axes = ("batch", "model") if kind == "inside" else ("model", "batch")
  layouts = api.LayoutMap(api.DeviceMesh((2, 2), axes))
  layouts["mlp/up/kernel"] = (None, "model")
  layouts["mlp/up/bias"] = ("model",)
  layouts["mlp/down/kernel"] = ("model", None)
  return api.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def digests(model: keras.Model) -> list[str]:
  """Digests of the weights and slots, whole."""
  values = [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]
  return [hashlib.sha256(v.tobytes()).hexdigest() for v in values]


def trained(kind: str, folder: pathlib.Path) -> dict[str, Any]:
  """A training, an evaluation and a prediction, with a last batch that no mesh divides."""
  keras.distribution.set_distribution(distribution(kind))
  keras.utils.set_random_seed(1)
  model = build()
  kwargs: dict[str, Any] = {"batch_size": 8, "epochs": EPOCHS, "verbose": 0}
  history = model.fit(X, Y, **kwargs, validation_data=(X[:12], Y[:12])).history
  found = {
    **history,
    "evaluate": model.evaluate(X, Y, 16, verbose=0),
    "predict": model.predict(X, 16, verbose=0).tolist(),
    "on_batch": [model.train_on_batch(X[:8], Y[:8])[0], model.test_on_batch(X[:8], Y[:8])[0]],
  }
  model.save(folder / f"{kind}.keras")
  model.save_weights(folder / f"{kind}.weights.h5")
  return {**found, "digests": digests(model), "devices": keras.distribution.list_devices()}


def data(folder: pathlib.Path) -> Any:
  return trained("data", folder)


def inside(folder: pathlib.Path) -> Any:
  return trained("inside", folder)


def across(folder: pathlib.Path) -> Any:
  return trained("across", folder)


def searched(folder: pathlib.Path) -> Any:
  return trained("searched", folder)


def sharded(folder: pathlib.Path) -> dict[str, Any]:
  """Each process has its half of each batch, of which the last one is of one and two examples."""
  del folder
  chosen = distribution("data")
  count = 1
  if workers.current().size > 1:
    chosen.auto_shard_dataset = False
    count = chosen.num_processes
    assert chosen.data_shard_id == workers.current().index
  keras.distribution.set_distribution(chosen)
  keras.utils.set_random_seed(1)
  model = build()
  batches = [slice(0, 8), slice(8, 16), slice(16, 19)]
  parts = [np.array_split(np.arange(36)[b], count)[workers.current().index] for b in batches]

  def examples() -> Any:
    for part in parts:
      yield X[part], Y[part]

  spec = (tf.TensorSpec([None, 8], tf.float32), tf.TensorSpec([None], tf.int64))
  history = model.fit(
    tf.data.Dataset.from_generator(examples, output_signature=spec), epochs=2, verbose=0
  )
  return {"loss": history.history["loss"], "accuracy": history.history["accuracy"]}


def unseeded(folder: pathlib.Path) -> dict[str, Any]:
  """Nobody has set a seed: all have the same weights, and shuffle alike."""
  del folder
  keras.distribution.set_distribution(distribution("data"))
  model = build()
  loss = model.fit(X, Y, batch_size=12, verbose=0).history["loss"]
  return {"loss": loss, "digests": digests(model)}


def callbacks(folder: pathlib.Path) -> dict[str, Any]:
  """Files that callbacks of Keras write."""
  keras.distribution.set_distribution(distribution("across"))
  keras.utils.set_random_seed(1)
  model = build()
  c = keras.callbacks
  written: list[Any] = [
    c.CSVLogger(str(folder / "log.csv")),
    c.ModelCheckpoint(str(folder / "kept" / "{epoch}.keras")),
    c.BackupAndRestore(str(folder / "backup"), save_freq=2, delete_checkpoint=False),
    c.EarlyStopping("loss", restore_best_weights=True),
  ]
  if importlib.util.find_spec("tensorboard"):
    written.append(c.TensorBoard(str(folder / "board"), histogram_freq=1))
  model.fit(X, Y, batch_size=12, epochs=2, verbose=0, callbacks=written)
  model.export(folder / "exported", verbose=False)
  return {"paths": [w.filepath for w in written if hasattr(w, "filepath")]}


class Ends(keras.callbacks.Callback):  # type: ignore[misc]  # Keras says nothing of its types.
  """Kills one of several processes in the midst of the second epoch, unless it did so before."""

  def __init__(self, process: int, told: pathlib.Path):
    super().__init__()
    self.process, self.told, self.epoch = process, told, 0

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    self.epoch = epoch

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    is_it = workers.current().size > 1 and workers.current().index == self.process
    if is_it and (self.epoch, batch) == (1, 1) and not self.told.exists():
      self.told.touch()
      os.kill(os.getpid(), signal.SIGKILL)


def first_ends(folder: pathlib.Path) -> Any:
  return resumed(folder, 0)


def last_ends(folder: pathlib.Path) -> Any:
  return resumed(folder, 1)


def resumed(folder: pathlib.Path, process: int) -> dict[str, Any]:
  """A training in which a process ends; the next one in the same folder goes on to its end."""
  keras.distribution.set_distribution(distribution("across"))
  keras.utils.set_random_seed(1)
  model = build()
  losses = {}
  told = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: losses.update({epoch: logs["loss"]})
  )
  backup = keras.callbacks.BackupAndRestore(str(folder / "backup"))
  found = [told, backup, Ends(process, folder / "ended")]
  # Not shuffled: the order of an epoch would depend on the epochs before it in the process.
  model.fit(X, Y, batch_size=12, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=found)
  return {"losses": losses, "digests": digests(model)}


def trained_a_step(kind: str) -> keras.Model:
  keras.distribution.set_distribution(distribution(kind))
  keras.utils.set_random_seed(1)
  model = build()
  model.train_on_batch(X[:8], Y[:8])
  return model


def read_alone(folder: pathlib.Path) -> None:
  """One process reads a variable, and the others go on with the training."""
  del folder
  store._READ_SECONDS = 3.0
  model = trained_a_step("across")
  if workers.current().is_chief:
    model.layers[0].kernel.numpy()
  model.train_on_batch(X[:8], Y[:8])


def saved_alone(folder: pathlib.Path) -> None:
  """One process saves, and the others go on with the training."""
  processes._MEET_SECONDS = 3.0
  model = trained_a_step("data")
  if workers.current().is_chief:
    model.save(folder / "alone.keras")
  model.train_on_batch(X[:8], Y[:8])


def parallelized(folder: pathlib.Path) -> dict[str, Any]:
  """Without Keras' API for it."""
  del folder
  keras.utils.set_random_seed(1)
  parallel = mtf.keras.parallelize(build(), "rows:2,cols:2", "mlp/up.units:rows,batch:cols")
  history = parallel.fit(X, Y, batch_size=8, epochs=EPOCHS, verbose=0).history
  return {**history, "digests": digests(parallel)}


def loaded(folder: pathlib.Path) -> dict[str, Any]:
  """Weights that count as large are loaded before the first step."""
  keras.utils.set_random_seed(3)
  build().save_weights(folder / "start.weights.h5")
  before, mirror.LARGE = mirror.LARGE, 1
  keras.distribution.set_distribution(distribution("across"))
  model = build()
  model.load_weights(folder / "start.weights.h5")
  watched = [mirror._WATCHED.get(id(w.value)) for w in model.weights]
  fetches = [getattr(w.watchers[0], "fetch", None) for w in watched if w is not None]
  spilled = sum(isinstance(fetch, spilling.Spilled) for fetch in fetches)
  loss = model.fit(X, Y, batch_size=12, shuffle=False, verbose=0).history["loss"]
  mirror.LARGE = before
  return {"loss": loss, "spilled": spilled}


def other_batches(folder: pathlib.Path) -> dict[str, str]:
  """Each process gives other examples, and says nothing of shards."""
  del folder
  keras.distribution.set_distribution(distribution("data"))
  keras.utils.set_random_seed(1)
  model, said = build(), ""
  first = 8 * workers.current().index
  try:
    model.train_on_batch(X[first : first + 8], Y[:8])
  except errors.ConfigError as e:
    said = str(e)
  return {"said": said}


def unwritten(folder: pathlib.Path) -> dict[str, str]:
  """The first process cannot write."""
  model = build()
  try:
    model.save(folder / "log.csv" / "no_folder.keras")
  except Exception as e:  # noqa: BLE001 - which it is, is what is told.
    return {"said": f"{type(e).__name__}: {e}"}
  return {"said": ""}


if __name__ == "__main__":
  main(*sys.argv[1:])
