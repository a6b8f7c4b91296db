"""Pictures of a report: parts of a tensor and their devices; time of a step and its memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.program.dimensions import Shape

FORMATS = (".svg", ".png", ".pdf")
_MOST_LABELS = 1100
_MOST_TICKS = 80


def draw_layout(
  path: str,
  shape: Shape,
  slice_shape: Sequence[int],
  parts: dict[tuple[int, ...], list[int]],
  title: str,
) -> None:
  """Draws the parts of a tensor as a grid of cells that name their devices.

  The last split dimension runs to the right, the other split ones down, the first
  slowest. Dimensions that are not split are not drawn.

  Args:
    path: a file name that ends in .svg, .png or .pdf.
    shape: of the tensor.
    slice_shape: sizes of a part.
    parts: for the offset of each part the devices that hold it.
    title: of the picture.

  Raises:
    UnsupportedError: matplotlib is not installed, or the format is another.
  """
  if not path.lower().endswith(FORMATS):
    raise UnsupportedError(
      f"a picture of a layout can be one of {', '.join(FORMATS)}; got {os.path.basename(path)!r}"
    )
  try:
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
  except ImportError as e:
    raise UnsupportedError(
      "a picture of a layout needs matplotlib: pip install matplotlib; "
      "str(report) and report.to_dict() do without"
    ) from e
  split = [i for i, (d, n) in enumerate(zip(shape, slice_shape)) if d.size != n]
  across, down = split[-1:], split[:-1]
  columns = sorted({tuple(b[i] for i in across) for b in parts})
  rows = sorted({tuple(b[i] for i in down) for b in parts})
  count = len(rows) * len(columns)
  width = min(max(5.0, 1.25 * len(columns) + 1.5), 60.0)
  height = min(max(2.4, 0.5 * len(rows) + 1.6), 60.0)
  # A figure of its own: pyplot would keep it, and might ask for a display.
  figure = Figure(figsize=(width, height), layout="constrained")
  axes = figure.add_subplot()
  colors = colormaps["viridis"]
  for begin, devices in parts.items():
    x, y = columns.index(tuple(begin[i] for i in across)), rows.index(tuple(begin[i] for i in down))
    shade = (y * len(columns) + x) / max(count - 1, 1)
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colors(shade), alpha=0.45, edgecolor="white"))
    if count <= _MOST_LABELS:
      axes.text(x + 0.5, y + 0.5, device_text(devices), ha="center", va="center", fontsize=7)
  axes.set_xlim(0, len(columns))
  axes.set_ylim(len(rows), 0)
  _label(axes, "x", shape, slice_shape, across, columns)
  _label(axes, "y", shape, slice_shape, down, rows)
  axes.set_title(title, fontsize=9, wrap=True)
  figure.savefig(path)


def device_text(devices: Sequence[int]) -> str:
  """Names devices shortly: "device 3", "devices 0-7", "devices 0, 8, ..., 504 (64)"."""
  first, last, n = devices[0], devices[-1], len(devices)
  if n == 1:
    return f"device {first}"
  if last - first == n - 1:
    return f"devices {first}-{last}"
  if n <= 4:
    return "devices " + ", ".join(map(str, devices))
  return f"devices {first}, {devices[1]},\n..., {last} ({n})"


def _label(
  axes: Any,
  which: str,
  shape: Shape,
  slice_shape: Sequence[int],
  dims: Sequence[int],
  offsets: Sequence[tuple[int, ...]],
) -> None:
  """Writes index ranges along an axis, "0:64" for the first 64 of a dimension."""
  if not dims:
    (axes.set_xticks if which == "x" else axes.set_yticks)([])
    return
  step = -(-len(offsets) // _MOST_TICKS)
  shown = list(range(0, len(offsets), step))
  texts = [", ".join(f"{b}:{b + slice_shape[i]}" for i, b in zip(dims, offsets[k])) for k in shown]
  name = ", ".join(f"{shape[i].name}={shape[i].size}" for i in dims)
  if which == "x":
    axes.set_xticks([k + 0.5 for k in shown], texts, fontsize=7)
    axes.set_xlabel(name)
  else:
    axes.set_yticks([k + 0.5 for k in shown], texts, fontsize=7)
    axes.set_ylabel(name)


def draw_time(
  path: str, parts: Mapping[str, float], held: Sequence[int], kept: int, title: str
) -> None:
  """Draws a bar for each part of the time, and below the memory over the operations.

  Args:
    path: a file name that ends in .svg, .png or .pdf.
    parts: seconds by name.
    held: bytes of one device while each operation runs.
    kept: the part of these that stays for the whole step.
    title: of the picture.

  Raises:
    UnsupportedError: matplotlib is not installed, or the format is another.
  """
  if not path.lower().endswith(FORMATS):
    raise UnsupportedError(
      f"a picture can be one of {', '.join(FORMATS)}; got {os.path.basename(path)!r}"
    )
  try:
    from matplotlib.figure import Figure
  except ImportError as e:
    raise UnsupportedError(
      "a picture of the time needs matplotlib: pip install matplotlib; "
      "str(report) and report.to_dict() do without"
    ) from e
  # A figure of its own: pyplot would keep it, and might ask for a display.
  figure = Figure(figsize=(8, 2.6 + 0.3 * len(parts)), layout="constrained")
  bars, memory = figure.subplots(2, 1)
  names = sorted(parts, key=lambda name: parts[name])
  bars.barh(names, [parts[name] * 1e3 for name in names], color="tab:blue")
  bars.set_xlabel("ms a step")
  bars.tick_params(labelsize=7)
  bars.set_title(title, fontsize=9, wrap=True)
  operations = range(len(held))
  memory.fill_between(operations, [n / 2**20 for n in held], color="tab:orange", alpha=0.6)
  memory.axhline(kept / 2**20, color="gray", linewidth=0.8, label="variables and inputs")
  memory.set_ylim(bottom=0)
  memory.set_xlabel("operation")
  memory.set_ylabel("MiB of a device")
  memory.legend(fontsize=7)
  memory.tick_params(labelsize=7)
  figure.savefig(path)
