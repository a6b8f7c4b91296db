"""The mode "score_from_strings": log-likelihoods of texts, or of the lines of files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.transformer.data.text_io import (
  encode_inputs,
  get_inputs_from_file,
  targets_vocabulary,
)
from mesh_tensorflow.transformer.modes.job import Job
from mesh_tensorflow.transformer.modes.registry import mode
from mesh_tensorflow.transformer.modes.score_files import show_scores
from mesh_tensorflow.transformer.modes.scoring import check_postprocess_fn, score_with_estimator


@mode("score_from_strings", scores=True)
def run_score_from_strings(job: Job) -> Any:
  """Scores, and shows the first scores."""
  result = score_from_strings(
    job.make_estimator(),
    job.vocabulary,
    job.model_type,
    job.batch_size,
    job.sequence_length,
    job.model_dir,
    job.eval_checkpoint_step,
  )
  show_scores(result)
  return result


@gin.configurable(module="mesh_tensorflow.transformer.utils")
@affects("report")
@takes(batch_size=COUNT)
def score_from_strings(
  estimator: Any,
  vocabulary: Any,
  model_type: str,
  batch_size: int,
  sequence_length: Mapping[str, int],
  model_dir: str,
  eval_checkpoint_step: Any,
  inputs: Any = gin.REQUIRED,
  targets: Any = gin.REQUIRED,
  score_postprocess_fn: Callable[..., Any] = gin.REQUIRED,
  eos_id: int = 1,
  score_eos: bool = True,
  score_with_estimator_fn: Callable[..., Any] = score_with_estimator,
) -> Any:
  """Scores texts, or the lines of files.

  For a model of type "lm" inputs are what comes before the targets and does not count in the score,
  and no end of sequence is added.

  Args:
    estimator: a `Trainer` that scores (`score_in_predict_mode`).
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    model_type: see `build_model`.
    batch_size: rows at a time.
    sequence_length: dict from feature to number of tokens.
    model_dir: folder of checkpoints.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    inputs: a list of texts, the name of a file of them, or None. If there are fewer inputs than
      targets, each is for the same number of targets.
    targets: a list of texts, or the name of a file. A single one is for all inputs.
    score_postprocess_fn: see `score_with_estimator`; `save_scores` writes files.
    eos_id: the end-of-sequence id.
    score_eos: whether targets end with it, so that it counts in the score.
    score_with_estimator_fn: `score_with_estimator` or `score_with_estimator_lazy`.

  Returns:
    What `score_postprocess_fn` returns.

  Raises:
    DataError: a file is missing; there are no targets; or the numbers of inputs and targets do not
      go together.
  """
  check_postprocess_fn(score_postprocess_fn, "score_from_strings")
  targets = _lines(targets)
  if not targets:
    raise DataError("score_from_strings: there are no targets to score")
  if inputs is not None:
    inputs, targets = _paired(_lines(inputs), targets)
  elif model_type != "lm":
    raise DataError(
      f"score_from_strings.inputs is None, but a model of type {model_type!r} needs inputs"
    )
  features = _features(
    inputs, targets, vocabulary, model_type, batch_size, sequence_length, eos_id, score_eos
  )

  def input_fn(params: Any = None) -> tf.data.Dataset:
    del params
    return tf.data.Dataset.from_tensor_slices(features).batch(batch_size)

  return score_with_estimator_fn(
    estimator,
    input_fn,
    eval_checkpoint_step,
    model_dir,
    vocabulary,
    score_postprocess_fn=score_postprocess_fn,
    num_examples=len(targets),
  )


def _features(
  inputs: list[str] | None,
  targets: list[str],
  vocabulary: Any,
  model_type: str,
  batch_size: int,
  sequence_length: Mapping[str, int],
  eos_id: int,
  score_eos: bool,
) -> dict[str, Any]:
  """The ids of all texts, by the feature that they are."""
  encode = functools.partial(encode_inputs, model_type=model_type, batch_size=batch_size)
  features = {
    # A vocabulary that is no tuple is that of both sides.
    "targets": encode(
      targets,
      targets_vocabulary(vocabulary),
      sequence_length=sequence_length["targets"],
      eos_id=eos_id if score_eos else 0,
      unscored_prefix=inputs if model_type == "lm" else None,
    )
  }
  if model_type != "lm":
    features["inputs"] = encode(
      inputs or (), vocabulary, sequence_length=sequence_length["inputs"], eos_id=eos_id
    )
  return features


def _lines(texts: Any) -> list[str]:
  """A list of texts, read from a file if its name is given."""
  return get_inputs_from_file(texts) if isinstance(texts, str) else list(texts)


def _paired(inputs: list[str], targets: list[str]) -> tuple[list[str], list[str]]:
  """Equally many inputs and targets, by repetition of those that are fewer."""
  if len(inputs) < len(targets):
    if not inputs or len(targets) % len(inputs):
      raise DataError(
        f"score_from_strings: the number of targets ({len(targets)}) is no multiple of the number "
        f"of inputs ({len(inputs)})"
      )
    times = len(targets) // len(inputs)
    return [x for x in inputs for _ in range(times)], targets
  if len(targets) < len(inputs):
    if len(targets) > 1:
      raise DataError(
        f"score_from_strings: {len(inputs)} inputs, but {len(targets)} targets; give as many, a "
        "multiple, or a single one for all inputs"
      )
    return inputs, targets * len(inputs)
  return inputs, targets
