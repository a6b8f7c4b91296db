"""Readers of text and tokens that find each example by its number.

| reader | of |
|---|---|
| `own_text` | documents of own files (text, JSON lines, tables), encoded at each start |
| `own_tokens` | a folder of tokens, encoded once by `tokenizing`, mapped into memory |
| `text_lm_dataset` | plain text files |
| `own_pairs` | pairs of fields of own files |
| `parallel_text_dataset` | pairs of lines of files |

What example n is depends on the files, the options, the seed and n, and on nothing else: a data set
that starts at example n is not read up to there.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_settings.rules import COUNT_OR_ZERO, one_of
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data import encoding, pair_rows, sources, token_rows
from mesh_tensorflow.transformer.data.files import token_folder
from mesh_tensorflow.transformer.data.files.arguments import argument
from mesh_tensorflow.transformer.data.files.documents import Field
from mesh_tensorflow.transformer.data.options import TwoSplits, reader, with_texts
from mesh_tensorflow.transformer.data.pair_rows import Pairs
from mesh_tensorflow.transformer.data.vocabularies import kept

_LOG = logging.getLogger("mesh_tensorflow")

# Encoding that took longer is worth a hint.
_LONG_SECONDS = 60.0


# ----------------------------------------------------------------------- language models


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel(TwoSplits):
  """Options of readers for language models."""

  context_tokens: int = argument(
    "the first so many ids of a window are negated: the model sees them, and they are not scored; "
    "consecutive windows overlap by as much.",
    0,
    COUNT_OR_ZERO,
  )

  def cut(self, mode: str, order: str) -> token_rows.Cut:
    """The cutting of rows, as an object; `ConfigError` for options that contradict each other."""
    return token_rows.Cut(self.length, mode, order, self.context_tokens, self.order_seed)

  def rows(
    self, tokens: np.ndarray, cut: token_rows.Cut, what: str, sizes: np.ndarray | None
  ) -> tf.data.Dataset:
    """Rows of tokens; see `token_rows.dataset`.

    Args:
      tokens: the ids of the split.
      cut: how rows are cut.
      what: name of the tokens, for errors.
      sizes: numbers of ids of its documents; None if the mode does not need them.
    """
    return token_rows.dataset(
      tokens, cut, train=self.train, what=what, document_sizes=sizes, skip=self.skip,
      rows=self.needed,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows(LanguageModel):
  """Options of readers that cut rows out of one long sequence of tokens."""

  mode: str = argument(
    '"stream": windows of the documents, one behind the other; "documents": the same, and '
    "features `targets_segmentation` and `targets_position` keep a model from looking into other "
    'documents; "packed": whole documents, of which only those longer than a row are cut.',
    "stream",
    one_of(("stream", "documents", "packed")),
  )
  order: str = argument(
    'of training: "shuffled": each window once in an epoch, in another order each time, cut at '
    'other places; "random": windows at random places, drawn with replacement.',
    "shuffled",
    one_of(("shuffled", "random")),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnText(sources.HeldOut, Windows):
  """Options of `own_text`."""


def _documents(options: OwnText, feature: str | None) -> Iterator[str]:
  """The training texts, for vocabularies."""
  del feature
  return (texts[0] for _, texts in sources.source("own_text", options).documents("train"))


@reader(
  OwnText,
  "sequence_length vocabulary dataset_split path validation_path validation_fraction format "
  "document separator field header quotes encoding mode order context_tokens seed skip batch_size",
  _documents,
)
def own_text(options: OwnText) -> tf.data.Dataset:
  """Examples for a language model from files of documents.

  Each document ends with an EOS. The training split is endless; every other split is finite and in
  order, and each of its tokens is scored once (but not the first `context_tokens`). All text is
  read and encoded at each start: what is too large for that is encoded once by `tokenize`, for
  `own_tokens`.

  {settings}

  Returns:
    A data set of dicts of int32 [sequence_length].

  Raises:
    ConfigError: a setting is wrong, or a package that a format needs is not installed.
    DataError: a file is missing, empty, damaged, not of its encoding or format; a field is not
      there; a split has no documents, or fewer tokens than a window; or the vocabulary cannot
      encode the text.
  """
  cut = options.cut(options.mode, options.order)
  source, split = sources.source("own_text", options), options.dataset_split
  what = f"the {split} split of {source.name}"
  started = time.perf_counter()
  documents = ((path, texts[0]) for path, texts in source.documents(split))
  tokens, sizes = encoding.encode_documents(documents, options.of_targets)
  if not sizes.size:
    raise source.nothing(split)
  encoding.check_known(tokens, options.of_targets, what)
  seconds = time.perf_counter() - started
  _LOG.info("%s: %d documents, %d tokens", what, sizes.size, tokens.size)
  if seconds > _LONG_SECONDS:
    _LOG.warning(
      "encoding %s took %.0f s, and takes them at each start: `mesh-transformer tokenize` does it "
      "once, for dataset.own_tokens",
      *(what, seconds),
    )
  return options.rows(tokens, cut, what, sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTokens(Windows):
  """Options of `own_tokens`."""

  path: str = argument("the folder that `mesh-transformer tokenize` made.", gin.REQUIRED)


def _no_texts(feature: str | None) -> Iterator[str]:
  """There are none: the tokens say of which vocabulary they are."""
  del feature
  path = gin.get_bindings(own_tokens).get("path", "FOLDER")
  raise ConfigError(
    f"tokens have their vocabulary: give run.vocabulary = 'tokens:{path}', or tokenize again"
  )


@with_texts(_no_texts)
@reader(
  OwnTokens,
  "sequence_length vocabulary dataset_split path mode order context_tokens seed skip batch_size",
)
def own_tokens(options: OwnTokens) -> tf.data.Dataset:
  """Examples for a language model from a folder that `mesh-transformer tokenize` made.

  They are those of `own_text` of the same files and settings; the vocabulary must be that of the
  tokens (`run.vocabulary = 'tokens:FOLDER'`). The files are mapped into memory: they may be larger
  than it, only what is used is read, and processes of one machine share it.

  {settings}

  Returns:
    A data set of dicts of int32 [sequence_length].

  Raises:
    ConfigError: a setting is wrong.
    DataError: there is no such folder, or it is not whole; the split has no tokens, or fewer than a
      window; or the tokens are of another vocabulary.
  """
  cut = options.cut(options.mode, options.order)
  tokens = token_folder.read(options.path)
  given, needed = kept.describe(options.of_targets), tokens.vocabulary
  if given["digest"] != needed["digest"]:
    raise DataError(
      f"the tokens of {tokens.path} are of {needed['class']} of {needed['size']} ids, and "
      f"run.vocabulary is another one ({given['class']} of {given['size']}): give run.vocabulary = "
      f"'tokens:{tokens.path}', or tokenize again"
    )
  split = "train" if options.train else "validation"
  sizes = None
  if options.mode == "packed":
    sizes = np.diff(tokens.map_documents(split), append=tokens.tokens[split])
  return options.rows(tokens.map_tokens(split), cut, f"the {split} split of {tokens.path}", sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextLm(sources.PlainFiles, LanguageModel):
  """Options of `text_lm_dataset`."""

  mode: str = argument(
    '"stream": the files are one long text, cut into windows: random ones for training (drawn with '
    "replacement), consecutive ones otherwise, the last zero-padded; feature `targets`. "
    '"documents": each document ends with EOS, and several share a row; features `targets`, '
    "`targets_segmentation`, `targets_position`; training goes through all rows in an order that "
    "differs in each epoch.",
    "documents",
    one_of(("documents", "stream")),
  )
  document_unit: str = argument(
    '"file", "paragraph" (blank lines between) or "line": what a document is.',
    "file",
    one_of(tuple(sources.SPLITTERS)),
  )
  too_long: str = argument(
    'a document with more than `sequence_length` ids (EOS counts) is "split" into several '
    'sequences, cut off ("truncate"), or refused ("error").',
    "split",
    one_of(("split", "truncate", "error")),
  )


def _plain_texts(options: TextLm, feature: str | None) -> Iterator[str]:
  """The training texts, for vocabularies."""
  del feature
  for file in options.read(options.train_files):
    # Read without an encoding, for bytes, they are taken for UTF-8.
    yield file.text if isinstance(file.text, str) else file.text.decode("utf-8", "replace")


@reader(
  TextLm,
  "sequence_length vocabulary dataset_split train_files validation_files validation_fraction "
  "validation_unit mode document_unit too_long context_tokens encoding skip_bad_files seed skip "
  "batch_size",
  _plain_texts,
)
def text_lm_dataset(options: TextLm) -> tf.data.Dataset:
  """Examples for a language model from plain text files (UTF-8; .gz are uncompressed).

  The training split is endless and random. Every other split is finite and in order, and all of
  its tokens are scored once (but not the first `context_tokens`, which only windows have).

  {settings}

  Returns:
    A data set of dicts of int32 [sequence_length].

  Raises:
    ConfigError: a setting is wrong.
    DataError: a file is missing, empty or undecodable; a split has no text or one shorter than
      a window; a document is too long; or the vocabulary cannot encode the text.
  """
  windows = options.mode == "stream"
  if options.context_tokens and not windows:
    raise ConfigError("text_lm_dataset: context_tokens needs mode 'stream'")
  cut = options.cut("stream", "drawn") if windows else options.cut("packed", "permuted")
  vocabulary = options.of_targets
  text = sources.plain_text("text_lm_dataset", options, options.train)
  what = f"the {options.dataset_split} split of {text.name}"
  sizes = None
  if windows:
    tokens = np.concatenate([encoding.encode(vocabulary, f.text, f.path) for f in text.files])
    encoding.check_known(tokens, vocabulary, what)
    tokens = text.part(tokens)
    if len(tokens) < cut.length:
      raise DataError(
        f"{what} has {len(tokens)} tokens, fewer than one sequence of sequence_length {cut.length}"
      )
  else:
    documents = text.documents(options.document_unit)
    tokens, sizes = encoding.encode_documents(documents, vocabulary, cut.length, options.too_long)
    encoding.check_known(tokens, vocabulary, what)
  return options.rows(tokens, cut, what, sizes)


# --------------------------------------------------------------------------------- pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnPairs(sources.HeldOut, TwoSplits, Pairs):
  """Options of `own_pairs`."""

  inputs: Field = argument(
    "the name of the field of inputs, or the number of the column from 0 on.", "inputs"
  )
  targets: Field = argument("the same, of targets.", "targets")
  # No arguments: a document is a record.
  document: str = "auto"
  separator: str | None = None
  field: Field | None = None

  @property
  def fields(self) -> tuple[Field, ...]:
    """The fields to read."""
    return self.inputs, self.targets


def _sides(options: OwnPairs, feature: str | None) -> Iterator[str]:
  """The training texts, for vocabularies: one side of the pairs, or both."""
  for _, texts in sources.source("own_pairs", options).documents("train"):
    yield from _of_feature(texts, feature)


def _of_feature(pair: Iterable[str], feature: str | None) -> list[str]:
  return [text for k, text in zip(pair_rows.FEATURES, pair) if feature in (None, k)]


@reader(
  OwnPairs,
  "sequence_length vocabulary dataset_split path validation_path validation_fraction inputs "
  "targets format header quotes encoding pack too_long seed skip batch_size",
  _sides,
)
def own_pairs(options: OwnPairs) -> tf.data.Dataset:
  """Pairs of texts, for encoder-decoders and models of joined sequences.

  They are fields of own files of records: JSON lines, CSV, TSV, Parquet. The training split is
  endless, in an order that differs in each epoch; every other split is finite and in the order of
  the files. Pairs of which one side is empty are left out.

  {settings}

  Returns:
    A data set of dicts of int32 [sequence_length].

  Raises:
    ConfigError: a setting is wrong, or a package that a format needs is not installed.
    DataError: a file is missing, empty, damaged, not of its encoding or format; a field is not
      there; a split has no pairs; or a pair is too long.
  """
  source, split = sources.source("own_pairs", options), options.dataset_split
  pairs = [(texts[0].strip(), texts[1].strip()) for _, texts in source.documents(split)]
  if not pairs:
    raise source.nothing(split)
  return pair_rows.dataset(pairs, options, f"the {split} split of {source.name}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelText(Pairs):
  """Options of `parallel_text_dataset`."""

  files: Mapping[str, Any] = argument(
    "for each split the pair (file of inputs, file of targets) of equally many lines, or one file "
    "with two columns on each line, separated by a tab; plain or .gz, in the encoding that "
    "`text_encoding` says. In place of a file: a glob or a list, whose files are taken sorted by "
    "name.",
    gin.REQUIRED,
  )
  data_dir: str = argument("folder of the files, if their names are relative.", "")


def _lines(options: ParallelText, feature: str | None) -> Iterator[str]:
  """The training texts, for vocabularies: one side of the pairs, or both."""
  for pair in sources.read_pairs(options.files, "train", options.data_dir):
    yield from _of_feature(pair, feature)


@reader(
  ParallelText,
  "sequence_length vocabulary dataset_split files data_dir pack too_long seed skip batch_size",
  _lines,
)
def parallel_text_dataset(options: ParallelText) -> tf.data.Dataset:
  """Pairs of texts from files, for encoder-decoders and models of joined sequences.

  The files are read into memory and encoded once. The training split is endless, in an order that
  differs in each epoch; every other split (a key of `files`) is finite and in the order of the
  files.

  {settings}

  Returns:
    A data set of dicts of int32 [sequence_length].

  Raises:
    ConfigError: a setting is wrong.
    DataError: a file is missing, empty or not of its encoding; parallel files differ in their
      number of lines; a line has not two columns; a pair is too long; or nothing is left.
  """
  split = options.dataset_split
  pairs = sources.read_pairs(options.files, split, options.data_dir)
  return pair_rows.dataset(pairs, options, f"the {split} split")
