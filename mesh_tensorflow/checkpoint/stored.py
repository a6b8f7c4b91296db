"""Entries that TensorFlow stored in the files of a checkpoint, and a check that they are readable.

For checkpoints without a manifest: with each tensor, and each slice of one, TensorFlow keeps a
checksum, which it compares when it reads all of that.
"""

from __future__ import annotations

import dataclasses
import math
import re

import tensorflow as tf

from mesh_tensorflow.checkpoint import reader

# "key (DT_FLOAT) [2,3]", where the key may have any bytes.
_LINE = re.compile(rb"(.*?) \(DT_\w+\) \[([\d,]*)\]\n", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Stored:
  """A tensor, or a slice of one, as it lies in the data files.

  Attributes:
    key: its key in the checkpoint's index.
    dtype: dtype of its values.
    num_bytes: size of the values; 0 for strings, whose size is unknown.
  """

  key: bytes
  dtype: tf.DType
  num_bytes: int


def stored_in(path: str) -> list[Stored]:
  """Lists all entries of a checkpoint: tensors, and slices of tensors.

  Raises:
    DamagedCheckpointError: the index cannot be read, or a data file is missing or too short.
  """
  dtypes = {name: spec.dtype for name, spec in reader.contents(path).items()}
  result = []
  for key, shape in _LINE.findall(tf.train.load_checkpoint(path).debug_string()):
    dtype = dtypes[_name_in(key)]
    num_elements = math.prod(int(n) for n in shape.split(b",") if n)
    result.append(Stored(key, dtype, 0 if dtype == tf.string else num_elements * dtype.size))
  return result


def _name_in(key: bytes) -> str:
  """Tensor name in an entry's key; a slice's key is byte 0, the name, bytes 0 and 1, its place."""
  return (key[1 : key.index(b"\0\1", 1)] if key.startswith(b"\0") else key).decode()


def check(path: str, stored: list[Stored]) -> None:
  """Checks that tensors and slices can be read, by reading each whole.

  In memory there are at most `reader.READ_AT_ONCE` bytes at once, or one tensor that is larger.

  Args:
    path: a checkpoint.
    stored: the entries to read.

  Raises:
    DamagedCheckpointError: something cannot be read.
  """
  for group in reader.groups(stored, lambda s: s.num_bytes):
    reader.restore_v2(path, [(s.key, "", s.dtype) for s in group])
