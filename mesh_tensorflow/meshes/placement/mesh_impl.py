"""A mesh of devices of one process, with explicit exchanges between them.

One program holds the slices of every processor; each per-device operation is
placed on its device, and a collective is a few TensorFlow operations that read
the slices of the other devices. The graph grows with the number of devices.

A device may be that of several processors (`shares`). These have one copy of what they
would have alike: a variable is stored once, what depends on equal slices is computed once,
and sums add up inside a device before anything is sent to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import GraphError, MeshShapeError
from mesh_tensorflow.meshes.contract import LaidOutVariable
from mesh_tensorflow.meshes.laid_out import LaidOut, LaidOutTensor, convert_args_to_laid_out_tensors
from mesh_tensorflow.meshes.layout import LayoutLike, processor_groups, shape_of
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.shares import SharesLike, assign_processors
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.numerics import constants, kernels
from mesh_tensorflow.program.dimensions import Shape, ShapeLike
from mesh_tensorflow.program.graph import Tensor


class PlacementMeshImpl(MeshImpl):
  """A mesh over a list of devices.

  Args:
    shape: mesh shape.
    layout: layout rules.
    devices: one device name per processor, row-major over the mesh; "" (the
      default device) is allowed. A name that repeats is a device of several processors.
    variable_store: where variables live; a new one by default.
    shares: for devices of unequal speed, how many processors each one gets: {"batch": [3, 1]} of a
      mesh "batch:4" are three for the first of two `devices`, and one for the second. See
      `assign_processors`.

  Raises:
    MeshShapeError: the number of devices is not the size of the mesh, or `shares` do not suit it.
  """

  LaidOutVariable = LaidOutVariable

  @checked
  def __init__(
    self,
    shape: ShapeLike,
    layout: LayoutLike,
    devices: Sequence[str],
    *,
    variable_store: VariableStore | None = None,
    shares: SharesLike | None = None,
  ):
    super().__init__(shape, layout, variable_store=variable_store)
    self._devices = list(devices)
    if shares is not None:
      self._devices = assign_processors(self.shape, self._devices, shares)
    self._turn = 0
    check_device_count(self.shape, len(self._devices))

  @property
  def devices(self) -> list[str]:
    """The device of every processor, in the order of processor numbers."""
    return self._devices

  # ------------------------------------------------------------ for the store

  @property
  def local_processors(self) -> range:
    return range(self.size)

  def processor_device(self, pnum: int) -> str | None:
    return self._devices[pnum] or None

  # ----------------------------------------------------------------- the contract

  def slicewise(self, fn: Callable[..., object], *inputs: Any) -> Any:
    # Processors of one device whose slices are the same tensors have one result.
    return self._slicewise(fn, inputs, lambda args: tuple(map(_identity, args)))

  def slicewise_update(self, fn: Callable[..., object], variables: LaidOut, *inputs: Any) -> Any:
    return self._slicewise(fn, (variables, *inputs), lambda args: id(args[0]))

  def _slicewise(
    self, fn: Callable[..., object], inputs: Sequence[Any], key_of: Callable[[Sequence[Any]], Any]
  ) -> Any:
    """Calls `fn` on the slices of each processor; once for those of a device with the same key."""
    per_input = [
      x.tensor_list if isinstance(x, LaidOutTensor) else [x] * self.size
      for x in convert_args_to_laid_out_tensors(inputs)
    ]
    results = []
    known: dict[Any, Any] = {}
    for i, device in enumerate(self._devices):
      args = [p[i] for p in per_input]
      key = (device, key_of(args))
      if key not in known:
        known[key] = self._call_on(device, fn, args)
      results.append(known[key])
    if isinstance(results[0], tuple):
      return tuple(LaidOutTensor(r) for r in zip(*results))
    return LaidOutTensor(results)

  def _call_on(self, device: str, fn: Callable[..., object], args: Sequence[Any]) -> Any:
    """Calls a function on the slices of one processor."""
    with tf.device(device or None), constants.on_device(device):
      return fn(*args)

  def laid_out_pnum(self) -> LaidOutTensor:
    # Python numbers: what is computed of them, offsets of slices, is known when the graph is made.
    return LaidOutTensor(range(self.size))

  def allreduce(
    self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str
  ) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    combine = {"SUM": kernels.sum_of, "MAX": _fold(tf.maximum), "MIN": _fold(tf.minimum)}.get(
      reduction_fn_string
    )
    if combine is None:
      raise GraphError(f"allreduce: {reduction_fn_string!r} is not SUM, MAX or MIN")
    if x.tensor_list[0].dtype == tf.bool:
      as_int = self.slicewise(lambda t: tf.cast(t, tf.int32), x)
      reduced = self.allreduce(as_int, mesh_axes, reduction_fn_string)
      as_bool: LaidOutTensor = self.slicewise(lambda t: tf.cast(t, tf.bool), reduced)
      return as_bool
    axes = [a for a in mesh_axes if self.shape[a].size > 1]
    if not axes:
      return x
    parts = self._device_parts(axes)
    return self._exchange(
      x, axes, lambda group: self._reduced(x.tensor_list, group, combine, parts)
    )

  def allconcat(
    self, x: LaidOut, mesh_axis: int, concat_axis: int, stack: bool = False
  ) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    join = kernels.stack if stack else tf.concat
    if not stack and self.shape[mesh_axis].size == 1:
      return x
    return self._exchange(
      x, [mesh_axis], lambda group: join([x.tensor_list[p] for p in group], concat_axis)
    )

  def alltoall(
    self, x: LaidOut, mesh_axis: int | Sequence[int], split_axis: int, concat_axis: int
  ) -> LaidOutTensor:
    return self._exchange_parts(
      "alltoall",
      x,
      mesh_axis,
      split_axis,
      lambda parts, group: tf.concat([parts[p] for p in group], concat_axis),
    )

  def reduce_scatter(self, x: LaidOut, mesh_axis: int, split_axis: int) -> LaidOutTensor:
    own = self._device_parts(self.group_axes(mesh_axis))
    return self._exchange_parts(
      "reduce_scatter",
      x,
      mesh_axis,
      split_axis,
      lambda parts, group: self._reduced(parts, group, kernels.sum_of, own),
    )

  def receive(
    self, x: LaidOut, mesh_axis: int | Sequence[int], source_pcoord: Sequence[int | None]
  ) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    axes = self.group_axes(mesh_axis)
    self._check_sources(source_pcoord, axes)
    result: list[Any] = [None] * self.size
    for group in processor_groups(self.shape, axes):
      for pnum, source in zip(group, source_pcoord):
        with tf.device(self.processor_device(pnum)):
          if source is None:
            result[pnum] = tf.zeros_like(x.tensor_list[pnum])
          elif self._devices[group[source]] == self._devices[pnum]:
            result[pnum] = x.tensor_list[group[source]]
          else:
            # On the receiver's device: this is the copy.
            result[pnum] = tf.identity(x.tensor_list[group[source]])
    return LaidOutTensor(result)

  def import_tf_tensor(self, x: Tensor | Shape, tf_x: tf.Tensor) -> LaidOutTensor:
    return LaidOutTensor(self.make_slices(tf_x, shape_of(x)))

  def export_to_tf_tensor(self, x: Tensor | Shape, laid_out_x: LaidOut) -> tf.Tensor:
    shape = x if isinstance(x, Shape) else x.shape
    return self.combine_slices(laid_out_x.to_laid_out_tensor().all_slices, shape)

  def Print(self, x: LaidOut, data: Sequence[LaidOut], message: str, **kwargs: Any) -> Any:  # noqa: N802
    """Prints all slices of `data`, once, on the first processor."""
    parts = [t for d in data for t in d.to_laid_out_tensor().all_slices]
    with tf.device(self.processor_device(0)):
      tf.print(message, *parts, summarize=kwargs.get("summarize", 3))
    return x

  # -------------------------------------------------------------------- helpers

  def _exchange(
    self,
    x: LaidOutTensor,
    mesh_axes: Sequence[int],
    combine: Callable[[Sequence[int]], tf.Tensor],
  ) -> LaidOutTensor:
    """Combines, in each group of processors, the slices of all its members.

    One member combines and hands the result on: between the devices of one host
    that costs no copy, and the arithmetic is done once. Successive exchanges take
    turns, so that the work spreads over the devices.

    Args:
      x: a laid-out tensor.
      mesh_axes: along which the members of a group differ.
      combine: takes the numbers of the members.
    """
    result: list[Any] = [None] * self.size
    for group in processor_groups(self.shape, mesh_axes):
      worker = group[self._turn % len(group)]
      with tf.device(self.processor_device(worker)):
        combined = combine(group)
      for pnum in group:
        result[pnum] = combined
    self._turn += 1
    return LaidOutTensor(result)

  def _exchange_parts(
    self,
    what: str,
    x: LaidOut,
    mesh_axis: int | Sequence[int],
    split_axis: int,
    combine: Callable[[Sequence[tf.Tensor], Sequence[int]], tf.Tensor],
  ) -> LaidOutTensor:
    """Splits all slices; each processor combines the parts of its group that are for it."""
    x = x.to_laid_out_tensor()
    axes = self.group_axes(mesh_axis)
    if not axes:
      return x
    n = self._split_parts(what, x.slice_shape, split_axis, axes)
    pieces = self.slicewise(lambda t: tuple(tf.split(t, n, split_axis)), x)
    result: list[Any] = [None] * self.size
    for group in processor_groups(self.shape, axes):
      for k, pnum in enumerate(group):
        with tf.device(self.processor_device(pnum)):
          result[pnum] = combine(pieces[k].tensor_list, group)
    return LaidOutTensor(result)

  def _device_parts(self, mesh_axes: Sequence[int]) -> list[list[int]]:
    """For each device the ranks of its processors in a group; each rank alone if groups differ.

    All groups sum in one order: what is replicated over other mesh axes is the same bit by bit.
    """
    found = set()
    for group in processor_groups(self.shape, mesh_axes):
      by_device: dict[str, list[int]] = {}
      for rank, pnum in enumerate(group):
        by_device.setdefault(self._devices[pnum], []).append(rank)
      found.add(tuple(map(tuple, by_device.values())))
    if len(found) > 1:
      return [[rank] for rank in range(self.group_size(mesh_axes))]
    return [list(ranks) for ranks in found.pop()]

  def _reduced(
    self,
    slices: Sequence[tf.Tensor],
    group: Sequence[int],
    combine: Callable[[list[tf.Tensor]], tf.Tensor],
    parts: Sequence[Sequence[int]],
  ) -> tf.Tensor:
    """Reduces slices on the current device; those of one device first there, so that one is sent.

    Args:
      slices: one for each processor of the mesh.
      group: the processors whose slices are reduced.
      combine: reduces a list of tensors.
      parts: see `_device_parts`.
    """
    if len(parts) == 1:
      return combine([slices[p] for p in group])
    sums = []
    for ranks in parts:
      own = [slices[group[rank]] for rank in ranks]
      with tf.device(self.processor_device(group[ranks[0]])):
        sums.append(combine(own) if len(own) > 1 else own[0])
    return combine(sums)


def _identity(x: Any) -> Any:
  """Key of an argument of `slicewise`: integers by their values, all else by what it is."""
  return (type(x), x) if isinstance(x, int) else id(x)


def _fold(fn: Callable[..., tf.Tensor]) -> Callable[[list[tf.Tensor]], tf.Tensor]:
  def fold(parts: list[tf.Tensor]) -> tf.Tensor:
    result = parts[0]
    for p in parts[1:]:
      result = fn(result, p)
    return result

  return fold


def check_device_count(shape: Shape, count: int) -> None:
  """Raises `MeshShapeError` unless the mesh has as many processors as there are devices.

  Args:
    shape: the mesh shape.
    count: number of devices.
  """
  if count == shape.size:
    return
  dims = " x ".join(f"{d.name}:{d.size}" for d in shape) or "(no dimensions)"
  fit = suggest_mesh_shape(shape, count)
  raise MeshShapeError(
    f"mesh shape {dims} has {shape.size} processors, but {count} device(s) were given; "
    f"a mesh that fits: {fit}; or give {shape.size} devices"
  )


def suggest_mesh_shape(shape: Shape, count: int) -> str:
  """A mesh shape with the same dimension names for `count` devices, as text."""
  if not len(shape):
    return f"all:{count}"
  sizes, left = [], count
  for d in list(shape)[1:]:
    n = max(k for k in range(1, min(d.size, left) + 1) if left % k == 0)
    sizes.append(n)
    left //= n
  return ",".join(f"{d.name}:{n}" for d, n in zip(shape, [left] + sizes))
