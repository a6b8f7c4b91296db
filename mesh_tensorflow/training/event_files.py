"""TensorBoard's event files, of a training and of evaluations."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.training import model_files

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
    if not model_files.optional(self._folder, "summaries", write):
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
