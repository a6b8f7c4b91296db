"""What the flags of the trainer become as arguments of `run`."""

from __future__ import annotations

import pytest
from absl.testing import flagsaver

from mesh_tensorflow.transformer.commands import trainer


@pytest.fixture
def arguments(monkeypatch):
  """Those that `run` is called with, when a mode is run that needs no devices and no folder."""
  found = {}
  monkeypatch.setattr(trainer.gin_config, "parse_gin_defaults_and_flags", lambda: None)
  monkeypatch.setattr(trainer.gin_config, "check_run", lambda: None)
  bindings = {"mode": "plan", "model_dir": "bound"}
  monkeypatch.setattr(trainer.gin, "get_bindings", lambda *_, **__: bindings)
  monkeypatch.setattr(trainer, "run", lambda **kwargs: found.update(kwargs))
  if not trainer.FLAGS.is_parsed():
    trainer.FLAGS.mark_as_parsed()
  return found


def test_without_flags_the_gin_files_decide(arguments):
  with flagsaver.flagsaver():
    trainer.main(["program"])
  of_a_tpu = dict.fromkeys(("tpu_job_name", "tpu", "gcp_project", "tpu_zone"))
  assert arguments == {"model_dir": "bound", **of_a_tpu}


def test_flags_are_arguments_of_run(arguments):
  of_a_tpu = dict(tpu_job_name="job", tpu="local", gcp_project="project", tpu_zone="zone")
  with flagsaver.flagsaver(allow_config_change=True, model_dir="given", **of_a_tpu):
    trainer.main(["program"])
  assert arguments == {"allow_config_change": True, "model_dir": "given", **of_a_tpu}
