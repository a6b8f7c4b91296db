"""Universal Transformer: the same layers again and again (Dehghani et al., 2018; 1807.03819)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import BELOW_ONE, affects, takes
from mesh_tensorflow.transformer.model import universal_passes as passes
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer
from mesh_tensorflow.transformer.model.universal_passes import HaltingState, UTPasses

_LOG = logging.getLogger("mesh_tensorflow")

# Values of arguments for which there is nothing that could be meant.
_UNAVAILABLE = {
  "act_type": ("global", "random"),
  "add_or_concat_timing_signal": ("concat",),
  "gate_ffn_layer": ("dense_relu_dense",),
}
_LEGAL = {
  "recurrence_type": ("act", "basic", "highway"),
  "add_or_concat_timing_signal": ("add",),
  "step_timing_signal_type": ("learned", "sinusoid"),
  "gate_ffn_layer": ("dense",),
  "gating_type": ("highway", "gru"),
}


@gin.configurable(module="mesh_tensorflow.transformer.universal_transformer")
@affects(training="dropout_rate")
@takes(dropout_rate=BELOW_ONE)
class UTLayerStack(UTPasses):
  """A stack whose layers are applied several times, with the same weights.

  Bind it as `make_layer_stack.layer_stack_cls`; it has no lists of sublayers. A pass through the
  layers is, for each of them: x + dropout(layer(layer_norm(x))).

  With the recurrence "act", adaptive computation time (Graves, 2016), each position halts by
  itself: a number between 0 and 1 is computed in each step, and the result is the mean of the
  states weighted with those, up to the step in which their sum exceeds 1 - act_epsilon.

  Args:
    layers: a list of `TransformerLayer`s.
    dropout_rate: rate at which values become 0 in training; all positions have one mask.
    norm_epsilon: of the layer norms.
    num_vanilla_transformer_layers: number of passes before, and after, the recurrence.
    couple_carry_transform_gates: whether the gates of a highway sum up to 1.
    act_type: "accumulated": the result is the weighted sum of states; any other: their
      interpolation. "global" and "random" do not exist.
    recurrence_type: "act", "basic" (just so many steps) or "highway" (gates between steps).
    act_max_steps: number of steps of "act", not counting the first.
    act_epsilon: how much less than 1 halts.
    num_rec_steps: number of steps of "basic" and "highway".
    num_inrecurrence_layers: number of passes in each step.
    position_start_index: number of the first position, for `add_position_timing_signal_func`.
    add_or_concat_timing_signal: "add".
    step_timing_signal_type: "learned" or "sinusoid".
    add_position_timing_signal: has no effect, as in the TF1 library: the positional embedding of
      the model tells positions apart.
    add_step_timing_signal: whether each step adds a vector that tells its number.
    mix_with_transformer_before_ut: whether there are passes before the recurrence.
    mix_with_transformer_after_ut: whether there are passes after it.
    gates_inputs: what the gates of "highway" are computed from: letters among "s" (the state), "t"
      (the transformed state) and "i" (the input of the stack).
    gate_ffn_layer: "dense".
    use_gated_transformer: whether each layer's output is mixed with its input by a gate.
    gating_type: "highway" or "gru".

  Raises:
    ConfigError: an argument is none of these.
  """

  def __init__(
    self,
    layers: Sequence[TransformerLayer],
    dropout_rate: float = 0.0,
    norm_epsilon: float = 1e-6,
    num_vanilla_transformer_layers: int = 2,
    couple_carry_transform_gates: bool = True,
    act_type: str = gin.REQUIRED,
    recurrence_type: str = gin.REQUIRED,
    act_max_steps: int = gin.REQUIRED,
    act_epsilon: float = gin.REQUIRED,
    num_rec_steps: int = gin.REQUIRED,
    num_inrecurrence_layers: int = gin.REQUIRED,
    position_start_index: int = gin.REQUIRED,
    add_or_concat_timing_signal: str = gin.REQUIRED,
    step_timing_signal_type: str = gin.REQUIRED,
    add_position_timing_signal: bool = gin.REQUIRED,
    add_step_timing_signal: bool = gin.REQUIRED,
    mix_with_transformer_before_ut: bool = gin.REQUIRED,
    mix_with_transformer_after_ut: bool = gin.REQUIRED,
    gates_inputs: str = gin.REQUIRED,
    gate_ffn_layer: str = gin.REQUIRED,
    use_gated_transformer: bool = gin.REQUIRED,
    gating_type: str = gin.REQUIRED,
  ):
    self._layers = layers
    self.dropout_rate = dropout_rate
    self.norm_epsilon = norm_epsilon
    self.num_vanilla_transformer_layers = num_vanilla_transformer_layers
    self.couple_carry_transform_gates = couple_carry_transform_gates
    self.act_type = act_type
    self.recurrence_type = recurrence_type
    self.act_max_steps = act_max_steps
    self.act_epsilon = act_epsilon
    self.num_rec_steps = num_rec_steps
    self.num_inrecurrence_layers = num_inrecurrence_layers
    self.position_start_index = position_start_index
    self.add_or_concat_timing_signal = add_or_concat_timing_signal
    self.step_timing_signal_type = step_timing_signal_type
    self.add_position_timing_signal = add_position_timing_signal
    self.add_step_timing_signal = add_step_timing_signal
    self.mix_with_transformer_before_ut = mix_with_transformer_before_ut
    self.mix_with_transformer_after_ut = mix_with_transformer_after_ut
    self.gates_inputs = gates_inputs
    self.gate_ffn_layer = gate_ffn_layer
    self.use_gated_transformer = use_gated_transformer
    self.gating_type = gating_type
    self._check_arguments()
    if add_position_timing_signal:
      _LOG.warning("UTLayerStack.add_position_timing_signal = True has no effect")

  def _check_arguments(self) -> None:
    # What is not used may have any value.
    used = ["recurrence_type"]
    if self.add_step_timing_signal:
      used += ["step_timing_signal_type", "add_or_concat_timing_signal"]
    if self.recurrence_type == "highway" or self.use_gated_transformer:
      used.append("gate_ffn_layer")
    if self.use_gated_transformer:
      used.append("gating_type")
    if self.recurrence_type == "act":
      used.append("act_type")
    for name in used:
      value = getattr(self, name)
      if value in _UNAVAILABLE.get(name, ()) or value not in _LEGAL.get(name, (value,)):
        legal = _LEGAL.get(name, ("accumulated", "basic"))
        raise errors.ConfigError(f"UTLayerStack.{name} = {value!r}: legal are {', '.join(legal)}")
    letters = set(self.gates_inputs or "")
    if self.recurrence_type == "highway" and not (letters and letters <= set("sti")):
      raise errors.ConfigError(
        f"UTLayerStack.gates_inputs = {self.gates_inputs!r}: legal are one or several of the "
        "letters s, t and i"
      )

  def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Applies the layers; see `LayerStack.call`."""
    mask = context.nonpadding if isinstance(context.sequence_id, mtf.Tensor) else None
    x = self._dropout(context, x)
    context.layer_outputs.append(x)
    if self.mix_with_transformer_before_ut:
      x = self._passes(context, x, mask, self.num_vanilla_transformer_layers)
    recurrence = {"act": self.act_layer, "basic": self.ut_basic, "highway": self.ut_highway}
    x = recurrence[self.recurrence_type](context, x, mask)
    if self.mix_with_transformer_after_ut:
      x = self._passes(context, x, mask, self.num_vanilla_transformer_layers)
    x = self._dropout(context, self._layer_norm(context, x))
    x = passes.masked(x, mask)
    context.layer_outputs.append(x)
    return x

  # -------------------------------------------------------------- recurrences

  def ut_basic(self, context: Context, x: mtf.Tensor, mask: mtf.Tensor | None) -> mtf.Tensor:
    """`num_rec_steps` steps.

    Args:
      context: a `Context`.
      x: `[<batch_dims>, length, d_model]`.
      mask: `[<batch_dims>, length]`, 0 at padding; or None.
    """
    for step in range(self.num_rec_steps):
      x = self._step(context, self.step_preprocess(context, x, step), mask)
    return x

  def act_layer(self, context: Context, x: mtf.Tensor, mask: mtf.Tensor | None) -> mtf.Tensor:
    """Adaptive computation time: act_max_steps + 1 steps; see `ut_basic` for the arguments.

    Variables: a dense layer in the scope `sigmoid_activation_for_pondering`.
    """
    model_dim = x.shape[-1]
    halting = HaltingState.start(x, self.act_epsilon)
    result = mtf.zeros_like(x)
    # Always as many steps as the slowest position may take: the graph has no loop whose length
    # depends on values.
    for step in range(self.act_max_steps + 1):
      x = self.step_preprocess(context, x, step)
      with mtf.variable_scope("sigmoid_activation_for_pondering"):
        probability = mtf.layers.dense(
          x,
          reduced_dims=[model_dim],
          new_dims=[mtf.Dimension(model_dim.name, 1)],
          activation=mtf.sigmoid,
          use_bias=True,
          variable_dtype=context.variable_dtype,
        )
      weight = halting.step(mtf.reshape(probability, x.shape - model_dim))
      x = self._step(context, x, mask)
      rest = result if self.act_type == "accumulated" else result * (1.0 - weight)
      result = x * weight + rest
    if context.train:
      mtf.scalar_summary("ponder_times", mtf.reduce_mean(halting.num_updates))
    return result

  def ut_highway(
    self, context: Context, layer_inputs: mtf.Tensor, mask: mtf.Tensor | None
  ) -> mtf.Tensor:
    """Steps with gates between them; see `ut_basic` for the arguments.

    Every step has gates of its own, in variables `dense/kernel`, `dense_1/bias`, `dense_2/kernel`
    and so on.
    """
    state = layer_inputs
    for step in range(self.num_rec_steps):
      new = self._step(context, self.step_preprocess(context, state, step), mask)
      sources = {"s": state, "t": new, "i": layer_inputs}
      state, transform, carry = passes.highway(
        lambda inputs: self._gate(context, mask, inputs, preprocess=False),
        [source for letter, source in sources.items() if letter in self.gates_inputs],
        state,
        new,
        self.couple_carry_transform_gates,
      )
      if context.train:
        mtf.scalar_summary("highway_transform_gate_layer", mtf.reduce_mean(transform))
        mtf.scalar_summary("highway_carry_gate_layer", mtf.reduce_mean(carry))
    return state
