"""The data of a training: examples in batches, batches stacked for a call, the saved position."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow import workers
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import CheckpointError, DataError
from mesh_tensorflow.training import input_shards, seeds, several_steps
from mesh_tensorflow.training.batch_stream import BatchStream, Epochs, Place
from mesh_tensorflow.training.input_shards import BatchRows, InputShard
from mesh_tensorflow.training.program import Program, local_part

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

    def batches(rows: tf.data.Dataset) -> tf.data.Dataset:
      rows = rows.map(
        lambda number, ex: (
          *(
            # Of an example what this process needs; which rows it needs, `read` and `own` say.
            tf.cast(_part(ex[n], begins[of_example:], sizes[of_example:]), dtype)
            for n, (begins, sizes), dtype in zip(names, parts, dtypes)
          ),
          number,
        )
      )
      return rows.batch(read, drop_remainder=True).map(
        lambda *xs: (*(tf.reshape(own(x), sizes) for x, (_, sizes) in zip(xs, parts)), xs[-1])
      )

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
    batches: the data set.
    explain: the error that TensorFlow's stands for; None: TensorFlow's is raised.

  Raises:
    DataError: a file of it is damaged or gone; or a generator raised a `DataError`.
  """
  iterator = iter(batches)
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
