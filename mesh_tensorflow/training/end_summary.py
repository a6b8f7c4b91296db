"""The last lines of a training: what was done, where it is, what to type next."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from mesh_tensorflow.training.duration import duration


@dataclasses.dataclass
class LossSummary:
  """The losses of a run, without one Python object for each step.

  Attributes:
    first: the first that is finite; None before.
    last: the last that is finite.
    best: the least of a single step.
    best_step: number of steps done then.
  """

  first: float | None = None
  last: float | None = None
  best: float = math.inf
  best_step: int = 0

  def add(self, before: int, losses: np.ndarray) -> None:
    """Takes the losses of a call.

    Args:
      before: number of steps done before it.
      losses: float [n].
    """
    places = np.flatnonzero(np.isfinite(losses))
    if not len(places):
      return
    if self.first is None:
      self.first = float(losses[places[0]])
    self.last = float(losses[places[-1]])
    least = int(places[np.argmin(losses[places])])
    if losses[least] < self.best:
      self.best, self.best_step = float(losses[least]), before + least + 1


def end_summary(
  first_step: int,
  step: int,
  seconds: float,
  losses: LossSummary,
  facts: Mapping[str, str],
  commands: Sequence[tuple[str, str]],
) -> str:
  """The text.

  Args:
    first_step: number of steps done when the run began.
    step: number of steps done when it ended.
    seconds: its time, all included.
    losses: its losses.
    facts: further lines, by what they are of.
    commands: what to type next: (what it does, command).
  """
  done = step - first_step
  rows = [("done", f"{done} steps, up to step {step}, in {duration(seconds)}, start-up included")]
  if losses.first is not None:
    rows.append(
      (
        "loss",
        f"{losses.first:.4f} at first, {losses.last:.4f} at last; the best of one step was "
        f"{losses.best:.4f}, step {losses.best_step}",
      )
    )
  rows += [*facts.items(), *commands]
  width = max(len(name) for name, _ in rows)
  return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
