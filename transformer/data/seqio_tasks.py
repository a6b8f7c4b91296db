"""Tasks and mixtures of seqio, under the gin names that T5 has for them: seqio is all they need.

The names are those of `t5.models.mesh_transformer`, which gin files import: here that import stands
for this module, and T5's own is not loaded. A task is registered by a module of one's own, which
`--module_import` names:

    seqio.TaskRegistry.add("my_task", ...)

    run.train_dataset_fn = @t5.models.mesh_transformer.mesh_train_dataset_fn
    mesh_train_dataset_fn.mixture_or_task_name = 'my_task'
    run.vocabulary = @t5.models.mesh_transformer.get_vocabulary()
    get_vocabulary.mixture_or_task_name = 'my_task'
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data.encoding import vocabulary_of
from mesh_tensorflow.transformer.data.eval_datasets import EvalDataset, text_pairs
from mesh_tensorflow.transformer.data.packing import (
  Length,
  pack_dataset,
  pack_or_pad,
  trim_and_pad_dataset,
)
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies

MODULE = "t5.models.mesh_transformer"
_FEATURES = ("inputs", "targets")
# A file, a pattern, or several.
Files: TypeAlias = str | Sequence[str]


@gin.configurable(module=MODULE)
@affects("training")
def mesh_train_dataset_fn(
  mixture_or_task_name: str = gin.REQUIRED,
  sequence_length: Length = gin.REQUIRED,
  vocabulary: Vocabularies | None = None,
  dataset_split: str = "train",
  shuffle: bool = True,
  seed: int | None = None,
  use_cached: bool = False,
  pack: bool = True,
  batch_size: int | None = None,
) -> tf.data.Dataset:
  """Examples of a task or mixture, as the trainer's `train_dataset_fn`.

  Args:
    mixture_or_task_name: as it is registered with seqio.
    sequence_length: an int, or a dict from each feature.
    vocabulary: those of the task's features; see `get_vocabulary`.
    dataset_split: of the task.
    shuffle: whether examples are shuffled.
    seed: of that; None: one that differs.
    use_cached: whether examples are those that seqio's `cache_tasks_main` has written.
    pack: several examples share a row; otherwise a row is one, padded.
    batch_size: has no effect.

  Returns:
    A data set of rows: `inputs` and `targets`, or what of these the task has; packed ones with
    `<f>_segmentation` and `<f>_position`.

  Raises:
    ConfigError: seqio is missing, or knows no such task, split or cache; or the vocabulary is
      another one than the task's.
  """
  del batch_size
  provider = _provider(mixture_or_task_name, dataset_split, vocabulary)
  dataset = _examples(
    provider,
    _lengths(provider, sequence_length),
    dataset_split,
    shuffle=shuffle,
    seed=seed,
    use_cached=use_cached,
  )
  keys = [f for f in _FEATURES if f in provider.output_features]
  return pack_or_pad(
    dataset.map(lambda example: {k: example[k] for k in keys}),
    sequence_length,
    pack=pack,
    feature_keys=keys,
  )


@gin.configurable(module=MODULE)
@affects("training")
@takes(num_eval_examples=COUNT)
def mesh_eval_dataset_fn(
  mixture_or_task_name: str = gin.REQUIRED,
  sequence_length: Length | None = gin.REQUIRED,
  vocabulary: Vocabularies | None = None,
  dataset_split: str = "validation",
  num_eval_examples: int | None = None,
  use_cached: bool = False,
  seed: int | None = None,
  pack: bool = False,
) -> list[EvalDataset]:
  """The tasks of a task or mixture that have the split, as the trainer's `eval_dataset_fn`.

  Args:
    mixture_or_task_name: see `mesh_train_dataset_fn`.
    sequence_length: likewise; None: each example as long as it is.
    vocabulary: likewise.
    dataset_split: of the tasks.
    num_eval_examples: the first of each task; None: all.
    use_cached: see `mesh_train_dataset_fn`.
    seed: of preprocessors that draw.
    pack: several examples share a row: for the mode "perplexity_eval".

  Returns:
    An `EvalDataset` for each task, with the task's metrics: those of texts, and those of scores.

  Raises:
    ConfigError: see `mesh_train_dataset_fn`.
  """
  provider = _provider(mixture_or_task_name, dataset_split, vocabulary)
  found = []
  for task in _tasks(provider, dataset_split):
    make = functools.partial(
      _eval_examples, task, dataset_split, num_eval_examples, use_cached, seed, pack,
      sequence_length=sequence_length,
    )  # fmt: skip
    metric_fns = [*task.predict_metric_fns, *task.score_metric_fns]
    found.append(EvalDataset(task.name, make, task.postprocess_fn, metric_fns))
  return found


@gin.configurable(module=MODULE)
@affects("training")
@takes(priming_sequence_length=COUNT)
def mesh_inference_dataset_fn(
  mixture_or_task_name: str = gin.REQUIRED,
  sequence_length: Length | None = gin.REQUIRED,
  dataset_split: str = "validation",
  vocabulary: Vocabularies | None = None,
  shuffle: bool = False,
  seed: int | None = None,
  num_inference_examples: int | None = None,
  priming_sequence_length: int | None = None,
) -> list[EvalDataset]:
  """The tasks of a task or mixture, to be decoded: `decode_from_dataset.infer_dataset_fn`.

  Args:
    mixture_or_task_name: see `mesh_train_dataset_fn`.
    sequence_length: see `mesh_eval_dataset_fn`.
    dataset_split: of the tasks.
    vocabulary: see `mesh_train_dataset_fn`.
    shuffle: whether examples are shuffled.
    seed: of that.
    num_inference_examples: the first of each task; None: all.
    priming_sequence_length: of a language model, whose examples have targets only: so many of
      their first tokens are the inputs that it goes on from.

  Returns:
    An `EvalDataset` for each task that has the split.

  Raises:
    ConfigError: see `mesh_train_dataset_fn`.
  """
  provider = _provider(mixture_or_task_name, dataset_split, vocabulary)
  found = []
  for task in _tasks(provider, dataset_split):
    make = functools.partial(
      _inference_examples,
      task, dataset_split, shuffle, seed, num_inference_examples, priming_sequence_length,
      sequence_length=sequence_length,
    )  # fmt: skip
    found.append(EvalDataset(task.name, make, task.postprocess_fn, task.predict_metric_fns))
  return found


@gin.configurable(module=MODULE)
@affects("report")
def get_vocabulary(mixture_or_task_name: str = gin.REQUIRED) -> Any:
  """The vocabulary of a task or mixture, or a pair if that of inputs is another one.

  Args:
    mixture_or_task_name: see `mesh_train_dataset_fn`.

  Raises:
    ConfigError: seqio is missing, or knows no such task.
  """
  features = _provider(mixture_or_task_name).output_features
  targets = features["targets"].vocabulary
  inputs = features["inputs"].vocabulary if "inputs" in features else targets
  return targets if inputs == targets else (inputs, targets)


@gin.configurable(module=MODULE)
@affects("training")
@takes(shuffle_buffer_size=COUNT)
def tsv_dataset_fn(
  filename: Files = gin.REQUIRED,
  sequence_length: Length = gin.REQUIRED,
  dataset_split: str = "train",
  vocabulary: Vocabularies = gin.REQUIRED,
  shuffle_buffer_size: int = 10000,
  batch_size: int | None = None,
) -> tf.data.Dataset:
  """Pairs of texts from files of two columns, "inputs<tab>targets", packed; needs no seqio.

  Args:
    filename: a file, a pattern, or a list of such.
    sequence_length: an int, or a dict from "inputs" and "targets".
    dataset_split: has no effect.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    shuffle_buffer_size: pairs are shuffled among so many.
    batch_size: has no effect.

  Returns:
    As `mesh_train_dataset_fn`.

  Raises:
    ConfigError: there is no such file.
  """
  del dataset_split, batch_size
  files = sorted(tf.io.gfile.glob(filename))
  if not files:
    raise ConfigError(f"tsv_dataset_fn.filename = {filename!r}: there is no such file")
  lines = tf.data.TextLineDataset(files)

  def split(line: tf.Tensor) -> dict[str, tf.Tensor]:
    columns = tf.io.decode_csv(
      line, record_defaults=["", ""], field_delim="\t", use_quote_delim=False
    )
    return dict(zip(_FEATURES, columns))

  texts = lines.map(split, num_parallel_calls=tf.data.AUTOTUNE).shuffle(shuffle_buffer_size)
  # Cut texts end with EOS, too; what is padded here is packed below.
  return pack_dataset(
    text_pairs(texts, sequence_length, vocabulary), sequence_length, keys=_FEATURES
  )


# --------------------------------------------------------------------------------- of seqio


def _seqio() -> Any:
  """The package seqio, which is loaded only where a task is asked for."""
  try:
    return importlib.import_module("seqio")
  except ImportError as e:
    raise ConfigError(
      f"tasks of T5 are those of seqio, which cannot be imported ({e}): pip install seqio"
    ) from e


def _tasks(provider: Any, split: str) -> list[Any]:
  """The tasks of a task or mixture that have a split."""
  return [task for task in _seqio().get_subtasks(provider) if split in task.splits]


def _provider(name: str, split: str | None = None, vocabulary: Vocabularies | None = None) -> Any:
  """A task or mixture.

  Args:
    name: as it is registered.
    split: that it must have, or None.
    vocabulary: that of the model, whose size must be that of the task's; or None.
  """
  try:
    provider = _seqio().get_mixture_or_task(name)
  except (ValueError, KeyError) as e:
    known = sorted({*_seqio().TaskRegistry.names(), *_seqio().MixtureRegistry.names()})
    raise ConfigError(
      f"seqio has no task or mixture {name!r} (it has {', '.join(known[:20]) or 'none'}); the "
      "module that registers it is imported by --module_import"
    ) from e
  if split is not None and split not in provider.splits:
    raise ConfigError(
      f"{name} has no split {split!r}; it has {', '.join(sorted(map(str, provider.splits)))}"
    )
  if vocabulary is not None:
    _check_vocabulary(name, provider, vocabulary)
  return provider


def _lengths(provider: Any, sequence_length: Length | None) -> dict[str, int] | None:
  """The lengths of features as seqio takes them."""
  if sequence_length is None:
    return None
  features = provider.output_features
  if not isinstance(sequence_length, Mapping):
    return dict.fromkeys(features, int(sequence_length))
  return {f: int(sequence_length[f]) for f in features if f in sequence_length}


def _examples(
  provider: Any, lengths: dict[str, int] | None, split: str, **options: Any
) -> tf.data.Dataset:
  """Tokenized examples, one epoch of a task; a mixture has no end."""
  name = provider.name
  try:
    dataset: tf.data.Dataset = provider.get_dataset(lengths, split=split, **options)
  except (ValueError, AssertionError) as e:
    raise ConfigError(f"{name}, split {split!r}: {' '.join(str(e).split())}") from e
  return dataset


def _eval_examples(
  task: Any,
  split: str,
  count: int | None,
  use_cached: bool,
  seed: int | None,
  pack: bool,
  sequence_length: Length | None,
) -> tf.data.Dataset:
  lengths = _lengths(task, sequence_length)
  dataset = _examples(task, lengths, split, shuffle=False, seed=seed, use_cached=use_cached)
  dataset = dataset.take(-1 if count is None else count)
  if sequence_length is None:
    return dataset
  keys = [f for f in _FEATURES if f in task.output_features]
  if pack:
    return pack_or_pad(dataset.map(lambda e: {k: e[k] for k in keys}), sequence_length)
  return trim_and_pad_dataset(dataset, sequence_length, feature_keys=keys)


def _inference_examples(
  task: Any,
  split: str,
  shuffle: bool,
  seed: int | None,
  count: int | None,
  priming: int | None,
  sequence_length: Length | None,
) -> tf.data.Dataset:
  lengths = _lengths(task, sequence_length)
  dataset = _examples(task, lengths, split, shuffle=shuffle, seed=seed, use_cached=False)
  dataset = dataset.take(-1 if count is None else count)
  if "inputs" in task.output_features:
    return dataset
  if priming is None:
    raise DataError(
      f"{task.name} has no inputs: bind mesh_inference_dataset_fn.priming_sequence_length, the "
      "number of tokens that the model goes on from"
    )
  return dataset.map(
    lambda e: {**e, "inputs": e["targets"][:priming]}, num_parallel_calls=tf.data.AUTOTUNE
  )


def _check_vocabulary(name: str, provider: Any, given: Vocabularies) -> None:
  """Raises an error if a task's ids are those of other vocabularies than the model's."""
  for feature, of_task in provider.output_features.items():
    if feature not in _FEATURES:
      continue
    of_model = vocabulary_of(feature, given)
    if of_model.vocab_size != of_task.vocabulary.vocab_size:
      raise ConfigError(
        f"{name} makes ids of a vocabulary of {of_task.vocabulary.vocab_size:,} for its {feature}, "
        f"and run.vocabulary has {of_model.vocab_size:,}; bind "
        "run.vocabulary = @t5.models.mesh_transformer.get_vocabulary()"
      )
