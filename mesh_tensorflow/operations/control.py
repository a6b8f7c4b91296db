"""Stop-gradient, printing, and scalar summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.program.graph import Operation, Tensor, check_one_graph, check_tensors

__all__ = [
  "Print",
  "PrintOperation",
  "ScalarSummaryOperation",
  "StopGradient",
  "scalar_summary",
  "stop_gradient",
]


class StopGradient(Operation):
  """The value of x, through which no gradient flows; see `stop_gradient`.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(self, x: Tensor, name: str | None = None):
    super().__init__([x], name=name or "stop_gradient")
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  @property
  def has_gradient(self) -> bool:
    return False

  def lower(self, lowering: LoweringInProgress) -> None:
    # As it is: a sum that is pending stays pending.
    lowering.set_tensor_lowering(self._outputs[0], lowering.tensors[self._inputs[0]])


def stop_gradient(x: Tensor) -> Tensor:
  """The value of x, a constant for `mtf.gradients`."""
  return StopGradient(x).outputs[0]


class PrintOperation(Operation):
  """The value of x; prints `data` when it is computed; name: of the operation. See `Print`."""

  def __init__(
    self,
    x: Tensor,
    data: Sequence[Tensor],
    message: str,
    name: str | None = None,
    **kwargs: Any,
  ):
    super().__init__([x], name=name or "Print")
    self._outputs = [Tensor(self, x.shape, x.dtype)]
    self._data = list(data)
    check_tensors(self.name, self._data)
    check_one_graph(self.name, x, self._data)
    self._message = f"{message} {self._data!r}"
    self._kwargs = kwargs

  @property
  def implicit_inputs(self) -> list[Tensor]:
    """Tensors that it uses besides its inputs."""
    return list(self._data)

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return grad_ys

  def lower(self, lowering: LoweringInProgress) -> None:
    # Sums that are pending are executed: parts of them would be printed else.
    value = lowering.mesh_impl(self).Print(
      lowering.tensors[self._inputs[0]].to_laid_out_tensor(),
      [lowering.tensors[d].to_laid_out_tensor() for d in self._data],
      self._message,
      **self._kwargs,
    )
    lowering.set_tensor_lowering(self._outputs[0], value)


def Print(x: Tensor, data: Sequence[Tensor], message: str, **kwargs: Any) -> Tensor:  # noqa: N802
  """The value of x; prints the slices of other tensors whenever it is computed.

  Args:
    x: a `Tensor`.
    data: a list of `Tensor`s to print.
    message: a text to put in front.
    **kwargs: `summarize`: number of elements to print of each axis end.
  """
  return PrintOperation(x, data, message, **kwargs).outputs[0]


class ScalarSummaryOperation(Operation, Tensor):
  """Reports the value of a scalar; see `scalar_summary`.

  It is an operation, and it is its own output: a `Tensor` of the scalar's value.
  """

  lowers_uneven_slices = True

  def __init__(self, name: str, x: Tensor):
    Operation.__init__(self, [x], name=name)
    if x.shape.ndims:
      raise ShapeError(
        f"scalar_summary {name!r} takes a scalar, got {x}; reduce it first (mtf.reduce_mean)"
      )
    Tensor.__init__(self, self, x.shape, x.dtype)
    self._name = self._name.removesuffix(":0")
    self._outputs = [self]

  @property
  def to_string(self) -> str:
    """Its name and input as text."""
    return f"ScalarSummaryOperation[{self._name}, {self._inputs[0].to_string}]"

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return grad_ys

  def lower(self, lowering: LoweringInProgress) -> None:
    value = lowering.tensors[self._inputs[0]].to_laid_out_tensor()
    lowering.scalar_summaries.append((self.name, value.one_slice))
    lowering.set_tensor_lowering(self, value)


def scalar_summary(name: str, x: Tensor) -> ScalarSummaryOperation:
  """Puts (name, value) into `lowering.scalar_summaries` when the graph is lowered.

  Args:
    name: of the summary, made unique within the graph.
    x: a scalar `Tensor`.

  Returns:
    An `Operation` that is also a `Tensor` of x's value.

  Raises:
    ShapeError: x is not a scalar.
  """
  return ScalarSummaryOperation(name, x)
