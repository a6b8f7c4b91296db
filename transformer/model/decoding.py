"""Incremental decoding of a `Unitransformer`: one position at a time, with cached states."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.layers.masks import masked_logit
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.decoding_states import in_reading_order
from mesh_tensorflow.transformer.model.sequence_utils import autoregressive_inputs

# Entries of a context's cache that are made from the encoder or from variables alone, so that the
# loop need not make them in each step.
_CONSTANT_KEYS = ("enc_dec_attention_mask", "encoder_spans", "softmax_kernel")


class DecodedModel(Protocol):
  """Structural type: the part of `Unitransformer` that decoding uses."""

  name: str
  autoregressive: bool
  input_full_attention: bool
  output_vocab_dim: mtf.Dimension | None
  shared_embedding_and_softmax_weights: bool
  model_dim: mtf.Dimension
  layout: Any
  mesh_shape: Any

  @property
  def ensemble_dims(self) -> list[mtf.Dimension]: ...

  def token_embedding(
    self, mesh: mtf.Mesh, variable_dtype: mtf.VariableDType | tf.DType
  ) -> Any: ...

  def _call_internal(
    self, context: Context, inputs: mtf.Tensor, targets: mtf.Tensor | None = None
  ) -> mtf.Tensor: ...


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
  """The arguments of the same names of `Unitransformer.sample_autoregressive`."""

  stop_at_token: int | None = 1
  max_steps: int | None = None
  temperature: float = 0.0
  has_partial_sequences: bool = True
  never_end: bool = False
  remove_partial_sequences: bool = False
  sampling_keep_top_k: int = -1
  bos_id: int = 0


class IncrementalModel:
  """A model that has seen the given tokens, and goes on one position at a time.

  Attributes:
    states: the decoding states after the given tokens: cached keys and values, say.

  Args:
    model: an autoregressive `Unitransformer`.
    given: int32 `[<batch_dims>, length]`: given tokens, then zeros.
    initial_position: int32: how many tokens are given.
    priority: int32 `[..., length]`: a position is seen by those of at least its priority.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    bos_id: the input at position 0.
    encoder_sequence_id: int32 `[<batch_dims>, memory_length]`, or None.
    beam_dim: see `Context`.
    states: those after the given tokens, if another program has made them for a model without an
      encoder; None: they are made here.
    **encoder_arguments: other arguments of `Context`.
  """

  def __init__(
    self,
    model: DecodedModel,
    given: mtf.Tensor,
    initial_position: mtf.Tensor,
    priority: mtf.Tensor,
    variable_dtype: mtf.VariableDType | tf.DType,
    bos_id: int = 0,
    encoder_sequence_id: mtf.Tensor | None = None,
    beam_dim: mtf.Dimension | None = None,
    states: Sequence[mtf.Tensor] | None = None,
    **encoder_arguments: Any,
  ):
    self._model = model
    self._length_dim = given.shape.dims[-1]
    self._priority = priority
    self._bos_id = bos_id
    self._arguments: dict[str, Any] = dict(
      model=model,
      mesh=given.mesh,
      batch_dims=given.shape.dims[:-1],
      length_dim=self._length_dim,
      variable_dtype=variable_dtype,
      beam_dim=beam_dim,
      # Decoded rows are not packed: each belongs to the encoder's sequence 1, not to its padding.
      sequence_id=None if encoder_sequence_id is None else 1,
      encoder_sequence_id=encoder_sequence_id,
      constant_states=[],
      **encoder_arguments,
    )
    first_part = self._first_part(given, initial_position, states)
    self.states = first_part.new_states
    # In place: the contexts of all later steps have this very list.
    constants = self._arguments["constant_states"]
    constants[:] = [in_reading_order(s) for s in constants]
    self._constants = {
      key: value
      for key, value in first_part.cache.items()
      if isinstance(key, tuple) and key[0] in _CONSTANT_KEYS
    }

  def _first_part(
    self,
    given: mtf.Tensor,
    initial_position: mtf.Tensor,
    states: Sequence[mtf.Tensor] | None,
  ) -> Context:
    """The context of the given tokens, with the states after them; see the class."""
    model, priority = self._model, self._priority
    # All positions in one pass, though only the first `initial_position` count: keys and values of
    # later ones are hidden until their step overwrites them.
    inputs = autoregressive_inputs(given)
    first_part = Context(
      **self._arguments,
      mode="first_part",
      position=mtf.range(given.mesh, self._length_dim, dtype=tf.int32),
      position_is_default=True,
      new_states=[] if states is None else list(states),
      initial_position=initial_position,
      read_priority=priority,
      write_priority=priority,
      inputs=inputs,
    )
    with mtf.variable_scope(model.name):
      if states is None:
        # The logits are not used: this fills the caches.
        model._call_internal(first_part, inputs)
      elif model.shared_embedding_and_softmax_weights:
        # The logits of nothing leave behind, in the cache, the table as the softmax takes it.
        dims = [*model.ensemble_dims, *given.shape.dims[:-1], model.model_dim]
        nothing = mtf.zeros(given.mesh, mtf.Shape(dims), first_part.activation_dtype)
        embedding = model.token_embedding(given.mesh, first_part.variable_dtype)
        embedding.hidden_to_logits(nothing, first_part)
    return first_part

  def loop_states(self) -> list[mtf.Tensor]:
    """`states` with their dims in the order in which a loop over steps reads them fastest."""
    return [in_reading_order(s) for s in self.states]

  def step(
    self,
    position: mtf.Tensor,
    ids: mtf.Tensor,
    states: Sequence[mtf.Tensor],
    seen_by_beams: mtf.Tensor | None = None,
  ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
    """The logits of the token at a position.

    Args:
      position: int32, a scalar or one for each row.
      ids: int32 `[<batch_dims>, length]`: the tokens before it.
      states: the states after them; the order of their last dims is kept.
      seen_by_beams: see `Context`.

    Returns:
      Logits `[<batch_dims>, vocab]`, and the states after this position.
    """
    # Before position 0 there is no token: the gather gives 0.
    token = mtf.gather(ids, position - 1, self._length_dim)
    if self._bos_id:
      token += mtf.to_int32(mtf.equal(position, 0)) * self._bos_id
    context = Context(
      **self._arguments,
      mode="incremental",
      position=position,
      states=list(states),
      new_states=[],
      initial_position=position,
      read_priority=position,
      write_priority=self._priority,
      inputs=token,
    )
    context.decoded_ids, context.seen_by_beams = ids, seen_by_beams
    context.cache.update(self._constants)
    with mtf.variable_scope(self._model.name):
      logits = self._model._call_internal(context, token)
    return logits, context.new_states


def sample_autoregressive(
  model: DecodedModel,
  partial_sequences: mtf.Tensor,
  options: SamplingOptions,
  variable_dtype: mtf.VariableDType | tf.DType,
  **encoder_arguments: Any,
) -> mtf.Tensor:
  """Continues sequences; see `Unitransformer.sample_autoregressive`.

  Args:
    model: an autoregressive `Unitransformer`.
    partial_sequences: int32 `[<batch_dims>, length]`.
    options: `SamplingOptions`.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    **encoder_arguments: what `IncrementalModel` takes.

  Returns:
    int32 `[<batch_dims>, length]`.
  """
  vocab_dim = model.output_vocab_dim
  if not model.autoregressive or vocab_dim is None:
    raise errors.ConfigError(f"sample_autoregressive: model {model.name} is not autoregressive")
  k = options.sampling_keep_top_k
  if k != -1 and k <= 0:
    raise errors.ConfigError(
      f"sample_autoregressive: sampling_keep_top_k must be positive, or -1 for all tokens, got {k}"
    )
  length_dim = partial_sequences.shape.dims[-1]
  priority = positions = mtf.range(partial_sequences.mesh, length_dim, dtype=tf.int32)
  if options.has_partial_sequences:
    given = mtf.not_equal(partial_sequences, 0)
    initial_position = mtf.reduce_sum(mtf.to_int32(given), reduced_dim=length_dim)
  else:
    # One position for all rows: masks and relative biases are then made once, not for each.
    initial_position = mtf.zeros(partial_sequences.mesh, mtf.Shape([]), tf.int32)
  if model.input_full_attention:
    # The given tokens, and the input that ends them, see each other.
    priority = positions * mtf.to_int32(mtf.greater(positions, initial_position))
  decoder = IncrementalModel(
    model,
    partial_sequences,
    initial_position,
    priority,
    variable_dtype,
    bos_id=options.bos_id,
    **encoder_arguments,
  )
  states = decoder.loop_states()
  if not options.has_partial_sequences:
    # Only their shapes: the pass over an empty sequence has filled them with what is not there.
    states = [mtf.zeros_like(s) for s in states]

  def cond_fn(position: mtf.Tensor, ids: mtf.Tensor, *states: mtf.Tensor) -> mtf.Tensor:
    del states
    done = _done(position, ids, partial_sequences, initial_position, options)
    return mtf.logical_not(mtf.reduce_all(done))

  def body_fn(position: mtf.Tensor, ids: mtf.Tensor, *states: mtf.Tensor) -> list[mtf.Tensor]:
    logits, new_states = decoder.step(position, ids, states)
    new_token = _choose(logits, vocab_dim, options)
    # Beyond the end of the sequence the one-hot is zero.
    here = mtf.one_hot(position, length_dim, dtype=tf.int32)
    ids += mtf.multiply(new_token, here, output_shape=ids.shape)
    return [position + 1, ids, *new_states]

  _, outputs, *_ = mtf.while_loop(cond_fn, body_fn, [initial_position, partial_sequences, *states])
  if options.has_partial_sequences and options.remove_partial_sequences:
    outputs = mtf.dynamic_shift(outputs, -initial_position, length_dim, wrap=False)
  return outputs


def _done(
  position: mtf.Tensor,
  ids: mtf.Tensor,
  partial_sequences: mtf.Tensor,
  initial_position: mtf.Tensor,
  options: SamplingOptions,
) -> mtf.Tensor:
  """Bool mask `[<batch_dims>]` of the rows that have ended."""
  length_dim = ids.shape.dims[-1]
  # Rows may start at different positions, so each has its own end.
  done = mtf.greater_equal(position, length_dim.size)
  if options.max_steps:
    done = mtf.logical_or(done, mtf.greater_equal(position - initial_position, options.max_steps))
  if options.stop_at_token is not None:

    def count(x: mtf.Tensor) -> mtf.Tensor:
      stops = mtf.to_int32(mtf.equal(x, options.stop_at_token))
      return mtf.reduce_sum(stops, reduced_dim=length_dim)

    # A prompt may contain stop tokens of its own: one more ends the row.
    given = count(partial_sequences) if options.has_partial_sequences else 0
    done = mtf.logical_or(done, mtf.greater(count(ids), given))
  return done


def _choose(logits: mtf.Tensor, vocab_dim: mtf.Dimension, options: SamplingOptions) -> mtf.Tensor:
  """The next token of each row: int32, the dims of logits but vocab_dim."""
  if options.never_end and options.stop_at_token is not None:
    stop = mtf.constant(logits.mesh, options.stop_at_token, dtype=tf.int32)
    logits += mtf.one_hot(stop, vocab_dim, on_value=masked_logit(logits.dtype), dtype=logits.dtype)
  k = options.sampling_keep_top_k
  if k != -1 and k < vocab_dim.size:
    # Counted from 0, this is the largest of those to leave out.
    threshold = mtf.nth_largest_element(logits, k, vocab_dim)
    logits = mtf.where(
      mtf.less_equal(logits, threshold), mtf.constant(logits.mesh, -1e6, dtype=logits.dtype), logits
    )
  return mtf.sample_with_temperature(logits, vocab_dim, options.temperature)
