"""What the trainer does to data: features checked, examples batched, batches stacked for a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.files import input_shards
from mesh_tensorflow.transformer.files.input_shards import BatchRows, InputShard
from mesh_tensorflow.transformer.programs import several_steps
from mesh_tensorflow.transformer.programs.model_features import MODEL_FEATURES
from mesh_tensorflow.transformer.programs.model_steps import ModelSteps

# Name of the position in the data, as a part of a checkpoint.
_PIPELINE = "input_pipeline"
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
class TrainingData:
  """The batches of one training run; on several workers, the part that this one needs of them.

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
      sets each worker makes all examples, and takes each n-th. Training ends when the first shard
      does; let the data set repeat. Functions that take `batch_rows` are divided already, and one
      worker reads all: for these it has no effect.
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
  ):
    self._steps = steps
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
    # A function that skips examples of its own accord may not know of which shard.
    skips = "skip" in takes and shard.count == 1
    if "skip" in takes:
      kwargs["skip"] = seen_steps * batch if skips else 0
    dataset = input_shards.read_shard(shard, lambda: dataset_fn(**kwargs))
    if seen_steps and not skips:
      dataset = dataset.skip(seen_steps * read)
    self.names = names = model_features(dataset)
    steps.check_features(names)
    check_lengths(dataset, names, steps)
    parts = [steps.local_part(n) for n in names]
    dataset = dataset.map(
      lambda ex: tuple(
        tf.cast(ex[n][begins[-1] : begins[-1] + sizes[-1]], tf.int32)
        for n, (begins, sizes) in zip(names, parts)
      )
    )
    dataset = dataset.batch(read, drop_remainder=True)
    own = tf.identity if len(here) == read else lambda x: tf.gather(x, here)
    self._dataset = dataset.map(
      lambda *xs: tuple(tf.reshape(own(x), sizes) for x, (_, sizes) in zip(xs, parts))
    )
    self._name = _PIPELINE
    self._agree = shard.count > 1
    if shard.count > 1 or len(here) < batch:
      # The position in the data is of use to a process that reads the same.
      how = ["rows" if makes_rows else "part"]
      if shard.count > 1:
        how = ["shard", shard.index, "of", shard.count]
      numbers = [n for begins, sizes in parts for n in (*begins, *sizes)]
      self._name = "_".join(map(str, [_PIPELINE, *how, *numbers]))

  def calls(
    self, count: int, per_call: int, most: Callable[[], int] | None = None
  ) -> Iterable[tuple[tf.Tensor, ...]]:
    """Batches stacked for one call each: tensors [steps, <shape of a batch>].

    Args:
      count: steps in all.
      per_call: steps in a call, at most; where a call has fewer, the next ends where it would have.
      most: returns how many steps the next call may have, the same in all workers.
    """
    calls = self._dataset.take(count).batch(per_call).prefetch(tf.data.AUTOTUNE)
    if self._agree:
      calls = input_shards.agreed(calls, count, lambda: per_call)
    return calls if most is None else several_steps.in_parts(calls, most)

  def saved_with_checkpoints(self) -> SavedPipeline:
    """The same batches, by an iterator whose position can be saved."""
    return SavedPipeline(self._dataset.prefetch(tf.data.AUTOTUNE), self._name, self._agree)


def _rows(steps: ModelSteps) -> np.ndarray:
  """Which examples of a batch this process needs, as a mask, in the order of the data."""
  begins, sizes = steps.local_part("targets")
  mask = np.zeros(steps.feature_shape("targets", training=True)[:-1], bool)
  mask[tuple(slice(b, b + n) for b, n in zip(begins[:-1], sizes[:-1]))] = True
  return mask.reshape(-1)


class SavedPipeline:
  """Batches from an iterator whose position, shuffle buffers included, is a part of checkpoints.

  Args:
    dataset: batches, as tuples.
    name: what its part of a checkpoint is called.
    agree: whether other workers may have fewer batches.
  """

  def __init__(self, dataset: tf.data.Dataset, name: str, agree: bool = False):
    self._iterator = iter(dataset)
    self._agree = agree
    self._checkpoint = tf.train.Checkpoint(iterator=self._iterator)
    self._name = name

  def calls(
    self, count: int, per_call: int, most: Callable[[], int] | None = None
  ) -> Iterator[tuple[tf.Tensor, ...]]:
    """As `TrainingData.calls`; nothing is read ahead of what a call takes."""
    asked = [per_call]
    calls = self._calls(count, per_call, most or (lambda: per_call), asked)
    return input_shards.agreed(calls, count, lambda: asked[0]) if self._agree else calls

  def _calls(
    self, count: int, per_call: int, most: Callable[[], int], asked: list[int]
  ) -> Iterator[tuple[tf.Tensor, ...]]:
    done = 0
    while count > 0:
      asked[0] = min(count, per_call - done % per_call, most())
      taken = []
      for _ in range(asked[0]):
        batch = next(self._iterator, None)
        if batch is None:
          break
        taken.append(batch)
      if not taken:
        return
      count -= len(taken)
      done += len(taken)
      yield tuple(tf.stack(xs) for xs in zip(*taken))

  def attachments(self) -> dict[str, Callable[[str], None]]:
    """What writes the position, for `Checkpointer.save`."""
    return {self._name: self._write}

  def _write(self, path: str) -> None:
    try:
      self._checkpoint.write(path)
    except _NOT_SAVED as e:
      raise DataError(
        f"checkpoint_input_pipeline: the position in the training data cannot be saved: {e}; use "
        "a data set of TensorFlow operations, or leave run.checkpoint_input_pipeline out"
      ) from e

  def restore(self, path: str) -> None:
    """Goes to where the data was at a checkpoint.

    Raises:
      DataError: there is no such position.
    """
    try:
      self._checkpoint.read(checkpoint_lib.attachment(path, self._name)).assert_consumed()
    except (tf.errors.OpError, ValueError, AssertionError) as e:
      raise DataError(
        f"checkpoint_input_pipeline: the position in the training data at {path} cannot be read "
        f"({e}); leave run.checkpoint_input_pipeline out to skip the examples seen before"
      ) from e

  def is_in(self, path: str | None) -> bool:
    """Whether a checkpoint has the position."""
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
