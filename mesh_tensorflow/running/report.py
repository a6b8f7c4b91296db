"""Text reports of a lowering: variable sizes and counters."""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from typing import Any

from mesh_tensorflow.errors import ArgumentError
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program.graph import Mesh

_LOG = logging.getLogger("mesh_tensorflow")


def pretty_print_counters(counters: Sequence[tuple[str, float]]) -> str:
  """Sums counters over the prefixes of their slash-separated names.

  Args:
    counters: (name, number) pairs.

  Returns:
    One line for each name and prefix, sorted, indented by one blank per slash.
  """
  totals: dict[str, float] = collections.defaultdict(float)
  for name, value in counters:
    parts = name.split("/")
    for i in range(len(parts)):
      totals["/".join(parts[: i + 1])] += value
  return "\n".join(f"{' ' * k.count('/')}{k}: {totals[k]:.3g}" for k in sorted(totals))


def log_variable_sizes(
  var_list: Sequence[Variable],
  tag: str,
  verbose: bool = True,
  mesh_to_impl: dict[Mesh, MeshImpl] | None = None,
  log_file: Any = None,
) -> list[str]:
  """Logs names, sizes, slice sizes and shapes of variables, and their totals.

  Args:
    var_list: mtf `Variable`s; nothing happens if it is empty.
    tag: title of the line of totals.
    verbose: one line for each variable as well.
    mesh_to_impl: dict from mesh to `MeshImpl`, for slice sizes (else 0).
    log_file: an open file to write the lines to.

  Returns:
    The lines.
  """
  if log_file is not None and not hasattr(log_file, "write"):
    raise ArgumentError(f"log_variable_sizes: log_file must be an open file, got {log_file!r}")
  if not var_list:
    return []
  lines, total, total_slices = [], 0, 0
  for v in sorted(var_list, key=lambda v: v.full_name):
    slice_size = mesh_to_impl[v.mesh].slice_size(v.shape) if mesh_to_impl else 0
    total += v.size
    total_slices += slice_size
    if verbose:
      lines.append(
        f"Variable {v.full_name.ljust(60)} size {str(v.size).ljust(12)} "
        f"slice_size {str(slice_size).ljust(12)} {str(v.shape).ljust(60)}"
      )
  lines.append(
    f"{tag.ljust(30)} count: {str(len(var_list)).ljust(6)}  "
    f"Total size: {str(total).ljust(15)}  Total slice_size: {str(total_slices).ljust(15)}"
  )
  for line in lines:
    _LOG.info("%s", line)
    if log_file is not None:
      log_file.write(line + "\n")
  return lines
