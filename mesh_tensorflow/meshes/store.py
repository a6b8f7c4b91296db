"""The variable store: slices that live on their devices, found again by name."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import CollectiveError, VariableError, WorkerLostError
from mesh_tensorflow.meshes.layout import TensorLayout
from mesh_tensorflow.meshes.remade_stores import Life
from mesh_tensorflow.numerics import initializers, kernels, random_bits
from mesh_tensorflow.numerics.initializers import InitializerLike
from mesh_tensorflow.program.dimensions import Shape

# Bytes of initial values that are computed at a time; computing them takes several times as much.
_COMPUTED_AT_ONCE = 16 * 2**20

# Of TensorFlow's ResourceStridedSliceAssign.
_MOST_AXES_OF_A_BLOCK = 8

# Time limit for the other workers to read a variable too, whose slices all of them have.
_READ_SECONDS = 300.0


def split_block(
  size: Sequence[int], item_bytes: int, limit: int
) -> list[tuple[list[int], list[int]]]:
  """Cuts a block of values into parts of at most `limit` bytes each, or of one row.

  Args:
    size: shape of the block.
    item_bytes: bytes of a value.
    limit: bytes. What TensorFlow sets no part of (more than eight axes) is one part.

  Returns:
    (offset, size) of each part.
  """
  axis = next((i for i, n in enumerate(size) if n > 1), None)
  total = math.prod(size) * item_bytes
  if axis is None or total <= limit or len(size) > _MOST_AXES_OF_A_BLOCK:
    return [([0] * len(size), list(size))]
  rows = max(1, limit * size[axis] // total)
  parts = []
  for start in range(0, size[axis], rows):
    offset, part = [0] * len(size), list(size)
    offset[axis], part[axis] = start, min(rows, size[axis] - start)
    parts.append((offset, part))
  return parts


def assign_block(variable: tf.Variable, offset: Sequence[int], value: tf.Tensor) -> None:
  """Writes a block of a variable in place, without a copy.

  Args:
    variable: the variable.
    offset: of the block.
    value: its values.
  """
  if value.shape.ndims > _MOST_AXES_OF_A_BLOCK:  # It is the whole.
    variable.assign(padded_slice(value, variable.shape))
    return
  # Not variable[...].assign, which reads the variable: it would have to be copied then.
  tf.raw_ops.ResourceStridedSliceAssign(
    ref=variable.handle,
    begin=offset,
    end=[o + n for o, n in zip(offset, value.shape)],
    strides=[1] * len(offset),
    value=value,
  )
  # After a partial write TensorFlow copies the variable at each read, unless this is called.
  tf.raw_ops.DisableCopyOnRead(resource=variable.handle)


def padded_slice(value: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
  """The values of a slice with zeros behind them.

  Args:
    value: the values.
    size: sizes of the slice.
  """
  for axis, n in enumerate(size):
    if value.shape[axis] != n:
      value = kernels.pad(value, axis, 0, n - value.shape[axis])
  return value


def computed_in_parts(
  init: initializers.Initializer,
  key: int,
  full: Sequence[int],
  begin: tuple[int, ...],
  part: Sequence[int],
  dtype: tf.DType,
) -> tf.Tensor:
  """Computes the initial values of a slice in blocks, with bounded temporary memory."""

  def values(begin: Sequence[int], size: Sequence[int]) -> tf.Tensor:
    return tf.cast(init.slice_values(key, full, list(begin), list(size), dtype), dtype)

  parts = split_block(part, dtype.size, _COMPUTED_AT_ONCE)
  # The first computes the whole for each part; the second takes no more than its result.
  if len(parts) == 1 or isinstance(init, (initializers.FromFunction, initializers.Constant)):
    return values(begin, part)
  result = tf.Variable(tf.zeros(part, dtype), trainable=False)
  for offset, size in parts:
    assign_block(result, offset, values([b + o for b, o in zip(begin, offset)], size))
  return result.read_value()  # The variable that gets it takes over the memory.


_P = ParamSpec("_P")
_R = TypeVar("_R")


class MakesSlices(Protocol):
  """Structural type: the part of `MeshImpl` that creates the slices of a variable."""

  @property
  def shape(self) -> Shape: ...

  @property
  def local_processors(self) -> Sequence[int]: ...

  @property
  def processors_of_workers(self) -> Sequence[Sequence[int]]: ...

  @property
  def lowerings_per_run(self) -> int: ...

  def tensor_layout(self, arg: Shape) -> TensorLayout: ...

  def slice_shape(self, tensor_shape: Shape) -> list[int]: ...

  def slice_begin(self, tensor_shape: Shape, pnum: int) -> list[int]: ...

  def create_slices(
    self,
    name: str,
    begins: Sequence[tuple[int, ...]],
    value: Callable[[tuple[int, ...]], tf.Tensor],
    trainable: bool,
  ) -> tuple[tf.Variable, ...]: ...


@dataclasses.dataclass(frozen=True)
class StoredVariable:
  """One mtf variable: its slices on this process's devices, and where each belongs.

  Attributes:
    name: full name, as in checkpoints.
    shape: a `Shape`.
    master_dtype: dtype in checkpoints.
    slice_dtype: dtype of the slices.
    trainable: whether it is trained.
    layout: which mesh axis splits which axis.
    mesh_shape: the mesh.
    slices: one tf.Variable for each processor of this process, () if the mesh is of others; on a
      placement mesh that of several if they are of one device and have the same slice.
    begins: the offset of each slice in the whole variable; of a slice that is padding alone it is
      at the end, or behind it.
    slice_shape: sizes of a slice, padding included.
    processors: the number of the processor of each slice.
    shares: for each worker the offsets of the slices that it contributes to `gathered`; () if every
      worker has all slices.
  """

  name: str
  shape: Shape
  master_dtype: tf.DType
  slice_dtype: tf.DType
  trainable: bool
  layout: TensorLayout
  mesh_shape: Shape
  slices: tuple[tf.Variable, ...]
  begins: tuple[tuple[int, ...], ...]
  slice_shape: tuple[int, ...]
  processors: tuple[int, ...] = (0,)
  shares: tuple[tuple[tuple[int, ...], ...], ...] = ()

  def extent(self, begin: Sequence[int]) -> list[int]:
    """Sizes of the slice at an offset without its padding; 0 if it is nothing else.

    Args:
      begin: the offset.
    """
    sizes = zip(self.shape.to_integer_list, begin, self.slice_shape)
    return [min(n, max(0, whole - b)) for whole, b, n in sizes]

  def has_values(self, begin: Sequence[int]) -> bool:
    """True if the slice at an offset is not padding alone.

    Args:
      begin: the offset.
    """
    return self.extent(begin) == list(self.slice_shape) or all(self.extent(begin))

  def distinct(self) -> list[tuple[tuple[int, ...], tf.Variable]]:
    """(offset, slice) of the slices without their replicas, and without those of padding alone."""
    seen: dict[tuple[int, ...], tf.Variable] = {}
    for begin, v in zip(self.begins, self.slices):
      if self.has_values(begin):
        seen.setdefault(begin, v)
    return list(seen.items())

  @property
  def placed_slices(self) -> list[tuple[tuple[int, ...], tf.Variable]]:
    """(offset, slice) of each tf.Variable: one that several processors share counts once."""
    return list({id(v): (begin, v) for begin, v in zip(self.begins, self.slices)}.values())

  @property
  def different_slices(self) -> tuple[tf.Variable, ...]:
    """The tf.Variables of `placed_slices`."""
    return tuple(v for _, v in self.placed_slices)

  def owned(self, worker: int = 0) -> list[tuple[tuple[int, ...], tf.Variable]]:
    """(offset, slice) of the slices that this process writes when all workers write together.

    Of the replicas of a slice that of the first worker counts. A variable of which every worker
    has all slices is worker 0's.

    Args:
      worker: the number of this worker.
    """
    if not self.shares:
      return self.distinct() if worker == 0 else []
    return [(begin, v) for begin, v in self.distinct() if begin in self.shares[worker]]

  def numpy(self) -> Any:
    """The whole value as an array.

    Raises:
      VariableError: other workers hold slices that this process has not.
    """
    whole = np.zeros(self.shape.to_integer_list, self.slice_dtype.as_numpy_dtype)
    distinct = self.distinct()
    if sum(math.prod(self.extent(begin)) for begin, _ in distinct) != whole.size:
      number = math.prod(-(-n // k) for n, k in zip(self.shape.to_integer_list, self.slice_shape))
      raise VariableError(
        f"variable {self.name} {self.shape} is split over several workers, and this one has "
        f"{len(distinct)} of its {number} slices; save a checkpoint and read the value from "
        "there, call `gathered` in all workers, or look at `slices`"
      )
    for begin, v in distinct:
      self._put(whole, begin, v.numpy())
    return whole

  def gathered(self) -> Any:
    """The whole value as an array; all workers call it at the same place of their programs.

    Raises:
      VariableError: another worker reads another variable at this place, or none within a time.
      WorkerLostError: another worker is gone.
    """
    if not self.shares:
      return self.numpy()
    where = f"variable {self.name} {self.shape} is split over {len(self.shares)} processes"
    how = "read it in all of them, at the same place of the program, and let one use the value"
    key = zlib.crc32(self.name.encode()) >> 1 | 1  # Not 0, which a worker at a barrier tells.
    try:
      keys = workers.gather(np.int32(key), timeout_seconds=_READ_SECONDS)
    except WorkerLostError:
      raise
    except CollectiveError as e:
      raise VariableError(
        f"{where}, and this one waited {_READ_SECONDS:g} s in vain for the others to read it; {how}"
      ) from e
    others = [i for i, k in enumerate(keys) if k != key]
    if others:
      raise VariableError(
        f"{where}, and {workers.current().names(others)} did not read it when this one did, or "
        f"failed (its log says why); {how}"
      )
    here = dict(zip(self.begins, self.slices))
    values = [here[begin].numpy() for begin in self.shares[workers.current().index]]
    data = b"".join(v.tobytes() for v in values)
    dtype = np.dtype(self.slice_dtype.as_numpy_dtype)
    part = math.prod(self.slice_shape) * dtype.itemsize
    room = -(-max(map(len, self.shares)) * part // 4) * 4
    rows = workers.gather(np.frombuffer(data.ljust(room, b"\0"), np.int32)).view(np.uint8)
    whole = np.zeros(self.shape.to_integer_list, dtype)
    for row, begins in zip(rows, self.shares):
      for i, begin in enumerate(begins):
        block = row[i * part : (i + 1) * part].view(dtype)
        self._put(whole, begin, block.reshape(self.slice_shape))
    return whole

  def _put(self, whole: Any, begin: Sequence[int], values: Any) -> None:
    """Sets the part of an array that a slice has, without its padding."""
    extent = self.extent(begin)
    whole[tuple(slice(b, b + n) for b, n in zip(begin, extent))] = values[
      tuple(slice(n) for n in extent)
    ]

  def assign(self, value: npt.ArrayLike | tf.Tensor) -> None:
    """Sets every slice from a whole array (cast to the slice dtype)."""
    value = tf.convert_to_tensor(value)
    if value.shape.as_list() != self.shape.to_integer_list:
      raise VariableError(
        f"variable {self.name} has shape {self.shape}, the new value has {value.shape}"
      )
    for begin, v in self.placed_slices:
      # Not for scalars: tf.slice takes an empty list for one of floats.
      part = value
      if begin:
        first = [min(b, n) for b, n in zip(begin, self.shape.to_integer_list)]
        part = padded_slice(kernels.cut(value, first, self.extent(begin)), self.slice_shape)
      v.assign(tf.cast(part, self.slice_dtype))


# Programs may lower in several threads, with one store.
_CREATION = threading.RLock()


def _one_thread_at_a_time(method: Callable[_P, _R]) -> Callable[_P, _R]:
  @functools.wraps(method)
  def locked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    with _CREATION:
      return method(*args, **kwargs)

  return locked


class VariableStore(tf.Module):  # type: ignore[misc]  # TensorFlow says nothing of its types.
  """Holds the variables of a mesh implementation.

  The first lowering of a program creates the slices, each on its device and
  without the rest of the variable; later lowerings find them by name.

  Args:
    seed: initial values are a function of it and of the variable's name.
    name: name of the module.
    noise_seed: of what random operations draw; `seed` by default.
  """

  @checked
  def __init__(self, seed: float = 0, name: str | None = None, *, noise_seed: float | None = None):
    super().__init__(name=name or "variable_store")
    self.seed = int(seed)
    self.noise_seed = self.seed if noise_seed is None else int(noise_seed)
    # Where tf.Module looks for variables: it does not look into a StoredVariable.
    self._slices: dict[str, tuple[tf.Variable, ...]] = {}
    self._stored: dict[str, StoredVariable] = {}
    # Of a store that a mesh implementation made for itself.
    self.life: Life | None = None

  def _looked_at(self) -> None:
    if self.life is not None:
      self.life.looked_at()

  def __contains__(self, name: str) -> bool:
    self._looked_at()
    return name in self._stored

  def __getitem__(self, name: str) -> StoredVariable:
    self._looked_at()
    if name not in self._stored:
      known = ", ".join(sorted(self._stored)[:20])
      raise VariableError(f"there is no variable {name!r}; known: {known}")
    return self._stored[name]

  def __iter__(self) -> Iterator[StoredVariable]:
    self._looked_at()
    return iter(list(self._stored.values()))

  def __len__(self) -> int:
    return len(self._stored)

  @property
  def names(self) -> list[str]:
    """Names in order of creation."""
    self._looked_at()
    return list(self._stored)

  @_one_thread_at_a_time
  def forget(self, names: Collection[str]) -> None:
    """Lets go of variables that no program uses any more; their memory is free then.

    Args:
      names: full names; those of none are no matter.
    """
    self._stored = {n: v for n, v in self._stored.items() if n not in names}
    self._slices = {n: v.different_slices for n, v in self._stored.items()}

  @_one_thread_at_a_time
  def get(
    self,
    mesh_impl: MakesSlices,
    name: str,
    shape: Shape,
    *,
    master_dtype: tf.DType,
    slice_dtype: tf.DType,
    initializer: InitializerLike = None,
    trainable: bool = True,
  ) -> StoredVariable:
    """Finds a variable, or creates its slices.

    Args:
      mesh_impl: says where the slices are (`local_processors`), and makes them (`create_slices`).
      name: full name.
      shape: a `Shape`.
      master_dtype: dtype in checkpoints.
      slice_dtype: dtype of the slices.
      initializer: an `Initializer`, or what `initializers.convert_to_initializer` accepts.
      trainable: whether it is trained.

    Returns:
      The `StoredVariable`.

    Raises:
      VariableError: it exists with another shape or dtype, or for another mesh.
    """
    layout = mesh_impl.tensor_layout(shape)
    if name in self._stored:
      old = self._stored[name]
      _check_same(old, mesh_impl, shape, layout, master_dtype, slice_dtype)
      if self.life is not None:
        self.life.asked_for(name)
      return old
    init = initializers.convert_to_initializer(initializer, slice_dtype)
    # Of the name, not of the order of creation: one variable more changes no other's values.
    key = random_bits.fold(random_bits.name_key(name), self.seed)
    full, part = shape.to_integer_list, mesh_impl.slice_shape(shape)
    begins = [tuple(mesh_impl.slice_begin(shape, p)) for p in mesh_impl.local_processors]

    def value(begin: tuple[int, ...]) -> tf.Tensor:
      extent = [min(n, max(0, size - b)) for size, b, n in zip(full, begin, part)]
      if extent == part:
        return computed_in_parts(init, key, full, begin, part, slice_dtype)
      if not all(extent):
        return tf.zeros(part, slice_dtype)
      values = computed_in_parts(init, key, full, begin, extent, slice_dtype)
      return padded_slice(values, part)

    with tf.init_scope():  # Out of the tf.function that is being traced, if one is.
      slices = mesh_impl.create_slices(_variable_name(f"{name}_slice"), begins, value, trainable)
    stored = StoredVariable(
      name=name,
      shape=shape,
      master_dtype=master_dtype,
      slice_dtype=slice_dtype,
      trainable=trainable,
      layout=layout,
      mesh_shape=mesh_impl.shape,
      slices=slices,
      begins=tuple(begins),
      slice_shape=tuple(part),
      processors=tuple(mesh_impl.local_processors),
      shares=shares_of(
        [mesh_impl.slice_begin(shape, p) for p in processors]
        for processors in mesh_impl.processors_of_workers
      ),
    )
    self._slices[name] = stored.different_slices
    self._stored[name] = stored
    if self.life is not None:
      self.life.made(stored, mesh_impl.lowerings_per_run)
    return stored


def shares_of(
  begins_of_workers: Iterable[Iterable[Sequence[int]]],
) -> tuple[tuple[tuple[int, ...], ...], ...]:
  """Shares of a variable, see `StoredVariable`: of a slice's replicas the first worker's counts.

  Args:
    begins_of_workers: for each worker the offsets of its slices.
  """
  begins = [dict.fromkeys(map(tuple, of_worker)) for of_worker in begins_of_workers]
  every = dict.fromkeys(b for of_worker in begins for b in of_worker)
  if all(len(of_worker) == len(every) for of_worker in begins):
    return ()
  first = {b: i for i, of_worker in reversed(list(enumerate(begins))) for b in of_worker}
  return tuple(tuple(b for b in of_worker if first[b] == i) for i, of_worker in enumerate(begins))


def _variable_name(name: str) -> str:
  """tf.Variable refuses names with empty path components ("a//b")."""
  return "/".join(p for p in name.split("/") if p)


def _check_same(
  old: StoredVariable,
  mesh_impl: MakesSlices,
  shape: Shape,
  layout: TensorLayout,
  master_dtype: tf.DType,
  slice_dtype: tf.DType,
) -> None:
  """Raises `VariableError` if a variable is asked for otherwise than it is."""
  if old.shape.to_integer_list != shape.to_integer_list:
    raise VariableError(
      f"variable {old.name} exists with shape {old.shape} and is now asked for with {shape}; "
      "use another name, or another variable store"
    )
  if (old.slice_dtype, old.master_dtype) != (slice_dtype, master_dtype):
    raise VariableError(
      f"variable {old.name} exists with dtypes master {old.master_dtype.name}, slice "
      f"{old.slice_dtype.name} and is now asked for with master {master_dtype.name}, slice "
      f"{slice_dtype.name}"
    )
  if old.layout != layout:
    raise VariableError(
      f"variable {old.name} exists as {old.shape}, {old.layout} and is now asked for as {shape}, "
      f"{layout}: its dimensions are named differently, or state is in other shards "
      "(with_sharded_state), so it would be split differently"
    )
  if old.mesh_shape.to_integer_list != mesh_impl.shape.to_integer_list:
    raise VariableError(
      f"variable {old.name} {shape} exists in slices for the mesh {old.mesh_shape} and is now "
      f"asked for on the mesh {mesh_impl.shape}; give each mesh implementation a variable "
      "store of its own, and move values with a checkpoint"
    )
