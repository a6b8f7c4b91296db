"""Keras' layouts of variables, by path, as layout rules over named dimensions.

A `LayoutMap` says for each axis of each variable over which axis of the mesh it is split. A layout
rule says it for a dimension, in all tensors that have it. Where all variables agree, and no tensor
would be split twice over one mesh axis, the map is a rule. Else (the weights' `d_model` over the
axis that splits the batch, say: what is called fully sharded data parallelism) the axis of that
variable gets a name of its own, under which it is *stored*; where the variable is read, it is
renamed to what the program calls it, so its slices are gathered just there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras

from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.meshes.layout import LayoutRules
from mesh_tensorflow.program.dimensions import Shape


@dataclasses.dataclass(frozen=True)
class VariableAxes:
  """A variable with the names of its axes.

  Attributes:
    path: its name here.
    variable: the keras.Variable, whose path the patterns of a map are for.
    dims: for each axis the name of its dimension; None of size 1.
  """

  path: str
  variable: Any
  dims: tuple[str | None, ...]

  @property
  def sizes(self) -> list[int]:
    """The sizes of its axes."""
    return [int(n) for n in self.variable.shape]


@dataclasses.dataclass(frozen=True)
class MapLayout:
  """Layout rules that a Keras `LayoutMap` was converted to.

  Attributes:
    rules: the layout rules.
    stored: for each variable with axes that are stored under other names, by path: the names of
      all its axes as it is stored.
    asked: the map's layout of each variable, by path: a mesh axis or None for each axis.
  """

  rules: LayoutRules
  stored: Mapping[str, tuple[str | None, ...]]
  asked: Mapping[str, tuple[str | None, ...]]


def batch_axis_of(distribution: Any) -> str | None:
  """The mesh axis over which a distribution splits the batch.

  Args:
    distribution: an object for which `meshes.is_distribution` is True. A map alone splits the batch
      over the first axis, as a `ModelParallel` of the map does.
  """
  if isinstance(distribution, keras.distribution.LayoutMap):
    mesh = distribution.device_mesh
    return None if mesh is None else str(mesh.axis_names[0])
  axis = distribution.get_data_layout((1, 1)).axes[0]
  return None if axis is None else str(axis)


def asked_of(
  distribution: Any, variable: VariableAxes, mesh_shape: Shape
) -> tuple[str | None, ...]:
  """The mesh axis that a distribution splits each axis of a variable over, or None.

  Patterns are searched as the installed Keras searches them.

  Args:
    distribution: an object for which `meshes.is_distribution` is True.
    variable: the variable.
    mesh_shape: the mesh.

  Raises:
    LayoutError: two patterns match, or a layout does not suit the variable or the mesh.
  """
  try:
    if isinstance(distribution, keras.distribution.LayoutMap):
      layout = distribution[variable.variable.path]
    else:
      layout = distribution.get_variable_layout(variable.variable)
  except ValueError as e:
    raise LayoutError(f"layout of variable {variable.path}: {e}") from e
  sizes = variable.sizes
  if layout is None:
    return (None,) * len(sizes)
  axes = tuple(None if a is None else str(a) for a in layout.axes)
  what = f"the layout map says {axes} of variable {variable.path} {sizes}"
  if len(axes) != len(sizes):
    raise LayoutError(f"{what}, which has {len(sizes)} axes")
  mesh = {m.name: int(m.size) for m in mesh_shape}
  used = [a for a in axes if a is not None]
  for a, size in zip(axes, sizes):
    if a is None:
      continue
    if a not in mesh:
      raise LayoutError(f"{what}, and the mesh {mesh_shape} has no axis {a}")
    if used.count(a) > 1:
      raise LayoutError(f"{what}: the mesh axis {a} can split one of its axes, not two")
    if size > 1 and size % mesh[a]:
      raise LayoutError(f"{what}, and {a}:{mesh[a]} does not divide {size}")
  # There is nothing to split in an axis of size 1: the key of multi-query attention, say.
  return tuple(a if n > 1 else None for a, n in zip(axes, sizes))


def rules_of(
  distribution: Any,
  variables: Sequence[VariableAxes],
  mesh_shape: Shape,
  batch_names: Collection[str],
  conflicts: Collection[frozenset[str]],
) -> MapLayout:
  """Converts a Keras distribution to layout rules.

  Args:
    distribution: an object for which `meshes.is_distribution` is True.
    variables: all variables of the model.
    mesh_shape: the mesh.
    batch_names: names of the dimensions that count examples.
    conflicts: pairs of names that one tensor of the program has.

  Raises:
    LayoutError: see `asked_of`.
  """
  asked = {v.path: asked_of(distribution, v, mesh_shape) for v in variables}
  batch_axis = batch_axis_of(distribution)
  if batch_axis is None:
    batch_axis = mesh_shape[0].name
  elif batch_axis not in mesh_shape.dimension_names:
    raise LayoutError(
      f"the distribution splits the batch over {batch_axis!r}, and the mesh {mesh_shape} has no "
      "such axis"
    )
  rules = {name: batch_axis for name in batch_names}
  rules.update(_rules_of_variables(variables, asked, rules, conflicts))
  names = {n for v in variables for n in v.dims if n is not None} | set(batch_names)
  stored: dict[str, tuple[str | None, ...]] = {}
  more: dict[str, str] = {}
  for v in variables:
    dims = list(v.dims)
    for i, (name, axis) in enumerate(zip(v.dims, asked[v.path])):
      if name is None or rules.get(name) == axis:
        continue
      dims[i] = _stored_name(name, axis, names)
      if axis is not None:
        more[str(dims[i])] = axis
    if tuple(dims) != v.dims:
      stored[v.path] = tuple(dims)
  return MapLayout(LayoutRules({**rules, **more}), stored, asked)


def _rules_of_variables(
  variables: Sequence[VariableAxes],
  asked: Mapping[str, tuple[str | None, ...]],
  rules: Mapping[str, str],
  conflicts: Collection[frozenset[str]],
) -> dict[str, str]:
  """Adds rules by votes of the variables, weighted by size, unless they conflict in a tensor."""
  votes: dict[tuple[str, str], int] = {}
  for v in variables:
    for name, axis in zip(v.dims, asked[v.path]):
      if name is not None and axis is not None:
        votes[name, axis] = votes.get((name, axis), 0) + math.prod(v.sizes)
  chosen = dict(rules)
  for name, axis in sorted(votes, key=lambda pair: (-votes[pair], pair)):
    if name in chosen:
      continue
    if any(a == axis and frozenset((name, n)) in conflicts for n, a in chosen.items()):
      continue
    chosen[name] = axis
  return chosen


def _stored_name(name: str, axis: str | None, names: Collection[str]) -> str:
  """A new dimension name for a variable's axis that is stored with another layout than `name`."""
  stored = f"{name}_over_{axis}" if axis else f"{name}_whole"
  while stored in names:
    stored += "_"
  return stored
