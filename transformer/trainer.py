"""The training loop around the programs of `model_steps`."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow import workers
from mesh_tensorflow.errors import (
  CheckpointError,
  ConfigError,
  DataError,
  NonFiniteError,
  WorkerLostError,
)
from mesh_tensorflow.transformer import init_checkpoint as init_checkpoint_lib
from mesh_tensorflow.transformer import mesh_setup, records, training_data
from mesh_tensorflow.transformer import nonfinite as nonfinite_lib
from mesh_tensorflow.transformer.inference import Inference
from mesh_tensorflow.transformer.model_steps import ModelSteps
from mesh_tensorflow.transformer.progress import TrainingProgress
from mesh_tensorflow.transformer.run_lock import training_lock
from mesh_tensorflow.transformer.stopping import StopRequests

_LOG = logging.getLogger("mesh_tensorflow")


class Trainer(Inference):
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
    steps_per_call: training steps in one call of the compiled program.
    save_checkpoints_steps: steps between checkpoints.
    keep_checkpoint_max: number of checkpoints to keep; None: all.
    report_every: steps between lines of the report.
    quiet: writes no lines.
    init_checkpoint: a checkpoint to start from if `model_dir` has none; see
      `init_checkpoint.restore`. The step goes on from its `global_step`, if it has one.
    init_variable_filter: regular expression; only variables of `init_checkpoint` in whose names it
      is found are taken from there.
    predict_fn: see `prediction.score_step` and `prediction.predict_step`.
    score_in_predict_mode: `predict` scores given targets in place of making outputs.
    model_info_file: a file for the sizes of variables and the counters of the training program.
    nonfinite: "stop": a NaN or infinite loss ends training with an error that names the step and
      the tensor; "skip": a step whose loss or gradients are NaN or infinite updates nothing, and is
      counted.
  """

  def __init__(
    self,
    steps: ModelSteps,
    vocabulary: Any,
    model_dir: str | None,
    optimizer: Callable[..., Any] | None = None,
    learning_rate_schedule: Any = None,
    steps_per_call: int = 100,
    save_checkpoints_steps: int = 5000,
    keep_checkpoint_max: int | None = None,
    report_every: int = 100,
    quiet: bool = False,
    init_checkpoint: str | None = None,
    *,
    init_variable_filter: str = "",
    predict_fn: Any = None,
    score_in_predict_mode: bool = False,
    model_info_file: str | None = None,
    nonfinite: str = "stop",
  ):
    nonfinite_lib.check_choice(nonfinite)
    self.steps = steps
    self.vocabulary = vocabulary
    self.model_dir = model_dir
    self._optimizer = optimizer
    self._schedule = learning_rate_schedule
    self._steps_per_call = max(1, steps_per_call)
    self._save_every = save_checkpoints_steps
    self._report_every = report_every
    # Of several workers only the chief reports.
    self._quiet = quiet or not workers.current().is_chief
    self._init_checkpoint = init_checkpoint
    self._init_variable_filter = init_variable_filter
    self._model_info_file = model_info_file
    self._skips = nonfinite == "skip"
    self.skipped_steps = self._skipped_in_a_row = 0
    self.predict_fn = predict_fn
    self.score_in_predict_mode = score_in_predict_mode
    self._programs: dict[Any, Any] = {}
    self._restored: str | None = None
    self._pipeline: training_data.SavedPipeline | None = None
    self._newest: str | None = None  # The checkpoint that training goes on from.
    self.global_step = 0
    self.losses: list[float] = []
    self.checkpointer = None
    self._saved_step = 0
    if model_dir:
      make_folder(model_dir)
      self.checkpointer = checkpoint_lib.Checkpointer(
        model_dir, self.mesh_impl.variable_store, max_to_keep=keep_checkpoint_max
      )

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
        `skip`, with the number of examples that were seen before. Returns single examples.
      train_steps: the absolute step at which to stop.
      dataset_split: for `dataset_fn`.
      on_ready: called with the graph when the program is built, before the first step.
      seen_data_init_step: the step at which the data began: the examples of the steps after it,
        up to the checkpoint's, are left out. By default the step of `init_checkpoint`, or 0.
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
      DataError: the data set is empty or ends early, or has the wrong features.
      NonFiniteError: the loss is NaN or infinite. Nothing is saved after that.
      StoppedError: SIGTERM or SIGINT came, in any worker. The steps done are saved.
      WorkerLostError: another worker of the cluster is gone.
    """
    self._check_train_arguments(dataset_fn, input_fn, (train_steps, steps, max_steps), hooks)
    is_chief = workers.current().is_chief
    with training_lock(self.model_dir if is_chief else None), StopRequests() as stop:
      try:
        return self._train(
          stop,
          dataset_fn,
          train_steps,
          dataset_split,
          on_ready,
          seen_data_init_step=seen_data_init_step,
          checkpoint_input_pipeline=checkpoint_input_pipeline,
          input_fn=input_fn,
          steps=steps,
          max_steps=max_steps,
        )
      except WorkerLostError:
        if self.checkpointer is not None:
          self.checkpointer.abandon()
        raise
      finally:
        if self.checkpointer is not None:
          self.checkpointer.wait()

  def _train(
    self,
    stop: StopRequests,
    dataset_fn: Callable[..., tf.data.Dataset] | None,
    train_steps: int | None,
    dataset_split: str,
    on_ready: Callable[[mtf.Graph], None] | None,
    *,
    seen_data_init_step: int | None,
    checkpoint_input_pipeline: bool,
    input_fn: Any,
    steps: int | None,
    max_steps: int | None,
  ) -> list[float]:
    start, first = self._start()
    if steps is not None:
      train_steps = start + steps
    elif max_steps is not None:
      train_steps = max_steps
    if input_fn is not None:

      def dataset_fn(**_):
        return training_data.examples_of(input_fn, self.steps.examples_per_step)

    if start >= train_steps:
      self._say(f"step {start} is reached already (train_steps is {train_steps})")
      self.build_for_inference()
      return []
    first = first if seen_data_init_step is None else seen_data_init_step
    if first > start:
      raise ConfigError(
        f"run.seen_data_init_step (={first}) is after the step {start} at which training goes on"
      )
    make_data = functools.partial(
      Trainer._data, dataset_fn=dataset_fn, split=dataset_split, first=first
    )
    data = make_data(self, start=start, checkpoint_input_pipeline=checkpoint_input_pipeline)
    progress = TrainingProgress(
      start,
      train_steps,
      self.steps.examples_per_step * max(self.steps.sequence_length.values()),
      report_every=self._report_every,
      summary_dir=self.model_dir if workers.current().is_chief else None,
      quiet=self._quiet,
    )
    compiled = self.compile_steps(data.names)
    self.global_step = start
    size = training_data.steps_per_call(self._steps_per_call, self._save_every)
    losses: list[float] = []
    try:
      for batches in records.reading((self._pipeline or data).calls(train_steps - start, size)):
        count = int(batches[0].shape[0])
        if self.global_step == start:
          self.prepare(compiled, on_ready, checkpoint=self._newest)
          progress.restart_clock()
        self._restored = None
        with self.mesh_impl.errors_of_runs("train_step"):
          result = compiled(batches, tf.constant(self.global_step, tf.int64))
          call_losses, bad = result.numpy().tolist()
        if self._skips:
          self._check_skipped(bad)
        else:
          self._check_finite(call_losses, start, make_data)
        losses += call_losses
        self.global_step += count
        progress.update(
          self.global_step,
          call_losses,
          self._learning_rate_value(self.global_step - 1),
          skipped=sum(n > 0 for n in bad),
        )
        if self.global_step < train_steps and workers.any_worker(stop.requested):
          stop.stop(self._save_and_leave())
        if self._is_time_to_save(count, train_steps):
          self.save()
      if self.global_step == start:
        raise DataError(
          "the training data set has no complete batch of "
          f"{self.steps.examples_per_step} sequences; use a smaller batch size or more data"
        )
      if self.global_step < train_steps:
        raise DataError(
          f"the training data ended after {self.global_step - start} of {train_steps - start} "
          "steps; let the data set repeat, or bind a smaller run.train_steps"
        )
    finally:
      progress.close()
    self.losses += losses
    return losses

  def _check_train_arguments(
    self, dataset_fn: Any, input_fn: Any, numbers: Sequence[int | None], hooks: Sequence[Any]
  ) -> None:
    if hooks:
      raise ConfigError("Trainer.train: hooks are of TF1 sessions, and are not available")
    if (dataset_fn is None) == (input_fn is None):
      raise ConfigError("Trainer.train: give either dataset_fn or input_fn")
    if sum(n is not None for n in numbers) != 1:
      raise ConfigError("Trainer.train: give one of train_steps, max_steps and steps")
    if self._optimizer is None:
      raise ConfigError("run.optimizer is not bound; bind @optimize.AdafactorOptimizer, say")

  def _start(self) -> tuple[int, int]:
    """The step at which training goes on, and the one at which this folder's training began."""
    self._newest = self.checkpointer.latest() if self.checkpointer is not None else None
    saved = checkpoint_lib.get_step_from_path(self._newest) if self._newest else 0
    self._saved_step = saved
    if not self._init_checkpoint:
      return saved, 0
    try:
      first = init_checkpoint_lib.step_of(self._init_checkpoint, self._init_variable_filter)
    except CheckpointError:
      if not saved:
        raise
      first = 0  # It is needed no more.
    return (saved, min(first, saved)) if saved else (first, first)

  def _data(
    self,
    dataset_fn: Callable[..., tf.data.Dataset],
    split: str,
    start: int,
    first: int,
    checkpoint_input_pipeline: bool = False,
  ) -> training_data.TrainingData:
    """The batches from step `start` on; sets `self._pipeline` if their position is to be saved."""
    # Data sets that shuffle without a seed of their own have the same order in all workers, and
    # whenever training goes on.
    tf.random.set_seed(self.mesh_impl.variable_store.seed)
    make = functools.partial(
      training_data.TrainingData, self.steps, dataset_fn, self.vocabulary, split
    )
    self._pipeline = None
    if checkpoint_input_pipeline and self.checkpointer is not None:
      data = make()
      pipeline = data.saved_with_checkpoints()
      if not workers.any_worker(not pipeline.is_in(self._newest)):
        pipeline.restore(self._newest)
      elif start > first:
        self._say(f"the position in the data was not saved at step {start}: examples are skipped")
        data = make(start - first)
        pipeline = data.saved_with_checkpoints()
      self._pipeline = pipeline
      return data
    return make(start - first)

  def prepare(
    self,
    compiled: Any,
    on_ready: Callable[[mtf.Graph], None] | None = None,
    *,
    checkpoint: str | None = None,
  ) -> None:
    """Traces the program, which creates the variables, then sets them to where training goes on.

    Args:
      compiled: see `compile_steps`.
      on_ready: called with the graph.
      checkpoint: of this model; None: `init_checkpoint`, or initial values.
    """
    started = time.perf_counter()
    compiled.get_concrete_function()
    _LOG.info("traced the training program in %.1f s", time.perf_counter() - started)
    if on_ready is not None:
      on_ready(self._train_graph())
    if checkpoint is not None:
      self.restore_if_any(checkpoint, for_training=True)
      return
    if self._init_checkpoint:
      done = init_checkpoint_lib.restore(
        self._init_checkpoint, self.mesh_impl.variable_store, self._init_variable_filter
      )
      self._say(done)
    elif hasattr(self.steps.model, "initialize"):
      # A model with a part that comes from a checkpoint of its own: a teacher.
      self.steps.model.initialize()

  def _train_graph(self) -> mtf.Graph:
    return self._step_fn.graph

  def compile_steps(self, names: Sequence[str]) -> Any:
    """Several training steps as one TensorFlow function.

    Args:
      names: features of the data.

    Returns:
      A function of (batches [n, <shape of a batch>] for each feature, number of the first step). It
      returns float32 [2, n]: the losses, and how many elements of loss and gradients were not
      finite, where such steps are skipped.
    """
    step_fn = self.steps.train_step(names, self._optimizer, skip_nonfinite=self._skips)
    step_fn.log_file = self._model_info_file
    self._step_fn = step_fn
    # Any number of steps: a shorter last call needs no program of its own.
    shapes = [self.steps.local_part(n)[1] for n in names]
    spec = tuple(tf.TensorSpec([None, *shape], tf.int32) for shape in shapes)

    @tf.function(input_signature=[spec, tf.TensorSpec([], tf.int64)], autograph=False)
    def call(batches, first_step):
      count = tf.shape(batches[0])[0]

      def step(i, results):
        at = first_step + tf.cast(i, tf.int64)
        values = [b[i] for b in batches]
        result = step_fn(*values, self._learning_rate(at), at)
        return i + 1, results.write(i, tf.stack(result) if self._skips else result)

      element = [2] if self._skips else []
      results = tf.TensorArray(tf.float32, size=count, element_shape=element)
      _, results = tf.while_loop(lambda i, _: i < count, step, [0, results], parallel_iterations=1)
      results = results.stack()
      return tf.transpose(results) if self._skips else tf.stack([results, tf.zeros_like(results)])

    return call

  def _learning_rate(self, step: tf.Tensor) -> tf.Tensor:
    if callable(self._schedule):
      return tf.cast(self._schedule(step=tf.cast(step, tf.float32)), tf.float32)
    return tf.constant(0.0 if self._schedule is None else float(self._schedule), tf.float32)

  def _learning_rate_value(self, step: int) -> float | None:
    if self._schedule is None:
      return None
    return float(self._learning_rate(tf.constant(step, tf.int64)))

  def _check_finite(self, losses: list[float], start: int, make_data: Callable[..., Any]) -> None:
    bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if bad is None:
      return
    step = self.global_step + bad
    saved, path = self._saved_step, None
    if self.checkpointer is not None:
      self.checkpointer.wait()
    if saved:
      path = os.path.join(self.model_dir, f"model.ckpt-{saved}")
    self._say(f"the loss became {losses[bad]} at step {step + 1}: looking for where it comes from")
    first = saved or start
    found = nonfinite_lib.find(self, step, first, path, functools.partial(make_data, start=first))
    raise NonFiniteError(
      f"the loss became {losses[bad]} at step {step + 1}{f' ({found})' if found else ''}; training "
      f"stopped, and nothing was saved after step {saved}. Lower the learning rate, or look at the "
      "data of that step; run.nonfinite = 'skip' leaves such steps out"
    )

  def _check_skipped(self, bad: list[float]) -> None:
    for i, n in enumerate(bad):
      self._skipped_in_a_row = self._skipped_in_a_row + 1 if n else 0
      self.skipped_steps += n > 0
      if self._skipped_in_a_row >= nonfinite_lib.MAX_SKIPPED_IN_A_ROW:
        raise NonFiniteError(
          f"the loss or gradients of the last {self._skipped_in_a_row} steps, up to "
          f"{self.global_step + i + 1}, were NaN or infinite; all were skipped (run.nonfinite = "
          f"'skip'), and training stopped. The last checkpoint is that of step {self._saved_step}"
        )

  def _is_time_to_save(self, count: int, train_steps: int) -> bool:
    if self.checkpointer is None:
      return False
    if self.global_step >= train_steps:
      return True
    before = self.global_step - count
    return bool(self._save_every) and (
      self.global_step // self._save_every > before // self._save_every
    )

  # ------------------------------------------------------------- checkpoints

  def save(self, *, asynchronous: bool = True) -> None:
    """Writes a checkpoint of the current step.

    Args:
      asynchronous: whether it may be written in the background.

    Raises:
      NonFiniteError: a variable holds NaN or infinity. The loss shows that a step later only.
      CheckpointError: the checkpoint before this one (synchronous: this one) could not be written.
    """
    name = next((v.name for v in self.mesh_impl.variable_store if not _is_finite(v)), None)
    if workers.any_worker(name is not None):
      raise NonFiniteError(
        f"variable {name or '(of which other workers have slices)'} became NaN or infinite by step "
        f"{self.global_step}; training stopped, and nothing was saved after step "
        f"{self._saved_step}. Lower the learning rate, or look at the data of the last steps"
      )
    attachments = self._pipeline.attachments() if self._pipeline is not None else None
    self.checkpointer.save(self.global_step, asynchronous=asynchronous, attachments=attachments)
    self._saved_step = self.global_step

  def _save_and_leave(self) -> str:
    """The last checkpoint of a training that was asked to stop; returns what was saved."""
    if self.checkpointer is None:
      return f"step {self.global_step} was done, and there is no model_dir to save it in"
    if self._saved_step != self.global_step:
      self.save(asynchronous=False)
    self.checkpointer.wait()
    return f"step {self.global_step} is saved in {self.model_dir}"

  def restore_if_any(self, path: str | None = None, for_training: bool = False) -> int:
    """Restores a checkpoint (the newest by default); 0 if there is none.

    Args:
      path: a checkpoint, or None.
      for_training: whether it must have exactly the model's variables; else it may have more
        (those of the optimizer).

    Returns:
      The step of the checkpoint.
    """
    path = path or (checkpoint_lib.latest_checkpoint(self.model_dir) if self.model_dir else None)
    if path is None:
      return 0
    checkpointer = self.checkpointer or checkpoint_lib.Checkpointer(
      os.path.dirname(path), self.mesh_impl.variable_store
    )
    checkpointer.restore(path, ignore_unexpected=not for_training)
    step = checkpoint_lib.get_step_from_path(path)
    self._restored = path
    self._say(f"restored {path}")
    return step

  def describe(self) -> str:
    """The layout of the training program, after it was built."""
    return mesh_setup.describe_layout(self.mesh_impl, self._train_graph())

  def _say(self, text: str) -> None:
    if not self._quiet:
      print(text, flush=True)


def make_folder(path: str) -> None:
  """Makes a folder, if it is not there.

  Raises:
    ConfigError: it cannot be made.
  """
  try:
    tf.io.gfile.makedirs(path)
  except tf.errors.OpError as e:
    raise ConfigError(
      f"cannot make the folder {path} ({e.message}): give another --model_dir, or the right to "
      "write there"
    ) from e


def _is_finite(stored: Any) -> bool:
  """Whether all numbers of a variable that this process has are finite."""
  return not stored.slice_dtype.is_floating or all(
    tf.reduce_all(tf.math.is_finite(v)) for _, v in stored.distinct()
  )
