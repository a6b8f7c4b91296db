"""Reports of workers to the launcher that has started them: their progress, and saved steps.

All write to one pipe, which the launcher reads: a line for each report, "worker word number". A
program that no launcher has started tells nobody.
"""

from __future__ import annotations

import contextlib
import functools
import os

# Environment variable that tells a worker its end of the pipe: "number:inode:worker".
VARIABLE = "MTF_LAUNCHER_REPORTS"

# The worker waits for the others; has joined them; has seen a whole checkpoint of a step.
JOINING, JOINED, SAVED = "joining", "joined", "saved"


def tell(word: str, number: int = 0) -> None:
  """Sends a report to the launcher, without waiting; does nothing if there is no launcher.

  Args:
    word: one of those above.
    number: the step that was saved.
  """
  pipe, worker = _end_of_pipe()
  if pipe is not None:
    # The launcher may be gone, or stopped.
    with contextlib.suppress(OSError):
      os.write(pipe, f"{worker} {word} {number}\n".encode())


@functools.cache
def _end_of_pipe() -> tuple[int | None, int]:
  # What this process starts is not the launcher's.
  text = os.environ.pop(VARIABLE, "")
  if not text:
    return None, 0
  pipe, inode, worker = (int(part) for part in text.split(":"))
  try:
    # A process in between may have closed it, and the number be another file's.
    return (pipe, worker) if os.fstat(pipe).st_ino == inode else (None, 0)
  except OSError:
    return None, 0


class Reports:
  """The launcher's end of the pipe.

  Attributes:
    at: the last of JOINING and JOINED that each worker has reported, by its number.
    saved: the newest step that was saved; -1 if none was.
  """

  def __init__(self) -> None:
    self._reader, self._writer = os.pipe()
    for end in (self._reader, self._writer):
      os.set_blocking(end, False)
    self._rest = b""
    self.at: dict[int, str] = {}
    self.saved = -1

  @property
  def file(self) -> int:
    """The end that workers inherit."""
    return self._writer

  def for_worker(self, worker: int) -> dict[str, str]:
    """The environment variable for one of them."""
    return {VARIABLE: f"{self._writer}:{os.fstat(self._writer).st_ino}:{worker}"}

  def read(self) -> None:
    """Reads the reports that have arrived since the last call; does not wait."""
    with contextlib.suppress(BlockingIOError):
      while data := os.read(self._reader, 4096):
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
          self._take(line.decode())

  def _take(self, line: str) -> None:
    worker, word, number = line.split()
    if word == SAVED:
      self.saved = max(self.saved, int(number))
    else:
      self.at[int(worker)] = word

  def close(self) -> None:
    """Closes both ends."""
    os.close(self._reader)
    os.close(self._writer)
