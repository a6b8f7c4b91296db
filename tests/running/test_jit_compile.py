"""Programs that XLA compiles: values as without it, inside of other functions, wrong use."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.environment.tensorflow_mode import is_jit_compiling
from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.transformer.model import decoding_states

BATCH, IO, HIDDEN = mtf.Dimension("batch", 4), mtf.Dimension("io", 8), mtf.Dimension("hidden", 6)
IMPLEMENTATIONS = {
  "placement": lambda: mtf.PlacementMeshImpl("all:1", "batch:all", ["CPU:0"]),
  "another device": lambda: mtf.PlacementMeshImpl("", "", ["CPU:1"]),
  "simd": lambda: mtf.SimdMeshImpl("all:1", "batch:all", devices=["CPU:0"]),
}
X = np.random.default_rng(0).normal(size=[4, 8]).astype(np.float32)


def make_step(impl, **kwargs):
  @mtf.function(impl, [mtf.TensorSpec([BATCH, IO])], **kwargs)
  def step(x):
    """A training step with random numbers and state."""
    hidden = mtf.layers.dense(x, HIDDEN, activation=mtf.relu, name="hidden", reduced_dims=[IO])
    hidden = mtf.dropout(hidden, True, rate=0.5)
    loss = mtf.reduce_mean(mtf.square(mtf.layers.dense(hidden, IO, reduced_dims=[HIDDEN]) - x))
    mtf.optimize.AdamWeightDecayOptimizer(0.1).minimize(loss)
    return loss

  return step


def losses(step):
  return [float(step(X, seed=i)) for i in range(3)]


def is_compiled(step, *args):
  """True if the traced caller has a function in it that XLA must compile."""
  caller = tf.function(lambda: step(*args, seed=0), autograph=False).get_concrete_function()
  functions = caller.graph.as_graph_def().library.function
  return any(f.attr["_XlaMustCompile"].b for f in functions)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_values_are_those_without(name):
  step = make_step(IMPLEMENTATIONS[name](), jit_compile=True)
  plain = make_step(IMPLEMENTATIONS[name]())
  for each in (step, plain):
    each.create_variables()
  for name, variable in plain.stored_variables.items():
    for a, b in zip(step.stored_variables[name].slices, variable.slices):
      a.assign(b)
  np.testing.assert_allclose(losses(step), losses(plain), rtol=1e-5)
  assert is_compiled(step, X) and not is_compiled(plain, X)


def test_a_caller_may_have_what_xla_has_not():
  step = make_step(IMPLEMENTATIONS["simd"](), jit_compile=True)

  @tf.function(autograph=False)
  def caller(text):
    return step(tf.reshape(tf.strings.to_number(tf.strings.split([text], " ").values), [4, 8]))

  text = " ".join(map(str, X.ravel()))
  step.create_variables()
  assert np.isfinite(float(caller(text)))


def test_where_xla_compiles():
  """A function, what it calls, and its loops; no other one, and not the next."""
  found = {}

  def look(name):
    found[name] = is_jit_compiling()

  def body(name):
    look(name)
    inner = tf.function(lambda: look(f"{name}, a call") or 0, autograph=False)
    tf.while_loop(lambda i: i < 2, lambda i: look(f"{name}, a loop") or [i + inner()], [0])

  look("eager")
  for name, options in {"plain": {}, "xla": {"jit_compile": True}, "plain again": {}}.items():
    tf.function(lambda n=name: body(n), autograph=False, **options).get_concrete_function()
  assert len(found) == 10
  for name, value in found.items():
    assert value == name.startswith("xla"), name


def test_a_caller_that_xla_compiles():
  """A program in it is traced for XLA; and for the kernels of CPUs before and after."""

  @mtf.function(IMPLEMENTATIONS["placement"](), [mtf.TensorSpec([BATCH, IO])])
  def program(x):
    """A write into a KV cache, which is in place on CPUs, by an operation that XLA has not."""
    position = mtf.constant(x.mesh, 3, [], tf.int32)
    return decoding_states.write_at(x, mtf.reduce_sum(x, reduced_dim=IO), position, IO)

  caller = tf.function(lambda x: program(x) + 1, autograph=False, jit_compile=True)
  plain = program(X)
  assert np.any(plain != X)
  np.testing.assert_allclose(caller(X) - 1, plain, rtol=1e-6)
  np.testing.assert_array_equal(program(X), plain)


def test_gradients_pass():
  impl = IMPLEMENTATIONS["placement"]()

  @mtf.function(impl, [mtf.TensorSpec([BATCH, IO])], jit_compile=True)
  def cubes(x):
    return mtf.reduce_sum(x * x * x)

  x = tf.constant(X)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = cubes(x)
  np.testing.assert_allclose(tape.gradient(y, x), 3 * X**2, rtol=1e-5)


def test_several_devices():
  impl = mtf.PlacementMeshImpl("all:2", "batch:all", ["CPU:0", "CPU:1"])
  with pytest.raises(UnsupportedError, match="step: jit_compile=True.*all=2.* has 2,.*size 1"):
    make_step(impl, jit_compile=True)


def test_operations_that_xla_does_not_know():
  @mtf.function(IMPLEMENTATIONS["simd"](), [mtf.TensorSpec([BATCH])], jit_compile=True)
  def lengths(x):
    def of_text(t):
      return tf.strings.length(tf.as_string(t))

    return mtf.slicewise(of_text, [x], x.shape, tf.int32, [BATCH])

  with pytest.raises(UnsupportedError, match="lengths: XLA does not compile AsString.*jit_compile"):
    lengths(np.zeros([4], np.float32))
