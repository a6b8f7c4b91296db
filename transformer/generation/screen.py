"""Texts on the screen and in a file, while they are written."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.training import model_files

# Between two pieces of text that appear: often enough to look like writing.
_SECONDS = 0.1
_MOST_TOKENS = 32


class Pace:
  """Adapts the number of tokens per decode call, so that a call takes about 0.1 s.

  It does not influence the generated text.
  """

  def __init__(self) -> None:
    self._tokens, self._last = 1.0, time.perf_counter()

  def __call__(self) -> int:
    """Returns the number of tokens of the next call; to be called before each."""
    now = time.perf_counter()
    # The first call traces the programs, and says nothing.
    factor = _SECONDS / max(now - self._last, 1e-6)
    self._tokens = min(max(self._tokens * min(max(factor, 0.5), 2.0), 1.0), _MOST_TOKENS)
    self._last = now
    return int(self._tokens)


class Screen:
  """Shows several texts, one below the other, the first that has not ended as it grows.

  Nothing is shown before the first `update`: what is to be said of the prompts comes before them.

  Args:
    headings: a line above each text; None: there is none.
    beginnings: what each text begins with: its prompt.
    stream: where to; the standard output by default.
  """

  def __init__(
    self, headings: Sequence[str | None], beginnings: Sequence[str], stream: IO[str] | None = None
  ):
    self._headings, self._beginnings = headings, beginnings
    self._stream = stream or sys.stdout
    self._sure = [""] * len(headings)
    self._ended = [False] * len(headings)
    self._now, self._shown = -1, 0

  def update(self, number: int, sure: str, ended: bool) -> None:
    """Records a text, and shows what can be shown.

    Args:
      number: of the text.
      sure: what comes behind its beginning, so far; longer with each call.
      ended: whether that is all.
    """
    self._sure[number], self._ended[number] = sure, ended
    if self._now < 0:
      self._next()
    while self._now < len(self._sure):
      text = self._sure[self._now]
      self._stream.write(text[self._shown :])
      self._shown = len(text)
      if not self._ended[self._now]:
        break
      self._stream.write("\n")
      self._next()
    self._stream.flush()

  def _next(self) -> None:
    self._now, self._shown = self._now + 1, 0
    if self._now < len(self._sure):
      heading = self._headings[self._now]
      if heading is not None:
        self._stream.write(f"{heading}\n")
      self._stream.write(self._beginnings[self._now])


@contextlib.contextmanager
def output_file(path: str | None) -> Iterator[Any]:
  """The file for texts, made anew; None without a path, and in workers that are not the chief.

  Raises:
    StorageError: it cannot be written.
  """
  if path is None or not workers.current().is_chief:
    yield None
    return
  folder, name = os.path.split(path)
  with model_files.errors_of_writing(folder or ".", name, "file name (sample.output)"):
    if folder:
      tf.io.gfile.makedirs(folder)
    file = tf.io.gfile.GFile(path, "w")
    file.write("")  # Else nothing is opened, and no error comes before the work.
    file.flush()
  try:
    yield file
  finally:
    with model_files.errors_of_writing(folder or ".", name, "file name (sample.output)"):
      file.close()
