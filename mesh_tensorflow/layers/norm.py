"""Layer, batch, group and instance normalization, over space that may be split."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import DimensionError, SizeError
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.numerics.initializers import InitializerLike
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast, rsqrt, square
from mesh_tensorflow.operations.norms import standardize
from mesh_tensorflow.operations.reduction import reduce_mean
from mesh_tensorflow.operations.variables import VariableDType, assign, get_variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import FloatTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["batch_norm", "group_norm", "instance_norm", "layer_norm"]


def layer_norm(
  x: FloatTensor, dim: Dimension, epsilon: float = 1e-6, name: str = "layer_prepostprocess"
) -> Tensor:
  """(x - mean) / sqrt(variance + epsilon) * scale + bias, over one dimension.

  Ba, Kiros and Hinton, 2016 (arXiv:1607.06450). Variables, both [dim]:
  `{name}/layer_norm/layer_norm_scale` (ones) and `.../layer_norm_bias` (zeros).

  Args:
    x: a floating `Tensor`.
    dim: the dimension to normalize over; may be split.
    epsilon: added to the (population) variance.
    name: name of the scope around `layer_norm`.

  Returns:
    A `Tensor` of x's shape.

  Raises:
    DimensionError: `dim` is not in x.
  """
  # Kept in float32 whatever the activations are: updates of a scale near 1 are lost in bfloat16.
  dtype = VariableDType(tf.float32, tf.float32, x.dtype)
  with scope.variable_scope(f"{name}/layer_norm"):
    scale = get_variable(
      x.mesh, "layer_norm_scale", Shape([dim]), dtype=dtype, initializer=initializers.Ones()
    )
    bias = get_variable(
      x.mesh, "layer_norm_bias", Shape([dim]), dtype=dtype, initializer=initializers.Zeros()
    )
  return einsum([standardize(x, dim, epsilon), scale], output_shape=x.shape) + bias


def batch_norm(
  x: Tensor,
  is_training: bool,
  momentum: float,
  epsilon: float | Tensor = 1e-9,
  dims_idx_start: int | None = 0,
  dims_idx_end: int | None = -1,
  init_zero: bool = False,
  name: str | None = None,
) -> tuple[Tensor, list[Operation]]:
  """Normalizes over the dimensions [dims_idx_start:dims_idx_end] of x.

  Ioffe and Szegedy, 2015 (arXiv:1502.03167). Variables, of the remaining dimensions, in
  scope `{name}`: `batch_norm_scale`, `batch_norm_bias`, and (not trained)
  `bn_moving_mean` and `bn_moving_variance`.

  Args:
    x: a floating `Tensor`.
    is_training: use the statistics of x and update the moving ones; else use those.
    momentum: moving <- momentum * moving + (1 - momentum) * batch.
    epsilon: added to the (population) variance.
    dims_idx_start: first dimension to normalize over.
    dims_idx_end: the dimension after the last.
    init_zero: whether the scale starts at 0, not 1.
    name: name of the scope; `batch_norm`, made unique, by default.

  Returns:
    A `Tensor` of x's shape, and the two operations that update the moving statistics ([]
    when not training). They run with the graph, as every assignment does.

  Raises:
    DimensionError: there is nothing to normalize over.
  """
  reduced = x.shape.dims[dims_idx_start:dims_idx_end]
  if not reduced:
    raise DimensionError(
      f"batch_norm: [{dims_idx_start}:{dims_idx_end}] selects no dimension of {x}"
    )
  kept = x.shape - reduced

  def variable(variable_name: str, initializer: InitializerLike, trainable: bool) -> Tensor:
    return get_variable(
      x.mesh,
      variable_name,
      kept,
      dtype=VariableDType(tf.float32, tf.float32, x.dtype if trainable else tf.float32),
      initializer=initializer,
      trainable=trainable,
    )

  ones, zeros = initializers.Ones(), initializers.Zeros()
  with scope.variable_scope(name, default_name="batch_norm", graph=x.graph):
    scale = variable("batch_norm_scale", zeros if init_zero else ones, True)
    bias = variable("batch_norm_bias", zeros, True)
    moving_mean = variable("bn_moving_mean", initializers.RandomNormal(), False)
    moving_variance = variable("bn_moving_variance", ones, False)

  updates: list[Operation] = []
  if is_training:
    mean = reduce_mean(x, output_shape=kept)
    centered = x - mean
    # From centered values: mean(x ** 2) - mean(x) ** 2 would cancel where the mean is large.
    variance = reduce_mean(square(centered), output_shape=kept)
    for moving, batch, what in (
      (moving_mean, mean, "bn_mean_update"),
      (moving_variance, variance, "bn_var_update"),
    ):
      # In float32: with a momentum of 0.999 a step in bfloat16 would be rounded away.
      new = moving * momentum + cast(batch, tf.float32) * (1.0 - momentum)
      updates.append(assign(moving, new, name=f"{name}/{what}"))
  else:
    centered = x - cast(moving_mean, x.dtype)
    variance = cast(moving_variance, x.dtype)
  y = einsum([centered, rsqrt(variance + epsilon), scale], output_shape=x.shape) + bias
  return y, updates


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
