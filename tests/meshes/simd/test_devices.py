"""How many devices a process can have before TensorFlow's runtime has started."""

from __future__ import annotations

import pytest
import tensorflow as tf

from mesh_tensorflow.meshes.simd import devices


@pytest.mark.parametrize(
  ("configured", "count"),
  # For each physical device what it is divided into; None: it is one logical device.
  [({}, 0), ({"a": None}, 1), ({"a": None, "b": None}, 2), ({"a": [1, 2, 3], "b": None}, 4)],
)
def test_a_device_that_is_not_divided_counts_as_one(configured, count, monkeypatch):
  monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: list(configured))
  monkeypatch.setattr(tf.config, "get_logical_device_configuration", configured.__getitem__)
  assert devices._count("GPU") == count
