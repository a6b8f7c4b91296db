"""Programs that predict: log-likelihoods of given targets, or new outputs; limits of lengths."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import DataError, ShapeError
from mesh_tensorflow.transformer.data import text_io
from mesh_tensorflow.transformer.data.text2self import dynamic_text2self
from mesh_tensorflow.transformer.model.forward import Forward

_LOG = logging.getLogger("mesh_tensorflow")


def predicting_features(steps: Forward, names: Sequence[str], score: bool) -> list[str]:
  """Selects the features of the data that the prediction program takes.

  Args:
    steps: the programs of the model.
    names: features of the data.
    score: True to score given targets, False to predict.

  Raises:
    DataError: a needed feature is missing.
  """
  model_type = steps.model_type
  if not score:
    if "inputs" not in names:
      raise DataError(
        f"the data has features {sorted(names)}, but a model of type {model_type!r} needs 'inputs' "
        "to predict"
      )
    return ["inputs"]
  needed = ("targets",) if model_type in ("lm", "delimited_lm") else ("inputs", "targets")
  missing = [n for n in needed if n not in names]
  if missing:
    raise DataError(
      f"the data has features {sorted(names)}, but a model of type {model_type!r} needs "
      f"{', '.join(map(repr, missing))} to score targets"
    )
  if model_type == "lm" and "inputs" in names:
    _LOG.warning(
      "the data has 'inputs', and model_type is 'lm': they are put in front of the targets, and "
      "count in the scores; for scores of the targets alone use model_type 'delimited_lm'"
    )
  return list(names)


def predictor(
  steps: Forward,
  names: Sequence[str],
  score: bool,
  predict_fn: Callable[..., mtf.Tensor] | None = None,
  batch_size: int | None = None,
) -> Callable[..., dict[str, tf.Tensor]]:
  """Builds the function that `Trainer.predict` and an exported model compute.

  Args:
    steps: the programs of the model.
    names: the features, in the order of the function's arguments.
    score: True to score given targets, False to predict.
    predict_fn: see `score_step` and `predict_step`.
    batch_size: rows per call; by default that of training.

  Returns:
    A function of int32 tensors [batch, length] that returns a dict: `inputs` and `outputs`; or, if
    `score`, `scores` and `targets`. Ids after the first EOS are zeros, except in targets that
    contain the inputs.
  """
  size = batch_size or steps.batch_size
  if not score:
    predict = predict_step(steps, size, predict_fn)
    return lambda inputs: {
      "inputs": text_io.clean_decodes(inputs),
      "outputs": text_io.clean_decodes(predict(inputs)),
    }
  program = score_step(steps, names, size, predict_fn)
  whole = steps.model_type == "delimited_lm" or (steps.model_type == "lm" and "inputs" in names)

  def scores(*features: tf.Tensor) -> dict[str, tf.Tensor]:
    result = program(*features)
    return {**result, "targets": result["targets"] if whole else text_io.clean_decodes(
      result["targets"]
    )}  # fmt: skip

  return scores


def score_step(
  steps: Forward,
  names: Sequence[str],
  batch_size: int,
  predict_fn: Callable[..., mtf.Tensor] | None = None,
) -> mtf.Function:
  """Log-likelihoods of targets.

  Args:
    steps: the programs of the model.
    names: the features, in the order of the program's arguments.
    batch_size: rows at a time.
    predict_fn: called with `model`, `features` and `variable_dtype` for the scores [batch], in
      place of the model.

  Returns:
    An `mtf.function` of the features that returns a dict: `scores`, float32 [batch], the sum of
    the natural logarithms of the probabilities of the positive targets (for a "delimited_lm": those
    after the inputs); and `targets`, int32 [batch, length], inputs included if they are joined.
  """

  @mtf.function(steps.mesh_impl, [steps.prediction_spec(n, batch_size) for n in names])
  def score(*args: mtf.Tensor) -> dict[str, mtf.Tensor]:
    features = dict(zip(names, args))
    # Model types "lm" and "delimited_lm" take one sequence.
    joins = steps.model_type in ("lm", "delimited_lm") and "inputs" in features
    if joins:
      features = dynamic_text2self(features)
    targets = features["targets"]
    if predict_fn is not None:
      scores = predict_fn(model=steps.model, features=features, variable_dtype=steps.variable_dtype)
      return {"scores": mtf.to_float(scores), "targets": targets}
    # Any mode but "train" is without dropout.
    logits, _ = steps.logits_and_loss(features, "score", 1, compute_loss=False)
    if len(logits.shape) != 3:
      raise ShapeError(
        f"scores are made of logits of 3 dimensions (batch, length, vocab), not {logits.shape}"
      )
    nats = mtf.layers.softmax_cross_entropy_with_logits(
      mtf.to_float(logits), mtf.maximum(targets, 0), steps.model.output_vocab_dim
    )
    scores = -mtf.reduce_sum(nats * steps.scored(targets), reduced_dim=targets.shape.dims[-1])
    return {"scores": scores, "targets": targets}

  return score


def predict_step(
  steps: Forward,
  batch_size: int,
  predict_fn: Callable[..., mtf.Tensor] | None = None,
) -> mtf.Function:
  """Outputs for inputs.

  Args:
    steps: the programs of the model.
    batch_size: rows at a time.
    predict_fn: called with `model`, `features` and `variable_dtype` for the outputs
      [batch, length], in place of the model.

  Returns:
    An `mtf.function` of `inputs`, int32 [batch, length], that returns int32 [batch, any]. Cut
    each row at its first end of sequence.
  """

  @steps.decoding_function([steps.prediction_spec("inputs", batch_size)])
  def predict(inputs: mtf.Tensor) -> mtf.Tensor:
    if predict_fn is not None:
      return predict_fn(
        model=steps.model, features={"inputs": inputs}, variable_dtype=steps.variable_dtype
      )
    length = steps.sequence_length["targets"]
    options = decoding_options(steps.model, length)
    if not hasattr(steps.model, "decode"):
      longest = longest_sequence(steps.model)
      if longest is not None:
        # Inputs and outputs of a language model share its positions.
        length = max(0, min(length, longest - inputs.shape.dims[-1].size))
      inputs = mtf.pad(inputs, [0, length], "length")
    return steps.generator()(inputs, variable_dtype=steps.variable_dtype, **options)

  return predict


def continuation(
  steps: Forward, length: int, batch_size: int
) -> Callable[..., dict[str, tf.Tensor]]:
  """Builds the function that continues prompts with an "lm" model, in the form of `predictor`.

  Args:
    steps: the programs of the model.
    length: number of ids of a row, prompt included; see `row_length`.
    batch_size: rows per call.

  Returns:
    A function of int32 [batch, length] that returns a dict of `inputs` and `outputs`, the latter
    with the given ids in front.
  """
  sample = steps.sample_step(length, batch_size)
  return lambda inputs: {"inputs": inputs, "outputs": text_io.clean_decodes(sample(inputs))}


def row_length(sequence_length: Mapping[str, int]) -> int:
  """The number of ids in a row of a language model, prompt and continuation together."""
  return sequence_length.get("targets", max(sequence_length.values()))


def longest_sequence(model: object) -> int | None:
  """The length of the longest sequence that a model can take, if its positions are a table.

  Args:
    model: a `Unitransformer`; or an encoder-decoder, of which the encoder counts.
  """
  table = getattr(getattr(model, "encoder", model), "max_length_dim", None)
  return None if table is None else table.size


def decoding_options(model: object, length: int) -> dict[str, Any]:
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
