"""Each model of keras.applications gets a layout by "auto"; see `applications`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import mesh_tensorflow as mtf
from tests.keras import applications


def test_there_are_many() -> None:
  assert len(applications.MODELS) > 30
  assert {"DenseNet121", "ResNet50", "VGG16", "MobileNetV2"} < set(applications.MODELS)


@pytest.mark.long
@pytest.mark.parametrize("name", applications.MODELS)
def test_a_layout_is_found(
  name: str, run_subprocess: Callable[..., Any], record_property: Callable[..., None]
) -> None:
  """In a process of its own: some have a billion bytes of weights."""
  meshes = ["x:2,y:2", *(["x:2,y:4"] if name == "DenseNet121" else [])]
  for mesh in meshes:
    module = ["-m", "tests.keras.applications", name, f"--mesh={mesh}"]
    found = run_subprocess(module, timeout=1800)
    record_property("layout", found.stdout.strip().splitlines()[-1])


@pytest.mark.long
def test_one_is_trained_as_in_keras(cpu_devices: list[str]) -> None:
  """A step, without and with the mesh; the layout is what was found."""
  losses = []
  for on_mesh in (False, True):
    model, (x, y) = applications.compiled("MobileNetV2")
    run = mtf.keras.parallelize(model, "x:2,y:2") if on_mesh else model
    losses.append([run.train_on_batch(x, y) for _ in range(2)][0])
    keras.backend.clear_session()
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
