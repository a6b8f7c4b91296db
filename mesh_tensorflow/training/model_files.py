"""Files that a run writes into its model folder: metrics.jsonl, event files, loss.png."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint import folder, writer
from mesh_tensorflow.checkpoint import folder as folder_lib
from mesh_tensorflow.errors import StorageError
from mesh_transformer_cli import untrusted

_LOG = logging.getLogger("mesh_tensorflow")

# Folders in which something could not be written, and a warning said so; and those of them that
# nobody may write to.
_warned: set[str] = set()
_denied: set[str] = set()


def write(model_dir: str, path: str, content: bytes) -> None:
  """Writes a file inside a folder, in one step; links are replaced, not followed.

  Args:
    model_dir: the folder.
    path: of the file; folders between are made.
    content: all of it.

  Raises:
    StorageError: it cannot be written, or is not inside.
  """
  with errors_of_writing(model_dir, os.path.basename(path)):
    folder.write(model_dir, path, content)


@contextlib.contextmanager
def errors_of_writing(place: str, what: str, setting: str = "--model_dir") -> Iterator[None]:
  """Context manager that converts file-system errors to a `StorageError` naming the folder.

  Args:
    place: the folder.
    what: name of the written thing, for the message.
    setting: name of the setting that gives the folder.
  """
  try:
    yield
  except (tf.errors.OpError, OSError) as e:
    raise StorageError(
      f"cannot write {what} in the folder {place} ({writer.reason(e)}): give another "
      f"{setting}, the right to write there, or space on its disk"
    ) from e


def optional(model_dir: str, what: str, write_it: Callable[[], None]) -> bool:
  """Writes optional files of a run: scalars, evaluated texts, the command line.

  If it cannot be written, a warning says so, once for a folder, and the run goes on.

  Args:
    model_dir: the folder.
    what: is written, for the warning.
    write_it: writes it.

  Returns:
    Whether it is written.
  """
  if model_dir in _denied:
    return False
  try:
    with errors_of_writing(model_dir, what):
      write_it()
  except StorageError as e:
    if isinstance(e.__cause__, (tf.errors.PermissionDeniedError, PermissionError)):
      _denied.add(model_dir)
    if model_dir not in _warned:
      _warned.add(model_dir)
      _LOG.warning("%s. The run goes on without it, and without others of its notes there", e)
    return False
  return True


def notes(model_dir: str, place: str, what: str, write_it: Callable[[str | None], None]) -> None:
  """Writes notes of an evaluation into a folder.

  Those in the folder of the model are optional, and a link in it that leads elsewhere is refused,
  as a disk that cannot be written to is; another folder was named by a user, who gets an error.

  Args:
    model_dir: the folder of the model.
    place: where they go.
    what: they are, for messages.
    write_it: writes them; called with the folder in which all must be, or None.

  Raises:
    StorageError: they cannot be written into a folder of a user's.
  """
  if not _is_own(model_dir, place):
    with errors_of_writing(place, what, "folder"):
      write_it(None)
    return

  def write_inside() -> None:
    folder.inside(model_dir, os.path.join(place, "any"))
    write_it(model_dir)

  optional(model_dir, what, write_inside)


def _is_own(model_dir: str, place: str) -> bool:
  """True if `place` is the model's folder or below it, judged by the paths alone."""
  own, other = (p if "://" in p else os.path.abspath(p) for p in (model_dir, place))
  # With the slash at the end, "model2" is not in "model".
  return f"{other.rstrip('/')}/".startswith(f"{own.rstrip('/')}/")


def make_folder(path: str) -> None:
  """Makes a folder, if it is not there.

  Raises:
    StorageError: it cannot be made.
  """
  try:
    tf.io.gfile.makedirs(path)
  except tf.errors.OpError as e:
    raise StorageError(
      f"cannot make the folder {path} ({e.message}): give another --model_dir, or the right to "
      "write there"
    ) from e


# Numbers of the event files of this process.
_FILES = itertools.count()

# SummaryMetadata {plugin_data {plugin_name: "scalars"} data_class: DATA_CLASS_SCALAR}. With it
# `tf.summary.write` writes what `tf.summary.scalar` does, also where TensorBoard is not installed.
_SCALAR_METADATA = b"\x0a\x09\x0a\x07scalars\x20\x01"


class EventFile:
  """The scalars of a training, in an event file of its own.

  Training goes on where it cannot be written; a checkpoint will say what is wrong.

  Args:
    folder: the folder of the model; None: nothing is written.
  """

  def __init__(self, folder: str | None):
    self._folder = folder or ""
    self._writer: Any = None
    self._write_steps: Any = None
    if folder:
      self._try(self._open)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes the scalars of one step."""
    if self._writer is not None:
      with self._writer.as_default():
        self._try(lambda: _write(step, values))

  def write_steps(self, name: str, steps: np.ndarray, values: np.ndarray) -> None:
    """Writes a scalar of several steps: by one program, without Python in between.

    Args:
      name: of the scalar.
      steps: int64 [n].
      values: float32 [n].
    """
    if self._writer is not None and len(steps):
      arguments = tf.constant(name), tf.constant(steps), tf.constant(values)
      self._try(lambda: self._write_steps(*arguments))

  def flush(self) -> None:
    """Flushes buffered scalars to the file."""
    if self._writer is not None:
      self._try(self._writer.flush)

  def close(self) -> None:
    """Closes the file."""
    if self._writer is not None:
      self._try(self._writer.close)
    self._writer = None

  def _open(self) -> None:
    self._writer = writer = tf.summary.create_file_writer(self._folder)

    def write_steps(name: tf.Tensor, steps: tf.Tensor, values: tf.Tensor) -> None:
      def one(i: tf.Tensor) -> list[tf.Tensor]:
        with writer.as_default():
          tf.summary.write(name, values[i], step=steps[i], metadata=_SCALAR_METADATA)
        return [i + 1]

      tf.while_loop(lambda i: i < tf.size(steps), one, [tf.constant(0)], parallel_iterations=1)

    self._write_steps = tf.function(
      write_steps,
      input_signature=[
        tf.TensorSpec([], tf.string),
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([None], tf.float32),
      ],
      autograph=False,
    )

  def _try(self, write: Callable[[], None]) -> None:
    if not optional(self._folder, "summaries", write):
      self._writer = None


def _write(step: int, values: Mapping[str, float]) -> None:
  # TensorFlow keeps the tensor of every Python number that it was given, for ever; of arrays not.
  at = tf.constant(np.array(step, np.int64))
  for name, value in values.items():
    tf.summary.write(name, np.array(value, np.float32), step=at, metadata=_SCALAR_METADATA)


def _write_simple_values(folder: str, step: int, values: Mapping[str, float]) -> None:
  """Writes scalars as the TF1 library did, as `simple_value`.

  TensorBoard reads both kinds; programs of T5 read only this one. `tf.summary` writes tensors.
  """
  number = next(_FILES)
  writer = tf.raw_ops.SummaryWriter(shared_name=f"mtf_scalars_{number}", container="")
  tf.raw_ops.CreateSummaryFileWriter(
    writer=writer,
    logdir=folder,
    max_queue=10,
    flush_millis=120_000,
    # Within a second and a machine, what makes the name of a file one of its own.
    filename_suffix=f".{os.getpid()}.{number}.scalars",
  )
  try:
    for name, value in values.items():
      tf.raw_ops.WriteScalarSummary(
        writer=writer,
        step=np.array(step, np.int64),
        tag=np.array(name, object),
        value=np.array(value, np.float32),
      )
    tf.raw_ops.FlushSummaryWriter(writer=writer)
  finally:
    tf.raw_ops.CloseSummaryWriter(writer=writer)


def write_scalars(
  folder: str, step: int, values: Mapping[str, float], *, model_dir: str | None = None
) -> None:
  """Writes TensorBoard scalars into a new event file in a folder. Of workers, only the chief.

  Args:
    folder: where to.
    step: of the values.
    values: by name.
    model_dir: the folder of the model; see `notes`.

  Raises:
    StorageError: they cannot be written, and are not optional.
  """
  if not workers.current().is_chief:
    return

  def write(_: str | None) -> None:
    _write_simple_values(folder, step, values)

  if model_dir is None:
    write(None)
  else:
    notes(model_dir, folder, "summaries", write)


METRICS = "metrics.jsonl"


class MetricsFile:
  """The reports of all runs in one folder, in the order of their steps.

  A run that goes on from a checkpoint does again the steps after it that an earlier run has done:
  what that one has reported of them is left out when the file is opened, and so is a line that it
  did not finish. Where the file cannot be written, training goes on without it.

  Args:
    model_dir: the folder; None: nothing is written.
    step: number of steps done when the run begins.
  """

  def __init__(self, model_dir: str | None, step: int):
    self._folder = model_dir or ""
    self._path = os.path.join(self._folder, METRICS)
    self._open = bool(model_dir)
    if self._open and not optional(
      self._folder, METRICS, lambda: _begin(self._folder, self._path, step)
    ):
      self._open = False

  def write(self, step: int, values: Mapping[str, object]) -> None:
    """Appends a report, with the time, in seconds since 1970.

    Args:
      step: of the values.
      values: by name; numbers, or texts.
    """
    if not self._open:
      return
    report = {"step": step, "time": round(time.time(), 3)}
    line = json.dumps(report | {k: _plain(v) for k, v in values.items()})
    self._open = optional(
      self._folder, METRICS, lambda: _append(self._folder, self._path, f"{line}\n")
    )


def read_metrics(model_dir: str) -> list[dict[str, Any]]:
  """The reports in a folder; none if there are none, or they cannot be read.

  Args:
    model_dir: the folder.
  """
  return list(_reports(os.path.join(model_dir, METRICS)))


def _begin(directory: str, path: str, step: int) -> None:
  """Drops reports of steps that the run repeats; replaces a link by a copy of the file."""
  reports = [r for r in _reports(path) if r["step"] <= step]
  text = "".join(f"{json.dumps(r)}\n" for r in reports)
  folder_lib.write(directory, path, text.encode())


def _append(directory: str, path: str, text: str) -> None:
  with tf.io.gfile.GFile(folder_lib.inside(directory, path), "a") as f:
    f.write(text)


def _reports(path: str) -> Iterator[dict[str, Any]]:
  """The complete lines."""
  try:
    with tf.io.gfile.GFile(path, "rb") as f:
      lines = f.read().decode("utf-8", errors="replace").splitlines()
  except tf.errors.OpError:  # It is not there, or is no file.
    return
  for line in lines:
    try:
      report = untrusted.parse(line)
    except ValueError:  # It ends in the middle: the run was killed, or the disk was full.
      continue
    if isinstance(report, dict) and isinstance(report.get("step"), int):
      yield report


def _plain(value: Any) -> Any:
  """Converts a value for JSON: floats to 7 significant digits, NaN and infinities to None."""
  if isinstance(value, (str, bool, int)) or value is None:
    return value
  number = float(value)
  return float(f"{number:.7g}") if math.isfinite(number) else None


PICTURE = "loss.png"
HINT = "pip install matplotlib; then they are drawn as a picture"


def can_draw() -> bool:
  """True if matplotlib is installed."""
  return importlib.util.find_spec("matplotlib") is not None


def draw_losses(model_dir: str) -> str | None:
  """Draws what `metrics.jsonl` tells of losses.

  Args:
    model_dir: the folder of the model.

  Returns:
    The path of the picture; None if there is nothing to draw, or it cannot be written.
  """
  curves = _curves(read_metrics(model_dir))
  if not any(len(steps) > 1 for steps, _ in curves.values()):
    return None
  path = os.path.join(model_dir, PICTURE)
  picture = _picture(curves)
  if optional(model_dir, PICTURE, lambda: write(model_dir, path, picture)):
    return path
  return None


def _curves(reports: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
  """Steps and values of the losses: of training, and of evaluations."""
  curves: dict[str, tuple[list[int], list[float]]] = {}
  for report in reports:
    for name, value in report.items():
      is_loss = name == "loss" or (name.startswith("eval/") and name.endswith("/loss"))
      if (is_loss or name == "eval/loss") and isinstance(value, (int, float)):
        steps, values = curves.setdefault(name, ([], []))
        steps.append(report["step"])
        values.append(value)
  return curves


def _picture(curves: dict[str, tuple[list[int], list[float]]]) -> bytes:
  """The picture, as PNG. Without pyplot: it would look for a screen."""
  figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 4.5), dpi=120)
  axes = figure.subplots()
  for name, (steps, values) in sorted(curves.items()):
    style = "o-" if name.startswith("eval/") else "-"
    axes.plot(steps, values, style, linewidth=1.2, markersize=3, label=name)
  axes.set_xlabel("step")
  axes.set_ylabel("loss (nats)")
  axes.grid(alpha=0.3)
  axes.legend()
  file = io.BytesIO()
  figure.savefig(file, format="png", bbox_inches="tight")
  return file.getvalue()
