"""Files that others wrote, read carefully: never more of them than is sensible."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from mesh_transformer_cli import untrusted

# Maximum bytes of a file that is read as a whole: far more than such files have.
MOST_BYTES = 1 << 26


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
  """The content of a small file.

  Args:
    path: local, or remote where TensorFlow has the file system ("gs://...").
    most: bytes.

  Raises:
    tf.errors.OpError: it cannot be read.
    JsonError: it is larger.
  """
  with tf.io.gfile.GFile(os.fspath(path), "rb") as f:
    content: bytes = f.read(most + 1)
  untrusted.check_size(content, most)
  return content


def read_json(
  path: str | os.PathLike[str],
  shape: Any = object,
  *,
  most: int = MOST_BYTES,
  finite: bool = True,
  values: int = untrusted.MOST_VALUES,
) -> Any:
  """The value of a file of JSON.

  Args:
    path: path of a small file; see `read_bytes`.
    shape: expected form of the value; see `untrusted.expect`.
    most: bytes.
    finite: see `untrusted.parse`.
    values: see `untrusted.parse`.

  Raises:
    tf.errors.OpError: it cannot be read.
    JsonError: it is no JSON, too large, or of another form; it is a `ValueError`.
  """
  value = untrusted.parse(read_bytes(path, most), finite=finite, values=values)
  return untrusted.expect(value, shape)
