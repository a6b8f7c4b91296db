"""Graph and Mesh: a program, before any layout.

A `Graph` is a list of operations on named-dimension tensors. Nothing is computed
here; `mtf.Lowering` does that for one layout and one mesh.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import gin

from mesh_tensorflow import scope
from mesh_tensorflow.arguments import checked
from mesh_tensorflow.errors import ArgumentError, GraphError
from mesh_tensorflow.operation import Operation
from mesh_tensorflow.tensor import Tensor
from mesh_tensorflow.tf_scopes import ScopesOfVariables

if TYPE_CHECKING:  # It imports this module.
  from mesh_tensorflow.operations.variables import Variable

__all__ = ["Graph", "Mesh", "Operation", "Tensor"]


class Graph:
  """A list of operations, in the order of their creation."""

  def __init__(self):
    self._operations: list[Operation] = []
    self._trainable_variables: list[Any] = []
    self._all_variables: list[Any] = []
    self._names_in_use: dict[str, int] = {}
    self.name_to_variable: dict[str, Any] = {}
    self.root_scope = scope.VariableScope("")
    self.captured_variable_scope = scope.get_variable_scope()
    self.tf_scopes = ScopesOfVariables()
    # What random operations depend on, besides their names: an int, or a scalar Tensor
    # (the step, say); None: each run draws new numbers.
    self.random_seed: int | Tensor | None = None
    # The training step, for optimizers and schedules: a scalar Tensor, or None.
    self.global_step: Tensor | None = None

  @property
  def operations(self) -> list[Operation]:
    """The live list of operations."""
    return self._operations

  @property
  def trainable_variables(self) -> list[Any]:
    """The live list of trainable `Variable` operations."""
    return self._trainable_variables

  @property
  def all_variables(self) -> list[Any]:
    """The live list of all `Variable` operations."""
    return self._all_variables

  @property
  def to_string(self) -> str:
    """One line of text for each operation."""
    return "\n".join(op.to_string for op in self._operations)

  def __repr__(self) -> str:
    return self.to_string

  def unique_name(self, name: str, mark_as_used: bool = True) -> str:
    """A name not used in this graph: `name`, or `name_1`, `name_2`, ...

    The open variable scope is put in front. Names that differ only in case count
    as equal.
    """
    if not isinstance(name, str) or not isinstance(mark_as_used, int):
      raise ArgumentError(
        f"unique_name takes a string, and True or False, got {name!r} and {mark_as_used!r}"
      )
    prefix = scope.current_scope_name()
    if prefix:
      name = f"{prefix}/{name}"
    key = base = name.lower()
    i = self._names_in_use.get(key, 0)
    if mark_as_used:
      self._names_in_use[key] = i + 1
    if i > 0:
      while key in self._names_in_use:
        key = f"{base}_{i}"
        i += 1
      if mark_as_used:
        self._names_in_use[key] = 1
      name = f"{name}_{i - 1}"
    return name

  def register_variable(self, variable: Any) -> None:
    """Enters a `Variable` operation into the lists of variables."""
    self._all_variables.append(variable)
    if variable.trainable:
      self._trainable_variables.append(variable)
    self.name_to_variable[variable.full_name] = variable
    self.tf_scopes.made(variable.full_name, variable.trainable)

  @gin.configurable(module="mesh_tensorflow.ops")
  def rewrite_stack_variables(
    self,
    max_combined_variable_size: int = 2**29,
    max_combined_slice_size: int = 2**27,
    mesh_to_impl: Any = None,
  ) -> None:
    """Does nothing: it made TF1 graphs smaller and has no effect on values."""
    del max_combined_variable_size, max_combined_slice_size, mesh_to_impl

  @checked
  def combine_assignments(self, assignments: Sequence[Operation]) -> list[Operation]:
    """Joins `Assign` operations that have the same assign function into one each.

    The given operations leave the graph and the joined ones are appended to it.

    Args:
      assignments: `Assign` operations of this graph.

    Returns:
      One `Assign` for each assign function, in order of first appearance.

    Raises:
      GraphError: an element is not an `Assign`.
    """
    from mesh_tensorflow.operations.assignments import Assign  # operations import this module

    groups: dict[Any, list[Assign]] = {}
    for op in assignments:
      if not isinstance(op, Assign):
        raise GraphError(f"combine_assignments takes Assign operations, got {op!r}")
      groups.setdefault(op.assign_fn, []).append(op)
    given = set(assignments)
    self._operations[:] = [op for op in self._operations if op not in given]
    return [
      Assign(
        [v for op in ops for v in op.variables],
        [x for op in ops for x in op.inputs],
        assign_fn=assign_fn,
      )
      for assign_fn, ops in groups.items()
    ]

  @checked
  def make_variables_untrainable(self, variables: Iterable[Variable]) -> None:
    """Takes `Variable` operations out of `trainable_variables`."""
    variables = set(variables)
    for v in variables:
      v.make_untrainable()
    self._trainable_variables[:] = [v for v in self._trainable_variables if v not in variables]

  @checked
  def clone_operations(
    self, ops: Sequence[Operation], input_mapping: dict[Tensor, Tensor]
  ) -> tuple[list[Operation], dict[Tensor, Tensor]]:
    """Copies operations, replacing their inputs.

    Variables and random operations are not copied, so a recomputation sees the
    same weights and the same dropout masks.

    Args:
      ops: operations of this graph, in order.
      input_mapping: tensor -> tensor to use in its place.

    Returns:
      The copies, and the mapping extended by old output -> new output.

    Raises:
      GraphError: an output of `ops` is already a key of the mapping.
    """
    mapping = dict(input_mapping)
    clones = []
    for op in ops:
      if not op.is_cloneable:
        continue
      clone = copy.copy(op)
      clone._inputs = [mapping.get(x, x) for x in op.inputs]
      clone._outputs = []
      for i, x in enumerate(op.outputs):
        if x in mapping:
          raise GraphError(f"{x} is an output of {op.name} and a key of input_mapping")
        mapping[x] = Tensor(clone, x.shape, x.dtype, name=x.name, index=i)
        clone._outputs.append(mapping[x])
      self._operations.append(clone)
      clones.append(clone)
    return clones, mapping

  @checked
  def capture_operations(self, fn: Callable[[], Any]) -> tuple[Any, list[Operation]]:
    """Calls `fn()`; returns its result and the operations it added to the graph."""
    n = len(self._operations)
    result = fn()
    return result, self._operations[n:]


class Mesh:
  """A mesh of processors that a graph's tensors live on; its shape is given later.

  Args:
    graph: the `Graph`.
    name: a name for messages.
    variable_placer: kept for compatibility; slices live on their own devices.
  """

  @checked
  def __init__(self, graph: Graph, name: str, variable_placer: Any = None):
    self._graph = graph
    self._name = name
    self._variable_placer = variable_placer

  @property
  def graph(self) -> Graph:
    """The `Graph` to which it belongs."""
    return self._graph

  @property
  def variable_placer_fn(self) -> Any:
    """The function of the variable placer, or "cpu:0"; plays no part."""
    return "cpu:0" if self._variable_placer is None else self._variable_placer.device_function

  def __repr__(self) -> str:
    return f"Mesh({self._name!r})"
