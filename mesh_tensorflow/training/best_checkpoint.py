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
# Names of fields in checkpoints, where those are older than the choice of a metric.
_STORED = {"best_value": "best_loss", "reference_value": "reference_loss"}
# Of a checkpoint that does not say by which metric: there was none but the loss.
_FIRST_METRIC = "loss"


@dataclasses.dataclass
class Evaluations:
  """Results of the evaluations of a training so far.

  Attributes:
    last_step: the step of the last one; -1: there was none.
    best_step: the step of the best one; -1: there was none with a finite value.
    best_value: its value of the metric.
    reference_value: the value from which `without_improvement` counts.
    without_improvement: how many evaluations since then were not better by more than the least that
      counts.
    kept_step: the step of the best checkpoint that was saved; -1: none was.
    kept_counts: see `checkpoint.Best`.
    metric: name of the metric that tells which one is best.
    lower_is_better: whether its lowest value is the best one; else its highest.
    keeps: whether the best checkpoint is kept; the only one that is no part of checkpoints.
  """

  last_step: int = -1
  best_step: int = -1
  best_value: float = math.inf
  reference_value: float = math.inf
  without_improvement: int = 0
  kept_step: int = -1
  kept_counts: bool = True
  metric: str = _FIRST_METRIC
  lower_is_better: bool = True

  def __post_init__(self) -> None:
    self.keeps = True
    # The best checkpoint before the one that is kept, until the next save lets go of it.
    self._before: tuple[int, bool] | None = None

  def compare_by(self, metric: str, lower_is_better: bool) -> str | None:
    """Sets the metric; results by another one are forgotten, since they cannot be compared.

    Args:
      metric: its name.
      lower_is_better: whether its lowest value is the best one.

    Returns:
      A line that says what was forgotten; None if nothing was.
    """
    before = (self.metric, self.lower_is_better)
    if (metric, lower_is_better) == before:
      return None
    best = f" ({self.best_value:.4f} at step {self.best_step})" if self.best_step >= 0 else ""
    line = (
      f"the best checkpoint is chosen by the {self._direction(lower_is_better)} {metric} now, and "
      f"was by the {self._direction(self.lower_is_better)} {self.metric}{best}: these cannot be "
      "compared, so the evaluations until now do not count"
    )
    was_evaluated = self.last_step >= 0
    if self.kept_step >= 0:
      self._before = self.kept_step, self.kept_counts
    self.metric, self.lower_is_better = metric, lower_is_better
    self.best_value = self.reference_value = math.inf if lower_is_better else -math.inf
    self.last_step = self.best_step = self.kept_step = -1
    self.without_improvement, self.kept_counts = 0, True
    return line if was_evaluated else None

  @staticmethod
  def _direction(lower_is_better: bool) -> str:
    return "lowest" if lower_is_better else "highest"

  def _is_better(self, value: float, than: float, min_delta: float = 0.0) -> bool:
    """True if a value is better than another by more than `min_delta`; NaN is not."""
    if self.lower_is_better:
      return value < than - min_delta
    return value > than + min_delta

  def take(self, step: int, value: float, min_delta: float) -> bool:
    """Records an evaluation.

    Args:
      step: number of steps done.
      value: that of the metric on the held-out data; NaN is no improvement.
      min_delta: improvements of at most so much do not count for `without_improvement`.

    Returns:
      Whether it is the best so far. That may be less of an improvement than counts.
    """
    self.last_step = step
    if self._is_better(value, self.reference_value, min_delta):
      self.reference_value, self.without_improvement = value, 0
    else:
      self.without_improvement += 1
    is_best = self._is_better(value, self.best_value)
    if is_best:
      self.best_step, self.best_value = step, value
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
    # NumPy: TensorFlow would store Python floats as float32, which the next value is compared with.
    return {_stored(n): _as_array(value) for n, value in dataclasses.asdict(self).items()}

  @classmethod
  def of_checkpoint(cls, path: str) -> Evaluations:
    """Reads the results saved with a checkpoint; initial values if it has none."""
    values = checkpoint_lib.Values(path)
    found = {
      field.name: values[EXTRA + _stored(field.name)]
      for field in dataclasses.fields(cls)
      if EXTRA + _stored(field.name) in values
    }
    if set(found) | set(_OF_METRIC) != {field.name for field in dataclasses.fields(cls)}:
      return cls()
    # As Python's values, which the defaults are, too.
    plain: dict[str, Any] = {
      n: x.tobytes().decode(errors="replace") if n == "metric" else x.item()
      for n, x in found.items()
    }
    return cls(**plain)


# Fields that older checkpoints do not have.
_OF_METRIC = ("metric", "lower_is_better")


def _stored(name: str) -> str:
  """Name of a field among the additional values of a checkpoint."""
  return _PREFIX + _STORED.get(name, name)


def _as_array(value: bool | float | str) -> np.ndarray:
  """A value as numbers; of a text its bytes."""
  if isinstance(value, str):
    return np.frombuffer(value.encode(), np.uint8)
  return np.array(value)


def best_checkpoint(model_dir: str) -> str:
  """The checkpoint of a folder that was best on the held-out data, by `run.best_metric`.

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
