"""The documents of own files: text, JSON lines, CSV and TSV, Parquet; one after the other.

A file is read some at a time, as far as its form allows. What is wrong with it is told with the
file, and the line or byte.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType

from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data.files import text_files
from mesh_transformer_cli import untrusted

FORMATS = ("text", "jsonl", "csv", "tsv", "parquet")
UNITS = ("file", "paragraph", "line")

_MOST_COLUMNS = 1 << 22

# A name, or the number of a column from 0 on.
Field = str | int
Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Form:
  """The format of files of documents.

  Attributes:
    format: one of `FORMATS`.
    unit: for "text": the unit of a document, one of `UNITS`; "separator" if `separator` is given.
    separator: for "text": the string between two documents.
    fields: for the other formats: the fields to read; (): the only one, or "text".
    header: for "csv" and "tsv": True if the first line names the columns; None: if `fields` are
      names.
    quotes: for "csv" and "tsv": True if columns may be in "...", with "" for a quote in them; None:
      in "csv" only.
    encoding: encoding of the text.
  """

  format: str = "text"
  unit: str = "file"
  separator: str | None = None
  fields: tuple[Field, ...] = ()
  header: bool | None = None
  quotes: bool | None = None
  encoding: str = "utf-8"


def documents(path: str, form: Form, read: Progress | None = None) -> Iterator[tuple[str, ...]]:
  """The documents of a file, in order; those without text (null, only blanks) are left out.

  Args:
    path: of the file.
    form: what is in it.
    read: gets the numbers of bytes that were read; see `text_files.chunks`.

  Returns:
    For each document its text; for a `form` with several fields, their texts.

  Raises:
    ConfigError: a package that the format needs is not installed.
    DataError: the file is missing, unreadable, damaged, not of its encoding, or not of its format;
      or a field is not there or is no text.
  """
  found = _READERS[form.format](path, form, read)
  return (texts for texts in found if all(t and not t.isspace() for t in texts))


def decoded(path: str, encoding: str, read: Progress | None = None) -> Iterator[str]:
  """Yields the decoded text of a file in chunks.

  Args:
    path: of the file.
    encoding: a name that Python knows.
    read: see `text_files.chunks`.

  Raises:
    DataError: it cannot be read, or is not of this encoding.
  """
  decoder = codecs.getincrementaldecoder(encoding)()
  utf8 = codecs.lookup(encoding).name == "utf-8"
  begin = 0  # The place of the chunk in the file.

  def decode(data: bytes, final: bool = False) -> str:
    try:
      return decoder.decode(data, final)
    except UnicodeDecodeError as e:
      # The decoder puts what it kept of the chunk before in front.
      at = begin + len(data) - len(e.object) + e.start
      raise DataError(
        f"{path} is not {encoding} text: byte 0x{e.object[e.start]:02x} at offset {at} "
        f"({e.reason}); give its encoding ('latin-1', 'utf-16', ...), convert it, or leave it out"
      ) from e
    except UnicodeError as e:
      raise DataError(f"{path} is not {encoding} text: {e}") from e

  for data in text_files.chunks(path, read):
    text = decode(data)
    # A mark of UTF-8 that some programs write is no text.
    yield text.removeprefix("\ufeff") if utf8 and not begin else text
    begin += len(data)
  yield decode(b"", final=True)


def _bounded(path: str, what: str) -> Callable[[int], None]:
  """Makes a check that raises `DataError` for more characters than one document may have."""
  most = text_files.most_of_one(path)

  def check(count: int) -> None:
    if most is not None and count > most:
      raise text_files.too_large(path, what, most)

  return check


def pieces(
  texts: Iterable[str], separator: str, check: Callable[[int], None] = lambda n: None
) -> Iterator[str]:
  """Splits a streamed text at a separator; the last piece may be "".

  Args:
    texts: the parts of the text.
    separator: at least one character.
    check: called with the number of characters of a piece that goes on; raises if it is too large.
  """
  kept: list[str] = []
  count = 0
  tail = ""  # The end of what is kept, in which a separator may begin.
  for text in texts:
    # Only where text and tail meet can a separator be that was not found before: what is kept of
    # a long document is not searched again with each part that comes.
    joined = tail + text
    count += len(text)
    check(count)
    if separator not in joined:
      kept.append(text)
      tail = joined[max(0, len(joined) - len(separator) + 1) :]
      continue
    first, *rest = "".join([*kept, text]).split(separator)
    yield first
    yield from rest[:-1]
    kept, count = [rest[-1]], len(rest[-1])
    tail = rest[-1][max(0, len(rest[-1]) - len(separator) + 1) :]
  yield "".join(kept)


# ------------------------------------------------------------------------------- text


def _text(path: str, form: Form, read: Progress | None) -> Iterator[tuple[str, ...]]:
  texts = decoded(path, form.encoding, read)
  check = _bounded(path, f"a {form.unit}" if form.unit in UNITS else "a document")
  if form.unit == "file":
    # One piece: nothing stands between its parts.
    parts, count = [], 0
    for text in texts:
      parts.append(text)
      count += len(text)
      check(count)
    yield ("".join(parts),)
  elif form.unit == "paragraph":
    yield from ((p,) for p in _paragraphs(_lines(texts, check), check))
  else:
    separator = form.separator if form.unit == "separator" else "\n"
    for piece in pieces(texts, separator or "\n", check):
      yield (piece.removesuffix("\r") if form.unit == "line" else piece,)


def _lines(texts: Iterable[str], check: Callable[[int], None]) -> Iterator[str]:
  """The lines of a text, without their ends; not the empty one behind a last end."""
  lines = pieces(texts, "\n", check)
  before = next(lines)
  for line in lines:
    yield before.removesuffix("\r")
    before = line
  if before:
    yield before


def _paragraphs(lines: Iterable[str], check: Callable[[int], None]) -> Iterator[str]:
  """Yields the paragraphs of a text: runs of lines between blank lines."""
  kept: list[str] = []
  count = 0
  for line in lines:
    if line and not line.isspace():
      kept.append(line)
      # A string by itself has some fifty bytes more than its characters.
      count += len(line) + 50
      check(count)
    elif kept:
      yield "\n".join(kept)
      kept, count = [], 0
  if kept:
    yield "\n".join(kept)


# ---------------------------------------------------------------------------- records


def _json(path: str, form: Form, read: Progress | None) -> Iterator[tuple[str, ...]]:
  for number, line in enumerate(
    _lines(decoded(path, form.encoding, read), _bounded(path, "a line")), 1
  ):
    if not line or line.isspace():
      continue
    try:
      record = untrusted.parse(line)
    except ValueError as e:
      array = " (a whole array is no JSON lines)" if line.lstrip()[0] == "[" else ""
      raise DataError(
        f"{path}, line {number}: this is not JSON: {e}{array}; each line must be an object such as "
        '{"text": "..."}'
      ) from e
    place = f"{path}, line {number}"
    if not isinstance(record, dict):
      raise DataError(f"{place}: an object with fields is needed, not {str(line)[:60]}")
    fields = _chosen(form.fields, list(record), place, "field")
    yield tuple(_as_text(record[f], f"{place}: field {f!r}") for f in fields)


def _table(path: str, form: Form, read: Progress | None) -> Iterator[tuple[str, ...]]:
  rows = _rows(path, form, read)
  named = not form.fields or any(isinstance(f, str) for f in form.fields)
  names: list[str] | None = None
  if named if form.header is None else form.header:
    names = next(rows, (0, []))[1]
  columns: list[int] | None = None
  for number, row in rows:
    if columns is None:
      columns = _columns(form.fields, names, len(row), path)
    if len(row) <= max(columns):
      raise DataError(
        f"{path}, line {number}: {len(row)} column(s), and column {max(columns)} (from 0) is "
        f"asked for: {str(row)[:80]}"
      )
    yield tuple(row[c] for c in columns)


def _rows(path: str, form: Form, read: Progress | None) -> Iterator[tuple[int, list[str]]]:
  """The rows of a table that are not empty, each with the number of the line where it ends."""
  delimiter = "\t" if form.format == "tsv" else ","
  quotes = form.format == "csv" if form.quotes is None else form.quotes
  texts = decoded(path, form.encoding, read)
  check = _bounded(path, "a line")
  if not quotes:
    for number, line in enumerate(_lines(texts, check), 1):
      if line:
        _check_columns(path, number, line, delimiter)
        yield number, line.split(delimiter)
    return
  # Documents are longer than the columns for which the module has its limit.
  csv.field_size_limit(min(sys.maxsize, 2**31 - 1, text_files.most_of_one(path) or sys.maxsize))

  # Not of `_lines`: a column in quotes has the ends of its lines as they are.
  def lines() -> Iterator[str]:
    for number, line in enumerate(pieces(texts, "\n", check), 1):
      _check_columns(path, number, line, delimiter)
      yield f"{line}\n"

  reader = csv.reader(lines(), delimiter=delimiter, strict=True)
  try:
    for row in reader:
      if row and row != [""]:
        yield reader.line_num, row
  except csv.Error as e:
    raise DataError(
      f"{path}, line {reader.line_num}: this is not {form.format}: {e}; if quotes are part of the "
      "text, give quotes = False"
    ) from e


def _check_columns(path: str, number: int, line: str, delimiter: str) -> None:
  # Each column takes more memory than the character in front of it.
  if line.count(delimiter) > _MOST_COLUMNS:
    raise DataError(f"{path}, line {number}: this is no table: {line.count(delimiter):,} columns")


def _columns(fields: Sequence[Field], names: list[str] | None, width: int, path: str) -> list[int]:
  """The numbers of the columns that are asked for."""
  if names is None:
    for field in fields:
      if isinstance(field, str):
        raise DataError(
          f"{path}: there is no column {field!r}: with header = False columns have numbers, "
          f"from 0 to {width - 1}"
        )
    if not fields and width > 1:
      raise DataError(f"{path}: which of the {width} columns is the text? Give field = 0, say")
    return [int(f) for f in fields or (0,)]
  return [
    f if isinstance(f, int) else names.index(f) for f in _chosen(fields, names, path, "column")
  ]


def _parquet(path: str, form: Form, read: Progress | None) -> Iterator[tuple[str, ...]]:
  pyarrow, parquet = parquet_modules()
  try:
    with open(path, "rb") as source:
      file = parquet.ParquetFile(source)
      schema = file.schema_arrow
      fields = _chosen(form.fields, schema.names, path, "column")
      names = [schema.names[f] if isinstance(f, int) else f for f in fields]
      for name in names:
        kind = schema.field(name).type
        value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(value) or pyarrow.types.is_large_string(value)):
          raise DataError(f"{path}: column {name!r} is {kind}, not text")
      done = 0
      for batch in file.iter_batches(batch_size=1024, columns=names):
        if read is not None:
          read(max(0, source.tell() - done))
          done = max(done, source.tell())
        columns = [batch.column(name).to_pylist() for name in names]
        yield from (tuple(t or "" for t in texts) for texts in zip(*columns))
  except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as e:
    if isinstance(e, OSError) and e.errno is not None:
      raise DataError(f"cannot read {path}: {e}") from e
    # Of damage within pyarrow raises an OSError, too.
    raise DataError(f"{path} is not a whole Parquet file: {str(e).splitlines()[0]}") from e


_READERS = {"text": _text, "jsonl": _json, "csv": _table, "tsv": _table, "parquet": _parquet}


def _chosen(
  fields: Sequence[Field], names: Sequence[str], place: str, kind: str
) -> Sequence[Field]:
  """Selects the fields to read among those of the file; raises if one is missing."""
  if not fields:
    if len(names) != 1 and "text" not in names:
      raise DataError(
        f"{place}: which {kind} is the text? There are {_listed(names)}; give field = '...'"
      )
    return ("text",) if "text" in names else names
  for field in fields:
    # A number is the place of a column; the fields of an object have no places.
    places = range(len(names)) if kind == "column" else range(0)
    if field not in (names if isinstance(field, str) else places):
      raise DataError(f"{place}: there is no {kind} {field!r}; there are {_listed(names)}")
  return fields


def _listed(names: Sequence[str]) -> str:
  shown = ", ".join(repr(n) for n in names[:12])
  more = f" and {len(names) - 12} more" if len(names) > 12 else ""
  return f"{shown}{more}" if names else "none"


def _as_text(value: object, place: str) -> str:
  if value is None:
    return ""
  if not isinstance(value, str):
    raise DataError(f"{place} is {type(value).__name__}, not text: {str(value)[:60]}")
  return value


def parquet_modules() -> tuple[ModuleType, ModuleType]:
  """The package pyarrow, and its part for Parquet; `ConfigError` if it is not installed."""
  try:
    import pyarrow
    import pyarrow.parquet
  except ImportError as e:
    raise ConfigError(
      "Parquet files need the package pyarrow: pip install pyarrow; or write them as JSON lines"
    ) from e
  return pyarrow, pyarrow.parquet


def bound_encoding(encoding: str) -> str:
  """An encoding that is known; that of `text_encoding` for `text_files.AS_BOUND`."""
  if encoding == text_files.AS_BOUND:
    return text_files.text_encoding()
  return text_files.text_encoding(encoding)
