"""A picture of an imported function: its parts from top to bottom, with their dimensions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from xml.sax.saxutils import escape

from mesh_tensorflow.errors import ArgumentError
from mesh_tensorflow.importing.building import Dimensioned
from mesh_tensorflow.importing.naming import Places
from mesh_tensorflow.importing.nodes import Node, Program, Wire
from mesh_tensorflow.program.dimensions import Dimension

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
