"""The mode "dry_run": plans, shows a batch as text, and leaves everything as it was."""

from __future__ import annotations

import os

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import gin_config, utils
from mesh_tensorflow.transformer.data import text_readers  # noqa: F401 - registers its names.
from mesh_tensorflow.transformer.modes import dry_run
from mesh_tensorflow.transformer.vocabulary import ByteVocabulary

SMALL = ["layers=1", "d_model=8", "d_ff=8", "heads=1", "d_kv=8", "dropout=0"]
PAIRS = ["one two\tun deux", "three\ttrois", "dog\tchien", "red cat\tchat rouge"]


@pytest.fixture(autouse=True)
def nothing_bound():
  gin.clear_config()
  yield
  gin.clear_config()


def run(model_dir, *assignments, bindings=()):
  """`utils.run` of a small language model, in the mode."""
  files = ["problems/tinyshakespeare.gin"]
  bindings = [*bindings, "run.mode = 'dry_run'"]
  gin_config.parse_gin(files, bindings, assignments=[*SMALL, *assignments])
  gin_config.check_run()
  return utils.run(None, None, None, None, model_dir and str(model_dir))


@pytest.fixture
def text(tmp_path):
  path = tmp_path / "text.txt"
  path.write_text("To be, or not to be, that is the question.\n" * 40)
  return str(path)


def test_a_language_model(tmp_path, text, capsys):
  report = run(None, f"data={text}", "length=16", "batch=4")
  out = capsys.readouterr().out
  assert isinstance(report, mtf.Report) and report.flops_per_device > 0
  assert "FLOP on each device" in out
  assert "parameters\n" in out and "Memory of one device" in out
  assert "targets [4, 16], 100.0% of it tokens" in out
  assert "example 1 of 4:" in out and "example 2 of 4:" in out and "example 3" not in out
  # What is shown is of the text.
  shown = [line.split(": ", 1)[1] for line in out.splitlines() if "targets (16 tokens)" in line]
  assert len(shown) == 2
  whole = "To be, or not to be, that is the question.\n" * 2
  assert all(eval(s) in whole for s in shown)
  assert out.endswith("dry run: nothing was trained, and nothing was written\n")
  assert os.listdir(tmp_path) == ["text.txt"]


def test_nothing_is_written_into_the_folder_of_the_model(tmp_path, text):
  run(tmp_path / "model", f"data={text}", "length=16", "batch=4")
  assert os.listdir(tmp_path) == ["text.txt"]


def test_the_mesh_need_not_be_there(text, capsys):
  run(None, f"data={text}", "length=16", "batch=64", "mesh=batch:64", "layout=batch:batch")
  assert "64 devices" in capsys.readouterr().out


def test_sequences_of_a_packed_row(tmp_path, capsys):
  (tmp_path / "pairs.tsv").write_text("\n".join(PAIRS * 4))
  bindings = [
    "run.model_type = 'bitransformer'",
    "run.vocabulary = @vocabulary.get_byte_vocabulary()",
    "run.train_dataset_fn = @dataset.parallel_text_dataset",
    f"dataset.parallel_text_dataset.files = {{'train': '{tmp_path}/pairs.tsv'}}",
    "run.sequence_length = {'inputs': 32, 'targets': 48}",
    "Unitransformer.max_length = 48",
  ]
  run(None, "batch=2", bindings=bindings)
  lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
  shown = [line for line in lines if "tokens): " in line]
  inputs = [eval(x.split("tokens): ")[1]) for x in shown if "inputs (" in x]
  targets = [eval(x.split("tokens): ")[1]) for x in shown if x.startswith("targets (")]
  assert len(inputs) == len(targets) >= 4
  assert any(line.startswith("sequence 2 of ") for line in lines)
  # The texts of a sequence belong together.
  assert {f"{a}\t{b}" for a, b in zip(inputs, targets)} <= set(PAIRS)


def test_what_is_not_scored_and_what_is_too_much():
  vocabulary = ByteVocabulary()
  ids = np.array(vocabulary.encode("abcdefgh"), np.int32)
  row = np.concatenate([-ids[:3], ids[3:], np.zeros(2, np.int32)])
  lines = dry_run.describe_batch({"targets": row[None]}, vocabulary)
  assert "  targets [1, 10], 80.0% of it tokens, the rest padding" in lines
  assert lines[-1] == "  targets (8 tokens, the first 3 not scored): 'abcdefgh'"
  many = np.array(vocabulary.encode("x" * 500), np.int32)[None]
  assert dry_run.describe_batch({"targets": many}, vocabulary)[-1].endswith("xxx...'")
  packed = {"targets": np.tile(ids, 10)[None], "targets_segmentation": np.arange(80)[None] // 8 + 1}
  lines = dry_run.describe_batch(packed, vocabulary)
  assert lines[-1] == "  ... 6 more sequences in the row"
  assert sum("'abcdefgh'" in line for line in lines) == 4


@pytest.mark.parametrize(
  ("assignments", "bindings", "error", "says"),
  [
    (["data=nowhere.txt"], (), errors.DataError, "nowhere.txt"),
    ((), ["run.train_dataset_fn = None"], errors.ConfigError, "run.train_dataset_fn is not bound"),
    ((), ["run.optimizer = None"], errors.ConfigError, "run.optimizer is not bound"),
    ((), ["run.vocabulary = None"], errors.ConfigError, "run.vocabulary is not bound"),
    (["run.dataset_split=validation"], (), errors.ConfigError, "'validation'"),
    (["mesh=model:3", "layout=heads:model"], (), errors.LayoutError, "heads"),
  ],
)
def test_what_is_wrong_is_told_as_by_training(text, assignments, bindings, error, says):
  with pytest.raises(error, match=says):
    run(None, f"data={text}", *assignments, bindings=bindings)
