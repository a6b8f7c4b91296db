"""Sources of text: documents and pairs from files, and the part of them that is held out."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, AnyStr

import gin

from mesh_settings.rules import FRACTION, one_of
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data.files import own_files, text_files
from mesh_tensorflow.transformer.data.files.arguments import argument
from mesh_tensorflow.transformer.data.files.own_files import FileForm, OwnFiles, Texts
from mesh_tensorflow.transformer.data.files.text_files import TextFile

_LOG = logging.getLogger("mesh_tensorflow")

HELD_OUT = 0.05  # The fraction of documents that is held out by default.


# ------------------------------------------------------------------- documents of own files


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut(FileForm):
  """Options of readers of own files, of which some documents are held out."""

  path: str | Sequence[str] = argument(
    "a file, a folder, a glob, or a list of them; .gz, .bz2, .xz and .zst are uncompressed. Of a "
    "folder all files in it and below that have a known suffix.",
    gin.REQUIRED,
  )
  validation_path: str | Sequence[str] | None = argument("the same, for what is held out.", None)
  validation_fraction: float | None = argument(
    f"part of the documents of `path` to hold out; None: {HELD_OUT}, if there is no "
    "`validation_path`; 0: none. Chosen by a hash of the document, so that it stays when other "
    "files are added; a text file of 8,192 characters that is a document, any document of 65,536, "
    "and the only one there is, give their ends.",
    None,
    FRACTION.or_none(),
  )


@dataclasses.dataclass(frozen=True)
class Source:
  """Documents to train on, and documents that are held out.

  Attributes:
    files: of both, or of those to train on.
    validation: files of held-out documents; None: those of `files`.
    fraction: the part of `files` that is held out.
  """

  files: OwnFiles
  validation: OwnFiles | None
  fraction: float

  @property
  def name(self) -> str:
    """The files, for messages."""
    return _named(self.files.paths)

  def documents(self, split: str) -> Iterator[tuple[str, Texts]]:
    """The documents of a split, in order, each with the path of its file.

    Args:
      split: "train"; any other name means what is held out.
    """
    train = split == "train"
    if self.validation is not None and not train:
      yield from self.validation.documents()
      return
    for number, path in enumerate(self.files.paths):
      for parts in self.files.divided(self.fraction, number):
        texts = parts[0] if train else parts[1]
        if texts is not None:
          yield path, texts

  def nothing(self, split: str) -> DataError:
    """The error for a split without documents, which says why it has none."""
    files = self.validation if self.validation is not None and split != "train" else self.files
    count = sum(1 for _ in itertools.islice(files.documents(), 1000))
    if count:
      return DataError(
        f"none of the {count} documents of {self.name} is in the {split} split "
        f"(validation_fraction {self.fraction}): give another fraction, validation_path, or "
        "smaller documents (document = 'paragraph' or 'line')"
      )
    if len(files.paths) == 1:
      return DataError(f"{files.paths[0]} has no text")
    return DataError(
      f"none of the {len(files.paths)} files has any text, {files.paths[0]} for instance"
    )


def source(reader: str, options: HeldOut) -> Source:
  """Finds the files of training and held-out documents.

  Args:
    reader: the name of the reader, for errors.
    options: its options.

  Raises:
    ConfigError: both a path and a fraction are given, or it is no fraction.
    DataError: see `own_files.find`.
  """
  fraction, held_out = options.validation_fraction, options.validation_path
  if held_out is not None and fraction:
    raise ConfigError(f"{reader}: give validation_path or validation_fraction, not both")
  if fraction is None:
    fraction = 0.0 if held_out is not None else HELD_OUT
  if not 0 <= fraction < 1:
    raise ConfigError(
      f"{reader}: validation_fraction (={fraction}) must be at least 0 and less than 1"
    )
  files = own_files.find(options.path, options)
  if held_out is None:
    return Source(files, None, fraction)
  validation = own_files.find(held_out, options)
  both = set(files.paths) & set(validation.paths)
  if both:
    raise ConfigError(
      f"{reader}: {len(both)} file(s) are in path and in validation_path, {min(both)} for "
      "instance: the held-out text would be trained on"
    )
  return Source(files, validation, fraction)


def _named(paths: Sequence[str]) -> str:
  first, *more = paths
  return f"{first} and {len(more)} more files" if more else first


# ------------------------------------------------------------------- plain text files


@dataclasses.dataclass(frozen=True)
class PlainText:
  """The text files of a split.

  Attributes:
    files: the files.
    fraction: the part of their text that is held out; 0: all of it is of the split.
    train: True for the training split.
  """

  files: list[TextFile]
  fraction: float
  train: bool

  @property
  def name(self) -> str:
    """The files, for messages."""
    return _named([f.path for f in self.files])

  def part(self, items: Any) -> Any:
    """The first 1 - fraction of a sequence for training, the rest otherwise."""
    if not self.fraction:
      return items
    border = int(len(items) * (1 - self.fraction))
    return items[:border] if self.train else items[border:]

  def documents(self, unit: str) -> list[tuple[str, Any]]:
    """The documents of the split, each with the path of its file.

    Args:
      unit: a key of `SPLITTERS`: what a document is.
    """
    whole = [(f.path, d) for f in self.files for d in SPLITTERS[unit](f.text)]
    return self.part(whole)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainFiles:
  """Options of where plain text is, and of what is held out."""

  train_files: str | Sequence[str] = argument(
    "a glob of text files, or a list of globs.", gin.REQUIRED
  )
  validation_files: str | Sequence[str] | None = argument("the same, for the held-out text.", None)
  validation_fraction: float | None = argument(
    "hold this part of `train_files` out instead.", None, FRACTION.or_none()
  )
  validation_unit: str = argument(
    'how that part is chosen: "text" takes the end of all text (in documents mode, the last '
    'documents); "file" takes whole files, spread evenly over the sorted paths.',
    "text",
    one_of(("text", "file")),
  )
  encoding: str | None = argument(
    "encoding of the files; by default that of `text_encoding`; None passes bytes to the "
    "vocabulary.",
    text_files.AS_BOUND,
  )
  skip_bad_files: bool = argument("leave out empty and undecodable files, with a warning.", False)

  def read(self, globs: str | Sequence[str]) -> list[TextFile]:
    """Reads the files that match; see `text_files.read_text_files`."""
    return text_files.read_text_files(
      globs, encoding=self.encoding, skip_bad_files=self.skip_bad_files
    )


def plain_text(reader: str, options: PlainFiles, train: bool) -> PlainText:
  """Reads the text files of a split.

  Args:
    reader: the name of the reader, for errors.
    options: its options.
    train: True for the training split.

  Raises:
    ConfigError: options that contradict each other.
    DataError: the splits have a file in common; one has none; or see `text_files`.
  """
  fraction, held_out = options.validation_fraction, options.validation_files
  if fraction is not None and not 0 < fraction < 1:
    raise ConfigError(
      f"{reader}: validation_fraction (={fraction}) must be between 0 and 1; without validation "
      "data leave it out"
    )
  if fraction is not None and held_out is not None:
    raise ConfigError(f"{reader}: give validation_files or validation_fraction, not both")
  if held_out is not None:
    both = _real_paths(options.train_files, not train) & _real_paths(held_out, False)
    if both:
      raise DataError(
        f"{reader}: {len(both)} file(s) are in train_files and in validation_files, {min(both)} "
        "for instance: the held-out text would be trained on"
      )
  elif fraction is None and not train:
    raise ConfigError(
      f"{reader}: there is no held-out text; give validation_files or validation_fraction"
    )
  files = options.read(options.train_files if train or held_out is None else held_out)
  if fraction is None or options.validation_unit == "text":
    return PlainText(files, fraction or 0.0, train)
  # Spread evenly over the sorted files, as neighbours may be alike; of their number alone, so that
  # both splits agree on it.
  left_out = [math.floor((i + 1) * fraction) > math.floor(i * fraction) for i in range(len(files))]
  chosen = [f for f, out in zip(files, left_out) if out != train]
  if not chosen:
    raise DataError(
      f"{reader}: validation_fraction {fraction} of {len(files)} file(s) leaves none for "
      f"{'training' if train else 'validation'}; use validation_unit 'text'"
    )
  return PlainText(chosen, 0.0, train)


def _real_paths(globs: str | Sequence[str], may_be_gone: bool) -> set[str]:
  """Real paths of the matching files; the empty set if there are none and `may_be_gone`."""
  try:
    return {os.path.realpath(p) for p in text_files.find_files(globs)}
  except DataError:
    if not may_be_gone:
      raise
    return set()


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


SPLITTERS: dict[str, Callable[[Any], list[Any]]] = {
  "file": lambda text: [text],
  "paragraph": _paragraphs,
  "line": _lines,
}


# -------------------------------------------------------------------------------- pairs


def read_pairs(
  files: Mapping[str, object], split: str, data_dir: str = ""
) -> list[tuple[str, str]]:
  """The (inputs, targets) texts of a split.

  Pairs of which one side is empty are left out, and counted in a warning.

  Args:
    files: see `parallel_text_dataset`.
    split: a key of `files`.
    data_dir: folder of the files, if their names are relative.

  Returns:
    Pairs of texts without blanks at their ends.

  Raises:
    ConfigError: there is no such split, or it is not given as files.
    DataError: see `parallel_text_dataset`.
  """
  if not isinstance(files, Mapping) or not files:
    raise ConfigError(f"files must be a dict from split to files, got {files!r}")
  if split not in files:
    raise ConfigError(f"there are no files for split {split!r}, only for {sorted(files)}")
  given = files[split]
  if isinstance(given, tuple) and len(given) == 2:
    texts = _read_parallel(*(text_files.in_folder(data_dir, g) for g in given))
    what = f"{given[0]} and {given[1]}"
  elif isinstance(given, (str, list)) and given:
    texts = _read_tsv(text_files.in_folder(data_dir, given))
    what = str(given)
  else:
    raise ConfigError(
      f"the files of split {split!r} must be a tuple (inputs, targets), or one file of two "
      f"columns, got {given!r}"
    )
  stripped = [(a.strip(), b.strip()) for a, b in texts]
  kept = [(a, b) for a, b in stripped if a and b]
  if len(kept) < len(stripped):
    _LOG.warning(
      "%s: %d of %d pairs are left out, because one side is empty",
      what, len(stripped) - len(kept), len(stripped),
    )  # fmt: skip
  if not kept:
    raise DataError(f"{what}: there is no pair of texts")
  return kept


def _read_parallel(
  inputs: str | Sequence[str], targets: str | Sequence[str]
) -> list[tuple[str, str]]:
  sides = [text_files.read_text_files(globs) for globs in (inputs, targets)]
  if len(sides[0]) != len(sides[1]):
    raise DataError(
      f"parallel files: {inputs} matches {len(sides[0])} file(s), and {targets} {len(sides[1])}"
    )
  result: list[tuple[str, str]] = []
  for a, b in zip(*sides):
    lines = [_all_lines(f.text) for f in (a, b)]
    if len(lines[0]) != len(lines[1]):
      raise DataError(
        f"parallel files must have equally many lines: {a.path} has {len(lines[0]):,}, and "
        f"{b.path} {len(lines[1]):,}"
      )
    result += zip(*lines)
  return result


def _read_tsv(globs: str | Sequence[str]) -> list[tuple[str, str]]:
  result = []
  for file in text_files.read_text_files(globs):
    for number, line in enumerate(_all_lines(file.text), 1):
      columns = line.split("\t")
      if len(columns) != 2:
        raise DataError(
          f"{file.path}, line {number}: {len(columns)} column(s) in place of two texts with a tab "
          f"between them: {line[:80]!r}"
        )
      result.append((columns[0], columns[1]))
  return result


def _all_lines(text: str) -> list[str]:
  # splitlines() would also split at form feeds and other separators.
  lines = text.split("\n")
  if not lines[-1]:
    lines.pop()
  return lines
