"""Generates texts from texts, and scores them: the modes "eval" and "infer" of the trainer."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.checkpoints import get_checkpoint_iterator
from mesh_tensorflow.transformer.eval_datasets import EvalDataset
from mesh_tensorflow.transformer.progress import write_scalars
from mesh_tensorflow.transformer.text_io import (
  get_inputs_from_file,
  inputs_vocabulary,
  strip_ids,
  targets_vocabulary,
  write_lines_to_file,
)
from mesh_tensorflow.transformer.vocabulary import EOS_ID

_LOG = logging.getLogger("mesh_tensorflow")

_ROUND_TO = 8  # Lengths are rounded up to this, so that similar inputs use one program.


def generate(
  estimator: Any,
  rows: Sequence[Sequence[int]],
  sequence_length: Mapping[str, int],
  batch_size: int | None = None,
) -> list[list[int]]:
  """What the model makes of rows of ids.

  Rows of similar length are decoded together. How an encoder-decoder decodes is bound in gin
  (`Bitransformer.decode.beam_size`, ...); if `max_decode_length` is not, it is
  `sequence_length["targets"]`.

  Args:
    estimator: a `Trainer`, with variables restored.
    rows: ids of each input, EOS included, at most `sequence_length["inputs"]`.
    sequence_length: dict with "inputs" and "targets".
    batch_size: rows at a time; as many as in a training batch by default.

  Returns:
    For each row the new ids, to the first EOS, without it.
  """
  order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
  ordered = [rows[i] for i in order]
  longest = -(-max(map(len, rows)) // _ROUND_TO) * _ROUND_TO
  length = min(longest, sequence_length["inputs"])
  options: dict[str, Any] = {}
  decode = getattr(estimator.steps.model, "decode", None)
  if decode is None:
    length += sequence_length["targets"]
    options["remove_partial_sequences"] = True
  elif "max_decode_length" in inspect.signature(decode).parameters and not _bound(
    "Bitransformer.decode.max_decode_length"
  ):
    options["max_decode_length"] = sequence_length["targets"]
  outputs = estimator.sample(ordered, length, batch_size=batch_size, **options)
  results: list[list[int]] = [[]] * len(rows)
  for i, output in zip(order, outputs):
    results[i] = strip_ids(output, EOS_ID)
  return results


def _bound(parameter: str) -> bool:
  try:
    return gin.query_parameter(parameter) is not None
  except ValueError:
    return False


def encode_lines(
  lines: Sequence[str], vocabulary: Any, length: int, eos_id: int = EOS_ID
) -> list[list[int]]:
  """Ids of lines of text, with EOS; longer ones are cut, and counted in a warning.

  Args:
    lines: texts.
    vocabulary: a vocabulary or a pair; that of the inputs is used.
    length: ids at most, EOS included.
    eos_id: the end-of-sequence id.
  """
  encode = inputs_vocabulary(vocabulary).encode
  rows = [list(encode(line.strip())) for line in lines]
  cut = [i for i, row in enumerate(rows, 1) if len(row) >= length]
  if cut:
    _LOG.warning(
      "%d of %d inputs are cut, because they have more than %d tokens (run.sequence_length); the "
      "first is on line %d", len(cut), len(rows), length - 1, cut[0],
    )  # fmt: skip
  return [[*row[: length - 1], eos_id] for row in rows]


@gin.configurable(module="mesh_tensorflow.transformer.utils")
def decode_from_file(
  estimator: Any,
  vocabulary: Any,
  model_type: str,
  batch_size: int,
  sequence_length: dict[str, int],
  checkpoint_path: str | None = None,
  input_filename: str = gin.REQUIRED,
  output_filename: str = gin.REQUIRED,
  eos_id: int = 1,
  repeats: int = 1,
) -> list[str]:
  """Decodes each line of a file and writes the results, one a line.

  Args:
    estimator: a `Trainer`, with variables restored.
    vocabulary: a vocabulary or a pair.
    model_type: "lm" continues each line, which stays in front of what is generated; others write
      what they make of it.
    batch_size: rows at a time.
    sequence_length: dict: of "inputs" and "targets"; for "lm" a row has
      `sequence_length["targets"]` ids at most, those of the line included.
    checkpoint_path: the checkpoint in use; its step goes into the output's name.
    input_filename: a text file, one input per line.
    output_filename: the results go to `<output_filename>-<step>`.
    eos_id: the end-of-sequence id.
    repeats: samples for each line.

  Returns:
    The lines written.

  Raises:
    DataError: the file is missing or empty, or for "lm" a line is too long.
  """
  lines = get_inputs_from_file(input_filename)
  lines = [line for line in lines for _ in range(repeats)]
  if not lines:
    raise DataError(f"the input file {input_filename!r} is empty")
  started = time.perf_counter()
  if model_type == "lm":
    rows = [list(inputs_vocabulary(vocabulary).encode(line)) for line in lines]
    length = sequence_length.get("targets", max(sequence_length.values()))
    outputs = estimator.sample(rows, length, batch_size=batch_size)
    outputs = [strip_ids(ids, eos_id) for ids in outputs]
  else:
    rows = encode_lines(lines, vocabulary, sequence_length["inputs"], eos_id)
    outputs = generate(estimator, rows, sequence_length, batch_size)
  results = [targets_vocabulary(vocabulary).decode(ids) for ids in outputs]
  filename = f"{output_filename}-{estimator.global_step}"
  write_lines_to_file(results, filename)
  seconds = time.perf_counter() - started
  print(f"{len(results):,} lines decoded in {seconds:.1f} s: {filename}", flush=True)
  return results


def restored_checkpoints(
  estimator: Any, checkpoint_step: Any, model_dir: str, paths: Sequence[str] | None = None
) -> Iterator[str]:
  """Restores one checkpoint after the other.

  Args:
    estimator: a `Trainer`.
    checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    model_dir: folder of checkpoints.
    paths: checkpoints to restore in place of those.

  Yields:
    The path of each, when `estimator` holds it.

  Raises:
    ConfigError: there is none.
  """
  newest = tf.train.latest_checkpoint(model_dir)
  estimator.build_for_inference()
  step = -1 if checkpoint_step is None else checkpoint_step
  for i, path in enumerate(paths or get_checkpoint_iterator(step, model_dir)):
    if path is None:
      raise ConfigError(f"there is no checkpoint in {model_dir}; train first")
    # To build the model restored the newest.
    if i or path != newest:
      estimator.global_step = estimator.restore_if_any(path)
    yield path


class _Texts:
  """The examples of one data set: ids to decode, and texts to compare with."""

  def __init__(self, dataset: EvalDataset, sequence_length: Any, vocabulary: Any):
    self.dataset = dataset
    self.rows: list[list[int]] = []
    self.inputs: list[str] = []
    self.targets: list[Any] = []
    self.examples: list[dict[str, Any]] = []
    for example in dataset.dataset_fn(sequence_length=sequence_length).as_numpy_iterator():
      missing = [k for k in ("inputs", "targets") if k not in example]
      if missing or "inputs_segmentation" in example:
        raise DataError(
          f"eval data set {dataset.name!r} has features {sorted(example)}: to score decoded texts "
          "it must yield single (not packed) pairs with 'inputs' and 'targets'"
        )
      self.rows.append([int(i) for i in np.trim_zeros(example["inputs"], "b")])
      self.inputs.append(_text(example, "inputs", inputs_vocabulary(vocabulary)))
      target = _text(example, "targets", targets_vocabulary(vocabulary))
      self.targets.append(dataset.postprocess_fn(target, example=example, is_target=True))
      self.examples.append(example)
    if not self.rows:
      raise DataError(f"eval data set {dataset.name!r} is empty")
    encode = inputs_vocabulary(vocabulary).encode
    cut = sum(len(encode(t)) >= len(r) > 0 for t, r in zip(self.inputs, self.rows))
    if cut:
      _LOG.warning(
        "eval data set %s: %d of %d inputs are cut to %d tokens (run.sequence_length)",
        dataset.name, cut, len(self.rows), max(map(len, self.rows)),
      )  # fmt: skip


def _text(example: Mapping[str, Any], feature: str, vocabulary: Any) -> str:
  """The text of a feature: as it was before it was encoded, if the example has that."""
  given = example.get(f"{feature}_pretokenized")
  if given is not None:
    return given.decode("utf-8") if isinstance(given, bytes) else str(given)
  return vocabulary.decode(strip_ids(example[feature], EOS_ID))


def eval_model(
  estimator: Any,
  vocabulary: Any,
  sequence_length: dict[str, int],
  batch_size: int,
  dataset_split: str,
  model_dir: str,
  eval_dataset_fn: Callable[..., Sequence[EvalDataset]],
  eval_summary_dir: str | None,
  eval_checkpoint_step: Any,
  eval_with_score: bool = False,
  output_eval_examples: bool = True,
  eval_dir_suffix: str | None = None,
  score_with_estimator_fn: Any = None,
) -> dict[str, dict[str, float]]:
  """Decodes data sets with each of the chosen checkpoints, and scores the texts.

  Writes to the summary folder the scalars `eval/<data set>/<metric>` and, if
  `output_eval_examples`, `<data set>_inputs`, `<data set>_targets` and
  `<data set>_<step>_predictions`; prints one line for each data set and checkpoint.

  Args:
    estimator: the `Trainer`.
    vocabulary: a vocabulary or a pair.
    sequence_length: dict from feature to number of tokens.
    batch_size: rows at a time.
    dataset_split: name of the split.
    model_dir: folder of checkpoints.
    eval_dataset_fn: called with sequence_length, vocabulary and dataset_split; those of its
      `EvalDataset`s that have no metrics are left out.
    eval_summary_dir: where files and scalars go; `model_dir/<split>_eval` by default.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    eval_with_score: must be False: scores in place of decoded texts are not available here.
    output_eval_examples: whether texts are written.
    eval_dir_suffix: added to the name of the folder, after "_".
    score_with_estimator_fn: must be None, likewise.

  Returns:
    For each data set its metrics with the last checkpoint; empty if none has metrics.

  Raises:
    ConfigError: there is no checkpoint, or something that is not available.
    DataError: a data set is empty, or is not of single pairs.
  """
  if eval_with_score or score_with_estimator_fn is not None:
    raise ConfigError("eval_model: evaluation of scores is not available in this version")
  datasets = eval_dataset_fn(
    sequence_length=sequence_length, vocabulary=vocabulary, dataset_split=dataset_split
  )
  datasets = [EvalDataset(*d) for d in datasets]
  left_out = [d.name for d in datasets if not d.metric_fns]
  if left_out:
    _LOG.info("data sets without metrics are left out: %s", left_out)
  if len(left_out) == len(datasets):
    return {}
  folder = eval_summary_dir or os.path.join(model_dir, f"{dataset_split}_eval")
  if eval_dir_suffix:
    folder += f"_{eval_dir_suffix}"
  cached = [_Texts(d, sequence_length, vocabulary) for d in datasets if d.metric_fns]
  if output_eval_examples:
    for texts in cached:
      write_lines_to_file(texts.inputs, os.path.join(folder, f"{texts.dataset.name}_inputs"))
      write_lines_to_file(texts.targets, os.path.join(folder, f"{texts.dataset.name}_targets"))
  results: dict[str, dict[str, float]] = {}
  decode = targets_vocabulary(vocabulary).decode
  for _ in restored_checkpoints(estimator, eval_checkpoint_step, model_dir):
    step = estimator.global_step
    for texts in cached:
      name = texts.dataset.name
      started = time.perf_counter()
      outputs = generate(estimator, texts.rows, sequence_length, batch_size)
      seconds = time.perf_counter() - started
      predictions = [
        texts.dataset.postprocess_fn(decode(ids), example=example)
        for ids, example in zip(outputs, texts.examples)
      ]
      if output_eval_examples:
        write_lines_to_file(predictions, os.path.join(folder, f"{name}_{step}_predictions"))
      metrics: dict[str, float] = {}
      for metric_fn in texts.dataset.metric_fns:
        metrics.update({k: float(v) for k, v in metric_fn(texts.targets, predictions).items()})
      results[name] = metrics
      write_scalars(folder, step, {f"eval/{name}/{k}": v for k, v in metrics.items()})
      scores = "  ".join(f"{k} {v:.2f}" for k, v in metrics.items())
      print(
        f"step {step}  {name}: {scores}  ({len(predictions):,} texts decoded in {seconds:.1f} s)",
        flush=True,
      )
  return results
