"""The trainer with `run.pipeline_stages` on several workers, whole stages in each of them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors, exit_codes
from mesh_tensorflow.transformer.model import mesh_setup
from tests.transformer import worker_processes as program

SETTINGS = [
  "num_layers = 4",
  "run.max_grad_norm = 0.5",
  "run.gradient_accumulation_steps = 2",
  "run.batch_size = ('sequences_per_batch', 8)",
  "run.report_every = 1",
]
# A stage in each worker, on two devices.
STAGES = [
  "run.pipeline_stages = 2",
  "run.mesh_shape = 'batch:2'",
  "run.layout_rules = 'batch:batch'",
]
CHUNKS = "run.pipeline_chunks = 2"
PROMPT = ["run.mode = 'infer'", "sample.prompt = 'To be'"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The folder of a training on one device."""
  folder = tmp_path_factory.mktemp("whole") / "model"
  program.run(1, program.trainer_arguments(folder, *SETTINGS))
  return folder


@pytest.mark.subprocess
def test_a_training_that_is_killed_goes_on_with_the_same_losses(whole, tmp_path, monkeypatch):
  """It goes on with two runs of layers on each stage."""
  folder = tmp_path / "model"
  arguments = program.trainer_arguments(folder, *SETTINGS, *STAGES)
  with monkeypatch.context() as m:
    m.setenv("MTF_FAULT", "SIGKILL 1 step/6")
    hooks = "--module_import=tests.transformer.fault_hooks"
    with program.processes(tmp_path, 2, [*arguments, hooks]) as group:
      assert group.wait_of(0, 200) == exit_codes.WORKER_LOST, group.text(0)
  assert 1 <= len(program.losses(folder)) < 8
  program.run(2, [*arguments, f"--gin_param={CHUNKS}"])
  losses, expected = program.losses(folder), program.losses(whole)
  assert list(losses) == list(expected) == list(range(1, 9))
  np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=1e-5)
  # The checkpoint is that of one mesh, and has the variables of both stages.
  values, others = (program.checkpoint_values(f, 8) for f in (folder, whole))
  assert set(values) == set(others)


@pytest.mark.subprocess
def test_two_workers_write_the_texts_of_one(whole):
  plain = program.run(1, program.trainer_arguments(whole, *SETTINGS, *PROMPT))
  staged = program.run(2, program.trainer_arguments(whole, *SETTINGS, *STAGES, CHUNKS, *PROMPT))
  text = plain[plain.index("To be") :].splitlines()[0]
  assert len(text) > len("To be")
  # TensorFlow's notices may come in the middle of a text, which is written token by token.
  assert text in re.sub(r"[EWI]\d{4} \d\d:.*\n", "", staged)


def in_cluster(monkeypatch, count):
  jobs = {"worker": [f"host{i}:1" for i in range(count)]}
  task = {"type": "worker", "index": 0}
  monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": task}))


def test_each_worker_has_whole_stages(monkeypatch):
  in_cluster(monkeypatch, 2)
  with pytest.raises(errors.ConfigError, match="stages is 3, .* 2 workers, .* to a multiple of 2"):
    mesh_setup.join_workers(mtf.convert_to_shape("batch:2"), pipeline_stages=3)
  in_cluster(monkeypatch, 4)
  with pytest.raises(errors.ConfigError, match="or start a number of workers that divides 2"):
    mesh_setup.join_workers(mtf.convert_to_shape("batch:2"), pipeline_stages=2)


@pytest.mark.subprocess
def test_a_stage_of_two_workers(tmp_path):
  devices = [f"/job:worker/replica:0/task:{w}/device:CPU:{i}" for i in range(2) for w in range(2)]
  bindings = [*SETTINGS, *STAGES, f"run.mesh_devices = {devices}"]
  text = program.run(
    2, program.trainer_arguments(tmp_path / "model", *bindings), exit_codes.CONFIGURATION
  )
  assert "ConfigError: stage 0 of run.pipeline_stages (2) has devices of worker 0" in text
  assert "the mesh of a stage is of one worker" in text
