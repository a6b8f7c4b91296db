"""Reads checkpoints: what is in them, and slices of it into variables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint.files import damaged, data_files
from mesh_tensorflow.store import StoredVariable, assign_block, split_block

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
  files = data_files(path)
  there = sum(tf.io.gfile.stat(f).length for f in files)
  # Strings have no fixed size, so this is a lower limit; a read finds other damage.
  needed = sum(_num_bytes(s, dtypes[n]) for n, s in shapes.items() if dtypes[n] != tf.string)
  if there < needed:
    raise damaged(path, f"{', '.join(files)} truncated, {there} bytes of {needed}")
  return {n: tf.TensorSpec(shapes[n], dtypes[n], n) for n in sorted(shapes)}


def host_device() -> str:
  """Where checkpoints are read and written."""
  return workers.host_device() if workers.current().size > 1 else "CPU:0"


def slice_spec(shape: Sequence[int], begin: Sequence[int], size: Sequence[int]) -> str:
  """A slice in the notation of SaveV2: "4 8 0,2:4,4"; "" for the whole variable."""
  if list(size) == list(shape):
    return ""
  ranges = ":".join(f"{b},{n}" for b, n in zip(begin, size))
  return f"{' '.join(map(str, shape))} {ranges}"


@dataclasses.dataclass(frozen=True)
class Request:
  """A slice to read.

  Attributes:
    name: in the checkpoint.
    spec: as of `slice_spec`.
    dtype: in the checkpoint.
    variables: get the value.
    offset: where in the variables; None: it is all of them.
    size: shape of the value.
  """

  name: str
  spec: str
  dtype: tf.DType
  variables: list[tf.Variable]
  offset: list[int] | None
  size: list[int]


def requests_for(
  name: str,
  dtype: tf.DType,
  stored: StoredVariable,
  begin: tuple[int, ...],
  variables: list[tf.Variable],
  in_parts: bool,
) -> list[Request]:
  """What to read for one slice of a variable.

  Args:
    name: in the checkpoint.
    dtype: in the checkpoint.
    stored: the variable.
    begin: offset of the slice.
    variables: the replicas that hold it.
    in_parts: whether a large one is read in several parts.
  """
  item_bytes = max(dtype.size, stored.slice_dtype.size)
  parts = [([0] * len(begin), list(stored.slice_shape))]
  if in_parts:
    parts = split_block(stored.slice_shape, item_bytes, _READ_AT_ONCE)
  whole = stored.shape.to_integer_list
  return [
    Request(
      name,
      slice_spec(whole, [b + o for b, o in zip(begin, offset)], size),
      dtype,
      variables,
      offset if len(parts) > 1 else None,
      size,
    )
    for offset, size in parts
  ]


def read_slices(path: str, requests: list[Request]) -> None:
  """Reads slices and assigns them to variables, cast to their dtypes.

  Args:
    path: a checkpoint.
    requests: the slices; the list is emptied.

  Raises:
    DamagedCheckpointError: a part of it cannot be read.
  """
  while requests:
    group, size = [], 0
    while requests:
      size += _num_bytes(requests[0].size, requests[0].dtype)
      if group and size > _READ_AT_ONCE:
        break
      group.append(requests.pop(0))
    try:
      with tf.device(host_device()):
        values = tf.raw_ops.RestoreV2(
          prefix=path,
          tensor_names=[r.name for r in group],
          shape_and_slices=[r.spec for r in group],
          dtypes=[r.dtype for r in group],
        )
    except tf.errors.OpError as e:
      files = ", ".join(data_files(path))
      raise damaged(path, f"cannot read {files}: {e.message}") from e
    for request, value in zip(group, values):
      for v in request.variables:
        with tf.device(v.device):
          new = tf.cast(value, v.dtype)
          if request.offset is None:
            v.assign(new)
          else:
            assign_block(v, request.offset, new)


def _num_bytes(shape: Iterable[int], dtype: tf.DType) -> int:
  return math.prod(shape) * dtype.size
