"""Functions that take gradients themselves, and lists of a tf.TensorArray beside their elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mesh_tensorflow as mtf
from tests.importing import comparing

RNG = np.random.default_rng(4)
IMAGE = RNG.normal(size=(4, 6, 6, 2)).astype(np.float32)
FILTER = RNG.normal(size=(3, 3, 2, 4)).astype(np.float32)
BIAS = RNG.normal(size=(4,)).astype(np.float32)
ROWS = RNG.normal(size=(4, 8)).astype(np.float32)


def _taken(loss: Callable[..., Any]) -> Callable[..., Any]:
  """The function of its arguments that returns the gradients of a loss."""

  def image_gradients(x: Any, w: Any, b: Any) -> Any:
    with tf.GradientTape() as tape:
      tape.watch([x, w, b])
      value = loss(x, w, b)
    return tape.gradient(value, [x, w, b])

  return image_gradients


def maxima(x: Any, w: Any, b: Any) -> Any:
  y = tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), b)
  return tf.reduce_sum(tf.nn.max_pool2d(tf.tanh(y), 2, 2, "VALID") ** 2)


def means(x: Any, w: Any, b: Any) -> Any:
  y = tf.nn.relu(tf.nn.conv2d(x, w, 2, "VALID") + b)
  return tf.reduce_sum(tf.nn.avg_pool2d(y, 2, 1, "SAME") ** 2)


def normed(x: Any, w: Any, b: Any) -> Any:
  y = tf.nn.conv2d(x, w, 1, "VALID")
  z = tf.raw_ops.FusedBatchNormV3(
    x=y, scale=b, offset=b * 2.0, mean=tf.zeros([0]), variance=tf.zeros([0])
  )[0]
  return tf.reduce_sum(tf.sin(z))


@pytest.mark.parametrize("loss", [maxima, means, normed])
def test_of_images(loss: Any, cpu_devices: list[str]) -> None:
  both = comparing.compare(
    _taken(loss), [IMAGE, FILTER, BIAS], "batch:r,filters:c", cpu_devices[:4],
    dims={"x": ["batch", None, None, None], "w": [None, None, None, "filters"]},
  )  # fmt: skip
  assert both.difference < 2e-5
  assert not both.imported.fallbacks


def loop_of_data(x: Any, w: Any) -> Any:
  """How often the body runs depends on the data, and so does the length of what is kept."""
  with tf.GradientTape() as tape:
    tape.watch([x, w])
    body = lambda v: [tf.tanh(v) * w + v]  # noqa: E731
    (y,) = tf.while_loop(lambda v: tf.reduce_sum(v * v) < 90.0, body, [x])
    loss = tf.reduce_sum(y * y)
  return tape.gradient(loss, [x, w])


def test_of_a_loop(cpu_devices: list[str]) -> None:
  args = [ROWS, 1.0 + np.abs(ROWS[0])]
  dims = {"x": ["rows", "columns"]}
  both = comparing.compare(loop_of_data, args, "rows:r,columns:c", cpu_devices[:4], dims=dims)
  assert both.difference < 1e-4
  assert not both.imported.fallbacks


def test_of_a_recurrent_layer(cpu_devices: list[str]) -> None:
  keras.utils.set_random_seed(1)
  inputs = keras.Input((5, 4))
  model = keras.Model(inputs, layers.Dense(4)(layers.LSTM(4, return_sequences=True)(inputs)))

  def recurrent_gradients(x: Any) -> Any:
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(model(x) ** 2)
    return tape.gradient(loss, [v.value for v in model.trainable_variables])

  x = RNG.normal(size=(4, 5, 4)).astype(np.float32)
  expected = tf.function(recurrent_gradients)(x)
  imported = mtf.from_tensorflow(recurrent_gradients, [tf.TensorSpec(x.shape)])
  assert not imported.fallbacks
  batch = next(iter(imported.dimensions))
  impl = mtf.SimdMeshImpl("r:2", f"{batch}:r", cpu_devices[:2])
  run = mtf.function(impl, [mtf.TensorSpec(imported.arguments[0])])(lambda x: imported(x))
  for ours, theirs in zip(run(x), expected, strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def picked(x: Any) -> Any:
  array = tf.TensorArray(tf.float32, 4, element_shape=[8], clear_after_read=False).unstack(x)
  return array.gather([2, 0, 2]), array.gather([1])


def scattered(x: Any) -> Any:
  array = tf.TensorArray(tf.float32, 5, element_shape=[8], clear_after_read=False)
  array = array.scatter([3, 1, 4, 3], x)
  return array.stack(), array.read(3)


def joined(x: Any) -> Any:
  array = tf.TensorArray(tf.float32, 2, element_shape=[2, 8])
  array = array.write(0, x[:2]).write(1, tf.sin(x[2:]))
  return array.concat()


@pytest.mark.parametrize("fn", [picked, scattered, joined])
def test_several_elements_of_a_list(fn: Any, cpu_devices: list[str]) -> None:
  dims = {"x": ["rows", "columns"]}
  both = comparing.compare(fn, [ROWS], "rows:r,columns:c", cpu_devices[:4], dims=dims)
  assert both.difference < 1e-5
  assert not both.imported.fallbacks


def test_a_list_of_lists_is_refused() -> None:
  def of_two_loops(x: Any) -> Any:
    with tf.GradientTape() as tape:
      tape.watch(x)

      def body(i: Any, v: Any) -> Any:
        return i + 1, tf.while_loop(lambda j, _: j < i, lambda j, u: (j + 1, tf.sin(u)), [0, v])[1]

      loss = tf.reduce_sum(tf.while_loop(lambda i, _: i < 3, body, [0, x])[1])
    return tape.gradient(loss, x)

  imported = comparing.imported_of(of_two_loops, [ROWS])
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  with pytest.raises(mtf.UnsupportedError, match="a list of lists, as the gradient of a loop"):
    imported(mtf.import_tf_tensor(mesh, ROWS, [("a", 4), ("b", 8)]))
