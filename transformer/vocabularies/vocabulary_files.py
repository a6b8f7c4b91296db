"""Vocabulary files, of which a reader sees all or nothing."""

from __future__ import annotations

import os
import socket

import tensorflow as tf

from mesh_tensorflow import errors


def write_whole_file(filename: str, content: bytes) -> None:
  """Writes a file so that a reader sees all of it or nothing, whoever else writes it meanwhile.

  Args:
    filename: its path; its folder is made.
    content: what becomes of it.

  Raises:
    errors.ConfigError: it cannot be written.
  """
  # Processes of several machines may have the same number.
  temporary = f"{filename}.tmp-{socket.gethostname()}-{os.getpid()}"
  try:
    if os.path.dirname(filename):
      tf.io.gfile.makedirs(os.path.dirname(filename))
    try:
      with tf.io.gfile.GFile(temporary, "wb") as f:
        f.write(content)
      tf.io.gfile.rename(temporary, filename, overwrite=True)
    finally:
      if tf.io.gfile.exists(temporary):
        tf.io.gfile.remove(temporary)
  except tf.errors.OpError as e:
    raise errors.ConfigError(
      f"cannot write the vocabulary file {filename} ({e.message}): give another filename, or the "
      "right to write there"
    ) from e
