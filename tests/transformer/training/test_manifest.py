"""The record of a run beside its checkpoints; and a run that goes on with other data or seeds."""

from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint
from mesh_tensorflow.training import input_shards, manifest
from mesh_tensorflow.transformer.data.files import records, text_files
from mesh_tensorflow.transformer.gin_config.model_config import ModelConfig
from mesh_tensorflow.transformer.training.trainer import ConfigRecord
from tests.transformer import small_lm

CONFIG = ConfigRecord(
  ModelConfig({"model": {"a": 1}, "other": {}, "vocabulary": [{"digest": "d"}]}, {})
)
SEEDS = {"weights": 0, "data": 1, "dropout": 2}


def of_files(*paths, seeds=SEEDS, config=CONFIG) -> manifest.Manifest:
  impl = mtf.PlacementMeshImpl("", "", [""])
  return manifest.capture(impl, config, map(str, paths), seeds)


def test_a_run_writes_it_and_a_resumed_one_compares(tmp_path, capsys):
  bindings = ("run.seed = 3", "run.seeds = {'data': 5}")
  small_lm.run(tmp_path, *bindings, text=small_lm.TEXT)
  written = json.loads((tmp_path / "model" / "manifest.json").read_text())
  assert written["versions"]["tensorflow"] == tf.__version__
  assert written["versions"]["mesh_tensorflow"] == mtf.__version__
  assert written["seeds"] == {"weights": 3, "data": 5, "dropout": 3}
  assert written["mesh"]["shape"] == "" and written["mesh"]["workers"] == 1
  assert [v["class"] for v in written["vocabulary"]]
  file = tmp_path / "text.txt"
  assert written["data"] == [
    {
      "path": str(file),
      "bytes": len(small_lm.TEXT),
      "sha256": hashlib.sha256(small_lm.TEXT.encode()).hexdigest(),
    }
  ]
  # The checkpoint has the same, as one of its own files.
  newest = checkpoint.latest_checkpoint(str(tmp_path / "model"))
  with open(f"{newest}.with-run-00000.json") as f:
    assert json.load(f) == written
  assert not checkpoint.verify(newest)

  capsys.readouterr()
  small_lm.run(tmp_path, *bindings, "run.train_steps = 3")
  assert "this run is not as" not in capsys.readouterr().out
  changed = small_lm.TEXT.replace("question", "solution")
  small_lm.run(tmp_path, "run.seed = 4", "run.train_steps = 4", text=changed)
  (line,) = [x for x in capsys.readouterr().out.splitlines() if "this run is not as" in x]
  assert line == (
    f"this run is not as that of model.ckpt-3 was: of its training data {file} has changed; "
    "the seed of data was 5, and is 4; the seed of dropout was 3, and is 4"
  )
  again = json.loads((tmp_path / "model" / "manifest.json").read_text())
  assert again["data"] != written["data"]


def test_the_hash_of_the_configuration_does_not_depend_on_the_folder():
  def hash_of(**other):
    record = {"model": {"a": 1}, "other": other, "vocabulary": []}
    config = ConfigRecord(ModelConfig(record, {}))
    return of_files(config=config).record["configuration"]["sha256"]

  one = hash_of(**{"mesh_tensorflow.transformer.utils.run.model_dir": "a", "x": 1})
  assert one == hash_of(**{"mesh_tensorflow.transformer.utils.run.model_dir": "b", "x": 1})
  assert one != hash_of(x=2)
  # Nor on the order in which files and flags set them.
  assert hash_of(x=1, y=2) == hash_of(y=2, x=1)


@pytest.mark.parametrize("at", [0, 3 * 2**20 // 15, 3 * 2**20 - 1])
def test_a_large_file_is_known_by_parts(tmp_path, at):
  file = tmp_path / "large"
  content = np.random.default_rng(0).integers(0, 256, 3 * 2**20, np.uint8)
  file.write_bytes(content.tobytes())
  before = of_files(file).record["data"][0]
  assert before["bytes"] == len(content) and "sha256" not in before
  assert of_files(file).record["data"] == [before]
  content[at] ^= 1
  file.write_bytes(content.tobytes())
  after = of_files(file).record["data"][0]
  assert after["sha256_of_parts"] != before["sha256_of_parts"]


def test_of_many_files_some_are_hashed_and_all_count(tmp_path):
  files = [tmp_path / f"{i:04}" for i in range(600)]
  for file in files:
    file.write_text(file.name)
  found = of_files(*files).record["data"]
  assert [f["path"] for f in found] == [str(f) for f in files]
  assert all(f["bytes"] == 4 for f in found)
  assert sum("sha256" in f for f in found) == 200


def compared(tmp_path, then: manifest.Manifest, now: manifest.Manifest) -> list[str]:
  path = str(tmp_path / "model.ckpt-7")
  then.write(checkpoint.attachment(path, manifest.ATTACHMENT))
  return manifest.differences(path, now)


def test_what_differs_is_told_in_one_line(tmp_path):
  for name in "abcdefg":
    (tmp_path / name).write_text(name)
  a, b, c, *others = (tmp_path / n for n in "abcdefg")
  then = of_files(a, b)
  assert compared(tmp_path, then, of_files(b, a)) == []
  # A file elsewhere with the same content is the same one; other initial weights are no matter.
  (tmp_path / "moved").mkdir()
  (tmp_path / "moved" / "a").write_text("a")
  moved = of_files(tmp_path / "moved" / "a", b, seeds={**SEEDS, "weights": 9})
  assert compared(tmp_path, then, moved) == []
  b.write_text("other")
  (line,) = compared(tmp_path, then, of_files(b, c))
  assert line.startswith("this run is not as that of model.ckpt-7 was: of its training data ")
  assert f"{b} has changed, {c} is new, {a} is gone" in line
  (line,) = compared(tmp_path, then, of_files(a, b, c, *others))
  assert line.endswith("and 3 more")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 99}'])
def test_a_record_that_cannot_be_read_is_not_compared(tmp_path, content):
  path = str(tmp_path / "model.ckpt-7")
  if content is not None:
    with open(f"{checkpoint.attachment(path, manifest.ATTACHMENT)}.json", "w") as f:
      f.write(content)
  assert manifest.differences(path, of_files()) == []


def test_files_that_are_gone_have_a_path_only(tmp_path):
  assert of_files(tmp_path / "gone").record["data"] == [{"path": str(tmp_path / "gone")}]


def test_readers_say_what_they_read(tmp_path):
  (tmp_path / "a.txt").write_text("a")
  (tmp_path / "b.txt").write_text("b")
  with input_shards.noted() as outer:
    text_files.read_text_files(str(tmp_path / "a*"))
    with input_shards.noted() as found:
      text_files.text_line_dataset(str(tmp_path / "*.txt"))
      records.tfrecord_dataset(["x", "y"])
  assert list(found) == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "x", "y"]
  assert list(outer) == [str(tmp_path / "a.txt")]
  text_files.read_text_files(str(tmp_path / "b*"))
  assert len(outer) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_the_commit_of_the_folder(tmp_path, monkeypatch, packed):
  inner = tmp_path / "inner"
  inner.mkdir()
  monkeypatch.chdir(inner)
  git = tmp_path / ".git"
  git.mkdir()
  (git / "HEAD").write_text("ref: refs/heads/mine\n")
  if packed:
    (git / "packed-refs").write_text("# pack-refs\nabc1 refs/heads/other\nabc2 refs/heads/mine\n")
  else:
    os.makedirs(git / "refs" / "heads")
    (git / "refs" / "heads" / "mine").write_text("abc2\n")
  assert of_files().record["commit"] == "abc2"
  (git / "HEAD").write_text("abc3\n")
  assert of_files().record["commit"] == "abc3"
  (git / "HEAD").write_text("ref: refs/heads/none\n")
  if not packed:
    assert of_files().record["commit"] is None
