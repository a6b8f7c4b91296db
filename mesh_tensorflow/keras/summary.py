"""The table of `ParallelModel.placement`: how the variables lie on the mesh."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from mesh_tensorflow.meshes.store import StoredVariable
from mesh_tensorflow.planning.text import format_bytes, table


def variables_table(
  variables: Sequence[StoredVariable],
  of_model: Collection[str],
  asked: Mapping[str, Sequence[str | None]],
) -> str:
  """A table with a line for each variable of a model, and one for all others.

  Args:
    variables: of a mesh's store.
    of_model: names of those of the model; others are slots of an optimizer, and metrics.
    asked: for variables of which Keras' layout map says something, a mesh axis or None for each
      axis; it is shown beside what was done.
  """
  header = ["variable", "sizes, and what splits them", "whole", "a device"]
  if asked:
    header.append("the map says")
  rows = []
  others = [v for v in variables if v.name not in of_model]
  for v in variables:
    if v.name in of_model:
      row = [v.name, " x ".join(_axes(v)) or "scalar", *map(format_bytes, _bytes([v]))]
      rows.append([*row, _asked(asked.get(v.name))] if asked else row)
  if others:
    row = [
      f"(optimizer and metrics: {len(others)} variables)",
      "",
      *map(format_bytes, _bytes(others)),
    ]
    rows.append([*row, ""] if asked else row)
  total = ["(all)", "", *map(format_bytes, _bytes(variables))]
  rows.append([*total, ""] if asked else total)
  return table(header, rows, len(rows))


def _axes(v: StoredVariable) -> list[str]:
  """The sizes, each with the mesh axis that splits it: "64/model"."""
  mesh = v.mesh_shape
  return [
    f"{d.size}" + (f"/{mesh[a].name}" if a is not None and mesh[a].size > 1 else "")
    for d, a in zip(v.shape, v.layout.tensor_axis_to_mesh_axis)
  ]


def _bytes(variables: Sequence[StoredVariable]) -> tuple[int, int]:
  """Bytes of variables, whole and on one device."""
  whole = sum(int(v.shape.size) * v.slice_dtype.size for v in variables)
  return whole, sum(math.prod(v.slice_shape) * v.slice_dtype.size for v in variables)


def _asked(axes: Sequence[str | None] | None) -> str:
  return "" if axes is None else ", ".join(a or "-" for a in axes) or "-"
