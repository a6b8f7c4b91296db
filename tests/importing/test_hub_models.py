"""Backbones of keras-hub, unmodified, beside Keras on one device."""

from __future__ import annotations

import keras
import pytest

from tests.importing import comparing, hub_models

hub = pytest.importorskip("keras_hub", reason="an extra: pip install mesh-tensorflow[keras-hub]")


@pytest.mark.long
@pytest.mark.parametrize("name", hub_models.NAMES)
def test_backbones(name: str, cpu_devices: list[str]) -> None:
  keras.utils.set_random_seed(2)
  fn, args = hub_models.backbone(hub, name)
  imported = comparing.imported_of(fn, args)
  batch, *_ = imported.dimensions
  # Besides the batch, a dimension of the weights of each layer.
  inner = next(n for n in imported.dimensions if n.endswith((".units", ".1")) and "/" in n)
  simd = name in hub_models.NAMES[::2]
  both = comparing.compare(
    fn, args, [(batch, "r"), (inner, "c")], cpu_devices if simd else cpu_devices[:4],
    imported=imported, simd=simd, traced=True,
  )  # fmt: skip
  assert both.difference < 1e-4
  assert not imported.fallbacks
