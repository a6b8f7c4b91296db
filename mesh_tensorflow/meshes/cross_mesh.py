"""Cross-mesh resharding: slices of a tensor on one mesh become its slices on another one.

`plan_transfers` says which block goes from which processor to which, from layouts alone; no
TensorFlow there. Each element is sent once to the target mesh, to one of the processors whose slice
has it (the replicas of a slice take turns, as do those of the source), and nothing is sent that the
target's device holds; inside the target mesh the replicas share what has come. This is the scheme
of Zhuang et al. (2022, "On Optimizing the Communication of Model Parallelism", arXiv:2211.05322).
Of a target mesh in several workers each worker gets its elements once. `reshard` builds the
transfers as TensorFlow operations, in the program around both meshes; each worker builds its part
of them, so all workers call it at the same places of one program.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.meshes.worker_transfers import TRANSFERS
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.program.dimensions import Dimension, Shape

Begin: TypeAlias = tuple[int, ...]


class HasSlices(Protocol):
  """Structural type: the part of `MeshImpl` that says where the slices of a tensor are."""

  @property
  def shape(self) -> Shape: ...

  @property
  def size(self) -> int: ...

  @property
  def local_processors(self) -> Sequence[int]: ...

  @property
  def processors_of_workers(self) -> Sequence[Sequence[int]]: ...

  def processor_device(self, pnum: int) -> str | None: ...

  def slice_shape(self, tensor_shape: Shape) -> list[int]: ...

  def slice_begin(self, tensor_shape: Shape, pnum: int) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A block of a tensor that a processor of the target takes from one of the source.

  Attributes:
    source: number of the processor that has it.
    begin: offset of the block in the source's slice.
    size: sizes of the block.
    is_sent: whether it goes from one device to another.
  """

  source: int
  begin: Begin
  size: tuple[int, ...]
  is_sent: bool

  @property
  def elements(self) -> int:
    """Number of elements of the block."""
    return math.prod(self.size)


@dataclasses.dataclass(frozen=True)
class Assembly:
  """A slice of the target: where it is put together, of which blocks, and who has it.

  Attributes:
    at: number of the processor that puts it together.
    replicas: numbers of all processors of its worker that have the slice.
    grid: for each axis the number of blocks along it.
    transfers: the blocks, row-major; none of a slice that is all padding.
    padding: for each axis the number of places behind the blocks that are padding.
  """

  at: int
  replicas: tuple[int, ...]
  grid: tuple[int, ...]
  transfers: tuple[Transfer, ...]
  padding: tuple[int, ...]


def _replicas(impl: HasSlices, shape: Shape) -> dict[Begin, list[int]]:
  """The processors that hold each slice, by its offset."""
  found: dict[Begin, list[int]] = {}
  for p in range(impl.size):
    found.setdefault(tuple(impl.slice_begin(shape, p)), []).append(p)
  return found


def _workers_of(impl: HasSlices) -> list[int]:
  """The worker of each processor; this one of a mesh that each process has for itself."""
  of_workers = impl.processors_of_workers
  if len(of_workers) == 1:
    return [workers.current().index] * impl.size
  worker_of = {p: w for w, processors in enumerate(of_workers) for p in processors}
  return [worker_of[p] for p in range(impl.size)]


def _device(name: str | None, worker: int) -> tuple[object, ...]:
  """Key of a device, the same however its name is written; "" is one of its own."""
  spec = tf.DeviceSpec.from_string(name or "")
  return worker, spec.device_type, spec.device_index


def plan_transfers(source: HasSlices, target: HasSlices, shape: Shape) -> list[Assembly]:
  """Plans the transfers from the slices of one mesh to those of another.

  Args:
    source: a mesh implementation that has the tensor.
    target: the one that gets it.
    shape: shape of the tensor, laid out on each as its rules say.
  """
  had = _replicas(source, shape)
  had_by, wanted_by = _workers_of(source), _workers_of(target)
  # The replicas of a slice, of each worker apart.
  wanted: dict[tuple[Begin, int], list[int]] = {}
  for p in range(target.size):
    wanted.setdefault((tuple(target.slice_begin(shape, p)), wanted_by[p]), []).append(p)
  part, new_part = source.slice_shape(shape), target.slice_shape(shape)
  devices = [_device(source.processor_device(p), had_by[p]) for p in range(source.size)]
  targets = [_device(target.processor_device(p), wanted_by[p]) for p in range(target.size)]
  starts = [sorted({begin[i] for begin in had}) for i in range(shape.ndims)]
  sent_by = [0] * source.size  # Elements; the replicas of a slice share the work.
  result = []
  for turn, ((begin, worker), replicas) in enumerate(wanted.items()):
    # The blocks along each axis: (first slice's offset, begin, end).
    cuts = [
      [(s, max(s, b), min(s + n, b + m, d.size)) for s in axis if s < b + m and b < s + n]
      for axis, b, n, m, d in zip(starts, begin, part, new_part, shape)
    ]
    cuts = [[(s, low, high) for s, low, high in axis if low < high] for axis in cuts]
    filled = [sum(high - low for _, low, high in axis) for axis in cuts]
    blocks = list(itertools.product(*cuts))

    def local(p: int, blocks: Sequence[Any] = blocks) -> int:
      """Elements that a processor of the target finds on its own device."""
      return sum(
        math.prod(high - low for _, low, high in block)
        for block in blocks
        if any(devices[q] == targets[p] for q in had[tuple(s for s, _, _ in block)])
      )

    held = [local(p) for p in replicas]
    best = [p for p, n in zip(replicas, held) if n == max(held)]
    at = best[turn % len(best)]
    transfers = []
    for block in blocks:
      holders = had[tuple(s for s, _, _ in block)]
      size = tuple(high - low for _, low, high in block)
      here = [q for q in holders if devices[q] == targets[at]]
      near = [q for q in holders if had_by[q] == worker]
      q = here[0] if here else min(near or holders, key=lambda q: sent_by[q])
      sent_by[q] += 0 if here else math.prod(size)
      offset = tuple(low - s for s, low, _ in block)
      transfers.append(Transfer(q, offset, size, not here))
    left = tuple(m - n for m, n in zip(new_part, filled))
    grid = tuple(map(len, cuts))
    result.append(Assembly(at, tuple(replicas), grid, tuple(transfers), left))
  return result


def elements_sent(source: HasSlices, target: HasSlices, shape: Shape) -> int:
  """Number of elements that cross from device to device when a tensor goes to another mesh.

  Args:
    source: a mesh implementation that has the tensor.
    target: the one that gets it.
    shape: shape of the tensor.
  """
  plan = plan_transfers(source, target, shape)
  return sum(t.elements for assembly in plan for t in assembly.transfers if t.is_sent)


def reshard(
  source: HasSlices,
  target: HasSlices,
  shape: Shape,
  dtype: tf.DType,
  slices: Sequence[tf.Tensor],
  plan: Sequence[Assembly] | None = None,
) -> list[tf.Tensor]:
  """Builds the slices of another mesh; to be called in the program around both.

  Args:
    source: a mesh implementation.
    target: another one.
    shape: shape of the tensor.
    dtype: its dtype.
    slices: a slice for each processor of the source that this process has.
    plan: what `plan_transfers` returned for them, if it was called before.

  Returns:
    A slice for each processor of the target that this process has.
  """
  here = workers.current().index
  had_by, wanted_by = _workers_of(source), _workers_of(target)
  own = dict(zip(source.local_processors, slices))
  result: dict[int, tf.Tensor] = {}
  for assembly in plan_transfers(source, target, shape) if plan is None else plan:
    blocks = []
    worker = wanted_by[assembly.at]
    for t in assembly.transfers:
      sender = had_by[t.source]
      if sender == here:
        block = _block(source, own[t.source], t)
        if worker == here:
          blocks.append(block)
        else:
          TRANSFERS.send(block, worker)
      elif worker == here:
        blocks.append(TRANSFERS.receive(t.size, dtype, sender))
    if worker != here:
      continue
    with tf.device(target.processor_device(assembly.at)):
      if blocks:
        whole = _joined(blocks, assembly.grid)
        for axis, n in enumerate(assembly.padding):
          whole = kernels.pad(whole, axis, 0, n) if n else whole
      else:
        whole = tf.zeros(target.slice_shape(shape), dtype)
    for p in assembly.replicas:
      result[p] = whole
  return [result[p] for p in target.local_processors]


class _EveryWorker:
  """The workers of a cluster as a mesh of which each has the whole of a tensor."""

  @property
  def shape(self) -> Shape:
    return Shape([Dimension("workers", workers.current().size)])

  @property
  def size(self) -> int:
    return workers.current().size

  @property
  def local_processors(self) -> list[int]:
    return [workers.current().index]

  @property
  def processors_of_workers(self) -> list[list[int]]:
    return [[i] for i in range(self.size)]

  def processor_device(self, pnum: int) -> str:
    del pnum  # Of others this is only a key.
    return workers.host_device()

  def slice_shape(self, tensor_shape: Shape) -> list[int]:
    return list(tensor_shape.to_integer_list)

  def slice_begin(self, tensor_shape: Shape, pnum: int) -> list[int]:
    del pnum
    return [0] * tensor_shape.ndims


def whole_everywhere(
  source: HasSlices, shape: Shape, dtype: tf.DType, slices: Sequence[tf.Tensor]
) -> tf.Tensor:
  """Puts a whole tensor together in every worker; each element goes to each worker once.

  Args:
    source: the mesh implementation that has it.
    shape: its shape.
    dtype: its dtype.
    slices: a slice for each processor of the source that this process has.
  """
  return reshard(source, _EveryWorker(), shape, dtype, slices)[0]


def _block(source: HasSlices, x: tf.Tensor, transfer: Transfer) -> tf.Tensor:
  if list(x.shape) == list(transfer.size):
    return x
  # Cut where it lies, so that no more is sent than is asked for.
  with tf.device(source.processor_device(transfer.source)):
    return kernels.cut(x, transfer.begin, transfer.size)


def _joined(blocks: Sequence[tf.Tensor], grid: Sequence[int]) -> tf.Tensor:
  """Concatenates a grid of blocks, row-major; a single one is copied to the current device."""
  parts = list(blocks)
  if len(parts) == 1:
    return tf.identity(parts[0])
  for axis in reversed(range(len(grid))):
    n = grid[axis]
    if n > 1:
      parts = [tf.concat(parts[i : i + n], axis) for i in range(0, len(parts), n)]
  return parts[0]
