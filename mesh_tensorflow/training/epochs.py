"""Endless training data out of data that ends: its epochs one after another, begun anywhere.

The data set of an epoch is gone through again and again, and what it shuffles is shuffled anew each
time. After `EPOCHS_OF_AN_ERA` epochs its function is called again, with another seed: where a row
of the data is found is arithmetic on the number of rows in an epoch, also after a million epochs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

EPOCHS_OF_AN_ERA = 100


@dataclasses.dataclass(frozen=True)
class Place:
  """Position in the data at which reading starts: after some rows of an epoch.

  Attributes:
    era: number of the era, from 0.
    epoch: number of the epoch in it.
    skip: number of rows of the epoch to skip.
  """

  era: int = 0
  epoch: int = 0
  skip: int = 0


class Epochs:
  """The rows of all epochs of a data set.

  Args:
    make: called with a number of batches to skip, returns the data set of the rest of an epoch;
      always called with 0 if `skips` is False.
    rows: rows in a batch.
    seen: number of batches that were seen before.
    seed: seed of shuffles that have none of their own.
    skips: True if `make` can skip batches.
    whole_batches: True if each epoch begins with a new batch, and the incomplete one at its end is
      dropped; used for data sets that skip.
    may_be_short: True if an epoch may have fewer rows than a batch, which then spans several; used
      for data sets that would repeat by themselves.

  Attributes:
    size: rows in an epoch, with `whole_batches` a multiple of `rows`; None: not known yet. It may
      be set when it is found while reading.
  """

  def __init__(
    self,
    make: Callable[[int], tf.data.Dataset],
    rows: int,
    seen: int = 0,
    seed: int = 0,
    *,
    skips: bool = False,
    whole_batches: bool = False,
    may_be_short: bool = False,
  ):
    self._make = make
    self.rows = rows
    self._seed = seed
    self.skips = skips
    self.whole_batches = whole_batches or skips
    self.may_be_short = may_be_short
    self._of_an_era = EPOCHS_OF_AN_ERA
    self.size: int | None = None
    begin = seen if skips else 0
    first = self._made(0, begin)
    self.element_spec = first.element_spec
    # The data set made for inspection is the first to be read.
    self._first = {(0, begin): first}
    # Negative: TensorFlow does not know it, or it is endless.
    count = int(first.cardinality())
    if count >= 0 and begin and not count:  # There are fewer: how many?
      begin, count = 0, int(self._made(0, 0).cardinality())
    if count >= 0:
      size = begin * rows + count
      self.size = size - size % rows if self.whole_batches else size

  def _made(self, era: int, batches: int) -> tf.data.Dataset:
    # Data sets that shuffle without a seed of their own have the same order in all workers, and
    # whenever training goes on.
    tf.random.set_seed((self._seed + 1_000_003 * era) % 2**31)
    return self._make(batches)

  def place_of(self, batches: int) -> tuple[Place, int]:
    """Finds the position in the data of the batch with a given number.

    Args:
      batches: the number of batches before it; without `size`, counted from the first epoch on.

    Returns:
      The place to read from, and the number of batches to drop there before the wanted one.
    """
    rows = batches * self.rows
    if not self.size or self.size < self.rows:
      return (Place(skip=rows), 0) if self.skips else (Place(), batches)
    if self.skips:
      return Place(skip=rows % self.size), 0
    # Batches go on over the ends of epochs; the rows behind an era's last whole batch are dropped.
    era, batches = divmod(batches, self.size * self._of_an_era // self.rows)
    epoch, rows = divmod(batches * self.rows, self.size)
    return Place(era, epoch, rows % self.rows), rows // self.rows

  def one_by_one(self) -> None:
    """Makes each epoch an era of its own, of whole batches.

    TensorFlow saves where an iterator is in an epoch, but not always in which order the shuffles of
    the next ones are.
    """
    self.whole_batches, self._of_an_era = True, 1
    if self.size:
      self.size -= self.size % self.rows

  def ends_with_epoch(self, place: Place) -> bool:
    """True if reading from `place` stops at the end of its epoch."""
    return bool(place.skip) if self.skips else self._of_an_era == 1

  def rows_from(self, place: Place) -> tf.data.Dataset:
    """From a place to the end of its era: pairs (number of the row in its epoch, row).

    Where the data skips there are two: the epoch that is begun with, and all those after it.
    """
    batches = place.skip // self.rows if self.skips else 0
    dataset = self._first.pop((place.era, batches), None)
    if dataset is None:
      dataset = self._made(place.era, batches)
    # Endless data has no last rows to leave out.
    if self.whole_batches and int(dataset.cardinality()) != tf.data.INFINITE_CARDINALITY:
      dataset = dataset.batch(self.rows, drop_remainder=True).unbatch()
    if self.skips:
      return dataset.enumerate(place.skip) if place.skip else dataset.enumerate().repeat()
    _pass_epochs(dataset, place.epoch)
    return dataset.enumerate().repeat(self._of_an_era - place.epoch).skip(place.skip)


def _pass_epochs(dataset: tf.data.Dataset, count: int) -> None:
  """Advances reshuffling datasets by `count` epochs, by making that many iterators."""
  # zip makes iterators of both and ends at once, as one is empty. It must be the first: zip would
  # take an element of the other before it ends, for which a shuffle fills its buffer.
  nothing = tf.data.Dataset.range(0)
  passed = tf.data.Dataset.range(count).flat_map(lambda _: tf.data.Dataset.zip((nothing, dataset)))
  for _ in passed:
    pass
