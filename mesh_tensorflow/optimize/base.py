"""What optimizers have in common."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from mesh_tensorflow import initializers
from mesh_tensorflow.errors import GraphError, ShapeError
from mesh_tensorflow.global_step import get_global_step
from mesh_tensorflow.graph import Mesh, Operation, Tensor
from mesh_tensorflow.operations.elementwise import sqrt, square
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.operations.reduction import reduce_mean
from mesh_tensorflow.operations.variables import Assign, Variable, get_variable
from mesh_tensorflow.optimize.scalars import ScalarLike, evaluate_scalar

_LOG = logging.getLogger("mesh_tensorflow")


class Optimizer:
  """Base class of optimizers; a subclass defines `apply_grad`.

  An update is an operation of the graph: it runs with the graph, at its place, after the
  operations that made the gradients. Slots (running averages) are untrainable variables
  called by the weight's full name and a suffix, within the open variable scope.
  """

  # Scalars evaluated in the current apply_grads: a schedule is evaluated once for all weights.
  _evaluated: dict[Any, Any] | None = None

  def minimize(
    self, loss: Tensor, variables: Sequence[Variable] | None = None
  ) -> list[Operation]:
    """Updates variables along the gradient of a loss.

    Args:
      loss: a scalar `Tensor`.
      variables: `Variable` operations; `graph.trainable_variables` by default.

    Returns:
      The update operations.
    """
    variables = list(loss.graph.trainable_variables if variables is None else variables)
    return self.apply_grads(gradients([loss], [v.outputs[0] for v in variables]), variables)

  def apply_grads(
    self, grads: Sequence[Tensor | None], variables: Sequence[Variable]
  ) -> list[Operation]:
    """Updates variables by their gradients.

    Args:
      grads: a gradient (or None) for each variable.
      variables: `Variable` operations.

    Returns:
      The update operations. `Assign`s that `apply_grad` made are joined, so that all values
      are computed before the first is assigned.

    Raises:
      GraphError: the two lists have different lengths.
    """
    grads, variables = list(grads), list(variables)
    if len(grads) != len(variables):
      raise GraphError(f"apply_grads: {len(grads)} gradients for {len(variables)} variables")
    self._evaluated = {}
    try:
      ops = [op for g, v in zip(grads, variables) for op in self.apply_grad(g, v)]
    finally:
      self._evaluated = None
    assigns = [op for op in ops if isinstance(op, Assign)]
    others = [op for op in ops if not isinstance(op, Assign)]
    return others + (variables[0].graph.combine_assignments(assigns) if assigns else [])

  def apply_grad(self, grad: Tensor | None, var: Variable) -> list[Operation]:
    """Updates one variable.

    Args:
      grad: its gradient, or None: then nothing happens, and no slot is made.
      var: a `Variable` operation.

    Returns:
      The update operations.
    """
    raise GraphError(f"{type(self).__name__} does not define apply_grad")

  def _scalar(self, value: ScalarLike, mesh: Mesh, what: str) -> float | Tensor:
    """`evaluate_scalar`, once for each value within `apply_grads`."""
    if self._evaluated is None:
      return evaluate_scalar(value, mesh, what)
    # The value is kept beside its result, so that its id stays its own.
    key = (id(value), mesh)
    if key not in self._evaluated:
      self._evaluated[key] = (value, evaluate_scalar(value, mesh, what))
    return self._evaluated[key][1]

  def _has_gradient(self, grad: Tensor | None, var: Variable) -> bool:
    """Whether there is something to do; warns if not.

    Raises:
      ShapeError: the gradient has another shape than the variable.
    """
    if grad is None:
      _LOG.warning("%s: variable %s has no gradient", type(self).__name__, var.full_name)
      return False
    if grad.shape != var.shape:
      raise ShapeError(
        f"{type(self).__name__}: the gradient of variable {var.full_name} {var.shape} has the "
        f"shape {grad.shape}"
      )
    return True


def slot_variable(var: Variable, name: str, shape: Any, dtype: Any) -> Variable:
  """An untrainable variable that starts with zeros, on the mesh of `var`."""
  return get_variable(
    var.mesh, name, shape, dtype=dtype, initializer=initializers.Zeros(), trainable=False
  ).operation


def reduce_rms(x: Tensor, **kwargs: Any) -> Tensor:
  """sqrt(mean(x ** 2)).

  Args:
    x: a floating `Tensor`.
    **kwargs: as `mtf.reduce_mean`.
  """
  return sqrt(reduce_mean(square(x), **kwargs))


__all__ = ["Optimizer", "get_global_step", "reduce_rms", "slot_variable"]
