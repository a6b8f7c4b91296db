"""The training step as a tensor of the graph."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow import initializers, scope
from mesh_tensorflow.graph import Mesh, Tensor
from mesh_tensorflow.operations.variables import get_variable


def get_global_step(mesh: Mesh) -> Tensor:
  """The number of training steps done so far.

  Args:
    mesh: a `Mesh`.

  Returns:
    `mesh.graph.global_step` if that is set; else the value of the untrainable int64
    variable `global_step`, which starts at 0. Who trains counts it up
    (`mtf.assign_add`).
  """
  step = mesh.graph.global_step
  if step is not None:
    return step
  with scope.outside_all_scopes():
    return get_variable(
      mesh,
      "global_step",
      [],
      dtype=tf.int64,
      initializer=initializers.Zeros(),
      trainable=False,
    )
