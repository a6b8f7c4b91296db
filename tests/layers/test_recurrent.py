"""Recurrent layers against Keras' on the same weights, on layouts; and one that learns."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.kinds import kept
from tests.operations.comparing import placement, rand, run, simd

B, L, D, H = (mtf.Dimension(n, s) for n, s in (("b", 4), ("length", 6), ("d", 2), ("h", 4)))
LAYOUTS = ["", "b:r,h:c", "length:r,d:c", "h:r"]
LENGTHS = np.array([6, 0, 3, 5], np.int32)
# Name, Keras' layer, our layer, number of states.
KINDS = {
  "lstm": (keras.layers.LSTM, mtf.layers.lstm, {}, 2),
  "lstm_no_bias": (keras.layers.LSTM, mtf.layers.lstm, {"use_bias": False}, 2),
  "gru": (keras.layers.GRU, mtf.layers.gru, {}, 1),
  "gru_before": (keras.layers.GRU, mtf.layers.gru, {"reset_after": False}, 1),
  "simple_rnn": (keras.layers.SimpleRNN, mtf.layers.simple_rnn, {}, 1),
}


def _values(kind, masked):
  """Inputs and weights, in Keras' shapes, and what Keras makes of them: outputs, states, grads."""
  keras_class, _, options, count = KINDS[kind]
  layer = keras_class(4, return_sequences=True, return_state=True, **options)
  x, states = rand(4, 6, 2), [rand(4, 4, seed=5 + i) for i in range(count)]
  layer.build((4, 6, 2))
  for i, w in enumerate(layer.weights):
    w.assign(rand(*w.shape, seed=20 + i))
  mask = tf.constant(np.arange(6) < LENGTHS[:, None]) if masked else None
  x_t, states_t = tf.constant(x), [tf.constant(h) for h in states]
  weights = [w.value for w in layer.trainable_weights]
  with tf.GradientTape() as tape:
    tape.watch([x_t, *states_t])
    ys = layer(x_t, initial_state=states_t, mask=mask)
    loss = tf.add_n([tf.reduce_sum(y * rand(*y.shape, seed=9 + i)) for i, y in enumerate(ys)])
  grads = tape.gradient(loss, [x_t, *states_t, *weights])
  named = {w.name: w.numpy() for w in layer.weights}
  return x, states, named, [y.numpy() for y in ys], [g.numpy() for g in grads]


def _initializer(value):
  return lambda shape, dtype: tf.constant(np.reshape(value, [int(n) for n in shape]))


def _weights(mesh, kind, named):
  """Our variables, in the order of Keras' gradients, set to Keras' values."""
  gates = {"lstm": [("lstm_gates", 4)], "gru": [("gru_gates", 3)]}.get(kind.split("_")[0], [])
  made = []

  def variable(name, shape, value):
    made.append(mtf.get_variable(mesh, f"rnn/{name}", shape, initializer=_initializer(value)))

  variable("kernel", [D, *gates, H], named["kernel"])
  variable("recurrent_kernel", [("_h", 4), *gates, H], named["recurrent_kernel"])
  if "bias" in named:
    bias = np.atleast_2d(named["bias"])
    variable("bias", [*gates, H], bias[0])
    if len(bias) > 1:
      variable("recurrent_bias", [*gates, H], bias[1])
  return made


def _check(kind, masked, cases):
  x, states, named, want, want_grads = _values(kind, masked)
  _, layer, options, count = KINDS[kind]
  bias = [np.reshape(g, [-1, 4]) for g in want_grads[3 + count :]]

  def build(mesh):
    x_t = mtf.import_tf_tensor(mesh, x, [B, L, D])
    states_t = [mtf.import_tf_tensor(mesh, h, [B, H]) for h in states]
    weights = _weights(mesh, kind, named)
    lengths = mtf.import_tf_tensor(mesh, LENGTHS, [B]) if masked else None
    before = len(mesh.graph.all_variables)
    y, last = layer(
      x_t,
      H,
      lengths=lengths,
      initial_state=states_t if count > 1 else states_t[0],
      name="rnn",
      **options,
    )
    assert len(mesh.graph.all_variables) == before
    ys = [y, *(last if count > 1 else [last])]
    assert y.shape == mtf.Shape([B, L, H])
    grad_ys = [
      mtf.import_tf_tensor(mesh, rand(*y.shape.to_integer_list, seed=9 + i), y.shape)
      for i, y in enumerate(ys)
    ]
    return [*ys, *mtf.gradients(ys, [x_t, *states_t, *weights], grad_ys)]

  for impl, in_function in cases:
    values = run(build, impl=impl, in_function=in_function)
    got, grads = values[: 1 + count], values[1 + count :]
    for a, b in zip(got, want):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(grads[: 3 + count], want_grads):
      np.testing.assert_allclose(np.reshape(a, b.shape), b, rtol=1e-4, atol=1e-5)
    # Keras has both biases of a GRU in one variable.
    none = np.zeros([0, 4])
    ours = np.concatenate([none, *(np.reshape(g, [-1, 4]) for g in grads[3 + count :])])
    np.testing.assert_allclose(ours, np.concatenate([none, *bias]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", list(KINDS))
def test_equals_keras(kind):
  _check(kind, False, [(placement(LAYOUTS[0]), False), (placement(LAYOUTS[1]), False)])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_equals_keras_with_lengths(kind):
  _check(kind, True, [(placement(layout), False) for layout in LAYOUTS])


@pytest.mark.slow
@pytest.mark.parametrize("kind", kept(["lstm", "gru_before"], ["gru_before"]))
def test_equals_keras_in_one_program(kind):
  _check(kind, True, [(simd("b:r,h:c"), True), (placement("b:r,h:c"), True)])
