"""Damaged checkpoints: every file, every kind of damage is noticed, named, and stepped over."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import re
import zlib

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.checkpoint import reader, snapshot, verification
from tests.checkpoint.checkpoint_stores import assert_holds, fill, make_store

DATA = [f".data-0000{i}-of-00002" for i in range(2)]
FILES = [".index", ".manifest", *DATA, ".with-input-00000.txt"]


@pytest.fixture
def two(cpu_devices, tmp_path, monkeypatch):
  """A folder with two checkpoints of several files, its checkpointer, and the values by step."""
  monkeypatch.setattr(snapshot, "TRANSFER_BUFFER", 600)
  store = make_store(cpu_devices, "2x2")
  c = checkpoint.Checkpointer(str(tmp_path), store, asynchronous=False)
  values = {}
  for step in (1, 2):
    values[step] = fill(store, step)
    c.save(step, attachments={"input": lambda prefix: write(prefix + ".txt", b"position 12")})
  return c, store, values


def write(path, content):
  with open(path, "wb") as f:
    f.write(content)


def content_of(folder):
  return {n: open(os.path.join(folder, n), "rb").read() for n in sorted(os.listdir(folder))}


def flipped(content, position, bit=0):
  content = bytearray(content)
  content[position] ^= 1 << bit
  return bytes(content)


def kinds_of_damage(content):
  """(what is said of it, damaged content); None: the file is not there."""
  last = len(content) - 1
  for position in sorted({0, 1, last // 3, last // 2, last - 1, last}):
    yield "has", flipped(content, position, position % 8)
  for rest in (last, len(content) // 2, 1, 0):
    yield "is truncated", content[:rest]
  yield "is longer", content + b"\n"


@pytest.mark.slow
def test_every_file_and_kind_of_damage(two, caplog):
  c, store, values = two
  folder = c.directory
  whole = content_of(folder)
  assert sorted(whole) == sorted(
    ["checkpoint"] + [f"model.ckpt-{n}{f}" for n in "12" for f in FILES]
  )
  for suffix in FILES:
    name = f"model.ckpt-2{suffix}"
    path = os.path.join(folder, name)
    for what, damaged in kinds_of_damage(whole[name]):
      write(path, damaged)
      (damage,) = checkpoint.verify(os.path.join(folder, "model.ckpt-2"))
      assert damage.file == path
      # Of a manifest one cannot always tell what is wrong.
      assert damage.what.startswith(what) or suffix == ".manifest", (name, damage.what)
      caplog.clear()
      fill(store, 9)
      restored = c.restore()
      assert (restored.path, restored.step) == (os.path.join(folder, "model.ckpt-1"), 1)
      assert_holds(store, values[1])
      (record,) = caplog.records
      assert record.levelno == logging.WARNING and path in record.getMessage()
      assert checkpoint.latest_checkpoint(folder) == c.latest() == restored.path
      # Who asks for that one gets an error, and a folder means the same everywhere.
      with pytest.raises(errors.CheckpointError, match=re.escape(f"damaged: {path} ")) as e:
        c.restore(os.path.join(folder, "model.ckpt-2"))
      assert isinstance(e.value, checkpoint.DamagedCheckpointError)
      assert "others in that folder: model.ckpt-1;" in str(e.value)
      assert checkpoint.resolve(folder) == restored.path
      assert content_of(folder) == {**whole, name: damaged}
    write(path, whole[name])
  assert c.restore().step == 2
  assert_holds(store, values[2])


def test_every_single_byte(two):
  c, _, _ = two
  whole = content_of(c.directory)
  checked = 0
  for suffix in FILES:
    name = f"model.ckpt-2{suffix}"
    path = os.path.join(c.directory, name)
    for position in range(len(whole[name])):
      write(path, flipped(whole[name], position, position % 8))
      checked += 1
      if suffix == ".manifest" and whole[name][:position] == b'{"format": ':
        # Another digit is another format: nobody can tell which one was written.
        with pytest.raises(errors.NewerFormatError):
          checkpoint.verify(os.path.join(c.directory, "model.ckpt-2"))
        continue
      (damage,) = checkpoint.verify(os.path.join(c.directory, "model.ckpt-2"))
      assert damage.file == path
    write(path, whole[name])
  assert checked > 1200
  assert not checkpoint.verify(c.directory)


@pytest.mark.parametrize("suffix", FILES)
def test_missing_file(two, suffix):
  c, store, values = two
  prefix = os.path.join(c.directory, "model.ckpt-2")
  os.remove(prefix + suffix)
  if suffix == ".manifest":
    # As one that TensorFlow or an older version wrote.
    assert c.restore().step == 2
    return
  assert c.restore().step == 1
  assert_holds(store, values[1])
  with pytest.raises(errors.CheckpointError, match=re.escape(f"{prefix}{suffix} is missing")):
    c.restore(prefix)


def test_damaged_state_file_loses_nothing(two):
  c, store, values = two
  path = os.path.join(c.directory, "checkpoint")
  whole = content_of(c.directory)
  state = whole["checkpoint"]
  damaged = [flipped(state, i, i % 8) for i in range(len(state))]
  damaged += [state[:n] for n in range(0, len(state), 7)] + [b"model_checkpoint", b"\0" * 64]
  for content in damaged:
    write(path, content)
    assert checkpoint.latest_checkpoint(c.directory) == os.path.join(c.directory, "model.ckpt-2")
  assert c.restore().step == 2
  assert_holds(store, values[2])
  assert content_of(c.directory) == {**whole, "checkpoint": damaged[-1]}
  # The next save makes a new one, and deletes none that the old one may have listed.
  again = checkpoint.Checkpointer(c.directory, store, max_to_keep=1, asynchronous=False)
  again.save(3)
  assert [p[-1] for p in checkpoint.all_checkpoints(c.directory)] == ["1", "2", "3"]
  assert tf.train.latest_checkpoint(c.directory) == os.path.join(c.directory, "model.ckpt-3")


def test_state_file_that_names_another_checkpoint(two):
  c, store, _ = two
  c.save(3)
  path = os.path.join(c.directory, "checkpoint")
  state = open(path, "rb").read()
  at = state.index(b"ckpt-3") + len(b"ckpt-")
  write(path, flipped(state, at))  # Now it is a valid state file, for model.ckpt-2.
  assert tf.train.latest_checkpoint(c.directory)[-1] == "2"
  assert c.restore().step == 3


def test_state_file_of_tensorflow(two):
  c, _, _ = two
  prefix = os.path.join(c.directory, "model.ckpt-1")
  for paths in (["model.ckpt-2", "model.ckpt-1"], ["run#1/model.ckpt-7", prefix]):
    lines = [f'model_checkpoint_path: "{paths[-1]}"']
    lines += [f'all_model_checkpoint_paths: "{p}"' for p in paths]
    write(os.path.join(c.directory, "checkpoint"), "\n".join(lines).encode())
    assert checkpoint.latest_checkpoint(c.directory) == prefix


def test_damage_of_all(two):
  c, store, _ = two
  before = {v.name: v.numpy() for v in store}
  for n in "12":
    path = os.path.join(c.directory, f"model.ckpt-{n}{DATA[1]}")
    write(path, flipped(open(path, "rb").read(), n == "1" and 5))
  with pytest.raises(errors.CheckpointError) as e:
    c.restore()
  for n in "12":
    assert f"model.ckpt-{n}{DATA[1]} has " in str(e.value)
  with pytest.raises(checkpoint.DamagedCheckpointError, match="all checkpoints in"):
    checkpoint.latest_checkpoint(c.directory)
  assert_holds(store, before)


@pytest.mark.parametrize("suffix", [".index", *DATA])
def test_damage_without_manifest(two, suffix):
  # TensorFlow's checksums are for tensors; damage shows when these are read.
  c, store, values = two
  prefix = os.path.join(c.directory, "model.ckpt-2")
  for n in "12":
    os.remove(os.path.join(c.directory, f"model.ckpt-{n}.manifest"))
  whole = open(prefix + suffix, "rb").read()
  for damaged in (flipped(whole, len(whole) // 3), whole[:-1], b""):
    write(prefix + suffix, damaged)
    fill(store, 9)
    assert c.restore().step == 1
    assert_holds(store, values[1])
    with pytest.raises(checkpoint.DamagedCheckpointError, match=re.escape(prefix + suffix[:5])):
      c.restore(prefix)


@pytest.mark.parametrize("data", DATA)
def test_tensors_without_manifest_are_read_before_it_is_taken(data, two, monkeypatch, caplog):
  """Damage of the newest is found by who looks for it, and no variable is set from it."""
  c, store, values = two
  prefix = os.path.join(c.directory, "model.ckpt-2")
  for n in "12":
    os.remove(os.path.join(c.directory, f"model.ckpt-{n}.manifest"))
  assert c.latest() == checkpoint.latest_checkpoint(c.directory) == prefix
  whole = open(prefix + data, "rb").read()
  set_from = []
  read_slices = reader.read_slices
  monkeypatch.setattr(
    reader,
    "read_slices",
    lambda path, requests: set_from.append(path) or read_slices(path, requests),
  )
  fill(store, 9)
  # Every byte is of some tensor, and each has a checksum.
  for position in range(0, len(whole), 7):
    write(prefix + data, flipped(whole, position, position % 8))
    (damage,) = checkpoint.verify(prefix)
    assert f"cannot read {prefix}{data}: " in str(damage)
  caplog.clear()
  assert c.latest() == checkpoint.latest_checkpoint(c.directory) == prefix[:-1] + "1"
  for record in caplog.records:
    assert record.levelno == logging.WARNING and f"{prefix}{data}: " in record.getMessage()
  assert len(caplog.records) == 2
  assert c.restore().step == 1
  assert set_from == [prefix[:-1] + "1"]
  assert_holds(store, values[1])


def test_tensors_are_read_within_a_buffer(cpu_devices, tmp_path, monkeypatch):
  """Slices of ours, and whole tensors of TensorFlow's, of all kinds; once while nothing changes."""
  monkeypatch.setattr(reader, "READ_AT_ONCE", 600)
  values = {
    "a": tf.ones([100], tf.float16),
    "b/c": tf.constant(["x", "yz"]),
    "d": tf.constant(True),
    "e": tf.zeros([0, 3]),
    "f": tf.range(150),
    "\N{SNOWMAN}": tf.range(10),
  }
  names = [*values, *["rows"] * 3]
  slices = [""] * len(values) + [f"300 2 {i},{n}:-" for i, n in ((0, 10), (10, 48), (58, 242))]
  tensors = [*values.values(), *[tf.ones([n, 2]) for n in (10, 48, 242)]]
  path = str(tmp_path / "model.ckpt-1")
  tf.raw_ops.SaveV2(prefix=path, tensor_names=names, shape_and_slices=slices, tensors=tensors)
  for name in os.listdir(tmp_path):
    os.utime(tmp_path / name, (1e9, 1e9))
  sizes = []
  restore = tf.raw_ops.RestoreV2

  def counting(**kwargs):
    out = restore(**kwargs)
    sizes.append(
      [0 if x.dtype == tf.string else x.shape.num_elements() * x.dtype.size for x in out]
    )
    return out

  monkeypatch.setattr(tf.raw_ops, "RestoreV2", counting)
  for _ in range(2):
    assert checkpoint.verify(path) == []
  assert sorted(n for s in sizes for n in s) == [0, 0, 1, 40, 80, 200, 384, 600, 1936]
  assert all(sum(s) <= 600 or len(s) == 1 for s in sizes) and len(sizes) > 3


def test_state_file_names_what_is_not_there(two):
  c, _, _ = two
  for n, expected in ((2, "1"), (1, None)):
    for suffix in FILES:
      os.remove(os.path.join(c.directory, f"model.ckpt-{n}{suffix}"))
    if expected:
      assert checkpoint.latest_checkpoint(c.directory)[-1] == expected
  with pytest.raises(checkpoint.DamagedCheckpointError, match="names .*-2 as the newest"):
    checkpoint.latest_checkpoint(c.directory)


def test_training_goes_on_after_damage(two, cpu_devices):
  c, store, values = two
  path = os.path.join(c.directory, f"model.ckpt-2{DATA[0]}")
  write(path, open(path, "rb").read()[:-3])
  c.restore()
  new = fill(store, 5)
  c.save(2)
  assert not checkpoint.verify(os.path.join(c.directory, "model.ckpt-2"))
  other = make_store(cpu_devices, "4")
  assert checkpoint.Checkpointer(c.directory, other).restore().step == 2
  assert_holds(other, new)


def test_renamed_and_copied(two, tmp_path):
  c, store, values = two
  for suffix in FILES:
    os.rename(os.path.join(c.directory, f"model.ckpt-2{suffix}"), tmp_path / f"best{suffix}")
  best = str(tmp_path / "best")
  assert not checkpoint.verify(best)
  fill(store, 9)
  assert c.restore(best).step == 2
  assert_holds(store, values[2])
  os.truncate(best + DATA[0], 10)
  with pytest.raises(errors.CheckpointError, match=re.escape(best + DATA[0]) + " is truncated"):
    c.restore(best)


def test_files_are_not_read_again_while_they_do_not_change(two, monkeypatch):
  c, _, _ = two
  path = os.path.join(c.directory, "model.ckpt-2")
  read = []
  real = verification.measure
  monkeypatch.setattr(verification, "measure", lambda p, s: read.append(s) or real(p, s))
  for name in os.listdir(c.directory):
    os.utime(os.path.join(c.directory, name), (1e9, 1e9))
  for _ in range(3):
    assert not checkpoint.verify(path)
  assert sorted(read) == sorted(f for f in FILES if f != ".manifest")
  content = open(path + DATA[1], "rb").read()
  write(path + DATA[1], flipped(content, 3))
  (damage,) = checkpoint.verify(path)
  assert damage.file == path + DATA[1]


def test_content_need_not_be_checked(two):
  c, store, values = two
  path = os.path.join(c.directory, "model.ckpt-2")
  write(path + ".with-input-00000.txt", b"other")
  fill(store, 9)
  assert c.restore(path, check_content=False).step == 2
  assert_holds(store, values[2])
  np.testing.assert_array_equal(c.restore().step, 1)


def _with_head(prefix, **changes):
  """Writes a manifest anew with other values in its first line."""
  path = pathlib.Path(f"{prefix}.manifest")
  head, body = path.read_bytes().split(b"\n", 1)
  path.write_bytes(json.dumps(json.loads(head) | changes).encode() + b"\n" + body)


@pytest.mark.parametrize("check_content", [True, False])
def test_a_newer_format_is_no_damage(two, check_content):
  c, _, _ = two
  newest = c.latest()
  _with_head(newest, format=2)
  message = "model.ckpt-.*was written by a newer version: format 2, this one reads up to 1; update"
  for use in (
    lambda: checkpoint.latest_checkpoint(c.directory),
    lambda: checkpoint.verify(newest),
    c.latest,
    lambda: c.restore(check_content=check_content),
    lambda: c.restore(path=newest, check_content=check_content),
  ):
    with pytest.raises(errors.CheckpointError, match=message) as e:
      use()
    assert isinstance(e.value, errors.NewerFormatError)
    assert not isinstance(e.value, errors.DamagedCheckpointError)


BODIES = {
  "brackets": b'{"files": ' + b"[" * 100_000,
  "number": b'{"files": [{"file": ".index", "bytes": 1e999, "crc32": "00000000"}]}',
  "kind": b'{"files": [{"file": 7, "bytes": 1, "crc32": "00000000"}]}',
  "crc": b'{"files": [{"file": ".index", "bytes": 1, "crc32": 7}]}',
  "list": b'[{"files": []}]',
  "null": b'{"files": null}',
  "digits": b'{"files": [{"file": ".index", "bytes": ' + b"9" * 5000 + b', "crc32": "00000000"}]}',
  "bytes": b"\xff\xfe{",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("checked", [True, False])
def test_a_manifest_of_any_text_is_damage(two, body, checked):
  c, _, _ = two
  newest = c.latest()
  head = {"format": 1, "bytes": len(body), "crc32": f"{zlib.crc32(body):08x}"}
  content = json.dumps(head).encode() + b"\n" + body if checked else body
  pathlib.Path(f"{newest}.manifest").write_bytes(content)
  found = checkpoint.latest_checkpoint(c.directory)
  assert found is not None and found != newest
  (damage,) = checkpoint.verify(newest)
  assert damage.file.endswith(".manifest") and len(str(damage)) < 1000


def test_values_of_a_checkpoint_of_another_program(tmp_path):
  path = str(tmp_path / "model.ckpt")
  tf.raw_ops.SaveV2(
    prefix=path, tensor_names=["a", "b"], shape_and_slices=["", ""],
    tensors=[tf.constant([1.0, 2.0]), tf.constant(3)],
  )  # fmt: skip
  values = checkpoint.Values(path)
  assert list(values) == ["a", "b"] and values["b"] == 3 and "c" not in values
  with pytest.raises(KeyError):
    values["c"]
  data = tmp_path / "model.ckpt.data-00000-of-00001"
  data.write_bytes(flipped(data.read_bytes(), 0))
  with pytest.raises(checkpoint.DamagedCheckpointError, match="cannot read a: .*Checksum"):
    checkpoint.Values(path)["a"]
  data.write_bytes(b"")
  with pytest.raises(checkpoint.DamagedCheckpointError, match="cannot read a"):
    checkpoint.Values(path)["a"]
  write(path + ".index", b"no index")
  with pytest.raises(checkpoint.DamagedCheckpointError, match="index"):
    checkpoint.Values(path)
