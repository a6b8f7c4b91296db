"""Layers of the Transformer on drawn layouts, placement and SIMD, eager and in tf.function.

A long run: `MTF_CONFORMANCE_DRAWS=30 pytest tests/transformer/test_layers_conformance.py`.
"""

from __future__ import annotations

import functools
import importlib
import os
import pathlib

import pytest

from tests.conformance import framework

# How many layouts each family is run on in every mode.
DRAWS = int(os.environ.get("MTF_CONFORMANCE_DRAWS", "2"))
# Threads and tracing take long: in other modes than the fastest, a draw takes one layer in so many.
PART = 1 if "MTF_CONFORMANCE_DRAWS" in os.environ else 5
# How many more, as they come, in one eager mode: many must be refused.
WILD = max(3, DRAWS // 3)
# Names (comma-separated) of the only layers to test.
ONLY = [name for name in os.environ.get("MTF_CONFORMANCE_ONLY", "").split(",") if name]


def _families() -> dict[str, list[framework.Descriptor]]:
  found = {}
  for path in sorted(pathlib.Path(__file__).parent.glob("descriptors_*.py")):
    module = importlib.import_module(f"tests.transformer.{path.stem}")
    chosen = [d for d in module.DESCRIPTORS if not ONLY or d.name in ONLY]
    if chosen:
      found[path.stem.removeprefix("descriptors_")] = chosen
  return found


FAMILIES = _families()
CASES = [
  (family, draw, mode)
  for family in FAMILIES
  for mode in framework.MODES
  for draw in range(DRAWS + WILD if mode == "placement_eager" else DRAWS)
]


@functools.cache
def layouts(family: str) -> list[framework.Layout]:
  return framework.draw_layouts(family, FAMILIES[family], DRAWS, WILD)


@pytest.mark.parametrize("family,draw,mode", CASES)
def test_family(family, draw, mode, cpu_devices):
  layout, descriptors = layouts(family)[draw], FAMILIES[family]
  if mode != "placement_eager":
    # Other layers in each mode and draw.
    descriptors = descriptors[(draw + 2 * framework.MODES.index(mode)) % PART :: PART]
  with framework.graph_optimizer(False):
    _, problems = framework.check_family(mode, layout, descriptors, cpu_devices)
  assert not problems, f"{layout}, {mode}:\n  " + "\n  ".join(problems)


def test_names_are_unique():
  names = [d.name for descriptors in FAMILIES.values() for d in descriptors]
  assert len(names) == len(set(names))
