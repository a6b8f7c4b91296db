"""Files of prompts, and files of results that are resumed after an interruption."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf

from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import DataError, StoppedError
from mesh_tensorflow.training import model_files
from mesh_tensorflow.transformer.data.files import text_files
from mesh_tensorflow.transformer.data.text_io import get_inputs_from_file
from mesh_transformer_cli import untrusted

_FORMAT = 1


class ResumableFile:
  """A file of results, one a line.

  Until it is complete its lines are in `<path>.unfinished`, and `<path>.progress` records how many
  of them are committed. Lines are synced to the disk before they are committed, so after any end of
  the process (SIGKILL, a power cut) a run of the same work resumes after the last committed line,
  and the file becomes the same as without interruption. Of workers, the chief reads and writes.

  Where files cannot be appended to ("gs://...") all is written at the end, and an interrupted run
  starts over.

  Args:
    path: path of the file; its folder is created.
    work: JSON-like values that determine the results; a file of other work is started over.

  Attributes:
    done: number of committed lines.
    resumed: number of lines that an earlier run had committed.

  Raises:
    StorageError: it cannot be written.
  """

  def __init__(self, path: str, work: Mapping[str, object]):
    self._path, self._remote = path, "://" in path
    # Hashed, since it may be large: all settings and texts.
    text = json.dumps([_FORMAT, work], sort_keys=True, default=repr)
    self._work = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    self._bytes = 0
    # Every worker resumes at the same line and holds the earlier lines: the mode returns them.
    self._lines: list[str] = by_chief(self._open)
    self.done = self.resumed = len(self._lines)

  @property
  def lines(self) -> list[str]:
    """All committed lines, without line ends."""
    return self._lines

  def append(self, lines: Sequence[str]) -> None:
    """Appends lines, each with its line end, and commits them."""
    done = self.done + len(lines)

    def write() -> None:
      data = "".join(lines).encode("utf-8", "surrogatepass")
      with self._errors(), open(self._part, "ab") as f:  # noqa: PTH123
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
      self._bytes += len(data)
      self._note(done)

    if not self._remote:
      by_chief(write)
    self._lines += [line.removesuffix("\n") for line in lines]
    self.done = done

  def finish(self) -> None:
    """Renames the complete file to its final name."""
    by_chief(self._finish)

  def _open(self) -> list[str]:
    folder = os.path.dirname(self._path)
    with self._errors():
      if folder:
        tf.io.gfile.makedirs(folder)
      if self._remote:
        return []
      lines, self._bytes = self._counted()
      with open(self._part, "ab") as f:  # noqa: PTH123
        f.truncate(self._bytes)
    self._note(len(lines))
    return lines

  def _counted(self) -> tuple[list[str], int]:
    """The committed lines and their size in bytes; ([], 0) if there are none of the same work."""
    try:
      with open(self._progress, encoding="utf-8") as f:  # noqa: PTH123
        noted = untrusted.expect(untrusted.parse(f.read()), {"bytes": int})
      with open(self._part, "rb") as f:  # noqa: PTH123
        data = f.read(noted["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
      return [], 0
    lines = data.decode("utf-8", "surrogatepass").split("\n")
    whole = lines.pop() == "" and len(data) == noted["bytes"] and len(lines) == noted.get("done")
    return (lines, len(data)) if whole and noted.get("work") == self._work else ([], 0)

  def _note(self, done: int) -> None:
    noted = {"work": self._work, "done": done, "bytes": self._bytes}
    unfinished = f"{self._progress}.new"
    with self._errors():
      with open(unfinished, "w", encoding="utf-8") as f:  # noqa: PTH123
        json.dump(noted, f)
        f.flush()
        os.fsync(f.fileno())
      os.replace(unfinished, self._progress)

  def _finish(self) -> None:
    with self._errors():
      if self._remote:
        with tf.io.gfile.GFile(self._path, "w") as f:
          f.write("".join(f"{line}\n" for line in self._lines))
        return
      os.replace(self._part, self._path)
      with contextlib.suppress(FileNotFoundError):
        os.remove(self._progress)

  @property
  def _part(self) -> str:
    return f"{self._path}.unfinished"

  @property
  def _progress(self) -> str:
    return f"{self._path}.progress"

  def _errors(self) -> contextlib.AbstractContextManager[None]:
    folder, name = os.path.split(self._path)
    return model_files.errors_of_writing(folder or ".", name, "file name")


@contextlib.contextmanager
def stopped_by_signals(what_is_kept: Callable[[], str]) -> Iterator[None]:
  """Turns SIGTERM and Ctrl-C inside the block into a `StoppedError`, between TensorFlow calls.

  Args:
    what_is_kept: returns the part of the error message that says what was saved.

  Raises:
    StoppedError: a signal came.
  """
  if threading.current_thread() is not threading.main_thread():
    yield  # Python lets only the main thread set handlers.
    return

  def stop(number: int, _: object) -> None:
    raise StoppedError(f"stopped by {signal.Signals(number).name}; {what_is_kept()}")

  wanted = [s for s in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(s) is not signal.SIG_IGN]
  before = {s: signal.signal(s, stop) for s in wanted}
  try:
    yield
  finally:
    for s, handler in before.items():
      signal.signal(s, handler)


# ------------------------------------------------------------------ prompts and results

# Under which a JSON object may have its text.
_KEYS = ("prompt", "inputs", "text")


def is_json_lines(filename: str) -> bool:
  """True if a file name ends in .jsonl or .ndjson, with or without .gz."""
  return filename.removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def read_prompts(filename: str) -> list[str]:
  """The inputs of a file: of JSON lines each text as it is, else see `get_inputs_from_file`.

  Args:
    filename: a text file. In JSON lines each line is a text, or an object with a text under
      "prompt", "inputs" or "text".

  Raises:
    DataError: the file cannot be read, or is empty, or has a line that is not JSON.
  """
  if not is_json_lines(filename):
    return get_inputs_from_file(filename)
  try:
    lines = text_files.read_text_file(filename, "utf-8").text.split("\n")
  except DataError as e:
    raise DataError(f"the input file {filename!r} cannot be read: {e}") from e
  return [_text_of(line, f"{filename}:{i}") for i, line in enumerate(lines, 1) if line.strip()]


def _text_of(line: str, place: str) -> str:
  try:
    value = untrusted.parse(line)
  except ValueError as e:
    raise DataError(f"{place} is not JSON: {e}") from e
  if isinstance(value, dict):
    value = next((value[k] for k in _KEYS if k in value), None)
  if not isinstance(value, str):
    raise DataError(
      f"{place}: a line must be a text in quotes, or an object with one under "
      f"{', '.join(map(repr, _KEYS))}"
    )
  return value


def result_line(filename: str, prompt: str, sample: int, text: str) -> str:
  """A line of a file of results, with its end.

  Args:
    filename: of the file; says of which kind it is.
    prompt: the input.
    sample: number of the sample of it, from 0.
    text: what came of it.

  Returns:
    In JSON lines the texts as they are; else newlines in the text are blanks, so that line and
    input go together.
  """
  if is_json_lines(filename):
    return json.dumps({"prompt": prompt, "sample": sample, "text": text}, ensure_ascii=False) + "\n"
  return text.replace("\n", " ") + "\n"


def text_entry(filename: str, prompt: str, sample: int, text: str) -> str:
  """An entry of `sample.output`: as `result_line`, but a text file has the texts as they are.

  Each ends with a line "---", which also ends the last one.
  """
  if is_json_lines(filename):
    return result_line(filename, prompt, sample, text)
  return f"{text}\n---\n"
