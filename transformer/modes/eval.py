"""The modes "eval" and "score_eval": data sets decoded and compared, or their targets scored."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import model_files
from mesh_tensorflow.training.progress import write_scalars
from mesh_tensorflow.transformer.data.bleu import Score
from mesh_tensorflow.transformer.data.eval_datasets import EvalDataset, reset_seeds
from mesh_tensorflow.transformer.data.text_io import (
  get_step_from_checkpoint_path,
  inputs_vocabulary,
  strip_ids,
  targets_vocabulary,
  write_lines_to_file,
)
from mesh_tensorflow.transformer.data.vocabularies.base import (
  EOS_ID,
  Vocabularies,
  Vocabulary,
  as_text,
)
from mesh_tensorflow.transformer.generation.seq2seq import generate
from mesh_tensorflow.transformer.modes.chosen_checkpoints import (
  CheckpointStep,
  restored_checkpoints,
)
from mesh_tensorflow.transformer.modes.input_fns import examples_input_fn
from mesh_tensorflow.transformer.modes.job import Job, mode
from mesh_tensorflow.transformer.modes.perplexity_eval import perplexity_eval_of
from mesh_tensorflow.transformer.modes.score import score_with_estimator
from mesh_tensorflow.transformer.training.trainer import Trainer

_LOG = logging.getLogger("mesh_tensorflow")


class _Texts:
  """The examples of one data set: ids to decode or score, and texts to compare with."""

  def __init__(
    self,
    dataset: EvalDataset,
    sequence_length: Mapping[str, int] | None,
    vocabulary: Vocabularies,
    needed: Sequence[str],
  ):
    self.dataset = dataset
    self.rows: list[list[int]] = []
    self.inputs: list[Any] = []
    self.targets: list[Any] = []
    self.examples: list[dict[str, Any]] = []
    for example in dataset.dataset_fn(sequence_length=sequence_length).as_numpy_iterator():
      missing = [k for k in needed if k not in example]
      if missing or "inputs_segmentation" in example:
        raise DataError(
          f"eval data set {dataset.name!r} has features {sorted(example)}: to evaluate texts it "
          f"must yield single (not packed) examples with {' and '.join(map(repr, needed))}"
        )
      if "inputs" in example:
        self.rows.append([int(i) for i in np.trim_zeros(example["inputs"], "b")])
        self.inputs.append(_text(example, "inputs", inputs_vocabulary(vocabulary)))
      target = _text(example, "targets", targets_vocabulary(vocabulary))
      self.targets.append(dataset.postprocess_fn(target, example=example, is_target=True))
      self.examples.append(example)
    if not self.examples:
      raise DataError(f"eval data set {dataset.name!r} is empty")
    encode = inputs_vocabulary(vocabulary).encode
    # A row has an EOS more than its text, if nothing was cut.
    texts = [(t, r) for t, r in zip(self.inputs, self.rows) if isinstance(t, str)]
    cut = sum(len(encode(t)) >= len(r) > 0 for t, r in texts)
    if cut:
      _LOG.warning(
        "eval data set %s: %d of %d inputs are cut to %d tokens (run.sequence_length)",
        dataset.name, cut, len(self.rows), max(map(len, self.rows)),
      )  # fmt: skip

  def longest(self, feature: str) -> int:
    """The largest number of ids of a feature; 0 if the examples do not have it."""
    return max(len(np.trim_zeros(e.get(feature, ()), "b")) for e in self.examples)

  def predictions(self, outputs: Sequence[Any]) -> list[Any]:
    """Postprocessed model outputs of the examples, as the metric functions take them."""
    return [
      self.dataset.postprocess_fn(output, example=example)
      for output, example in zip(outputs, self.examples)
    ]

  def write(self, model_dir: str, folder: str) -> None:
    """Writes inputs and targets, to be compared with predictions line by line."""
    base = os.path.join(folder, self.dataset.name)
    if self.inputs:
      _note_lines(model_dir, self.inputs, f"{base}_inputs")
    _note_lines(model_dir, self.targets, f"{base}_targets")


def _text(example: Mapping[str, Any], feature: str, vocabulary: Vocabulary) -> Any:
  """The text of a feature: as it was before it was encoded, if the example has that."""
  given = example.get(f"{feature}_pretokenized")
  if given is None:
    given = vocabulary.decode(strip_ids(example[feature], EOS_ID))
  return _no_bytes(given)


def _no_bytes(decoded: object) -> Any:
  """Bytes as text; a text, or the list that a vocabulary decodes to, as it is."""
  return as_text(decoded) if isinstance(decoded, bytes) else decoded


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
  datasets = _datasets_with_metrics(
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
  cached = [_Texts(d, sequence_length, vocabulary, needed) for d in datasets]
  if output_eval_examples:
    for texts in cached:
      texts.write(model_dir, folder)
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
        outputs = _decodes(estimator, texts, sequence_length, batch_size, vocabulary)
      seconds = time.perf_counter() - started
      # The data set postprocesses the model's texts for comparison; scores are numbers already.
      predictions = list(outputs) if eval_with_score else texts.predictions(outputs)
      name = texts.dataset.name
      if output_eval_examples:
        _note_lines(model_dir, predictions, os.path.join(folder, f"{name}_{step}_predictions"))
      results[name] = _metrics(texts, predictions, eval_with_score)
      done = f"{len(predictions):,} texts {'scored' if eval_with_score else 'decoded'}"
      _report(name, step, results[name], f"{done} in {seconds:.1f} s")
      scalars = {f"eval/{name}/{k}": v for k, v in results[name].items()}
      write_scalars(folder, step, scalars, model_dir=model_dir)
  return results


def _datasets_with_metrics(given: Sequence[EvalDataset]) -> list[EvalDataset]:
  datasets = [EvalDataset(*d) for d in given]
  left_out = [d.name for d in datasets if not d.metric_fns]
  if left_out:
    _LOG.info("data sets without metrics are left out: %s", left_out)
  return [d for d in datasets if d.metric_fns]


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


def _decodes(
  estimator: Trainer,
  texts: _Texts,
  sequence_length: Mapping[str, int],
  batch_size: int,
  vocabulary: Vocabularies,
) -> list[Any]:
  decode = targets_vocabulary(vocabulary).decode
  rows = generate(estimator, texts.rows, sequence_length, batch_size)
  return [_no_bytes(decode(ids)) for ids in rows]


def _scores(
  estimator: Trainer,
  texts: _Texts,
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


def _metrics(texts: _Texts, predictions: Sequence[Any], are_scores: bool) -> dict[str, float]:
  """Computes the metrics of a data set that take the available kind (predictions or scores)."""
  metrics: dict[str, float] = {}
  left_out = []
  for metric_fn in texts.dataset.metric_fns:
    if _takes(metric_fn) in (None, "scores" if are_scores else "predictions"):
      metrics.update(_as_dict(metric_fn(texts.targets, predictions)))
    else:
      left_out.append(getattr(metric_fn, "__name__", repr(metric_fn)))
  if left_out and are_scores and not metrics:
    _LOG.warning(
      "eval data set %s: the metric %s is left out, because it takes texts (targets, predictions): "
      "in mode 'score_eval' those that take (targets, scores) get the log-likelihoods of the "
      "targets, and mean_score is their mean. Texts are compared in mode 'eval'",
      texts.dataset.name, ", ".join(left_out),
    )  # fmt: skip
    metrics["mean_score"] = float(np.mean(predictions))
  elif left_out:
    kind, mode_of_it = ("texts", "eval") if are_scores else ("scores", "score_eval")
    _LOG.info("metrics of %s are left out: %s; they are for mode %r", kind, left_out, mode_of_it)
  return metrics


def _takes(metric_fn: Callable[..., object]) -> str | None:
  """Kind of values a metric function takes besides targets: the name of its second argument.

  Returns:
    "predictions" or "scores"; None if the signature tells neither.
  """
  try:
    parameters = list(inspect.signature(metric_fn).parameters.values())
  except (TypeError, ValueError):
    return None
  name = parameters[1].name if len(parameters) > 1 else None
  return name if name in ("predictions", "scores") else None


def _as_dict(metrics: Any) -> dict[str, float]:
  """Converts a metric function's result, a dict or a tf.Summary of scalars, to a dict of floats."""
  if not isinstance(metrics, Mapping):
    metrics = {v.tag: v.simple_value for v in metrics.value}
  return {k: v if isinstance(v, Score) else float(v) for k, v in metrics.items()}


@mode("eval", finds_lengths=True)
def run_eval(job: Job) -> dict[str, dict[str, float]]:
  """Decodes and compares; without a data set that has metrics as the mode "perplexity_eval"."""
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
