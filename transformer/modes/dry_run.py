"""The mode "dry_run": all that training does before its first step, shown; nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import mesh_tensorflow as mtf
from mesh_settings.run import RunSettings
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data.encoding import vocabulary_of
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies, as_text
from mesh_tensorflow.transformer.model.model_steps import ModelSteps
from mesh_tensorflow.transformer.modes import job
from mesh_tensorflow.transformer.modes.job import Job, mode
from mesh_tensorflow.transformer.modes.planned_steps import StepMaker, count_parameters
from mesh_tensorflow.transformer.training.trainer import open_data

# Of a batch so many rows are shown, of a row so many sequences, of a text so many characters.
_ROWS, _SEQUENCES, _CHARACTERS = 2, 4, 240


def _check(settings: RunSettings) -> None:
  train = job.get_mode("train")
  if train.check is not None:
    train.check(settings)
  if settings.vocabulary is None:
    raise ConfigError(
      "run.vocabulary is not bound: bind @vocabulary.get_byte_vocabulary(), or give a problem file"
    )


@mode("dry_run", on_devices=False, check=_check)
def run_dry_run(job: Job) -> mtf.Report:
  """Builds and plans the training, reads one batch of its data, and shows examples of it."""
  make = StepMaker(job.settings, job.sequence_length, job.batch_size)
  steps = make.steps(job.mesh_shape, job.layout_rules)
  print(f"{count_parameters(steps):,} parameters", flush=True)
  report = mtf.describe(make(job.mesh_shape, job.layout_rules))
  print(report.to_text(rows=3), flush=True)
  batch = first_batch(steps, job.train_dataset_fn, job.vocabulary, job.dataset_split)
  print("\n".join(describe_batch(batch, job.vocabulary)))
  print("dry run: nothing was trained, and nothing was written", flush=True)
  return report


def first_batch(
  steps: ModelSteps,
  dataset_fn: Any,
  vocabulary: Vocabularies,
  split: str,
) -> dict[str, np.ndarray]:
  """The batch of the first training step.

  Args:
    steps: the programs of the model.
    dataset_fn: see `Trainer.train`.
    vocabulary: for `dataset_fn`.
    split: likewise.

  Returns:
    For each feature of the model its ids, [batch, length].

  Raises:
    DataError: there is not one whole batch.
  """
  data = open_data(steps, dataset_fn, vocabulary, split)
  call = next(iter(data.calls(1, 1)), None)
  if call is None:
    raise DataError(f"the training data has fewer examples than a batch of {steps.batch_size}")
  values = dict(zip(data.names, call))
  # The first axis is the steps of a call, here 1; an ensemble has another axis.
  return {n: np.reshape(v.numpy(), [-1, v.shape[-1]]) for n, v in values.items()}


def describe_batch(batch: Mapping[str, np.ndarray], vocabulary: Vocabularies) -> list[str]:
  """Lines that show a batch: its features, how full they are, and examples as text.

  Args:
    batch: ids of each feature, [batch, length].
    vocabulary: a vocabulary or a pair.
  """
  lines = ["the first batch:"]
  for name, ids in batch.items():
    full = f", {np.mean(ids != 0):.1%} of it tokens, the rest padding" if name in _TEXTS else ""
    lines.append(f"  {name} {list(ids.shape)}{full}")
  rows = len(next(iter(batch.values())))
  for row in range(min(_ROWS, rows)):
    lines.append(f"example {row + 1} of {rows}:")
    lines += _row({name: ids[row] for name, ids in batch.items()}, vocabulary)
  return lines


_TEXTS = ("inputs", "targets")


def _row(row: Mapping[str, np.ndarray], vocabulary: Vocabularies) -> list[str]:
  """The sequences of a row, each with its texts; a row that is not packed is one."""
  texts = [name for name in _TEXTS if name in row]
  segments = {name: row.get(f"{name}_segmentation", np.ones_like(row[name])) for name in texts}
  numbers = sorted({int(n) for s in segments.values() for n in s} - {0})
  lines = []
  for number in numbers[:_SEQUENCES]:
    where = f"  sequence {number} of {len(numbers)}: " if len(numbers) > 1 else "  "
    for name in texts:
      ids = row[name][segments[name] == number]
      lines.append(where + _text(name, ids, vocabulary))
      where = " " * len(where)
  if len(numbers) > _SEQUENCES:
    lines.append(f"  ... {len(numbers) - _SEQUENCES} more sequences in the row")
  return lines


def _text(name: str, ids: np.ndarray, vocabulary: Vocabularies) -> str:
  """The ids of a feature as text, with what decides the loss and cannot be seen in it."""
  tokens = ids[ids != 0]
  # Negated ids are seen by the model and not scored.
  unscored = int(np.sum(tokens < 0))
  note = f", the first {unscored} not scored" if unscored else ""
  text = as_text(vocabulary_of(name, vocabulary).decode(np.abs(tokens).tolist()))
  shown = repr(text if len(text) <= _CHARACTERS else text[:_CHARACTERS] + "...")
  return f"{name} ({tokens.size} tokens{note}): {shown}"
