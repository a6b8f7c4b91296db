"""Tables and a picture of an imported function: its parts with their dimensions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from mesh_tensorflow.errors import ArgumentError
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


# Light enough for black text; each dimension has the next one, again from the first after the last.
_COLORS = (
  "#9ecae1 #fdd0a2 #a1d99b #dadaeb #fcbba1 #fee391 #c7e9c0 #fbb4d9 #bcbddc #d9d9d9 #b3e2cd #f4cae4"
).split()
_ROW, _BOX, _LETTER, _GAP, _MARGIN = 30, 20, 6.4, 4, 12


class _Part:
  """Operations under one name scope, and their result.

  Args:
    name: of the part: a layer, say.
  """

  def __init__(self, name: str):
    self.name = name
    self.nodes: list[Node] = []

  @property
  def result(self) -> Wire | None:
    """Last output of the last operation that has one; None if none has."""
    made = [w for node in self.nodes for w in node.outputs]
    return made[-1] if made else None

  @property
  def variables(self) -> list[Wire]:
    """The variables that it reads."""
    inputs = [w for node in self.nodes for w in node.inputs if w.variable is not None]
    return list(dict.fromkeys(inputs))


def _parts(program: Program) -> list[_Part]:
  """Groups consecutive operations by the first two name scopes: the model's and the layer's."""
  parts: list[_Part] = []
  for node in program.nodes:
    scopes = node.name.split("/")[:-1]
    name = "/".join(scopes[:2]) or node.type
    if not parts or parts[-1].name != name:
      parts.append(_Part(name))
    parts[-1].nodes.append(node)
  return parts


def picture(program: Program, dimensioned: Dimensioned, places: Places) -> str:
  """An SVG: for each part of the function what it makes, and its variables; dimensions are boxes.

  Args:
    program: the program.
    dimensioned: its dimensions.
    places: what of it has a name.
  """
  colors: dict[str, str] = {}

  def boxes(wire: Wire, x: float, y: float) -> tuple[str, float]:
    drawn = ""
    for dims in dimensioned.of(wire):
      for d in dims:
        color = colors.setdefault(d.name, _COLORS[len(colors) % len(_COLORS)])
        text, x_next = _box(d, color, x, y)
        drawn, x = drawn + text, x_next
    return drawn, x

  rows: list[tuple[str, Wire | None, Sequence[Wire]]] = [
    *((name, wire, ()) for name, wire in places.arguments.items()),
    *((part.name, part.result, part.variables) for part in _parts(program)),
    *((name, wire, ()) for name, wire in places.outputs.items()),
  ]
  names = _MARGIN + _LETTER * max(len(name) for name, *_ in rows) + 3 * _GAP
  body, widths = [], [names]
  variables_at = names
  for _, wire, _ in rows:
    if wire is not None:
      variables_at = max(variables_at, boxes(wire, names, 0)[1])
  for i, (name, wire, variables) in enumerate(rows):
    y = _MARGIN + i * _ROW
    body.append(_text(name, _MARGIN, y, "start"))
    if wire is not None:
      body.append(boxes(wire, names, y)[0])
    x = variables_at + 4 * _GAP
    for v in variables:
      label = v.name.rsplit("/", 1)[-1]
      body.append(_text(label, x, y, "start", "#555"))
      drawn, x = boxes(v, x + _LETTER * (len(label) + 1), y)
      body.append(drawn)
      x += 3 * _GAP
    widths.append(x)
  width, height = max(widths) + _MARGIN, 2 * _MARGIN + len(rows) * _ROW
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
    f'viewBox="0 0 {width:.0f} {height}" font-family="monospace" font-size="11">\n'
    f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
  )


def save(path: str, text: str) -> None:
  """Writes a picture.

  Raises:
    ArgumentError: the name does not end in .svg.
  """
  if os.path.splitext(path)[1].lower() != ".svg":
    raise ArgumentError(f"save_picture: the name of a picture ends in .svg, got {path!r}")
  with open(path, "w", encoding="utf-8") as f:
    f.write(text)


def _box(dim: Dimension, color: str, x: float, y: float) -> tuple[str, float]:
  label = f"{dim.name} {dim.size}"
  width = _LETTER * len(label) + 2 * _GAP
  text = (
    f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{_BOX}" rx="3" fill="{color}"/>'
    + _text(label, x + width / 2, y, "middle")
  )
  return text, x + width + _GAP


def _text(text: str, x: float, y: float, anchor: str, color: str = "black") -> str:
  return (
    f'<text x="{x:.0f}" y="{y + 14}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
  )
