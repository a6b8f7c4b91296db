"""SIGTERM and Ctrl-C in training: the step is finished, a checkpoint written, and the program left.

Schedulers and cloud machines send SIGTERM some time before they take a machine away.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from mesh_tensorflow.errors import StoppedError

# Exit code of a training that was asked to stop, and whose last step is saved.
EXIT_STOPPED = 74


class StopRequests:
  """Takes note of signals that ask the program to stop, inside its block.

  The first signal is only noted; `requested` says so. The second one ends the program at once.

  Args:
    signals: the signals.
  """

  def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)):
    self._signals = signals
    self._before: dict[signal.Signals, Any] = {}
    self._name = ""

  @property
  def requested(self) -> bool:
    """Whether a signal came."""
    return bool(self._name)

  def stop(self, what_was_saved: str) -> None:
    """Raises the error that ends the program.

    Args:
      what_was_saved: for its text.

    Raises:
      StoppedError: always.
    """
    raise StoppedError(
      f"stopped by {self._name or 'a signal to another worker'}; {what_was_saved}. The same "
      "command goes on from there"
    )

  def __enter__(self) -> StopRequests:
    # Python calls signal handlers in the main thread only, and lets only it set them.
    if threading.current_thread() is threading.main_thread():
      # What a shell has set to be ignored (programs in the background) stays so.
      wanted = [s for s in self._signals if signal.getsignal(s) is not signal.SIG_IGN]
      self._before = {s: signal.signal(s, self._note) for s in wanted}
    return self

  def __exit__(self, *exc_info: Any) -> None:
    for s, handler in self._before.items():
      signal.signal(s, handler)
    self._before = {}

  def _note(self, number: int, frame: Any) -> None:
    del frame
    self._name = signal.Signals(number).name
    for s, handler in self._before.items():
      # Python raises KeyboardInterrupt when TensorFlow returns, which may take long. A notebook,
      # though, shall live on.
      is_program = handler is signal.default_int_handler and "ipykernel" not in sys.modules
      signal.signal(s, signal.SIG_DFL if is_program else handler)
    # Nobody may be left to read it.
    with contextlib.suppress(OSError):
      os.write(
        2,
        f"\n{self._name}: a checkpoint is written when the steps that are going on are done; "
        "once more ends the program at once\n".encode(),
      )
