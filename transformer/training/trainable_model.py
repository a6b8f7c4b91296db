"""A trainable model: compiles its training program and restores its state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import workers
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.training import device_memory, several_steps, utilization
from mesh_tensorflow.training.divergence import DivergenceWatch
from mesh_tensorflow.training.learning_rate import LearningRate
from mesh_tensorflow.training.loss_check import LossCheck
from mesh_tensorflow.training.memory_check import MemoryCheck
from mesh_tensorflow.training.progress import TrainingProgress
from mesh_tensorflow.training.report_settings import ReportSettings
from mesh_tensorflow.training.report_steps import ReportSteps
from mesh_tensorflow.training.reported import ReportedValues
from mesh_tensorflow.training.several_steps import StopFlag
from mesh_tensorflow.transformer.meshes import mesh_setup
from mesh_tensorflow.transformer.programs.model_steps import ModelSteps
from mesh_tensorflow.transformer.training import manifest
from mesh_tensorflow.transformer.training.estimator import Estimator
from mesh_tensorflow.transformer.training.init_checkpoint import InitialCheckpoint
from mesh_tensorflow.transformer.training.saving import TrainingCheckpoints

_LOG = logging.getLogger("mesh_tensorflow")


class TrainableModel(Estimator):
  """Base class of `Trainer`: everything except the training loop.

  Args:
    steps: the `ModelSteps`.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    model_dir: folder of checkpoints, or None.
    settings: the settings of the training loop.
    optimizer: an optimizer class or factory, called with `learning_rate`.
    learning_rate_schedule: a function of the step (a float32 scalar tf.Tensor), a number, or None.
    init_variable_filter: regular expression that selects variables of `init_checkpoint` by name.
    model_info_file: a file for the sizes of variables and the counters of the program; or None.
    **options: arguments of `Estimator`.
  """

  def __init__(
    self,
    steps: ModelSteps,
    vocabulary: Any,
    model_dir: str | None,
    *,
    settings: TrainerSettings,
    optimizer: Callable[..., Any] | None,
    learning_rate_schedule: Any,
    init_variable_filter: str,
    model_info_file: str | None,
    **options: Any,
  ):
    super().__init__(steps, vocabulary, model_dir, settings=settings, **options)
    self._loss_check = LossCheck(settings.nonfinite)
    self._optimizer = optimizer
    self._rate = LearningRate(learning_rate_schedule)
    path = settings.init_checkpoint
    self._init = InitialCheckpoint(path, init_variable_filter) if path else None
    self._model_info_file = model_info_file
    self._settings = settings
    self._reports = ReportSettings(
      settings.norms_every, settings.peak_flops, settings.profile_steps
    )
    self._checkpoints = TrainingCheckpoints(
      self.checkpointer, self.mesh_impl.variable_store, settings.save_checkpoints_steps
    )

  @property
  def skipped_steps(self) -> int:
    """Number of steps that were skipped because of NaN or infinity."""
    return self._loss_check.skipped_steps

  def compile_steps(
    self, names: Sequence[str], stop: StopFlag | None = None, reports: ReportSteps | None = None
  ) -> Any:
    """Several training steps as one TensorFlow function; see `several_steps.compile_steps`.

    Args:
      names: features of the data.
      stop: ends a call early.
      reports: the steps that are reported; None: none is.
    """
    optimizer, skips = self._check_optimizer(), self._loss_check.skips
    self._memory = MemoryCheck(self.mesh_impl)
    # Norms and scalars of layers go into files: without a folder nobody would see them.
    norms = bool(reports is not None and reports.norms_every != 0 and self.model_dir)
    on_tpu = isinstance(self.mesh_impl, mtf.StrategyMeshImpl)
    values = ReportedValues(norms, of_updates=not on_tpu)
    self._reported = values if reports is not None and self.model_dir else None
    step_fn = self.steps.train_step(
      names, optimizer, skip_nonfinite=skips, look=self._memory.look, reported=self._reported
    )
    step_fn.log_file = self._model_info_file
    self._step_fn = step_fn
    shapes = [self.steps.local_part(n)[1] for n in names]
    return several_steps.compile_steps(
      step_fn, shapes, self._rate.of, skips, stop, reports if norms else None
    )

  def _new_progress(self, start: int, last: int) -> tuple[TrainingProgress, ReportSteps]:
    """Makes the progress reporter of the steps from `start` to `last`, and its schedule."""
    settings, chief = self._reports, workers.current().is_chief
    every = self._settings.report_every
    steps = ReportSteps(start, last, every, settings.norms_every, settings.profile_steps or ())
    vocab = getattr(self.steps.model, "output_vocab_dim", None)
    progress = TrainingProgress(
      start,
      last,
      self.steps.examples_per_step * max(self.steps.sequence_length.values()),
      summary_dir=self.model_dir if chief else None,
      quiet=self._quiet,
      steps=steps,
      watch=DivergenceWatch(start, last, getattr(vocab, "size", None)) if chief else None,
      profile_steps=settings.profile_steps,
    )
    return progress, steps

  def _complete_rates(self, progress: TrainingProgress) -> None:
    """Sets a progress reporter's FLOPs, peak and memory, known once the program is built."""
    if progress.records and self._reports.peak_flops != 0:
      dtype = self.steps.variable_dtype.activation_dtype
      peak = utilization.peak_flops(self._reports.peak_flops, self.mesh_impl, dtype)
      progress.rates.flops = utilization.step_flops(self._train_graph())
      progress.rates.peak_flops = peak
    if progress.records:
      progress.rates.memory = lambda: device_memory.used_bytes(self.mesh_impl)

  def _call(
    self, compiled: Any, batches: Any
  ) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Runs steps; returns losses, numbers of non-finite elements, and reported values by name."""
    self._restored = None
    with self.mesh_impl.errors_of_runs("train_step"):
      # Not a Python number: TensorFlow caches a tensor for each of those, forever.
      step = tf.constant(np.array(self.global_step, np.int64))
      losses, bad, *values = compiled(batches, step).numpy()
    names = self._reported.names if self._reported is not None else []
    return losses.tolist(), bad.tolist(), dict(zip(names, values))

  def prepare(
    self,
    compiled: Any,
    on_ready: Callable[[mtf.Graph], None] | None = None,
    *,
    checkpoint: str | None = None,
  ) -> None:
    """Traces the program, which creates the variables, and restores their values.

    Args:
      compiled: see `compile_steps`.
      on_ready: called with the graph.
      checkpoint: a checkpoint of this model; None: `init_checkpoint`, or initial values.
    """
    self._say("the training program is built and compiled, which may take a while")
    started = time.perf_counter()
    self._memory.trace(compiled.get_concrete_function, self._step_fn)
    _LOG.info("traced the training program in %.1f s", time.perf_counter() - started)
    if workers.current().is_chief and self.checkpointer is not None:
      self._checkpoints.config = self._model_config
    if checkpoint is not None:
      self._check_config(checkpoint)  # Before anything is told or written of this model.
    if workers.current().is_chief and self.checkpointer is not None:
      self._take_manifest(self.checkpointer.directory, checkpoint)
    if on_ready is not None:
      on_ready(self._train_graph())
    if checkpoint is not None:
      self.restore_if_any(checkpoint, for_training=True)
      return
    if self._init is not None:
      for line in self._init.restore(self.mesh_impl.variable_store, self._model_config):
        self._say(line)
    elif hasattr(self.steps.model, "initialize"):
      # A model with a part that comes from a checkpoint of its own: a teacher.
      self.steps.model.initialize()

  def _take_manifest(self, model_dir: str, checkpoint: str | None) -> None:
    """Writes this run's manifest and reports differences from that of a checkpoint."""
    store, data = self.mesh_impl.variable_store, self._checkpoints.data
    found = manifest.capture(
      self.mesh_impl,
      self._model_config,
      data.files if data is not None else (),
      {"weights": store.seed, "data": self._data_seed, "dropout": store.noise_seed},
    )
    for line in manifest.differences(checkpoint, found) if checkpoint is not None else ():
      self._say(line)
    found.write_into(model_dir)
    self._checkpoints.manifest = found

  def _check_optimizer(self) -> Callable[..., Any]:
    if self._optimizer is None:
      raise ConfigError("run.optimizer is not bound; bind @optimize.AdafactorOptimizer, say")
    return self._optimizer

  def _train_graph(self) -> mtf.Graph:
    graph = self._step_fn.graph
    if graph is None:
      raise ValueError("the training program is not built")
    return graph

  def describe(self) -> str:
    """The layout of the training program, after it was built."""
    return mesh_setup.describe_layout(self.mesh_impl, self._train_graph())
