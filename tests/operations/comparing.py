"""Compares mtf programs with plain TensorFlow: values and gradients, layout by layout."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf

MESH = "r:2,c:2"


def placement(layout, mesh=MESH):
  """A mesh implementation on the default device."""
  shape = mtf.convert_to_shape(mesh)
  return mtf.PlacementMeshImpl(shape, layout, [""] * shape.size)


def simd(layout, mesh=MESH):
  """A mesh implementation that traces one program for all processors."""
  return mtf.SimdMeshImpl(mesh, layout)


def run(build, layout="", mesh=MESH, *, in_function=False, seed=0, impl=None):
  """Lowers `build(mesh)`, which returns a list of mtf.Tensors; returns a list of arrays."""
  impl = placement(layout, mesh) if impl is None else impl

  def program():
    graph = mtf.Graph()
    outputs = build(mtf.Mesh(graph, "m"))
    lowering = mtf.Lowering(graph, {outputs[0].mesh: impl}, seed=seed)
    return [lowering.export_to_tf_tensor(y) for y in outputs]

  def step():
    return impl.run(program)

  values = tf.function(step, autograph=False)() if in_function else step()
  return [v.numpy() for v in values]


def rand(*shape, seed=0):
  return np.random.RandomState(seed).uniform(-1.0, 1.0, shape).astype(np.float32)


def _as_list(x):
  return list(x) if isinstance(x, (list, tuple)) else [x]


def check(mtf_fn, tf_fn, inputs, layouts, mesh=MESH, rtol=1e-5):
  """Checks an mtf function against a plain TensorFlow one.

  Args:
    mtf_fn: takes mtf.Tensors, returns one or several.
    tf_fn: takes tf.Tensors, returns as many tf.Tensors.
    inputs: list of (array, shape).
    layouts: list of layouts. The last one is also tried inside tf.function, under a
      placement and a SIMD mesh.
    mesh: mesh shape.
    rtol: relative tolerance.
  """
  xs = [tf.constant(a) for a, _ in inputs]
  floating = [i for i, x in enumerate(xs) if x.dtype.is_floating]
  with tf.GradientTape() as tape:
    tape.watch([xs[i] for i in floating])
    ys = _as_list(tf_fn(*xs))
    float_ys = [y for y in ys if y.dtype.is_floating]
    weights = [rand(*y.shape, seed=7 + i) for i, y in enumerate(float_ys)]
    loss = tf.add_n([tf.reduce_sum(y * w) for y, w in zip(float_ys, weights)] or [tf.constant(0.0)])
  grads = tape.gradient(loss, [xs[i] for i in floating], unconnected_gradients="zero")
  expected = [tf.convert_to_tensor(v).numpy() for v in ys + grads]

  def build(m):
    tensors = [mtf.import_tf_tensor(m, a, s) for a, s in inputs]
    outputs = _as_list(mtf_fn(*tensors))
    float_outputs = [y for y in outputs if y.dtype.is_floating]
    if not float_outputs or not floating:
      return outputs
    back = mtf.gradients(
      float_outputs,
      [tensors[i] for i in floating],
      grad_ys=[mtf.import_tf_tensor(m, w, y.shape) for w, y in zip(weights, float_outputs)],
    )
    zeros = [mtf.zeros_like(tensors[i]) for i in floating]
    return outputs + [z if g is None else g for g, z in zip(back, zeros)]

  cases = [(placement(layout, mesh), False) for layout in layouts]
  cases += [(placement(layouts[-1], mesh), True), (simd(layouts[-1], mesh), True)]
  for impl, in_function in cases:
    values = run(build, impl=impl, in_function=in_function)
    for i, (value, want) in enumerate(zip(values, expected)):
      what = f"{type(impl).__name__}, {impl.layout_rules}, result {i}"
      assert value.shape == want.shape, (what, value.shape, want.shape)
      np.testing.assert_allclose(value, want, rtol=rtol, atol=1e-6, err_msg=what)
