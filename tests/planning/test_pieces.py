"""Pieces: operations that are lowered once for all like them, and figures computed from a few."""

from __future__ import annotations

import functools

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.planning.evaluation import Evaluator
from mesh_tensorflow.planning.lowering import Prober
from mesh_tensorflow.planning.pieces import Pieces, kind_of
from tests.planning.test_auto_layout import MACHINE, check_against_whole

A, B = mtf.Dimension("a", 64), mtf.Dimension("b", 64)


def tensor():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  return mtf.import_tf_tensor(mesh, tf.zeros([64, 64]), [A, B])


def layers(count):
  """Layers with dropout, whose gradients are added up, and a loss."""
  x = tensor()
  weights = []
  for i in range(count):
    with mtf.variable_scope(f"layer{i}"):
      weights.append(mtf.get_variable(x.mesh, "w", [B, mtf.Dimension("c", 64)]))
      inside = mtf.relu(mtf.einsum([x, weights[-1]], [A, mtf.Dimension("c", 64)]))
      x += mtf.dropout(mtf.reshape(inside, [A, B]), True, 0.9)
  loss = mtf.reduce_mean(mtf.square(x))
  return x.graph, [loss, *mtf.gradients([loss], weights)]


def test_what_a_layer_more_has_is_alike_to_what_the_others_have():
  def kinds(count):
    graph, results = layers(count)
    chains = Evaluator(graph, results)
    return {type(k.operation).__name__ for k in chains.kinds}, len(set(chains.kinds))

  assert kinds(5) == kinds(3)


def test_functions_are_alike_if_all_that_they_use_is():
  def made(factor, fn=tf.abs, **more):
    def own(t, *, offset=0.0):
      return fn(t) * factor + offset

    return functools.partial(own, **more) if more else own

  def keyword(offset):
    return eval("lambda t, *, o=offset: t + o", {"offset": offset})  # The code is the same.

  def kind(fn):
    return kind_of(mtf.cwise(fn, [tensor()]).operation)

  # `tf.random.uniform` is a function in functions, deeper than is looked into.
  assert kind(made(2.0, tf.random.uniform)) == kind(made(2.0, tf.random.uniform))
  assert kind(made(2.0)) != kind(made(3.0))
  assert kind(made(2.0)) != kind(made(2.0, tf.square))
  assert kind(made(2.0, offset=1.0)) != kind(made(2.0, offset=2.0))
  code = keyword(1.0)
  other = type(code)(code.__code__, {})
  other.__kwdefaults__ = {"o": 2.0}
  assert kind(code) != kind(other)


def random_numbers(x, loops):
  """Two draws, in as many loops."""
  if not loops:
    return mtf.dropout(mtf.dropout(x, True, 0.5) + 1.0, True, 0.9)

  def body(i, y):
    return [i + 1, random_numbers(y, loops - 1)]

  start = [mtf.constant(x.mesh, 0, dtype=tf.int32), x]
  return mtf.while_loop(lambda i, _: mtf.less(i, 3), body, start, maximum_iterations=3)[1]


@pytest.mark.parametrize("loops", [0, 1, 2])
def test_random_numbers_cost_what_a_whole_lowering_says(loops):
  x = tensor()
  results = [mtf.reduce_sum(random_numbers(x, loops))]
  told = {"mesh_shape": "r:2", "machine": MACHINE, "results": results}
  found = mtf.auto_layout(x.graph, **told)
  for choice in (found, *found.alternatives):
    check_against_whole(choice, x.graph, MACHINE, results)


@pytest.mark.parametrize(
  ("fn", "lowered"),
  [
    (lambda t: tf.exp(t) + 1.0, 3),  # In proportion to the slice.
    (lambda t: tf.reduce_sum(t[:, None] * t[None], 1), 4),  # To its square.
    (lambda t: t * 2.0 if t.shape[0] > 8 else t * 2.0 * 2.0, 4),  # Small ones otherwise.
  ],
)
def test_figures_for_other_sizes_are_computed_where_they_follow(fn, lowered):
  x = mtf.import_tf_tensor(mtf.Mesh(mtf.Graph(), "m"), tf.zeros([64]), [A])
  op = mtf.slicewise(fn, [x], splittable_dims=[A]).operation
  pieces, split = Pieces(), (("a", 0),)
  found = {n: pieces.piece(pieces.kind(op), split, (n,), (None,)) for n in (2, 8, 16)}
  assert found == {n: Prober().piece(op, (n,), split, (None,)) for n in found}
  # Whole, by 2, and by 8, which checks; by 16 only if that does not hold.
  assert pieces.prober.lowered == lowered
