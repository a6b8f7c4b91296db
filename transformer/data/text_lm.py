"""Language-model data from plain text files: held in memory, cut by index, resumable anywhere.

What example n is depends on the files, the settings, the seed and n, and on nothing else: a
data set that starts at example n is not read up to there.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, AnyStr

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.declared import COUNT, COUNT_OR_ZERO, FRACTION, affects, takes
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import data_seed, input_shards
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer.data import encoding as encoding_lib
from mesh_tensorflow.transformer.data import own_documents, text_lm_rows
from mesh_tensorflow.transformer.files import text_files
from mesh_tensorflow.transformer.files.text_files import TextFile

_LOG = logging.getLogger("mesh_tensorflow")


def _texts(feature: str | None) -> Iterator[str]:
  """Training texts for vocabularies: the files that gin binds."""
  del feature
  given = gin.get_bindings(text_lm_dataset)
  if "train_files" not in given:
    raise ConfigError("text_lm_dataset.train_files is not bound")
  options = {n: given[n] for n in ("encoding", "skip_bad_files") if n in given}
  for file in text_files.read_text_files(given["train_files"], **options):
    # Read without an encoding, for bytes, they are taken for UTF-8.
    yield file.text if isinstance(file.text, str) else file.text.decode("utf-8", "replace")


@own_documents.with_texts(_texts)
@gin.configurable(module="mesh_tensorflow.transformer.dataset")
@affects("training")
@takes(
  validation_fraction=FRACTION, context_tokens=COUNT_OR_ZERO, skip=COUNT_OR_ZERO, batch_size=COUNT
)
def text_lm_dataset(
  sequence_length: int | Mapping[str, int],
  vocabulary: Any,
  dataset_split: str = "train",
  train_files: str | Sequence[str] = gin.REQUIRED,
  validation_files: str | Sequence[str] | None = None,
  validation_fraction: float | None = None,
  validation_unit: str = "text",
  mode: str = "documents",
  document_unit: str = "file",
  too_long: str = "split",
  context_tokens: int = 0,
  encoding: str | None = text_files.AS_BOUND,
  skip_bad_files: bool = False,
  seed: int | None = None,
  skip: int = 0,
  batch_size: int | None = None,
  *,
  batch_rows: BatchRows | None = None,
) -> tf.data.Dataset:
  """Examples for a language model from plain text files (UTF-8; .gz are uncompressed).

  The training split is endless and random. Every other split is finite and in order, and all of
  its tokens are scored once (but not the first `context_tokens`).

  Args:
    sequence_length: an int, or a dict with "targets".
    vocabulary: a `Vocabulary`, or an (inputs, targets) tuple of them.
    dataset_split: "train"; any other name means the held-out text.
    train_files: a glob of text files, or a list of globs.
    validation_files: the same, for the held-out text.
    validation_fraction: hold this part of `train_files` out instead.
    validation_unit: how that part is chosen: "text" takes the end of all text (in documents mode,
      the last documents); "file" takes whole files, spread evenly over the sorted paths.
    mode: "stream": the files are one long text, cut into windows: random ones for training
      (drawn with replacement), consecutive ones otherwise, the last zero-padded; feature `targets`.
      "documents": each document ends with EOS, and several share a row; features `targets`,
      `targets_segmentation`, `targets_position`; training goes through all rows in an order
      that differs in each epoch.
    document_unit: "file", "paragraph" (blank lines between) or "line": what a document is.
    too_long: a document with more than `sequence_length` ids (EOS counts) is "split" into several
      sequences, cut off ("truncate"), or refused ("error").
    context_tokens: stream mode: the first so many ids of a window are negated: the model sees
      them, and they are not scored; consecutive windows overlap by as much.
    encoding: of the files; by default that of `text_encoding`; None passes bytes to the vocabulary.
    skip_bad_files: leave out empty and undecodable files, with a warning.
    seed: of the random choices; None: that of the run (`run.seeds`).
    skip: start at this example.
    batch_size: has no effect.
    batch_rows: make only the examples that are needed of each batch, the first of which begins at
      `skip`; None: all.

  Returns:
    A data set of dicts of int32 [sequence_length].

  Raises:
    ConfigError: a setting is wrong.
    DataError: a file is missing, empty or undecodable; a split has no text or one shorter than
      a window; a document is too long; or the vocabulary cannot encode the text.
  """
  del batch_size
  length = _length(sequence_length)
  _check_choices(mode, document_unit, too_long, validation_unit)
  _check_numbers(context_tokens, length, mode, skip)
  vocabulary = vocabulary[1] if isinstance(vocabulary, tuple) else vocabulary
  train = dataset_split == "train"
  seed = data_seed.chosen(seed)
  rows = batch_rows or input_shards.current().rows()
  files, fraction = _choose_files(
    train, train_files, validation_files, validation_fraction, validation_unit,
    encoding=encoding, skip_bad_files=skip_bad_files,
  )  # fmt: skip
  what = f"the {dataset_split} split of {_name_of(files)}"
  if mode == "stream":
    tokens = np.concatenate([text_lm_rows.encode(vocabulary, f.text, f.path) for f in files])
    encoding_lib.check_known(tokens, vocabulary, what)
    tokens = _part(tokens, fraction, train)
    return text_lm_rows.windows(tokens, length, context_tokens, train, seed, skip, rows, what)
  whole = [(f.path, d) for f in files for d in _SPLITTERS[document_unit](f.text)]
  own = _part(whole, fraction, train)
  return text_lm_rows.document_rows(
    own, vocabulary, length, too_long, train, seed, skip, rows, what
  )


# ------------------------------------------------------------------ files and splits


def _choose_files(
  train: bool,
  train_files: str | Sequence[str],
  validation_files: str | Sequence[str] | None,
  fraction: float | None,
  unit: str,
  **options: Any,
) -> tuple[list[TextFile], float]:
  """The files of the split, and which part of their text is still to be held out."""
  if fraction is not None and not 0 < fraction < 1:
    raise ConfigError(
      f"text_lm_dataset: validation_fraction (={fraction}) must be between 0 and 1; without "
      "validation data leave it out"
    )
  if fraction is not None and validation_files is not None:
    raise ConfigError("text_lm_dataset: give validation_files or validation_fraction, not both")
  if validation_files is not None:
    both = _real_paths(train_files, not train) & _real_paths(validation_files, False)
    if both:
      raise DataError(
        f"text_lm_dataset: {len(both)} file(s) are in train_files and in validation_files, "
        f"{min(both)} for instance: the held-out text would be trained on"
      )
    return text_files.read_text_files(train_files if train else validation_files, **options), 0.0
  if fraction is None:
    if not train:
      raise ConfigError(
        "text_lm_dataset: there is no held-out text; give validation_files or validation_fraction"
      )
    return text_files.read_text_files(train_files, **options), 0.0
  files = text_files.read_text_files(train_files, **options)
  if unit == "text":
    return files, fraction
  # Spread evenly over the sorted files, as neighbours may be alike; of their number alone, so that
  # both splits agree on it.
  held_out = [math.floor((i + 1) * fraction) > math.floor(i * fraction) for i in range(len(files))]
  chosen = [f for f, h in zip(files, held_out) if h != train]
  if not chosen:
    raise DataError(
      f"text_lm_dataset: validation_fraction {fraction} of {len(files)} file(s) leaves none for "
      f"{'training' if train else 'validation'}; use validation_unit 'text'"
    )
  return chosen, 0.0


def _real_paths(globs: str | Sequence[str], may_be_gone: bool) -> set[str]:
  """Real paths of the matching files; the empty set if there are none and `may_be_gone`."""
  try:
    return {os.path.realpath(p) for p in text_files.find_files(globs)}
  except DataError:
    if not may_be_gone:
      raise
    return set()


def _part(items: Any, fraction: float, train: bool) -> Any:
  """The first 1 - fraction of a sequence for training, the rest otherwise."""
  if not fraction:
    return items
  border = int(len(items) * (1 - fraction))
  return items[:border] if train else items[border:]


def _name_of(files: Sequence[TextFile]) -> str:
  return files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more files"


def _whole(text: AnyStr) -> list[AnyStr]:
  return [text]


def _lines(text: AnyStr) -> list[AnyStr]:
  # splitlines() would also split a str at form feeds and other separators.
  return [line for line in re.split(_of_kind(r"\r?\n", text), text) if line]


def _paragraphs(text: AnyStr) -> list[AnyStr]:
  pattern, ends = _of_kind(r"\r?\n(?:[ \t]*\r?\n)+", text), _of_kind("\r\n", text)
  paragraphs = [p.strip(ends) for p in re.split(pattern, text)]
  return [p for p in paragraphs if p.strip()]


def _of_kind(pattern: str, text: AnyStr) -> AnyStr:
  """Converts a pattern to the type of the text, bytes or str."""
  return pattern.encode() if isinstance(text, bytes) else pattern


_SPLITTERS: dict[str, Callable[[Any], list[Any]]] = {
  "file": _whole,
  "paragraph": _paragraphs,
  "line": _lines,
}


def _length(sequence_length: int | Mapping[str, int]) -> int:
  """The length of targets."""
  if isinstance(sequence_length, Mapping):
    if "targets" not in sequence_length:
      raise ConfigError(f"text_lm_dataset: sequence_length {sequence_length} has no 'targets'")
    return int(sequence_length["targets"])
  return int(sequence_length)


def _check_numbers(context_tokens: int, length: int, mode: str, skip: int) -> None:
  if not 0 <= context_tokens < length:
    raise ConfigError(
      f"text_lm_dataset: context_tokens (={context_tokens}) must be at least 0 and less than "
      f"sequence_length (={length})"
    )
  if context_tokens and mode != "stream":
    raise ConfigError("text_lm_dataset: context_tokens needs mode 'stream'")
  if skip < 0:
    raise ConfigError(f"text_lm_dataset: skip (={skip}) must not be negative")


def _check_choices(mode: str, document_unit: str, too_long: str, validation_unit: str) -> None:
  for name, value, choices in (
    ("mode", mode, ("documents", "stream")),
    ("document_unit", document_unit, tuple(_SPLITTERS)),
    ("too_long", too_long, ("split", "truncate", "error")),
    ("validation_unit", validation_unit, ("text", "file")),
  ):
    if value not in choices:
      raise ConfigError(f"text_lm_dataset: {name} (={value!r}) must be one of {', '.join(choices)}")
