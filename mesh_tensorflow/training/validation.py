"""Evaluation on held-out data while a model is trained, and what follows from it."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from mesh_settings.hints import did_you_mean
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training.best_checkpoint import Evaluations

_LOG = logging.getLogger("mesh_tensorflow")

# Of what shuffles: each evaluation sees the same examples, whatever the seed of the training is.
_SEED = 12345

# Held-out data sets, by name: functions that make data sets of single examples.
MakeDatasets = Callable[[], Mapping[str, Callable[[], tf.data.Dataset]]]


# `Program.reading`.
Reading = Callable[[tf.data.Dataset], Iterable[Mapping[str, tf.Tensor]]]


class TextMetrics(Protocol):
  """The evaluation of a model by texts that it writes: data sets that are decoded and compared.

  Attributes:
    names: the metrics of each data set, by the data set's name.
  """

  names: Mapping[str, Sequence[str]]

  def evaluate(self, goes_on: Callable[[], bool]) -> DecodedMetrics | None:
    """Decodes with the variables as they are, each time the same examples.

    Args:
      goes_on: asked before each batch, by all workers alike; False gives up.

    Returns:
      The metrics; None if given up.
    """


@dataclasses.dataclass(frozen=True)
class DecodedMetrics:
  """What was found by decoding.

  Attributes:
    values: metrics by name, of each data set.
    text: how many texts were decoded, in words.
  """

  values: Mapping[str, Mapping[str, float]]
  text: str


class Evaluator(Protocol):
  """The evaluation of a model on data, as a training asks for it.

  Attributes:
    shown: the metrics that are written as scalars, among them "loss".
    lower_is_better: those of all metrics whose lowest value is the best.
    without_texts: end of the error for an unknown metric, where no data set is decoded.
  """

  shown: Sequence[str] = ("loss",)
  lower_is_better: Sequence[str] = ("loss",)
  without_texts: str = ""

  def check(self, dataset: tf.data.Dataset) -> Sequence[str]:
    """Raises `DataError` for data that the model cannot take; returns the features it takes."""

  def metrics(
    self, dataset: tf.data.Dataset, max_batches: int | None, goes_on: Callable[[], bool]
  ) -> dict[str, float] | None:
    """The metrics of a data set, with the variables as they are, by one program traced once.

    Args:
      dataset: single examples.
      max_batches: number of batches; None: all.
      goes_on: asked before each batch, by all workers alike; False gives up.

    Returns:
      Metrics by name, among them "loss"; {} if there was nothing to evaluate; None if given up.
    """

  def metric_names(self) -> Sequence[str]:
    """The names in what `metrics` returns that can tell which checkpoint is best."""
    return self.shown

  def text_metrics(self, max_batches: int | None) -> TextMetrics | None:
    """Prepares metrics of decoded texts; None if no held-out data set has any.

    Args:
      max_batches: number of batches of each data set; None: all.

    Raises:
      DataError: a data set that has metrics is empty, or cannot be decoded.
    """
    return None

  def joined(self, found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several data sets together, of those of each: their means."""
    return {name: sum(m[name] for m in found) / len(found) for name in found[0]}

  def fingerprint(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
    """Numbers that tell whether two evaluations saw the same examples; none if they always do."""
    return ()

  def text(self, metrics: Mapping[str, float]) -> str:
    """The metrics in a line of the report."""


def compare_by_metric(
  settings: TrainerSettings, evaluator: Evaluator | None, evaluations: Evaluations
) -> str | None:
  """Sets the metric by which evaluations are compared; see `Evaluations.compare_by`.

  Args:
    settings: of the training.
    evaluator: knows of which metrics the lowest value is the best.
    evaluations: those so far.

  Returns:
    A line that says that earlier evaluations do not count any more; None if they do, or nothing is
    evaluated.
  """
  if not settings.eval_every_steps or evaluator is None:
    return None
  metric, mode = settings.best_metric, settings.best_metric_mode
  # "NAME/loss" is that of a data set.
  lower = (
    metric.rpartition("/")[2] in evaluator.lower_is_better if mode == "auto" else mode == "min"
  )
  return evaluations.compare_by(metric, lower)


def nothing_to_do(
  settings: TrainerSettings, step: int, last: int, evaluations: Evaluations
) -> str | None:
  """A line that says why no step is left to do; None if some are.

  Args:
    settings: of the training.
    step: number of steps done.
    last: the step at which training ends.
    evaluations: those so far.
  """
  if step >= last:
    return f"step {step} is reached already (train_steps is {last})"
  why = _reason_to_stop(settings, evaluations)
  if why is None:
    return None
  return f"training was stopped early at step {step}: {why}; with a larger one it goes on"


def _reason_to_stop(settings: TrainerSettings, evaluations: Evaluations) -> str | None:
  """Why training ends before its last step, in words; None if it does not."""
  waited, patience = evaluations.without_improvement, settings.early_stopping_patience
  if patience is None or waited < patience:
    return None
  delta = settings.early_stopping_min_delta
  by = f" by more than {delta:g}" if delta else ""
  what = "the loss" if evaluations.metric == "loss" else evaluations.metric
  return (
    f"in {waited} evaluation{'s' if waited > 1 else ''} {what} was not "
    f"{'lower' if evaluations.lower_is_better else 'higher'}{by} than "
    f"{evaluations.reference_value:.4f} (run.early_stopping_patience)"
  )


class Validator:
  """Does the evaluations of one training.

  The model is evaluated after each `eval_every_steps`, and after the last one, on the variables
  that are trained. Each time it sees the same examples. Whether a step was evaluated is a part of
  checkpoints: a training that was interrupted has the evaluations of one that was not.

  Args:
    settings: of the training: when is evaluated, and what follows from it.
    make_datasets: returns the held-out data sets.
    evaluator: evaluates the trained model.
    evaluations: the results so far; each evaluation is added to them.
    reading: of the program that is trained.

  Raises:
    DataError: there is no example to evaluate, or one has not the features of the model.
    ConfigError: there are no held-out data sets; one is endless, and all of it was asked for; or
      `best_metric` is no metric of theirs.
  """

  def __init__(
    self,
    settings: TrainerSettings,
    make_datasets: MakeDatasets | None,
    evaluator: Evaluator,
    evaluations: Evaluations,
    reading: Reading,
  ):
    self._settings = settings
    self._evaluator = evaluator
    self._evaluations = evaluations
    self._sets: dict[str, _HeldOut] = {}
    self._texts: TextMetrics | None = None
    if not settings.eval_every_steps:
      return
    if make_datasets is None:
      raise ConfigError(
        "run.eval_every_steps: there are no held-out data sets to evaluate on; give them"
      )
    evaluations.keeps = settings.keep_best
    if not settings.keep_best:
      evaluations.kept_step = -1
    makers = make_datasets()
    if not makers:
      raise DataError("run.eval_dataset_fn returns no data set to evaluate in training")
    self._sets = {
      n: _HeldOut(n, make, settings.eval_steps, evaluator, reading) for n, make in makers.items()
    }
    for held_out in self._sets.values():
      held_out.check()
    self._texts = self._chosen_texts()

  def _chosen_texts(self) -> TextMetrics | None:
    """What decodes, if `best_metric` is a metric of texts; None if it is one of batches.

    Raises:
      ConfigError: it is neither.
    """
    metric, several = self._settings.best_metric, len(self._sets) > 1
    if metric in self._evaluator.shown:
      return None
    names = self._evaluator.metric_names()
    legal = [*names, *(f"{n}/{k}" for n in self._sets for k in names if several)]
    if metric in legal:
      return None
    # Only now, since it reads all texts of a data set.
    texts = self._evaluator.text_metrics(self._settings.eval_steps)
    if texts is not None:
      own = dict.fromkeys(k for metrics in texts.names.values() for k in metrics)
      of_texts = [*own, *(f"{n}/{k}" for n in texts.names for k in texts.names[n] if several)]
      if metric in of_texts:
        return texts
      legal += of_texts
    of_none = "" if texts is not None else self._evaluator.without_texts
    raise ConfigError(
      f"{self._settings.named('best_metric')} = {metric!r}: there is no such metric; there are "
      f"{', '.join(legal)}{of_none}{did_you_mean(metric, legal)}"
    )

  def steps_left(self, step: int) -> int:
    """Number of steps until the next evaluation; `sys.maxsize` if there are none."""
    every = self._settings.eval_every_steps
    return every - step % every if every else sys.maxsize

  def is_due(self, step: int, last: int) -> bool:
    """True if an evaluation is due now.

    Args:
      step: number of steps done.
      last: the step at which training ends.
    """
    every = self._settings.eval_every_steps
    if not every or not step or self._evaluations.last_step == step:
      return False
    return step % every == 0 or step == last

  def run(self, step: int, goes_on: Callable[[], bool]) -> tuple[str, dict[str, float]] | None:
    """Evaluates.

    Args:
      step: number of steps done.
      goes_on: asked before each batch, by all workers alike; False gives up.

    Returns:
      A line, and scalars by name; None if it was given up: then it counts as not done.
    """
    found: dict[str, dict[str, float]] = {}
    for name, held_out in self._sets.items():
      metrics = held_out.evaluate(goes_on)
      if metrics is None:
        return None
      found[name] = metrics
    decoded = self._texts.evaluate(goes_on) if self._texts is not None else None
    if self._texts is not None and decoded is None:
      return None
    whole = self._evaluator.joined(list(found.values()))
    shown = self._evaluator.shown
    values = {k: whole[k] for k in shown}
    if len(found) > 1:
      values |= {f"{n}/{k}": m[k] for n, m in found.items() for k in shown}
    if decoded is not None:
      values |= _means(decoded.values)
      if len(found) > 1:
        values |= {f"{n}/{k}": x for n, m in decoded.values.items() for k, x in m.items()}
    value = values.get(self._settings.best_metric)
    if value is None:
      raise DataError(
        f"this evaluation gave no {self._settings.best_metric} "
        f"({self._settings.named('best_metric')}); it gave {', '.join(values)}"
      )
    is_best = self._evaluations.take(step, value, self._settings.early_stopping_min_delta)
    line = self._line(step, whole, found, decoded, is_best)
    return line, {f"eval/{k}": x for k, x in values.items()}

  def _line(
    self,
    step: int,
    whole: Mapping[str, float],
    found: Mapping[str, Mapping[str, float]],
    decoded: DecodedMetrics | None,
    is_best: bool,
  ) -> str:
    seen, patience = self._evaluations, self._settings.early_stopping_patience
    words = "the best so far"
    if not is_best:
      name = "" if seen.metric == "loss" else f"{seen.metric} "
      words = f"best {name}{seen.best_value:.4f} at step {seen.best_step}"
      if seen.best_step < 0:
        words = "not finite"
    if patience is not None and seen.without_improvement:
      words += f"; no improvement {seen.without_improvement} of {patience}"
    of_each = ""
    if len(found) > 1:
      of_each = "  " + ", ".join(f"{n} {m['loss']:.4f}" for n, m in found.items())
    if decoded is not None:
      of_each += "".join(f"  {k} {x:.4f}" for k, x in _means(decoded.values).items())
      if len(decoded.values) > 1:
        for n, m in decoded.values.items():
          of_each += "".join(f"  {n}/{k} {x:.4f}" for k, x in m.items())
      of_each += f"  ({decoded.text})"
    return f"step {step:>7}  eval {self._evaluator.text(whole)}{of_each}  {words}"

  def reason_to_stop(self) -> str | None:
    """Why training ends now, in words; None if it does not."""
    if not self._settings.eval_every_steps:
      return None
    return _reason_to_stop(self._settings, self._evaluations)


def _means(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
  """The mean of each metric over the data sets that have it."""
  of_metric: dict[str, list[float]] = {}
  for metrics in found.values():
    for name, value in metrics.items():
      of_metric.setdefault(name, []).append(value)
  return {name: sum(values) / len(values) for name, values in of_metric.items()}


class _HeldOut:
  """One held-out data set, evaluated repeatedly.

  It is created once and iterated anew each time, since creating it may read and encode a whole
  corpus. If iterating gives other examples, as with shuffling, it is created anew each time.
  """

  def __init__(
    self,
    name: str,
    make: Callable[[], tf.data.Dataset],
    max_batches: int | None,
    evaluator: Evaluator,
    reading: Reading,
  ):
    self._name = name
    self._make = make
    self._max_batches = max_batches
    self._evaluator, self._reading = evaluator, reading
    self._dataset: tf.data.Dataset | None = None
    self._first: tuple[float, ...] | None = None
    self._makes_anew = False

  def _made(self) -> tf.data.Dataset:
    if self._dataset is None or self._makes_anew:
      # Shuffles have the same order each time, and in all workers. Training data is not affected:
      # it sets its seed when it is made.
      tf.random.set_seed(_SEED)
      self._dataset = self._make()
    return self._dataset

  def check(self) -> None:
    """Checks the data before training starts; see `Validator`."""
    dataset = self._made()
    names = self._evaluator.check(dataset)
    if self._max_batches is None and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
      raise ConfigError(
        f"the held-out data set {self._name!r} is endless, and run.eval_steps is None, all of it: "
        "bind run.eval_steps, the number of batches"
      )
    # One that shuffles has another order each time it is gone through.
    first, again = (self._first_example(dataset) for _ in range(2))
    self._makes_anew = any(not np.array_equal(first[n], again[n]) for n in names)

  def _first_example(self, dataset: tf.data.Dataset) -> Mapping[str, tf.Tensor]:
    for example in self._reading(dataset.take(1)):
      return example
    raise DataError(
      f"the held-out data set {self._name!r}, for evaluation in training, has no example"
    )

  def evaluate(self, goes_on: Callable[[], bool]) -> dict[str, float] | None:
    """The metrics; None if `goes_on` says that there will be none."""
    metrics = self._evaluated(goes_on)
    if metrics is None:
      return None
    seen = self._evaluator.fingerprint(metrics)
    if not self._makes_anew and self._first not in (None, seen):
      # All workers come to this: what they compare are numbers of the whole batch.
      _LOG.info("data set %s has other examples each time: it is made anew", self._name)
      self._makes_anew = True
      metrics = self._evaluated(goes_on)
      if metrics is None:
        return None
      seen = self._evaluator.fingerprint(metrics)
    if self._first is None:
      self._first = seen
    return metrics

  def _evaluated(self, goes_on: Callable[[], bool]) -> dict[str, float] | None:
    metrics = self._evaluator.metrics(self._made(), self._max_batches, goes_on)
    if metrics is not None and not metrics:
      raise DataError(f"data set {self._name!r} has no tokens to evaluate")
    return metrics
