"""Guards the runs of a SIMD mesh: no run waits forever, and none starts after one that failed.

Queues know no timeout, and keep what a failed run left in them. TensorFlow's
collectives know one, but spend a sleeping thread on each call for that long.
So neither is asked to watch itself: a state variable frames each run (it is odd
while one is going on), and a watchdog thread looks at it now and then.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_LOG = logging.getLogger("mesh_tensorflow")


def unlifted_variable(value: Any, dtype: tf.DType, name: str) -> tf.Variable:
  """A variable for internal use, which tf.function does not take for one that it created.

  (It would trace its function a second time.) To be called in a `tf.init_scope`.
  """
  return tf.Variable(
    value, trainable=False, dtype=dtype, name=name, experimental_enable_variable_lifting=False
  )


class RunGuard:
  """Watches the runs of one mesh.

  Args:
    devices: device of every processor of this process.
    timeout_seconds: a run, or one iteration of a loop in it, that takes longer is
      broken off.
    break_off: makes every processor that waits fail, now and in future.
  """

  def __init__(self, devices: Sequence[str], timeout_seconds: float, break_off: Callable[[], None]):
    self._devices = list(devices)
    self._break_off = break_off
    self._progress: list[tf.Variable] | None = None
    self._watched = False
    self.timeout_seconds = float(timeout_seconds)
    self.broken = False
    with tf.init_scope(), tf.device(self._devices[0]):
      self._state = unlifted_variable(0, tf.int64, "mtf_run_state")

  @property
  def progress(self) -> list[tf.Variable]:
    """A counter of every processor, advanced by each iteration of a loop that exchanges."""
    if self._progress is None:
      made = []
      with tf.init_scope():
        for d in self._devices:
          with tf.device(d):
            made.append(unlifted_variable(0, tf.int64, "mtf_progress"))
      self._progress = made
    return self._progress

  def framed(self, calls: Callable[[], list[tf.Tensor]]) -> None:
    """Frames the run that `calls` adds to the graph; it returns a tensor of each call."""
    with tf.device(self._devices[0]):
      state = self._state.read_value()
      # A run that failed has left the number odd, and may have left values in queues.
      idle = tf.equal(tf.bitwise.bitwise_and(state, 1), 0)
      check = tf.debugging.Assert(idle, ["mtf_run_failed: run state", state])
      with tf.control_dependencies([check]):
        start = self._state.assign_add(1, read_value=False)
    with tf.control_dependencies([start]):
      done = calls()
    with tf.control_dependencies(done), tf.device(self._devices[0]):
      self._state.assign_add(1, read_value=False)
    if not self._watched:
      self._watched = True
      _watch(self)

  def reset(self) -> None:
    """Forgets that a run failed."""
    self._state.assign(0)

  def signs_of_life(self) -> tuple[int, ...]:
    """Progress counters, which change while runs advance; the first is odd during a run."""
    return tuple(int(v.numpy()) for v in [self._state] + (self._progress or []))

  def break_off(self) -> None:
    """Aborts the current run, and marks the guard as broken for good."""
    self.broken = True
    self._break_off()
    self._state.assign(0)


def _watch(guard: RunGuard) -> None:
  """Starts the watchdog thread, which ends with the guard or with the interpreter."""
  stop = threading.Event()
  thread = threading.Thread(
    target=_watchdog,
    args=(weakref.ref(guard), guard.timeout_seconds, stop),
    daemon=True,
    name="mtf-watchdog",
  )

  def end() -> None:
    # TensorFlow must not be called while the interpreter shuts down.
    stop.set()
    thread.join(10.0)

  weakref.finalize(guard, stop.set).atexit = False
  atexit.register(end)
  weakref.finalize(guard, atexit.unregister, end).atexit = False
  thread.start()


def _watchdog(guard_ref: weakref.ref[RunGuard], timeout: float, stop: threading.Event) -> None:
  last, since = None, time.monotonic()
  while not stop.wait(min(5.0, timeout / 4)):
    guard = guard_ref()
    if guard is None:
      return
    now = guard.signs_of_life()
    if now != last or now[0] % 2 == 0:
      last, since = now, time.monotonic()
    elif time.monotonic() - since > timeout:
      _LOG.error("no processor of the mesh moved for %g s: the run is broken off", timeout)
      guard.break_off()
      return
    del guard  # A thread that held it while it sleeps would keep it from ever ending.
