"""Families of keras-hub, unmodified, under Keras' distributions beside Keras on one device."""

from __future__ import annotations

import keras
import pytest

from tests.keras import hub_families

pytest.importorskip("keras_hub", reason="an extra: pip install mesh-tensorflow[keras-hub]")

# One that has a map of its own and generates, and one that has experts to choose.
QUICK = {("Gemma", "own map", "2x2"), ("Mixtral", "derived map", "2x2")}
CASES = [
  (family.name, kind, mesh)
  for family in hub_families.FAMILIES
  for kind in hub_families.LAYOUTS
  for mesh in hub_families.MESHES
]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "kind", "mesh"),
  [c if c in QUICK else pytest.param(*c, marks=pytest.mark.long) for c in CASES],
)
def test_families(name: str, kind: str, mesh: str, cpu_devices: list[str]) -> None:
  family = next(f for f in hub_families.FAMILIES if f.name == name)
  found = hub_families.compared(family, kind, mesh)
  keras.backend.clear_session()
  if found is None:
    pytest.skip(f"{name} of keras-hub has no layout map of its own")
  assert found.numbers < hub_families.TOLERANCE
  assert not found.tokens
  assert found.split or kind == "auto"
