"""The text form of a layout report: tables of at most 100 columns."""

from __future__ import annotations

import collections
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mesh_tensorflow.planning.cost_model import StepTime
from mesh_tensorflow.planning.lowering import OperationCost

WIDTH = 100

_Item = TypeVar("_Item")


def report_text(report: Any, rows: int) -> str:
  """A `Report` as text.

  Args:
    report: a `describe.Report`.
    rows: maximum number of rows of a table.
  """
  mesh = " x ".join(f"{m.name}:{m.size}" for m in report.mesh_shape) or "(no dimensions)"
  layout = ", ".join(f"{t}:{m}" for t, m in report.layout.written) or "(no rules)"
  if report.shard_state:
    layout += f"; state in shards over {', '.join(report.shard_state)}"
  loads = report.processors_of_devices
  devices = f"{len(loads)} device{'' if len(loads) == 1 else 's'}"
  if max(loads) > 1:
    devices = f"{sum(loads)} processors on {devices}, {':'.join(map(str, loads))}"
  parts = [
    textwrap.fill(
      f"{report.title} on mesh {mesh} ({devices}), layout {layout}",
      WIDTH,
      subsequent_indent="  ",
    ),
    _rules(report),
    _pipeline(report),
    _time(report, rows),
    "" if report.shares is None else str(report.shares),
    _memory(report, rows),
    _work(report, rows),
    _communication(report, rows),
    _placements("Variables, per device", report.variables, rows),
    _placements("Tensors that every device holds whole", report.replicated_tensors, rows),
  ]
  return "\n\n".join(p for p in parts if p)


def _pipeline(report: Any) -> str:
  """The stages of a pipeline, and its schedule."""
  plan = report.pipeline
  if plan is None:
    return ""
  title = (
    f"Pipeline of {len(plan.stages)} stages, {plan.microbatches} microbatches, schedule "
    f"{plan.schedule}: stages are idle for {100 * plan.bubble:.0f} % of the time"
  )
  if plan.is_timed:
    title += f"; {format_seconds(plan.seconds)} a step"
  rows = [["stage", "forward", "backward", "updates", "under way", "memory a device", "sends"]]
  if not plan.is_timed:
    rows = [["stage", "under way", "memory a device", "sends"]]
  for s in plan.stages:
    times = [s.forward, s.backward, s.outside]
    rows.append(
      [
        s.name,
        *(format_seconds(t) for t in times if plan.is_timed),
        f"{s.under_way:.3g}",
        format_bytes(s.memory),
        format_bytes(s.sent),
      ]
    )
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = [
    "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths)))
    for r in rows
  ]
  lines = ["  " + line.rstrip() for line in lines]
  if len(plan.stages) <= 16 and plan.microbatches <= 64:
    lines += ["  Digits are microbatches going forward, letters the same ones going back:"]
    lines += [f"  {line}" for line in plan.drawn().splitlines()]
  title = textwrap.fill(title, WIDTH, subsequent_indent="  ")
  return "\n".join([title, *lines])


def format_bytes(n: int) -> str:
  """A number of bytes with a binary unit: "1.5 KiB"."""
  value, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
  while value >= 1024 and len(units) > 1:
    value /= 1024
    units.pop(0)
  exact = value >= 1000 or units[0] == "B"
  return f"{value:.0f} {units[0]}" if exact else f"{value:.3g} {units[0]}"


def format_flops(n: float) -> str:
  """A number of FLOPs with a decimal unit: "1.5 GFLOP"."""
  value, units = float(n), ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]
  while value >= 1000 and len(units) > 1:
    value /= 1000
    units.pop(0)
  return f"{value:.3g} {units[0]}"


def format_seconds(seconds: float) -> str:
  """A time with a unit: "1.5 ms"."""
  for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
    if seconds * factor >= 1 or unit == "us":
      break
  return f"{seconds * factor:.3g} {unit}"


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
  return f"{text[:left]}..{text[len(text) - (width - 2 - left) :]}"


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
  lines += [
    textwrap.fill("! " + p, WIDTH, initial_indent="  ", subsequent_indent="    ") for p in problems
  ]
  return "\n".join(lines) if len(lines) > 1 else "Layout rules: none"


def _time(report: Any, rows: int) -> str:
  """Formats the breakdown of the predicted time; "" without one."""
  time = report.time
  if time is None:
    return ""
  lines = [f"Predicted for {report.machine.name}: {format_seconds(report.seconds)} a step"]
  if report.utilisation:
    lines[0] += f", {100 * report.utilisation:.3g}% of the devices' peak"
  if report.tokens_per_second:
    lines[0] += f", {report.tokens_per_second:.4g} tokens/s"
  if report.pipeline is not None:
    lines.append("  The work of a device of each stage, added up over the stages:")
  parts = sorted(time.parts().items(), key=lambda part: -part[1])
  share = 100 / time.seconds if time.seconds else 0.0
  lines.append(
    table(
      ["part", "seconds", "share"],
      [[name, format_seconds(s), f"{s * share:.1f}%"] for name, s in parts],
      rows + 5,
    )
  )
  products = sorted(time.work.products.items(), key=lambda part: -part[1])
  if products:
    lines.append(
      table(
        ["products", "FLOPs", "seconds", "of the peak"],
        [
          [
            f"{dtype}, up to {format_flops(10**size)} each",
            format_flops(time.work.flops[dtype, size]),
            format_seconds(s),
            f"{100 * _part_of_peak(time, dtype, size):.1f}%",
          ]
          for (dtype, size), s in products
        ],
        rows,
      )
    )
  return "\n".join(lines)


def _part_of_peak(time: StepTime, dtype: str, size: int) -> float:
  share = time.devices if time.machine.shared else 1
  ideal = time.work.flops[dtype, size] / time.machine.device.peak(dtype) * share
  return float(ideal / time.work.products[dtype, size])


def _memory(report: Any, rows: int) -> str:
  if report.pipeline is not None:
    return ""  # That of each stage is told with the stages.
  m = report.memory
  sums = [
    ["variables", format_bytes(m.variables)],
    ["inputs", format_bytes(m.inputs)],
    ["activations, at most", format_bytes(m.activations)],
    ["total", format_bytes(m.total)],
  ]
  # What the processors of a device have alike they have once: it takes less than all of theirs.
  several = max(report.processors_of_devices) > 1
  text = f"Memory of one {'processor' if several else 'device'}\n" + "\n".join(
    f"  {n:<22}{b:>12}" for n, b in sums
  )
  if m.largest:
    text += f"\n  The peak is at {_shorten(m.peak_operation, 60)}; the largest then:\n"
    lines = [
      [name, str(count), format_bytes(total)]
      for name, count, _, total in _grouped(m.largest, lambda h: h.bytes, lambda h: h.bytes)
    ]
    text += table(["tensor", "number", "bytes"], lines, min(rows, 5))
  return text


def _work(report: Any, rows: int) -> str:
  total = report.flops_per_device
  if not total:
    return ""
  repeated = total * report.mesh_shape.size / max(report.flops_needed, 1)
  alike = "no part is computed twice"
  if repeated >= 1.005:
    alike = f"each on {repeated:.3g} devices alike"
  text = f"Matrix products and convolutions: {format_flops(total)} on each device; {alike}"

  def flops(op: OperationCost) -> int:
    return int(op.flops * op.times)

  lines = [
    [name, str(count), format_flops(flops(op)), f"{100 * cost / total:.1f}%", str(op.repeated)]
    for name, count, op, cost in _grouped(
      [op for op in report.operations if op.flops], flops, lambda op: (flops(op), op.repeated)
    )
  ]
  header = ["operation", "number", "each", "share", "repeated"]
  return text + "\n" + table(header, lines, rows)


def _communication(report: Any, rows: int) -> str:
  moved = report.bytes_moved()
  if not any(moved.values()):
    return "No bytes move between devices"
  axes = [m for m, n in moved.items() if n]
  sums = ", ".join(f"{m} {format_bytes(moved[m])}" for m in axes)
  over = {op.name: report.bytes_moved(op) for op in report.operations if op.collectives}
  groups = _grouped(
    [op for op in report.operations if op.collectives],
    lambda op: sum(over[op.name].values()),
    lambda op: (_collectives(op), *over[op.name].values()),
  )
  lines = [
    [name, str(count), _collectives(op)]
    + [format_bytes(over[op.name][m] * count) if over[op.name][m] else "-" for m in axes]
    for name, count, op, _ in groups
  ]
  return f"Bytes that one device sends over each mesh dimension: {sums}\n" + table(
    ["operation", "number", "each does", *axes], lines, rows
  )


def _grouped(
  items: Sequence[_Item], cost: Callable[[_Item], int], alike: Callable[[_Item], object]
) -> list[tuple[str, int, _Item, int]]:
  """Groups items that are alike and whose names differ in numbers only: layers of a model.

  Returns:
    (name, number of items, one of them, their cost), the costliest first. The name of several
    has "*" in place of numbers.
  """
  groups: dict[Any, list[_Item]] = {}
  for item in items:
    groups.setdefault((re.sub(r"\d+", "*", _name(item)), alike(item)), []).append(item)
  result = [
    (key[0] if len(group) > 1 else _name(group[0]), len(group), group[0], sum(map(cost, group)))
    for key, group in groups.items()
  ]
  return sorted(result, key=lambda r: -r[3])


def _collectives(op: OperationCost) -> str:
  counts = collections.Counter(c.kind for c in op.collectives)
  return ", ".join(kind if n == 1 else f"{n} {kind}" for kind, n in counts.items())


def _name(item: Any) -> str:
  if getattr(item, "in_unbounded_loop", False):
    return f"{item.name} (each iteration)"
  return item.name if getattr(item, "times", 1) == 1 else f"{item.name} (x {item.times})"


def _placements(title: str, placements: Sequence[Any], rows: int) -> str:
  if not placements:
    return ""

  def size(p: Any) -> int:
    return int(p.bytes_per_device)

  def shape(p: Any) -> str:
    return shape_text(p.shape, p.split)

  lines = [
    [name, str(count), _shorten(shape(p), 44), format_bytes(total), str(p.copies)]
    for name, count, p, total in _grouped(placements, size, lambda p: (shape(p), size(p)))
  ]
  total = format_bytes(sum(map(size, placements)))
  return f"{title}: {len(placements)}, {total}\n" + table(
    ["name", "number", "dimensions", "bytes", "copies"], lines, rows
  )
