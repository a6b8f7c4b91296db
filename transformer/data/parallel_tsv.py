"""A reader of pairs of texts: lines of two columns."""

from __future__ import annotations

from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.transformer.data.encoding import with_eos
from mesh_tensorflow.transformer.data.packing import Length, pack_or_pad
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID


@gin.configurable(module="mesh_tensorflow.transformer.dataset")
@affects("training")
@takes(batch_size=COUNT, max_encoded_len=COUNT_OR_ZERO)
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

  def encode(line: tf.Tensor) -> dict[str, tf.Tensor]:
    # Quotes are part of a text here, not around a column.
    columns = tf.io.decode_csv(line, ["", ""], field_delim="\t", use_quote_delim=False)
    ids = {k: vocabularies[k].encode_tf(c) for k, c in zip(("inputs", "targets"), columns)}
    return {k: with_eos(v, eos_id) for k, v in ids.items()} if append_eos else ids

  dataset = dataset.map(encode, num_parallel_calls=tf.data.AUTOTUNE)
  if max_encoded_len:
    dataset = dataset.filter(
      lambda ex: tf.maximum(tf.size(ex["inputs"]), tf.size(ex["targets"])) <= max_encoded_len
    )
  return pack_or_pad(dataset, sequence_length)
