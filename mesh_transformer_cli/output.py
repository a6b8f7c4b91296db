"""Output whose reader may end before the program does: `mesh-transformer plan ... | head`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_NOBODY_READS = 141  # As a shell counts a program that SIGPIPE (13) has ended.


@contextlib.contextmanager
def until_its_reader_ends() -> Iterator[None]:
  """Ends the process, without an error to read, once whoever reads its output has ended."""
  try:
    try:
      yield
    finally:
      sys.stdout.flush()
  except BrokenPipeError:
    # What is left in its buffer would be written at exit, and fail once more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(_NOBODY_READS)
