"""Separable convolution along one dimension: each channel for itself, then all channels."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.layers.dense import VarianceScalingInitializer, dense
from mesh_tensorflow.operations.binary import add_n
from mesh_tensorflow.operations.shift import shift
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import NumberTensor
from mesh_tensorflow.program.dimensions import Dimension, DimensionLike, convert_to_dimension
from mesh_tensorflow.program.graph import Tensor

__all__ = ["separable_conv1d"]


def separable_conv1d(
  x: NumberTensor,
  output_dim: DimensionLike,
  min_relative_pos: int = -1,
  max_relative_pos: int = 1,
  depthwise_filter_initializer_scale: float = 1.0,
  pointwise_filter_initializer_scale: float = 1.0,
  name: str | None = None,
  use_bias: bool = True,
  kernel_depth_weights: Sequence[Tensor] | None = None,
) -> Tensor:
  """A depthwise convolution along the length, then a dense layer over the channels.

  Variables, for offset number i: `{name}/depthwise_conv_hack/depthwise_dense_{i}/kernel` [depth];
  with a bias also `{name}/depthwise_conv_hack/depthwise_dense_0/bias` [depth]; then
  `{name}/pointwise_dense/kernel` [depth, out] and `.../bias` [out].

  Args:
    x: a `Tensor` [batch..., length, depth]. All dimensions may be split over the mesh: of a
      split length, neighbours exchange what the offsets reach.
    output_dim: the new last dimension.
    min_relative_pos: the first offset r: y[t] depends on x[t + r].
    max_relative_pos: the last offset.
    depthwise_filter_initializer_scale: variance of the depthwise weights times their number.
    pointwise_filter_initializer_scale: variance of the pointwise weights times the depth.
    name: name of the scope; `separable_conv1d`, made unique, by default.
    use_bias: whether both parts have a bias.
    kernel_depth_weights: a list of `Tensor`s [depth], one for each offset, in place of the
      depthwise kernels.

  Returns:
    A `Tensor` [batch..., length, out].

  Raises:
    ShapeError: the offsets are in the wrong order, or not as many as `kernel_depth_weights`.
  """
  if x.shape.ndims < 2:
    raise ShapeError(f"separable_conv1d needs dimensions [batch..., length, depth], got {x}")
  *_, length_dim, depth_dim = x.shape.dims
  with scope.variable_scope(name, default_name="separable_conv1d", graph=x.graph):
    y = _depthwise_conv1d_hack(
      x,
      depth_dim,
      length_dim,
      min_relative_pos=min_relative_pos,
      max_relative_pos=max_relative_pos,
      use_bias=use_bias,
      initializer_scale=depthwise_filter_initializer_scale,
      kernel_depth_weights=kernel_depth_weights,
    )
    return dense(
      y,
      convert_to_dimension(output_dim),
      reduced_dims=[depth_dim],
      use_bias=use_bias,
      kernel_initializer=VarianceScalingInitializer(scale=pointwise_filter_initializer_scale),
      name="pointwise_dense",
    )


def _depthwise_conv1d_hack(
  x: Tensor,
  depth_dim: Dimension,
  length_dim: Dimension,
  min_relative_pos: int = -1,
  max_relative_pos: int = 1,
  name: str | None = None,
  use_bias: bool = True,
  initializer_scale: float = 1.0,
  kernel_depth_weights: Sequence[Tensor] | None = None,
) -> Tensor:
  """y[t] = sum over r of w_r * x[t + r], elementwise along `depth_dim`; zeros beyond the ends.

  Variables: see `separable_conv1d`; its part in the scope `depthwise_conv_hack`.

  Args:
    x: a `Tensor`.
    depth_dim: the dimension of the weights.
    length_dim: the dimension along which x is shifted.
    min_relative_pos: the first offset r.
    max_relative_pos: the last offset.
    name: name of the scope; `depthwise_conv_hack`, made unique, by default.
    use_bias: whether a bias is added.
    initializer_scale: variance of the weights times their number.
    kernel_depth_weights: a list of weights [depth_dim], one for each offset, or None.

  Raises:
    ShapeError: see `separable_conv1d`.
  """
  offsets = range(min_relative_pos, max_relative_pos + 1)
  if not offsets:
    raise ShapeError(
      f"separable convolution of {x}: min_relative_pos {min_relative_pos} must not be larger than "
      f"max_relative_pos {max_relative_pos}"
    )
  if kernel_depth_weights is not None and len(kernel_depth_weights) != len(offsets):
    raise ShapeError(
      f"separable convolution of {x}: {len(kernel_depth_weights)} kernel_depth_weights are given "
      f"for {len(offsets)} offsets, {min_relative_pos} to {max_relative_pos}"
    )
  with scope.variable_scope(name, default_name="depthwise_conv_hack", graph=x.graph):
    total: Tensor = add_n(
      [
        dense(
          shift(x, -offset, length_dim, wrap=False) if offset else x,
          new_dims=[],
          reduced_dims=[],
          expert_dims=[depth_dim],
          use_bias=use_bias and i == 0,
          # Nothing is reduced, so the fan-in is 1; what is summed up are the offsets.
          kernel_initializer=VarianceScalingInitializer(scale=initializer_scale / len(offsets)),
          kernel_weights=None if kernel_depth_weights is None else kernel_depth_weights[i],
          name=f"depthwise_dense_{i}",
        )
        for i, offset in enumerate(offsets)
      ]
    )
    return total
