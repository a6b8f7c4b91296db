"""Several elements of a list at once: `gather`, `scatter` and `concat` of a tf.TensorArray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError, UnsupportedError
from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.families.control_flow import list_dim, list_labels
from mesh_tensorflow.importing.nodes import Node, Wire
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labelled,
  Labels,
  Rule,
  rule,
)
from mesh_tensorflow.importing.value import Value, flat
from mesh_tensorflow.operations.binary import sub
from mesh_tensorflow.operations.comparison import equal, greater
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reduction import broadcast, reduce_max
from mesh_tensorflow.operations.scatter import SplitGatherOperation
from mesh_tensorflow.operations.stacks import Element, empty_stack, pop, push
from mesh_tensorflow.operations.where import where
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Tensor


class _OfStack(Rule):
  """Base class: a stack and the elements pushed and popped have the same dimensions."""

  def relate(self, node: Node, axes: Axes) -> None:
    first, *others = _wires(node)
    for i in range(first.rank):
      axes.join(*[(w, i) for w in (first, *others) if w.static is None and w.rank == first.rank])


def _wires(node: Node) -> list[Wire]:
  """Wires of stack and element among inputs and outputs; PopBack's second input is a shape."""
  return [*node.inputs[: 1 if node.type == "TensorListPopBack" else 2], *node.outputs]


@rule("EmptyTensorList")
class Empty(Rule):
  """A stack without elements; it may have any number of them."""

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    (out,) = node.outputs
    dtype = tf.as_dtype(node.attributes["element_dtype"])
    if dtype == tf.variant:
      raise UnsupportedError(
        f"from_tensorflow: {node} is a list of lists, as the gradient of a loop in a loop keeps "
        "it; import what is before the gradient, and take that by mtf.gradients"
      )
    if None in out.shape:
      raise ShapeError(f"from_tensorflow: the shape of the elements of {node} is not known")
    axes = make.axes_of(out)
    return [Value(empty_stack(make.mesh, Element(Shape(flat(axes)), dtype)), axes)]


@rule("TensorListPushBack")
class PushBack(_OfStack):
  """A stack with another element at its end."""

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    stack = make.value(node.inputs[0])
    item = make.value(node.inputs[1], stack.axes)
    return [Value(push(stack.tensor, item.ordered()), stack.axes)]


@rule("TensorListPopBack")
class PopBack(_OfStack):
  """A stack without its last element, and that element."""

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    stack = make.value(node.inputs[0])
    rest, item = pop(stack.tensor)
    return [Value(rest, stack.axes), Value(item, stack.axes)]


@rule("TensorListGather")
class Gather(Labelled):
  """The elements at some places, stacked."""

  def labels(self, node: Node) -> Labels:
    labels = list_labels(node.inputs[0])
    return Labels([labels, ("picked",), None], [("picked", *labels[1:])])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    dim = list_dim(dims, node)
    if dim is None:  # All places are the one that there is.
      return [broadcast(xs[0], Shape([*xs[0].shape, *xs[1].shape]))]
    return [SplitGatherOperation(xs[0], xs[1], dim).outputs[0]]


@rule("TensorListScatterIntoExistingList")
class Scatter(Labelled):
  """The list with other elements at some places; of two for one place the last one stays."""

  def labels(self, node: Node) -> Labels:
    labels = list_labels(node.outputs[0])
    return Labels([labels, ("given", *labels[1:]), ("given",)], [labels])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    before, items, places = xs
    if not dims["given"]:  # One element, for one place.
      dim = list_dim(dims, node)
      if dim is None:
        return [items]
      is_here = equal(mtf_range(make.mesh, dim, tf.int32), cast(places, tf.int32))
      return [where(is_here, items, before, output_shape=before.shape)]
    (given,) = dims["given"]
    here = Shape(dims["list"])
    pairs = Shape([*here, given])
    # For each place 1 + the number of the last element for it; 0 if there is none.
    numbers = mtf_range(make.mesh, given, tf.int32) + 1
    is_meant = equal(cast(places, tf.int32), _places(make, here), output_shape=pairs)
    last = reduce_max(
      where(is_meant, broadcast(numbers, pairs), 0, output_shape=pairs), output_shape=here
    )
    picked = where(greater(last, 0), sub(last, 1), 0, output_shape=here)
    found = SplitGatherOperation(items, picked, given).outputs[0]
    return [where(greater(last, 0), found, before, output_shape=before.shape)]


def _places(make: Construction, here: Shape) -> Tensor | int:
  return mtf_range(make.mesh, here.dims[0], tf.int32) if here.ndims else 0


@rule("TensorListConcatV2")
class Concat(Rule):
  """The elements, one behind the other along their first axis."""

  def relate(self, node: Node, axes: Axes) -> None:
    of, out = node.inputs[0], node.outputs[0]
    list_labels(of)
    axes.relate([(of, 0), (of, 1)], [(out, 0)])
    for i in range(1, out.rank):
      axes.join((of, i + 1), (out, i))

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    return [make.value(node.inputs[0]), None]  # The caller reshapes; the lengths are static.
