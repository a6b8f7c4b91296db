"""Lists that grow and shrink at their end: what a tf.while_loop keeps for its gradient.

How often it runs need not be known, so they are the stacks that `mtf.while_loop` itself keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError, UnsupportedError
from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.nodes import Node, Wire
from mesh_tensorflow.importing.rules import Construction, Rule, rule
from mesh_tensorflow.importing.value import Value, flat
from mesh_tensorflow.operations.stacks import Element, empty_stack, pop, push
from mesh_tensorflow.program.dimensions import Shape


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
