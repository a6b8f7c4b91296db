"""Cross entropies that TensorFlow has as one operation: its gradients, which are no derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.importing import comparing

RNG = np.random.default_rng(4)
LOGITS = RNG.normal(size=(4, 8)).astype(np.float32)
LABELS = RNG.uniform(-0.5, 1.5, (4, 8)).astype(np.float32)
IDS = tf.constant([7, 0, 3, 3])
DIMS = {"x": ["batch", "classes"], "labels": ["batch", "classes"]}


def dense(x: Any, labels: Any) -> Any:
  return tf.nn.softmax_cross_entropy_with_logits(labels, x)


def sparse(x: Any, labels: Any) -> Any:
  return tf.nn.sparse_softmax_cross_entropy_with_logits(IDS, x * labels)


def taken(loss: Callable[..., Any]) -> Callable[..., Any]:
  """The gradients, which the function takes itself."""

  def fn(x: Any, labels: Any) -> Any:
    with tf.GradientTape() as tape:
      tape.watch([x, labels])
      y = tf.square(loss(x, labels))
    return tape.gradient(y, [x, labels])

  return fn


CASES: dict[str, Callable[[Any, Any], Any]] = {
  "dense": dense,
  "one_row": lambda x, labels: tf.nn.softmax_cross_entropy_with_logits(
    labels[:1] + tf.zeros_like(x), x
  ),
  "labels_of_the_logits": lambda x, labels: dense(x, x * labels),
  "one_class": lambda x, labels: dense(x[:, :1], labels[:, :1]),
  "joined": lambda x, labels: dense(tf.reshape(x, [2, 16]), tf.reshape(labels, [2, 16])),
  "another_axis": lambda x, labels: tf.nn.softmax_cross_entropy_with_logits(labels, x, axis=0),
  "sparse": sparse,
  "taken": taken(dense),
  "taken_sparse": taken(sparse),
  "keras": lambda x, labels: tf.keras.losses.CategoricalCrossentropy(
    from_logits=True, label_smoothing=0.1
  )(labels, x),
}
LAYOUTS = ("batch:r,classes:c", "classes:r")


@pytest.mark.parametrize(
  ("name", "layout"),
  [
    pytest.param(name, layout, marks=[pytest.mark.long] if (i + k) % 2 else [])
    for i, name in enumerate(CASES)
    for k, layout in enumerate(LAYOUTS)
  ],
)
def test_gradients_are_those_of_tensorflow(name: str, layout: str, cpu_devices: list[str]) -> None:
  both = comparing.compare(
    lambda x, labels: CASES[name](x, labels),
    [LOGITS, LABELS],
    layout,
    cpu_devices[:4],
    dims=DIMS,
    traced=name == "dense",
  )
  assert both.difference < 5e-6
  assert not both.imported.fallbacks


@pytest.mark.parametrize("loss", [dense, sparse])
def test_gradients_of_gradients_are_those_of_tensorflow(
  loss: Callable[..., Any], cpu_devices: list[str]
) -> None:
  x, labels = tf.constant(LOGITS), tf.constant(LABELS)
  with tf.GradientTape() as outer:
    outer.watch([x, labels])
    with tf.GradientTape() as tape:
      tape.watch([x, labels])
      y = tf.square(loss(x, labels))
    first = tape.gradient(y, [x, labels])
    total = sum(tf.reduce_sum(g * g) for g in first)
  expected = outer.gradient(total, [x, labels])

  imported = mtf.from_tensorflow(loss, [tf.TensorSpec([4, 8])] * 2, dims=DIMS)

  def twice(x: mtf.Tensor, labels: mtf.Tensor) -> list[mtf.Tensor]:
    y = mtf.square(imported(x, labels))
    first = mtf.gradients([y], [x, labels])
    return mtf.gradients([mtf.reduce_sum(mtf.square(g)) for g in first], [x, labels])

  specs = [mtf.TensorSpec("batch:4,classes:8")] * 2
  impl = mtf.PlacementMeshImpl("r:2,c:2", "batch:r,classes:c", cpu_devices[:4])
  given = mtf.function(impl, input_signature=specs)(twice)(LOGITS, LABELS)
  for g, e in zip(given, expected):
    np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-4)
