"""Slices of examples for the processors of a mesh, from `tf.data`.

The archived package fed TPUs by sessions and infeed queues. Here a reader cuts each batch into one
slice for each processor; `start_infeed_thread` fills a queue of them beforehand. Arguments `sess`
are not used, and may be None.
"""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.environment.data_sets import without_autotuning
from mesh_tensorflow.errors import DataError, ShapeError, SizeError
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.program.dimensions import Shape, ShapeLike, convert_to_shape

# Batches that wait in the queue.
_IN_QUEUE = 2


class ProcessDevices:
  """The devices of a mesh's processors, in the order of processor numbers.

  Args:
    simd_mesh_impl: a `MeshImpl` with `devices`.
  """

  def __init__(self, simd_mesh_impl: Any):
    self._devices = [str(d or "") for d in simd_mesh_impl.devices]
    self._hosts = [_host_device_to_id(d) for d in self._devices]
    if self.num_cores % self.num_hosts:
      raise SizeError(
        f"the {self.num_cores} processors of mesh {simd_mesh_impl.shape} are on {self.num_hosts} "
        "hosts, not the same number on each"
      )

  @property
  def ordered_ordinals(self) -> list[int]:
    """Device numbers of the processors on their hosts."""
    return [int(d.rsplit(":", 1)[-1]) if d[-1:].isdigit() else 0 for d in self._devices]

  @property
  def ordered_tpus(self) -> list[str]:
    """Devices of the processors."""
    return list(self._devices)

  @property
  def ordered_hosts(self) -> list[str]:
    """CPU devices of the processors' hosts."""
    return [_host_id_to_tf_device(i, False) for i in self._hosts]

  @property
  def ordered_host_ids(self) -> list[int]:
    """Numbers of the processors' hosts."""
    return list(self._hosts)

  @property
  def host_id_to_its_pnums(self) -> dict[int, list[int]]:
    """The processors of each host."""
    found: dict[int, list[int]] = collections.defaultdict(list)
    for pnum, host in enumerate(self._hosts):
      found[host].append(pnum)
    return dict(found)

  @property
  def num_cores(self) -> int:
    """Number of processors."""
    return len(self._devices)

  @property
  def num_hosts(self) -> int:
    """Number of hosts."""
    return len(set(self._hosts))

  @property
  def num_cores_per_host(self) -> int:
    """Number of processors of each host."""
    return self.num_cores // self.num_hosts


def _host_device_to_id(device: str) -> int:
  """The task of a device; 0 if its name has none."""
  _, _, task = device.partition("/task:")
  return int(task.split("/")[0]) if task else 0


def _host_id_to_tf_device(host_id: int, external_worker: bool) -> str:
  job = "/job:tpu_worker" if external_worker else ""
  return f"{job}/task:{host_id}/device:CPU:0"


def _pnum_map(mesh_impl: MeshImpl, shape: Shape) -> np.ndarray:
  """Processor numbers by slice: an axis for each dimension, and one for replicas."""
  # It cuts batches into equal slices: an uneven split is told of here.
  counts = [d.size // n for d, n in zip(shape, mesh_impl.even_only.slice_shape(shape))]
  slots: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
  for pnum in range(mesh_impl.size):
    begin = mesh_impl.slice_begin(shape, pnum)
    sizes = mesh_impl.slice_shape(shape)
    slots[tuple(b // n for b, n in zip(begin, sizes))].append(pnum)
  table = np.zeros([*counts, mesh_impl.size // int(np.prod(counts))], np.int64)
  for place, pnums in slots.items():
    table[place] = pnums
  return table


class SubBatchSlicer:
  """Cuts the part of a batch that one host reads into slices for its processors.

  Args:
    sub_batch_ds_creator: a function that makes a data set of batches of that part.
    host_id: number of the host.
    all_sub_batch_pnums: for each input the processors that need a slice of the part.
    simd_mesh_impl: a `MeshImpl`.
    mtf_input_shapes: shapes of whole batches, one for each input.
    external_worker: kept for programs that give it; not used.
    global_batch: whether the part is the whole batch.
  """

  def __init__(
    self,
    sub_batch_ds_creator: Callable[[], tf.data.Dataset],
    host_id: int,
    all_sub_batch_pnums: Sequence[Any],
    simd_mesh_impl: MeshImpl,
    mtf_input_shapes: Sequence[ShapeLike],
    external_worker: bool,
    global_batch: bool,
  ):
    del external_worker
    self.host_id = host_id
    self._create, self._impl = sub_batch_ds_creator, simd_mesh_impl
    self._pnums = [list(np.ravel(p)) for p in all_sub_batch_pnums]
    self._shapes = [convert_to_shape(s) for s in mtf_input_shapes]
    self._global_batch = global_batch
    self._iterator: Iterator[Any] | None = None

  @property
  def initializer(self) -> Callable[[], None]:
    """A function that begins with the first batch."""

    def start() -> None:
      self._iterator = iter(without_autotuning(self._create()))

    return start

  def get_slices(self) -> list[tuple[tf.Tensor, int, int]]:
    """(slice, processor number, number of the input) of all slices of the next batch.

    Raises:
      StopIteration: there is none.
    """
    if self._iterator is None:
      self.initializer()
    assert self._iterator is not None
    batch = next(self._iterator)
    batch = batch if isinstance(batch, (tuple, list)) else (batch,)
    slices: list[tuple[tf.Tensor, int, int]] = []
    for i, (t, shape, pnums) in enumerate(zip(batch, self._shapes, self._pnums)):
      sizes = self._impl.slice_shape(shape)
      cut: dict[tuple[int, ...], tf.Tensor] = {}
      for pnum in pnums:
        begin = list(self._impl.slice_begin(shape, int(pnum)))
        if not self._global_batch:
          begin[0] = 0  # The part that was read is the first.
        place = tuple(begin)
        if place not in cut:
          cut[place] = tf.slice(t, begin, sizes)
        slices.append((cut[place], int(pnum), i))
    return slices


class SimdMeshImplInputReader:
  """Reads batches for a mesh: each part of the batch from a data set of its own.

  Args:
    simd_mesh_impl: a `MeshImpl` with `devices`.
    ds_creator: makes a data set of single examples. In training it is called once for each part of
      the batch that is split: it must shuffle, or parts repeat each other.
    mtf_input_shapes: shapes of batches, one for each tensor of an example; the first says how the
      batch is split.
    ds_prefetch_size: batches that are prepared ahead.
    external_worker: kept for programs that give it; not used.
    is_eval_mode: whether one data set is read in its order, for all.

  Raises:
    SizeError: there is no shape, or batch sizes differ.
  """

  def __init__(
    self,
    simd_mesh_impl: Any,
    ds_creator: Callable[[], tf.data.Dataset],
    mtf_input_shapes: Sequence[ShapeLike],
    ds_prefetch_size: int = tf.data.AUTOTUNE,
    external_worker: bool = True,
    is_eval_mode: bool = False,
  ):
    shapes = _input_shapes(mtf_input_shapes)
    self._impl, self._shapes = simd_mesh_impl, shapes
    self._queue: queue.Queue[Any] = queue.Queue(_IN_QUEUE)
    self._slicers: list[SubBatchSlicer] = []
    devices = ProcessDevices(simd_mesh_impl)
    maps = [_pnum_map(simd_mesh_impl, s) for s in shapes]
    parts = 1 if is_eval_mode else len(maps[0])
    batch = shapes[0][0].size // parts

    def create() -> tf.data.Dataset:
      return ds_creator().batch(batch, drop_remainder=True).prefetch(ds_prefetch_size)

    used: collections.Counter[int] = collections.Counter()
    for i in range(parts):
      pnums = [np.ravel(m if is_eval_mode else m[i]) for m in maps]
      host = devices.num_hosts - 1
      if not is_eval_mode:
        # The host that has most of the processors; then the one that reads least; then the first.
        of_host = collections.Counter(devices.ordered_host_ids[p] for p in pnums[0])
        host = min(of_host, key=lambda h: (-of_host[h], used[h], h))
        used[host] += 1
      self._slicers.append(
        SubBatchSlicer(create, host, pnums, simd_mesh_impl, shapes, external_worker, is_eval_mode)
      )

  @property
  def infeed_queue(self) -> queue.Queue[Any]:
    """The queue that `start_infeed_thread` fills: what `next_slices` would return."""
    return self._queue

  def next_slices(self) -> list[list[tf.Tensor]]:
    """Slices of the next batch: for each input a list with one for each processor.

    Raises:
      StopIteration: there is none.
    """
    slices: list[list[Any]] = [[None] * self._impl.size for _ in self._shapes]
    for slicer in self._slicers:
      for t, pnum, i in slicer.get_slices():
        slices[i][pnum] = t
    return slices

  def start_infeed_thread(
    self, sess: object, number_steps: int = -1, initial_wait_sec: float = 0.5
  ) -> threading.Thread:
    """Fills the queue in the background.

    What ends the reading early goes into the queue as an exception.

    Args:
      sess: not used.
      number_steps: batches to read; all there are if less than 1.
      initial_wait_sec: seconds to wait before the first.

    Returns:
      The thread.
    """
    del sess

    def read() -> None:
      time.sleep(initial_wait_sec)
      done = 0
      try:
        while number_steps < 1 or done < number_steps:
          self._queue.put(self.next_slices())
          done += 1
      except StopIteration:
        self._queue.put(DataError(f"the data ended after {done} batches"))
      except Exception as e:  # The one who takes from the queue shall hear of it.
        self._queue.put(e)

    thread = threading.Thread(target=read, daemon=True, name="input_reader")
    thread.start()
    return thread


class PlacementMeshImplInputReader:
  """Reads batches for a placement mesh.

  Args:
    placement_mesh_impl: a `MeshImpl`.
    ds_creator: makes a data set of single examples.
    mtf_input_shapes: shapes of batches, one for each tensor of an example.
    ds_prefetch_size: batches that are prepared ahead.
    is_eval_mode: kept for programs that give it. The last batch, if it is not whole, is dropped in
      all modes: slices have one size.

  Raises:
    SizeError: there is no shape, or batch sizes differ.
  """

  def __init__(
    self,
    placement_mesh_impl: MeshImpl,
    ds_creator: Callable[[], tf.data.Dataset],
    mtf_input_shapes: Sequence[ShapeLike],
    ds_prefetch_size: int = tf.data.AUTOTUNE,
    is_eval_mode: bool = False,
  ):
    del is_eval_mode
    self._shapes = _input_shapes(mtf_input_shapes)
    self._impl = placement_mesh_impl
    batch = self._shapes[0][0].size
    self._data = ds_creator().batch(batch, drop_remainder=True).prefetch(ds_prefetch_size)
    self._iterator: Iterator[Any] | None = None

  def initialize(self, sess: object) -> None:
    """Begins with the first batch.

    Args:
      sess: not used.
    """
    del sess
    self._iterator = iter(without_autotuning(self._data))

  def next_slices(self) -> list[list[tf.Tensor]]:
    """Slices of the next batch: for each input a list with one for each processor.

    Raises:
      StopIteration: there is none.
    """
    if self._iterator is None:
      self.initialize(None)
    assert self._iterator is not None
    batch = next(self._iterator)
    batch = batch if isinstance(batch, (tuple, list)) else (batch,)
    return [self._impl.make_slices(t, shape) for t, shape in zip(batch, self._shapes)]

  def gpu_placement(self, model_fn: Callable[[list[tf.Tensor], list[tf.Tensor]], Any]) -> Any:
    """Calls a function with the slices of the two inputs of the next batch.

    Args:
      model_fn: takes the slices of the first and those of the second input.

    Raises:
      ShapeError: there are not two inputs.
    """
    if len(self._shapes) != 2:
      raise ShapeError(f"gpu_placement needs two inputs, got the shapes {self._shapes}")
    first, second = self.next_slices()
    return model_fn(first, second)


def _input_shapes(mtf_input_shapes: Sequence[ShapeLike]) -> list[Shape]:
  shapes = [convert_to_shape(s) for s in mtf_input_shapes]
  if not shapes or len({s[0].size for s in shapes}) != 1:
    raise SizeError(
      f"an input reader needs shapes of one batch size, which stands first, got {shapes}"
    )
  return shapes
