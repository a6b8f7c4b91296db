"""Operations that need some axes of each example whole: resizing, patches, matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.families.inputs import static_input
from mesh_tensorflow.importing.nodes import Node, Wire
from mesh_tensorflow.importing.rules import (
  Construction,
  Label,
  Labels,
  Rule,
  Slicewise,
  on_slices,
  rule,
)
from mesh_tensorflow.importing.value import Value, flat
from mesh_tensorflow.program.dimensions import Dimension

# Batch and channels stay split.
_RESIZING = "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor"

# Of each example, the axes behind the batch: for these the operation is done on it whole.
_OF_EXAMPLES = """AdjustContrastv2 AdjustHue AdjustSaturation DepthToSpace Dilation2D
ExtractImagePatches ExtractVolumePatches HSVToRGB ImageProjectiveTransformV2
ImageProjectiveTransformV3 LRN RGBToHSV SpaceToDepth"""

# Of matrices, or of diagonals: all axes but the first ones of this number less than the rank.
_OF_MATRICES = {
  "BatchMatrixBandPart": 2, "Cholesky": 2, "MatrixBandPart": 2, "MatrixDeterminant": 2,
  "MatrixDiagPart": 2, "MatrixDiagPartV2": 2, "MatrixDiagPartV3": 2, "MatrixInverse": 2,
}  # fmt: skip


@rule(*_RESIZING.split())
class Resize(Slicewise):
  """Images of another size."""

  def labels(self, node: Node) -> Labels:
    static_input(node, 1, "size")
    x = ("batch", "height", "width", "channels")
    y = ("batch", "new_height", "new_width", "channels")
    return Labels([x, None], [y], [*x[1:3], *y[1:3]])


@rule(*_OF_EXAMPLES.split())
class OfExamples(Slicewise):
  """Operations on whole examples of a batch."""

  def labels(self, node: Node) -> Labels:
    inputs: list[Any] = []
    whole: list[Label] = []
    batch = node.outputs[0].shape[0]
    for k, w in enumerate(node.inputs):
      # What is not of the batch (a filter, a factor) is given to each.
      of_batch = k == 0 or (w.rank > 1 and w.shape[0] == batch != 1 and _is_transform(node, k))
      if k and w.static is not None and not of_batch:
        inputs.append(None)
        continue
      names: list[Label] = [f"x{k}_{i}" for i in range(w.rank)]
      whole += names[1:] if of_batch else names
      inputs.append(["batch", *names[1:]] if of_batch else names)
    made: list[Label] = [f"y{i}" for i in range(1, node.outputs[0].rank)]
    return Labels(inputs, [["batch", *made]], [*whole, *made])


def _is_transform(node: Node, index: int) -> bool:
  return node.type.startswith("ImageProjectiveTransform") and index == 1


@rule(*_OF_MATRICES)
class OfMatrices(Slicewise):
  """Operations on the matrices of the last two axes."""

  def labels(self, node: Node) -> Labels:
    x, y = node.inputs[0], node.outputs[0]
    batch: list[Label] = list(range(x.rank - 2))
    last: list[Label] = ["rows", "columns"]
    same = x.shape == y.shape
    made: list[Label] = last if same else [f"made{i}" for i in range(y.rank - len(batch))]
    for i, _ in enumerate(node.inputs[1:], 1):
      static_input(node, i, "parameters")
    others: list[Any] = [None] * (len(node.inputs) - 1)
    return Labels([[*batch, *last], *others], [[*batch, *made]], [*last, *made])


@rule("SpaceToBatchND", "BatchToSpaceND")
class Phases(Rule):
  """SpaceToBatch and back: the phases of an image as a batch, for dilated convolutions.

  The axis of the batch is the product of the phases and of the batch, which stays split.
  """

  def _wide(self, node: Node) -> tuple[Wire, Wire]:
    """The images, and the phases of them."""
    x, y = node.inputs[0], node.outputs[0]
    return (x, y) if node.type == "SpaceToBatchND" else (y, x)

  def relate(self, node: Node, axes: Axes) -> None:
    images, phases = self._wide(node)
    sizes = tuple(int(b) for b in static_input(node, 1, "block").flat)
    n = len(sizes)
    # A wire of its own for the phases: nothing else has their axes.
    block = Wire(f"{node.name}/phases", sizes, phases.dtype)
    axes.add(block)
    axes.relate([*((block, i) for i in range(n)), (images, 0)], [(phases, 0)])
    for i in range(n + 1, images.rank):
      axes.join((images, i), (phases, i))

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    images, phases = self._wide(node)
    block = [int(b) for b in static_input(node, 1, "block").flat]
    margins = [(int(a), int(b)) for a, b in static_input(node, 2, "paddings or crops")]
    n = len(block)
    named = make.axes_of(images)
    batch, rest = named[0], named[n + 1 :]
    space = [(Dimension(f"_space{i}", size),) for i, size in enumerate(images.shape[1 : n + 1])]
    parts = [(Dimension(f"_part{i}", size),) for i, size in enumerate(phases.shape[1 : n + 1])]
    offsets = [(Dimension(f"_phase{i}", b),) for i, b in enumerate(block)]
    whole_axes = (batch, *space, *rest)
    cut_axes = (batch, *(axis for pair in zip(parts, offsets) for axis in pair), *rest)
    phase_axes = ((*flat(offsets), *batch), *parts, *rest)
    x, y = node.inputs[0], node.outputs[0]
    kept = flat([batch, *rest])
    long = [m * b for m, b in zip(phases.shape[1:], block)]

    if node.type == "SpaceToBatchND":

      def cut(t: tf.Tensor) -> tf.Tensor:
        t = tf.pad(t, [(0, 0), *margins, *([(0, 0)] * len(rest))])
        pairs = [k for m, b in zip(long, block) for k in (m // b, b)]
        return tf.reshape(t, [t.shape[0], *pairs, *t.shape[n + 1 :]])

      operand = make.value(x, whole_axes).ordered()
      (made,) = on_slices(cut, [operand], [whole_axes], [cut_axes], [y.dtype], kept, node.type)
      return [Value(made, phase_axes)]

    def join(t: tf.Tensor) -> tf.Tensor:
      t = tf.reshape(t, [t.shape[0], *long, *t.shape[2 * n + 1 :]])
      begin = [0, *(before for before, _ in margins), *([0] * len(rest))]
      return tf.slice(t, begin, [-1, *images.shape[1 : n + 1], *([-1] * len(rest))])

    operand = Value(make.value(x, phase_axes).tensor, cut_axes).ordered()
    (made,) = on_slices(join, [operand], [cut_axes], [whole_axes], [y.dtype], kept, node.type)
    return [Value(made, whole_axes)]
