"""Log-likelihoods of given targets: of texts, of files, of data sets."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data.eval_datasets import EvalDataset, reset_seeds
from mesh_tensorflow.transformer.data.text_io import (
  encode_inputs,
  get_inputs_from_file,
  targets_vocabulary,
)
from mesh_tensorflow.transformer.modes.checkpoints import named_checkpoints
from mesh_tensorflow.transformer.modes.input_fns import combined_dataset_input_fn
from mesh_tensorflow.transformer.modes.score_files import save_scores, save_scores_to_tfrecords

_LOG = logging.getLogger("mesh_tensorflow")
_MODULE = "mesh_tensorflow.transformer.utils"


@gin.configurable(module=_MODULE)
def compute_log_likelihoods(
  estimator: Any, input_fn: Any, checkpoint_path: str | None = None
) -> list[float]:
  """The log-likelihood of each row of targets.

  Args:
    estimator: a `Trainer` that scores (`score_in_predict_mode`).
    input_fn: see `Trainer.predict`.
    checkpoint_path: a checkpoint; None: the newest.

  Raises:
    ConfigError: the estimator does not score.
  """
  _check_scores(estimator, "compute_log_likelihoods")
  return [float(r["scores"]) for r in estimator.predict(input_fn, checkpoint_path=checkpoint_path)]


@gin.configurable(module=_MODULE)
def score_with_estimator(
  estimator: Any,
  input_fn: Any,
  eval_checkpoint_step: Any,
  model_dir: str,
  vocabulary: Any,
  score_postprocess_fn: Callable[..., Any] = save_scores,
  num_examples: int | None = None,
) -> Any:
  """Scores data with one checkpoint.

  Args:
    estimator: a `Trainer` that scores (`score_in_predict_mode`).
    input_fn: see `Trainer.predict`.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    model_dir: folder of checkpoints.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    score_postprocess_fn: called with the list of results, dicts of `scores` and `targets`, and the
      vocabulary.
    num_examples: so many results are used; None: all but the padding at the end, rows without a
      target.

  Returns:
    What `score_postprocess_fn` returns.

  Raises:
    ConfigError: there is no such checkpoint, or several; or the estimator does not score.
    DataError: there is nothing to score (`save_scores`).
  """
  results = _results(estimator, input_fn, eval_checkpoint_step, model_dir, num_examples)
  return score_postprocess_fn(list(results), vocabulary)


@gin.configurable(module=_MODULE)
def score_with_estimator_lazy(
  estimator: Any,
  input_fn: Any,
  eval_checkpoint_step: Any,
  model_dir: str,
  vocabulary: Any,
  score_postprocess_fn: Callable[..., Any] = save_scores_to_tfrecords,
  num_examples: int | None = None,
  num_examples_per_shard: int = 100000,
) -> None:
  """Scores data with one checkpoint, one part after the other: for more than fits in memory.

  Args:
    estimator: see `score_with_estimator`.
    input_fn: see there.
    eval_checkpoint_step: see there.
    model_dir: see there.
    vocabulary: see there.
    score_postprocess_fn: called for each part with the results, the vocabulary and `shard_idx`, its
      number from 0.
    num_examples: see there.
    num_examples_per_shard: number of results in a part.

  Raises:
    ConfigError: see there.
    DataError: there is nothing to score.
  """
  if num_examples_per_shard < 1:
    raise ConfigError(
      f"score_with_estimator_lazy: num_examples_per_shard (={num_examples_per_shard}) is below 1"
    )
  part: list[dict[str, Any]] = []
  shard = 0
  for result in _results(estimator, input_fn, eval_checkpoint_step, model_dir, num_examples):
    part.append(result)
    if len(part) == num_examples_per_shard:
      score_postprocess_fn(part, vocabulary, shard_idx=shard)
      part, shard = [], shard + 1
  if part:
    score_postprocess_fn(part, vocabulary, shard_idx=shard)
  elif not shard:
    raise DataError("score_with_estimator_lazy: there are no results; is the data set empty?")


def _check_scores(estimator: Any, what: str) -> None:
  if not estimator.score_in_predict_mode:
    raise ConfigError(
      f"{what}: the estimator makes outputs; to score targets, make it with "
      "score_in_predict_mode=True (run.mode 'score_eval', 'score_from_strings', ...)"
    )


def _check_postprocess_fn(function: Any, what: str) -> None:
  # Before anything is computed.
  if not callable(function):
    raise ConfigError(
      f"{what}.score_postprocess_fn is {function!r}; bind what becomes of the scores, @save_scores "
      "or @save_scores_to_tfrecords"
    )


def _results(
  estimator: Any, input_fn: Any, checkpoint_step: Any, model_dir: str, num_examples: int | None
) -> Iterator[dict[str, Any]]:
  """What the one chosen checkpoint predicts for the examples, without padding."""
  _check_scores(estimator, "score_with_estimator")
  step = -1 if checkpoint_step is None else checkpoint_step
  if step == "new":
    raise ConfigError("scores are of exactly one checkpoint, not of new ones as they appear")
  paths = list(named_checkpoints(step, model_dir))
  if len(paths) != 1 or paths[0] is None:
    found = f"there are {len(paths)} of {checkpoint_step!r}" if len(paths) > 1 else "there is none"
    raise ConfigError(
      f"scores are of exactly one checkpoint, but {found} in {model_dir} "
      "(run.eval_checkpoint_step; -1 is the newest)"
    )
  results = estimator.predict(input_fn, checkpoint_path=paths[0])
  return _without_padding(results) if num_examples is None else _first(results, num_examples)


def _first(results: Iterable[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
  if count > 0:
    for i, result in enumerate(results, 1):
      yield result
      if i == count:
        return


def _without_padding(results: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
  """All but the rows at the end that have no target."""
  held_back = []
  for result in results:
    held_back.append(result)
    targets = result["targets"]
    if bool(targets) if isinstance(targets, (str, bytes)) else np.any(targets):
      yield from held_back
      held_back = []


@gin.configurable(module=_MODULE)
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
  _check_postprocess_fn(score_postprocess_fn, "score_from_strings")
  targets = _lines(targets)
  if not targets:
    raise DataError("score_from_strings: there are no targets to score")
  if inputs is not None:
    inputs, targets = _paired(_lines(inputs), targets)
  elif model_type != "lm":
    raise DataError(
      f"score_from_strings.inputs is None, but a model of type {model_type!r} needs inputs"
    )
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
      inputs, vocabulary, sequence_length=sequence_length["inputs"], eos_id=eos_id
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


@gin.configurable(module=_MODULE)
def score_from_dataset(
  estimator: Any,
  vocabulary: Any,
  batch_size: int,
  sequence_length: Mapping[str, int],
  model_dir: str,
  eval_checkpoint_step: Any,
  dataset_split: str,
  score_dataset_fn: Callable[..., Sequence[EvalDataset]] | None = None,
  score_postprocess_fn: Callable[..., Any] = gin.REQUIRED,
  score_with_estimator_fn: Callable[..., Any] = score_with_estimator,
) -> Any:
  """Scores data sets, all as one.

  Args:
    estimator: a `Trainer` that scores (`score_in_predict_mode`).
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    batch_size: rows at a time.
    sequence_length: dict from feature to number of tokens.
    model_dir: folder of checkpoints.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    dataset_split: name of the split.
    score_dataset_fn: called with sequence_length, vocabulary and dataset_split; returns
      `EvalDataset`s.
    score_postprocess_fn: see `score_with_estimator`; `save_scores` writes files.
    score_with_estimator_fn: `score_with_estimator` or `score_with_estimator_lazy`.

  Returns:
    What `score_postprocess_fn` returns.

  Raises:
    ConfigError: there is no `score_dataset_fn`.
  """
  _check_postprocess_fn(score_postprocess_fn, "score_from_dataset")
  if score_dataset_fn is None:
    raise ConfigError(
      "score_from_dataset.score_dataset_fn is not bound; bind a function that returns "
      "EvalDatasets, such as @dataset.parallel_text_eval_datasets"
    )
  reset_seeds()
  datasets = score_dataset_fn(
    sequence_length=sequence_length, vocabulary=vocabulary, dataset_split=dataset_split
  )
  input_fn = combined_dataset_input_fn(
    [EvalDataset(*d) for d in datasets], batch_size, sequence_length
  )
  return score_with_estimator_fn(
    estimator,
    input_fn,
    eval_checkpoint_step,
    model_dir,
    vocabulary,
    score_postprocess_fn=score_postprocess_fn,
  )
