"""The rows of `text_lm`: windows of one long text, or documents packed, each found by its number.

Training draws them at random; any other split has all in order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import DataError
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.data import encoding as encoding_lib
from mesh_tensorflow.transformer.data import packing
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID

_LOG = logging.getLogger("mesh_tensorflow")

# Examples made by one call of the graph: the cost of a call is shared, memory stays small.
_BLOCK = 64
_ENDLESS = 2**62


def encode(vocabulary: Any, text: str | bytes, path: str) -> np.ndarray:
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


def windows(
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
  # Rounded up: the last window may reach beyond the end.
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
    # tf.gather refuses what is beyond the end; there the last window is padded, below.
    windows = tf.cast(tf.gather(memory, tf.minimum(at, len(tokens) - 1)), tf.int32)
    if not train:
      windows = tf.where(at < len(tokens), windows, 0)
    if context:
      # Negative targets are seen and do not count: in order, the window before has scored them.
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
  """Marks a data set as infinite, which TensorFlow cannot infer after unbatching."""
  return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def _numbers(begin: int, end: int, rows: BatchRows | None) -> tf.data.Dataset:
  """Batches of the numbers of needed examples from `begin` to `end`."""
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


def document_rows(
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
    ids = encode(vocabulary, text, path)
    # Of their own dtype: an int of Python's may make all of them int64.
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
  # There are as many positions as tokens, and they stay in memory, too.
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
    # Without limits: all bits of the generator.
    minval=None,
    maxval=None,
    dtype=tf.int64,
    alg="philox",
  )
  return tf.cast(tf.argsort(bits, stable=True), tf.int64)
