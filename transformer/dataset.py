"""Data sets for training and evaluation: readers, encoding, packing, padding.

Conventions: id 0 is padding and id 1 ends a sequence (EOS); there is no begin-of-sequence id.
Packed data has, next to a feature `f`, `f_segmentation` (the number of the sequence in its row,
from 1; 0 for padding) and `f_position` (from 0 in each sequence).

A reader meant for the trainer takes the keywords `sequence_length`, `vocabulary` and
`dataset_split`; `batch_size` is accepted and has no effect. It yields single examples. If it knows
its examples by number, it takes `skip` and `batch_rows`, too; else its sources read the part of
their records that `input_shards.current()` tells (see `training_data.TrainingData`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.data.encoding import (
  encode_all_features,
  encode_dataset,
  supervised_to_dict,
  with_eos,
)
from mesh_tensorflow.transformer.data.eval_datasets import (
  EvalDataset,
  parallel_text_eval_datasets,
  text_lm_eval_datasets,
  tfds_eval_datasets,
)
from mesh_tensorflow.transformer.data.packing import (
  Length,
  ensure_dataset_eos,
  pack_dataset,
  pack_or_pad,
  trim_and_pad_dataset,
)
from mesh_tensorflow.transformer.data.parallel_text import parallel_text_dataset
from mesh_tensorflow.transformer.data.text_lm import text_lm_dataset
from mesh_tensorflow.transformer.data.tfds_readers import (
  pretokenized_tfds_dataset,
  tfds_sentences,
  untokenized_tfds_dataset,
)
from mesh_tensorflow.transformer.files import records, text_files
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID


def pad_dataset_with_zeroed_out_examples(ds: tf.data.Dataset) -> tf.data.Dataset:
  """The data set, followed by endless copies of its elements with all values zero (or "")."""
  zeros = ds.map(lambda x: tf.nest.map_structure(tf.zeros_like, x))
  return ds.concatenate(zeros.repeat())


# -------------------------------------------------------------------------- readers


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
  features = {k: tf.io.VarLenFeature(tf.int64) for k in keys}

  def decode(record):
    parsed = tf.io.parse_single_example(record, features)
    ids = {k: parsed[k].values + vocab_shift for k in keys}
    return ids if eos_included else {k: with_eos(v) for k, v in ids.items()}

  dataset = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
  return pack_or_pad(dataset, sequence_length)


@gin.configurable
def pretokenized_t2t_dataset(
  dataset_name: str = gin.REQUIRED,
  text2self: bool = False,
  data_dir: str = gin.REQUIRED,
  dataset_split: str = "train",
  batch_size: int | None = None,
  sequence_length: Length = gin.REQUIRED,
  vocabulary: Any = None,
  eos_included: bool = True,
  vocab_shift: int = 0,
  *,
  one_epoch: bool = False,
) -> tf.data.Dataset:
  """Records as tensor2tensor writes them: `{data_dir}/{dataset_name}-{dataset_split}-*`.

  Args:
    dataset_name: first part of the file names.
    text2self: read `targets` only; otherwise `inputs` too.
    data_dir: folder.
    dataset_split: "train" repeats, and shuffles the packed rows.
    batch_size: has no effect.
    sequence_length: an int, or a dict from each feature.
    vocabulary: has no effect.
    eos_included: sequences end with EOS already.
    vocab_shift: added to all ids.
    one_epoch: do not repeat: the trainer asks for it, and repeats by itself.

  Returns:
    A data set of packed examples.

  Raises:
    DataError: there is no such file.
  """
  del vocabulary
  pattern = f"{data_dir}/{dataset_name}-{dataset_split}-*"
  train = dataset_split == "train"
  dataset = pretokenized_tfrecord_dataset(
    filenames=text_files.find_files(pattern),
    text2self=text2self,
    eos_included=eos_included,
    repeat=train and not one_epoch,
    batch_size=batch_size,
    sequence_length=sequence_length,
    vocab_shift=vocab_shift,
  )
  return dataset.shuffle(1000) if train else dataset


@gin.configurable
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
    text_files.text_line_dataset(glob).repeat().shuffle(shuffle_buffer_size).prefetch(prefetch)
    for glob, _ in glob_weight_list
  ]
  if len(datasets) == 1:
    return datasets[0]
  total = sum(weight for _, weight in glob_weight_list)
  return tf.data.Dataset.sample_from_datasets(
    datasets, weights=[weight / total for _, weight in glob_weight_list]
  )


@gin.configurable
def make_text_line_dataset(glob: str = gin.REQUIRED) -> tf.data.Dataset:
  """Endless shuffled lines of the text files that match a glob; see the function above."""
  return sample_from_text_line_datasets([(glob, 1.0)])


@gin.configurable
def simple_text_line_dataset(
  glob: str = gin.REQUIRED, shuffle_buffer_size: int = 100000
) -> tf.data.Dataset:
  """The lines of the text files that match a glob: shuffled, each once."""
  return text_files.text_line_dataset(glob).shuffle(shuffle_buffer_size)


@gin.configurable
def packed_parallel_tsv_dataset(
  dataset: tf.data.Dataset = gin.REQUIRED,
  dataset_split: str = gin.REQUIRED,
  batch_size: int | None = None,
  sequence_length: Length = gin.REQUIRED,
  vocabulary: Any = gin.REQUIRED,
  append_eos: bool = True,
  eos_id: int = EOS_ID,
  max_encoded_len: int = 0,
) -> tf.data.Dataset:
  """Pairs of texts, from lines of two columns separated by a tab.

  Args:
    dataset: yields lines, scalar strings; quotes have no meaning.
    dataset_split: has no effect.
    batch_size: has no effect.
    sequence_length: an int, or a dict from "inputs" and "targets".
    vocabulary: a `Vocabulary`, or a tuple of one for inputs and one for targets.
    append_eos: end sequences with `eos_id`.
    eos_id: the id.
    max_encoded_len: leave out pairs of which one side has more ids (EOS counts); 0 for no limit.

  Returns:
    A data set of examples, packed by default (see `pack_or_pad`).
  """
  del dataset_split, batch_size
  pair = vocabulary if isinstance(vocabulary, tuple) else (vocabulary, vocabulary)
  vocabularies = dict(zip(("inputs", "targets"), pair))

  def encode(line):
    columns = tf.io.decode_csv(line, ["", ""], field_delim="\t", use_quote_delim=False)
    ids = {k: vocabularies[k].encode_tf(c) for k, c in zip(("inputs", "targets"), columns)}
    return {k: with_eos(v, eos_id) for k, v in ids.items()} if append_eos else ids

  dataset = dataset.map(encode, num_parallel_calls=tf.data.AUTOTUNE)
  if max_encoded_len:
    dataset = dataset.filter(
      lambda ex: tf.maximum(tf.size(ex["inputs"]), tf.size(ex["targets"])) <= max_encoded_len
    )
  return pack_or_pad(dataset, sequence_length)


__all__ = [
  "EvalDataset",
  "encode_all_features",
  "encode_dataset",
  "ensure_dataset_eos",
  "make_text_line_dataset",
  "pack_dataset",
  "pack_or_pad",
  "packed_parallel_tsv_dataset",
  "parallel_text_dataset",
  "parallel_text_eval_datasets",
  "pad_dataset_with_zeroed_out_examples",
  "pretokenized_t2t_dataset",
  "pretokenized_tfds_dataset",
  "pretokenized_tfrecord_dataset",
  "sample_from_text_line_datasets",
  "simple_text_line_dataset",
  "supervised_to_dict",
  "text_lm_dataset",
  "text_lm_eval_datasets",
  "tfds_eval_datasets",
  "tfds_sentences",
  "trim_and_pad_dataset",
  "untokenized_tfds_dataset",
]
