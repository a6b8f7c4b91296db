"""Every operation, on drawn layouts, placement and SIMD, eager and in tf.function."""

from __future__ import annotations

import functools
import importlib
import os
import pathlib

import pytest

from tests.conformance import framework

DRAWS = int(os.environ.get("MTF_CONFORMANCE_DRAWS", "3"))
# Names (comma-separated) of the only operations to test.
ONLY = [name for name in os.environ.get("MTF_CONFORMANCE_ONLY", "").split(",") if name]

FAMILIES = {}
for _path in sorted(pathlib.Path(__file__).parent.glob("descriptors_*.py")):
  _family = _path.stem.removeprefix("descriptors_")
  _module = importlib.import_module(f"tests.conformance.{_path.stem}")
  FAMILIES[_family] = [d for d in _module.DESCRIPTORS if not ONLY or d.name in ONLY]


CASES = [
  (family, draw, mode)
  for family, descriptors in FAMILIES.items()
  for mode in framework.MODES
  for draw in range(3 * DRAWS if mode.endswith("eager") else DRAWS)
  if descriptors
]


@functools.cache
def layouts(family: str) -> list[framework.Layout]:
  """Layouts for all modes; then twice as many wild ones for the eager modes, which are fast."""
  return framework.draw_layouts(family, FAMILIES[family], DRAWS, wild=2 * DRAWS)


@pytest.mark.parametrize("family,draw,mode", CASES)
def test_family(family, draw, mode, cpu_devices, record_property):
  layout = layouts(family)[draw]
  # TensorFlow's graph optimizer takes most of the time; smaller families are tested with it.
  with framework.graph_optimizer(draw == 0 and len(FAMILIES[family]) < 40):
    cases, problems = framework.check_family(mode, layout, FAMILIES[family], cpu_devices)
  record_property("conformance_cases", cases)
  assert not problems, f"{layout}, {mode}:\n  " + "\n  ".join(problems)


def test_names_are_unique():
  names = [d.name for descriptors in FAMILIES.values() for d in descriptors]
  assert len(names) == len(set(names))


@pytest.mark.parametrize("family", [f for f, descriptors in FAMILIES.items() if descriptors])
def test_every_operation_is_split_somewhere(family):
  """The drawn layouts shall not leave an operation untested."""
  never = [
    d.name
    for d in FAMILIES[family]
    if d.dimension_names
    and not any(d.split_dimensions(l) and not d.is_illegal(l) for l in layouts(family))
  ]
  assert not never
