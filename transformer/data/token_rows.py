"""Rows cut out of one long array of tokens, in memory or on disk; each is found by its number.

What row n is depends on the tokens, the settings, the seed and n, and on nothing else. Nothing is
made for the rows before it: a training that goes on at row 10**9 begins at once.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.data import packing
from mesh_tensorflow.transformer.data.packing import Length
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID

_LOG = logging.getLogger("mesh_tensorflow")

_FEATURES = ("targets", "targets_segmentation", "targets_position")

# From numbers of rows int64 [n] to where they begin and how many tokens they have.
Places = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
# From these places to features.
Reader = Callable[[tf.Tensor, tf.Tensor], dict[str, tf.Tensor]]

MODES = ("stream", "documents", "packed")
ORDERS = ("shuffled", "random")

# Rows made by one call of the graph: the cost of a call is shared, memory stays small.
_BLOCK = 64
_ENDLESS = 2**62
# What random numbers are for; the second part of their seeds.
_ORDER, _CUT, _PLACE = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Cut:
  """Settings for cutting rows out of a sequence of tokens.

  Attributes:
    length: tokens in a row.
    mode: "stream": windows of the text, in which documents follow each other, an EOS after each;
      "documents": the same windows, with features that tell documents apart, so that a model does
      not look from one into another; "packed": whole documents, as many as a row holds, and only
      those that are longer are cut.
    order: of training: "shuffled": all rows, each once in an epoch, in another order each time; and
      windows are cut at other places each time. "random": windows at places that are drawn with
      replacement.
    context: in windows, the first so many ids are negated: the model sees them, and they are not
      scored; consecutive windows overlap by as much.
    seed: of the order.

  Raises:
    ConfigError: a value is wrong, or contradicts another.
  """

  length: int
  mode: str = "stream"
  order: str = "shuffled"
  context: int = 0
  seed: int = 0

  def __post_init__(self) -> None:
    for name, choices in (("mode", MODES), ("order", ORDERS)):
      if getattr(self, name) not in choices:
        raise ConfigError(f"{name} (={getattr(self, name)!r}) must be one of {', '.join(choices)}")
    if self.mode == "packed" and (self.order != "shuffled" or self.context):
      raise ConfigError("mode 'packed' has no windows: leave order and context_tokens out")
    if not 0 <= self.context < self.length:
      raise ConfigError(
        f"context_tokens (={self.context}) must be at least 0 and less than sequence_length "
        f"(={self.length})"
      )


def length_of(sequence_length: Length) -> int:
  """The length of targets.

  Raises:
    ConfigError: there is none.
  """
  if not isinstance(sequence_length, Mapping):
    return int(sequence_length)
  if "targets" not in sequence_length:
    raise ConfigError(f"sequence_length {sequence_length} has no 'targets'")
  return int(sequence_length["targets"])


def dataset(
  tokens: np.ndarray,
  cut: Cut,
  *,
  train: bool,
  what: str,
  document_sizes: np.ndarray | None = None,
  skip: int = 0,
  rows: BatchRows | None = None,
) -> tf.data.Dataset:
  """Rows of tokens: endless and shuffled for training, else all in order, each token once.

  Args:
    tokens: ids of any integer dtype, each document with an EOS at its end. Of an np.memmap only
      what is in a row is read.
    cut: how rows are made.
    train: whether they are for training.
    what: the tokens, for errors.
    document_sizes: the numbers of tokens of all documents, for "packed".
    skip: start at this row.
    rows: make only those that are needed of each batch, the first of which begins at `skip`;
      None: all.

  Returns:
    A data set of dicts of int32 [length]: `targets`; and but for "stream" `targets_segmentation`
    and `targets_position`.

  Raises:
    ConfigError: `skip` is negative.
    DataError: there are fewer tokens than a row of training needs.
  """
  if skip < 0:
    raise ConfigError(f"skip (={skip}) must not be negative")
  if cut.mode == "packed":
    assert document_sizes is not None
    count, places = _packed(document_sizes, cut, train, what)
  else:
    count, places = _windows(len(tokens), cut, train, what)
  apart = cut.mode != "stream"
  mapped = isinstance(tokens, np.memmap)
  read = (_mapped_reader if mapped else _memory_reader)(tokens, cut.length, apart)
  column = tf.range(cut.length, dtype=tf.int64)

  def block(index: tf.Tensor) -> dict[str, tf.Tensor]:
    features = read(*places(index))
    if cut.context:
      ids = features["targets"]
      features["targets"] = tf.where(column < cut.context, -ids, ids)
    return {k: tf.ensure_shape(v, [None, cut.length]) for k, v in features.items()}

  result = _numbers(min(skip, count), count, rows)
  result = result.map(block, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
  # Whole blocks are prefetched: handing single rows from thread to thread costs more.
  result = result.prefetch(tf.data.AUTOTUNE).unbatch()
  if train:
    # TensorFlow does not know it of data that is unbatched.
    endless = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
    result = result.apply(endless)
  return result


def _numbers(begin: int, end: int, rows: BatchRows | None) -> tf.data.Dataset:
  """Batches of the numbers of needed rows from `begin` to `end`."""
  if rows is None:
    return tf.data.Dataset.range(begin, end).batch(_BLOCK)
  found = tf.data.Dataset.range(rows.count(end - begin)).batch(_BLOCK)
  return found.map(lambda k: begin + rows.numbers(k))


# ------------------------------------------------------------- which tokens are in a row


def _windows(size: int, cut: Cut, train: bool, what: str) -> tuple[int, Places]:
  """The number of windows, and a function from their numbers to their places."""
  length, stride = cut.length, cut.length - cut.context
  if not train:
    if not size:
      raise DataError(f"{what} has no tokens")
    # Rounded up: the last window may reach beyond the end.
    count = 1 + max(0, -(-(size - length) // stride))
    return count, lambda n: (n * stride, tf.minimum(size - n * stride, length))
  if size < length:
    raise DataError(f"{what} has {size} tokens, fewer than one row of sequence_length {length}")
  whole = tf.constant(length, tf.int64)

  def random(n: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    begins = _drawn(cut.seed, _PLACE, n, size - length + 1)
    return begins, tf.fill(tf.shape(n), whole)

  if cut.order == "random":
    return _ENDLESS, random
  # Each epoch begins up to a window later: otherwise the same words would always stand at the
  # beginning of a row, with nothing before them.
  shifts = min(stride, size - length + 1)
  per_epoch = 1 + (size - (shifts - 1) - length) // stride

  def shuffled(n: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    epoch = n // per_epoch
    number = _permuted(cut.seed, _ORDER, epoch, n % per_epoch, per_epoch)
    begins = _drawn(cut.seed, _CUT, epoch, shifts) + number * stride
    return begins, tf.fill(tf.shape(n), whole)

  return _ENDLESS, shuffled


def _packed(sizes: np.ndarray, cut: Cut, train: bool, what: str) -> tuple[int, Places]:
  """The number of rows of whole documents, and a function from their numbers to their places."""
  if not sizes.size:
    raise DataError(f"{what} has no documents")
  whole, rest = np.divmod(sizes, cut.length)
  # The parts of a document: as many rows as it fills, and what is left of it.
  counts = whole + (rest > 0)
  parts = np.full(counts.sum(), cut.length, np.int64)
  last = np.cumsum(counts) - 1
  parts[last[rest > 0]] = rest[rest > 0]
  ends = np.cumsum(parts)[packing.choose_row_ends(parts, cut.length) - 1]
  borders = np.concatenate([[0], ends])
  count = len(ends)
  _LOG.info("%s: %d tokens in %d rows of %d", what, borders[-1], count, cut.length)
  with tf.device("CPU:0"):
    table = tf.constant(borders)

  def places(n: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    if train:
      n = _permuted(cut.seed, _ORDER, n // count, n % count, count)
    begins = tf.gather(table, n)
    return begins, tf.gather(table, n + 1) - begins

  return _ENDLESS if train else count, places


def _permuted(seed: int, purpose: int, epoch: tf.Tensor, index: tf.Tensor, size: int) -> tf.Tensor:
  """The places of some numbers in permutations of 0..size-1, one for each epoch; int64 [n].

  No permutation is made: each place is computed by itself.
  """
  # `tf.random.experimental.index_shuffle` is this with one seed: it takes no batch of them.
  return tf.raw_ops.RandomIndexShuffle(
    index=index,
    seed=_seeds(seed, purpose, epoch),
    max_index=tf.fill(tf.shape(index), tf.constant(size - 1, tf.int64)),
    rounds=4,
  )


def _drawn(seed: int, purpose: int, number: tf.Tensor, limit: int) -> tf.Tensor:
  """Pseudo-random integers in 0..limit-1, a function of the given numbers; int64 [n]."""
  # One element of 2**62 in a random order is as good as drawn; stateless_uniform has one seed for
  # all that it draws.
  wide = _permuted(seed, purpose, number, tf.zeros_like(number), _ENDLESS)
  return wide % limit


def _seeds(seed: int, purpose: int, number: tf.Tensor) -> tf.Tensor:
  """int64 [n, 3]: seeds for some numbers."""
  first, second = (tf.fill(tf.shape(number), tf.constant(x, tf.int64)) for x in (seed, purpose))
  return tf.stack([first, second, number], axis=1)


# ------------------------------------------------------------------ what is in a row


def _memory_reader(tokens: np.ndarray, length: int, apart: bool) -> Reader:
  """A function from the places of rows to their features, int32 [n, length]; padding is 0."""
  with tf.device("CPU:0"):
    memory = tf.constant(tokens)
  column = tf.range(length, dtype=tf.int64)

  def read(begins: tf.Tensor, sizes: tf.Tensor) -> dict[str, tf.Tensor]:
    at = tf.minimum(begins[:, tf.newaxis] + column, len(tokens) - 1)
    ids = tf.cast(tf.gather(memory, at), tf.int32)
    ids = tf.where(column < sizes[:, tf.newaxis], ids, 0)
    return {"targets": ids, **_told_apart(ids)} if apart else {"targets": ids}

  return read


def _mapped_reader(tokens: np.ndarray, length: int, apart: bool) -> Reader:
  """Like `_memory_reader`, for a memory-mapped file.

  By NumPy: TensorFlow maps no file, and its readers of records go through it from the beginning.
  """
  column = np.arange(length, dtype=np.int32)

  def copy(begins: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    ids = np.zeros([len(begins), length], np.int32)
    for row, begin, size in zip(ids, begins.tolist(), sizes.tolist()):
      row[:size] = tokens[begin : begin + size]
    if not apart:
      return [ids]
    # As `_told_apart`, in fewer passes.
    starts = np.ones(ids.shape, bool)
    np.equal(ids[:, :-1], EOS_ID, out=starts[:, 1:])
    position = column - np.maximum.accumulate(np.where(starts, column, 0), axis=1)
    is_text = ids != 0
    segmentation = np.cumsum(starts, axis=1, dtype=np.int32)
    return [ids, segmentation * is_text, position * is_text]

  names = _FEATURES if apart else _FEATURES[:1]

  def read(begins: tf.Tensor, sizes: tf.Tensor) -> dict[str, tf.Tensor]:
    types = [tf.int32] * len(names)
    return dict(zip(names, tf.numpy_function(copy, [begins, sizes], types, stateful=False)))

  return read


def _told_apart(ids: tf.Tensor) -> dict[str, tf.Tensor]:
  """Segment ids and positions of the documents in rows, split at EOS: int32 [rows, length]."""
  first = tf.ones_like(ids[:, :1])
  starts = tf.concat([first, tf.cast(tf.equal(ids[:, :-1], EOS_ID), tf.int32)], axis=1)
  # The documents of all rows, numbered one after the other; and the column where each begins.
  number = tf.cumsum(tf.reshape(starts, [-1])) - 1
  column = tf.range(tf.shape(ids)[1])
  columns = tf.reshape(tf.broadcast_to(column, tf.shape(ids)), [-1])
  begins = tf.math.segment_min(columns, number)
  position = tf.reshape(columns - tf.gather(begins, number), tf.shape(ids))
  is_text = tf.not_equal(ids, 0)
  return {
    "targets_segmentation": tf.where(is_text, tf.cumsum(starts, axis=1), 0),
    "targets_position": tf.where(is_text, position, 0),
  }
