"""Checkpoints of variables that are split unevenly: they have no padding, and suit any layout."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import checkpoint
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.program.dimensions import convert_to_shape

VARIABLES = {
  "embedding": "vocab:65,d:6",
  "few": "vocab:3,heads:5",
  "bias": "vocab:65",
  "one": "vocab:1",
  "step": "",
}
MESHES = {
  "1": ("", "", 1),
  "3": ("m:3", "vocab:m~", 3),
  "4": ("m:4", "vocab:m~", 4),
  "4 other": ("m:4", "d:m~,heads:m~", 4),
  "2x4": ("r:2,m:4", "vocab:m~,d:r,heads:r~", 8),
}


def make_store(devices, mesh):
  shape, layout, size = MESHES[mesh]
  store = VariableStore(seed=7)
  impl = PlacementMeshImpl(shape, layout, devices[:size], variable_store=store)
  for name, dims in VARIABLES.items():
    dtype = tf.int32 if not dims else tf.float32
    store.get(impl, name, convert_to_shape(dims), master_dtype=dtype, slice_dtype=dtype)
  return store


@pytest.mark.parametrize("written", ["4", "2x4"])
def test_read_on_other_meshes(tmp_path, cpu_devices, written):
  store = make_store(cpu_devices, written)
  rng = np.random.default_rng(0)
  values = {v.name: rng.integers(-99, 99, v.shape.to_integer_list) for v in store}
  for v in store:
    v.assign(tf.cast(values[v.name], v.slice_dtype))
    # What is in the padding is not written.
    for begin, s in zip(v.begins, v.slices):
      if v.extent(begin) != list(v.slice_shape):
        mask = np.ones(v.slice_shape, bool)
        mask[tuple(slice(n) for n in v.extent(begin))] = False
        s.assign(np.where(mask, np.float32("nan"), s.numpy()))
  with checkpoint.Checkpointer(str(tmp_path), store) as saver:
    path = saver.save(1)
  reader = tf.train.load_checkpoint(path)
  for name, value in values.items():
    np.testing.assert_array_equal(reader.get_tensor(name), value, err_msg=name)
  for mesh in MESHES:
    other = make_store(cpu_devices, mesh)
    checkpoint.Checkpointer(str(tmp_path), other).restore(path)
    for v in other:
      np.testing.assert_array_equal(v.numpy(), values[v.name], err_msg=f"{mesh} {v.name}")
      for s in v.slices:
        assert np.all(np.isfinite(s.numpy())), (mesh, v.name)
