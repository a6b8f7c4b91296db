"""Measures a text of one's own: finds it and reads it once, without TensorFlow."""

from __future__ import annotations

import csv
import dataclasses
import glob
import os
from collections.abc import Iterator
from typing import Any

from mesh_transformer_cli import decompress, untrusted

# As `mesh_tensorflow.transformer.data.files.own_files` takes them; a test compares the two.
FORMATS = {
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
# Approximate ratio of a text's size to that of its compressed file.
_COMPRESSION = 3
COMPRESSED = tuple(decompress.NAMES)
# Names of the model's folder and of the files that `init` writes.
MODEL, GIN, README = "model", "train.gin", "README.md"

# So much is read; of a larger text it is taken for all of it.
_MOST = 16 << 20


class TextError(Exception):
  """The text cannot be used; the message is one line that says what to do."""

  def __str__(self) -> str:
    return untrusted.shortened(super().__str__())


@dataclasses.dataclass(frozen=True)
class Text:
  """A measured text.

  Attributes:
    path: value of `own_text.path` in gin.
    files: its files.
    format: format of all files, or "auto" where they differ.
    field: the name of the field of records; None where it need not be said.
    characters: approximate number of characters.
    different: number of different characters seen.
    whole: whether all of it was read.
  """

  path: str
  files: tuple[str, ...]
  format: str
  field: str | None
  characters: int
  different: int
  whole: bool


def find(folder: str, given: str | None) -> tuple[str, list[str]]:
  """Finds the text: the given files, or those of a folder.

  Args:
    folder: of `init`.
    given: a file, a folder or a pattern; None: look into `folder`.

  Returns:
    What `own_text.path` is, as an absolute path, and the files.

  Raises:
    TextError: there is none, or it is not clear which.
  """
  if given is not None and not _is_same(given, folder):
    path = os.path.abspath(given)
    if os.path.isdir(path):
      files = sorted(_texts_in(path))
      if not files:
        raise TextError(f"in the folder {given} is no text: {_known()}")
      return path, files
    files = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else [path]
    files = [f for f in files if os.path.isfile(f)]
    if not files:
      raise TextError(f"there is no text {given} in {os.getcwd()}")
    return path, files
  here = os.path.abspath(folder)
  own = {os.path.join(here, README)}
  files = sorted(f for f in _texts_in(here, without=MODEL) if f not in own)
  if not files:
    raise TextError(
      f"no text is given, and in {folder} there is none: add --text=PATH, a file or folder; or "
      f"put it into {folder}: {_known()}"
    )
  return _pattern(here, files, folder), files


def _pattern(folder: str, files: list[str], shown: str) -> str:
  """One path for some files in a folder, which holds others, too."""
  if len(files) == 1:
    return files[0]
  below = {os.path.relpath(f, folder).split(os.sep)[0] for f in files}
  if len(below) == 1:
    return os.path.join(folder, below.pop())
  suffixes = {_suffixes(f) for f in files}
  # Not *.md: the README that is written here is none of the texts.
  together = len(suffixes) == 1 and ".md" not in suffixes
  if together and all(os.path.dirname(f) == folder for f in files):
    return os.path.join(folder, f"*{suffixes.pop()}")
  names = ", ".join(os.path.relpath(f, folder) for f in files[:3])
  raise TextError(f"in {shown} lie several texts ({names}, ...): choose by --text=PATH")


def _texts_in(folder: str, without: str | None = None) -> Iterator[str]:
  for at, folders, names in os.walk(folder):
    hidden = [f for f in folders if f.startswith(".") or (at == folder and f == without)]
    folders[:] = [f for f in folders if f not in hidden]
    for name in names:
      if not name.startswith(".") and _format(name) is not None:
        yield os.path.join(at, name)


def _is_same(one: str, other: str) -> bool:
  return os.path.realpath(one) == os.path.realpath(other)


def _known() -> str:
  return f"files {', '.join(sorted(FORMATS))}, or these with {', '.join(COMPRESSED)} behind"


def _suffixes(path: str) -> str:
  """The last suffix, with the one before if that is of a compressed file."""
  base, last = os.path.splitext(path)
  return os.path.splitext(base)[1] + last if last in COMPRESSED else last


def _format(path: str) -> str | None:
  first = os.path.splitext(_suffixes(path))[0] or _suffixes(path)
  return FORMATS.get(first.lower())


# ------------------------------------------------------------------ measuring


def measure(path: str, files: list[str], encoding: str, field: str | None) -> Text:
  """Reads a text, or its beginning.

  Args:
    path: see `Text`.
    files: its files.
    encoding: encoding of the files.
    field: the name of the field, where records have several.

  Raises:
    TextError: a file cannot be read, is not of its encoding or form; or there is too little text.
  """
  formats = {_format(f) or "text" for f in files}
  kind = formats.pop() if len(formats) == 1 else "auto"
  size = sum(os.path.getsize(f) * (_COMPRESSION if _is_compressed(f) else 1) for f in files)
  seen: set[str] = set()
  read, named = 0, field
  whole = True
  for file in files:
    texts, named = _texts(file, encoding, named)
    for text in texts:
      seen.update(text)
      read += len(text)
      if read > _MOST:
        whole = False
        break
    if not whole:
      break
  if any(_format(f) == "parquet" or f.endswith(".zst") for f in files):
    whole = False  # Their size is all that is known here.
  field = named if kind != "text" and named != "text" else None
  return Text(path, tuple(files), kind, field, read if whole else size, len(seen), whole)


def _is_compressed(file: str) -> bool:
  return file.endswith(COMPRESSED)


def _texts(file: str, encoding: str, field: str | None) -> tuple[Iterator[str], str | None]:
  """The texts of a file, and the name of their field; nothing of what only extras can read."""
  kind = _format(file) or "text"
  if kind == "parquet" or file.endswith(".zst"):
    return iter(()), field
  lines = _lines(file, encoding)
  if kind == "text":
    return lines, field
  if kind == "jsonl":
    return _json_texts(file, lines, field)
  return _table_texts(file, lines, "\t" if kind == "tsv" else ",", field)


def _lines(file: str, encoding: str) -> Iterator[str]:
  suffix = os.path.splitext(file)[1]
  done = 0
  try:
    with open(file, "rb") as source:
      is_compressed = suffix in decompress.NAMES
      f = decompress.open_stream(source, suffix) if is_compressed else source
      most = decompress.most_of_one(os.path.getsize(file)) if is_compressed else -1
      while line := f.readline(most):
        if len(line) == most:
          raise TextError(f"{file}: a line has {most:,} bytes or more: this is no text")
        yield line.decode(encoding)
        done += len(line)
  except UnicodeDecodeError as e:
    raise TextError(
      f"{file}: byte {done + e.start} (0x{e.object[e.start]:02x}) is not {encoding}: give its "
      "encoding, --encoding=latin-1 say"
    ) from None
  except UnicodeError as e:  # From codecs that read lines in their own way.
    raise TextError(f"{file} is not {encoding}: {e}; give its encoding by --encoding") from None
  except (OSError, decompress.DamagedError) as e:
    raise TextError(f"{file} cannot be read: {getattr(e, 'strerror', None) or e}") from None


def _json_texts(
  file: str, lines: Iterator[str], field: str | None
) -> tuple[Iterator[str], str | None]:
  def records() -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      try:
        record = untrusted.parse(line)
      except ValueError as e:
        raise TextError(f"{file}:{number} is no JSON of one line: {e}") from None
      if not isinstance(record, dict):
        raise TextError(f"{file}:{number} is no object with named fields")
      yield record

  found = records()
  first = next(found, {})
  field = _field(file, [k for k, v in first.items() if isinstance(v, str)], field)
  name = field or ""

  def texts() -> Iterator[str]:
    yield str(first.get(name, ""))
    for record in found:
      yield str(record.get(name, ""))

  return texts(), field


def _table_texts(
  file: str, lines: Iterator[str], delimiter: str, field: str | None
) -> tuple[Iterator[str], str | None]:
  rows = _rows(file, csv.reader(lines, delimiter=delimiter))
  names = next(rows, [])
  field = _field(file, names, field)
  column = names.index(field) if field in names else 0
  return (row[column] for row in rows if len(row) > column), field


def _rows(file: str, reader: Any) -> Iterator[list[str]]:
  """The rows of a table, as Python's reader gives them."""
  try:
    yield from reader
  except csv.Error as e:
    raise TextError(f"{file}:{reader.line_num} is no row of a table: {e}") from None


def _field(file: str, names: list[str], wanted: str | None) -> str | None:
  """The field of the text: the one that is wanted, "text", or the only one."""
  if wanted is not None and wanted not in names:
    raise TextError(f"{file} has no field {wanted!r}; there are {', '.join(names) or 'none'}")
  if wanted is None and names and "text" not in names and len(names) > 1:
    raise TextError(f"{file} has the fields {', '.join(names)}: choose by --field=NAME")
  return wanted or ("text" if "text" in names else names[0] if names else None)
