"""The request of one call of `Trainer.train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import COUNT_OR_ZERO, takes
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.gin_config import checks
from mesh_tensorflow.transformer.programs import training_data


@dataclasses.dataclass(frozen=True)
class TrainRequest:
  """The arguments of `Trainer.train`, checked; see there.

  Attributes:
    dataset_fn: makes the data set of single examples.
    dataset_split: for it.
    train_steps: the absolute step at which to stop; None if `steps` is given.
    steps: the number of steps to do.
    on_ready: called with the graph.
    seen_data_init_step: the step at which the data began, if it is given.
    checkpoint_input_pipeline: whether the position in the data is saved.
  """

  dataset_fn: Callable[..., tf.data.Dataset]
  dataset_split: str
  train_steps: int | None
  steps: int | None
  on_ready: Callable[[mtf.Graph], None] | None
  seen_data_init_step: int | None
  checkpoint_input_pipeline: bool

  def last_step(self, start: int) -> int:
    """The step at which to stop, if training goes on at the step `start`."""
    return start + (self.steps or 0) if self.train_steps is None else self.train_steps

  def first_step_of_data(self, began: int, start: int) -> int:
    """The step at which the data began.

    Args:
      began: the step at which training in this folder began.
      start: the step at which it goes on.

    Raises:
      ConfigError: that is later than `start`.
    """
    first = began if self.seen_data_init_step is None else self.seen_data_init_step
    if first > start:
      raise ConfigError(
        f"run.seen_data_init_step (={first}) is after the step {start} at which training goes on"
      )
    return first


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
  **others: Any,
) -> TrainRequest:
  """Checks the arguments of `Trainer.train` and merges those that are aliases of each other.

  Args:
    dataset_fn: returns a data set of single examples; or None, if `input_fn` is given.
    input_fn: an Estimator's function that returns batches of dicts; or None.
    examples_per_step: number of examples in a batch.
    train_steps: absolute step at which to stop; exactly one of the three numbers must be given.
    max_steps: another name of `train_steps`.
    steps: number of steps to do.
    hooks: must be empty.
    **others: further fields of `TrainRequest`, passed on.

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

  last = train_steps if max_steps is None else max_steps
  return TrainRequest(dataset_fn or examples, train_steps=last, steps=steps, **others)


def check_all_done(step: int, start: int, last: int, examples_per_step: int) -> None:
  """Raises `DataError` if the data ended before training did.

  Args:
    step: the step that was reached.
    start: the step at which training went on.
    last: the step at which it was to end.
    examples_per_step: examples in a batch.
  """
  if step == start:
    raise DataError(
      "the training data set has no complete batch of "
      f"{examples_per_step} sequences; use a smaller batch size or more data"
    )
  if step < last:
    raise DataError(
      f"the training data ended after {step - start} of {last - start} steps, and gave nothing "
      "when it was gone through again: run.train_dataset_fn must return a data set that can be "
      "read several times, or endless; or bind a smaller run.train_steps"
    )
