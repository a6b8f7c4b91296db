"""Outputs of a model for a data set, as texts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import gin
import numpy as np

from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data.eval_datasets import EvalDataset, reset_seeds
from mesh_tensorflow.transformer.data.text_io import (
  get_step_from_checkpoint_path,
  inputs_vocabulary,
  targets_vocabulary,
  write_lines_to_file,
)
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies
from mesh_tensorflow.transformer.generation.seq2seq import generate
from mesh_tensorflow.transformer.modes.input_fns import examples_input_fn
from mesh_tensorflow.transformer.modes.score import add_pretokenized, text_of
from mesh_tensorflow.transformer.training.trainer import InputFn, Trainer

_LOG = logging.getLogger("mesh_tensorflow")
_MODULE = "mesh_tensorflow.transformer.utils"


@gin.configurable(module=_MODULE)
@affects("report")
def decode(
  estimator: Trainer,
  input_fn: InputFn,
  vocabulary: Vocabularies,
  checkpoint_path: str | None = None,
) -> Iterator[str]:
  """The texts that a model makes of inputs; some are logged.

  Args:
    estimator: a `Trainer`.
    input_fn: see `Trainer.predict`.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    checkpoint_path: a checkpoint; None: the newest.

  Yields:
    The text of each row of outputs. What the estimator gives as bytes comes as it is.

  Raises:
    ConfigError: the estimator scores.
  """
  if estimator.score_in_predict_mode:
    raise ConfigError("decode: the estimator scores; make it with score_in_predict_mode=False")
  for i, result in enumerate(estimator.predict(input_fn, checkpoint_path=checkpoint_path)):
    output = result["outputs"]
    if not isinstance(output, bytes):
      output = text_of(output, targets_vocabulary(vocabulary))
    if i & (i - 1) == 0:  # 0, 1, 2, 4, 8, ...
      given = text_of(result["inputs"], inputs_vocabulary(vocabulary))
      _LOG.info("decoded %d: %r -> %r", i, given, output)
    yield output


@gin.configurable(module=_MODULE)
@affects("report")
@takes(batch_size=COUNT)
def decode_from_dataset(
  estimator: Trainer,
  vocabulary: Vocabularies,
  model_type: str,
  batch_size: int,
  sequence_length: Mapping[str, int],
  checkpoint_path: str | None = None,
  infer_dataset_fn: Callable[..., Sequence[EvalDataset]] = gin.REQUIRED,
  dataset_split: str = "validation",
  decode_output_dir: str = gin.REQUIRED,
) -> None:
  """Decodes the inputs of data sets; for `infer_model.decode_fn`.

  Writes, for each data set, `<name>_<step>_predictions`, `<name>_targets` and `<name>_inputs`.

  Args:
    estimator: a `Trainer`.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    model_type: "lm" continues the inputs, which stay in front of what is generated; others write
      what they make of them, as mode "eval" does.
    batch_size: rows at a time.
    sequence_length: dict of "inputs" and "targets"; an "lm" takes as many tokens as both.
    checkpoint_path: a checkpoint; None: the newest.
    infer_dataset_fn: called with sequence_length, vocabulary and dataset_split; returns
      `EvalDataset`s of `inputs` and `targets`.
    dataset_split: name of the split.
    decode_output_dir: a folder.

  Raises:
    ConfigError: there is no checkpoint.
    DataError: a data set is empty, or has other features.
  """
  path = checkpoint_path or estimator.latest_checkpoint()
  if path is None:
    raise ConfigError(f"there is no checkpoint in {estimator.model_dir}; train first")
  step = get_step_from_checkpoint_path(path)
  reset_seeds()
  datasets = infer_dataset_fn(
    sequence_length=sequence_length, vocabulary=vocabulary, dataset_split=dataset_split
  )
  datasets = [EvalDataset(*d) for d in datasets]
  # Each is read once: it may be shuffled.
  examples = [
    list(d.dataset_fn(sequence_length=sequence_length).as_numpy_iterator()) for d in datasets
  ]
  for dataset, own in zip(datasets, examples):
    _check(dataset.name, own)
  every = [e for own in examples for e in own]
  if model_type == "lm":
    input_fn = examples_input_fn(every, batch_size)
    outputs = decode(estimator, input_fn, vocabulary, checkpoint_path=path)
  else:
    estimator.restore_for_inference(path)
    rows = [[int(i) for i in np.trim_zeros(e["inputs"], "b")] for e in every]
    made = generate(estimator, rows, sequence_length, batch_size)
    outputs = iter([targets_vocabulary(vocabulary).decode(ids) for ids in made])
  for dataset, own in zip(datasets, examples):
    add_pretokenized(own, vocabulary)
    targets = [
      dataset.postprocess_fn(text_of(e["targets_pretokenized"]), example=e, is_target=True)
      for e in own
    ]
    # zip asks for an example first, so that no output of the next data set is taken.
    predictions = [dataset.postprocess_fn(text, example=e) for e, text in zip(own, outputs)]
    base = os.path.join(decode_output_dir, dataset.name)
    write_lines_to_file(predictions, f"{base}_{step}_predictions")
    write_lines_to_file(targets, f"{base}_targets")
    write_lines_to_file([text_of(e["inputs_pretokenized"]) for e in own], f"{base}_inputs")


def _check(name: str, examples: Sequence[Mapping[str, object]]) -> None:
  if not examples:
    raise DataError(f"data set {name!r} is empty")
  missing = [f for f in ("inputs", "targets") if f not in examples[0]]
  if missing:
    raise DataError(
      f"data set {name!r} has features {sorted(examples[0])}, and no {', '.join(missing)}"
    )
