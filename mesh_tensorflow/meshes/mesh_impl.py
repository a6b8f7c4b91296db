"""Base class of the mesh implementations: what follows from the contract.

Everything that can be said in terms of `slicewise`, the collectives and the processor number
is written here once, for all implementations. What one defines for itself: `contract`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError, UnsupportedError
from mesh_tensorflow.meshes import laid_out
from mesh_tensorflow.meshes.contract import MeshContract
from mesh_tensorflow.meshes.laid_out import (
  LaidOut,
  LazyAllreduceSum,
  LazyGather,
  compatible_lazy_allreduce_sums,
)
from mesh_tensorflow.meshes.layout import (
  MeshLayout,
  pnum_to_processor_coordinates,
  processor_coordinates_to_pnum,
  shape_of,
)
from mesh_tensorflow.meshes.slices import align
from mesh_tensorflow.numerics import kernels, padding, random_bits
from mesh_tensorflow.program.dimensions import Shape, ShapeLike, list_product

# How many operations before its use a variable that is stored in shards may be gathered.
GATHERED_AHEAD = 8


class MeshImpl(MeshContract):
  """Base class of mesh implementations.

  Args:
    shape: mesh shape; a `Shape`, a list of dimensions, or "rows:2,cols:4".
    layout_rules: `LayoutRules`, or what `convert_to_layout_rules` takes.
    variable_store: where variables live; a new `VariableStore` by default.
    shares: of a mesh that is only planned, how many processors each device gets; see
      `PlacementMeshImpl`.
  """

  def laid_out_pcoord(self, mesh_axis: int) -> laid_out.LaidOutTensor:
    """The processor's coordinate along a mesh axis: an int32 scalar per processor."""
    stride = list_product(self._shape.to_integer_list[mesh_axis + 1 :])
    n = self._shape[mesh_axis].size
    coordinate: laid_out.LaidOutTensor = self.slicewise(
      lambda pnum: pnum // stride % n, self.laid_out_pnum()
    )
    return coordinate

  def laid_out_entry(self, mesh_axes: Sequence[int], table: Sequence[Sequence[int]]) -> Any:
    """Each processor's entry of a table.

    Args:
      mesh_axes: mesh axes, increasing.
      table: an entry (a sequence of numbers) for every combination of coordinates along these
        axes, row-major.

    Returns:
      The entry if all are equal. Else a laid-out tensor of int32 (lists if static).
    """
    # Lists: a tuple would be several outputs of `slicewise`.
    table = [list(entry) for entry in table]
    if all(entry == table[0] for entry in table):
      return table[0]
    sizes = self._shape.to_integer_list
    entries = []
    for pnum in range(self.size):
      coord = pnum_to_processor_coordinates(self._shape, pnum)
      rank = processor_coordinates_to_pnum(
        [sizes[m] for m in mesh_axes], [coord[m] for m in mesh_axes]
      )
      entries.append(table[rank])
    return self.slicewise(
      lambda p: tf.gather(tf.constant(entries), p) if tf.is_tensor(p) else entries[p],
      self.laid_out_pnum(),
    )

  def laid_out_slice_begin(self, tensor_shape: Shape) -> list[Any]:
    """Per tensor axis the offset of the processor's slice: 0, or an int32 scalar laid out."""
    begins: list[Any] = []
    for d, axis in zip(tensor_shape, self.tensor_layout(tensor_shape)):
      if axis is None or self._shape[axis].size == 1:
        begins.append(0)
      else:
        part = -(-d.size // self._shape[axis].size)
        begins.append(self.slicewise(lambda c, part=part: c * part, self.laid_out_pcoord(axis)))
    return begins

  def laid_out_extents(self, tensor_shape: Shape, axes: Sequence[int]) -> list[Any]:
    """Numbers of places of the processor's slice that are not padding.

    Args:
      tensor_shape: a `Shape`.
      axes: axes of it that are split.

    Returns:
      For each axis an int32 scalar laid out; Python integers if they are static.
    """
    begins, sizes = self.laid_out_slice_begin(tensor_shape), self.slice_shape(tensor_shape)

    def extent(begin: int | tf.Tensor, whole: int, part: int) -> int | tf.Tensor:
      if isinstance(begin, int):
        return min(part, max(0, whole - begin))
      return tf.clip_by_value(whole - begin, 0, part)

    return [self.slicewise(extent, begins[i], tensor_shape[i].size, sizes[i]) for i in axes]

  def without_padding(
    self, x: LaidOut, tensor_shape: Shape, value: Callable[[tf.DType], tf.Tensor], along: Any = None
  ) -> LaidOut:
    """x with its padding replaced; x itself if no dimension is split unevenly.

    Args:
      x: a laid-out tensor.
      tensor_shape: its `Shape`.
      value: returns the scalar for the padding; called with the dtype of x.
      along: the dimensions whose padding is replaced; all by default.
    """
    axes = [i for i in self.uneven_axes(tensor_shape) if along is None or tensor_shape[i] in along]
    if not axes:
      return x
    replaced: laid_out.LaidOutTensor = self.slicewise(
      lambda t, *extents: padding.replaced(t, axes, extents, value(t.dtype)),
      x,
      *self.laid_out_extents(tensor_shape, axes),
    )
    return replaced

  def gathered_for(self, x: LaidOut, tensor_shape: Shape, coarser: MeshLayout) -> LaidOut:
    """Slices of this layout, gathered to those of one that leaves more dimensions whole.

    Args:
      x: a laid-out tensor.
      tensor_shape: its `Shape`.
      coarser: the layout, see `MeshLayout.unsplit`.
    """
    for axis, mesh_axis in enumerate(self.tensor_layout(tensor_shape)):
      if mesh_axis is None or coarser.tensor_layout(tensor_shape)[axis] is not None:
        continue
      x = self.allconcat(x, mesh_axis, axis)
      if axis in self.uneven_axes(tensor_shape):
        size = tensor_shape[axis].size
        x = self.slicewise(lambda t, i=axis, n=size: kernels.cut_axis(t, i, 0, n), x)
    return x

  def cut_from(self, x: LaidOut, tensor_shape: Shape, coarser: MeshLayout) -> LaidOut:
    """Slices of this layout, cut from those of one that leaves more dimensions whole.

    Args:
      x: a laid-out tensor.
      tensor_shape: its `Shape`.
      coarser: the layout, see `MeshLayout.unsplit`.
    """
    parts = self.slice_shape(tensor_shape)
    for axis, mesh_axis in enumerate(self.tensor_layout(tensor_shape)):
      if mesh_axis is None or coarser.tensor_layout(tensor_shape)[axis] is not None:
        continue
      size = parts[axis] * self._shape[mesh_axis].size
      x = self.slicewise(lambda t, i=axis, n=size: padding.padded(t, i, n), x)
      x = self.allsplit(x, mesh_axis, axis)
    return x

  def padded_whole(self, tf_tensor: tf.Tensor, tensor_shape: Shape) -> tf.Tensor:
    """A whole tensor with padding behind it, so that it can be cut into slices of one shape."""
    uneven, parts = self.uneven_axes(tensor_shape), self.slice_shape(tensor_shape)
    for axis, mesh_axis in enumerate(self.tensor_layout(tensor_shape)):
      if mesh_axis is not None and axis in uneven:
        size = parts[axis] * self._shape[mesh_axis].size
        tf_tensor = padding.padded(tf_tensor, axis, size)
    return tf_tensor

  def laid_out_slice_num(self, tensor_shape: Shape) -> laid_out.LaidOutTensor:
    """A number per processor, equal for processors that hold the same slice."""
    result: laid_out.LaidOutTensor = self.slicewise(lambda p: p * 0, self.laid_out_pnum())
    for axis in self.tensor_layout(tensor_shape):
      if axis is not None:
        n = self._shape[axis].size
        result = self.slicewise(lambda r, c, n=n: r * n + c, result, self.laid_out_pcoord(axis))
    return result

  def slicewise_delay_allreduce(self, fn: Callable[..., object], *inputs: Any) -> Any:
    """`slicewise` of a linear function: sums that are pending stay pending."""
    if compatible_lazy_allreduce_sums(inputs):
      first = inputs[0]
      return LazyAllreduceSum(
        self,
        self.slicewise(fn, *[x.laid_out_input for x in inputs]),
        first.mesh_axes,
        add_counter_fn=first.add_counter_fn,
      )
    return self.slicewise(fn, *inputs)

  def joined_sum_bytes(self, mesh_axes: Sequence[int]) -> int:
    """Size of a message, in bytes, up to which pending sums are joined; 0: each is exchanged alone.

    Args:
      mesh_axes: the mesh axes to sum over.
    """
    del mesh_axes
    return 0

  def allsplit(
    self, x: LaidOut, mesh_axis: int, split_axis: int, which: LaidOut | None = None
  ) -> laid_out.LaidOutTensor:
    """Every processor keeps its part of its slice; no communication.

    Args:
      x: a laid-out tensor.
      mesh_axis: the processor's coordinate along it says which part.
      split_axis: the tensor axis to cut.
      which: a laid-out part number to use in place of the coordinate.
    """
    n = self._shape[mesh_axis].size
    if n == 1:
      return x.to_laid_out_tensor()

    def keep(t: tf.Tensor, part: int | tf.Tensor) -> tf.Tensor:
      size = t.shape[split_axis]
      if size % n:
        raise ShapeError(
          f"allsplit: axis {split_axis} of size {size} cannot be split over mesh axis "
          f"{self._shape[mesh_axis].name}:{n}"
        )
      return kernels.cut_axis(t, split_axis, part * (size // n), size // n)

    which = self.laid_out_pcoord(mesh_axis) if which is None else which
    parts: laid_out.LaidOutTensor = self.slicewise(keep, x, which)
    return parts

  def to_shards(self, x: LaidOut, shape: Shape, stored: MeshLayout) -> laid_out.LaidOutTensor:
    """Slices of this layout, cut into those of a finer one; a pending sum is scattered.

    Args:
      x: a laid-out tensor.
      shape: its `Shape`.
      stored: the finer layout, see `stored_layout`.
    """
    split = self._split(shape, stored)
    if not split:
      return x.to_laid_out_tensor()
    if isinstance(x, LazyAllreduceSum):
      return x.shards(split)
    if isinstance(x, LazyGather) and x.split == split:
      return x.shards
    return laid_out.cut(self, x, split)

  def from_shards(
    self,
    x: LaidOut,
    shape: Shape,
    stored: MeshLayout,
    after: Callable[[], Sequence[tf.Tensor]] = list,
  ) -> LaidOut:
    """Slices of this layout, gathered from those of a finer one when they are used.

    Args:
      x: a laid-out tensor.
      shape: its `Shape`.
      stored: the finer layout, see `stored_layout`.
      after: returns tensors that a gather waits for, if slices are gathered for each use.
    """
    split = self._split(shape, stored)
    if not split:
      return x

    keeps, part = not self.reshards_after_forward, self.slice_shape(shape)
    return LazyGather(self, x.to_laid_out_tensor(), split, part, keeps, after)

  def has_shards(self, x: LaidOut, shape: Shape, stored: MeshLayout) -> bool:
    """True if the slices of a finer layout are there, and those of this one are not.

    Args:
      x: a laid-out tensor.
      shape: its `Shape`.
      stored: the finer layout, see `stored_layout`.
    """
    if isinstance(x, LazyAllreduceSum):
      return x.is_scattered
    return isinstance(x, LazyGather) and x.split == self._split(shape, stored)

  def _split(self, shape: Shape, stored: MeshLayout) -> laid_out.Split:
    """The cuts that a finer layout adds, in order of tensor axes; see `laid_out.Split`."""
    if stored is self:
      return ()
    return tuple(
      (after, i, shape[i].size)
      for i, (before, after) in enumerate(
        zip(self.tensor_layout(shape), stored.tensor_layout(shape))
      )
      if before is None and after is not None
    )

  def reduce_scatter(self, x: LaidOut, mesh_axis: int, split_axis: int) -> laid_out.LaidOutTensor:
    """Sums along a mesh axis; every processor gets its part of the sum.

    Args:
      x: a laid-out tensor of numbers.
      mesh_axis: the mesh axis to sum over; the coordinate along it says which part.
      split_axis: the tensor axis that is cut into parts.

    Raises:
      ShapeError: `split_axis` cannot be split into as many parts.
    """
    if self._shape[mesh_axis].size == 1:
      return x.to_laid_out_tensor()
    # Each gets its part of every slice, stacked along a new axis.
    stacked = self.alltoall(
      self.slicewise(lambda t: t[tf.newaxis], x), mesh_axis, split_axis + 1, 0
    )
    total: laid_out.LaidOutTensor = self.slicewise(lambda t: tf.reduce_sum(t, 0), stacked)
    return total

  def shift_by_n_processors(
    self, x: LaidOut, mesh_axis: int, offset: int, wrap: bool
  ) -> laid_out.LaidOutTensor:
    """The processor at coordinate i receives the slice of i - offset (or zeros, or wrapped)."""
    n = self._shape[mesh_axis].size
    source: list[int | None] = []
    for i in range(n):
      c = i - offset
      source.append(c % n if wrap else (c if 0 <= c < n else None))
    return self.receive(x, mesh_axis, source)

  def broadcast(self, x: LaidOut, mesh_axis: int, source_pcoord: int = 0) -> laid_out.LaidOutTensor:
    """Every processor along the mesh axis gets the slice of the one at `source_pcoord`."""
    return self.receive(x, mesh_axis, [source_pcoord] * self._shape[mesh_axis].size)

  def broadcast_impl(
    self, old_slices: LaidOut, old_shape: ShapeLike, new_shape: ShapeLike
  ) -> laid_out.LaidOutTensor:
    """Slices of `old_shape` transposed and repeated to slices of `new_shape`."""
    old_shape, new_shape = shape_of(old_shape), shape_of(new_shape)
    new_slice_shape = self.slice_shape(new_shape)
    new_slices: laid_out.LaidOutTensor = self.slicewise(
      lambda t: kernels.broadcast_to(align(t, old_shape.dims, new_shape.dims), new_slice_shape),
      old_slices,
    )
    return new_slices

  def einsum(self, equation: str, *slices: tf.Tensor) -> tf.Tensor:
    """Contracts slices on one processor; an override hook."""
    return tf.einsum(equation, *slices)

  def make_slices(self, tf_tensor: tf.Tensor, tensor_shape: ShapeLike) -> list[tf.Tensor]:
    """Cuts a whole tensor into one slice per processor; equal slices are one tensor."""
    tensor_shape = shape_of(tensor_shape)
    slice_shape = self.slice_shape(tensor_shape)
    if slice_shape == tensor_shape.to_integer_list:
      return [tf_tensor] * self.size
    tf_tensor = self.padded_whole(tf_tensor, tensor_shape)
    cut: dict[tuple[int, ...], tf.Tensor] = {}
    result = []
    for pnum in range(self.size):
      begin = tuple(self.slice_begin(tensor_shape, pnum))
      if begin not in cut:
        cut[begin] = kernels.cut(tf_tensor, begin, slice_shape)
      result.append(cut[begin])
    return result

  def combine_slices(
    self, slices: Sequence[tf.Tensor], tensor_shape: ShapeLike, device: str | None = None
  ) -> tf.Tensor:
    """Puts a whole tensor together from one slice per processor."""
    tensor_shape = shape_of(tensor_shape)
    if tensor_shape.ndims == 0 or self.tensor_layout(tensor_shape).is_fully_replicated:
      return slices[0]
    to_tensor_axis = self.tensor_layout(tensor_shape).mesh_axis_to_tensor_axis(self.ndims)

    def combine() -> tf.Tensor:
      parts = list(slices)
      for m, tensor_axis in zip(self._shape, to_tensor_axis):
        # `parts` is ordered row-major over the mesh axes that are left; m is the first.
        inner = len(parts) // m.size
        if tensor_axis is None or m.size == 1:
          # Replicas: those at coordinate 0 are as good as the others.
          parts = parts[:inner]
        else:
          parts = [tf.concat(parts[i::inner], tensor_axis) for i in range(inner)]
      whole = parts[0]
      for axis in self.uneven_axes(tensor_shape):
        whole = kernels.cut_axis(whole, axis, 0, tensor_shape[axis].size)
      return whole

    if device is None:
      return combine()
    with tf.device(device):
      return combine()

  def local_part(self, shape: Shape) -> tuple[list[int], list[int]]:
    """Smallest block of a tensor that contains the slices of all processors of this process.

    Args:
      shape: a `Shape`.

    Returns:
      (begins, sizes): offset and size along each axis; all of the tensor in a single process.
    """
    return [0] * shape.ndims, shape.to_integer_list

  def combine_local_slices(self, slices: Sequence[tf.Tensor], tensor_shape: Shape) -> tf.Tensor:
    """`combine_slices` of the slices that `run_per_device` gave for one tensor."""
    return self.combine_slices(slices, tensor_shape)

  def random(
    self,
    shape: Shape,
    tf_fn: Callable[..., tf.Tensor],
    kwargs: dict[str, Any],
    key: int | LaidOut = 0,
  ) -> laid_out.LaidOutTensor:
    """Random slices of one logical tensor: values depend on key and global index only.

    Args:
      shape: a `Shape`.
      tf_fn: `tf.random.uniform`, `tf.random.normal` or `tf.random.truncated_normal`.
      kwargs: its keyword arguments (minval, maxval, mean, stddev, dtype).
      key: a uint32 scalar, laid out, or a Python integer.

    Raises:
      UnsupportedError: another function.
    """
    draw = random_bits.DISTRIBUTIONS.get(getattr(tf_fn, "__name__", ""))
    if draw is None:
      raise UnsupportedError(
        f"random: {tf_fn!r} cannot be drawn slice by slice; use tf.random.uniform, "
        "tf.random.normal or tf.random.truncated_normal"
      )
    shape = shape_of(shape)
    slice_shape = self.slice_shape(shape)
    begins = self.laid_out_slice_begin(shape)
    numbers: laid_out.LaidOutTensor = self.slicewise(
      lambda k, *b: draw(k, shape.to_integer_list, b, slice_shape, **kwargs), key, *begins
    )
    return numbers
