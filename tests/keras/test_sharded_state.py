"""Keras models whose weights and optimizer state are in shards train as under plain Keras."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ArgumentError, LayoutError
from mesh_tensorflow.keras import layouts
from tests.keras.models import X, Y, assert_same_history, assert_same_variables, compiled
from tests.kinds import kept

FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


def odd() -> keras.Model:
  """Sizes that no mesh divides, state that is not trained, and weights smaller than the mesh."""
  keras.utils.set_random_seed(1)
  layers = [
    keras.Input((8,)),
    keras.layers.Dense(17, activation="relu", name="up"),
    keras.layers.BatchNormalization(name="norm"),
    keras.layers.Dense(4, name="down"),
    keras.layers.Dense(1, use_bias=False, name="last"),
    keras.layers.Dense(4, name="out"),
  ]
  return keras.Sequential(layers, name="net")


OPTIMIZERS = {
  "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=1.0),
  "accumulated": lambda: keras.optimizers.Adam(
    0.01, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2
  ),
  "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
  "adafactor": lambda: keras.optimizers.Adafactor(0.01),
}


def _data_parallel() -> Any:
  return keras.distribution.DataParallel(devices=keras.distribution.list_devices("cpu")[:4])


def _given(again: bool, kind: type[mtf.MeshImpl]) -> mtf.MeshImpl:
  devices = [f"/device:CPU:{i}" for i in range(4)]
  return kind("batch:4", "batch:batch", devices).with_sharded_state("batch", again)


WAYS = {
  "placement": lambda: {"mesh_impl_or_shape": _given(True, mtf.PlacementMeshImpl)},
  "gathered once": lambda: {"mesh_impl_or_shape": _given(False, mtf.SimdMeshImpl)},
  "by name": lambda: {
    "mesh_impl_or_shape": "batch:4",
    "layout": "batch:batch",
    "shard_state": "batch",
  },
  "two dimensions": lambda: {
    "mesh_impl_or_shape": "rows:2,cols:2",
    "layout": "batch:rows",
    "shard_state": ["rows", "cols"],
  },
  "data parallel": lambda: {"mesh_impl_or_shape": _data_parallel(), "shard_state": True},
  "searched": lambda: {"mesh_impl_or_shape": 4, "shard_state": True},
  "searched by AutoParallel": lambda: {
    "mesh_impl_or_shape": mtf.keras.AutoParallel(4, shard_state=True)
  },
}


def _stored(impl: mtf.MeshImpl) -> tuple[int, int]:
  """Number of elements of variables that may be cut: of all, and on each device."""
  stored = [v for v in impl.variable_store if v.shape.size > 1]
  return (
    sum(int(v.shape.size) for v in stored),
    sum(int(np.prod(v.slice_shape)) for v in stored),
  )


# Every optimizer on one mesh of each implementation, every way with one optimizer.
CASES = [(w, o) for w in WAYS for o in OPTIMIZERS if o == "adam" or w in ("placement", "by name")]
KEPT = [
  ("placement", "accumulated"),
  ("by name", "adafactor"),
]


@pytest.mark.parametrize(("way", "optimizer"), kept(CASES, KEPT))
def test_fit_evaluate_save_and_load(way, optimizer, tmp_path, cpu_devices):
  # With a smaller last batch, of which there is a program of its own, or without.
  count = len(X) if (way, optimizer) == ("placement", "adam") else 16
  x, y = X[:count], Y[:count]
  plain = compiled(OPTIMIZERS[optimizer], odd)
  model = compiled(OPTIMIZERS[optimizer], odd)
  parallel = mtf.keras.parallelize(model, **WAYS[way]())
  assert_same_history(parallel.fit(x, y, **FIT), plain.fit(x, y, **FIT), 1e-5)
  impl = parallel.mesh_impl
  assert set(impl.state_dims) == set(impl.shape.dimension_names)
  whole, stored = _stored(impl)
  # Some weights have fewer elements than there are devices.
  assert stored < whole / 2.5
  np.testing.assert_allclose(
    parallel.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), rtol=1e-4
  )
  assert_same_variables(model, plain)
  path = tmp_path / "model.keras"
  parallel.save(path)
  loaded = keras.models.load_model(path)
  assert_same_variables(loaded, model, 1e-7)
  again = mtf.keras.parallelize(loaded, "other:2", "", shard_state=True)
  assert_same_history(again.fit(x, y, **FIT), plain.fit(x, y, **FIT), 1e-4)


def test_a_distribution_of_kerass_own(cpu_devices, enabled):
  plain = compiled(make=odd)
  expected = plain.fit(X, Y, **FIT)
  with mtf.keras.AutoParallel(4, shard_state=True).scope():
    model = compiled(make=odd)
    assert_same_history(model.fit(X, Y, **FIT), expected, 1e-5)


@pytest.mark.parametrize("over", kept(["batch", True], [True]))
def test_stages_in_shards(over, cpu_devices):
  """Of each stage the weights are cut over its own mesh."""
  plain = compiled()
  parallel = mtf.keras.parallelize(
    compiled(), "batch:2", "batch:batch", stages=2, microbatches=2, shard_state=over
  )
  # The last batch is a smaller one.
  assert_same_history(parallel.fit(X, Y, **FIT), plain.fit(X, Y, **FIT), 1e-5)
  assert_same_variables(parallel.model, plain)
  for stage in parallel.mesh_impl.stages.values():
    assert stage.state_dims == ("batch",)
  kernels = [v for v in parallel.mesh_impl.variable_store if v.shape.ndims == 2]
  assert kernels and all(np.prod(v.slice_shape) * 2 == v.shape.size for v in kernels)


def test_shards_are_found_where_nothing_fits_otherwise(cpu_devices, monkeypatch):
  """By default nothing is in shards that fits without."""

  def wide() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
      [
        keras.Input((8,)),
        *(keras.layers.Dense(64, "gelu") for _ in range(6)),
        keras.layers.Dense(4),
      ]
    )

  parallel = mtf.keras.parallelize(compiled(make=wide), "batch:4")
  parallel.fit(X[:8], Y[:8], **FIT)
  assert not parallel.mesh_impl.state_dims
  limit = int(parallel.describe().memory.total) * 0.8
  # Split by batch alone, weights and Adam's moments are whole.
  search = functools.partial(layouts.auto_layout, memory_limit=limit, fixed="batch:batch")
  monkeypatch.setattr(layouts, "auto_layout", search)
  parallel = mtf.keras.parallelize(compiled(make=wide), "batch:4")
  found = parallel.fit(X[:8], Y[:8], **FIT)
  assert parallel.mesh_impl.state_dims == ("batch",)
  assert_same_history(found, compiled(make=wide).fit(X[:8], Y[:8], **FIT), 1e-5)


@pytest.mark.parametrize(
  ("mesh", "asked", "error", "says"),
  [
    ("batch:4", "data", LayoutError, "'data'.*batch"),
    ("batch:4", ["batch", "data"], LayoutError, "'data'.*batch"),
    ("batch:4", 3, ArgumentError, "3"),
    ("batch:4", [3], ArgumentError, "string"),
    (4, "batch", ArgumentError, "shard_state=True"),
  ],
)
def test_wrong_shards(mesh, asked, error, says, cpu_devices):
  with pytest.raises(error, match=says):
    mtf.keras.parallelize(compiled(), mesh, shard_state=asked)
