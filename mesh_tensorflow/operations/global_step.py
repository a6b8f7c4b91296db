"""The training step as a tensor of the graph."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import GraphError
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.constants import ones_like
from mesh_tensorflow.operations.variables import Assign, assign_add, get_variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.graph import Graph, Mesh, Operation, Tensor

_NAME = "global_step"


@checked
def get_global_step(mesh: Mesh) -> Tensor:
  """The number of training steps done so far.

  Args:
    mesh: a `Mesh`.

  Returns:
    `mesh.graph.global_step` if that is set; else the value of the untrainable int64
    variable `global_step`, which starts at 0. `Optimizer.minimize` counts it up; who calls
    `apply_grads` does so with `count_global_step`.
  """
  step = mesh.graph.global_step
  if step is not None:
    return step
  # One for all, whoever asks for it inside whatever scope.
  with scope.outside_all_scopes(), scope.variable_scope("", reuse=scope.AUTO_REUSE):
    return get_variable(
      mesh,
      _NAME,
      [],
      dtype=tf.int64,
      initializer=initializers.Zeros(),
      trainable=False,
    )


@checked
def count_global_step(graph: Graph) -> list[Operation]:
  """Adds 1 to the variable `global_step` in each step; creates it if the graph has none.

  Args:
    graph: a `Graph` that has operations.

  Returns:
    The `Assign` operation in a list; [] where `graph.global_step` stands in the variable's place,
    or where the graph assigns to it already (`Optimizer.minimize` does, if something reads it).

  Raises:
    GraphError: the graph has no operation, so no mesh for the variable.
  """
  if graph.global_step is None and _NAME not in graph.name_to_variable:
    if not graph.operations:
      raise GraphError(
        "count_global_step: the graph has no operations, so there is no mesh for the variable "
        f"{_NAME!r}; call it after the program is built, or get_global_step(mesh) first"
      )
    of = graph.trainable_variables or graph.operations
    get_global_step(of[0].mesh)
  return count_global_step_if_there(graph)


def count_global_step_if_there(graph: Graph) -> list[Operation]:
  """Like `count_global_step`, but creates no variable: [] if nothing has read the step.

  Args:
    graph: a `Graph`.
  """
  variable = graph.name_to_variable.get(_NAME)
  if graph.global_step is not None or variable is None:
    return []
  if any(isinstance(op, Assign) and variable in op.variables for op in graph.operations):
    return []
  return [assign_add(variable, ones_like(variable.value))]
