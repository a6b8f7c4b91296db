"""Evaluation on held-out data while a model is trained, and what follows from it."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, COUNT_OR_ZERO, NOT_BELOW_ZERO
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training.best_checkpoint import Evaluations
from mesh_tensorflow.transformer.files import records
from mesh_tensorflow.transformer.programs import evaluation, training_data
from mesh_tensorflow.transformer.training.estimator import Estimator

_LOG = logging.getLogger("mesh_tensorflow")

# Of what shuffles: each evaluation sees the same examples, whatever the seed of the training is.
_SEED = 12345


@dataclasses.dataclass(frozen=True)
class Validation:
  """Settings of the evaluations during training; an argument of `Trainer`.

  The model is evaluated after each `every` steps, and after the last one, teacher-forced, by one
  program that is traced once, on the variables that are trained. Each time it sees the same
  examples. Whether a step was evaluated is a part of checkpoints: a training that was interrupted
  has the evaluations of one that was not.

  Attributes:
    every: steps between evaluations; 0: there are none.
    make_datasets: returns a dict from names to functions that make data sets of single examples.
    max_batches: number of batches of each data set; None: all.
    keep_best: True to keep the checkpoint with the lowest loss beside the newest ones.
    patience: number of evaluations in a row without improvement after which training ends; None:
      it does not end early.
    min_delta: for `patience`, the loss must decrease by more than this, in nats, to improve.

  Raises:
    ConfigError: a value that is none of these.
  """

  every: int = 0
  make_datasets: Callable[[], Mapping[str, Callable[[], tf.data.Dataset]]] | None = None
  max_batches: int | None = 100
  keep_best: bool = True
  patience: int | None = None
  min_delta: float = 0.0

  def __post_init__(self) -> None:
    for name, rule in (
      ("every", COUNT_OR_ZERO),
      ("max_batches", COUNT.or_none()),
      ("patience", COUNT.or_none()),
      ("min_delta", NOT_BELOW_ZERO),
    ):
      if not rule.is_legal(getattr(self, name)):
        raise ConfigError(f"Validation: {name} = {getattr(self, name)!r}: it must be {rule.legal}")
    if self.every and self.make_datasets is None:
      raise ConfigError("Validation: give make_datasets, which returns the held-out data sets")
    if self.patience is not None and not self.every:
      raise ConfigError(
        f"run.early_stopping_patience is {self.patience}, but nothing is evaluated in training: "
        "bind run.eval_every_steps, the steps between evaluations"
      )

  def nothing_to_do(self, step: int, last: int, evaluations: Evaluations) -> str | None:
    """A line that says why no step is left to do; None if some are.

    Args:
      step: number of steps done.
      last: the step at which training ends.
      evaluations: those so far.
    """
    if step >= last:
      return f"step {step} is reached already (train_steps is {last})"
    why = self.reason_to_stop(evaluations)
    if why is None:
      return None
    return f"training was stopped early at step {step}: {why}; with a larger one it goes on"

  def reason_to_stop(self, evaluations: Evaluations) -> str | None:
    """Why training ends before its last step, in words; None if it does not."""
    waited = evaluations.without_improvement
    if self.patience is None or waited < self.patience:
      return None
    by = f" by more than {self.min_delta:g}" if self.min_delta else ""
    return (
      f"in {waited} evaluation{'s' if waited > 1 else ''} the loss was not lower{by} than "
      f"{evaluations.reference_loss:.4f} (run.early_stopping_patience)"
    )


class Validator:
  """Does the evaluations of one training.

  Args:
    how: the settings of the evaluations.
    model: the trained model.
    evaluations: the results so far; each evaluation is added to them.

  Raises:
    DataError: there is no example to evaluate, or one has not the features of the model.
    ConfigError: a data set is endless, and all of it was asked for.
  """

  def __init__(self, how: Validation, model: Estimator, evaluations: Evaluations):
    self._how = how
    self._model = model
    self._evaluations = evaluations
    self._sets: dict[str, _HeldOut] = {}
    if not how.every:
      return
    evaluations.keeps = how.keep_best
    if not how.keep_best:
      evaluations.kept_step = -1
    makers = how.make_datasets() if how.make_datasets is not None else {}
    if not makers:
      raise DataError("run.eval_dataset_fn returns no data set to evaluate in training")
    self._sets = {n: _HeldOut(n, make, how.max_batches) for n, make in makers.items()}
    for held_out in self._sets.values():
      held_out.check(model)

  def steps_left(self, step: int) -> int:
    """Number of steps until the next evaluation; `sys.maxsize` if there are none."""
    every = self._how.every
    return every - step % every if every else sys.maxsize

  def is_due(self, step: int, last: int) -> bool:
    """True if an evaluation is due now.

    Args:
      step: number of steps done.
      last: the step at which training ends.
    """
    if not self._how.every or not step or self._evaluations.last_step == step:
      return False
    return step % self._how.every == 0 or step == last

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
      metrics = held_out.evaluate(self._model, goes_on)
      if metrics is None:
        return None
      found[name] = metrics
    whole = _of_all(found)
    is_best = self._evaluations.take(step, whole["loss"], self._how.min_delta)
    scalars = {f"eval/{k}": whole[k] for k in _SHOWN}
    if len(found) > 1:
      scalars |= {f"eval/{n}/{k}": m[k] for n, m in found.items() for k in _SHOWN}
    return self._line(step, whole, found, is_best), scalars

  def _line(
    self, step: int, whole: Mapping[str, float], found: Mapping[str, Any], is_best: bool
  ) -> str:
    seen = self._evaluations
    words = "the best so far"
    if not is_best:
      words = f"best {seen.best_loss:.4f} at step {seen.best_step}"
      if seen.best_step < 0:
        words = "not finite"
    if self._how.patience is not None and seen.without_improvement:
      words += f"; no improvement {seen.without_improvement} of {self._how.patience}"
    of_each = ""
    if len(found) > 1:
      of_each = "  " + ", ".join(f"{n} {m['loss']:.4f}" for n, m in found.items())
    return (
      f"step {step:>7}  eval loss {whole['loss']:.4f} nats  "
      f"{whole['bits_per_token']:.4f} bits/token  accuracy {whole['token_accuracy']:.4f}  "
      f"({whole['num_eval_tokens']:,.0f} tokens){of_each}  {words}"
    )

  def reason_to_stop(self) -> str | None:
    """Why training ends now, in words; None if it does not."""
    return self._how.reason_to_stop(self._evaluations) if self._how.every else None


_SHOWN = ("loss", "bits_per_token", "token_accuracy")


def _of_all(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
  """The metrics of all data sets together, each token alike."""
  tokens = sum(m["num_eval_tokens"] for m in found.values())
  loss = sum(m["total_nats"] for m in found.values()) / tokens
  return {
    "loss": loss,
    "bits_per_token": loss / math.log(2.0),
    "token_accuracy": sum(m["token_accuracy"] * m["num_eval_tokens"] for m in found.values())
    / tokens,
    "num_eval_tokens": tokens,
  }


class _HeldOut:
  """One held-out data set, evaluated repeatedly.

  It is created once and iterated anew each time, since creating it may read and encode a whole
  corpus. If iterating gives other examples, as with shuffling, it is created anew each time.
  """

  def __init__(self, name: str, make: Callable[[], tf.data.Dataset], max_batches: int | None):
    self._name = name
    self._make = make
    self._max_batches = max_batches
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

  def check(self, model: Estimator) -> None:
    """Checks the data before training starts; see `Validator`."""
    dataset = self._made()
    names = training_data.model_features(dataset)
    model.steps.check_features(names)
    training_data.check_lengths(dataset, names, model.steps)
    if self._max_batches is None and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
      raise ConfigError(
        f"the held-out data set {self._name!r} is endless, and run.eval_steps is None, all of it: "
        "bind run.eval_steps, the number of batches"
      )
    # One that shuffles has another order each time it is gone through.
    first, again = (self._first_example(dataset) for _ in range(2))
    self._makes_anew = any(not np.array_equal(first[n], again[n]) for n in names)

  def _first_example(self, dataset: tf.data.Dataset) -> Mapping[str, tf.Tensor]:
    for example in records.reading(dataset.take(1)):
      found: Mapping[str, tf.Tensor] = example
      return found
    raise DataError(
      f"the held-out data set {self._name!r}, for evaluation in training, has no example"
    )

  def evaluate(self, model: Estimator, goes_on: Callable[[], bool]) -> dict[str, float] | None:
    """The metrics; None if `goes_on` says that there will be none."""
    metrics = self._evaluated(model, goes_on)
    seen = _examples_seen(metrics)
    if metrics is not None and not self._makes_anew and self._first not in (None, seen):
      # All workers come to this: what they compare are numbers of the whole batch.
      _LOG.info("data set %s has other examples each time: it is made anew", self._name)
      self._makes_anew = True
      metrics = self._evaluated(model, goes_on)
      seen = _examples_seen(metrics)
    if metrics is not None and self._first is None:
      self._first = seen
    return metrics

  def _evaluated(self, model: Estimator, goes_on: Callable[[], bool]) -> dict[str, float] | None:
    dataset = self._made()
    sums = model.sums_over(dataset, self._max_batches, goes_on=goes_on)
    if sums is None:
      return None
    if not sums[0].get("tokens"):
      raise DataError(f"data set {self._name!r} has no tokens to evaluate")
    return evaluation.metrics_of(*sums)


def _examples_seen(metrics: Mapping[str, float] | None) -> tuple[float, ...]:
  """Fingerprint of the examples that an evaluation saw."""
  names = ("num_eval_tokens", "mean_label", "max_targets_length")
  return () if metrics is None else tuple(metrics[n] for n in names)
