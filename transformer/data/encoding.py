"""Text to ids, in data sets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import DataError
from mesh_tensorflow.transformer.data import packing
from mesh_tensorflow.transformer.data.vocabularies.base import (
  EOS_ID,
  PythonVocabulary,
  Vocabularies,
  Vocabulary,
)

_LOG = logging.getLogger("mesh_tensorflow")

# A text of at least so many ids of which a larger part is unknown is refused. (Where no letter is
# known, the blanks are: half of the ids.)
_LONG, _MOST_UNKNOWN = 1000, 0.3

_ROWS = 128  # Texts that one call of Python encodes.


def check_known(ids: np.ndarray, vocabulary: Vocabulary, what: str) -> None:
  """Raises if nearly all of a long text is unknown to the vocabulary.

  Args:
    ids: of the text.
    vocabulary: its vocabulary; if it has an unknown id, that is its `unk_id`.
    what: the text, for the error.

  Raises:
    DataError: the words of a long text are unknown, mostly.
  """
  unknown = getattr(vocabulary, "unk_id", None)
  if unknown is None or ids.size < _LONG:
    return
  share = np.count_nonzero(ids == unknown) / ids.size
  if share > _MOST_UNKNOWN:
    raise DataError(
      f"{what}: {share:.0%} of {ids.size:,} tokens are unknown to the vocabulary: is it that of "
      "another language? A model keeps the vocabulary that it was trained with"
    )


def encode(vocabulary: Any, text: str | bytes, path: str) -> np.ndarray:
  """The ids of a text, in the smallest dtype that holds the vocabulary."""
  encode = getattr(vocabulary, "encode_array", vocabulary.encode)
  try:
    ids = np.asarray(encode(text), np.int64)
  except DataError as e:
    raise DataError(f"{path}: {e}") from e
  size = vocabulary.vocab_size
  if ids.size and not (ids.min() > 0 and ids.max() < size):
    bad = ids[(ids <= 0) | (ids >= size)]
    raise DataError(
      f"{path}: the vocabulary encodes this text with id {bad[0]}, which is not in 1..{size - 1} "
      "(0 is padding)"
    )
  return ids.astype(np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.int32)


def encode_in_groups(texts: Sequence[str], vocabulary: Vocabulary) -> Iterator[list[int]]:
  """The ids of each text, without EOS."""
  if not isinstance(vocabulary, PythonVocabulary):
    yield from map(vocabulary.encode, texts)
    return
  for first in range(0, len(texts), _ROWS):
    yield from vocabulary.encode_texts(texts[first : first + _ROWS])


def encode_documents(
  documents: Iterable[tuple[str, str | bytes]],
  vocabulary: Vocabulary,
  length: int | None = None,
  too_long: str = "split",
) -> tuple[np.ndarray, np.ndarray]:
  """Encodes documents, with an EOS behind each.

  Args:
    documents: path and text of each.
    vocabulary: their vocabulary.
    length: ids in a row; None: documents may have any length.
    too_long: treatment of longer documents: "split" keeps them, "truncate" cuts them (without an
      EOS), "error" refuses them.

  Returns:
    The ids of all documents, and int64 [documents], the number of ids of each.

  Raises:
    DataError: a document is too long, or cannot be encoded.
  """
  parts: list[np.ndarray] = []
  for number, (path, text) in enumerate(documents):
    ids = encode(vocabulary, text, path)
    # Of their own dtype: an int of Python's may make all of them int64.
    ids = np.append(ids, ids.dtype.type(EOS_ID))
    if length is not None and len(ids) > length and too_long != "split":
      if too_long == "error":
        raise DataError(
          f"{path}: document {number} has {len(ids)} tokens (EOS included), more than "
          f"sequence_length {length}; use too_long 'split' or 'truncate', or a longer sequence"
        )
      ids = ids[:length]
    parts.append(ids)
  sizes = np.array([len(p) for p in parts], np.int64)
  return np.concatenate(parts) if parts else np.zeros(0, np.int32), sizes


def encode_dataset(dataset: tf.data.Dataset, vocabulary: Vocabulary) -> tf.data.Dataset:
  """Encodes every feature, a scalar string, to int32 ids; adds no EOS."""
  return encode_features(dataset, dict.fromkeys(packing.element_spec(dataset), vocabulary))


def encode_all_features(
  dataset: tf.data.Dataset, vocabulary: Vocabularies, length: packing.Length | None = None
) -> tf.data.Dataset:
  """Encodes string features to int64 ids with EOS (1) at the end; drops the other features.

  Args:
    dataset: yields dicts.
    vocabulary: a `Vocabulary`, or a tuple of one for `inputs` and one for all other features.
    length: that of `pack_or_pad`, if it comes next: ids that it would cut may be left out, and
      there may be zeros behind the others. It makes the same of them, and both take less time.

  Returns:
    A data set of dicts.
  """
  spec = packing.element_spec(dataset)
  strings = [k for k in spec if spec[k].dtype == tf.string]
  if len(strings) < len(spec):
    _LOG.info("features that are no strings are dropped: %s", sorted(set(spec) - set(strings)))
    dataset = dataset.map(lambda example: {k: example[k] for k in strings})
  most = None
  if length is not None:
    most = {k: packing.length_of("encode_all_features", length, k) for k in strings}
  vocabularies = {k: vocabulary_of(k, vocabulary) for k in strings}
  return encode_features(dataset, vocabularies, eos_id=EOS_ID, dtype=tf.int64, most=most)


def encode_features(
  dataset: tf.data.Dataset,
  vocabularies: Mapping[str, Vocabulary],
  *,
  eos_id: int | None = None,
  dtype: tf.DType = tf.int32,
  most: Mapping[str, int] | None = None,
) -> tf.data.Dataset:
  """Encodes features, each a scalar string, to ids.

  A vocabulary that encodes in Python gets many strings in one call, which takes less time than the
  call.

  Args:
    dataset: yields dicts; the features that are not in `vocabularies` pass untouched.
    vocabularies: by the names of the features.
    eos_id: the id at the end; None: there is none.
    dtype: of the ids.
    most: the number of ids of each feature, without EOS, behind which texts are cut. There may be
      zeros behind the ids then. None: all ids, and nothing else.

  Returns:
    A data set of dicts.
  """
  in_python = {k: v for k, v in vocabularies.items() if isinstance(v, PythonVocabulary)}
  limits: Mapping[str, int] = {} if most is None else most

  def encode_rows(examples: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    result = dict(examples)
    for k, vocabulary in in_python.items():
      ids, lengths = vocabulary.encode_rows_tf(examples[k], limits.get(k))
      ids = tf.cast(ids, dtype)
      if eos_id is not None:
        ids = tf.pad(ids, [[0, 0], [0, 1]])
        is_end = tf.range(tf.shape(ids)[1]) == lengths[:, tf.newaxis]
        ids, lengths = tf.where(is_end, tf.cast(eos_id, dtype), ids), lengths + 1
      result[k] = (ids, lengths) if most is None else ids
    return result

  def encode(example: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    result = dict(example)
    for k, vocabulary in vocabularies.items():
      if k not in in_python:
        ids = tf.cast(vocabulary.encode_tf(example[k])[: limits.get(k)], dtype)
        result[k] = ids if eos_id is None else with_eos(ids, eos_id)
      elif most is None:
        padded, length = example[k]
        result[k] = padded[:length]
    return result

  if in_python:
    groups = dataset.batch(_ROWS).map(encode_rows, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = packing.counted_as(groups.unbatch(), dataset)
  if most is not None and len(in_python) == len(vocabularies):
    return dataset
  return dataset.map(encode, num_parallel_calls=tf.data.AUTOTUNE)


def vocabulary_of(feature: str, vocabulary: Vocabularies) -> Any:
  """The vocabulary of a feature: of an (inputs, targets) tuple the one for it."""
  if not isinstance(vocabulary, tuple):
    return vocabulary
  return vocabulary[0] if feature == "inputs" else vocabulary[1]


def with_eos(ids: tf.Tensor, eos_id: int = EOS_ID) -> tf.Tensor:
  """Ids [length] with EOS at the end."""
  return tf.concat([ids, tf.cast([eos_id], ids.dtype)], 0)


def supervised_to_dict(dataset: tf.data.Dataset, text2self: bool) -> tf.data.Dataset:
  """Turns (inputs, targets) pairs into dicts: `targets`, and `inputs` unless `text2self`."""
  if text2self:
    return dataset.map(lambda inputs, targets: {"targets": targets})
  return dataset.map(lambda inputs, targets: {"inputs": inputs, "targets": targets})
