"""`mtf.keras.parallelize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import ArgumentError
from mesh_tensorflow.keras.layouts import rules_by_hand
from mesh_tensorflow.keras.meshes import check_same_mesh, convert_to_mesh, is_distribution
from mesh_tensorflow.keras.parallel_model import ParallelModel
from mesh_tensorflow.keras.programs import Programs
from mesh_tensorflow.keras.steps import check_model


@checked
def parallelize(
  model: Any,
  mesh_impl_or_shape: Any = None,
  layout: Any = "auto",
  dims: Mapping[str, Sequence[str | None]] | None = None,
  *,
  fallback: str = "replicate",
) -> ParallelModel:
  """A Keras model that trains, evaluates and predicts split over a mesh of devices.

  The model is as it is: nothing of it is written anew, no layer is replaced. Its step is traced by
  TensorFlow and becomes a program on named dimensions (`mtf.from_tensorflow`), which any layout
  may split: batches, weights, heads, images. Losses, metrics, optimizers, schedules, callbacks and
  the loop are Keras' own.

  Args:
    model: a keras.Model; compiled, or to be compiled by the `compile` of what is returned.
    mesh_impl_or_shape: a mesh implementation; a mesh shape ("rows:2,cols:2", {"rows": 2}); a number
      of devices, or a list of their names: an automatic layout then chooses the shape; or a
      `keras.distribution.DeviceMesh`, `ModelParallel` or `DataParallel`. By default what
      `keras.distribution.set_distribution` has set.
    layout: "auto" (a mesh implementation with layout rules keeps them; a distribution is a layout
      itself; else `mtf.auto_layout` searches, at the first batch); layout rules over the names that
      `dimensions` has; or a `keras.distribution.LayoutMap`, `ModelParallel` or `DataParallel`.
    dims: names of dimensions, as of `mtf.from_tensorflow`; the arguments are called "inputs",
      "targets" and "sample_weight", and their first axis "batch".
    fallback: "replicate" (each device computes operations without a rule whole, with a warning) or
      "error"; see `mtf.from_tensorflow`.

  Returns:
    A `ParallelModel`.

  Raises:
    ArgumentError: the model is no Keras model on TensorFlow, or the mesh is none.
    LayoutError: the layout is for another mesh. A rule for a dimension that there is not is told at
      the first batch.
    MeshShapeError: the mesh has no devices, or two dimensions of one name.
  """
  check_model(model)
  if mesh_impl_or_shape is None:
    mesh_impl_or_shape = keras.distribution.distribution()
    if mesh_impl_or_shape is None and is_distribution(layout):
      mesh_impl_or_shape = layout
    if mesh_impl_or_shape is None:
      raise ArgumentError(
        "parallelize: give a mesh, as 'rows:2,cols:2', or set a keras.distribution before"
      )
  mesh = convert_to_mesh(mesh_impl_or_shape)
  if layout is None:
    layout = ""
  if isinstance(layout, str) and layout == "auto" and is_distribution(mesh_impl_or_shape):
    layout = mesh_impl_or_shape
  if is_distribution(layout):
    check_same_mesh(mesh, layout)
  else:
    rules_by_hand(mesh, layout)
  if fallback not in ("error", "replicate"):
    raise ArgumentError(f"parallelize: fallback is 'error' or 'replicate', got {fallback!r}")
  return ParallelModel(Programs(model, mesh, layout, dims or {}, fallback))
