"""A program cut into chains of operations whose costs are independent of each other.

A sum that is pending passes from the operation that made it through others, up to the one that
executes it. These are a chain: what it costs follows from the assignment of its dimensions alone.
All other operations are chains of one. Operations inside of loops are among them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence

from mesh_tensorflow.planning.liveness import probable_results
from mesh_tensorflow.planning.loops import Opened, inner_operations
from mesh_tensorflow.planning.mesh_impl import allreduce_bytes
from mesh_tensorflow.planning.pieces import Assignment, Kind, Pieces
from mesh_tensorflow.planning.probing import Piece, State
from mesh_tensorflow.program.graph import Graph, Operation, Tensor
from mesh_tensorflow.program.reachability import needed_operations, reads


@dataclasses.dataclass
class Sum:
  """A pending sum.

  Attributes:
    axes: mesh axes.
    bytes: of a slice.
    executed: whether it has been executed.
  """

  axes: tuple[int, ...]
  bytes: int
  executed: bool = False


@dataclasses.dataclass
class Step:
  """An operation in the order of the program, with the pending sums that it executes.

  Attributes:
    index: number of the operation.
    piece: what it does.
    sums: the sums that it executes first, as (mesh axes, bytes).
  """

  index: int
  piece: Piece
  sums: list[tuple[tuple[int, ...], int]]


@dataclasses.dataclass
class Chain:
  """Operations whose cost depends only on the assignment of their own dimensions.

  Attributes:
    operations: numbers of the operations.
    dims: names of their dimensions.
    count: number of chains of the program that are alike, this one included.
  """

  operations: list[int]
  dims: list[str]
  count: int = 1


class Chains:
  """The operations of a program that are needed, in chains.

  Args:
    graph: the graph.
    results: tensors that are exported, or None for those that no operation reads.
    pieces: of other programs that are alike, which must be kept meanwhile; None: new ones.

  Attributes:
    needed: the operations of the graph.
    operations: these, with those of loops in place of the loops.
    times: number of times that each of these runs.
    opened: where each of these stands.
    results: the tensors that are exported.
    chains: of those that are alike, one, with its `count`.
    dims: sizes of all dimensions, by name.
    conflicts: pairs of names that one tensor has.
    forbidden: for a dimension why no layout may split it.
    others: operations that are not needed.
  """

  def __init__(self, graph: Graph, results: Sequence[Tensor] | None, pieces: Pieces | None = None):
    self.graph = graph
    self.results = (
      probable_results(graph.operations) if results is None else list(dict.fromkeys(results))
    )
    self._results = set(self.results)
    needed = needed_operations(graph.operations, self.results)
    self.needed: list[Operation] = [op for op in graph.operations if op in needed]
    self.opened = Opened(self.needed)
    self.operations: list[Operation] = [u.operation for u in self.opened.units]
    self.times: list[int] = [u.times for u in self.opened.units]
    self.pieces = Pieces() if pieces is None else pieces
    self.kinds: list[Kind] = [self.pieces.kind(u.operation, u.block > 0) for u in self.opened.units]
    self.reads: list[list[Tensor]] = [u.reads for u in self.opened.units]
    self.dims: dict[str, set[int]] = {}
    self.conflicts: set[frozenset[str]] = set()
    every = [one for op in graph.operations for one in [op, *inner_operations(op)]]
    for op in every:
      for x in reads(op) + op.outputs:
        names = [d.name for d in x.shape]
        for d in x.shape:
          self.dims.setdefault(d.name, set()).add(int(d.size))
        self.conflicts.update(frozenset((a, b)) for a in names for b in names if a != b)
    self._consumers: dict[Tensor, list[int]] = {}
    for i, read in enumerate(self.reads):
      for x in read:
        self._consumers.setdefault(x, []).append(i)
    self.forbidden: dict[str, str] = {}
    self._origins: dict[int, list[bool]] = {}
    # Unneeded operations are lowered all the same, so a layout has to suit them.
    self.others = [op for op in graph.operations if op not in needed]
    for op in self.others:
      self.pieces.kind(op)
    self._find_forbidden()
    self._pending = self._find_pending()
    self.chains = self._find_chains()

  def parts(self, name: str) -> int:
    """Greatest common divisor of the sizes of a dimension: most parts that divide all of them."""
    return math.gcd(*self.dims[name])

  def walk(
    self, indices: Sequence[int], layout: dict[str, int], sizes: Sequence[int]
  ) -> Iterator[Step]:
    """The operations of a chain (or of the program) under a layout, in order.

    Args:
      indices: their numbers.
      layout: mesh axis by dimension name.
      sizes: of the mesh axes.

    Yields:
      Steps; the last may have a piece with a `problem`.
    """
    states: dict[Tensor, Sum] = {}
    chosen = set(indices)
    for i in indices:
      read, kind = self.reads[i], self.kinds[i]
      sums = [states.get(x) for x in read]
      given: tuple[State, ...] = tuple(None if s is None or s.executed else s.axes for s in sums)
      piece = self.pieces.piece(kind, own_part(kind, layout), sizes, given)
      executed = []
      for j in piece.executed:
        s = sums[j]
        if s is not None and not s.executed:
          s.executed = True
          executed.append((s.axes, s.bytes))
      if not piece.problem:
        for j, out in enumerate(self.operations[i].outputs):
          same, state = piece.same[j], piece.states[j]
          source = sums[same] if same is not None else None
          if source is not None:
            states[out] = source
          elif state is not None:
            states[out] = Sum(state, piece.pending[j])
          # Consumers outside the chain execute the pending sums that reach them.
          outside = any(c not in chosen for c in self._consumers.get(out, ()))
          s = states.get(out)
          if s is not None and not s.executed and (outside or out in self._results):
            s.executed = True
            executed.append((s.axes, s.bytes))
      yield Step(i, piece, executed)
      if piece.problem:
        return

  def _find_forbidden(self) -> None:
    own = dict.fromkeys([*self.kinds, *map(self.pieces.kind, self.others)])
    for kind in own:
      read = reads(kind.operation)
      origin = [False] * len(kind.operation.outputs)
      for name in sorted(kind.dims):
        common = math.gcd(*kind.dims[name])
        factor = next((p for p in range(2, common + 1) if common % p == 0), 0)
        if not factor:
          continue
        piece = self.pieces.piece(kind, ((name, 0),), (factor,), (None,) * len(read))
        if piece.problem:
          self.forbidden.setdefault(name, piece.problem)
        else:
          origin = [a or s is not None for a, s in zip(origin, piece.states)]
      self._origins[kind.number] = origin

  def _find_pending(self) -> set[Tensor]:
    """Tensors whose sum may be pending."""
    pending: set[Tensor] = set()
    for op, kind, read in zip(self.operations, self.kinds, self.reads):
      given: tuple[State, ...] = tuple((0,) if x in pending else None for x in read)
      passed = [False] * len(op.outputs)
      if any(given):
        piece = self.pieces.piece(kind, (), (2,), given)
        if not piece.problem:
          passed = [s is not None for s in piece.states]
      for out, made, is_passed in zip(op.outputs, self._origins[kind.number], passed):
        if made or is_passed:
          pending.add(out)
    return pending

  def _find_chains(self) -> list[Chain]:
    leader = list(range(len(self.operations)))

    def find(i: int) -> int:
      while leader[i] != i:
        leader[i] = leader[leader[i]]
        i = leader[i]
      return i

    maker = {x: i for i, op in enumerate(self.operations) for x in op.outputs}
    for i, op in enumerate(self.operations):
      if any(x in self._pending for x in op.outputs):
        for x in self.reads[i]:
          if x in self._pending and x in maker:
            leader[find(i)] = find(maker[x])
    groups: dict[int, list[int]] = {}
    for i in range(len(self.operations)):
      groups.setdefault(find(i), []).append(i)
    alike: dict[Hashable, Chain] = {}
    for indices in groups.values():
      key = self._chain_key(indices)
      if key in alike:
        alike[key].count += 1
      else:
        names = sorted({d for i in indices for d in self.kinds[i].dims})
        alike[key] = Chain(indices, names)
    return list(alike.values())

  def _chain_key(self, indices: Sequence[int]) -> Hashable:
    chosen = set(indices)
    places: dict[Tensor, tuple[int, int]] = {}
    key: list[Hashable] = []
    for n, i in enumerate(indices):
      inside = tuple(places.get(x) for x in self.reads[i])
      left = []
      for j, x in enumerate(self.operations[i].outputs):
        places[x] = (n, j)
        outside = any(c not in chosen for c in self._consumers.get(x, ()))
        left.append(x in self._pending and (outside or x in self._results))
      key.append((self.kinds[i].number, self.times[i], inside, tuple(left)))
    return tuple(key)


def own_part(kind: Kind, layout: dict[str, int]) -> Assignment:
  """The part of a layout that concerns an operation.

  Args:
    kind: of the operation.
    layout: mesh axis by dimension name.
  """
  return tuple((d, layout[d]) for d in sorted(kind.dims) if d in layout)


def sum_bytes(axes: Sequence[int], size: int, sizes: Sequence[int]) -> dict[int, int]:
  """Bytes over each mesh axis of executing a pending sum.

  Args:
    axes: mesh axes.
    size: bytes of a slice.
    sizes: of all mesh axes.
  """
  return allreduce_bytes(size, [a for a in axes if sizes[a] > 1], sizes)
