"""Loops of the BERT programs: training, evaluation and prediction on a mesh.

`Runner` runs a program: a function of named tensors that returns a `ModelSpec` (model_function.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tqdm

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, workers
from mesh_tensorflow.bert.initial_weights import initialize
from mesh_tensorflow.bert.model_function import (
  EVAL,
  PREDICT,
  REAL,
  TRAIN,
  ModelFn,
  ModelSpec,
  batch_specs,
  make_function,
  mean_of_real,
  second_dimension,
)
from mesh_tensorflow.bert.records import InputFn
from mesh_tensorflow.errors import DataError, NonFiniteError
from mesh_tensorflow.training.event_files import EventFile

__all__ = [
  "EVAL",
  "PREDICT",
  "REAL",
  "TRAIN",
  "ModelFn",
  "ModelSpec",
  "Runner",
  "batch_specs",
  "make_function",
  "mean_of_real",
  "second_dimension",
  "write_results",
]

# Calls run more steps each time until a call takes this long.
_CALL_SECONDS = 1.0


class Runner:
  """Trains, evaluates and predicts with a model, whose checkpoints are in a folder.

  Args:
    model_fn: the model.
    mesh_impl: the mesh.
    output_dir: folder of its checkpoints; a run goes on from the newest. None: there are none.
    init_checkpoint: weights to start from if the folder has no checkpoint; see `initialize`.
    save_checkpoints_steps: steps between checkpoints; there is one at the end, too.
    iterations_per_loop: most steps of one call.
    seed: seed of dropout, and of the order of examples.
  """

  def __init__(
    self,
    model_fn: ModelFn,
    mesh_impl: mtf.MeshImpl,
    output_dir: str | None = None,
    *,
    init_checkpoint: str | None = None,
    save_checkpoints_steps: int = 1000,
    iterations_per_loop: int = 1000,
    seed: int = 0,
  ):
    self._model_fn = model_fn
    self._mesh_impl = mesh_impl
    self._output_dir = output_dir
    self._init_checkpoint = init_checkpoint
    self._save_steps = save_checkpoints_steps
    self._most_steps = iterations_per_loop
    self._seed = seed
    self._store = mesh_impl.variable_store
    self._saver = None
    if output_dir:
      # Ten, and one for every two hours, as the archived programs kept.
      self._saver = checkpoint.Checkpointer(
        output_dir, self._store, max_to_keep=10, keep_every_n_hours=2
      )
    self._filled: set[str] = set()
    self._functions: dict[Any, Any] = {}
    self.step = self._step_of_folder()

  def _step_of_folder(self) -> int:
    path = self._saver.latest() if self._saver is not None else None
    return checkpoint.get_step_from_path(path) if path else 0

  # ------------------------------------------------------------------- training

  def train(self, input_fn: InputFn, batch_size: int, max_steps: int) -> list[float]:
    """Trains up to a step.

    Args:
      input_fn: function that reads batches without end.
      batch_size: examples in each.
      max_steps: the step to stop at, counted from the model's beginning.

    Returns:
      The losses of the steps that were done.

    Raises:
      DataError: there are no examples, or records are not as the model needs them.
      NonFiniteError: a loss is not finite; the checkpoint before it is kept.
    """
    losses: list[float] = []
    if self.step >= max_steps:
      print(
        f"nothing to train: {self._output_dir} has a checkpoint of step {self.step}", flush=True
      )
      return losses
    params = {"batch_size": batch_size, "seed": self._seed, "first_step": self.step}
    dataset = input_fn(params)
    call = self._training_call(dataset)
    batches = iter(dataset)
    size = 1
    events = self._events("")
    with tqdm.tqdm(total=max_steps, initial=self.step, unit="step", disable=None) as bar:
      while self.step < max_steps:
        stop = min(max_steps, (self.step // self._save_steps + 1) * self._save_steps)
        count, started = min(size, stop - self.step), time.perf_counter()
        found, rates = _read(call, batches, self.step, count)
        seconds = time.perf_counter() - started
        self._check_finite(found)
        self.step += count
        losses += found.tolist()
        bar.update(count)
        bar.set_postfix(loss=f"{found.mean():.4f}", refresh=False)
        events.write(
          self.step,
          {
            "loss": float(found.mean()),
            "learning_rate": float(rates[-1]),
            "steps_per_second": count / seconds,
          },
        )
        if self.step == stop:
          self._save()
          recent = float(np.mean(losses[-self._save_steps :]))
          bar.write(f"step {self.step:>6}/{max_steps}  loss {recent:.4f}")
        if seconds < _CALL_SECONDS:
          size = min(2 * size, self._most_steps)
    events.close()
    if self._saver is not None:
      self._saver.wait()
    return losses

  def _training_call(self, dataset: tf.data.Dataset) -> Callable[..., Any]:
    """Makes a function that runs steps: of an iterator, the first step, and the number of steps."""
    specs = dataset.element_spec
    step_of, made = self._function(TRAIN, specs)
    seed = self._seed

    def one(batches: Any, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
      batch = batches.get_next()
      # A step draws what it would in any other run of the same seed.
      result = step_of(*[batch[name] for name in specs], seed=step + seed * 2**32)
      return result["loss"], tf.cast(result.get("learning_rate", float("nan")), tf.float32)

    def training_steps(batches: Any, first: tf.Tensor, count: tf.Tensor) -> Any:
      def body(i: tf.Tensor, losses: Any, rates: Any) -> Any:
        loss, rate = one(batches, first + tf.cast(i, tf.int64))
        return i + 1, losses.write(i, loss), rates.write(i, rate)

      arrays = [tf.TensorArray(tf.float32, size=count) for _ in range(2)]
      _, losses, rates = tf.while_loop(
        lambda i, *_: i < count, body, [0, *arrays], parallel_iterations=1
      )
      return losses.stack(), rates.stack()

    if "call" not in made:
      made["call"] = tf.function(training_steps, autograph=False)
      # Tracing makes the variables.
      scalars = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int32)
      made["call"].get_concrete_function(iter(dataset), *scalars)
    self._fill(TRAIN)
    call = made["call"]
    return lambda batches, first, count: [
      x.numpy() for x in call(batches, tf.constant(first, tf.int64), tf.constant(count))
    ]

  def _check_finite(self, losses: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(losses))
    if bad.size:
      raise NonFiniteError(
        f"the loss of step {self.step + bad[0]} is {losses[bad[0]]}: the learning rate is too "
        "high, or the data of this step are not finite; the newest checkpoint is kept"
      )

  def _save(self) -> None:
    if self._saver is not None:
      self._saver.save(self.step)

  # ------------------------------------------------------- evaluation, prediction

  def evaluate(
    self, input_fn: InputFn, batch_size: int, max_steps: int | None = None
  ) -> dict[str, float]:
    """The metrics of the model, with their sum `loss` (see `ModelSpec`), and `global_step`.

    Args:
      input_fn: function that reads batches. The last may have fewer examples: it is padded with
        zeros, which count in no metric.
      batch_size: number of examples in a batch.
      max_steps: maximum number of batches; None: all.

    Raises:
      DataError: there are no examples.
    """
    sums: dict[str, np.ndarray] = {}
    losses: Sequence[str] = ()
    for result, _ in self._results(EVAL, input_fn, batch_size, max_steps):
      losses = list(result["losses"])
      for name, pair in result["metrics"].items():
        values = np.array([float(x) for x in pair])
        sums[name] = sums.get(name, np.zeros(2)) + values
    if not sums:
      raise DataError("there are no examples to evaluate")
    found = {name: float(a / b) if b else 0.0 for name, (a, b) in sums.items()}
    if losses:
      found["loss"] = sum(found[name] for name in losses)
    found["global_step"] = self.step
    events = self._events("eval")
    events.write(self.step, found)
    events.close()
    return found

  def predict(self, input_fn: InputFn, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """The predictions of each example, in order."""
    for result, count in self._results(PREDICT, input_fn, batch_size, None):
      arrays = {name: x.numpy() for name, x in result["predictions"].items()}
      for row in range(count):
        yield {name: a[row] for name, a in arrays.items()}

  def _results(
    self, mode: str, input_fn: InputFn, batch_size: int, max_steps: int | None
  ) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the model's outputs for each batch, and its number of examples without padding."""
    dataset = input_fn({"batch_size": batch_size})
    if max_steps is not None:
      dataset = dataset.take(max_steps)
    specs = batch_specs(dataset.element_spec, batch_size, mode)
    step_of, made = self._function(mode, specs)
    if "call" not in made:
      made["call"] = tf.function(
        lambda batch, seed: step_of(*[batch[n] for n in specs], seed=seed), autograph=False
      )
      made["call"].get_concrete_function(dict(specs), tf.TensorSpec([], tf.int64))
    self._fill(mode)
    batches = iter(dataset)
    number = 0
    while (batch := _read(next, batches, None)) is not None:
      count = int(next(iter(batch.values())).shape[0])
      if REAL in specs and REAL not in batch:
        batch[REAL] = tf.ones([count], tf.int32)
      filled = {
        name: tf.pad(x, [[0, batch_size - count]] + [[0, 0]] * (len(x.shape) - 1))
        for name, x in batch.items()
      }
      yield made["call"](filled, tf.constant(number, tf.int64)), count
      number += 1

  # -------------------------------------------------------------------- variables

  def _function(self, mode: str, specs: Mapping[str, tf.TensorSpec]) -> tuple[Any, dict[str, Any]]:
    """The model's function for batches of these specs, and the dict of its compiled calls."""
    key = (mode, *((name, tuple(spec.shape)) for name, spec in specs.items()))
    if key not in self._functions:
      function = make_function(self._model_fn, mode, specs, self._mesh_impl)
      self._functions[key] = (function, {})
    found: tuple[Any, dict[str, Any]] = self._functions[key]
    return found

  def _fill(self, mode: str) -> None:
    """Restores variables that a trace has made: from the folder, or from the initial checkpoint."""
    new = set(self._store.names) - self._filled
    if not new:
      return
    path = self._saver.latest() if self._saver is not None else None
    if path and self._saver is not None:
      self._saver.restore(
        path, should_restore=lambda name: name in new, ignore_unexpected=mode != TRAIN
      )
    elif self._init_checkpoint:
      for line in initialize(self._store, self._init_checkpoint, new):
        print(line, flush=True)
    elif mode != TRAIN and not self._filled:
      print(
        f"{self._output_dir or 'output_dir'} has no checkpoint, and there is no init_checkpoint: "
        "the model has its initial values, which are random",
        flush=True,
      )
    self._filled |= new

  def _events(self, name: str) -> EventFile:
    """TensorBoard's file in a folder of the model's; the chief's."""
    writes = self._output_dir and workers.current().is_chief
    return EventFile(os.path.join(self._output_dir or "", name) if writes else None)


def _read(call: Callable[..., Any], *args: Any) -> Any:
  """Calls a function that reads records.

  Raises:
    DataError: they end, are damaged, or are not as the model needs them.
  """
  try:
    return call(*args)
  except tf.errors.OutOfRangeError as e:
    raise DataError("there are no examples to train on") from e
  except (tf.errors.DataLossError, tf.errors.NotFoundError) as e:
    raise DataError(f"cannot read the examples: {e.message.splitlines()[0]}") from e
  except tf.errors.InvalidArgumentError as e:
    if "Feature" in e.message or "parse" in e.message:
      raise DataError(f"a record is not as the model needs it: {e.message.splitlines()[0]}") from e
    raise


def write_results(path: str, found: Mapping[str, Any]) -> None:
  """Writes metrics as sorted lines `key = value`, and prints them in one line."""
  with tf.io.gfile.GFile(path, "w") as f:
    for name in sorted(found):
      f.write(f"{name} = {found[name]}\n")
  numbers = [f"{n} {v:.4f}" for n, v in sorted(found.items()) if n != "global_step"]
  print(f"step {found['global_step']:>6}: {', '.join(numbers)}", flush=True)
