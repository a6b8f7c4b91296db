"""Shapes that follow from constants, or from the arguments' sizes, where TensorFlow has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.importing import comparing

LONG_IF_SEARCHED = (
  "test_a_function_traced_for_any_batch",
  "test_a_recurrent_layer_over_joined_axes",
)

X = np.random.default_rng(8).normal(size=(4, 8, 6)).astype(np.float32)
DIMS = {"x": ["a", "b", "c"]}
MASK = np.arange(32).reshape(4, 8) % 3 == 0
TABLE = tf.Variable(X[0, :6], name="table")


CASES: dict[str, Callable[[Any], Any]] = {
  "repeat": lambda x: tf.repeat(x, [1, 2, 0, 3], 0) * 2.0,
  "repeat_last": lambda x: tf.repeat(x, [1, 2, 0, 3, 1, 1], -1),
  "mask": lambda x: tf.boolean_mask(x, [True, False, True, True]),
  "mask_of_two_axes": lambda x: tf.boolean_mask(x, MASK) + tf.reduce_sum(x),
  "mask_of_lengths": lambda x: tf.boolean_mask(x, tf.sequence_mask([1, 2, 3, 4], 8)),
  "mask_of_one": lambda x: tf.boolean_mask(x[:1], [True]),
  "mask_of_one_value": lambda x: tf.reduce_sum(tf.boolean_mask(x, x >= tf.reduce_max(x))),
  "squeezed_constant": lambda x: x[0] * tf.squeeze(tf.ones([1, 8, 1]) + 1.0, [0]),
  "places": lambda x: tf.gather_nd(x, tf.where(MASK)),
  "segment_sum": lambda x: tf.math.segment_sum(x, [0, 0, 2, 2]),
  "segment_mean": lambda x: tf.math.segment_mean(x, [0, 1, 1, 1]) ** 2,
  "segment_max": lambda x: (
    tf.math.segment_max(x, [0, 0, 0, 1]), tf.math.segment_min(x, [0, 0, 0, 1])
  ),
  "segment_prod": lambda x: tf.math.segment_prod(x, [0, 0, 1, 1]),
  "parts": lambda x: tf.dynamic_partition(x, [0, 1, 0, 0], 2),
  "an_empty_part": lambda x: tf.dynamic_partition(x * x, [1, 1, 1, 1], 2)[1],
  "eigenvalues": lambda x: tf.linalg.eigvalsh(
    tf.matmul(x, x, transpose_a=True) + tf.linalg.diag(tf.range(6.0))
  ),
  "own_gradient_of_segments": lambda x: tf.nn.silu(tf.math.segment_max(x, [0, 0, 1, 1])),
  "fold_of_segments": lambda x: tf.foldl(
    lambda a, y: tf.sin(a) + y, tf.math.segment_sum(x, [0, 1, 1, 2])
  ),
  "map_of_a_mask": lambda x: tf.map_fn(tf.tanh, tf.boolean_mask(x, [True, True, False, True])),
  "ragged": lambda x: tf.RaggedTensor.from_row_splits(x, [0, 1, 4]).to_tensor(),
  "unique": lambda x: x[:2] * tf.cast(tf.unique([3, 3, 5])[0], tf.float32)[:, None, None],
  "turned": lambda x: tf.image.rot90(x, 1),
  "gather_nd_of_a_variable": lambda x: tf.gather_nd(TABLE, [[0, 1], [5, 5]]) * x[0, 0, 0],
  "rows_of_a_variable": lambda x: tf.gather_nd(TABLE, [[0], [5], [0]]) * x[0, 0],
  "ctc": lambda x: tf.nn.ctc_loss(
    [[1, 2]] * 8, x, [2] * 8, [4] * 8, logits_time_major=True, blank_index=0
  ),
  "written_rows": lambda x: tf.raw_ops.InplaceUpdate(x=x + 1.0, i=[2, 0], v=x[:2]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_shapes_that_constants_say(name: str, cpu_devices: list[str]) -> None:
  fn = CASES[name]
  number = list(CASES).index(name)
  layout = ("a:r,b:c", "b:r,c:c", "c:r,a:c")[number % 3]
  if name == "written_rows":  # TensorFlow has no gradient of it.
    fn = lambda x: tf.stop_gradient(CASES[name](x))  # noqa: E731
  both = comparing.compare(lambda x: fn(x), [X], layout, cpu_devices[:4], dims=DIMS,
                           traced=number % 2 == 0)  # fmt: skip
  assert both.difference < 1e-5


def test_slices_with_indices_become_tensors(cpu_devices: list[str]) -> None:
  """What a tape gives for a table, and tf.IndexedSlices that a function makes itself."""

  def gradient(x: Any) -> Any:
    with tf.GradientTape() as tape:
      y = tf.reduce_sum(tf.gather(TABLE, [0, 3, 3]) ** 2) * tf.reduce_mean(x)
    return {"table": tape.gradient(y, TABLE), "y": y}

  def own(x: Any) -> Any:
    return tf.IndexedSlices(x * 2.0, tf.constant([0, 2, 2, 1]), tf.constant([5, 8, 6]))

  for fn in (gradient, own):

    def dense(x: Any, fn: Callable[[Any], Any] = fn) -> Any:
      return tf.nest.map_structure(tf.convert_to_tensor, fn(x))

    imported = comparing.imported_of(fn, [X], DIMS)
    both = comparing.compare(dense, [X], "b:r,c:c", cpu_devices[:4], imported=imported)
    assert both.difference < 1e-5


@pytest.mark.parametrize(
  ("fn", "text"),
  [
    (lambda x: tf.IndexedSlices(x, tf.constant([0, 2, 2, 1])), "IndexedSlices without dense_shape"),
    (lambda x: tf.RaggedTensor.from_row_splits(x, [0, 1, 4]), "returns a RaggedTensor"),
    (lambda x: tf.sparse.from_dense(x), "returns a SparseTensor, .*tf.sparse.to_dense"),
  ],
)
def test_what_is_no_tensor_is_told(fn: Callable[[Any], Any], text: str) -> None:
  with pytest.raises(mtf.UnsupportedError, match=text):
    comparing.imported_of(fn, [X])


def test_what_does_not_fit_together_is_told() -> None:
  """TensorFlow, which does not know the size of the mask's result, says so when it runs."""

  def fn(x: Any) -> Any:
    return tf.add_n([tf.boolean_mask(x, [True, False, True, True]), x])

  with pytest.raises(mtf.ShapeError, match=r"AddN .*test_known_shapes.py.*3 and 4"):
    comparing.imported_of(fn, [X])


class Loops(keras.layers.Layer):
  """Its call is a tf.function, which Keras traces for batches of any size."""

  @tf.function
  def call(self, x: Any) -> Any:
    y = x
    for i in tf.range(3):
      if tf.reduce_sum(y) > 3.0:
        y = tf.tanh(y) + x[:, i : i + 1]
      else:
        y = y * 0.5
    return y


@tf.function
def halved(x: Any) -> Any:
  for _ in tf.range(2):
    x = x / 2.0
  return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 3.0, lambda: x - 1.0)


@pytest.mark.parametrize(
  "layout", ["batch:r,net/dense.units:c", pytest.param("batch:r", marks=pytest.mark.long)]
)
def test_a_function_traced_for_any_batch(layout: str, cpu_devices: list[str]) -> None:
  def model() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.Dense(8), Loops(), keras.layers.Dense(4)]
    made = keras.Sequential([*layers, keras.layers.Lambda(halved)], name="net")
    made.compile(keras.optimizers.SGD(0.1), "mse")
    return made

  x = X.reshape(-1, 6)
  expected = model().fit(x, x[:, :4], batch_size=8, verbose=0, shuffle=False)
  impl = mtf.PlacementMeshImpl("r:2,c:2", layout, cpu_devices[:4])
  given = mtf.keras.parallelize(model(), impl).fit(x, x[:, :4], batch_size=8, verbose=0,
                                                   shuffle=False)  # fmt: skip
  np.testing.assert_allclose(given.history["loss"], expected.history["loss"], rtol=1e-5)


class Squashed(tf.Module):
  """Its call is traced for batches of any size."""

  def __init__(self) -> None:
    super().__init__()
    self.w = tf.Variable(X[0, :6, :3], name="w")

  @tf.function(input_signature=[tf.TensorSpec([None, 6])])
  def __call__(self, x: Any) -> Any:
    y = x
    for _ in tf.range(2):
      y = tf.tanh(y)
    return tf.nn.softmax(tf.reshape(y, [-1, 2, 3])) @ self.w[:3] + y[:1, :3]


@tf.function(input_signature=[tf.TensorSpec(None)], autograph=False)
def of_any_rank(x: Any) -> Any:
  return tf.nn.silu(x) * 2.0


@tf.function(reduce_retracing=True, autograph=False)
def of_many_sizes(x: Any) -> Any:
  return tf.tanh(x) @ TABLE + tf.cast(tf.shape(x)[0], tf.float32)


@pytest.mark.parametrize("name", ["module", "rank", "sizes", "saved"])
def test_a_signature_of_any_size(name: str, tmp_path: Any, cpu_devices: list[str]) -> None:
  for n in (2, 3, 5):
    of_many_sizes(tf.ones([n, 6]))
  fns = {"module": Squashed(), "rank": of_any_rank, "sizes": of_many_sizes}
  fn: Any = fns.get(name)
  if name == "saved":
    tf.saved_model.save(fns["module"], tmp_path)
    fn = tf.saved_model.load(tmp_path)
  x = X[:, 0]
  imported = mtf.from_tensorflow(fn, [mtf.TensorSpec("batch:4,d:6")])
  both = comparing.compare(fn, [x], "batch:r,d:c", cpu_devices[:4], imported=imported)
  assert both.difference < 1e-5


@pytest.mark.parametrize(
  "name", ["LSTM", *(pytest.param(n, marks=pytest.mark.long) for n in ("GRU", "SimpleRNN"))]
)
def test_a_recurrent_layer_over_joined_axes(name: str, cpu_devices: list[str]) -> None:
  """As recognition of text in images has it: rows and columns are the sequence."""
  keras.utils.set_random_seed(1)
  layers = [
    keras.Input((4, 6, 2)),
    keras.layers.Conv2D(4, 3, padding="same"),
    keras.layers.Reshape((24, 4)),
    getattr(keras.layers, name)(4, return_sequences=True),
    keras.layers.Reshape((4, 6, 4)),
  ]
  model = keras.Sequential(layers, name="net")
  x = np.random.default_rng(1).normal(size=(4, 4, 6, 2)).astype(np.float32)
  dims = {"inputs": ["batch", "rows", "columns", "channels"]}
  imported = mtf.from_tensorflow(model, [tf.TensorSpec(x.shape)], dims=dims)
  layout = "batch:r,columns:c"
  both = comparing.compare(model, [x], layout, cpu_devices[:4], imported=imported)
  assert both.difference < 1e-5
