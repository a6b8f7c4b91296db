"""Training, evaluation and prediction of the BERT programs on a mesh.

`Runner` trains a model by the common loop (`mesh_tensorflow.training.loop`): a model is a function
of named tensors that returns a `ModelSpec` (model_function.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import checkpoint, workers
from mesh_tensorflow.bert import records
from mesh_tensorflow.bert.initial_weights import initialize
from mesh_tensorflow.bert.model_function import (
  EVAL,
  PREDICT,
  REAL,
  TRAIN,
  BertProgram,
  ModelFn,
  ModelSpec,
  TrainableModel,
  batch_specs,
  make_function,
  mean_of_real,
  second_dimension,
)
from mesh_tensorflow.bert.records import InputFn
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.training.loop import TrainingLoop
from mesh_tensorflow.training.model_files import EventFile
from mesh_tensorflow.training.program import ModelRecord
from mesh_tensorflow.training.settings import checked_settings
from mesh_tensorflow.training.state import ModelState
from mesh_tensorflow.training.validation import Evaluator

__all__ = [
  "EVAL",
  "PREDICT",
  "REAL",
  "TRAIN",
  "ModelFn",
  "ModelSpec",
  "Runner",
  "TrainableModel",
  "batch_specs",
  "make_function",
  "mean_of_real",
  "second_dimension",
  "write_results",
]


class _BertWeights:
  """Weights of a BERT that a training starts from; see `initialize`."""

  def __init__(self, path: str):
    self._path = path

  def step(self) -> int:
    return 0

  def restore(self, store: VariableStore, record: ModelRecord | None) -> list[str]:
    return initialize(store, self._path, set(store.names))


class Runner:
  """Trains, evaluates and predicts with a model, whose checkpoints are in a folder.

  Args:
    model_fn: the model.
    mesh_impl: the mesh.
    output_dir: folder of its checkpoints; a run goes on from the newest. None: there are none.
    settings: the settings of the training loop: `seed` is that of dropout and of the order of
      examples, `init_checkpoint` the weights to start from (see `initialize`).
  """

  def __init__(
    self,
    model_fn: ModelFn,
    mesh_impl: mtf.MeshImpl,
    output_dir: str | None = None,
    *,
    settings: TrainerSettings | None = None,
  ):
    self._model_fn = model_fn
    self._mesh_impl = mesh_impl
    self._settings = settings or TrainerSettings()
    self._state = ModelState(
      mesh_impl,
      output_dir,
      keep_checkpoint_max=self._settings.keep_checkpoint_max,
      # As the archived programs kept.
      checkpoint_options={"keep_every_n_hours": 2},
      quiet=not workers.current().is_chief,
    )
    self._filled: set[str] = set()
    self._functions: dict[Any, Any] = {}
    path = self._state.latest_checkpoint()
    self._state.step = checkpoint.get_step_from_path(path) if path else 0

  @property
  def step(self) -> int:
    """The step of the model."""
    return self._state.step

  # ------------------------------------------------------------------- training

  def train(
    self,
    input_fn: InputFn,
    batch_size: int,
    max_steps: int,
    evaluation: Evaluation | None = None,
  ) -> list[float]:
    """Trains up to a step.

    Args:
      input_fn: function that reads batches without end.
      batch_size: examples in each.
      max_steps: the step to stop at, counted from the model's beginning.
      evaluation: what is done every `settings.eval_every_steps`.

    Returns:
      The losses of the steps that were done.

    Raises:
      ConfigError: the model does not say how it is trained.
      DataError: there are no examples, or records are not as the model needs them.
      NonFiniteError: a loss is not finite; the checkpoint before it is kept.
      StoppedError: the program was asked to stop; all is saved.
    """
    model_fn, seed = self._model_fn, self._settings.seed
    if not isinstance(model_fn, TrainableModel):
      raise ConfigError("Runner.train: the model function is no TrainableModel")
    how = model_fn.optimization
    how.check()
    params = {"batch_size": batch_size, "seed": seed}

    def examples(skip: int = 0) -> tf.data.Dataset:
      return input_fn({**params, "first_step": skip // batch_size}).unbatch()

    settings = checked_settings(
      self._settings, max_grad_norm=1.0 if how.clip_gradients else self._settings.max_grad_norm
    )
    program = BertProgram(model_fn, input_fn(params).element_spec, self._mesh_impl, seed)
    initial = self._settings.init_checkpoint
    loop = TrainingLoop(
      program,
      self._state,
      settings,
      optimizer=how.make_optimizer,
      learning_rate=how.learning_rate if how.init_lr else None,
      initial=_BertWeights(initial) if initial else None,
      held_out=evaluation.datasets if evaluation is not None else None,
      evaluator=evaluation,
    )
    losses = loop.train(examples, max_steps)
    if losses:
      self.take_trained()
    return losses

  def take_trained(self) -> None:
    """Takes the variables that there are for those of the model, which nothing restores."""
    self._filled |= set(self._state.store.names)

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
    dataset = input_fn({"batch_size": batch_size})
    found = self.metrics(dataset, batch_size, max_steps)
    if not found:
      raise DataError("there are no examples to evaluate")
    folder = self._state.model_dir
    writes = folder and workers.current().is_chief
    events = EventFile(os.path.join(folder or "", "eval") if writes else None)
    events.write(self.step, found)
    events.close()
    return found

  def metrics(
    self,
    dataset: tf.data.Dataset,
    batch_size: int,
    max_steps: int | None,
    goes_on: Callable[[], bool] = lambda: True,
  ) -> dict[str, float] | None:
    """The metrics of `evaluate`, of a data set of batches; {}: of nothing; None: given up."""
    sums: dict[str, np.ndarray] = {}
    losses: Sequence[str] = ()
    for result, _ in self._results(EVAL, dataset, batch_size, max_steps):
      losses = list(result["losses"])
      for name, pair in result["metrics"].items():
        values = np.array([float(x) for x in pair])
        sums[name] = sums.get(name, np.zeros(2)) + values
      if not goes_on():
        return None
    if not sums:
      return {}
    found = {name: float(a / b) if b else 0.0 for name, (a, b) in sums.items()}
    if losses:
      found["loss"] = sum(found[name] for name in losses)
    found["global_step"] = self.step
    return found

  def predict(self, input_fn: InputFn, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """The predictions of each example, in order."""
    dataset = input_fn({"batch_size": batch_size})
    for result, count in self._results(PREDICT, dataset, batch_size, None):
      arrays = {name: x.numpy() for name, x in result["predictions"].items()}
      for row in range(count):
        yield {name: a[row] for name, a in arrays.items()}

  def _results(
    self, mode: str, dataset: tf.data.Dataset, batch_size: int, max_steps: int | None
  ) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the model's outputs for each batch, and its number of examples without padding."""
    if max_steps is not None:
      dataset = dataset.take(max_steps)
    specs = batch_specs(dataset.element_spec, batch_size, mode)
    call = self._function(mode, specs)
    for number, batch in enumerate(records.reading(dataset)):
      count = int(next(iter(batch.values())).shape[0])
      if REAL in specs and REAL not in batch:
        batch[REAL] = tf.ones([count], tf.int32)
      filled = {
        name: tf.pad(x, [[0, batch_size - count]] + [[0, 0]] * (len(x.shape) - 1))
        for name, x in batch.items()
      }
      yield call(filled, tf.constant(number, tf.int64)), count

  def _function(self, mode: str, specs: Mapping[str, tf.TensorSpec]) -> Any:
    """The model's compiled function of a batch of these specs and a seed; its variables are set."""
    key = (mode, *((name, tuple(spec.shape)) for name, spec in specs.items()))
    if key not in self._functions:
      step_of = make_function(self._model_fn, mode, specs, self._mesh_impl)
      self._functions[key] = tf.function(
        lambda batch, seed: step_of(*[batch[n] for n in specs], seed=seed), autograph=False
      )
      self._functions[key].get_concrete_function(dict(specs), tf.TensorSpec([], tf.int64))
      self._fill()
    return self._functions[key]

  def _fill(self) -> None:
    """Restores variables that a trace has made: from the folder, or from the initial checkpoint."""
    store, saver = self._state.store, self._state.checkpointer
    new = set(store.names) - self._filled
    path = self._state.latest_checkpoint()
    if new and path and saver is not None:
      saver.restore(path, should_restore=new.__contains__, ignore_unexpected=True)
    elif new and self._settings.init_checkpoint:
      for line in initialize(store, self._settings.init_checkpoint, new):
        self._state.say(line)
    elif new and not self._filled:
      self._state.say(
        f"{self._state.model_dir or 'output_dir'} has no checkpoint, and there is no "
        "init_checkpoint: the model has its initial values, which are random"
      )
    self._filled |= new


class Evaluation(Evaluator):
  """The evaluation of a model while it is trained, an `Evaluator` of the loop.

  Args:
    runner: has the model.
    input_fn: function that reads batches.
    batch_size: number of examples in a batch.
    take: called with the metrics of each evaluation.
  """

  def __init__(
    self,
    runner: Runner,
    input_fn: InputFn,
    batch_size: int,
    take: Callable[[dict[str, float]], None] = lambda _: None,
  ):
    self._runner = runner
    self._input_fn = input_fn
    self._batch_size = batch_size
    self._take = take

  def datasets(self) -> dict[str, Callable[[], tf.data.Dataset]]:
    """The data set, as `held_out` of the loop."""
    return {"eval": lambda: self._input_fn({"batch_size": self._batch_size}).unbatch()}

  def check(self, dataset: tf.data.Dataset) -> Sequence[str]:
    """The names of the features, as they are read."""
    return list(dataset.element_spec)

  def metrics(
    self, dataset: tf.data.Dataset, max_batches: int | None, goes_on: Callable[[], bool]
  ) -> dict[str, float] | None:
    """The metrics; see `Runner.evaluate`."""
    self._runner.take_trained()
    batches = dataset.batch(self._batch_size)
    found = self._runner.metrics(batches, self._batch_size, max_batches, goes_on)
    if found:
      self.shown = [name for name in found if name != "global_step"]
      self._take(found)
    return found

  def text(self, metrics: Mapping[str, float]) -> str:
    """The metrics, the loss first."""
    return _text(metrics)


def _text(found: Mapping[str, float]) -> str:
  names = sorted((n for n in found if n != "global_step"), key=lambda n: (n != "loss", n))
  return ", ".join(f"{n} {found[n]:.4f}" for n in names)


def write_results(path: str, found: Mapping[str, float]) -> None:
  """Writes metrics as sorted lines `key = value`, and prints them in one line; the chief does."""
  if not workers.current().is_chief:
    return
  with tf.io.gfile.GFile(path, "w") as f:
    for name in sorted(found):
      f.write(f"{name} = {found[name]}\n")
  print(f"step {found['global_step']:>6}: {_text(found)}", flush=True)
