"""What a person sees of a long run: a progress bar, one line per report, TensorBoard scalars."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tqdm

from mesh_tensorflow import workers
from mesh_tensorflow.transformer.files import model_files


class TrainingProgress:
  """Reports a training run.

  On a terminal a progress bar shows loss, speed and time left; every `report_every` steps
  a line with the same facts stays on the screen. Elsewhere only the lines are written.

  Args:
    first_step: step at which the run starts.
    last_step: step at which it ends.
    tokens_per_step: positions in a batch.
    report_every: steps between lines.
    summary_dir: folder for TensorBoard files, or None.
    quiet: writes nothing but the TensorBoard files.
  """

  def __init__(
    self,
    first_step: int,
    last_step: int,
    tokens_per_step: int,
    report_every: int = 100,
    summary_dir: str | None = None,
    quiet: bool = False,
  ):
    self._first_step = self._step = first_step
    self._last_step = last_step
    self._tokens_per_step = tokens_per_step
    self._report_every = report_every
    self._quiet = quiet
    self._summary_dir = summary_dir or ""
    self._writer: Any = None
    if summary_dir:
      self._try_summaries(self._open_writer)
    self._bar = tqdm.tqdm(
      total=last_step,
      initial=first_step,
      unit="step",
      dynamic_ncols=True,
      disable=quiet or not sys.stderr.isatty(),
      smoothing=0.1,
    )
    self._window: list[float] = []
    self._skipped = 0
    self._started = self._window_started = time.perf_counter()
    self._window_step = first_step
    self._last_line_step = first_step

  def update(
    self,
    step: int,
    losses: list[float],
    learning_rate: float | None = None,
    *,
    skipped: int = 0,
  ) -> None:
    """Takes note of the losses of the steps up to `step`.

    Args:
      step: number of steps done.
      losses: the losses since the last call, in nats per position.
      learning_rate: of the last step.
      skipped: how many of the steps were skipped, because of NaN or infinity.
    """
    # Steps that were skipped have no loss: with one NaN the mean of the line would be NaN.
    self._window += [x for x in losses if math.isfinite(x)]
    self._skipped += skipped
    first = step - len(losses) + 1
    for i, loss in enumerate(losses):
      self._scalars(first + i, {"loss": loss})
    if learning_rate is not None:
      self._scalars(step, {"learning_rate": learning_rate})
    self._bar.update(step - self._step)
    self._step = step
    self._bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
    # A call may have many steps: a line is due when a multiple was reached or passed.
    if step // self._report_every > self._last_line_step // self._report_every or (
      step >= self._last_step
    ):
      self._line(step)

  def _line(self, step: int) -> None:
    now = time.perf_counter()
    # The first call traces the program; the speed before it says nothing.
    seconds = max(now - self._window_started, 1e-9)
    steps = max(step - self._window_step, 1)
    rate = steps / seconds
    tokens = rate * self._tokens_per_step
    left = (self._last_step - step) / rate
    loss = sum(self._window) / len(self._window) if self._window else math.nan
    skipped = f"  {self._skipped} step(s) skipped" if self._skipped else ""
    self.scalars(step, {"tokens_per_second": tokens})
    self.line(
      f"step {step:>7}/{self._last_step}  loss {loss:.4f}  {tokens:,.0f} tokens/s  "
      f"{_duration(left)} left{skipped}"
    )
    self._window = []
    self._window_started, self._window_step = now, step
    self._last_line_step = step

  def restart_clock(self) -> None:
    """Leaves the time until now out of the speed (tracing, evaluation, a checkpoint)."""
    self._window_started, self._window_step = time.perf_counter(), self._step

  def line(self, text: str) -> None:
    """Writes a line that stays."""
    if not self._quiet:
      if self._bar.disable:
        print(text, flush=True)
      else:
        self._bar.write(text)

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """Writes TensorBoard scalars."""
    self._scalars(step, values)
    if self._writer is not None:
      self._try_summaries(self._writer.flush)

  def _scalars(self, step: int, values: Mapping[str, float]) -> None:
    if self._writer is not None:
      with self._writer.as_default():
        self._try_summaries(lambda: _write(step, values))

  def close(self) -> None:
    self._bar.close()
    if self._writer is not None:
      self._try_summaries(self._writer.close)

  def _open_writer(self) -> None:
    self._writer = tf.summary.create_file_writer(self._summary_dir)

  def _try_summaries(self, write: Callable[[], None]) -> None:
    """Training goes on where scalars cannot be written; a checkpoint will say what is wrong."""
    if not model_files.optional(self._summary_dir, "summaries", write):
      self._writer = None


# Numbers of the event files of this process.
_FILES = itertools.count()

# SummaryMetadata {plugin_data {plugin_name: "scalars"} data_class: DATA_CLASS_SCALAR}. With it
# `tf.summary.write` writes what `tf.summary.scalar` does, also where TensorBoard is not installed.
_SCALAR_METADATA = b"\x0a\x09\x0a\x07scalars\x20\x01"


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
    model_dir: the folder of the model; see `model_files.notes`.

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
    model_files.notes(model_dir, folder, "summaries", write)


def _duration(seconds: float) -> str:
  seconds = int(round(seconds))
  if seconds < 100:
    return f"{seconds} s"
  minutes, seconds = divmod(seconds, 60)
  if minutes < 100:
    return f"{minutes} min {seconds} s"
  hours, minutes = divmod(minutes, 60)
  return f"{hours} h {minutes} min"
