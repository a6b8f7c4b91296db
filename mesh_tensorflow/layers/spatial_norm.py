"""Group and instance normalization of images and volumes, over space that may be split."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import DimensionError, SizeError
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast, rsqrt, square
from mesh_tensorflow.operations.reduction import reduce_mean
from mesh_tensorflow.operations.variables import VariableDType, get_variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import FloatTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Tensor

__all__ = ["group_norm", "instance_norm"]


def group_norm(
  x: FloatTensor,
  groups: int,
  dim: DimensionLike | None = None,
  batch_dims: Sequence[DimensionLike] | None = None,
  epsilon: float = 1e-5,
  name: str | None = None,
) -> Tensor:
  """Normalizes each example over its space and the channels of a group.

  (x - mean) / sqrt(variance + epsilon) * scale + bias. Wu and He, 2018 (arXiv:1803.08494).
  Variables, both of the channels: `{name}/scale` (ones) and `{name}/bias` (zeros).

  Args:
    x: a floating `Tensor`. All dimensions may be split, the channels through groups too.
    groups: number of groups; neighbouring channels are of one.
    dim: the channels; the last dimension by default.
    batch_dims: dimensions of examples; the first one by default. All others are space.
    epsilon: added to the (population) variance.
    name: name of the scope; `group_norm`, made unique, by default.

  Returns:
    A `Tensor` of x's shape.

  Raises:
    SizeError: `groups` does not divide the channels.
    DimensionError: x has not the dimensions, or there is nothing to normalize over.
  """
  channels = x.shape.dims[-1] if dim is None else convert_to_dimension(dim)
  groups = operator.index(groups)
  if groups < 1 or channels.size % groups:
    raise SizeError(
      f"group_norm of {x}: groups must divide the channels {channels.name}={channels.size}, got "
      f"{groups}"
    )
  return _normalized(x, groups, channels, batch_dims, epsilon, name, "group_norm")


def instance_norm(
  x: FloatTensor,
  dim: DimensionLike | None = None,
  batch_dims: Sequence[DimensionLike] | None = None,
  epsilon: float = 1e-5,
  name: str | None = None,
) -> Tensor:
  """Normalizes each channel of each example over its space; otherwise as `group_norm`.

  Ulyanov, Vedaldi and Lempitsky, 2016 (arXiv:1607.08022).
  """
  channels = x.shape.dims[-1] if dim is None else convert_to_dimension(dim)
  return _normalized(x, channels.size, channels, batch_dims, epsilon, name, "instance_norm")


def _normalized(
  x: Tensor,
  groups: int,
  channels: Dimension,
  batch_dims: Sequence[DimensionLike] | None,
  epsilon: float,
  name: str | None,
  layer: str,
) -> Tensor:
  batch = x.shape.dims[:1] if batch_dims is None else [convert_to_dimension(d) for d in batch_dims]
  for d in (*batch, channels):
    if d not in x.shape:
      raise no_such_dimension(layer, d, x)
  if channels in batch:
    raise DimensionError(f"{layer} of {x}: {channels.name} is of examples and of channels")
  if x.shape.ndims == len(batch) + 1 and groups == channels.size:
    raise DimensionError(f"{layer} of {x}: there is nothing to normalize over")
  kept = Shape([*batch, channels])
  # In float32: sums over many positions.
  wide = cast(x, tf.float32) if x.dtype.size < 4 else x
  centered = wide - _means(wide, kept, channels, groups)
  variance = _means(square(centered), kept, channels, groups)
  with scope.variable_scope(name, default_name=layer, graph=x.graph):
    dtype = VariableDType(tf.float32, tf.float32, wide.dtype)
    scale, bias = (
      get_variable(x.mesh, n, Shape([channels]), dtype=dtype, initializer=initializer)
      for n, initializer in (("scale", initializers.Ones()), ("bias", initializers.Zeros()))
    )
  y = einsum([centered, rsqrt(variance + epsilon), scale], output_shape=x.shape) + bias
  return cast(y, x.dtype)


def _means(x: Tensor, kept: Shape, channels: Dimension, groups: int) -> Tensor:
  """Mean of the group of each example and channel."""
  means = reduce_mean(x, output_shape=kept) if x.shape.ndims > kept.ndims else x
  if groups == channels.size:
    return means
  # A product with a matrix, not a reshape: a layout may split the channels through a group.
  group, size = Dimension("_norm_groups", groups), channels.size // groups
  member = np.repeat(np.eye(groups, dtype=np.float32), size, axis=0)
  belongs = cast(constant(x.mesh, member, Shape([channels, group]), tf.float32), x.dtype)
  of_groups = einsum([means, belongs * (1.0 / size)], output_shape=kept - channels + group)
  return einsum([of_groups, belongs], output_shape=kept)
