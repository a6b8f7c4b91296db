"""The training step as a tensor of the graph."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.assignments import Assign, assign_add
from mesh_tensorflow.operations.constants import ones_like
from mesh_tensorflow.operations.variables import get_variable
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
  """Adds 1 to the variable `global_step`, if the graph has it and does not count it yet.

  Args:
    graph: a `Graph`.

  Returns:
    The `Assign` operation in a list; [] where no schedule or decay rate reads the variable,
    where `graph.global_step` stands in its place, or where the graph assigns to it already.
  """
  variable = graph.name_to_variable.get(_NAME)
  if graph.global_step is not None or variable is None:
    return []
  if any(isinstance(op, Assign) and variable in op.variables for op in graph.operations):
    return []
  return [assign_add(variable, ones_like(variable.value))]
