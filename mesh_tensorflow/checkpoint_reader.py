"""Reads checkpoints: what is in them, and slices of it into variables."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from mesh_tensorflow import checkpoint_files, workers
from mesh_tensorflow.checkpoint_files import damaged
from mesh_tensorflow.store import StoredVariable

# Bytes that one read operation brings into host memory.
_READ_AT_ONCE = 64 * 2**20


def contents(path: str) -> dict[str, tf.TensorSpec]:
  """Shape and dtype of every tensor in a checkpoint, by name.

  Args:
    path: a checkpoint.

  Returns:
    A dict of tf.TensorSpec.

  Raises:
    DamagedCheckpointError: the index cannot be read, or a data file is missing or too short.
  """
  try:
    reader = tf.train.load_checkpoint(path)
    dtypes = reader.get_variable_to_dtype_map()
    shapes = reader.get_variable_to_shape_map()
  except Exception as e:  # noqa: BLE001 - the reader raises errors of no documented type.
    raise damaged(path, f"cannot read {path}.index: {e}") from e
  files = checkpoint_files.data_files(path)
  there = sum(tf.io.gfile.stat(f).length for f in files)
  # Strings have no fixed size, so this is a lower limit; a read finds other damage.
  needed = sum(_num_bytes(s, dtypes[n]) for n, s in shapes.items() if dtypes[n] != tf.string)
  if there < needed:
    raise damaged(path, f"{', '.join(files)} truncated, {there} bytes of {needed}")
  return {n: tf.TensorSpec(shapes[n], dtypes[n], n) for n in sorted(shapes)}


def host_device() -> str:
  """Where checkpoints are read and written."""
  return workers.host_device() if workers.current().size > 1 else "CPU:0"


def slice_spec(stored: StoredVariable, begin: tuple[int, ...]) -> str:
  """The slice in the notation of SaveV2: "4 8 0,2:4,4"; "" for the whole variable."""
  shape = stored.shape.to_integer_list
  if list(stored.slice_shape) == shape:
    return ""
  ranges = ":".join(f"{b},{n}" for b, n in zip(begin, stored.slice_shape))
  return f"{' '.join(map(str, shape))} {ranges}"


def read_slices(path: str, requests: list[tuple[str, str, tf.DType, list[tf.Variable]]]) -> None:
  """Reads slices and assigns them to variables, cast to their dtypes.

  Args:
    path: a checkpoint.
    requests: for each slice its name, slice spec, and dtype in the checkpoint, and the variables
      that hold it; the list is emptied.

  Raises:
    DamagedCheckpointError: a part of it cannot be read.
  """
  while requests:
    group, size = [], 0
    while requests:
      *_, dtype, variables = requests[0]
      size += _num_bytes(variables[0].shape, dtype)
      if group and size > _READ_AT_ONCE:
        break
      group.append(requests.pop(0))
    try:
      with tf.device(host_device()):
        values = tf.raw_ops.RestoreV2(
          prefix=path,
          tensor_names=[name for name, *_ in group],
          shape_and_slices=[spec for _, spec, *_ in group],
          dtypes=[dtype for _, _, dtype, _ in group],
        )
    except tf.errors.OpError as e:
      files = ", ".join(checkpoint_files.data_files(path))
      raise damaged(path, f"cannot read {files}: {e.message}") from e
    for (*_, variables), value in zip(group, values):
      for v in variables:
        with tf.device(v.device):
          v.assign(tf.cast(value, v.dtype))


def _num_bytes(shape: Iterable[int], dtype: tf.DType) -> int:
  return int(np.prod(list(shape), dtype=np.int64)) * dtype.size
