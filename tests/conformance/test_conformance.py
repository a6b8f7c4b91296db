"""Every operation and layer, on drawn layouts, placement and SIMD, eager and in tf.function.

A long run: `MTF_CONFORMANCE_DRAWS=30 pytest -n 2 tests/conformance/test_conformance.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pathlib

import pytest

from tests.conformance import framework

# How many layouts each family is run on in every mode.
DRAWS = int(os.environ.get("MTF_CONFORMANCE_DRAWS", "3"))
# How many more, as they come, in the eager modes: they are fast, and many must be refused.
WILD = max(6, DRAWS // 3)
# Names (comma-separated) of the only operations to test.
ONLY = [name for name in os.environ.get("MTF_CONFORMANCE_ONLY", "").split(",") if name]


def _families() -> dict[str, list[framework.Descriptor]]:
  """The descriptors of operations and of layers, by family."""
  found = {}
  for folder in ("conformance", "layers"):
    for path in sorted((pathlib.Path(__file__).parents[1] / folder).glob("descriptors_*.py")):
      module = importlib.import_module(f"tests.{folder}.{path.stem}")
      chosen = [d for d in module.DESCRIPTORS if not ONLY or d.name in ONLY]
      if chosen:
        found[path.stem.removeprefix("descriptors_")] = chosen
  return found


FAMILIES = _families()
CASES = [
  (family, draw, mode)
  for family in FAMILIES
  for mode in framework.MODES
  for draw in range(DRAWS + WILD if mode.endswith("eager") else DRAWS)
]


@functools.cache
def layouts(family: str) -> list[framework.Layout]:
  """Layouts for all modes; then the wild ones for the eager modes."""
  return framework.draw_layouts(family, FAMILIES[family], DRAWS, WILD)


@pytest.mark.parametrize("family,draw,mode", CASES)
def test_family(family, draw, mode, cpu_devices, record_property):
  layout = layouts(family)[draw]
  # TensorFlow's graph optimizer takes most of the time; smaller families are tested with it.
  with framework.graph_optimizer(draw == 0 and len(FAMILIES[family]) < 40):
    tally, problems = framework.check_family(mode, layout, FAMILIES[family], cpu_devices)
  counts = {"family": family, "descriptors": len(FAMILIES[family]), "mode": mode}
  record_property("conformance", {**counts, "layout": str(layout), **dataclasses.asdict(tally)})
  assert not problems, f"{layout}, {mode}:\n  " + "\n  ".join(problems)


def test_names_are_unique():
  names = [d.name for descriptors in FAMILIES.values() for d in descriptors]
  assert len(names) == len(set(names))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_is_split_somewhere(family):
  """The drawn layouts shall not leave an operation untested."""
  never = [
    d.name
    for d in FAMILIES[family]
    if d.dimension_names
    and not any(d.split_dimensions(l) and not d.is_illegal(l) for l in layouts(family))
  ]
  assert not never
