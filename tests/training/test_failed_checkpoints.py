"""Several workers whose checkpoints cannot be written, with the real program."""

from __future__ import annotations

import os
import pathlib
import re

import pytest

from mesh_tensorflow import checkpoint, exit_codes
from tests.conftest import ROOT
from tests.transformer import worker_processes as program

HOOKS = "--module_import=tests.transformer.write_hooks"


def last_line(group: program.Processes, worker: int) -> str:
  return group.text(worker).splitlines()[-1]


@pytest.mark.long
@pytest.mark.subprocess
def test_a_failed_checkpoint_is_every_workers_error(tmp_path, monkeypatch):
  """Also of one that still writes when the others know: they stay until it knows, too."""
  folder = tmp_path / "model"
  monkeypatch.setenv("MTF_WRITES", "fails")
  arguments = program.trainer_arguments(folder, *program.on_mesh("batch:3", "batch:batch"))
  with program.processes(tmp_path, 3, [*arguments, HOOKS]) as group:
    assert group.wait() == [exit_codes.STORAGE] * 3, "\n".join(group.text(i) for i in range(3))
    for i in range(3):
      assert re.search(
        rf"worker {i}/3: StorageError: cannot write checkpoint model.ckpt-4 in {folder}: "
        r"worker 1 \(127.0.0.1:\d+\): .*No space left on device",
        last_line(group, i),
      ), group.text(i)
  assert not checkpoint.all_checkpoints(str(folder))
  assert not [n for n in os.listdir(folder) if n.startswith((".unfinished", "model.ckpt"))]


@pytest.mark.subprocess
def test_a_folder_that_is_not_shared_is_noticed_before_the_first_step(tmp_path, monkeypatch):
  monkeypatch.setenv("MTF_WRITES", "apart")
  monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
  arguments = program.trainer_arguments(
    tmp_path / "model", *program.on_mesh("batch:2", "batch:batch")
  )
  arguments[0] = "--model_dir=model"
  monkeypatch.chdir(tmp_path)
  with program.processes(tmp_path, 2, [*arguments, HOOKS]) as group:
    assert group.wait() == [exit_codes.CONFIGURATION] * 2, "\n".join(
      group.text(i) for i in range(2)
    )
    for i in range(2):
      assert re.search(
        rf"worker {i}/2: CheckpointError: the workers do not share the folder model: worker 1 "
        r"\(127.0.0.1:\d+\) cannot see what worker 0 \(127.0.0.1:\d+\) writes there",
        last_line(group, i),
      ), group.text(i)
  assert not program.losses(tmp_path / "model")
  assert pathlib.Path("elsewhere/model").is_dir()
