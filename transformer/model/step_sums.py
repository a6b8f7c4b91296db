"""Variables that change once after a training step, by sums over all of its tokens.

A layer sees the tokens of one call: with microbatches a part of the step's. So what it counts is
handed to the training step, which adds up the parts and then makes the updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

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


def take(graph: mtf.Graph) -> dict[str, mtf.Tensor]:
  """The recorded counts of a microbatch as named outputs, summed over layers of one variable.

  They are no longer recorded; `update` gets the outputs of all microbatches together.
  """
  by_variable: dict[mtf.Tensor, StepSum] = {}
  recorded = _of_graph(graph)
  for s in recorded:
    before = by_variable.get(s.variable)
    if before is not None:
      s = dataclasses.replace(s, count=before.count + s.count)
    by_variable[s.variable] = s
  recorded.clear()
  sums = {f"step_sum_{i}": s for i, s in enumerate(by_variable.values())}
  vars(graph)["_taken_step_sums"] = sums
  return {name: s.count for name, s in sums.items()}


def update(graph: mtf.Graph, outputs: Mapping[str, mtf.Tensor]) -> None:
  """Makes the updates: variable += rate * sign(mean of the sum - sum).

  Args:
    graph: that of the step.
    outputs: the counts that `take` returned, summed over all microbatches of the step.
  """
  taken: dict[str, StepSum] = vars(graph).get("_taken_step_sums", {})
  for name, s in taken.items():
    count = outputs[name]
    mean = mtf.reduce_mean(count, output_shape=[])
    change = mtf.sign(mtf.sub(mean, count, output_shape=count.shape)) * s.rate
    mtf.assign_add(s.variable, change)
