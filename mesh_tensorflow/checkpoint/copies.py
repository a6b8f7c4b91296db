"""Values to save: which worker writes them, and snapshots if variables change meanwhile."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint import keeping, reader, snapshot, writer
from mesh_tensorflow.checkpoint.restoring import EXTRA, GLOBAL_STEP
from mesh_tensorflow.checkpoint.snapshot import Piece, Spool, pieces_of, whole_piece
from mesh_tensorflow.errors import CheckpointError, StorageError
from mesh_tensorflow.meshes.store import StoredVariable

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
    if not in_background or self._in_memory or size <= snapshot.TRANSFER_BUFFER:
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
