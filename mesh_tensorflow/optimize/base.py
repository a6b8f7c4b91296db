"""Base class of optimizers."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, TypeVar

import tensorflow as tf

from mesh_settings.trainer import STATE_DTYPES
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.errors import ConfigError, DTypeError, GraphError, ShapeError
from mesh_tensorflow.numerics import compact, initializers
from mesh_tensorflow.operations.cross_mesh import stage
from mesh_tensorflow.operations.elementwise import sqrt, square
from mesh_tensorflow.operations.global_step import (
  count_global_step,
  count_global_step_if_there,
  get_global_step,
)
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.operations.reduction import reduce_mean
from mesh_tensorflow.operations.variables import (
  Assign,
  Compact,
  Variable,
  VariableDType,
  get_variable,
)
from mesh_tensorflow.optimize.scalars import ScalarLike, evaluate_scalar
from mesh_tensorflow.program.argument_kinds import CastableTensor
from mesh_tensorflow.program.dimensions import Shape, ShapeLike
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor

__all__ = ["Optimizer", "count_global_step", "get_global_step", "reduce_rms"]

_LOG = logging.getLogger("mesh_tensorflow")

# Smaller slots are kept in float32: their bytes are few, and their rounding is felt by all.
_SMALLEST_COMPACT = 4096

_Self = TypeVar("_Self", bound="Optimizer")


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

  # See `with_state_dtype` and `with_stochastic_rounding`.
  _state_dtype = "float32"
  _rounds_stochastically = False

  @checked
  def with_state_dtype(self: _Self, dtype: DTypeLike) -> _Self:
    """The same optimizer with running averages in fewer bits.

    It is for averages of the shape of their weight (Adam's m and v, a momentum) of at least 4,096
    elements; Adafactor's factored ones, and those of biases and norms, are small, and stay float32.
    They are computed in float32 and rounded stochastically.

    Args:
      dtype: "float32"; "bfloat16", of half the bytes; or "int8", of a quarter: an element has a
        byte, which is multiplied by the smallest of the scales of the indices that it has along
        each axis.

    Raises:
      ConfigError: it is something else.
    """
    name = dtype if isinstance(dtype, str) else tf.as_dtype(dtype).name
    if name not in STATE_DTYPES:
      raise ConfigError(
        f"{type(self).__name__}: state dtype {name!r} is not one of {', '.join(STATE_DTYPES)}"
      )
    return self._with(_state_dtype=name)

  def with_stochastic_rounding(self: _Self) -> _Self:
    """The same optimizer, whose new weights are rounded stochastically where they are bfloat16.

    It is for weights that are stored in bfloat16 alone (`slice_dtype`), of half the bytes: an
    update is computed in float32, and the new weight is one of its two neighbours, the nearer one
    with the greater probability, so that it is right on average. Rounded to the nearest, a weight
    stays what it is under all updates of less than some 2 ** -9 of it. Which neighbour it is
    depends on the seed, the step and the place in the variable, not on the layout. It is done by
    `minimize` and `apply_grads`.
    """
    return self._with(_rounds_stochastically=True)

  def _with(self: _Self, **values: Any) -> _Self:
    """A copy with other attributes, of the optimizers inside, too."""
    result = copy.copy(self)
    # Muon has an optimizer for what is no matrix, say.
    inner = {k: v._with(**values) for k, v in vars(self).items() if isinstance(v, Optimizer)}
    for key, value in {**inner, **values}.items():
      setattr(result, key, value)
    return result

  def _slot(
    self,
    var: Variable,
    suffix: str,
    dtype: Any = tf.float32,
    *,
    shape: Shape | None = None,
    nonnegative: bool = False,
  ) -> Variable:
    """A slot of a variable, in the form that `with_state_dtype` says.

    Args:
      var: the variable.
      suffix: what is added to its name.
      dtype: of a slot that is not compact.
      shape: if it is not that of the variable; then it is not compact.
      nonnegative: whether it never has a negative value.
    """
    name = var.full_name + suffix
    names = var.shape.dimension_names
    if (
      self._state_dtype == "float32"
      or shape is not None
      or var.size < _SMALLEST_COMPACT
      or len(set(names)) < len(names)
    ):
      return slot_variable(var, name, var.shape if shape is None else shape, dtype)
    return compact_slot_variable(var, name, self._state_dtype, nonnegative)

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
    if self._rounds_stochastically:
      for v in variables:
        if v.slice_dtype == tf.bfloat16:
          v.compact = Compact()
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
    made = []
    for g, v in zip(grads, variables):
      with stage(v.mesh):
        made += self.apply_grad(g, v)
    return made

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


def slot_variable(var: Variable, name: str, shape: ShapeLike, dtype: Any) -> Variable:
  """An untrainable variable that starts with zeros, on the mesh of `var`."""
  slot = get_variable(
    var.mesh, name, shape, dtype=dtype, initializer=initializers.Zeros(), trainable=False
  ).operation
  assert isinstance(slot, Variable)
  slot.sharded_as = var
  return slot


def compact_slot_variable(
  var: Variable, name: str, state_dtype: str, nonnegative: bool
) -> Variable:
  """A slot of the shape of its variable, in bfloat16, or in 8 bits with scales.

  In a checkpoint the first is float32, by the name of the slot; the names of the second are those
  of `compact`. Either is restored from the other, and from what is not compact.

  Args:
    var: the variable.
    name: of the slot.
    state_dtype: one of `STATE_DTYPES`.
    nonnegative: whether it never has a negative value.
  """
  if state_dtype == "bfloat16":
    slot = slot_variable(var, name, var.shape, VariableDType(tf.float32, tf.bfloat16, tf.float32))
    slot.compact = Compact()
    return slot
  scales = [
    slot_variable(var, scale, [] if var.shape.ndims == 1 else [d], tf.float32)
    for d, scale in zip(var.shape, compact.names_of_scales(name, var.shape.dimension_names))
  ]
  dtype = tf.uint8 if nonnegative else tf.int8
  codes = slot_variable(
    var, compact.name_of_codes(name), var.shape, VariableDType(dtype, dtype, tf.float32)
  )
  codes.compact = Compact(tuple(scales))
  return codes


@checked
def reduce_rms(x: Tensor, **kwargs: Any) -> Tensor:
  """sqrt(mean(x ** 2)).

  Args:
    x: a floating `Tensor`.
    **kwargs: as `mtf.reduce_mean`.
  """
  return sqrt(reduce_mean(square(x), **kwargs))
