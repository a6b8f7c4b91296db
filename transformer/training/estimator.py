"""A model and its folder without training: restoring, evaluation, prediction, generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.numerics import random_bits
from mesh_tensorflow.transformer.files import records
from mesh_tensorflow.transformer.generation import predict, saved_model
from mesh_tensorflow.transformer.generation.prefill_decode import DecodeOptions, DecodePrograms
from mesh_tensorflow.transformer.programs import evaluation, training_data
from mesh_tensorflow.transformer.programs.model_features import MODEL_FEATURES
from mesh_tensorflow.transformer.programs.model_steps import ModelSteps
from mesh_tensorflow.transformer.training.model_folder import ModelFolder


class Estimator(ModelFolder):
  """Base class of `Trainer`: everything except training.

  Args:
    steps: the `ModelSteps`.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    model_dir: folder of checkpoints, or None.
    predict_fn: see `predict`.
    score_in_predict_mode: whether `predict` scores given targets.
    **options: of `ModelFolder`.
  """

  def __init__(
    self,
    steps: ModelSteps,
    vocabulary: Any,
    model_dir: str | None,
    *,
    predict_fn: Any = None,
    score_in_predict_mode: bool = False,
    **options: Any,
  ):
    super().__init__(steps, vocabulary, model_dir, **options)
    self.predict_fn = predict_fn
    self.score_in_predict_mode = score_in_predict_mode
    self._programs: dict[Any, Any] = {}

  # -------------------------------------------------------------- evaluation

  def evaluate(
    self,
    dataset: Any = None,
    max_batches: int | None = None,
    what: str = "eval",
    *,
    input_fn: Any = None,
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
      dataset = training_data.examples_of(input_fn, self.steps.batch_size)
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
    names = training_data.model_features(dataset)
    step = self._eval_step(names)
    training_data.check_lengths(dataset, names, self.steps)
    dataset = dataset.map(lambda ex: tuple(tf.cast(ex[n], tf.int32) for n in names))
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
        self.global_step = self.restore_if_any()
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
    self.global_step = self.restore_if_any()

  def restore_for_inference(self, checkpoint_path: str | None = None) -> None:
    """Creates the model's variables if they are not there, and restores a checkpoint.

    Args:
      checkpoint_path: a checkpoint; None: the newest. If there is none at all, the variables stay
        as they are.
    """
    self._build()
    path = checkpoint_path or self.latest_checkpoint()
    if path is not None and path != self._restored:
      self.global_step = self.restore_if_any(path)

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
    **options: Any,
  ) -> list[list[int]]:
    """Continues rows of ids; an encoder-decoder makes targets of inputs.

    Args:
      rows: the given ids of each row; may be empty rows.
      length: ids of a row at most, the given ones included.
      batch_size: rows at a time; as many as in a training batch by default.
      seed: what is drawn depends on it, and on the place of a row among the rows; None: on how many
        runs there were before.
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
    self, input_fn: Any, checkpoint_path: str | None = None
  ) -> Iterator[dict[str, np.ndarray]]:
    """Outputs for inputs; or, with `score_in_predict_mode`, the log-likelihoods of targets.

    Args:
      input_fn: a data set of batches of dicts of ids, or a function that returns one (see
        `training_data.call_input_fn`). Features that models do not take are ignored, but for
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
    for batch in training_data.call_input_fn(input_fn, size).as_numpy_iterator():
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

  def _padded(self, x: Any, name: str) -> np.ndarray:
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
    serving_input_receiver_fn: Any = None,
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
