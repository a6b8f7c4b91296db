"""Stores of variables that the tests of checkpoints save and restore."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.program.dimensions import convert_to_shape

VARIABLES = {
  "transformer/embedding": ([("vocab", 16), ("d_model", 8)], tf.float32, tf.float32),
  "transformer/layer/wi/kernel": ([("d_model", 8), ("d_ff", 8)], tf.bfloat16, tf.float32),
  "transformer/layer/scale": ([("d_model", 8)], tf.float32, tf.float32),
  "transformer/layer/scale_slot_v": ([("d_model", 8)], tf.float32, tf.float32),
  "transformer/temperature": ([], tf.float32, tf.float32),
  "transformer/steps": ([], tf.int32, tf.int32),
}
MESHES = {
  "1": ("", "", 1),
  "2x2": ("rows:2,cols:2", "vocab:rows,d_ff:cols", 4),
  "2x2 other": ("rows:2,cols:2", "d_model:rows,d_ff:cols,vocab:cols", 4),
  "2x4": ("rows:2,cols:4", "vocab:cols,d_ff:rows", 8),
  "4": ("all:4", "d_model:all", 4),
  "2x2x2": ("x:2,y:2,z:2", "vocab:x,d_model:y,d_ff:z", 8),
}


def make_store(devices, mesh="1", variables=None, seed=0):
  """A store that holds `variables` laid out on a mesh."""
  shape, layout, size = MESHES[mesh]
  store = VariableStore(seed=seed)
  impl = PlacementMeshImpl(shape, layout, devices[:size], variable_store=store)
  for name, (dims, master, slices) in (variables or VARIABLES).items():
    store.get(
      impl,
      name,
      convert_to_shape(dims),
      master_dtype=master,
      slice_dtype=slices,
      initializer=tf.keras.initializers.Zeros() if slices == tf.int32 else None,
    )
  return store


def fill(store, seed):
  """Random values that bfloat16 holds exactly; returns them by name."""
  random = np.random.RandomState(seed)
  values = {}
  for stored in store:
    values[stored.name] = random.randint(-100, 100, stored.shape.to_integer_list)
    stored.assign(tf.cast(values[stored.name], stored.slice_dtype))
  return values


def values_of(store):
  return {v.name: v.numpy() for v in store}


def assert_holds(store, values):
  assert set(store.names) == set(values)
  for name, value in values.items():
    np.testing.assert_array_equal(store[name].numpy(), value, err_msg=name)
    for begin, v in zip(store[name].begins, store[name].slices):
      part = tuple(slice(b, b + n) for b, n in zip(begin, store[name].slice_shape))
      np.testing.assert_array_equal(v.numpy(), value[part], err_msg=name)
