"""Elements that `mtf.reshard` sends, beside the least possible and beside gather and scatter.

python -m docs.tools.resharding     prints the table of docs/pipelines.md; a test keeps them equal

For each pair of mesh shapes every pair of twelve drawn layouts, of a tensor whose sizes the meshes
divide and of one whose sizes they do not. The figures follow from the layouts, and no device is
needed; tests compare them with the bytes of transfers in traced programs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.meshes import cross_mesh

SOURCES = ("s:2", "s:4", "s:2,t:2")
TARGETS = ("u:2", "u:4", "u:2,v:2", "u:2,v:4")
LAYOUTS = 12
SHAPE = mtf.Shape([mtf.Dimension("a", 8), mtf.Dimension("b", 16), mtf.Dimension("c", 24)])
# No size can be divided; of "c" some devices of four have nothing.
UNEVEN = mtf.Shape([mtf.Dimension("a", 7), mtf.Dimension("b", 9), mtf.Dimension("c", 5)])
# The number of the target's first device if it shares none with the source, which begins at 0.
APART = 8
Impl: TypeAlias = mtf.PlacementMeshImpl


def layouts(mesh: str, seed: str) -> list[str]:
  """Drawn layouts: each mesh dimension splits some tensor dimension, or none.

  Args:
    mesh: shape of the mesh.
    seed: of the draw.
  """
  names = mtf.convert_to_shape(mesh).dimension_names
  draw, found = random.Random(f"{mesh} {seed}"), []
  for _ in range(LAYOUTS):
    order = draw.sample(["a", "b", "c", "", ""], len(names))
    found.append(",".join(f"{d}:{m}~" for d, m in zip(order, names) if d))
  return found


def mesh(shape: str, layout: str, first: int) -> Impl:
  """A mesh on consecutive devices that need not be there.

  Args:
    shape: its shape.
    layout: its layout rules.
    first: number of its first device.
  """
  size = mtf.convert_to_shape(shape).size
  return mtf.PlacementMeshImpl(shape, layout, [f"CPU:{first + i}" for i in range(size)])


def pairs(source: str, target: str, first: int) -> Iterator[tuple[Impl, Impl]]:
  """Meshes with every pair of drawn layouts.

  Args:
    source: shape of the mesh that has the tensor.
    target: shape of the mesh that gets it.
    first: number of the target's first device; that of the source is 0.
  """
  for a, b in itertools.product(layouts(source, "from"), layouts(target, "to")):
    yield mesh(source, a, 0), mesh(target, b, first)


def blocks(impl: mtf.MeshImpl, whole: np.ndarray, shape: mtf.Shape) -> list[np.ndarray]:
  """The slice of each processor, without its padding, as NumPy cuts it.

  Args:
    impl: the mesh.
    whole: the tensor.
    shape: its shape.
  """
  n = impl.slice_shape(shape)
  begins = [impl.slice_begin(shape, p) for p in range(impl.size)]
  return [whole[tuple(slice(b, b + k) for b, k in zip(begin, n))] for begin in begins]


def least(source: Impl, target: Impl, shape: mtf.Shape) -> int:
  """The least number of elements that must come to the target's devices.

  Of each distinct slice of the target some processor must get what its device does not have.

  Args:
    source: the mesh that has the tensor.
    target: the mesh that gets it.
    shape: shape of the tensor.
  """
  whole = np.arange(shape.size).reshape(shape.to_integer_list)
  held = dict(zip(source.devices, blocks(source, whole, shape)))
  found: dict[tuple[int, ...], int] = {}
  for p, wanted in enumerate(blocks(target, whole, shape)):
    has = np.intersect1d(wanted, held.get(target.devices[p], [])).size
    key = tuple(target.slice_begin(shape, p))
    found[key] = min(found.get(key, wanted.size), wanted.size - has)
  return sum(found.values())


def spread(source: Impl, target: Impl, shape: mtf.Shape) -> int:
  """Elements that go on inside the target, from a replica of a slice to the others.

  Args:
    source: the mesh that has the tensor.
    target: the mesh that gets it.
    shape: shape of the tensor.
  """
  plan = cross_mesh.plan_transfers(source, target, shape)
  return sum(sum(t.elements for t in a.transfers) * (len(a.replicas) - 1) for a in plan)


def gathered_and_scattered(source: Impl, target: Impl, shape: mtf.Shape) -> int:
  """Elements sent if the source's first device gathers the tensor and sends each slice from there.

  Args:
    source: the mesh that has the tensor.
    target: the mesh that gets it.
    shape: shape of the tensor.
  """
  whole = np.arange(shape.size).reshape(shape.to_integer_list)
  root = source.devices[0]
  collected = shape.size - blocks(source, whole, shape)[0].size
  slices = zip(target.devices, blocks(target, whole, shape))
  return collected + sum(x.size for device, x in slices if device != root)


def row(source: str, target: str, first: int) -> tuple[list[int], float]:
  """Mean numbers of elements of a tensor over all pairs of layouts.

  Args:
    source: shape of the mesh that has the tensor.
    target: shape of the mesh that gets it.
    first: number of the target's first device.

  Returns:
    The means of (least, sent, spread inside the target, gathered and scattered), and the largest
    part by which what is sent is above the least.
  """
  found, excess = [], 0.0
  for (a, b), shape in itertools.product(pairs(source, target, first), (SHAPE, UNEVEN)):
    bound, sent = least(a, b, shape), cross_mesh.elements_sent(a, b, shape)
    found.append((bound, sent, spread(a, b, shape), gathered_and_scattered(a, b, shape)))
    excess = max(excess, (sent - bound) / max(bound, 1))
  return [round(sum(column) / len(found)) for column in zip(*found)], excess


def table() -> str:
  """The table, as Markdown, and a line that says how far from the least it is."""
  names = ("least", "sent", "inside", "naive")
  columns = ["from", "to", *names, *(f"shared: {name}" for name in names)]
  lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
  most = 0.0
  for source, target in itertools.product(SOURCES, TARGETS):
    cells = ["x".join(str(d.size) for d in mtf.convert_to_shape(m)) for m in (source, target)]
    for first in (APART, 0):
      means, excess = row(source, target, first)
      cells += [f"{n:,}" for n in means]
      most = max(most, excess)
    lines.append("| " + " | ".join(cells) + " |")
  count = LAYOUTS**2 * len(SOURCES) * len(TARGETS)
  return "\n".join(
    [*lines, "", f"{count:,} pairs of layouts, at most {100 * most:.0f} % above the least."]
  )


if __name__ == "__main__":
  print(table())
