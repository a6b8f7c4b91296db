"""Disks that get full: room is made, the last good checkpoint stays, and the error says enough."""

from __future__ import annotations

import gc
import logging
import os
import pathlib
import subprocess

import pytest
import tensorflow as tf

from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.checkpoint import keeping, snapshot, writer
from tests.checkpoint.checkpoint_stores import MESHES, VARIABLES, assert_holds, fill, make_store

# 400 kB, beside which the other files are small.
LARGE = {"w": ([("n", 100_000)], tf.float32, tf.float32)}
SIZE = 400_000
WHOLE = 420_000  # With index, manifest and state.


@pytest.fixture
def disk(monkeypatch):
  """A function that makes the disk of a folder one of so many bytes."""

  def of_size(place: pathlib.Path, size: int) -> None:
    def free(_: str) -> int:
      return size - sum(f.stat().st_size for f in place.rglob("*") if f.is_file())

    monkeypatch.setattr(keeping, "free_bytes", free)

  return of_size


def steps_in(place) -> list[int]:
  return [checkpoint.get_step_from_path(p) for p in checkpoint.all_checkpoints(str(place))]


def checkpointer(place, cpu_devices, max_to_keep=None, **kwargs):
  store = make_store(cpu_devices, "1", LARGE)
  kwargs.setdefault("asynchronous", False)
  return checkpoint.Checkpointer(str(place), store, max_to_keep=max_to_keep, **kwargs), store


def test_the_oldest_goes_before_a_save_only_if_it_must(tmp_path, cpu_devices, disk, caplog):
  c, store = checkpointer(tmp_path, cpu_devices, max_to_keep=2)
  disk(tmp_path, 10 * WHOLE)
  before_writing = []
  real = writer.Job.run
  with pytest.MonkeyPatch.context() as m:
    m.setattr(writer.Job, "run", lambda job: before_writing.append(steps_in(tmp_path)) or real(job))
    for step in (1, 2, 3):
      c.save(step)
    assert before_writing.pop() == [1, 2] and not caplog.records
    disk(tmp_path, int(2.5 * WHOLE))
    values = fill(store, 4)
    c.save(4)
    assert before_writing.pop() == [3]
  assert f"{tmp_path}/model.ckpt-2 is deleted before model.ckpt-4 is saved, not" in caplog.text
  assert steps_in(tmp_path) == [3, 4]
  fill(store, 9)
  c.restore()
  assert_holds(store, values)


@pytest.mark.parametrize("damaged", [False, True])
def test_the_last_good_one_stays(damaged, tmp_path, cpu_devices, disk):
  """Also if it is an older one, because the newest is damaged."""
  c, store = checkpointer(tmp_path, cpu_devices, max_to_keep=2 if damaged else 1)
  values = fill(store, 1)
  c.save(1)
  if damaged:
    c.save(2)
    with open(tmp_path / "model.ckpt-2.data-00000-of-00001", "r+b") as f:
      f.write(b"\xff" * 8)
  there = sorted(os.listdir(tmp_path))
  disk(tmp_path, int((1.5 + damaged) * WHOLE))
  fill(store, 3)
  with pytest.raises(errors.StorageError) as e:
    c.save(3)
  said = str(e.value)
  for words in (
    f"cannot write checkpoint model.ckpt-3 in {tmp_path}: it needs 416.4 kB, and the disk has ",
    "run.keep_checkpoint_max, Checkpointer's max_to_keep: now ",
    "earlier checkpoints are untouched",
  ):
    assert said.count(words) == 1, said
  assert len(said) < 500 and "\n" not in said
  assert sorted(os.listdir(tmp_path)) == there
  fill(store, 9)
  assert c.restore().step == 1
  assert_holds(store, values)
  disk(tmp_path, 10 * WHOLE)  # With more room the same checkpointer goes on.
  c.save(3)
  assert steps_in(tmp_path) == ([2, 3] if damaged else [3])


def test_nothing_is_deleted_that_would_have_stayed(tmp_path, cpu_devices, disk):
  c, _ = checkpointer(tmp_path, cpu_devices, max_to_keep=3)
  for step in (1, 2):
    c.save(step)
  disk(tmp_path, int(2.5 * WHOLE))
  with pytest.raises(errors.StorageError, match=r"now 3\)"):
    c.save(3)
  assert steps_in(tmp_path) == [1, 2]


def test_the_copy_of_values_gives_way(tmp_path, cpu_devices, disk, monkeypatch, caplog):
  """First the temporary file goes, for which the training then waits; then old checkpoints."""
  monkeypatch.setattr(snapshot, "TRANSFER_BUFFER", 100_000)
  c, store = checkpointer(tmp_path, cpu_devices, max_to_keep=2, asynchronous=True)
  c.save(1)
  c.wait()
  assert c._copies.spool is not None
  real = keeping.free_bytes

  def free(place):  # The file has no name, so its size is added here.
    return int(2.5 * WHOLE) - WHOLE * len(steps_in(tmp_path)) - SIZE * (c._copies.spool is not None)

  monkeypatch.setattr(keeping, "free_bytes", free)
  c.save(2)
  assert c._copies.spool is None and c._thread is None and steps_in(tmp_path) == [1, 2]
  assert "there is no room for it beside the checkpoint" in caplog.text
  monkeypatch.setattr(keeping, "free_bytes", real)
  c.save(3)
  c.wait()
  assert c._copies.spool is not None
  assert real(str(tmp_path / "not" / "there")) > 0 and real("gs://bucket/x") is None


@pytest.mark.parametrize("mesh", MESHES)
def test_the_size_is_known_before(mesh, tmp_path, cpu_devices):
  """Of replicas one counts, of slices all."""
  store = make_store(cpu_devices, mesh)
  checkpoint.Checkpointer(str(tmp_path), store, asynchronous=False).save(1)
  written = sum(f.stat().st_size for f in tmp_path.iterdir() if f.is_file())
  needed = keeping.needed_bytes(store)
  assert written <= needed < written + 4 * 4096 + 200 * len(VARIABLES)


def test_many_that_go_at_once_are_named(tmp_path, cpu_devices, caplog):
  """As in a folder in which all were kept, when that setting is changed."""
  checkpointer(tmp_path, cpu_devices)[0].save(1)
  c, _ = checkpointer(tmp_path, cpu_devices)
  for step in (2, 3, 4):
    c.save(step)
  assert not caplog.records
  checkpointer(tmp_path, cpu_devices, max_to_keep=2)[0].save(5)
  assert steps_in(tmp_path) == [4, 5]
  (record,) = caplog.records
  assert "3 checkpoints in" in caplog.text and "model.ckpt-1 to model.ckpt-3" in caplog.text
  assert record.levelno == logging.WARNING and "run.keep_checkpoint_max" in caplog.text


def test_an_error_of_the_background_is_told_once(tmp_path, cpu_devices, monkeypatch, caplog):
  def full(**_):
    raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

  monkeypatch.setattr(tf.raw_ops, "SaveV2", full)
  c, _ = checkpointer(tmp_path, cpu_devices, asynchronous=True)
  c.save(1)
  with pytest.raises(errors.StorageError, match="No space left .*keep_checkpoint_max"):
    c.wait()
  c.wait()
  assert not caplog.records
  c.save(2)
  c._thread.join()
  del c
  gc.collect()
  (record,) = caplog.records  # Nobody asked.
  assert "cannot write checkpoint model.ckpt-2" in record.getMessage()


@pytest.mark.parametrize(
  "error",
  [
    tf.errors.PermissionDeniedError(None, None, "Permission denied"),
    tf.errors.ResourceExhaustedError(None, None, "No space left on device"),
    tf.errors.FailedPreconditionError(None, None, "Read-only file system"),
    tf.errors.UnknownError(None, None, "Input/output error"),
    OSError(122, "Disk quota exceeded"),
    PermissionError(13, "Permission denied"),
  ],
)
def test_what_disks_say_is_an_error_of_storage(error, tmp_path, cpu_devices, monkeypatch):
  def fails(*_, **__):
    raise error

  for module, name in ((tf.raw_ops, "SaveV2"), (tf.io.gfile, "rename"), (tf.io.gfile, "makedirs")):
    with monkeypatch.context() as m:
      m.setattr(module, name, fails)
      c, _ = checkpointer(tmp_path, cpu_devices)
      with pytest.raises(errors.StorageError, match="cannot write checkpoint model.ckpt-1 in"):
        c.save(1)
      assert not any(tmp_path.iterdir())


def test_a_real_disk(tmp_path, cpu_devices):
  """Of 1 MB: two checkpoints fit, and a third only when the first is gone."""
  place = tmp_path / "disk"
  place.mkdir()
  try:
    subprocess.run(
      ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=True, capture_output=True
    )
  except (OSError, subprocess.CalledProcessError) as e:
    pytest.skip(f"a small disk cannot be mounted here: {e}")
  try:
    c, store = checkpointer(place / "run", cpu_devices, max_to_keep=2, asynchronous=True)
    for step in (1, 2, 3, 4):
      values = fill(store, step)
      c.save(step)
    c.wait()
    assert steps_in(place / "run") == [3, 4]
    (place / "other").write_bytes(b"x" * 100_000)
    with open(place / "run" / "model.ckpt-4.index", "r+b") as f:
      f.write(b"\xff" * 8)  # Now 3 is the last good one.
    with pytest.raises(errors.StorageError, match="needs 416.4 kB, and the disk has "):
      c.save(5)
    assert c.restore().step == 3
    (place / "other").unlink()
    with open(place / "run" / "model.ckpt-4.index", "r+b") as f:
      f.truncate(0)
    values = fill(store, 6)
    (place / "run" / "model.ckpt-4.data-00000-of-00001").unlink()
    c.save(6)
    c.wait()
    fill(store, 9)
    assert c.restore().step == 6
    assert_holds(store, values)
  finally:
    subprocess.run(["umount", "--lazy", str(place)], check=True)


# -------------------------------------------------------------------- another model


def make_model(num_layers: int, d_model: int, d_ff: int, scope: str = "decoder") -> dict:
  layers = {}
  for i in range(num_layers):
    of_layer = f"{scope}/block_{i:03}/layer_000"
    layers[f"{of_layer}/wi/kernel"] = ([("d_model", d_model), ("d_ff", d_ff)],) + (tf.float32,) * 2
    layers[f"{of_layer}/scale"] = ([("d_model", d_model)],) + (tf.float32,) * 2
  return layers


@pytest.mark.parametrize(
  ("model", "expected"),
  [
    (
      (50, 4, 2),
      [
        "checkpoint PATH is not of this model: 100 variables have another shape, and all differ by "
        "d_model: 2 in the checkpoint, 4 here",
        "  such as decoder/block_000/layer_000/wi/kernel: (2, 2) in the checkpoint, "
        "[d_model:4, d_ff:2] in the model",
        "  set what makes d_model 4 so that it is 2, or use another folder or checkpoint (all "
        "names: --verbosity=0, or the error's `details`)",
      ],
    ),
    (
      (50, 4, 3),
      [
        "checkpoint PATH is not of this model: 100 variables have another shape, and all differ by "
        "d_model: 2 in the checkpoint, 4 here and d_ff: 2 in the checkpoint, 3 here",
        "  such as decoder/block_000/layer_000/wi/kernel: (2, 2) in the checkpoint, "
        "[d_model:4, d_ff:3] in the model",
        "  set what makes d_model 4 so that it is 2 and d_ff 3 so that it is 2, or use another "
        "folder or checkpoint (all names: --verbosity=0, or the error's `details`)",
      ],
    ),
    (
      (60, 2, 2),
      [
        "checkpoint PATH is not of this model:",
        "  missing in the checkpoint (20), all in decoder/:",
        "    decoder/block_050/layer_000/wi/kernel [2, 2]",
        "    decoder/block_050/layer_000/scale [2]",
        "    decoder/block_051/layer_000/wi/kernel [2, 2]",
        "    and 17 more (all names: --verbosity=0, or the error's `details`)",
      ],
    ),
  ],
)
def test_another_model_in_few_lines(model, expected, tmp_path, cpu_devices, caplog):
  caplog.set_level(logging.INFO, "mesh_tensorflow")
  store = make_store(cpu_devices, "1", make_model(50, 2, 2))
  path = checkpoint.Checkpointer(str(tmp_path), store, asynchronous=False).save(1)
  other = make_store(cpu_devices, "1", make_model(*model))
  with pytest.raises(errors.CheckpointError) as e:
    checkpoint.Checkpointer(str(tmp_path), other).restore()
  assert str(e.value).split("\n") == [line.replace("PATH", path) for line in expected]
  names = set(make_model(*model)) ^ set(make_model(50, 2, 2)) or set(make_model(*model))
  assert all(f"    {n}" in e.value.details for n in names)
  assert e.value.details in caplog.text


def test_shapes_that_differ_in_many_ways_have_no_cause(tmp_path, cpu_devices):
  variables = {f"v{i}": ([("n", i + 1)], tf.float32, tf.float32) for i in range(6)}
  store = make_store(cpu_devices, "1", variables)
  checkpoint.Checkpointer(str(tmp_path), store, asynchronous=False).save(1)
  other = {f"v{i}": ([("n", i + 2)], tf.float32, tf.float32) for i in range(6)}
  with pytest.raises(errors.CheckpointError) as e:
    checkpoint.Checkpointer(str(tmp_path), make_store(cpu_devices, "1", other)).restore()
  lines = str(e.value).split("\n")
  assert len(lines) == 6 and lines[1] == "  of another shape or kind (6):"
  assert lines[-1].startswith("    and 3 more (all names: ")
