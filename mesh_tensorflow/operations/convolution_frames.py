"""Frames: the positions of a split axis that the windows of one processor's outputs reach.

Along an axis of an image, output o of a window reaches the positions o * stride - before to
o * stride - before + reach - 1. A processor that holds a block of the outputs needs the *frame*
from the first position of its first output to the last of its last one. Frames overlap, may begin
anywhere in a block, may be longer than several blocks, and may lie beyond the ends of the image,
where zeros are. `take` brings each processor its frame; `give` is what that is transposed to: it
brings what was computed for each position of a frame back to where the position lies, and adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.program.dimensions import Dimension, list_product


def split_axis(impl: MeshImpl, dim: Dimension) -> int | None:
  """The mesh axis over which a dimension is split in more than one part, or None."""
  axis: int | None = impl.tensor_dimension_to_mesh_axis(dim)
  return None if axis is None or impl.shape[axis].size == 1 else axis


@dataclasses.dataclass(frozen=True)
class Reach:
  """Receptive fields of the windows along one axis of an image, over all devices.

  Attributes:
    image: the dimension of the image.
    outputs: the dimension of the features: one position for each window.
    stride: from one window to the next.

    reach: extent of a window: positions from its first to its last, ends included.
    before: positions of the first window that lie before the image: padding.
  """

  image: Dimension
  outputs: Dimension
  stride: int
  reach: int
  before: int

  def turned(self) -> Reach:
    """The reverse: from positions of the image to the windows over them; for a stride of 1."""
    return Reach(self.outputs, self.image, 1, self.reach, self.reach - 1 - self.before)


class Frames:
  """The frames of the processors along one axis, and how to exchange them.

  Args:
    impl: a `MeshImpl`.
    axis: the tensor axis that is meant.
    reach: a `Reach`.
  """

  def __init__(self, impl: MeshImpl, axis: int, reach: Reach):
    self._impl, self._axis, self._reach = impl, axis, reach
    self._held, self._made = split_axis(impl, reach.image), split_axis(impl, reach.outputs)
    self._n = 1 if self._made is None else impl.shape[self._made].size
    here = reach.outputs.size // self._n
    self.size = (here - 1) * reach.stride + reach.reach if here else 0
    # Where the frame of each coordinate along the mesh axis of the outputs begins.
    self._begins = [j * here * reach.stride - reach.before for j in range(self._n)]
    self._block = reach.image.size // (1 if self._held is None else impl.shape[self._held].size)

  @property
  def is_split(self) -> bool:
    """True if the image or the outputs are split along the axis."""
    return self._held is not None or self._made is not None

  def begin(self) -> Any:
    """First position of the processor's frame in the image.

    An integer if the outputs are not split, else a laid-out scalar, one per processor.
    """
    if self._made is None:
      return self._begins[0]
    entry = self._impl.laid_out_entry([self._made], [[b] for b in self._begins])
    return entry[0] if isinstance(entry, list) else self._impl.slicewise(lambda e: e[0], entry)

  def take(self, lowering: LoweringInProgress, x: LaidOut, counter: str) -> Any:
    """The frame of each processor, from slices of the image.

    Args:
      lowering: gets counters of what is moved.
      x: slices of an image, laid out; with zeros added beyond its ends.
      counter: what the counters are of.
    """
    x = x.to_laid_out_tensor()
    steps = self._neighbours()
    if steps is None:
      if self._held is not None:
        x = self._impl.allconcat(x, self._held, self._axis)
        self._count(lowering, x, "allconcat", self._held, counter)
      first, last = min(self._begins), max(self._begins) + self.size
      x = self._fitted(x, -first, last - self._reach.image.size)
      return self._cut(x, [b - first for b in self._begins], self.size)
    parts = []
    for q, begin, size in steps:
      part = self._impl.slicewise(
        lambda t, begin=begin, size=size: kernels.cut_axis(t, self._axis, begin, size), x
      )
      if q:
        part = self._moved(lowering, part, q, counter)
      parts.append(part)
    if len(parts) > 1:
      x = self._impl.slicewise(lambda *ts: tf.concat(ts, self._axis), *parts)
    else:
      x = parts[0]
    return self._cut(x, self._places(steps), self.size)

  def give(self, lowering: LoweringInProgress, y: LaidOut, counter: str) -> Any:
    """Sums the frames into the image: the transpose of `take`; laid out as the image.

    Args:
      lowering: gets counters of what is moved.
      y: a frame for each processor, laid out.
      counter: what the counters are of.
    """
    steps = self._neighbours()
    if steps is None:
      return self._give_all(lowering, y, counter)
    y = self._placed(y, self._places(steps), sum(size for _, _, size in steps))
    tensors, stretches, done = [], [], 0
    for q, begin, size in steps:
      part, at = y, done
      if q:
        part = self._impl.slicewise(
          lambda t, done=done, size=size: kernels.cut_axis(t, self._axis, done, size), y
        )
        part, at = self._moved(lowering, part, -q, counter), 0
      tensors.append(part)
      stretches.append((begin, size, at))
      done += size
    return self._impl.slicewise(
      lambda *ts: summed(ts, stretches, self._axis, self._block), *tensors
    )

  def _give_all(self, lowering: LoweringInProgress, y: LaidOut, counter: str) -> Any:
    impl, axis, n = self._impl, self._axis, self._reach.image.size
    first, last = min(self._begins), max(self._begins) + self.size
    y = self._placed(y, [b - first for b in self._begins], last - first)
    y = self._fitted(y, first, n - last)
    if self._made is None:
      return y if self._held is None else impl.allsplit(y, self._held, axis)
    if self._held == self._made:
      self._count(lowering, y, "reduce_scatter", self._made, counter)
      return impl.reduce_scatter(y, self._made, axis)
    self._count(lowering, y, "allreduce", self._made, counter)
    y = impl.allreduce(y, [self._made], "SUM")
    return y if self._held is None else impl.allsplit(y, self._held, axis)

  def _neighbours(self) -> list[tuple[int, int, int]] | None:
    """Plans which part of which neighbours' blocks each processor receives.

    Returns:
      (q, begin, size) for each distance q: the part of the block of processor i + q that some
      processor i needs; together they are contiguous. None if there is no neighbour exchange: the
      axis is not split, or differently from the outputs, or all blocks are needed.
    """
    if self._held is None or self._held != self._made or not self.size:
      return None
    b = self._block
    # Relative to the beginning of the processor's own block, as all run one program.
    first = min(begin - j * b for j, begin in enumerate(self._begins))
    last = max(begin - j * b + self.size for j, begin in enumerate(self._begins))
    distances = range(first // b, (last - 1) // b + 1)
    steps = []
    for q in distances:
      begin, end = max(first - q * b, 0), min(last - q * b, b)
      steps.append((q, begin, end - begin))
    moved = sum(size for q, _, size in steps if 0 < abs(q) < self._n)
    # An exchange of all with all moves no more than (n - 1) blocks.
    return None if moved > (self._n - 1) * b else steps

  def _places(self, steps: Sequence[tuple[int, int, int]]) -> list[int]:
    """First position of each processor's frame in the concatenation of `steps`."""
    q, begin, _ = steps[0]
    first = q * self._block + begin
    return [b - j * self._block - first for j, b in enumerate(self._begins)]

  def _moved(self, lowering: LoweringInProgress, part: Any, distance: int, counter: str) -> Any:
    """Sends parts along the mesh axis: processor i receives from i + distance, or gets zeros."""
    if abs(distance) >= self._n:
      return self._impl.slicewise(tf.zeros_like, part)
    assert self._held is not None
    source = [i + distance if 0 <= i + distance < self._n else None for i in range(self._n)]
    self._count(lowering, part, "halo", self._held, counter)
    return self._impl.receive(part, self._held, source)

  def _count(
    self, lowering: LoweringInProgress, x: LaidOut, what: str, mesh_axis: int, counter: str
  ) -> None:
    size = list_product(x.slice_shape) * self._impl.size
    lowering.add_counter(f"{what}/[{mesh_axis}]/{counter}", size)

  def _fitted(self, x: LaidOut, before: int, after: int) -> Any:
    """Pads the slices with zeros; crops them where the numbers are negative."""
    if before == after == 0:
      return x
    return self._impl.slicewise(lambda t: fitted(t, self._axis, before, after), x)

  def _cut(self, x: LaidOut, begins: Sequence[int], size: int) -> Any:
    """Slices `size` positions from `begins[i]` on processors of coordinate i."""
    if all(b == 0 for b in begins) and x.slice_shape[self._axis] == size:
      return x
    begin = begins[0]
    if any(b != begin for b in begins):
      assert self._made is not None
      begin = self._impl.laid_out_entry([self._made], [[b] for b in begins])
      return self._impl.slicewise(
        lambda t, b: kernels.cut_axis(t, self._axis, b[0], size), x, begin
      )
    return self._impl.slicewise(lambda t: kernels.cut_axis(t, self._axis, begin, size), x)

  def _placed(self, y: LaidOut, begins: Sequence[int], size: int) -> Any:
    """Transpose of `_cut`: `size` positions, zeros outside the frame."""
    room = size - self.size
    # Zeros of a fixed number on both sides, and a cut: XLA pads by no computed number.
    y = self._fitted(y, room, room)
    return self._cut(y, [room - b for b in begins], size)


def fitted(t: tf.Tensor, axis: int, before: int, after: int) -> tf.Tensor:
  """Pads an axis with zeros; crops it where the numbers are negative.

  Args:
    t: a tensor of static shape.
    axis: the axis that gets longer or shorter.
    before: zeros to add in front; if negative, positions to crop.
    after: zeros to add at the end; if negative, positions to crop.
  """
  n = t.shape[axis]
  begin, end = min(max(-before, 0), n), max(n - max(-after, 0), 0)
  if begin >= end:
    sizes = t.shape.as_list()
    sizes[axis] = max(n + before + after, 0)
    return tf.zeros(sizes, t.dtype)
  if (begin, end) != (0, n):
    t = kernels.cut_axis(t, axis, begin, end - begin)
  if before > 0 or after > 0:
    t = kernels.pad(t, axis, max(before, 0), max(after, 0))
  return t


def summed(
  tensors: Sequence[tf.Tensor],
  stretches: Sequence[tuple[int, int, int]],
  axis: int,
  size: int,
) -> tf.Tensor:
  """Sums stretches of several tensors into a block of zeros.

  Neighbours add to a few positions at the ends: only these are summed, and the rest is copied
  once. Padding each stretch to the block would take several times the memory of the block.

  Args:
    tensors: what is added.
    stretches: for each tensor where in the block its stretch begins, how many positions it has,
      and where in the tensor it begins.
    axis: the axis that is meant.
    size: positions of the block.
  """
  ends = sorted({0, size, *(e for begin, n, _ in stretches for e in (begin, begin + n))})
  pieces = []
  for first, last in zip(ends, ends[1:]):
    here = [
      kernels.cut_axis(t, axis, first - begin + at, last - first)
      for t, (begin, n, at) in zip(tensors, stretches)
      if begin <= first and last <= begin + n
    ]
    if not here:
      sizes = tensors[0].shape.as_list()
      sizes[axis] = last - first
      here = [tf.zeros(sizes, tensors[0].dtype)]
    pieces.append(here[0] if len(here) == 1 else tf.add_n(here))
  return pieces[0] if len(pieces) == 1 else tf.concat(pieces, axis)
