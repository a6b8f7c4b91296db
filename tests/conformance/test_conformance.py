"""Every operation and layer, on drawn layouts, placement and SIMD, eager and in tf.function.

A long run: `MTF_CONFORMANCE_DRAWS=30 pytest -n 2 tests/conformance/test_conformance.py`. With this
variable, also with 3, what its default is, every operation is traced on every layout, too.
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
# Tracing takes longest: if no number is given, an operation is traced on one of the layouts that
# are legal for it, on another one in each mode.
ALL_TRACED = "MTF_CONFORMANCE_DRAWS" in os.environ
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


def chosen(family: str, draw: int, mode: str) -> list[framework.Descriptor]:
  """What is run on a layout: all; in traced modes what refuses it, and that whose turn it is."""
  if ALL_TRACED or not mode.endswith("function"):
    return FAMILIES[family]
  result = []
  for i, descriptor in enumerate(FAMILIES[family], framework.MODES.index(mode) // 2):
    legal = [n for n in range(DRAWS) if not descriptor.is_illegal(layouts(family)[n])]
    if draw not in legal or draw == legal[i % len(legal)]:
      result.append(descriptor)
  return result


@pytest.mark.parametrize("family,draw,mode", CASES)
def test_family(family, draw, mode, cpu_devices, record_property):
  layout, descriptors = layouts(family)[draw], chosen(family, draw, mode)
  # TensorFlow's graph optimizer takes most of the time; smaller families are tested with it.
  with framework.graph_optimizer(draw == 0 and len(FAMILIES[family]) < 40):
    tally, problems = framework.check_family(mode, layout, descriptors, cpu_devices)
  counts = {"family": family, "descriptors": len(FAMILIES[family]), "mode": mode}
  record_property("conformance", {**counts, "layout": str(layout), **dataclasses.asdict(tally)})
  assert not problems, f"{layout}, {mode}:\n  " + "\n  ".join(problems)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_runs_in_every_mode(family):
  """On a layout that is legal for it, if one of those drawn is."""
  for mode in framework.MODES:
    runs = [chosen(family, n, mode) for n in range(DRAWS)]
    for d in FAMILIES[family]:
      legal = [n for n in range(DRAWS) if not d.is_illegal(layouts(family)[n])]
      assert not legal or any(d in runs[n] for n in legal), (mode, d.name)


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
