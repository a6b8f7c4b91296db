"""Lightweight and dynamic convolutions (Wu et al., 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.layers import VarianceScalingInitializer
from mesh_tensorflow.numerics.initializers import InitializerLike
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer
from mesh_tensorflow.transformer.model.layers.conv_layers import SeparableConv1DLayer

_MODULE = "mesh_tensorflow.transformer.transformer_layers"


@gin.configurable(module=_MODULE)
@affects(training="depthwise_filter_initializer_scale pointwise_filter_initializer_scale")
@takes(output_size=COUNT, num_unique_depth_filters=COUNT)
class Conv1DLocalAttn(SeparableConv1DLayer):
  """Base class: a separable convolution whose depthwise weights are a softmax over positions.

  Args:
    min_relative_pos: the first relative position.
    max_relative_pos: the last relative position.
    output_size: size of the result's last dimension.
    depthwise_filter_initializer_scale: variance of the depthwise weights times their number.
    pointwise_filter_initializer_scale: variance of the pointwise weights times the input's size.
    activation: name of an mtf function, or "linear".
    num_unique_depth_filters: the channels are divided into so many groups, which have the same
      filters.

  Raises:
    ConfigError: num_unique_depth_filters does not divide output_size.
  """

  def __init__(
    self,
    min_relative_pos: int,
    max_relative_pos: int,
    output_size: int,
    depthwise_filter_initializer_scale: float = 1.0,
    pointwise_filter_initializer_scale: float = 1.0,
    activation: str = "linear",
    num_unique_depth_filters: int = 1,
  ):
    super().__init__(
      min_relative_pos,
      max_relative_pos,
      output_size,
      depthwise_filter_initializer_scale,
      pointwise_filter_initializer_scale,
      activation,
    )
    if output_size % num_unique_depth_filters:
      raise errors.ConfigError(
        f"{type(self).__name__}: num_unique_depth_filters (={num_unique_depth_filters}) must "
        f"divide output_size (={output_size})"
      )
    self._num_unique_depth_filters = num_unique_depth_filters

  def get_kernel_wt(
    self,
    x: mtf.Tensor,
    repeated_kernel_dim: list[mtf.Dimension],
    kernel_initializer: InitializerLike,
    i: int,
    context: Context,
    variable_dtype: mtf.VariableDType | tf.DType,
    master_dtype: tf.DType = tf.float32,
    slice_dtype: tf.DType = tf.float32,
  ) -> mtf.Tensor:
    """The weights of one relative position, before the softmax.

    Args:
      x: the layer's input.
      repeated_kernel_dim: a list of one dimension: the channels of one group.
      kernel_initializer: of the variable.
      i: number of the relative position.
      context: a `Context`.
      variable_dtype: of the variable.
      master_dtype: not used.
      slice_dtype: not used.

    Returns:
      `[repeated_kernel_dim]`, after the dims of x but the last if they depend on it.
    """
    del context, master_dtype, slice_dtype
    return self._kernel_weights(x, repeated_kernel_dim, kernel_initializer, i, variable_dtype)

  def _kernel_weights(
    self,
    x: mtf.Tensor,
    dims: list[mtf.Dimension],
    initializer: InitializerLike,
    i: int,
    dtype: mtf.VariableDType | tf.DType,
  ) -> mtf.Tensor:
    """Computes the result of `get_kernel_wt`; for subclasses to define."""
    raise NotImplementedError(f"{type(self).__name__} defines no get_kernel_wt")

  def call(
    self,
    context: Context,
    x: mtf.Tensor,
    losses: list[mtf.Tensor] | None = None,
    all_kernel_wts: Sequence[mtf.Tensor] | None = None,
  ) -> mtf.Tensor:
    """Applies the layer; see `SeparableConv1DLayer.call`."""
    if all_kernel_wts is None:
      all_kernel_wts = self._normalized_kernels(context, x)
    return super().call(context, x, losses, all_kernel_wts=all_kernel_wts)

  def _normalized_kernels(self, context: Context, x: mtf.Tensor) -> list[mtf.Tensor]:
    """For each relative position the weights, whose sum over relative positions is 1."""
    channels = x.shape[-1]
    groups = mtf.Dimension("_unique_depth_filters", self._num_unique_depth_filters)
    repeated = mtf.Dimension("repeated_kernel_dim", channels.size // groups.size)
    scale = (self._depthwise_filter_initializer_scale or 1.0) / self.filter_size
    initializer = VarianceScalingInitializer(scale=scale)
    weights = [
      self.get_kernel_wt(x, [repeated], initializer, i, context, context.variable_dtype)
      for i in range(self.filter_size)
    ]
    # A softmax over positions needs them in one tensor, on one processor.
    taps = mtf.Dimension("_taps", self.filter_size)
    normalized = mtf.softmax(mtf.stack(weights, taps.name), taps)
    if groups.size > 1:
      dims = normalized.shape.dims
      # The weights of one group, repeated for the others.
      normalized = mtf.einsum([normalized], output_shape=mtf.Shape(dims[:-1] + [groups, repeated]))
      normalized = mtf.replace_dimensions(normalized, [groups, repeated], channels)
    else:
      normalized = mtf.replace_dimensions(normalized, repeated, channels)
    kernels: list[mtf.Tensor] = mtf.unstack(normalized, taps)
    return kernels


@gin.configurable(module=_MODULE)
class LightweightConv1DLocalAttn(Conv1DLocalAttn):
  """A lightweight convolution: the weights are variables.

  Variables besides those of `SeparableConv1DLayer`: `lightwt_depthwise_dense_<i>/kernel`
  [repeated_kernel_dim].
  """

  def _kernel_weights(
    self,
    x: mtf.Tensor,
    dims: list[mtf.Dimension],
    initializer: InitializerLike,
    i: int,
    dtype: mtf.VariableDType | tf.DType,
  ) -> mtf.Tensor:
    name = f"lightwt_depthwise_dense_{i}"
    return mtf.layers.get_dense_kernel_weights(
      x, [], [], dims, initializer, name=name, variable_dtype=dtype
    )


@gin.configurable(module=_MODULE)
class DynamicConv1DLocalAttn(Conv1DLocalAttn):
  """A dynamic convolution: the weights at a position are computed from its input.

  Variables besides those of `SeparableConv1DLayer`: `dyn_conv_depthwise_dense_<i>/kernel` [d_model,
  repeated_kernel_dim] and `.../bias` [repeated_kernel_dim].
  """

  def _kernel_weights(
    self,
    x: mtf.Tensor,
    dims: list[mtf.Dimension],
    initializer: InitializerLike,
    i: int,
    dtype: mtf.VariableDType | tf.DType,
  ) -> mtf.Tensor:
    return mtf.layers.dense(
      x,
      dims,
      reduced_dims=x.shape.dims[-1:],
      variable_dtype=dtype,
      kernel_initializer=initializer,
      name=f"dyn_conv_depthwise_dense_{i}",
    )


_ATTENTION_TYPES = {
  "lightweight_conv": LightweightConv1DLocalAttn,
  "dynamic_conv": DynamicConv1DLocalAttn,
}


@gin.configurable(module=_MODULE)
@affects(training="depthwise_filter_initializer_scale pointwise_filter_initializer_scale")
@takes(output_size=COUNT, num_unique_depth_filters=COUNT)
class LocalConvAttnBlock(TransformerLayer):
  """A gated dense layer, a lightweight or dynamic convolution, and a dense layer.

  Variables: `local_conv_inp_0`, `local_conv_inp_1` and `local_conv_attn_op_projection`, each with
  `kernel` [_d_model, d_model] and `bias` [d_model], and those of the convolution.

  Args:
    min_relative_pos: the first relative position.
    max_relative_pos: the last relative position.
    output_size: size of the convolution's last dimension.
    depthwise_filter_initializer_scale: variance of the depthwise weights times their number.
    pointwise_filter_initializer_scale: variance of the pointwise weights times the input's size.
    activation: name of an mtf function, or "linear".
    num_unique_depth_filters: not used: the convolution has one group of filters, as in existing
      checkpoints.
    attention_type: "lightweight_conv" or "dynamic_conv".

  Raises:
    UnsupportedError: attention_type is not known.
  """

  def __init__(
    self,
    min_relative_pos: int,
    max_relative_pos: int,
    output_size: int,
    depthwise_filter_initializer_scale: float = 1.0,
    pointwise_filter_initializer_scale: float = 1.0,
    activation: str = "linear",
    num_unique_depth_filters: int = 1,
    attention_type: str = "lightweight_conv",
  ):
    del num_unique_depth_filters
    if attention_type not in _ATTENTION_TYPES:
      raise errors.UnsupportedError(
        f"LocalConvAttnBlock: attention_type must be one of {', '.join(_ATTENTION_TYPES)}, got "
        f"{attention_type!r}"
      )
    self.output_size = output_size
    self.conv_layer = _ATTENTION_TYPES[attention_type](
      min_relative_pos,
      max_relative_pos,
      output_size,
      depthwise_filter_initializer_scale,
      pointwise_filter_initializer_scale,
      activation,
    )

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Applies the layer; see `TransformerLayer.call`."""
    options: dict[str, Any] = dict(variable_dtype=context.variable_dtype)
    channels = x.shape[-1]
    x = mtf.layers.dense_product(
      x,
      reduced_dims=[channels],
      new_dims=[channels],
      activation_functions=["linear", "sigmoid"],
      name="local_conv_inp",
      **options,
    )
    y = self.conv_layer.call(context, x, losses)
    return mtf.layers.dense(
      y,
      [mtf.Dimension(channels.name, self.output_size)],
      reduced_dims=y.shape.dims[-1:],
      name="local_conv_attn_op_projection",
      **options,
    )
