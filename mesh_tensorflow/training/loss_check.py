"""Checks the losses of training steps: NaN and infinity end the training, or are counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mesh_tensorflow.errors import NonFiniteError
from mesh_tensorflow.training import nonfinite


class LossCheck:
  """Takes the results of the steps of a training.

  Args:
    choice: `run.nonfinite`: "stop" or "skip".

  Attributes:
    skips: whether steps that are not finite are skipped.
    skipped_steps: how many were.
  """

  def __init__(self, choice: str):
    nonfinite.check_choice(choice)
    self.skips = choice == "skip"
    self.skipped_steps = 0
    self._in_a_row = 0

  def take(
    self,
    step: int,
    losses: Sequence[float],
    bad: Sequence[float],
    saved_step: int,
    find: Callable[[int, float], str | None],
  ) -> None:
    """Checks the results of one call of the program.

    Args:
      step: number of steps done before it.
      losses: of its steps.
      bad: for each, how many elements of loss and gradients were not finite, if these are skipped.
      saved_step: the step of the last checkpoint, for the error.
      find: called with a step (from 0) and its loss, which is not finite; returns words about where
        that came from.

    Raises:
      NonFiniteError: training cannot go on.
    """
    if self.skips:
      self._count(step, bad, saved_step)
      return
    for i, loss in enumerate(losses):
      if not math.isfinite(loss):
        found = find(step + i, loss)
        raise NonFiniteError(
          f"the loss became {loss} at step {step + i + 1}{f' ({found})' if found else ''}; "
          f"training stopped, and nothing was saved after step {saved_step}. Lower the learning "
          "rate, or look at the data of that step; run.nonfinite = 'skip' leaves such steps out"
        )

  def _count(self, step: int, bad: Sequence[float], saved_step: int) -> None:
    for i, n in enumerate(bad):
      self._in_a_row = self._in_a_row + 1 if n else 0
      self.skipped_steps += n > 0
      if self._in_a_row >= nonfinite.MAX_SKIPPED_IN_A_ROW:
        raise NonFiniteError(
          f"the loss or gradients of the last {self._in_a_row} steps, up to {step + i + 1}, were "
          "NaN or infinite; all were skipped (run.nonfinite = 'skip'), and training stopped. The "
          f"last checkpoint is that of step {saved_step}"
        )
