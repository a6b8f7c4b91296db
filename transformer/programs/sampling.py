"""Generation programs, for continuations or targets of inputs, and limits of their lengths."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.programs.forward import Forward


def sample_step(steps: Forward, length: int, rows: int, **options: Any) -> mtf.Function:
  """Continues given tokens; an encoder-decoder makes the targets of given inputs.

  Args:
    steps: the model on its mesh.
    length: tokens of a row, the given ones included.
    rows: rows at a time.
    **options: of `Unitransformer.sample_autoregressive` or `Bitransformer.decode`.

  Returns:
    An `mtf.function` of (int32 [rows, length]) that returns the same shape (for an
    encoder-decoder with `max_decode_length`, that length).
  """
  generate = steps.generator()
  dims = [mtf.Dimension("batch", rows), mtf.Dimension("length", length)]

  @mtf.function(steps.mesh_impl, [mtf.TensorSpec(dims, tf.int32, "inputs")])
  def sample_step(inputs: mtf.Tensor) -> mtf.Tensor:
    return generate(inputs, variable_dtype=steps.variable_dtype, **options)

  return sample_step


def row_length(sequence_length: Mapping[str, int]) -> int:
  """The number of ids in a row of a language model, prompt and continuation together."""
  return sequence_length.get("targets", max(sequence_length.values()))


def longest_sequence(model: Any) -> int | None:
  """The length of the longest sequence that a model can take, if its positions are a table.

  Args:
    model: a `Unitransformer`; or an encoder-decoder, of which the encoder counts.
  """
  table = getattr(getattr(model, "encoder", model), "max_length_dim", None)
  return None if table is None else table.size


def decoding_options(model: Any, length: int) -> dict[str, Any]:
  """Decoding arguments with which a model's outputs do not contain the inputs.

  How an encoder-decoder decodes is bound in gin (`Bitransformer.decode.beam_size`, ...); if
  `max_decode_length` is not, it is `length`.
  """
  decode = getattr(model, "decode", None)
  if decode is None:
    return {"remove_partial_sequences": True}
  takes_length = "max_decode_length" in inspect.signature(decode).parameters
  if takes_length and not _bound("Bitransformer.decode.max_decode_length"):
    return {"max_decode_length": length}
  return {}


def _bound(parameter: str) -> bool:
  try:
    return gin.query_parameter(parameter) is not None
  except ValueError:
    return False
