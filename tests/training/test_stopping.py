"""Signals in training: the loop of steps ends early, saves, and leaves; or the time is over."""

from __future__ import annotations

import os
import signal
import threading
import time

import gin
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import checkpoint, errors, exit_codes
from mesh_tensorflow.training import command, several_steps, stopping
from tests.transformer import training_program as program

pytestmark = pytest.mark.usefixtures("ctrl_c", "without_attention")


def send(number: int, after: float = 0.0) -> None:
  """A signal to this process, from another thread."""
  threading.Timer(after, lambda: os.kill(os.getpid(), number)).start()


def send_and_wait(stop: stopping.StopRequests) -> None:
  """SIGTERM to this process, which has noted it."""
  os.kill(os.getpid(), signal.SIGTERM)
  while not stop.requested:
    time.sleep(0.01)


def signal_in_call(monkeypatch, number: int, at: int) -> None:
  """Sends a signal while TensorFlow does the steps of the call that begins at a step, or later."""
  running = stopping.StopRequests.running
  sent = []

  def watched(self, done, saved):
    running(self, done, saved)
    if done >= at and not sent:
      sent.append(done)
      send(number, 0.3)

  monkeypatch.setattr(stopping.StopRequests, "running", watched)


def many_rows(sequence_length, vocabulary=None, dataset_split="train"):
  """Rows that take no time: of calls of thousands of steps, making them would take most."""
  rows = next(iter(program.dataset(sequence_length).batch(64)))
  return tf.data.Dataset.from_tensor_slices(rows).repeat()


# -------------------------------------------------------------- the loop of steps


@pytest.mark.parametrize(
  ("mesh", "implementation"),
  [("", "placement"), pytest.param("batch:2", "simd", marks=pytest.mark.long)],
)
def test_a_long_call_ends_early_and_is_saved(
  mesh, implementation, tmp_path, monkeypatch, cpu_devices
):
  """One call would do all 2,000 steps; those done are in the checkpoint, and go on from there."""
  folder = str(tmp_path / "m")
  signal_in_call(monkeypatch, signal.SIGTERM, at=0)
  trainer = program.make_trainer(
    mesh, implementation, model_dir=folder, steps_per_call=2000, save_checkpoints_steps=0
  )
  with pytest.raises(
    errors.StoppedError,
    match=r"stopped by SIGTERM; step \d+ is saved in .*; \d+ of 2000 steps remain. The same",
  ) as e:
    trainer.train(many_rows, 2000)
  done = trainer.global_step
  assert 0 < done < 2000
  assert f"step {done} is saved" in str(e.value) and f"{2000 - done} of 2000" in str(e.value)
  assert checkpoint.latest_checkpoint(folder).endswith(f"-{done}")
  monkeypatch.undo()
  if not mesh:
    whole = program.make_trainer(mesh, implementation, steps_per_call=2000)
    whole.train(many_rows, done)
    for name, value in program.weights(trainer).items():
      np.testing.assert_array_equal(value, program.weights(whole)[name], err_msg=name)
  # The flag is down again.
  assert len(trainer.train(many_rows, done + 3)) == 3


def test_a_saved_position_in_the_data_is_that_of_the_step(tmp_path, monkeypatch, cpu_devices):
  """Calls are short there, so that none need end early."""
  folder = str(tmp_path / "m")
  signal_in_call(monkeypatch, signal.SIGTERM, at=1)
  options = dict(steps_per_call=20_000, save_checkpoints_steps=0)
  trainer = program.make_trainer(model_dir=folder, **options)
  gin.bind_parameter("StopRequests.save_within_seconds", 0.6)
  monkeypatch.setattr(stopping.StopRequests, "_end", lambda *_: None)  # This machine may be slow.
  with pytest.raises(errors.StoppedError):
    trainer.train(many_rows, 20_000, checkpoint_input_pipeline=True)
  done = trainer.global_step
  assert 0 < done < 20_000
  monkeypatch.undo()
  resumed = program.make_trainer(model_dir=folder, **options)
  losses = resumed.train(many_rows, done + 3, checkpoint_input_pipeline=True)
  whole = program.make_trainer(steps_per_call=20_000).train(many_rows, done + 3)
  assert losses == whole[done:]


def test_while_the_flag_is_up_a_call_is_one_step():
  stop = several_steps.StopFlag()
  steps = several_steps.compile_steps(
    lambda batch, rate, step: tf.cast(batch, tf.float32) + rate,
    [tf.TensorSpec([], tf.int32)],
    lambda step: 0.5,
    False,
    stop,
  )
  batches = (tf.range(10, 14),)
  assert steps(batches, tf.constant(7, tf.int64)).numpy()[0].tolist() == [10.5, 11.5, 12.5, 13.5]
  stop.put(True)
  assert steps(batches, tf.constant(7, tf.int64)).numpy()[0].tolist() == [10.5]


def test_calls_last_as_long_as_they_may():
  lengths = several_steps.CallLengths(5.0)
  assert lengths.most == 1
  lengths.measured(1, 20.0)
  assert lengths.most == 1
  lengths.measured(1, 1.0)
  assert lengths.most == 5
  lengths.measured(5, 0.01)
  assert lengths.most == 2500
  lengths.measured(1, 0.0)
  assert 2500 < lengths.most < 2**31


def test_calls_are_cut_and_end_where_they_would_have():
  calls = [(np.arange(a, b), np.arange(a, b) + 7) for a, b in [(0, 5), (5, 10), (10, 12)]]
  most = iter([1, 2, 9, 9, 1, 1])
  parts = list(several_steps.in_parts(calls, lambda: next(most)))
  assert [x.tolist() for x, _ in parts] == [[0], [1, 2], [3, 4], [5, 6, 7, 8, 9], [10], [11]]
  assert all((y == x + 7).all() for x, y in parts)


# ------------------------------------------------------------------------ requests


def test_an_ignored_signal_stays_ignored():
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  with stopping.StopRequests() as stop:
    stop.running(1, 0)
    os.kill(os.getpid(), signal.SIGINT)
    assert not stop.requested
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested
  assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_before_the_first_step_a_signal_ends_the_block_at_once():
  with pytest.raises(
    errors.StoppedError, match="stopped by SIGTERM; no step was done, so nothing is lost"
  ):
    with stopping.StopRequests():
      os.kill(os.getpid(), signal.SIGTERM)
      time.sleep(30)
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("seconds", [0, -1, "15", None, True, float("nan")])
def test_a_time_that_is_none(seconds):
  gin.bind_parameter("StopRequests.save_within_seconds", seconds)
  with pytest.raises(errors.ConfigError, match="save_within_seconds"):
    stopping.StopRequests()


def ends(body, capfd) -> tuple[int, str]:
  """Exit code and stderr of a fork of this process that runs `body(stop)`, and then waits."""
  child = os.fork()
  if not child:
    try:
      with stopping.StopRequests() as stop:
        body(stop)
        time.sleep(30)
    except errors.StoppedError as e:
      os._exit(exit_codes.of_error(e))
    finally:
      os._exit(99)
  return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), capfd.readouterr().err


def test_a_second_signal_ends_the_program_and_says_what_is_lost(monkeypatch, capfd):
  monkeypatch.setattr(stopping, "_SAME_SECONDS", 0.2)

  def body(stop):
    stop.running(37, 30)
    send(signal.SIGTERM)
    send(signal.SIGINT, 2.0)

  code, err = ends(body, capfd)
  assert code == exit_codes.of_signal(signal.SIGINT) == exit_codes.INTERRUPTED
  first, second = err.strip().splitlines()
  assert first.startswith("SIGTERM: a checkpoint is written when the step that is going on is done")
  assert second == (
    "SIGTERM: a second signal came; the program ends. The steps after the last whole checkpoint "
    "(step 30) are lost; step 37 was reached, or more"
  )


def test_one_signal_that_comes_twice_is_one(monkeypatch, capfd):
  """`timeout` sends it to a process, and then to its group."""

  def body(stop):
    stop.running(37, 30)
    for _ in range(3):
      os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    os._exit(9)

  assert ends(body, capfd)[0] == 9


def test_the_time_is_over(capfd):
  gin.bind_parameter("StopRequests.save_within_seconds", 0.3)

  def body(stop):
    stop.running(37, 30)
    send(signal.SIGTERM)

  code, err = ends(body, capfd)
  assert code == 128 + signal.SIGTERM
  assert "SIGTERM: no checkpoint was begun within 0.3 s; the program ends" in err
  assert "(step 30) are lost; step 37 was reached" in err


def test_a_checkpoint_that_is_being_written_has_all_the_time(capfd):
  gin.bind_parameter("StopRequests.save_within_seconds", 0.2)

  def body(stop):
    stop.running(37, 30)
    with stop.saving():
      send(signal.SIGTERM)
      time.sleep(0.8)
      os._exit(9)

  assert ends(body, capfd)[0] == 9


def test_a_checkpoint_begun_before_the_signal_is_not_that_of_the_signal(capfd):
  gin.bind_parameter("StopRequests.save_within_seconds", 0.3)

  def body(stop):
    stop.running(37, 30)
    with stop.saving():
      send_and_wait(stop)

  code, err = ends(body, capfd)
  assert code == 128 + signal.SIGTERM and "no checkpoint was begun within 0.3 s" in err


def test_where_nothing_is_lost_the_code_says_so(monkeypatch, capfd):
  """Python cannot be reached: it reads data, or restores."""
  gin.bind_parameter("StopRequests.save_within_seconds", 0.3)
  monkeypatch.setattr(stopping.StopRequests, "_handle", lambda *_: None)
  code, err = ends(lambda stop: send(signal.SIGTERM), capfd)
  assert code == exit_codes.STOPPED
  assert "The program ends" not in err and "Nothing is lost" in err


def test_a_forked_process_is_not_this_one():
  """A pool of a data set of one's own ends its processes by SIGTERM; training goes on."""
  with stopping.StopRequests() as stop:
    stop.running(1, 0)
    child = os.fork()
    if not child:
      time.sleep(30)
      os._exit(9)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    time.sleep(0.2)
    assert not stop.requested


# ----------------------------------------------------- when nothing is left to be saved


def test_the_time_counts_from_the_last_checkpoint(capfd):
  """One that took longer than the time was begun, and the next one has the time again."""
  gin.bind_parameter("StopRequests.save_within_seconds", 0.5)

  def body(stop):
    stop.running(37, 30)
    with stop.saving():
      send(signal.SIGTERM)
      time.sleep(1.5)
    time.sleep(0.2)
    os._exit(9)

  assert ends(body, capfd)[0] == 9


def test_when_all_is_saved_the_program_may_take_its_time(capfd):
  """Iterators of data and reports are closed, and no worker of a cluster is hurried."""
  gin.bind_parameter("StopRequests.save_within_seconds", 0.2)

  def body(stop):
    stop.running(37, 30)
    send_and_wait(stop)
    with stop.saving():
      stop.saved("step 37 is saved in m")
    time.sleep(1.8)
    os._exit(9)

  code, err = ends(body, capfd)
  assert code == 9
  assert "lost" not in err


def test_a_second_signal_when_all_is_saved(monkeypatch, capfd):
  monkeypatch.setattr(stopping, "_SAME_SECONDS", 0.2)

  def body(stop):
    stop.running(37, lambda: 30)
    send_and_wait(stop)
    stop.saved("step 37 is saved in m")
    send(signal.SIGTERM, 1.5)

  code, err = ends(body, capfd)
  assert code == exit_codes.STOPPED
  assert err.endswith("the program ends. Nothing is lost: step 37 is saved in m\n")


def test_what_is_lost_goes_by_the_checkpoint_that_is_whole_by_then(capfd):
  gin.bind_parameter("StopRequests.save_within_seconds", 0.3)
  whole = [30]

  def body(stop):
    stop.running(37, lambda: whole[-1])
    whole.append(36)
    send(signal.SIGTERM)

  code, err = ends(body, capfd)
  assert code == 128 + signal.SIGTERM
  assert "(step 36) are lost; step 37 was reached" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_training(number, capfd):
  child = os.fork()
  if not child:
    with stopping.BeforeTraining("worker 1/2: "):
      send(number)
      time.sleep(30)
    os._exit(99)
  assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == exit_codes.STOPPED
  assert capfd.readouterr().err == (
    f"worker 1/2: StoppedError: stopped by {number.name} before training began; nothing is lost: "
    "no step was done. The same command goes on from there\n"
  )


def test_training_takes_over_the_signals_for_good():
  """In its block, and behind it: what is done there is no longer before training."""
  usual = signal.getsignal(signal.SIGINT)
  with stopping.BeforeTraining():
    assert signal.getsignal(signal.SIGINT) is not usual
    with stopping.StopRequests() as stop:
      stop.running(1, 0)
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(0.3)
      assert stop.requested
    assert signal.getsignal(signal.SIGINT) is usual
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(5)
  assert signal.getsignal(signal.SIGINT) is usual
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("code", [exit_codes.DONE, exit_codes.STOPPED])
def test_a_worker_that_only_takes_leave_ends_with_its_code(code):
  """Its work is done, and said to be; a signal then does not make it another code."""
  child = os.fork()
  if not child:
    command._end_at_a_signal(code)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
    os._exit(99)
  assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
