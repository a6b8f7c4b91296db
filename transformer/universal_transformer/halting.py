"""The halting of adaptive computation time (Graves, 2016; arXiv:1603.08983)."""

from __future__ import annotations

import dataclasses

import mesh_tensorflow as mtf


@dataclasses.dataclass
class HaltingState:
  """Halting state of all positions; all tensors are `[<batch_dims>, length]`.

  Attributes:
    threshold: the sum of probabilities above which a position halts.
    probability: the sum of halting probabilities so far.
    remainders: 1 minus that sum, from when the position halted.
    num_updates: number of steps of the position.
  """

  threshold: float
  probability: mtf.Tensor
  remainders: mtf.Tensor
  num_updates: mtf.Tensor

  @classmethod
  def start(cls, x: mtf.Tensor, epsilon: float) -> HaltingState:
    """The state before the first step, for x `[<batch_dims>, length, d_model]`."""
    zeros = mtf.zeros(x.mesh, x.shape[:-1], x.dtype)
    return cls(1.0 - epsilon, zeros, zeros, zeros)

  def step(self, probability: mtf.Tensor) -> mtf.Tensor:
    """Takes a step.

    Args:
      probability: of halting now.

    Returns:
      The weight of the state after this step: the probability; the remainder, if the position
      halts in this step; 0 if it has halted.
    """
    dtype = probability.dtype

    def condition(value: mtf.Tensor) -> mtf.Tensor:
      return mtf.cast(value, dtype)

    # Positions are told apart by factors of 0 and 1: all take all steps, only some count.
    running = condition(mtf.less(self.probability, 1.0))
    reached = self.probability + probability * running
    # N(t) of the paper: the first step in which the sum exceeds 1 - epsilon.
    halting = condition(mtf.greater(reached, self.threshold)) * running
    running *= condition(mtf.less_equal(reached, self.threshold))
    self.probability += probability * running
    # R(t): the last step gets what is left of 1.
    self.remainders += halting * (1.0 - self.probability)
    # In floats p + (1 - p) is exactly 1: who has halted does not run again.
    self.probability += halting * self.remainders
    self.num_updates += running + halting
    return probability * running + halting * self.remainders
