"""Keras models on a mesh of which devices have unequal shares."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf
from tests.keras.models import X, Y, compiled
from tests.kinds import kept


@pytest.mark.parametrize("sharding", kept(["", "rows"], ["rows"]))
def test_a_model_trains_as_in_keras(sharding, cpu_devices):
  expected = compiled()
  plain = expected.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
  mesh = mtf.PlacementMeshImpl(
    "rows:4", "batch:rows", cpu_devices[:2], shares={"rows": [3, 1]}
  ).with_sharded_state(sharding)
  model = mtf.keras.parallelize(compiled(), mesh)
  found = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
  np.testing.assert_allclose(found["loss"], plain["loss"], rtol=1e-5)
  assert found["accuracy"] == pytest.approx(plain["accuracy"])
  for a, b in zip(model.get_weights(), expected.get_weights()):
    np.testing.assert_allclose(a, b, atol=1e-5)
  np.testing.assert_allclose(model.predict(X, verbose=0), expected.predict(X, verbose=0), atol=1e-5)
