"""Random numbers of imported functions: their distribution, and that layouts change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf

SHAPE = (16, 40, 8)
LAYOUTS = (("placement", ""), ("placement", "a:r,c:c"), ("simd", "b:r,a:c"))


def draw(fn: Callable[[Any], Any], layout: tuple[str, str], devices: list[str], runs: int) -> Any:
  """Results of some runs, and the gradient of the sum of each."""
  kind, rules = layout
  impl = (mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl)("r:2,c:2", rules, devices)
  shape = mtf.Shape(list(zip("abc", SHAPE)))
  imported = mtf.from_tensorflow(fn, [mtf.TensorSpec(shape, tf.float32)])

  @mtf.function(impl, input_signature=[mtf.TensorSpec(shape, tf.float32)])
  def run(x: mtf.Tensor) -> Any:
    y = imported(x)
    return y, mtf.gradients([mtf.reduce_sum(y)], [x])[0]

  return [[np.asarray(t) for t in run(np.ones(SHAPE, np.float32))] for _ in range(runs)]


SEED = (3, 5)
# name -> a function of ones, and the mean and standard deviation of what it makes.
STATELESS: dict[str, tuple[Callable[[Any], Any], float, float]] = {
  "uniform": (lambda x: x * tf.random.stateless_uniform(SHAPE, SEED), 0.5, 12**-0.5),
  "normal": (lambda x: x * tf.random.stateless_normal(SHAPE, SEED, 1.0, 2.0), 1.0, 2.0),
  "truncated": (lambda x: x * tf.random.stateless_truncated_normal(SHAPE, SEED), 0.0, 0.8796),
  "integers": (
    lambda x: x * tf.cast(tf.random.stateless_uniform(SHAPE, SEED, 0, 7, tf.int32), tf.float32),
    3.0,
    2.0,
  ),
  "all_integers": (
    lambda x: (
      x
      * tf.cast(tf.random.stateless_uniform(SHAPE, SEED, None, None, tf.int64), tf.float32)
      * 2.0**-63
    ),
    0.0,
    3**-0.5,
  ),
}


# A distribution of floats and one of integers; the others repeat them.
@pytest.mark.parametrize(
  "name",
  [
    n if n in ("normal", "integers") else pytest.param(n, marks=pytest.mark.long) for n in STATELESS
  ],
)
def test_seeds_are_all_that_stateless_numbers_depend_on(name: str, cpu_devices: list[str]) -> None:
  fn, mean, deviation = STATELESS[name]
  first, again = draw(fn, LAYOUTS[1], cpu_devices[:4], 2)
  y = first[0]
  # Five standard errors.
  assert abs(y.mean() - mean) < 5 * deviation / y.size**0.5
  assert abs(y.std() - deviation) < 5 * deviation / y.size**0.5
  np.testing.assert_array_equal(y, again[0])
  for axis in range(3):
    assert not np.array_equal(np.take(y, 0, axis), np.take(y, 1, axis))
  np.testing.assert_array_equal(draw(fn, LAYOUTS[2], cpu_devices[:4], 1)[0][0], y)


def test_stateful_numbers_are_new_in_each_run(cpu_devices: list[str]) -> None:
  def fn(x: Any) -> Any:
    return x * tf.random.uniform(SHAPE) + tf.random.normal(SHAPE, 4.0)

  (y, dy), (other, _) = draw(fn, LAYOUTS[2], cpu_devices[:4], 2)
  assert np.mean(y == other) < 0.01
  assert abs(y.mean() - 4.5) < 0.1
  # The gradient is the uniform factor of this run.
  assert abs(np.mean(dy) - 0.5) < 0.02 and 0 <= dy.min() < dy.max() < 1


def test_dropout_of_keras_by_its_own_seed_generator(cpu_devices: list[str]) -> None:
  layer = keras.layers.Dropout(0.25, seed=7)
  layer.build(SHAPE)
  runs = []
  for layout in LAYOUTS:
    layer.seed_generator.state.assign(keras.random.SeedGenerator(7).state.value)
    runs.append(draw(lambda x: layer(x, training=True), layout, cpu_devices[:4], 2))
  for of_layout in runs[1:]:
    for (y, dy), (expected, _) in zip(of_layout, runs[0]):
      np.testing.assert_array_equal(y, expected)
      # What is kept is scaled, and so is its gradient.
      np.testing.assert_array_equal(dy, expected)
  first, second = runs[0][0][0], runs[0][1][0]
  assert set(np.unique(first)) == {np.float32(0), np.float32(1 / 0.75)}
  assert abs(np.mean(first == 0) - 0.25) < 0.03
  # The generator's state has moved on.
  assert 0.3 < np.mean(first != second) < 0.45


def _chosen(x: Any) -> Any:
  logits = tf.math.log(tf.constant([[0.1, 0.2, 0.7]])) * x[0, :, :1]
  return tf.transpose(tf.cast(tf.random.categorical(logits, 400), tf.float32))[:, :, None] * x[0, 0]


# name -> a function of ones, and the mean and standard deviation of what it makes.
BY_SEED: dict[str, tuple[Callable[[Any], Any], float, float]] = {
  "gamma": (lambda x: tf.random.gamma([200], 2.0 * x[0]), 2.0, 2.0**0.5),
  "gamma_with_a_seed": (lambda x: tf.random.gamma([200], 2.0 * x[0], seed=3), 2.0, 2.0**0.5),
  "poisson": (lambda x: tf.random.poisson([200], 3.0 * x[0]), 3.0, 3.0**0.5),
  "categorical": (_chosen, 1.6, 0.6633),
  "shuffle": (
    lambda x: x * tf.random.shuffle(tf.cast(tf.reshape(tf.range(16 * 320), SHAPE), tf.float32)),
    2559.5, 1478.0),
}  # fmt: skip


@pytest.mark.parametrize(
  "name",
  [
    n if n in ("categorical", "shuffle") else pytest.param(n, marks=pytest.mark.long)
    for n in BY_SEED
  ],
)
def test_numbers_that_tensorflow_draws_by_a_seed(name: str, cpu_devices: list[str]) -> None:
  """As on each layout, and new in each run."""
  fn, mean, deviation = BY_SEED[name]
  first, second = draw(fn, LAYOUTS[1], cpu_devices[:4], 2)
  y = first[0]
  count = y.size // (8 if name == "categorical" else 1)  # Each stands there eight times.
  assert abs(y.mean() - mean) < 5 * deviation / count**0.5
  assert abs(y.std() - deviation) < 0.05 * deviation
  assert np.mean(y == second[0]) < 0.7
  for other in (LAYOUTS[0], LAYOUTS[2]):
    for result, again in zip(draw(fn, other, cpu_devices[:4], 1)[0], first):
      np.testing.assert_allclose(result, again, rtol=1e-5)
  if name == "gamma":
    assert abs(first[1][0].mean() - 200 * 2.0) < 20  # Of a scale that is sampled: y / alpha.
