"""Building blocks of the Universal Transformer's recurrences; see `UTLayerStack`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.models.context import Context
from mesh_tensorflow.transformer.models.layer_stack import Layers, check_keeps_shape
from mesh_tensorflow.transformer.models.sublayers import sublayer_dropout
from mesh_tensorflow.transformer.universal_transformer import gates, timing


class UTPasses(Layers):
  """Passes through the layers, and what is added between them.

  The attributes, set by `UTLayerStack`, are its arguments of the same names.
  """

  dropout_rate: float
  norm_epsilon: float
  couple_carry_transform_gates: bool
  recurrence_type: str
  act_max_steps: int
  num_rec_steps: int
  num_inrecurrence_layers: int
  position_start_index: int
  step_timing_signal_type: str
  add_step_timing_signal: bool
  gate_ffn_layer: str
  use_gated_transformer: bool
  gating_type: str

  def _layer_norm(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    return mtf.layers.layer_norm(x, context.model.model_dim, self.norm_epsilon)

  def _dropout(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Dropout in training; all positions of a sequence have one mask."""
    return sublayer_dropout(x, None, context, dropout_rate=self.dropout_rate)

  def _step(self, context: Context, x: mtf.Tensor, mask: mtf.Tensor | None) -> mtf.Tensor:
    return self._passes(context, x, mask, self.num_inrecurrence_layers)

  def _passes(
    self, context: Context, x: mtf.Tensor, mask: mtf.Tensor | None, times: int
  ) -> mtf.Tensor:
    for _ in range(times):
      x = self.vanilla_transformer_layer(context, x, mask)
    return x

  def vanilla_transformer_layer(
    self, context: Context, x: mtf.Tensor, mask: mtf.Tensor | None
  ) -> mtf.Tensor:
    """One pass through all layers; see `ut_basic` for the arguments.

    Raises:
      ShapeError: a layer changes the dimensions of x.
    """
    for i, layer in enumerate(self._layers):
      with mtf.variable_scope(layer.name or ""):
        normalized = self._layer_norm(context, gates.masked(x, mask))
        context.current_layer, context.current_layer_input = layer, normalized
        with mtf.variable_scope(type(layer).__name__):
          y = layer.call(context, normalized)
        check_keeps_shape(layer, x, y)
        if self.use_gated_transformer:
          y = self.gating(context, x, y, mask)
        x += self._dropout(context, y)
      if i != len(self._layers) - 1:
        context.layer_outputs.append(x)
      context.layer_index += 1
    return x

  # -------------------------------------------------------------------- gates

  def gating(
    self,
    context: Context,
    x: mtf.Tensor,
    transformed_x: mtf.Tensor,
    mask: mtf.Tensor | None,
  ) -> mtf.Tensor:
    """Mixes a layer's input and output by gates, as `gating_type` says.

    Args:
      context: a `Context`.
      x: `[<batch_dims>, length, d_model]`.
      transformed_x: of the same dims.
      mask: `[<batch_dims>, length]`, 0 at padding; or None.
    """

    def gate(inputs: list[mtf.Tensor]) -> mtf.Tensor:
      return self._gate(context, mask, inputs, preprocess=True)

    if self.gating_type == "gru":
      return gates.gru(gate, x, transformed_x)
    inputs = [x, transformed_x]
    return gates.highway(gate, inputs, x, transformed_x, self.couple_carry_transform_gates)[0]

  def _gate(
    self,
    context: Context,
    mask: mtf.Tensor | None,
    inputs: list[mtf.Tensor],
    preprocess: bool,
  ) -> mtf.Tensor:
    return self.ffn_layer_multi_inputs(
      context,
      mask,
      inputs,
      ffn_layer_type=self.gate_ffn_layer,
      activation=mtf.sigmoid,
      preprocess=preprocess,
    )

  def ffn_layer_multi_inputs(
    self,
    context: Context,
    mask: mtf.Tensor | None,
    inputs_list: list[mtf.Tensor],
    ffn_layer_type: str = "dense",
    kernel_initializer: Any = None,
    activation: Callable[[mtf.Tensor], mtf.Tensor] | None = None,
    preprocess: bool = False,
    postprocess: bool = False,
  ) -> mtf.Tensor:
    """A dense layer of several tensors, one behind the other along d_model.

    Args:
      context: a `Context`.
      mask: `[<batch_dims>, length]`, 0 at padding; or None.
      inputs_list: list of tensors of the same dims; with `preprocess` it is changed.
      ffn_layer_type: "dense".
      kernel_initializer: see `mtf.layers.dense`.
      activation: a function of a tensor, or None.
      preprocess: whether the inputs are masked and layer-normalized, in place.
      postprocess: whether the result is.

    Returns:
      A tensor of the dims of one input.

    Raises:
      ConfigError: ffn_layer_type is not "dense".
    """
    if ffn_layer_type != "dense":
      raise errors.ConfigError(
        f'UTLayerStack: ffn_layer_type must be "dense", got {ffn_layer_type!r}'
      )
    return gates.ffn_layer_multi_inputs(
      context,
      mask,
      inputs_list,
      self._layer_norm,
      kernel_initializer=kernel_initializer,
      activation=activation,
      preprocess=preprocess,
      postprocess=postprocess,
    )

  # ----------------------------------------------------------- timing signals

  def step_preprocess(self, context: Context, x: mtf.Tensor, step: int) -> mtf.Tensor:
    """Preprocessing of a step: adds the step's timing signal, if `add_step_timing_signal`.

    Args:
      context: a `Context`.
      x: `[<batch_dims>, length, d_model]`.
      step: number of the step.
    """
    if not self.add_step_timing_signal:
      return x
    return self.add_step_timing_signal_func(context, x, step)

  def add_step_timing_signal_func(self, context: Context, x: mtf.Tensor, step: int) -> mtf.Tensor:
    """Adds the vector of a step; see `step_preprocess`."""
    channels = x.shape[-1]
    if self.step_timing_signal_type == "sinusoid":
      return x + timing.sinusoid_layer_timing_signal(context, channels, step)
    # The last of the act_max_steps + 1 steps of "act" is out of the table, and gets zeros.
    num_steps = self.act_max_steps if self.recurrence_type == "act" else self.num_rec_steps
    return x + self.get_layer_timing_signal_learned_1d(context, channels, step, num_steps)

  def get_layer_timing_signal_learned_1d(
    self, context: Context, channels: mtf.Dimension, layer: int, num_layers: int
  ) -> mtf.Tensor:
    """The trained vector of a step; see `timing.learned_layer_timing_signal`."""
    return timing.learned_layer_timing_signal(context, channels, layer, num_layers)

  def add_position_timing_signal_func(
    self, context: Context, x: mtf.Tensor, step: int
  ) -> mtf.Tensor:
    """Adds sinusoids that tell positions apart, counted from `position_start_index`.

    No recurrence calls it.

    Args:
      context: a `Context`.
      x: `[<batch_dims>, length, d_model]`.
      step: number of the step; has no effect.
    """
    del step
    return x + self.get_timing_signal_1d(
      context, context.length_dim, x.shape[-1], start_index=self.position_start_index
    )

  def get_timing_signal_1d(
    self,
    context: Context,
    length: mtf.Dimension,
    channels: mtf.Dimension,
    min_timescale: float = 1.0,
    max_timescale: float = 1.0e4,
    start_index: int = 0,
  ) -> mtf.Tensor:
    """Sinusoids of different wavelengths; see `timing.timing_signal_1d`."""
    return timing.timing_signal_1d(
      context, length, channels, min_timescale, max_timescale, start_index
    )
