"""Tables of the dimensions and operations of an imported function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from mesh_tensorflow.importing.building import Dimensioned
from mesh_tensorflow.importing.naming import Places
from mesh_tensorflow.importing.nodes import Node, Program, Wire
from mesh_tensorflow.importing.replicating import rule_of
from mesh_tensorflow.importing.rules import Labelled
from mesh_tensorflow.program.dimensions import Dimension


@dataclasses.dataclass(frozen=True)
class ImportedOperation:
  """An operation of an imported function.

  Attributes:
    type: TensorFlow's name of it.
    name: of this one.
    line: the line of Python that made it.
    dimensions: names of the dimensions along which a layout splits its work: those of its inputs
      and outputs, but for what it needs whole.
    is_fallback: whether each device computes it whole.
  """

  type: str
  name: str
  line: str
  dimensions: frozenset[str]
  is_fallback: bool


def operation_rows(nodes: Iterable[Node], dimensioned: Dimensioned) -> list[ImportedOperation]:
  """Records of operations."""
  return [
    ImportedOperation(
      node.type,
      node.name,
      node.line,
      frozenset(_splittable(node, dimensioned)),
      node.fallback,
    )
    for node in nodes
  ]


def _splittable(node: Node, dimensioned: Dimensioned) -> Iterator[str]:
  """Yields names of a node's dimensions, except those of axes that its rule needs whole."""
  wires = [w for w in (*node.inputs, *node.outputs) if w.static is None]
  whole: set[tuple[Wire, int]] = set()
  rule = rule_of(node)
  if isinstance(rule, Labelled):
    labels = rule.labels(node)
    # An input without labels says how it is done: it is no operand.
    wires = [w for w, names in zip(node.inputs, labels.inputs) if names and w.static is None]
    wires += node.outputs
    named = [*zip(node.inputs, labels.inputs), *zip(node.outputs, labels.outputs)]
    whole = {(w, i) for w, names in named for i, n in enumerate(names or ()) if n in labels.whole}
  for wire in wires:
    for i, dims in enumerate(dimensioned.of(wire)):
      if (wire, i) not in whole:
        yield from (d.name for d in dims)


class DimensionTable(Mapping[str, Dimension]):
  """Names of dimensions -> `mtf.Dimension`s; printed, a table of where each occurs.

  Args:
    program: the program.
    dimensioned: its dimensions.
    places: what of it has a name.
  """

  def __init__(self, program: Program, dimensioned: Dimensioned, places: Places):
    self._dims: dict[str, Dimension] = {}
    self._places: dict[str, list[str]] = {}
    named = {**places.arguments, **places.variables, **places.outputs}
    for name, wire in named.items():
      for i, dims in enumerate(dimensioned.of(wire)):
        for d in dims:
          self._enter(d).append(f"{name}[{i}]")
    for wire in program.wires:
      if wire.static is None:
        for dims in dimensioned.of(wire):
          for d in dims:
            self._enter(d)

  def _enter(self, dim: Dimension) -> list[str]:
    self._dims.setdefault(dim.name, dim)
    return self._places.setdefault(dim.name, [])

  def __getitem__(self, name: str) -> Dimension:
    return self._dims[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._dims)

  def __len__(self) -> int:
    return len(self._dims)

  def places(self, name: str) -> list[str]:
    """Lists where a dimension occurs: arguments, results and variables, each with the axis."""
    return list(self._places[name])

  def __str__(self) -> str:
    width = max([len("name"), *map(len, self._dims)])
    lines = [f"{'name':{width}}  {'size':>8}  occurs in"]
    for name, dim in self._dims.items():
      places = self._places[name]
      shown = ", ".join(places[:4]) or "(operations only)"
      more = f", and {len(places) - 4} more" if len(places) > 4 else ""
      lines.append(f"{name:{width}}  {dim.size:>8}  {shown}{more}")
    return "\n".join(lines)

  __repr__ = __str__
