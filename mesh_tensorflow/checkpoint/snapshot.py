"""Snapshots of the values of a save: who writes which, and held in memory or in a local file."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint import keeping, reader, writer
from mesh_tensorflow.checkpoint.restoring import EXTRA, GLOBAL_STEP
from mesh_tensorflow.errors import CheckpointError, StorageError
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
    value: its value, on the host.
    spool: takes the value; None: it stays in memory.

  Raises:
    OSError: there is no room in the spool.
  """
  # A tensor's values lie row after row, and so does each part of it.
  start = None if spool is None else spool.append(np.asarray(value))
  whole = stored.shape.to_integer_list
  limit = TRANSFER_BUFFER // _PIECES_OF_A_BUFFER
  parts = split_block(stored.slice_shape, value.dtype.size, limit)
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


_LOG = logging.getLogger("mesh_tensorflow")

# A slice that this worker writes: name, variable, offset, and what has the value.
_Owned = tuple[str, StoredVariable, tuple[int, ...], tf.Variable]


class Copies:
  """Takes the values of saves; keeps the temporary file, which they share.

  Args:
    directory: folder of the checkpoints.
    in_memory: keep the values in memory, not in a file.
    snapshot_directory: of the temporary file; None for the folder of the checkpoints, or the
      system's for such files if the checkpoints are in a remote store.
  """

  def __init__(self, directory: str, in_memory: bool, snapshot_directory: str | None):
    self._directory = directory
    self._in_memory = in_memory
    self._snapshot_directory = snapshot_directory
    self.spool: Spool | None = None

  def take(
    self,
    variables: Mapping[str, StoredVariable],
    step: int,
    extra: Mapping[str, Any],
    in_background: bool,
  ) -> tuple[list[Piece], bool]:
    """Takes a snapshot of the slices that this worker writes.

    Args:
      variables: all, by name.
      step: the number of steps done.
      extra: what else goes into the checkpoint, by name; the chief writes it.
      in_background: whether the variables shall be free to change.

    Returns:
      The pieces, and whether the variables may change while they are written: `in_background`, or
      False where there is no room for a copy.

    Raises:
      CheckpointError: the variable `global_step` says another step.
    """
    owned = _owned(variables, step)
    size = sum(v.shape.num_elements() * v.dtype.size for *_, v in owned)
    # A copy that one write would take into memory at once anyway needs no file.
    if not in_background or self._in_memory or size <= TRANSFER_BUFFER:
      pieces = _pieces(owned, in_background, None)
    else:
      try:
        self.spool = self.spool or self._new_spool(size, keeping.needed_bytes(variables.values()))
        self.spool.begin(size)
        pieces = _pieces(owned, in_background, self.spool)
      except (OSError, StorageError) as e:
        _LOG.warning(
          "no copy of the values of step %d can be made in %s: %s; the training waits until its "
          "checkpoint is written",
          step,
          self._folder(),
          writer.reason(e),
        )
        self.close()
        in_background = False
        pieces = _pieces(owned, in_background, None)
    if workers.current().is_chief:
      with tf.device(reader.host_device()):
        pieces.append(whole_piece(GLOBAL_STEP, tf.constant(step, tf.int64)))
        for name, value in extra.items():
          value = tf.constant(value.numpy() if tf.is_tensor(value) else value)
          pieces.append(whole_piece(EXTRA + name, value))
    return pieces, in_background

  def _new_spool(self, size: int, needed: int) -> Spool:
    """A temporary file that leaves enough room for the checkpoint.

    Args:
      size: bytes that it is to hold.
      needed: bytes of the checkpoint.

    Raises:
      StorageError: there is no room for both.
    """
    place = self._folder()
    free = keeping.free_bytes(place)
    if free is not None and "://" not in self._directory:
      is_beside = os.stat(place).st_dev == os.stat(self._directory).st_dev
      if is_beside and free < size + needed:
        raise StorageError("there is no room for it beside the checkpoint")
    return Spool(place)

  def close(self) -> None:
    """Removes the temporary file, if there is one."""
    if self.spool is not None:
      self.spool.close()
      self.spool = None

  def _folder(self) -> str:
    """Directory of the temporary file that holds a snapshot."""
    if self._snapshot_directory:
      return self._snapshot_directory
    return tempfile.gettempdir() if "://" in self._directory else self._directory


def _owned(variables: Mapping[str, StoredVariable], step: int) -> list[_Owned]:
  """The slices that this worker writes."""
  owned: list[_Owned] = []
  for name, stored in variables.items():
    if name != GLOBAL_STEP:
      owned += [(name, stored, begin, v) for begin, v in stored.owned(workers.current().index)]
      continue
    now = int(stored.slices[0].numpy())
    if now != step:
      raise CheckpointError(f"save(step={step}): the variable global_step is {now}")
  return owned


def _pieces(owned: Sequence[_Owned], in_background: bool, spool: Spool | None) -> list[Piece]:
  """Pieces to write of this worker's slices; copied, or in the spool, if `in_background`."""
  pieces = []
  for name, stored, begin, variable in owned:
    # On CPUs it shares the buffer; a later update of the variable works on a copy.
    value = variable.read_value()
    if in_background and spool is None:
      with tf.device(reader.host_device()):
        value = tf.identity(value)
    pieces += pieces_of(name, stored, begin, value, spool)
  return pieces
