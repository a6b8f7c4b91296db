"""Rows of pairs of texts: encoded into memory once, packed, each row found by its number.

What row n is depends on the pairs, the options, the seed and n, and on nothing else: a data set
that starts at row n encodes nothing twice and makes no rows before it. With sampled pieces each
epoch is encoded anew, those before row n, too, whose rows are counted.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_settings.rules import FRACTION, one_of
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.data import packing
from mesh_tensorflow.transformer.data.encoding import check_known, encode_in_groups, vocabulary_of
from mesh_tensorflow.transformer.data.files.arguments import argument
from mesh_tensorflow.transformer.data.options import ByNumber
from mesh_tensorflow.transformer.data.vocabularies.base import EOS_ID

_LOG = logging.getLogger("mesh_tensorflow")

FEATURES = ("inputs", "targets")
_BLOCK = 64  # Rows made at a time.
_OPEN_ROWS = 8  # Rows that a pair may go to; with one of them a row has twice as much padding.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(ByNumber):
  """Options of readers of pairs of texts that know their examples by number."""

  pack: bool = argument(
    "True if several pairs share a row, and the features `<f>_segmentation` and `<f>_position` "
    "tell them apart; otherwise a row is a pair, padded.",
    True,
  )
  too_long: str = argument(
    "a pair with more ids than `sequence_length` on one side (EOS counts) is left out "
    '("drop", with a warning that counts them), cut off ("truncate"), or refused ("error").',
    "drop",
    one_of(("drop", "truncate", "error")),
  )
  sampled_pieces: float = argument(
    "training texts are cut into pieces at random, anew in each epoch, which keeps a model from "
    "learning few texts by heart: of BPE the rate at which merges are left out (BPE-dropout, "
    "Provilkov et al., 2020; 0.1 there), of unigram pieces the exponent of their probabilities "
    "(Kudo, 2018; 0.1 to 0.5 there). For SentencePiece vocabularies; 0: always the best pieces.",
    0.0,
    FRACTION,
  )


def dataset(texts: Sequence[tuple[str, str]], options: Pairs, what: str) -> tf.data.Dataset:
  """Rows of pairs: endless and shuffled for training, else each pair once, in order.

  Args:
    texts: pairs of inputs and targets.
    options: those of the reader.
    what: name of the texts in error messages.

  Returns:
    A data set of dicts of int32 [length of the feature].

  Raises:
    ConfigError: a length is missing.
    DataError: a pair is too long, or nothing is left.
  """
  lengths, skip, pack = options.lengths(*FEATURES), options.skip, options.pack
  seed = _seed(options)
  epochs = _epochs(texts, options, what)
  needed_rows = options.needed or BatchRows(1, (0,))

  def blocks() -> Iterator[dict[str, np.ndarray]]:
    begin = -skip  # Number of the first row of the epoch, if 0 is the first that is wanted.
    for epoch, pairs in epochs():
      order = pairs.order(seed, epoch) if options.train else np.arange(pairs.count)
      # To find the row at which to start only the sizes of the pairs before it are needed.
      rows = pairs.pack(order) if pack else [[int(i)] for i in order]
      needed = [rows[i - begin] for i in needed_rows.within(begin, begin + len(rows))]
      for first in range(0, len(needed), _BLOCK):
        yield pairs.block(needed[first : first + _BLOCK], pack)
      begin += len(rows)

  suffixes = ("", "_segmentation", "_position") if pack else ("",)
  spec = {
    key + suffix: tf.TensorSpec([None, lengths[key]], tf.int32)
    for key in FEATURES
    for suffix in suffixes
  }
  result = tf.data.Dataset.from_generator(blocks, output_signature=spec)
  # Whole blocks are prefetched: handing single examples from thread to thread costs more.
  result = result.prefetch(4).unbatch()
  return packing.endless(result) if options.train else result


def _epochs(
  texts: Sequence[tuple[str, str]], options: Pairs, what: str
) -> Callable[[], Iterator[tuple[int, _EncodedPairs]]]:
  """A function that gives the number and the pairs of each epoch; in training endlessly."""
  if not (options.train and options.sampled_pieces):
    once = _EncodedPairs(texts, options, what)
    return lambda: ((epoch, once) for epoch in (itertools.count() if options.train else [0]))
  encode = functools.partial(_EncodedPairs, texts, options, what)
  first = encode(0)  # What is wrong with the pairs is told now.

  def sampled() -> Iterator[tuple[int, _EncodedPairs]]:
    with concurrent.futures.ThreadPoolExecutor(1) as ahead:
      pairs = first
      for epoch in itertools.count():
        # While this epoch is trained on.
        following = ahead.submit(encode, epoch + 1)
        yield epoch, pairs
        pairs = following.result()

  return sampled


class _EncodedPairs:
  """Ids of all pairs, EOS included, one after another in memory.

  Args:
    texts: the pairs.
    options: those of the reader.
    what: name of the texts in messages.
    epoch: of which pieces are sampled; None: they are the best ones.
  """

  def __init__(
    self, texts: Sequence[tuple[str, str]], options: Pairs, what: str, epoch: int | None = None
  ):
    vocabulary, too_long = options.vocabulary, options.too_long
    encoded = {
      k: _encoded(vocabulary_of(k, vocabulary), side, options, epoch)
      for k, side in zip(FEATURES, zip(*texts))
    }
    self._lengths = lengths = options.lengths(*FEATURES)
    parts: dict[str, list[np.ndarray]] = {k: [] for k in FEATURES}
    dropped = 0
    for number, of_pair in enumerate(zip(*(encoded[k] for k in FEATURES)), 1):
      ids = dict(zip(FEATURES, of_pair))
      bad = [k for k in FEATURES if len(ids[k]) > lengths[k]]
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
      for k in FEATURES:
        parts[k].append(ids[k])
    if dropped and not epoch:
      _LOG.warning(
        "%s: %d of %d pairs are left out, because one side has more tokens than sequence_length %s",
        what, dropped, len(texts), lengths,
      )  # fmt: skip
    self.count = len(parts["targets"])
    if not self.count:
      raise DataError(
        f"{what}: all {len(texts)} pairs have more tokens than sequence_length {lengths}; use "
        "too_long 'truncate', or longer sequences"
      )
    self._sizes = {k: np.array([len(p) for p in parts[k]], np.int64) for k in FEATURES}
    self._starts = {k: np.cumsum(self._sizes[k]) - self._sizes[k] for k in FEATURES}
    self._ids = {k: np.concatenate(parts[k]).astype(np.int32) for k in FEATURES}
    for k in FEATURES:
      check_known(self._ids[k], vocabulary_of(k, vocabulary), f"{what}, {k}")
    tokens = {k: len(v) for k, v in self._ids.items()}
    _LOG.info("%s: %d pairs, tokens %s", what, self.count, tokens)

  def order(self, seed: int, epoch: int) -> np.ndarray:
    """The numbers of all pairs in random order, a function of seed and epoch.

    So a training that goes on makes the order of its epoch again.
    """
    return np.random.default_rng([seed, epoch]).permutation(self.count)

  def pack(self, order: np.ndarray) -> list[list[int]]:
    """Rows of pairs: each goes to the oldest open row that has room for both of its sides."""
    limits = [self._lengths[k] for k in FEATURES]
    a_sizes, b_sizes = (self._sizes[k][order].tolist() for k in FEATURES)
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
    for k in FEATURES:
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


def _seed(options: Pairs) -> int:
  """The seed of the order; not negative, as NumPy's generators take it."""
  return options.order_seed % 2**64


def _encoded(
  vocabulary: Any, texts: Sequence[str], options: Pairs, epoch: int | None
) -> Iterable[np.ndarray]:
  """The ids of texts, each with EOS."""
  if epoch is None:
    rows: Iterable[Any] = encode_in_groups(texts, vocabulary)
  elif hasattr(vocabulary, "sample"):
    rows = vocabulary.sample(texts, options.sampled_pieces, (_seed(options), epoch))
  else:
    raise ConfigError(
      f"sampled_pieces = {options.sampled_pieces}: {type(vocabulary).__name__} has no pieces to "
      "choose from; give a SentencePiece vocabulary (get_subword_vocabulary), or 0"
    )
  return (np.append(np.asarray(ids, np.int32), np.int32(EOS_ID)) for ids in rows)
