"""Operations without a rule: computed whole on each device, with a warning, and exact gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.importing import comparing, layouts

LONG_IF_SEARCHED = (
  "test_a_keras_model_trains_as_by_keras",
  "test_values_and_gradients_on_drawn_layouts",
)
X = np.random.default_rng(3).normal(size=(4, 6, 8)).astype(np.float32)
W = tf.Variable(X[:, 0].T / 3, name="w")
SPEC = [tf.TensorSpec([4, 8])]


def _rounded(x: Any) -> Any:
  return tf.cast(tf.round(x * 2), tf.int32)


def _masked_in_a_loop(x: Any) -> Any:
  def body(i: Any, y: Any) -> Any:
    return i + 1, tf.tanh(y) + tf.reduce_sum(tf.boolean_mask(y, x[..., 0] > 0), 0)

  return tf.while_loop(lambda i, y: i < 2, body, (0, x))[1]


# Without a rule, or with one that does not know their settings; between operations that are split.
REPLICATED: dict[str, Callable[[Any], Any]] = {
  "one": lambda x: tf.tanh(x) * tf.dynamic_stitch([[2, 0], [3, 1]], [x[:2] * x[2:], tf.sin(x[2:])]),
  "of_a_computed_axis": lambda x: tf.cumsum(x * x, tf.cast(x[0, 0, 0] > 9, tf.int32)),
  "mask": lambda x: tf.reduce_sum(tf.boolean_mask(x * x, x[..., 0] > 0), 0) * x,
  "unique": lambda x: x * tf.cast(tf.unique(_rounded(x[1, 2]))[1], tf.float32),
  "sparse": lambda x: tf.sparse.to_dense(tf.sparse.softmax(tf.sparse.from_dense(x[0]))) * x,
  "known_size": lambda x: tf.ensure_shape(
    tf.math.segment_sum(x, _rounded(x[:, 0, 0]) * 0), [1, 6, 8]),
  "sets": lambda x: x[0] * tf.cast(
    tf.ensure_shape(tf.sets.size(tf.sets.union(_rounded(x[0]), _rounded(x[1]))), [6]),
    tf.float32)[:, None],
  "parts": lambda x: tf.ensure_shape(tf.dynamic_stitch(
    tf.dynamic_partition(tf.range(4), _rounded(x[:, 0, 0]) % 2, 2),
    tf.dynamic_partition(tf.sin(x), _rounded(x[:, 0, 0]) % 2, 2)), [4, 6, 8]),
  "in_a_branch": lambda x: tf.cond(
    x[0, 0, 0] > 9, lambda: x, lambda: x * tf.reduce_sum(tf.boolean_mask(x, x > 0))),
  "in_a_loop": _masked_in_a_loop,
  "variable": lambda x: tf.reduce_sum(tf.boolean_mask(tf.matmul(x, W), x[..., 0] > 0), 0),
}  # fmt: skip


@pytest.mark.parametrize("simd", [False, True])
@pytest.mark.parametrize("name", REPLICATED)
def test_values_and_gradients_on_drawn_layouts(
  name: str, simd: bool, cpu_devices: list[str], request: pytest.FixtureRequest
) -> None:
  imported = comparing.imported_of(REPLICATED[name], [X])
  number = list(REPLICATED).index(name)
  layout = layouts.drawn(imported, 2, 2, number + 20 * simd)
  both = comparing.compare(
    REPLICATED[name], [X], layout, cpu_devices[:4], imported=imported, simd=simd
  )
  assert both.difference < 2e-5, layout


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", REPLICATED)
def test_more_drawn_layouts(name: str, seed: int, cpu_devices: list[str]) -> None:
  imported = comparing.imported_of(REPLICATED[name], [X])
  layout = layouts.drawn(imported, 2, 4, seed)
  both = comparing.compare(
    REPLICATED[name], [X], layout, cpu_devices, imported=imported, simd=bool(seed % 2)
  )
  assert both.difference < 2e-5, layout


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
  return [r.getMessage() for r in caplog.records if "there is no rule to split" in r.getMessage()]


def logarithms(x: Any) -> Any:
  y = tf.cast(x[:, :4] @ tf.transpose(x[:, :4]) + tf.eye(4), tf.complex64)
  z = tf.math.real(tf.linalg.logm(y) + tf.linalg.logm(y * 2))
  return z + tf.reduce_sum(tf.boolean_mask(x, x > 0))


def test_one_warning_for_each_kind(
  caplog: pytest.LogCaptureFixture, cpu_devices: list[str]
) -> None:
  imported = mtf.from_tensorflow(logarithms, SPEC)
  first, second = _warnings(caplog)
  for text in (
    "logarithms: there is no rule to split MatrixLogarithm (MatrixLogarithm, test_replicated.py:",
    "in logarithms), and 1 more of its type: each device does all of its work, on inputs of 256 ",
    "which are gathered where a layout splits them; fallback='error' refuses it",
  ):
    assert text in first and "\n" not in first
  assert "Where" in second
  assert {op.type for op in imported.fallbacks} == {"MatrixLogarithm", second.split()[7]}
  impl = mtf.PlacementMeshImpl("r:2", "x.0:r", cpu_devices[:2])
  run = mtf.function(impl, input_signature=[mtf.TensorSpec("a:4,b:8")])(lambda x: imported(x))
  for _ in range(2):
    run(X[0, :4])
  assert len(_warnings(caplog)) == 2
  with pytest.raises(mtf.ShapeError, match=r"made by Where .*in logarithms"):
    mtf.from_tensorflow(logarithms, SPEC, fallback="error")


@keras.saving.register_keras_serializable()
class Stitch(keras.layers.Layer):
  """An operation without a rule, with a weight, between layers that are split."""

  def build(self, shape: Any) -> None:
    self.kernel = self.add_weight(shape=(4, 1), initializer="random_normal", name="kernel")

  def call(self, x: Any) -> Any:
    units = tf.transpose(x)
    parts = [units[:4] * self.kernel, units[4:] + self.kernel]
    return tf.transpose(tf.dynamic_stitch([[0, 2, 4, 6], [1, 3, 5, 7]], parts))


@pytest.mark.parametrize("simd", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_keras_model_trains_as_by_keras(
  simd: bool, caplog: pytest.LogCaptureFixture, cpu_devices: list[str]
) -> None:
  def model() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((8,)), keras.layers.Dense(8), Stitch(), keras.layers.Dense(4)]
    made = keras.Sequential(layers, name="net")
    made.compile(keras.optimizers.Adam(0.01), "mse")
    return made

  x, y = X.reshape(-1, 8), X.reshape(-1, 8)[:, :4]
  expected = model().fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
  kind = mtf.SimdMeshImpl if simd else mtf.PlacementMeshImpl
  impl = kind("rows:2,cols:2", "batch:rows,net/dense.units:cols", cpu_devices[:4])
  parallel = mtf.keras.parallelize(model(), impl)
  history = parallel.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
  np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)
  parallel.evaluate(x, y, batch_size=8, verbose=0)
  assert len([t for t in _warnings(caplog) if "DynamicStitch" in t]) == 1
