"""Schedule of the reported steps of a training, and of the ends of its program's calls."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class ReportSteps:
  """The steps of which a report tells: the first of a run, each multiple, and the last.

  Steps are numbered by how many are done after them, from 1.

  Attributes:
    first: number of steps done when the run begins.
    last: number of steps done when it ends.
    every: steps between reports.
    norms_every: steps between norms; None: those of the reports; 0: no norms.
    ends: further steps after which a call has to end.
  """

  first: int
  last: int
  every: int
  norms_every: int | None = None
  ends: tuple[int, ...] = ()

  def between(self, before: int, step: int) -> list[int]:
    """The reported steps behind `before`, up to `step`."""
    multiples = range((before // self.every + 1) * self.every, step + 1, self.every)
    found = {n for n in (self.first + 1, self.last) if before < n <= step}
    return sorted(found.union(multiples))

  def steps_of_call(self, step: int, most: int) -> int:
    """Number of steps of the next call, chosen so that it ends at a reported step if possible.

    Args:
      step: number of steps done.
      most: maximum number of steps of the call.
    """
    if step == self.first:
      return 1  # The user waits for the first report.
    ends = [n for n in self.ends if step < n < step + most]
    most = min(ends) - step if ends else most
    last = (step + most) // self.every * self.every
    return last - step if last > step else most

  def norms_wanted(self, at: tf.Tensor) -> tf.Tensor:
    """Returns a bool scalar: True if the step computes norms.

    Args:
      at: number of the step, from 0, an int64 scalar.
    """
    done = at + 1
    every = self.norms_every or self.every
    wanted = tf.equal(done % every, 0)
    for n in {self.first + 1, self.last}:
      wanted |= tf.equal(done, n)
    if every != self.every:
      wanted |= tf.equal(done % self.every, 0)
    return wanted
