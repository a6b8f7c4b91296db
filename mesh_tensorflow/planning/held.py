"""Memory of a layout: exact for a complete one, a lower bound for a partial one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.planning.chains import Chains, Step, own_part
from mesh_tensorflow.planning.liveness import Held, Memory
from mesh_tensorflow.planning.loops import Unit
from mesh_tensorflow.program.graph import Tensor

# Maximum number of program points at which the memory is bounded.
_MOMENTS = 8


class Holdings:
  """Memory of a program on one device, as a function of the layout.

  Args:
    chains: the program.
  """

  def __init__(self, chains: Chains):
    self.chains = chains
    self._variables: dict[str, tuple[dict[str, int], int]] = {}
    for op in chains.graph.operations:
      if isinstance(op, Variable):
        dims = {d.name: int(d.size) for d in op.shape}
        self._variables[op.full_name] = (dims, int(op.size) * int(op.slice_dtype.size))
    # Unused inputs take memory all the same.
    self._unused = [chains.pieces.kind(op) for op in chains.others if not op.inputs]
    self._sets: list[frozenset[str]] = []
    self._amounts = self._bound_amounts()

  def memory(self, layout: dict[str, int], sizes: Sequence[int]) -> Memory:
    """The memory of one device, as `mtf.describe` finds it.

    Args:
      layout: mesh axis by dimension name.
      sizes: of the mesh axes.
    """
    blocks, inputs = self._blocks(layout, sizes)
    memory, peak = Memory(inputs=inputs), 0
    operations = self.chains.needed
    for i, (op, now) in enumerate(zip(operations, blocks[0].amounts(len(operations)))):
      memory.timeline.append(Held(op.name, now))
      if now > memory.activations:
        memory.activations, memory.peak_operation, peak = now, op.name, i
    live = [Held(x.name, n) for x, n in self._held_at(0, peak, blocks)]
    memory.largest = sorted(live, key=lambda held: -held.bytes)
    memory.variables = sum(
      size // math.prod(sizes[layout[d]] for d in dims if d in layout)
      for dims, size in self._variables.values()
    )
    return memory

  def variables(self) -> list[tuple[str, int]]:
    """Names and bytes of the variables, the largest first."""
    return sorted(((n, b) for n, (_, b) in self._variables.items()), key=lambda v: -v[1])

  def least(
    self, layout: Mapping[str, int | None], domains: Mapping[str, set[int]], sizes: Sequence[int]
  ) -> float:
    """Lower bound of the bytes per device of every layout that extends a partial one.

    Args:
      layout: by name of each decided dimension the mesh axis that splits it, or None.
      domains: by name of a dimension the mesh axes that may split it.
      sizes: of the mesh axes.
    """
    parts = np.array([most_parts(s, layout, domains, sizes) for s in self._sets], float)
    return float((self._amounts / parts).sum(axis=1).max()) if len(parts) else 0.0

  def _blocks(self, layout: dict[str, int], sizes: Sequence[int]) -> tuple[list[_Block], int]:
    """Computes the buffers of each block, the program's first; and the bytes of inputs."""
    chains, opened = self.chains, self.chains.opened
    blocks = [_Block() for _ in opened.blocks]
    inputs = sum(
      chains.pieces.piece(kind, own_part(kind, layout), sizes, ()).inputs for kind in self._unused
    )
    # By tensor: its block, and the key of its buffer there.
    place: dict[Tensor, tuple[int, object]] = {}
    for step in chains.walk(range(len(chains.operations)), layout, sizes):
      unit = opened.units[step.index]
      inputs += step.piece.inputs
      _add_unit(unit, step, blocks[unit.block], place)
    for x in chains.results:
      if x in place:
        blocks[0].use(place[x][1], len(chains.needed) - 1)
    # From the inside outwards: a body takes its room while its loop runs.
    for number in range(len(blocks) - 1, 0, -1):
      outer, at = opened.blocks[number]
      inside = blocks[outer].inside
      inside[at] = max(inside.get(at, 0), max(blocks[number].amounts(), default=0))
    return blocks, inputs

  def _bound_amounts(self) -> np.ndarray:
    """Live bytes by program point and by set of dimensions, with nothing split.

    Splitting only divides a buffer: a layout that communicates has more buffers, not fewer.
    """
    blocks, _ = self._blocks({}, [])
    count = len(self.chains.needed)
    held = blocks[0].amounts(count)
    step = max(1, -(-count // _MOMENTS))
    moments = [
      max(range(b, min(b + step, count)), key=lambda i: held[i]) for b in range(0, count, step)
    ]
    places: dict[frozenset[str], int] = {}
    rows: list[dict[int, int]] = [{} for _ in moments or [0]]

    def add(row: dict[int, int], names: frozenset[str], size: int) -> None:
      column = places.setdefault(names, len(places))
      row[column] = row.get(column, 0) + size

    for row in rows:
      for dims, size in self._variables.values():
        add(row, frozenset(dims), size)
    for moment, row in zip(moments, rows):
      for x, size in self._held_at(0, moment, blocks):
        add(row, frozenset(x.shape.dimension_names), size)
    self._sets = list(places)
    amounts = np.zeros([len(rows), len(places)])
    for r, row in enumerate(rows):
      for column, size in row.items():
        amounts[r, column] = size
    return amounts

  def _held_at(
    self, number: int, moment: int, blocks: Sequence[_Block]
  ) -> Iterator[tuple[Tensor, int]]:
    """Yields the live tensors and their bytes at a point of a block.

    If a loop runs at that point, those of its body at its peak are among them.
    """
    for first, last, size, x in blocks[number].buffers:
      if first <= moment <= last:
        yield x, size
    bodies = [
      (max(amounts), i, amounts.index(max(amounts)))
      for i, around in enumerate(self.chains.opened.blocks)
      if around == (number, moment) and (amounts := blocks[i].amounts())
    ]
    if bodies:
      _, i, at = max(bodies)
      yield from self._held_at(i, at, blocks)


class _Block:
  """Buffers of the operations of a program, or of the body of a loop.

  Attributes:
    inside: by place, the bytes that the body of the operation there takes.
  """

  def __init__(self) -> None:
    self._buffers: dict[object, tuple[int, int, int, Tensor]] = {}
    self.inside: dict[int, int] = {}

  @property
  def buffers(self) -> list[tuple[int, int, int, Tensor]]:
    """(first use, last use, bytes, tensor) of each buffer."""
    return list(self._buffers.values())

  def add(self, key: object, place: int, size: int, x: Tensor) -> object:
    """Adds a buffer, if there is none of this key; returns the key."""
    self._buffers.setdefault(key, (place, place, size, x))
    return key

  def use(self, key: object, place: int) -> None:
    """Extends the lifetime of a buffer to a program point."""
    first, _, size, x = self._buffers[key]
    self._buffers[key] = first, place, size, x

  def amounts(self, count: int = 0) -> list[int]:
    """Live bytes at each program point, padded to at least `count` points."""
    last_uses = [last for _, last, _, _ in self._buffers.values()]
    count = max([count, *(place + 1 for place in [*last_uses, *self.inside])])
    change = [0] * (count + 1)
    for first, last, size, _ in self._buffers.values():
      change[first] += size
      change[last + 1] -= size
    held = itertools.accumulate(change[:count])
    return [n + self.inside.get(i, 0) for i, n in enumerate(held)]


def _add_unit(
  unit: Unit, step: Step, block: _Block, place: dict[Tensor, tuple[int, object]]
) -> None:
  """Adds the buffers that an operation uses and makes to its block; enters them in `place`."""
  piece, now = step.piece, unit.place
  if piece.inside:
    block.inside[now] = piece.inside
  if unit.uses:
    for x in unit.reads:
      if x in place and place[x][0] == unit.block:
        block.use(place[x][1], now)
  if not unit.makes:
    return
  for j, out in enumerate(unit.operation.outputs):
    kind, n = piece.buffers[j]
    if kind == "new":
      place[out] = unit.block, block.add((step.index, j), now, n, out)
    elif kind == "reduced":
      key = ("reduced", unit.reads[n])
      place[out] = unit.block, block.add(key, now, piece.executed.get(n, 0), out)
    elif kind != "elsewhere":
      source = unit.reads[n] if kind == "input" else unit.operation.outputs[n]
      if source in place:
        place[out] = place[source]


def most_parts(
  names: frozenset[str],
  layout: Mapping[str, int | None],
  domains: Mapping[str, set[int]],
  sizes: Sequence[int],
) -> int:
  """Maximum number of parts that a tensor of these dimensions can be split into.

  Args:
    names: of its dimensions.
    layout: by name of each decided dimension the mesh axis that splits it, or None.
    domains: by name of a dimension the mesh axes that may split it.
    sizes: of the mesh axes.
  """
  axes: set[int] = set()
  for name in names:
    if name in layout:
      axis = layout[name]
      if axis is not None:
        axes.add(axis)
    else:
      axes |= domains.get(name, set())
  return math.prod(sizes[a] for a in axes)
