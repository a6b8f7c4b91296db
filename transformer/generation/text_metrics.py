"""Metrics of texts that a model writes: data sets decoded and compared with their targets.

Mode "eval" does it with a checkpoint, and evaluation in training with the weights as they are.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.training.validation import DecodedMetrics, TextMetrics
from mesh_tensorflow.transformer.data.bleu import Score
from mesh_tensorflow.transformer.data.eval_datasets import EvalDataset, reset_seeds
from mesh_tensorflow.transformer.data.text_io import (
  inputs_vocabulary,
  strip_ids,
  targets_vocabulary,
)
from mesh_tensorflow.transformer.data.vocabularies.base import (
  EOS_ID,
  Vocabularies,
  Vocabulary,
  as_text,
)
from mesh_tensorflow.transformer.generation.seq2seq import generate

_LOG = logging.getLogger("mesh_tensorflow")

# Of what is drawn where decoding draws: each evaluation in training draws the same, and leaves the
# counter of random numbers, which is a part of checkpoints, as it is.
_SEED = 12345

# `EvalDataset`s of a split.
MakeEvalDatasets = Callable[[], Sequence[EvalDataset]]


def with_metrics(given: Sequence[EvalDataset]) -> list[EvalDataset]:
  """Those of some data sets that have metrics; the log names the others."""
  datasets = [EvalDataset(*d) for d in given]
  left_out = [d.name for d in datasets if not d.metric_fns]
  if left_out:
    _LOG.info("data sets without metrics are left out: %s", left_out)
  return [d for d in datasets if d.metric_fns]


class Texts:
  """The examples of one data set: ids to decode or score, and texts to compare with.

  Args:
    dataset: the data set.
    sequence_length: dict from feature to number of tokens; None: as long as they are.
    vocabulary: a vocabulary or a pair.
    needed: features that examples must have.
    max_examples: number of examples at most, the first; None: all.

  Attributes:
    dataset: the data set.
    rows: ids of each input.
    inputs: text of each input.
    targets: of each example, postprocessed, as metrics take it.
    examples: as the data set gives them.

  Raises:
    DataError: there is no example, or one lacks a feature or is packed.
  """

  def __init__(
    self,
    dataset: EvalDataset,
    sequence_length: Mapping[str, int] | None,
    vocabulary: Vocabularies,
    needed: Sequence[str],
    max_examples: int | None = None,
  ):
    self.dataset = dataset
    self.rows: list[list[int]] = []
    self.inputs: list[Any] = []
    self.targets: list[Any] = []
    self.examples: list[dict[str, Any]] = []
    self._vocabulary = vocabulary
    read = dataset.dataset_fn(sequence_length=sequence_length).as_numpy_iterator()
    for example in itertools.islice(read, max_examples):
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

  def metric_names(self) -> list[str]:
    """Names of the metrics that are computed of texts: those of the targets themselves."""
    to_text = targets_vocabulary(self._vocabulary).decode
    perfect = [_no_bytes(to_text(strip_ids(e["targets"], EOS_ID))) for e in self.examples]
    return list(compute(self, self.predictions(perfect)))


def _text(example: Mapping[str, Any], feature: str, vocabulary: Vocabulary) -> Any:
  """The text of a feature: as it was before it was encoded, if the example has that."""
  given = example.get(f"{feature}_pretokenized")
  if given is None:
    given = vocabulary.decode(strip_ids(example[feature], EOS_ID))
  return _no_bytes(given)


def _no_bytes(decoded: object) -> Any:
  """Bytes as text; a text, or the list that a vocabulary decodes to, as it is."""
  return as_text(decoded) if isinstance(decoded, bytes) else decoded


def decode(
  estimator: Any,
  texts: Texts,
  sequence_length: Mapping[str, int],
  batch_size: int | None,
  vocabulary: Vocabularies,
  **options: Any,
) -> list[Any]:
  """What the model makes of the inputs of a data set; not postprocessed.

  Args:
    estimator: a `Trainer`, with variables restored or trained.
    texts: the data set.
    sequence_length: dict with "inputs" and "targets".
    batch_size: rows at a time; as many as in a training batch by default.
    vocabulary: a vocabulary or a pair.
    **options: of `seq2seq.generate`.
  """
  to_text = targets_vocabulary(vocabulary).decode
  rows = generate(estimator, texts.rows, sequence_length, batch_size, **options)
  return [_no_bytes(to_text(ids)) for ids in rows]


def compute(texts: Texts, predictions: Sequence[Any], are_scores: bool = False) -> dict[str, float]:
  """Computes the metrics of a data set that take the available kind (predictions or scores).

  Args:
    texts: the data set.
    predictions: of each example, postprocessed; or the log-likelihood of its targets.
    are_scores: whether they are log-likelihoods.
  """
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


class _GivenUp(Exception):
  """Decoding is to end before its next batch."""


class HeldOutTexts(TextMetrics):
  """Metrics of held-out data sets in training, decoded by the model as it is then.

  Args:
    estimator: a `Trainer`.
    datasets: the data sets; those without metrics are left out.
    max_batches: number of batches of each data set; None: all.

  Attributes:
    names: the metrics of each data set, by the data set's name.

  Raises:
    DataError: a data set is empty, or cannot be decoded.
  """

  def __init__(self, estimator: Any, datasets: MakeEvalDatasets, max_batches: int | None):
    self._estimator = estimator
    steps = estimator.steps
    rows = None if max_batches is None else max_batches * steps.batch_size
    # The examples are those of mode "eval"; data for training may use Python's generator, too.
    state = random.getstate()
    reset_seeds()
    self._texts = [
      Texts(d, steps.sequence_length, estimator.vocabulary, ("inputs", "targets"), rows)
      for d in with_metrics(datasets())
    ]
    random.setstate(state)
    self.names = {t.dataset.name: t.metric_names() for t in self._texts}

  def evaluate(self, goes_on: Callable[[], bool]) -> DecodedMetrics | None:
    """See `TextMetrics`."""

    def before_batch() -> None:
      if not goes_on():
        raise _GivenUp

    started, found, count = time.perf_counter(), {}, 0
    try:
      for texts in self._texts:
        found[texts.dataset.name] = self._metrics(texts, before_batch)
        count += len(texts.examples)
    except _GivenUp:
      return None
    seconds = time.perf_counter() - started
    return DecodedMetrics(found, f"{count:,} texts decoded in {seconds:.1f} s")

  def _metrics(self, texts: Texts, before_batch: Callable[[], None]) -> dict[str, float]:
    estimator = self._estimator
    outputs = decode(
      estimator,
      texts,
      estimator.steps.sequence_length,
      None,
      estimator.vocabulary,
      seed=_SEED,
      before_batch=before_batch,
    )
    # All workers go by the same numbers.
    found = by_chief(lambda: _numbers(compute(texts, texts.predictions(outputs))))
    return dict(found)


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
  return {name: float(value) for name, value in metrics.items()}
