"""Guards the runs of a SIMD mesh: errors of exchanges, and no run waits forever."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy.typing as npt
import tensorflow as tf

from mesh_tensorflow.errors import CollectiveError
from mesh_tensorflow.program.dimensions import Shape


class _MeshImpl(Protocol):
  @property
  def shape(self) -> Shape: ...

  def reset(self) -> None: ...


@contextlib.contextmanager
def collective_errors(mesh_impl: _MeshImpl | None = None, *, what: str = "") -> Iterator[None]:
  """Turns TensorFlow's errors about a failed exchange into `CollectiveError`.

  To be put around the call of a `tf.function` that runs a SIMD mesh: errors of a
  running function are TensorFlow's, and reach only the caller of the function.
  (`mtf.function` does this by itself.)

  Args:
    mesh_impl: a `SimdMeshImpl` to reset after any error of TensorFlow, so that it can go on.
    what: name of the function, for the message.

  Raises:
    CollectiveError: in place of such an error, which is its cause.
  """
  try:
    yield
  except tf.errors.OpError as e:
    if mesh_impl is not None:
      mesh_impl.reset()
    meaning = next((m for sign, m in _SIGNS if sign in str(e)), None)
    if meaning is None and isinstance(e, tf.errors.CancelledError):
      meaning = _CANCELLED
    if meaning is None:
      raise
    where = "" if mesh_impl is None else f"on mesh {mesh_impl.shape}"
    prefix = f"{' '.join(w for w in (what, where) if w)}: " if what or where else ""
    raise CollectiveError(f"{prefix}{meaning}\n{str(e).strip()}") from e


_VAIN = (
  "a processor waited in vain for another one: their programs took different paths, or one is stuck"
)

# Which of a run's errors TensorFlow reports is a matter of chance.
_CANCELLED = (
  "the program of a processor failed, and TensorFlow reports what this cancelled in place of the "
  "error, which it logs: set the environment variable TF_CPP_MIN_LOG_LEVEL=1, and run this again"
)

# Markers in TensorFlow's messages: names of queues and checks of this package, and the
# words of the collective executor, which gives up everything after one failure.
_SIGNS = (
  (
    "mtf_exchange",
    f"{_VAIN}; make the tf.function anew before the next run (an mtf.function does so by itself)",
  ),
  (
    "mtf_run_failed",
    "an earlier run of this mesh failed midway, or another run is going on; call "
    "mesh_impl.reset() before the next run",
  ),
  (
    "Collective ops is aborted",
    f"{_VAIN}; or it failed. Start the program again: TensorFlow's collectives do not recover",
  ),
)


_LOG = logging.getLogger("mesh_tensorflow")


def unlifted_variable(value: npt.ArrayLike, dtype: tf.DType, name: str) -> tf.Variable:
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
    counters: further variables that change while a run advances; more may come.
  """

  def __init__(
    self,
    devices: Sequence[str],
    timeout_seconds: float,
    break_off: Callable[[], None],
    counters: Iterable[tf.Variable] = (),
  ):
    self._devices = list(devices)
    self._break_off = break_off
    self._counters = counters
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
    # A tuple that grows must not be seen by who lists all objects, to look for a leak, say.
    return tuple([int(v.numpy()) for v in [self._state, *(self._progress or []), *self._counters]])

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
