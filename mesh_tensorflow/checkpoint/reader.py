"""Reads checkpoints: their entries, and slices of them into variables."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint.files import damaged, data_files
from mesh_tensorflow.errors import CheckpointError
from mesh_tensorflow.meshes.store import StoredVariable, assign_block, split_block

# "key (DT_FLOAT) [2,3]", where the key may have any bytes.
_LINE = re.compile(rb"(.*?) \(DT_\w+\) \[([\d,]*)\]\n", re.DOTALL)

_T = TypeVar("_T")


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
  dtypes = {name: spec.dtype for name, spec in contents(path).items()}
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

  In memory there are at most `READ_AT_ONCE` bytes at once, or one tensor that is larger.

  Args:
    path: a checkpoint.
    stored: the entries to read.

  Raises:
    DamagedCheckpointError: something cannot be read.
  """
  for group in groups(stored, lambda s: s.num_bytes):
    restore_v2(path, [(s.key, "", s.dtype) for s in group])


# Bytes that one read operation brings into host memory.
READ_AT_ONCE = 64 * 2**20


class Values(Mapping[str, np.ndarray]):
  """The tensors of a checkpoint, whole, by name; each is read when it is asked for.

  Args:
    path: a checkpoint, of any program of TensorFlow's.

  Raises:
    DamagedCheckpointError: the index cannot be read; or, when a tensor is asked for, its data.
  """

  def __init__(self, path: str):
    self._path = path
    self._reader, self._shapes, _ = _open(path)

  def __getitem__(self, name: str) -> np.ndarray:
    self._shapes[name]  # A KeyError, as of any mapping.
    try:
      return np.asarray(self._reader.get_tensor(name))
    except Exception as e:  # noqa: BLE001 - as in `_open`.
      raise damaged(self._path, f"cannot read {name}: {e}") from e

  def __iter__(self) -> Iterator[str]:
    return iter(sorted(self._shapes))

  def __len__(self) -> int:
    return len(self._shapes)

  def __contains__(self, name: object) -> bool:
    return name in self._shapes  # That of `Mapping` would read the tensor.


def _open(path: str) -> tuple[Any, dict[str, list[int]], dict[str, tf.DType]]:
  """TensorFlow's reader of a checkpoint, and the shapes and dtypes of its tensors by name.

  Raises:
    DamagedCheckpointError: the index cannot be read.
  """
  try:
    reader = tf.train.load_checkpoint(path)
    return reader, reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
  except Exception as e:  # noqa: BLE001 - the reader raises errors of no documented type.
    raise damaged(path, f"cannot read {path}.index: {e}") from e


def contents(path: str) -> dict[str, tf.TensorSpec]:
  """Shape and dtype of every tensor in a checkpoint, by name.

  Args:
    path: a checkpoint.

  Returns:
    A dict of tf.TensorSpec.

  Raises:
    DamagedCheckpointError: the index cannot be read, or a data file is missing or too short.
  """
  _, shapes, dtypes = _open(path)
  files = data_files(path)
  there = sum(tf.io.gfile.stat(f).length for f in files)
  # Strings have no fixed size, so this is a lower limit; a read finds other damage.
  needed = sum(_num_bytes(s, dtypes[n]) for n, s in shapes.items() if dtypes[n] != tf.string)
  if there < needed:
    raise damaged(path, f"{', '.join(files)} truncated, {there} bytes of {needed}")
  return {n: tf.TensorSpec(shapes[n], dtypes[n], n) for n in sorted(shapes)}


def host_device() -> str:
  """Name of the device on which checkpoints are read and written."""
  return workers.host_device() if workers.current().size > 1 else "CPU:0"


_MOST_DIMS_OF_A_SLICE = 8


def slice_spec(name: str, shape: Sequence[int], begin: Sequence[int], size: Sequence[int]) -> str:
  """A slice of a variable in the notation of SaveV2: "4 8 0,2:4,4"; "" for all of it.

  Raises:
    CheckpointError: it is a slice of more than eight dimensions.
  """
  if list(size) == list(shape):
    return ""
  if len(shape) > _MOST_DIMS_OF_A_SLICE:  # TensorFlow would abort the process.
    raise CheckpointError(
      f"variable {name} of shape {list(shape)}: checkpoints of TensorFlow hold slices of at most "
      f"{_MOST_DIMS_OF_A_SLICE} dimensions; do not split it, or give it fewer dimensions (and "
      "mtf.reshape what mtf.get_variable returns)"
    )
  ranges = ":".join(f"{b},{n}" for b, n in zip(begin, size))
  return f"{' '.join(map(str, shape))} {ranges}"


@dataclasses.dataclass(frozen=True)
class Request:
  """A slice to read.

  Attributes:
    name: in the checkpoint.
    spec: the slice, in the notation of `slice_spec`.
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
  """Read requests for one slice of a variable.

  Args:
    name: in the checkpoint.
    dtype: in the checkpoint.
    stored: the variable.
    begin: offset of the slice.
    variables: the replicas that hold it.
    in_parts: whether a large one is read in several parts.
  """
  # A value is read in the one dtype and cast to the other.
  item_bytes = max(dtype.size, stored.slice_dtype.size)
  extent = stored.extent(begin)
  parts = [([0] * len(begin), extent)]
  if in_parts:
    parts = split_block(extent, item_bytes, READ_AT_ONCE)
  whole = stored.shape.to_integer_list
  return [
    Request(
      name,
      slice_spec(stored.name, whole, [b + o for b, o in zip(begin, offset)], size),
      dtype,
      variables,
      # Padding behind them keeps its zeros.
      offset if len(parts) > 1 or extent != list(stored.slice_shape) else None,
      size,
    )
    for offset, size in parts
  ]


def read_slices(path: str, requests: list[Request]) -> None:
  """Reads slices and assigns them to variables, cast to their dtypes.

  Args:
    path: a checkpoint.
    requests: the slices.

  Raises:
    DamagedCheckpointError: a part of it cannot be read.
  """
  for group in groups(requests, lambda r: _num_bytes(r.size, r.dtype)):
    values = restore_v2(path, [(r.name, r.spec, r.dtype) for r in group])
    for request, value in zip(group, values):
      for v in request.variables:
        with tf.device(v.device):
          new = tf.cast(value, v.dtype)
          if request.offset is None:
            v.assign(new)
          else:
            assign_block(v, request.offset, new)


def groups(items: Sequence[_T], num_bytes: Callable[[_T], int]) -> Iterator[list[_T]]:
  """The items in groups to read at once, each of at most `READ_AT_ONCE` bytes if it has several."""
  group: list[_T] = []
  size = 0
  for item in items:
    size += num_bytes(item)
    if group and size > READ_AT_ONCE:
      yield group
      group, size = [], num_bytes(item)
    group.append(item)
  if group:
    yield group


def restore_v2(path: str, wanted: Sequence[tuple[str | bytes, str, tf.DType]]) -> list[tf.Tensor]:
  """Reads tensors.

  Args:
    path: a checkpoint.
    wanted: of each its name, slice (see `slice_spec`) and dtype.

  Raises:
    DamagedCheckpointError: one cannot be read; it names the file, if TensorFlow tells which.
  """
  names, specs, dtypes = zip(*wanted)
  try:
    with tf.device(host_device()):
      values: list[Any] = tf.raw_ops.RestoreV2(
        prefix=path, tensor_names=names, shape_and_slices=specs, dtypes=dtypes
      )
      return values
  except tf.errors.OpError as e:
    files = data_files(path)
    shard = re.search(r"TensorBundle at .* shard (\d+) \(", e.message, re.DOTALL)
    if shard and int(shard.group(1)) < len(files):
      files = [files[int(shard.group(1))]]
    raise damaged(path, f"cannot read {', '.join(files)}: {e.message}") from e


def _num_bytes(shape: Iterable[int], dtype: tf.DType) -> int:
  size: int = dtype.size
  return math.prod(shape) * size
