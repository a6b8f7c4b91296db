"""The training loop, evaluation and generation around the programs of `model_steps`."""

from __future__ import annotations

import inspect
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.errors import DataError, NonFiniteError
from mesh_tensorflow.transformer import mesh_setup
from mesh_tensorflow.transformer.model_steps import MODEL_FEATURES, ModelSteps
from mesh_tensorflow.transformer.progress import TrainingProgress

_LOG = logging.getLogger("mesh_tensorflow")


class Trainer:
  """Trains, evaluates and samples from a model; resumes from its folder.

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
    init_checkpoint: a checkpoint to start from if `model_dir` has none; the step starts at 0.
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
  ):
    self.steps = steps
    self.vocabulary = vocabulary
    self.model_dir = model_dir
    self._optimizer = optimizer
    self._schedule = learning_rate_schedule
    self._steps_per_call = max(1, steps_per_call)
    self._save_every = save_checkpoints_steps
    self._report_every = report_every
    self._quiet = quiet
    self._init_checkpoint = init_checkpoint
    self._eval_steps: dict[tuple[str, ...], Any] = {}
    self._samplers: dict[Any, Any] = {}
    self.global_step = 0
    self.losses: list[float] = []
    self.checkpointer = None
    if model_dir:
      tf.io.gfile.makedirs(model_dir)
      self.checkpointer = checkpoint_lib.Checkpointer(
        model_dir, self.mesh_impl.variable_store, max_to_keep=keep_checkpoint_max
      )

  @property
  def mesh_impl(self) -> mtf.MeshImpl:
    return self.steps.mesh_impl

  # ---------------------------------------------------------------- training

  def train(
    self,
    dataset_fn: Callable[..., tf.data.Dataset],
    train_steps: int,
    dataset_split: str = "train",
    on_ready: Callable[[mtf.Graph], None] | None = None,
  ) -> list[float]:
    """Trains until the global step is `train_steps`, from the newest checkpoint on.

    Args:
      dataset_fn: called as `fn(sequence_length=, vocabulary=, dataset_split=)`; if it takes
        `skip`, with the number of examples that were seen before. Returns single examples.
      train_steps: the absolute step at which to stop.
      dataset_split: for `dataset_fn`.
      on_ready: called with the graph when the program is built, before the first step.

    Returns:
      The losses of the steps done.

    Raises:
      DataError: the data set is empty or ends early, or has the wrong features.
      NonFiniteError: the loss is NaN or infinite. Nothing is saved after that.
    """
    start = self._resume_step()
    if start >= train_steps:
      self._say(f"step {start} is reached already (train_steps is {train_steps})")
      self.build_for_inference()
      return []
    dataset, names = self._batches(dataset_fn, dataset_split, start)
    step_fn = self.steps.train_step(names, self._optimizer)
    progress = TrainingProgress(
      start,
      train_steps,
      self.steps.batch_size * max(self.steps.sequence_length.values()),
      report_every=self._report_every,
      summary_dir=self.model_dir,
      quiet=self._quiet,
    )
    compiled = self._compile(step_fn, names)
    self.global_step = start
    data = self._calls(dataset, names, start, train_steps)
    losses: list[float] = []
    try:
      for batches in data:
        count = int(batches[0].shape[0])
        first = self.global_step == start
        if first:
          self._prepare(compiled, on_ready)
          progress.restart_clock()
        call_losses = compiled(batches, tf.constant(self.global_step, tf.int64)).numpy().tolist()
        self._check_finite(call_losses)
        losses += call_losses
        self.global_step += count
        progress.update(
          self.global_step, call_losses, self._learning_rate_value(self.global_step - 1)
        )
        if self._is_time_to_save(count, train_steps):
          self.save()
      if self.global_step == start:
        raise DataError(
          "the training data set has no complete batch of "
          f"{self.steps.batch_size} sequences; use a smaller batch size or more data"
        )
      if self.global_step < train_steps:
        raise DataError(
          f"the training data ended after {self.global_step - start} of {train_steps - start} "
          "steps; let the data set repeat, or bind a smaller run.train_steps"
        )
    finally:
      progress.close()
      if self.checkpointer is not None:
        self.checkpointer.wait()
    self.losses += losses
    return losses

  def _prepare(self, compiled: Any, on_ready: Callable[[mtf.Graph], None] | None) -> None:
    """Traces the program, which creates the variables, then restores them."""
    started = time.perf_counter()
    compiled.get_concrete_function()
    _LOG.info("traced the training program in %.1f s", time.perf_counter() - started)
    if on_ready is not None:
      on_ready(self._train_graph())
    if self.restore_if_any(for_training=True):
      return
    if self._init_checkpoint:
      self.restore_if_any(self._init_checkpoint)
    elif hasattr(self.steps.model, "initialize"):
      # A model with a part that comes from a checkpoint of its own: a teacher.
      self.steps.model.initialize()

  def _train_graph(self) -> mtf.Graph:
    return self._step_fn.graph

  def _compile(self, step_fn: mtf.Function, names: Sequence[str]) -> Any:
    """Several steps as one TensorFlow function: (batches [n, batch, length], step) -> losses."""
    self._step_fn = step_fn
    # Any number of steps: a shorter last call needs no program of its own.
    spec = tuple(tf.TensorSpec([None, *self.steps.feature_shape(n)], tf.int32) for n in names)

    @tf.function(input_signature=[spec, tf.TensorSpec([], tf.int64)], autograph=False)
    def call(batches, first_step):
      count = tf.shape(batches[0])[0]

      def step(i, losses):
        at = first_step + tf.cast(i, tf.int64)
        values = [b[i] for b in batches]
        loss = step_fn(*values, self._learning_rate(at), at)
        return i + 1, losses.write(i, loss)

      losses = tf.TensorArray(tf.float32, size=count, element_shape=[])
      _, losses = tf.while_loop(lambda i, _: i < count, step, [0, losses], parallel_iterations=1)
      return losses.stack()

    return call

  def _learning_rate(self, step: tf.Tensor) -> tf.Tensor:
    if callable(self._schedule):
      return tf.cast(self._schedule(step=tf.cast(step, tf.float32)), tf.float32)
    return tf.constant(0.0 if self._schedule is None else float(self._schedule), tf.float32)

  def _learning_rate_value(self, step: int) -> float | None:
    if self._schedule is None:
      return None
    return float(self._learning_rate(tf.constant(step, tf.int64)))

  def _check_finite(self, losses: list[float]) -> None:
    for i, loss in enumerate(losses):
      if not math.isfinite(loss):
        raise NonFiniteError(
          f"the loss became {loss} at step {self.global_step + i + 1}; training stopped, and "
          f"nothing was saved after step {self._last_saved_step()}. Lower the learning rate, or "
          "look at the data of that step"
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

  def save(self) -> None:
    """Writes a checkpoint of the current step.

    Raises:
      NonFiniteError: a variable holds NaN or infinity. The loss shows that a step later only.
    """
    for stored in self.mesh_impl.variable_store:
      if stored.slice_dtype.is_floating and not all(
        tf.reduce_all(tf.math.is_finite(v)) for _, v in stored.distinct()
      ):
        raise NonFiniteError(
          f"variable {stored.name} became NaN or infinite by step {self.global_step}; training "
          f"stopped, and nothing was saved after step {self._last_saved_step()}. Lower the "
          "learning rate, or look at the data of the last steps"
        )
    self.checkpointer.save(self.global_step)

  def _last_saved_step(self) -> int:
    if self.checkpointer is not None:
      self.checkpointer.wait()
    path = checkpoint_lib.latest_checkpoint(self.model_dir) if self.model_dir else None
    return checkpoint_lib.get_step_from_path(path) if path else 0

  def _resume_step(self) -> int:
    return self._last_saved_step()

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
    self._say(f"restored {path}")
    return step

  # -------------------------------------------------------------------- data

  def _batches(
    self, dataset_fn: Callable[..., tf.data.Dataset], split: str, start: int
  ) -> tuple[tf.data.Dataset, list[str]]:
    """Batches of the model's features from step `start` on, and the features' names."""
    seen = start * self.steps.batch_size
    kwargs = dict(
      sequence_length=self.steps.sequence_length,
      vocabulary=self.vocabulary,
      dataset_split=split,
    )
    skips = _takes_skip(dataset_fn)
    if skips:
      kwargs["skip"] = seen
    dataset = dataset_fn(**kwargs)
    if seen and not skips:
      dataset = dataset.skip(seen)
    names = [n for n in MODEL_FEATURES if n in dataset.element_spec]
    self.steps.check_features(names)
    self._check_lengths(dataset, names)
    dataset = dataset.map(lambda ex: tuple(tf.cast(ex[n], tf.int32) for n in names))
    return dataset.batch(self.steps.batch_size, drop_remainder=True), names

  def _check_lengths(self, dataset: tf.data.Dataset, names: Sequence[str]) -> None:
    for name in names:
      expected = self.steps.sequence_length[name.split("_")[0]]
      shape = dataset.element_spec[name].shape
      if shape.rank != 1 or shape[0] not in (None, expected):
        raise DataError(
          f"feature {name!r} of the data has shape {shape}, expected [{expected}] "
          "(run.sequence_length); pad or cut it with dataset.pack_or_pad"
        )

  def _calls(
    self, dataset: tf.data.Dataset, names: Sequence[str], start: int, stop: int
  ) -> tf.data.Dataset:
    """Batches stacked for one call each: lists of [steps, batch, length]."""
    shapes = [self.steps.feature_shape(n) for n in names]
    size = _steps_per_call(self._steps_per_call, self._save_every)
    return (
      dataset.map(lambda *xs: tuple(tf.reshape(x, s) for x, s in zip(xs, shapes)))
      .take(stop - start)
      .batch(size)
      .prefetch(tf.data.AUTOTUNE)
    )

  # -------------------------------------------------------------- evaluation

  def evaluate(
    self, dataset: tf.data.Dataset, max_batches: int | None = None, what: str = "eval"
  ) -> dict[str, float]:
    """Teacher-forced evaluation.

    Args:
      dataset: single examples; ends by itself, or `max_batches` ends it. The last batch is
        filled up with padding, which is not scored.
      max_batches: number of batches; None: all.
      what: name of the data, for messages.

    Returns:
      `loss` (nats per scored token), `bits_per_token`, `token_accuracy`, `sequence_accuracy`,
      `num_eval_tokens`, `neg_log_perplexity`, `total_nats`.

    Raises:
      DataError: there is nothing to evaluate.
    """
    names = [n for n in MODEL_FEATURES if n in dataset.element_spec]
    step = self._eval_step(names)
    self._check_lengths(dataset, names)
    dataset = dataset.map(lambda ex: tuple(tf.cast(ex[n], tf.int32) for n in names))
    dataset = dataset.batch(self.steps.batch_size).prefetch(tf.data.AUTOTUNE)
    sums: dict[str, float] = {}
    for i, batch in enumerate(dataset):
      if max_batches is not None and i >= max_batches:
        break
      values = [self._filled(x, n) for x, n in zip(batch, names)]
      if i == 0 and not self.global_step:
        step.get_concrete_function(*values)
        self.global_step = self.restore_if_any()
      for name, value in step(*values).items():
        sums[name] = sums.get(name, 0.0) + float(value)
    if not sums.get("tokens"):
      raise DataError(f"data set {what!r} has no tokens to evaluate")
    loss = sums["loss"] / sums["tokens"]
    return {
      "loss": loss,
      "bits_per_token": loss / math.log(2.0),
      "neg_log_perplexity": -loss,
      "token_accuracy": sums["correct"] / sums["tokens"],
      "sequence_accuracy": sums["correct_sequences"] / max(sums["sequences"], 1.0),
      "num_eval_tokens": sums["tokens"],
      "total_nats": sums["loss"],
    }

  def _filled(self, x: tf.Tensor, name: str) -> tf.Tensor:
    """A batch padded with rows of zeros to the full batch size."""
    missing = self.steps.batch_size - int(x.shape[0])
    if missing:
      x = tf.pad(x, [[0, missing], [0, 0]])
    return tf.reshape(x, self.steps.feature_shape(name))

  # ------------------------------------------------------------- generation

  def sample(
    self, rows: Sequence[Sequence[int]], length: int, batch_size: int | None = None, **options: Any
  ) -> list[list[int]]:
    """Continues rows of ids; an encoder-decoder makes targets of inputs.

    Args:
      rows: the given ids of each row; may be empty rows.
      length: ids of a row at most, the given ones included.
      batch_size: rows at a time; as many as in a training batch by default.
      **options: of `Unitransformer.sample_autoregressive` or `Bitransformer.decode`.

    Returns:
      For each row its ids, the given ones included; or the ids of its targets.
    """
    size = batch_size or self.steps.batch_size
    key = (size, length, tuple(sorted(options.items())))
    if key not in self._samplers:
      self._samplers[key] = self.steps.sample_step(length, size, **options)
    sampler = self._samplers[key]
    # An encoder-decoder puts nothing behind its inputs.
    continues = 0 if hasattr(self.steps.model, "decode") else 1
    results: list[list[int]] = []
    for start in range(0, len(rows), size):
      ids = np.zeros([size, length], np.int32)
      part = rows[start : start + size]
      for i, row in enumerate(part):
        if len(row) > length - continues:
          raise DataError(
            f"a prompt has {len(row)} ids, which leaves no room in sequences of {length}; "
            "shorten it, or bind a larger run.sequence_length (and Unitransformer.max_length)"
          )
        ids[i, : len(row)] = row
      ids[len(part) :] = ids[0]  # Empty rows would go on to the full length.
      results += sampler(ids).numpy()[: len(part)].tolist()
    return results

  def build_for_inference(self) -> None:
    """Creates the model's variables without training, and restores the newest checkpoint."""
    names = self.steps.required_features
    zeros = [tf.zeros(self.steps.feature_shape(n), tf.int32) for n in names]
    self._eval_step(names).get_concrete_function(*zeros)
    self.global_step = self.restore_if_any()

  def _eval_step(self, names: Sequence[str]) -> Any:
    """The compiled evaluation step for data of these features."""
    key = tuple(names)
    if key not in self._eval_steps:
      self._eval_steps[key] = tf.function(self.steps.eval_step(names), autograph=False)
    return self._eval_steps[key]

  def describe(self) -> str:
    """The layout of the training program, after it was built."""
    return mesh_setup.describe_layout(self.mesh_impl, self._train_graph())

  def _say(self, text: str) -> None:
    if not self._quiet:
      print(text, flush=True)


def _takes_skip(dataset_fn: Callable[..., Any]) -> bool:
  try:
    return "skip" in inspect.signature(dataset_fn).parameters
  except (TypeError, ValueError):
    return False


def _steps_per_call(wanted: int, save_every: int) -> int:
  """The largest number of steps up to `wanted` after which a checkpoint can be due."""
  if not save_every:
    return wanted
  return max(n for n in range(1, min(wanted, save_every) + 1) if save_every % n == 0)
