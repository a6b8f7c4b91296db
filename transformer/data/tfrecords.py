"""Readers of TFRecords of ids, as tensor2tensor writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.transformer.data.encoding import with_eos
from mesh_tensorflow.transformer.data.packing import Length, pack_or_pad
from mesh_tensorflow.transformer.files import records, text_files


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

  def decode(record: tf.Tensor) -> dict[str, tf.Tensor]:
    parsed = tf.io.parse_single_example(record, features)
    ids = {k: parsed[k].values + vocab_shift for k in keys}
    return ids if eos_included else {k: with_eos(v) for k, v in ids.items()}

  dataset = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
  return pack_or_pad(dataset, sequence_length)


@gin.configurable(module="mesh_tensorflow.transformer.dataset")
@affects("training")
@takes(batch_size=COUNT)
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
  # Rows, not examples: what was packed together stays together.
  return dataset.shuffle(1000) if train else dataset
