"""Finds and reads text files, and says clearly what is wrong with them.

All text of files, whatever it is for, is in the encoding that `text_encoding` says, if its reader
is not given another one. Files may be compressed, as their names say: .gz, .bz2, .xz and .zst.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import encodings.aliases
import glob as python_glob
import itertools
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import gin
import tensorflow as tf

from mesh_settings.hints import did_you_mean
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import input_shards
from mesh_transformer_cli import decompress

_LOG = logging.getLogger("mesh_tensorflow")

# In place of the name of an encoding: that of `text_encoding`.
AS_BOUND = ""

# Bytes: of one read; of a .gz file that is read rather than believed.
_CHUNK = 1 << 20
_SMALL = 1 << 20
_MOST_RATIO = 1032  # Of deflate: what it packs into one byte at best.

# TensorFlow's error for bytes that are no UTF-8 does not say of which file: these were opened, the
# last one last.
_OPENED: dict[str, None] = {}


@gin.configurable(module="mesh_tensorflow.transformer.text_files")
@affects("report")
def text_encoding(encoding: str = "utf-8") -> str:
  """The encoding of all text files whose readers are not given another one.

  Training, validation and parallel texts, inputs to be decoded and scored, and the texts that
  vocabularies are made of. What the package writes is UTF-8.

  Args:
    encoding: a name that Python knows: "utf-8", "latin-1", "cp1252", "utf-16", "shift_jis" ...

  Raises:
    ConfigError: an unknown name.
  """
  try:
    codecs.lookup(encoding)
  except (LookupError, TypeError) as e:
    known = [n.replace("_", "-") for n in {*encodings.aliases.aliases.values(), "latin-1", "utf-8"}]
    hint = did_you_mean(str(encoding).lower().replace("_", "-"), known)
    raise ConfigError(f"unknown text encoding {encoding!r}{hint}") from e
  return encoding


@dataclasses.dataclass(frozen=True)
class TextFile:
  """One text.

  Attributes:
    path: where it was read.
    text: str; bytes if it was read without an encoding.
  """

  path: str
  text: Any


def find_files(globs: str | Sequence[str]) -> list[str]:
  """The files that match one or several globs, sorted, each once.

  Args:
    globs: a glob ("*", "?", "[...]", and "**" for any folders below; "~" is the home folder) or a
      list of globs. Remote paths ("gs://...") work where TensorFlow has their file system.

  Returns:
    Paths; folders that match are left out.

  Raises:
    ConfigError: not a string and not a list of strings, or an empty list.
    DataError: a glob that matches no file.
  """
  patterns = [globs] if isinstance(globs, (str, os.PathLike)) else globs
  if not patterns or not all(isinstance(p, (str, os.PathLike)) for p in patterns):
    raise ConfigError(f"a text file glob or a list of globs is needed, not {globs!r}")
  found: set[str] = set()
  for pattern in map(os.fspath, patterns):
    if "://" in pattern:
      matches = [p for p in tf.io.gfile.glob(pattern) if not tf.io.gfile.isdir(p)]
    else:
      # By Python, which knows "**" and "~".
      matches = python_glob.glob(os.path.expanduser(pattern), recursive=True)
      if matches == [pattern] and os.path.isdir(pattern):
        raise DataError(
          f"{pattern} is a folder; name its files, {os.path.join(pattern, '*.txt')} for instance"
        )
      matches = [p for p in matches if not os.path.isdir(p)]
    if not matches:
      is_glob = python_glob.has_magic(pattern)
      what = "no file matches" if is_glob else "there is no file"
      where = "" if os.path.isabs(pattern) or "://" in pattern else f" (from {os.getcwd()})"
      raise DataError(f"{what} {pattern!r}{where}")
    found.update(matches)
  input_shards.note(sorted(found))
  return sorted(found)


def in_folder(folder: str, globs: str | Sequence[str]) -> str | list[str]:
  """Prefixes relative globs with a folder ("~" is the home folder); keeps absolute ones."""
  if not isinstance(globs, (str, os.PathLike)):
    return [os.path.join(folder, os.fspath(g)) for g in globs]
  return os.path.join(folder, os.fspath(globs))


def compression_of(path: str) -> str:
  """The suffix of a compressed file, ".gz" say; "" for another one."""
  suffix = os.path.splitext(path)[1].lower()
  return suffix if suffix in decompress.NAMES else ""


def chunks(path: str, read: Callable[[int], None] | None = None) -> Iterator[bytes]:
  """The bytes of a file, uncompressed, some at a time.

  Args:
    path: local, or remote where TensorFlow has the file system ("gs://...").
    read: called now and then with the number of bytes of the file that were read since the last
      call, compressed ones if it is compressed: together its size.

  Raises:
    ConfigError: what a .zst file needs is not installed.
    DataError: the file is missing, unreadable or damaged.
  """
  suffix = compression_of(path)
  done = 0
  try:
    # Python's own, where it will do: it reads twice as fast as that of TensorFlow.
    with tf.io.gfile.GFile(path, "rb") if "://" in path else open(path, "rb") as file:
      stream = decompress.open_stream(file, suffix) if suffix else file
      while data := stream.read(_CHUNK):
        if read is not None:
          # What decompresses reads ahead: the place in the file is not that in the data.
          now = file.tell()
          read(now - done)
          done = now
        yield data
      if read is not None:
        read(file.tell() - done)
  except ImportError as e:
    raise ConfigError(
      "files that end in .zst need the package zstandard: pip install zstandard; or uncompress them"
    ) from e
  except decompress.DamagedError as e:
    raise DataError(f"{path} is not a whole {decompress.NAMES[suffix]} file: {e}") from e
  except (OSError, tf.errors.OpError) as e:
    raise DataError(f"cannot read {path}: {e}") from e


def most_of_one(path: str) -> int | None:
  """Maximum bytes of one document or line of a compressed file; None if it is not compressed.

  Raises:
    DataError: the file is missing or unreadable.
  """
  if not compression_of(path):
    return None
  try:
    return decompress.most_of_one(tf.io.gfile.stat(path).length)
  except tf.errors.OpError as e:
    raise DataError(f"cannot read {path}: {e.message}") from e


def check_lines(path: str) -> None:
  """Checks the line lengths of a .gz file before tf.data reads it, which has no limit of its own.

  A small file is read, and one that says of itself that it becomes more than `most_of_one`. A
  larger one is what it says; the smallest cannot become so large.

  Raises:
    DataError: it has a line of more than `most_of_one` bytes; or is damaged.
  """
  most = most_of_one(path)
  assert most is not None
  with tf.io.gfile.GFile(path, "rb") as file:
    size = file.size()
    if size * _MOST_RATIO <= most:
      return
    if size > _SMALL:
      file.seek(size - 4)
      if struct.unpack("<I", file.read(4))[0] <= most:
        return
  line = 0
  for data in chunks(path):
    first = data.find(b"\n")
    line += len(data) if first < 0 else first
    if line > most:
      raise too_large(path, "a line", most)
    if first >= 0:
      # What is shorter than a chunk is no large line.
      line = len(data) - data.rfind(b"\n") - 1


def too_large(path: str, what: str, most: int) -> DataError:
  """The error for a document or line of a compressed file that is larger than `most_of_one`."""
  return DataError(
    f"{path}: {what} has more than {most:,} bytes, so much more than the compressed file that this "
    "is no text; if it is one, uncompress the file"
  )


def read_text_files(
  globs: str | Sequence[str], *, encoding: str | None = AS_BOUND, skip_bad_files: bool = False
) -> list[TextFile]:
  """Reads all files that match; see `find_files` and `read_text_file`.

  Args:
    globs: see `find_files`.
    encoding: of the text; by default that of `text_encoding`; None gives bytes.
    skip_bad_files: leave out files that are empty or undecodable, with a warning.

  Returns:
    The texts, sorted by path.

  Raises:
    DataError: no file matches; or a file is empty, undecodable or unreadable, unless
      `skip_bad_files`; or all are.
  """
  result, skipped = [], []
  for path in find_files(globs):
    try:
      result.append(read_text_file(path, encoding))
    except DataError as e:
      if not skip_bad_files:
        raise
      skipped.append(str(e))
  if skipped:
    _LOG.warning(
      "%d of %d text files are left out; the first: %s",
      len(skipped),
      len(skipped) + len(result),
      skipped[0],
    )
  if not result:
    raise DataError(f"none of the files {globs!r} can be used; the first: {skipped[0]}")
  return result


def read_text_file(path: str, encoding: str | None = AS_BOUND) -> TextFile:
  """Reads one file, uncompressing it if its name says so.

  Args:
    path: its path.
    encoding: of the text; by default that of `text_encoding`; None gives bytes.

  Returns:
    The text; line ends are kept as they are.

  Raises:
    DataError: the file is empty, unreadable, damaged, or holds bytes that are not in `encoding`; or
        it is a compressed one and has more than `most_of_one`.
  """
  most = most_of_one(path)
  parts, count = [], 0
  for part in chunks(path):
    parts.append(part)
    count += len(part)
    if most is not None and count > most:
      raise too_large(path, "it", most)
  data = b"".join(parts)
  del parts
  if not data:
    raise DataError(f"{path} is empty")
  if encoding is None:
    return TextFile(path, data)
  encoding = text_encoding() if encoding == AS_BOUND else text_encoding(encoding)
  try:
    return TextFile(path, data.decode(encoding))
  except UnicodeError as e:
    where = e.reason if isinstance(e, UnicodeDecodeError) else str(e)
    at = getattr(e, "start", 0)
    raise _no_text(path, encoding, data[at], at, where) from e


def _no_text(path: str, encoding: str, byte: int, offset: int, why: str) -> DataError:
  return DataError(
    f"{path} is not {encoding} text: byte 0x{byte:02x} at offset {offset} ({why}); give its "
    "encoding, such as --gin_param=\"text_encoding.encoding = 'latin-1'\", convert it, or leave "
    "it out"
  )


def text_line_dataset(globs: str | Sequence[str]) -> tf.data.Dataset:
  """The lines of all files that match (compressed ones too), as scalar strings of UTF-8.

  Of a divided input those of this part; see `input_shards.current`. Files of another encoding than
  UTF-8 (see `text_encoding`), and compressed ones but .gz, are read by Python, which a saved
  position in the data does not cover.

  Raises:
    DataError: no file matches. While the lines are read, by `records.reading`: one is not text.
  """
  return input_shards.current().of_files(find_files(globs), _lines_of_files)


def _lines_of_files(files: list[str]) -> tf.data.Dataset:
  encoding = text_encoding()
  # tf.data reads lines of bytes: in UTF-16, say, a line feed is two of them. It knows only gzip.
  by_python = any(compression_of(f) not in ("", ".gz") for f in files)
  if by_python or codecs.lookup(encoding).name != "utf-8":

    def lines() -> Iterator[bytes]:
      for path in files:
        text = read_text_file(path, encoding).text
        for line in text.removesuffix("\n").split("\n"):
          # TextLineDataset leaves out the "\r" of "\r\n", too.
          yield line.removesuffix("\r").encode()

    return tf.data.Dataset.from_generator(lines, output_signature=tf.TensorSpec([], tf.string))
  for path in files:
    _OPENED.pop(path, None)
    _OPENED[path] = None
  return _raw_lines(files).map(
    lambda line: tf.strings.unicode_transcode(line, "UTF-8", "UTF-8", errors="strict")
  )


def check_opened() -> None:
  """Raises `DataError` for the last opened file that is not UTF-8 text, whatever size.

  Files that cannot be read by now are left out: they failed, or will, with an error of their own.
  """
  for path in reversed(_OPENED):
    if tf.io.gfile.exists(path):
      with contextlib.suppress(_Unreadable):
        _check_utf_8(path)


class _Unreadable(Exception):
  """Internal."""


def _check_utf_8(path: str) -> None:
  rest, offset = b"", 0  # The beginning of a character, and its place.
  for part in itertools.chain(_readable(path), [b""]):
    data = rest + part
    try:
      data.decode("utf-8")
      end = len(data)
    except UnicodeDecodeError as e:
      if not part or e.end < len(data) or e.reason != "unexpected end of data":
        raise _no_text(path, "utf-8", data[e.start], offset + e.start, e.reason) from e
      end = e.start
    rest, offset = data[end:], offset + end


def _readable(path: str) -> Iterator[bytes]:
  try:
    yield from chunks(path)
  except DataError as e:
    raise _Unreadable from e


def _raw_lines(files: list[str]) -> tf.data.Dataset:
  gzipped = [f for f in files if f.endswith(".gz")]
  plain = [f for f in files if not f.endswith(".gz")]
  if not gzipped:
    return tf.data.TextLineDataset(plain)
  with futures.ThreadPoolExecutor() as pool:  # Decompression leaves the interpreter to others.
    list(pool.map(check_lines, gzipped))
  result = tf.data.TextLineDataset(gzipped, compression_type="GZIP")
  return tf.data.TextLineDataset(plain).concatenate(result) if plain else result
