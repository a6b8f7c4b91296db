"""Input functions for `Trainer.predict`: functions that return batches of ids."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.transformer.data.eval_datasets import EvalDataset
from mesh_tensorflow.transformer.model.model_features import MODEL_FEATURES

_T = TypeVar("_T")


def filter_features(example: Mapping[str, _T]) -> dict[str, _T]:
  """Those features of an example that models take."""
  return {k: v for k, v in example.items() if k in MODEL_FEATURES}


def combined_dataset_input_fn(
  datasets: Sequence[EvalDataset],
  batch_size: int,
  sequence_length: Mapping[str, int] | None,
  check_for_metrics: bool = False,
) -> Callable[..., tf.data.Dataset]:
  """An Estimator's input function of several data sets, one after the other.

  Args:
    datasets: `EvalDataset`s.
    batch_size: number of examples in a batch; the last is filled up with zeros.
    sequence_length: for the data sets.
    check_for_metrics: leave out data sets without metrics.

  Returns:
    A function that returns batches of those features that models take.

  Raises:
    DataError: there is no data set, when it is called.
  """

  def input_fn(params: object = None) -> tf.data.Dataset:
    del params
    chosen = [d for d in datasets if d.metric_fns or not check_for_metrics]
    if not chosen:
      raise DataError("there is no data set to predict for")
    parts = [d.dataset_fn(sequence_length=sequence_length).map(filter_features) for d in chosen]
    dataset = functools.reduce(lambda a, b: a.concatenate(b), parts)
    # Rows of zeros have no targets, by which they are known when scores come back.
    return dataset.padded_batch(batch_size).map(lambda batch: _filled(batch, batch_size))

  return input_fn


def examples_input_fn(
  examples: Sequence[Mapping[str, np.ndarray]], batch_size: int
) -> Callable[..., tf.data.Dataset]:
  """An Estimator's input function of examples that were read before, in their order.

  Args:
    examples: dicts of arrays; those features that models take and all have are used.
    batch_size: number of examples in a batch; the last may have fewer.
  """
  names = [n for n in MODEL_FEATURES if all(n in e for e in examples)]
  features = {}
  for name in names:
    length = max(len(e[name]) for e in examples)
    features[name] = np.zeros([len(examples), length], np.int32)
    for row, example in zip(features[name], examples):
      row[: len(example[name])] = example[name]

  def input_fn(params: object = None) -> tf.data.Dataset:
    del params
    return tf.data.Dataset.from_tensor_slices(features).batch(batch_size)

  return input_fn


def _filled(batch: dict[str, tf.Tensor], rows: int) -> dict[str, tf.Tensor]:
  """A batch with rows of zeros at its end."""

  def fill(x: tf.Tensor) -> tf.Tensor:
    missing = [[0, rows - tf.shape(x)[0]]] + [[0, 0]] * (x.shape.rank - 1)
    return tf.ensure_shape(tf.pad(x, missing), [rows, *x.shape[1:]])

  return {k: fill(v) for k, v in batch.items()}


def tell_training_split(dataset_split: str) -> None:
  """Prints a line if the split to evaluate, by default "train", is that of the training.

  Args:
    dataset_split: name of the split.
  """
  if dataset_split == "train" and workers.current().is_chief:
    print(
      "evaluates the split 'train', which the model is trained on; for held-out data set "
      "run.dataset_split = 'validation' (--split=validation), or another split of the data",
      flush=True,
    )
