"""Models, data and comparisons of the tests of `mtf.keras`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import mesh_tensorflow as mtf

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 8)).astype(np.float32)
Y = RNG.integers(0, 4, 22)
LAYOUT = "batch:rows,net/up.units:cols"


def small(**kwargs: Any) -> keras.Model:
  """Two dense layers; the same initial weights each time."""
  keras.utils.set_random_seed(1)
  layers = [
    keras.Input((8,)),
    keras.layers.Dense(16, activation="gelu", name="up", **kwargs),
    keras.layers.Dense(4, name="down"),
  ]
  return keras.Sequential(layers, name="net")


def single() -> keras.Model:
  """One dense layer."""
  keras.utils.set_random_seed(1)
  return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="down")], name="net")


def compiled(
  optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.01),
  make: Callable[[], keras.Model] = small,
  **kwargs: Any,
) -> keras.Model:
  """A model for classes, compiled."""
  model = make()
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(optimizer(), **{"loss": loss, "metrics": ["accuracy"], **kwargs})
  return model


_searched: list[bool] = []


def searched() -> bool:
  """Whether layouts are searched, in place of those that tests give."""
  return bool(_searched)


@contextlib.contextmanager
def search() -> Iterator[None]:
  """Has layouts searched, in place of those that tests give."""
  _searched.append(True)
  try:
    yield
  finally:
    _searched.pop()


def placement(shape: str = "rows:2,cols:2", layout: str = LAYOUT) -> mtf.PlacementMeshImpl:
  """A mesh of the first virtual CPUs."""
  size = mtf.convert_to_shape(shape).size
  rules = "" if searched() else layout
  return mtf.PlacementMeshImpl(shape, rules, [f"/device:CPU:{i}" for i in range(size)])


def simd(shape: str = "rows:2,cols:2", layout: str = LAYOUT) -> mtf.SimdMeshImpl:
  """Likewise, of one program for all devices."""
  return mtf.SimdMeshImpl(shape, "" if searched() else layout)


def assert_same_variables(a: keras.Model, b: keras.Model, tolerance: float = 1e-4) -> None:
  """Weights, slots and metrics of two models are equal."""
  ours, theirs = [[*m.variables, *m.optimizer.variables] for m in (a, b)]
  assert len(ours) == len(theirs)
  for u, v in zip(ours, theirs):
    np.testing.assert_allclose(u.numpy(), v.numpy(), rtol=tolerance, atol=1e-5, err_msg=u.path)


def assert_same_history(a: Any, b: Any, tolerance: float = 1e-4) -> None:
  """Two histories are equal."""
  assert set(a.history) == set(b.history)
  assert a.epoch == b.epoch
  for name in a.history:
    np.testing.assert_allclose(a.history[name], b.history[name], rtol=tolerance, err_msg=name)
