"""Modes that evaluate, score and decode on two workers; and a vocabulary that they make first."""

from __future__ import annotations

import os
import pathlib
import re

import pytest

from mesh_tensorflow import exit_codes
from mesh_tensorflow.training import run_lock
from tests import worker_group
from tests.transformer import modes_program as program
from tests.transformer import worker_processes
from tests.transformer.modes import test_modes

# Of workers that fail for the same reason the last may find that the others are gone.
FAILED = {exit_codes.CONFIGURATION, exit_codes.LOCK, exit_codes.WORKER_LOST}


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
  pytest.importorskip("sentencepiece")
  (tmp_path / "pairs.tsv").write_text("".join(p + "\n" for p in test_modes.PAIRS))
  (tmp_path / "inputs.txt").write_text("".join(p + "\n" for p in test_modes.INPUTS))
  (tmp_path / "targets.txt").write_text("".join(p + "\n" for p in test_modes.TARGETS))
  return tmp_path


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
  files = [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("events")]
  return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.mark.long
@pytest.mark.subprocess
def test_two_workers_write_what_one_process_does(folder, cpu_devices):
  """They make the vocabulary, train, and run each mode: files and results are the same bits."""
  command = ["-m", "tests.transformer.modes_program", str(folder), "two"]
  codes, texts = worker_group.run(2, command)
  out = "".join(texts)
  assert codes == [0, 0], out
  assert out.count("training a subword vocabulary of 40 pieces") == 1
  assert [p.name for p in (folder / "vocabulary").iterdir()] == ["model"]
  for file in (folder / "model").glob(f"model.ckpt-{program.STEPS + 2}.*"):
    file.unlink()
  expected = program.run_modes(folder, "one")
  for worker in range(2):
    assert re.findall(rf"worker {worker}: (.*)", out) == expected
  written = files_of(folder / "one")
  assert {f"decoded-{program.STEPS}", "score_from_strings.scores", "shard_0.tfrecord"} <= set(
    written
  )
  assert f"eval/validation_{program.STEPS}_predictions" in written
  assert files_of(folder / "two") == written
  # Of the event files there is one for each mode that writes scalars.
  for mode in ("perplexity_eval", "eval", "score_eval"):
    assert len(list((folder / "two" / mode).glob("events*"))) == 1
  # The one that came while they waited was evaluated after the one that was there.
  seen = [int(n) for n in re.findall(r"^step (\d+)  validation: loss", texts[0], re.MULTILINE)]
  assert seen == [program.STEPS, program.STEPS, program.STEPS + 2]


@pytest.mark.subprocess
def test_a_vocabulary_that_cannot_be_made_is_every_workers_error(folder):
  """Nobody waits for the chief in vain."""
  config = folder / "config.gin"
  wrong = "vocabulary.get_subword_vocabulary.vocab_size = 5000"
  config.write_text("\n".join(program.bindings(folder, wrong)))
  arguments = [f"--model_dir={folder}/model", f"--gin_file={config}"]
  with worker_processes.processes(folder, 2, arguments) as group:
    assert set(group.wait()) <= FAILED, group.text(0) + group.text(1)
    text = (
      "train_subword_vocabulary: SentencePiece cannot make a 'bpe' vocabulary of vocab_size 5000"
    )
    assert f"worker 0/2: ConfigError: {text}" in group.text(0)
    told = r"worker 1/2: ConfigError: worker 0 \(127.0.0.1:\d+\): "
    assert re.search(told + re.escape(text), group.text(1)), group.text(1)
  assert not list(folder.glob("vocabulary*/*"))


@pytest.mark.subprocess
def test_another_training_in_the_folder_is_every_workers_error(folder):
  config = folder / "config.gin"
  config.write_text("\n".join(program.bindings(folder)))
  arguments = [f"--model_dir={folder}/model", f"--gin_file={config}"]
  (folder / "model").mkdir()
  with run_lock.training_lock(str(folder / "model")):
    with worker_processes.processes(folder, 2, arguments) as group:
      assert set(group.wait()) <= FAILED, group.text(0) + group.text(1)
  for i in range(2):
    assert f"another training uses {folder}/model (process {os.getpid()} on" in group.text(i)
  assert not list((folder / "model").glob("model.ckpt*"))
