"""The trainer's data pipeline: checks features, batches examples, stacks batches for a call."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import CheckpointError, ConfigError, DataError
from mesh_tensorflow.training import data_seed, files_read, input_shards, several_steps
from mesh_tensorflow.training.batch_stream import BatchStream
from mesh_tensorflow.training.epochs import Epochs, Place
from mesh_tensorflow.training.input_shards import BatchRows, InputShard
from mesh_tensorflow.transformer.programs.model_features import MODEL_FEATURES
from mesh_tensorflow.transformer.programs.model_steps import ModelSteps

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


def model_features(dataset: tf.data.Dataset) -> list[str]:
  """The names of those features of a data set that models take."""
  spec = dataset.element_spec
  if not isinstance(spec, dict):
    raise DataError(f"the data set must yield dicts of features, and it yields {spec}")
  return [n for n in MODEL_FEATURES if n in spec]


def check_lengths(dataset: tf.data.Dataset, names: Sequence[str], steps: ModelSteps) -> None:
  """Raises `DataError` for a feature of single examples that is not as long as the model says."""
  for name in names:
    expected = steps.feature_shape(name)[-1]
    shape = dataset.element_spec[name].shape
    if shape.rank != 1 or shape[0] not in (None, expected):
      raise DataError(
        f"feature {name!r} of the data has shape {shape}, expected [{expected}] "
        "(run.sequence_length); pad or cut it with dataset.pack_or_pad"
      )


def call_input_fn(input_fn: Any, batch_size: int) -> tf.data.Dataset:
  """The data set of an Estimator's input function, which yields batches.

  Args:
    input_fn: a data set, or a function; its argument `params`, if it has one, is
      `{"batch_size": batch_size}`.
    batch_size: number of examples in a batch.

  Raises:
    DataError: the function returns something else.
  """
  dataset = input_fn
  if callable(input_fn):
    parameters = inspect.signature(input_fn).parameters
    kwargs = {"params": {"batch_size": batch_size}} if "params" in parameters else {}
    dataset = input_fn(**kwargs)
  if not isinstance(dataset, tf.data.Dataset):
    raise DataError(f"an input_fn must return a tf.data.Dataset, not {type(dataset).__name__}")
  return dataset


def examples_of(input_fn: Any, batch_size: int) -> tf.data.Dataset:
  """The single examples of an Estimator's input function, which yields batches of dicts."""
  dataset = call_input_fn(input_fn, batch_size)
  if isinstance(dataset.element_spec, tuple):  # (features, labels); the labels are features, too.
    dataset = dataset.map(lambda features, *_: features)
  return dataset.unbatch()


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
    steps: the programs of the model.
    dataset_fn: called with `sequence_length`, `vocabulary` and `dataset_split`; if it takes `skip`,
      with the number of examples seen before; and if it takes `batch_rows`, with a `BatchRows`, or
      with None if all are needed. Returns single examples.
    vocabulary: for `dataset_fn`.
    split: for `dataset_fn`.
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
    steps: ModelSteps,
    dataset_fn: Callable[..., tf.data.Dataset],
    vocabulary: Any,
    split: str,
    seen_steps: int = 0,
    *,
    shard_input: bool = False,
    say: Callable[[str], None] | None = None,
    examples_in_epoch: int | None = None,
    seed: int | None = None,
  ):
    self._steps = steps
    seed = steps.mesh_impl.variable_store.seed if seed is None else seed
    kwargs = dict(sequence_length=steps.sequence_length, vocabulary=vocabulary, dataset_split=split)
    takes = _parameters(dataset_fn)
    makes_rows = "batch_rows" in takes
    shard, rows = InputShard(), _rows(steps)
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
      with data_seed.used(seed), files_read.noted() as files:
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
    dataset = self._epochs
    self.names = names = model_features(dataset)
    steps.check_features(names)
    check_lengths(dataset, names, steps)
    parts = [steps.local_part(n) for n in names]
    own = tf.identity if len(here) == read else lambda x: tf.gather(x, here)

    def batches(rows: tf.data.Dataset) -> tf.data.Dataset:
      rows = rows.map(
        lambda number, ex: (
          *(
            # Of the length what this process needs; which rows it needs, `read` and `own` say.
            tf.cast(ex[n][begins[-1] : begins[-1] + sizes[-1]], tf.int32)
            for n, (begins, sizes) in zip(names, parts)
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


def _rows(steps: ModelSteps) -> np.ndarray:
  """Bool mask of the examples of a batch that this process needs, in the order of the data."""
  begins, sizes = steps.local_part("targets")
  mask = np.zeros(steps.feature_shape("targets", training=True)[:-1], bool)
  mask[tuple(slice(b, b + n) for b, n in zip(begins[:-1], sizes[:-1]))] = True
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


def check_data_options(skip_seen_data: bool, checkpoint_input_pipeline: bool) -> None:
  """Raises `ConfigError` if both are asked for."""
  if skip_seen_data and checkpoint_input_pipeline:
    raise ConfigError(
      "run.skip_seen_data and run.checkpoint_input_pipeline are two ways to go on with the data; "
      "bind one of them"
    )


def steps_per_call(wanted: int, save_every: int) -> int:
  """The largest number of steps up to `wanted` after which a checkpoint can be due."""
  if not save_every:
    return wanted
  return max(n for n in range(1, min(wanted, save_every) + 1) if save_every % n == 0)


def _parameters(dataset_fn: Callable[..., Any]) -> Collection[str]:
  try:
    return inspect.signature(dataset_fn).parameters
  except (TypeError, ValueError):
    return ()
