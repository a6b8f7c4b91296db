"""Data sets to evaluate on: held-out text, and pairs of texts for translations to be scored."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.transformer.data.encoding import encode_features, vocabulary_of
from mesh_tensorflow.transformer.data.packing import Length, trim_and_pad_dataset
from mesh_tensorflow.transformer.data.sources import read_pairs
from mesh_tensorflow.transformer.data.stream_readers import load_text_pairs
from mesh_tensorflow.transformer.data.text_readers import text_lm_dataset
from mesh_tensorflow.transformer.data.vocabularies.base import EOS_ID, Vocabularies

_MODULE = "mesh_tensorflow.transformer.dataset"
_SEED = 12345

EvalDataset = collections.namedtuple(
  "EvalDataset", ["name", "dataset_fn", "postprocess_fn", "metric_fns"]
)
EvalDataset.__doc__ = """A data set to evaluate on.

Attributes:
  name: string.
  dataset_fn: function with an optional argument `sequence_length` that returns a tf.data.Dataset.
  postprocess_fn: function(text, example=None, is_target=False) that makes what metrics take.
  metric_fns: list of functions(targets, predictions) that return a dict of numbers.
"""

_T = TypeVar("_T")


@gin.configurable(module=_MODULE)
@affects("training")
def text_lm_eval_datasets(
  sequence_length: Length,
  vocabulary: Vocabularies,
  dataset_split: str = "validation",
  name: str = "text",
) -> list[EvalDataset]:
  """The held-out part of `text_lm_dataset`, as the trainer's `eval_dataset_fn`.

  Args:
    sequence_length: an int, or a dict with "targets".
    vocabulary: a `Vocabulary`.
    dataset_split: see `text_lm_dataset`.
    name: of the data set, in summaries.

  Returns:
    A list of one `EvalDataset` without metrics (for the mode perplexity_eval).
  """

  def dataset_fn(sequence_length: Length = sequence_length) -> tf.data.Dataset:
    return text_lm_dataset(
      sequence_length=sequence_length, vocabulary=vocabulary, dataset_split=dataset_split
    )

  return [EvalDataset(name, dataset_fn, as_it_is, [])]


@gin.configurable(module=_MODULE)
@affects("training")
def parallel_text_eval_datasets(
  sequence_length: Length | None,
  vocabulary: Vocabularies,
  dataset_split: str = "validation",
  files: Mapping[str, object] = gin.REQUIRED,
  data_dir: str = "",
  name: str | None = None,
  metric_fns: Sequence[Callable[..., Mapping[str, float]]] = (),
) -> list[EvalDataset]:
  """Pairs of texts from files, as the trainer's `eval_dataset_fn`.

  Args:
    sequence_length: see `text_pairs`.
    vocabulary: a `Vocabulary`, or a tuple of one for inputs and one for targets.
    dataset_split: a key of `files`.
    files: see `parallel_text_dataset`.
    data_dir: see `parallel_text_dataset`.
    name: of the data set, in summaries; the split by default.
    metric_fns: functions(targets, predictions) of texts, such as `bleu.bleu`.

  Returns:
    A list of one `EvalDataset`.
  """
  pairs = read_pairs(files, dataset_split, data_dir)

  def dataset_fn(sequence_length: Length | None = sequence_length) -> tf.data.Dataset:
    texts = tf.data.Dataset.from_tensor_slices(
      {"inputs": [a for a, _ in pairs], "targets": [b for _, b in pairs]}
    )
    return text_pairs(texts, sequence_length, vocabulary)

  return [EvalDataset(name or dataset_split, dataset_fn, as_it_is, list(metric_fns))]


@gin.configurable(module=_MODULE)
@affects("training")
def tfds_eval_datasets(
  sequence_length: Length | None,
  vocabulary: Vocabularies,
  dataset_split: str = "validation",
  dataset_name: str = gin.REQUIRED,
  tfds_data_dir: str | None = None,
  inputs_feature: str | None = None,
  targets_feature: str | None = None,
  name: str | None = None,
  metric_fns: Sequence[Callable[..., Mapping[str, float]]] = (),
) -> list[EvalDataset]:
  """Pairs of texts from a TensorFlow dataset, as the trainer's `eval_dataset_fn`.

  Args:
    sequence_length: see `text_pairs`.
    vocabulary: a `Vocabulary`, or a tuple of one for inputs and one for targets.
    dataset_split: TFDS split.
    dataset_name: TFDS name, of a data set of text pairs.
    tfds_data_dir: where TensorFlow Datasets keeps its data; None for its default.
    inputs_feature: see `untokenized_tfds_dataset`.
    targets_feature: see `untokenized_tfds_dataset`.
    name: of the data set, in summaries; the split by default.
    metric_fns: functions(targets, predictions) of texts, such as `bleu.bleu`.

  Returns:
    A list of one `EvalDataset`.
  """

  def dataset_fn(sequence_length: Length | None = sequence_length) -> tf.data.Dataset:
    texts = load_text_pairs(
      dataset_name, dataset_split, tfds_data_dir, inputs_feature, targets_feature
    )
    return text_pairs(texts, sequence_length, vocabulary)

  return [EvalDataset(name or dataset_split, dataset_fn, as_it_is, list(metric_fns))]


def text_pairs(
  texts: tf.data.Dataset, sequence_length: Length | None, vocabulary: Vocabularies
) -> tf.data.Dataset:
  """Encodes pairs of texts, each by itself.

  Args:
    texts: dicts of scalar strings `inputs` and `targets`.
    sequence_length: an int, or a dict from "inputs" and "targets": longer sequences are cut (and
      end with EOS), shorter ones padded. None: each as long as it is.
    vocabulary: a `Vocabulary`, or a tuple of one for inputs and one for targets.

  Returns:
    A data set of dicts: ids `inputs` and `targets`, int32, with EOS, and the texts
    `inputs_pretokenized` and `targets_pretokenized`.
  """
  keys = ("inputs", "targets")
  lengths = sequence_length if isinstance(sequence_length, Mapping) else dict.fromkeys(
    keys, sequence_length
  )  # fmt: skip

  dataset = encode_features(
    texts.map(lambda example: {**example, **{f"{k}_pretokenized": example[k] for k in keys}}),
    {k: vocabulary_of(k, vocabulary) for k in keys},
    eos_id=EOS_ID,
    # Room for the EOS: what is cut ends, too.
    most=None if sequence_length is None else {k: n - 1 for k, n in lengths.items() if n},
  )
  if sequence_length is None:
    return dataset
  return trim_and_pad_dataset(dataset, sequence_length, feature_keys=keys)


def as_it_is(text: _T, example: object = None, is_target: bool = False) -> _T:
  """The identity, as a `postprocess_fn`."""
  del example, is_target
  return text


def reset_seeds() -> None:
  """Resets random seeds before an evaluation reads data, so that shuffles repeat in all workers."""
  random.seed(_SEED)
  tf.random.set_seed(_SEED)
