"""Base class of optimizers."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import DTypeError, GraphError, ShapeError
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.elementwise import sqrt, square
from mesh_tensorflow.operations.global_step import (
  count_global_step,
  count_global_step_if_there,
  get_global_step,
)
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.operations.reduction import reduce_mean
from mesh_tensorflow.operations.variables import Assign, Variable, get_variable
from mesh_tensorflow.optimize.scalars import ScalarLike, evaluate_scalar
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor

__all__ = ["Optimizer", "count_global_step", "get_global_step", "reduce_rms"]

_LOG = logging.getLogger("mesh_tensorflow")


class _Evaluated(threading.local):
  """Scalars evaluated in the `apply_grads` that runs: one evaluation for all weights.

  On a SIMD mesh that executes eagerly each device's program runs in a thread of its own, and
  all use one optimizer.
  """

  scalars: dict[Any, Any] | None = None


_EVALUATED = _Evaluated()


@contextlib.contextmanager
def _evaluated_once() -> Iterator[None]:
  outer, _EVALUATED.scalars = _EVALUATED.scalars, {}
  try:
    yield
  finally:
    _EVALUATED.scalars = outer


class Optimizer:
  """Base class of optimizers; a subclass defines `apply_grad`.

  An update is an operation of the graph: it runs with the graph, at its place, after the
  operations that made the gradients. Slots (running averages) are untrainable variables
  called by the weight's full name and a suffix, within the open variable scope.
  """

  # Whether `apply_grad` is right for complex gradients; it is not where squares or signs of real
  # numbers are used.
  takes_complex = False

  @checked
  def minimize(self, loss: Tensor, variables: Sequence[Variable] | None = None) -> list[Operation]:
    """Updates variables along the gradient of a loss, and counts the global step.

    The step is counted if a schedule or a decay rate reads it; `count_global_step` counts it
    always.

    Args:
      loss: a scalar `Tensor`.
      variables: `Variable` operations; `graph.trainable_variables` by default.

    Returns:
      The update operations.
    """
    variables = list(loss.graph.trainable_variables if variables is None else variables)
    updates = self.apply_grads(gradients([loss], [v.outputs[0] for v in variables]), variables)
    return updates + count_global_step_if_there(loss.graph)

  @checked
  def apply_grads(
    self, grads: Sequence[CastableTensor | None], variables: Sequence[Variable]
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
    with _evaluated_once():
      # A schedule is evaluated once, not once for each of hundreds of weights.
      ops = self._apply_all(grads, variables)
    assigns = [op for op in ops if isinstance(op, Assign)]
    others = [op for op in ops if not isinstance(op, Assign)]
    return others + (variables[0].graph.combine_assignments(assigns) if assigns else [])

  def apply_grad(self, grad: CastableTensor | None, var: Variable) -> list[Operation]:
    """Updates one variable.

    Args:
      grad: its gradient, or None: then nothing happens, and no slot is made.
      var: a `Variable` operation.

    Returns:
      The update operations.
    """
    raise GraphError(
      f"{type(self).__name__} defines no method apply_grad, to update variable {var.full_name}"
    )

  def _apply_all(
    self, grads: Sequence[CastableTensor | None], variables: Sequence[Variable]
  ) -> list[Operation]:
    """Calls `apply_grad` for each variable; returns all its operations."""
    return [op for g, v in zip(grads, variables) for op in self.apply_grad(g, v)]

  def _learning_rate_for(self, var: Variable | None) -> ScalarLike:
    """The learning rate of a variable; of None: the usual one."""
    raise NotImplementedError

  def _scalar(self, value: ScalarLike, mesh: Mesh, what: str) -> float | Tensor:
    """`evaluate_scalar`, once for each value within `apply_grads`."""
    # The value is kept beside its result, so that its id stays its own.
    result: float | Tensor = self._once(
      (id(value), mesh), lambda: (value, evaluate_scalar(value, mesh, what))
    )[1]
    return result

  def _once(self, key: Any, make: Callable[[], Any]) -> Any:
    """Returns `make()`, cached by `key` within one call of `apply_grads`."""
    found = _EVALUATED.scalars
    if found is None:
      return make()
    if key not in found:
      found[key] = make()
    return found[key]

  def _has_gradient(self, grad: CastableTensor | None, var: Variable) -> TypeGuard[Tensor]:
    """Checks a gradient; False, with a warning, if the variable has none.

    Raises:
      ShapeError: the gradient has another shape than the variable.
      DTypeError: it is complex, and the optimizer takes real ones only.
    """
    if grad is None:
      _LOG.warning("%s: variable %s has no gradient", type(self).__name__, var.full_name)
      return False
    if grad.shape != var.shape:
      raise ShapeError(
        f"{type(self).__name__}: the gradient of variable {var.full_name} {var.shape} has the "
        f"shape {grad.shape}"
      )
    if grad.dtype.is_complex and not self.takes_complex:
      raise DTypeError(
        f"{type(self).__name__}: the gradient of variable {var.full_name} is complex, whose square "
        "says nothing of its size; use SgdOptimizer, or make the variable of two real ones "
        "(mtf.complex)"
      )
    return True


def slot_variable(var: Variable, name: str, shape: ShapeLike, dtype: tf.DType) -> Variable:
  """An untrainable variable that starts with zeros, on the mesh of `var`."""
  slot = get_variable(
    var.mesh, name, shape, dtype=dtype, initializer=initializers.Zeros(), trainable=False
  ).operation
  assert isinstance(slot, Variable)
  slot.sharded_as = var
  return slot


@checked
def reduce_rms(x: Tensor, **kwargs: Any) -> Tensor:
  """sqrt(mean(x ** 2)).

  Args:
    x: a floating `Tensor`.
    **kwargs: as `mtf.reduce_mean`.
  """
  return sqrt(reduce_mean(square(x), **kwargs))
