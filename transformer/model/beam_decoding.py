"""Beam search with a `Unitransformer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.model.decoding import DecodedModel, IncrementalModel


def beam_search(
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
  beam_dim, length_dim = inputs.shape.dims[-2:]
  decoder = IncrementalModel(
    model,
    inputs,
    # Nothing is given: a search begins with empty sequences.
    mtf.zeros(inputs.mesh, mtf.Shape([]), tf.int32),
    mtf.range(inputs.mesh, length_dim, dtype=tf.int32),
    variable_dtype,
    bos_id=bos_id,
    **encoder_arguments,
  )

  def logits_fn(
    step: mtf.Tensor, ids: mtf.Tensor, states: Sequence[mtf.Tensor]
  ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
    logits, new_states = decoder.step(step, ids, states)
    # Log probabilities add up over a sequence: in bfloat16 close beams would become equal.
    return mtf.cast(logits, tf.float32), new_states

  ids, _ = mtf.beam_search.beam_search(
    logits_fn,
    inputs,
    alpha,
    # Only their shapes: the pass over an empty sequence has filled them with what is not there.
    states=[mtf.zeros_like(s) for s in decoder.loop_states()],
    decode_length=decode_length,
    layout=model.layout,
    mesh_shape=model.mesh_shape,
  )
  # Beams come back sorted, the best first.
  return mtf.gather(ids, mtf.constant(ids.mesh, 0, dtype=tf.int32), beam_dim)
