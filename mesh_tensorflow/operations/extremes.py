"""Gradients of maxima and minima over dimensions."""

from __future__ import annotations

from mesh_tensorflow.operations.comparison import equal
from mesh_tensorflow.operations.reduction import add_gradient
from mesh_tensorflow.operations.where import where
from mesh_tensorflow.program.graph import Tensor


def _gradient(dy: Tensor, x: Tensor, y: Tensor) -> Tensor:
  """Gradient of an extreme: dy where x equals y, else 0; equal elements each get all of dy."""
  return where(equal(x, y, output_shape=x.shape), dy, 0.0, output_shape=x.shape)


add_gradient("MAX", _gradient)
add_gradient("MIN", _gradient)
