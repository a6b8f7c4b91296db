"""Texts that workers tell each other."""

from __future__ import annotations

import contextlib
import threading

import numpy as np

from mesh_tensorflow.workers.membership import gather

# Bytes. A compiled gather serves one length, so there are few different ones.
_STEP = 4096

# Longer than TensorFlow takes to notice that a worker is gone.
_LAST_WORDS_SECONDS = 45.0


def gather_texts(text: str) -> list[str]:
  """The texts of all workers; every worker calls it at the same place of its program.

  Args:
    text: text of this worker.

  Raises:
    WorkerLostError: another worker is gone.
  """
  data = text.encode()
  lengths = gather(np.int32(len(data)))
  if not lengths.any():
    return [""] * len(lengths)
  room = -(-int(lengths.max()) // _STEP) * _STEP
  rows = gather(np.frombuffer(data.ljust(room, b"\0"), np.int32))
  return [row.tobytes()[:n].decode() for row, n in zip(rows, lengths)]


def last_words(text: str) -> list[str]:
  """Gathers each worker's error message before exiting (bounded wait).

  To the others, a worker that exits before they know why is lost. So each waits for the others
  here, but not for long: one may be elsewhere in its program.

  Args:
    text: error message of this worker; "" if it only heard of the error from another one.

  Returns:
    The texts in the order of workers; [] if another worker is gone, or did not call this in time.
  """
  # This gather has a dtype of its own, so it never meets one of another place of the program.
  data = np.frombuffer(text.encode()[:_STEP].ljust(_STEP, b"\0"), np.int64)
  heard: list[str] = []

  def meet() -> None:
    with contextlib.suppress(Exception):
      rows = gather(data)
      heard.extend(row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows)

  thread = threading.Thread(target=meet, daemon=True, name="mtf-last-words")
  thread.start()
  thread.join(_LAST_WORDS_SECONDS)
  return list(heard)
