"""Own files as a source of documents: found by path, folder or glob, of a form by their suffix."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence

import tensorflow as tf

from mesh_settings.rules import one_of
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data.files import documents, text_files, token_folder
from mesh_tensorflow.transformer.data.files.arguments import argument, check_choices
from mesh_tensorflow.transformer.data.files.documents import Field, Form, Progress

# What a file is by its suffix, if nothing else is said. In a folder, these are the files taken.
FORMAT_OF_SUFFIX = {
  ".txt": "text",
  ".text": "text",
  ".md": "text",
  ".jsonl": "jsonl",
  ".ndjson": "jsonl",
  ".json": "jsonl",
  ".csv": "csv",
  ".tsv": "tsv",
  ".tab": "tsv",
  ".parquet": "parquet",
  ".pq": "parquet",
}

# The texts of a document: one; or several, such as inputs and targets.
Texts = tuple[str, ...]

# A document of so many characters gives its end to the held-out part, a shorter one goes there
# whole or not at all: of one long text, and of a few books, a part can be held out, too. Files that
# are documents are few, mostly; records are many, and there it is better to hold out whole ones.
LONG_FILE, LONG = 1 << 13, 1 << 16


@dataclasses.dataclass(frozen=True)
class OwnFiles:
  """Files of documents, and how they are read.

  Attributes:
    paths: of the files, sorted.
    forms: what is in each.
  """

  paths: tuple[str, ...]
  forms: tuple[Form, ...]

  def documents(self) -> Iterator[tuple[str, Texts]]:
    """All documents in order: the path of the file, and the texts of the fields."""
    for number, path in enumerate(self.paths):
      for texts in self.of_file(number):
        yield path, texts

  def of_file(self, number: int, read: Progress | None = None) -> Iterator[Texts]:
    """The documents of one file.

    Args:
      number: of the file.
      read: see `documents.documents`.
    """
    return documents.documents(self.paths[number], self.forms[number], read)

  def divided(
    self, fraction: float, number: int, read: Progress | None = None
  ) -> Iterator[tuple[Texts | None, Texts | None]]:
    """Yields the documents of one file, split between training and validation; see `split`.

    Args:
      fraction: the part that is held out.
      number: of the file.
      read: see `documents.documents`.
    """
    found = self.of_file(number, read)
    first = list(itertools.islice(found, 2))
    long = LONG_FILE if self.forms[number].unit == "file" else LONG
    if len(self.paths) == 1 and len(first) == 1:
      long = 0  # There is no other document.
    for texts in itertools.chain(first, found):
      yield split(texts, fraction, long)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileForm:
  """The form of files of documents: arguments of all that reads own files."""

  format: str = argument(
    '"text", "jsonl", "csv", "tsv" or "parquet"; "auto": by the suffix, under that of a compressed '
    "file; a file of another suffix is text.",
    "auto",
    one_of(("auto", *documents.FORMATS)),
  )
  document: str = argument(
    'in text files "file", "paragraph" (blank lines between) or "line"; "auto": a file. In the '
    "other formats a document is a record.",
    "auto",
    one_of(("auto", *documents.UNITS)),
  )
  separator: str | None = argument(
    "in place of `document`: the string between two documents of a text file, such as "
    '"<|endoftext|>".',
    None,
  )
  field: Field | None = argument(
    "name of the field of the text, or number of the column from 0 on; None: the only one, or "
    '"text".',
    None,
  )
  header: bool | None = argument(
    "True if the first line of a table names its columns; None: unless fields are numbers.", None
  )
  quotes: bool | None = argument(
    "True if columns of a table may be in quotes; None: in CSV only.", None
  )
  encoding: str = argument(
    "encoding of the files; by default that of `text_encoding`.", text_files.AS_BOUND
  )

  @property
  def fields(self) -> tuple[Field, ...]:
    """The fields to read; (): the only one, or "text"."""
    return () if self.field is None else (self.field,)


def find(path: str | Sequence[str], form: FileForm = FileForm()) -> OwnFiles:
  """Finds files of documents.

  Args:
    path: a file, a folder (all files in it and below whose suffix is known; hidden ones are not
      taken), a glob, or a list of these.
    form: what is in them.

  Raises:
    ConfigError: a setting is wrong, or contradicts another.
    DataError: there is no such file, or none in a folder.
  """
  check_choices(form)
  separator, document, fields = form.separator, form.document, form.fields
  if separator is not None and (document != "auto" or not separator):
    raise ConfigError(
      "give document or separator, not both" if separator else "separator must not be empty"
    )
  encoding = documents.bound_encoding(form.encoding)
  paths = _find_files(path, form.format)
  forms = []
  for p in paths:
    of_file = _format_of(p) if form.format == "auto" else form.format
    unit = "separator" if separator is not None else "file" if document == "auto" else document
    if of_file != "text":
      if (separator is not None or document != "auto") and not any(map(_is_text, paths)):
        raise ConfigError(
          f"document and separator are for text files, and a record of {p} ({of_file}) is one"
        )
      unit = "record"
    elif fields:
      raise ConfigError(f"{p} is a text file, which has no fields {list(fields)}; give its format")
    forms.append(Form(of_file, unit, separator, fields, form.header, form.quotes, encoding))
  return OwnFiles(tuple(paths), tuple(forms))


def _is_text(path: str) -> bool:
  return _format_of(path) == "text"


def _format_of(path: str) -> str:
  return FORMAT_OF_SUFFIX.get(_suffix(path), "text")


def _suffix(path: str) -> str:
  """The suffix of a file; of a compressed one, the one before."""
  bare = path[: -len(text_files.compression_of(path))] if text_files.compression_of(path) else path
  return os.path.splitext(bare)[1].lower()


def _find_files(path: str | Sequence[str], format: str) -> list[str]:
  given = [path] if isinstance(path, (str, os.PathLike)) else list(path)
  found: set[str] = set()
  files = []
  for p in given:
    folder = os.path.expanduser(os.fspath(p)) if isinstance(p, (str, os.PathLike)) else ""
    if folder and tf.io.gfile.isdir(folder):
      found.update(_in_folder(folder, format))
    else:
      files.append(p)
  if files or not given:
    found.update(text_files.find_files(files))
  return sorted(found)


def _in_folder(folder: str, format: str) -> list[str]:
  """Files in a folder and below; with format "auto" only those with a known suffix."""
  found: list[str] = []
  others: collections.Counter[str] = collections.Counter()
  for at, below, names in tf.io.gfile.walk(folder):
    # In place: what is taken out is not gone through.
    below[:] = sorted(b for b in below if not b.startswith("."))
    if token_folder.METADATA in names:
      below[:] = names[:] = []  # Tokens that were made of text, perhaps of this.
    for name in names:
      if name.startswith("."):
        continue
      if format == "auto" and _suffix(name) not in FORMAT_OF_SUFFIX:
        others[_suffix(name) or "no suffix"] += 1
      else:
        found.append(os.path.join(at, name))
  if not found:
    there = ", ".join(f"{n} of {s}" for s, n in others.most_common(5))
    raise DataError(
      f"{folder} has no file of {', '.join(FORMAT_OF_SUFFIX)}"
      + (f", but {there}: give their format, or a glob" if there else ": it is empty")
    )
  return found


# --------------------------------------------------------------------- the held-out part


def split(texts: Texts, fraction: float, long: int = LONG) -> tuple[Texts | None, Texts | None]:
  """Divides a document between training and validation, by its text alone.

  So a document stays on its side whatever other files come or go, and copies of it are on the same.

  Args:
    texts: of the document.
    fraction: the part that is held out.
    long: a document of so many characters is divided: its end is held out.

  Returns:
    What is trained on, and what is held out; None for nothing.
  """
  if not fraction:
    return texts, None
  if len(texts) == 1 and len(texts[0]) >= long:
    border = int(len(texts[0]) * (1 - fraction))
    parts = texts[0][:border], texts[0][border:]
    return (parts[0],) if parts[0] else None, (parts[1],) if parts[1] else None
  digest = hashlib.blake2b(digest_size=8)
  for text in texts:
    digest.update(text.encode("utf-8", "surrogatepass"))
    digest.update(b"\0")
  held_out = int.from_bytes(digest.digest(), "big") < fraction * 2**64
  return (None, texts) if held_out else (texts, None)
