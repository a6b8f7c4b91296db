"""Building blocks of the Universal Transformer: gates, timing signals, halting, recurrences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.numerics.initializers import InitializerLike
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.layer_stack import Layers, check_keeps_shape
from mesh_tensorflow.transformer.model.sequence_utils import sinusoid_positional_embedding_weights
from mesh_tensorflow.transformer.model.sublayers import sublayer_dropout


def masked(x: mtf.Tensor, mask: mtf.Tensor | None) -> mtf.Tensor:
  """x, zero at padding."""
  return x if mask is None else x * mask


def gru(
  gate: Callable[[list[mtf.Tensor]], mtf.Tensor], x: mtf.Tensor, transformed_x: mtf.Tensor
) -> mtf.Tensor:
  """A gated recurrent unit whose state is `transformed_x`.

  Args:
    gate: makes a gate, between 0 and 1, from tensors, which it may normalize in place.
    x: the input.
    transformed_x: the state.
  """
  inputs = [x, transformed_x]
  update = gate(inputs)
  reset = gate(inputs)
  candidate = gate([reset * x, transformed_x])
  # (1 - update) state + update * candidate, with one product less.
  return transformed_x + update * (candidate - transformed_x)


def highway(
  gate: Callable[[list[mtf.Tensor]], mtf.Tensor],
  inputs: list[mtf.Tensor],
  x: mtf.Tensor,
  transformed_x: mtf.Tensor,
  coupled: bool,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
  """x times a carry gate plus transformed_x times a transform gate.

  Args:
    gate: makes a gate, between 0 and 1, from tensors, which it may normalize in place.
    inputs: what the gates are made from.
    x: what is carried.
    transformed_x: what it is transformed to.
    coupled: whether the gates sum up to 1.

  Returns:
    (the sum, the transform gate, the carry gate).
  """
  # Transform before carry: each gate may normalize the inputs in place once more.
  transform = gate(inputs)
  carry = 1.0 - transform if coupled else gate(inputs)
  return x * carry + transformed_x * transform, transform, carry


@dataclasses.dataclass
class HaltingState:
  """Halting state of all positions; all tensors are `[<batch_dims>, length]`.

  Attributes:
    threshold: the sum of probabilities above which a position halts.
    probability: the sum of halting probabilities so far.
    remainders: 1 minus that sum, from when the position halted.
    num_updates: number of steps of the position.
  """

  threshold: float
  probability: mtf.Tensor
  remainders: mtf.Tensor
  num_updates: mtf.Tensor

  @classmethod
  def start(cls, x: mtf.Tensor, epsilon: float) -> HaltingState:
    """The state before the first step, for x `[<batch_dims>, length, d_model]`."""
    zeros = mtf.zeros(x.mesh, x.shape[:-1], x.dtype)
    return cls(1.0 - epsilon, zeros, zeros, zeros)

  def step(self, probability: mtf.Tensor) -> mtf.Tensor:
    """Takes a step.

    Args:
      probability: of halting now.

    Returns:
      The weight of the state after this step: the probability; the remainder, if the position
      halts in this step; 0 if it has halted.
    """
    dtype = probability.dtype

    def condition(value: mtf.Tensor) -> mtf.Tensor:
      return mtf.cast(value, dtype)

    # Positions are told apart by factors of 0 and 1: all take all steps, only some count.
    running = condition(mtf.less(self.probability, 1.0))
    reached = self.probability + probability * running
    # N(t) of the paper: the first step in which the sum exceeds 1 - epsilon.
    halting = condition(mtf.greater(reached, self.threshold)) * running
    running *= condition(mtf.less_equal(reached, self.threshold))
    self.probability += probability * running
    # R(t): the last step gets what is left of 1.
    self.remainders += halting * (1.0 - self.probability)
    # In floats p + (1 - p) is exactly 1: who has halted does not run again.
    self.probability += halting * self.remainders
    self.num_updates += running + halting
    return probability * running + halting * self.remainders


def timing_signal_1d(
  context: Context,
  length: mtf.Dimension,
  channels: mtf.Dimension,
  min_timescale: float = 1.0,
  max_timescale: float = 1.0e4,
  start_index: int = 0,
) -> mtf.Tensor:
  """Sinusoids of different wavelengths.

  Args:
    context: a `Context`.
    length: dimension of positions.
    channels: dimension of the vectors, of an even size.
    min_timescale: wavelength of the first, divided by 2 pi.
    max_timescale: wavelength of the last.
    start_index: number of the first position.

  Returns:
    `[length, channels]` of the activation dtype: first all sines, then all cosines.
  """
  # Under another name the dimension is not split over the mesh, and can be cut.
  name = f"_{length.name}"
  table = sinusoid_positional_embedding_weights(
    context.mesh,
    mtf.Dimension(name, start_index + length.size),
    channels,
    context.activation_dtype,
    min_timescale,
    max_timescale,
  )
  if start_index:
    table = mtf.slice(table, start_index, length.size, name)
  return mtf.rename_dimension(table, name, length.name)


def learned_layer_timing_signal(
  context: Context, channels: mtf.Dimension, layer: int, num_layers: int
) -> mtf.Tensor:
  """A trained vector for each recurrent step: variable `layer_embedding` [layer, d_model].

  Args:
    context: a `Context`.
    channels: dimension of the vector.
    layer: number of the step; beyond the table the vector is zero.
    num_layers: number of vectors.

  Returns:
    `[channels]`.
  """
  layer_dim = mtf.Dimension("layer", num_layers)
  table = mtf.get_variable(
    context.mesh,
    "layer_embedding",
    mtf.Shape([layer_dim, channels]),
    dtype=context.variable_dtype,
    initializer=tf.random_normal_initializer(stddev=channels.size**-0.5),
  )
  # With the initial values: vectors of variance 1, as those of tokens.
  scale: float = channels.size**0.5
  return mtf.gather(table, layer, layer_dim) * scale


def sinusoid_layer_timing_signal(
  context: Context, channels: mtf.Dimension, layer: int
) -> mtf.Tensor:
  """A fixed vector for a recurrent step, as that for a position: `[channels]`."""
  layer_dim = mtf.Dimension("_layer", 1)
  signal = timing_signal_1d(context, layer_dim, channels, start_index=layer)
  return mtf.reshape(signal, mtf.Shape([channels]))


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
        normalized = self._layer_norm(context, masked(x, mask))
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
      return gru(gate, x, transformed_x)
    inputs = [x, transformed_x]
    return highway(gate, inputs, x, transformed_x, self.couple_carry_transform_gates)[0]

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
    kernel_initializer: InitializerLike = None,
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
    if preprocess:
      # In place: the next gate of the same list normalizes what is normalized. So were the models
      # trained whose checkpoints exist.
      for i, x in enumerate(inputs_list):
        inputs_list[i] = self._layer_norm(context, masked(x, mask))
    channels = inputs_list[0].shape[-1]
    if len(inputs_list) == 1:
      inputs = inputs_list[0]
    else:
      inputs = mtf.concat(inputs_list, channels.name)
    output = mtf.layers.dense(
      inputs,
      reduced_dims=[inputs.shape[-1]],
      new_dims=[channels],
      activation=activation,
      use_bias=True,
      variable_dtype=context.variable_dtype,
      kernel_initializer=kernel_initializer,
    )
    return self._layer_norm(context, masked(output, mask)) if postprocess else output

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
      return x + sinusoid_layer_timing_signal(context, channels, step)
    # The last of the act_max_steps + 1 steps of "act" is out of the table, and gets zeros.
    num_steps = self.act_max_steps if self.recurrence_type == "act" else self.num_rec_steps
    return x + self.get_layer_timing_signal_learned_1d(context, channels, step, num_steps)

  def get_layer_timing_signal_learned_1d(
    self, context: Context, channels: mtf.Dimension, layer: int, num_layers: int
  ) -> mtf.Tensor:
    """The trained vector of a step; see `learned_layer_timing_signal`."""
    return learned_layer_timing_signal(context, channels, layer, num_layers)

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
    """Sinusoids of different wavelengths; see `timing_signal_1d`."""
    return timing_signal_1d(context, length, channels, min_timescale, max_timescale, start_index)
