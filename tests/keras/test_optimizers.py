"""Optimizers of Keras on a mesh give Keras' own curve of losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers as o

import mesh_tensorflow as mtf
from tests.keras.models import assert_same_variables, compiled, placement, single

SEARCHED_TOO = True
LONG_IF_SEARCHED = (
  "test_updates_with_conditions",
  "test_repeated_ids_of_an_embedding",
  "test_a_gradient_of_zeros",
)
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


def test_repeated_ids_of_an_embedding() -> None:
  """The second moment is of the summed gradient, as under JAX and PyTorch.

  TensorFlow's gradient of a look-up is a list of rows, and Keras under TensorFlow adds up the
  squares of an id's rows, not the square of their sum. So what is compared with is Adam of Keras
  on the gradient as a tensor.
  """
  ids, y = np.array([[1, 1, 1, 2], [3, 1, 0, 0]]), np.array([0, 1])

  def embedding() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(4, 8), keras.layers.GlobalAveragePooling1D()]
    return keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(2)])

  theirs, ours = (compiled(make=embedding, metrics=None) for _ in range(2))
  parallel = mtf.keras.parallelize(ours, placement(layout="batch:rows"))
  parallel.fit(ids, y, batch_size=2, epochs=3, shuffle=False, verbose=0)
  weights = [v.value for v in theirs.trainable_variables]
  for _ in range(3):
    with tf.GradientTape() as tape:
      loss = theirs.loss(y, theirs(ids))
    gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, weights)]
    theirs.optimizer.apply(gradients, theirs.trainable_variables)
  for v, w in zip(ours.trainable_variables, theirs.trainable_variables):
    np.testing.assert_allclose(v.numpy(), w.numpy(), rtol=1e-4, atol=1e-6, err_msg=v.path)


def test_a_gradient_of_zeros() -> None:
  """Weights whose gradient is always 0 are decayed all the same: behind a softmax of one value."""

  def softmax() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(1, activation="softmax"), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input([8]), *layers])

  optimizer = lambda: o.SGD(0.1, weight_decay=0.5)  # noqa: E731
  theirs, ours = (compiled(optimizer, softmax, metrics=None) for _ in range(2))
  parallel = mtf.keras.parallelize(ours, placement(layout="batch:rows"))
  x, y = np.ones([8, 8], np.float32), np.arange(8) % 2
  for model in (theirs, parallel):
    model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
  assert_same_variables(ours, theirs)
  assert np.max(np.abs(theirs.layers[0].kernel - softmax().layers[0].kernel)) > 0.01


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_200_steps(name: str) -> None:
  assert_same_curve(CASES[name], 200)


@pytest.mark.parametrize(
  "name",
  [n if "scale" in n else pytest.param(n, marks=pytest.mark.long) for n in WITH_CONDITIONS],
)
@pytest.mark.slow
def test_updates_with_conditions(name: str) -> None:
  assert_same_curve(WITH_CONDITIONS[name], 5)
