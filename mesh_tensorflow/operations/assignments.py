"""Assignments to variables, and what is ordered after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, DTypeError, GraphError, ShapeError, VariableError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program.graph import Graph, Operation, Tensor, check_one_graph
from mesh_tensorflow.program.operators import provide

__all__ = [
  "Assign",
  "Depend",
  "assign",
  "assign_add",
  "assign_add_slice",
  "assign_slice",
  "assign_sub",
  "assign_sub_slice",
  "depend",
]


def assign_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> Any:
  """Sets a slice to a value, cast to the slice dtype.

  Args:
    variable: the mtf `Variable`.
    slice_var: one of its slices.
    val: a tf.Tensor of the slice's shape.
  """
  return slice_var.assign(tf.cast(val, variable.slice_dtype), read_value=False)


def assign_add_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> Any:
  """Adds a value, cast to the slice dtype, to a slice; arguments as `assign_slice`."""
  return slice_var.assign_add(tf.cast(val, variable.slice_dtype), read_value=False)


def assign_sub_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> Any:
  """Subtracts a value, cast to the slice dtype, from a slice; arguments as `assign_slice`."""
  return slice_var.assign_sub(tf.cast(val, variable.slice_dtype), read_value=False)


class Assign(Operation):
  """Assigns values to variables, in order, where it stands in the graph.

  Args:
    variables: `Variable` operations.
    new_values: one `Tensor` for each, of its shape.
    assign_fn: `fn(mtf_variable, slice_tf_variable, tf_value)`.
    name: of the operation.

  Raises:
    ShapeError: a value has other dimensions than its variable.
  """

  is_cloneable = False
  may_mix_meshes = True

  def __init__(
    self,
    variables: Sequence[Variable],
    new_values: Sequence[Tensor],
    assign_fn: Callable[..., object] = assign_slice,
    name: str | None = None,
  ):
    variables, new_values = list(variables), list(new_values)
    if not variables or len(variables) != len(new_values):
      raise ArgumentError(
        f"{name or 'assign'}: one value for each variable is needed, got {len(new_values)} values "
        f"for {len(variables)} variables {[v.full_name for v in variables]}"
      )
    super().__init__(new_values, variables[0].mesh, name=name or "assign")
    self._variables = variables
    self._assign_fn = assign_fn
    for v, x in zip(self._variables, new_values):
      if v.shape != x.shape:
        raise ShapeError(
          f"{self.name}: the value for variable {v.full_name} has {x.shape}, the variable {v.shape}"
        )
      if (x.dtype == tf.string) != (v.slice_dtype == tf.string):
        raise DTypeError(
          f"{self.name}: the value for variable {v.full_name} of dtype {v.slice_dtype.name} is {x}"
        )

  @property
  def variables(self) -> list[Variable]:
    """The `Variable` operations that are assigned to."""
    return self._variables

  @property
  def assign_fn(self) -> Callable[..., Any]:
    """The function that writes a value into a slice."""
    return self._assign_fn

  @property
  def has_gradient(self) -> bool:
    return False

  def lower(self, lowering: LoweringInProgress) -> None:
    done = []
    # All values are read before anything is written.
    values = [lowering.tensors[x].to_laid_out_tensor() for x in self._inputs]
    for v, value in zip(self._variables, values):
      done += lowering.variables[v].assign_to_slices(self._assign_fn, value)
    lowering.operations[self] = grouped(done)


def grouped(results: Sequence[object]) -> Any:
  """Groups operations into one tf.Operation; None when executing eagerly."""
  if tf.executing_eagerly():
    return None
  return tf.group([r for r in results if r is not None])


def assign(
  var: object,
  new_val: Tensor,
  assign_fn: Callable[..., object] = assign_slice,
  name: str | None = None,
) -> Assign:
  """Assigns to a variable.

  The assignment happens whenever the graph's lowering runs, where it stands in the
  order of the graph's operations. Values read before it are not affected.

  Args:
    var: a `Variable`, or its value (also through a chain of operations of one input,
      a cast for example).
    new_val: a `Tensor` of the variable's shape.
    assign_fn: `fn(mtf_variable, slice_tf_variable, tf_value)`, which writes a value into a slice.
    name: of the operation.

  Returns:
    The `Assign` operation.

  Raises:
    VariableError: `var` leads to no variable.
  """
  op = var.operation if isinstance(var, Tensor) else var
  while isinstance(op, Operation) and not isinstance(op, Variable):
    if len(op.inputs) != 1:
      break
    op = op.inputs[0].operation
  if not isinstance(op, Variable):
    raise VariableError(f"assign: {var!r} is not a variable, nor the value of one")
  return Assign([op], [new_val], assign_fn=assign_fn, name=name)


def assign_add(var: object, new_val: Tensor) -> Assign:
  """Adds to a variable; arguments as `assign`."""
  return assign(var, new_val, assign_fn=assign_add_slice)


def assign_sub(var: object, new_val: Tensor) -> Assign:
  """Subtracts from a variable; arguments as `assign`."""
  return assign(var, new_val, assign_fn=assign_sub_slice)


class Depend(Operation):
  """x, after the given operations and tensors.

  Operations run in the order of the graph, so this only needs to exist.

  Args:
    x: a `Tensor`.
    dependencies: a list of `Operation`s and `Tensor`s.
    name: of the operation.
  """

  def __init__(
    self, x: Tensor, dependencies: Sequence[Operation | Tensor], name: str | None = None
  ):
    super().__init__([x], x.mesh, name=name or "depend")
    for d in dependencies:
      if not isinstance(d, (Operation, Tensor)):
        raise GraphError(
          f"{self.name} of {x}: a dependency must be an Operation or a Tensor, got {d!r}"
        )
    check_one_graph(self.name, x, dependencies)
    self._dependencies = list(dependencies)
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return grad_ys

  def lower(self, lowering: LoweringInProgress) -> None:
    for d in self._dependencies:
      if isinstance(d, Tensor):
        lowering.tensors[d].to_laid_out_tensor()
    lowering.set_tensor_lowering(
      self.outputs[0],
      lowering.mesh_impl(self).slicewise(tf.identity, lowering.tensors[self.inputs[0]]),
    )


def depend(x: Tensor, dependencies: Sequence[Operation | Tensor]) -> Tensor:
  """Identity of x, ordered after the dependencies."""
  return Depend(x, dependencies).outputs[0]


def _combine_assignments(graph: Graph, assignments: Sequence[Operation]) -> list[Operation]:
  """Implements `Graph.combine_assignments`."""
  groups: dict[Any, list[Assign]] = {}
  for op in assignments:
    if not isinstance(op, Assign):
      raise GraphError(f"combine_assignments takes Assign operations, got {op!r}")
    groups.setdefault(op.assign_fn, []).append(op)
  given = set(assignments)
  graph.operations[:] = [op for op in graph.operations if op not in given]
  return [
    Assign(
      [v for op in ops for v in op.variables],
      [x for op in ops for x in op.inputs],
      assign_fn=assign_fn,
    )
    for assign_fn, ops in groups.items()
  ]


provide(combine_assignments=_combine_assignments)
