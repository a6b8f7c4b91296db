"""Sublayers: what a layer stack does before, around and after its layers.

Each is a function `f(x, layer_stack, context) -> y`. Variables are created in the scope that is
open when it runs: that of the layer, or, for initial and final sublayers, that of the stack.
"""

from __future__ import annotations

import math
from typing import Protocol

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import BELOW_ONE, NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.operations.norms import rms_normalize
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.dropout import dropout, dropout_broadcast_dims

_MODULE = "mesh_tensorflow.transformer.transformer"


class Stack(Protocol):
  """Structural type: the part of a layer stack that its sublayers use.

  Attributes:
    dropout_rate: of the older lists of sublayers, see `LayerStack`; only `sublayer_legacy_dropout`
      reads it, and only stacks with those lists have it.
  """

  dropout_rate: float


@gin.configurable(module=_MODULE)
def sublayer_call_layer(x: mtf.Tensor, layer_stack: Stack | None, context: Context) -> mtf.Tensor:
  """The current layer, called in a variable scope named after its class; padding is zeroed."""
  x = sublayer_mask_padding(x, layer_stack, context)
  layer = context.current_layer
  with mtf.variable_scope(type(layer).__name__):
    return layer.call(context, x)


@gin.configurable(module=_MODULE)
def sublayer_mask_padding(x: mtf.Tensor, layer_stack: Stack | None, context: Context) -> mtf.Tensor:
  """Zeros at padding, if the context has sequence ids for each position."""
  del layer_stack
  if isinstance(context.sequence_id, mtf.Tensor):
    nonpadding: mtf.Tensor = context.nonpadding
    return x * nonpadding
  return x


@gin.configurable(module=_MODULE)
@takes(epsilon=NOT_BELOW_ZERO)
def sublayer_rms_norm(
  x: mtf.Tensor,
  layer_stack: Stack | None,
  context: Context,
  epsilon: float = 1e-6,
  name: str = "rms_norm",
) -> mtf.Tensor:
  """RMS norm: x * rsqrt(mean(x ** 2) + epsilon) * scale (Zhang and Sennrich, 2019)."""
  del layer_stack
  return _rms_norm(x, context, [context.model.model_dim], epsilon, name)


@gin.configurable(module=_MODULE)
@takes(epsilon=NOT_BELOW_ZERO)
def sublayer_output_rms_norm(
  x: mtf.Tensor,
  layer_stack: Stack | None,
  context: Context,
  epsilon: float = 1e-6,
  name: str = "output_rms_norm",
) -> mtf.Tensor:
  """`sublayer_rms_norm` under another name: the second norm of a sandwich, or a post-norm.

  In `LayerStack.sublayers_per_layer`, pre-norm is [rms_norm, call_layer, dropout, residual];
  post-norm (Vaswani et al., 2017) is [call_layer, dropout, residual, output_rms_norm]; sandwich
  norm (Ding et al., 2021, arXiv:2105.13290; Gemma 2) is [rms_norm, call_layer, output_rms_norm,
  dropout, residual].
  """
  return sublayer_rms_norm(x, layer_stack, context, epsilon=epsilon, name=name)


@gin.configurable(module=_MODULE)
def sublayer_legacy_rms_norm(
  x: mtf.Tensor, layer_stack: Stack | None, context: Context
) -> mtf.Tensor:
  """`sublayer_rms_norm` under the older name `layer_norm`."""
  return sublayer_rms_norm(x, layer_stack, context, name="layer_norm")


@gin.configurable(module=_MODULE)
def sublayer_legacy_final_rms_norm(
  x: mtf.Tensor, layer_stack: Stack | None, context: Context
) -> mtf.Tensor:
  """`sublayer_rms_norm` under the older name `final_layer_norm`."""
  return sublayer_rms_norm(x, layer_stack, context, name="final_layer_norm")


@gin.configurable(module=_MODULE)
@takes(epsilon=NOT_BELOW_ZERO)
def sublayer_rms_norm_subsampled(
  x: mtf.Tensor,
  layer_stack: Stack | None,
  context: Context,
  percentage: float = 100.0,
  epsilon: float = 1e-6,
) -> mtf.Tensor:
  """Like `sublayer_rms_norm`, the mean taken over the first `percentage` percent of channels."""
  del layer_stack
  model = context.model
  with mtf.variable_scope("layer_norm_subsampled"):
    scale = ones_variable(context, "scale", mtf.Shape(model.ensemble_dims + [model.model_dim]))
    size = math.ceil(model.model_dim.size * percentage / 100)
    subsampled = x
    if size != model.model_dim.size:
      # A slice of a split dimension would not do; channels beyond the first `size` count zero.
      kept = mtf.less(mtf.range(x.mesh, model.model_dim, dtype=tf.int32), size)
      subsampled = x * mtf.cast(kept, x.dtype)
    mean = mtf.reduce_sum(mtf.square(subsampled), reduced_dim=model.model_dim) * (1.0 / size)
    return x * mtf.rsqrt(mean + epsilon) * scale


@gin.configurable(module=_MODULE)
@takes(epsilon=NOT_BELOW_ZERO)
def sublayer_scale_norm(
  x: mtf.Tensor,
  layer_stack: Stack | None,
  context: Context,
  epsilon: float = 1e-6,
  name: str = "scale_norm",
) -> mtf.Tensor:
  """Like `sublayer_rms_norm` with one scalar scale (Nguyen and Salazar, 2019)."""
  del layer_stack
  return _rms_norm(x, context, [], epsilon, name)


@gin.configurable(module=_MODULE)
@takes(epsilon=NOT_BELOW_ZERO)
def sublayer_true_layer_norm(
  x: mtf.Tensor, layer_stack: Stack | None, context: Context, epsilon: float = 1e-6
) -> mtf.Tensor:
  """Layer norm with mean, scale and bias (Ba et al., 2016)."""
  del layer_stack
  with mtf.variable_scope("true_layer_norm"):
    return mtf.layers.layer_norm(x, context.model.model_dim, epsilon)


@gin.configurable(module=_MODULE)
def sublayer_residual(x: mtf.Tensor, layer_stack: Stack | None, context: Context) -> mtf.Tensor:
  """Adds the input of the current layer."""
  del layer_stack
  return x + context.current_layer_input


@gin.configurable(module=_MODULE)
def sublayer_scaled_residual(
  x: mtf.Tensor,
  layer_stack: Stack | None,
  context: Context,
  input_scale: float = 1.0,
  output_scale: float = 1.0,
) -> mtf.Tensor:
  """input_scale * the input of the current layer + output_scale * x.

  DeepNorm (Wang et al., 2022; arXiv:2203.00555) is post-norm with input_scale =
  `deepnorm_input_scale`, and with weights that start smaller, by `deepnorm_initial_gain`.
  """
  del layer_stack
  return x * output_scale + context.current_layer_input * input_scale


@gin.configurable(module=_MODULE)
@affects("training")
@takes(dropout_rate=BELOW_ONE)
def sublayer_dropout(
  x: mtf.Tensor, layer_stack: Stack | None, context: Context, dropout_rate: float = 0.0
) -> mtf.Tensor:
  """Dropout in training; see `dropout_broadcast_dims`."""
  del layer_stack
  return dropout(x, dropout_rate, context, _dropped(context))


def _dropped(context: Context) -> mtf.Shape:
  """Dimensions of dropout masks of the residual stream: members of an ensemble share them."""
  positions = [] if context.length_dim is None else [context.length_dim]
  return mtf.Shape([*context.batch_dims, *positions, context.model.model_dim])


@gin.configurable(module=_MODULE)
@affects("training")
def sublayer_clip_activation_gradient(
  x: mtf.Tensor, layer_stack: Stack | None, context: Context, rms_norm: float = 1.0
) -> mtf.Tensor:
  """x, whose gradient is scaled down to a root mean square of at most `rms_norm`; 0: as it is."""
  del layer_stack, context
  return mtf.layers.clip_activation_gradient(x, rms_norm)


@gin.configurable(module=_MODULE)
@affects("training")
def sublayer_legacy_dropout(x: mtf.Tensor, layer_stack: Stack, context: Context) -> mtf.Tensor:
  """`sublayer_dropout` with the dropout rate of the layer stack."""
  return sublayer_dropout(x, layer_stack, context, dropout_rate=layer_stack.dropout_rate)


@gin.configurable(module=_MODULE)
@affects("training")
@takes(init_dropout_rate=BELOW_ONE)
def sublayer_annealed_dropout(
  x: mtf.Tensor,
  layer_stack: Stack | None,
  context: Context,
  init_dropout_rate: float = 0.0,
  start_step: int | None = None,
  end_step: int | None = None,
) -> mtf.Tensor:
  """Dropout whose rate falls linearly from `init_dropout_rate` to 0 between two steps.

  Raises:
    ConfigError: start_step or end_step is None.
  """
  del layer_stack
  if start_step is None or end_step is None:
    raise errors.ConfigError(
      f"sublayer_annealed_dropout needs start_step (={start_step}) and end_step (={end_step})"
    )
  if not context.train or init_dropout_rate <= 0:
    return x
  return mtf.layers.annealed_dropout(
    x,
    True,
    start_step,
    end_step,
    init_dropout_rate,
    noise_shape=_dropped(context) - dropout_broadcast_dims(context),
  )


@gin.configurable(module=_MODULE)
@affects(training="initial_value")
def sublayer_rezero(
  x: mtf.Tensor, layer_stack: Stack | None, context: Context, initial_value: float = 0.0
) -> mtf.Tensor:
  """Multiplies by one trained number (Bachlechner et al., 2020); variable `rezero_weight`."""
  del layer_stack
  weight = mtf.get_variable(
    x.mesh,
    "rezero_weight",
    shape=mtf.Shape(context.model.ensemble_dims),
    dtype=context.variable_dtype,
    # With 0 each layer begins as the identity.
    initializer=tf.constant_initializer(initial_value),
  )
  return x * weight


def _rms_norm(
  x: mtf.Tensor, context: Context, scale_dims: list[mtf.Dimension], epsilon: float, name: str
) -> mtf.Tensor:
  """x of root mean square 1, times a trained scale of these dims and the ensemble's."""
  model = context.model
  with mtf.variable_scope(name):
    scale = ones_variable(context, "scale", mtf.Shape(model.ensemble_dims + scale_dims))
    return rms_normalize(x, model.model_dim, epsilon, scale=scale)


def ones_variable(context: Context, name: str, shape: mtf.Shape) -> mtf.Tensor:
  """A variable that starts as ones."""
  return mtf.get_variable(
    context.mesh,
    name,
    shape,
    dtype=context.variable_dtype,
    initializer=tf.ones_initializer(),
  )


def zeros_variable(context: Context, name: str, shape: mtf.Shape) -> mtf.Tensor:
  """A variable that starts as zeros."""
  return mtf.get_variable(
    context.mesh,
    name,
    shape,
    dtype=context.variable_dtype,
    initializer=tf.zeros_initializer(),
  )
