"""Statistics along a dimension: correlation, means of groups."""

from __future__ import annotations

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import reciprocal, sqrt, square
from mesh_tensorflow.operations.reduction import reduce_mean, reduce_sum
from mesh_tensorflow.operations.reshape import rename_dimension, replace_dimensions
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Tensor

__all__ = ["compress_mean", "corr"]


def corr(
  x: Tensor, dim: DimensionLike, epsilon: float | Tensor = 1e-20, name: str = "pearson_correlation"
) -> Tensor:
  """Pearson correlation of the indices of a dimension, over all other dimensions.

  Args:
    x: a floating `Tensor`.
    dim: the dimension whose indices are compared; anywhere in x.
    epsilon: added to the norms.
    name: name of the last operation.

  Returns:
    A `Tensor` [`{dim}_1`, `{dim}_2`], symmetric, with values in -1..1.

  Raises:
    DimensionError: `dim` is not in x.
  """
  dim = convert_to_dimension(dim)
  if dim not in x.shape:
    raise no_such_dimension(f"corr {name}", dim, x)
  kept = Shape([dim])
  centered = x - reduce_mean(x, output_shape=kept)
  norm = sqrt(reduce_sum(square(centered), output_shape=kept)) + epsilon
  unit = einsum([centered, reciprocal(norm)], output_shape=x.shape)
  # Under two names, or the product would have each index with itself only.
  first, second = (rename_dimension(unit, dim.name, f"{dim.name}_{i}") for i in (1, 2))
  output_dims = [Dimension(f"{dim.name}_{i}", dim.size) for i in (1, 2)]
  return einsum([first, second], output_shape=Shape(output_dims), name=name)


def compress_mean(x: Tensor, dim: DimensionLike, compression_factor: int) -> Tensor:
  """Means of groups of neighbours along a dimension.

  Args:
    x: a floating `Tensor`.
    dim: the dimension; the result has its name and 1 / compression_factor of its size.
    compression_factor: size of a group.

  Returns:
    A `Tensor`.

  Raises:
    ShapeError: the factor does not divide the size.
  """
  dim = convert_to_dimension(dim)
  if compression_factor < 1 or dim.size % compression_factor:
    raise ShapeError(
      f"compress_mean: dimension {dim.name}={dim.size} of {x} is not divisible by the "
      f"compression factor {compression_factor}"
    )
  # The groups keep the name, and so the layout.
  groups = Dimension(dim.name, dim.size // compression_factor)
  group = Dimension("compression_factor", compression_factor)
  return reduce_mean(replace_dimensions(x, dim, [groups, group]), reduced_dim=group)
