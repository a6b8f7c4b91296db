"""The table of docs/importing.md: models of Keras, imported, beside Keras on one device.

python -m docs.tools.imported_models               prints the rows of all models
python -m docs.tools.imported_models unet_3d Bert  of some; those of keras-hub need that installed
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import mesh_tensorflow as mtf
from tests.importing import comparing, hub_models, image_models, layouts

SMALL = ("small_images", "unet_3d", "recommender")
ALL = (*image_models.APPLICATIONS, *SMALL, *hub_models.NAMES)
TITLE = """\
| model | operations | types | fallbacks | largest difference | split: on data | of all | \
without the batch: on data | of all |
|---|---|---|---|---|---|---|---|---|"""


def model(name: str) -> tuple[Callable[..., Any], list[np.ndarray]]:
  """A model as a function of arrays, and arrays for it."""
  keras.utils.set_random_seed(1)
  if name in hub_models.NAMES:
    return hub_models.backbone(importlib.import_module("keras_hub"), name)
  make = getattr(image_models, name) if name in SMALL else image_models.application(name)
  made = make()
  # Random weights in training are chaotic in float32: see tests/importing/test_image_models.py.
  return image_models.caller(made, training=name in SMALL), image_models.arguments(made)


def of_data(imported: mtf.Imported) -> list[bool]:
  """For each operation whether it depends on an argument; others are of variables alone."""
  program = imported._traced().traced.program
  reached = set(program.inputs)
  found = []
  for node in program.nodes:
    found.append(any(w in reached for w in node.inputs))
    if found[-1]:
      reached.update(node.outputs)
  return found


def shares(imported: mtf.Imported, rules: layouts.Layout) -> list[str]:
  """The share of operations that a layout splits: of those on data, and of all."""
  named = {n for n, _ in rules}
  is_split = np.array([bool(op.dimensions & named) for op in imported.operations])
  return [f"{np.mean(is_split[of_data(imported)]):.0%}", f"{np.mean(is_split):.0%}"]


def difference(both: comparing.Both, sources: int) -> float:
  """The largest one: of results in units of the largest result, of gradients of the largest of all.

  Args:
    both: what was compared: results, then gradients.
    sources: so many gradients.
  """
  worst = 0.0
  pairs = list(zip(both.given, both.expected))
  first = len(pairs) - sources
  for group in (pairs[:first], pairs[first:]):
    unit = max((float(np.abs(b).max()) for _, b in group if b.size), default=1.0)
    worst = max([worst, *(float(np.abs(a - b).max()) / unit for a, b in group if a.size)])
  return worst


def row(name: str, devices: list[str]) -> str:
  """The row of a model."""
  fn, args = model(name)
  imported = comparing.imported_of(fn, args)
  rules = layouts.by_hand(imported)
  both = comparing.compare(
    fn, args, rules, devices, imported=imported, simd=len(devices) > 1, traced=True
  )
  operations = imported.operations
  floating = [*(v.variable.dtype.is_floating for v in imported.variables)]
  sources = sum(floating) + sum(a.dtype.kind == "f" for a in args)
  cells = [
    name,
    len(operations),
    len({op.type for op in operations}),
    len(imported.fallbacks),
    f"{difference(both, sources):.1e}",
    *shares(imported, rules),
    *shares(imported, layouts.without_batch(imported)),
  ]
  return f"| {' | '.join(map(str, cells))} |"


def main(names: list[str]) -> None:
  """Prints the table."""
  mtf.virtual_cpu_devices(4)
  print(TITLE)
  for name in names or ALL:
    print(row(name, [f"CPU:{i}" for i in range(4)]), flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
