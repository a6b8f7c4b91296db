"""Pieces: operations that are lowered once for all like them, and figures computed from a few."""

from __future__ import annotations

import functools
import itertools

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.planning.evaluation import Evaluator
from mesh_tensorflow.planning.lowering import PendingSum, Prober
from mesh_tensorflow.planning.pieces import Examples, Pieces, kind_of
from mesh_tensorflow.program.graph import reads
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
  found = {n: pieces.piece(pieces.kind(op), split, (n,), (None,)) for n in (2, 4, 8, 16)}
  assert found == {n: Prober().piece(op, (n,), split, (None,)) for n in found}
  # By 2, by 4, and by 8, which checks; by 16 only if that does not hold.
  assert pieces.prober.lowered == lowered


def elementwise(shape):
  """An elementwise operation of each class on tensors of a shape, with what it reads."""
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x, y = (mtf.import_tf_tensor(mesh, tf.zeros(shape.to_integer_list), shape) for _ in range(2))
  made = [
    mtf.add(x, y),
    x / y,
    mtf.maximum(x, y),
    x * 2.0,
    x + 2.0,
    mtf.sin(x),
    mtf.cast(x, tf.int32),
  ]
  return [t.operation for t in made]


def test_what_does_the_same_on_slices_of_other_sizes_and_names_follows_from_them():
  shapes = [mtf.Shape([A, mtf.Dimension(name, n)]) for name, n in [("b", 64), ("c", 24), ("d", 40)]]
  pieces = Pieces()
  lowered = []
  for shape in shapes:
    for op in elementwise(shape):
      kind = pieces.kind(op)
      for layout, sizes in ((), (4,)), ((("a", 0),), (4,)), ((("a", 1),), (8, 2)):
        states = (None,) * len(op.inputs)
        found = pieces.piece(kind, layout, sizes, states)
        assert found == Prober().piece(op, sizes, layout, states)
    lowered.append(pieces.prober.lowered)
  # Of the first shape two are lowered, and a third that checks them; of each other one the whole.
  count = len(elementwise(shapes[0]))
  assert lowered == [3 * count, 4 * count, 5 * count]


def test_what_sums_over_the_mesh_follows_from_others_too():
  pieces = Pieces()
  for name, size in [("b", 128), ("c", 512)]:
    mesh = mtf.Mesh(mtf.Graph(), "m")
    w = mtf.get_variable(mesh, "w", [A, mtf.Dimension(name, size)])
    adafactor = mtf.optimize.AdafactorOptimizer(min_dim_size_to_factor=8)
    op = adafactor.apply_grads([w + 1.0], [w.operation])[-1]
    states = (None,) * len(reads(op))
    for sizes in itertools.permutations((2, 4, 8, 16), 2):
      for layout in ((("a", 0),), ((name, 1),), (("a", 0), (name, 1)), (("a", 1), (name, 0))):
        found = pieces.piece(pieces.kind(op), layout, sizes, states)
        assert any(cost.collectives for cost in found.costs)
        assert found == Prober().piece(op, sizes, layout, states), (layout, sizes)
  assert pieces.prober.lowered < 30, pieces.prober.lowered  # Of 40.


def test_examples_tell_what_is_linear_in_amounts_and_nothing_else():
  examples = Examples()
  assert examples.add([1, 10, 100], [3, 250]) and examples.add([1, 20, 100], [3, 260])
  assert examples.at([1, 30, 200]) is None  # Not a combination of them.
  assert examples.at([1, 30, 100]) is None  # Nothing has shown that it holds.
  assert examples.at([1, 20, 100]) == [3, 260]
  assert examples.add([1, 40, 100], [3, 280])
  assert examples.at([1, 30, 100]) == [3, 270]
  assert not examples.add([1, 50, 100], [3, 289])


@pytest.mark.parametrize("pending", [(None, True), (True, None), (True, True)])
def test_pending_sums_pass_through_them_as_alone(pending):
  shapes = [mtf.Shape([A, B]), mtf.Shape([mtf.Dimension("c", 6), A])]
  pieces = Pieces()
  for shape in shapes:
    for op in elementwise(shape):
      for axis in (0, 1):
        states = tuple(PendingSum((axis,)) if p else None for p in pending[: len(op.inputs)])
        layout = (("a", 1 - axis),)
        found = pieces.piece(pieces.kind(op), layout, (4, 4), states)
        assert found == Prober().piece(op, (4, 4), layout, states)


def test_sums_that_an_operation_executes_are_added_to_its_piece_without_sums():
  x = tensor()
  w = mtf.get_variable(x.mesh, "w", [B, A])
  loss = mtf.reduce_sum(mtf.square(mtf.einsum([x, w], [A])))
  (gradient,) = mtf.gradients([loss], [w])
  update = mtf.assign(w.operation, gradient)
  adafactor = mtf.optimize.AdafactorOptimizer(min_dim_size_to_factor=8)
  by_adafactor = adafactor.apply_grads([gradient], [w.operation])[-1]
  reduced = mtf.reduce_max(x, output_shape=[A]).operation
  flags = mtf.logical_not(mtf.greater(x, 0.0)).operation
  for op in (update, by_adafactor, reduced, flags, w.operation):
    pieces = Pieces()
    kind, read = pieces.kind(op), reads(op)
    for layout in ((), (("a", 0),), (("b", 0),), (("a", 0), ("b", 2))):
      for i in range(len(read)):
        states = tuple(PendingSum((1,)) if j == i else None for j in range(len(read)))
        found = pieces.piece(kind, layout, (4, 2, 8), states)
        assert found == Prober().piece(op, (4, 2, 8), layout, states), (op, layout, i)
    if op is by_adafactor:  # Of each tensor that it reads one sum alone, and one more that checks.
      assert pieces.prober.lowered < 4 * len(read)


def test_functions_that_look_at_their_shape_do_not_share():
  def by_size(t):
    return t * 2.0 if t.shape.num_elements() > 100 else t * 2.0 * 2.0

  pieces = Pieces()
  for n in (64, 1024, 96):
    dim = mtf.Dimension("a", n)
    x = mtf.import_tf_tensor(mtf.Mesh(mtf.Graph(), "m"), tf.zeros([n]), [dim])
    op = mtf.cwise(by_size, [x]).operation
    for layout in (), (("a", 0),):
      found = pieces.piece(pieces.kind(op), layout, (2,), (None,))
      assert found == Prober().piece(op, (2,), layout, (None,))


def test_imported_layers_that_are_alike_are_of_the_same_kinds():
  def kinds(count):
    def layers(x, w):
      for _ in range(count):
        x = tf.nn.elu(tf.clip_by_value(tf.matmul(x, w), -1.0, 1.0))
      return x

    specs = [tf.TensorSpec([64, 64]), tf.TensorSpec([64, 64])]
    imported = mtf.from_tensorflow(layers, specs, dims={"x": ["a", "b"], "w": ["b", "b2"]})
    x = tensor()
    w = mtf.import_tf_tensor(x.mesh, tf.zeros([64, 64]), [B, mtf.Dimension("b2", 64)])
    result = imported(x, w)
    return set(Evaluator(x.graph, [result]).kinds)

  assert len(kinds(4)) == len(kinds(3))
