"""The mode "score_from_dataset": log-likelihoods of the targets of data sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gin

from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.data.eval_datasets import EvalDataset, reset_seeds
from mesh_tensorflow.transformer.modes.input_fns import combined_dataset_input_fn
from mesh_tensorflow.transformer.modes.job import Job
from mesh_tensorflow.transformer.modes.registry import mode
from mesh_tensorflow.transformer.modes.score_files import show_scores
from mesh_tensorflow.transformer.modes.scoring import check_postprocess_fn, score_with_estimator


@mode("score_from_dataset", scores=True)
def run_score_from_dataset(job: Job) -> Any:
  """Scores, and shows the first scores."""
  result = score_from_dataset(
    job.make_estimator(),
    job.vocabulary,
    job.batch_size,
    job.sequence_length,
    job.model_dir,
    job.eval_checkpoint_step,
    job.dataset_split,
  )
  show_scores(result)
  return result


@gin.configurable(module="mesh_tensorflow.transformer.utils")
@affects("report")
@takes(batch_size=COUNT)
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
  check_postprocess_fn(score_postprocess_fn, "score_from_dataset")
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
