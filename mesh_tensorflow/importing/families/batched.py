"""Operations on matrices, vectors or images of which there are many: each is whole, they are split.

What such an operation does with the axes of one example is a signature, as of NumPy's generalized
functions: `"ab,aN->bN"` solves a system, for each of the axes in front. A small letter is an axis
that is needed whole, a capital one an axis along which parts are independent (right-hand sides,
channels), `-` an operand that has to be known while tracing. Axes in front are batches: those of
operands are aligned from their last one, and may be of size 1 where TensorFlow broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.importing.families.inputs import static_input
from mesh_tensorflow.importing.nodes import Node, Wire
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labelled,
  Labels,
  Slicewise,
  rule,
)
from mesh_tensorflow.operations.elementwise import square
from mesh_tensorflow.operations.reduction import reduce_sum
from mesh_tensorflow.program.graph import Tensor

_SIGNATURES = {
  "BandedTriangularSolve": "ba,aN->aN",
  "CropAndResize": "bhwC,Ni,N,-->NyxC",
  "Cross": "a,a->a",
  "Eig": "ab->c,ac",
  "LogMatrixDeterminant": "ab->,",
  "LowerBound": "a,N->N",
  "Lu": "ab->ab,c",
  "MatrixSolve": "ab,aN->bN",
  "MatrixSolveLs": "ab,aN,->bN",
  "MatrixSquareRoot": "ab->ab",
  "MatrixTriangularSolve": "ab,aN->bN",
  "NthElement": "a,-->",
  "Qr": "ab->ac,cb",
  "ScaleAndTranslate": "hwC,-,i,j->yxC",
  "SelfAdjointEigV2": "ab->c,ac",
  "Svd": "ab->c,ac,bc",
  "TridiagonalMatMul": "ia,ja,ka,aN->aN",
  "TridiagonalSolve": "ia,aN->aN",
  "UpperBound": "a,N->N",
}


@rule(*_SIGNATURES)
class Batched(Slicewise):
  """Operation on whole examples, with a signature as of a NumPy gufunc."""

  def labels(self, node: Node) -> Labels:
    ins, outs = (side.split(",") for side in _SIGNATURES[node.type].split("->"))
    whole: set[Label] = {c for side in (*ins, *outs) for c in side if c.islower()}

    def of(wire: Wire, core: str) -> list[Label]:
      count = wire.rank - len(core)
      if count < 0:  # It is left out: the vectors beside singular values.
        names = [f"{core}{i}" for i in range(wire.rank)]
        whole.update(names)
        return [*names]
      return [*range(-count, 0), *core]

    inputs: list[Any] = []
    for i, (wire, core) in enumerate(zip(node.inputs, ins)):
      if core == "-":
        static_input(node, i, "parameters")
      inputs.append(None if core == "-" else of(wire, core))
    return Labels(inputs, [of(w, core) for w, core in zip(node.outputs, outs)], whole)


@rule("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3")
class MatrixDiag(Slicewise):
  """Builds matrices from their diagonals."""

  def labels(self, node: Node) -> Labels:
    x, y = node.inputs[0], node.outputs[0]
    for i in range(1, len(node.inputs)):
      static_input(node, i, "parameters")
    batch: list[Label] = list(range(y.rank - 2))
    given: list[Label] = [f"diagonal{i}" for i in range(x.rank - len(batch))]
    others: list[Any] = [None] * (len(node.inputs) - 1)
    made: list[Label] = ["rows", "columns"]
    return Labels([[*batch, *given], *others], [[*batch, *made]], [*given, *made])


@rule("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")
class MatrixSetDiag(Slicewise):
  """Replaces the diagonals of matrices."""

  def labels(self, node: Node) -> Labels:
    x, diagonal = node.inputs[:2]
    for i in range(2, len(node.inputs)):
      static_input(node, i, "parameters")
    batch: list[Label] = list(range(x.rank - 2))
    matrix: list[Label] = [*batch, "rows", "columns"]
    given: list[Label] = [f"diagonal{i}" for i in range(diagonal.rank - len(batch))]
    others: list[Any] = [None] * (len(node.inputs) - 2)
    return Labels([matrix, [*batch, *given], *others], [matrix], [*matrix[-2:], *given])


@rule("Diag", "DiagPart")
class TensorDiag(Slicewise):
  """Puts a tensor on the diagonal of one of twice the rank, or reads that diagonal."""

  def labels(self, node: Node) -> Labels:
    x = [f"x{i}" for i in range(node.inputs[0].rank)]
    y = [f"y{i}" for i in range(node.outputs[0].rank)]
    return Labels([[*x]], [[*y]], [*x, *y])


@rule("ReverseSequence")
class ReverseSequence(Slicewise):
  """Reverses the first positions of each sequence."""

  def labels(self, node: Node) -> Labels:
    axes: list[Label] = list(range(node.inputs[0].rank))
    batch, sequence = node.attributes["batch_dim"], node.attributes["seq_dim"]
    return Labels([axes, [axes[batch]]], [axes], [axes[sequence]])


_SEGMENTS = """SegmentMax SegmentMaxV2 SegmentMean SegmentMin SegmentMinV2 SegmentProd SegmentProdV2
SegmentSum SegmentSumV2 UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd"""


@rule(*_SEGMENTS.split())
class Segments(Slicewise):
  """Segment reductions; the axes after those of the segment ids stay split."""

  def labels(self, node: Node) -> Labels:
    data, numbers = node.inputs[:2]
    count: list[Any] = [None] * (len(node.inputs) - 2)
    for i, _ in enumerate(count, 2):
      static_input(node, i, "number of segments")
    axes: list[Label] = list(range(data.rank))
    counted, rest = axes[: numbers.rank], axes[numbers.rank :]
    return Labels([axes, counted, *count], [["segments", *rest]], ["segments", *counted])


_OF_ROWS = [f"SparseSegment{kind}" for kind in ("Mean", "SqrtN", "Sum")]


@rule(*_OF_ROWS, *(f"{name}WithNumSegments" for name in _OF_ROWS))
class SegmentsOfRows(Slicewise):
  """Segment reductions of rows that are gathered first: the sparse segment operations."""

  def labels(self, node: Node) -> Labels:
    rest: list[Label] = list(range(1, node.inputs[0].rank))
    ins: list[Any] = [["rows", *rest], ["places"], ["places"]]
    for i in range(3, len(node.inputs)):
      static_input(node, i, "number of segments")
      ins.append(None)
    return Labels(ins, [["segments", *rest]], ["rows", "places", "segments"])


@rule("FakeQuantWithMinMaxVars")
class Quantized(Slicewise):
  """Fake quantization to a number of bits between two scalars."""

  def labels(self, node: Node) -> Labels:
    axes = range(node.inputs[0].rank)
    return Labels([axes, [], []], [axes])


@rule("FakeQuantWithMinMaxVarsPerChannel")
class QuantizedChannels(Slicewise):
  """Fake quantization with a range for each position of the last axis."""

  def labels(self, node: Node) -> Labels:
    axes = range(node.inputs[0].rank)
    return Labels([axes, axes[-1:], axes[-1:]], [axes])


@rule("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV3", "QuantizeAndDequantizeV4")
class QuantizedRange(Slicewise):
  """Fake quantization to a given range, or to that of the whole tensor, or of each channel."""

  def labels(self, node: Node) -> Labels:
    axes, axis = list(range(node.inputs[0].rank)), node.attributes["axis"]
    channel = [] if axis < 0 else [axis]
    whole = [] if node.attributes["range_given"] else [i for i in axes if i not in channel]
    bounds = [channel if w.rank else [] for w in node.inputs[1:3]]
    bits: list[Any] = [None] * (len(node.inputs) - 3)
    for i, _ in enumerate(bits, 3):
      static_input(node, i, "number of bits")
    if not node.attributes["range_given"]:
      bounds = [[f"bound{k}_{i}" for i in range(w.rank)] for k, w in enumerate(node.inputs[1:3])]
      whole += [label for names in bounds for label in names]
    return Labels([axes, *bounds, *bits], [axes], whole)


@rule("MaxPoolWithArgmax")
class MaxPoolWithArgmax(Slicewise):
  """Max pooling with positions: numbers within each image, or within the whole batch."""

  def labels(self, node: Node) -> Labels:
    batch: list[Label] = ["batch"] if node.attributes["include_batch_in_index"] else []
    x: list[Label] = ["batch", "height", "width", "channels"]
    y: list[Label] = ["batch", "rows", "columns", "channels"]
    return Labels([x], [y, y], [*batch, *x[1:], *y[1:3]])


@rule("XlaDynamicUpdateSlice")
class UpdateSlice(Slicewise):
  """Writes a block at a computed position; axes that the block covers stay split."""

  def labels(self, node: Node) -> Labels:
    x, update, begin = node.inputs
    axes: list[Label] = list(range(x.rank))
    part = [i if n == m else f"part{i}" for i, (n, m) in enumerate(zip(x.shape, update.shape))]
    cut = [label for i, p in enumerate(part) if p != i for label in (i, p)]
    return Labels([axes, part, ["begin"]], [axes], [*cut, "begin"])

  def run(self, node: Node) -> Callable[..., Any]:
    def put(x: tf.Tensor, update: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
      room = [int(n) - int(m) for n, m in zip(x.shape, update.shape)]
      first = tf.clip_by_value(tf.reshape(tf.cast(begin, tf.int32), [len(room)]), 0, room)
      margins = tf.stack([first, room - first], axis=1)
      is_new = tf.pad(tf.ones(update.shape, tf.int32), margins) > 0
      return tf.where(is_new, tf.reshape(tf.pad(update, margins), x.shape), x)

    return put


@rule("XlaDynamicSlice")
class DynamicSlice(Slicewise):
  """Reads a block at a computed position; axes that the block covers stay split."""

  def labels(self, node: Node) -> Labels:
    (x, _, _), (out,) = node.inputs, node.outputs
    static_input(node, 2, "size")
    axes: list[Label] = list(range(x.rank))
    part = [i if n == m else f"part{i}" for i, (n, m) in enumerate(zip(x.shape, out.shape))]
    cut = [label for i, p in enumerate(part) if p != i for label in (i, p)]
    return Labels([axes, ["begin"], None], [part], [*cut, "begin"])

  def run(self, node: Node) -> Callable[..., Any]:
    (x, _, _), (out,) = node.inputs, node.outputs

    def cut(t: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
      sizes = [int(k) if n == m else m for n, m, k in zip(x.shape, out.shape, t.shape)]
      room = [int(n) - m for n, m in zip(t.shape, sizes)]
      first = tf.clip_by_value(tf.reshape(tf.cast(begin, tf.int32), [len(room)]), 0, room)
      return tf.slice(t, first, sizes)

    return cut


@rule("L2Loss")
class L2Loss(Labelled):
  """Half the sum of squares."""

  def labels(self, node: Node) -> Labels:
    return Labels([range(node.inputs[0].rank)], [[]])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    return [reduce_sum(square(xs[0]), output_shape=[]) * 0.5]


@rule("EnsureShape")
class EnsureShape(Labelled):
  """Identity; the shape was checked while tracing."""

  def labels(self, node: Node) -> Labels:
    axes = range(node.outputs[0].rank)
    return Labels([axes], [axes])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    return [xs[0]]
