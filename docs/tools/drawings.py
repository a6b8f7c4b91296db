"""The drawings of docs/drawings: `python -m docs.tools.drawings` writes them.

Rooms and floors are those of the test of the house (tests/house/floors.py), so a drawing shows what
is checked; a test draws them again and compares.
"""

from __future__ import annotations

import dataclasses
import html
import pathlib

from tests.house import floors

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "drawings"

_FONT = 'font-family="Helvetica, Arial, sans-serif"'
_INK = "#1a237e"
# What a letter of 13 pixels takes, on an average; boxes leave some room.
_LETTER = 8.2


@dataclasses.dataclass
class Drawing:
  """An SVG picture.

  Attributes:
    width: pixels.
    height: pixels.
    title: for readers who do not see it.
    parts: its elements.
  """

  width: float
  height: float
  title: str
  parts: list[str] = dataclasses.field(default_factory=list)

  def box(
    self, x: float, y: float, width: float, height: float, fill: str, *, dashed: bool = False
  ) -> None:
    """A rectangle."""
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    self.parts.append(
      f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}"'
      f' stroke="{_INK}"{dash}/>'
    )

  def text(
    self,
    x: float,
    y: float,
    text: str,
    *,
    size: int = 13,
    bold: bool = False,
    anchor: str = "start",
  ) -> None:
    """A line of text; y is its base line."""
    weight = ' font-weight="bold"' if bold else ""
    self.parts.append(
      f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight} text-anchor="{anchor}">'
      f"{html.escape(text)}</text>"
    )

  def arrow(self, *points: tuple[float, float], both: bool = False) -> None:
    """A line through points, with a head at its end, or at both."""
    start = ' marker-start="url(#head)"' if both else ""
    way = " ".join(f"{x:g},{y:g}" for x, y in points)
    self.parts.append(
      f'<polyline points="{way}" fill="none" stroke="{_INK}" stroke-width="1.5"'
      f' marker-end="url(#head)"{start}/>'
    )

  def svg(self) -> str:
    """The text of the file."""
    return "\n".join(
      [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}"'
        f' viewBox="0 0 {self.width:g} {self.height:g}" {_FONT} fill="{_INK}">',
        f"<title>{html.escape(self.title)}</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8"'
        ' markerHeight="8" orient="auto-start-reverse">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{_INK}"/></marker></defs>',
        f'<rect width="{self.width:g}" height="{self.height:g}" fill="white"/>',
        *self.parts,
        "</svg>\n",
      ]
    )


_ROW, _GAP, _MARGIN = 26, 8, 16


def rooms() -> Drawing:
  """The rooms, floor by floor, the lowest at the bottom."""
  rows = [
    (package, number, row.split())
    for package, of_package in floors.FLOORS.items()
    for number, row in enumerate(of_package, start=1)
  ]
  drawing = Drawing(
    820, 0, "Rooms and floors; a file imports from its own room and from lower floors only"
  )
  y = 12.0
  above = None
  for package, number, names in reversed(rows):
    if package != above:
      y += 30
      drawing.text(_MARGIN, y - 10, f"{package.replace('.', '/')}/", size=15, bold=True)
      above = package
    drawing.text(_MARGIN + 18, y + 18, str(number), anchor="end")
    x = _MARGIN + 32.0
    for name in names:
      width = _LETTER * len(name) + 16
      if x + width > drawing.width - _MARGIN:
        x, y = _MARGIN + 32.0, y + _ROW + 3
      of, room = floors.room_named(package, name)
      is_folder = (floors.ROOT / floors.FOLDERS[of] / room).is_dir()
      drawing.box(x, y, width, _ROW, "#e8eaf6" if is_folder else "white", dashed=not is_folder)
      drawing.text(x + width / 2, y + 18, name, anchor="middle", bold=is_folder)
      x += width + _GAP
    y += _ROW + _GAP
  drawing.text(
    _MARGIN + 32, y + 18, "Bold: a folder. Dashed: one file. Imports lead downward only."
  )
  drawing.height = y + 32
  return drawing


@dataclasses.dataclass(frozen=True)
class Station:
  """A stop on the way from a gin file to a device.

  Attributes:
    rooms: where its code is.
    title: what it is.
    lines: what happens there.
  """

  rooms: str
  title: str
  lines: tuple[str, ...]


WAY = [
  Station(
    "transformer/gin_config",
    "Settings",
    ("gin files and --gin_param: read and checked whole,", "then bound; nothing has run yet"),
  ),
  Station(
    "transformer/modes",
    "run.mode",
    ("looked up by its name; it makes what it needs:", "mesh, vocabulary, model, data, trainer"),
  ),
  Station(
    "transformer/model",
    "The Python function of a step",
    ("a model of layers; loss, gradients, optimizer", "as one mtf.function of named tensors"),
  ),
  Station(
    "program, operations (layers, optimize)",
    "mtf.Graph: a program without a layout",
    ("operations on named dimensions; gradients and", "assignments are operations like others"),
  ),
  Station(
    "running, with the layout of meshes",
    "mtf.Lowering: each operation on slices",
    ("slicewise code, and a collective where the", "layout splits what the operation joins"),
  ),
  Station(
    "meshes: placement, simd or tpu",
    "TensorFlow functions on devices",
    (
      "placement: one graph that has the slices of all;",
      "simd, tpu: one program, a call for each device",
    ),
  ),
]


def way() -> Drawing:
  """From a gin file to a device program."""
  left, width, height, gap = 270.0, 400.0, 66.0, 26.0
  drawing = Drawing(
    left + width + 224,
    30 + len(WAY) * (height + gap) + 30,
    "The way from a gin file to a program on devices",
  )
  y = 24.0
  tops = []
  for i, station in enumerate(WAY):
    tops.append(y)
    drawing.box(left, y, width, height, "#e8eaf6")
    drawing.text(left + 12, y + 20, station.title, bold=True, size=14)
    for k, line in enumerate(station.lines):
      drawing.text(left + 12, y + 39 + 17 * k, line)
    drawing.text(left - 12, y + 38, station.rooms, anchor="end", size=12)
    if i + 1 < len(WAY):
      drawing.arrow((left + 60, y + height), (left + 60, y + height + gap - 1))
    y += height + gap
  right = left + width
  # Beside the program: batches go in, state stays, results come out.
  _beside(drawing, right, tops[1], ("files, vocabularies, data", "text to batches of ids"))
  _beside(drawing, right, tops[3], ("checkpoint", "slices to files, and back"))
  _beside(drawing, right, tops[4], ("meshes: variable store", "slices, on their devices"))
  bottom = tops[-1] + height / 2
  drawing.arrow((right + 110, tops[3] + 47), (right + 110, tops[4] - 1), both=True)
  drawing.arrow(
    (right + 40, tops[4] + 47), (right + 40, bottom - 14), (right + 1, bottom - 14), both=True
  )
  drawing.text(right + 48, bottom - 12, "read and assigned", size=12)
  side = right + 204
  drawing.arrow(
    (right + 187, tops[1] + 23), (side, tops[1] + 23), (side, bottom + 6), (right + 1, bottom + 6)
  )
  drawing.text(right + 24, bottom + 22, "each call: batches in;", size=12)
  drawing.text(right + 24, bottom + 38, "loss, tokens, ... out", size=12)
  drawing.arrow((right + 1, bottom + 28), (right + 20, bottom + 28))
  drawing.text(left + 72, tops[4] - 8, "once, when it is traced; not at each step", size=12)
  drawing.height = y + 4
  return drawing


def _beside(drawing: Drawing, right: float, y: float, lines: tuple[str, str]) -> None:
  drawing.box(right + 24, y, 162, 46, "white")
  for k, line in enumerate(lines):
    drawing.text(right + 105, y + 19 + 17 * k, line, anchor="middle", size=12)


DRAWINGS = {"rooms": rooms, "way": way}


def draw(folder: pathlib.Path) -> None:
  """Writes all drawings into a folder."""
  for name, make in DRAWINGS.items():
    (folder / f"{name}.svg").write_text(make().svg(), encoding="utf-8")


if __name__ == "__main__":
  FOLDER.mkdir(exist_ok=True)
  draw(FOLDER)
  print(f"written: {len(DRAWINGS)} drawings in {FOLDER}")
