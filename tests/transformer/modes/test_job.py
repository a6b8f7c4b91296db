"""Modes are looked up: what a function marked with `@mode` gets, and which names are legal."""

from __future__ import annotations

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.modes import Job, mode
from mesh_tensorflow.transformer.modes import job as job_lib

ARGUMENTS = dict(
  tpu_job_name=None,
  tpu=None,
  gcp_project=None,
  tpu_zone=None,
  model_dir=None,
  mesh_shape="batch:2",
  layout_rules="batch:batch",
  sequence_length=8,
  batch_size=("tokens_per_replica", 32),
)


@pytest.fixture
def modes(monkeypatch):
  """The modes; those that a test adds are gone after it."""
  monkeypatch.setattr(job_lib, "_MODES", dict(job_lib._MODES))
  yield job_lib
  monkeypatch.undo()
  job_lib.MODES[:] = job_lib.mode_names()


def test_a_mode_of_ones_own_gets_the_checked_arguments_of_run(modes):
  @mode("mine", on_devices=False)
  def mine(job: Job):
    return job

  job = utils.run(**ARGUMENTS, mode="mine", report_every=7)
  assert (job.batch_size, job.report_every, job.mode.name) == (8, 7, "mine")
  assert job.sequence_length == {"inputs": 8, "targets": 8}
  assert job.mesh_shape == mtf.Shape([mtf.Dimension("batch", 2)])
  with pytest.raises(AttributeError, match="report_evry"):
    job.report_evry  # noqa: B018


def test_names_are_legal_when_they_are_registered(modes):
  with pytest.raises(errors.ConfigError, match=r"run.mode = 'mine': it must be one of .*'train'"):
    utils.run(**ARGUMENTS, mode="mine")
  mode("mine", on_devices=False)(lambda job: 3)
  assert utils.run(**ARGUMENTS, mode="mine") == 3
  with pytest.raises(errors.ConfigError, match="did you mean mine"):
    utils.run(**ARGUMENTS, mode="mina")
  with pytest.raises(errors.ConfigError, match="'mina' is unknown; use .*'?mine"):
    modes.get_mode("mina")


def test_a_mode_checks_before_anything_is_done(modes):
  def check(job):
    raise errors.ConfigError(f"needs {job.export_path!r}")

  mode("mine", check=check)(lambda job: 3)
  with pytest.raises(errors.ConfigError, match="needs 'x'"):
    utils.run(**ARGUMENTS, mode="mine", export_path="x")


def test_a_second_mode_of_one_name_is_refused(modes):
  def run_train(job):
    return job

  with pytest.raises(errors.ConfigError, match=r"'train' is there already: .*modes\.train"):
    mode("train")(run_train)
  assert mode("mine")(run_train) is run_train
  assert mode("mine")(run_train) is run_train  # A notebook's cell is run twice.


def test_the_modes_that_there_are():
  assert set(utils.MODES) >= {
    *("train", "eval", "score_eval", "perplexity_eval", "infer", "plan"),
    *("score_from_strings", "score_from_dataset", "export", "export_infer", "export_score"),
  }
  assert [n for n in utils.MODES if job_lib.get_mode(n).trains] == ["train"]
  assert {n for n in utils.MODES if job_lib.get_mode(n).one_process} == {
    *("average", "export", "export_infer", "export_score"),
  }
