"""The trainer of Transformers: training by the common loop, evaluation, prediction, generation."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow import workers
from mesh_tensorflow.arguments.declared import COUNT_OR_ZERO, takes
from mesh_tensorflow.environment.data_sets import without_autotuning
from mesh_tensorflow.environment.tensorflow_mode import not_converted
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.numerics import random_bits
from mesh_tensorflow.training.data import TrainingData
from mesh_tensorflow.training.init_checkpoint import InitialCheckpoint
from mesh_tensorflow.training.loop import LearningRateLike, TrainingLoop
from mesh_tensorflow.training.settings import SEEDS, checked_settings
from mesh_tensorflow.training.state import ModelState
from mesh_tensorflow.training.validation import Evaluator, MakeDatasets, TextMetrics
from mesh_tensorflow.transformer.data.files import records
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies
from mesh_tensorflow.transformer.generation import predict, saved_model, text_metrics
from mesh_tensorflow.transformer.generation.prefill_decode import DecodeOptions, DecodePrograms
from mesh_tensorflow.transformer.gin_config import checks, model_config
from mesh_tensorflow.transformer.gin_config.model_config import ATTACHMENT, ModelConfig
from mesh_tensorflow.transformer.model import evaluation, mesh_setup, stages
from mesh_tensorflow.transformer.model.model_features import MODEL_FEATURES
from mesh_tensorflow.transformer.model.model_steps import ModelSteps

# An Estimator's: a data set of batches, or a function that returns one.
InputFn: TypeAlias = Callable[..., tf.data.Dataset] | tf.data.Dataset


@dataclasses.dataclass(frozen=True)
class ConfigRecord:
  """The `ModelRecord` of a Transformer.

  Attributes:
    config: what decides the model, as `model_config.capture` finds it.
    allow_change: whether checkpoints may be of another model.
  """

  config: ModelConfig
  allow_change: bool = False

  def attachments(self) -> dict[str, Callable[[str], None]]:
    """The writer of the configuration."""
    return {ATTACHMENT: self.config.write}

  def manifest(self) -> dict[str, Any]:
    """Hash of the configuration, and the vocabulary."""
    return {
      "configuration": {"file": "operative_config.gin", "sha256": self._hash()},
      "vocabulary": self.config.record["vocabulary"],
    }

  def _hash(self) -> str:
    """Hash of all settings except the folder, equal for runs with the same settings."""
    settings = {k: v for k, v in self.config.record.items() if k != "vocabulary"}
    settings["other"] = {
      k: v for k, v in settings.get("other", {}).items() if not k.endswith(".run.model_dir")
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

  def compare(self, path: str, fits: Callable[[], bool]) -> list[str]:
    """See `model_config.compare`."""
    return model_config.compare(path, self.config, self.allow_change, fits=fits)

  def compare_with_initial(self, path: str) -> list[str]:
    """See `model_config.compare_with_initial`."""
    return model_config.compare_with_initial(path, self.config)


@takes(train_steps=COUNT_OR_ZERO, max_steps=COUNT_OR_ZERO, steps=COUNT_OR_ZERO)
def train_request(
  dataset_fn: Callable[..., tf.data.Dataset] | None,
  input_fn: InputFn | None,
  examples_per_step: int,
  *,
  train_steps: int | None,
  max_steps: int | None,
  steps: int | None,
  hooks: Sequence[object],
) -> tuple[Callable[..., tf.data.Dataset], int | None]:
  """Checks the arguments of `Trainer.train` and merges those that are aliases of each other.

  Args:
    dataset_fn: returns a data set of single examples; or None, if `input_fn` is given.
    input_fn: an Estimator's function that returns batches of dicts; or None.
    examples_per_step: number of examples in a batch.
    train_steps: absolute step at which to stop; exactly one of the three numbers must be given.
    max_steps: another name of `train_steps`.
    steps: number of steps to do.
    hooks: must be empty.

  Returns:
    The function that makes the data set, and the step at which to stop; None if `steps` is given.

  Raises:
    ConfigError: incompatible arguments.
  """
  checks.check_arguments("Trainer.train", train_request, locals())
  if hooks:
    raise ConfigError("Trainer.train: hooks are of TF1 sessions, and are not available")
  if (dataset_fn is None) == (input_fn is None):
    raise ConfigError("Trainer.train: give either dataset_fn or input_fn")
  if sum(n is not None for n in (train_steps, max_steps, steps)) != 1:
    raise ConfigError("Trainer.train: give one of train_steps, max_steps and steps")

  def examples(**_: Any) -> tf.data.Dataset:
    return examples_of(input_fn, examples_per_step)

  return dataset_fn or examples, train_steps if max_steps is None else max_steps


def bound_dataset_fn(
  steps: ModelSteps,
  dataset_fn: Callable[..., tf.data.Dataset],
  vocabulary: Vocabularies,
  split: str,
) -> Callable[..., tf.data.Dataset]:
  """A data set function as `run` takes it, as one of `TrainingData`.

  Args:
    steps: the programs of the model, which know the lengths of sequences.
    dataset_fn: called as `fn(sequence_length=, vocabulary=, dataset_split=)`; see `Trainer.train`.
    vocabulary: for it.
    split: for it.
  """
  return functools.partial(
    dataset_fn, sequence_length=steps.sequence_length, vocabulary=vocabulary, dataset_split=split
  )


def open_data(
  steps: ModelSteps,
  dataset_fn: Callable[..., tf.data.Dataset],
  vocabulary: Vocabularies,
  split: str,
  seen_steps: int = 0,
  **options: Any,
) -> TrainingData:
  """The `TrainingData` of texts; arguments as of `bound_dataset_fn` and `TrainingData`."""
  return TrainingData(
    steps, bound_dataset_fn(steps, dataset_fn, vocabulary, split), seen_steps, **options
  )


def call_input_fn(input_fn: InputFn, batch_size: int) -> tf.data.Dataset:
  """The data set of an Estimator's input function, which yields batches.

  Args:
    input_fn: a data set, or a function; its argument `params`, if it has one, is
      `{"batch_size": batch_size}`.
    batch_size: number of examples in a batch.

  Raises:
    DataError: the function returns something else.
  """
  dataset = input_fn
  if callable(input_fn):
    parameters = inspect.signature(input_fn).parameters
    kwargs = {"params": {"batch_size": batch_size}} if "params" in parameters else {}
    dataset = input_fn(**kwargs)
  if not isinstance(dataset, tf.data.Dataset):
    raise DataError(f"an input_fn must return a tf.data.Dataset, not {type(dataset).__name__}")
  return dataset


def examples_of(input_fn: InputFn, batch_size: int) -> tf.data.Dataset:
  """The single examples of an Estimator's input function, which yields batches of dicts."""
  dataset = call_input_fn(input_fn, batch_size)
  if isinstance(dataset.element_spec, tuple):  # (features, labels); the labels are features, too.
    dataset = dataset.map(lambda features, *_: features)
  return dataset.unbatch()


class Trainer:
  """Trains, evaluates and samples from a model; resumes from its folder.

  It stands where the TF1 library had an Estimator, and has its methods: `train`, `evaluate`,
  `predict`, `export_saved_model`, `latest_checkpoint`, `get_variable_value`. The loop is that of
  all trainings, `mesh_tensorflow.training.loop`.

  Args:
    steps: a `ModelSteps`.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    model_dir: folder for checkpoints and summaries; None keeps nothing.
    optimizer: an optimizer class or factory, called with `learning_rate`.
    learning_rate_schedule: a function of `step` (a float32 scalar tf.Tensor), a number, or
      None (the optimizer gets None).
    settings: the settings, of the loop and of all programs: they replace those of `steps`. None:
      those of `steps`, and all checkpoints are kept; `seed` is that of the mesh's variable store.
    quiet: writes no lines.
    init_variable_filter: regular expression; only variables of `init_checkpoint` in whose names it
      is found are taken from there.
    predict_fn: see `predict.score_step` and `predict.predict_step`.
    score_in_predict_mode: `predict` scores given targets in place of making outputs.
    model_info_file: a file for the sizes of variables and the counters of the training program.
    held_out: makes the data sets that the model is evaluated on every `eval_every_steps`.
    held_out_texts: returns the `EvalDataset`s that are decoded then, if `best_metric` is one of
      their metrics.
    **fields: other values of single settings, by the names of `TrainerSettings`; they win over
      `settings` and over those of `steps`. `steps_per_call` is another name of
      `iterations_per_loop`.

  Attributes:
    steps: the programs of the model, with the settings of this trainer; those that were given stay
      as they are.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    state: the model's variables and their folder.
    loop: the training loop.

  Raises:
    ConfigError: a setting cannot have such a value.
  """

  def __init__(
    self,
    steps: ModelSteps,
    vocabulary: Vocabularies,
    model_dir: str | None,
    optimizer: Callable[..., mtf.optimize.Optimizer] | None = None,
    learning_rate_schedule: LearningRateLike = None,
    *,
    settings: TrainerSettings | None = None,
    quiet: bool = False,
    init_variable_filter: str = "",
    predict_fn: Callable[..., mtf.Tensor] | None = None,
    score_in_predict_mode: bool = False,
    model_info_file: str | None = None,
    held_out: MakeDatasets | None = None,
    held_out_texts: text_metrics.MakeEvalDatasets | None = None,
    **fields: Any,
  ):
    if "steps_per_call" in fields:
      fields["iterations_per_loop"] = fields.pop("steps_per_call")
    has_seeds = settings is not None or not fields.keys().isdisjoint(SEEDS)
    if settings is None:
      of_steps = dataclasses.replace(steps.settings, seed=steps.mesh_impl.variable_store.seed)
      settings, fields = of_steps, {"keep_checkpoint_max": None, **fields}
    settings = checked_settings(settings, owner="Trainer", **fields)
    self.steps = steps = steps.with_settings(settings)
    self.vocabulary = vocabulary
    self.predict_fn = predict_fn
    self.score_in_predict_mode = score_in_predict_mode
    self._programs: dict[Any, Any] = {}
    self.state = ModelState(
      steps.mesh_impl,
      model_dir,
      keep_checkpoint_max=settings.keep_checkpoint_max,
      use_ema=settings.use_ema,
      average_checkpoints=settings.average_checkpoints,
      # Of several workers only the chief reports.
      quiet=quiet or not workers.current().is_chief,
      make_record=lambda: ConfigRecord(
        model_config.capture(steps.model_type, vocabulary, steps.variable_dtype),
        settings.allow_config_change,
      ),
    )
    if has_seeds:
      self.state.use_seeds_of(settings)
    init = settings.init_checkpoint
    self.loop = TrainingLoop(
      steps,
      self.state,
      settings,
      optimizer=optimizer,
      learning_rate=learning_rate_schedule,
      initial=InitialCheckpoint(init, init_variable_filter) if init else None,
      held_out=held_out,
      evaluator=_TextEvaluator(self, held_out_texts),
      model_info_file=model_info_file,
      quiet=quiet,
    )

  # ----------------------------------------------------------------------- parts

  @property
  def mesh_impl(self) -> mtf.MeshImpl:
    """The mesh that the programs are for."""
    return self.steps.mesh_impl

  @property
  def model_dir(self) -> str | None:
    """Folder of checkpoints, or None."""
    return self.state.model_dir

  @property
  def checkpointer(self) -> checkpoint_lib.Checkpointer | None:
    """Writes and reads the checkpoints; None without a folder."""
    return self.state.checkpointer

  @property
  def global_step(self) -> int:
    """The step of the variables."""
    return self.state.step

  @property
  def losses(self) -> list[float]:
    """The losses of all steps that were done here."""
    return self.loop.losses

  @property
  def skipped_steps(self) -> int:
    """Number of steps that were skipped because of NaN or infinity."""
    return self.loop.skipped_steps

  def use_seeds(self, *, noise: int, data: int) -> None:
    """See `ModelState.use_seeds`."""
    self.state.use_seeds(noise=noise, data=data)

  def latest_checkpoint(self) -> str | None:
    """The newest good checkpoint of `model_dir`; see `ModelState.latest_checkpoint`."""
    return self.state.latest_checkpoint()

  def get_variable_names(self) -> list[str]:
    """The names of all variables in the newest checkpoint; without one, of the program."""
    return self.state.variable_names()

  def get_variable_value(self, name: str) -> np.ndarray:
    """A variable in the newest checkpoint; without one, in the program.

    Args:
      name: its full name.

    Raises:
      VariableError: there is no such variable.
    """
    return self.state.variable_value(name)

  def save(self, *, asynchronous: bool = True) -> None:
    """Writes a checkpoint of the current step; see `TrainingLoop.save`."""
    self.loop.save(asynchronous=asynchronous)

  def describe(self) -> str:
    """The layout of the training program, after it was built."""
    return self.describe_graph(self.loop.graph)

  def describe_graph(self, graph: mtf.Graph) -> str:
    """The layout of a program that is built but not run yet.

    Args:
      graph: of the program.
    """
    cut = stages.described(self.steps.model, len(self.mesh_impl.stages))
    return mesh_setup.describe_layout(self.mesh_impl, graph, cut)

  # -------------------------------------------------------------------- training

  def train(
    self,
    dataset_fn: Callable[..., tf.data.Dataset] | None = None,
    train_steps: int | None = None,
    dataset_split: str = "train",
    on_ready: Callable[[mtf.Graph], None] | None = None,
    *,
    seen_data_init_step: int | None = None,
    checkpoint_input_pipeline: bool = False,
    input_fn: InputFn | None = None,
    steps: int | None = None,
    max_steps: int | None = None,
    hooks: Sequence[object] = (),
  ) -> list[float]:
    """Trains until the global step is `train_steps`, from the newest checkpoint on.

    Args:
      dataset_fn: called as `fn(sequence_length=, vocabulary=, dataset_split=)`; if it takes
        `skip`, with the number of examples that were seen before; if it takes `batch_rows`, with
        those that this worker needs (see `TrainingData`). Returns single examples.
      train_steps: the absolute step at which to stop.
      dataset_split: for `dataset_fn`.
      on_ready: called with the graph when the program is built, before the first step.
      seen_data_init_step: see `TrainingLoop.train`.
      checkpoint_input_pipeline: save where the data is with each checkpoint, and go on there: no
        example is read twice to be skipped.
      input_fn: in place of `dataset_fn`, an Estimator's: a function that returns batches of dicts.
      steps: in place of `train_steps`, the number of steps to do.
      max_steps: another name of `train_steps`, the Estimator's.
      hooks: must be empty: these were for TF1 sessions.

    Returns:
      The losses of the steps done.

    Raises:
      MeshError: see `TrainingLoop.train`.
    """
    dataset_fn, train_steps = train_request(
      dataset_fn,
      input_fn,
      self.steps.examples_per_step,
      train_steps=train_steps,
      max_steps=max_steps,
      steps=steps,
      hooks=hooks,
    )
    return self.loop.train(
      bound_dataset_fn(self.steps, dataset_fn, self.vocabulary, dataset_split),
      train_steps,
      steps=steps,
      on_ready=on_ready,
      seen_data_init_step=seen_data_init_step,
      checkpoint_input_pipeline=checkpoint_input_pipeline,
      on_nothing=self.build_for_inference,
    )

  # -------------------------------------------------------------- evaluation

  def evaluate(
    self,
    dataset: tf.data.Dataset | None = None,
    max_batches: int | None = None,
    what: str = "eval",
    *,
    input_fn: InputFn | None = None,
    steps: int | None = None,
    checkpoint_path: str | None = None,
    name: str | None = None,
  ) -> dict[str, float]:
    """Teacher-forced evaluation.

    Args:
      dataset: single examples; ends by itself, or `max_batches` ends it. The last batch is
        filled up with padding, which is not scored.
      max_batches: number of batches; None: all.
      what: name of the data, for messages.
      input_fn: in place of `dataset`, an Estimator's: a function that returns batches of dicts.
      steps: another name of `max_batches`, the Estimator's.
      checkpoint_path: a checkpoint to restore first.
      name: another name of `what`.

    Returns:
      `loss` (nats per scored token), `bits_per_token`, `token_accuracy`, `sequence_accuracy`,
      `num_eval_tokens`, `neg_log_perplexity`, `total_nats`, `mean_label` (of the target ids: tells
      whether two evaluations saw the same data), `max_targets_length` (in tokens).

    Raises:
      ConfigError: neither `dataset` nor `input_fn` is given, or both.
      DataError: there is nothing to evaluate.
    """
    if (dataset is None) == (input_fn is None):
      raise ConfigError("Trainer.evaluate: give either dataset or input_fn")
    if input_fn is not None:
      dataset = examples_of(input_fn, self.steps.batch_size)
    max_batches = steps if max_batches is None else max_batches
    if checkpoint_path is not None:
      self.restore_for_inference(checkpoint_path)
    found = self.sums_over(dataset, max_batches, may_restore=checkpoint_path is None)
    if found is None or not found[0].get("tokens"):
      raise DataError(f"data set {name or what!r} has no tokens to evaluate")
    return evaluation.metrics_of(*found)

  def sums_over(
    self,
    dataset: tf.data.Dataset,
    max_batches: int | None = None,
    *,
    goes_on: Callable[[], bool] = lambda: True,
    may_restore: bool = False,
  ) -> tuple[dict[str, float], float] | None:
    """The sums of `evaluation.eval_step` over a data set.

    Args:
      dataset: see `evaluate`.
      max_batches: number of batches; None: all.
      goes_on: asked before each batch; False gives up.
      may_restore: whether the newest checkpoint is meant where nothing was trained or restored.

    Returns:
      The sums by name, of nothing an empty dict; and the largest of the `longest`. None if it was
      given up.
    """
    names = self.steps.feature_names(dataset)
    step = self._eval_step(names)
    dataset = dataset.map(not_converted(lambda ex: tuple(tf.cast(ex[n], tf.int32) for n in names)))
    dataset = dataset.batch(self.steps.batch_size).prefetch(tf.data.AUTOTUNE)
    sums: dict[str, float] = {}
    longest = 0.0
    for i, batch in enumerate(records.reading(dataset)):
      if max_batches is not None and i >= max_batches:
        break
      if not goes_on():
        return None
      values = [self._filled(x, n) for x, n in zip(batch, names)]
      if i == 0 and may_restore and not self.global_step:
        # Tracing makes the variables, which must be there to be restored.
        step.get_concrete_function(*values)
        self.state.restore()
      result = {k: float(v) for k, v in step(*values).items()}
      longest = max(longest, result.pop("longest"))
      sums = {k: sums.get(k, 0.0) + v for k, v in result.items()}
    return sums, longest

  def _filled(self, x: tf.Tensor, name: str) -> tf.Tensor:
    """A batch padded with rows of zeros to the full batch size."""
    missing = self.steps.batch_size - int(x.shape[0])
    if missing:
      x = tf.pad(x, [[0, missing], [0, 0]])
    return tf.reshape(x, self.steps.feature_shape(name))

  def build_for_inference(self) -> None:
    """Creates the model's variables without training, and restores the newest checkpoint."""
    self._build()
    self.state.restore()

  def restore_for_inference(self, checkpoint_path: str | None = None) -> None:
    """Creates the model's variables if they are not there, and restores a checkpoint.

    Args:
      checkpoint_path: a checkpoint; None: the newest. If there is none at all, the variables stay
        as they are.
    """
    self._build()
    path = checkpoint_path or self.latest_checkpoint()
    if path is not None and path != self.state.restored:
      self.state.restore(path)

  def _build(self) -> None:
    names = self.steps.required_features
    zeros = [tf.zeros(self.steps.feature_shape(n), tf.int32) for n in names]
    self._eval_step(names).get_concrete_function(*zeros)

  def _eval_step(self, names: Sequence[str]) -> Any:
    """The compiled evaluation step for data of these features."""
    key = ("eval", *names)
    if key not in self._programs:
      self._programs[key] = tf.function(self.steps.eval_step(names), autograph=False)
    return self._programs[key]

  # -------------------------------------------------------------- prediction

  def sample(
    self,
    rows: Sequence[Sequence[int]],
    length: int,
    batch_size: int | None = None,
    *,
    seed: int | None = None,
    before_batch: Callable[[], None] = lambda: None,
    **options: Any,
  ) -> list[list[int]]:
    """Continues rows of ids; an encoder-decoder makes targets of inputs.

    Args:
      rows: the given ids of each row; may be empty rows.
      length: ids of a row at most, the given ones included.
      batch_size: rows at a time; as many as in a training batch by default.
      seed: what is drawn depends on it, and on the place of a row among the rows; None: on how many
        runs there were before.
      before_batch: called before each batch; what it raises ends sampling.
      **options: of `Unitransformer.sample_autoregressive` or `Bitransformer.decode`.

    Returns:
      For each row its ids, the given ones included; or the ids of its targets.
    """
    size = batch_size or self.steps.batch_size
    key = (size, length, tuple(sorted(options.items())))
    if key not in self._programs:
      self._programs[key] = self.steps.sample_step(length, size, **options)
    sampler = self._programs[key]
    # An encoder-decoder puts nothing behind its inputs.
    continues = 0 if hasattr(self.steps.model, "decode") else 1
    results: list[list[int]] = []
    for start in range(0, len(rows), size):
      ids = np.zeros([size, length], np.int32)
      part = rows[start : start + size]
      for i, row in enumerate(part):
        if len(row) > length - continues:
          longest = predict.longest_sequence(self.steps.model)
          limit = "" if longest is None else f" of at most {longest}, the model's positions"
          larger = f", or bind a larger run.sequence_length{limit}"
          raise DataError(
            f"a prompt has {len(row)} ids, which leaves no room in sequences of {length}; "
            f"shorten it{larger if longest is None or longest > length else ''}"
          )
        ids[i, : len(row)] = row
      ids[len(part) :] = ids[0]  # Empty rows would go on to the full length.
      drawn = None if seed is None else random_bits.fold(seed, start)
      before_batch()
      results += sampler(ids, seed=drawn).numpy()[: len(part)].tolist()
    return results

  def decode_programs(self, rows: int, length: int, options: DecodeOptions) -> DecodePrograms:
    """The programs that continue rows of a language model, made once for the same arguments.

    Args:
      rows: rows at a time.
      length: positions that the model sees.
      options: see `DecodeOptions`.
    """
    key = ("decode", rows, length, options)
    if key not in self._programs:
      self._programs[key] = DecodePrograms(self.steps, rows, length, options)
    programs: DecodePrograms = self._programs[key]
    return programs

  def predict(
    self, input_fn: InputFn | None, checkpoint_path: str | None = None
  ) -> Iterator[dict[str, np.ndarray]]:
    """Outputs for inputs; or, with `score_in_predict_mode`, the log-likelihoods of targets.

    Args:
      input_fn: a data set of batches of dicts of ids, or a function that returns one (see
        `call_input_fn`). Features that models do not take are ignored, but for
        `predict_batch_size`: how many rows of each batch count.
      checkpoint_path: a checkpoint to restore first; None: the newest in `model_dir`.

    Yields:
      For each row a dict: `inputs` and `outputs`, int32 [length], zeros after the first end of
      sequence; or `targets`, likewise, and `scores`, a float32 scalar. The targets of a
      "delimited_lm" are inputs and targets joined, both whole.

    Raises:
      DataError: a feature is missing or too long.
    """
    self.restore_for_inference(checkpoint_path)
    size = self.steps.batch_size
    batches = without_autotuning(call_input_fn(input_fn, size).prefetch(1))
    for batch in batches.as_numpy_iterator():
      batch = batch[0] if isinstance(batch, tuple) else batch
      if not isinstance(batch, Mapping):
        raise DataError(f"predict: the data must be dicts of features, not {type(batch).__name__}")
      names = [n for n in MODEL_FEATURES if n in batch]
      names = predict.predicting_features(self.steps, names, self.score_in_predict_mode)
      rows = len(batch[names[0]])
      if "predict_batch_size" in batch:
        rows = min(rows, int(np.max(batch["predict_batch_size"])))
      program = self._predictor(tuple(names))
      for start in range(0, rows, size):
        stop = min(start + size, rows)
        values = [self._padded(batch[n][start:stop], n) for n in names]
        outputs = {k: v.numpy()[: stop - start] for k, v in program(*values).items()}
        for i in range(stop - start):
          yield {k: v[i] for k, v in outputs.items()}

  def _padded(self, x: npt.ArrayLike, name: str) -> np.ndarray:
    """Rows of ids, padded to the shape that programs that predict take."""
    x = np.asarray(x)
    length = self.steps.feature_shape(name)[-1]
    if x.ndim != 2 or x.shape[1] > length:
      raise DataError(
        f"predict: feature {name!r} of the data has shape {list(x.shape)}, expected "
        f"[rows, {length}] (run.sequence_length); pad or cut it with dataset.trim_and_pad_dataset"
      )
    result = np.zeros([self.steps.batch_size, length], np.int32)
    result[: x.shape[0], : x.shape[1]] = x
    # Empty rows would go on to the full length.
    result[x.shape[0] :] = result[0]
    return result

  def _predictor(self, names: tuple[str, ...]) -> Any:
    """The compiled program that predicts: a function of features that returns a dict."""
    key = ("predict", self.score_in_predict_mode, *names)
    if key not in self._programs:
      self._programs[key] = tf.function(
        predict.predictor(self.steps, names, self.score_in_predict_mode, self.predict_fn),
        autograph=False,
      )
    return self._programs[key]

  # ------------------------------------------------------------------ export

  def export_saved_model(
    self,
    export_dir_base: str,
    serving_input_receiver_fn: object = None,
    checkpoint_path: str | None = None,
    *,
    batch_size: int = 1,
  ) -> str:
    """Writes a SavedModel that predicts, or scores, from strings; see `saved_model.save`.

    Args:
      export_dir_base: the SavedModel goes into a new folder in here, named by the time.
      serving_input_receiver_fn: must be None: it made TF1 placeholders.
      checkpoint_path: a checkpoint to export; None: the newest.
      batch_size: rows at a time. Requests may have any number.

    Returns:
      The path of the SavedModel.
    """
    if serving_input_receiver_fn is not None:
      raise ConfigError(
        "export_saved_model: serving_input_receiver_fn made TF1 placeholders; leave it out, "
        "the signature takes strings"
      )
    self.restore_for_inference(checkpoint_path)
    return saved_model.save(
      self.steps,
      export_dir_base,
      self.vocabulary,
      batch_size,
      score=self.score_in_predict_mode,
      predict_fn=self.predict_fn,
    )


class _TextEvaluator(Evaluator):
  """The `Evaluator` of a `Trainer`: teacher-forced, each token alike; and decoded, if asked for."""

  shown = ("loss", "bits_per_token", "token_accuracy")
  lower_is_better = ("loss", "bits_per_token")
  without_texts = "; no held-out data set has metric_fns, for decoded texts"

  def __init__(self, trainer: Trainer, datasets: text_metrics.MakeEvalDatasets | None):
    self._trainer = trainer
    self._datasets = datasets

  def check(self, dataset: tf.data.Dataset) -> Sequence[str]:
    return self._trainer.steps.feature_names(dataset)

  def metrics(
    self, dataset: tf.data.Dataset, max_batches: int | None, goes_on: Callable[[], bool]
  ) -> dict[str, float] | None:
    sums = self._trainer.sums_over(dataset, max_batches, goes_on=goes_on)
    if sums is None:
      return None
    return evaluation.metrics_of(*sums) if sums[0].get("tokens") else {}

  def text_metrics(self, max_batches: int | None) -> TextMetrics | None:
    if self._datasets is None:
      return None
    texts = text_metrics.HeldOutTexts(self._trainer, self._datasets, max_batches)
    return texts if texts.names else None

  def joined(self, found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return evaluation.joined(found)

  def fingerprint(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
    return tuple(metrics[n] for n in ("num_eval_tokens", "mean_label", "max_targets_length"))

  def text(self, metrics: Mapping[str, float]) -> str:
    return (
      f"loss {metrics['loss']:.4f} nats  {metrics['bits_per_token']:.4f} bits/token  "
      f"accuracy {metrics['token_accuracy']:.4f}  ({metrics['num_eval_tokens']:,.0f} tokens)"
    )
