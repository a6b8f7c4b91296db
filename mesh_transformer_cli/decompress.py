"""Compressed files (.gz, .bz2, .xz, .zst), read in pieces of a bounded size."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

NAMES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}

# Bytes read from a file at once, and bytes decompressed at once.
_INPUT, _OUTPUT = 1 << 16, 1 << 20
# Memory limit of a decompressor, in bytes: the default of zstd's own, and twice what `xz -9` needs.
_MOST_MEMORY = (1 << 27) + (1 << 20)
# A block of zstd has four bytes at least, and becomes 128 KiB at most: 16 MiB come of so many.
_ZSTD_INPUT = 512

# Maximum bytes of a document, or line, of a compressed file: _LARGEST, or _TIMES the file's size if
# that is more. No text is compressed to less.
_LARGEST, _TIMES = 1 << 25, 64


class DamagedError(Exception):
  """A file is truncated, or not of the format that its suffix says."""


def most_of_one(size: int) -> int:
  """Maximum bytes of one document in a compressed file of `size` bytes (against zip bombs)."""
  return max(_LARGEST, _TIMES * size)


class Reads(Protocol):
  """Structural type: what bytes are read from."""

  def read(self, size: int, /) -> bytes: ...


def open_stream(file: Reads, suffix: str) -> io.BufferedIOBase:
  """Opens a stream of the decompressed content; it raises `DamagedError` at a damaged place.

  Args:
    file: the compressed file, open for reading bytes; needs `read` only.
    suffix: suffix of the file's name, one of `NAMES`.

  Raises:
    ImportError: zstandard is not installed.
  """
  return io.BufferedReader(_Pieces(_STREAMS[suffix](file)), _INPUT)


class _Pieces(io.RawIOBase):
  """A raw stream of what the `read` of a decompressor below returns."""

  def __init__(self, source: Reads):
    self._source = source
    self._left = memoryview(b"")

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    if not self._left:
      try:
        self._left = memoryview(self._source.read(_OUTPUT))
      except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as e:
        raise DamagedError(str(e)) from e
    count = min(len(self._left), len(buffer))
    buffer[:count], self._left = self._left[:count], self._left[count:]
    return count


class _Frames:
  """Reads the concatenated streams, or frames, of a compressed file.

  Args:
    file: has `read`.
    start: makes what decompresses one of them: with `decompress(data, max_length)`, `needs_input`,
      `eof` and `unused_data`, as those of Python's bz2 and lzma.
    errors: exceptions that `decompress` raises for damaged data.
    padding: a byte that may stand behind each.
  """

  def __init__(
    self,
    file: Reads,
    start: Callable[[], Any],
    errors: tuple[type[Exception], ...],
    padding: bytes = b"",
  ):
    self._file, self._start, self._errors, self._padding = file, start, errors, padding
    self._frame: Any = None
    self._data = b""

  def read(self, size: int) -> bytes:
    """Returns up to about `size` decompressed bytes; b"" at the end."""
    while True:
      if self._frame is None:
        self._data = self._data.lstrip(self._padding) if self._padding else self._data
        self._data = self._data or self._file.read(_INPUT)
        if not self._data:
          return b""
        if self._padding and not self._data.strip(self._padding):
          self._data = b""
          continue
        self._frame = self._start()
      elif self._frame.needs_input and not self._data:
        self._data = self._file.read(_INPUT)
        if not self._data:
          raise DamagedError("it ends before its end: it was cut")
      data, self._data = self._data, b""
      try:
        found: bytes = self._frame.decompress(data, size)
      except self._errors as e:
        raise DamagedError(str(e)) from e
      if self._frame.eof:
        self._data, self._frame = self._frame.unused_data, None
      if found:
        return found


class _ZstdFrame:
  """A frame of zstd, as `_Frames` wants it: it is given a few blocks at once."""

  def __init__(self) -> None:
    self._frame = zstandard_module().ZstdDecompressor().decompressobj()
    self._left = memoryview(b"")
    self.eof = False
    self.unused_data = b""

  @property
  def needs_input(self) -> bool:
    return not self._left

  def decompress(self, data: bytes, size: int) -> bytes:
    del size  # The output of a few blocks is bounded.
    if data:
      self._left = memoryview(data)
    piece, self._left = self._left[:_ZSTD_INPUT], self._left[_ZSTD_INPUT:]
    found: bytes = self._frame.decompress(piece)
    if self._frame.eof:
      self.eof = True
      self.unused_data = self._frame.unused_data + bytes(self._left)
    return found


def zstandard_module() -> ModuleType:
  """The package zstandard, which is imported where it is needed first."""
  import zstandard

  return zstandard


def _zstd(file: Reads) -> _Frames:
  return _Frames(file, _ZstdFrame, (zstandard_module().ZstdError, MemoryError))


def _xz(file: Reads) -> _Frames:
  def start() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_AUTO, memlimit=_MOST_MEMORY)

  return _Frames(file, start, (lzma.LZMAError, EOFError, MemoryError), padding=b"\0")


def _bz2(file: Reads) -> _Frames:
  return _Frames(file, bz2.BZ2Decompressor, (OSError, ValueError, EOFError))


_STREAMS: dict[str, Callable[[Any], Any]] = {
  ".gz": lambda f: gzip.GzipFile(fileobj=f),
  ".bz2": _bz2,
  ".xz": _xz,
  ".zst": _zstd,
}
