"""Batches of a training by number: epochs, skipping of those seen before."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
import tqdm

from mesh_tensorflow.errors import DataError

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


# How often what an epoch has may turn out to be something else, while seen batches are left out.
_TRIES = 3

# What TensorFlow says where the data set itself does not know how long its examples are.
_OTHER_LENGTHS = re.compile(
  r"(Incompatible shapes at component|Cannot (batch|add) tensor"
  # Of batches of examples that are all of one other length.
  r"|Input to reshape is a tensor with)[^\n]*?(?= \[Op:|\n|$)"
)


class BatchStream:
  """Reads batches across the boundaries of epochs.

  Args:
    epochs: the source of rows.
    batches: maps a data set of pairs (row number, row) to one of several batches at a time: tuples
      of tensors [batches, ...], the last of which are the row numbers, int64 [batches, rows].
    examples: number of examples of the training data in a batch.
    say: called with messages about the data; None: no messages.

  Attributes:
    place: position at which the iterator began.
    iterator: iterator over the data set that `batches` returned.
    last_row: number of the last row that it returned; -1: none.
  """

  def __init__(
    self,
    epochs: Epochs,
    batches: Callable[[tf.data.Dataset], tf.data.Dataset],
    examples: int,
    say: Callable[[str], None] | None = None,
  ):
    self._epochs = epochs
    self._batches = batches
    self._examples = examples
    self._say = say
    self._told = False
    self.place = Place()
    self.iterator: Iterator[tuple[tf.Tensor, ...]] = iter(())
    self._held: tuple[tf.Tensor, ...] | None = None
    self.last_row = -1

  def begin(self, place: Place, last_row: int = -1) -> None:
    """Positions the stream at a place in the data.

    Args:
      place: the place.
      last_row: number of the last row of an iterator from there whose position is restored next.
    """
    self.place = place
    # Kept: with a data set goes the order of its shuffles, also for an iterator that is restored.
    self._dataset = self._epochs.rows_from(place)
    self.iterator = iter(self._batches(self._dataset))
    self._held = None
    self.last_row = last_row

  def skip(self, seen: int) -> None:
    """Positions the stream at a batch: by arithmetic if the epoch's size is known, else by reading.

    Args:
      seen: the number of batches before it.
    """
    for _ in range(_TRIES):
      size = self._epochs.size
      place, left = self._epochs.place_of(seen)
      self.begin(place)
      if self._epochs.skips and place.skip:
        # Kept for the next call: only reading tells if there is a batch after the skipped ones.
        self._held = self._part(sys.maxsize)
        if self._held is None:  # The epoch ended before it, at an unknown row.
          self._epochs.size = size = None
          self.begin(Place())
          left = seen
      if not left or self._pass_over(left, size):
        return

  def _pass_over(self, left: int, size: int | None) -> bool:
    """Reads and drops seen batches; False if an epoch turns out to have another size."""
    examples = left * self._examples
    if self._say is not None:
      self._say(f"the training data goes on behind examples seen before: {examples:,} are read")
    shows = self._say is not None and sys.stderr.isatty()
    with tqdm.tqdm(
      total=examples, unit="example", desc="seen before", dynamic_ncols=True, disable=not shows
    ) as bar:
      while left:
        # Python is back after each call, and hears signals.
        part = self._part(left)
        if part is None or self._epochs.size != size:
          return self._epochs.size == size
        count = int(part[0].shape[0])
        left -= count
        bar.update(count * self._examples)
    return True

  def calls(self, count: int, wanted: Callable[[int], int]) -> Iterator[tuple[tf.Tensor, ...]]:
    """Batches stacked for one call each; fewer where the data ends.

    Args:
      count: batches in all.
      wanted: called with the number of batches that were returned, returns how many are wanted
        next; nothing is read ahead of that but by the data set.
    """
    done = 0
    while done < count:
      missing = n = min(wanted(done), count - done)
      parts = []
      while missing:
        part = self._part(missing)
        if part is None:
          break
        parts.append(part)
        missing -= int(part[0].shape[0])
      if parts:
        yield parts[0] if len(parts) == 1 else tuple(tf.concat(xs, 0) for xs in zip(*parts))
      if missing:
        return
      done += n

  def _part(self, most: int) -> tuple[tf.Tensor, ...] | None:
    """The next batches, up to `most` of them; None at the end of data that cannot be repeated."""
    part, self._held = self._held, None
    while part is None:
      part = self._next()
      if part is not None:
        part = self._without_numbers(part)
        if part is None:
          return None
      elif not self._next_era():
        return None
    count = int(part[0].shape[0])
    if count > most:
      self._held = tuple(x[most:] for x in part)
      part = tuple(x[:most] for x in part)
    return part

  def _next(self) -> tuple[tf.Tensor, ...] | None:
    """Next batch, None at the end; raises DataError if example lengths differ from the model's."""
    try:
      return next(self.iterator, None)
    except tf.errors.InvalidArgumentError as e:
      wrong = _OTHER_LENGTHS.search(str(e))
      if wrong is None:
        raise
      raise DataError(
        "examples of the training data have not the length that run.sequence_length says; pad or "
        f"cut them with dataset.pack_or_pad (TensorFlow: {wrong[0]})"
      ) from e

  def _next_era(self) -> bool:
    """Starts the next era; returns False if the data has ended for good."""
    if self.last_row < 0:
      return False  # The era had no batch.
    if self._epochs.ends_with_epoch(self.place):
      self._ends_at(self.last_row)
    self.begin(Place(self.place.era + 1))
    return True

  def _without_numbers(self, part: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...] | None:
    """Strips row numbers after checking them for an epoch's end; None if it has no full batch."""
    *features, numbers = part
    if not self._told or self._epochs.size is None:
      rows = numbers.numpy().reshape(-1)
      # A row of number 0 begins an epoch: the row before it was the last of the one before.
      before = np.concatenate([[self.last_row], rows[:-1]])
      for last in before[(rows == 0) & (before >= 0)][:1].tolist():
        self._ends_at(last)
        if last + 1 < self._epochs.rows and not self._epochs.may_be_short:
          return None
    self.last_row = int(numbers[-1, -1])
    return tuple(features)

  def _ends_at(self, row: int) -> None:
    """Records that an epoch ended with this row, and says so once."""
    self._epochs.size = size = row + 1
    if self._told or size < self._epochs.rows:
      return
    self._told = True
    if self._say is not None:
      examples = size * self._examples // self._epochs.rows
      self._say(
        f"the training data has ended: an epoch of {examples:,} examples begins anew (the next "
        "ones do without a word)"
      )
