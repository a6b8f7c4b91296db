"""Operations that only arrange elements: reshape, transpose, broadcast, tile, pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labelled,
  Labels,
  Rule,
  Slicewise,
  rule,
)
from mesh_tensorflow.importing.value import Value, flat
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.reduction import broadcast
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Tensor


@rule("Reshape", "ExpandDims", "Squeeze")
class Reshape(Rule):
  """The same elements in other axes: nothing is done where axes are only joined, or split again."""

  def relate(self, node: Node, axes: Axes) -> None:
    if node.inputs[0].static is None:
      axes.relate_reshape(node.inputs[0], node.outputs[0])

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    return [make.value(node.inputs[0]).with_axes(make.axes_of(node.outputs[0]))]


@rule("Transpose")
class Transpose(Rule):
  """The axes in another order."""

  def relate(self, node: Node, axes: Axes) -> None:
    for i, k in enumerate(_permutation(node)):
      axes.join((node.outputs[0], i), (node.inputs[0], k))

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    return [make.value(node.inputs[0]).transposed(_permutation(node))]


def _permutation(node: Node) -> list[int]:
  rank = node.inputs[0].rank
  return [int(i) % rank for i in static_values(node, 1)]


def static_values(node: Node, index: int) -> list[Any]:
  """Flat list of the values of an input that must be static.

  Raises:
    UnsupportedError: the input is not static.
  """
  values = node.static(index)
  if values is None:
    raise UnsupportedError(
      f"from_tensorflow: input {index} of {node} says how tensors are arranged, and is known only "
      "when the function runs; make it of constants and of static shapes"
    )
  found: list[Any] = values.reshape(-1).tolist()
  return found


@rule("BroadcastTo")
class BroadcastTo(Labelled):
  """Axes of size 1, and new ones in front, repeated."""

  def labels(self, node: Node) -> Labels:
    x, out = node.inputs[0], node.outputs[0]
    return Labels([tuple(range(-x.rank, 0)), None], [tuple(range(-out.rank, 0))])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    return [broadcast(xs[0], Shape(flat(dims[i] for i in range(-node.outputs[0].rank, 0))))]


@rule("Fill")
class Fill(Labelled):
  """Fills a shape with a scalar."""

  def labels(self, node: Node) -> Labels:
    return Labels([None, ()], [tuple(range(node.outputs[0].rank))])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    return [broadcast(xs[1], Shape(flat(dims[i] for i in range(node.outputs[0].rank))))]


@rule("Empty")
class Empty(Labelled):
  """Uninitialized tensors; zeros here."""

  def labels(self, node: Node) -> Labels:
    return Labels([None], [tuple(range(node.outputs[0].rank))])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    (out,) = node.outputs
    return [constant(make.mesh, 0, Shape(flat(dims[i] for i in range(out.rank))), out.dtype)]


@rule("ZerosLike", "OnesLike")
class Like(Labelled):
  """Zeros or ones of the shape and dtype of a tensor."""

  def labels(self, node: Node) -> Labels:
    axes = tuple(range(node.outputs[0].rank))
    return Labels([axes], [axes])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    value = 1 if node.type == "OnesLike" else 0
    return [constant(make.mesh, value, xs[0].shape, xs[0].dtype)]


@rule("Tile")
class Tile(Slicewise):
  """Axes repeated; those that are not are kept as they are."""

  def labels(self, node: Node) -> Labels:
    times = static_values(node, 1)
    outs = [i if n == 1 else ("tiled", i) for i, n in enumerate(times)]
    repeated = [i for i, n in enumerate(times) if n != 1]
    return Labels(
      [tuple(range(len(times))), None], [outs], [*repeated, *(("tiled", i) for i in repeated)]
    )


@rule("Pack")
class Pack(Slicewise):
  """Tensors of one shape, joined along a new axis."""

  def labels(self, node: Node) -> Labels:
    rank = node.outputs[0].rank
    axis = node.attributes["axis"] % rank
    axes = tuple(range(rank - 1))
    return Labels([axes] * len(node.inputs), [(*axes[:axis], "new", *axes[axis:])], ["new"])


@rule("Unpack")
class Unpack(Slicewise):
  """A tensor for each position along an axis."""

  def labels(self, node: Node) -> Labels:
    rank = node.inputs[0].rank
    axis = node.attributes["axis"] % rank
    axes = tuple(range(rank - 1))
    return Labels([(*axes[:axis], "old", *axes[axis:])], [axes] * len(node.outputs), ["old"])
