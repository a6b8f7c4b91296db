"""Concat, split, stack, unstack, slice and pad."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.operations.comparing import check, placement, rand, run

A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 6)
LAYOUTS = ["", "a:r", "a:c"]
X = (rand(4, 6), [A, B])


def test_concat():
  other = (rand(4, 2, seed=1), [A, ("b", 2)])
  check(
    lambda x, y: mtf.concat([x, y, x], "b"),
    lambda x, y: tf.concat([x, y, x], 1),
    [X, other],
    LAYOUTS,
  )


def test_split_in_equal_parts():
  check(lambda x: mtf.split(x, B, 3), lambda x: tf.split(x, 3, 1), [X], LAYOUTS)


@pytest.mark.parametrize("kind", [list, tuple])
def test_split_by_sizes(kind):
  check(
    lambda x: mtf.split(x, B, kind([1, 2, 3])), lambda x: tf.split(x, [1, 2, 3], 1), [X], LAYOUTS
  )


@pytest.mark.parametrize("used", [[0], [1], [2], [0, 2]])
def test_gradient_of_unused_parts_is_zero(used):
  def pick(parts):
    return [parts[i] for i in used]

  check(
    lambda x: pick(mtf.split(x, B, [1, 2, 3])),
    lambda x: pick(tf.split(x, [1, 2, 3], 1)),
    [X],
    ["", "a:r"],
  )
  check(lambda x: pick(mtf.unstack(x, B)), lambda x: pick(tf.unstack(x, axis=1)), [X], ["", "a:r"])


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_stack(axis):
  other = (rand(4, 6, seed=1), [A, B])
  check(
    lambda x, y: mtf.stack([x, y], "n", axis),
    lambda x, y: tf.stack([x, y], axis),
    [X, other],
    LAYOUTS,
  )


def test_unstack():
  check(lambda x: mtf.unstack(x, B), lambda x: tf.unstack(x, axis=1), [X], LAYOUTS)


def test_slice_and_pad():
  check(lambda x: mtf.slice(x, 1, 3, "b"), lambda x: x[:, 1:4], [X], LAYOUTS)
  check(lambda x: mtf.pad(x, [2, 1], "b"), lambda x: tf.pad(x, [[0, 0], [2, 1]]), [X], LAYOUTS)


def test_integers_and_bools():
  values = np.arange(24).reshape(4, 6)
  for array in (values, values % 2 == 0):

    def build(m, array=array):
      x = mtf.import_tf_tensor(m, array, [A, B])
      return [mtf.concat(mtf.split(x, B, 2), "b"), mtf.pad(mtf.slice(x, 2, 4, "b"), [2, 0], "b")]

    whole, padded = run(build, "a:r")
    np.testing.assert_array_equal(whole, array)
    np.testing.assert_array_equal(padded[:, 2:], array[:, 2:])


@pytest.mark.parametrize(
  "make",
  [
    lambda x: mtf.concat([x, x], "b"),
    lambda x: mtf.split(x, B, 2)[0],
    lambda x: mtf.unstack(x, B)[0],
    lambda x: mtf.slice(x, 0, 2, "b"),
    lambda x: mtf.pad(x, [0, 2], "b"),
    lambda x: mtf.stack([mtf.slice(x, 0, 1, "a")] * 6, "b2"),
  ],
)
def test_the_dimension_must_not_be_split(make):
  with pytest.raises(mtf.LayoutError, match="b2?:6 of .* is split over mesh axis c:2"):
    run(lambda m: [make(mtf.import_tf_tensor(m, *X))], "b:c,b2:c")


def test_a_mesh_axis_of_size_one_does_not_split():
  (value,) = run(lambda m: [mtf.slice(mtf.import_tf_tensor(m, *X), 1, 2, "b")], "b:c", "c:1")
  np.testing.assert_array_equal(value, X[0][:, 1:3])


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda x: mtf.concat([x, x], "q"), "no dimension 'q'"),
    (lambda x: mtf.concat([x, mtf.slice(x, 0, 2, "a")], "b"), "differ in the size of 'b' only"),
    (lambda x: mtf.split(x, ("b", 5), 5), "no dimension"),
    (lambda x: mtf.split(x, B, 4), "4 equal parts"),
    (lambda x: mtf.split(x, B, [1, 2]), "do not add up to b=6"),
    (lambda x: mtf.stack([x, mtf.slice(x, 0, 2, "a")], "n"), "one shape"),
    (lambda x: mtf.stack([x], "n", 3), "axis 3"),
    (lambda x: mtf.unstack(x, ("b", 7)), "no dimension"),
    (lambda x: mtf.slice(x, 4, 3, "b"), "positions 4 to 7 are not within b=6"),
    (lambda x: mtf.slice(x, -1, 3, "b"), "not within"),
    (lambda x: mtf.slice(x, 0, 1, "q"), "no dimension 'q'"),
    (lambda x: mtf.pad(x, [1], "b"), "before, after"),
    (lambda x: mtf.pad(x, [1, -1], "b"), "before, after"),
    (lambda x: mtf.concat([x, mtf.to_int32(x)], "b"), "one dtype"),
    (lambda x: mtf.concat([], "b"), "at least one"),
  ],
)
def test_wrong_use_is_told_when_the_graph_is_built(make, message):
  graph = mtf.Graph()
  x = mtf.import_tf_tensor(mtf.Mesh(graph, "m"), *X)
  with pytest.raises(ValueError, match=message) as error:
    make(x)
  assert isinstance(error.value, mtf.MeshError)
  # The failed operation has left nothing in the graph.
  mtf.Lowering(graph, {x.mesh: placement("")})


def test_splittable_dimensions():
  x = mtf.import_tf_tensor(mtf.Mesh(mtf.Graph(), "m"), *X)
  ops = [
    mtf.concat([x, x], "b").operation,
    mtf.split(x, B, 2)[0].operation,
    mtf.unstack(x, B)[0].operation,
    mtf.slice(x, 0, 2, "b").operation,
    mtf.pad(x, [0, 2], "b").operation,
  ]
  for op in ops:
    assert (op.splittable_dims, op.unsplittable_dims) == ({"a"}, {"b"})
  stacked = mtf.stack([x, x], "n").operation
  assert (stacked.splittable_dims, stacked.unsplittable_dims) == ({"a", "b"}, {"n"})
  assert [t.name for t in mtf.split(x, B, 2)] == ["split_1:0", "split_1:1"]
