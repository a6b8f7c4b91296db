"""The layout of a Keras model: given by hand, in Keras' words, or searched."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras

from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.importing.imported import Imported
from mesh_tensorflow.keras.layouts import MapLayout, VariableAxes, rules_of
from mesh_tensorflow.keras.meshes import MeshChoice, is_distribution
from mesh_tensorflow.meshes.layout import LayoutRules, convert_to_layout_rules
from mesh_tensorflow.meshes.layout_names import check_mesh_names
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.planning.auto_layout import LayoutChoice, auto_layout
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Graph
from mesh_tensorflow.running.function import Function, TensorSpec

_LOG = logging.getLogger("mesh_tensorflow")
# Time limit of the layout search: longer ones rarely find better, and the first batch waits.
_SEARCH_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Decision:
  """A mesh with its layout.

  Attributes:
    mesh_impl: the mesh implementation.
    names: for each variable, by path, the names of its axes in a program; None for size 1.
    kind: of the program it was made for: "train", "test" or "predict".
    map_layout: layout rules made from Keras' layout map, or None.
    choice: what was found, where a layout was searched; None if there was none to be found.
    searched: whether a layout was searched.
  """

  mesh_impl: MeshImpl
  names: dict[str, tuple[str | None, ...]]
  kind: str
  map_layout: MapLayout | None = None
  choice: LayoutChoice | None = None
  searched: bool = False

  @property
  def stored(self) -> Mapping[str, tuple[str | None, ...]]:
    """Dimension names of the variables that are stored under others than `names`, by path."""
    return {} if self.map_layout is None else self.map_layout.stored


def decide(
  kind: str,
  mesh: MeshChoice,
  layout: Any,
  imported: Imported,
  body: Callable[..., Any],
  signature: Sequence[TensorSpec],
  model: keras.Model,
) -> Decision:
  """Decides the layout for a program.

  Args:
    kind: kind of the program: "train", "test" or "predict".
    mesh: the mesh.
    layout: "auto", layout rules, or what `is_distribution`.
    imported: the forward part of the program.
    body: the program, a function of `mtf.Tensor`s.
    signature: its arguments.
    model: the model.

  Raises:
    LayoutError: what is asked for suits neither the program nor the mesh.
    OutOfMemoryError: no layout fits into memory.
  """
  names = names_of(imported)
  shape = mesh.shape
  by_hand = rules_by_hand(mesh, layout)
  if is_distribution(layout):
    assert shape is not None
    found = _of_distribution(layout, imported, _graph(mesh, body, signature), shape, model)
    return Decision(mesh.make(shape, found.rules), names, kind, found)
  if by_hand is not None:
    return Decision(mesh.make(shape or _shape_for(by_hand, mesh.size), by_hand), names, kind)
  if mesh.size == 1:
    return Decision(mesh.make(shape or Shape([Dimension("all", 1)]), ""), names, kind)
  any_mesh = mesh.make(shape or Shape([Dimension("all", mesh.size)]), "")
  planned = Function(body, any_mesh, signature, "mesh")
  choice: LayoutChoice | None = None
  try:
    if shape is None:
      choice = auto_layout(planned, devices=mesh.size, time_limit=_SEARCH_SECONDS)
    else:
      choice = auto_layout(planned, mesh_shape=shape, time_limit=_SEARCH_SECONDS)
  except LayoutError as e:  # Sizes of 1, say: nobody asked for a rule, so none is wrong.
    decided, unsplit = any_mesh, str(e)
  else:
    decided, unsplit = mesh.make(choice.mesh_shape, choice.layout), choice.why_unsplit()
  _LOG.info("parallelize: layout %s", decided.layout_rules.pairs)
  if unsplit:
    _LOG.warning(
      "parallelize: the automatic layout splits nothing over the mesh %s: %s. A larger batch or "
      "model may be split; a layout by hand is taken as it is",
      *(",".join(f"{m.name}:{m.size}" for m in decided.shape), unsplit),
    )
  return Decision(decided, names, kind, None, choice, searched=True)


def rules_by_hand(mesh: MeshChoice, layout: Any) -> LayoutRules | None:
  """The layout rules that a user wrote, for the layout or for the mesh; None if there are none.

  Args:
    mesh: the mesh.
    layout: "auto", layout rules, or what Keras has for a layout; see `decide`.

  Raises:
    LayoutError: a rule names a mesh dimension that there is not.
  """
  if isinstance(layout, str) and layout == "auto":
    rules = LayoutRules([]) if mesh.given is None else mesh.given.layout_rules
    if not rules.pairs:
      return None
  elif is_distribution(layout):
    return None
  else:
    rules = convert_to_layout_rules(layout)
  check_mesh_names(mesh.shape or _shape_for(rules, mesh.size), rules)
  return rules


def names_of(imported: Imported) -> dict[str, tuple[str | None, ...]]:
  """The names of the axes of the variables of an imported function; None for size 1."""
  return {
    v.name: tuple(d.name if d.size > 1 else None for d in v.shape) for v in imported.variables
  }


def suited(mesh_impl: MeshImpl, imported: Imported, always: Collection[str]) -> MeshImpl:
  """Drops layout rules that do not fit a program: the dimension is missing, or does not divide.

  A last batch that is smaller, say: its examples cannot be split, so each device computes all of
  them. Variables have the same sizes in all programs: their rules stay.

  Args:
    mesh_impl: the mesh.
    imported: the forward part of the program.
    always: names of dimensions whose rules are never left out.
  """
  mesh = {m.name: int(m.size) for m in mesh_impl.shape}
  dims = imported.dimensions
  unsuited = [
    (d, m)
    for d, m in mesh_impl.layout_rules.pairs
    if d not in always and (d not in dims or (m in mesh and dims[d].size % mesh[m]))
  ]
  if not unsuited:
    return mesh_impl
  for d, m in unsuited:
    if d not in dims:
      continue
    _LOG.info(
      "parallelize: %s:%d cannot be split over %s:%d, so each device computes all of it",
      *(d, dims[d].size, m, mesh[m]),
    )
  return mesh_impl.with_layout([p for p in mesh_impl.layout_rules.pairs if p not in unsuited])


def _of_distribution(
  distribution: Any, imported: Imported, graph: Graph, shape: Shape, model: keras.Model
) -> MapLayout:
  of_keras = {id(v.value): v for v in model.variables}
  variables = [
    VariableAxes(v.name, of_keras[id(v.variable)], names_of(imported)[v.name])
    for v in imported.variables
    if id(v.variable) in of_keras
  ]
  batch = {s[0].name for s in imported.arguments if s.ndims}
  return rules_of(distribution, variables, shape, batch, _conflicts(graph))


def _conflicts(graph: Graph) -> set[frozenset[str]]:
  """Pairs of dimension names that occur together in a tensor of a graph."""
  shapes = {
    tuple(x.shape.dimension_names)
    for op in graph.operations
    for one in (op, *getattr(op, "inner_operations", ()))
    for x in one.outputs
  }
  return {frozenset((a, b)) for names in shapes for a in names for b in names if a != b}


def _graph(mesh: MeshChoice, body: Callable[..., Any], signature: Sequence[TensorSpec]) -> Graph:
  assert mesh.shape is not None
  return Function(body, mesh.make(mesh.shape, ""), signature, "mesh").build_graph()[0]


def _shape_for(rules: LayoutRules, size: int) -> Shape:
  """Mesh shape of `size` devices for layout rules over one mesh dimension.

  Raises:
    LayoutError: the rules are over several mesh dimensions, whose sizes are not given.
  """
  names = sorted({m for _, m in rules.pairs})
  if len(names) > 1:
    raise LayoutError(
      f"parallelize: the layout {rules.pairs} is over the mesh dimensions {', '.join(names)}, and "
      f"of the mesh only its number of devices is given, {size}; give a mesh shape, as "
      f"'{','.join(f'{n}:{size if i == 0 else 1}' for i, n in enumerate(names))}'"
    )
  return Shape([Dimension(names[0] if names else "all", size)])
