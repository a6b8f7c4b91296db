"""A best checkpoint stays beside the newest ones, until there is a better one."""

from __future__ import annotations

import pathlib

import pytest
import tensorflow as tf

from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.checkpoint import Best, keeping, writer
from tests.checkpoint.checkpoint_stores import assert_holds, fill, make_store

LARGE = {"w": ([("n", 100_000)], tf.float32, tf.float32)}
WHOLE = 420_000  # A checkpoint of it, with index, manifest and state.


def steps_in(place: pathlib.Path) -> list[int]:
  return [checkpoint.get_step_from_path(p) for p in checkpoint.all_checkpoints(str(place))]


def listed(place: pathlib.Path) -> list[int]:
  paths = tf.train.get_checkpoint_state(str(place)).all_model_checkpoint_paths
  return [checkpoint.get_step_from_path(p) for p in paths]


@pytest.fixture
def saver(cpu_devices, tmp_path):
  store = make_store(cpu_devices)
  return checkpoint.Checkpointer(str(tmp_path), store, max_to_keep=2, asynchronous=False)


def test_one_that_counts_stays_when_it_is_old(saver, tmp_path):
  saver.save(10, best=Best(10))
  for step in (20, 30):
    saver.save(step, best=Best(10))
  assert steps_in(tmp_path) == listed(tmp_path) == [10, 20, 30]
  saver.save(40, best=Best(10))
  assert steps_in(tmp_path) == listed(tmp_path) == [10, 30, 40]
  # A better one: the old one is one of many again, and too old.
  saver.save(50, best=Best(50, before=10))
  assert steps_in(tmp_path) == listed(tmp_path) == [40, 50]
  # Without one, only the newest stay.
  saver.save(60, best=Best(50))
  saver.save(70)
  assert steps_in(tmp_path) == listed(tmp_path) == [60, 70]


def test_one_that_does_not_count_makes_no_other_go(saver, tmp_path, caplog):
  saver.save(10)
  saver.save(20)
  saver.save(23, best=Best(23, counts=False))
  assert steps_in(tmp_path) == [10, 20, 23]
  assert checkpoint.latest_checkpoint(str(tmp_path)).endswith("model.ckpt-23")
  saver.save(26, best=Best(26, counts=False, before=23, before_counts=False))
  assert steps_in(tmp_path) == listed(tmp_path) == [10, 20, 26]
  saver.save(30, best=Best(26, counts=False))
  assert steps_in(tmp_path) == [20, 26, 30]
  # Two go at once, one of them because it is no longer the best: that is no surprise.
  saver.save(40, best=Best(40, before=26, before_counts=False))
  assert steps_in(tmp_path) == listed(tmp_path) == [30, 40]
  assert not caplog.records


def test_another_run_knows_it_when_it_is_told(saver, cpu_devices, tmp_path):
  values = fill(make := make_store(cpu_devices), 3)
  saver = checkpoint.Checkpointer(str(tmp_path), make, max_to_keep=1, asynchronous=False)
  saver.save(1, best=Best(1))
  store = make_store(cpu_devices)
  again = checkpoint.Checkpointer(str(tmp_path), store, max_to_keep=1, asynchronous=False)
  for step in (2, 3):
    again.save(step, best=Best(1))
  assert steps_in(tmp_path) == [1, 3]
  again.restore(str(tmp_path / "model.ckpt-1"))
  assert_holds(store, values)


def test_kept_for_each_so_many_hours(cpu_devices, tmp_path):
  """The best one is not taken for one of those that stay for ever."""
  now = keeping.time.time()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(keeping.time, "time", lambda: now)
    saver = checkpoint.Checkpointer(
      str(tmp_path),
      make_store(cpu_devices),
      max_to_keep=1,
      keep_every_n_hours=2,
      asynchronous=False,
    )
    for i in range(6):
      now += 3600
      saver.save(i, best=Best(0))
    assert steps_in(tmp_path) == [0, 1, 3, 5]
    assert listed(tmp_path) == [0, 5]


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_full_disk_the_best_is_the_last_to_go(cpu_devices, tmp_path, monkeypatch, fails):
  """What takes its place may not be written at all; then it is still there."""

  def free(_: str) -> int:
    return int(3.5 * WHOLE) - sum(f.stat().st_size for f in tmp_path.iterdir() if f.is_file())

  store = make_store(cpu_devices, "1", LARGE)
  saver = checkpoint.Checkpointer(str(tmp_path), store, max_to_keep=2, asynchronous=False)
  for step in (1, 2, 3):
    saver.save(step, best=Best(1))
  assert steps_in(tmp_path) == [1, 2, 3]
  monkeypatch.setattr(keeping, "free_bytes", free)
  before = []

  def run(job: writer.Job) -> None:
    before.append(steps_in(tmp_path))
    if fails:
      raise job.not_written("the disk is gone")
    real(job)

  real = writer.Job.run
  monkeypatch.setattr(writer.Job, "run", run)
  if fails:
    with pytest.raises(errors.StorageError, match="the disk is gone"):
      saver.save(4, best=Best(4, before=1))
    assert steps_in(tmp_path) == [1, 3]
  else:
    saver.save(4, best=Best(4, before=1))
    assert steps_in(tmp_path) == [3, 4]
  assert before == [[1, 3]]
