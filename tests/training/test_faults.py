"""What happens to a training when something goes wrong, with the real program."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import kill_runs
from mesh_tensorflow import checkpoint, errors, exit_codes, workers
from mesh_tensorflow.checkpoint import writer
from mesh_tensorflow.training import run_lock, stopping
from mesh_tensorflow.transformer import dataset
from tests.transformer import training_program
from tests.transformer import worker_processes as program

pytestmark = pytest.mark.usefixtures("without_attention")

ENDLESS = "run.train_steps = 1000000"
FEW_CHECKPOINTS = "run.keep_checkpoint_max = 2"


def steps_saved(folder: pathlib.Path) -> list[int]:
  return [checkpoint.get_step_from_path(p) for p in checkpoint.all_checkpoints(str(folder))]


@pytest.mark.subprocess
def test_a_signal_to_one_worker_saves_and_stops_all(tmp_path):
  folder = tmp_path / "model"
  bindings = [*program.on_mesh("batch:2", "batch:batch"), ENDLESS, "run.save_checkpoints_steps = 0"]
  with program.processes(tmp_path, 2, program.trainer_arguments(folder, *bindings)) as group:
    group.wait_for(lambda: "step " in group.text(0))
    group.all[1].send_signal(signal.SIGTERM)
    assert group.wait() == [exit_codes.STOPPED] * 2
    stopped = re.search(
      r"worker 0/2: StoppedError: stopped by a signal to another worker; step (\d+) is saved in "
      r".*; \d+ of 1000000 steps remain. The same command goes on",
      group.text(0),
    )
    assert stopped, group.text(0)
    assert "worker 1/2: StoppedError: stopped by SIGTERM; step" in group.text(1)
  assert steps_saved(folder) == [int(stopped.group(1))]
  assert list(program.losses(folder)) == list(range(1, int(stopped.group(1)) + 1))


@pytest.mark.subprocess
def test_a_killed_worker_is_named_and_the_other_goes_on(tmp_path):
  folder = tmp_path / "model"
  bindings = [*program.on_mesh("batch:2", "batch:batch"), ENDLESS, FEW_CHECKPOINTS]
  with program.processes(tmp_path, 2, program.trainer_arguments(folder, *bindings)) as group:
    group.wait_for(lambda: len(steps_saved(folder)) > 0)
    group.all[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    codes = group.wait()
    assert time.monotonic() - killed < 120
    assert codes == [workers.EXIT_WORKER_LOST, -signal.SIGKILL]
    assert "worker 0/2: WorkerLostError: lost worker 1 (127.0.0.1:" in group.text(0)
  last = steps_saved(folder)[-1]
  out = program.run(1, program.trainer_arguments(folder, f"run.train_steps = {last + 4}"))
  assert f"restored {folder}/model.ckpt-{last}" in out
  assert steps_saved(folder)[-1] == last + 4


@pytest.mark.long
@pytest.mark.subprocess
def test_the_launcher_starts_all_again(tmp_path):
  folder = tmp_path / "model"
  bindings = [*program.on_mesh("batch:2", "batch:batch"), "run.train_steps = 60"]
  command = program.launcher(2, program.trainer_arguments(folder, *bindings), "--restarts=1")
  with subprocess.Popen(
    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  ) as launcher:
    try:
      while launcher.poll() is None and not steps_saved(folder):
        time.sleep(0.02)
      children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
      os.kill(int(children.split()[-1]), signal.SIGKILL)
      out = launcher.communicate(timeout=240)[0]
    finally:
      launcher.kill()
  assert launcher.returncode == 0, out
  assert "all workers are started again in 1 s (1 of 1), since one failed with exit code 137" in out
  assert f"restored {folder}/model.ckpt-" in out and "step      60/60" in out


# ------------------------------------------------------------------- one process


def test_a_stopped_training_goes_on_as_if_it_had_not_been(
  tmp_path, cpu_devices, ctrl_c, monkeypatch
):
  """Ctrl-C in the middle; the weights in the end are the same, bit for bit."""
  options = dict(save_checkpoints_steps=100, steps_per_call=2)
  running = stopping.StopRequests.running

  def interrupted(self, done, saved):
    running(self, done, saved)
    if done == 4:
      os.kill(os.getpid(), signal.SIGINT)

  trainer = training_program.make_trainer(model_dir=str(tmp_path / "a"), **options)
  monkeypatch.setattr(stopping.StopRequests, "running", interrupted)
  with pytest.raises(errors.StoppedError, match=r"stopped by SIGINT; step \d+ is saved in"):
    trainer.train(training_program.dataset, 12)
  monkeypatch.undo()
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  assert 0 < trainer.global_step < 12
  resumed = training_program.make_trainer(model_dir=str(tmp_path / "a"), **options)
  resumed.train(training_program.dataset, 12)
  whole = training_program.make_trainer(**options)
  whole.train(training_program.dataset, 12)
  expected = training_program.weights(whole)
  for name, value in training_program.weights(resumed).items():
    np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_two_trainings_in_one_folder(tmp_path, cpu_devices):
  trainer = training_program.make_trainer(model_dir=str(tmp_path))
  with run_lock.training_lock(str(tmp_path)):
    with pytest.raises(errors.LockedError, match=f"another training uses .*{os.getpid()} on"):
      trainer.train(training_program.dataset, 4)
  assert not steps_saved(tmp_path)
  trainer.train(training_program.dataset, 4)


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_folder_stays_locked_when_the_file_of_its_lock_is_deleted(made_anew, tmp_path):
  path = tmp_path / run_lock.NAME
  with run_lock.training_lock(str(tmp_path)):
    path.unlink()
    if made_anew:
      path.write_text("")
    for _ in range(2):
      with pytest.raises(errors.LockedError, match="another training uses"):
        with run_lock.training_lock(str(tmp_path)):
          pass
  with run_lock.training_lock(str(tmp_path)):
    assert f"process {os.getpid()} on " in path.read_text()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_another_machine_has(number, tmp_path, monkeypatch):
  """Network file systems say so in one of two ways."""
  (tmp_path / run_lock.NAME).write_text("process 7 on elsewhere since 2020-01-01 00:00:00")

  def flock(*_):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(fcntl, "flock", flock)
  with pytest.raises(errors.ConfigError, match="another training uses .*process 7 on elsewhere"):
    with run_lock.training_lock(str(tmp_path)):
      pass


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
  def flock(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

  monkeypatch.setattr(fcntl, "flock", flock)
  with run_lock.training_lock(str(tmp_path)):
    pass
  assert "training.lock cannot be locked (No locks available)" in caplog.text
  assert "two would overwrite each other's checkpoints; the last one was none" in caplog.text
  caplog.clear()
  with run_lock.training_lock(str(tmp_path)):
    assert f"the last one was process {os.getpid()} on " in caplog.text


def test_a_lock_on_a_full_disk(tmp_path, monkeypatch):
  def pwrite(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(os, "pwrite", pwrite)
  with run_lock.training_lock(str(tmp_path)):
    with pytest.raises(errors.ConfigError, match="another training uses"):
      with run_lock.training_lock(str(tmp_path)):
        pass


def test_a_folder_that_cannot_be_made(tmp_path):
  (tmp_path / "file").write_text("")
  trainer = training_program.make_trainer(model_dir=str(tmp_path / "file" / "model"))
  words = "cannot make the folder .*file/model .*--model_dir"
  with pytest.raises(errors.StorageError, match=words):
    trainer.train(training_program.dataset, 4)


def test_a_full_disk_stops_training_and_leaves_what_was_saved(tmp_path, monkeypatch, cpu_devices):
  write = writer.Job._write_parts

  def full(job):
    if job.step > 4:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(job)

  monkeypatch.setattr(writer.Job, "_write_parts", full)
  trainer = training_program.make_trainer(model_dir=str(tmp_path), save_checkpoints_steps=4)
  with pytest.raises(errors.StorageError, match=r"model.ckpt-8 in .*No space left on device"):
    trainer.train(training_program.dataset, 100)
  assert steps_saved(tmp_path) == [4]
  assert checkpoint.verify(str(tmp_path / "model.ckpt-4")) == []
  monkeypatch.undo()
  resumed = training_program.make_trainer(model_dir=str(tmp_path), save_checkpoints_steps=4)
  resumed.train(training_program.dataset, 8)
  assert steps_saved(tmp_path) == [4, 8]


@pytest.mark.long  # `test_operating.py` has its exit code, and the line that says why.
@pytest.mark.subprocess
def test_a_file_that_cannot_grow(tmp_path):
  """The operating system's own error, in the real program: a limit of the size of files."""
  folder = tmp_path / "model"
  arguments = program.trainer_arguments(folder)
  run = subprocess.run(
    [sys.executable, "-m", "mesh_tensorflow.transformer.main", *arguments],
    capture_output=True,
    text=True,
    timeout=240,
    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
  )
  assert run.returncode == exit_codes.STORAGE, run.stdout + run.stderr
  assert "StorageError: cannot write checkpoint model.ckpt-4" in run.stderr.splitlines()[-1]
  assert "File too large" in run.stderr.splitlines()[-1]
  assert not steps_saved(folder) and not list(folder.glob("*.data-*"))
  program.run(1, arguments)  # With more space it goes well.
  assert steps_saved(folder) == [4, 8]


@pytest.mark.parametrize("hours", [-1, 100])
def test_a_clock_that_jumps(hours, tmp_path, monkeypatch, cpu_devices):
  """Back or forward after each look: everything is kept that a right clock would keep."""
  now = [1e9]

  def clock():
    now[0] += 3600 * hours
    return now[0]

  monkeypatch.setattr(time, "time", clock)
  trainer = training_program.make_trainer(
    model_dir=str(tmp_path), save_checkpoints_steps=2, steps_per_call=2, keep_checkpoint_max=3
  )
  losses = trainer.train(training_program.dataset, 12)
  assert len(losses) == 12
  assert steps_saved(tmp_path) == [8, 10, 12]
  assert checkpoint.latest_checkpoint(str(tmp_path)).endswith("-12")


# ------------------------------------------------------------------- damaged records


@pytest.fixture
def records(tmp_path):
  """Two files of 40 records; the second has a wrong bit in record 10."""
  files = []
  for i in range(2):
    files.append(str(tmp_path / f"made-train-{i:05}"))
    with tf.io.TFRecordWriter(files[-1]) as writer:
      for n in range(40):
        ids = tf.train.Feature(int64_list=tf.train.Int64List(value=[2 + n % 9] * 15 + [1]))
        example = tf.train.Example(features=tf.train.Features(feature={"targets": ids}))
        writer.write(example.SerializeToString())
  content = bytearray(pathlib.Path(files[1]).read_bytes())
  size = len(content) // 40
  content[10 * size + size // 2] ^= 4
  pathlib.Path(files[1]).write_bytes(content)
  return files


def read(files, **options):
  return dataset.pretokenized_tfrecord_dataset(
    files, True, True, repeat=False, batch_size=None, sequence_length={"targets": 16}, **options
  )


def test_a_damaged_record_is_named(records, cpu_devices):
  with pytest.raises(errors.DataError) as e:
    training_program.make_trainer().train(lambda **_: read(records), 100)
  assert f"{records[1]}: record 10 (from 0)" in str(e.value)
  assert records[0] not in str(e.value) and "skip_damaged" in str(e.value)


def test_the_rest_of_a_damaged_file_may_be_left_out(records, caplog):
  rows = list(read(records, skip_damaged=True))
  assert sum(int((row["targets"] == 1).numpy().sum()) for row in rows) == 50
  assert f"1 of 2 files are damaged, and left out from there on: {records[1]}: " in caplog.text


@pytest.mark.long
@pytest.mark.subprocess
def test_a_training_that_is_killed_again_and_again_ends_as_if_it_had_not_been(tmp_path):
  """Of `benchmarks/kill_runs.py`; MTF_KILL_RUNS=50 does so many."""
  runs = int(os.environ.get("MTF_KILL_RUNS", "1"))
  assert kill_runs.compare(tmp_path, runs, kills=3 if runs == 1 else 1, seed=1) == 0


@pytest.mark.long
@pytest.mark.subprocess
@pytest.mark.parametrize("workers", [2, 3])
def test_exit_code_message_and_folder_agree_after_signals(workers, tmp_path):
  """As above."""
  runs = int(os.environ.get("MTF_KILL_RUNS", "4"))
  assert kill_runs.stop_again_and_again(tmp_path, runs, seed=workers, workers=workers) == 0
