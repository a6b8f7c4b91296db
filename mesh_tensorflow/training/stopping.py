"""SIGTERM and Ctrl-C in training: the step is finished, a checkpoint written, and the program left.

Schedulers and cloud machines send SIGTERM some time before they take a machine away.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin

from mesh_tensorflow import exit_codes, workers
from mesh_tensorflow.arguments.declared import ABOVE_ZERO, affects, takes
from mesh_tensorflow.errors import ConfigError, StoppedError
from mesh_tensorflow.training.several_steps import StopFlag

# A signal that comes again so soon is the same one: `timeout`, containers and launchers send it to
# a process and to its group.
_SAME_SECONDS = 1.0


@gin.configurable(module="mesh_tensorflow.transformer.stopping", allowlist=["save_within_seconds"])
@affects("report")
@takes(save_within_seconds=ABOVE_ZERO)
class StopRequests:
  """Context manager that records signals which ask the program to stop.

  The first signal sets `requested`, and the loop of steps ends after the current step. Before the
  first step, where nothing can be lost, it ends the block with a `StoppedError`. The second signal
  ends the program at once; so does a watchdog if no checkpoint is begun in time. Both say what is
  lost.

  Python calls signal handlers only when TensorFlow returns to it, so a separate thread reads the
  numbers of the signals from a wakeup descriptor.

  Args:
    flag: is set when a signal comes; None: there is no loop to be ended.
    signals: the signals.
    save_within_seconds: how long after the first signal a checkpoint must have begun. On several
      workers, and where the position in the data is saved, calls of the compiled program last at
      most a third of it, as measured.
  """

  def __init__(
    self,
    flag: StopFlag | None = None,
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    *,
    save_within_seconds: float = 15.0,
  ):
    is_number = isinstance(save_within_seconds, (int, float)) and save_within_seconds is not True
    if not is_number or not save_within_seconds > 0:
      raise ConfigError(
        f"StopRequests.save_within_seconds = {save_within_seconds!r}: it must be a number above 0"
      )
    self.save_within_seconds = float(save_within_seconds)
    self._flag = flag
    self._signals = signals
    self._before: dict[signal.Signals, Any] = {}
    self._number = 0
    # Done, and what tells which one is saved; None: nothing can be lost.
    self._steps: tuple[int, Callable[[], int]] | None = None
    self._saving = False
    self._saved_at = 0.0  # When the last writing of a checkpoint ended.
    self._all_saved = ""  # In words, when no step is left that could be lost.
    self._thread: threading.Thread | None = None

  @property
  def requested(self) -> bool:
    """True if a stop signal was received."""
    return bool(self._number)

  def running(self, done: int, saved: int | Callable[[], int]) -> None:
    """Records the steps that would be lost if the program ended; call it before each call.

    Args:
      done: number of steps done.
      saved: the step of the last whole checkpoint; or a function of any thread that returns it, for
        one that may be whole before the steps are done.
    """
    self._steps = done, saved if callable(saved) else lambda: saved

  @contextlib.contextmanager
  def saving(self) -> Iterator[None]:
    """Context manager around the writing of a checkpoint; suspends the watchdog meanwhile."""
    self._saving = True
    try:
      yield
    finally:
      self._saved_at = time.monotonic()  # The time until the next one begins now.
      self._saving = False

  def saved(self, what: str) -> None:
    """Records that a complete checkpoint has all steps done, so that nothing can be lost.

    Args:
      what: a text that says what was saved.
    """
    self._all_saved = what

  def stop(self, what_was_saved: str, *, goes_on: bool = True) -> None:
    """Raises the error that ends the program.

    Args:
      what_was_saved: for its text.
      goes_on: whether the same command goes on from there.

    Raises:
      StoppedError: always.
    """
    advice = ". The same command goes on from there" if goes_on else ""
    name = signal.Signals(self._number).name if self._number else "a signal to another worker"
    raise StoppedError(f"stopped by {name}; {what_was_saved}{advice}")

  # ------------------------------------------------------------------ the signals

  def __enter__(self) -> StopRequests:
    # Python calls signal handlers in the main thread only, and lets only it set them.
    if threading.current_thread() is threading.main_thread():
      self._reader, self._writer = os.pipe()
      os.set_blocking(self._writer, False)
      self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
      # Signals that a shell has set to be ignored (background programs) stay ignored.
      wanted = [s for s in self._signals if signal.getsignal(s) is not signal.SIG_IGN]
      self._before = {s: signal.signal(s, self._handle) for s in wanted}
      self._thread = threading.Thread(target=self._watch, daemon=True, name="mtf-stop-requests")
      self._thread.start()
      _entered.append(self)
    for early in _early:
      # From now on, even after this block, no signal counts as one before training.
      early.hand_over(self)
    return self

  def __exit__(self, *exc_info: Any) -> None:
    if self._thread is None:
      return
    _entered.remove(self)
    self.restore_handlers()
    os.close(self._writer)  # Ends the thread.
    self._thread.join()
    os.close(self._reader)
    self._thread = None

  def as_if_entered_after(self, wakeup: int, before: Mapping[signal.Signals, object]) -> None:
    """Makes the block restore the handlers from before an enclosing block."""
    self._old_wakeup = wakeup
    self._before |= {s: before.get(s, handler) for s, handler in self._before.items()}

  def restore_handlers(self) -> None:
    """Restores the signal handlers from before the block."""
    signal.set_wakeup_fd(self._old_wakeup)
    for s, handler in self._before.items():
      signal.signal(s, handler)
    self._before = {}

  def _handle(self, number: int, frame: types.FrameType | None) -> None:
    """Signal handler, called in the main thread as soon as it runs Python code."""
    again = self.requested and time.monotonic() - self._came > _SAME_SECONDS
    self._note(number)
    if again and not _is_program() and callable(self._before[signal.Signals(number)]):
      self._before[signal.Signals(number)](number, frame)
    if self._steps is None and workers.current().size == 1:
      self.stop("no step was done, so nothing is lost")

  def _note(self, number: int) -> None:
    if not self._number:
      self._came = time.monotonic()
      self._number = number

  def _watch(self) -> None:
    """Watchdog thread: reads signal numbers, and ends the program when time is up."""
    told = False
    while True:
      left = self._seconds_left() if told else None
      if not select.select([self._reader], [], [], 1.0 if left == 0.0 else left)[0]:
        if self._seconds_left() == 0.0:
          self._end(f"no checkpoint was begun within {self.save_within_seconds:g} s")
        continue
      data = os.read(self._reader, 256)
      if not data:
        return
      if self._old_wakeup >= 0:
        with contextlib.suppress(OSError):
          os.write(self._old_wakeup, data)
      for number in data:
        if number not in self._before:
          continue
        if not told:
          told = True
          self._note(number)
          if self._steps is not None:
            self._tell()
          if self._flag is not None:
            self._flag.put(True)
        elif time.monotonic() - self._came > _SAME_SECONDS:
          self._end("a second signal came", number)

  def _seconds_left(self) -> float | None:
    """Seconds until a checkpoint must begin (at least 1 while one is written); None: no limit."""
    if self._all_saved:
      return None
    left = max(self._came, self._saved_at) + self.save_within_seconds - time.monotonic()
    return max(left, 1.0 if self._saving else 0.0)

  def _tell(self) -> None:
    bound = f"{self.save_within_seconds:g} s" if _is_program() else "some time"
    _say(
      f"\n{self._name}: a checkpoint is written when the step that is going on is done, within "
      f"{bound} (StopRequests.save_within_seconds); once more ends the program at once"
    )

  @property
  def _name(self) -> str:
    return signal.Signals(self._number).name

  def _end(self, why: str, number: int | None = None) -> None:
    """Ends the program, where it is one, from the thread: TensorFlow may not return for long."""
    if not _is_program():
      return
    steps = self._steps
    done, saved = (0, 0) if steps is None else (steps[0], steps[1]())
    if self._all_saved:
      lost, code = f"nothing is lost: {self._all_saved}", exit_codes.STOPPED
    elif steps is None:
      lost, code = "nothing is lost: no step was done", exit_codes.STOPPED
    else:
      lost = (
        f"the steps after the last whole checkpoint (step {saved}) are lost; step {done} was "
        "reached, or more"
      )
      code = exit_codes.of_signal(number or self._number)
    _say(f"{self._name}: {why}; the program ends. {lost[0].upper()}{lost[1:]}")
    with contextlib.suppress(OSError, ValueError):
      sys.stdout.flush()
    os._exit(code)


class BeforeTraining:
  """Ends the program at once when a signal comes in its block, before a `StopRequests` is entered.

  From the start until training begins, while workers meet, data is opened and the model is made,
  there is nothing to be saved: the exit code is that of a training that was stopped.

  Args:
    prefix: of the message.
    signals: the signals.
  """

  def __init__(
    self, prefix: str = "", signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
  ):
    self._prefix = prefix
    self._signals = signals
    self._before: dict[signal.Signals, Any] = {}
    self._over = False
    self._thread: threading.Thread | None = None

  def __enter__(self) -> BeforeTraining:
    if _is_program() and threading.current_thread() is threading.main_thread():
      self._reader, self._writer = os.pipe()
      os.set_blocking(self._writer, False)
      self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
      wanted = [s for s in self._signals if signal.getsignal(s) is not signal.SIG_IGN]
      # The thread sees a signal sooner than Python's handler, which waits for TensorFlow to return.
      self._before = {s: signal.signal(s, lambda *_: None) for s in wanted}
      self._thread = threading.Thread(target=self._watch, daemon=True, name="mtf-before-training")
      self._thread.start()
      _early.append(self)
    return self

  def __exit__(self, *exc_info: Any) -> None:
    if self._thread is None:
      return
    _early.remove(self)
    if not self._over:
      self.restore_handlers()
    os.close(self._writer)  # Ends the thread.
    self._thread.join()
    os.close(self._reader)
    self._thread = None

  def hand_over(self, stop: StopRequests) -> None:
    """Hands the signals over to a training, which restores the handlers from before this block."""
    if not self._over:
      self._over = True
      stop.as_if_entered_after(self._old_wakeup, self._before)

  def restore_handlers(self) -> None:
    """Restores the signal handlers from before the block."""
    signal.set_wakeup_fd(self._old_wakeup)
    for s, handler in self._before.items():
      signal.signal(s, handler)
    self._before = {}

  def _watch(self) -> None:
    while data := os.read(self._reader, 256):
      came = [number for number in data if number in self._before]
      if came and not self._over:
        name = signal.Signals(came[0]).name
        _say(
          f"{self._prefix}StoppedError: stopped by {name} before training began; nothing is lost: "
          "no step was done. The same command goes on from there"
        )
        os._exit(exit_codes.STOPPED)


# Those whose blocks are entered, for processes that this one forks.
_entered: list[StopRequests] = []
_early: list[BeforeTraining] = []


def _after_fork() -> None:
  """Restores the earlier signal handlers in a forked process."""
  for entered in (_entered, _early):
    while entered:
      with contextlib.suppress(ValueError, OSError):
        entered.pop().restore_handlers()


os.register_at_fork(after_in_child=_after_fork)


def _is_program() -> bool:
  """True in a script, whose process may be ended; False in a notebook or at a Python prompt."""
  return "ipykernel" not in sys.modules and not hasattr(sys, "ps1") and not sys.flags.interactive


def _say(text: str) -> None:
  # Nobody may be left to read it.
  with contextlib.suppress(OSError):
    os.write(2, f"{text}\n".encode())
