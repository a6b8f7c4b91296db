"""Readers of TensorFlow Datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import input_shards
from mesh_tensorflow.transformer.data.encoding import (
  encode_all_features,
  supervised_to_dict,
  with_eos,
)
from mesh_tensorflow.transformer.data.packing import Length, pack_or_pad

_MODULE = "mesh_tensorflow.transformer.dataset"


@gin.configurable(module=_MODULE)
@affects("training")
@takes(batch_size=COUNT)
def pretokenized_tfds_dataset(
  dataset_name: str = gin.REQUIRED,
  text2self: bool = gin.REQUIRED,
  tfds_data_dir: str | None = gin.REQUIRED,
  dataset_split: str = gin.REQUIRED,
  batch_size: int | None = None,
  sequence_length: Length = gin.REQUIRED,
  vocabulary: Any = None,
  *,
  one_epoch: bool = False,
) -> tf.data.Dataset:
  """A tokenized TensorFlow dataset, packed.

  Args:
    dataset_name: TFDS name, whose supervised pair consists of ids.
    text2self: use the targets only (language model).
    tfds_data_dir: where TensorFlow Datasets keeps its data; None for its default.
    dataset_split: "train" repeats and shuffles.
    batch_size: has no effect.
    sequence_length: an int, or a dict from each feature.
    vocabulary: has no effect; see `get_tfds_vocabulary`, whose ids these are.
    one_epoch: do not repeat: the trainer asks for it, and repeats by itself.

  Returns:
    A data set of packed examples.
  """
  del batch_size, vocabulary
  dataset = load_tfds(
    dataset_name, dataset_split, tfds_data_dir, as_supervised=True, one_epoch=one_epoch
  )
  dataset = supervised_to_dict(dataset, text2self)
  # Ids move up by one, to make room for EOS.
  dataset = dataset.map(
    lambda example: {k: with_eos(tf.cast(v, tf.int64) + 1) for k, v in example.items()},
    num_parallel_calls=tf.data.AUTOTUNE,
  )
  return pack_or_pad(dataset, sequence_length)


@gin.configurable(module=_MODULE)
@affects("training")
@takes(batch_size=COUNT)
def untokenized_tfds_dataset(
  dataset_name: str = gin.REQUIRED,
  text2self: bool = gin.REQUIRED,
  tfds_data_dir: str | None = gin.REQUIRED,
  dataset_split: str = gin.REQUIRED,
  batch_size: int | None = None,
  sequence_length: Length = gin.REQUIRED,
  vocabulary: Any = gin.REQUIRED,
  pack: bool = gin.REQUIRED,
  *,
  inputs_feature: str | None = None,
  targets_feature: str | None = None,
  one_epoch: bool = False,
) -> tf.data.Dataset:
  """A TensorFlow dataset of text, encoded while it is read.

  Args:
    dataset_name: TFDS name.
    text2self: language model: the one text feature (or the one named "targets" or "text")
      becomes `targets`. Otherwise the supervised pair becomes `inputs` and `targets`.
    tfds_data_dir: where TensorFlow Datasets keeps its data; None for its default.
    dataset_split: "train" repeats and shuffles.
    batch_size: has no effect.
    sequence_length: an int, or a dict from each feature.
    vocabulary: a `Vocabulary`, or a tuple of one for inputs and one for targets.
    pack: whether examples are packed, or padded.
    inputs_feature: the feature that becomes `inputs`, in place of the first of the supervised
      pair: "en", say, for a translation data set that is listed the other way round.
    targets_feature: the feature that becomes `targets`.
    one_epoch: do not repeat: the trainer asks for it, and repeats by itself.

  Returns:
    A data set of examples.

  Raises:
    ConfigError: a feature is named without the other one, or does not exist.
    DataError: it is unclear which feature is the text.
  """
  del batch_size
  if text2self:
    if inputs_feature:
      raise ConfigError("untokenized_tfds_dataset: text2self has no inputs, leave inputs_feature")
    dataset = load_tfds(
      dataset_name, dataset_split, tfds_data_dir, as_supervised=False, one_epoch=one_epoch
    )
    names = {"targets": targets_feature or _text_feature(dataset_name, dataset.element_spec)}
    dataset = _renamed(dataset, dataset_name, names)
  else:
    dataset = load_text_pairs(
      dataset_name,
      dataset_split,
      tfds_data_dir,
      inputs_feature,
      targets_feature,
      one_epoch=one_epoch,
    )
  dataset = encode_all_features(dataset, vocabulary)
  return pack_or_pad(dataset, sequence_length, pack=pack)


def load_text_pairs(
  dataset_name: str,
  dataset_split: str,
  tfds_data_dir: str | None,
  inputs: str | None = None,
  targets: str | None = None,
  *,
  one_epoch: bool = False,
) -> tf.data.Dataset:
  """Pairs of texts of a TensorFlow dataset.

  Args:
    dataset_name: TFDS name.
    dataset_split: "train" repeats and shuffles.
    tfds_data_dir: where TensorFlow Datasets keeps its data; None for its default.
    inputs: the feature that becomes `inputs`; None: the first of the supervised pair.
    targets: the feature that becomes `targets`; None: the second.
    one_epoch: do not repeat: the trainer asks for it, and repeats by itself.

  Returns:
    A data set of dicts of scalar strings `inputs` and `targets`.

  Raises:
    ConfigError: only one feature is named, or one does not exist.
  """
  if (inputs is None) != (targets is None):
    raise ConfigError(
      f"TFDS dataset {dataset_name!r}: name both features or none, got inputs_feature {inputs!r} "
      f"and targets_feature {targets!r}"
    )
  dataset = load_tfds(
    dataset_name,
    dataset_split,
    tfds_data_dir,
    as_supervised=inputs is None,
    one_epoch=one_epoch,
  )
  if inputs is None or targets is None:
    return supervised_to_dict(dataset, text2self=False)
  return _renamed(dataset, dataset_name, {"inputs": inputs, "targets": targets})


def load_tfds(
  name: str, split: str, data_dir: str | None, *, as_supervised: bool, one_epoch: bool = False
) -> tf.data.Dataset:
  """`tfds.load`; the split "train" is shuffled, and repeats if not `one_epoch`.

  Of a divided input its part of the examples; see `input_shards.current`.
  """
  import tensorflow_datasets as tfds  # Slow to import, and most runs do not need it.

  train = split == "train"
  shard = input_shards.current()
  # A part of the examples, not of the files, of which there may be few, or one more in one part.
  part = split if shard.count == 1 else tfds.even_splits(split, n=shard.count)[shard.index]
  # Files in random order are else read in a race: other workers, and a training that goes on,
  # would see others in their place.
  options = tf.data.Options()
  options.deterministic = True
  dataset = tfds.load(
    name, split=part, as_supervised=as_supervised, data_dir=data_dir, shuffle_files=train,
    read_config=tfds.ReadConfig(options=options),
  )  # fmt: skip
  if not train:
    return dataset
  # Repeated, then shuffled: the buffer is filled once, not anew in each epoch.
  return (dataset if one_epoch else dataset.repeat()).shuffle(1000)


@gin.configurable(module=_MODULE)
@affects("training")
@takes(max_examples=COUNT)
def tfds_sentences(
  dataset_name: str = gin.REQUIRED,
  features: Sequence[str] = gin.REQUIRED,
  tfds_data_dir: str | None = None,
  dataset_split: str = "train",
  max_examples: int = 1_000_000,
) -> Iterator[bytes]:
  """Texts of a TensorFlow dataset: what `get_subword_vocabulary` trains on.

  Args:
    dataset_name: TFDS name.
    features: the text features to take, ("en", "fr") say.
    tfds_data_dir: where TensorFlow Datasets keeps its data; None for its default.
    dataset_split: the split, or a part of it.
    max_examples: take the texts of so many examples from its beginning.

  Yields:
    Texts, UTF-8.

  Raises:
    ConfigError: there is no such feature.
  """
  import tensorflow_datasets as tfds  # Slow to import, and most runs do not need it.

  dataset = tfds.load(
    dataset_name, split=dataset_split, as_supervised=False, data_dir=tfds_data_dir,
    shuffle_files=False,
  )  # fmt: skip
  dataset = _renamed(dataset.take(max_examples), dataset_name, {f: f for f in features})
  for example in dataset.as_numpy_iterator():
    yield from (example[f] for f in features)


def _renamed(
  dataset: tf.data.Dataset, dataset_name: str, names: Mapping[str, str]
) -> tf.data.Dataset:
  """Dicts of the features `names[key]`, called `key`."""
  known = list(dataset.element_spec)
  unknown = [f for f in names.values() if f not in known]
  if unknown:
    raise ConfigError(f"TFDS dataset {dataset_name!r} has no feature {unknown}, only {known}")
  return dataset.map(lambda example: {key: example[f] for key, f in names.items()})


def _text_feature(dataset_name: str, spec: Mapping[str, Any]) -> str:
  strings = [
    k for k, v in spec.items() if getattr(v, "dtype", None) == tf.string and v.shape.rank == 0
  ]
  for k in ("targets", "text"):
    if k in strings:
      return k
  if len(strings) != 1:
    raise DataError(
      f"TFDS dataset {dataset_name!r}: text2self needs one text feature, or one named 'targets' or "
      f"'text'; its text features are {strings}, of all features {list(spec)}"
    )
  return strings[0]
