"""Language-model data from plain text files: held in memory, cut by index, resumable anywhere.

What example n is depends on the files, the settings, the seed and n, and on nothing else: a
data set that starts at example n is not read up to there.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, AnyStr

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data import encoding as encoding_lib
from mesh_tensorflow.transformer.data import packing
from mesh_tensorflow.transformer.files import input_shards, text_files
from mesh_tensorflow.transformer.files.input_shards import BatchRows
from mesh_tensorflow.transformer.files.text_files import TextFile
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID

_LOG = logging.getLogger("mesh_tensorflow")

# Examples made by one call of the graph: the cost of a call is shared, memory stays small.
_BLOCK = 64
_ENDLESS = 2**62


@gin.configurable(module="mesh_tensorflow.transformer.dataset")
def text_lm_dataset(
  sequence_length: int | Mapping[str, int],
  vocabulary: Any,
  dataset_split: str = "train",
  train_files: str | Sequence[str] = gin.REQUIRED,
  validation_files: str | Sequence[str] | None = None,
  validation_fraction: float | None = None,
  validation_unit: str = "text",
  mode: str = "documents",
  document_unit: str = "file",
  too_long: str = "split",
  context_tokens: int = 0,
  encoding: str | None = text_files.AS_BOUND,
  skip_bad_files: bool = False,
  seed: int = 0,
  skip: int = 0,
  batch_size: int | None = None,
  *,
  batch_rows: BatchRows | None = None,
) -> tf.data.Dataset:
  """Examples for a language model from plain text files (UTF-8; .gz are uncompressed).

  The training split is endless and random. Every other split is finite and in order, and all of
  its tokens are scored once (but not the first `context_tokens`).

  Args:
    sequence_length: an int, or a dict with "targets".
    vocabulary: a `Vocabulary`, or an (inputs, targets) tuple of them.
    dataset_split: "train"; any other name means the held-out text.
    train_files: a glob of text files, or a list of globs.
    validation_files: the same, for the held-out text.
    validation_fraction: hold this part of `train_files` out instead.
    validation_unit: how that part is chosen: "text" takes the end of all text (in documents mode,
      the last documents); "file" takes whole files, spread evenly over the sorted paths.
    mode: "stream": the files are one long text, cut into windows: random ones for training
      (drawn with replacement), consecutive ones otherwise, the last zero-padded; feature `targets`.
      "documents": each document ends with EOS, and several share a row; features `targets`,
      `targets_segmentation`, `targets_position`; training goes through all rows in an order
      that differs in each epoch.
    document_unit: "file", "paragraph" (blank lines between) or "line": what a document is.
    too_long: a document with more than `sequence_length` ids (EOS counts) is "split" into several
      sequences, cut off ("truncate"), or refused ("error").
    context_tokens: stream mode: the first so many ids of a window are negated: the model sees
      them, and they are not scored; consecutive windows overlap by as much.
    encoding: of the files; by default that of `text_encoding`; None passes bytes to the vocabulary.
    skip_bad_files: leave out empty and undecodable files, with a warning.
    seed: of the random choices.
    skip: start at this example.
    batch_size: has no effect.
    batch_rows: make only the examples that are needed of each batch, the first of which begins at
      `skip`; None: all.

  Returns:
    A data set of dicts of int32 [sequence_length].

  Raises:
    ConfigError: a setting is wrong.
    DataError: a file is missing, empty or undecodable; a split has no text or one shorter than
      a window; a document is too long; or the vocabulary cannot encode the text.
  """
  del batch_size
  if isinstance(sequence_length, Mapping):
    if "targets" not in sequence_length:
      raise ConfigError(f"text_lm_dataset: sequence_length {sequence_length} has no 'targets'")
    sequence_length = sequence_length["targets"]
  length = int(sequence_length)
  _check_choice("mode", mode, ("documents", "stream"))
  _check_choice("document_unit", document_unit, tuple(_SPLITTERS))
  _check_choice("too_long", too_long, ("split", "truncate", "error"))
  _check_choice("validation_unit", validation_unit, ("text", "file"))
  if not 0 <= context_tokens < length:
    raise ConfigError(
      f"text_lm_dataset: context_tokens (={context_tokens}) must be at least 0 and less than "
      f"sequence_length (={length})"
    )
  if context_tokens and mode != "stream":
    raise ConfigError("text_lm_dataset: context_tokens needs mode 'stream'")
  if skip < 0:
    raise ConfigError(f"text_lm_dataset: skip (={skip}) must not be negative")
  if isinstance(vocabulary, tuple):
    vocabulary = vocabulary[1]
  train = dataset_split == "train"
  rows = batch_rows or input_shards.current().rows()
  files, fraction = _choose_files(
    train, train_files, validation_files, validation_fraction, validation_unit,
    encoding=encoding, skip_bad_files=skip_bad_files,
  )  # fmt: skip
  what = f"the {dataset_split} split of {train_files if files is None else _name_of(files)}"
  if mode == "stream":
    tokens = np.concatenate([_encode(vocabulary, f.text, f.path) for f in files])
    encoding_lib.check_known(tokens, vocabulary, what)
    tokens = _part(tokens, fraction, train)
    return _stream(tokens, length, context_tokens, train, seed, skip, rows, what)
  split = _SPLITTERS[document_unit]
  documents = [(f.path, d) for f in files for d in split(f.text)]
  documents = _part(documents, fraction, train)
  return _documents(documents, vocabulary, length, too_long, train, seed, skip, rows, what)


# ------------------------------------------------------------------ files and splits


def _choose_files(
  train: bool,
  train_files: str | Sequence[str],
  validation_files: str | Sequence[str] | None,
  fraction: float | None,
  unit: str,
  **options: Any,
) -> tuple[list[TextFile], float]:
  """The files of the split, and which part of their text is still to be held out."""
  if fraction is not None and not 0 < fraction < 1:
    raise ConfigError(
      f"text_lm_dataset: validation_fraction (={fraction}) must be between 0 and 1; without "
      "validation data leave it out"
    )
  if fraction is not None and validation_files is not None:
    raise ConfigError("text_lm_dataset: give validation_files or validation_fraction, not both")
  if validation_files is not None:
    both = _real_paths(train_files, not train) & _real_paths(validation_files, False)
    if both:
      raise DataError(
        f"text_lm_dataset: {len(both)} file(s) are in train_files and in validation_files, "
        f"{min(both)} for instance: the held-out text would be trained on"
      )
    return text_files.read_text_files(train_files if train else validation_files, **options), 0.0
  if fraction is None:
    if not train:
      raise ConfigError(
        "text_lm_dataset: there is no held-out text; give validation_files or validation_fraction"
      )
    return text_files.read_text_files(train_files, **options), 0.0
  files = text_files.read_text_files(train_files, **options)
  if unit == "text":
    return files, fraction
  held_out = [math.floor((i + 1) * fraction) > math.floor(i * fraction) for i in range(len(files))]
  chosen = [f for f, h in zip(files, held_out) if h != train]
  if not chosen:
    raise DataError(
      f"text_lm_dataset: validation_fraction {fraction} of {len(files)} file(s) leaves none for "
      f"{'training' if train else 'validation'}; use validation_unit 'text'"
    )
  return chosen, 0.0


def _real_paths(globs: str | Sequence[str], may_be_gone: bool) -> set[str]:
  """The files that match, without links; to evaluate, those of training need not be there."""
  try:
    return {os.path.realpath(p) for p in text_files.find_files(globs)}
  except DataError:
    if not may_be_gone:
      raise
    return set()


def _part(items: Any, fraction: float, train: bool) -> Any:
  """The first 1 - fraction of a sequence for training, the rest otherwise."""
  if not fraction:
    return items
  border = int(len(items) * (1 - fraction))
  return items[:border] if train else items[border:]


def _name_of(files: Sequence[TextFile]) -> str:
  return files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more files"


def _whole(text: AnyStr) -> list[AnyStr]:
  return [text]


def _lines(text: AnyStr) -> list[AnyStr]:
  # splitlines() would also split a str at form feeds and other separators.
  return [line for line in re.split(_of_kind(r"\r?\n", text), text) if line]


def _paragraphs(text: AnyStr) -> list[AnyStr]:
  pattern, ends = _of_kind(r"\r?\n(?:[ \t]*\r?\n)+", text), _of_kind("\r\n", text)
  paragraphs = [p.strip(ends) for p in re.split(pattern, text)]
  return [p for p in paragraphs if p.strip()]


def _of_kind(pattern: str, text: AnyStr) -> AnyStr:
  """A pattern as bytes for bytes."""
  return pattern.encode() if isinstance(text, bytes) else pattern


_SPLITTERS: dict[str, Callable[[Any], list[Any]]] = {
  "file": _whole,
  "paragraph": _paragraphs,
  "line": _lines,
}


def _encode(vocabulary: Any, text: str | bytes, path: str) -> np.ndarray:
  """The ids of a text, in the smallest dtype that holds the vocabulary."""
  encode = getattr(vocabulary, "encode_array", vocabulary.encode)
  try:
    ids = np.asarray(encode(text), np.int64)
  except DataError as e:
    raise DataError(f"{path}: {e}") from e
  size = vocabulary.vocab_size
  if ids.size and not (ids.min() > 0 and ids.max() < size):
    bad = ids[(ids <= 0) | (ids >= size)]
    raise DataError(
      f"{path}: the vocabulary encodes this text with id {bad[0]}, which is not in 1..{size - 1} "
      "(0 is padding)"
    )
  return ids.astype(np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.int32)


# ----------------------------------------------------------------------------- windows


def _stream(
  tokens: np.ndarray,
  length: int,
  context: int,
  train: bool,
  seed: int,
  skip: int,
  rows: BatchRows | None,
  what: str,
) -> tf.data.Dataset:
  """Windows of one long text."""
  if len(tokens) < length:
    raise DataError(
      f"{what} has {len(tokens)} tokens, fewer than one sequence of sequence_length {length}"
    )
  stride = length - context
  num_windows = _ENDLESS if train else 1 + -(-(len(tokens) - length) // stride)
  with tf.device("CPU:0"):
    memory = tf.constant(tokens)
  column = tf.range(length, dtype=tf.int64)

  def draw(block: tf.Tensor) -> tf.Tensor:
    return _random_integers(seed, block, len(tokens) - length + 1)

  def begins(index: tf.Tensor) -> tf.Tensor:
    if not train:
      return index * stride
    if rows is None:
      return draw(index[0] // _BLOCK)
    blocks, which = tf.unique(index // _BLOCK, out_idx=tf.int64)
    drawn = tf.map_fn(draw, blocks)
    return tf.gather_nd(drawn, tf.stack([which, index % _BLOCK], axis=1))

  def block(index: tf.Tensor) -> dict[str, tf.Tensor]:
    """The windows of up to _BLOCK numbers; for training, of whole blocks or of given rows."""
    at = begins(index)[:, tf.newaxis] + column
    windows = tf.cast(tf.gather(memory, tf.minimum(at, len(tokens) - 1)), tf.int32)
    if not train:
      windows = tf.where(at < len(tokens), windows, 0)
    if context:
      windows = tf.where(column < context, -windows, windows)
    return {"targets": tf.ensure_shape(windows, [None, length])}

  first = min(skip, num_windows)
  if rows is None and train:
    first -= first % _BLOCK  # Whole blocks are drawn, so it starts at the beginning of one.
  dataset = _numbers(first, num_windows, rows)
  dataset = dataset.map(block, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
  # Whole blocks are prefetched: handing single examples from thread to thread costs more.
  dataset = dataset.prefetch(tf.data.AUTOTUNE).unbatch()
  dataset = dataset.skip(skip - first) if first < skip else dataset
  return _known_as_endless(dataset) if train else dataset


def _known_as_endless(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """TensorFlow does not know it of data that is unbatched."""
  return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def _numbers(begin: int, end: int, rows: BatchRows | None) -> tf.data.Dataset:
  """The numbers of those examples from `begin` to `end` that are needed, some at a time."""
  if rows is None:
    return tf.data.Dataset.range(begin, end).batch(_BLOCK)
  dataset = tf.data.Dataset.range(rows.count(end - begin)).batch(_BLOCK)
  return dataset.map(lambda k: begin + rows.numbers(k))


def _random_integers(seed: int, block: tf.Tensor, limit: int) -> tf.Tensor:
  """int64 [_BLOCK], uniform in [0, limit): a function of seed and block number."""
  return tf.random.stateless_uniform(
    [_BLOCK],
    seed=tf.stack([tf.constant(seed, tf.int64), tf.cast(block, tf.int64)]),
    maxval=limit,
    dtype=tf.int64,
    alg="philox",  # The default differs between kinds of devices.
  )


# --------------------------------------------------------------------------- documents


def _documents(
  documents: Iterable[tuple[str, Any]],
  vocabulary: Any,
  length: int,
  too_long: str,
  train: bool,
  seed: int,
  skip: int,
  rows: BatchRows | None,
  what: str,
) -> tf.data.Dataset:
  """Rows of packed documents: the rows of `pack_dataset`, found once, by index."""
  parts: list[np.ndarray] = []
  sizes: list[int] = []
  for number, (path, text) in enumerate(documents):
    ids = _encode(vocabulary, text, path)
    ids = np.append(ids, ids.dtype.type(EOS_ID))
    if len(ids) > length:
      if too_long == "error":
        raise DataError(
          f"{path}: document {number} has {len(ids)} tokens (EOS included), more than "
          f"sequence_length {length}; use too_long 'split' or 'truncate', or a longer sequence"
        )
      if too_long == "truncate":
        ids = ids[:length]
    parts.append(ids)
    sizes += [length] * (len(ids) // length) + [len(ids) % length] * (len(ids) % length > 0)
  if not parts:
    raise DataError(f"{what} has no documents")
  tokens = np.concatenate(parts)
  encoding_lib.check_known(tokens, vocabulary, what)
  stops = np.cumsum(sizes, dtype=np.int64)
  # The difference of two large numbers is small: in int32 it is right even after an overflow.
  position = np.arange(len(tokens), dtype=np.int64).astype(np.int32)
  position -= np.repeat((stops - sizes).astype(np.int32), sizes)
  position = position.astype(np.uint16 if length <= 2**16 else np.int32)
  ends = packing.choose_row_ends(sizes, length)
  borders = np.concatenate([[0], stops[ends - 1]])
  num_rows = len(ends)
  _LOG.info("%s: %d tokens in %d rows of %d", what, len(tokens), num_rows, length)
  with tf.device("CPU:0"):
    memory, positions, borders = tf.constant(tokens), tf.constant(position), tf.constant(borders)
  column = tf.range(length, dtype=tf.int64)

  def block(index: tf.Tensor) -> dict[str, tf.Tensor]:
    at = tf.gather(borders, index)[:, tf.newaxis] + column
    inside = at < tf.gather(borders, index + 1)[:, tf.newaxis]
    at = tf.minimum(at, len(tokens) - 1)
    ids = tf.where(inside, tf.cast(tf.gather(memory, at), tf.int32), 0)
    place = tf.where(inside, tf.cast(tf.gather(positions, at), tf.int32), 0)
    result = {
      "targets": ids,
      "targets_segmentation": packing.segmentation(ids, place),
      "targets_position": place,
    }
    return {k: tf.ensure_shape(v, [None, length]) for k, v in result.items()}

  def order(epoch: tf.Tensor) -> tf.Tensor:
    """The rows of an epoch that are needed."""
    order = _permutation(seed, epoch, num_rows)
    if rows is None:
      return order
    number = epoch * num_rows + tf.range(num_rows, dtype=tf.int64) - skip
    needed = tf.gather(tf.constant(rows.mask()), number % rows.batch)
    return tf.boolean_mask(order, needed & (number >= 0))

  if train:
    dataset = tf.data.Dataset.range(skip // num_rows, _ENDLESS).map(order).unbatch()
    if rows is None:
      dataset = dataset.skip(skip % num_rows)
    dataset = dataset.batch(_BLOCK)
  else:
    dataset = _numbers(min(skip, num_rows), num_rows, rows)
  dataset = dataset.map(block, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
  dataset = dataset.prefetch(tf.data.AUTOTUNE).unbatch()
  return _known_as_endless(dataset) if train else dataset


def _permutation(seed: int, epoch: tf.Tensor, n: int) -> tf.Tensor:
  """int64 [n]: the numbers 0..n-1 in an order that is a function of seed and epoch."""
  bits = tf.random.stateless_uniform(
    [n],
    seed=tf.stack([tf.constant(seed, tf.int64), epoch]),
    minval=None,
    maxval=None,
    dtype=tf.int64,
    alg="philox",
  )
  return tf.cast(tf.argsort(bits, stable=True), tf.int64)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
  if value not in choices:
    raise ConfigError(f"text_lm_dataset: {name} (={value!r}) must be one of {', '.join(choices)}")
