"""Variables that change once after a training step, by sums over all of its tokens.

A layer sees the tokens of one call: with microbatches a part of the step's. So what it counts is
handed to the training step, which adds up the parts and then makes the updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import mesh_tensorflow as mtf


@dataclasses.dataclass(frozen=True)
class StepSum:
  """A count, and the variable that it changes.

  Attributes:
    variable: the value of the variable; float32.
    count: float32 of the same dims: what this call adds to the sum of the step.
    rate: the variable goes up by this where the sum is below its mean, and down where it is above.
  """

  variable: mtf.Tensor
  count: mtf.Tensor
  rate: float


def record(graph: mtf.Graph, sums: Sequence[StepSum]) -> None:
  """Records the counts of a model's call, for `take`."""
  _of_graph(graph).extend(sums)


def _of_graph(graph: mtf.Graph) -> list[StepSum]:
  """The list of counts recorded in a graph; it lives as long as the graph."""
  found: list[StepSum] = vars(graph).setdefault("_step_sums", [])
  return found


def take(graph: mtf.Graph) -> list[StepSum]:
  """Removes and returns the counts of a graph, summed over layers that share a variable."""
  by_variable: dict[mtf.Tensor, StepSum] = {}
  recorded = _of_graph(graph)
  for s in recorded:
    before = by_variable.get(s.variable)
    if before is not None:
      s = dataclasses.replace(s, count=before.count + s.count)
    by_variable[s.variable] = s
  recorded.clear()
  return list(by_variable.values())


def as_outputs(sums: Sequence[StepSum]) -> dict[str, mtf.Tensor]:
  """The counts as named outputs of a microbatch."""
  return {f"step_sum_{i}": s.count for i, s in enumerate(sums)}


def of_step(sums: Sequence[StepSum], outputs: dict[str, mtf.Tensor]) -> list[StepSum]:
  """Replaces a microbatch's counts by the outputs summed over all microbatches of a step."""
  return [dataclasses.replace(s, count=outputs[name]) for name, s in zip(as_outputs(sums), sums)]


def update(sums: Sequence[StepSum]) -> None:
  """Makes the updates: variable += rate * sign(mean of the sum - sum)."""
  for s in sums:
    mean = mtf.reduce_mean(s.count, output_shape=[])
    change = mtf.sign(mtf.sub(mean, s.count, output_shape=s.count.shape)) * s.rate
    mtf.assign_add(s.variable, change)
