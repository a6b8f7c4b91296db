"""Workers that a launcher has started end with it, however it ends.

The launcher holds one end of a pipe, each worker the other: when the launcher is gone, and be it by
SIGKILL, the worker reads the end of the pipe.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time

# Environment variable that tells the worker its end of the pipe: "number:inode".
VARIABLE = "MTF_LAUNCHER_PIPE"

# Time limit for a worker to write its last checkpoint after its launcher has gone.
_GRACE_SECONDS = 60.0


def pipe_for_worker(pipe: int) -> dict[str, str]:
  """The environment variable for a worker that inherits the reading end of a pipe."""
  return {VARIABLE: f"{pipe}:{os.fstat(pipe).st_ino}"}


def end_with_launcher() -> None:
  """Asks this process to stop, as SIGTERM does, when its launcher is gone.

  Does nothing if no launcher started it, and when called again.
  """
  # What this process starts is not the launcher's.
  text = os.environ.pop(VARIABLE, "")
  if not text:
    return
  pipe, inode = (int(part) for part in text.split(":"))
  try:
    if os.fstat(pipe).st_ino != inode:
      return  # A process in between has closed it, and the number is another file's.
  except OSError:
    return
  threading.Thread(target=_watch, args=(pipe,), daemon=True, name="mtf-launcher-watch").start()


def _watch(pipe: int) -> None:
  with contextlib.suppress(OSError):
    while os.read(pipe, 1):
      pass
  time.sleep(0.2)  # Until all that the launcher had open is closed.
  _forget_broken_outputs()
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(_GRACE_SECONDS)
  os.kill(os.getpid(), signal.SIGKILL)


def _forget_broken_outputs() -> None:
  """Redirects stdout and stderr to the null device if the launcher at their other end is gone."""
  nowhere = os.open(os.devnull, os.O_WRONLY)
  for descriptor in (1, 2):
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if any(event & (select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0)):
      os.dup2(nowhere, descriptor)
  os.close(nowhere)
