"""`mtf.function(..., precision=...)`: computations in half precision, variables in float32."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import optimize
from mesh_tensorflow.errors import ArgumentError
from mesh_tensorflow.numerics import precision as precisions
from mesh_tensorflow.running import function
from tests.kinds import kept

BATCH, IO, HIDDEN, CLASSES = (
  mtf.Dimension(*d) for d in [("batch", 16), ("io", 8), ("hidden", 32), ("classes", 12)]
)
RNG = np.random.default_rng(0)
X = RNG.normal(size=[16, 8]).astype(np.float32)
Y = np.argmax(X @ RNG.normal(size=[8, 12]), 1).astype(np.int32)
MESHES = {"one": ("r:1", ""), "2x2": ("r:2,s:2", "batch:r,hidden:s"), "split": ("r:4", "classes:r")}


def make_impl(kind, mesh, devices):
  shape, rules = MESHES[mesh]
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  devices = devices[: mtf.convert_to_shape(shape).size]
  return cls(shape, rules, devices, variable_store=mtf.VariableStore(seed=1))


def model(x, y):
  w = mtf.get_variable(x.mesh, "w", [IO, HIDDEN])
  h = mtf.relu(mtf.einsum([x, w], output_shape=[BATCH, HIDDEN]))
  h = mtf.layers.layer_norm(h, HIDDEN)
  logits = mtf.layers.dense(h, CLASSES, reduced_dims=[HIDDEN], name="out")
  loss = mtf.layers.softmax_cross_entropy_with_logits(logits, y, CLASSES)
  return logits, mtf.reduce_mean(loss)


def training_step(impl, precision, seen=None):
  @mtf.function(
    impl, [mtf.TensorSpec([BATCH, IO]), mtf.TensorSpec([BATCH], tf.int32)], precision=precision
  )
  def step(x, y):
    logits, loss = model(x, y)
    if seen is not None:
      seen.extend([x.dtype, y.dtype, logits.dtype, loss.dtype])
    variables = x.graph.trainable_variables
    gradients = mtf.gradients([loss], [v.value for v in variables])
    optimize.AdamWOptimizer(0.02).apply_grads(gradients, variables)
    return {"loss": loss, "logits": logits, "ids": mtf.argmax(logits, CLASSES)}

  return step


@pytest.fixture(scope="module")
def in_float32(cpu_devices):
  step = training_step(make_impl("placement", "one", cpu_devices), None)
  return [step(X, Y)["loss"].numpy() for _ in range(12)]


TRAININGS = [
  (kind, mesh, precision)
  for kind, mesh in (("placement", "one"), ("placement", "2x2"), ("simd", "2x2"), ("simd", "split"))
  for precision in ("bfloat16", "float16", "float32")
]


@pytest.mark.parametrize("kind,mesh,precision", kept(TRAININGS, TRAININGS[1::2]))
def test_it_trains_as_in_float32(kind, mesh, precision, cpu_devices, in_float32):
  seen = []
  step = training_step(make_impl(kind, mesh, cpu_devices), precision, seen)
  outputs = [step(X, Y) for _ in range(12)]
  half = tf.as_dtype(precision)
  assert seen[:4] == [half, tf.int32, half, tf.float32]
  assert {k: v.dtype for k, v in outputs[0].items()} == {
    "loss": tf.float32, "logits": tf.float32, "ids": tf.int32
  }  # fmt: skip
  assert {v.dtype for v in step.variables if v.dtype.is_floating} == {tf.float32}
  tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[precision]
  losses = [o["loss"].numpy() for o in outputs]
  np.testing.assert_allclose(losses, in_float32, rtol=tolerance)
  assert losses[-1] < 0.6 * losses[0]


def test_products_are_in_it_and_no_weight_is_cast_twice(cpu_devices):
  step = training_step(make_impl("placement", "one", cpu_devices), "bfloat16")
  graph, _, _ = step.build_graph()
  products = [o.outputs[0].dtype for o in graph.operations if type(o).__name__ == "EinsumOperation"]
  assert len(products) >= 5 and set(products) == {tf.bfloat16}
  step(X, Y)
  concrete = tf.function(lambda: step(X, Y)).get_concrete_function().graph
  ops = list(concrete.as_graph_def().node)
  for f in concrete.as_graph_def().library.function:
    ops += f.node_def
  weights = [
    n for n in ops
    if n.op == "Cast" and n.attr["DstT"].type == tf.bfloat16.as_datatype_enum
    and re.search("ReadVariableOp", n.input[0])
  ]  # fmt: skip
  assert len({n.input[0] for n in weights}) == len(weights)


def test_only_what_is_float32_is_changed(cpu_devices):
  impl = make_impl("placement", "one", cpu_devices)
  seen = {}

  @mtf.function(
    impl, [mtf.TensorSpec([IO], tf.float64), mtf.TensorSpec([IO])], precision="bfloat16"
  )
  def f(x, z):
    wide = mtf.get_variable(x.mesh, "wide", [IO], tf.float64)
    given = mtf.get_variable(x.mesh, "given", [IO], activation_dtype=tf.float32)
    plain = mtf.get_variable(x.mesh, "plain", [IO])
    seen.update(x=x.dtype, z=z.dtype, wide=wide.dtype, given=given.dtype, plain=plain.dtype)
    return x * wide, given, plain * z

  outputs = f(np.ones(8), np.ones(8, np.float32))
  assert [y.dtype for y in outputs] == [tf.float64, tf.float32, tf.float32]
  assert seen == {
    "x": tf.float64, "z": tf.bfloat16, "wide": tf.float64, "given": tf.float32, "plain": tf.bfloat16
  }  # fmt: skip


def test_inside_of_another_function(cpu_devices):
  """It computes in its own precision there, and what is around it as before."""
  impl = make_impl("placement", "one", cpu_devices)
  seen = []

  @mtf.function(impl, [mtf.TensorSpec([IO])], precision="bfloat16")
  def inner(x):
    seen.append(x.dtype)
    return x * mtf.get_variable(x.mesh, "inner", [IO])

  @mtf.function(impl, [mtf.TensorSpec([IO])])
  def outer(x):
    y = inner(x)
    seen.append(mtf.get_variable(x.mesh, "outer", [IO]).dtype)
    return y + x

  assert outer(X[0]).dtype == tf.float32
  assert seen[-2:] == [tf.bfloat16, tf.float32]


def test_gradients_of_a_tape(cpu_devices):
  impl = make_impl("simd", "2x2", cpu_devices)

  @mtf.function(
    impl, [mtf.TensorSpec([BATCH, IO]), mtf.TensorSpec([BATCH], tf.int32)], precision="bfloat16"
  )
  def loss(x, y):
    return model(x, y)[1]

  x = tf.constant(X)
  loss.create_variables()
  with tf.GradientTape() as tape:
    tape.watch(x)
    value = loss(x, Y)
  gradients = tape.gradient(value, [x, *loss.trainable_variables])
  assert {g.dtype for g in gradients} == {tf.float32}
  assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in gradients)


def test_what_is_faster_and_what_there_is_not(cpu_devices, monkeypatch):
  impl, seen = make_impl("placement", "one", cpu_devices), []
  for faster in ("bfloat16", "float32"):
    monkeypatch.setattr(precisions, "faster", lambda faster=faster: faster)
    f = mtf.function(impl, [mtf.TensorSpec([IO])], precision="auto")
    f(lambda x: seen.append(x.dtype) or x)(X[0])
  assert list(dict.fromkeys(seen)) == [tf.bfloat16, tf.float32]
  with pytest.raises(ArgumentError, match="precision is 'bfloat'; did you mean 'bfloat16'"):
    mtf.function(impl, [mtf.TensorSpec([IO])], precision="bfloat")(lambda x: x)
  with pytest.raises(ArgumentError, match="'auto' is .*, and this mesh is of 2: give bfloat16 or"):
    function._InPrecision(lambda x: x, "auto", 2)
