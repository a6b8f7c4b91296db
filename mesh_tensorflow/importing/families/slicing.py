"""Cutting and joining along axes: concat, split, slice, pad, reverse, roll."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.families.inputs import static_input
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import Label, Labels, Slicewise, rule


@dataclasses.dataclass(frozen=True)
class Cut:
  """Slicing of one axis of the input of a StridedSlice, or a new axis that it inserts.

  Attributes:
    axis: of the input; None for a new axis of size 1.
    begin: the first position that is taken.
    step: from one position to the next; may be negative.
    size: number of positions that are taken.
    dropped: whether the axis, of which one position is taken, is not in the result.
    entry: index of its entry in the operation's `begin`; None if it has none.
  """

  axis: int | None
  begin: int = 0
  step: int = 1
  size: int = 1
  dropped: bool = False
  entry: int | None = None

  def takes_all(self, size: int) -> bool:
    """True if an axis of that size is taken whole and in order."""
    return (self.begin, self.step, self.size) == (0, 1, size) and not self.dropped

  @property
  def as_slice(self) -> Any:
    """Python index of this cut: a slice, an integer, or None for a new axis."""
    if self.axis is None:
      return None
    if self.dropped:
      return self.begin
    if not self.size:
      return slice(0, 0)
    end = self.begin + self.step * self.size
    return slice(self.begin, None if end < 0 else end, self.step)


def strided_slice_cuts(
  shape: Sequence[int],
  begin: Sequence[int] | npt.NDArray[Any],
  end: Sequence[int] | npt.NDArray[Any],
  strides: Sequence[int] | npt.NDArray[Any],
  masks: Mapping[str, Any],
) -> list[Cut]:
  """The cuts of a StridedSlice, in the order of the axes of its input and of its result.

  Args:
    shape: shape of the input.
    begin: first position of each entry; negative ones count from the end.
    end: position after the last one of each entry.
    strides: step of each entry; may be negative, not 0.
    masks: attributes "begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask" and
      "shrink_axis_mask".
  """

  def bit(mask: str, i: int) -> bool:
    return bool(int(masks[f"{mask}_mask"]) >> i & 1)

  n = len(begin)
  taken = sum(not bit("new_axis", i) and not bit("ellipsis", i) for i in range(n))
  cuts: list[Cut] = []
  axis = 0

  def whole(count: int) -> None:
    nonlocal axis
    cuts.extend(Cut(a, size=shape[a]) for a in range(axis, axis + count))
    axis += count

  for i in range(n):
    # Where several bits are set, the ellipsis goes first, then the new axis.
    if bit("ellipsis", i):
      whole(len(shape) - taken)
    elif bit("new_axis", i):
      cuts.append(Cut(None))
    elif bit("shrink_axis", i):
      first = int(begin[i])
      cuts.append(Cut(axis, first + shape[axis] if first < 0 else first, dropped=True, entry=i))
      axis += 1
    else:
      step = int(strides[i])
      first, last, step = slice(
        None if bit("begin", i) else int(begin[i]), None if bit("end", i) else int(end[i]), step
      ).indices(shape[axis])
      size = len(range(first, last, step))
      cuts.append(Cut(axis, first, step, size, entry=None if bit("begin", i) else i))
      axis += 1
  whole(len(shape) - axis)
  return cuts


def _positive(axis: int, rank: int) -> int:
  return axis + rank if axis < 0 else axis


@rule("Concat", "ConcatV2")
class Concat(Slicewise):
  """Tensors joined along an axis."""

  def labels(self, node: Node) -> Labels:
    (out,) = node.outputs
    at = 0 if node.type == "Concat" else len(node.inputs) - 1
    axis = _positive(int(static_input(node, at, "axis")), out.rank)
    others: list[Label] = list(range(out.rank))
    inputs: list[Any] = []
    for i, w in enumerate(node.inputs):
      if i == at:
        inputs.append(None)
        continue
      whole = w.shape[axis] == out.shape[axis]  # The others are empty.
      part = axis if whole else f"part{i}"
      inputs.append([*others[:axis], part, *others[axis + 1 :]])
    return Labels(inputs, [others], [axis, *(n[axis] for n in inputs if n is not None)])


@rule("Split", "SplitV")
class Split(Slicewise):
  """Parts of a tensor along an axis."""

  def labels(self, node: Node) -> Labels:
    value = 1 if node.type == "Split" else 0
    at = 0 if node.type == "Split" else 2
    x = node.inputs[value]
    axis = _positive(int(static_input(node, at, "axis")), x.rank)
    given: list[Label] = list(range(x.rank))
    inputs: list[Any] = [None] * len(node.inputs)
    inputs[value] = given
    outputs = [
      [*given[:axis], axis if w.shape[axis] == x.shape[axis] else f"part{i}", *given[axis + 1 :]]
      for i, w in enumerate(node.outputs)
    ]
    return Labels(inputs, outputs, [axis, *(names[axis] for names in outputs)])


@rule("Slice")
class Slice(Slicewise):
  """A block of a tensor; where it begins may be computed."""

  def labels(self, node: Node) -> Labels:
    (x, begin, _), (out,) = node.inputs, node.outputs
    labels: list[Label] = list(range(x.rank))
    made = [i if n == m else f"cut{i}" for i, (n, m) in enumerate(zip(x.shape, out.shape))]
    cut = [label for i, m in enumerate(made) if m != i for label in (i, m)]
    first = None if begin.static is not None else ["begin"]
    return Labels([labels, first, None], [made], [*cut, *(first or ())])

  def run(self, node: Node) -> Callable[..., Any]:
    (x, begin, _), (out,) = node.inputs, node.outputs
    known = begin.static
    if known is not None:
      sizes = [-1 if n == m else m for n, m in zip(x.shape, out.shape)]
      return lambda t: tf.slice(t, tf.constant(known), tf.constant(sizes, begin.dtype))

    def cut(t: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
      for axis, (n, m) in enumerate(zip(x.shape, out.shape)):
        if n != m:
          t = cut_axis_at(t, axis, first[axis], m)
      return t

    return cut


def cut_axis_at(t: tf.Tensor, axis: int, begin: tf.Tensor, size: int) -> tf.Tensor:
  """Slices `size` positions of an axis from a computed one; negative ones count from the end."""
  sizes = t.shape.as_list()
  begin = tf.where(begin < 0, begin + sizes[axis], begin)
  begins, ends = ([tf.constant(n, begin.dtype) for n in e] for e in ([0] * len(sizes), sizes))
  begins[axis], ends[axis] = begin, begin + size
  # Not tf.slice, of whose gradient TensorFlow does not know the shape.
  y = tf.strided_slice(t, tf.stack(begins), tf.stack(ends))
  return tf.reshape(y, [*sizes[:axis], size, *sizes[axis + 1 :]])


@rule("InplaceUpdate")
class InplaceUpdate(Slicewise):
  """Replaces slices at some positions of the first axis; makes a new tensor."""

  def labels(self, node: Node) -> Labels:
    rest: list[Label] = list(range(1, node.outputs[0].rank))
    inputs: list[Any] = [["rows", *rest], ["places"] * node.inputs[1].rank, ["places", *rest]]
    return Labels(inputs, [["rows", *rest]], ["rows", "places"])

  def run(self, node: Node) -> Callable[..., Any]:
    return lambda x, places, rows: tf.tensor_scatter_nd_update(x, tf.reshape(places, [-1, 1]), rows)


@rule("StridedSlice")
class StridedSlice(Slicewise):
  """Indexing with brackets: ranges, steps, integers, new axes, an ellipsis.

  An integer, or the beginning of a range of step 1, may be computed.
  """

  def labels(self, node: Node) -> Labels:
    x = node.inputs[0]
    cuts = _cuts(node)
    labels: list[Label] = list(range(x.rank))
    made: list[Label] = []
    begin = None if node.static(1) is not None else ["begin"]
    whole: list[Label] = list(begin or ())
    for i, cut in enumerate(cuts):
      if cut.axis is None:
        made.append(f"new{i}")
      elif cut.takes_all(x.shape[cut.axis]):
        made.append(cut.axis)
      else:
        whole.append(cut.axis)
        if not cut.dropped:
          # Of the same size only if it is reversed.
          made.append(cut.axis if cut.size == x.shape[cut.axis] else f"cut{cut.axis}")
          whole.append(made[-1])
    return Labels([labels, begin, None, None], [made], whole)

  def run(self, node: Node) -> Callable[..., Any]:
    cuts = _cuts(node)
    x, begin = node.inputs[:2]
    if begin.static is not None:
      brackets = tuple(cut.as_slice for cut in cuts)
      return lambda t: t[brackets]

    def cut_at(t: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
      for cut in cuts:
        axis = cut.axis
        if axis is None or cut.takes_all(x.shape[axis]):
          continue
        at = tf.zeros([], first.dtype) if cut.entry is None else first[cut.entry]
        t = cut_axis_at(t, axis, at, cut.size)
      return tf.reshape(t, _sizes_after(t.shape.as_list(), cuts))

    return cut_at


def _sizes_after(sizes: Sequence[int], cuts: Sequence[Cut]) -> list[int]:
  """Sizes after slicing: without dropped axes, with 1 for new ones."""
  return [1 if cut.axis is None else sizes[cut.axis] for cut in cuts if not cut.dropped]


def _cuts(node: Node) -> list[Cut]:
  """The `Cut` of each axis; if `begin` is computed, only their sizes and entries are valid."""
  x, begin, end, _ = node.inputs
  steps = static_input(node, 3, "strides")
  if begin.static is not None and end.static is not None:
    return strided_slice_cuts(x.shape, begin.static, end.static, steps, node.attributes)
  if any(int(s) != 1 for s in steps):
    raise UnsupportedError(
      f"from_tensorflow: {node} begins or ends at computed positions, with strides {list(steps)}"
    )
  n = begin.shape[0]
  first = [0] * n if begin.static is None else begin.static
  # The sizes are those of the result, which are known.
  sizes = iter(node.outputs[0].shape)
  return [
    cut if cut.dropped else dataclasses.replace(cut, size=next(sizes))
    for cut in strided_slice_cuts(x.shape, first, [x + 1 for x in first], [1] * n, node.attributes)
  ]


@rule("Pad", "PadV2", "MirrorPad")
class Pad(Slicewise):
  """Zeros, another number, or a reflection around a tensor."""

  def labels(self, node: Node) -> Labels:
    paddings = static_input(node, 1, "paddings")
    labels: list[Label] = list(range(node.inputs[0].rank))
    made = [f"padded{i}" if paddings[i].any() else i for i in labels]  # type: ignore[call-overload]
    padded = [label for i, m in enumerate(made) if m != i for label in (i, m)]
    inputs: list[Any] = [labels, None, ()]
    return Labels(inputs[: len(node.inputs)], [made], padded)


@rule("ReverseV2", "Roll")
class Turned(Slicewise):
  """Reorders positions along some axes: reverse and roll."""

  def labels(self, node: Node) -> Labels:
    x = node.inputs[0]
    labels: list[Label] = list(range(x.rank))
    at = len(node.inputs) - 1
    axes = static_input(node, at, "axes").reshape([-1])
    inputs: list[Any] = [labels] + [None] * at
    if node.type == "Roll" and node.static(1) is None:
      inputs[1] = ["shift"] * node.inputs[1].rank
    turned = [_positive(int(a), x.rank) for a in axes]
    return Labels(inputs, [labels], [*turned, *(inputs[1] or ())])
