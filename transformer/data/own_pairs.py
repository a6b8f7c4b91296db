"""Pairs of texts from own files of records: JSON lines, tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, COUNT_OR_ZERO, FRACTION, affects, takes
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import data_seed
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.data import own_documents, parallel_text
from mesh_tensorflow.transformer.data.packing import Length
from mesh_tensorflow.transformer.files import text_files
from mesh_tensorflow.transformer.files.documents import Field

_FEATURES = ("inputs", "targets")


def _texts(feature: str | None) -> Iterator[str]:
  """Training texts for vocabularies: one side of the pairs (`feature`), or both."""
  sides = _FEATURES if feature is None else (feature,)
  for _, texts in own_documents.bound(own_pairs, _FEATURES).documents("train"):
    yield from (texts[_FEATURES.index(s)] for s in sides)


@own_documents.with_texts(_texts)
@gin.configurable(module="mesh_tensorflow.transformer.dataset")
@affects("training")
@takes(validation_fraction=FRACTION, skip=COUNT_OR_ZERO, batch_size=COUNT)
def own_pairs(
  sequence_length: Length,
  vocabulary: Any,
  dataset_split: str = "train",
  path: str | Sequence[str] = gin.REQUIRED,
  validation_path: str | Sequence[str] | None = None,
  validation_fraction: float | None = None,
  inputs: Field = "inputs",
  targets: Field = "targets",
  format: str = "auto",
  header: bool | None = None,
  quotes: bool | None = None,
  encoding: str = text_files.AS_BOUND,
  pack: bool = True,
  too_long: str = "drop",
  seed: int | None = None,
  skip: int = 0,
  batch_size: int | None = None,
  *,
  batch_rows: BatchRows | None = None,
) -> tf.data.Dataset:
  """Pairs of texts, for encoder-decoders and models of joined sequences.

  The training split is endless, in an order that differs in each epoch; every other split is finite
  and in the order of the files. Pairs of which one side is empty are left out.

  Args:
    sequence_length: an int, or a dict from "inputs" and "targets".
    vocabulary: a `Vocabulary`, or a tuple of one for inputs and one for targets.
    dataset_split: "train"; any other name means the held-out pairs.
    path: see `own_text`; files of records: JSON lines, CSV, TSV, Parquet.
    validation_path: the same, for the held-out pairs.
    validation_fraction: part of the pairs of `path` to hold out, chosen by a hash of both texts; by
      default 0.05, if there is no `validation_path`; 0: none.
    inputs: the name of the field of inputs, or the number of the column from 0 on.
    targets: the same, of targets.
    format: see `own_text`.
    header: True if the first line of a table names its columns; by default if `inputs` or `targets`
      is no number.
    quotes: True if columns of a table may be in quotes; by default those of CSV are.
    encoding: encoding of the files; by default that of `text_encoding`.
    pack: True if several pairs share a row; see `parallel_text_dataset`.
    too_long: "drop", "truncate" or "error": the treatment of pairs longer than `sequence_length`.
    seed: of the order; None: that of the run (`run.seeds`).
    skip: start at this row.
    batch_size: has no effect.
    batch_rows: make only the rows that are needed of each batch, the first of which begins at
      `skip`; None: all.

  Returns:
    A data set of dicts of int32 [sequence_length].

  Raises:
    ConfigError: a setting is wrong, or a package that a format needs is not installed.
    DataError: a file is missing, empty, damaged, not of its encoding or format; a field is not
      there; a split has no pairs; or a pair is too long.
  """
  del batch_size
  source = own_documents.source(
    "own_pairs", path, validation_path, validation_fraction,
    format=format, header=header, quotes=quotes, fields=(inputs, targets), encoding=encoding,
  )  # fmt: skip
  pairs = [(texts[0].strip(), texts[1].strip()) for _, texts in source.documents(dataset_split)]
  if not pairs:
    raise DataError(source.nothing(dataset_split))
  if too_long not in parallel_text.TOO_LONG:
    choices = ", ".join(parallel_text.TOO_LONG)
    raise ConfigError(f"own_pairs: too_long (={too_long!r}) must be one of {choices}")
  if skip < 0:
    raise ConfigError(f"own_pairs: skip (={skip}) must not be negative")
  return parallel_text.rows_of_pairs(
    pairs, sequence_length, vocabulary, f"the {dataset_split} split of {source.name}",
    train=dataset_split == "train", pack=pack, too_long=too_long,
    seed=data_seed.chosen(seed), skip=skip,
    batch_rows=batch_rows,
  )  # fmt: skip
