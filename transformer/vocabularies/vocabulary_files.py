"""Atomic writing of vocabulary files."""

from __future__ import annotations

import os

import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.checkpoint import folder, writer


def write_whole_file(filename: str, content: bytes) -> None:
  """Writes a file atomically, also with several concurrent writers.

  Args:
    filename: its path; its folder is made.
    content: what becomes of it.

  Raises:
    errors.StorageError: it cannot be written.
  """
  try:
    folder.write(os.path.dirname(filename), filename, content)
  except (tf.errors.OpError, OSError) as e:
    raise errors.StorageError(
      f"cannot write the vocabulary file {filename} ({writer.reason(e)}): give another filename, "
      "or the right to write there"
    ) from e
