"""The bytes of files that may be compressed, as their names say: .gz, .bz2, .xz and .zst."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, DataError
from mesh_transformer_cli import decompress

_CHUNK = 1 << 20
_SMALL = 1 << 20
_MOST_RATIO = 1032  # Of deflate: what it packs into one byte at best.


def suffix_of(path: str) -> str:
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
  suffix = suffix_of(path)
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
  if not suffix_of(path):
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
