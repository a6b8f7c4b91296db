"""Runs that are killed while they write, and disks that are full or cannot be written."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import tensorflow as tf

from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.checkpoint import keeping
from tests.checkpoint.checkpoint_stores import assert_holds, fill, make_store


class Killed(BaseException):
  """Stands for the end of the process: no handler of ours catches it."""


def killed_after(monkeypatch, module, name, count):
  """Ends the program after the `count`-th call of a function."""
  real, calls = getattr(module, name), []

  def wrapper(*args, **kwargs):
    result = real(*args, **kwargs)
    calls.append(1)
    if len(calls) == count:
      raise Killed
    return result

  monkeypatch.setattr(module, name, wrapper)


@pytest.mark.parametrize(
  "where, name, count, survives",
  [
    (tf.raw_ops, "SaveV2", 1, 1),
    (tf.raw_ops, "MergeV2Checkpoints", 1, 1),
    (tf.io.gfile, "rename", 1, 1),  # The manifest is written.
    (tf.io.gfile, "rename", 2, 1),  # The data is in place, manifest and index are not.
    (tf.io.gfile, "rename", 3, 1),
    (tf.io.gfile, "rename", 4, 1),  # The checkpoint is whole; the state file lacks it.
    (tf.io.gfile, "rename", 5, 2),
  ],
)
def test_killed_in_the_middle(cpu_devices, tmp_path, monkeypatch, where, name, count, survives):
  store = make_store(cpu_devices, "2x2")
  values = {1: fill(store, 1)}
  checkpoint.Checkpointer(str(tmp_path), store, max_to_keep=2, asynchronous=False).save(1)
  values[2] = fill(store, 2)
  c = checkpoint.Checkpointer(str(tmp_path), store, max_to_keep=2, asynchronous=False)
  with monkeypatch.context() as m:
    killed_after(m, where, name, count)
    with pytest.raises(Killed):
      c.save(2)
  # The next process finds a whole checkpoint, with our functions and TensorFlow's.
  assert tf.train.latest_checkpoint(str(tmp_path)).endswith(f"-{survives}")
  store = make_store(cpu_devices, "2x4")
  c = checkpoint.Checkpointer(str(tmp_path), store, max_to_keep=2, asynchronous=False)
  assert c.restore().step == survives
  assert_holds(store, values[survives])
  # What is left behind goes with its first save.
  c.save(3)
  left = sorted(n for n in os.listdir(tmp_path) if not n.startswith(("model.ckpt-1", "checkpoint")))
  whole = [n for n in left if "model.ckpt-2" not in n or count > 2 and name == "rename"]
  assert left == whole and len(left) in (3, 6)
  assert checkpoint.latest_checkpoint(str(tmp_path)).endswith("-3")


@pytest.mark.subprocess
def test_process_killed_while_writing(run_forked, tmp_path):
  program = """
import os, signal, sys
import tensorflow as tf
from mesh_tensorflow import checkpoint
from mesh_tensorflow.program.dimensions import convert_to_shape
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
impl = PlacementMeshImpl("", "", [""])
impl.variable_store.get(impl, "w", convert_to_shape([("n", 5)]), master_dtype=tf.float32,
                        slice_dtype=tf.float32)
c = checkpoint.Checkpointer(sys.argv[1], impl.variable_store)
if sys.argv[2] == "kill":
  c.save(1)
  c.wait()
  save = tf.raw_ops.SaveV2
  def killed(**kwargs):
    save(**kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
  tf.raw_ops.SaveV2 = killed
  c.save(2)
  c.wait()
print("step", c.restore().step)
c.save(3)  # No wait(): a program that ends finishes its checkpoint.
"""
  result = run_forked(["-c", program, tmp_path, "kill"], check=False)
  assert result.returncode == -9
  assert any(n.startswith(".unfinished") for n in os.listdir(tmp_path))
  result = run_forked(["-c", program, tmp_path, "go on"])
  assert "step 1" in result.stdout
  assert sorted(os.listdir(tmp_path)) == [
    "checkpoint",
    "model.ckpt-1.data-00000-of-00001",
    "model.ckpt-1.index",
    "model.ckpt-1.manifest",
    "model.ckpt-3.data-00000-of-00001",
    "model.ckpt-3.index",
    "model.ckpt-3.manifest",
  ]
  assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-3")


@pytest.mark.long
@pytest.mark.subprocess
def test_killed_at_random_moments(run_forked, tmp_path):
  program = ["-m", "tests.checkpoint.checkpoint_kill_program"]
  result = run_forked([*program, tmp_path / "runs", "4", "3", "160"])
  told = re.search(r"4 kills, (\d) in the middle of a write; same final values", result.stdout)
  assert told and int(told.group(1)) > 0, result.stdout


# --------------------------------------------------------------------------- disks


@pytest.mark.subprocess
def test_full_disk_leaves_earlier_checkpoints(run_forked, tmp_path):
  # A limit on the size of files makes the file system itself fail in the middle of a write.
  result = run_forked(
    f"""
import resource, signal
import numpy as np
import tensorflow as tf
from mesh_tensorflow import (checkpoint, errors)
from mesh_tensorflow.program.dimensions import convert_to_shape
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
impl = PlacementMeshImpl("", "", [""])
store = impl.variable_store
w = store.get(impl, "w", convert_to_shape([("n", 500000)]),
              master_dtype=tf.float32, slice_dtype=tf.float32)
w.assign(np.random.RandomState(0).randn(500000).astype(np.float32))
c = checkpoint.Checkpointer({str(tmp_path)!r}, store)
c.save(1)
c.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000000, -1))
c.save(2)
try:
  c.wait()
except errors.CheckpointError as e:
  print("told:", e)
c.restore()
print("step", c.restore().step)
"""
  )
  assert "told: cannot write checkpoint model.ckpt-2" in result.stdout
  assert "step 1" in result.stdout
  assert len(os.listdir(tmp_path)) == 4


@pytest.fixture
def small_disk(tmp_path):
  """The folder of a disk of 3 MB."""
  folder = tmp_path / "disk"
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)]
  try:
    subprocess.run(mount, check=True, capture_output=True)
  except (OSError, subprocess.CalledProcessError) as e:
    pytest.skip(f"a small disk cannot be mounted here: {e}")
  yield folder
  subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_disk_and_read_only_disk(small_disk, cpu_devices, monkeypatch):
  variables = {"w": ([("n", 400_000)], tf.float32, tf.float32)}
  store = make_store(cpu_devices, "1", variables)
  values = fill(store, 1)
  folder = str(small_disk / "run")
  c = checkpoint.Checkpointer(folder, store)
  c.save(1)
  c.wait()
  before = sorted(os.listdir(folder))
  fill(store, 2)
  words = r"model.ckpt-{} .* needs 1.6 MB, and the disk has 1.\d MB free; .*keep_checkpoint_max"
  for step in (2, 3):
    with pytest.raises(errors.StorageError, match=words.format(step)):
      c.save(step)
    assert sorted(os.listdir(folder)) == before
  # As on a disk that somebody else fills meanwhile.
  monkeypatch.setattr(keeping, "free_bytes", lambda directory: None)
  for step in (2, 3):
    c.save(step)
    with pytest.raises(errors.StorageError) as e:
      c.wait()
    said = str(e.value)
    assert f"cannot write checkpoint model.ckpt-{step} " in said and "No space left" in said
    assert said.count("run.keep_checkpoint_max") == 1
    assert sorted(os.listdir(folder)) == before
  subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
  for checkpointer in (c, checkpoint.Checkpointer(folder, store)):
    checkpointer.save(4)
    with pytest.raises(errors.StorageError, match="model.ckpt-4 .* Read-only file system"):
      checkpointer.wait()
    assert checkpointer.restore().step == 1
    assert_holds(store, values)
    fill(store, 2)
  assert sorted(os.listdir(folder)) == before
