"""Halo reduction is an adjoint; which way rows are exchanged; what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance.framework import Layout, make_impl

A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 6)


def _function(layout, mesh, shapes, fn, dtypes=None):
  devices = [d.name for d in tf.config.list_logical_devices("CPU")]
  impl = make_impl("simd", Layout(mesh, layout), devices)
  dtypes = dtypes or [tf.float32] * len(shapes)
  return mtf.function(impl, [mtf.TensorSpec(s, d) for s, d in zip(shapes, dtypes)])(fn)


@pytest.mark.parametrize("halo, wrap", [(1, True), (2, False), (5, True), (5, False)])
def test_halo_reduce_is_the_adjoint_of_halo_exchange(halo, wrap):
  wide = mtf.Dimension("b", 2 + 2 * halo)
  narrow = mtf.Dimension("b", 2)

  def both(x, y):
    exchanged = mtf.halo_exchange(x, A, narrow, halo, wrap)
    reduced = mtf.halo_reduce(y, A, wide, halo, wrap)
    return mtf.reduce_sum(exchanged * y), mtf.reduce_sum(x * reduced)

  rng = np.random.default_rng(0)
  x, y = (rng.normal(size=[4, d.size]).astype(np.float32) for d in (narrow, wide))
  left, right = _function("a:r", "r:4", [[A, narrow], [A, wide]], both)(x, y)
  assert abs(left) > 0.01
  np.testing.assert_allclose(left, right, rtol=1e-4)


@pytest.mark.parametrize("rows, updates, moved", [(4096, 8, "values"), (8, 4096, "table")])
def test_what_is_fewer_bytes_travels(rows, updates, moved):
  table, items, d = mtf.Dimension("t", rows), mtf.Dimension("n", updates), mtf.Dimension("d", 4)

  def scatter(x, i):
    y = mtf.scatter_add(x, i, table)
    return y, mtf.gather_split(y, i, table)

  program = _function("t:r,n:r", "r:4", [[items, d], [items]], scatter, [tf.float32, tf.int32])
  rng = np.random.default_rng(0)
  x, i = rng.normal(size=[updates, 4]).astype(np.float32), rng.integers(0, rows, updates)
  y, read = program(x, i.astype(np.int32))
  want = np.zeros([rows, 4])
  np.add.at(want, i, x)
  np.testing.assert_allclose(y, want, atol=1e-4)
  np.testing.assert_allclose(read, want[i], atol=1e-4)
  # Of the table of 16 bytes a row each of 4 processors sends its block to 3 others, twice: for the
  # sums and to read. The values, of 16 bytes and an index: to add up; to read, indices there and
  # values back.
  by_table, by_values = 2 * rows // 4 * 16 * 3, 2 * updates // 4 * (16 + 4) * 3
  found = mtf.describe(program).bytes_moved()["r"]
  assert found == (by_values if moved == "values" else by_table) == min(by_table, by_values)


def test_a_sort_moves_a_split_dimension_to_another():
  # [a, b] with b split: by a, which is free, there and back; and without a, all of it.
  n, m = mtf.Dimension("n", 16), mtf.Dimension("m", 64)
  two = _function("n:r", "r:4", [[m, n]], lambda x: mtf.sort(x, n))
  assert mtf.describe(two).bytes_moved()["r"] == 2 * (64 * 16 // 4 * 4 // 4 * 3)
  one = _function("n:r", "r:4", [[n]], lambda x: mtf.argsort(x, n))
  assert mtf.describe(one).bytes_moved()["r"] == 16 // 4 * 4 * 3


def test_gradients_of_complex_tensors_are_those_of_tensorflow():
  def loss(z, abs_fn, real_fn, exp_fn, sum_fn):
    return sum_fn(abs_fn(exp_fn(z * (1 + 2j)) / (z + 3.0)) * real_fn(z * z))

  def gradient(z):
    y = loss(z, mtf.abs, mtf.real, mtf.exp, mtf.reduce_sum)
    return y, *mtf.gradients([y], [z])

  rng = np.random.default_rng(0)
  z = (rng.normal(size=[4, 6]) + 1j * rng.normal(size=[4, 6])).astype(np.complex64)
  y, dz = _function("a:r,b:s", "r:2,s:2", [[A, B]], gradient, [tf.complex64])(z)
  x = tf.constant(z)
  with tf.GradientTape() as tape:
    tape.watch(x)
    want = loss(x, tf.abs, tf.math.real, tf.exp, tf.reduce_sum)
  np.testing.assert_allclose(y, want, rtol=1e-5)
  np.testing.assert_allclose(dz, tape.gradient(want, x), rtol=1e-4, atol=1e-4)


def test_what_is_refused():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x, i = mtf.zeros(mesh, [A, B]), mtf.zeros(mesh, [A], tf.int32)
  square = mtf.zeros(mesh, [("m", 3), ("n", 3), A])
  m, n = square.shape[0], square.shape[1]
  for error, text, call in [
    (mtf.ShapeError, "larger than two halos", lambda: mtf.halo_reduce(x, A, B, 3)),
    (mtf.DimensionError, "no dimension b=6", lambda: mtf.halo_reduce(i, A, B, 0)),
    (mtf.ShapeError, "which only the result shall have", lambda: mtf.scatter_add(x, i, B)),
    (mtf.ShapeError, "have the dimension a=4 that is indexed", lambda: mtf.scatter_add(x, i, A)),
    (mtf.ShapeError, "must have the new dimension c=3, all of",
     lambda: mtf.scatter_add(x, i, ("c", 3), [("c", 3), A])),
    (mtf.DTypeError, "integer", lambda: mtf.segment_sum(x, x, ("c", 3))),
    (mtf.DimensionError, "no dimension", lambda: mtf.sort(x, ("c", 3))),
    (mtf.ShapeError, "must have one size", lambda: mtf.cholesky(x, A, B)),
    (mtf.DimensionError, "are one dimension", lambda: mtf.cholesky(square, m, m)),
    (mtf.ShapeError, "rename it", lambda: mtf.solve(square, square, m, n)),
    (mtf.DTypeError, "different dtypes", lambda: mtf.solve(
      square, mtf.zeros(mesh, [m], tf.complex64), m, n)),
    (mtf.DTypeError, "must be float32", lambda: mtf.cholesky(
      mtf.to_bfloat16(square), m, n)),
    (mtf.DTypeError, "must be float32 or float64", lambda: mtf.complex(mtf.to_bfloat16(x))),
    (mtf.ShapeError, "has not the shape", lambda: mtf.complex(x, square)),
  ]:  # fmt: skip
    with pytest.raises(error, match=text):
      call()


def test_a_complex_variable_is_trained_by_a_step_against_its_gradient():
  target = np.complex64([1 + 1j, -2j, 3, 0.5 - 1j])

  def step(optimizer):
    def fn(x):
      start = tf.zeros_initializer()
      w = mtf.get_variable(x.mesh, "w", x.shape, dtype=tf.complex64, initializer=start)
      loss = mtf.reduce_sum(mtf.square(mtf.abs(w - x)))
      optimizer.minimize(loss)
      return loss

    return _function("a:r", "r:2", [[A]], fn, [tf.complex64])

  train = step(mtf.optimize.SgdOptimizer(0.25))
  losses = [float(train(target)) for _ in range(3)]
  # The gradient is 2 (w - x): each step halves the distance.
  np.testing.assert_allclose(losses, np.sum(np.abs(target) ** 2) * 0.25 ** np.arange(3), rtol=1e-5)
  with pytest.raises(mtf.DTypeError, match="AdamWeightDecayOptimizer: .* of variable w is complex"):
    step(mtf.optimize.AdamWeightDecayOptimizer(0.1))(target)
