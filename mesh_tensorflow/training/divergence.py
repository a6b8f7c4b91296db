"""Warnings of a diverging training: each is given once, with advice; none ends the training."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterator

# The loss rose by this part of what it was in the beginning, and by at least so many nats.
_RISEN, _RISEN_NATS = 0.5, 1.0
# A model that knows nothing but how many tokens there are has a loss of ln(vocabulary).
_NEAR_UNIFORM = 0.02
# Steps and part of the training after which a model has learned more than that.
_LEARNED_STEPS, _LEARNED_PART = 200, 0.1
# Gradients are exploding at so many times their usual norm; and usual is what so many reports say.
_EXPLODED, _USUAL = 100.0, 5


class DivergenceWatch:
  """Watches the reports of a training for signs of divergence.

  Args:
    first_step: number of steps done when the run begins.
    last_step: number of steps done when it ends.
    vocab_size: number of ids that the model tells apart; None: not known.
  """

  def __init__(self, first_step: int, last_step: int, vocab_size: int | None = None):
    self._first, self._last = first_step, last_step
    self._uniform = math.log(vocab_size) if vocab_size and vocab_size > 1 else None
    self._start: float | None = None
    self._rate: float | None = None
    self._norms: collections.deque[float] = collections.deque(maxlen=20)
    self._told: set[str] = set()

  def look(
    self, step: int, loss: float, rate: float | None = None, norm: float | None = None
  ) -> list[str]:
    """Records a report.

    Args:
      step: number of steps done.
      loss: mean since the report before, in nats.
      rate: the learning rate, if there is a schedule.
      norm: of the gradients, if it is known.

    Returns:
      Warnings: what is seen for the first time.
    """
    if self._start is None and math.isfinite(loss):
      self._start = loss
    found = [*self._of_loss(step, loss, rate), *self._of_norm(step, norm)]
    self._rate = rate
    new = [text for sign, text in found if sign not in self._told]
    self._told.update(sign for sign, _ in found)
    return new

  def _of_loss(self, step: int, loss: float, rate: float | None) -> Iterator[tuple[str, str]]:
    if self._start is None or not math.isfinite(loss):
      return  # NaN and infinity end the training, or are counted.
    if loss > self._start + max(_RISEN_NATS, _RISEN * abs(self._start)):
      yield (
        "risen",
        f"step {step}: the loss is {loss:.4f}, far over the {self._start:.4f} that it began with: "
        "the training diverges. Try a learning rate of a third, a longer warm-up, or clipping of "
        "gradients",
      )
    rising = rate is not None and self._rate is not None and rate > self._rate
    soon = max(_LEARNED_STEPS, _LEARNED_PART * self._last)
    if self._uniform is None or step < soon or step - self._first < _LEARNED_STEPS or rising:
      return  # In a warm-up a model may learn nothing yet.
    if abs(loss - self._uniform) < _NEAR_UNIFORM * self._uniform:
      yield (
        "uniform",
        f"step {step}: the loss is {loss:.4f}, still near ln(vocabulary) = {self._uniform:.4f}, "
        "that of a model which takes all tokens for equally likely: it learns nothing. Look at "
        "decoded examples of the data and at run.variable_filter, and try a learning rate ten "
        "times as large, or a tenth",
      )

  def _of_norm(self, step: int, norm: float | None) -> Iterator[tuple[str, str]]:
    if norm is None:
      return
    usual = statistics.median(self._norms) if len(self._norms) >= _USUAL else math.inf
    if not math.isfinite(norm) or norm > _EXPLODED * max(usual, 1e-12):
      was = f", usually {usual:.3g}" if math.isfinite(usual) else ""
      yield (
        "exploded",
        f"step {step}: the norm of the gradients is {norm:.3g}{was}: they explode. Try clipping "
        "of gradients, a lower learning rate, a longer warm-up, or float32 activations",
      )
    else:
      self._norms.append(norm)
