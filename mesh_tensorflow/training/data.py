"""The data of a training: examples in batches, batches stacked for a call, the saved position.

`Epochs` and `BatchStream` find batches by number, over the ends of epochs. `TrainingData` makes the
batches of a program of them, `SavedPipeline` those whose position is saved.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import gin
import numpy as np
import tensorflow as tf
import tqdm

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow import workers
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.environment.data_sets import without_autotuning
from mesh_tensorflow.environment.tensorflow_mode import not_converted
from mesh_tensorflow.errors import CheckpointError, DataError
from mesh_tensorflow.training import input_shards, seeds, several_steps
from mesh_tensorflow.training.input_shards import BatchRows, InputShard
from mesh_tensorflow.training.program import Program, local_part

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
    self.iterator = iter(without_autotuning(self._batches(self._dataset)))
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


# Name of the position in the data, as a part of a checkpoint.
_PIPELINE = "input_pipeline"
# In that part: where its iterator began, which has to begin there again to go on.
_PLACE = "place/.ATTRIBUTES/VARIABLE_VALUE"
_AUTOTUNE = tf.data.AUTOTUNE
# Errors of data sets whose position cannot be saved; those of disks are others.
_NOT_SAVED = (
  tf.errors.FailedPreconditionError,
  tf.errors.InvalidArgumentError,
  tf.errors.UnimplementedError,
  ValueError,
)

_Element = TypeVar("_Element")


@gin.configurable(module="mesh_tensorflow.transformer.training_data", allowlist=["shard_input"])
@affects("training")
class TrainingData:
  """The batches of one training run; on several workers, the part that this one needs of them.

  Finite data is repeated and reshuffled in each epoch (see `Epochs`). If its function takes `skip`
  or `batch_rows`, the incomplete batch at the end of an epoch is dropped. Data with less than a
  batch gives no batches. A function that takes `one_epoch` is asked not to repeat its data; its
  epochs may be shorter than a batch.

  Which examples are in which batch does not depend on the workers, unless `shard_input` is true.
  A data set function that takes `batch_rows` makes only the examples that this worker needs; of
  the others each worker goes through all examples, and keeps its own rows.

  Args:
    program: the program, which says what is in a batch.
    dataset_fn: called, if it takes `skip`, with the number of examples seen before; and if it takes
      `batch_rows`, with a `BatchRows`, or with None if all are needed. Returns single examples:
      dicts of features.
    seen_steps: number of steps whose examples are left out.
    shard_input: divides what is read: each worker reads and parses its shard of the records only,
      and its rows of a batch are the next examples of that shard. Workers that need the same rows
      have the same shard. Which examples a step sees then depends on how many shards there are, and
      so on the number of workers. Files and TensorFlow datasets are divided by the readers of this
      package, and by functions that ask for `input_shards.current()`; of other functions' data
      sets each worker makes all examples, and takes each n-th. Each shard is repeated when it ends.
      Functions that take `batch_rows` are divided already, and one worker reads all: for these it
      has no effect.
    say: called with messages about the data: a new epoch begins, seen examples are being read.
    examples_in_epoch: number of examples in an epoch as last counted; None: unknown. A hint for
      skipping examples, which need not be right.
    seed: seed of random orders; None: that of the initial weights.

  Attributes:
    names: the features of a batch.
    files: what the data is read from, as the keys, so far as its readers say (`files_read`).
  """

  def __init__(
    self,
    program: Program,
    dataset_fn: Callable[..., tf.data.Dataset],
    seen_steps: int = 0,
    *,
    shard_input: bool = False,
    say: Callable[[str], None] | None = None,
    examples_in_epoch: int | None = None,
    seed: int | None = None,
  ):
    seed = program.mesh_impl.variable_store.seed if seed is None else seed
    kwargs: dict[str, Any] = {}
    takes = _parameters(dataset_fn)
    makes_rows = "batch_rows" in takes
    shard, rows = InputShard(), _rows(program)
    if shard_input and not makes_rows:
      shard, rows = input_shards.divide(rows)
    batch, here = len(rows), np.flatnonzero(rows).tolist()
    read = batch
    if makes_rows:
      kwargs["batch_rows"] = None
    if makes_rows and len(here) < batch:
      # The last row of a batch is made by all: so they agree on how many whole batches there are.
      kwargs["batch_rows"] = BatchRows(batch, tuple(sorted({*here, batch - 1})))
      read = len(kwargs["batch_rows"].needed)
      here = list(range(len(here)))
    # A function that skips examples itself may not know of the shards.
    skips = "skip" in takes and shard.count == 1
    if "one_epoch" in takes:
      kwargs["one_epoch"] = True

    def make(batches: int) -> tf.data.Dataset:
      if "skip" in takes:
        kwargs["skip"] = batches * batch
      with seeds.used(seed), input_shards.noted() as files:
        self.files = files
        return input_shards.read_shard(shard, lambda: dataset_fn(**kwargs))

    self._epochs = Epochs(
      make, read, seen_steps, seed,
      skips=skips, whole_batches=makes_rows, may_be_short="one_epoch" in takes,
    )  # fmt: skip
    if examples_in_epoch and self._epochs.size is None and shard.count == 1:
      self._epochs.size = examples_in_epoch * read // batch
    self._seen = seen_steps
    self._say = say
    self._examples = batch
    self.names = names = program.feature_names(self._epochs)
    parts = [local_part(program, n) for n in names]
    dtypes = [program.feature_spec(n, training=True).dtype for n in names]
    of_example = len(program.examples)
    own = tf.identity if len(here) == read else lambda x: tf.gather(x, here)

    @not_converted
    def of_row(number: tf.Tensor, ex: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, ...]:
      # Of an example what this process needs; which rows it needs, `read` and `own` say.
      found = [
        tf.cast(_part(ex[n], begins[of_example:], sizes[of_example:]), dtype)
        for n, (begins, sizes), dtype in zip(names, parts, dtypes)
      ]
      return (*found, number)

    @not_converted
    def of_batch(*xs: tf.Tensor) -> tuple[tf.Tensor, ...]:
      return (*(tf.reshape(own(x), sizes) for x, (_, sizes) in zip(xs, parts)), xs[-1])

    def batches(rows: tf.data.Dataset) -> tf.data.Dataset:
      return rows.map(of_row).batch(read, drop_remainder=True).map(of_batch)

    self._batches = batches
    self._name = _PIPELINE
    self._agree = shard.count > 1
    if shard.count > 1 or len(here) < batch:
      self._name = _name_of_part(shard, makes_rows, parts)

  def calls(
    self, count: int, per_call: int, most: Callable[[], int] | None = None
  ) -> Iterable[tuple[tf.Tensor, ...]]:
    """Batches stacked for one call each: tensors [steps, <shape of a batch>].

    Args:
      count: steps in all.
      per_call: steps in a call, at most; where a call has fewer, the next ends where it would have.
      most: returns how many steps the next call may have, the same in all workers.
    """
    stream = self._stream(lambda rows: self._batches(rows).batch(per_call).prefetch(_AUTOTUNE))
    calls = _behind(self._seen, stream, lambda: stream.calls(count, lambda _: per_call))
    if self._agree:
      calls = input_shards.agreed(calls, count, lambda: per_call)
    return calls if most is None else several_steps.in_parts(calls, most)

  def saved_with_checkpoints(self) -> SavedPipeline:
    """The same batches, by an iterator whose position can be saved.

    Data that ends is repeated in whole batches: what is left at the end of an epoch is left out.
    """
    self._epochs.one_by_one()
    # One at a time, as a stack of one: the position that is saved is that of the step.
    stream = self._stream(lambda rows: self._batches(rows).prefetch(_AUTOTUNE).batch(1))
    return SavedPipeline(stream, self._name, self._agree, seen=self._seen)

  @property
  def examples_in_epoch(self) -> int | None:
    """Number of training examples in an epoch; None if unknown."""
    size = self._epochs.size
    return size * self._examples // self._epochs.rows if size and not self._agree else None

  def _stream(self, batches: Callable[[tf.data.Dataset], tf.data.Dataset]) -> BatchStream:
    return BatchStream(self._epochs, batches, self._examples, self._say)


def _name_of_part(
  shard: InputShard, makes_rows: bool, parts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> str:
  """Name of the saved position of this process's part of the data; tells the parts apart."""
  how = ["rows" if makes_rows else "part"]
  if shard.count > 1:
    how = ["shard", str(shard.index), "of", str(shard.count)]
  numbers = [n for begins, sizes in parts for n in (*begins, *sizes)]
  return "_".join(map(str, [_PIPELINE, *how, *numbers]))


def _behind(
  seen: int, stream: BatchStream, calls: Callable[[], Iterable[Any]]
) -> Iterator[tuple[tf.Tensor, ...]]:
  """Skips seen batches lazily, when the first call is requested."""
  stream.skip(seen)
  yield from calls()


def _part(x: tf.Tensor, begins: Sequence[int], sizes: Sequence[int]) -> tf.Tensor:
  return x[tuple(slice(b, b + n) for b, n in zip(begins, sizes))] if begins else x


def _rows(program: Program) -> np.ndarray:
  """Bool mask of the examples of a batch that this process needs, in the order of the data."""
  begins, sizes = program.mesh_impl.local_part(program.examples)
  mask = np.zeros(program.examples.to_integer_list, bool)
  mask[tuple(slice(b, b + n) for b, n in zip(begins, sizes))] = True
  return mask.reshape(-1)


class SavedPipeline:
  """Batches from an iterator whose position, shuffle buffers included, is a part of checkpoints.

  Args:
    stream: the batches, one at a time.
    name: name of its part of a checkpoint.
    agree: whether other workers may have fewer batches.
    seen: number of batches that were seen before; none if a position is restored.
  """

  def __init__(self, stream: BatchStream, name: str, agree: bool = False, *, seen: int = 0):
    self._stream = stream
    self._agree = agree
    self._name = name
    self._seen: int | None = seen

  def calls(
    self, count: int, per_call: int, most: Callable[[], int] | None = None
  ) -> Iterator[tuple[tf.Tensor, ...]]:
    """Like `TrainingData.calls`, without reading ahead of the next call."""
    asked = [per_call]

    def wanted(done: int) -> int:
      asked[0] = min(count - done, per_call - done % per_call, most() if most else per_call)
      return asked[0]

    calls = self._calls(count, wanted)
    return input_shards.agreed(calls, count, lambda: asked[0]) if self._agree else calls

  def _calls(self, count: int, wanted: Callable[[int], int]) -> Iterator[tuple[tf.Tensor, ...]]:
    self._begin()
    yield from self._stream.calls(count, wanted)

  def _begin(self) -> None:
    seen, self._seen = self._seen, None
    if seen is not None:
      self._stream.skip(seen)

  def attachments(self) -> dict[str, Callable[[str], None]]:
    """The writer of the position, as `attachments` of `Checkpointer.save`."""
    return {self._name: self._write}

  def _write(self, path: str) -> None:
    self._begin()
    try:
      self._checkpoint().write(path)
    except _NOT_SAVED as e:
      raise DataError(
        f"checkpoint_input_pipeline: the position in the training data cannot be saved: {e}; use "
        "a data set of TensorFlow operations, or leave run.checkpoint_input_pipeline out"
      ) from e

  def restore(self, path: str) -> None:
    """Restores the position in the data that was saved with a checkpoint.

    Raises:
      DataError: there is no such position.
    """
    position = checkpoint_lib.attachment(path, self._name)
    try:
      place = checkpoint_lib.Values(position)[_PLACE]
      *place, last_row = place.tolist()
      self._stream.begin(Place(*place), last_row)
      self._checkpoint().read(position).assert_consumed()
      self._seen = None
    except (tf.errors.OpError, CheckpointError, ValueError, AssertionError) as e:
      raise DataError(
        f"checkpoint_input_pipeline: the position in the training data at {path} cannot be read "
        f"({e}); leave run.checkpoint_input_pipeline out to skip the examples seen before"
      ) from e

  def _checkpoint(self) -> tf.train.Checkpoint:
    place = (*dataclasses.astuple(self._stream.place), self._stream.last_row)
    return tf.train.Checkpoint(
      iterator=self._stream.iterator, place=tf.Variable(place, trainable=False, dtype=tf.int64)
    )

  def is_in(self, path: str | None) -> bool:
    """True if a checkpoint contains the position."""
    return path is not None and tf.io.gfile.exists(
      checkpoint_lib.attachment(path, self._name) + ".index"
    )


def _parameters(dataset_fn: Callable[..., tf.data.Dataset]) -> Collection[str]:
  try:
    return inspect.signature(dataset_fn).parameters
  except (TypeError, ValueError):
    return ()


@dataclasses.dataclass(frozen=True)
class TrainingSource:
  """The source of the batches of a training.

  Attributes:
    program: the program, which says what is in a batch.
    dataset_fn: makes the data set of single examples; see `TrainingData`.
    first: the step whose batch is the first of the data set.
    examples_in_epoch: number of examples in an epoch as last counted; None: not counted.
    seed: see `TrainingData`.
  """

  program: Program
  dataset_fn: Callable[..., tf.data.Dataset]
  first: int
  examples_in_epoch: int | None = None
  seed: int | None = None

  def batches_from(self, start: int, say: Callable[[str], None] | None = None) -> TrainingData:
    """The batches of the step `start` and of those after it.

    Args:
      start: the step.
      say: gets lines about the data.
    """
    return TrainingData(
      self.program,
      self.dataset_fn,
      start - self.first,
      say=say,
      examples_in_epoch=self.examples_in_epoch,
      seed=self.seed,
    )

  def open(
    self, start: int, checkpoint: str | None, say: Callable[[str], None], *, saves_position: bool
  ) -> tuple[TrainingData, SavedPipeline | None]:
    """The data from a step on, with an iterator whose position is saved, if it is to be.

    Args:
      start: the step.
      checkpoint: that of the step `start`, which may have the position; None at the beginning.
      say: gets lines about the data.
      saves_position: whether the position is saved with checkpoints.
    """
    data = self.batches_from(start, say)
    if not saves_position:
      return data, None
    pipeline = data.saved_with_checkpoints()
    # All workers or none: otherwise they would be at different places in the data.
    there = checkpoint is not None and pipeline.is_in(checkpoint)
    if not workers.any_worker(not there) and checkpoint is not None:
      pipeline.restore(checkpoint)
    elif start > self.first:
      say(f"the position in the data was not saved at step {start}: examples are skipped")
    return data, pipeline


def _cannot_read(error: tf.errors.OpError) -> DataError | None:
  if isinstance(error, (tf.errors.DataLossError, tf.errors.NotFoundError)):
    return DataError(f"cannot read the data: {error.message.splitlines()[0]}")
  return raised_by_generator(error)


def raised_by_generator(error: tf.errors.OpError) -> DataError | None:
  """The error of a data set's generator, in whose place TensorFlow raises its own."""
  if not isinstance(error, (tf.errors.InvalidArgumentError, tf.errors.UnknownError)):
    return None
  told = re.search(r"(?:DataError|ConfigError): (.*)", error.message)
  return told and DataError(told.group(1))


def reading(
  batches: Iterable[_Element],
  explain: Callable[[tf.errors.OpError], DataError | None] = _cannot_read,
) -> Iterator[_Element]:
  """Yields the elements of a data set.

  Args:
    batches: the data set, which is not tuned: it prefetches as far as it says.
    explain: the error that TensorFlow's stands for; None: TensorFlow's is raised.

  Raises:
    DataError: a file of it is damaged or gone; or a generator raised a `DataError`.
  """
  tuned = isinstance(batches, tf.data.Dataset)
  iterator = iter(without_autotuning(batches) if tuned else batches)
  while True:
    try:
      batch = next(iterator)
    except StopIteration:
      return
    except tf.errors.OpError as e:
      explained = explain(e)
      if explained is None:
        raise
      raise explained from e
    yield batch
