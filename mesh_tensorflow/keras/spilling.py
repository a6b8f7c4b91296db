"""Whole values of weights in a temporary file, until their slices are made.

Weights that are loaded before the first step have no slices yet. Each of several processes would
hold all of them whole, also those slices that are never its own.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import weakref
import zlib

import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers

_LOG = logging.getLogger("mesh_tensorflow")
_LOCK = threading.Lock()


class _File:
  """A file without a name, which is gone with the last value in it, or with the process."""

  def __init__(self) -> None:
    self.file = tempfile.TemporaryFile(prefix="mtf-keras-")  # noqa: SIM115 - closed with the last.
    self.size = 0


# The one that is written to; weak, as values hold it.
_CURRENT: weakref.WeakSet[_File] = weakref.WeakSet()


def is_wanted() -> bool:
  """True if there are several processes: one alone has all slices soon, which take as much."""
  return workers.current().size > 1


class Spilled:
  """A value in a temporary file, or in memory if it cannot be written; a call reads it.

  The file is in the folder that `tempfile` chooses (TMPDIR), with those of other weights.

  Args:
    value: the value.

  Attributes:
    digest: CRC-32 of the value.
  """

  def __init__(self, value: tf.Tensor):
    array = np.ascontiguousarray(value.numpy())
    data = array.reshape(-1).view(np.uint8).data
    self.digest = zlib.crc32(data)
    self._shape, self._dtype = array.shape, array.dtype
    self._value: tf.Tensor | None = None
    try:
      with _LOCK:
        found = next(iter(_CURRENT), None) or _File()
        _CURRENT.add(found)
        found.file.seek(found.size)
        found.file.write(data)
        found.file.flush()
        self._file, self._offset = found, found.size
        found.size += len(data)
    except OSError as e:
      _LOG.warning(
        "mtf.keras: a weight of %d MiB stays in memory until the first step, as it cannot be "
        "written into a temporary file: %s",
        *(len(data) >> 20, e),
      )
      self._value = value

  def __call__(self) -> tf.Tensor:
    """The value."""
    if self._value is not None:
      return self._value
    array = np.empty(self._shape, self._dtype)
    with _LOCK:
      self._file.file.seek(self._offset)
      self._file.file.readinto(array.reshape(-1).view(np.uint8).data)
    return tf.convert_to_tensor(array)
