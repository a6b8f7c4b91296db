"""Language-model data from own files: text, JSON lines, tables; read and encoded at each start.

What is too large to be encoded at each start is encoded once: `tokenizing`, `own_tokens`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, COUNT_OR_ZERO, FRACTION, affects, takes
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.training import data_seed, input_shards
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.data import encoding as encoding_lib
from mesh_tensorflow.transformer.data import own_documents, text_lm_rows, token_rows
from mesh_tensorflow.transformer.data.packing import Length
from mesh_tensorflow.transformer.files import text_files
from mesh_tensorflow.transformer.files.documents import Field
from mesh_tensorflow.transformer.vocabularies.base import EOS_ID

_LOG = logging.getLogger("mesh_tensorflow")

# Encoding that took longer is worth a hint.
_LONG_SECONDS = 60.0


def _texts(feature: str | None) -> Iterator[str]:
  """Training texts for vocabularies, from the files that gin binds for `own_text`."""
  del feature
  for _, texts in own_documents.bound(own_text, ("field",)).documents("train"):
    yield from texts


@own_documents.with_texts(_texts)
@gin.configurable(module="mesh_tensorflow.transformer.dataset")
@affects("training")
@takes(
  validation_fraction=FRACTION, context_tokens=COUNT_OR_ZERO, skip=COUNT_OR_ZERO, batch_size=COUNT
)
def own_text(
  sequence_length: Length,
  vocabulary: Any,
  dataset_split: str = "train",
  path: str | Sequence[str] = gin.REQUIRED,
  validation_path: str | Sequence[str] | None = None,
  validation_fraction: float | None = None,
  format: str = "auto",
  document: str = "auto",
  separator: str | None = None,
  field: Field | None = None,
  header: bool | None = None,
  quotes: bool | None = None,
  encoding: str = text_files.AS_BOUND,
  mode: str = "stream",
  order: str = "shuffled",
  context_tokens: int = 0,
  seed: int | None = None,
  skip: int = 0,
  batch_size: int | None = None,
  *,
  batch_rows: BatchRows | None = None,
) -> tf.data.Dataset:
  """Examples for a language model from files of documents.

  Each document ends with an EOS. The training split is endless; every other split is finite and in
  order, and each of its tokens is scored once (but not the first `context_tokens`).

  Args:
    sequence_length: an int, or a dict with "targets".
    vocabulary: a `Vocabulary`, or an (inputs, targets) tuple.
    dataset_split: "train"; any other name means the held-out documents.
    path: a file, a folder, a glob, or a list of them; .gz, .bz2, .xz and .zst are uncompressed. Of
      a folder all files in it and below that have a known suffix.
    validation_path: the same, for the held-out documents.
    validation_fraction: hold this part of the documents of `path` out: by default 0.05, if there
      is no `validation_path`; 0: none. Chosen by a hash of the document, so that it stays when
      other files are added; a text file of 8,192 characters that is a document, any document of
      65,536, and the only one there is, give their ends.
    format: "text", "jsonl", "csv", "tsv" or "parquet"; "auto": by the suffix.
    document: in text files "file", "paragraph" (blank lines between) or "line"; "auto": a file. In
      the other formats it is a record.
    separator: in place of `document`: the string between documents, such as "<|endoftext|>".
    field: the name of the field of the text, or the number of the column from 0 on; by default the
      one that there is, or "text".
    header: whether the first line of a table names its columns; by default if `field` is no number.
    quotes: whether columns of a table may be in quotes; by default those of CSV are.
    encoding: of the files; by default that of `text_encoding`.
    mode: "stream": windows of the documents, one behind the other; "documents": the same, and
      features `targets_segmentation` and `targets_position` keep a model from looking into other
      documents; "packed": whole documents, of which only those longer than a row are cut.
    order: of training: "shuffled": each window once in an epoch, in another order each time, cut
      at other places; "random": windows at random places, drawn with replacement.
    context_tokens: the first so many ids of a window are negated: the model sees them, and they
      are not scored; consecutive windows overlap by as much.
    seed: of the order; None: that of the run (`run.seeds`).
    skip: start at this example.
    batch_size: has no effect.
    batch_rows: make only these examples of each batch, beginning at `skip`; None: all.

  Returns:
    A data set of dicts of int32 [sequence_length].

  Raises:
    ConfigError: a setting is wrong, or a package that a format needs is not installed.
    DataError: a file is missing, empty, damaged, not of its encoding or format; a field is not
      there; a split has no documents, or fewer tokens than a window; or the vocabulary cannot
      encode the text.
  """
  del batch_size
  length = token_rows.length_of(sequence_length)
  cut = token_rows.Cut(length, mode, order, context_tokens, data_seed.chosen(seed))
  source = own_documents.source(
    "own_text", path, validation_path, validation_fraction,
    format=format, document=document, separator=separator, header=header, quotes=quotes,
    fields=() if field is None else (field,), encoding=encoding,
  )  # fmt: skip
  vocabulary = vocabulary[1] if isinstance(vocabulary, tuple) else vocabulary
  return _rows(source, dataset_split, vocabulary, cut, skip, batch_rows)


def _rows(
  source: own_documents.Source,
  split: str,
  vocabulary: Any,
  cut: token_rows.Cut,
  skip: int,
  batch_rows: BatchRows | None,
) -> tf.data.Dataset:
  """The rows of a split of documents, which are encoded first."""
  what = f"the {split} split of {source.name}"
  started = time.perf_counter()
  tokens, sizes = _encoded(source.documents(split), vocabulary)
  if not sizes.size:
    raise DataError(source.nothing(split))
  encoding_lib.check_known(tokens, vocabulary, what)
  seconds = time.perf_counter() - started
  _LOG.info("%s: %d documents, %d tokens", what, sizes.size, tokens.size)
  if seconds > _LONG_SECONDS:
    _LOG.warning(
      "encoding %s took %.0f s, and takes them at each start: `mesh-transformer tokenize` does it "
      "once, for dataset.own_tokens",
      *(what, seconds),
    )
  return token_rows.dataset(
    tokens,
    cut,
    train=split == "train",
    what=what,
    document_sizes=sizes,
    skip=skip,
    rows=batch_rows or input_shards.current().rows(),
  )


def _encoded(
  documents: Iterator[tuple[str, tuple[str, ...]]], vocabulary: Any
) -> tuple[np.ndarray, np.ndarray]:
  """The ids of all documents, an EOS behind each; and the number of ids of each."""
  parts: list[np.ndarray] = []
  sizes: list[int] = []
  for path, (text,) in documents:
    ids = text_lm_rows.encode(vocabulary, text, path)
    parts += [ids, np.array([EOS_ID], ids.dtype)]
    sizes.append(len(ids) + 1)
  return np.concatenate(parts) if parts else np.zeros(0, np.int32), np.array(sizes, np.int64)
