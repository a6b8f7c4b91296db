"""Several workers evaluate while they train, and agree on the best checkpoint and on the end."""

from __future__ import annotations

import re

import pytest

from mesh_tensorflow import checkpoint
from mesh_tensorflow.training.best_checkpoint import Evaluations, best_checkpoint
from tests.transformer import worker_processes as program

SETTINGS = (
  *("run.eval_every_steps = 2", "run.eval_steps = 2", "run.train_steps = 6"),
  # Nothing is an improvement of so much: the second evaluation is the last.
  *("run.early_stopping_patience = 1", "run.early_stopping_min_delta = 100.0"),
)


@pytest.mark.slow
def test_two_workers_evaluate_as_one_device(tmp_path):
  found = []
  for count in (1, 2):
    folder = tmp_path / str(count)
    folder.mkdir()
    mesh = program.on_mesh("batch:2", "batch:batch") if count == 2 else []
    out = program.run(count, program.trainer_arguments(folder / "model", *SETTINGS, *mesh))
    found.append([float(x) for x in re.findall(r"eval loss ([0-9.]+) nats", out)])
    assert out.count("stopped early at step 4 of 6") == 1  # The chief says it.
    newest = checkpoint.latest_checkpoint(str(folder / "model"))
    assert newest is not None and newest.endswith("model.ckpt-4")
    assert Evaluations.of_checkpoint(newest).last_step == 4
    assert best_checkpoint(str(folder / "model")) == newest
  one, two = found
  assert len(one) == 2 and one[1] < one[0]
  assert two == pytest.approx(one, abs=2e-4)
