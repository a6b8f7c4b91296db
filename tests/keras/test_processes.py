"""Keras programs of several processes: equal to one process, files, losses of a process, errors."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import tempfile
from typing import Any

import keras
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors, workers
from mesh_tensorflow.keras import processes
from tests import worker_group
from tests.keras import processes_program as program

PROGRAM = ("-m", "tests.keras.processes_program")


@functools.cache
def folder_of_all() -> tempfile.TemporaryDirectory[str]:
  return tempfile.TemporaryDirectory()


@functools.cache
def found(things: tuple[str, ...], how: str = "arguments", count: int = 2) -> Any:
  """For each of so many processes what it told of each thing, by thing."""
  folder = folder_of_all().name
  codes, texts = worker_group.run(count, [*PROGRAM, how, str(4 // count), folder, *things], 300)
  assert codes == [0] * count, "".join(texts)
  lines = [[line for line in text.splitlines() if line.startswith("{")] for text in texts]
  return [dict(zip(things, map(json.loads, of_one), strict=True)) for of_one in lines]


KINDS = ("data", "inside", "across")
SEARCHED = ("searched",)


@functools.cache
def alone() -> Any:
  """What Keras has on one device, in this process."""
  keras.utils.set_random_seed(1)
  model = program.build()
  kwargs: dict[str, Any] = {"batch_size": 8, "epochs": program.EPOCHS, "verbose": 0}
  x, y = program.X, program.Y
  history = model.fit(x, y, **kwargs, validation_data=(x[:12], y[:12])).history
  return {
    **history,
    "evaluate": model.evaluate(x, y, 16, verbose=0),
    "predict": model.predict(x, 16, verbose=0).tolist(),
    "on_batch": [model.train_on_batch(x[:8], y[:8])[0], model.test_on_batch(x[:8], y[:8])[0]],
  }


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("kind", [*KINDS, pytest.param("searched", marks=pytest.mark.long)])
def test_several_processes_are_equal_to_one(kind: str) -> None:
  """Fifteen steps, of which three are of batches that no mesh divides."""
  first, second = (of_one[kind] for of_one in found(KINDS if kind in KINDS else SEARCHED))
  assert first == second  # Bit for bit, weights and slots included.
  assert first["devices"] == [f"cpu:{i}" for i in range(4)]
  for name, want in alone().items():
    np.testing.assert_allclose(first[name], want, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("kind", ["inside", "across"])
def test_what_is_saved_loads_into_plain_keras(kind: str) -> None:
  digests = found(KINDS)[0][kind]["digests"]
  assert not mtf.keras.is_enabled()
  folder = pathlib.Path(folder_of_all().name)
  loaded = keras.models.load_model(folder / f"{kind}.keras")
  again = program.build()
  again.load_weights(folder / f"{kind}.weights.h5")
  for model in (loaded, again):
    assert [hashlib.sha256(w.tobytes()).hexdigest() for w in model.get_weights()] == digests[:4]
  assert program.digests(loaded)[:-1] == digests[:-1]


@pytest.mark.slow
@pytest.mark.subprocess
def test_data_that_are_sharded_and_seeds() -> None:
  things = ("sharded", "unseeded", "parallelized", "loaded")
  first, second = found(things, "variables")
  assert first == second
  for name in ("loss", "accuracy"):
    np.testing.assert_allclose(first["parallelized"][name], alone()[name], rtol=1e-5)
  (one,) = found(("sharded", "loaded"), "alone", 1)
  for name, want in one["sharded"].items():
    np.testing.assert_allclose(first["sharded"][name], want, rtol=1e-5)
  # From a temporary file of each process.
  assert (one["loaded"]["spilled"], first["loaded"]["spilled"]) == (0, 4)
  np.testing.assert_allclose(first["loaded"]["loss"], one["loaded"]["loss"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.subprocess
def test_one_process_writes() -> None:
  first, second = found(("callbacks", "unwritten", "other_batches"), "config")
  folder = pathlib.Path(folder_of_all().name)
  lines = (folder / "log.csv").read_text().splitlines()
  assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1"]
  assert sorted(p.name for p in (folder / "kept").iterdir()) == ["1.keras", "2.keras"]
  assert json.loads((folder / "backup" / "training_metadata.json").read_text())["batch"] == 2
  if (folder / "board").exists():
    events = list((folder / "board" / "train").glob("events*"))
    assert len({p.name.split(".")[4] for p in events}) == 1  # The numbers of their processes.
  assert (folder / "exported" / "saved_model.pb").exists()
  assert (
    first["callbacks"]["paths"]
    == second["callbacks"]["paths"]
    == [str(folder / "kept" / "{epoch}.keras")]
  )
  assert first["unwritten"]["said"].startswith("NotADirectoryError")
  assert second["unwritten"]["said"].startswith("StorageError: process 0 could not write")
  # A program that goes on tells of batches that are not the same.
  for of_one in (first, second):
    assert "first batch of train" in of_one["other_batches"]["said"]


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize(
  ("thing", "codes"),
  [("last_ends", [75, -9]), ("first_ends", [-9, 75])],
)
@pytest.mark.long  # Lost workers: tests/transformer/training; waiting in vain: the next test.
def test_a_process_that_is_killed(thing: str, codes: list[int], tmp_path: pathlib.Path) -> None:
  """The other one says so and ends; the same command again goes on, with the same losses."""
  (tmp_path / "killed").mkdir()
  arguments = [*PROGRAM, "config", "2", str(tmp_path / "killed"), thing]
  found_codes, texts = worker_group.run(2, arguments, 300)
  assert found_codes == codes, "".join(texts)
  lost = codes.index(-9)
  assert f"WorkerLostError: lost worker {lost} (127.0.0.1:" in texts[1 - lost]
  ends = []
  for folder in ("killed", "whole"):
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "ended").touch()
    arguments = [*PROGRAM, "config", "2", str(tmp_path / folder), thing]
    found_codes, texts = worker_group.run(2, arguments, 300)
    assert found_codes == [0, 0], "".join(texts)
    ends.append([json.loads(t[t.index("{") :]) for t in texts])
  again, whole = ends
  assert sorted(again[0]["losses"]) == ["1", "2"] and sorted(whole[0]["losses"]) == ["0", "1", "2"]
  for of_one in (*again, *whole):
    assert of_one["digests"] == whole[0]["digests"]
    assert of_one["losses"].items() <= whole[0]["losses"].items()


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize(
  ("thing", "words"),
  [
    ("read_alone", "for the others to read it; read it in all of them"),
    pytest.param(
      "saved_alone", "for the others to save it; call it in all", marks=pytest.mark.long
    ),
  ],
)
def test_what_one_process_does_alone(thing: str, words: str, tmp_path: pathlib.Path) -> None:
  codes, texts = worker_group.run(2, [*PROGRAM, "config", "2", str(tmp_path), thing], 300)
  assert codes == [2, 75], "".join(texts)
  assert "VariableError: " in texts[0] and f"waited 3 s in vain {words}" in texts[0]


def test_where_processes_are_said() -> None:
  """Arguments count before the environment, and TF_CONFIG where nothing else is said."""
  two = workers.Cluster((("worker", 0, "a:1"), ("worker", 1, "b:2")), 1)
  names = ("JOB_ADDRESSES", "NUM_PROCESSES", "PROCESS_ID")
  environ = {
    f"KERAS_DISTRIBUTION_{n}": v for n, v in zip(names, ("a:1, b:2", "2", "1"), strict=True)
  }
  assert processes.cluster_of(environ=environ) == two
  assert processes.cluster_of("a:1,b:2", 2, 1, {}) == two
  assert processes.cluster_of(process_id=0, environ=environ).index == 0
  task = {"type": "worker", "index": 1}
  config = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": task})}
  assert processes.cluster_of(environ=config) == two
  assert processes.cluster_of("c:1", 1, 0, config).size == 1


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ((None, None, None), "nothing says which processes there are: give .*TF_CONFIG"),
    ((None, 2, 0), "job_addresses missing: give"),
    (("a:1,b:2", 2, None), "process_id missing: give"),
    ((None, 2, None), "job_addresses and process_id missing"),
    (("a:1", 2, 0), r"num_processes is 2, and job_addresses has 1 \(a:1\); .* of every process"),
    (("a:1,b:2", 3, 0), "num_processes is 3, and job_addresses has 2"),
    (("a:1,b:2", 2, 2), "process_id is 2, and 2 processes have the numbers 0 to 1"),
    (("a:1,b:2", 2, -1), "process_id is -1"),
    (("a:1,b:2", "two", 0), "num_processes must be a whole number, got 'two'"),
    (("a:1,b:2", 2, True), "process_id must be a whole number, got True"),
    ((["a:1", "b:2"], 2, 0), "job_addresses is a text with commas"),
    (("a:1,b", 2, 0), "different addresses host:port"),
    (("a:1,a:1", 2, 0), "different addresses host:port"),
    (("a:1,,b:1", 3, 0), "different addresses host:port"),
  ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], words: str) -> None:
  with pytest.raises(errors.ConfigError, match=f"keras.distribution.initialize: .*{words}|{words}"):
    processes.cluster_of(*arguments, environ={})
