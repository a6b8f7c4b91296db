"""The same answers from every program that trains: signals, kills, locks, disks, flags.

| what happens | exit code | what is told |
|---|---|---|
| --help | 0 | the flags |
| a wrong flag | 2 | which |
| a second trainer in the folder | 6 | who is there |
| SIGKILL | 137 | the next run goes on from the newest checkpoint |
| SIGTERM | 74 | which step is saved, and that the same command goes on |
| a full disk | 4 | the checkpoint that cannot be written |
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from mesh_tensorflow import checkpoint, exit_codes
from tests.conftest import ROOT
from tests.transformer import worker_processes

SECONDS = 300
WORDS = "the a red blue dog cat sees hears runs near house tree quickly slowly it".split()
ENDLESS = "1000000"


def _bert_files(folder: pathlib.Path) -> list[str]:
  """Writes a configuration and a vocabulary; returns the flags that all BERT programs share."""
  from tests.bert import models

  config = models.config(vocab_size=40, num_blocks=1, max_position_embeddings=32)
  (folder / "config.json").write_text(config.to_json_string())
  special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
  (folder / "vocab.txt").write_text("\n".join([*special, *WORDS]))
  return [
    f"--bert_config_file={folder / 'config.json'}", f"--output_dir={folder / 'model'}",
    "--mesh_shape=all:1", "--layout=", "--train_batch_size=4", "--save_checkpoints_steps=2",
    "--iterations_per_loop=2", "--report_every=2", "--max_seq_length=16",
  ]  # fmt: skip


def _pretraining(folder: pathlib.Path) -> list[str]:
  from tensorflow import io

  from mesh_tensorflow.bert import records

  shared = _bert_files(folder)
  tokens = {name: [1] * 16 for name in ("input_ids", "input_mask", "segment_ids")}
  masked = {f"masked_lm_{n}": [1] * 3 for n in ("positions", "ids")}
  example = records.example(
    {**tokens, **masked, "masked_lm_weights": [1.0] * 3, "next_sentence_labels": [0]}
  )
  with io.TFRecordWriter(str(folder / "train.tfrecord")) as f:
    for _ in range(8):
      f.write(example)
  return [
    *shared, f"--input_train_files={folder / 'train.tfrecord'}", "--mode=train",
    "--max_predictions_per_seq=3", f"--num_train_steps={ENDLESS}", "--num_warmup_steps=0",
  ]  # fmt: skip


def _fine_tuning(folder: pathlib.Path) -> list[str]:
  return [
    *_bert_files(folder), f"--vocab_file={folder / 'vocab.txt'}", "--do_train",
    f"--num_train_epochs={ENDLESS}",
  ]  # fmt: skip


def _classifier(folder: pathlib.Path) -> list[str]:
  rows = "".join(f"x\t{i % 2}\t\tthe red dog {WORDS[i]}\n" for i in range(8))
  (folder / "train.tsv").write_text(rows)
  return [*_fine_tuning(folder), "--task_name=cola", f"--data_dir={folder}"]


def _squad(folder: pathlib.Path) -> list[str]:
  context = " ".join(WORDS[:6])
  answer = {"text": "red", "answer_start": context.index("red")}
  qas = [{"id": str(i), "question": "red", "answers": [answer]} for i in range(8)]
  data = {"data": [{"paragraphs": [{"context": context, "qas": qas}]}]}
  (folder / "train.json").write_text(json.dumps(data))
  squad = [f"--train_file={folder / 'train.json'}", "--max_query_length=4"]
  return [*_fine_tuning(folder), *squad]


def _unet(folder: pathlib.Path) -> list[str]:
  import numpy as np

  from mesh_tensorflow.experimental import offline_data_aug

  for i in range(2):
    image = np.random.default_rng(i).uniform(size=[8] * 3).astype("f")
    offline_data_aug.save_to_tfrecord(image, np.round(image), None, i, str(folder), "scan")
  return [
    "--nouse_tpu", "--mesh_shape=rows:1", "--layout=", "--ct_resolution=8", "--mtf_dtype=float32",
    "--image_nx_block=2", "--image_ny_block=2", "--batch_size_train=2", "--n_base_filters=2",
    "--network_depth=2", "--n_conv_per_block=1", "--n_dataset_processes=2",
    "--n_dataset_read_interleave=2", f"--train_file_pattern={folder}/*.tfrecords",
    f"--checkpoint_dir={folder / 'model'}", f"--num_train_iterations_per_loop={ENDLESS}",
    "--num_eval_iterations_per_loop=0", "--save_checkpoints_steps=2", "--report_every=2",
  ]  # fmt: skip


def _transformer(folder: pathlib.Path) -> list[str]:
  mesh = worker_processes.on_mesh("", "")
  endless = [f"run.train_steps = {ENDLESS}", "run.save_checkpoints_steps = 2"]
  return worker_processes.trainer_arguments(folder / "model", *mesh, *endless)


def _own(folder: pathlib.Path) -> list[str]:
  return [
    f"--model_dir={folder / 'model'}",
    f"--steps={ENDLESS}",
    "--mesh_shape=rows:1",
    "--layout=batch:rows",
  ]


PROGRAMS: dict[str, Callable[[pathlib.Path], list[str]]] = {
  "mesh_tensorflow.transformer.main": _transformer,
  "mesh_tensorflow.bert.run_pretraining": _pretraining,
  "mesh_tensorflow.bert.run_classifier": _classifier,
  "mesh_tensorflow.bert.run_squad": _squad,
  "mesh_tensorflow.experimental.model_executor": _unet,
  "mesh_tensorflow.examples.own_program": _own,
}
FLAG = {name: "--model_dir" for name in PROGRAMS} | {
  name: "--output_dir" for name in PROGRAMS if ".bert." in name
}
FLAG["mesh_tensorflow.experimental.model_executor"] = "--checkpoint_dir"


class Running:
  """A program in a process of its own; all that it writes goes into a file."""

  def __init__(self, folder: pathlib.Path, name: str, arguments: list[str], **environ: str):
    self._path = folder / f"out-{len(list(folder.glob('out-*')))}.txt"
    self._file = self._path.open("w")
    command = [sys.executable, "-m", "tests.training.answers_program", name, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environ}
    self.process = subprocess.Popen(
      command, cwd=ROOT, env=env, stdout=self._file, stderr=subprocess.STDOUT
    )

  @property
  def text(self) -> str:
    return self._path.read_text()

  def wait(self) -> int:
    return self.process.wait(SECONDS)

  def wait_for(self, condition: Callable[[], object]) -> None:
    """Waits until something is so; fails if the process ends before."""
    end = time.monotonic() + SECONDS
    while not condition():
      assert self.process.poll() is None and time.monotonic() < end, self.text
      time.sleep(0.1)

  def close(self) -> None:
    if self.process.poll() is None:
      self.process.kill()
      self.process.wait()
    self._file.close()


@contextlib.contextmanager
def running(*args, **kwargs) -> Iterator[Running]:
  program = Running(*args, **kwargs)
  try:
    yield program
  finally:
    program.close()


def _trains(program: Running) -> bool:
  return "the first step is done" in program.text


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize("name", PROGRAMS)
def test_help_and_wrong_flags(name, run_forked):
  def started(flag):
    program = ["-m", "tests.training.answers_program", name, flag]
    return run_forked(program, check=False, env={"PYTHONPATH": str(ROOT)})

  told, bad = started("--help"), started("--nosense=1")
  assert told.returncode == exit_codes.DONE and FLAG[name] in told.stdout + told.stderr, told
  assert bad.returncode == exit_codes.CONFIGURATION, bad
  text = bad.stdout + bad.stderr
  assert "nosense" in text and "Traceback" not in text


@pytest.mark.long
@pytest.mark.subprocess
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_second_trainer_a_kill_a_signal(name, tmp_path):
  arguments, model = PROGRAMS[name](tmp_path), tmp_path / "model"
  with running(tmp_path, name, arguments) as first:
    first.wait_for(lambda: _trains(first))
    with running(tmp_path, name, arguments) as second:
      assert second.wait() == exit_codes.LOCK, second.text
    (line,) = [x for x in second.text.splitlines() if "LockedError" in x]
    assert f"another training uses {model}" in line and f"process {first.process.pid}" in line
    first.wait_for(lambda: checkpoint.all_checkpoints(str(model)))
    first.process.kill()
    assert first.wait() == -signal.SIGKILL
  newest = checkpoint.latest_checkpoint(str(model))
  with running(tmp_path, name, arguments) as again:
    again.wait_for(lambda: _trains(again))
    again.process.send_signal(signal.SIGTERM)
    assert again.wait() == exit_codes.STOPPED, again.text
  assert f"restored {newest}" in again.text
  (found,) = re.findall(r"StoppedError: stopped by SIGTERM; step (\d+) is saved in .*", again.text)
  assert "The same command goes on from there" in again.text and "Traceback" not in again.text
  assert checkpoint.latest_checkpoint(str(model)).endswith(f"model.ckpt-{found}")
  assert int(found) > checkpoint.get_step_from_path(newest)


@pytest.mark.long
@pytest.mark.subprocess
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_full_disk(name, tmp_path):
  arguments = PROGRAMS[name](tmp_path)
  with running(tmp_path, name, arguments, MTF_FULL_DISK="1") as program:
    assert program.wait() == exit_codes.STORAGE, program.text
  assert re.search(r"StorageError: cannot write checkpoint .*No space left on device", program.text)
  assert "Traceback" not in program.text and not checkpoint.all_checkpoints(str(tmp_path / "model"))
