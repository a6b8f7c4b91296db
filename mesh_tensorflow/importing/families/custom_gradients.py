"""IdentityN, with which a function under tf.custom_gradient ends: its own gradient is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.replicating import relate_program
from mesh_tensorflow.importing.rules import Construction, Rule, rule
from mesh_tensorflow.importing.value import Value
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.operations.constants import zeros_like
from mesh_tensorflow.program.graph import Operation, Tensor


class CustomGradientOperation(Operation):
  """Identity of its first inputs, with a custom gradient.

  Args:
    inputs: tensors: first those that it returns, then others that the gradient uses.
    count: number of tensors that it returns.
    backward: a function of the inputs, the outputs, and a gradient, or None, for each output; it
      returns one, or None, for each input.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(
    self,
    inputs: list[Tensor],
    count: int,
    backward: Callable[..., Sequence[Tensor | None]],
    name: str | None = None,
  ):
    super().__init__(inputs, name=name or "custom_gradient")
    self._backward = backward
    self._outputs = [Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(inputs[:count])]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor | None]) -> Sequence[Tensor | None]:
    # Not the tensors that it was made of: a clone, in a recomputation, has others.
    return self._backward(self.inputs, self.outputs, grad_ys)

  def lower(self, lowering: LoweringInProgress) -> None:
    for x, y in zip(self._inputs, self._outputs):
      lowering.set_tensor_lowering(y, lowering.tensors[x])


@rule("IdentityN")
class IdentityN(Rule):
  """Identity; with the custom gradient of the function that it ends, if there is one."""

  def relate(self, node: Node, axes: Axes) -> None:
    for x, y in zip(node.inputs, node.outputs):
      for i in range(y.rank):
        axes.join((x, i), (y, i))
    own = node.gradient
    if own is None:
      return
    # Before the program's operations: a gradient is laid out as what it is the gradient of.
    places = [
      *zip(own.program.inputs, (node.outputs[i] for i in own.of_outputs)),
      *zip(own.program.outputs, (node.inputs[i] for i in own.of_inputs)),
    ]
    for x, y in places:
      for i in range(y.rank):
        axes.join((y, i), (x, i))
    relate_program(own.program, axes)

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    own = node.gradient
    if own is None and not node.no_gradient:
      return [make.value(w) for w in node.inputs]
    # Variables are read where they are needed.
    wires = [w for w in node.inputs if w.variable is None]
    values = {w: make.value(w) for w in wires}

    def backward(
      inputs: Sequence[Tensor], outputs: Sequence[Tensor], grad_ys: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
      if own is None:
        raise UnsupportedError(
          f"from_tensorflow: {node}, the end of a function under tf.custom_gradient, cannot be "
          f"differentiated: {node.no_gradient}"
        )
      grads_of = [zeros_like(y) if dy is None else dy for y, dy in zip(outputs, grad_ys)]
      given: list[Value | None] = [
        Value(grads_of[i], values[wires[i]].axes) for i in own.of_outputs
      ]
      now = {w: Value(x, values[w].axes) for w, x in zip(wires, inputs)}
      given += [now.get(w) for w in own.program.inputs[len(given) :]]
      grads: list[Tensor | None] = [None] * len(inputs)
      for i, grad in zip(own.of_inputs, make.run(own.program, given)):
        grads[i] = grad.with_axes(values[wires[i]].axes).tensor
      return grads

    operation = CustomGradientOperation(
      [values[w].tensor for w in wires], len(node.outputs), backward, node.type
    )
    return [Value(y, values[w].axes) for y, w in zip(operation.outputs, wires)]
