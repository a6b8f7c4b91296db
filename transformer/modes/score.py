"""The modes that score: log-likelihoods of given texts or of targets of data sets; their files."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias, TypeVar

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import model_files
from mesh_tensorflow.transformer.data.encoding import vocabulary_of
from mesh_tensorflow.transformer.data.eval_datasets import EvalDataset, reset_seeds
from mesh_tensorflow.transformer.data.text_io import (
  encode_inputs,
  get_inputs_from_file,
  targets_vocabulary,
  write_lines_to_file,
)
from mesh_tensorflow.transformer.data.vocabularies.base import (
  EOS_ID,
  Vocabularies,
  Vocabulary,
  as_text,
)
from mesh_tensorflow.transformer.modes.chosen_checkpoints import CheckpointStep, named_checkpoints
from mesh_tensorflow.transformer.modes.input_fns import (
  combined_dataset_input_fn,
  tell_training_split,
)
from mesh_tensorflow.transformer.modes.job import Job, mode
from mesh_tensorflow.transformer.training.trainer import InputFn, Trainer

_LOG = logging.getLogger("mesh_tensorflow")
_MODULE = "mesh_tensorflow.transformer.utils"
# Of one text: its ids, or itself; and a score.
Ids: TypeAlias = np.ndarray | Sequence[int] | str | bytes
# Texts, or the name of a file of them.
Texts: TypeAlias = Sequence[str] | str
_T = TypeVar("_T")
_SHOWN = 10  # Scores that are printed.


@gin.configurable(module=_MODULE)
@affects("report")
def save_scores(
  results: Sequence[Mapping[str, Any]],
  vocabulary: Vocabularies,
  scores_filename: str | None = None,
  save_example_text: bool = True,
) -> Any:
  """Writes scores to files, one a line.

  Args:
    results: dicts with `scores`, a number, and `targets` and perhaps `inputs`, ids or text.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    scores_filename: None: nothing is written. Else `<scores_filename>.scores`, and, with
      `save_example_text`, `.targets`, `.lengths` (in tokens) and, if there are any, `.inputs`.
    save_example_text: whether texts are written and returned.

  Returns:
    The list of scores; with `save_example_text` a tuple of it, the inputs, if there are any, and
    the targets.

  Raises:
    DataError: there are no results.
  """
  if not results:
    raise DataError("save_scores: there are no results to save; is the data set empty?")
  scores = [float(r["scores"]) for r in results]
  if scores_filename is not None:
    write_lines_to_file([f"{s:g}" for s in scores], f"{scores_filename}.scores")
  if not save_example_text:
    return scores
  features = ["inputs", "targets"] if "inputs" in results[0] else ["targets"]
  texts = {f: [text_of(r[f], vocabulary_of(f, vocabulary)) for r in results] for f in features}
  if scores_filename is not None:
    for feature in features:
      write_lines_to_file(texts[feature], f"{scores_filename}.{feature}")
    lengths = [_length(r["targets"], vocabulary_of("targets", vocabulary)) for r in results]
    write_lines_to_file(lengths, f"{scores_filename}.lengths")
  return (scores, *(texts[f] for f in features))


def show_scores(result: object) -> None:
  """Prints the first scores and their mean, if no file is bound for them.

  Args:
    result: what `save_scores` returned; nothing is shown of what other functions return.
  """
  bound = gin.get_bindings(f"{_MODULE}.save_scores", resolve_references=False)
  if bound.get("scores_filename") is not None:
    return
  scores, *texts = result if isinstance(result, tuple) else (result,)
  if not isinstance(scores, list) or not scores:
    return
  for i, score in enumerate(scores[:_SHOWN]):
    print(f"{score + 0.0:g}", *(repr(column[i]) for column in texts), sep="  ")
  if len(scores) > _SHOWN:
    print(f"... and {len(scores) - _SHOWN:,} more")
  print(
    f"{len(scores):,} scores (log-likelihoods in nats), mean {np.mean(scores):g}; nothing is "
    "written: --output=PREFIX of the command score (save_scores.scores_filename) makes files of "
    "all scores and texts",
    flush=True,
  )


@gin.configurable(module=_MODULE)
@affects("report")
def save_scores_to_tfrecords(
  results: Sequence[Mapping[str, Any]],
  vocabulary: Vocabularies,
  scores_filename: str,
  shard_idx: int = 0,
  save_ids_only: bool = False,
) -> None:
  """Writes scores as tf.Examples to `<scores_filename>_<shard_idx>.tfrecord`.

  Each has `input` (the text of the part of the targets that is not scored, else of the inputs, else
  ""), `target` and `score`.

  Args:
    results: dicts with `targets` and perhaps `inputs`, ids or text, and `scores` (0.0 if missing).
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    scores_filename: first part of the file's name.
    shard_idx: number of the file.
    save_ids_only: of `input`, only what is before the first blank: an identifier.

  Raises:
    StorageError: the file cannot be written.
  """
  if not workers.current().is_chief:
    return
  path = f"{scores_filename}_{shard_idx}.tfrecord"
  folder = path.rpartition("/")[0]
  with (
    model_files.errors_of_writing(folder or ".", os.path.basename(path), "scores_filename"),
    _record_writer(path, folder) as writer,
  ):
    for result in results:
      texts = add_pretokenized(dict(result), vocabulary)
      given = as_text(texts.get("targets_neg_pretokenized", texts.get("inputs_pretokenized", "")))
      if save_ids_only:
        given = given.split(" ")[0]
      features = {
        "input": _bytes(given),
        "target": _bytes(as_text(texts.get("targets_pretokenized", ""))),
        "score": tf.train.Feature(
          float_list=tf.train.FloatList(value=[float(result.get("scores", 0.0))])
        ),
      }
      example = tf.train.Example(features=tf.train.Features(feature=features))
      # Features are a map, which has no order of its own: equal results make equal files.
      writer.write(example.SerializeToString(deterministic=True))


def _record_writer(path: str, folder: str) -> tf.io.TFRecordWriter:
  if folder:
    tf.io.gfile.makedirs(folder)
  return tf.io.TFRecordWriter(path)


def add_pretokenized(
  examples: MutableMapping[str, Any] | Iterable[MutableMapping[str, Any]], vocabulary: Vocabularies
) -> Any:
  """Adds the texts of the ids `inputs` and `targets`, where they are missing.

  Args:
    examples: a dict of numpy arrays, or several, changed in place: `<f>_pretokenized` becomes what
      the positive ids of `<f>` decode to (a text, as a rule), and, if there are negative ones,
      `<f>_neg_pretokenized` that of their absolute values.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.

  Returns:
    `examples`.
  """
  if not isinstance(examples, MutableMapping):
    for example in examples:
      add_pretokenized(example, vocabulary)
    return examples
  for feature in ("inputs", "targets"):
    if feature in examples and f"{feature}_pretokenized" not in examples:
      own = vocabulary_of(feature, vocabulary)
      value = examples[feature]
      examples[f"{feature}_pretokenized"] = text_of(value, own)
      if not isinstance(value, (str, bytes)) and np.any(np.asarray(value) < 0):
        negative = np.asarray(value)
        examples[f"{feature}_neg_pretokenized"] = text_of(-negative[negative < 0], own)
  return examples


def text_of(ids: Ids, vocabulary: Vocabulary | None = None) -> Any:
  """Decodes ids without padding, negative ids and the EOS at the end.

  Args:
    ids: of an example, or its text, which stays as it is (bytes become text).
    vocabulary: may decode to a text, bytes or a list, which is not changed. None: `ids` are what it
      decoded to.
  """
  if isinstance(ids, bytes):
    return as_text(ids)
  if vocabulary is None or isinstance(ids, str):
    return ids
  kept = [int(i) for i in np.asarray(ids).reshape(-1) if i > 0]
  if kept and kept[-1] == EOS_ID:
    kept.pop()
  return vocabulary.decode(kept)


def _length(ids: Ids, vocabulary: Vocabulary) -> int:
  """Number of ids before the first padding."""
  if isinstance(ids, (str, bytes)):
    ids = vocabulary.encode(text_of(ids, vocabulary))
  zeros = np.flatnonzero(np.asarray(ids) == 0)
  return int(zeros[0]) if zeros.size else len(ids)


def _bytes(text: str) -> tf.train.Feature:
  return tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode("utf-8")]))


@gin.configurable(module=_MODULE)
@affects("report")
def compute_log_likelihoods(
  estimator: Trainer, input_fn: InputFn, checkpoint_path: str | None = None
) -> list[float]:
  """The log-likelihood of each row of targets.

  Args:
    estimator: a `Trainer` that scores (`score_in_predict_mode`).
    input_fn: see `Trainer.predict`.
    checkpoint_path: a checkpoint; None: the newest.

  Raises:
    ConfigError: the estimator does not score.
  """
  _check_scores(estimator, "compute_log_likelihoods")
  return [float(r["scores"]) for r in estimator.predict(input_fn, checkpoint_path=checkpoint_path)]


@gin.configurable(module=_MODULE)
@affects("report")
@takes(num_examples=COUNT)
def score_with_estimator(
  estimator: Trainer,
  input_fn: InputFn,
  eval_checkpoint_step: CheckpointStep,
  model_dir: str,
  vocabulary: Vocabularies,
  score_postprocess_fn: Callable[..., object] = save_scores,
  num_examples: int | None = None,
) -> Any:
  """Scores data with one checkpoint.

  Args:
    estimator: a `Trainer` that scores (`score_in_predict_mode`).
    input_fn: see `Trainer.predict`.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    model_dir: folder of checkpoints.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    score_postprocess_fn: called with the list of results, dicts of `scores` and `targets`, and the
      vocabulary.
    num_examples: number of results; None: all but the padding at the end, rows without a target.

  Returns:
    What `score_postprocess_fn` returns.

  Raises:
    ConfigError: there is no such checkpoint, or several; or the estimator does not score.
    DataError: there is nothing to score (`save_scores`).
  """
  results = _results(estimator, input_fn, eval_checkpoint_step, model_dir, num_examples)
  return score_postprocess_fn(list(results), vocabulary)


@gin.configurable(module=_MODULE)
@affects("report")
@takes(num_examples=COUNT, num_examples_per_shard=COUNT)
def score_with_estimator_lazy(
  estimator: Trainer,
  input_fn: InputFn,
  eval_checkpoint_step: CheckpointStep,
  model_dir: str,
  vocabulary: Vocabularies,
  score_postprocess_fn: Callable[..., object] = save_scores_to_tfrecords,
  num_examples: int | None = None,
  num_examples_per_shard: int = 100000,
) -> None:
  """Scores data with one checkpoint, one part after the other: for more than fits in memory.

  Args:
    estimator: a `Trainer` that scores (`score_in_predict_mode`).
    input_fn: see `Trainer.predict`.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    model_dir: folder of checkpoints.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    score_postprocess_fn: called for each part with the results, the vocabulary and `shard_idx`, its
      number from 0.
    num_examples: number of results; None: all but the padding at the end, rows without a target.
    num_examples_per_shard: number of results in a part.

  Raises:
    ConfigError: there is no such checkpoint, or several; the estimator does not score; or
      `num_examples_per_shard` is below 1.
    DataError: there is nothing to score.
  """
  if num_examples_per_shard < 1:
    raise ConfigError(
      f"score_with_estimator_lazy: num_examples_per_shard (={num_examples_per_shard}) is below 1"
    )
  part: list[Mapping[str, Ids]] = []
  shard = 0
  for result in _results(estimator, input_fn, eval_checkpoint_step, model_dir, num_examples):
    part.append(result)
    if len(part) == num_examples_per_shard:
      score_postprocess_fn(part, vocabulary, shard_idx=shard)
      part, shard = [], shard + 1
  if part:
    score_postprocess_fn(part, vocabulary, shard_idx=shard)
  elif not shard:
    raise DataError("score_with_estimator_lazy: there are no results; is the data set empty?")


def _check_scores(estimator: Trainer, what: str) -> None:
  if not estimator.score_in_predict_mode:
    raise ConfigError(
      f"{what}: the estimator makes outputs; to score targets, make it with "
      "score_in_predict_mode=True (run.mode 'score_eval', 'score_from_strings', ...)"
    )


def check_postprocess_fn(function: object, what: str) -> None:
  """Raises `ConfigError` if nothing is said of what becomes of the scores."""
  # Before anything is computed.
  if not callable(function):
    raise ConfigError(
      f"{what}.score_postprocess_fn is {function!r}; bind what becomes of the scores, @save_scores "
      "or @save_scores_to_tfrecords"
    )


def _results(
  estimator: Trainer,
  input_fn: InputFn,
  checkpoint_step: CheckpointStep,
  model_dir: str,
  num_examples: int | None,
) -> Iterator[Mapping[str, Ids]]:
  """Yields the predictions of the one chosen checkpoint, without padding rows."""
  _check_scores(estimator, "score_with_estimator")
  step = -1 if checkpoint_step is None else checkpoint_step
  if step == "new":
    raise ConfigError("scores are of exactly one checkpoint, not of new ones as they appear")
  paths = list(named_checkpoints(step, model_dir))
  if len(paths) != 1 or paths[0] is None:
    found = f"there are {len(paths)} of {checkpoint_step!r}" if len(paths) > 1 else "there is none"
    raise ConfigError(
      f"scores are of exactly one checkpoint, but {found} in {model_dir} "
      "(run.eval_checkpoint_step; -1 is the newest)"
    )
  results = estimator.predict(input_fn, checkpoint_path=paths[0])
  return _without_padding(results) if num_examples is None else _first(results, num_examples)


def _first(results: Iterable[_T], count: int) -> Iterator[_T]:
  if count > 0:
    for i, result in enumerate(results, 1):
      yield result
      # Without asking for another one, for which a batch of padding may be computed.
      if i == count:
        return


def _without_padding(
  results: Iterable[Mapping[str, Ids]],
) -> Iterator[Mapping[str, Ids]]:
  """All but the rows at the end that have no target."""
  held_back = []
  for result in results:
    held_back.append(result)
    targets = result["targets"]
    if bool(targets) if isinstance(targets, (str, bytes)) else np.any(targets):
      yield from held_back
      held_back = []


@mode("score_from_dataset", scores=True)
def run_score_from_dataset(job: Job) -> Any:
  """Scores, and shows the first scores."""
  tell_training_split(job.dataset_split)
  result = score_from_dataset(
    job.make_estimator(),
    job.vocabulary,
    job.batch_size,
    job.sequence_length,
    job.model_dir,
    job.eval_checkpoint_step,
    job.dataset_split,
  )
  show_scores(result)
  return result


@gin.configurable(module="mesh_tensorflow.transformer.utils")
@affects("report")
@takes(batch_size=COUNT)
def score_from_dataset(
  estimator: Trainer,
  vocabulary: Vocabularies,
  batch_size: int,
  sequence_length: Mapping[str, int],
  model_dir: str,
  eval_checkpoint_step: CheckpointStep,
  dataset_split: str,
  score_dataset_fn: Callable[..., Sequence[EvalDataset]] | None = None,
  score_postprocess_fn: Callable[..., object] = gin.REQUIRED,
  score_with_estimator_fn: Callable[..., object] = score_with_estimator,
) -> Any:
  """Scores data sets, all as one.

  Args:
    estimator: a `Trainer` that scores (`score_in_predict_mode`).
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    batch_size: rows at a time.
    sequence_length: dict from feature to number of tokens.
    model_dir: folder of checkpoints.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    dataset_split: name of the split.
    score_dataset_fn: called with sequence_length, vocabulary and dataset_split; returns
      `EvalDataset`s.
    score_postprocess_fn: see `score_with_estimator`; `save_scores` writes files.
    score_with_estimator_fn: `score_with_estimator` or `score_with_estimator_lazy`.

  Returns:
    What `score_postprocess_fn` returns.

  Raises:
    ConfigError: there is no `score_dataset_fn`.
  """
  check_postprocess_fn(score_postprocess_fn, "score_from_dataset")
  if score_dataset_fn is None:
    raise ConfigError(
      "score_from_dataset.score_dataset_fn is not bound; bind a function that returns "
      "EvalDatasets, such as @dataset.parallel_text_eval_datasets"
    )
  reset_seeds()
  datasets = score_dataset_fn(
    sequence_length=sequence_length, vocabulary=vocabulary, dataset_split=dataset_split
  )
  input_fn = combined_dataset_input_fn(
    [EvalDataset(*d) for d in datasets], batch_size, sequence_length
  )
  return score_with_estimator_fn(
    estimator,
    input_fn,
    eval_checkpoint_step,
    model_dir,
    vocabulary,
    score_postprocess_fn=score_postprocess_fn,
  )


@mode("score_from_strings", scores=True)
def run_score_from_strings(job: Job) -> Any:
  """Scores, and shows the first scores."""
  result = score_from_strings(
    job.make_estimator(),
    job.vocabulary,
    job.model_type,
    job.batch_size,
    job.sequence_length,
    job.model_dir,
    job.eval_checkpoint_step,
  )
  show_scores(result)
  return result


@gin.configurable(module="mesh_tensorflow.transformer.utils")
@affects("report")
@takes(batch_size=COUNT)
def score_from_strings(
  estimator: Trainer,
  vocabulary: Vocabularies,
  model_type: str,
  batch_size: int,
  sequence_length: Mapping[str, int],
  model_dir: str,
  eval_checkpoint_step: CheckpointStep,
  inputs: Texts | None = gin.REQUIRED,
  targets: Texts = gin.REQUIRED,
  score_postprocess_fn: Callable[..., object] = gin.REQUIRED,
  eos_id: int = 1,
  score_eos: bool = True,
  score_with_estimator_fn: Callable[..., object] = score_with_estimator,
) -> Any:
  """Scores texts, or the lines of files.

  For a model of type "lm" inputs are what comes before the targets and does not count in the score,
  and no end of sequence is added.

  Args:
    estimator: a `Trainer` that scores (`score_in_predict_mode`).
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    model_type: see `build_model`.
    batch_size: rows at a time.
    sequence_length: dict from feature to number of tokens.
    model_dir: folder of checkpoints.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    inputs: a list of texts, the name of a file of them, or None. If there are fewer inputs than
      targets, each is for the same number of targets.
    targets: a list of texts, or the name of a file. A single one is for all inputs.
    score_postprocess_fn: see `score_with_estimator`; `save_scores` writes files.
    eos_id: the end-of-sequence id.
    score_eos: whether targets end with it, so that it counts in the score.
    score_with_estimator_fn: `score_with_estimator` or `score_with_estimator_lazy`.

  Returns:
    What `score_postprocess_fn` returns.

  Raises:
    DataError: a file is missing; there are no targets; or the numbers of inputs and targets do not
      go together.
  """
  check_postprocess_fn(score_postprocess_fn, "score_from_strings")
  targets = _lines(targets)
  if not targets:
    raise DataError("score_from_strings: there are no targets to score")
  if inputs is not None:
    inputs, targets = _paired(_lines(inputs), targets)
  elif model_type != "lm":
    raise DataError(
      f"score_from_strings.inputs is None, but a model of type {model_type!r} needs inputs"
    )
  features = _features(
    inputs, targets, vocabulary, model_type, batch_size, sequence_length, eos_id, score_eos
  )

  def input_fn(params: object = None) -> tf.data.Dataset:
    del params
    return tf.data.Dataset.from_tensor_slices(features).batch(batch_size)

  return score_with_estimator_fn(
    estimator,
    input_fn,
    eval_checkpoint_step,
    model_dir,
    vocabulary,
    score_postprocess_fn=score_postprocess_fn,
    num_examples=len(targets),
  )


def _features(
  inputs: list[str] | None,
  targets: list[str],
  vocabulary: Vocabularies,
  model_type: str,
  batch_size: int,
  sequence_length: Mapping[str, int],
  eos_id: int,
  score_eos: bool,
) -> dict[str, Any]:
  """The ids of all texts, by the feature that they are."""
  encode = functools.partial(encode_inputs, model_type=model_type, batch_size=batch_size)
  features = {
    # A vocabulary that is no tuple is that of both sides.
    "targets": encode(
      targets,
      targets_vocabulary(vocabulary),
      sequence_length=sequence_length["targets"],
      eos_id=eos_id if score_eos else 0,
      unscored_prefix=inputs if model_type == "lm" else None,
    )
  }
  if model_type != "lm":
    features["inputs"] = encode(
      inputs or (), vocabulary, sequence_length=sequence_length["inputs"], eos_id=eos_id
    )
  return features


def _lines(texts: Texts) -> list[str]:
  """A list of texts, read from a file if its name is given."""
  return get_inputs_from_file(texts) if isinstance(texts, str) else list(texts)


def _paired(inputs: list[str], targets: list[str]) -> tuple[list[str], list[str]]:
  """Equally many inputs and targets, by repetition of those that are fewer."""
  if len(inputs) < len(targets):
    if not inputs or len(targets) % len(inputs):
      raise DataError(
        f"score_from_strings: the number of targets ({len(targets)}) is no multiple of the number "
        f"of inputs ({len(inputs)})"
      )
    times = len(targets) // len(inputs)
    return [x for x in inputs for _ in range(times)], targets
  if len(targets) < len(inputs):
    if len(targets) > 1:
      raise DataError(
        f"score_from_strings: {len(inputs)} inputs, but {len(targets)} targets; give as many, a "
        "multiple, or a single one for all inputs"
      )
    return inputs, targets * len(inputs)
  return inputs, targets
