"""Log-likelihoods of given targets, by one checkpoint: for the modes that score."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gin
import numpy as np

from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.modes.chosen_checkpoints import named_checkpoints
from mesh_tensorflow.transformer.modes.score_files import save_scores, save_scores_to_tfrecords

_LOG = logging.getLogger("mesh_tensorflow")
_MODULE = "mesh_tensorflow.transformer.utils"


@gin.configurable(module=_MODULE)
@affects("report")
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
@affects("report")
@takes(num_examples=COUNT)
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
    num_examples: number of results; None: all but the padding at the end, rows without a target.

  Returns:
    What `score_postprocess_fn` returns.

  Raises:
    ConfigError: there is no such checkpoint, or several; or the estimator does not score.
    DataError: there is nothing to score (`save_scores`).
  """
  results = _results(estimator, input_fn, eval_checkpoint_step, model_dir, num_examples)
  return score_postprocess_fn(list(results), vocabulary)


@gin.configurable(module=_MODULE)
@affects("report")
@takes(num_examples=COUNT, num_examples_per_shard=COUNT)
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
    estimator: a `Trainer` that scores (`score_in_predict_mode`).
    input_fn: see `Trainer.predict`.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    model_dir: folder of checkpoints.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    score_postprocess_fn: called for each part with the results, the vocabulary and `shard_idx`, its
      number from 0.
    num_examples: number of results; None: all but the padding at the end, rows without a target.
    num_examples_per_shard: number of results in a part.

  Raises:
    ConfigError: there is no such checkpoint, or several; the estimator does not score; or
      `num_examples_per_shard` is below 1.
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


def check_postprocess_fn(function: Any, what: str) -> None:
  """Raises `ConfigError` if nothing is said of what becomes of the scores."""
  # Before anything is computed.
  if not callable(function):
    raise ConfigError(
      f"{what}.score_postprocess_fn is {function!r}; bind what becomes of the scores, @save_scores "
      "or @save_scores_to_tfrecords"
    )


def _results(
  estimator: Any, input_fn: Any, checkpoint_step: Any, model_dir: str, num_examples: int | None
) -> Iterator[dict[str, Any]]:
  """Yields the predictions of the one chosen checkpoint, without padding rows."""
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
      # Without asking for another one, for which a batch of padding may be computed.
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
