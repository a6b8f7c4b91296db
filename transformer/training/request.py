"""The arguments of `Trainer.train`, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT_OR_ZERO, takes
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.gin_config import checks
from mesh_tensorflow.transformer.model import training_data


@takes(train_steps=COUNT_OR_ZERO, max_steps=COUNT_OR_ZERO, steps=COUNT_OR_ZERO)
def train_request(
  dataset_fn: Callable[..., tf.data.Dataset] | None,
  input_fn: Any,
  examples_per_step: int,
  *,
  train_steps: int | None,
  max_steps: int | None,
  steps: int | None,
  hooks: Sequence[Any],
) -> tuple[Callable[..., tf.data.Dataset], int | None]:
  """Checks the arguments of `Trainer.train` and merges those that are aliases of each other.

  Args:
    dataset_fn: returns a data set of single examples; or None, if `input_fn` is given.
    input_fn: an Estimator's function that returns batches of dicts; or None.
    examples_per_step: number of examples in a batch.
    train_steps: absolute step at which to stop; exactly one of the three numbers must be given.
    max_steps: another name of `train_steps`.
    steps: number of steps to do.
    hooks: must be empty.

  Returns:
    The function that makes the data set, and the step at which to stop; None if `steps` is given.

  Raises:
    ConfigError: incompatible arguments.
  """
  checks.check_arguments("Trainer.train", train_request, locals())
  if hooks:
    raise ConfigError("Trainer.train: hooks are of TF1 sessions, and are not available")
  if (dataset_fn is None) == (input_fn is None):
    raise ConfigError("Trainer.train: give either dataset_fn or input_fn")
  if sum(n is not None for n in (train_steps, max_steps, steps)) != 1:
    raise ConfigError("Trainer.train: give one of train_steps, max_steps and steps")

  def examples(**_: Any) -> tf.data.Dataset:
    return training_data.examples_of(input_fn, examples_per_step)

  return dataset_fn or examples, train_steps if max_steps is None else max_steps
