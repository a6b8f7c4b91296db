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


@functools.cache
def layouts(family: str) -> list[framework.Layout]:
  return framework.draw_layouts(family, FAMILIES[family], DRAWS)


@pytest.mark.parametrize("mode", framework.MODES)
@pytest.mark.parametrize("draw", range(DRAWS))
@pytest.mark.parametrize("family", [f for f, descriptors in FAMILIES.items() if descriptors])
def test_family(family, draw, mode, cpu_devices, record_property):
  layout = layouts(family)[draw]
  with framework.graph_optimizer(draw == 0):
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
