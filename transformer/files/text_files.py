"""Finds and reads text files, and says clearly what is wrong with them."""

from __future__ import annotations

import dataclasses
import glob as python_glob
import gzip
import logging
import os
import zlib
from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.files import input_shards

_LOG = logging.getLogger("mesh_tensorflow")


@dataclasses.dataclass(frozen=True)
class TextFile:
  """One text.

  Attributes:
    path: where it was read.
    text: str; bytes if it was read without an encoding.
  """

  path: str
  text: str | bytes


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
  return sorted(found)


def in_folder(folder: str, globs: str | Sequence[str]) -> str | list[str]:
  """Globs that are relative to a folder; "~" is the home folder, and absolute ones stay."""
  if not isinstance(globs, (str, os.PathLike)):
    return [os.path.join(folder, os.fspath(g)) for g in globs]
  return os.path.join(folder, os.fspath(globs))


def read_text_files(
  globs: str | Sequence[str], *, encoding: str | None = "utf-8", skip_bad_files: bool = False
) -> list[TextFile]:
  """Reads all files that match; see `find_files` and `read_text_file`.

  Args:
    globs: see `find_files`.
    encoding: of the text; None gives bytes.
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


def read_text_file(path: str, encoding: str | None = "utf-8") -> TextFile:
  """Reads one file, uncompressing it if its name ends in ".gz".

  Args:
    path: its path.
    encoding: of the text; None gives bytes.

  Returns:
    The text; line ends are kept as they are.

  Raises:
    DataError: the file is empty, unreadable, damaged, or holds bytes that are not in `encoding`.
  """
  try:
    with tf.io.gfile.GFile(path, "rb") as f:
      data = f.read()
    if path.endswith(".gz"):
      data = gzip.decompress(data)
  except (EOFError, zlib.error, gzip.BadGzipFile) as e:
    raise DataError(f"{path} is not a whole gzip file: {e}") from e
  except (OSError, tf.errors.OpError) as e:
    raise DataError(f"cannot read {path}: {e}") from e
  if not data:
    raise DataError(f"{path} is empty")
  if encoding is None:
    return TextFile(path, data)
  try:
    return TextFile(path, data.decode(encoding))
  except UnicodeDecodeError as e:
    raise DataError(
      f"{path} is not {encoding} text: byte 0x{data[e.start]:02x} at offset {e.start} "
      f"({e.reason}); give its encoding, convert it, or leave it out"
    ) from e
  except LookupError as e:
    raise ConfigError(f"unknown text encoding {encoding!r}") from e


def text_line_dataset(globs: str | Sequence[str]) -> tf.data.Dataset:
  """The lines of all files that match (.gz ones uncompressed), as scalar strings.

  Of a divided input those of this part; see `input_shards.current`.

  Raises:
    DataError: no file matches.
  """
  return input_shards.current().of_files(find_files(globs), _lines_of_files)


def _lines_of_files(files: list[str]) -> tf.data.Dataset:
  compressed = [f for f in files if f.endswith(".gz")]
  plain = [f for f in files if not f.endswith(".gz")]
  if not compressed:
    return tf.data.TextLineDataset(plain)
  result = tf.data.TextLineDataset(compressed, compression_type="GZIP")
  return tf.data.TextLineDataset(plain).concatenate(result) if plain else result
