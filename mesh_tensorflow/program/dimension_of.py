"""Dimensions that are given themselves, or by their names."""

from __future__ import annotations

from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Tensor


def dimension_of(what: str, dim: DimensionLike | str, owner: Shape | Tensor) -> Dimension:
  """The dimension of a shape that is given itself, or by its name.

  Args:
    what: name of the operation or function, for the error.
    dim: the dimension, or its name.
    owner: the `Shape`, or the tensor, that has it.

  Raises:
    DimensionError: there is no such dimension.
  """
  shape = owner if isinstance(owner, Shape) else owner.shape
  if isinstance(dim, str):
    found = next((d for d in shape if d.name == dim), None)
  else:
    dim = convert_to_dimension(dim)
    found = dim if dim in shape else None
  if found is None:
    raise no_such_dimension(what, dim, owner)
  return found
