"""What each of two workers does in test_checkpoint_workers.py: saves, restores, fails together.

Arguments: what to do ("together", "killed" or "apart"), the folder of the checkpoints, a checkpoint
of another mesh to start from.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, errors, workers
from mesh_tensorflow.checkpoint import shared_folder, writer

SHAPES = {"a": [("x", 8), ("y", 4)], "b": [("y", 4)], "c": [("x", 8), ("z", 6)]}
MESH, LAYOUT = "rows:2,cols:2", "x:rows,y:cols"


def values(step):
  """What the variables hold at a step."""
  return {
    name: np.random.default_rng([step, i]).standard_normal([n for _, n in dims]).astype("float32")
    for i, (name, dims) in enumerate(SHAPES.items())
  }


def set_all(store, step):
  for name, value in values(step).items():
    store[name].assign(value)


def assert_all(store, step):
  for name, value in values(step).items():
    stored = store[name]
    assert len(stored.slices) == 2
    for begin, v in zip(stored.begins, stored.slices):
      part = tuple(slice(b, b + n) for b, n in zip(begin, stored.slice_shape))
      np.testing.assert_array_equal(v.numpy(), value[part])


def expect(kind, words, call):
  try:
    call()
  except kind as e:
    assert words in str(e), str(e)
  else:
    raise AssertionError(f"no {kind.__name__} with {words!r}")


def together(folder, other_mesh, impl, train):
  me = workers.current().index
  store = impl.variable_store
  c = checkpoint.Checkpointer(folder, store, max_to_keep=3)
  assert c.latest() is None
  expect(errors.CheckpointError, "there is no checkpoint in", c.restore)

  # Each reads its own slices of what one process wrote on another mesh.
  assert c.restore(other_mesh).step == 5
  assert_all(store, 5)
  expect(errors.VariableError, "is split over several workers", store["a"].numpy)
  np.testing.assert_array_equal(store["b"].numpy(), values(5)["b"])

  # Training goes on while all write; what a killed run left in the folder does not confuse them.
  written = count_writes()
  c.save(1, extra={"number": 7}, attachments={"input": write_text(f"of {me}")})
  for _ in range(20):
    train()
  c.wait()
  assert written == [["a", "c"] if me else ["a", "b", "c", "global_step", "_extra/number"]], written
  assert c.latest() == os.path.join(folder, "model.ckpt-1")
  restored = c.restore()
  assert (restored.step, restored.extra) == (1, {"number": 7})
  assert_all(store, 5)
  with open(checkpoint.attachment(restored.path, "input")) as f:
    assert f.read() == f"of {me}"

  # The disk of worker 1 is full: all are told so, and nothing changes.
  before = content_of(folder)
  workers.barrier()  # Nobody begins to write before all have looked.
  set_all(store, 6)
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  if me == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, -1))
  c.save(2)
  expect(
    errors.CheckpointError, f"cannot write checkpoint model.ckpt-2 in {folder}: worker 1", c.wait
  )
  resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, -1))
  workers.barrier()  # The chief removes what is left when all know.
  assert content_of(folder) == before
  workers.barrier()
  if me == 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, -1))
  expect(errors.CheckpointError, ": worker 0", lambda: c.save(2, asynchronous=False))
  resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, -1))
  workers.barrier()
  assert content_of(folder) == before
  workers.barrier()
  c.save(2)
  set_all(store, 9)
  c.restore()
  assert_all(store, 6)

  # One damaged byte, in the part of either: the one before is used by all.
  for shard in (0, 1):
    path = os.path.join(folder, f"model.ckpt-2.data-0000{shard}-of-00002")
    if me == 0:
      flip(path)
    workers.barrier()
    expect(errors.CheckpointError, path, lambda: c.restore(os.path.join(folder, "model.ckpt-2")))
    assert c.restore().step == 1
    assert_all(store, 5)
    assert c.latest() == os.path.join(folder, "model.ckpt-1")
    workers.barrier()
    if me == 0:
      flip(path)
    workers.barrier()
  assert c.restore().step == 2

  # A worker that does not see the folder.
  real = tf.io.gfile.exists
  if me == 1:
    tf.io.gfile.exists = lambda path: folder not in path and real(path)
  expect(errors.CheckpointError, "worker 1" if me == 0 else "does not see", c.restore)
  tf.io.gfile.exists = real
  set_all(store, 3)
  c.save(3, asynchronous=False)
  workers.barrier()
  assert not [n for n in os.listdir(folder) if n.startswith(".unfinished")]


def killed(folder, other_mesh, impl, train):
  """Worker 1 is killed when it has written its part of the second checkpoint."""
  del other_mesh
  me = workers.current().index
  c = checkpoint.Checkpointer(folder, impl.variable_store)
  set_all(impl.variable_store, 1)
  c.save(1)
  c.wait()
  set_all(impl.variable_store, 2)
  if me == 1:
    measured = writer.Job._measured
    writer.Job._measured = lambda *a: measured(*a) and os.kill(os.getpid(), 9)
  c.save(2)
  started = time.monotonic()
  expect(errors.CheckpointError, "worker 1 (", c.wait)
  print(f"told after {time.monotonic() - started:.1f} s", flush=True)
  # TensorFlow would not let it go before it has missed the other worker for some time.
  os._exit(75)


def apart(folder, other_mesh, impl, train):
  """Each worker has a folder of its own, until all have the same."""
  del other_mesh, train
  me = workers.current().index
  set_all(impl.variable_store, 1)
  c = checkpoint.Checkpointer(f"{folder}-{me}", impl.variable_store)
  assert c.latest() is None  # Who only reads needs no place to write.
  words = f"share the folder {folder}-{me}: worker 1 (127.0.0.1:"
  patience = shared_folder._PATIENCE_SECONDS
  assert patience < 10
  shared_folder._PATIENCE_SECONDS = 0.5
  for call in (c.check_folder, lambda: c.save(1), lambda: c.save(1, asynchronous=False)):
    expect(errors.CheckpointError, words, call)
  shared_folder._PATIENCE_SECONDS = patience

  # One that sees it and cannot write there.
  c = checkpoint.Checkpointer(folder, impl.variable_store, worker_timeout_seconds=5.0)
  with no_right_to_write(me == 1):
    words = f"cannot write checkpoints in {folder}: worker 1 (127.0.0.1:"
    expect(errors.CheckpointError, words, c.check_folder)
    expect(errors.CheckpointError, "Permission denied", c.check_folder)
  c.check_folder()

  # Or not any more. It can tell the others of it by no file, and all know it nevertheless.
  c.save(1, asynchronous=False)
  for denied in (1, 0):
    with no_right_to_write(me == denied):
      started = time.monotonic()
      c.save(2)
      try:
        c.wait()
      except errors.CheckpointError as e:
        assert f"model.ckpt-2 in {folder}: worker {denied} (127.0.0.1:" in str(e), e
        assert "Permission denied" in str(e), e
        assert e.told_to_all
      else:
        raise AssertionError("nothing said that it could not be written")
      assert time.monotonic() - started < 60  # Nobody waits without end.
    workers.barrier()
  c.save(2, asynchronous=False)
  assert [p[-1] for p in checkpoint.all_checkpoints(folder)] == ["1", "2"]
  workers.barrier()


@contextlib.contextmanager
def no_right_to_write(denied):
  """Lets what changes files fail in this process."""
  real = {name: getattr(tf.io.gfile, name) for name in ("GFile", "rename", "remove", "rmtree")}

  def failing(name):
    def call(*args, **kwargs):
      if name != "GFile" or "w" in (*args, "r")[1]:
        raise tf.errors.PermissionDeniedError(None, None, "Permission denied")
      return real[name](*args, **kwargs)

    return call

  for name in real if denied else ():
    setattr(tf.io.gfile, name, failing(name))
  try:
    yield
  finally:
    for name, call in real.items():
      setattr(tf.io.gfile, name, call)


def content_of(folder):
  return {n: open(os.path.join(folder, n), "rb").read() for n in sorted(os.listdir(folder))}


def flip(path):
  with open(path, "r+b") as f:
    f.seek(5)
    byte = f.read(1)[0]
    f.seek(5)
    f.write(bytes([byte ^ 4]))


def write_text(text):
  def write(prefix):
    with open(prefix, "w") as f:
      f.write(text)

  return write


def count_writes():
  """A list to which the names in each written part are added."""
  names, real = [], tf.raw_ops.SaveV2

  def save(**kwargs):
    assert threading.current_thread() is not threading.main_thread()
    names.append(list(dict.fromkeys(kwargs["tensor_names"])))
    tf.raw_ops.SaveV2 = real
    return real(**kwargs)

  tf.raw_ops.SaveV2 = save
  return names


def main(what, folder, other_mesh):
  workers.join(virtual_cpu_devices=2)
  impl = mtf.simd_mesh_impl.SimdMeshImpl(MESH, LAYOUT)

  @mtf.function(impl, [mtf.TensorSpec([mtf.Dimension("x", 8)], tf.float32)])
  def step(x):
    total = mtf.zeros(x.mesh, [])
    for name, dims in SHAPES.items():
      v = mtf.get_variable(x.mesh, name, [mtf.Dimension(*d) for d in dims])
      mtf.assign_add(v, mtf.zeros_like(v))
      total += mtf.reduce_sum(v)
    return total + mtf.reduce_sum(x)

  x = np.ones([8], np.float32)
  step(x)
  {"together": together, "killed": killed, "apart": apart}[what](
    folder, other_mesh, impl, lambda: step(x)
  )
  print("done", flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
