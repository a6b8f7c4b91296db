"""Results of the evaluations during training: the best step, and its checkpoint.

It is a part of each checkpoint, so a training that goes on knows what an uninterrupted one would;
and who wants the best checkpoint of a folder asks its newest one.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.checkpoint import restoring
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.checkpoint.files import INDEX, NAME
from mesh_tensorflow.checkpoint.restoring import EXTRA
from mesh_tensorflow.errors import CheckpointError, ConfigError

# Names of the additional values of a checkpoint begin so.
_PREFIX = "evaluation_"


@dataclasses.dataclass
class Evaluations:
  """Results of the evaluations of a training so far.

  Attributes:
    last_step: the step of the last one; -1: there was none.
    best_step: the step of the one with the lowest loss; -1: there was none with a finite loss.
    best_loss: its loss.
    reference_loss: the loss from which `without_improvement` counts.
    without_improvement: how many evaluations since then had no loss that was lower by more than the
      least that counts.
    kept_step: the step of the best checkpoint that was saved; -1: none was.
    kept_counts: see `checkpoint.Best`.
    keeps: whether the best checkpoint is kept; the only one that is no part of checkpoints.
  """

  last_step: int = -1
  best_step: int = -1
  best_loss: float = math.inf
  reference_loss: float = math.inf
  without_improvement: int = 0
  kept_step: int = -1
  kept_counts: bool = True

  def __post_init__(self) -> None:
    self.keeps = True
    # The best checkpoint before the one that is kept, until the next save lets go of it.
    self._before: tuple[int, bool] | None = None

  def take(self, step: int, loss: float, min_delta: float) -> bool:
    """Records an evaluation.

    Args:
      step: number of steps done.
      loss: that of the held-out data; NaN is no improvement.
      min_delta: improvements of at most so much do not count for `without_improvement`.

    Returns:
      Whether it is the best so far. That may be less of an improvement than counts.
    """
    self.last_step = step
    if loss < self.reference_loss - min_delta:
      self.reference_loss, self.without_improvement = loss, 0
    else:
      self.without_improvement += 1
    is_best = loss < self.best_loss
    if is_best:
      self.best_step, self.best_loss = step, loss
    return is_best

  def to_keep(self, step: int) -> bool:
    """True if the step is the best one and its checkpoint has not been kept yet."""
    return self.keeps and step == self.best_step != self.kept_step

  def keep(self, step: int, counts: bool) -> None:
    """Records that the best step's checkpoint exists, or will be written next.

    Args:
      step: of it.
      counts: see `checkpoint.Best`.
    """
    if self.kept_step not in (-1, step):
      self._before = self.kept_step, self.kept_counts
    self.kept_step, self.kept_counts = step, counts

  def best(self) -> checkpoint_lib.Best | None:
    """The checkpoint that must be kept after the next save; None if there is none."""
    (before, before_counts), self._before = self._before or (None, True), None
    if self.kept_step < 0:
      return None
    return checkpoint_lib.Best(self.kept_step, self.kept_counts, before, before_counts)

  def values(self) -> dict[str, Any]:
    """Values to save with a checkpoint; empty if there was no evaluation."""
    if self.last_step < 0:
      return {}
    # NumPy: TensorFlow would store Python floats as float32, which the next loss is compared with.
    return {_PREFIX + name: np.array(value) for name, value in dataclasses.asdict(self).items()}

  @classmethod
  def of_checkpoint(cls, path: str) -> Evaluations:
    """Reads the results saved with a checkpoint; initial values if it has none."""
    values = checkpoint_lib.Values(path)
    names = [field.name for field in dataclasses.fields(cls)]
    if not all(EXTRA + _PREFIX + n in values for n in names):
      return cls()
    # As Python's numbers, which the defaults are, too.
    return cls(**{n: values[EXTRA + _PREFIX + n].item() for n in names})


def best_checkpoint(model_dir: str) -> str:
  """The checkpoint of a folder whose loss on the held-out data was lowest.

  Several workers must all call it, and get the same.

  Args:
    model_dir: a folder in which a training with `run.eval_every_steps` has saved checkpoints.

  Returns:
    Its path.

  Raises:
    ConfigError: there is no checkpoint, or nothing was evaluated or kept.
    CheckpointError: it was deleted.
  """
  newest = restoring.newest_good(model_dir)
  if newest is None:
    raise ConfigError(f"there is no checkpoint in {model_dir}; train first")
  found: str = by_chief(lambda: _kept(newest))
  return found


def _kept(newest: str) -> str:
  """Path of the best checkpoint recorded in the newest one."""
  kept = Evaluations.of_checkpoint(newest).kept_step
  if kept < 0:
    raise ConfigError(
      f"{newest} knows of no best checkpoint: train with run.eval_every_steps (and run.keep_best), "
      "or name a step, or -1 (the newest)"
    )
  folder = os.path.dirname(newest)
  path = os.path.join(folder, f"{NAME}{kept}")
  if not tf.io.gfile.exists(path + INDEX):
    there = [os.path.basename(p) for p in checkpoint_lib.all_checkpoints(folder)]
    raise CheckpointError(
      f"the best checkpoint, {path}, was deleted; there are {', '.join(there)} (-1 is the newest)"
    )
  return path
