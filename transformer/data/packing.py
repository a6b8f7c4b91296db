"""Makes sequences equally long: by packing several into a row, or by padding.

Packing is greedy, without look-ahead: an example goes to the open row if all of its features fit
there, and otherwise closes that row and opens the next.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.environment.tensorflow_mode import not_converted
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.transformer.data.vocabularies.base import EOS_ID

# Examples that one call of a graph cuts or pads: a call takes 20 microseconds, an example less.
GROUP = 64

# What one length for all features, or one for each, looks like.
Length = int | Mapping[str, int]


@gin.configurable(module="mesh_tensorflow.transformer.dataset")
@affects("training")
def pack_or_pad(
  dataset: tf.data.Dataset,
  length: Length,
  pack: bool = True,
  feature_keys: Collection[str] | None = None,
  ensure_eos: bool | Collection[str] = False,
) -> tf.data.Dataset:
  """Makes every sequence as long as `length`, by packing or by padding.

  Args:
    dataset: yields dicts of sequences.
    length: an int, or a dict from each feature key.
    pack: several sequences share a row (`pack_dataset`, which drops other features).
    feature_keys: features to work on; all by default.
    ensure_eos: the last token becomes EOS unless it is padding: True for all `feature_keys`, or
      the keys for which that holds.

  Returns:
    A data set of dicts with static shapes.
  """
  feature_keys = list(feature_keys or element_spec(dataset))
  if pack:
    dataset = pack_dataset(dataset, length, keys=feature_keys)
  dataset = trim_and_pad_dataset(dataset, length, feature_keys=feature_keys)
  if ensure_eos:
    dataset = ensure_dataset_eos(dataset, feature_keys if ensure_eos is True else ensure_eos)
  return dataset


@gin.configurable(module="mesh_tensorflow.transformer.dataset")
@affects("training")
def pack_dataset(
  dataset: tf.data.Dataset,
  length: Length,
  keys: Collection[str] | None = None,
  use_custom_ops: bool = False,
) -> tf.data.Dataset:
  """Packs several examples into each row of fixed length.

  Sequences are cut to their length. Groups of max(length) consecutive examples are packed by
  themselves, in order: an example goes to the open row if all of its features fit there, and
  otherwise opens the next. The length of a sequence is its number of non-zero ids.

  Args:
    dataset: yields dicts of integer sequences.
    length: an int, or a dict from each key.
    keys: features to pack, the others are dropped; all by default.
    use_custom_ops: has no effect; there is one implementation, in TensorFlow operations.

  Returns:
    A data set of dicts of int32 [length of the key]: `key`, `key_segmentation` and
    `key_position` for each key.

  Raises:
    DataError: a key is unknown, or a feature is not a sequence of integers.
  """
  del use_custom_ops
  spec = element_spec(dataset)
  keys = _check_keys("pack_dataset", spec, keys)
  for k in keys:
    if spec[k].shape.rank != 1 or not spec[k].dtype.is_integer:
      raise DataError(
        f"pack_dataset: feature {k!r} must be a sequence of integers, and it is "
        f"{spec[k].dtype.name} of shape {spec[k].shape}"
      )
  lengths = {k: length_of("pack_dataset", length, k) for k in keys}

  size = max(lengths.values())

  @not_converted
  def cut(examples: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    # With a column more, as TensorFlow crashes where it takes empty tensors apart.
    columns = {k: tf.pad(examples[k], [[0, 0], [0, 1]])[:, : lengths[k]] for k in keys}
    return {k: tf.cast(v, tf.int32) for k, v in columns.items()}

  @not_converted
  def pack(examples: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return pack_group(examples, lengths)

  dataset = dataset.map(not_converted(lambda example: {k: example[k] for k in keys}))
  # Cut in smaller groups than are packed: one long example makes all of its group as long.
  dataset = dataset.padded_batch(min(size, GROUP)).map(cut, num_parallel_calls=tf.data.AUTOTUNE)
  # Zeros behind an example do not count, and are not taken off before.
  dataset = dataset.unbatch().padded_batch(size, {k: [None] for k in keys})
  return dataset.map(pack, num_parallel_calls=tf.data.AUTOTUNE).unbatch()


def trim_and_pad_dataset(
  dataset: tf.data.Dataset, length: Length, feature_keys: Collection[str] | None = None
) -> tf.data.Dataset:
  """Cuts or zero-pads the first axis of features to `length`.

  Args:
    dataset: yields dicts of tensors of any dtype (strings are padded with "").
    length: an int, or a dict from each key.
    feature_keys: features to work on, the others pass untouched; all by default.

  Returns:
    A data set of dicts with static shapes.

  Raises:
    DataError: a key is unknown, has no length, or is a scalar.
  """
  spec = element_spec(dataset)
  keys = _check_keys("trim_and_pad_dataset", spec, feature_keys)
  lengths = {k: length_of("trim_and_pad_dataset", length, k) for k in keys}
  for k in keys:
    if spec[k].shape.rank == 0:
      raise DataError(f"trim_and_pad_dataset: feature {k!r} is a scalar")
  if all(spec[k].shape[:1] == [lengths[k]] for k in keys):
    return dataset  # As packed rows are.

  @not_converted
  def fit(examples: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {**examples, **{k: _trim_and_pad(examples[k], n) for k, n in lengths.items()}}

  @not_converted
  def fit_one(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    fitted = {k: _trim_and_pad(example[k][tf.newaxis], n)[0] for k, n in lengths.items()}
    return {**example, **fitted}

  # A group may have what is of one shape but for an axis that becomes so, and not empty: TensorFlow
  # crashes where it takes such tensors apart.
  if all(v.shape[k in lengths :].num_elements() for k, v in spec.items()):
    # The map makes tensors of what is ragged in the specification alone, as rows of ragged tensors.
    groups = dataset.map(not_converted(dict)).padded_batch(GROUP)
    groups = groups.map(fit, num_parallel_calls=tf.data.AUTOTUNE)
    return counted_as(groups.unbatch(), dataset)
  return dataset.map(fit_one, num_parallel_calls=tf.data.AUTOTUNE)


def _trim_and_pad(x: tf.Tensor, length: int) -> tf.Tensor:
  """Examples [n, any, ...] as [n, length, ...]."""
  outer, inner = x.shape[:1], x.shape[2:]
  x = x[:, :length]
  missing = length - tf.shape(x)[1]
  if x.dtype == tf.string:  # tf.pad has no kernel for strings.
    padding = tf.fill(tf.concat([tf.shape(x)[:1], [missing], tf.shape(x)[2:]], 0), "")
    x = tf.concat([x, padding], 1)
  else:
    x = tf.pad(x, [[0, 0], [0, missing]] + [[0, 0]] * inner.rank)
  return tf.ensure_shape(x, [*outer, length, *inner])


def counted_as(dataset: tf.data.Dataset, other: tf.data.Dataset) -> tf.data.Dataset:
  """The data set with the cardinality of another one, which is lost in groups, if that is known."""
  cardinality = tf.get_static_value(other.cardinality())
  if cardinality is None or cardinality == tf.data.UNKNOWN_CARDINALITY:
    return dataset  # None: within a function of a data set.
  return dataset.apply(tf.data.experimental.assert_cardinality(cardinality))


def ensure_dataset_eos(
  dataset: tf.data.Dataset, feature_keys: Collection[str] | None = None
) -> tf.data.Dataset:
  """Makes the last id of each sequence EOS (1), unless it is padding (0).

  Args:
    dataset: yields dicts of integer sequences of fixed length.
    feature_keys: features to work on; all by default.

  Returns:
    A data set: last ids above 1 become 1, negative ones 0.

  Raises:
    DataError: a key is unknown.
  """
  keys = set(_check_keys("ensure_dataset_eos", element_spec(dataset), feature_keys))

  def end(v: tf.Tensor) -> tf.Tensor:
    return tf.concat([v[:-1], tf.clip_by_value(v[-1:], 0, EOS_ID)], 0)

  return dataset.map(
    not_converted(lambda example: {k: end(v) if k in keys else v for k, v in example.items()}),
    num_parallel_calls=tf.data.AUTOTUNE,
  )


def pack_group(
  examples: Mapping[str, tf.Tensor], lengths: Mapping[str, int]
) -> dict[str, tf.Tensor]:
  """Packs a group of examples in order, as graph operations without a loop.

  Args:
    examples: for each key int32 [n, any], zero-padded; n is at most the largest length. An
      example's sequence is its first k elements, where k, which must not exceed the length, counts
      its non-zero elements.
    lengths: the row length of each key.

  Returns:
    For each key int32 [rows, length] tensors `key`, `key_segmentation` and `key_position`.
  """
  keys = list(lengths)
  sizes = tf.stack(
    [tf.math.count_nonzero(examples[k], axis=1, dtype=tf.int32) for k in keys], axis=1
  )  # [n, keys]
  row_lengths = tf.constant([lengths[k] for k in keys], tf.int32)
  rows, starts = _choose_rows(sizes, row_lengths, max(lengths.values()))
  num_rows = rows[-1] + 1
  packed = {}
  for i, key in enumerate(keys):
    tokens = examples[key]
    column = tf.range(tf.shape(tokens)[1])
    index = tf.where(column < sizes[:, i, tf.newaxis])  # [tokens, 2]: example, column
    example, column = index[:, 0], tf.cast(index[:, 1], tf.int32)
    target = tf.stack([tf.gather(rows, example), tf.gather(starts[:, i], example) + column], axis=1)
    # Ids and positions in one scatter: they go to the same places.
    both = tf.stack([tf.gather_nd(tokens, index), column], axis=1)
    both = tf.scatter_nd(target, both, tf.stack([num_rows, lengths[key], 2]))
    both = tf.ensure_shape(both, [None, lengths[key], 2])
    packed[key], packed[key + "_position"] = both[..., 0], both[..., 1]
    packed[key + "_segmentation"] = segmentation(packed[key], packed[key + "_position"])
  return packed


def segmentation(tokens: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
  """Numbers the sequences of each row from 1; 0 where the token is 0.

  Args:
    tokens: int32 [rows, length].
    position: int32 [rows, length], which starts at 0 in each sequence.
  """
  # Padding has position 0, too, but stands behind all sequences of the row, and its token is 0.
  starts = tf.cast(tf.equal(position, 0), tf.int32)
  return tf.cumsum(starts, axis=1) * tf.cast(tf.not_equal(tokens, 0), tf.int32)


def _choose_rows(sizes: tf.Tensor, lengths: tf.Tensor, most: int) -> tuple[tf.Tensor, tf.Tensor]:
  """The row (int32 [n]) and the offsets in it (int32 [n, keys]) of at most `most` examples."""
  n = tf.shape(sizes)[0]
  total = tf.pad(tf.cumsum(sizes), [[1, 0], [0, 0]])  # [n + 1, keys]: tokens before an example
  # If a row began with example i, the first example that does not fit would be end[i].
  limit = tf.transpose(total[:-1] + lengths)
  end = tf.searchsorted(tf.transpose(total), limit, side="right") - 1
  # All features must fit: the first that does not decides.
  end = tf.reduce_min(end, axis=0)
  # Where rows begin: the first ones from 0 on, then as many again, by jumps of so many rows.
  jump, first = tf.concat([end, [n]], 0), tf.zeros([1], tf.int32)
  for _ in range(most.bit_length()):
    first = tf.concat([first, tf.gather(jump, first)], 0)
    jump = tf.gather(jump, jump)
  rows = tf.searchsorted(first, tf.range(n), side="right") - 1
  return rows, total[:-1] - tf.gather(total, tf.gather(first, rows))


def choose_row_ends(sizes: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
  """Packs sequences of one feature that lie one after another in memory.

  Rows are those of `pack_dataset`, which begins a new row after each `length` sequences.

  Args:
    sizes: the number of tokens of each sequence, at most `length`.
    length: tokens in a row.

  Returns:
    int64 [rows]: how many sequences lie in this row and the ones before.
  """
  # bisect on a list: for single numbers several times faster than np.searchsorted.
  total = [0, *np.cumsum(np.asarray(sizes, np.int64)).tolist()]
  ends = []
  first = 0
  while first < len(sizes):
    # The last sequence whose end is within the row.
    end = bisect.bisect_right(total, total[first] + length, first) - 1
    first = min(end, (first // length + 1) * length)
    ends.append(first)
  return np.array(ends, np.int64)


def endless(dataset: tf.data.Dataset) -> tf.data.Dataset:
  """Marks a data set as infinite, which TensorFlow cannot infer after unbatching."""
  return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def element_spec(dataset: tf.data.Dataset) -> Mapping[str, tf.TensorSpec]:
  """The features of a data set of dicts; `DataError` if it yields something else."""
  spec = dataset.element_spec
  if not isinstance(spec, Mapping):
    raise DataError(f"the data set must yield dicts of features, and it yields {spec}")
  return spec


def _check_keys(
  what: str, spec: Mapping[str, tf.TensorSpec], keys: Collection[str] | None
) -> list[str]:
  keys = list(spec) if keys is None else list(keys)
  unknown = [k for k in keys if k not in spec]
  if unknown or not keys:
    raise DataError(f"{what}: there is no feature {unknown}; the features are {list(spec)}")
  return keys


def length_of(what: str, length: Length, key: str) -> int:
  """The length of a feature; `DataError` of the function `what` if there is none."""
  if not isinstance(length, Mapping):
    return int(length)
  if key not in length:
    raise DataError(f"{what}: no length is given for feature {key!r}, only for {list(length)}")
  return int(length[key])


def pad_dataset_with_zeroed_out_examples(ds: tf.data.Dataset) -> tf.data.Dataset:
  """The data set, followed by endless copies of its elements with all values zero (or "")."""
  zeros = ds.map(lambda x: tf.nest.map_structure(tf.zeros_like, x))
  return ds.concatenate(zeros.repeat())
