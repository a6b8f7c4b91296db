"""Fourier transforms over the last axes, which are taken whole."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_tensorflow.importing.nodes import Node, Wire
from mesh_tensorflow.importing.rules import Label, Labels, Slicewise, rule

# How many axes each transforms. Those of real tensors change the size of the last one.
_AXES = {
  f"{inverse}{kind}{suffix}": count
  for inverse in ("", "I")
  for kind in ("FFT", "RFFT")
  for count, suffix in ((1, ""), (2, "2D"), (3, "3D"))
}


@rule(*_AXES)
class Fourier(Slicewise):
  """A transform of the last axes; the others are kept."""

  def labels(self, node: Node) -> Labels:
    n = _AXES[node.type]

    def of(wire: Wire, side: str) -> Sequence[Label]:
      return (*range(wire.rank - n), *((side, i) for i in range(n)))

    x, out = node.inputs[0], node.outputs[0]
    lengths = [None] * (len(node.inputs) - 1)
    whole = [(side, i) for side in ("in", "out") for i in range(n)]
    return Labels([of(x, "in"), *lengths], [of(out, "out")], whole)
