"""Pictures of a predicted step: its time by part, and memory from its begin to its end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.planning.picture import FORMATS


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
