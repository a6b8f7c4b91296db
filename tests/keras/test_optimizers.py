"""Optimizers of Keras on a mesh give Keras' own curve of losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers as o

import mesh_tensorflow as mtf
from tests.keras.models import assert_same_variables, compiled, placement, single

# Those of the issue with the options that change the update, and others.
CASES: dict[str, Callable[[], Any]] = {
  "sgd": lambda: o.SGD(0.1),
  "momentum": lambda: o.SGD(0.1, momentum=0.9, nesterov=True),
  "adam": lambda: o.Adam(0.01, amsgrad=True, clipnorm=0.1),
  "adamw": lambda: o.AdamW(0.01, global_clipnorm=0.2, use_ema=True, ema_momentum=0.9),
  "adafactor": lambda: o.Adafactor(0.05),
  "rmsprop": lambda: o.RMSprop(0.01, centered=True, momentum=0.5, clipvalue=0.05),
  "adagrad": lambda: o.Adagrad(o.schedules.ExponentialDecay(0.1, 3, 0.9), weight_decay=0.01),
  "lion": lambda: o.Lion(0.01, loss_scale_factor=64.0),
}
WITH_CONDITIONS: dict[str, Callable[[], Any]] = {
  "warmup": lambda: o.Adam(o.schedules.CosineDecay(0.0, 9, warmup_target=0.02, warmup_steps=3)),
  "average that is taken over": lambda: o.SGD(
    0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
  ),
  "dynamic loss scale": lambda: o.LossScaleOptimizer(o.Adam(0.01), dynamic_growth_steps=2),
  "accumulated gradients": lambda: o.Adam(0.01, gradient_accumulation_steps=2),
}


def assert_same_curve(optimizer: Callable[[], Any], steps: int) -> None:
  x = np.random.default_rng(0).normal(size=(8 * steps, 8)).astype(np.float32)
  y = np.argmax(x[:, :4] + 0.3 * x[:, 4:], 1)
  data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
  theirs, ours = (compiled(optimizer, single, metrics=None) for _ in range(2))
  parallel = mtf.keras.parallelize(ours, placement(layout="batch:rows,net/down.units:cols"))
  # A step is an epoch: the logged loss is a mean over an epoch.
  kwargs = {"epochs": steps, "steps_per_epoch": 1, "shuffle": False, "verbose": 0}
  expected, found = (model.fit(data, **kwargs).history["loss"] for model in (theirs, parallel))
  assert len(expected) == steps
  np.testing.assert_allclose(found, expected, rtol=1e-4)
  assert_same_variables(ours, theirs, 1e-3)


def test_some_steps() -> None:
  assert_same_curve(CASES["adam"], 5)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_200_steps(name: str) -> None:
  assert_same_curve(CASES[name], 200)


@pytest.mark.parametrize(
  "name",
  [n if "scale" in n else pytest.param(n, marks=pytest.mark.long) for n in WITH_CONDITIONS],
)
def test_updates_with_conditions(name: str) -> None:
  assert_same_curve(WITH_CONDITIONS[name], 5)
