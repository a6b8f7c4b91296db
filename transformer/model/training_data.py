"""Training data of texts: features of ids, of the model's lengths."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training.data import TrainingData
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies
from mesh_tensorflow.transformer.model.model_steps import ModelSteps

# An Estimator's: a data set of batches, or a function that returns one.
InputFn: TypeAlias = Callable[..., tf.data.Dataset] | tf.data.Dataset


def bound_dataset_fn(
  steps: ModelSteps,
  dataset_fn: Callable[..., tf.data.Dataset],
  vocabulary: Vocabularies,
  split: str,
) -> Callable[..., tf.data.Dataset]:
  """A data set function as `run` takes it, as one of `TrainingData`.

  Args:
    steps: the programs of the model, which know the lengths of sequences.
    dataset_fn: called as `fn(sequence_length=, vocabulary=, dataset_split=)`; see `Trainer.train`.
    vocabulary: for it.
    split: for it.
  """
  return functools.partial(
    dataset_fn, sequence_length=steps.sequence_length, vocabulary=vocabulary, dataset_split=split
  )


def open_data(
  steps: ModelSteps,
  dataset_fn: Callable[..., tf.data.Dataset],
  vocabulary: Vocabularies,
  split: str,
  seen_steps: int = 0,
  **options: Any,
) -> TrainingData:
  """The `TrainingData` of texts; arguments as of `bound_dataset_fn` and `TrainingData`."""
  return TrainingData(
    steps, bound_dataset_fn(steps, dataset_fn, vocabulary, split), seen_steps, **options
  )


def call_input_fn(input_fn: InputFn, batch_size: int) -> tf.data.Dataset:
  """The data set of an Estimator's input function, which yields batches.

  Args:
    input_fn: a data set, or a function; its argument `params`, if it has one, is
      `{"batch_size": batch_size}`.
    batch_size: number of examples in a batch.

  Raises:
    DataError: the function returns something else.
  """
  dataset = input_fn
  if callable(input_fn):
    parameters = inspect.signature(input_fn).parameters
    kwargs = {"params": {"batch_size": batch_size}} if "params" in parameters else {}
    dataset = input_fn(**kwargs)
  if not isinstance(dataset, tf.data.Dataset):
    raise DataError(f"an input_fn must return a tf.data.Dataset, not {type(dataset).__name__}")
  return dataset


def examples_of(input_fn: InputFn, batch_size: int) -> tf.data.Dataset:
  """The single examples of an Estimator's input function, which yields batches of dicts."""
  dataset = call_input_fn(input_fn, batch_size)
  if isinstance(dataset.element_spec, tuple):  # (features, labels); the labels are features, too.
    dataset = dataset.map(lambda features, *_: features)
  return dataset.unbatch()


def check_data_options(skip_seen_data: bool, checkpoint_input_pipeline: bool) -> None:
  """Raises `ConfigError` if both are asked for."""
  if skip_seen_data and checkpoint_input_pipeline:
    raise ConfigError(
      "run.skip_seen_data and run.checkpoint_input_pipeline are two ways to go on with the data; "
      "bind one of them"
    )
