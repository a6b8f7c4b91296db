"""Images and volumes with more positions: nearest and linear interpolation."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, ShapeError
from mesh_tensorflow.operations.binary import add, multiply
from mesh_tensorflow.operations.comparison import equal
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reduction import broadcast
from mesh_tensorflow.operations.reshape import replace_dimensions
from mesh_tensorflow.operations.shift import shift
from mesh_tensorflow.program.argument_kinds import FloatTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor

__all__ = ["upsample"]


def upsample(x: FloatTensor, factors: Sequence[int], method: str = "nearest") -> Tensor:
  """Interpolation to more positions along each spatial dimension.

  "nearest" repeats each position. "linear" is what `tf.image.resize` calls bilinear: positions are
  the centers of cells, and beyond the first and the last center the image is constant. All
  dimensions may be split; for "linear" one position on each side is exchanged.

  Args:
    x: [batch..., space..., channels], as many dimensions of space as factors.
    factors: how many positions each becomes, along each spatial dimension.
    method: "nearest" or "linear".

  Returns:
    A `Tensor`; the spatial dimensions keep their names and have sizes times the factors.

  Raises:
    ConfigError: another method.
    ShapeError: x has too few dimensions, or a factor is below 1.
  """
  if method not in ("nearest", "linear"):
    raise ConfigError(f"upsample of {x}: method must be 'nearest' or 'linear', got {method!r}")
  factors = [operator.index(f) for f in factors]
  if not factors or min(factors) < 1 or x.shape.ndims < len(factors) + 1:
    raise ShapeError(
      f"upsample of {x}: factors must be numbers of at least 1 for spatial dimensions that stand "
      f"before one of channels, got {factors}"
    )
  # One axis after the other: the interpolation of several is the product of those of each.
  for d, factor in zip(x.shape.dims[-len(factors) - 1 : -1], factors):
    if factor > 1:
      x = _along(x, d, factor, method)
  return x


def _along(x: Tensor, dim: Dimension, factor: int, method: str) -> Tensor:
  part = Dimension("_upsampled", factor)
  dims = x.shape.dims
  axis = dims.index(dim)
  wide = Shape([*dims[: axis + 1], part, *dims[axis + 1 :]])
  if method == "nearest":
    y = broadcast(x, wide)
  else:
    # Position r of the cell i has its center at i + place; what it takes of i - 1, i and i + 1.
    places = [(r + 0.5) / factor - 0.5 for r in range(factor)]
    weights = [[max(-p, 0.0), 1.0 - abs(p), max(p, 0.0)] for p in places]
    before, here, after = (
      constant(x.mesh, [w[k] for w in weights], Shape([part]), x.dtype) for k in range(3)
    )
    neighbours = [(_moved(x, dim, 1), before), (x, here), (_moved(x, dim, -1), after)]
    first, second, third = (multiply(t, w, output_shape=wide) for t, w in neighbours)
    y = add(add(first, second), third)
  return replace_dimensions(y, [dim, part], Dimension(dim.name, dim.size * factor))


def _moved(x: Tensor, dim: Dimension, offset: int) -> Tensor:
  """Each position gets what its neighbour has; that at the end keeps its own."""
  end = 0 if offset > 0 else dim.size - 1
  is_end = cast(equal(mtf_range(x.mesh, dim, tf.int32), end), x.dtype)
  return add(shift(x, offset, dim, wrap=False), multiply(x, is_end, output_shape=x.shape))
