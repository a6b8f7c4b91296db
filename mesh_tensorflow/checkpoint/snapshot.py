"""The values of a save, held until they are written: in memory, or in a file on a local disk.

Variables go on changing while a checkpoint is written in the background. What is held in memory
must then be copied, up to the size of all slices. A copy in a file is the operating system's to
keep: it goes to its page cache as fast as memory is copied, and to the disk when memory is wanted.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from mesh_tensorflow.checkpoint import reader
from mesh_tensorflow.meshes.store import StoredVariable, split_block

# Bytes that one write operation takes.
TRANSFER_BUFFER = 64 * 2**20

# A slice in a checkpoint has at most this part of a buffer: nobody has to read more at once, and it
# is in memory twice when TensorFlow gets it. A larger slice of a device becomes several.
_PIECES_OF_A_BUFFER = 4


class Spool:
  """Values in a temporary file without a name, which disappears with the process.

  Saves that follow one another use the same file: memory that the system's cache has for it already
  is copied to several times faster than new memory, and a save needs the room on the disk anyway.

  Args:
    directory: where to put it.

  Raises:
    OSError: there is no room, as from all methods.
  """

  def __init__(self, directory: str):
    self._file = tempfile.TemporaryFile(dir=directory, buffering=0)
    self._size = 0

  def begin(self, num_bytes: int) -> None:
    """Clears the file, and reserves `num_bytes` bytes on the disk."""
    self._file.seek(0)
    self._size = 0
    # Notices at once that there is no room, and makes writing faster.
    os.posix_fallocate(self._file.fileno(), 0, num_bytes)

  def append(self, array: np.ndarray) -> int:
    """Appends an array to the file; returns its offset in bytes."""
    begin = self._size
    # As bytes: NumPy gives no buffer of bfloat16.
    left = array.reshape(-1).view(np.uint8).data
    while left:
      # A file without a buffer may take less than all; Linux never takes more than 2 GB at once.
      written = self._file.write(left)
      left = left[written:]
      self._size += written
    return begin

  def read(self, begin: int, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """The values that begin there."""
    array = np.empty(shape, dtype.as_numpy_dtype)
    left = array.reshape(-1).view(np.uint8).data
    while left:
      count = os.preadv(self._file.fileno(), [left], begin)
      if not count:
        raise OSError(f"the copy of the values to save ends at byte {begin}")
      left = left[count:]
      begin += count
    return tf.constant(array)

  def close(self) -> None:
    """Removes the file."""
    self._file.close()


@dataclasses.dataclass
class Piece:
  """A tensor that is written as one slice of a variable.

  Attributes:
    name: name of the variable.
    spec: the slice, as `reader.slice_spec` writes it.
    dtype: the dtype to write it in.
    held: the tensor that has it; or, if it is in a `Spool`, that and where; None once written.
    held_dtype: the dtype it is held in.
    part: (offset, size) in the tensor; None: all of it.
    size: its shape.
  """

  name: str
  spec: str
  dtype: tf.DType
  held: tf.Tensor | tuple[Spool, int] | None
  held_dtype: tf.DType
  part: tuple[list[int], list[int]] | None
  size: list[int]

  @property
  def num_bytes(self) -> int:
    """Bytes of the value, strings not counted."""
    return 0 if self.held_dtype == tf.string else math.prod(self.size) * self.held_dtype.size

  def value(self) -> tf.Tensor:
    """The tensor to write, in `dtype`; read from the spool if it is there."""
    if isinstance(self.held, tuple):
      spool, begin = self.held
      value = spool.read(begin, self.size, self.held_dtype)
    else:
      value = tf.slice(self.held, *self.part) if self.part else self.held
    return value if value.dtype == self.dtype else tf.cast(value, self.dtype)

  def release(self) -> None:
    """Frees the value."""
    self.held = None


def pieces_of(
  name: str, stored: StoredVariable, begin: Sequence[int], value: tf.Tensor, spool: Spool | None
) -> list[Piece]:
  """The pieces of one slice of a variable.

  Args:
    name: name of the variable in the checkpoint.
    stored: the variable.
    begin: offset of the slice.
    value: its value, without padding, on the host.
    spool: takes the value; None: it stays in memory.

  Raises:
    OSError: there is no room in the spool.
  """
  # A tensor's values lie row after row, and so does each part of it.
  start = None if spool is None else spool.append(np.asarray(value))
  whole = stored.shape.to_integer_list
  limit = TRANSFER_BUFFER // _PIECES_OF_A_BUFFER
  parts = split_block(stored.extent(begin), value.dtype.size, limit)
  pieces = []
  for offset, size in parts:
    at = [b + o for b, o in zip(begin, offset)]
    spec = reader.slice_spec(name, whole, at, size)
    held = value if start is None else (spool, start)
    part = (offset, size) if len(parts) > 1 else None
    piece = Piece(name, spec, stored.master_dtype, held, value.dtype, part, size)
    pieces.append(piece)
    if start is not None:
      start += piece.num_bytes
  return pieces


def whole_piece(name: str, value: tf.Tensor) -> Piece:
  """A tensor of its own, as one piece."""
  return Piece(name, "", value.dtype, value, value.dtype, None, value.shape.as_list())


def groups(pieces: Sequence[Piece]) -> list[list[Piece]]:
  """The pieces in groups to write at once, each of at most `TRANSFER_BUFFER` bytes."""
  result: list[list[Piece]] = []
  size = 0
  for piece in pieces:
    if not result or size + piece.num_bytes > TRANSFER_BUFFER:
      result.append([])
      size = 0
    result[-1].append(piece)
    size += piece.num_bytes
  return result
