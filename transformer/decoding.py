"""Incremental decoding of a `Unitransformer`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.context import Context
from mesh_tensorflow.transformer.sequence_utils import autoregressive_inputs

if TYPE_CHECKING:
  from mesh_tensorflow.transformer.unitransformer import Unitransformer


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


def sample_autoregressive(
  model: Unitransformer,
  partial_sequences: mtf.Tensor,
  options: SamplingOptions,
  variable_dtype: mtf.VariableDType,
  encoder_sequence_id: mtf.Tensor | None = None,
  **encoder_arguments: Any,
) -> mtf.Tensor:
  """Continues sequences; see `Unitransformer.sample_autoregressive`.

  Args:
    model: an autoregressive `Unitransformer`.
    partial_sequences: int32 `[<batch_dims>, length]`.
    options: `SamplingOptions`.
    variable_dtype: an `mtf.VariableDType`.
    encoder_sequence_id: int32 `[<batch_dims>, memory_length]`.
    **encoder_arguments: other arguments of both contexts.

  Returns:
    int32 `[<batch_dims>, length]`.
  """
  if not model.autoregressive:
    raise errors.ConfigError(f"sample_autoregressive: model {model.name} is not autoregressive")
  k = options.sampling_keep_top_k
  if k != -1 and k <= 0:
    raise errors.ConfigError(
      f"sample_autoregressive: sampling_keep_top_k must be positive, or -1 for all tokens, got {k}"
    )
  length_dim = partial_sequences.shape.dims[-1]
  mesh = partial_sequences.mesh
  positions = mtf.range(mesh, length_dim, dtype=tf.int32)
  given = mtf.not_equal(partial_sequences, 0)
  initial_position = mtf.reduce_sum(mtf.to_int32(given), reduced_dim=length_dim)
  priority = positions
  if model.input_full_attention:
    # The given tokens, and the input that ends them, see each other.
    priority = positions * mtf.to_int32(mtf.greater(positions, initial_position))
  constant_states: list[Any] = []
  common = dict(
    model=model,
    mesh=mesh,
    batch_dims=partial_sequences.shape.dims[:-1],
    length_dim=length_dim,
    variable_dtype=variable_dtype,
    sequence_id=None if encoder_sequence_id is None else 1,
    encoder_sequence_id=encoder_sequence_id,
    constant_states=constant_states,
    **encoder_arguments,
  )

  first_part = Context(
    **common,
    mode="first_part",
    position=positions,
    position_is_default=True,
    new_states=[],
    initial_position=initial_position,
    read_priority=priority,
    write_priority=priority,
    inputs=partial_sequences,
  )
  with mtf.variable_scope(model.name):
    # The logits are not used: this fills the caches.
    model._call_internal(first_part, autoregressive_inputs(partial_sequences))
  states = first_part.new_states
  if not options.has_partial_sequences:
    states = [mtf.zeros_like(s) for s in states]

  def cond_fn(position: mtf.Tensor, ids: mtf.Tensor, *states: mtf.Tensor) -> mtf.Tensor:
    del states
    done = _done(position, ids, partial_sequences, initial_position, options)
    return mtf.logical_not(mtf.reduce_all(done))

  def body_fn(position: mtf.Tensor, ids: mtf.Tensor, *states: mtf.Tensor) -> list[mtf.Tensor]:
    # Before position 0 there is no token: the gather gives 0.
    token = mtf.gather(ids, position - 1, length_dim)
    if options.bos_id:
      token += mtf.to_int32(mtf.equal(position, 0)) * options.bos_id
    context = Context(
      **common,
      mode="incremental",
      position=position,
      states=list(states),
      new_states=[],
      initial_position=position,
      read_priority=position,
      write_priority=priority,
      inputs=token,
    )
    with mtf.variable_scope(model.name):
      logits = model._call_internal(context, token)
    new_token = _choose(logits, model.output_vocab_dim, options)
    # Beyond the end of the sequence the one-hot is zero.
    ids += new_token * mtf.one_hot(position, length_dim, dtype=tf.int32)
    return [position + 1, ids, *context.new_states]

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
  """Which rows have ended: bool `[<batch_dims>]`."""
  length_dim = ids.shape.dims[-1]
  done = mtf.greater_equal(position, length_dim.size)
  if options.max_steps:
    done = mtf.logical_or(done, mtf.greater_equal(position - initial_position, options.max_steps))
  if options.stop_at_token is not None:

    def count(x: mtf.Tensor) -> mtf.Tensor:
      stops = mtf.to_int32(mtf.equal(x, options.stop_at_token))
      return mtf.reduce_sum(stops, reduced_dim=length_dim)

    given = count(partial_sequences) if options.has_partial_sequences else 0
    done = mtf.logical_or(done, mtf.greater(count(ids), given))
  return done


def _choose(logits: mtf.Tensor, vocab_dim: mtf.Dimension, options: SamplingOptions) -> mtf.Tensor:
  """The next token of each row: int32, the dims of logits but vocab_dim."""
  if options.never_end and options.stop_at_token is not None:
    stop = mtf.constant(logits.mesh, options.stop_at_token, dtype=tf.int32)
    logits += mtf.one_hot(stop, vocab_dim, on_value=-1e9, dtype=logits.dtype)
  k = options.sampling_keep_top_k
  if k != -1 and k < vocab_dim.size:
    threshold = mtf.nth_largest_element(logits, k, vocab_dim)
    logits = mtf.where(
      mtf.less_equal(logits, threshold), mtf.constant(logits.mesh, -1e6, dtype=logits.dtype), logits
    )
  return mtf.sample_with_temperature(logits, vocab_dim, options.temperature)
