"""Generation of tokens: sampling and beam search, as methods of a `Unitransformer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.model import beam_caches, decoding
from mesh_tensorflow.transformer.model.decoding import DecodedModel, IncrementalModel


def _beam_search(
  model: DecodedModel,
  inputs: mtf.Tensor,
  decode_length: mtf.Tensor | int | None,
  variable_dtype: mtf.VariableDType | tf.DType,
  alpha: float,
  bos_id: int = 0,
  **encoder_arguments: Any,
) -> mtf.Tensor:
  """The best sequences; see `Unitransformer.beam_search`.

  Args:
    model: an autoregressive `Unitransformer`.
    inputs: int32 zeros `[<batch_dims>, beam, length]`.
    decode_length: number of steps at most, or None.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    alpha: exponent of the length penalty.
    bos_id: the input at position 0.
    **encoder_arguments: what `IncrementalModel` takes.

  Returns:
    int32 `[<batch_dims>, length]`.
  """
  if not model.autoregressive:
    raise errors.ConfigError(f"beam_search: model {model.name} is not autoregressive")
  if model.input_full_attention:
    raise errors.UnsupportedError(
      f"beam_search: model {model.name} has input_full_attention, and a search starts from "
      "nothing; use sample_autoregressive"
    )
  if inputs.shape.ndims < 3:
    raise errors.ShapeError(
      f"beam_search: inputs must have the dimensions [<batch_dims>, beam, length], got {inputs}"
    )
  *batch_dims, beam_dim, length_dim = inputs.shape.dims
  share = beam_dim.size <= beam_caches.MOST_BEAMS
  decoder = IncrementalModel(
    model,
    inputs,
    # Nothing is given: a search begins with empty sequences.
    mtf.zeros(inputs.mesh, mtf.Shape([]), tf.int32),
    mtf.range(inputs.mesh, length_dim, dtype=tf.int32),
    variable_dtype,
    bos_id=bos_id,
    beam_dim=beam_dim if share else None,
    **encoder_arguments,
  )

  def logits_fn(
    step: mtf.Tensor, ids: mtf.Tensor, states: Sequence[mtf.Tensor]
  ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
    if share:
      *states, ancestors = states
      ancestors = beam_caches.with_own(ancestors, step)
      logits, new_states = decoder.step(step, ids, states, beam_caches.seen(ancestors))
      new_states.append(ancestors)
    else:
      logits, new_states = decoder.step(step, ids, states)
    # Log probabilities add up over a sequence: in bfloat16 close beams would become equal.
    return mtf.cast(logits, tf.float32), new_states

  # Only their shapes: the pass over an empty sequence has filled them with what is not there.
  states = [mtf.zeros_like(s) for s in decoder.loop_states()]
  if share:
    states.append(beam_caches.no_ancestors(inputs.mesh, [*batch_dims, beam_dim], length_dim))
  ids, _ = mtf.beam_search.beam_search(
    logits_fn,
    inputs,
    alpha,
    states=states,
    decode_length=decode_length,
    layout=model.layout,
    mesh_shape=model.mesh_shape,
  )
  # Beams come back sorted, the best first.
  return mtf.gather(ids, mtf.constant(ids.mesh, 0, dtype=tf.int32), beam_dim)


_FLOAT32 = mtf.VariableDType(tf.float32)


class Generation:
  """Methods of an autoregressive model that make tokens, one position at a time."""

  @gin.configurable(module="Unitransformer")
  def sample_autoregressive(
    self: decoding.DecodedModel,
    partial_sequences: mtf.Tensor,
    stop_at_token: int | None = 1,
    max_steps: int | None = None,
    temperature: float = 0.0,
    variable_dtype: mtf.VariableDType | tf.DType = _FLOAT32,
    encoder_output: mtf.Tensor | None = None,
    encoder_sequence_id: mtf.Tensor | None = None,
    encoder_inputs: mtf.Tensor | None = None,
    shared_params: dict[str, Any] | None = None,
    has_partial_sequences: bool = True,
    encoder_layer_outputs: list[mtf.Tensor] | None = None,
    never_end: bool = False,
    remove_partial_sequences: bool = False,
    sampling_keep_top_k: int = -1,
    bos_id: int = 0,
  ) -> mtf.Tensor:
    """Continues sequences, one token at a time, with cached keys and values.

    Rows that have ended go on until all have: cut each at its first `stop_at_token`.

    Args:
      partial_sequences: int32 `[<batch_dims>, length]`: given tokens, then zeros.
      stop_at_token: a row ends with this id (new ones, beyond those given); None: never.
      max_steps: a row ends after so many new tokens; None or 0: at the end of `length`.
      temperature: 0 takes the likeliest token; 1 draws from the model's distribution.
      variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
      encoder_output: `[<batch_dims>, memory_length, d_model]`.
      encoder_sequence_id: int32 `[<batch_dims>, memory_length]`.
      encoder_inputs: int32 `[<batch_dims>, memory_length]`.
      shared_params: dict from a parameter's name to a tensor or embedding.
      has_partial_sequences: False if `partial_sequences` is all zeros.
      encoder_layer_outputs: list of tensors.
      never_end: never choose `stop_at_token`.
      remove_partial_sequences: return only the new tokens, moved to the left.
      sampling_keep_top_k: choose among so many likeliest tokens; -1: among all.
      bos_id: the input at position 0.

    Returns:
      int32 `[<batch_dims>, length]`.

    Raises:
      ConfigError: the model is not autoregressive, or sampling_keep_top_k is 0 or below -1.
    """
    return decoding.sample_autoregressive(
      self,
      partial_sequences,
      decoding.SamplingOptions(
        stop_at_token=stop_at_token,
        max_steps=max_steps,
        temperature=temperature,
        has_partial_sequences=has_partial_sequences,
        never_end=never_end,
        remove_partial_sequences=remove_partial_sequences,
        sampling_keep_top_k=sampling_keep_top_k,
        bos_id=bos_id,
      ),
      variable_dtype=variable_dtype,
      encoder_output=encoder_output,
      encoder_sequence_id=encoder_sequence_id,
      encoder_inputs=encoder_inputs,
      shared_params=shared_params,
      encoder_layer_outputs=encoder_layer_outputs,
    )

  def beam_search(
    self: decoding.DecodedModel,
    inputs: mtf.Tensor,
    decode_length: mtf.Tensor | int | None,
    variable_dtype: mtf.VariableDType | tf.DType = _FLOAT32,
    encoder_output: mtf.Tensor | None = None,
    encoder_sequence_id: mtf.Tensor | None = None,
    encoder_inputs: mtf.Tensor | None = None,
    alpha: float = 0.6,
    shared_params: dict[str, Any] | None = None,
    encoder_layer_outputs: list[mtf.Tensor] | None = None,
    bos_id: int = 0,
  ) -> mtf.Tensor:
    """The best sequences, found by `mtf.beam_search.beam_search`.

    Args:
      inputs: int32 zeros `[<batch_dims>, beam, length]`.
      decode_length: number of tokens at most, if less than length: a number, or an int32 scalar
        tensor; or None.
      variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
      encoder_output: `[<batch_dims>, memory_length, d_model]`.
      encoder_sequence_id: int32 `[<batch_dims>, memory_length]`.
      encoder_inputs: int32 `[<batch_dims>, memory_length]`.
      alpha: exponent of the length penalty.
      shared_params: dict from a parameter's name to a tensor or embedding.
      encoder_layer_outputs: list of tensors.
      bos_id: the input at position 0.

    Returns:
      int32 `[<batch_dims>, length]`; zeros after the end of the sequence.

    Raises:
      ConfigError: the model is not autoregressive.
      UnsupportedError: the model has input_full_attention.
      ShapeError: inputs have no beam dimension.
    """
    return _beam_search(
      self,
      inputs,
      decode_length,
      variable_dtype,
      alpha,
      bos_id=bos_id,
      encoder_output=encoder_output,
      encoder_sequence_id=encoder_sequence_id,
      encoder_inputs=encoder_inputs,
      shared_params=shared_params,
      encoder_layer_outputs=encoder_layer_outputs,
    )
