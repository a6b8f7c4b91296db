"""Layers and losses on drawn layouts, placement and SIMD, eager and in tf.function."""

from __future__ import annotations

import pytest

from tests.conformance import framework
from tests.layers.descriptors_layers import DESCRIPTORS

DRAWS = 3
LAYOUTS = framework.draw_layouts("layers", DESCRIPTORS, DRAWS)


@pytest.mark.parametrize("mode", framework.MODES)
@pytest.mark.parametrize("draw", range(DRAWS))
def test_layers(draw, mode, cpu_devices, record_property):
  with framework.graph_optimizer(draw == 0):
    cases, problems = framework.check_family(mode, LAYOUTS[draw], DESCRIPTORS, cpu_devices)
  record_property("conformance_cases", cases)
  assert not problems, f"{LAYOUTS[draw]}, {mode}:\n  " + "\n  ".join(problems)


def test_every_layer_is_split_somewhere():
  never = [
    d.name
    for d in DESCRIPTORS
    if not any(d.split_dimensions(l) and not d.is_illegal(l) for l in LAYOUTS)
  ]
  assert not never
