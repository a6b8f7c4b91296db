"""Products of tensors, summed over axes: MatMul, BatchMatMul, Einsum; and BiasAdd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labelled,
  Labels,
  Slicewise,
  rule,
)
from mesh_tensorflow.operations.binary import add
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Tensor


class Contraction(Labelled):
  """A product, summed over the labels that the output leaves out."""

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    out = Shape([d for label in self.labels(node).outputs[0] for d in dims[label]])
    # int32 of int8, say: BatchMatMulV3 has the dtype of its output as an attribute.
    operands = [cast(x, node.outputs[0].dtype) for x in xs]
    return [einsum(operands, output_shape=out, name=node.type)]


@rule("MatMul")
class MatMul(Contraction):
  """A product of two matrices, each of which may be transposed."""

  def labels(self, node: Node) -> Labels:
    a = "km" if node.attributes["transpose_a"] else "mk"
    b = "nk" if node.attributes["transpose_b"] else "kn"
    return Labels([a, b], ["mn"])


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
class BatchMatMul(Contraction):
  """Products of matrices, whose other axes broadcast."""

  def labels(self, node: Node) -> Labels:
    a = "km" if node.attributes["adj_x"] else "mk"
    b = "nk" if node.attributes["adj_y"] else "kn"
    x, y = node.inputs
    (out,) = node.outputs

    def batch(rank: int) -> tuple[int, ...]:
      return tuple(range(2 - rank, 0))

    return Labels([(*batch(x.rank), *a), (*batch(y.rank), *b)], [(*batch(out.rank), *"mn")])


@rule("Einsum")
class Einsum(Contraction):
  """TensorFlow's einsum, with an ellipsis and with axes that are repeated in one operand."""

  def labels(self, node: Node) -> Labels:
    left, right = _equation(node).split("->")
    ins = [_term(t, w.rank) for t, w in zip(left.split(","), node.inputs)]
    out = _term(right, node.outputs[0].rank)
    if all(len(set(term)) == len(term) for term in ins):
      return Labels(ins, [out])
    # A diagonal: its axes are different dimensions, and taken whole; so are those that are summed.
    twice = {label for term in ins for label in term if term.count(label) > 1}
    whole = {label for term in ins for label in term if label not in out} | twice
    apart = [
      [(label, k, i) if label in whole else label for i, label in enumerate(term)]
      for k, term in enumerate(ins)
    ]
    summed = [label for term in apart for label in term if label not in out]
    return Labels(apart, [out], [*(whole & set(out)), *summed])

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    if self.labels(node).whole:
      return _DIAGONAL.compute(node, xs, dims, make)
    return super().compute(node, xs, dims, make)


class _Diagonal(Slicewise):
  """TensorFlow's einsum on slices."""

  def labels(self, node: Node) -> Labels:
    return Einsum().labels(node)


_DIAGONAL = _Diagonal()


def _equation(node: Node) -> str:
  text = node.attributes["equation"]
  return str(text.decode() if isinstance(text, bytes) else text).replace(" ", "")


def _term(term: str, rank: int) -> tuple[Label, ...]:
  before, dots, after = term.partition("...")
  n = rank - len(before) - len(after) if dots else 0
  return (*before, *range(-n, 0), *after)


@rule("BiasAdd", "BiasAddV1")
class BiasAdd(Labelled):
  """A bias for each channel, which is the last axis or the second one."""

  def labels(self, node: Node) -> Labels:
    rank = node.inputs[0].rank
    axes = tuple(range(rank))
    channel = 1 if node.attributes.get("data_format") in (b"NCHW", "NCHW") else rank - 1
    return Labels([axes, (channel,)], [axes])

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    return [add(xs[0], xs[1], output_shape=xs[0].shape)]
