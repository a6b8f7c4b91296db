"""Checkpoints that several workers write and read together."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import checkpoint, errors, workers
from mesh_tensorflow.checkpoint import meeting as meeting_module
from mesh_tensorflow.checkpoint.meeting import Meeting
from mesh_tensorflow.meshes.layout import TensorLayout, pnum_to_processor_coordinates
from mesh_tensorflow.meshes.store import StoredVariable, shares_of
from mesh_tensorflow.program.dimensions import convert_to_shape
from tests import worker_group
from tests.checkpoint import checkpoint_stores
from tests.checkpoint.checkpoint_workers_program import SHAPES, values

SUFFIXES = ("", ".index", ".manifest")
PROGRAM = "tests.checkpoint.checkpoint_workers_program"


def run_workers(*arguments: str) -> tuple[list[int], list[str]]:
  """Runs the program in two processes; their exit codes and output."""
  return worker_group.run(2, ["-m", PROGRAM, *arguments])


def make_store(devices, mesh, step=None):
  """A store of the program's variables on a mesh of this process."""
  variables = {name: (dims, tf.float32, tf.float32) for name, dims in SHAPES.items()}
  store = checkpoint_stores.make_store(devices, mesh, variables)
  for name, value in values(step).items() if step else ():
    store[name].assign(value)
  return store


@pytest.mark.subprocess
def test_two_workers(cpu_devices, tmp_path, run_subprocess):
  folder = str(tmp_path / "run")
  first = make_store(cpu_devices, "2x4", 5)
  other = checkpoint.Checkpointer(str(tmp_path), first, asynchronous=False).save(5)
  # What is left of an earlier run looks as if worker 1 were ready.
  remains = tmp_path / "run" / ".unfinished-model.ckpt-1.0123abcd.1"
  remains.mkdir(parents=True)
  (remains / "worker-00001.done").write_text('{"parts": []}')
  (tmp_path / "run" / "model.ckpt-9.data-00000-of-00002").write_text("no index")
  codes, outputs = run_workers("together", folder, other)
  assert codes == [0, 0], "\n".join(outputs)
  assert all(output.endswith("done\n") for output in outputs)
  files = [f".data-0000{i}-of-00002" for i in range(2)] + [".index", ".manifest"]
  attached = [f".with-input-0000{i}" for i in range(2)]
  assert sorted(os.listdir(folder)) == sorted(
    ["checkpoint"]
    + [f"model.ckpt-{n}{f}" for n in "123" for f in files]
    + [f"model.ckpt-1{f}" for f in attached]
  )
  # One process, of any mesh, goes on from there.
  for mesh in ("1", "2x2 other"):
    store = make_store(cpu_devices, mesh)
    assert checkpoint.Checkpointer(folder, store).restore().step == 3
    checkpoint_stores.assert_holds(store, values(3))
  # TensorFlow reads it whole, without this package.
  whole = run_subprocess(["-c", READ, folder], cwd=tmp_path, env={"TF_CPP_MIN_LOG_LEVEL": "3"})
  read = json.loads(whole.stdout.splitlines()[-1])
  assert read.pop("global_step") == 3
  assert {n: np.float32(v).tolist() for n, v in read.items()} == {
    n: v.tolist() for n, v in values(3).items()
  }


READ = """
import json, sys
import tensorflow as tf
reader = tf.train.load_checkpoint(sys.argv[1])
names = reader.get_variable_to_shape_map()
assert "mesh_tensorflow" not in sys.modules
print(json.dumps({name: reader.get_tensor(name).tolist() for name in names}))
"""


@pytest.mark.subprocess
def test_a_folder_that_is_not_shared(tmp_path):
  codes, outputs = run_workers("apart", str(tmp_path / "run"), "")
  assert codes == [0, 0], "\n".join(outputs)
  assert all(output.endswith("done\n") for output in outputs)
  assert not [p for i in range(2) for p in (tmp_path / f"run-{i}").glob("*")]
  names = {p.name.split(".data-")[0] for p in (tmp_path / "run").iterdir() if p.is_file()}
  assert names == {"checkpoint", *(f"model.ckpt-{n}{s}" for n in "12" for s in SUFFIXES)}


@pytest.mark.subprocess
def test_a_worker_is_killed_while_all_write(cpu_devices, tmp_path):
  codes, outputs = run_workers("killed", str(tmp_path), "")
  assert codes == [75, -signal.SIGKILL], "\n".join(outputs)
  seconds = float(re.search(r"told after (\d+\.\d) s", outputs[0]).group(1))
  assert seconds < 120  # Without an end it would be waited for half an hour.
  store = make_store(cpu_devices, "1")
  c = checkpoint.Checkpointer(str(tmp_path), store, asynchronous=False)
  assert c.restore().step == 1
  checkpoint_stores.assert_holds(store, values(1))
  c.save(3)
  assert {n.split(".")[1] for n in os.listdir(tmp_path) if "." in n} == {"ckpt-1", "ckpt-3"}


# ------------------------------------------------------------------- without processes


def stored_on(processors, mesh, layout, begins, shares=()):
  return StoredVariable(
    name="v",
    shape=convert_to_shape([("x", 4), ("y", 6)]),
    master_dtype=tf.float32,
    slice_dtype=tf.float32,
    trainable=True,
    layout=TensorLayout(layout),
    mesh_shape=convert_to_shape(mesh),
    slices=tuple(tf.Variable(tf.zeros([2, 3])) for _ in processors),
    begins=begins,
    slice_shape=tuple(
      n // (1 if a is None else convert_to_shape(mesh)[a].size) for n, a in zip((4, 6), layout)
    ),
    processors=processors,
    shares=shares,
  )


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("layout", [(None, None), (0, None), (None, 1), (1, 0), (1, None)])
def test_each_slice_is_owned_by_one_worker(layout, count):
  mesh = convert_to_shape("rows:2,cols:2")
  size = [n // (1 if a is None else 2) for n, a in zip((4, 6), layout)]
  processors = [
    tuple(range(4 * worker // count, 4 * (worker + 1) // count)) for worker in range(count)
  ]

  def begin(p):
    coordinates = pnum_to_processor_coordinates(mesh, p)
    return tuple(0 if a is None else coordinates[a] * n for n, a in zip(size, layout))

  begins = [tuple(map(begin, of_worker)) for of_worker in processors]
  owned = []
  for worker in range(count):
    stored = stored_on(
      processors[worker], "rows:2,cols:2", layout, begins[worker], shares_of(begins)
    )
    owned += [(begin, worker) for begin, _ in stored.owned(worker)]
  assert len(owned) == len({begin for begin, _ in owned}) == 2 ** sum(a is not None for a in layout)
  # A replica of the lowest processor, so of the lowest worker that has one.
  assert owned[0] == ((0, 0), 0)


def test_a_variable_that_is_whole_everywhere_is_worker_0s():
  stored = stored_on((0, 1), "all:2", (0, None), ((0, 0), (2, 0)))
  assert len(stored.owned(0)) == 2
  assert stored.owned(1) == []


def test_a_variable_of_a_mesh_in_one_worker_is_that_ones():
  begins = ((0, 0), (2, 0))
  here = stored_on((0, 1), "all:2", (0, None), begins, shares_of([(), begins]))
  assert here.owned(0) == []
  assert [begin for begin, _ in here.owned(1)] == list(begins)
  there = stored_on((), "all:2", (0, None), (), shares_of([(), begins]))
  assert there.owned(0) == there.owned(1) == []


def test_the_whole_value_needs_all_slices():
  stored = stored_on((2, 3), "rows:2,cols:2", (0, 1), ((2, 0), (2, 3)))
  with pytest.raises(errors.VariableError, match="variable v .* has 2 of its 4 slices"):
    stored.numpy()


@pytest.fixture
def meeting(tmp_path, monkeypatch):
  """Two workers' views of one folder; `listens` says who is there."""
  there = {0, 1}
  monkeypatch.setattr(workers, "listens", lambda cluster, worker: worker in there)
  monkeypatch.setattr(meeting_module, "_SECONDS_BETWEEN_CALLS", 0.05)
  tasks = (("worker", 0, "a:1"), ("worker", 1, "b:1"))
  abandoned = threading.Event()
  return (
    [
      Meeting(str(tmp_path / "folder"), workers.Cluster(tasks, i), 2.0, abandoned) for i in range(2)
    ],
    there,
    abandoned,
  )


def test_meeting(meeting):
  (chief, other), _, _ = meeting
  other.report([["part", 3, 4]])
  assert chief.wait_for_parts() == {1: [["part", 3, 4]]}
  told = []
  thread = threading.Thread(target=lambda: told.append(other.wait_for_outcome()))
  thread.start()
  chief.announce(None)
  thread.join()
  assert told == [None]
  assert not os.path.exists(chief.folder)


def test_a_worker_that_fails_tells_the_chief_who_tells_the_others(meeting):
  (chief, other), _, _ = meeting
  other.report_error("the disk is full")
  with pytest.raises(errors.CheckpointError, match=r"^worker 1 \(b:1\): the disk is full$") as e:
    chief.wait_for_parts()
  told = []
  thread = threading.Thread(target=lambda: told.append(other.wait_for_outcome()))
  thread.start()
  chief.announce(str(e.value))
  thread.join()
  assert [(type(e), str(e)) for e in told] == [
    (errors.StorageError, "worker 1 (b:1): the disk is full")
  ]


def test_who_hears_of_a_failure_waits_until_all_have(tmp_path):
  """A worker may end with the error, and would be lost to one that still writes its part."""
  tasks = tuple(("worker", i, f"localhost:{i + 1}") for i in range(3))
  folder = str(tmp_path / "folder")
  chief, failed, slow = (
    Meeting(folder, workers.Cluster(tasks, i), 10.0, threading.Event()) for i in range(3)
  )
  problem = "worker 1 (localhost:2): the disk is full"
  failed.report_error("the disk is full")
  told = {}

  def hear(meeting, name):
    told[name] = str(meeting.wait_for_outcome())

  threads = [threading.Thread(target=chief.announce, args=[problem])]
  threads.append(threading.Thread(target=hear, args=[failed, "failed"]))
  for thread in threads:
    thread.start()
  end = time.monotonic() + 60
  while not os.path.exists(os.path.join(folder, "worker-00001.seen")):
    assert time.monotonic() < end
    time.sleep(0.01)
  time.sleep(0.5)
  assert not told and all(thread.is_alive() for thread in threads)
  hear(slow, "slow")
  for thread in threads:
    thread.join(60)
  assert told == {"failed": problem, "slow": problem}
  assert not os.path.exists(folder)


def test_a_mark_that_found_no_space_is_still_a_mark(meeting):
  (chief, other), _, _ = meeting
  os.makedirs(chief.folder)
  open(os.path.join(chief.folder, "worker-00001.failed"), "w").close()
  with pytest.raises(errors.CheckpointError, match="worker 1 .* its log says why"):
    chief.wait_for_parts()


def test_nobody_waits_for_a_silent_worker(meeting):
  (chief, other), there, abandoned = meeting
  chief._timeout = other._timeout = 0.4
  os.makedirs(chief.folder)
  started = time.monotonic()
  with pytest.raises(errors.CheckpointError, match=r"worker 1 \(b:1\): no sign of it for 0 s"):
    chief.wait_for_parts()
  assert "worker 0 (a:1): no sign" in str(other.wait_for_outcome())
  there.clear()
  with pytest.raises(errors.CheckpointError, match=r"worker 1 \(b:1\): it is gone"):
    chief.wait_for_parts()
  assert "worker 0 (a:1): it is gone" in str(other.wait_for_outcome())
  abandoned.set()
  with pytest.raises(errors.CheckpointError, match="waiting for it was given up"):
    chief.wait_for_parts()
  chief.announce("lost")
  assert "gave this checkpoint up" in str(other.wait_for_outcome())
  assert time.monotonic() - started < 60


def test_a_worker_that_goes_on_writing_is_waited_for(meeting):
  (chief, other), _, _ = meeting
  os.makedirs(chief.folder)

  def write():
    for _ in range(5):  # Longer than a silent one is waited for.
      time.sleep(0.5)
      with open(os.path.join(chief.folder, "part"), "a") as f:
        f.write("more")
    other.report([])

  thread = threading.Thread(target=write)
  thread.start()
  assert chief.wait_for_parts() == {1: []}
  thread.join()
