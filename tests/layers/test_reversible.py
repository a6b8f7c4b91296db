"""Reversible layers: gradients equal to plain ones, without the activations between layers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.errors import ArgumentError, ShapeError
from mesh_tensorflow.operations.custom_gradient import CustomGradientOperation
from mesh_tensorflow.operations.random import RandomOperation
from tests.kinds import kept

B, D = mtf.Dimension("b", 4), mtf.Dimension("d", 4)
LAYERS = 4
RNG = np.random.default_rng(0)
X, OUTSIDE = RNG.normal(size=[4, 4]).astype("f"), RNG.normal(size=[4]).astype("f")
WEIGHTS = RNG.normal(size=[LAYERS, 4, 4]).astype("f")


def make_impl(layout="", store=None):
  return mtf.placement_mesh_impl.PlacementMeshImpl(
    "r:2,s:2", layout, [""] * 4, variable_store=store
  )


def weight(mesh, i):
  return mtf.get_variable(
    mesh, f"w_{i}", [mtf.Dimension("_d", 4), D], initializer=mtf.initializers.Constant(WEIGHTS[i])
  )


def layer(i, outside, dropout=0.0):
  """A layer with a variable, a tensor from outside and, if asked for, dropout."""

  def f(x):
    y = mtf.einsum([mtf.rename_dimension(x, "d", "_d"), weight(x.mesh, i)], output_shape=[B, D])
    y = mtf.tanh(y) + x * outside
    return mtf.dropout(y, True, rate=dropout) if dropout else y

  return f


def chain(x, fs, recompute):
  streams = (x, None, x, None)
  for f in fs:
    streams = layers.reversible_half_residual_and_swap(*streams, f, recompute_grads=recompute)
  return streams


def program(loss_of, recompute, dropout=0.0):
  """Graph, and the gradients of a loss with respect to x, to the outside tensor and the weights."""
  graph = mtf.Graph()
  graph.random_seed = 3
  mesh = mtf.Mesh(graph, "m")
  x, outside = mtf.import_tf_tensor(mesh, X, [B, D]), mtf.import_tf_tensor(mesh, OUTSIDE, [D])
  y1, _, y2, _ = chain(x, [layer(i, outside, dropout) for i in range(LAYERS)], recompute)
  loss = mtf.reduce_sum(loss_of(y1, y2))
  weights = [v.value for v in graph.trainable_variables]
  return mesh, mtf.gradients([loss], [x, outside, *weights])


def values(mesh, tensors, impl):
  lowering = mtf.Lowering(mesh.graph, {mesh: impl})
  return [lowering.export_to_tf_tensor(t) for t in tensors]


LOSSES = {
  "both": lambda y1, y2: mtf.square(y1) + mtf.sin(y2),
  "first": lambda y1, y2: mtf.square(y1),
  "second": lambda y1, y2: mtf.sin(y2),
}


def test_the_function_may_use_the_other_stream_itself():
  found = []
  for recompute in (False, True):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    x1, x2 = (mtf.import_tf_tensor(mesh, v, [B, D]) for v in (X, np.cos(X)))
    y1, _, y2, _ = layers.reversible_half_residual_and_swap(
      x1, None, x2, None, lambda x, x1=x1: mtf.sin(x) * x1, recompute_grads=recompute
    )
    grads = mtf.gradients([mtf.reduce_sum(mtf.square(y1) + mtf.sin(y2))], [x1, x2])
    found.append(values(mesh, grads, make_impl("b:r")))
  (plain_1, plain_2), (again_1, again_2) = found
  np.testing.assert_allclose(again_1, plain_1, rtol=1e-5)
  np.testing.assert_allclose(again_2, plain_2, rtol=1e-5)


WAYS = list(itertools.product(LOSSES, [0.0, 0.3], [False, True]))


@pytest.mark.parametrize(
  ("loss", "dropout", "in_function"), kept(WAYS, [WAYS[i] for i in (3, 4, 10)])
)
def test_gradients_equal_those_without_recomputation(loss, dropout, in_function):
  found = []
  for recompute in (False, True):

    def run(recompute=recompute):
      mesh, gradients = program(LOSSES[loss], recompute, dropout)
      # The last layer's f does not matter for its first output.
      gradients = gradients[: -1 if loss == "first" else None]
      return values(mesh, gradients, make_impl("b:r,d:s"))

    found.append((tf.function(run, autograph=False) if in_function else run)())
  for plain, recomputed in zip(*found):
    assert np.abs(plain).max() > 0.01
    np.testing.assert_allclose(recomputed, plain, rtol=2e-5, atol=1e-5)


def test_gradients_equal_those_of_tensorflow():
  x, outside, weights = tf.constant(X), tf.constant(OUTSIDE), tf.unstack(tf.constant(WEIGHTS))
  with tf.GradientTape() as tape:
    tape.watch([x, outside, *weights])
    y1 = y2 = x
    for w in weights:
      y1, y2 = y2, y1 + tf.tanh(y2 @ w) + y2 * outside
    loss = tf.reduce_sum(y1**2 + tf.sin(y2))
  expected = tape.gradient(loss, [x, outside, *weights])
  mesh, gradients = program(LOSSES["both"], recompute=True)
  for got, want in zip(values(mesh, gradients, make_impl()), expected):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


def test_backward_reads_no_activation_between_the_layers():
  """Of what was computed forwards it reads the last outputs, weights, masks and what is outside."""

  def forward_tensors_read(recompute):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    x, outside = mtf.import_tf_tensor(mesh, X, [B, D]), mtf.import_tf_tensor(mesh, OUTSIDE, [D])
    fs = [layer(i, outside, dropout=0.5) for i in range(LAYERS)]
    (y1, _, y2, _), forward = graph.capture_operations(lambda: chain(x, fs, recompute))
    cotangent = mtf.ones(mesh, [B, D])
    xs = [x, outside, *(v.value for v in graph.trainable_variables)]
    _, backward = graph.capture_operations(
      lambda: mtf.gradients([y1, y2], xs, [cotangent, cotangent * 2.0])
    )
    free = [op for op in forward if isinstance(op, (mtf.Variable, RandomOperation))]
    made = {t for op in forward if op not in free for t in op.outputs}
    read = {t for op in backward for t in op.inputs if t in made}
    # The wrapper's outputs are the tensors that it was given, under other names.
    wrappers = [op for op in forward if isinstance(op, CustomGradientOperation)]
    return read, set(wrappers[-1].outputs + wrappers[-1].inputs[-4:]) if wrappers else {y1, y2}

  read, last = forward_tensors_read(recompute=True)
  assert read and read <= last
  read, last = forward_tensors_read(recompute=False)
  assert len(read - last) >= 2 * LAYERS - 2


def test_memory_does_not_grow_with_the_number_of_layers():
  def activations(number, recompute):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    x = mtf.import_tf_tensor(mesh, X, [B, D])
    fs = [lambda t: mtf.sin(mtf.tanh(t))] * number
    y1, _, y2, _ = chain(x, fs, recompute)
    (dx,) = mtf.gradients([mtf.reduce_sum(mtf.square(y1) * y2)], [x])
    return mtf.describe(mesh.graph, "", "all:1", results=[dx]).memory.activations

  def growth(recompute):
    return (activations(13, recompute) - activations(3, recompute)) / X.nbytes / 10

  assert growth(recompute=True) == 0.0
  assert growth(recompute=False) >= 1.0  # Of tanh; the gradient of sin needs no output.


def test_recomputation_waits_for_the_gradient_of_the_layer_above():
  """Otherwise all activations could be computed again before the first gradient."""
  mesh, _ = program(LOSSES["both"], recompute=True)
  after = [op for op in mesh.graph.operations if type(op).__name__ == "AfterOperation"]
  assert len(after) == LAYERS
  assert all("/gradients/" in op.inputs[1].name for op in after)


def test_an_output_in_between_may_be_used():
  found = []
  for recompute in (False, True):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    x, outside = mtf.import_tf_tensor(mesh, X, [B, D]), mtf.import_tf_tensor(mesh, OUTSIDE, [D])
    streams = chain(x, [layer(0, outside), layer(1, outside)], recompute)
    between = mtf.reduce_sum(mtf.sin(streams[2]) * streams[0])
    for i in (2, 3):
      streams = layers.reversible_half_residual_and_swap(
        *streams, layer(i, outside), recompute_grads=recompute
      )
    loss = mtf.reduce_sum(mtf.square(streams[2])) + between
    found.append(values(mesh, mtf.gradients([loss], [x, outside]), make_impl("d:r")))
  for plain, recomputed in zip(*found):
    np.testing.assert_allclose(recomputed, plain, rtol=2e-5, atol=1e-5)


def test_inside_a_recomputation():
  found = []
  for recompute in (False, True):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    x, outside = mtf.import_tf_tensor(mesh, X, [B, D]), mtf.import_tf_tensor(mesh, OUTSIDE, [D])

    def stack(t, recompute=recompute, outside=outside):
      y1, _, y2, _ = chain(t, [layer(i, outside) for i in range(3)], recompute)
      return mtf.square(y1) + y2

    y = mtf.recompute_grad(stack, [x]) if recompute else stack(x)
    weights = [v.value for v in mesh.graph.trainable_variables]
    gradients = mtf.gradients([mtf.reduce_sum(y)], [x, outside, *weights])
    found.append(values(mesh, gradients, make_impl()))
  for plain, recomputed in zip(*found):
    np.testing.assert_allclose(recomputed, plain, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
  "f, expected", [(lambda t: t, [3.0, 5.0]), (lambda t: mtf.ones_like(t), [1.0, 2.0])]
)
def test_functions_without_operations_of_their_own(f, expected):
  """Of (a, b), f(t) = t makes (a + b, a + 2 b); f(t) = 1 makes (a + 1, b + 1)."""
  mesh = mtf.Mesh(mtf.Graph(), "m")
  a, b = (mtf.import_tf_tensor(mesh, X, [B, D]) for _ in range(2))
  streams = (a, None, b, None)
  for _ in range(2):
    streams = layers.reversible_half_residual_and_swap(*streams, f)
  loss = mtf.reduce_sum(streams[0] + streams[2] * 2.0)
  for got, number in zip(values(mesh, mtf.gradients([loss], [a, b]), make_impl()), expected):
    np.testing.assert_allclose(got, np.full([4, 4], number))


def test_result_is_four_tensors_and_none_passes_through_without_recomputation():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.import_tf_tensor(mesh, X, [B, D])
  f = layer(0, mtf.import_tf_tensor(mesh, OUTSIDE, [D]))
  y1, y1_backwards, y2, y2_backwards = layers.reversible_half_residual_and_swap(
    x, None, x, None, f, recompute_grads=False
  )
  assert (y1, y1_backwards, y2_backwards) == (x, None, None)
  assert y2.shape == x.shape
  outputs = layers.reversible_half_residual_and_swap(x, None, x, None, f)
  assert len(outputs) == 4 and all(isinstance(t, mtf.Tensor) for t in outputs)


@pytest.mark.parametrize("recompute", [True, False])
def test_errors(recompute):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x, short = mtf.import_tf_tensor(mesh, X, [B, D]), mtf.import_tf_tensor(mesh, OUTSIDE, [D])

  def half(x1, x2, f):
    return layers.reversible_half_residual_and_swap(x1, None, x2, None, f, recompute)

  with pytest.raises(
    ArgumentError, match=r"f must return a Tensor of the shape of .*b=4.*got 1\.0"
  ):
    half(x, x, lambda t: 1.0)
  with pytest.raises(ShapeError, match=r"x1, x2 and f\(x2\) must have one shape.*b=4, d=4.*d=4"):
    half(x, x, lambda t: mtf.reduce_sum(t, reduced_dim=B))
  with pytest.raises(ShapeError, match="one shape and dtype"):
    half(x, short, lambda t: t)
  with pytest.raises(ShapeError, match="bfloat16"):
    half(x, x, lambda t: mtf.cast(t, tf.bfloat16))
