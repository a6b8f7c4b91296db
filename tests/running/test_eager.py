"""mtf.eager: operations run when they are made; the same function staged gives the same numbers."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf

BATCH, HIDDEN, OUT = (mtf.Dimension(n, s) for n, s in [("batch", 4), ("hidden", 8), ("out", 4)])
X = np.random.default_rng(0).normal(size=[4, 8]).astype(np.float32)


@pytest.fixture(params=["placement", "simd"])
def make_impl(request, cpu_devices):
  def make(shape="r:2,s:2", layout="batch:r,hidden:s"):
    cls = mtf.SimdMeshImpl if request.param == "simd" else mtf.PlacementMeshImpl
    return cls(shape, layout, cpu_devices[: mtf.convert_to_shape(shape).size])

  return make


@pytest.fixture
def mesh(make_impl):
  with mtf.eager(make_impl(), seed=5) as mesh:
    yield mesh


@pytest.fixture
def x(mesh):
  return mtf.import_tf_tensor(mesh, X, [BATCH, HIDDEN])


def train(x, steps=3):
  """Several kinds of operations, variables, noise, an update."""
  w = mtf.get_variable(x.mesh, "w", [HIDDEN, OUT])
  h = mtf.dropout(mtf.einsum([x, w], [BATCH, OUT]), is_training=True, rate=0.5)
  h = mtf.recompute_grad(lambda t: mtf.tanh(t) * t, [h])
  _, h = mtf.while_loop(
    lambda i, a: mtf.less(i, steps),
    lambda i, a: [i + 1, mtf.tanh(a * 2.0)],
    [mtf.constant(x.mesh, 0, dtype=tf.int32), h],
  )
  loss = mtf.reduce_mean(mtf.square(h))
  mtf.optimize.MomentumOptimizer(0.1, 0.9).minimize(loss)
  return loss, w, mtf.softmax(h, OUT)


def test_the_same_numbers_as_staged(make_impl):
  eager, staged = (
    mtf.function(make_impl(), [mtf.TensorSpec([BATCH, HIDDEN])])(train) for _ in range(2)
  )
  with mtf.eager(eager.mesh_impl) as mesh:
    x = mtf.import_tf_tensor(mesh, X, [BATCH, HIDDEN])
    for seed in range(3):
      for got, want in zip(eager(x, seed=seed), staged(X, seed=seed)):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-6)
  # The variables are those of the mesh, for what is staged afterwards.
  for got, want in zip(eager(X, seed=7), staged(X, seed=7)):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_a_plain_function_with_the_seed_of_the_session(make_impl):
  staged = mtf.function(make_impl(), [mtf.TensorSpec([BATCH, HIDDEN])])(train)
  with mtf.eager(make_impl(), seed=9) as mesh:
    got = train(mtf.import_tf_tensor(mesh, X, [BATCH, HIDDEN]))
    for g, want in zip(got, staged(X, seed=9)):
      np.testing.assert_allclose(g.numpy(), want, rtol=1e-4, atol=1e-6)
    again = mtf.random_uniform(mesh, [BATCH]), mtf.random_uniform(mesh, [BATCH])
    assert np.all(again[0].numpy() != again[1].numpy())


def test_graphs_made_inside_run_at_once(make_impl):
  with mtf.eager(make_impl()):
    mesh = mtf.Mesh(mtf.Graph(), "own")
    assert float(mtf.reduce_sum(mtf.import_tf_tensor(mesh, X, [BATCH, HIDDEN]))) == pytest.approx(
      X.sum(), rel=1e-4
    )


def test_looking_at_a_tensor(x):
  text = str(x)
  assert "[batch=4 over r:2, hidden=8 over s:2] float32" in text
  assert "processor 3 on CPU:3: batch 2:4, hidden 4:8" in text
  assert "0.12573" in text
  assert repr(x) == f"{x}" == "Tensor[import:0, Shape[batch=4, hidden=8], tf.float32]"
  total = mtf.reduce_sum(x)
  assert "whole on each of 4 processors" in str(total)
  assert repr(total).endswith(f"tf.float32] = {total.numpy()}")
  assert f"{total:.2f}" == f"{X.sum():.2f}"
  for s in (x * 2.0).slices:
    (b0, e0), (b1, e1) = s.where["batch"], s.where["hidden"]
    np.testing.assert_array_equal(s.value, 2 * X[b0:e0, b1:e1])
    assert s.value.device.endswith(s.device)
  np.testing.assert_array_equal(np.asarray(x), X)
  np.testing.assert_array_equal(tf.square(x), X * X)


def test_indexing_by_names(x):
  np.testing.assert_array_equal(x["batch", 1].numpy(), X[1])
  np.testing.assert_array_equal(x[{HIDDEN: -1}].numpy(), X[:, -1])
  assert x[{"batch": 1, "hidden": 2}].item() == X[1, 2]
  whole = mtf.rename_dimension(x, "hidden", "whole")
  np.testing.assert_array_equal(whole["whole", 2:5].numpy(), X[:, 2:5])
  rows = mtf.import_tf_tensor(x.mesh, [2, 0], [mtf.Dimension("rows", 2)])
  np.testing.assert_array_equal(x["batch", rows].numpy(), X[[2, 0]])


def test_comparing(x):
  np.testing.assert_array_equal((x > 0.0).numpy(), X > 0)
  np.testing.assert_array_equal((x <= x * 2.0).numpy(), X <= 2 * X)
  assert mtf.reduce_max(x) > 1.0
  assert not mtf.reduce_max(x) < 1.0
  assert x == x and x in {x}  # By identity, as everywhere.


@pytest.mark.parametrize(
  "wrong, error, text",
  [
    (lambda x: bool(x), mtf.ArgumentError, "only a tensor of one element"),
    (lambda x: x[0], mtf.ArgumentError, "indexed by names"),
    (lambda x: x["length", 0], mtf.DimensionError, "no dimension 'length'"),
    (lambda x: x["batch", 4], mtf.ArgumentError, "4 is no position along batch=4"),
    (lambda x: x["batch", 1.5], mtf.ArgumentError, "got 1.5"),
    (lambda x: x["batch", ::2], mtf.ArgumentError, "step 1"),
    (lambda x: x["batch", 0:2], mtf.LayoutError, "batch"),
    (lambda x: mtf.zeros(x.mesh, [mtf.Dimension("batch", 3)]), mtf.LayoutError, "batch:3"),
    (lambda x: mtf.constant(x.mesh, 1, dtype=tf.int32) // 0, mtf.DivisionError, ""),
  ],
)
def test_wrong_uses(wrong, error, text, x):
  before = len(x.graph.operations)
  with pytest.raises(error, match=text):
    wrong(x)
  assert len(x.graph.operations) <= before + 3
  np.testing.assert_array_equal((x + 1.0).numpy(), X + 1)  # The session goes on.


def test_where_it_does_not_work(make_impl, x):
  @tf.function
  def inside():
    with mtf.eager(make_impl()):
      pass

  with pytest.raises(mtf.GraphError, match="mtf.eager inside a tf.function"):
    inside()

  @tf.function
  def operation():
    return (x + 1.0).value

  with pytest.raises(mtf.GraphError, match="inside a tf.function"):
    operation()
  with pytest.raises(mtf.ArgumentError):
    mtf.eager("mesh").__enter__()
  with pytest.raises(mtf.MeshError):
    mtf.eager(make_impl(), seed="7").__enter__()


def test_variables(mesh, x):
  def read():
    return mtf.get_variable(mesh, "v", [HIDDEN], initializer=mtf.initializers.Constant(1.0))

  first = read()
  (gradient,) = mtf.gradients([mtf.reduce_sum(x * first)], [first])
  np.testing.assert_allclose(gradient.numpy(), X.sum(0), rtol=1e-5)
  mtf.assign_sub(first, gradient * 0.5)
  assert first.numpy()[0] == 1.0  # A tensor keeps its value.
  np.testing.assert_allclose(read().numpy(), 1 - X.sum(0) / 2, rtol=1e-5)
  np.testing.assert_array_equal(mtf.read_variable(first.operation).numpy(), read().numpy())
  assert len(mesh.graph.trainable_variables) == 1


def test_adaptive_optimizers_and_joined_assignments(mesh, x):
  class Own(mtf.optimize.Optimizer):
    def apply_grad(self, grad, var):
      return [mtf.assign_add(var, mtf.ones_like(var.value))]

  v = mtf.get_variable(mesh, "v", [HIDDEN], initializer=mtf.initializers.Zeros())
  Own().minimize(mtf.reduce_sum(x * v))
  np.testing.assert_array_equal(mtf.get_variable(mesh, "v", [HIDDEN]).numpy(), np.ones(8))


def test_staged_functions_inside_stay_staged(make_impl, mesh):
  calls = []

  @mtf.function(make_impl(), [mtf.TensorSpec([BATCH, HIDDEN])])
  def f(x):
    calls.append(type(x))
    return x * 2.0

  np.testing.assert_array_equal(f(X), 2 * X)
  f(X)
  assert set(calls) == {mtf.Tensor} and not mesh.graph.operations


def test_a_long_session_does_not_grow(mesh, x):
  graph, state = mesh.graph, x
  w = mtf.get_variable(mesh, "w", [HIDDEN])
  sizes = []
  for i in range(900):
    state = (mtf.tanh(state) + w).detach()
    if i % 100 == 99:
      mtf.assign(mtf.get_variable(mesh, "w", [HIDDEN]), mtf.reduce_mean(state, reduced_dim=BATCH))
      sizes.append(len(graph.operations))
  assert max(sizes) < 1300
  names = len(graph._counts)
  graph.forget()
  assert len(graph.operations) < 20
  state = mtf.tanh(state)
  assert len(graph._counts) == names
  (y,) = mtf.gradients([mtf.reduce_sum(state * x)], [x])  # What is held has its past.
  np.testing.assert_allclose(y.numpy(), state.numpy(), rtol=1e-5)


def test_values_go_with_their_tensors(mesh, x):
  big = mtf.zeros(mesh, [BATCH, mtf.Dimension("big", 2**16)])
  held = big + 1.0
  del big
  mesh.graph.forget()
  (slices,) = [s for t, s in mesh.graph._eager.tensors.items() if t is held]
  assert len(mesh.graph._eager.tensors) == 3  # x, held, and what that was made of.
  del held, slices
  mesh.graph.forget()
  gc.collect()
  assert set(mesh.graph._eager.tensors) == {x}
