"""The text form of a layout report: tables of at most 100 columns."""

from __future__ import annotations

import collections
import textwrap
from collections.abc import Sequence
from typing import Any

WIDTH = 100


def report_text(report: Any, rows: int) -> str:
  """A `Report` as text.

  Args:
    report: a `describe.Report`.
    rows: at most so many rows in a table.
  """
  mesh = " x ".join(f"{m.name}:{m.size}" for m in report.mesh_shape) or "(no dimensions)"
  layout = ", ".join(f"{t}:{m}" for t, m in report.layout.pairs) or "(no rules)"
  parts = [
    textwrap.fill(
      f"{report.title} on mesh {mesh} ({report.mesh_shape.size} devices), layout {layout}",
      WIDTH,
      subsequent_indent="  ",
    ),
    _rules(report),
    _memory(report),
    _work(report, rows),
    _communication(report, rows),
    _placements("Variables, per device", report.variables, rows),
    _placements("Tensors that every device holds whole", report.replicated_tensors, rows),
  ]
  return "\n\n".join(p for p in parts if p)


def format_bytes(n: int) -> str:
  """A number of bytes with a binary unit: "1.5 KiB"."""
  value, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
  while value >= 1024 and len(units) > 1:
    value /= 1024
    units.pop(0)
  return f"{int(value)} B" if units[0] == "B" else f"{value:.3g} {units[0]}" if (
    value < 1000
  ) else f"{value:.0f} {units[0]}"


def format_flops(n: int) -> str:
  """A number of FLOPs with a decimal unit: "1.5 GFLOP"."""
  value, units = float(n), ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]
  while value >= 1000 and len(units) > 1:
    value /= 1000
    units.pop(0)
  return f"{value:.3g} {units[0]}"


def shape_text(shape: Sequence[tuple[str, int]], split: Sequence[str | None]) -> str:
  """Dimensions and the mesh dimensions that split them: "batch=8/rows, d=4"."""
  if not shape:
    return "scalar"
  return ", ".join(f"{n}={s}" + (f"/{m}" if m else "") for (n, s), m in zip(shape, split))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], limit: int) -> str:
  """Aligned columns: the first on the left, as wide as the line allows, others on the right.

  Args:
    header: one title for each column.
    rows: one text for each column.
    limit: rows to show; the others are counted in a last line.
  """
  shown = list(rows[:limit])
  widths = [max(len(r[i]) for r in [header, *shown]) for i in range(len(header))]
  widths[0] = min(widths[0], WIDTH - 2 - sum(w + 2 for w in widths[1:]))
  lines = []
  for row in [header, *shown]:
    cells = [_shorten(row[0], widths[0]).ljust(widths[0])]
    cells += [text.rjust(w) for text, w in zip(row[1:], widths[1:])]
    lines.append(("  " + "  ".join(cells)).rstrip())
  if len(rows) > limit:
    lines.append(f"  ... and {len(rows) - limit} more")
  return "\n".join(lines)


def _shorten(text: str, width: int) -> str:
  """The text with its middle left out if it is too long: both ends of a name matter."""
  if len(text) <= width:
    return text
  left = (width - 2) // 3
  return f"{text[:left]}..{text[len(text) - (width - 2 - left):]}"


def _rules(report: Any) -> str:
  lines = ["Layout rules"]
  good = [r for r in report.rules if not r.problem]
  if good:
    rows = [
      [
        f"{r.tensor_dimension}:{r.mesh_dimension}",
        _shorten(", ".join(map(str, r.sizes)), 24),
        str(r.mesh_size),
        str(r.variables),
        str(r.tensors),
      ]
      for r in good
    ]
    header = ["rule", "sizes split", "in parts", "variables", "other tensors"]
    lines.append(table(header, rows, len(rows)))
  problems = [
    f"{r.tensor_dimension}:{r.mesh_dimension} matches nothing: {r.problem}"
    for r in report.rules
    if r.problem
  ]
  problems += [
    f"mesh dimension {m} splits nothing: its devices repeat the same work"
    for m in report.idle_mesh_dimensions
  ]
  lines += [textwrap.fill("! " + p, WIDTH, initial_indent="  ", subsequent_indent="    ")
            for p in problems]
  return "\n".join(lines) if len(lines) > 1 else "Layout rules: none"


def _memory(report: Any) -> str:
  m = report.memory
  rows = [
    ["variables", format_bytes(m.variables)],
    ["inputs", format_bytes(m.inputs)],
    ["activations, at most", format_bytes(m.activations)],
    ["total", format_bytes(m.total)],
  ]
  text = "Memory of one device\n" + "\n".join(f"  {n:<22}{b:>12}" for n, b in rows)
  if m.largest:
    text += f"\n  The peak is at {_shorten(m.peak_operation, 60)}; the largest then:"
    for name, size in m.largest[:3]:
      text += f"\n    {_shorten(name, 76):<78}{format_bytes(size):>12}"
  return text


def _work(report: Any, rows: int) -> str:
  total = report.flops_per_device
  if not total:
    return ""
  repeated = total * report.mesh_shape.size / max(report.flops_needed, 1)
  text = (
    f"Matrix products and convolutions: {format_flops(total)} on each device; "
    f"each part is computed {repeated:.3g} times"
  )
  costly = sorted(
    (op for op in report.operations if op.flops), key=lambda op: -op.flops * op.times
  )
  header = ["operation", "FLOP", "share", "repeated"]
  lines = [
    [
      _name(op),
      format_flops(op.flops * op.times),
      f"{100 * op.flops * op.times / total:.1f}%",
      str(op.repeated),
    ]
    for op in costly
  ]
  return text + "\n" + table(header, lines, rows)


def _communication(report: Any, rows: int) -> str:
  moved = report.bytes_moved()
  if not any(moved.values()):
    return "No bytes move between devices"
  axes = [m for m, n in moved.items() if n]
  sums = ", ".join(f"{m} {format_bytes(moved[m])}" for m in axes)
  talking = [(op, report.bytes_moved(op)) for op in report.operations if op.collectives]
  talking.sort(key=lambda item: -sum(item[1].values()))
  header = ["operation", "collectives", *axes]
  lines = [
    [_name(op), _collectives(op), *(format_bytes(over[m]) if over[m] else "-" for m in axes)]
    for op, over in talking
  ]
  return f"Bytes that one device sends over each mesh dimension: {sums}\n" + table(
    header, lines, rows
  )


def _collectives(op: Any) -> str:
  counts = collections.Counter(c.kind for c in op.collectives)
  return ", ".join(kind if n == 1 else f"{n} {kind}" for kind, n in counts.items())


def _name(op: Any) -> str:
  if op.in_unbounded_loop:
    return f"{op.name} (each iteration)"
  return op.name if op.times == 1 else f"{op.name} (x {op.times})"


def _placements(title: str, placements: Sequence[Any], rows: int) -> str:
  if not placements:
    return ""
  lines = [
    [p.name, _shorten(shape_text(p.shape, p.split), 44), format_bytes(p.bytes_per_device),
     str(p.copies)]
    for p in placements
  ]
  total = format_bytes(sum(p.bytes_per_device for p in placements))
  return f"{title}: {len(placements)}, {total}\n" + table(
    ["name", "dimensions", "bytes", "copies"], lines, rows
  )
