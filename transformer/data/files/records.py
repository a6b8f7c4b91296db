"""TFRecord files: damaged ones are named, or left out from the damage on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

from mesh_tensorflow.errors import DataError
from mesh_tensorflow.training import data, input_shards
from mesh_tensorflow.transformer.data.files import text_files

_LOG = logging.getLogger("mesh_tensorflow")
_BUFFER = 64 * 1024 * 1024

# TensorFlow's error for a damaged record does not say of which file: these were opened.
_OPENED: dict[str, None] = {}

_Element = TypeVar("_Element")


def tfrecord_dataset(
  filenames: str | Sequence[str], *, skip_damaged: bool = False
) -> tf.data.Dataset:
  """The records of TFRecord files, in order.

  Of a divided input those of this part; see `input_shards.current`.

  Args:
    filenames: one or several files.
    skip_damaged: reads all files once before, and leaves out the rest of a file from a damaged
      record on; a warning names them. (What is behind a damaged record cannot be told from it.)
  """
  files = [filenames] if isinstance(filenames, str) else list(filenames)
  return input_shards.current().of_files(files, lambda part: _records(part, skip_damaged))


def _records(files: list[str], skip_damaged: bool) -> tf.data.Dataset:
  _OPENED.update(dict.fromkeys(files))
  input_shards.note(files)
  if skip_damaged:
    damaged = {f: n for f, n in ((f, first_damaged(f)) for f in files) if n is not None}
    if damaged:
      _LOG.warning(
        "%d of %d files are damaged, and left out from there on: %s",
        len(damaged), len(files), "; ".join(_place(f, n) for f, n in damaged.items()),
      )  # fmt: skip
      pairs = (files, tf.constant([damaged.get(f, -1) for f in files], tf.int64))
      return tf.data.Dataset.from_tensor_slices(pairs).flat_map(
        # -1 takes all.
        lambda f, n: tf.data.TFRecordDataset(f, buffer_size=_BUFFER).take(n)
      )
  return tf.data.TFRecordDataset(files, buffer_size=_BUFFER)


def first_damaged(filename: str) -> int | None:
  """The number of the first record of a file that cannot be read; None if all can."""
  count = 0
  try:
    for _ in tf.data.TFRecordDataset(filename, buffer_size=_BUFFER):
      count += 1
  except tf.errors.DataLossError:
    return count
  return None


def reading(batches: Iterable[_Element]) -> Iterator[_Element]:
  """Yields the elements of a data set; its errors about damaged files name the file.

  Raises:
    DataError: a TFRecord file is damaged, or a text file is not of its encoding.
  """
  return data.reading(batches, _explained)


def _explained(error: tf.errors.OpError) -> DataError | None:
  if isinstance(error, tf.errors.DataLossError):
    damaged = [(f, first_damaged(f)) for f in _OPENED if tf.io.gfile.exists(f)]
    where = "; ".join(_place(f, n) for f, n in damaged if n is not None)
    return DataError(
      f"the training data is damaged: {where or error.message}. Get the file again; or bind "
      "pretokenized_tfrecord_dataset.skip_damaged = True, which leaves out the rest of it"
    )
  if "Invalid formatting on input string" in error.message:
    text_files.check_opened()
  return data.raised_by_generator(error)


def _place(filename: str, number: int) -> str:
  return f"{filename}: record {number} (from 0)"
