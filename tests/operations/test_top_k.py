"""Top-k, argmax, and the n-th largest element."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.kinds import in_turns, kept
from tests.operations.comparing import check, rand, run

A, B = mtf.Dimension("a", 8), mtf.Dimension("b", 4)
NUMBERS = (np.arange(32, dtype=np.int32).reshape(8, 4), [A, B])
LAYOUTS = ["", "a:r", "b:c", "a:r,b:c"]


CASES = list(itertools.product([1, 2, 3, 4, 5, 8], [True, False]))


@pytest.mark.parametrize(("k", "first"), kept(CASES, in_turns(CASES)))
def test_top_k(k, first):
  k_dim = mtf.Dimension("k", k)
  if first:
    x, shape, order = rand(8, 4), [A, B], [1, 0]
  else:
    x, shape, order = rand(4, 8), [B, A], [0, 1]
  check(
    lambda x: mtf.top_k(x, A, k_dim),
    lambda x: tf.math.top_k(tf.transpose(x, order), k),
    [(x, shape)],
    ["", "b:r", "a:r,b:c", "a:r"],
  )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_values(layout):
  def build(m):
    x = mtf.import_tf_tensor(m, *NUMBERS)
    equal = mtf.zeros(m, [A, B])
    return [
      mtf.top_k(x, A, mtf.Dimension("k", 6))[1],
      mtf.top_k(equal, A, mtf.Dimension("k", 6))[1],
      mtf.top_k(equal, A, mtf.Dimension("k", 3))[1],
      mtf.nth_largest_element(x, 2, A),
      mtf.nth_smallest_element(x, 1, A),
      mtf.argmax(equal, A),
      mtf.argmax(x, A),
    ]

  top, ties6, ties3, third, second, first, last = run(build, layout)
  assert top.tolist() == [[7, 6, 5, 4, 3, 2]] * 4
  assert ties6.tolist() == [list(range(6))] * 4 and ties3.tolist() == [[0, 1, 2]] * 4
  assert third.tolist() == [20, 21, 22, 23] and second.tolist() == [4, 5, 6, 7]
  assert first.tolist() == [0] * 4 and last.tolist() == [7] * 4


def test_golden_top_2_with_its_gradient():
  x = np.array([[1, 10], [2, 9], [3, 8], [4, 7], [5, 6], [6, 5]], np.float32)
  a, b, k = mtf.Dimension("a", 6), mtf.Dimension("b", 2), mtf.Dimension("k", 2)

  def build(m):
    t = mtf.import_tf_tensor(m, x, [a, b])
    values, indices = mtf.top_k(t, a, k)
    dvalues = mtf.import_tf_tensor(m, np.array([[11.0, 12.0], [13.0, 14.0]], np.float32), [b, k])
    return [values, indices] + mtf.gradients([values], [t], grad_ys=[dvalues])

  values, indices, grad = run(build, "a:r,b:c")
  assert values.tolist() == [[6, 5], [10, 9]] and indices.tolist() == [[5, 4], [0, 1]]
  assert grad.tolist() == [[0, 13], [0, 14], [0, 0], [0, 0], [12, 0], [11, 0]]


def test_argmax_and_top_1():
  x = np.random.RandomState(0).randint(0, 3, [4, 8, 2]).astype(np.float32)
  shape = [B, A, ("c", 2)]
  for layout in LAYOUTS + ["c:r,a:c"]:
    arg, value, index = run(
      lambda m: [
        mtf.argmax(mtf.import_tf_tensor(m, x, shape), A),
        *mtf.top_1(mtf.import_tf_tensor(m, x, shape), A),
      ],
      layout,
    )
    np.testing.assert_array_equal(arg, x.argmax(1))
    np.testing.assert_array_equal(index, x.argmax(1))
    np.testing.assert_array_equal(value, x.max(1))


def test_the_gradient_of_top_1_goes_to_one_element():
  x = np.array([[1, 3, 3, 0]], np.float32)

  def build(m):
    t = mtf.import_tf_tensor(m, x, [("n", 1), B])
    return mtf.gradients([mtf.reduce_sum(mtf.top_1(t, B)[0])], [t])

  for layout in LAYOUTS:
    assert run(build, layout)[0].tolist() == [[0, 1, 0, 0]]


def test_the_first_of_many_equal_elements_is_found():
  n = 100_000
  (value,) = run(lambda m: [mtf.argmax(mtf.ones(m, [("n", n)]), ("n", n))])
  assert value == 0


@pytest.mark.parametrize("dtype", [tf.int32, tf.bfloat16, tf.int64])
def test_dtypes(dtype):
  x = tf.constant(NUMBERS[0] % 7, dtype)
  values, indices = run(lambda m: mtf.top_k(mtf.import_tf_tensor(m, x, [A, B]), A, ("k", 3)), "a:r")
  expected = tf.math.top_k(tf.transpose(x), 3)
  assert values.dtype == dtype.as_numpy_dtype
  np.testing.assert_array_equal(values, expected[0].numpy())
  np.testing.assert_array_equal(indices, expected[1].numpy())


def test_gradient_of_nth_largest_element():
  check(
    lambda x: mtf.nth_largest_element(x, 2, A),
    lambda x: tf.sort(x, 0)[5],
    [(rand(8, 4), [A, B])],
    LAYOUTS,
  )
  check(
    lambda x: mtf.nth_smallest_element(x, 0, B),
    lambda x: tf.sort(x, 1)[:, 0],
    [(rand(8, 4), [A, B])],
    LAYOUTS,
  )


def test_wrong_use_is_told():
  m = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.import_tf_tensor(m, *NUMBERS)
  with pytest.raises(mtf.ShapeError, match="k=9 elements cannot be taken from a=8"):
    mtf.top_k(x, A, mtf.Dimension("k", 9))
  with pytest.raises(mtf.DimensionError, match="no dimension q=8"):
    mtf.argmax(x, ("q", 8))
  with pytest.raises(mtf.ShapeError, match="n = 8 is not in 0 to 7"):
    mtf.nth_largest_element(x, 8, A)
  with pytest.raises(mtf.LayoutError, match="k:2"):
    run(lambda m: mtf.top_k(mtf.import_tf_tensor(m, *NUMBERS), A, ("k", 2)), "k:r")


def test_positions_are_gathered_without_a_check_and_values_with_one():
  m = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.import_tf_tensor(m, *NUMBERS)
  values, positions = mtf.top_k(x, A, mtf.Dimension("k", 2))
  assert mtf.gather(x, positions, A).operation._in_range
  assert not mtf.gather(x, values, A).operation._in_range
  assert not mtf.gather(mtf.slice(x, 0, 7, "a"), positions, ("a", 7)).operation._in_range
