"""Layouts of imported functions: one as a user would write it, and drawn ones."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf

Layout = list[tuple[str, str]]


def tensors_of(imported: mtf.Imported) -> list[frozenset[str]]:
  """The names of the dimensions of each tensor, of variables too."""
  model = imported._traced()
  return [
    frozenset(d.name for dims in model.dimensioned.of(wire) for d in dims)
    for wire in model.traced.program.wires
  ]


def by_hand(imported: mtf.Imported, columns: int = 2) -> Layout:
  """The batch over the rows "r", and over the columns "c" as many dimensions as may be.

  A dimension goes first if more operations have it; none that a tensor has beside another of the
  columns, nor one that the columns do not divide.

  Args:
    imported: the function; its first dimension is the batch.
    columns: number of them.
  """
  operations = imported.operations
  batch, *others = imported.dimensions
  count = {n: sum(n in op.dimensions for op in operations) for n in others}
  first = sorted(others, key=lambda n: -count[n])
  return filled(imported, [(batch, "r")], [(n, "c") for n in first], {"c": columns})


def without_batch(imported: mtf.Imported) -> Layout:
  """The batch whole, and over the rows "r" and the columns "c" as many others as may be.

  So weights are split of which neither axis may stand beside the batch and the columns.
  """
  operations = imported.operations
  _, *others = imported.dimensions
  count = {n: sum(n in op.dimensions for op in operations) for n in others}
  first = sorted(others, key=lambda n: -count[n])
  return filled(imported, [], [(n, a) for n in first for a in "rc"], {"r": 2, "c": 2})


def drawn(imported: mtf.Imported, rows: int, columns: int, seed: int) -> Layout:
  """Dimensions in a drawn order, each over a drawn axis, as long as that is legal."""
  rng = np.random.default_rng(seed)
  names = rng.permutation(list(imported.dimensions)).tolist()
  wishes = [(str(n), str(rng.choice(["r", "c"]))) for n in names]
  return filled(imported, [], wishes, {"r": rows, "c": columns})


def filled(imported: mtf.Imported, rules: Layout, wishes: Layout, sizes: dict[str, int]) -> Layout:
  """The rules, and those of the wishes that may stand beside what is there already.

  Args:
    imported: the function.
    rules: of dimensions and mesh axes.
    wishes: likewise; the first ones go first.
    sizes: of the mesh axes.
  """
  tensors, rules = tensors_of(imported), list(rules)
  for name, axis in wishes:
    if name in dict(rules):
      continue
    others = {n for n, a in rules if a == axis}
    free = not any(name in names and names & others for names in tensors)
    if free and imported.dimensions[name].size % sizes[axis] == 0:
      rules.append((name, axis))
  return rules
