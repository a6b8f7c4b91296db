"""Reads checkpoints: what is in them, whether they are whole, and slices into variables."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from mesh_tensorflow import checkpoint_files
from mesh_tensorflow.checkpoint_files import latest_checkpoint
from mesh_tensorflow.errors import CheckpointError
from mesh_tensorflow.store import StoredVariable

# Bytes that one read operation brings into host memory.
_READ_AT_ONCE = 128 * 2**20


def resolve(path: str) -> str:
  """The checkpoint that a path means: itself, its index file, or the newest one in a folder.

  Raises:
    CheckpointError: there is none.
  """
  path = os.fspath(path)
  if path.endswith(".index"):
    path = path[: -len(".index")]
  if tf.io.gfile.exists(path + ".index"):
    return path
  if tf.io.gfile.isdir(path):
    latest = latest_checkpoint(path)
    if latest is None:
      raise CheckpointError(f"there is no checkpoint in {path}")
    return latest
  directory = os.path.dirname(path) or "."
  if not tf.io.gfile.isdir(directory):
    raise CheckpointError(f"there is no checkpoint {path}: there is no folder {directory}")
  raise CheckpointError(
    f"there is no checkpoint {path}: {path}.index is missing; {checkpoint_files.advice(directory)}"
  )


def describe(path: str) -> dict[str, tf.TensorSpec]:
  """Shape and dtype of every tensor in a checkpoint, by name; also checks that its files are whole.

  Args:
    path: as `resolve` takes it.

  Returns:
    A dict of tf.TensorSpec.

  Raises:
    CheckpointError: there is no such checkpoint, or a file is missing, truncated, or damaged.
  """
  path = resolve(path)
  directory = os.path.dirname(path) or "."
  try:
    reader = tf.train.load_checkpoint(path)
    dtypes = reader.get_variable_to_dtype_map()
    shapes = reader.get_variable_to_shape_map()
  except Exception as e:  # noqa: BLE001 - the reader raises errors of no documented type.
    raise CheckpointError(
      f"checkpoint {path} is damaged: cannot read {path}.index: {e}; "
      f"{checkpoint_files.advice(directory, path)}"
    ) from e
  files = checkpoint_files.data_files(path)
  there = sum(tf.io.gfile.stat(f).length for f in files)
  # Strings have no fixed size, so this is a lower limit; a read finds other damage.
  needed = sum(_num_bytes(s, dtypes[n]) for n, s in shapes.items() if dtypes[n] != tf.string)
  if there < needed:
    raise CheckpointError(
      f"checkpoint {path} is damaged: {', '.join(files)} truncated, {there} bytes of {needed}; "
      f"{checkpoint_files.advice(directory, path)}"
    )
  return {n: tf.TensorSpec(shapes[n], dtypes[n], n) for n in sorted(shapes)}


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
    CheckpointError: the checkpoint is damaged.
  """
  while requests:
    group, size = [], 0
    while requests and (not group or size < _READ_AT_ONCE):
      group.append(requests.pop(0))
      *_, dtype, variables = group[-1]
      size += _num_bytes(variables[0].shape, dtype)
    try:
      with tf.device("CPU:0"):
        values = tf.raw_ops.RestoreV2(
          prefix=path,
          tensor_names=[name for name, *_ in group],
          shape_and_slices=[spec for _, spec, *_ in group],
          dtypes=[dtype for _, _, dtype, _ in group],
        )
    except tf.errors.OpError as e:
      files = ", ".join(checkpoint_files.data_files(path))
      raise CheckpointError(
        f"checkpoint {path} is damaged: cannot read {files}: {e.message}; "
        f"{checkpoint_files.advice(os.path.dirname(path) or '.', path)}"
      ) from e
    for (*_, variables), value in zip(group, values):
      for v in variables:
        with tf.device(v.device):
          v.assign(tf.cast(value, v.dtype))


def _num_bytes(shape: Iterable[int], dtype: tf.DType) -> int:
  return int(np.prod(list(shape), dtype=np.int64)) * dtype.size
