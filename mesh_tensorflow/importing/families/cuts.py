"""Resolves the masks of TensorFlow's StridedSlice to plain numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt


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
