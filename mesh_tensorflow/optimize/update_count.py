"""Number of updates that an optimizer has made, for bias corrections and moving averages."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.assignments import assign_add
from mesh_tensorflow.operations.constants import ones_like
from mesh_tensorflow.operations.variables import get_variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor


def update_count(mesh: Mesh, name: str) -> tuple[Tensor, list[Operation]]:
  """The number of updates that came before the one of this graph.

  It is a variable of its own, not the global step: slots that begin with zeros in a training that
  goes on from a checkpoint without them are at their first update, whatever its step.

  Args:
    mesh: a `Mesh`.
    name: name of the untrainable int64 variable, within the open variable scope.

  Returns:
    The count, as it is before this graph's update; and, when a graph asks for it first, the
    operation that counts this update, in a list.
  """
  is_counted = scope.full_variable_name(name) in mesh.graph.name_to_variable
  count = get_variable(
    mesh, name, [], dtype=tf.int64, initializer=initializers.Zeros(), trainable=False
  )
  if is_counted:
    return count, []
  return count, [assign_add(count, ones_like(count))]
