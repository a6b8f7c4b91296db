"""Writing, checking and reading of records of examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import DataError
from mesh_tensorflow.training import data

# Size and kind of a feature: () for a number, (n,) for n of them; tf.int64 or tf.float32.
Feature = tuple[tuple[int, ...], Any]
InputFn = Callable[[Mapping[str, Any]], tf.data.Dataset]

_PARALLEL = 4
_SHUFFLED = 100  # Records among which training shuffles.

_Element = TypeVar("_Element")


def token_features(seq_length: int) -> dict[str, Feature]:
  """Features that all records have: WordPiece ids, mask (1, or 0 for padding) and segment ids."""
  seq = (seq_length,)
  return {name: (seq, tf.int64) for name in ("input_ids", "input_mask", "segment_ids")}


def example(features: Mapping[str, Sequence[float]]) -> bytes:
  """A `tf.train.Example`: lists of integers as int64, others as float.

  Args:
    features: lists by name.
  """
  made = {}
  for name, values in features.items():
    if all(isinstance(v, (int, np.integer)) for v in values):
      made[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    else:
      made[name] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
  return bytes(
    tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString(deterministic=True)
  )


def parse(record: tf.Tensor, features: Mapping[str, Feature]) -> dict[str, tf.Tensor]:
  """The features of a record; integers as int32, which accelerators prefer."""
  wanted = {name: tf.io.FixedLenFeature(shape, dtype) for name, (shape, dtype) in features.items()}
  parsed = tf.io.parse_single_example(record, wanted)
  return {k: tf.cast(v, tf.int32) if v.dtype == tf.int64 else v for k, v in parsed.items()}


def check_first(file: str, features: Mapping[str, Feature], advice: str) -> None:
  """Checks that the first record of a file has the features that the model needs.

  Args:
    file: path of a file of records.
    features: the needed features, (shape, dtype) by name.
    advice: text that names the setting that decides their sizes.

  Raises:
    DataError: it is not; there is none; or the file holds no records.
  """
  try:
    record = next(iter(tf.data.TFRecordDataset(file).take(1)), None)
    found = None if record is None else tf.train.Example.FromString(record.numpy())
  except Exception as e:  # noqa: BLE001 - a file of text, say: errors of TensorFlow and protobuf.
    raise DataError(f"{file} holds no records of examples (TFRecord of tf.train.Example)") from e
  if found is None:
    raise DataError(f"{file} is empty: it has no records")
  for name, (shape, dtype) in features.items():
    feature = found.features.feature.get(name)
    if feature is None:
      names = ", ".join(sorted(found.features.feature))
      raise DataError(f"{file}: its records have no feature {name}; they have {names}")
    values = feature.float_list if dtype.is_floating else feature.int64_list
    size = shape[0] if shape else 1
    if len(values.value) != size:
      raise DataError(
        f"{file}: {name} has {len(values.value)} values of {dtype.name} in each record, the model "
        f"needs {size}; {advice}"
      )


def _shuffle(dataset: tf.data.Dataset, size: int, seed: int) -> tf.data.Dataset:
  """Shuffles an endless stream in consecutive blocks of `size` elements.

  `Dataset.shuffle` also draws by the seed of `tf.random.set_seed`: its order depends on what else
  the process has done. Here it is a function of `seed`, on every machine, for every iterator.
  """

  def window(number: tf.Tensor, elements: Any) -> tf.data.Dataset:
    order = tf.random.experimental.stateless_shuffle(tf.range(size), tf.stack([seed, number]))
    shuffled = tf.nest.map_structure(lambda x: tf.gather(x, order), elements)
    return tf.data.Dataset.from_tensor_slices(shuffled)

  return dataset.batch(size, drop_remainder=True).enumerate().flat_map(window)


def input_fn(
  files: Sequence[str],
  features: Mapping[str, Feature],
  is_training: bool,
  *,
  drop_remainder: bool,
  shuffle_files: bool = False,
  repeat: bool | None = None,
  threads: int = _PARALLEL,
) -> InputFn:
  """A function that reads batches.

  Args:
    files: paths of the files of records.
    features: the features to read, (shape, dtype) by name.
    is_training: whether records are repeated without end, and shuffled (among 100).
    drop_remainder: whether a last batch that is not full is left out.
    shuffle_files: whether training reads several files in a drawn order, in turn.
    repeat: whether records are repeated; as `is_training` by default.
    threads: number of records that are parsed at once.

  Returns:
    A function of a dict with `batch_size` and, if wanted, `seed` (of the order, which depends on
    nothing else) and `first_step` (batches that are passed over); it returns a data set of dicts.
  """
  files = list(files)
  repeat = is_training if repeat is None else repeat

  def make(params: Mapping[str, Any]) -> tf.data.Dataset:
    seed = int(params.get("seed", 0))
    if is_training and shuffle_files:
      # The order must not depend on how fast files are read: a run can go on where another ended.
      dataset = tf.data.Dataset.from_tensor_slices(files).repeat()
      dataset = _shuffle(dataset, len(files), seed)
      dataset = dataset.interleave(tf.data.TFRecordDataset, cycle_length=min(threads, len(files)))
    else:
      dataset = tf.data.TFRecordDataset(files)
      dataset = dataset.repeat() if repeat else dataset
    if is_training:
      dataset = _shuffle(dataset, _SHUFFLED, seed)
    batch_size = int(params["batch_size"])
    dataset = dataset.skip(int(params.get("first_step", 0)) * batch_size)
    dataset = dataset.map(lambda r: parse(r, features), num_parallel_calls=threads)
    return dataset.batch(batch_size, drop_remainder=drop_remainder).prefetch(2)

  return make


def in_memory(columns: Mapping[str, Any], is_training: bool, *, drop_remainder: bool) -> InputFn:
  """As `input_fn`, of arrays whose first dimension is that of the examples."""

  def make(params: Mapping[str, Any]) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(dict(columns))
    if is_training:
      dataset = _shuffle(dataset.repeat(), _SHUFFLED, int(params.get("seed", 0)))
    batch_size = int(params["batch_size"])
    dataset = dataset.skip(int(params.get("first_step", 0)) * batch_size)
    return dataset.batch(batch_size, drop_remainder=drop_remainder).prefetch(2)

  return make


def reading(batches: Iterable[_Element]) -> Iterator[_Element]:
  """Yields the elements of a data set of records.

  Raises:
    DataError: they are damaged, or are not as the model needs them.
  """
  return data.reading(batches, _explained)


def _explained(error: tf.errors.OpError) -> DataError | None:
  if isinstance(error, (tf.errors.DataLossError, tf.errors.NotFoundError)):
    return DataError(f"cannot read the examples: {error.message.splitlines()[0]}")
  wrong = isinstance(error, tf.errors.InvalidArgumentError)
  if wrong and ("Feature" in error.message or "parse" in error.message):
    return DataError(f"a record is not as the model needs it: {error.message.splitlines()[0]}")
  return None
