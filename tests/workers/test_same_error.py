"""An error that all workers have is what each ends with, also when another one ends first."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mesh_tensorflow import errors, workers
from mesh_tensorflow.checkpoint import by_chief, meeting, shared_folder
from mesh_tensorflow.workers import agreement, membership, texts

CLUSTER = workers.Cluster((("worker", 0, "a:1"), ("worker", 1, "a:2")), 1)


@pytest.fixture
def second_of_two(monkeypatch):
  """This process seems to be worker 1, and worker 0 is gone as soon as it has said its word."""

  def said(word: str):
    def gathered(text):
      return [word, text]

    for module in (texts, shared_folder):
      monkeypatch.setattr(module, "gather_texts", gathered)

  def gone():
    raise errors.WorkerLostError("lost worker 0")

  monkeypatch.setattr(workers, "current", lambda: CLUSTER)
  monkeypatch.setattr(workers, "barrier", gone)
  monkeypatch.setattr(membership, "barrier", gone)
  return said


@pytest.mark.parametrize(
  ("word", "kind"),
  [("unseen", errors.CheckpointError), ("the disk is full", errors.StorageError)],
)
def test_a_folder(word, kind, second_of_two):
  second_of_two(word)
  with pytest.raises(kind):
    shared_folder._agree("folder", "")


def test_what_all_do_together(second_of_two):
  second_of_two(json.dumps(["StorageError", "the disk is full"]))
  with pytest.raises(errors.StorageError, match=r"worker 0 \(a:1\) failed: the disk is full"):
    meeting.raise_together("save", None)


def test_what_one_does_for_all(second_of_two, monkeypatch):
  second_of_two(json.dumps({"value": None, "error": ["ConfigError", "a wrong name"]}))
  monkeypatch.setattr(by_chief, "_wait_for_chief", lambda: None)
  with pytest.raises(errors.ConfigError, match=r"worker 0 \(a:1\): a wrong name"):
    by_chief.by_chief(lambda: None)


def test_other_settings(second_of_two, monkeypatch):
  second_of_two(json.dumps(["run.seed = 1"]))
  rows = np.stack([np.zeros(8, np.int32), np.ones(8, np.int32)])
  monkeypatch.setattr(workers, "gather", lambda value: rows)
  with pytest.raises(errors.ConfigError, match="run.seed = 2"):
    agreement.check_same(["run.seed = 2"])
