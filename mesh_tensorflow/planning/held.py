"""The memory of a layout: exact for one, and at least so much for all that begin alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.planning.chains import Chains, own_part
from mesh_tensorflow.planning.liveness import Held, Memory
from mesh_tensorflow.program.graph import Tensor

# At so many moments of the program its memory is bounded.
_MOMENTS = 8


class Holdings:
  """What a program holds, by dimensions.

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
    # What is brought in and not used is there all the same.
    self._unused = [chains.pieces.kind(op) for op in chains.others if not op.inputs]
    self._sets: list[frozenset[str]] = []
    self._amounts = self._bound_amounts()

  def memory(self, layout: dict[str, int], sizes: Sequence[int]) -> Memory:
    """The memory of one device, as `mtf.describe` finds it.

    Args:
      layout: mesh axis by dimension name.
      sizes: of the mesh axes.
    """
    buffers, inside, inputs = self._buffers(layout, sizes)
    operations = self.chains.operations
    change = [0] * (len(operations) + 1)
    for first, last, size, _ in buffers:
      change[first] += size
      change[last + 1] -= size
    memory, now, peak = Memory(inputs=inputs), 0, 0
    for i, op in enumerate(operations):
      now += change[i]
      memory.timeline.append(Held(op.name, now + inside.get(i, 0)))
      if memory.timeline[-1].bytes > memory.activations:
        memory.activations, memory.peak_operation, peak = now + inside.get(i, 0), op.name, i
    live = [Held(x.name, n) for first, last, n, x in buffers if first <= peak <= last]
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
    """What every layout holds at least that splits these dimensions so.

    Args:
      layout: mesh axis, or None for whole, of the dimensions that are decided.
      domains: mesh axes that may split each dimension.
      sizes: of the mesh axes.
    """
    parts = np.array([most_parts(s, layout, domains, sizes) for s in self._sets], float)
    return float((self._amounts / parts).sum(axis=1).max()) if len(parts) else 0.0

  def _buffers(
    self, layout: dict[str, int], sizes: Sequence[int]
  ) -> tuple[list[tuple[int, int, int, Tensor]], dict[int, int], int]:
    """Buffers as (first use, last use, bytes, tensor); bytes of bodies; bytes of inputs."""
    chains = self.chains
    buffers: dict[object, list[int]] = {}
    tensors: dict[object, Tensor] = {}
    place: dict[Tensor, object] = {}
    inside: dict[int, int] = {}
    inputs = sum(
      chains.pieces.piece(kind, own_part(kind, layout), sizes, ()).inputs for kind in self._unused
    )
    for step in chains.walk(range(len(chains.operations)), layout, sizes):
      i, piece = step.index, step.piece
      inputs += piece.inputs
      if piece.inside:
        inside[i] = piece.inside
      for x in chains.reads[i]:
        if place.get(x) in buffers:
          buffers[place[x]][1] = i
      for j, out in enumerate(chains.operations[i].outputs):
        kind, n = piece.buffers[j]
        if kind == "new":
          place[out] = (i, j)
          buffers[place[out]], tensors[place[out]] = [i, i, n], out
        elif kind == "input":
          place[out] = place.get(chains.reads[i][n])
        elif kind == "output":
          place[out] = place.get(chains.operations[i].outputs[n])
        elif kind == "reduced":
          key = ("reduced", chains.reads[i][n])
          size = piece.executed.get(n, 0)
          place[out] = key
          if key not in buffers:
            buffers[key], tensors[key] = [i, i, size], out
        else:
          place[out] = None
    end = len(chains.operations) - 1
    for x in chains.results:
      if place.get(x) in buffers:
        buffers[place[x]][1] = end
    held = [(first, last, n, tensors[key]) for key, (first, last, n) in buffers.items()]
    return held, inside, inputs

  def _bound_amounts(self) -> np.ndarray:
    """Bytes of the whole program by moment and by set of dimensions.

    What splitting makes of a buffer are its parts, and never the memory of another: where a
    layout exchanges, there are more buffers, not fewer.
    """
    buffers, _, _ = self._buffers({}, [])
    count = len(self.chains.operations)
    change = [0] * (count + 1)
    for first, last, size, _ in buffers:
      change[first] += size
      change[last + 1] -= size
    held = list(np.cumsum(change[:count])) if count else []
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
      for first, last, size, x in buffers:
        if first <= moment <= last:
          add(row, frozenset(x.shape.dimension_names), size)
    self._sets = list(places)
    amounts = np.zeros([len(rows), len(places)])
    for r, row in enumerate(rows):
      for column, size in row.items():
        amounts[r, column] = size
    return amounts


def most_parts(
  names: frozenset[str],
  layout: Mapping[str, int | None],
  domains: Mapping[str, set[int]],
  sizes: Sequence[int],
) -> int:
  """Into how many parts a tensor of these dimensions can be split at most.

  Args:
    names: of its dimensions.
    layout: mesh axis, or None for whole, of the dimensions that are decided.
    domains: mesh axes that may split each dimension.
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
