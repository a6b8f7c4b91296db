"""Readers of records that come in order: lines, TFRecords, TensorFlow Datasets.

A reader is a chain of `tf.data`: of a divided input its part of the records (`input_shards`),
repeated and shuffled for training, encoded, packed or padded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_settings.rules import COUNT_OR_ZERO
from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.environment.data_sets import without_autotuning
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import input_shards
from mesh_tensorflow.transformer.data.encoding import (
  encode_all_features,
  encode_features,
  supervised_to_dict,
  vocabulary_of,
  with_eos,
)
from mesh_tensorflow.transformer.data.files import records, text_files
from mesh_tensorflow.transformer.data.files.arguments import argument
from mesh_tensorflow.transformer.data.options import MODULE, Examples, reader
from mesh_tensorflow.transformer.data.packing import (
  GROUP,
  Length,
  counted_as,
  length_of,
  pack_or_pad,
)
from mesh_tensorflow.transformer.data.vocabularies.base import EOS_ID

_ONE_EPOCH = "do not repeat: the trainer asks for it, and repeats by itself."


# -------------------------------------------------------------------------------- lines


@gin.configurable(module=MODULE)
@affects("training")
@takes(shuffle_buffer_size=COUNT, prefetch=COUNT_OR_ZERO)
def sample_from_text_line_datasets(
  glob_weight_list: Sequence[tuple[str, float]],
  shuffle_buffer_size: int = 100000,
  prefetch: int = 1000,
) -> tf.data.Dataset:
  """Endless shuffled lines of several sets of text files, mixed by weight.

  Args:
    glob_weight_list: (glob of text files, relative weight) of each set.
    shuffle_buffer_size: in lines, for each set.
    prefetch: in lines, for each set.

  Returns:
    A data set of scalar strings.

  Raises:
    DataError: a glob matches no file.
  """
  if not glob_weight_list:
    raise ConfigError("sample_from_text_line_datasets: glob_weight_list is empty")
  datasets = [
    # Repeated, then shuffled: the buffer is filled once, not anew in each epoch.
    text_files.text_line_dataset(glob).repeat().shuffle(shuffle_buffer_size).prefetch(prefetch)
    for glob, _ in glob_weight_list
  ]
  if len(datasets) == 1:
    return datasets[0]
  total = sum(weight for _, weight in glob_weight_list)
  return tf.data.Dataset.sample_from_datasets(
    datasets, weights=[weight / total for _, weight in glob_weight_list]
  )


@gin.configurable(module=MODULE)
@affects("training")
def make_text_line_dataset(glob: str = gin.REQUIRED) -> tf.data.Dataset:
  """Endless shuffled lines of the text files of one glob; see `sample_from_text_line_datasets`."""
  return sample_from_text_line_datasets([(glob, 1.0)])


@gin.configurable(module=MODULE)
@affects("training")
@takes(shuffle_buffer_size=COUNT)
def simple_text_line_dataset(
  glob: str = gin.REQUIRED, shuffle_buffer_size: int = 100000
) -> tf.data.Dataset:
  """The lines of the text files that match a glob: shuffled, each once."""
  return text_files.text_line_dataset(glob).shuffle(shuffle_buffer_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelTsv(Examples):
  """Options of `packed_parallel_tsv_dataset`."""

  dataset: tf.data.Dataset = argument(
    "yields lines of two columns, scalar strings; quotes have no meaning.", gin.REQUIRED
  )
  append_eos: bool = argument("end sequences with `eos_id`.", True)
  eos_id: int = argument("the id.", EOS_ID)
  max_encoded_len: int = argument(
    "leave out pairs of which one side has more ids (EOS counts); 0 for no limit.",
    0,
    COUNT_OR_ZERO,
  )


@reader(
  ParallelTsv,
  "dataset dataset_split batch_size sequence_length vocabulary append_eos eos_id max_encoded_len",
  dataset_split=gin.REQUIRED,
  sequence_length=gin.REQUIRED,
  vocabulary=gin.REQUIRED,
)
def packed_parallel_tsv_dataset(options: ParallelTsv) -> tf.data.Dataset:
  """Pairs of texts, from lines of two columns separated by a tab; the split has no effect.

  {settings}

  Returns:
    A data set of examples, packed by default (see `pack_or_pad`).
  """

  def split(line: tf.Tensor) -> dict[str, tf.Tensor]:
    # Quotes are part of a text here, not around a column.
    columns = tf.io.decode_csv(line, ["", ""], field_delim="\t", use_quote_delim=False)
    return dict(zip(("inputs", "targets"), columns))

  keys = ("inputs", "targets")
  texts = options.dataset.map(split, num_parallel_calls=tf.data.AUTOTUNE)
  dataset = encode_features(
    texts,
    {k: vocabulary_of(k, options.vocabulary) for k in keys},
    eos_id=options.eos_id if options.append_eos else None,
    dtype=tf.int64 if options.append_eos else tf.int32,
    # Whole, where their sizes matter.
    most=None if options.max_encoded_len else options.lengths(*keys),
  )
  if options.max_encoded_len:
    dataset = dataset.filter(
      lambda ex: (
        tf.maximum(tf.size(ex["inputs"]), tf.size(ex["targets"])) <= options.max_encoded_len
      )
    )
  return pack_or_pad(dataset, options.sequence_length)


# ---------------------------------------------------------------------------- TFRecords


def pretokenized_tfrecord_dataset(
  filenames: str | Sequence[str],
  text2self: bool,
  eos_included: bool,
  repeat: bool,
  batch_size: int | None,
  sequence_length: Length,
  vocab_shift: int = 0,
  *,
  skip_damaged: bool = False,
) -> tf.data.Dataset:
  """Reads TFRecords of tf.Examples of ids, and packs them.

  Args:
    filenames: one or several files.
    text2self: read `targets` only; otherwise `inputs` too.
    eos_included: sequences end with EOS already.
    repeat: endlessly.
    batch_size: has no effect.
    sequence_length: an int, or a dict from each feature.
    vocab_shift: added to all ids.
    skip_damaged: leave out the rest of a damaged file; see `records.tfrecord_dataset`.

  Returns:
    A data set of packed examples.
  """
  del batch_size
  dataset = records.tfrecord_dataset(filenames, skip_damaged=skip_damaged)
  if repeat:
    dataset = dataset.repeat()
  keys = ["targets"] if text2self else ["inputs", "targets"]
  features = {k: tf.io.RaggedFeature(tf.int64) for k in keys}
  lengths = {k: length_of("pretokenized_tfrecord_dataset", sequence_length, k) for k in keys}

  def decode(group: tf.Tensor) -> dict[str, tf.Tensor]:
    result = {}
    for k, ids in tf.io.parse_example(group, features).items():
      # What would be cut later is cut here, and zeros stand behind shorter sequences.
      result[k] = (ids + vocab_shift).to_tensor(shape=[None, lengths[k]])
      if not eos_included:
        is_end = tf.range(lengths[k]) == ids.row_lengths()[:, tf.newaxis]
        result[k] = tf.where(is_end, tf.constant(EOS_ID, tf.int64), result[k])
    return result

  groups = dataset.batch(GROUP).map(decode, num_parallel_calls=tf.data.AUTOTUNE)
  return pack_or_pad(counted_as(groups.unbatch(), dataset), sequence_length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T2t(Examples):
  """Options of `pretokenized_t2t_dataset`."""

  dataset_name: str = argument("first part of the file names.", gin.REQUIRED)
  text2self: bool = argument("read `targets` only; otherwise `inputs` too.", False)
  data_dir: str = argument("folder.", gin.REQUIRED)
  eos_included: bool = argument("sequences end with EOS already.", True)
  vocab_shift: int = argument("added to all ids.", 0)
  one_epoch: bool = argument(_ONE_EPOCH, False)


@reader(
  T2t,
  "dataset_name text2self data_dir dataset_split batch_size sequence_length vocabulary "
  "eos_included vocab_shift",
  sequence_length=gin.REQUIRED,
  vocabulary=None,
)
def pretokenized_t2t_dataset(options: T2t) -> tf.data.Dataset:
  """Records as tensor2tensor writes them: `{data_dir}/{dataset_name}-{dataset_split}-*`.

  The split "train" repeats, and its packed rows are shuffled. The ids are those of the records: the
  vocabulary has no effect.

  {settings}

  Returns:
    A data set of packed examples.

  Raises:
    DataError: there is no such file.
  """
  pattern = f"{options.data_dir}/{options.dataset_name}-{options.dataset_split}-*"
  dataset = pretokenized_tfrecord_dataset(
    filenames=text_files.find_files(pattern),
    text2self=options.text2self,
    eos_included=options.eos_included,
    repeat=options.train and not options.one_epoch,
    batch_size=options.batch_size,
    sequence_length=options.sequence_length,
    vocab_shift=options.vocab_shift,
  )
  # Rows, not examples: what was packed together stays together.
  return dataset.shuffle(1000) if options.train else dataset


# ------------------------------------------------------------------- TensorFlow Datasets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tfds(Examples):
  """Options of readers of TensorFlow Datasets."""

  dataset_name: str = argument("TFDS name.", gin.REQUIRED)
  text2self: bool = argument(
    "language model: the targets only; if it is not tokenized, the one text feature (or the one "
    'named "targets" or "text"). Otherwise the supervised pair becomes `inputs` and `targets`.',
    gin.REQUIRED,
  )
  tfds_data_dir: str | None = argument(
    "where TensorFlow Datasets keeps its data; None for its default.", gin.REQUIRED
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretokenizedTfds(Tfds):
  """Options of `pretokenized_tfds_dataset`."""

  one_epoch: bool = argument(_ONE_EPOCH, False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UntokenizedTfds(Tfds):
  """Options of `untokenized_tfds_dataset`."""

  pack: bool = argument("True if examples are packed; else they are padded.", gin.REQUIRED)
  inputs_feature: str | None = argument(
    'the feature that becomes `inputs`, in place of the first of the supervised pair: "en", say, '
    "for a translation data set that is listed the other way round.",
    None,
  )
  targets_feature: str | None = argument("the feature that becomes `targets`.", None)
  one_epoch: bool = argument(_ONE_EPOCH, False)


@reader(
  PretokenizedTfds,
  "dataset_name text2self tfds_data_dir dataset_split batch_size sequence_length vocabulary",
  dataset_split=gin.REQUIRED,
  sequence_length=gin.REQUIRED,
  vocabulary=None,
)
def pretokenized_tfds_dataset(options: PretokenizedTfds) -> tf.data.Dataset:
  """A TensorFlow dataset whose supervised pair consists of ids, packed.

  The split "train" repeats and is shuffled. The vocabulary has no effect; see
  `get_tfds_vocabulary`, whose ids these are.

  {settings}

  Returns:
    A data set of packed examples.
  """
  dataset = load_tfds(
    options.dataset_name,
    options.dataset_split,
    options.tfds_data_dir,
    as_supervised=True,
    one_epoch=options.one_epoch,
  )
  dataset = supervised_to_dict(dataset, options.text2self)
  # Ids move up by one, to make room for EOS.
  dataset = dataset.map(
    lambda example: {k: with_eos(tf.cast(v, tf.int64) + 1) for k, v in example.items()},
    num_parallel_calls=tf.data.AUTOTUNE,
  )
  return pack_or_pad(dataset, options.sequence_length)


@reader(
  UntokenizedTfds,
  "dataset_name text2self tfds_data_dir dataset_split batch_size sequence_length vocabulary pack",
  dataset_split=gin.REQUIRED,
  sequence_length=gin.REQUIRED,
  vocabulary=gin.REQUIRED,
)
def untokenized_tfds_dataset(options: UntokenizedTfds) -> tf.data.Dataset:
  """A TensorFlow dataset of text, encoded while it is read.

  The split "train" repeats and is shuffled.

  {settings}

  Returns:
    A data set of examples.

  Raises:
    ConfigError: a feature is named without the other one, or does not exist.
    DataError: it is unclear which feature is the text.
  """
  name, inputs, targets = options.dataset_name, options.inputs_feature, options.targets_feature
  where = (name, options.dataset_split, options.tfds_data_dir)
  if options.text2self:
    if inputs:
      raise ConfigError("untokenized_tfds_dataset: text2self has no inputs, leave inputs_feature")
    dataset = load_tfds(*where, as_supervised=False, one_epoch=options.one_epoch)
    names = {"targets": targets or _text_feature(name, dataset.element_spec)}
    dataset = _renamed(dataset, name, names)
  else:
    dataset = load_text_pairs(*where, inputs, targets, one_epoch=options.one_epoch)
  dataset = encode_all_features(dataset, options.vocabulary, options.sequence_length)
  return pack_or_pad(dataset, options.sequence_length, pack=options.pack)


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


@gin.configurable(module=MODULE)
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
  for example in without_autotuning(dataset).as_numpy_iterator():
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
