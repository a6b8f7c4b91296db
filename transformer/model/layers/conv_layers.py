"""Convolutions along the length."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.layers import VarianceScalingInitializer
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer

_LOG = logging.getLogger("mesh_tensorflow")
_MODULE = "mesh_tensorflow.transformer.transformer_layers"


class Conv1D(TransformerLayer):
  """Base class of convolutions: what they keep while decoding, the last inputs."""

  def record_states_first_part_mode(
    self, context: Context, x: mtf.Tensor, filter_size: int, length_dim_name: str = "length"
  ) -> None:
    """Records the last inputs before `context.initial_position`, zeros before the first.

    Args:
      context: a `Context`.
      x: `[<batch_dims>, length, d_model]`.
      filter_size: how many inputs.
      length_dim_name: name of their dimension: the state is `[<batch_dims>, <name>=filter_size,
        d_model]`.
    """
    *batch, length, channels = x.shape.dims
    # Under another name: its size may be that of the length.
    window = mtf.Dimension("_window", filter_size)
    end = context.initial_position
    position = mtf.add(
      end,
      mtf.range(x.mesh, window, tf.int32) - filter_size,
      output_shape=mtf.Shape([*end.shape.dims, window]),
    )
    state = mtf.gather(x, position, length, output_shape=mtf.Shape([*batch, window, channels]))
    context.record_new_states([mtf.rename_dimension(state, window.name, length_dim_name)])

  def record_states_incremental_mode(
    self, context: Context, x: mtf.Tensor, filter_size: int, length_dim_name: str = "length"
  ) -> mtf.Tensor:
    """Records the last inputs, this one last.

    Args:
      context: a `Context`.
      x: `[<batch_dims>, d_model]`.
      filter_size: how many inputs.
      length_dim_name: name of their dimension.

    Returns:
      The new state, `[<batch_dims>, <name>=filter_size, d_model]`.
    """
    filter_dim = mtf.Dimension(length_dim_name, filter_size)
    last = mtf.constant(x.mesh, filter_size - 1, dtype=tf.int32)
    (old,) = context.get_states(1)
    state = self.update_state(old, x, last, filter_dim, context.activation_dtype)
    context.record_new_states([state])
    return state

  def update_state(
    self,
    old_state: mtf.Tensor,
    x: mtf.Tensor,
    position: mtf.Tensor,
    filter_dim: mtf.Dimension,
    dtype: tf.DType,
  ) -> mtf.Tensor:
    """The state shifted by one, and x added at a position.

    Args:
      old_state: `[<batch_dims>, filter_dim, d_model]`.
      x: `[<batch_dims>, d_model]`.
      position: int32 scalar.
      filter_dim: the dimension of the last inputs.
      dtype: dtype of the state.
    """
    # The oldest input falls out; its place at the other end is zero, so that adding is writing.
    shifted = mtf.shift(old_state, -1, filter_dim, wrap=False)
    here = mtf.one_hot(position, filter_dim, dtype=dtype)
    return shifted + mtf.einsum([x, here], output_shape=old_state.shape)

  def _masked(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """x, with zeros where the input is padding (id 0)."""
    inputs = getattr(context, "inputs", None)
    if inputs is None:
      return x
    return x * mtf.cast(mtf.not_equal(inputs, 0), context.activation_dtype)


@gin.configurable(module=_MODULE)
@takes(filter_size=COUNT, output_size=COUNT)
class Conv1DLayer(Conv1D):
  """A convolution, centered at each position; while decoding, it ends at the position.

  So a decoder trained with it does not decode what it was trained for, unless filter_size is 1:
  use `SeparableConv1DLayer` with max_relative_pos 0 there. The layout must not split the length.
  Variable: `conv2d/kernel` [1, filter_size, d_model, output_size].

  Args:
    filter_size: number of positions.
    output_size: size of the result's last dimension.
    activation: name of an mtf function, or "linear".
  """

  def __init__(self, filter_size: int, output_size: int, activation: str = "linear"):
    self._filter_size = filter_size
    self._output_size = output_size
    self._activation = activation

  @property
  def filter_size(self) -> int:
    return self._filter_size

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Applies the layer; see `TransformerLayer.call`."""
    del losses
    x = self._masked(context, x)
    if context.mode == "first_part":
      if self.filter_size > 1:
        _LOG.warning(
          "layer %s (Conv1DLayer): its filter of %d positions is centered in training, and ends at "
          "the position while decoding",
          self.name or "",
          self.filter_size,
        )
      self.record_states_first_part_mode(context, x, self.filter_size)
    incremental = context.mode == "incremental"
    batch, channels = x.shape.dims[:-1], x.shape[-1]
    if incremental:
      x = self.record_states_incremental_mode(context, x, self.filter_size)
    # While decoding the state is as long as the filter: VALID leaves one position, the last.
    y = mtf.layers.conv1d(
      mtf.rename_dimension(x, channels.name, "input_dim"),
      mtf.Dimension(channels.name, self._output_size),
      filter_size=self.filter_size,
      padding="VALID" if incremental else "SAME",
    )
    if incremental:
      y = mtf.reshape(y, mtf.Shape([*batch, y.shape[-1]]))
    return activated(y, self._activation)


@gin.configurable(module=_MODULE)
@affects(training="depthwise_filter_initializer_scale pointwise_filter_initializer_scale")
@takes(output_size=COUNT)
class SeparableConv1DLayer(Conv1D):
  """A convolution of each channel for itself, then a dense layer.

  y[p] depends on x[p + min_relative_pos] to x[p + max_relative_pos]; while decoding, positions
  after p count as zeros. Variables: see `mtf.layers.separable_conv1d`.

  Args:
    min_relative_pos: the first relative position.
    max_relative_pos: the last.
    output_size: size of the result's last dimension.
    depthwise_filter_initializer_scale: variance of the depthwise weights times their number.
    pointwise_filter_initializer_scale: variance of the pointwise weights times the input's size.
    activation: name of an mtf function, or "linear".
  """

  def __init__(
    self,
    min_relative_pos: int,
    max_relative_pos: int,
    output_size: int,
    depthwise_filter_initializer_scale: float = 1.0,
    pointwise_filter_initializer_scale: float = 1.0,
    activation: str = "linear",
  ):
    self._min_relative_pos = min_relative_pos
    self._max_relative_pos = max_relative_pos
    self._output_size = output_size
    self._depthwise_filter_initializer_scale = depthwise_filter_initializer_scale
    self._pointwise_filter_initializer_scale = pointwise_filter_initializer_scale
    self._activation = activation

  @property
  def filter_size(self) -> int:
    return self._max_relative_pos - self._min_relative_pos + 1

  @property
  def _state_size(self) -> int:
    """Number of inputs cached for decoding."""
    return max(self.filter_size, 1 - self._min_relative_pos)

  def call(
    self,
    context: Context,
    x: mtf.Tensor,
    losses: list[mtf.Tensor] | None = None,
    all_kernel_wts: Sequence[mtf.Tensor] | None = None,
  ) -> mtf.Tensor:
    """Applies the layer; see `TransformerLayer.call`.

    Args:
      context: a `Context`.
      x: `[<batch_dims>, length, d_model]`; `[<batch_dims>, d_model]` in incremental decoding.
      losses: not used.
      all_kernel_wts: for each relative position the depthwise weights, [d_model] or of x's dims,
        in place of variables.
    """
    del losses
    x = self._masked(context, x)
    if context.mode == "first_part":
      self.record_states_first_part_mode(context, x, self._state_size)
    if context.mode == "incremental":
      state = self.record_states_incremental_mode(context, x, self._state_size)
      y = self._last_of_state(state, x, all_kernel_wts)
    else:
      y = mtf.layers.separable_conv1d(
        x,
        mtf.Dimension(x.shape[-1].name, self._output_size),
        min_relative_pos=self._min_relative_pos,
        max_relative_pos=self._max_relative_pos,
        depthwise_filter_initializer_scale=self._depthwise_filter_initializer_scale,
        pointwise_filter_initializer_scale=self._pointwise_filter_initializer_scale,
        kernel_depth_weights=all_kernel_wts,
      )
    return activated(y, self._activation)

  def _last_of_state(
    self, state: mtf.Tensor, x: mtf.Tensor, all_kernel_wts: Sequence[mtf.Tensor] | None
  ) -> mtf.Tensor:
    """`mtf.layers.separable_conv1d` of the state, at its last position only."""
    window, channels = state.shape.dims[-2:]
    # Under a name of its own: the layout may split the length.
    state = mtf.rename_dimension(state, window.name, "_window")
    inputs = mtf.unstack(state, state.shape[-2])
    # The scopes that `mtf.layers.separable_conv1d` opens: in training it made these variables.
    with mtf.variable_scope(None, default_name="separable_conv1d", graph=x.graph):
      with mtf.variable_scope(None, default_name="depthwise_conv_hack", graph=x.graph):
        scale = self._depthwise_filter_initializer_scale / self.filter_size
        offsets = range(self._min_relative_pos, self._max_relative_pos + 1)
        taps = [
          mtf.layers.dense(
            # Later inputs are not there yet.
            inputs[offset - 1] if offset <= 0 else mtf.zeros_like(x),
            [],
            reduced_dims=[],
            expert_dims=[channels],
            use_bias=i == 0,
            kernel_initializer=VarianceScalingInitializer(scale=scale),
            kernel_weights=None if all_kernel_wts is None else all_kernel_wts[i],
            name=f"depthwise_dense_{i}",
          )
          for i, offset in enumerate(offsets)
          # The first has the bias, whatever its offset.
          if offset <= 0 or i == 0
        ]
        y = mtf.add_n(taps)
      return mtf.layers.dense(
        y,
        mtf.Dimension(channels.name, self._output_size),
        reduced_dims=[channels],
        kernel_initializer=VarianceScalingInitializer(
          scale=self._pointwise_filter_initializer_scale
        ),
        name="pointwise_dense",
      )


def activated(y: mtf.Tensor, activation: str | Callable[[mtf.Tensor], mtf.Tensor]) -> mtf.Tensor:
  """y through an activation function, by its name in mtf or itself; "linear": y."""
  if activation == "linear":
    return y
  fn = activation if callable(activation) else getattr(mtf, activation, None)
  if not callable(fn):
    raise errors.ConfigError(
      f"activation {activation!r}: there is no such mtf function; use a name like relu, gelu, "
      "swish, linear"
    )
  return fn(y)
