"""Imported loops, conditions and TensorLists, and Keras' recurrent layers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import mesh_tensorflow as mtf
from tests.importing import comparing

LONG_IF_SEARCHED = (
  "test_recurrent_layers_where_there_is_a_gpu",
  "test_variables_that_an_iteration_assigns_are_read_anew",
)
RNG = np.random.default_rng(3)
X = RNG.normal(size=(4, 6, 2)).astype(np.float32)
V = RNG.normal(size=(4, 8)).astype(np.float32)
RECURRENT = {
  "lstm": lambda: layers.LSTM(4),
  "gru": lambda: layers.GRU(4),
  "lstm_sequences": lambda: layers.LSTM(4, return_sequences=True),
  "gru_before": lambda: layers.GRU(4, reset_after=False, go_backwards=True),
  "simple_rnn": lambda: layers.SimpleRNN(4),
  "bidirectional": lambda: layers.Bidirectional(layers.LSTM(4)),
}


def classifier(kind: str) -> keras.Model:
  """Ids, vectors, a recurrent layer, logits."""
  keras.utils.set_random_seed(1)
  inputs = keras.Input((6,), dtype="int32")
  h = RECURRENT[kind]()(layers.Embedding(8, 4, name="embedding")(inputs))
  model = keras.Model(inputs, layers.Dense(4, name="logits")(h))
  for v in model.trainable_variables:
    v.assign(v + 0.1 * RNG.normal(size=v.shape))
  return model


def check(fn: Any, args: Any, layout: str, devices: Any, **kwargs: Any) -> None:
  both = comparing.compare(fn, args, layout, devices, **kwargs)
  assert both.difference < 1e-5
  assert not both.imported.fallbacks


IDS = RNG.integers(0, 8, [4, 6]).astype(np.int32)


DIMS = {"inputs": ["batch", "time"], "logits/kernel": [None, "classes"]}


@pytest.mark.parametrize(
  "kind",
  # A GRU is below, with a mask; the others repeat these.
  [k if k == "lstm" else pytest.param(k, marks=pytest.mark.long) for k in RECURRENT],
)
def test_keras_classifiers(kind: str, cpu_devices: list[str]) -> None:
  model = classifier(kind)
  run = lambda inputs: model(inputs)  # noqa: E731
  imported = comparing.imported_of(run, [IDS], DIMS)
  if kind != "lstm":
    check(run, [IDS], "batch:r,classes:c", cpu_devices[:4], imported=imported)
  if kind in ("lstm", "gru"):
    units = imported.variables[-1].shape.dims[0].name
    assert "classes" in str(imported.dimensions) and units == "classes"
    (hidden,) = {v.shape.dims[0].name for v in imported.variables if "recurrent" in v.name}
    check(run, [IDS], f"batch:r,{hidden}:c", cpu_devices[:4], simd=True, imported=imported)


def test_masked_sequences(cpu_devices: list[str]) -> None:
  """Ids 0 are padding: Keras' mask goes through the loop."""
  inputs = keras.Input((6,), dtype="int32")
  h = layers.Embedding(8, 4, mask_zero=True)(inputs)
  model = keras.Model(inputs, layers.Dense(4, name="logits")(layers.GRU(4)(h)))
  ids = np.where(np.arange(6) < [[6], [2], [4], [1]], IDS, 0).astype(np.int32)
  run = lambda inputs: model(inputs)  # noqa: E731
  check(run, [ids], "batch:r,classes:c", cpu_devices[:4], dims=DIMS)


def power(x: Any, w: Any) -> Any:
  """How often the body runs depends on the data."""
  return tf.while_loop(lambda v: tf.reduce_sum(v) < 50.0, lambda v: [v * w + tf.sin(v)], [x])[0]


def nested(x: Any, w: Any) -> Any:
  """A loop in a loop, and a branch in each iteration."""

  def body(i: Any, v: Any) -> Any:
    v = tf.cond(i % 2 == 0, lambda: v * w, lambda: tf.sin(v))
    _, v = tf.while_loop(lambda j, _: j < i, lambda j, u: (j + 1, u + w), [0, v])
    return i + 1, v

  return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]


def written(x: Any, w: Any) -> Any:
  """A TensorArray whose elements have a shape that only the body tells."""

  def body(i: Any, array: Any) -> Any:
    return i + 1, array.write(i, tf.tanh(x * tf.cast(i, tf.float32) + w))

  array = tf.while_loop(lambda i, _: i < 3, body, [0, tf.TensorArray(tf.float32, 3)])[1]
  return array.stack()


def chosen(x: Any, w: Any) -> Any:
  number = tf.cast(tf.reduce_sum(tf.abs(x)) > 0, tf.int32) + 1
  return tf.switch_case(number, [lambda: x, lambda: x * w, lambda: tf.sin(x) + w])


def branches(x: Any, w: Any) -> Any:
  return tf.cond(tf.reduce_max(x) > 100.0, lambda: (x, w), lambda: (x * w, tf.sin(w)))


PROGRAMS = {
  "power": (power, [np.abs(V) + 0.5, np.full([8], 1.2, np.float32)]),
  "nested": (nested, [V, V[0]]),
  "written": (written, [V, V[0]]),
  "chosen": (chosen, [V, V[0]]),
  "branches": (branches, [V, V[0]]),
}


@pytest.mark.parametrize(
  ("name", "simd"),
  # Each once, on one of the two.
  [
    pytest.param(name, simd, marks=[pytest.mark.long] if simd == bool(i % 2) else [])
    for i, name in enumerate(PROGRAMS)
    for simd in (False, True)
  ],
)
def test_programs(name: str, simd: bool, cpu_devices: list[str]) -> None:
  fn, args = PROGRAMS[name]
  dims = {"x": ["rows", "columns"]}
  check(fn, args, "rows:r,columns:c", cpu_devices[:4], dims=dims, simd=simd)


def _until(limit: float, state: tf.Variable, change: Any) -> Any:
  """The condition reads what the body assigns."""

  def body(v: Any) -> Any:
    change()
    return [v * (1.0 + 0.01 * state)]

  return lambda x: tf.while_loop(lambda v: tf.reduce_sum(state) < limit, body, [x])[0]


def _in_a_branch(state: tf.Variable) -> Any:
  def body(i: Any, v: Any) -> Any:
    before = state + 0.0
    tf.cond(i % 2 == 0, lambda: state.assign_add(tf.ones([8])), lambda: state.assign(state * 2.0))
    return i + 1, v + before

  return lambda x: tf.while_loop(lambda i, _: i < 4, body, [0, x])[1]


def _nested(state: tf.Variable) -> Any:
  def inner(j: Any, v: Any) -> Any:
    v = v + state
    state.assign_sub(0.5 * state)
    return j + 1, v

  def outer(i: Any, v: Any) -> Any:
    v = v * state
    return i + 1, tf.while_loop(lambda j, _: j < 2, inner, [0, v])[1]

  def run(x: Any) -> Any:
    x = x + state
    return tf.while_loop(lambda i, _: i < 2, outer, [0, x])[1] - state

  return run


@pytest.mark.parametrize("simd", [False, True])
@pytest.mark.parametrize("name", ["assigned", "added", "branch", "nested"])
def test_variables_that_an_iteration_assigns_are_read_anew(
  name: str, simd: bool, cpu_devices: list[str]
) -> None:
  state = tf.Variable(np.linspace(0.5, 1.0, 8, dtype=np.float32), name="state")
  fn = {
    "assigned": lambda: _until(30.0, state, lambda: state.assign(state * 1.3)),
    "added": lambda: _until(30.0, state, lambda: state.assign_add(tf.ones([8]))),
    "branch": lambda: _in_a_branch(state),
    "nested": lambda: _nested(state),
  }[name]()
  start = state.numpy()
  outcomes = []
  for layout in ("", "rows:r,columns:c", "columns:r"):
    state.assign(start)
    want = [fn(tf.constant(V)).numpy(), state.numpy()]
    state.assign(start)
    dims = {"x": ["rows", "columns"]}
    imported = mtf.from_tensorflow(
      tf.function(lambda x: (fn(x), state + 0.0)), [tf.TensorSpec(V.shape)], dims
    )
    kind = mtf.SimdMeshImpl if simd else mtf.PlacementMeshImpl
    impl = kind("r:2,c:2", layout, cpu_devices[:4])
    outcomes.append((comparing.on_mesh(imported, [V], impl, traced=simd), want))
  for found, want in outcomes:
    for a, b in zip(found, want):
      np.testing.assert_allclose(a, b, rtol=1e-5)


def test_maximum_iterations_are_known_to_the_plan() -> None:
  fn = lambda x: tf.while_loop(  # noqa: E731
    lambda v: tf.reduce_sum(v) < 1e9, lambda v: [v * 2.0], [x], maximum_iterations=5
  )[0]
  imported = comparing.imported_of(fn, [V])
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  imported(mtf.import_tf_tensor(mesh, V, [("a", 4), ("b", 8)]))
  (loop,) = [op for op in graph.operations if isinstance(op, mtf.WhileLoopOperation)]
  assert loop.maximum_iterations == 5


def test_loops_that_begin_with_one_constant_have_dimensions_of_their_own() -> None:
  def two_loops(x: Any, w: Any) -> Any:
    start = tf.ones([8])
    scaled = tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, v * w), [0, start])
    added = tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, v + x[0]), [0, start])
    return scaled[1], added[1]

  imported = comparing.imported_of(two_loops, [V, V[0]])
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.import_tf_tensor(mesh, V, [("a", 4), ("b", 8)])
  scaled, added = imported(x, mtf.import_tf_tensor(mesh, V[0], [("c", 8)]))
  assert scaled.shape != added.shape


def test_a_shape_that_only_running_tells_is_refused() -> None:
  def grown(x: Any) -> Any:
    invariants = [tf.TensorShape([]), tf.TensorShape([None, 8])]
    body = lambda i, v: (i + 1, tf.concat([v, v], 0))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 2, body, [0, x], shape_invariants=invariants)[1]

  with pytest.raises(mtf.ShapeError, match="while.*known only when the function runs"):
    comparing.imported_of(grown, [V])


@pytest.mark.parametrize("kind", ["lstm", "gru", "bidirectional"])
def test_recurrent_layers_where_there_is_a_gpu(
  kind: str, monkeypatch: pytest.MonkeyPatch, cpu_devices: list[str]
) -> None:
  """Keras would have them as one operation of cuDNN there; they are traced as on a CPU."""
  model = classifier(kind)
  model(IDS)
  expected = comparing.original(model, [IDS], [v.value for v in model.variables])
  devices = tf.config.list_logical_devices

  def with_gpu(device_type: str | None = None) -> Any:
    return devices("CPU") if device_type == "GPU" else devices(device_type)

  monkeypatch.setattr(tf.config, "list_logical_devices", with_gpu)
  spec = tf.TensorSpec(IDS.shape, tf.int32)

  def types() -> set[str]:
    graph = tf.function(lambda x: model(x)).get_concrete_function(spec).graph
    return {op.type for op in graph.get_operations()}

  assert "CudnnRNNV3" in types()
  imported = mtf.from_tensorflow(model, [spec], dims=DIMS)
  impl = mtf.PlacementMeshImpl("r:2,c:2", "batch:r,classes:c", cpu_devices[:4])
  given = comparing.on_mesh(imported, [IDS], impl, traced=False)
  np.testing.assert_allclose(given[0], expected[0], rtol=1e-5, atol=1e-5)
  assert "CudnnRNNV3" in types()  # Keras is as it was.
