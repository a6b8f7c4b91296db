"""Variables: reading, and assignments."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import Construction, Rule, rule
from mesh_tensorflow.importing.value import Value, flat
from mesh_tensorflow.operations.binary import add, sub
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.program.dimensions import Shape


@rule("ReadVariableOp")
class ReadVariable(Rule):
  """The value of a variable, after the assignments that stand before."""

  def relate(self, node: Node, axes: Axes) -> None:
    axes.relate_reshape(node.inputs[0], node.outputs[0])

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    return [read_value(node, make)]


def read_value(node: Node, make: Construction) -> Value:
  """The value of the variable that is the first input, without dimensions of size 1."""
  (handle, *_) = node.inputs
  assert handle.variable is not None
  tensor, axes = make.read(handle.variable), make.axes_of(handle)
  wide = Shape(flat(axes))
  return Value(tensor if tensor.shape == wide else reshape(tensor, wide), axes)


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
class AssignVariable(Rule):
  """A new value of a variable, or a change of it."""

  def relate(self, node: Node, axes: Axes) -> None:
    handle, value = node.inputs
    if value.static is None:
      axes.relate_reshape(handle, value)

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    handle, wire = node.inputs
    assert handle.variable is not None
    value = make.value(wire, make.axes_of(handle))
    if node.type != "AssignVariableOp":
      old = read_value(node, make)
      change = add if node.type == "AssignAddVariableOp" else sub
      value = Value(change(old.tensor, value.tensor, output_shape=old.tensor.shape), old.axes)
    make.assign(handle.variable, value)
    return []
