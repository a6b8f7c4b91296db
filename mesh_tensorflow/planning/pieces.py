"""Costs of operations under any assignment, from as few lowerings as possible.

A piece without exchanges is the same computation whatever the sizes of the mesh axes, on slices of
other sizes. Each of its figures (FLOPs, bytes) is then a sum of products of 1 / (parts of a
dimension), and follows from the pieces in which each dimension is whole or split. The first one
that was lowered checks that it does; if not, and where there are exchanges, every one is lowered.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Sequence

from mesh_tensorflow.planning.alike import kind_of
from mesh_tensorflow.planning.loops import inner_operations
from mesh_tensorflow.planning.probing import Piece, Prober, State
from mesh_tensorflow.planning.work import Work
from mesh_tensorflow.program.graph import Operation
from mesh_tensorflow.program.reachability import reads

# (dimension name, mesh axis) pairs, by name.
Assignment = tuple[tuple[str, int], ...]


@dataclasses.dataclass(eq=False)
class Kind:
  """Operations that are alike.

  Attributes:
    operation: one of them.
    dims: sizes of the dimensions of the tensors it reads, makes, and has inside, by name.
    number: of the kind.
    in_loop: whether they draw random numbers anew in each iteration of a loop.
    on_all_axes: whether they exchange over mesh axes that split nothing of them, too.
  """

  operation: Operation
  dims: dict[str, set[int]]
  number: int
  in_loop: bool
  on_all_axes: bool = False


class Pieces:
  """The pieces of the operations of a program."""

  def __init__(self) -> None:
    self.prober = Prober()
    self.kinds: dict[Hashable, Kind] = {}
    self._lowered: dict[Hashable, Piece] = {}
    # By kind, pattern and states: the sizes and the piece that was lowered first; None where
    # sizes do not follow from others.
    self._first: dict[Hashable, tuple[tuple[int, ...], Piece] | None] = {}
    self._checked: set[Hashable] = set()
    self._found: dict[Hashable, Piece] = {}

  def kind(self, op: Operation, in_loop: bool = False) -> Kind:
    """The kind of an operation.

    Args:
      op: an operation.
      in_loop: whether it is inside of a loop that is opened.
    """
    in_loop = in_loop and getattr(op, "draws_random_numbers", False)
    key = (kind_of(op), in_loop)
    if key not in self.kinds:
      dims: dict[str, set[int]] = {}
      every = [op, *inner_operations(op)]
      everywhere = any(getattr(one, "exchanges_over_whole_mesh", False) for one in every)
      for one in every:
        for x in reads(one) + one.outputs:
          for d in x.shape:
            dims.setdefault(d.name, set()).add(int(d.size))
      self.kinds[key] = Kind(op, dims, len(self.kinds), in_loop, everywhere)
    return self.kinds[key]

  def piece(
    self, kind: Kind, assignment: Assignment, sizes: Sequence[int], states: tuple[State, ...]
  ) -> Piece:
    """The piece of an operation of a kind.

    Args:
      kind: the kind.
      assignment: of its dimensions; sorted.
      sizes: of all mesh axes.
      states: of the tensors that it reads, whose mesh axes are numbered as those of `sizes`.

    Returns:
      The piece; its mesh axes are numbered likewise.
    """
    used = sorted({a for _, a in assignment} | {a for s in states if s for a in s})
    if kind.on_all_axes:
      used = sorted({*used, *(a for a, n in enumerate(sizes) if n > 1)})
    key = (kind.number, assignment, tuple(sizes[a] for a in used), states)
    if key not in self._found:
      self._found[key] = self._find(kind, assignment, sizes, states, used)
    return self._found[key]

  def _find(
    self,
    kind: Kind,
    assignment: Assignment,
    sizes: Sequence[int],
    states: tuple[State, ...],
    used: list[int],
  ) -> Piece:
    # Without exchanges the order of the mesh axes does not matter.
    order: list[int] = []
    for a in [a for _, a in assignment] + [a for s in states if s for a in s] + used:
      if a not in order:
        order.append(a)
    pattern, given = _renumber(assignment, states, order)
    key = (kind.number, pattern, given)
    n = tuple(sizes[a] for a in order)
    if key not in self._first:
      piece = self._lower(kind, pattern, n, given)
      self._first[key] = None if piece.exchanges or piece.problem else (n, piece)
      if piece.problem:
        return piece
    first = self._first[key]
    if first is not None and first[0] != n:
      if key not in self._checked:
        self._checked.add(key)
        if not self._follows(kind, pattern, given, n, *first):
          first = self._first[key] = None
      if first is not None:
        result = self._interpolate(kind, pattern, n, given)
        assert result is not None
        return _numbered(result, order)
    if first is not None:
      return _numbered(first[1], order)
    pattern, given = _renumber(assignment, states, used)
    return _numbered(self._lower(kind, pattern, tuple(sizes[a] for a in used), given), used)

  def _follows(
    self,
    kind: Kind,
    pattern: Assignment,
    given: tuple[State, ...],
    n: tuple[int, ...],
    lowered: tuple[int, ...],
    piece: Piece,
  ) -> bool:
    """True if interpolation from smaller mesh sizes predicts this piece exactly."""
    axes = sorted({a for _, a in pattern})
    if all(lowered[a] == _smallest_factor(kind, pattern, a) for a in axes):
      # One of those that others are computed from checks nothing.
      lowered, piece = n, self._lower(kind, pattern, n, given)
    check = self._interpolate(kind, pattern, lowered, given)
    exact = not piece.exchanges and not piece.problem
    return exact and check is not None and _agree(check, piece)

  def _lower(
    self, kind: Kind, pattern: Assignment, sizes: tuple[int, ...], states: tuple[State, ...]
  ) -> Piece:
    key = (kind.number, pattern, sizes, states)
    if key not in self._lowered:
      self._lowered[key] = self.prober.piece(kind.operation, sizes, pattern, states, kind.in_loop)
    return self._lowered[key]

  def _interpolate(
    self, kind: Kind, pattern: Assignment, sizes: tuple[int, ...], states: tuple[State, ...]
  ) -> Piece | None:
    """The piece for other sizes, from those with each axis of dimensions whole or split."""
    axes = sorted({a for _, a in pattern})
    pending = {a for s in states if s for a in s}
    small = [_smallest_factor(kind, pattern, a) for a in axes]
    corners: list[tuple[tuple[bool, ...], Piece]] = []
    for split in itertools.product((False, True), repeat=len(axes)):
      kept = [a for a, is_split in zip(axes, split) if is_split]
      # A mesh axis over which a sum is pending is there also where it splits nothing.
      others = sorted(pending - set(kept))
      order = [*kept, *others]
      part = tuple((d, a) for d, a in pattern if a in kept)
      renumbered, given = _renumber(part, states, order)
      factors = [small[axes.index(a)] for a in kept] + [2] * len(others)
      piece = self._lower(kind, renumbered, tuple(factors), given)
      if piece.problem or piece.exchanges:
        return None
      corners.append((split, piece))
    weights = [
      math.prod(_weight(sizes[a], small[i], split[i]) for i, a in enumerate(axes))
      for split, _ in corners
    ]
    return _combine([piece for _, piece in corners], weights)


def _weight(size: int, small: int, split: bool) -> float:
  """Interpolation weight, linear in 1 / size, of the corner with (or without) a split."""
  t = (1 - 1 / size) / (1 - 1 / small)
  return t if split else 1 - t


def _smallest_factor(kind: Kind, pattern: Assignment, axis: int) -> int:
  sizes = {n for d, a in pattern if a == axis for n in kind.dims[d]}
  common = math.gcd(*sizes)
  return next((p for p in range(2, common + 1) if common % p == 0), 2)


def _renumber(
  assignment: Assignment, states: tuple[State, ...], order: Sequence[int]
) -> tuple[Assignment, tuple[State, ...]]:
  new = {a: i for i, a in enumerate(order)}
  return (
    tuple((d, new[a]) for d, a in assignment),
    tuple(None if s is None else tuple(new[a] for a in s) for s in states),
  )


def _numbered(piece: Piece, order: Sequence[int]) -> Piece:
  """The piece with mesh axis i named `order[i]`."""
  if all(a == i for i, a in enumerate(order)):
    return piece
  return dataclasses.replace(
    piece,
    states=[None if s is None else tuple(order[a] for a in s) for s in piece.states],
    exchanges=[
      (kind, {order[a]: n for a, n in over.items()}, times) for kind, over, times in piece.exchanges
    ],
  )


def _figures(piece: Piece) -> list[float]:
  """All figures of a piece that depend on sizes, in a fixed order."""
  result: list[float] = []
  for work, _ in piece.works:
    for p in work.products:
      result += [p.flops, p.bytes]
    result.append(work.traffic)
  result += [n for kind, n in piece.buffers if kind == "new"]
  result += [n for _, n in sorted(piece.executed.items())]
  result += [*piece.pending, piece.inside, piece.inputs]
  return result


def _structure(piece: Piece) -> Hashable:
  works = tuple(
    (times, w.launches, tuple((p.dtype, p.channels) for p in w.products))
    for w, times in piece.works
  )
  buffers = tuple((kind, None if kind == "new" else n) for kind, n in piece.buffers)
  return (works, buffers, tuple(sorted(piece.executed)), tuple(piece.same))


def _combine(corners: Sequence[Piece], weights: Sequence[float]) -> Piece | None:
  last = corners[-1]  # Where all are split.
  if any(_structure(piece) != _structure(last) for piece in corners):
    return None
  columns = zip(*(_figures(piece) for piece in corners))
  figures = iter([round(sum(w * f for w, f in zip(weights, column))) for column in columns])
  works = []
  for work, times in last.works:
    products = [p._replace(flops=next(figures), bytes=next(figures)) for p in work.products]
    works.append((Work(products, next(figures), work.launches), times))
  return Piece(
    works=works,
    buffers=[(kind, next(figures)) if kind == "new" else (kind, n) for kind, n in last.buffers],
    executed={i: next(figures) for i in sorted(last.executed)},
    states=last.states,
    same=last.same,
    pending=[next(figures) for _ in last.pending],
    inside=next(figures),
    inputs=next(figures),
  )


def _agree(a: Piece, b: Piece) -> bool:
  return _structure(a) == _structure(b) and a.states == b.states and _figures(a) == _figures(b)
