"""Checks of layout rules for dimensions that the program or the mesh does not have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from mesh_settings.hints import did_you_mean, hint
from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.meshes.layout import LayoutRules
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Graph, Operation


def dimension_names(graph: Graph) -> set[str]:
  """Names of the dimensions of all tensors of a graph."""
  return set(_names(graph.operations))


def _names(operations: Iterable[Operation]) -> Iterator[str]:
  for op in operations:
    yield from (n for t in op.outputs for n in t.shape.dimension_names)
    yield from _names(getattr(op, "inner_operations", ()))  # Of a loop.


def check_mesh_names(
  mesh_shape: Shape, layout_rules: LayoutRules, usual: Collection[str] = ()
) -> None:
  """Raises an error for a rule whose mesh dimension the mesh does not have.

  Args:
    mesh_shape: mesh shape.
    layout_rules: layout rules.
    usual: names that a mesh need not have.

  Raises:
    LayoutError: it names the rule, and what the mesh has.
  """
  names = mesh_shape.dimension_names
  for tensor_name, mesh_name in layout_rules.check_mesh(mesh_shape):
    if mesh_name not in usual:
      raise LayoutError(
        f"layout rule {tensor_name}:{mesh_name}: the mesh has no dimension {mesh_name!r}; it has "
        f"{', '.join(names) or 'none'}{did_you_mean(mesh_name, names, 2, 0.5)}"
      )


def check_tensor_names(mesh_impl: MeshImpl, graph: Graph, usual: Collection[str] = ()) -> None:
  """Raises an error for a rule whose tensor dimension no tensor of a graph has.

  Args:
    mesh_impl: has the layout rules; those for mesh dimensions that it does not have are left out.
    graph: a program.
    usual: names that a program need not have.

  Raises:
    LayoutError: it names the rule, and what the program has.
  """
  present = dimension_names(graph)
  for tensor_name, mesh_name in mesh_impl.layout_rules.pairs:
    if mesh_name not in mesh_impl.shape.dimension_names:
      continue
    if tensor_name not in present and tensor_name not in usual:
      raise unknown_dimension(tensor_name, mesh_name, present)


def unknown_dimension(
  tensor_name: str, mesh_name: str, present: Collection[str], meant: str | None = None
) -> LayoutError:
  """The error for a rule whose tensor dimension a program does not have.

  Args:
    tensor_name: the dimension.
    mesh_name: the mesh dimension of the rule.
    present: names of the dimensions of the program.
    meant: the one that is certainly meant, if that is known.
  """
  meant_by = hint([meant]) if meant else did_you_mean(tensor_name, present, 2, 0.5)
  return LayoutError(
    f"layout rule {tensor_name}:{mesh_name}: no tensor of the model has a dimension "
    f"{tensor_name!r}{meant_by}; the dimensions are "
    f"{', '.join(sorted(n for n in present if not n.startswith('_')))}"
  )


def check_names(mesh_impl: MeshImpl, graph: Graph) -> None:
  """Raises `LayoutError` for a rule that names what the mesh or the graph does not have."""
  check_mesh_names(mesh_impl.shape, mesh_impl.layout_rules)
  check_tensor_names(mesh_impl, graph)
