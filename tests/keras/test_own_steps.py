"""Models with a train_step, test_step or compute_loss of their own, as Keras' guides write them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.keras.models import X, Y, assert_same_history, assert_same_variables, placement, searched

SEARCHED_TOO = True
LONG_IF_SEARCHED = ("test_own_steps",)
FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


class OwnSteps(keras.Sequential):
  """A tape, the optimizer and the metrics by hand."""

  def train_step(self, data: Any) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
      y_pred = self(x, training=True)
      loss = self.compute_loss(y=y, y_pred=y_pred)
    gradients = tape.gradient(loss, self.trainable_variables)
    self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
    for metric in self.metrics:
      if metric.name == "loss":
        metric.update_state(loss)
      else:
        metric.update_state(y, y_pred)
    return {m.name: m.result() for m in self.metrics}

  def test_step(self, data: Any) -> Any:
    x, y = data
    y_pred = self(x, training=False)
    for metric in self.metrics:
      if metric.name == "loss":
        metric.update_state(self.compute_loss(y=y, y_pred=y_pred))
      else:
        metric.update_state(y, y_pred)
    return {m.name: m.result() for m in self.metrics}


class AroundKeras(keras.Sequential):
  """Keras' own step, and a loss of its own."""

  def train_step(self, data: Any) -> Any:
    logs = super().train_step(data)
    return {**logs, "twice": 2.0 * logs["loss"]}

  def compute_loss(
    self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
    training: bool = True,
  ) -> Any:  # fmt: skip
    del x, sample_weight, training
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, True)) + 0.1


class TwoOptimizers(keras.Model):
  """A second optimizer, for some of the weights, as adversarial models have it; no targets."""

  def __init__(self) -> None:
    super().__init__()
    self.up, self.down = keras.layers.Dense(6), keras.layers.Dense(8)
    self.down_optimizer = keras.optimizers.Adam(0.02)
    self.tracker = keras.metrics.Mean(name="squares")

  @property
  def metrics(self) -> list[Any]:
    return [self.tracker]

  def call(self, x: Any) -> Any:
    return self.down(keras.ops.tanh(self.up(x)))

  def train_step(self, x: Any) -> Any:
    with tf.GradientTape(persistent=True) as tape:
      loss = tf.reduce_mean(tf.square(self(x) - x))
    for optimizer, layer in ((self.optimizer, self.up), (self.down_optimizer, self.down)):
      gradients = tape.gradient(loss, layer.trainable_weights)
      optimizer.apply_gradients(zip(gradients, layer.trainable_weights))
    self.tracker.update_state(loss)
    return {"squares": self.tracker.result()}


def _classifier(kind: type) -> keras.Model:
  keras.utils.set_random_seed(1)
  layers = [
    keras.Input((8,)),
    keras.layers.Dense(16, activation="relu", name="up"),
    keras.layers.Dense(4, name="down"),
  ]
  model = kind(layers, name="net")
  loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
  return model


@pytest.mark.parametrize("kind", [OwnSteps, pytest.param(AroundKeras, marks=pytest.mark.long)])
@pytest.mark.slow
def test_own_steps(kind: type) -> None:
  theirs, ours = _classifier(kind), _classifier(kind)
  mesh = placement(layout="batch:rows,net/up.units:cols")
  parallel = mtf.keras.parallelize(ours, mesh)
  kwargs = {**FIT, "validation_data": (X[16:20], Y[16:20])}
  assert_same_history(parallel.fit(X[:16], Y[:16], **kwargs), theirs.fit(X[:16], Y[:16], **kwargs))
  assert_same_variables(ours, theirs)
  if searched():
    return
  store = mesh.variable_store
  assert store["net/up/kernel"].slice_shape == (8, 8)
  slots = [n for n in store.names if n.endswith("up_kernel_momentum")]
  assert [store[n].slice_shape for n in slots] == [(8, 8)]


@pytest.mark.long
def test_two_optimizers() -> None:
  models = []
  for _ in range(2):
    keras.utils.set_random_seed(1)
    models.append(TwoOptimizers())
    models[-1].compile(keras.optimizers.SGD(0.1))
  theirs, ours = models
  parallel = mtf.keras.parallelize(ours, placement("rows:2", "batch:rows"))
  assert_same_history(parallel.fit(X[:16], **FIT), theirs.fit(X[:16], **FIT))
  assert_same_variables(ours, theirs)
  for u, v in zip(ours.down_optimizer.variables, theirs.down_optimizer.variables, strict=True):
    np.testing.assert_allclose(u.numpy(), v.numpy(), rtol=1e-4, atol=1e-6)
  assert int(ours.down_optimizer.iterations.numpy()) == 4


@pytest.mark.long
def test_a_compile_leaves_no_slots_behind() -> None:
  theirs, ours = _classifier(keras.Sequential), _classifier(keras.Sequential)
  parallel = mtf.keras.parallelize(ours, placement("rows:2", "batch:rows"))
  for optimizer in ("adam", "sgd"):
    for model in (parallel, theirs):
      model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    histories = [m.fit(X[:8], Y[:8], **{**FIT, "epochs": 1}) for m in (parallel, theirs)]
    assert_same_history(*histories)
  names = parallel.mesh_impl.variable_store.names
  assert not [n for n in names if "adam" in n]
  assert len(names) == len([*ours.variables, *ours.metrics_variables, *ours.optimizer.variables])
