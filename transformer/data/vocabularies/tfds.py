"""Vocabularies of TensorFlow Datasets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gin

from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabulary


class TFDSVocabulary(Vocabulary):
  """A text encoder of TensorFlow Datasets, its ids shifted by one to make room for EOS.

  Args:
    tfds_encoder: has `vocab_size`, `encode(s)` and `decode(ids)`; its id 0 is padding.
  """

  def __init__(self, tfds_encoder: Any):
    self._tfds_encoder = tfds_encoder

  @property
  def vocab_size(self) -> int:
    return int(self._tfds_encoder.vocab_size) + 1

  def encode(self, s: str) -> list[int]:
    return [i + 1 for i in self._tfds_encoder.encode(s)]

  def decode(self, ids: Iterable[int]) -> str:
    return str(self._tfds_encoder.decode([int(i) - 1 for i in ids]))


@gin.configurable(module="mesh_tensorflow.transformer.vocabulary")
@affects("report")
def get_tfds_vocabulary(
  dataset_name: str = gin.REQUIRED, *, tfds_data_dir: str | None = None
) -> TFDSVocabulary:
  """The vocabulary that a TensorFlow dataset was tokenized with.

  Args:
    dataset_name: a dataset whose text feature has an encoder, "lm1b/subwords32k" for instance.
    tfds_data_dir: where TensorFlow Datasets keeps its data; its own default if not given.

  Returns:
    The vocabulary of the second supervised feature; inputs are taken to use the same one.

  Raises:
    errors.ConfigError: the dataset has no such feature, or the feature has no encoder.
  """
  import tensorflow_datasets as tfds  # Slow to import, and most runs do not need it.

  info = tfds.builder(dataset_name, data_dir=tfds_data_dir).info
  if not info.supervised_keys:
    raise errors.ConfigError(f"TFDS dataset {dataset_name!r} has no supervised keys")
  key = info.supervised_keys[1]
  encoder = getattr(info.features[key], "encoder", None)
  if encoder is None:
    raise errors.ConfigError(
      f"feature {key!r} of TFDS dataset {dataset_name!r} is not tokenized (it has no encoder); use "
      "untokenized_tfds_dataset with another vocabulary, get_byte_vocabulary() for instance"
    )
  return TFDSVocabulary(encoder)
