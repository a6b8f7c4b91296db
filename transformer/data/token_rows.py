"""Rows cut out of one long array of tokens, in memory or on disk; each is found by its number.

What row n is depends on the tokens, the settings, the seed and n, and on nothing else. Nothing is
made for the rows before it: a training that goes on at row 10**9 begins at once.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from mesh_tensorflow.environment.tensorflow_mode import not_converted
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.data import packing
from mesh_tensorflow.transformer.data.vocabularies.base import EOS_ID

_LOG = logging.getLogger("mesh_tensorflow")

_FEATURES = ("targets", "targets_segmentation", "targets_position")

# From numbers of rows int64 [n] to where they begin and how many tokens they have.
Places = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
# From these places to features.
Reader = Callable[[tf.Tensor, tf.Tensor], dict[str, tf.Tensor]]

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
      replacement. "permuted" (of packed documents) and "drawn" (of windows) are the same by other
      generators, which `text_lm_dataset` has had from its beginning; "permuted" documents are told
      apart by their sizes, not by EOS ids.
    context: in windows, the first so many ids are negated: the model sees them, and they are not
      scored; consecutive windows overlap by as much.
    seed: of the order.

  Raises:
    ConfigError: values that contradict each other.
  """

  length: int
  mode: str = "stream"
  order: str = "shuffled"
  context: int = 0
  seed: int = 0

  def __post_init__(self) -> None:
    if self.mode == "packed" and (self.order not in ("shuffled", "permuted") or self.context):
      raise ConfigError("mode 'packed' has no windows: leave order and context_tokens out")
    if not 0 <= self.context < self.length:
      raise ConfigError(
        f"context_tokens (={self.context}) must be at least 0 and less than sequence_length "
        f"(={self.length})"
      )


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
    document_sizes: the numbers of tokens of all documents, int64, for "packed".
    skip: start at this row.
    rows: make only those that are needed of each batch, the first of which begins at `skip`;
      None: all.

  Returns:
    A data set of dicts of int32 [length]: `targets`; and but for "stream" `targets_segmentation`
    and `targets_position`.

  Raises:
    DataError: there are fewer tokens than a row of training needs.
  """
  positions = None
  if cut.mode == "packed":
    assert document_sizes is not None
    parts = _parts(document_sizes, cut.length)
    count, places = _packed(parts, cut, train, what)
    if cut.order == "permuted":
      positions = _positions(parts, cut.length)
  else:
    count, places = _windows(len(tokens), cut, train, what)
  if train and cut.order == "permuted":
    numbers = _permuted_epochs(count, cut.seed, skip, rows)
  else:
    end = _ENDLESS if train else count
    numbers = _numbers(min(skip, end), end, rows)
  apart, full = cut.mode != "stream", train and cut.mode != "packed"
  if isinstance(tokens, np.memmap):
    read = _mapped_reader(tokens, cut.length, apart)
  else:
    read = _memory_reader(tokens, cut.length, apart, full, positions)
  column = tf.range(cut.length, dtype=tf.int64)

  @not_converted
  def block(index: tf.Tensor) -> dict[str, tf.Tensor]:
    features = read(*places(index))
    if cut.context:
      ids = features["targets"]
      features["targets"] = tf.where(column < cut.context, -ids, ids)
    return {k: tf.ensure_shape(v, [None, cut.length]) for k, v in features.items()}

  result = numbers.map(block, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
  # Whole blocks are prefetched: handing single rows from thread to thread costs more.
  result = result.prefetch(tf.data.AUTOTUNE).unbatch()
  return packing.endless(result) if train else result


def _numbers(begin: int, end: int, rows: BatchRows | None) -> tf.data.Dataset:
  """Batches of the numbers of needed rows from `begin` to `end`."""
  if rows is None:
    # Whole blocks of numbers, wherever it begins: `_random_by_block` draws a block at a time.
    border = min(-(-begin // _BLOCK) * _BLOCK, end)
    found = tf.data.Dataset.range(border, end).batch(_BLOCK)
    if border == begin:
      return found
    return tf.data.Dataset.range(begin, border).batch(_BLOCK).concatenate(found)
  found = tf.data.Dataset.range(rows.count(end - begin)).batch(_BLOCK)
  return found.map(not_converted(lambda k: begin + rows.numbers(k)))


def _permuted_epochs(count: int, seed: int, skip: int, rows: BatchRows | None) -> tf.data.Dataset:
  """Batches of the numbers of needed rows: endlessly permutations of 0..count-1, from `skip` on."""

  @not_converted
  def epoch(number: tf.Tensor) -> tf.Tensor:
    bits = _uniform([count], seed, number, None)  # All bits of the generator.
    order = tf.cast(tf.argsort(bits, stable=True), tf.int64)
    if rows is None:
      return order
    place = number * count + tf.range(count, dtype=tf.int64) - skip
    needed = tf.gather(tf.constant(rows.mask()), place % rows.batch)
    return tf.boolean_mask(order, needed & (place >= 0))

  found = tf.data.Dataset.range(skip // count, _ENDLESS).map(epoch).unbatch()
  return (found.skip(skip % count) if rows is None else found).batch(_BLOCK)


# ------------------------------------------------------------- which tokens are in a row


def _windows(size: int, cut: Cut, train: bool, what: str) -> tuple[int, Places]:
  """The number of windows (held-out ones), and a function from their numbers to their places."""
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

  if cut.order in _DRAWS:
    draw = _DRAWS[cut.order]
    return 0, lambda n: (draw(cut.seed, n, size - length + 1), tf.fill(tf.shape(n), whole))
  # Each epoch begins up to a window later: otherwise the same words would always stand at the
  # beginning of a row, with nothing before them.
  shifts = min(stride, size - length + 1)
  per_epoch = 1 + (size - (shifts - 1) - length) // stride

  def shuffled(n: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    epoch = n // per_epoch
    number = _permuted(cut.seed, _ORDER, epoch, n % per_epoch, per_epoch)
    begins = _drawn(cut.seed, _CUT, epoch, shifts) + number * stride
    return begins, tf.fill(tf.shape(n), whole)

  return 0, shuffled


def _parts(sizes: np.ndarray, length: int) -> np.ndarray:
  """Sizes of the parts of documents: as many rows as each fills, and what is left of it."""
  whole, rest = np.divmod(sizes, length)
  counts = whole + (rest > 0)
  parts = np.full(counts.sum(), length, np.int64)
  last = np.cumsum(counts) - 1
  parts[last[rest > 0]] = rest[rest > 0]
  return parts


def _packed(parts: np.ndarray, cut: Cut, train: bool, what: str) -> tuple[int, Places]:
  """The number of rows of packed parts, and a function from their numbers to their places."""
  if not parts.size:
    raise DataError(f"{what} has no documents")
  ends = np.cumsum(parts)[packing.choose_row_ends(parts, cut.length) - 1]
  borders = np.concatenate([[0], ends])
  count = len(ends)
  _LOG.info("%s: %d tokens in %d rows of %d", what, borders[-1], count, cut.length)
  with tf.device("CPU:0"):
    table = tf.constant(borders)

  def places(n: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    if train and cut.order == "shuffled":
      n = _permuted(cut.seed, _ORDER, n // count, n % count, count)
    begins = tf.gather(table, n)
    return begins, tf.gather(table, n + 1) - begins

  return count, places


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


def _random(seed: int, number: tf.Tensor, limit: int) -> tf.Tensor:
  return _drawn(seed, _PLACE, number, limit)


def _random_by_block(seed: int, number: tf.Tensor, limit: int) -> tf.Tensor:
  """As `_random`, but the generator has a seed for each block of `_BLOCK` numbers."""

  def drawn(block: tf.Tensor) -> tf.Tensor:
    return _uniform([_BLOCK], seed, block, limit)

  def of_several() -> tf.Tensor:
    blocks, which = tf.unique(number // _BLOCK, out_idx=tf.int64)
    return tf.gather_nd(tf.map_fn(drawn, blocks), tf.stack([which, number % _BLOCK], axis=1))

  first, last = number[0] // _BLOCK, number[-1] // _BLOCK
  return tf.cond(first == last, lambda: tf.gather(drawn(first), number % _BLOCK), of_several)


_DRAWS = {"random": _random, "drawn": _random_by_block}


def _uniform(shape: list[int], seed: int, number: tf.Tensor, limit: int | None) -> tf.Tensor:
  """int64, uniform in [0, limit), or of all numbers: a function of the seed and a number."""
  return tf.random.stateless_uniform(
    shape,
    seed=tf.stack([tf.constant(seed, tf.int64), tf.cast(number, tf.int64)]),
    minval=None if limit is None else 0,
    maxval=limit,
    dtype=tf.int64,
    alg="philox",  # The default differs between kinds of devices.
  )


def _seeds(seed: int, purpose: int, number: tf.Tensor) -> tf.Tensor:
  """int64 [n, 3]: seeds for some numbers."""
  first, second = (tf.fill(tf.shape(number), tf.constant(x, tf.int64)) for x in (seed, purpose))
  return tf.stack([first, second, number], axis=1)


# ------------------------------------------------------------------ what is in a row


def _positions(parts: np.ndarray, length: int) -> np.ndarray:
  """The place of each token in its part; of a small dtype, as they stay in memory."""
  stops = np.cumsum(parts)
  # The difference of two large numbers is small: in int32 it is right even after an overflow.
  position = np.arange(parts.sum(), dtype=np.int64).astype(np.int32)
  position -= np.repeat((stops - parts).astype(np.int32), parts)
  return position.astype(np.uint16 if length <= 2**16 else np.int32)


def _memory_reader(
  tokens: np.ndarray, length: int, apart: bool, full: bool, positions: np.ndarray | None
) -> Reader:
  """A function from the places of rows to their features, int32 [n, length]; padding is 0.

  Args:
    tokens: the ids.
    length: of a row.
    apart: True if features tell documents apart.
    full: True if all rows are as long as `length`.
    positions: place of each token in its part, by which documents are told apart; None: by EOS.
  """
  with tf.device("CPU:0"):
    memory = tf.constant(tokens)
    in_part = None if positions is None else tf.constant(positions)
  column = tf.range(length, dtype=tf.int64)

  def read(begins: tf.Tensor, sizes: tf.Tensor) -> dict[str, tf.Tensor]:
    at = begins[:, tf.newaxis] + column
    inside = None if full else column < sizes[:, tf.newaxis]

    def taken(values: tf.Tensor) -> tf.Tensor:
      # tf.gather refuses what is beyond the end; there the last row is padded.
      found = tf.gather(values, at if full else tf.minimum(at, len(tokens) - 1))
      return tf.cast(found, tf.int32) if full else tf.where(inside, tf.cast(found, tf.int32), 0)

    ids = taken(memory)
    if not apart:
      return {"targets": ids}
    if in_part is None:
      return {"targets": ids, **_told_apart(ids)}
    place = taken(in_part)
    segmentation = packing.segmentation(ids, place)
    return {"targets": ids, "targets_segmentation": segmentation, "targets_position": place}

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
