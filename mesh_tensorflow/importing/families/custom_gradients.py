"""IdentityN, with which a function under tf.custom_gradient ends: its own gradient is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.replicating import relate_program
from mesh_tensorflow.importing.rules import Construction, Rule, rule
from mesh_tensorflow.importing.value import Value
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.operations.constants import zeros_like
from mesh_tensorflow.program.graph import Operation, Tensor


class CustomGradientOperation(Operation):
  """Its inputs, with a gradient that a function makes.

  Args:
    inputs: tensors.
    backward: a function of a gradient, or None, for each output; it returns one, or None, for each
      input.
    name: of the operation.
  """

  def __init__(
    self,
    inputs: list[Tensor],
    backward: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]],
    name: str | None = None,
  ):
    super().__init__(inputs, name=name or "custom_gradient")
    self._backward = backward
    self._outputs = [Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(inputs)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor | None]) -> Sequence[Tensor | None]:
    return self._backward(grad_ys)

  def lower(self, lowering: LoweringInProgress) -> None:
    for x, y in zip(self._inputs, self._outputs):
      lowering.set_tensor_lowering(y, lowering.tensors[x])


@rule("IdentityN")
class IdentityN(Rule):
  """Its inputs; if it ends a function with a gradient of its own, with that."""

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
    values = [make.value(w) for w in node.inputs[: len(node.outputs)]]
    own = node.gradient
    if own is None:
      return values

    def backward(grad_ys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
      given = [
        Value(zeros_like(y) if dy is None else dy, values[i].axes)
        for i in own.of_outputs
        for y, dy in [(operation.outputs[i], grad_ys[i])]
      ]
      grads: list[Tensor | None] = [None] * own.count
      for i, grad in zip(own.of_inputs, make.run(own.program, given)):
        grads[i] = grad.with_axes(values[i].axes).tensor
      return grads

    operation = CustomGradientOperation([v.tensor for v in values], backward, node.type)
    return [Value(y, v.axes) for y, v in zip(operation.outputs, values)]
