"""The data of one training: its batches from any step on, and the position that is saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.transformer.programs.model_steps import ModelSteps
from mesh_tensorflow.transformer.programs.training_data import SavedPipeline, TrainingData


@dataclasses.dataclass(frozen=True)
class TrainingSource:
  """The source of the batches of a training.

  Attributes:
    dataset_fn: makes the data set of single examples; see `Trainer.train`.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    split: name of the split.
    first: the step whose batch is the first of the data set.
    examples_in_epoch: number of examples in an epoch as last counted; None: not counted.
    seed: see `TrainingData`.
  """

  dataset_fn: Callable[..., tf.data.Dataset]
  vocabulary: Any
  split: str
  first: int
  examples_in_epoch: int | None = None
  seed: int | None = None

  def batches_from(
    self, steps: ModelSteps, start: int, say: Callable[[str], None] | None = None
  ) -> TrainingData:
    """The batches of the step `start` and of those after it.

    Args:
      steps: the programs of the model, which say what is in a batch.
      start: the step.
      say: gets lines about the data.
    """
    return TrainingData(
      steps,
      self.dataset_fn,
      self.vocabulary,
      self.split,
      start - self.first,
      say=say,
      examples_in_epoch=self.examples_in_epoch,
      seed=self.seed,
    )

  def open(
    self,
    steps: ModelSteps,
    start: int,
    checkpoint: str | None,
    say: Callable[[str], None],
    *,
    saves_position: bool,
  ) -> tuple[TrainingData, SavedPipeline | None]:
    """The data from a step on, with an iterator whose position is saved, if it is to be.

    Args:
      steps: the programs of the model.
      start: the step.
      checkpoint: that of the step `start`; None at the beginning.
      say: gets lines about the data.
      saves_position: whether the position is saved with checkpoints.
    """
    if not saves_position:
      return self.batches_from(steps, start, say), None
    return self.saved_batches_from(steps, start, checkpoint, say)

  def saved_batches_from(
    self, steps: ModelSteps, start: int, checkpoint: str | None, say: Callable[[str], None]
  ) -> tuple[TrainingData, SavedPipeline]:
    """Like `batches_from`, by an iterator whose position is saved with checkpoints.

    Args:
      steps: the programs of the model.
      start: the step.
      checkpoint: that of the step `start`, which may have the position; None at the beginning.
      say: gets a line if it has not.

    Returns:
      The data, and the iterator.
    """
    data = self.batches_from(steps, start, say)
    pipeline = data.saved_with_checkpoints()
    # All workers or none: otherwise they would be at different places in the data.
    there = checkpoint is not None and pipeline.is_in(checkpoint)
    if not workers.any_worker(not there) and checkpoint is not None:
      pipeline.restore(checkpoint)
    elif start > self.first:
      say(f"the position in the data was not saved at step {start}: examples are skipped")
    return data, pipeline
