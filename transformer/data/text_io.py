"""Text in and out of a trained model: prompts from a file, samples to a file."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import gin
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import model_files
from mesh_tensorflow.transformer.data.files import text_files
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies, Vocabulary

_LOG = logging.getLogger("mesh_tensorflow")
_MODULE = "mesh_tensorflow.transformer.utils"


def inputs_vocabulary(vocabulary: Vocabularies) -> Any:
  """The vocabulary of inputs: the first of a tuple, else the vocabulary itself."""
  return vocabulary[0] if isinstance(vocabulary, tuple) else vocabulary


def targets_vocabulary(vocabulary: Vocabularies) -> Any:
  """The vocabulary of targets: the second of a tuple, else the vocabulary itself."""
  return vocabulary[1] if isinstance(vocabulary, tuple) else vocabulary


@gin.configurable(module=_MODULE)
@affects("report")
def separate_vocabularies(
  inputs: Vocabulary = gin.REQUIRED, targets: Vocabulary = gin.REQUIRED
) -> tuple[Any, Any]:
  """A pair of vocabularies, for `run.vocabulary`."""
  return inputs, targets


def get_inputs_from_file(input_filename: str, ignore_comments: bool = False) -> list[str]:
  """Lines of a text file, without blanks at their ends; one empty last line is left out.

  Args:
    input_filename: a file.
    ignore_comments: whether lines that begin with # are left out.

  Raises:
    DataError: the file does not exist, is empty, or is not of its encoding (see `text_encoding`).
  """
  try:
    text = text_files.read_text_file(input_filename).text
  except DataError as e:
    raise DataError(f"the input file {input_filename!r} cannot be read: {e}") from e
  lines = [line.rstrip() for line in text.removesuffix("\n").split("\n")]
  if lines and not lines[-1]:
    lines.pop()
  if ignore_comments:
    lines = [line for line in lines if not line.startswith("#")]
  return lines


def encode_inputs(
  inputs: Sequence[str],
  vocabulary: Vocabularies,
  model_type: str,
  batch_size: int,
  sequence_length: int,
  eos_id: int = 1,
  unscored_prefix: Sequence[str] | None = None,
) -> np.ndarray:
  """Ids of lines of text, for decoding.

  Args:
    inputs: lines.
    vocabulary: a vocabulary or a pair; that of the inputs is used.
    model_type: a language model ("lm") gets no end-of-sequence id.
    batch_size: rows are filled up to a multiple of it, by copies of the first.
    sequence_length: rows are cut or padded with zeros to it.
    eos_id: the end-of-sequence id.
    unscored_prefix: for each line a text whose negated ids come first.

  Returns:
    int32 [rows, sequence_length].

  Raises:
    DataError: there are no lines.
  """
  rows = []
  for i, line in enumerate(inputs):
    ids = list(inputs_vocabulary(vocabulary).encode(line.strip()))
    if unscored_prefix:
      prefix = inputs_vocabulary(vocabulary).encode(unscored_prefix[i].strip())
      # Negative ids are seen and not scored: see `autoregressive_inputs` and the loss.
      ids = [-n for n in prefix] + ids
    # A language model goes on with the text; an encoder's input has an end.
    if model_type != "lm":
      ids.append(eos_id)
    rows.append(ids)
  return _filled_rows(rows, batch_size, sequence_length)


def encode_delimited_lm(
  inputs: Sequence[str],
  targets: Sequence[str],
  vocabulary: Vocabularies,
  batch_size: int,
  sequence_length: int,
  eos_id: int = 1,
  include_final_eos: bool = True,
) -> np.ndarray:
  """Ids of "inputs EOS targets EOS", for a language model of inputs and targets.

  Args:
    inputs: lines.
    targets: as many lines.
    vocabulary: a vocabulary or a pair.
    batch_size: rows are filled up to a multiple of it, by copies of the first.
    sequence_length: rows are cut or padded with zeros to it.
    eos_id: the end-of-sequence id.
    include_final_eos: whether it also comes after the targets.

  Returns:
    int32 [rows, sequence_length].

  Raises:
    DataError: there are no lines, or not equally many.
  """
  if len(inputs) != len(targets):
    raise DataError(f"encode_delimited_lm: {len(inputs)} inputs, but {len(targets)} targets")
  rows = []
  for a, b in zip(inputs, targets):
    ids = [*inputs_vocabulary(vocabulary).encode(a.strip()), eos_id]
    ids += targets_vocabulary(vocabulary).encode(b.strip())
    rows.append([*ids, eos_id] if include_final_eos else ids)
  return _filled_rows(rows, batch_size, sequence_length)


def _filled_rows(rows: Sequence[Sequence[int]], batch_size: int, length: int) -> np.ndarray:
  """Rows of ids cut or padded to a length; whole batches of them, by copies of the first."""
  if not rows:
    raise DataError("there are no input lines to encode")
  result = np.zeros([-(-len(rows) // batch_size) * batch_size, length], np.int32)
  for i, row in enumerate(rows):
    ids = row[:length]
    result[i, : len(ids)] = ids
  result[len(rows) :] = result[0]
  cut = sum(len(row) > length for row in rows)
  if cut:
    _LOG.warning(
      "%d of %d lines are cut to %d tokens (run.sequence_length)", cut, len(rows), length
    )
  return result


@gin.configurable(module=_MODULE)
@affects("report")
def clean_decodes(
  ids: npt.ArrayLike | tf.Tensor, eos_id: int = 1, pad_id: int = 0, length_axis: int = -1
) -> Any:
  """Replaces what comes after the first end-of-sequence id by padding.

  Args:
    ids: an integer tf.Tensor.
    eos_id: the end-of-sequence id, which is kept.
    pad_id: the padding.
    length_axis: the axis of positions.
  """
  ids = tf.convert_to_tensor(ids)
  ended = tf.cumsum(tf.cast(tf.equal(ids, eos_id), tf.int32), axis=length_axis, exclusive=True)
  return tf.where(tf.equal(ended, 0), ids, tf.cast(pad_id, ids.dtype))


def write_lines_to_file(
  lines: Sequence[object], filename: str, *, inside: str | None = None
) -> None:
  """Writes one line for each element; newlines in it become blanks. Of workers, only the chief.

  Args:
    lines: the elements.
    filename: of the file; its folder is made.
    inside: a folder in which the file must be, whatever links are in it: for names that no user
      gave.

  Raises:
    StorageError: it cannot be written.
  """
  if not workers.current().is_chief:
    return
  texts = [str(line).replace("\n", " ") + "\n" for line in lines]
  if inside is not None:
    model_files.write(inside, filename, "".join(texts).encode())
    return
  folder = os.path.dirname(filename)
  with model_files.errors_of_writing(folder or ".", os.path.basename(filename), "file name"):
    if folder:
      tf.io.gfile.makedirs(folder)
    with tf.io.gfile.GFile(filename, "w") as f:
      f.write("")  # Without any write a file that is there would stay.
      for text in texts:
        f.write(text)


def strip_ids(row: Sequence[int], eos_id: int = 1) -> list[int]:
  """Ids up to the first end-of-sequence or padding id, without it."""
  result = []
  for n in row:
    if n in (0, eos_id):
      break
    result.append(int(n))
  return result


def get_step_from_checkpoint_path(checkpoint_path: str) -> int:
  """The step in the name of a checkpoint: 5000 for ".../model.ckpt-5000.index".

  Raises:
    ConfigError: the name has no "model.ckpt-<step>".
  """
  path = checkpoint_path
  tail = path.rpartition("model.ckpt-")[2] if "model.ckpt-" in path else ""
  digits = tail.split(".")[0]
  if not digits.isdigit():
    raise ConfigError(f"{path!r} is not the name of a checkpoint (model.ckpt-<step>)")
  return int(digits)
