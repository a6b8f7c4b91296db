"""The layers of the Evolved Transformer (So, Liang and Le, 2019; arXiv:1901.11117)."""

from __future__ import annotations

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer
from mesh_tensorflow.transformer.model.dropout import dropout
from mesh_tensorflow.transformer.model.layers.conv_layers import Conv1DLayer, SeparableConv1DLayer
from mesh_tensorflow.transformer.model.layers.enc_dec_attention import EncDecAttention
from mesh_tensorflow.transformer.model.layers.self_attention import SelfAttention

_MODULE = "mesh_tensorflow.transformer.evolved_transformer"


@gin.configurable(module=_MODULE)
class GatedLinearUnitLayer(TransformerLayer):
  """A dense layer times the sigmoid of another, both to the size of the input.

  Variables: `glu_0/{kernel,bias}` and `glu_1/{kernel,bias}`.
  """

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Applies the layer; see `TransformerLayer.call`."""
    del losses
    io_dim = x.shape[-1]
    return mtf.layers.dense_product(
      x,
      reduced_dims=[io_dim],
      new_dims=[io_dim],
      activation_functions=["linear", "sigmoid"],
      variable_dtype=context.variable_dtype,
      expert_dims=context.model.ensemble_dims,
      name="glu",
    )


@gin.configurable(module=_MODULE)
@affects(training="dropout_rate initializer_scale")
@takes(d_model=COUNT, dropout_rate=BELOW_ONE)
class EncoderConvolutionalLayer(TransformerLayer):
  """Two branches, a dense layer and a convolution, then a separable convolution.

  The convolutions see positions on both sides: for encoders. Variables are in the scopes `conv1x1`,
  `conv3x1`, `layer_prepostprocess` and `sep_conv9x1`. d_model cannot be split over the mesh.

  Args:
    d_model: size of the input.
    dropout_rate: rate at which values become 0 in training; all positions of a sequence have one
      mask.
    initializer_scale: scale of the initial values of the dense layer and the separable convolution.
    norm_epsilon: of the layer norm.
  """

  def __init__(
    self,
    d_model: int,
    dropout_rate: float,
    initializer_scale: float = 1.0,
    norm_epsilon: float = 1e-6,
  ):
    self._d_model = d_model
    self._dropout_rate = dropout_rate
    self._initializer_scale = initializer_scale
    self._norm_epsilon = norm_epsilon
    self._conv3x1 = Conv1DLayer(filter_size=3, output_size=d_model // 2, activation="relu")
    self._sep_conv9x1 = _separable(-4, 4, d_model // 2, initializer_scale)

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Applies the layer; see `TransformerLayer.call`."""
    del losses
    io_dim = x.shape[-1]
    # Widths as the search found them, in parts of d_model: 2048, 256 and 256 of 512.
    wide_dim = mtf.Dimension(io_dim.name, 4 * self._d_model)
    with mtf.variable_scope("conv1x1"):
      left = mtf.layers.dense(
        x,
        reduced_dims=[io_dim],
        new_dims=[wide_dim],
        activation=mtf.relu,
        use_bias=False,
        variable_dtype=context.variable_dtype,
        kernel_initializer=mtf.layers.VarianceScalingInitializer(scale=self._initializer_scale),
      )
    left = _dropout(context, left, self._dropout_rate)
    with mtf.variable_scope("conv3x1"):
      right = self._conv3x1.call(context, x)
    right = _dropout(context, right, self._dropout_rate)
    # The paper adds branches of different widths by zeros behind the narrower one.
    hidden = left + _pad_channels_dim(right, wide_dim.size)
    hidden = mtf.layers.layer_norm(hidden, wide_dim, self._norm_epsilon)
    with mtf.variable_scope("sep_conv9x1"):
      output = self._sep_conv9x1.call(context, hidden)
    return _pad_channels_dim(_dropout(context, output, self._dropout_rate), self._d_model)


@gin.configurable(module=_MODULE)
class DecoderAttentionLayer(TransformerLayer):
  """The sum of self-attention and of attention to the encoder.

  Variables are in the scopes `self_attention` and `enc_dec_attention`.

  Args:
    base_num_heads: number of heads of attention to the encoder; self-attention has twice as many.
      Other arguments of both come from gin.
  """

  def __init__(self, base_num_heads: int):
    # The paper's 16 heads beside 8.
    self._self_attention = SelfAttention(num_heads=2 * base_num_heads)
    self._enc_dec_attention = EncDecAttention(num_heads=base_num_heads)

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Applies the layer; see `TransformerLayer.call`."""
    del losses
    with mtf.variable_scope("self_attention"):
      left = self._self_attention.call(context, x)
    with mtf.variable_scope("enc_dec_attention"):
      right = self._enc_dec_attention.call(context, x)
    return left + right


@gin.configurable(module=_MODULE)
@affects(training="dropout_rate initializer_scale")
@takes(d_model=COUNT, dropout_rate=BELOW_ONE)
class DecoderConvolutionalLayer(TransformerLayer):
  """Two branches of separable convolutions, then another one; they see no later position.

  Variables are in the scopes `sep_conv11x1`, `sep_conv7x1_1`, `layer_prepostprocess` and
  `sep_conv7x1_2`. d_model cannot be split over the mesh.

  Args:
    d_model: size of the input.
    dropout_rate: rate at which values become 0 in training; all positions of a sequence have one
      mask.
    initializer_scale: scale of the initial values of the convolutions.
    norm_epsilon: of the layer norm.
  """

  def __init__(
    self,
    d_model: int,
    dropout_rate: float,
    initializer_scale: float = 1.0,
    norm_epsilon: float = 1e-6,
  ):
    self._d_model = d_model
    self._dropout_rate = dropout_rate
    self._norm_epsilon = norm_epsilon
    self._sep_conv11x1 = _separable(-10, 0, 2 * d_model, initializer_scale, activation="relu")
    self._sep_conv7x1_1 = _separable(-6, 0, d_model // 2, initializer_scale)
    self._sep_conv7x1_2 = _separable(-6, 0, d_model, initializer_scale)

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Applies the layer; see `TransformerLayer.call`.

    The decoding states are the last 11 and twice the last 7 vectors.
    """
    del losses
    with mtf.variable_scope("sep_conv11x1"):
      left = self._sep_conv11x1.call(context, x)
    left = _dropout(context, left, self._dropout_rate)
    with mtf.variable_scope("sep_conv7x1_1"):
      right = self._sep_conv7x1_1.call(context, x)
    right = _dropout(context, right, self._dropout_rate)
    hidden = left + _pad_channels_dim(right, 2 * self._d_model)
    hidden = mtf.layers.layer_norm(hidden, hidden.shape[-1], self._norm_epsilon)
    with mtf.variable_scope("sep_conv7x1_2"):
      output = self._sep_conv7x1_2.call(context, hidden)
    return _dropout(context, output, self._dropout_rate)


def _separable(
  min_relative_pos: int,
  max_relative_pos: int,
  output_size: int,
  initializer_scale: float,
  activation: str = "linear",
) -> TransformerLayer:
  return SeparableConv1DLayer(
    min_relative_pos=min_relative_pos,
    max_relative_pos=max_relative_pos,
    output_size=output_size,
    depthwise_filter_initializer_scale=initializer_scale,
    pointwise_filter_initializer_scale=initializer_scale,
    activation=activation,
  )


def _dropout(context: Context, x: mtf.Tensor, rate: float) -> mtf.Tensor:
  return dropout(
    x, rate, context, mtf.Shape([*context.batch_dims, context.length_dim, x.shape[-1]])
  )


def _pad_channels_dim(x: mtf.Tensor, size: int) -> mtf.Tensor:
  """Zeros behind the last dimension, up to a size.

  Raises:
    ShapeError: the dimension is larger.
  """
  dim = x.shape[-1]
  if size < dim.size:
    raise errors.ShapeError(f"{x} cannot be padded to {dim.name}={size}, which is smaller")
  return mtf.pad(x, [0, size - dim.size], dim.name) if size > dim.size else x
