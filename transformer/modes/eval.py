"""The modes "eval" and "score_eval": data sets decoded and compared, or their targets scored."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.training import model_files
from mesh_tensorflow.training.progress import write_scalars
from mesh_tensorflow.transformer.data.bleu import Score
from mesh_tensorflow.transformer.data.eval_datasets import EvalDataset, reset_seeds
from mesh_tensorflow.transformer.data.text_io import (
  get_step_from_checkpoint_path,
  write_lines_to_file,
)
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies
from mesh_tensorflow.transformer.generation import text_metrics
from mesh_tensorflow.transformer.modes.chosen_checkpoints import (
  CheckpointStep,
  restored_checkpoints,
)
from mesh_tensorflow.transformer.modes.input_fns import examples_input_fn, tell_training_split
from mesh_tensorflow.transformer.modes.job import Job, mode
from mesh_tensorflow.transformer.modes.perplexity_eval import perplexity_eval_of
from mesh_tensorflow.transformer.modes.score import score_with_estimator
from mesh_tensorflow.transformer.training.trainer import Trainer

_LOG = logging.getLogger("mesh_tensorflow")


def eval_model(
  estimator: Trainer,
  vocabulary: Vocabularies,
  sequence_length: dict[str, int] | None,
  batch_size: int,
  dataset_split: str,
  model_dir: str,
  eval_dataset_fn: Callable[..., Sequence[EvalDataset]] | None,
  eval_summary_dir: str | None,
  eval_checkpoint_step: CheckpointStep,
  eval_with_score: bool = False,
  output_eval_examples: bool = True,
  eval_dir_suffix: str | None = None,
  score_with_estimator_fn: Callable[..., Any] = score_with_estimator,
) -> dict[str, dict[str, float]]:
  """Decodes data sets, or scores their targets, with each of the chosen checkpoints.

  Writes to the summary folder the scalars `eval/<data set>/<metric>` and, if
  `output_eval_examples`, `<data set>_inputs`, `<data set>_targets` and
  `<data set>_<step>_predictions`; prints one line for each data set and checkpoint.

  Args:
    estimator: the `Trainer`, or a function of the sequence length that makes it.
    vocabulary: a vocabulary or a pair.
    sequence_length: dict from feature to number of tokens; None, if `estimator` is a function: as
      long as the longest examples.
    batch_size: rows at a time.
    dataset_split: name of the split.
    model_dir: folder of checkpoints.
    eval_dataset_fn: called with sequence_length, vocabulary and dataset_split; those of its
      `EvalDataset`s that have no metrics are left out.
    eval_summary_dir: where files and scalars go; `model_dir/<split>_eval` by default.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    eval_with_score: metrics get, in place of texts, the log-likelihoods of the targets. As in
      seqio, a metric whose second argument is called `scores` is for these, one with `predictions`
      for texts, another one for both. Without one for scores the mean of the log-likelihoods is
      given, as "mean_score", with a warning.
    output_eval_examples: whether texts are written.
    eval_dir_suffix: added to the name of the folder, after "_".
    score_with_estimator_fn: what scores: called as `score_with_estimator` is; it returns the
      scores, or a tuple with them first.

  Returns:
    For each data set its metrics with the last checkpoint; empty if none has metrics.

  Raises:
    ConfigError: there is no data set function, no sequence length, or no checkpoint.
    DataError: a data set is empty, or is not of single examples.
  """
  if eval_dataset_fn is None:
    raise ConfigError("run.eval_dataset_fn is not bound: there is no data set to evaluate on")
  if sequence_length is None and not callable(estimator):
    raise ConfigError("run.sequence_length is not bound")
  reset_seeds()
  datasets = text_metrics.with_metrics(
    eval_dataset_fn(
      sequence_length=sequence_length, vocabulary=vocabulary, dataset_split=dataset_split
    )
  )
  if not datasets:
    return {}
  folder = eval_summary_dir or os.path.join(model_dir, f"{dataset_split}_eval")
  if eval_dir_suffix:
    folder += f"_{eval_dir_suffix}"
  needed = ("targets",) if eval_with_score else ("inputs", "targets")
  cached = [text_metrics.Texts(d, sequence_length, vocabulary, needed) for d in datasets]
  if output_eval_examples:
    for texts in cached:
      _write(texts, model_dir, folder)
  longest = {k: max(t.longest(k) for t in cached) for k in ("inputs", "targets")}
  if sequence_length is None:
    sequence_length = {k: max(n, 1) for k, n in longest.items()}
  if callable(estimator):
    estimator = estimator(sequence_length)
  results: dict[str, dict[str, float]] = {}
  for path in restored_checkpoints(estimator, eval_checkpoint_step, model_dir):
    step = estimator.global_step
    for texts in cached:
      started = time.perf_counter()
      outputs: Sequence[Any]
      if eval_with_score:
        outputs = _scores(estimator, texts, batch_size, path, vocabulary, score_with_estimator_fn)
      else:
        outputs = text_metrics.decode(estimator, texts, sequence_length, batch_size, vocabulary)
      seconds = time.perf_counter() - started
      # The data set postprocesses the model's texts for comparison; scores are numbers already.
      predictions = list(outputs) if eval_with_score else texts.predictions(outputs)
      name = texts.dataset.name
      if output_eval_examples:
        _note_lines(model_dir, predictions, os.path.join(folder, f"{name}_{step}_predictions"))
      results[name] = text_metrics.compute(texts, predictions, eval_with_score)
      done = f"{len(predictions):,} texts {'scored' if eval_with_score else 'decoded'}"
      _report(name, step, results[name], f"{done} in {seconds:.1f} s")
      scalars = {f"eval/{name}/{k}": v for k, v in results[name].items()}
      write_scalars(folder, step, scalars, model_dir=model_dir)
  return results


def _write(texts: text_metrics.Texts, model_dir: str, folder: str) -> None:
  """Writes inputs and targets, to be compared with predictions line by line."""
  base = os.path.join(folder, texts.dataset.name)
  if texts.inputs:
    _note_lines(model_dir, texts.inputs, f"{base}_inputs")
  _note_lines(model_dir, texts.targets, f"{base}_targets")


def _report(name: str, step: int, metrics: Mapping[str, float], done: str) -> None:
  numbers = "  ".join(f"{k} {v:.2f}" for k, v in metrics.items())
  print(f"step {step}  {name}: {numbers}  ({done})", flush=True)
  for metric, value in metrics.items():
    if isinstance(value, Score):
      print(f"  {metric}: {value.signature}", flush=True)


def _note_lines(model_dir: str, lines: Sequence[object], filename: str) -> None:
  """Writes texts that were evaluated, one a line; see `model_files.notes`."""
  model_files.notes(
    model_dir,
    os.path.dirname(filename),
    os.path.basename(filename),
    lambda inside: write_lines_to_file(lines, filename, inside=inside),
  )


def _scores(
  estimator: Trainer,
  texts: text_metrics.Texts,
  batch_size: int,
  path: str,
  vocabulary: Vocabularies,
  score_with_estimator_fn: Callable[..., Any],
) -> list[float]:
  scores = score_with_estimator_fn(
    estimator,
    examples_input_fn(texts.examples, batch_size),
    get_step_from_checkpoint_path(path),
    os.path.dirname(path),
    vocabulary,
    num_examples=len(texts.examples),
  )
  # With the texts of targets, and perhaps inputs, behind them; or alone.
  scores = scores[0] if isinstance(scores, tuple) else scores
  if scores is None or len(scores) != len(texts.examples):
    raise ConfigError(
      f"eval_model: score_with_estimator_fn returned "
      f"{'nothing' if scores is None else f'{len(scores)} scores'} for {len(texts.examples)} "
      "examples; use score_with_estimator with save_scores"
    )
  return list(scores)


@mode("eval", finds_lengths=True)
def run_eval(job: Job) -> dict[str, dict[str, float]]:
  """Decodes and compares; without a data set that has metrics as the mode "perplexity_eval"."""
  tell_training_split(job.dataset_split)
  # First of all the devices: when data is read they cannot be made any more.
  estimator = job.make_estimator_of_lengths()
  if job.eval_dataset_fn is not None:
    results = _eval_job(job, estimator)
    if results or job.sequence_length is None:
      return results
  # The folder of evaluations, of one data set or several.
  folder = job.eval_summary_dir or os.path.join(job.model_dir, f"{job.dataset_split}_eval")
  return perplexity_eval_of(job, estimator, folder)


@mode("score_eval", finds_lengths=True, scores=True)
def run_score_eval(job: Job) -> dict[str, dict[str, float]]:
  """Gives the metrics the log-likelihoods of the targets."""
  tell_training_split(job.dataset_split)
  return _eval_job(job, job.make_estimator_of_lengths())


def _eval_job(job: Job, estimator: Trainer) -> dict[str, dict[str, float]]:
  return eval_model(
    estimator,
    job.vocabulary,
    job.sequence_length,
    job.batch_size,
    job.dataset_split,
    job.model_dir,
    job.eval_dataset_fn,
    job.eval_summary_dir,
    job.eval_checkpoint_step,
    eval_with_score=job.mode.scores,
    output_eval_examples=job.output_eval_examples,
    eval_dir_suffix=job.eval_dir_suffix,
  )
