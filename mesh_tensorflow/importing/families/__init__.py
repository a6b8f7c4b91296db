"""The rules of operations, one file for each family; importing a file registers its rules."""

from mesh_tensorflow.importing.families import (  # noqa: F401 - they register rules
  batch_norm,
  batched,
  contraction,
  control_flow,
  convolutions,
  custom_gradients,
  elementwise,
  fourier,
  gathers,
  images,
  list_access,
  pooling,
  random,
  reductions,
  shapes,
  slicing,
  softmax,
  state,
  taken_gradients,
)
