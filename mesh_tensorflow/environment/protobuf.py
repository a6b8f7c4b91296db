"""Serialized protocol buffers, read without their generated classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def fields(message: Any) -> Iterator[tuple[int, Any]]:
  """Number and value of each field of a protocol buffer, as it is encoded.

  Args:
    message: its bytes; a memoryview is not copied.
  """
  i = 0
  while i < len(message):
    key, i = _varint(message, i)
    kind = key & 7
    if kind == 0:
      value, i = _varint(message, i)
    else:
      size, i = _varint(message, i) if kind == 2 else ({1: 8, 5: 4}[kind], i)
      value, i = message[i : i + size], i + size
    yield key >> 3, value


def _varint(message: Any, i: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    byte = message[i]
    value, i, shift = value | (byte & 127) << shift, i + 1, shift + 7
    if byte < 128:
      return value, i
