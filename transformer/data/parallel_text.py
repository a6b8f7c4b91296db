"""Pairs of texts from files: two parallel files, or one of two columns; packed, resumable.

What row n is depends on the files, the settings, the seed and n, and on nothing else: a data set
that starts at row n encodes nothing twice and reads no rows before it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import data_seed, input_shards
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.data import own_documents
from mesh_tensorflow.transformer.data.encoding import check_known, vocabulary_of
from mesh_tensorflow.transformer.data.packing import Length
from mesh_tensorflow.transformer.files import text_files
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID

_LOG = logging.getLogger("mesh_tensorflow")

_KEYS = ("inputs", "targets")
TOO_LONG = ("drop", "truncate", "error")  # What is done with pairs that are.
_BLOCK = 64  # Rows made at a time.
_OPEN_ROWS = 8  # Rows that a pair may go to; with one of them a row has twice as much padding.


def _texts(feature: str | None) -> Iterator[str]:
  """Training texts for vocabularies: one side of the pairs that gin binds, or both."""
  given = gin.get_bindings(parallel_text_dataset)
  if "files" not in given:
    raise ConfigError("parallel_text_dataset.files is not bound")
  for pair in read_pairs(given["files"], "train", given.get("data_dir", "")):
    yield from (text for k, text in zip(_KEYS, pair) if feature in (None, k))


@own_documents.with_texts(_texts)
@gin.configurable(module="mesh_tensorflow.transformer.dataset")
@affects("training")
@takes(skip=COUNT_OR_ZERO, batch_size=COUNT)
def parallel_text_dataset(
  sequence_length: Length,
  vocabulary: Any,
  dataset_split: str = "train",
  files: Mapping[str, Any] = gin.REQUIRED,
  data_dir: str = "",
  pack: bool = True,
  too_long: str = "drop",
  seed: int | None = None,
  skip: int = 0,
  batch_size: int | None = None,
  *,
  batch_rows: BatchRows | None = None,
) -> tf.data.Dataset:
  """Pairs of texts from files, for encoder-decoders and models of joined sequences.

  The files are read into memory and encoded once. The training split is endless, in an order that
  differs in each epoch; every other split is finite and in the order of the files.

  Args:
    sequence_length: an int, or a dict from "inputs" and "targets".
    vocabulary: a `Vocabulary`, or a tuple of one for inputs and one for targets.
    dataset_split: a key of `files`.
    files: for each split the pair (file of inputs, file of targets) of equally many lines, or one
      file with two columns on each line, separated by a tab; plain or .gz, in the encoding that
      `text_encoding` says. In place of a file: a glob or a list, whose files are taken sorted by
      name.
    data_dir: folder of the files, if their names are relative.
    pack: several pairs share a row, and the features `<f>_segmentation` and `<f>_position` tell
      them apart; otherwise a row is a pair, padded.
    too_long: a pair with more ids than `sequence_length` on one side (EOS counts) is left out
      ("drop", with a warning that counts them), cut off ("truncate"), or refused ("error").
    seed: of the order; None: that of the run (`run.seeds`).
    skip: start at this row.
    batch_size: has no effect.
    batch_rows: make only the rows that are needed of each batch, the first of which begins at
      `skip`; None: all.

  Returns:
    A data set of dicts of int32 [sequence_length].

  Raises:
    ConfigError: a setting is wrong.
    DataError: a file is missing, empty or not of its encoding; parallel files differ in their
      number of lines; a line has not two columns; a pair is too long; or nothing is left.
  """
  del batch_size
  if too_long not in TOO_LONG:
    raise ConfigError(
      f"parallel_text_dataset: too_long (={too_long!r}) must be one of {', '.join(TOO_LONG)}"
    )
  if skip < 0:
    raise ConfigError(f"parallel_text_dataset: skip (={skip}) must not be negative")
  return rows_of_pairs(
    read_pairs(files, dataset_split, data_dir), sequence_length, vocabulary,
    f"the {dataset_split} split",
    train=dataset_split == "train", pack=pack, too_long=too_long,
    seed=data_seed.chosen(seed), skip=skip,
    batch_rows=batch_rows,
  )  # fmt: skip


def rows_of_pairs(
  texts: Sequence[tuple[str, str]],
  sequence_length: Length,
  vocabulary: Any,
  what: str,
  *,
  train: bool,
  pack: bool,
  too_long: str,
  seed: int,
  skip: int,
  batch_rows: BatchRows | None,
) -> tf.data.Dataset:
  """Rows of pairs: endless and shuffled for training, else each pair once, in order.

  Args:
    texts: pairs of inputs and targets.
    sequence_length: an int, or a dict from "inputs" and "targets".
    vocabulary: a `Vocabulary`, or a tuple of one for inputs and one for targets.
    what: name of the texts in error messages.
    train: True for endless, shuffled rows; False for each pair once, in order.
    pack: True if several pairs share a row; False pads each pair to a row.
    too_long: "drop", "truncate" or "error": the treatment of pairs longer than `sequence_length`.
    seed: seed of the order.
    skip: number of rows to skip.
    batch_rows: make only these rows of each batch, beginning at `skip`; None: those of the current
      input shard, or all.

  Raises:
    ConfigError: a length is missing.
    DataError: a pair is too long, or nothing is left.
  """
  lengths = _lengths(sequence_length)
  pairs = _EncodedPairs(texts, vocabulary, lengths, too_long, what)
  of_batch = batch_rows or input_shards.current().rows() or BatchRows(1, (0,))

  def blocks() -> Iterator[dict[str, np.ndarray]]:
    begin = -skip  # Number of the first row of the epoch, if 0 is the first that is wanted.
    for order in pairs.epochs(seed) if train else [np.arange(pairs.count)]:
      # To find the row at which to start only the sizes of the pairs before it are needed.
      rows = pairs.pack(order) if pack else [[int(i)] for i in order]
      needed = [rows[i - begin] for i in of_batch.within(begin, begin + len(rows))]
      for first in range(0, len(needed), _BLOCK):
        yield pairs.block(needed[first : first + _BLOCK], pack)
      begin += len(rows)

  suffixes = ("", "_segmentation", "_position") if pack else ("",)
  spec = {
    key + suffix: tf.TensorSpec([None, lengths[key]], tf.int32)
    for key in _KEYS
    for suffix in suffixes
  }
  dataset = tf.data.Dataset.from_generator(blocks, output_signature=spec)
  # Whole blocks are prefetched: handing single examples from thread to thread costs more.
  dataset = dataset.prefetch(4).unbatch()
  endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
  return dataset.apply(endless) if train else dataset


def _lengths(sequence_length: Length) -> dict[str, int]:
  if not isinstance(sequence_length, Mapping):
    return dict.fromkeys(_KEYS, int(sequence_length))
  missing = [k for k in _KEYS if k not in sequence_length]
  if missing:
    raise ConfigError(f"sequence_length {sequence_length} has no {missing}")
  return {k: int(sequence_length[k]) for k in _KEYS}


# ------------------------------------------------------------------------------- reading


def read_pairs(files: Mapping[str, Any], split: str, data_dir: str = "") -> list[tuple[str, str]]:
  """The (inputs, targets) texts of a split.

  Pairs of which one side is empty are left out, and counted in a warning.

  Args:
    files: see `parallel_text_dataset`.
    split: a key of `files`.
    data_dir: folder of the files, if their names are relative.

  Returns:
    Pairs of texts without blanks at their ends.

  Raises:
    ConfigError: there is no such split, or it is not given as files.
    DataError: see `parallel_text_dataset`.
  """
  if not isinstance(files, Mapping) or not files:
    raise ConfigError(f"files must be a dict from split to files, got {files!r}")
  if split not in files:
    raise ConfigError(f"there are no files for split {split!r}, only for {sorted(files)}")
  given = files[split]
  if isinstance(given, tuple) and len(given) == 2:
    texts = _read_parallel(*(text_files.in_folder(data_dir, g) for g in given))
    what = f"{given[0]} and {given[1]}"
  elif isinstance(given, (str, list)) and given:
    texts = _read_tsv(text_files.in_folder(data_dir, given))
    what = str(given)
  else:
    raise ConfigError(
      f"the files of split {split!r} must be a tuple (inputs, targets), or one file of two "
      f"columns, got {given!r}"
    )
  stripped = [(a.strip(), b.strip()) for a, b in texts]
  kept = [(a, b) for a, b in stripped if a and b]
  if len(kept) < len(stripped):
    _LOG.warning(
      "%s: %d of %d pairs are left out, because one side is empty",
      what, len(stripped) - len(kept), len(stripped),
    )  # fmt: skip
  if not kept:
    raise DataError(f"{what}: there is no pair of texts")
  return kept


def _read_parallel(inputs: Any, targets: Any) -> list[tuple[str, str]]:
  sides = [text_files.read_text_files(globs) for globs in (inputs, targets)]
  if len(sides[0]) != len(sides[1]):
    raise DataError(
      f"parallel files: {inputs} matches {len(sides[0])} file(s), and {targets} {len(sides[1])}"
    )
  result: list[tuple[str, str]] = []
  for a, b in zip(*sides):
    lines = [_lines(f.text) for f in (a, b)]
    if len(lines[0]) != len(lines[1]):
      raise DataError(
        f"parallel files must have equally many lines: {a.path} has {len(lines[0]):,}, and "
        f"{b.path} {len(lines[1]):,}"
      )
    result += zip(*lines)
  return result


def _read_tsv(globs: Any) -> list[tuple[str, str]]:
  result = []
  for file in text_files.read_text_files(globs):
    for number, line in enumerate(_lines(file.text), 1):
      columns = line.split("\t")
      if len(columns) != 2:
        raise DataError(
          f"{file.path}, line {number}: {len(columns)} column(s) in place of two texts with a tab "
          f"between them: {line[:80]!r}"
        )
      result.append((columns[0], columns[1]))
  return result


def _lines(text: str) -> list[str]:
  # splitlines() would also split at form feeds and other separators.
  lines = text.split("\n")
  if not lines[-1]:
    lines.pop()
  return lines


# ------------------------------------------------------------------------------- packing


class _EncodedPairs:
  """Ids of all pairs, EOS included, one after another in memory."""

  def __init__(
    self,
    texts: Sequence[tuple[str, str]],
    vocabulary: Any,
    lengths: Mapping[str, int],
    too_long: str,
    what: str,
  ):
    self._lengths = lengths
    parts: dict[str, list[np.ndarray]] = {k: [] for k in _KEYS}
    dropped = 0
    for number, pair in enumerate(texts, 1):
      ids = {k: _encode(vocabulary_of(k, vocabulary), text) for k, text in zip(_KEYS, pair)}
      bad = [k for k in _KEYS if len(ids[k]) > lengths[k]]
      if bad and too_long == "error":
        k = bad[0]
        raise DataError(
          f"{what}: the {k} of pair {number} have {len(ids[k])} tokens (EOS included), more than "
          f"sequence_length {lengths[k]}; use too_long 'drop' or 'truncate', or longer sequences"
        )
      if bad and too_long == "drop":
        dropped += 1
        continue
      for k in bad:
        ids[k] = np.append(ids[k][: lengths[k] - 1], EOS_ID)
      for k in _KEYS:
        parts[k].append(ids[k])
    if dropped:
      _LOG.warning(
        "%s: %d of %d pairs are left out, because one side has more tokens than sequence_length %s",
        what, dropped, len(texts), dict(lengths),
      )  # fmt: skip
    self.count = len(parts["targets"])
    if not self.count:
      raise DataError(
        f"{what}: all {len(texts)} pairs have more tokens than sequence_length {dict(lengths)}"
      )
    self._sizes = {k: np.array([len(p) for p in parts[k]], np.int64) for k in _KEYS}
    self._starts = {k: np.cumsum(self._sizes[k]) - self._sizes[k] for k in _KEYS}
    self._ids = {k: np.concatenate(parts[k]).astype(np.int32) for k in _KEYS}
    for k in _KEYS:
      check_known(self._ids[k], vocabulary_of(k, vocabulary), f"{what}, {k}")
    tokens = {k: len(v) for k, v in self._ids.items()}
    _LOG.info("%s: %d pairs, tokens %s", what, self.count, tokens)

  def epochs(self, seed: int) -> Iterator[np.ndarray]:
    """Endlessly: the numbers of all pairs, in random order."""
    epoch = 0
    while True:
      # A function of seed and epoch: a training that goes on makes the order of its epoch again.
      yield np.random.default_rng([seed, epoch]).permutation(self.count)
      epoch += 1

  def pack(self, order: np.ndarray) -> list[list[int]]:
    """Rows of pairs: each goes to the oldest open row that has room for both of its sides."""
    limits = [self._lengths[k] for k in _KEYS]
    a_sizes, b_sizes = (self._sizes[k][order].tolist() for k in _KEYS)
    rows: list[list[int]] = []
    open_rows: list[list[Any]] = []  # [room for inputs, room for targets, pairs]
    for pair, a, b in zip(order.tolist(), a_sizes, b_sizes):
      for row in open_rows:
        if a <= row[0] and b <= row[1]:
          row[0] -= a
          row[1] -= b
          row[2].append(pair)
          break
      else:
        if len(open_rows) == _OPEN_ROWS:
          open_rows.pop(0)
        rows.append([pair])
        open_rows.append([limits[0] - a, limits[1] - b, rows[-1]])
    return rows

  def block(self, rows: Sequence[Sequence[int]], packed: bool) -> dict[str, np.ndarray]:
    """The features of some rows: int32 [rows, length]."""
    counts = np.array([len(row) for row in rows])
    pairs = np.concatenate([np.asarray(row) for row in rows])
    row_of = np.repeat(np.arange(len(rows)), counts)
    number = np.arange(len(pairs)) - np.repeat(np.cumsum(counts) - counts, counts)
    result = {}
    for k in _KEYS:
      sizes = self._sizes[k][pairs]
      # Of each token: its pair, its place in the pair, in its row and in memory.
      pair_of = np.repeat(np.arange(len(pairs)), sizes)
      place = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
      before = np.cumsum(sizes) - sizes
      offset = before - np.repeat(before[np.cumsum(counts) - counts], counts)
      where = (row_of[pair_of], offset[pair_of] + place)
      values = {"": self._ids[k][self._starts[k][pairs][pair_of] + place]}
      if packed:
        values.update({"_segmentation": number[pair_of] + 1, "_position": place})
      for suffix, value in values.items():
        array = np.zeros([len(rows), self._lengths[k]], np.int32)
        array[where] = value
        result[k + suffix] = array
    return result


def _encode(vocabulary: Any, text: str) -> np.ndarray:
  """The ids of a text, with EOS."""
  return np.append(np.asarray(vocabulary.encode(text), np.int32), np.int32(EOS_ID))
