"""The training loop: it puts together a program, its state, data, saving, signals and reports."""

from __future__ import annotations

import array
import contextlib
import copy
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import ConfigError, DataError, GraphError, WorkerLostError
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.meshes.tpu.mesh_impl import StrategyMeshImpl
from mesh_tensorflow.optimize.base import Optimizer
from mesh_tensorflow.program.graph import Graph
from mesh_tensorflow.running.function import Function
from mesh_tensorflow.training import (
  loss_scale,
  manifest,
  memory_check,
  model_files,
  nonfinite,
  several_steps,
  utilization,
  validation,
)
from mesh_tensorflow.training import program as program_lib
from mesh_tensorflow.training.data import SavedPipeline, TrainingData, TrainingSource
from mesh_tensorflow.training.divergence import DivergenceWatch
from mesh_tensorflow.training.memory_check import MemoryCheck
from mesh_tensorflow.training.nonfinite import LossCheck
from mesh_tensorflow.training.program import ModelRecord, Program
from mesh_tensorflow.training.progress import TrainingProgress
from mesh_tensorflow.training.reported import ReportedValues, ReportSteps
from mesh_tensorflow.training.run_lock import training_lock
from mesh_tensorflow.training.saving import TrainingCheckpoints
from mesh_tensorflow.training.several_steps import CallLengths, StopFlag
from mesh_tensorflow.training.state import ModelState, averages_in_place
from mesh_tensorflow.training.stopping import StopRequests
from mesh_tensorflow.training.validation import Evaluator, MakeDatasets, Validator

# A function of `step`, a number, or nothing.
LearningRateLike: TypeAlias = Callable[..., float | tf.Tensor] | float | None


class LearningRate:
  """A schedule, a number or nothing, as the training program and its reports take it.

  Args:
    schedule: a function of `step` (a float32 scalar tf.Tensor), a number, or None.
  """

  def __init__(self, schedule: LearningRateLike):
    self._schedule = schedule

  def of(self, step: tf.Tensor) -> tf.Tensor:
    """The rate of a step, a float32 scalar; 0 without a schedule: the optimizer has its own."""
    if callable(self._schedule):
      return tf.cast(self._schedule(step=tf.cast(step, tf.float32)), tf.float32)
    return tf.constant(0.0 if self._schedule is None else float(self._schedule), tf.float32)

  def at(self, step: int) -> float | None:
    """The rate of a step, for a report; None without a schedule."""
    if self._schedule is None:
      return None
    # Not of a Python number: TensorFlow keeps the tensors of these, for ever.
    return float(self.of(tf.constant(np.array(step, np.int64))))


_LOG = logging.getLogger("mesh_tensorflow")

# Longer calls would keep a bar from moving, and lines from coming when their steps are done.
_CALL_SECONDS = 1.0


class InitialWeights(Protocol):
  """Weights of another model that a training starts from, if its folder has none."""

  def step(self) -> int:
    """The step at which such a training begins."""

  def restore(self, store: VariableStore, record: ModelRecord | None) -> list[str]:
    """Sets variables; returns lines that tell which."""


class TrainingLoop:
  """Trains a program: the loop, and what it needs around it.

  Args:
    program: the program.
    state: its variables and their folder.
    settings: the settings.
    optimizer: an optimizer class or factory, called with `learning_rate`.
    learning_rate: a function of `step` (a float32 scalar tf.Tensor), a number, or None (the
      optimizer gets 0).
    initial: weights to start from if the folder has no checkpoint.
    held_out: makes the data sets of evaluations during training.
    evaluator: does these evaluations.
    model_info_file: a file for the sizes of variables and the counters of the training program.
    quiet: writes no lines. Of several workers only the chief writes any.

  Attributes:
    program: the program.
    state: its variables and their folder.
    settings: the settings.
    losses: those of all steps that were done here.
    report_dir: folder of metrics and summaries, that of the checkpoints; None: there are none.
  """

  def __init__(
    self,
    program: Program,
    state: ModelState,
    settings: TrainerSettings,
    *,
    optimizer: Callable[..., Optimizer] | None,
    learning_rate: LearningRateLike = None,
    initial: InitialWeights | None = None,
    held_out: MakeDatasets | None = None,
    evaluator: Evaluator | None = None,
    model_info_file: str | None = None,
    quiet: bool = False,
  ):
    self.program = program
    self.state = state
    self.settings = settings
    self.losses: list[float] = []
    self.report_dir = state.model_dir
    self._optimizer = optimizer
    self._rate = LearningRate(learning_rate)
    self._initial = initial
    self._held_out = held_out
    self._evaluator = evaluator
    self._model_info_file = model_info_file
    self._quiet = quiet or not workers.current().is_chief
    skips = loss_scale.skips(settings, program.activation_dtype)
    self._loss_check = LossCheck(settings, skips)
    self._checkpoints = TrainingCheckpoints(
      state.checkpointer, state.store, settings.save_checkpoints_steps
    )
    self._stop_flag = StopFlag()
    self._step_fn: Function | None = None
    self._locked = False

  @property
  def skipped_steps(self) -> int:
    """Number of steps that were skipped because of NaN or infinity."""
    return self._loss_check.skipped_steps

  @contextlib.contextmanager
  def lock(self) -> Iterator[None]:
    """Context manager that holds the folder for this process, over several trainings.

    Raises:
      LockedError: another process trains there.
    """
    if self._locked:
      yield
      return
    with contextlib.ExitStack() as stack:
      if self.state.model_dir:
        model_files.make_folder(self.state.model_dir)
      by_chief(lambda: stack.enter_context(training_lock(self.state.model_dir)))
      self._locked = True
      try:
        yield
      finally:
        self._locked = False

  # ---------------------------------------------------------------- training

  def train(
    self,
    dataset_fn: Callable[..., tf.data.Dataset],
    train_steps: int | None = None,
    *,
    steps: int | None = None,
    on_ready: Callable[[Graph], None] | None = None,
    seen_data_init_step: int | None = None,
    checkpoint_input_pipeline: bool = False,
    on_nothing: Callable[[], None] | None = None,
  ) -> list[float]:
    """Trains until the global step is `train_steps`, from the newest checkpoint on.

    Args:
      dataset_fn: makes the data set of single examples; see `TrainingData`.
      train_steps: the absolute step at which to stop.
      steps: in its place, the number of steps to do.
      on_ready: called with the graph when the program is built, before the first step.
      seen_data_init_step: the step at which the data began: the examples of the steps after it,
        up to the checkpoint's, are left out. By default the step of the initial checkpoint, or of
        the checkpoint of another program that was in `model_dir` when training began; or 0.
      checkpoint_input_pipeline: save where the data is with each checkpoint, and go on there: no
        example is read twice to be skipped.
      on_nothing: called if there is no step to do.

    Returns:
      The losses of the steps done.

    Raises:
      ConfigError: arguments that do not go together.
      DataError: the data set has no whole batch, or gives nothing when it is gone through again
        (data that ends is repeated); or it has the wrong features.
      NonFiniteError: the loss is NaN or infinite. Nothing is saved after that.
      StoppedError: SIGTERM or SIGINT came, in any worker. The steps done are saved.
      WorkerLostError: another worker of the cluster is gone.
    """
    self._check_optimizer()
    with contextlib.ExitStack() as stack:
      stack.enter_context(self.lock())
      self._stop_flag.put(False)
      stop = stack.enter_context(StopRequests(self._stop_flag))
      try:
        start, began = self._start()
        last = start + (steps or 0) if train_steps is None else train_steps
        forgotten = validation.compare_by_metric(
          self.settings, self._evaluator, self._checkpoints.evaluations
        )
        nothing = validation.nothing_to_do(
          self.settings, start, last, self._checkpoints.evaluations
        )
        if nothing is not None:
          self.state.say(nothing)
          if on_nothing is not None:
            on_nothing()
          return []
        validator = self._validator()  # Checks the metric before that is said to have changed.
        if forgotten is not None:
          self.state.say(forgotten)
        first = began if seen_data_init_step is None else seen_data_init_step
        if first > start:
          raise ConfigError(
            f"run.seen_data_init_step (={first}) is after the step {start} at which training goes "
            "on"
          )
        source = TrainingSource(
          self.program,
          dataset_fn,
          first,
          self._checkpoints.examples_in_epoch,
          self.state.data_seed,
        )
        return self._train(
          stop, source, validator, start, last, on_ready, checkpoint_input_pipeline
        )
      except WorkerLostError:
        if self.state.checkpointer is not None:
          self.state.checkpointer.abandon()
        raise
      finally:
        if self.state.checkpointer is not None:
          with stop.saving():
            self.state.checkpointer.wait()

  def _train(
    self,
    stop: StopRequests,
    source: TrainingSource,
    validator: Validator | None,
    start: int,
    last: int,
    on_ready: Callable[[Graph], None] | None,
    saves_position: bool,
  ) -> list[float]:
    names, batches = self._open_data(source, start, saves_position)
    progress, reports = self._new_progress(start, last)
    # A flag ends the calls of one process. Workers stop at one step, and a saved position in the
    # data is that of the step: their calls are short instead.
    alone = workers.current().size == 1 and self._checkpoints.pipeline is None
    # A third of the time for a call; the rest is for the checkpoint to be begun. And a person sees
    # that it goes on.
    lengths = CallLengths(min(stop.save_within_seconds / 3, _CALL_SECONDS))
    per_call = several_steps.steps_per_call(
      self.settings.iterations_per_loop, self.settings.save_checkpoints_steps
    )

    def most() -> int:
      left = validator.steps_left(self.state.step) if validator is not None else sys.maxsize
      return reports.steps_of_call(self.state.step, min(left, lengths.most))

    compiled = self.compile_steps(names, self._stop_flag if alone else None, reports)
    find = functools.partial(self._find_nonfinite, source, start)
    self.state.step = start
    losses = array.array("f")  # Objects of Python's would take eight times the memory.

    def prepare() -> None:
      with progress.starting("tracing"):
        self.prepare(compiled, on_ready, checkpoint=self._checkpoints.newest)

    early: str | None = None
    try:
      if start > source.first:
        prepare()  # Before the data, in which it may take a while to get behind what was seen.
        # If the training was stopped before the evaluation of its last step was done.
        early = self._validate(validator, progress, stop, last)
        self._save_what_is_due(stop, start, last)
      count = last - start if early is None else 0
      reading = self.program.reading(batches.calls(count, per_call, most))
      for values in progress.inputs("data", reading):
        before = self.state.step
        if before == start:
          if start == source.first:
            prepare()
          self._complete_rates(progress)
          progress.restart_clock()
        stop.running(before, self._checkpoints.whole_step)
        progress.before_call(before)
        called = time.perf_counter()
        with progress.starting("TensorFlow") if before == start else contextlib.nullcontext():
          of_call, bad, others = self._call(compiled, values)
        lengths.measured(len(of_call), time.perf_counter() - called)
        # Before the check: what ends a training is no reason not to tell of the steps before it.
        n = self._loss_check.steps_before_end(of_call)
        ok = {name: v[:n] for name, v in others.items()}
        progress.update(before + n, of_call[:n], self._rate.at, bad=bad[:n], values=ok)
        self._loss_check.take(before, of_call, bad, self._checkpoints.saved_step, find)
        losses.extend(of_call)
        self.state.step += len(of_call)
        early = self._validate(validator, progress, stop, last)
        # The first worker's measure is that of all.
        failed = self._checkpoints.has_failed
        asked = workers.gather(np.array([stop.requested, lengths.most, failed], np.int32))
        lengths.most = int(asked[0, 1])
        if asked[:, 2].any() and self.state.checkpointer is not None:
          self.state.checkpointer.wait()  # Raises what a checkpoint in the background met.
        # At the last step nothing is left to stop: the checkpoint that is due comes anyway.
        if self.state.step < last and early is None and asked[:, 0].any():
          self._save_and_stop(stop, last)
        self._save_what_is_due(stop, before, last if early is None else self.state.step)
        if early is not None:
          break
        progress.restart_clock()
      if early is not None:
        progress.line(f"stopped early at step {self.state.step} of {last}: {early}")
    finally:
      progress.close()
    if early is None:
      self._check_all_done(start, last)
    with stop.saving():
      progress.summarize(self._checkpoints.last_written())
      if self.state.checkpointer is not None:
        stop.saved(f"step {self.state.step} is saved in {self.state.checkpointer.directory}")
    self.losses += losses
    return losses.tolist()

  def _start(self) -> tuple[int, int]:
    """The step at which training goes on, and the one at which this folder's training began."""
    if self.state.checkpointer is not None:
      self.state.checkpointer.check_folder()
    return self._checkpoints.start(self._initial.step if self._initial else None, self.state.say)

  def _open_data(
    self, source: TrainingSource, start: int, saves_position: bool
  ) -> tuple[list[str], TrainingData | SavedPipeline]:
    """Opens the training data; returns its features and its batches from step `start` on."""
    data, pipeline = source.open(
      start,
      self._checkpoints.newest,
      self.state.say,
      saves_position=saves_position and self.state.checkpointer is not None,
    )
    self._checkpoints.data, self._checkpoints.pipeline = data, pipeline
    return data.names, data if pipeline is None else pipeline

  def _check_all_done(self, start: int, last: int) -> None:
    """Raises `DataError` if the data ended before training did."""
    step = self.state.step
    if step == start:
      raise DataError(
        "the training data set has no complete batch of "
        f"{self.program.examples.size} sequences; use a smaller batch size or more data"
      )
    if step < last:
      raise DataError(
        f"the training data ended after {step - start} of {last - start} steps, and gave nothing "
        "when it was gone through again: run.train_dataset_fn must return a data set that can be "
        "read several times, or endless; or bind a smaller run.train_steps"
      )

  # --------------------------------------------------------------- evaluation

  def _validator(self) -> Validator | None:
    if self._evaluator is None:
      return None
    evaluations, reading = self._checkpoints.evaluations, self.program.reading
    return Validator(self.settings, self._held_out, self._evaluator, evaluations, reading)

  def _validate(
    self, validator: Validator | None, progress: TrainingProgress, stop: StopRequests, last: int
  ) -> str | None:
    """Evaluates on held-out data, if that is due; returns why training ends now, if it does."""
    if validator is None or not validator.is_due(self.state.step, last):
      return None

    def goes_on() -> bool:
      return not workers.any_worker(stop.requested)

    averaged = averages_in_place(self.state.store) if self.settings.use_ema else None
    with averaged or contextlib.nullcontext():
      found = validator.run(self.state.step, goes_on)
    if found is not None:
      line, scalars = found
      progress.line(line)
      progress.scalars(self.state.step, scalars)
      seen = self._checkpoints.evaluations
      if seen.metric != "loss" and seen.best_step >= 0:  # Of losses the scalars tell.
        progress.facts[f"best {seen.metric}"] = f"{seen.best_value:.4f}, step {seen.best_step}"
    progress.restart_clock()
    return validator.reason_to_stop() if found is not None else None

  # ------------------------------------------------------------- checkpoints

  def save(self, *, asynchronous: bool = True) -> None:
    """Writes a checkpoint of the current step.

    Args:
      asynchronous: whether it may be written in the background.

    Raises:
      NonFiniteError: a variable holds NaN or infinity. The loss shows that a step later only.
      CheckpointError: the checkpoint before this one (synchronous: this one) could not be written.
    """
    self._checkpoints.save(self.state.step, asynchronous)

  def _save_what_is_due(self, stop: StopRequests, before: int, last: int) -> None:
    """Saves a checkpoint after a call if one is due, or keeps the best one so far."""
    step = self.state.step
    is_due = self._checkpoints.is_due(before, step, last)
    if is_due or self._checkpoints.evaluations.to_keep(step):
      with stop.saving():
        if is_due:
          self.save()
        else:
          self._checkpoints.keep_best(step)

  def _save_and_stop(self, stop: StopRequests, last: int) -> None:
    """Saves, and ends a training that was asked to stop."""
    step, has_folder = self.state.step, self.state.checkpointer is not None
    with stop.saving():
      saved = self._checkpoints.save_before_leaving(step)
      if has_folder:
        stop.saved(saved)
    stop.stop(f"{saved}; {last - step} of {last} steps remain", goes_on=has_folder)

  # --------------------------------------------------------------- the program

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
    self._memory = MemoryCheck(self.state.mesh_impl)
    # Norms and scalars of layers go into files: without a folder nobody would see them.
    norms = bool(reports is not None and reports.norms_every != 0 and self.report_dir)
    on_tpu = isinstance(self.state.mesh_impl, StrategyMeshImpl)
    values = ReportedValues(norms, of_updates=not on_tpu)
    self._reported = values if reports is not None and self.report_dir else None
    step_fn = program_lib.train_step(
      self.program,
      self.settings,
      names,
      optimizer,
      look=self._memory.look,
      reported=self._reported,
    )
    step_fn.log_file = self._model_info_file
    self._step_fn = step_fn
    batches = [
      tf.TensorSpec(
        program_lib.local_part(self.program, n)[1],
        self.program.feature_spec(n, training=True).dtype,
      )
      for n in names
    ]
    return several_steps.compile_steps(
      step_fn, batches, self._rate.of, skips, stop, reports if norms else None
    )

  def watch_step(self, names: Sequence[str]) -> tuple[list[str], Function]:
    """A training step that only looks for NaN and infinity; see `program.watch_step`."""
    return program_lib.watch_step(self.program, self.settings, names)

  def prepare(
    self,
    compiled: Any,
    on_ready: Callable[[Graph], None] | None = None,
    *,
    checkpoint: str | None = None,
  ) -> None:
    """Traces the program, which creates the variables, and restores their values.

    Args:
      compiled: see `compile_steps`.
      on_ready: called with the graph.
      checkpoint: a checkpoint of this model; None: the initial weights, or initial values.
    """
    state = self.state
    state.say("the training program is built and compiled, which may take a while")
    started = time.perf_counter()
    assert self._step_fn is not None
    self._memory.trace(compiled.get_concrete_function, self._step_fn)
    _LOG.info("traced the training program in %.1f s", time.perf_counter() - started)
    writes = workers.current().is_chief and state.checkpointer is not None
    if writes:
      self._checkpoints.record = state.record
    if checkpoint is not None:
      state.check_record(checkpoint)  # Before anything is told or written of this model.
    if writes:
      self._take_manifest(checkpoint)
    if on_ready is not None:
      on_ready(self.graph)
    if checkpoint is not None:
      state.restore(checkpoint, for_training=True)
      return
    if self._initial is not None:
      for line in self._initial.restore(state.store, state.record):
        state.say(line)
    else:
      self.program.initialize()

  def _take_manifest(self, checkpoint: str | None) -> None:
    """Writes this run's manifest and reports differences from that of a checkpoint."""
    state, data = self.state, self._checkpoints.data
    found = manifest.capture(
      state.mesh_impl,
      state.record,
      data.files if data is not None else (),
      {"weights": state.store.seed, "data": state.data_seed, "dropout": state.store.noise_seed},
    )
    for line in manifest.differences(checkpoint, found) if checkpoint is not None else ():
      state.say(line)
    found.write_into(state.model_dir or "")
    self._checkpoints.manifest = found

  def _call(
    self, compiled: Callable[..., tf.Tensor], batches: tuple[tf.Tensor, ...]
  ) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Runs steps; returns losses, numbers of non-finite elements, and reported values by name."""
    self.state.restored = None
    with self.state.mesh_impl.errors_of_runs("train_step"):
      # Not a Python number: TensorFlow caches a tensor for each of those, forever.
      step = tf.constant(np.array(self.state.step, np.int64))
      losses, bad, *values = compiled(batches, step).numpy()
    names = self._reported.names if self._reported is not None else []
    return losses.tolist(), bad.tolist(), dict(zip(names, values))

  def _check_optimizer(self) -> Callable[..., Any]:
    if self._optimizer is None:
      optimizer = self.settings.named("optimizer")
      raise ConfigError(f"{optimizer} is not bound; bind @optimize.AdafactorOptimizer, say")
    return self._optimizer

  @property
  def graph(self) -> Graph:
    """The graph of the training program, after it was built."""
    graph = self._step_fn.graph if self._step_fn is not None else None
    if graph is None:
      raise GraphError("the training program is not built")
    return graph

  # ------------------------------------------------------------------ reports

  def _new_progress(self, start: int, last: int) -> tuple[TrainingProgress, ReportSteps]:
    """Makes the progress reporter of the steps from `start` to `last`, and its schedule."""
    settings, chief = self.settings, workers.current().is_chief
    profiled = settings.profile_steps
    steps = ReportSteps(start, last, settings.report_every, settings.norms_every, profiled or ())
    unit, per_step = self.program.speed
    progress = TrainingProgress(
      start,
      last,
      per_step,
      summary_dir=self.report_dir if chief else None,
      quiet=self._quiet,
      steps=steps,
      watch=DivergenceWatch(start, last, self.program.num_classes) if chief else None,
      profile_steps=profiled,
      unit=unit,
    )
    return progress, steps

  def _complete_rates(self, progress: TrainingProgress) -> None:
    """Sets a progress reporter's FLOPs, peak and memory, known once the program is built."""
    peak, impl = self.settings.peak_flops, self.state.mesh_impl
    if progress.records and peak != 0:
      dtype = self.program.activation_dtype
      progress.rates.peak_flops = utilization.peak_flops(peak, impl, dtype)
      progress.rates.flops = utilization.step_flops(self.graph)
    if progress.records:
      progress.rates.memory = lambda: memory_check.used_bytes(impl)

  def _find_nonfinite(
    self, source: TrainingSource, start: int, step: int, loss: float
  ) -> str | None:
    """A text about the origin of a loss that is not finite; see `nonfinite.find`."""
    path = self._checkpoints.last_written()
    self.state.say(f"the loss became {loss} at step {step + 1}: looking for where it comes from")
    return nonfinite.find(self, source, step, self._checkpoints.saved_step or start, path)

  def replay(self) -> TrainingLoop:
    """The same training with variables of its own, and without a folder."""
    again = copy.copy(self)
    store = self.state.store
    impl = self.state.mesh_impl.with_store(
      VariableStore(seed=store.seed, noise_seed=store.noise_seed)
    )
    again.program = self.program.on_mesh(impl)
    again.state = self.state.on_mesh(impl)
    return again
