"""The bytes of files that may be compressed, as their names say: .gz, .bz2, .xz and .zst."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, DataError

_CHUNK = 1 << 20
_NAMES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}

# What opens an open file as a stream of what was compressed, by suffix.
_OPENERS: dict[str, Callable[[Any], Any]] = {
  ".gz": lambda f: gzip.GzipFile(fileobj=f),
  ".bz2": bz2.BZ2File,
  ".xz": lzma.LZMAFile,
  ".zst": lambda f: _ZstdStream(f),
}


def suffix_of(path: str) -> str:
  """The suffix of a compressed file, ".gz" say; "" for another one."""
  suffix = os.path.splitext(path)[1].lower()
  return suffix if suffix in _OPENERS else ""


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
  suffix = suffix_of(path)
  done = 0
  try:
    # Python's own, where it will do: it reads twice as fast as that of TensorFlow.
    with tf.io.gfile.GFile(path, "rb") if "://" in path else open(path, "rb") as file:
      stream = _OPENERS[suffix](file) if suffix else file
      while data := stream.read(_CHUNK):
        if read is not None:
          # What decompresses reads ahead: the place in the file is not that in the data.
          now = file.tell()
          read(now - done)
          done = now
        yield data
      if read is not None:
        read(file.tell() - done)
  except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, _ZstdError) as e:
    raise DataError(f"{path} is not a whole {_NAMES[suffix]} file: {e}") from e
  except (OSError, tf.errors.OpError) as e:
    if suffix == ".bz2" and isinstance(e, OSError) and e.errno is None:  # Of damage, too.
      raise DataError(f"{path} is not a whole bzip2 file: {e}") from e
    raise DataError(f"cannot read {path}: {e}") from e


class _ZstdError(Exception):
  """A damaged file; that of zstandard may not be there to be caught."""


class _ZstdStream:
  """Reads what zstd compressed; the reader of zstandard takes a file that was cut for a whole one.

  Args:
    file: has `read`.
  """

  def __init__(self, file: Any):
    self._zstandard = zstandard_module()
    self._file = file
    self._frame: Any = None

  def read(self, size: int) -> bytes:
    """About `size` bytes or more; none at the end."""
    found: list[bytes] = []
    count = 0
    while count < size:
      data = self._file.read(size // 8)
      if not data:
        if self._frame is not None:
          raise _ZstdError("it ends within a frame")
        break
      while data:  # A file may be several frames, one after the other.
        if self._frame is None:
          self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        try:
          found.append(self._frame.decompress(data))
        except self._zstandard.ZstdError as e:
          raise _ZstdError(str(e)) from e
        count += len(found[-1])
        data = b""
        if self._frame.eof:
          data, self._frame = self._frame.unused_data, None
    return b"".join(found)


def zstandard_module() -> ModuleType:
  """The package zstandard; `ConfigError` if it is not installed."""
  try:
    import zstandard
  except ImportError as e:
    raise ConfigError(
      "files that end in .zst need the package zstandard: pip install zstandard; or uncompress them"
    ) from e
  return zstandard
