"""Checkpoints: any layout, TensorFlow's own readers, atomicity, background writing, errors."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.checkpoint import files, reader, snapshot
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.running.lowering import RUN_COUNTER
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl
from tests.checkpoint.checkpoint_stores import (
  MESHES,
  VARIABLES,
  assert_holds,
  fill,
  make_store,
  values_of,
)

# --------------------------------------------------------------------- any layout


@pytest.fixture(scope="module")
def saved_at_2x2(cpu_devices, tmp_path_factory):
  directory = str(tmp_path_factory.mktemp("saved"))
  store = make_store(cpu_devices, "2x2")
  values = fill(store, 1)
  path = checkpoint.Checkpointer(directory, store, asynchronous=False).save(7)
  return path, values


@pytest.mark.parametrize("mesh", MESHES)
def test_restores_on_any_layout(saved_at_2x2, cpu_devices, mesh):
  path, values = saved_at_2x2
  store = make_store(cpu_devices, mesh, seed=3)
  restored = checkpoint.Checkpointer("unused", store).restore(path)
  assert (restored.path, restored.step, restored.extra) == (path, 7, {})
  assert_holds(store, values)
  for stored in store:
    assert [v.device[-6:] for v in stored.slices] == [
      d[-6:] for d in cpu_devices[: len(stored.slices)]
    ]


@pytest.mark.parametrize("mesh", MESHES)
def test_written_on_any_layout_restores_on_one_device(cpu_devices, tmp_path, mesh):
  store = make_store(cpu_devices, mesh)
  values = fill(store, 2)
  with checkpoint.Checkpointer(str(tmp_path), store) as c:
    c.save(3)
  other = make_store(cpu_devices, "1", seed=3)
  assert checkpoint.Checkpointer(str(tmp_path), other).restore().step == 3
  assert_holds(other, values)


def test_tensorflow_reads_whole_tensors(saved_at_2x2):
  path, values = saved_at_2x2
  directory = os.path.dirname(path)
  assert tf.train.latest_checkpoint(directory) == path
  reader = tf.train.load_checkpoint(directory)
  shapes = reader.get_variable_to_shape_map()
  assert shapes == {
    "global_step": [],
    **{name: [n for _, n in dims] for name, (dims, *_) in VARIABLES.items()},
  }
  dtypes = reader.get_variable_to_dtype_map()
  for name, (_, master, _) in VARIABLES.items():
    assert dtypes[name] == master
    np.testing.assert_array_equal(reader.get_tensor(name).astype(np.float32), values[name])
  assert dtypes["global_step"] == tf.int64
  assert reader.get_tensor("global_step") == 7
  state = tf.train.get_checkpoint_state(directory)
  assert list(state.all_model_checkpoint_paths) == [path]


def test_replicas_are_written_once(cpu_devices, tmp_path):
  sizes = []
  for mesh in ("1", "2x2x2"):
    store = make_store(cpu_devices, mesh)
    path = checkpoint.Checkpointer(str(tmp_path / mesh), store, asynchronous=False).save(1)
    sizes.append(os.path.getsize(path + ".data-00000-of-00001"))
  assert sizes[0] == sizes[1] == 4 * (16 * 8 + 8 + 8 + 1 + 1) + 2 * 64 + 8


def test_reads_a_checkpoint_of_several_shards(cpu_devices, tmp_path):
  values = fill(make_store(cpu_devices), 4)
  prefix = str(tmp_path / "model.ckpt-12")
  parts = []
  for i, name in enumerate(values):
    parts.append(f"{prefix}_part{i}")
    tf.raw_ops.SaveV2(
      prefix=parts[-1],
      tensor_names=[name],
      shape_and_slices=[""],
      tensors=[tf.constant(values[name], tf.float64)],
    )
  tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=prefix)
  store = make_store(cpu_devices, "2x4")
  restored = checkpoint.Checkpointer(str(tmp_path), store).restore()
  assert restored.step is None
  assert_holds(store, values)
  os.remove(prefix + ".data-00003-of-00006")
  with pytest.raises(errors.CheckpointError, match="data-00003-of-00006 is missing"):
    checkpoint.Checkpointer(str(tmp_path), store).restore()


def test_reads_in_several_operations(saved_at_2x2, cpu_devices, monkeypatch):
  monkeypatch.setattr(reader, "READ_AT_ONCE", 40)
  path, values = saved_at_2x2
  store = make_store(cpu_devices, "2x2 other")
  checkpoint.Checkpointer("unused", store).restore(path)
  assert_holds(store, values)


@pytest.mark.parametrize(
  "first, then",
  [
    ((PlacementMeshImpl, "2x2"), (PlacementMeshImpl, "2x4")),
    ((SimdMeshImpl, "2x2"), (PlacementMeshImpl, "1")),
    ((PlacementMeshImpl, "2x4"), (SimdMeshImpl, "4")),
  ],
)
def test_a_program_trains_saves_and_resumes(cpu_devices, tmp_path, first, then):
  def program(implementation, mesh):
    shape, layout, size = MESHES[mesh]
    impl = implementation(shape, layout, cpu_devices[:size])
    spec = mtf.TensorSpec([mtf.Dimension("d_model", 8)], tf.float32)
    return impl.variable_store, mtf.function(impl, input_signature=[spec])(noisy_step)

  x = np.arange(8, dtype=np.float32)
  store, step = program(*first)
  losses = [float(step(x)) for _ in range(3)]
  with checkpoint.Checkpointer(str(tmp_path), store) as c:
    c.save(3)
    losses += [float(step(x)) for _ in range(3)]
  # Each step draws new noise, so the run's counter must continue too.
  store, step = program(*then)
  step(x)
  assert RUN_COUNTER in store
  checkpoint.Checkpointer(str(tmp_path), store).restore()
  np.testing.assert_allclose([float(step(x)) for _ in range(3)], losses[3:], rtol=1e-5)
  assert len(set(losses)) == 6


def noisy_step(x):
  dims = [mtf.Dimension("d_model", 8), mtf.Dimension("d_ff", 8)]
  w = mtf.get_variable(x.mesh, "w", dims)
  noise = mtf.random_uniform(x.mesh, dims)
  mtf.assign_add(w, noise)
  return mtf.reduce_sum(mtf.einsum([x, w + noise], output_shape=dims[1:]))


# ------------------------------------------------------------------------- naming


def test_names_and_steps(tmp_path):
  assert checkpoint.get_step_from_path("/a/b/model.ckpt-120") == 120
  assert checkpoint.get_step_from_path("model.ckpt-7.index") == 7
  with pytest.raises(errors.CheckpointError, match="no step in 'dir/model.ckpt'"):
    checkpoint.get_step_from_path("dir/model.ckpt")
  assert checkpoint.latest_checkpoint(str(tmp_path / "nowhere")) is None
  assert checkpoint.all_checkpoints(str(tmp_path / "nowhere")) == []
  for n in (9, 10, 100):
    tf.raw_ops.SaveV2(
      prefix=str(tmp_path / f"model.ckpt-{n}"),
      tensor_names=["a"],
      shape_and_slices=[""],
      tensors=[tf.constant(1)],
    )
  (tmp_path / "model.ckpt-200.data-00000-of-00001").write_text("")
  expected = [str(tmp_path / f"model.ckpt-{n}") for n in (9, 10, 100)]
  assert checkpoint.all_checkpoints(str(tmp_path)) == expected
  assert checkpoint.latest_checkpoint(str(tmp_path)) == expected[-1]


def test_relative_folder_can_be_moved(cpu_devices, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  store = make_store(cpu_devices)
  values = fill(store, 1)
  c = checkpoint.Checkpointer("run", store, asynchronous=False)
  assert c.save(1) == os.path.join("run", "model.ckpt-1")
  assert checkpoint.latest_checkpoint("run") == os.path.join("run", "model.ckpt-1")
  os.rename("run", "moved")
  fill(store, 2)
  checkpoint.Checkpointer("moved", store).restore()
  assert_holds(store, values)
  for path in ("moved", "moved/model.ckpt-1", "moved/model.ckpt-1.index"):
    assert checkpoint.resolve(path) == "moved/model.ckpt-1"
  monkeypatch.chdir("moved")
  assert checkpoint.Checkpointer("..", store).restore("model.ckpt-1").step == 1


def test_extra_values(cpu_devices, tmp_path):
  store = make_store(cpu_devices)
  c = checkpoint.Checkpointer(str(tmp_path), store, asynchronous=False)
  c.save(5, extra={"examples": np.int64(2**40), "rate": tf.constant([0.5, 2.0]), "name": "abc"})
  extra = c.restore().extra
  assert sorted(extra) == ["examples", "name", "rate"]
  assert extra["examples"] == 2**40 and extra["name"] == b"abc"
  np.testing.assert_array_equal(extra["rate"], [0.5, 2.0])


def test_attachments(cpu_devices, tmp_path):
  def write(prefix):
    tf.train.Checkpoint(step=tf.Variable(3)).write(prefix)

  store = make_store(cpu_devices)
  c = checkpoint.Checkpointer(str(tmp_path), store, max_to_keep=1)
  path = c.save(5, attachments={"input": write})
  c.wait()
  step = tf.Variable(0)
  tf.train.Checkpoint(step=step).read(checkpoint.attachment(path, "input")).assert_consumed()
  assert step.numpy() == 3
  assert checkpoint.all_checkpoints(str(tmp_path)) == [path]
  assert c.restore().step == 5
  # They go with their checkpoint.
  c.save(6)
  c.wait()
  assert not [n for n in os.listdir(tmp_path) if "-5" in n]

  def disk_is_full(prefix):
    write(prefix)
    raise OSError("no space")

  c.save(7, attachments={"input": disk_is_full})
  with pytest.raises(errors.CheckpointError, match="model.ckpt-7 in .*: no space"):
    c.wait()
  assert not [n for n in os.listdir(tmp_path) if "-7" in n]


def test_old_ones_are_deleted(cpu_devices, tmp_path):
  store = make_store(cpu_devices)
  c = checkpoint.Checkpointer(str(tmp_path), store, max_to_keep=2)
  for step in (1, 2, 3, 10):
    c.save(step)
  c.wait()
  names = [os.path.basename(p) for p in checkpoint.all_checkpoints(str(tmp_path))]
  assert names == ["model.ckpt-3", "model.ckpt-10"]
  assert len(os.listdir(tmp_path)) == 7
  # Also those of an earlier run, but never a file that is not listed.
  (tmp_path / "model.ckpt-1.index").write_text("copied here by hand")
  os.remove(tmp_path / "model.ckpt-3.index")
  c = checkpoint.Checkpointer(str(tmp_path), store, max_to_keep=2, asynchronous=False)
  c.save(11)
  c.save(12)
  names = [os.path.basename(p) for p in checkpoint.all_checkpoints(str(tmp_path))]
  assert names == ["model.ckpt-1", "model.ckpt-11", "model.ckpt-12"]
  state = tf.train.get_checkpoint_state(str(tmp_path))
  assert [os.path.basename(p) for p in state.all_model_checkpoint_paths] == names[1:]
  with pytest.raises(errors.CheckpointError, match="max_to_keep"):
    checkpoint.Checkpointer(str(tmp_path), store, max_to_keep=0)


def test_one_for_each_hours_is_kept(cpu_devices, tmp_path, monkeypatch):
  now = [1000.0]
  monkeypatch.setattr(time, "time", lambda: now[0])
  store = make_store(cpu_devices)
  for start in (0, 6):  # The second half is another run.
    c = checkpoint.Checkpointer(
      str(tmp_path), store, max_to_keep=1, keep_every_n_hours=2, asynchronous=False
    )
    for i in range(start, start + 6):
      now[0] = 1000.0 + 3600 * i
      c.save(i)
  steps = [checkpoint.get_step_from_path(p) for p in checkpoint.all_checkpoints(str(tmp_path))]
  assert steps == [2, 4, 6, 8, 10, 11]
  # The clock was a year ahead, and is set right.
  now[0] += 365 * 86400
  c.save(12)
  now[0] -= 365 * 86400
  for i in range(13, 21):
    now[0] += 3600
    c.save(i)
  steps = [checkpoint.get_step_from_path(p) for p in checkpoint.all_checkpoints(str(tmp_path))]
  assert steps[5:] == [12, 16, 18, 20]


def test_going_back_to_an_older_step(cpu_devices, tmp_path):
  store = make_store(cpu_devices)
  c = checkpoint.Checkpointer(str(tmp_path), store, asynchronous=False)
  first = fill(store, 1)
  c.save(1)
  c.save(2)
  c.restore(str(tmp_path / "model.ckpt-1"))
  values = fill(store, 2)
  c.save(1)
  assert checkpoint.latest_checkpoint(str(tmp_path)).endswith("-1")
  state = tf.train.get_checkpoint_state(str(tmp_path))
  assert [p[-1] for p in state.all_model_checkpoint_paths] == ["2", "1"]
  c.restore()
  assert_holds(store, values)
  c.restore(str(tmp_path / "model.ckpt-2"))
  assert_holds(store, first)


def test_only_checkpoint_is_replaced(cpu_devices, tmp_path):
  store = make_store(cpu_devices)
  c = checkpoint.Checkpointer(str(tmp_path), store, asynchronous=False)
  c.save(1)
  values = fill(store, 2)
  c.save(1)
  fill(store, 3)
  c.restore()
  assert_holds(store, values)


# --------------------------------------------------------------------- background


@pytest.mark.parametrize("held", ["small", "in memory", "in a file"])
def test_later_updates_do_not_reach_a_save_under_way(cpu_devices, tmp_path, monkeypatch, held):
  store = make_store(cpu_devices, "2x2")
  if held != "small":
    monkeypatch.setattr(snapshot, "TRANSFER_BUFFER", 64)
  values = fill(store, 1)
  go, save = threading.Event(), tf.raw_ops.SaveV2

  def slow(**kwargs):
    assert go.wait(60)
    return save(**kwargs)

  monkeypatch.setattr(tf.raw_ops, "SaveV2", slow)
  c = checkpoint.Checkpointer(str(tmp_path), store, snapshot_in_memory=held == "in memory")
  c.save(1)
  open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors()]
  assert any(f.startswith(str(tmp_path)) for f in open_files) == (held == "in a file")
  for stored in store:
    for v in stored.slices:
      v.assign_add(tf.ones_like(v))
      tf.raw_ops.ResourceApplyGradientDescent(
        var=v.handle, alpha=tf.ones([], v.dtype), delta=tf.ones_like(v)
      ) if v.dtype == tf.float32 else None
      if v.shape.rank:
        v.scatter_nd_add([[0]], tf.ones_like(v)[:1])
  assert checkpoint.latest_checkpoint(str(tmp_path)) is None
  go.set()
  c.restore()
  assert_holds(store, values)


def _descriptors():
  return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_save_is_written_and_released_group_by_group(
  cpu_devices, tmp_path, monkeypatch, in_memory
):
  monkeypatch.setattr(snapshot, "TRANSFER_BUFFER", 64)
  store = make_store(cpu_devices, "2x2")
  values = fill(store, 1)
  saves, written, real = [], [], tf.raw_ops.SaveV2

  def save(**kwargs):
    assert not [r for r in written if r() is not None], "what is written is still held"
    written.extend(weakref.ref(t) for t in kwargs["tensors"])
    saves.append(sum(t.shape.num_elements() * t.dtype.size for t in kwargs["tensors"]))
    return real(**kwargs)

  monkeypatch.setattr(tf.raw_ops, "SaveV2", save)
  c = checkpoint.Checkpointer(str(tmp_path), store, snapshot_in_memory=in_memory)
  c.save(1)
  c.wait()
  assert len(saves) > 10 and max(saves) <= 64
  path = checkpoint.latest_checkpoint(str(tmp_path))
  assert len(tf.io.gfile.glob(path + ".data-*")) == len(saves)
  reader = tf.train.load_checkpoint(path)
  for name, value in values.items():
    np.testing.assert_array_equal(reader.get_tensor(name).astype(np.float32), value)
  fill(store, 2)
  c.restore()
  assert_holds(store, values)


def test_saves_that_follow_one_another_use_one_file(cpu_devices, tmp_path, monkeypatch):
  monkeypatch.setattr(snapshot, "TRANSFER_BUFFER", 64)
  store = make_store(cpu_devices, "2x2")
  with checkpoint.Checkpointer(str(tmp_path), store) as c:
    values, files = {}, set()
    for step in (1, 2, 3):
      values[step] = fill(store, step)
      c.save(step)
      files.add(id(c._copies.spool))
      os.posix_fallocate(c._copies.spool._file.fileno(), 0, 10_000)
    assert len(files) == 1
    file = c._copies.spool._file
  assert file.closed
  for step in (1, 2, 3):
    c.restore(str(tmp_path / f"model.ckpt-{step}"))
    assert_holds(store, values[step])


def test_without_room_for_a_copy_the_save_is_not_in_the_background(
  cpu_devices, tmp_path, monkeypatch, caplog
):
  """A folder that is not there stands for a full disk: both raise an OSError."""
  monkeypatch.setattr(snapshot, "TRANSFER_BUFFER", 64)
  store = make_store(cpu_devices, "2x2")
  values = fill(store, 1)
  nowhere = str(tmp_path / "nowhere")
  c = checkpoint.Checkpointer(str(tmp_path), store, snapshot_directory=nowhere)
  path = c.save(1)
  assert checkpoint.verify(path) == []
  assert f"no copy of the values of step 1 can be made in {nowhere}: " in caplog.text
  fill(store, 2)
  c.restore()
  assert_holds(store, values)


def test_a_disk_that_gets_full_while_the_copy_is_made(cpu_devices, tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(snapshot, "TRANSFER_BUFFER", 64)
  store = make_store(cpu_devices, "2x2")
  values = fill(store, 1)
  append, spools = snapshot.Spool.append, []

  def full(spool, array):
    spools.append(spool)
    if len(spools) > 3:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return append(spool, array)

  monkeypatch.setattr(snapshot.Spool, "append", full)
  c = checkpoint.Checkpointer(str(tmp_path), store)
  c.save(1)
  assert c._thread is None and spools[0]._file.closed
  assert "No space left on device" in caplog.text
  fill(store, 2)
  c.restore()
  assert_holds(store, values)


def test_error_of_the_thread_is_raised_by_the_next_call(cpu_devices, tmp_path, monkeypatch):
  store = make_store(cpu_devices)
  c = checkpoint.Checkpointer(str(tmp_path), store)
  c.save(1)
  c.wait()
  real = tf.raw_ops.SaveV2

  def full(**kwargs):
    real(**kwargs)
    raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

  for next_call in (c.wait, lambda: c.save(4), c.restore):
    monkeypatch.setattr(tf.raw_ops, "SaveV2", full)
    c.save(2)
    c._thread.join()
    monkeypatch.setattr(tf.raw_ops, "SaveV2", real)
    with pytest.raises(
      errors.CheckpointError,
      match=r"cannot write checkpoint model.ckpt-2 in .*: No space left .*earlier .* untouched",
    ):
      next_call()
    assert sorted(os.listdir(tmp_path)) == [
      "checkpoint",
      "model.ckpt-1.data-00000-of-00001",
      "model.ckpt-1.index",
      "model.ckpt-1.manifest",
    ]
  c.save(3)
  c.wait()
  assert c.restore().step == 3


def test_files_are_read_and_written_on_the_first_cpu(cpu_devices, tmp_path, monkeypatch):
  """Where threads may run operations next to those of a mesh; see `workers.host_device`."""
  used = []

  def recording(op, name):
    def call(**kwargs):
      used.append((name, tf.constant(0).device[-5:]))
      return op(**kwargs)

    return call

  for name in ("SaveV2", "MergeV2Checkpoints", "RestoreV2"):
    monkeypatch.setattr(tf.raw_ops, name, recording(getattr(tf.raw_ops, name), name))
  c = checkpoint.Checkpointer(str(tmp_path), make_store(cpu_devices, "2x2"))
  with tf.device(cpu_devices[1]):
    assert tf.constant(0).device.endswith("CPU:1")
    path = c.save(1, asynchronous=False)
    os.remove(path + ".manifest")
    assert c.latest() == path
    c.restore()
  assert dict(used) == dict.fromkeys(["SaveV2", "MergeV2Checkpoints", "RestoreV2"], "CPU:0")
  assert {device for _, device in used} == {"CPU:0"}


def test_synchronous_save_raises_at_once(cpu_devices, tmp_path):
  (tmp_path / "file").write_text("")
  c = checkpoint.Checkpointer(str(tmp_path / "file" / "run"), make_store(cpu_devices))
  with pytest.raises(errors.CheckpointError, match="cannot write .* model.ckpt-1 in .*/run"):
    c.save(1, asynchronous=False)
  c.wait()


# --------------------------------------------------------------------- strictness


def test_one_message_with_everything_that_does_not_fit(saved_at_2x2, cpu_devices):
  path, values = saved_at_2x2
  changed = {
    **{k: v for k, v in VARIABLES.items() if "layer/scale" not in k},
    "transformer/embedding": ([("vocab", 16), ("d_model", 4)], tf.float32, tf.float32),
    "transformer/steps": ([("n", 1)], tf.int32, tf.int32),
    "transformer/new": ([("d_model", 4)], tf.float32, tf.float32),
    "transformer/other": ([], tf.float32, tf.float32),
  }
  store = make_store(cpu_devices, "1", changed)
  before = values_of(store)
  c = checkpoint.Checkpointer("unused", store)
  with pytest.raises(errors.CheckpointError) as e:
    c.restore(path)
  assert str(e.value) == "\n".join(
    [
      f"checkpoint {path} is not of this model:",
      "  missing in the checkpoint (2):",
      "    transformer/new [4]",
      "    transformer/other []",
      "  in the checkpoint but not in the model (2):",
      "    transformer/layer/scale (8,)",
      "    transformer/layer/scale_slot_v (8,)",
      "  of another shape or kind (2):",
      "    transformer/embedding: (16, 8) in the checkpoint, [vocab:16, d_model:4] in the model",
      "    transformer/steps: () in the checkpoint, [n:1] in the model",
    ]
  )
  assert_holds(store, before)
  with pytest.raises(errors.CheckpointError) as e:
    c.restore(path, ignore_missing=True, ignore_unexpected=True)
  assert len(str(e.value).split("\n")) == 4


def test_parts_can_be_ignored(saved_at_2x2, cpu_devices):
  path, values = saved_at_2x2
  fewer = {k: v for k, v in VARIABLES.items() if "slot" not in k}
  store = make_store(cpu_devices, "2x2", {**fewer, "new": ([], tf.float32, tf.float32)})
  store["new"].assign(5.0)
  c = checkpoint.Checkpointer("unused", store)
  with pytest.raises(errors.CheckpointError, match=r"new \[\]\n  in the.*\n    \S+v "):
    c.restore(path)
  c.restore(path, ignore_missing=True, ignore_unexpected=True)
  assert_holds(store, {**{k: values[k] for k in fewer}, "new": np.float32(5)})


def test_names_can_be_mapped_and_chosen(saved_at_2x2, cpu_devices):
  path, values = saved_at_2x2
  store = make_store(
    cpu_devices,
    "2x2",
    {
      "student/scale": VARIABLES["transformer/layer/scale"],
      "student/kernel": VARIABLES["transformer/layer/scale"],
    },
  )
  before = values_of(store)
  c = checkpoint.Checkpointer("unused", store)
  mapping = {"student/scale": "transformer/layer/scale", "student/kernel": "nowhere"}.__getitem__
  with pytest.raises(errors.CheckpointError, match=r"student/kernel \(as nowhere\) \[8\]"):
    c.restore(path, name_in_checkpoint=mapping, ignore_unexpected=True)
  c.restore(
    path,
    name_in_checkpoint=mapping,
    should_restore=lambda n: n.endswith("scale"),
    ignore_unexpected=True,
  )
  np.testing.assert_array_equal(store["student/scale"].numpy(), values["transformer/layer/scale"])
  np.testing.assert_array_equal(store["student/kernel"].numpy(), before["student/kernel"])
  with pytest.raises(errors.CheckpointError, match="no variable to restore"):
    c.restore(path, should_restore=lambda n: False)


def test_report_of_what_matched(saved_at_2x2, cpu_devices):
  path, values = saved_at_2x2
  store = make_store(
    cpu_devices,
    "2x2",
    {
      "transformer/embedding": VARIABLES["transformer/embedding"],
      "transformer/layer/scale": ([("d_model", 4)], tf.float32, tf.float32),
      "student/scale": VARIABLES["transformer/layer/scale"],
      "new": ([], tf.float32, tf.float32),
    },
  )
  before = values_of(store)
  c = checkpoint.Checkpointer("unused", store)
  restored = c.restore(
    path,
    name_in_checkpoint=lambda n: n.replace("student/", "transformer/layer/"),
    ignore_missing=True,
    ignore_unexpected=True,
    ignore_mismatched=True,
  )
  assert restored.report() == "\n".join(
    [
      f"{path}: 2 variables restored",
      "  of these under another name (1):",
      "    student/scale (as transformer/layer/scale)",
      "  not in the checkpoint, unchanged (1):",
      "    new",
      "  of another shape or kind, unchanged (1):",
      "    transformer/layer/scale: (8,) in the checkpoint, [d_model:4] in the model",
      "  in the checkpoint, not used (4):",
      "    transformer/layer/scale_slot_v",
      "    transformer/layer/wi/kernel",
      "    transformer/steps",
      "    transformer/temperature",
    ]
  )
  assert restored.matched == {
    "transformer/embedding": "transformer/embedding",
    "student/scale": "transformer/layer/scale",
  }
  before["transformer/embedding"] = values["transformer/embedding"]
  before["student/scale"] = values["transformer/layer/scale"]
  assert_holds(store, before)


def test_run_counter_may_be_missing_or_unexpected(cpu_devices, tmp_path):
  counter = {RUN_COUNTER: ([], tf.int32, tf.int32)}
  with_counter = make_store(cpu_devices, "1", {**VARIABLES, **counter})
  without = make_store(cpu_devices, "1")
  with_counter[RUN_COUNTER].assign(5)
  for i, (a, b) in enumerate([(with_counter, without), (without, with_counter)]):
    checkpoint.Checkpointer(str(tmp_path / str(i)), a, asynchronous=False).save(1)
    checkpoint.Checkpointer(str(tmp_path / str(i)), b).restore()
  assert with_counter[RUN_COUNTER].numpy() == 5
  with_counter[RUN_COUNTER].assign(9)
  c = checkpoint.Checkpointer(str(tmp_path / "0"), with_counter)
  # Weights for another run: its counter is its own.
  c.restore(name_in_checkpoint=lambda n: n)
  assert with_counter[RUN_COUNTER].numpy() == 9
  c.restore()
  assert with_counter[RUN_COUNTER].numpy() == 5


def test_several_stores(cpu_devices, tmp_path):
  counter = {RUN_COUNTER: ([], tf.int32, tf.int32)}
  a = make_store(cpu_devices, "2x2", {"a": ([("d_ff", 8)], tf.float32, tf.float32), **counter})
  b = make_store(cpu_devices, "1", {"b": ([("d_ff", 8)], tf.float32, tf.float32), **counter})
  values = fill(a, 1), fill(b, 2)
  c = checkpoint.Checkpointer(str(tmp_path), [a, b])
  c.save(1)
  fill(a, 3), fill(b, 4)
  c.restore()
  assert_holds(a, values[0])
  assert_holds(b, values[1])
  with pytest.raises(errors.CheckpointError, match="variable a is in two"):
    checkpoint.Checkpointer(str(tmp_path), [a, a]).save(1)


def test_global_step_variable(cpu_devices, tmp_path):
  step = {"global_step": ([], tf.int64, tf.int64)}
  store = make_store(cpu_devices, "2x2", {**VARIABLES, **step})
  store["global_step"].assign(tf.constant(4, tf.int64))
  c = checkpoint.Checkpointer(str(tmp_path), store)
  with pytest.raises(errors.CheckpointError, match=r"save\(step=5\): .* global_step is 4"):
    c.save(5)
  c.save(4)
  store["global_step"].assign(tf.constant(9, tf.int64))
  assert c.restore().step == 4
  assert store["global_step"].numpy() == 4


def test_empty_store(saved_at_2x2, tmp_path):
  c = checkpoint.Checkpointer(str(tmp_path), VariableStore())
  with pytest.raises(errors.CheckpointError, match="lower the program"):
    c.save(1)
  with pytest.raises(errors.CheckpointError, match="lower the program"):
    c.restore(saved_at_2x2[0])


def test_text_in_place_of_numbers(cpu_devices, tmp_path):
  store = make_store(cpu_devices, "1", {"a": ([], tf.float32, tf.float32)})
  tf.raw_ops.SaveV2(
    prefix=str(tmp_path / "model.ckpt-1"),
    tensor_names=["a"],
    shape_and_slices=[""],
    tensors=[tf.constant("text")],
  )
  with pytest.raises(errors.CheckpointError, match="a: string in the checkpoint, float32 here"):
    checkpoint.Checkpointer(str(tmp_path), store).restore()


# ------------------------------------------------------------------- no or damaged


def test_no_checkpoint(cpu_devices, tmp_path):
  store = make_store(cpu_devices)
  c = checkpoint.Checkpointer(str(tmp_path / "run"), store, asynchronous=False)
  for path, message in [
    (str(tmp_path), "there is no checkpoint in "),
    (None, "there is no checkpoint in .*/run$"),
    (str(tmp_path / "x" / "model.ckpt-1"), "there is no folder "),
    (str(tmp_path / "model.ckpt-1"), "model.ckpt-1.index is missing; there is no other"),
  ]:
    with pytest.raises(errors.CheckpointError, match=message):
      c.restore(path)
  c.save(5)
  with pytest.raises(errors.CheckpointError, match="others in that folder: model.ckpt-5; give"):
    c.restore(str(tmp_path / "run" / "model.ckpt-4"))


def test_describe(saved_at_2x2):
  found = checkpoint.describe(os.path.dirname(saved_at_2x2[0]))
  assert found["transformer/layer/wi/kernel"] == tf.TensorSpec(
    [8, 8], tf.bfloat16, "transformer/layer/wi/kernel"
  )
  assert set(found) == {*VARIABLES, "global_step"}


def test_remains_of_others_stay(tmp_path):
  data = ".data-00000-of-00001"
  keep = ["events.out", "model.ckpt-1.index", f"model.ckpt-1{data}", f"x{data}"]
  for name in [*keep, f"model.ckpt-2{data}", ".unfinished-checkpoint"]:
    (tmp_path / name).write_text("")
  (tmp_path / ".unfinished-model.ckpt-3").mkdir()
  (tmp_path / ".unfinished-model.ckpt-3" / "file").write_text("")
  files.remove_remains(str(tmp_path))
  assert sorted(os.listdir(tmp_path)) == sorted(keep)


def _many_dims(count):
  inner = [(f"x{i}", 2) for i in range(count - 2)]
  return {"v": ([("d_model", 8), *inner, ("d_ff", 8)], tf.float32, tf.float32)}


@pytest.mark.parametrize(
  "count,old,new", [(8, "2x2", "2x2 other"), (8, "1", "2x2x2"), (9, "1", "1")]
)
def test_variables_of_many_dimensions(cpu_devices, tmp_path, count, old, new):
  store = make_store(cpu_devices, old, _many_dims(count))
  values = fill(store, 1)
  checkpoint.Checkpointer(str(tmp_path), store, asynchronous=False).save(1)
  other = make_store(cpu_devices, new, _many_dims(count), seed=3)
  checkpoint.Checkpointer(str(tmp_path), other).restore()
  assert_holds(other, values)


def test_slices_of_nine_dimensions_are_refused(cpu_devices, tmp_path):
  """TensorFlow would abort the process."""
  variables = _many_dims(9)
  whole = make_store(cpu_devices, "1", variables)
  checkpoint.Checkpointer(str(tmp_path), whole, asynchronous=False).save(1)
  split = make_store(cpu_devices, "2x2", variables)
  with pytest.raises(errors.CheckpointError, match="variable v .* at most 8 dimensions"):
    checkpoint.Checkpointer(str(tmp_path), split).restore()
  with pytest.raises(errors.CheckpointError, match="variable v .* at most 8 dimensions"):
    checkpoint.Checkpointer(str(tmp_path / "other"), split, asynchronous=False).save(1)
