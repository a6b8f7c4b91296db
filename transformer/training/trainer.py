"""The training loop around the programs of `model_steps`."""

from __future__ import annotations

import array
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.records import with_settings
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import WorkerLostError
from mesh_tensorflow.training import averages, model_files
from mesh_tensorflow.training import nonfinite as nonfinite_lib
from mesh_tensorflow.training.progress import TrainingProgress
from mesh_tensorflow.training.run_lock import training_lock
from mesh_tensorflow.training.several_steps import CallLengths, StopFlag
from mesh_tensorflow.training.stopping import StopRequests
from mesh_tensorflow.transformer.files import records
from mesh_tensorflow.transformer.gin_config import checks
from mesh_tensorflow.transformer.programs import training_data
from mesh_tensorflow.transformer.programs.model_steps import ModelSteps
from mesh_tensorflow.transformer.programs.training_data import SavedPipeline, TrainingData
from mesh_tensorflow.transformer.training.request import TrainRequest, check_all_done, train_request
from mesh_tensorflow.transformer.training.source import TrainingSource
from mesh_tensorflow.transformer.training.trainable_model import TrainableModel
from mesh_tensorflow.transformer.training.validation import Validation, Validator

# Longer calls would keep a bar from moving, and lines from coming when their steps are done.
_CALL_SECONDS = 1.0


class Trainer(TrainableModel):
  """Trains, evaluates and samples from a model; resumes from its folder.

  It stands where the TF1 library had an Estimator, and has its methods: `train`, `evaluate`,
  `predict`, `export_saved_model`, `latest_checkpoint`, `get_variable_value`.

  Args:
    steps: a `ModelSteps`.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    model_dir: folder for checkpoints and summaries; None keeps nothing.
    optimizer: an optimizer class or factory, called with `learning_rate`.
    learning_rate_schedule: a function of `step` (a float32 scalar tf.Tensor), a number, or
      None (the optimizer gets None).
    settings: the settings of the training loop and of the model's folder.
    quiet: writes no lines.
    init_variable_filter: regular expression; only variables of `init_checkpoint` in whose names it
      is found are taken from there.
    predict_fn: see `prediction.score_step` and `prediction.predict_step`.
    score_in_predict_mode: `predict` scores given targets in place of making outputs.
    model_info_file: a file for the sizes of variables and the counters of the training program.
    validation: how the model is evaluated while it is trained; None: it is not.
    **changes: single settings in place of those of `settings`, by name; `steps_per_call` is another
      name of `iterations_per_loop`. Without `settings` all checkpoints are kept.
  """

  def __init__(
    self,
    steps: ModelSteps,
    vocabulary: Any,
    model_dir: str | None,
    optimizer: Callable[..., Any] | None = None,
    learning_rate_schedule: Any = None,
    *,
    settings: TrainerSettings | None = None,
    quiet: bool = False,
    init_variable_filter: str = "",
    predict_fn: Callable[..., Any] | None = None,
    score_in_predict_mode: bool = False,
    model_info_file: str | None = None,
    validation: Validation | None = None,
    **changes: Any,
  ):
    if "steps_per_call" in changes:
      changes["iterations_per_loop"] = changes.pop("steps_per_call")
    settings = with_settings(settings or TrainerSettings(keep_checkpoint_max=None), changes)
    checks.check_record("Trainer", settings)
    super().__init__(
      steps,
      vocabulary,
      model_dir,
      settings=settings,
      optimizer=optimizer,
      learning_rate_schedule=learning_rate_schedule,
      init_variable_filter=init_variable_filter,
      model_info_file=model_info_file,
      predict_fn=predict_fn,
      score_in_predict_mode=score_in_predict_mode,
      # Of several workers only the chief reports.
      quiet=quiet or not workers.current().is_chief,
    )
    self._steps_per_call = training_data.steps_per_call(
      settings.iterations_per_loop, settings.save_checkpoints_steps
    )
    self._validation = validation or Validation()
    self._stop_flag = StopFlag()
    self.losses: list[float] = []

  # ---------------------------------------------------------------- training

  def train(
    self,
    dataset_fn: Callable[..., tf.data.Dataset] | None = None,
    train_steps: int | None = None,
    dataset_split: str = "train",
    on_ready: Callable[[mtf.Graph], None] | None = None,
    *,
    seen_data_init_step: int | None = None,
    checkpoint_input_pipeline: bool = False,
    input_fn: Any = None,
    steps: int | None = None,
    max_steps: int | None = None,
    hooks: Sequence[Any] = (),
  ) -> list[float]:
    """Trains until the global step is `train_steps`, from the newest checkpoint on.

    Args:
      dataset_fn: called as `fn(sequence_length=, vocabulary=, dataset_split=)`; if it takes
        `skip`, with the number of examples that were seen before; if it takes `batch_rows`, with
        those that this worker needs (see `TrainingData`). Returns single examples.
      train_steps: the absolute step at which to stop.
      dataset_split: for `dataset_fn`.
      on_ready: called with the graph when the program is built, before the first step.
      seen_data_init_step: the step at which the data began: the examples of the steps after it,
        up to the checkpoint's, are left out. By default the step of `init_checkpoint`, or of the
        checkpoint of another program that was in `model_dir` when training began; or 0.
      checkpoint_input_pipeline: save where the data is with each checkpoint, and go on there: no
        example is read twice to be skipped.
      input_fn: in place of `dataset_fn`, an Estimator's: a function that returns batches of dicts.
      steps: in place of `train_steps`, the number of steps to do.
      max_steps: another name of `train_steps`, the Estimator's.
      hooks: must be empty: these were for TF1 sessions.

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
    request = train_request(
      dataset_fn,
      input_fn,
      self.steps.examples_per_step,
      train_steps=train_steps,
      max_steps=max_steps,
      steps=steps,
      hooks=hooks,
      dataset_split=dataset_split,
      on_ready=on_ready,
      seen_data_init_step=seen_data_init_step,
      checkpoint_input_pipeline=checkpoint_input_pipeline,
    )
    self._check_optimizer()
    if self.model_dir:
      model_files.make_folder(self.model_dir)
    with contextlib.ExitStack() as stack:
      by_chief(lambda: stack.enter_context(training_lock(self.model_dir)))
      self._stop_flag.put(False)
      stop = stack.enter_context(StopRequests(self._stop_flag))
      try:
        return self._train(request, stop)
      except WorkerLostError:
        if self.checkpointer is not None:
          self.checkpointer.abandon()
        raise
      finally:
        if self.checkpointer is not None:
          with stop.saving():
            self.checkpointer.wait()

  def _train(self, request: TrainRequest, stop: StopRequests) -> list[float]:
    start, began = self._start()
    last = request.last_step(start)
    nothing = self._validation.nothing_to_do(start, last, self._checkpoints.evaluations)
    if nothing is not None:
      self._say(nothing)
      self.build_for_inference()
      return []
    validator = Validator(self._validation, self, self._checkpoints.evaluations)
    first = request.first_step_of_data(began, start)
    source, names, batches = self._open_data(request, start, first)
    progress, reports = self._new_progress(start, last)
    # A flag ends the calls of one process. Workers stop at one step, and a saved position in the
    # data is that of the step: their calls are short instead.
    alone = workers.current().size == 1 and self._checkpoints.pipeline is None
    # A third of the time for a call; the rest is for the checkpoint to be begun. And a person sees
    # that it goes on.
    lengths = CallLengths(min(stop.save_within_seconds / 3, _CALL_SECONDS))

    def most() -> int:
      left = validator.steps_left(self.global_step)
      return reports.steps_of_call(self.global_step, min(left, lengths.most))

    compiled = self.compile_steps(names, self._stop_flag if alone else None, reports)
    find = functools.partial(self._find_nonfinite, source, start)
    self.global_step = start
    losses = array.array("f")  # Objects of Python's would take eight times the memory.
    prepare = functools.partial(
      self.prepare, compiled, request.on_ready, checkpoint=self._checkpoints.newest
    )
    early: str | None = None
    try:
      if start > first:
        prepare()  # Before the data, in which it may take a while to get behind what was seen.
        # If the training was stopped before the evaluation of its last step was done.
        early = self._validate(validator, progress, stop, last)
        self._save_what_is_due(stop, start, last)
      count = last - start if early is None else 0
      for values in records.reading(batches.calls(count, self._steps_per_call, most)):
        before = self.global_step
        if before == start:
          if start == first:
            prepare()
          self._complete_rates(progress)
          progress.restart_clock()
        stop.running(before, self._checkpoints.whole_step)
        progress.before_call(before)
        called = time.perf_counter()
        of_call, bad, others = self._call(compiled, values)
        lengths.measured(len(of_call), time.perf_counter() - called)
        self._loss_check.take(before, of_call, bad, self._checkpoints.saved_step, find)
        losses.extend(of_call)
        self.global_step += len(of_call)
        skipped = sum(n > 0 for n in bad)
        progress.update(self.global_step, of_call, self._rate.at, skipped=skipped, values=others)
        early = self._validate(validator, progress, stop, last)
        # The first worker's measure is that of all.
        failed = self._checkpoints.has_failed
        asked = workers.gather(np.array([stop.requested, lengths.most, failed], np.int32))
        lengths.most = int(asked[0, 1])
        if asked[:, 2].any() and self.checkpointer is not None:
          self.checkpointer.wait()  # Raises what a checkpoint in the background met.
        # At the last step nothing is left to stop: the checkpoint that is due comes anyway.
        if self.global_step < last and early is None and asked[:, 0].any():
          self._save_and_stop(stop, last)
        self._save_what_is_due(stop, before, last if early is None else self.global_step)
        if early is not None:
          break
        progress.restart_clock()
      if early is not None:
        progress.line(f"stopped early at step {self.global_step} of {last}: {early}")
    finally:
      progress.close()
    if early is None:
      check_all_done(self.global_step, start, last, self.steps.examples_per_step)
    with stop.saving():
      progress.summarize(self._checkpoints.last_written())
      if self.checkpointer is not None:
        stop.saved(f"step {self.global_step} is saved in {self.checkpointer.directory}")
    self.losses += losses
    return losses.tolist()

  def _open_data(
    self, request: TrainRequest, start: int, first: int
  ) -> tuple[TrainingSource, list[str], TrainingData | SavedPipeline]:
    """Opens the training data; returns its source, features and batches from step `start` on."""
    source = TrainingSource(
      request.dataset_fn,
      self.vocabulary,
      request.dataset_split,
      first,
      self._checkpoints.examples_in_epoch,
      self._data_seed,
    )
    data, pipeline = source.open(
      self.steps,
      start,
      self._checkpoints.newest,
      self._say,
      saves_position=request.checkpoint_input_pipeline and self.checkpointer is not None,
    )
    self._checkpoints.data, self._checkpoints.pipeline = data, pipeline
    return source, data.names, data if pipeline is None else pipeline

  def _validate(
    self, validator: Validator, progress: TrainingProgress, stop: StopRequests, last: int
  ) -> str | None:
    """Evaluates on held-out data, if that is due; returns why training ends now, if it does."""
    if not validator.is_due(self.global_step, last):
      return None

    def goes_on() -> bool:
      return not workers.any_worker(stop.requested)

    averaged = averages.in_place(self.mesh_impl.variable_store) if self._use_ema else None
    with averaged or contextlib.nullcontext():
      found = validator.run(self.global_step, goes_on)
    if found is not None:
      line, scalars = found
      progress.line(line)
      progress.scalars(self.global_step, scalars)
    progress.restart_clock()
    return validator.reason_to_stop() if found is not None else None

  def _save_what_is_due(self, stop: StopRequests, before: int, last: int) -> None:
    """Saves a checkpoint after a call if one is due, or keeps the best one so far."""
    step = self.global_step
    is_due = self._checkpoints.is_due(before, step, last)
    if is_due or self._checkpoints.evaluations.to_keep(step):
      with stop.saving():
        if is_due:
          self.save()
        else:
          self._checkpoints.keep_best(step)

  def _save_and_stop(self, stop: StopRequests, last: int) -> None:
    """Saves, and ends a training that was asked to stop."""
    with stop.saving():
      saved = self._checkpoints.save_before_leaving(self.global_step)
      if self.checkpointer is not None:
        stop.saved(saved)
    left = f"{last - self.global_step} of {last} steps remain"
    stop.stop(f"{saved}; {left}", goes_on=self.checkpointer is not None)

  def _find_nonfinite(
    self, source: TrainingSource, start: int, step: int, loss: float
  ) -> str | None:
    """A text about the origin of a loss that is not finite; see `nonfinite.find`."""
    path = self._checkpoints.last_written()
    self._say(f"the loss became {loss} at step {step + 1}: looking for where it comes from")
    first = self._checkpoints.saved_step or start
    return nonfinite_lib.find(
      self, step, first, path, lambda again: source.batches_from(again.steps, first)
    )

  def _start(self) -> tuple[int, int]:
    """The step at which training goes on, and the one at which this folder's training began."""
    if self.checkpointer is not None:
      self.checkpointer.check_folder()
    return self._checkpoints.start(self._init.step if self._init else None, self._say)

  # ------------------------------------------------------------- checkpoints

  def save(self, *, asynchronous: bool = True) -> None:
    """Writes a checkpoint of the current step.

    Args:
      asynchronous: whether it may be written in the background.

    Raises:
      NonFiniteError: a variable holds NaN or infinity. The loss shows that a step later only.
      CheckpointError: the checkpoint before this one (synchronous: this one) could not be written.
    """
    self._checkpoints.save(self.global_step, asynchronous)
