"""Equivalence classes of axes that are one dimension, and how they are joined.

An axis of a wire is a sequence of *factors*, major first: none for size 1, one as a rule, several
where a reshape joins axes (`[batch, length, d] -> [batch * length, d]`). So a reshape that joins
and one that splits again cost nothing, and a layout of `batch` goes through. Factors that are
known to be the same are joined (a union-find); one that turns out to be a product (because it
meets several) is replaced by its parts everywhere. Two axes of one tensor are never joined.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from mesh_tensorflow.errors import DimensionError
from mesh_tensorflow.importing.nodes import Node, Wire

# An axis of a wire: the wire, and the position of the axis, not negative.
Axis = tuple[Wire, int]


class Factor:
  """Equivalence class of axes of one size, or of factors of axes; becomes an `mtf.Dimension`.

  Attributes:
    size: at least 2.
    name: given by the user, or None.
    pinned: whether it must stay one dimension: of a variable or an argument, or named by the user.
    places: the axes that it is a factor of, in order.
    alike: another factor that would be the same one, if both did not occur in one tensor.
  """

  def __init__(self, size: int):
    self.size = size
    self.name: str | None = None
    self.pinned = False
    self.places: dict[Axis, None] = {}
    self.wires: set[Wire] = set()
    self.alike: Factor | None = None
    self._same: Factor | None = None
    self._parts: tuple[Factor, Factor] | None = None

  @property
  def where(self) -> str:
    """First axis that it is a factor of, for messages."""
    wire, i = next(iter(self.places))
    return f"axis {i} of {wire.name}"

  def resolved(self) -> list[Factor]:
    """Factors that have replaced it by joins and splits."""
    factor = self
    while factor._same is not None:
      factor = factor._same
    if factor is not self:
      self._same = factor
    if factor._parts is None:
      return [factor]
    return [f for part in factor._parts for f in part.resolved()]

  def split(self, major: int) -> None:
    """Replaces it by two, the first of size `major`, wherever it is."""
    self._parts = Factor(major), Factor(self.size // major)
    for part in self._parts:
      part.places, part.wires = dict(self.places), set(self.wires)

  def absorb(self, other: Factor) -> None:
    """Makes `other` the same as this one."""
    other._same = self
    self.places.update(other.places)
    self.wires |= other.wires
    self.pinned |= other.pinned
    self.name = self.name or other.name
    self.alike = self.alike or other.alike


class Axes:
  """The factors of all axes of a program.

  Rules call `join` and `relate` for what a node does to its axes; nothing has to be said of axes
  that are new in an output.

  Args:
    derived: names of which two may turn out to be the same dimension, which then has one of them.
  """

  def __init__(self, derived: Collection[str] = ()) -> None:
    self._derived = frozenset(derived)
    self._of: dict[Wire, list[list[Factor]]] = {}
    self._because: Node | None = None

  @contextlib.contextmanager
  def because_of(self, node: Node) -> Iterator[None]:
    """Context manager: records a node as the reason of the joins inside."""
    before, self._because = self._because, node
    yield
    self._because = before

  def factors(self, wire: Wire, position: int) -> tuple[Factor, ...]:
    """The factors of an axis, major first; () for size 1."""
    return tuple(f for first in self._axes(wire)[position] for f in first.resolved())

  def all_factors(self) -> list[Factor]:
    """Every factor once, in order of first appearance."""
    return list(
      dict.fromkeys(f for wire in self._of for i in range(wire.rank) for f in self.factors(wire, i))
    )

  def add(self, wire: Wire, pinned: bool = False) -> None:
    """Enters a wire.

    Args:
      wire: the wire.
      pinned: whether each axis must stay one dimension.
    """
    for i in range(wire.rank):
      for factor in self._axes(wire)[i]:
        factor.pinned |= pinned

  def pin(self, wire: Wire, position: int) -> None:
    """Pins an axis that is one dimension, so that it is not split in several."""
    factors = self.factors(wire, position)
    if len(factors) == 1:
      factors[0].pinned = True

  def join(self, *axes: Axis) -> None:
    """Joins axes of one size to one dimension; axes of size 1 are left out.

    Joins that would put two axes of one tensor into one class are not made.

    Args:
      *axes: pairs (wire, position).
    """
    wide = [(w, i) for w, i in axes if w.shape[i] != 1]
    for axis in wide[1:]:
      self.relate([wide[0]], [axis])

  def relate(self, left: Sequence[Axis], right: Sequence[Axis]) -> None:
    """Relates two runs of axes with the same elements in row-major order, as in a reshape.

    Args:
      left: axes, major first.
      right: axes of the same product of sizes.
    """
    done = 0
    while True:
      a = [f for w, i in left for f in self.factors(w, i)][done:]
      b = [f for w, i in right for f in self.factors(w, i)][done:]
      if not a or not b:
        return
      x, y = a[0], b[0]
      if x.size == y.size:
        self._same(x, y)
        done += 1
      elif x.size > y.size and x.size % y.size == 0 and not x.pinned:
        x.split(y.size)
      elif y.size > x.size and y.size % x.size == 0 and not y.pinned:
        y.split(x.size)
      else:
        return

  def relate_reshape(self, before: Wire, after: Wire) -> None:
    """Relates the axes of a tensor and of what it is reshaped to.

    Args:
      before: a wire.
      after: one of as many elements.
    """
    for left, right in reshape_groups(before.shape, after.shape):
      self.relate([(before, i) for i in left], [(after, i) for i in right])

  def _axes(self, wire: Wire) -> list[list[Factor]]:
    if wire not in self._of:
      self._of[wire] = [[] if n == 1 else [Factor(n)] for n in wire.shape]
      for i, factors in enumerate(self._of[wire]):
        for factor in factors:
          factor.places[wire, i] = None
          factor.wires.add(wire)
    return self._of[wire]

  def _same(self, x: Factor, y: Factor) -> bool:
    if x is y:
      return True
    small, large = sorted([x.wires, y.wires], key=len)
    if any(w in large for w in small):
      _note_alike(*((y, x) if x.pinned and not y.pinned else (x, y)))
      return False
    if x.name in self._derived and y.name:
      x.name = None
    elif x.name and y.name in self._derived:
      y.name = None
    if x.name and y.name and x.name != y.name:
      raise DimensionError(
        f"from_tensorflow: two names for one axis: {x.name!r} ({x.where}) and {y.name!r} "
        f"({y.where}) are the same dimension, by {self._because!r}; give both one name"
      )
    x.absorb(y)
    return True


def _note_alike(renamed: Factor, origin: Factor) -> None:
  """Records that a factor resembles `origin`, for its name; avoids cycles."""
  seen: Factor | None = origin
  while seen is not None:
    if seen is renamed:
      return
    seen = seen.alike.resolved()[0] if seen.alike else None
  renamed.alike = renamed.alike or origin


def reshape_groups(
  before: Sequence[int], after: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
  """Groups the axes of a reshape into the smallest runs of equal products.

  Args:
    before: sizes; none of them 0.
    after: sizes of the same product.

  Returns:
    Pairs of positions in `before` and in `after`, of the same product of sizes; axes of size 1 are
    left out.
  """
  left = [i for i, n in enumerate(before) if n != 1]
  right = [i for i, n in enumerate(after) if n != 1]
  groups: list[tuple[list[int], list[int]]] = []
  while left and right:
    a, b = [left.pop(0)], [right.pop(0)]
    while (p := _product(before, a)) != (q := _product(after, b)):
      if p < q and left:
        a.append(left.pop(0))
      elif q < p and right:
        b.append(right.pop(0))
      else:
        return groups
    groups.append((a, b))
  return groups


def _product(sizes: Sequence[int], positions: Iterable[int]) -> int:
  return math.prod(sizes[i] for i in positions)
