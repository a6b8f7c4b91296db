"""One-hot, gather, ranges, running sums, and pooling along one dimension."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.operations.comparing import check, placement, rand, run

A, B, C, D = (mtf.Dimension(n, s) for n, s in [("a", 8), ("b", 4), ("c", 2), ("d", 6)])
NUMBERS = (np.arange(32, dtype=np.int32).reshape(8, 4), [A, B])
LAYOUTS = ["", "a:r", "b:c", "a:r,b:c"]


def ints(low, high, *shape, seed=0):
  return np.random.RandomState(seed).randint(low, high, shape).astype(np.int32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_values(layout):
  def build(m):
    x = mtf.import_tf_tensor(m, *NUMBERS)
    rows = mtf.import_tf_tensor(m, np.array([3, 1]), [C])
    columns = mtf.import_tf_tensor(m, np.array([0, 1, 2, 3]), [B])
    return [
      mtf.cumsum(x, A),
      mtf.gather(x, rows, A),
      mtf.gather(x, columns, A),
      mtf.gather(x, 99, A),
      mtf.gather(x, -1, A),
      mtf.one_hot(mtf.import_tf_tensor(m, np.array([9, -1]), [C]), A),
      mtf.one_hot(rows, B, 5, -1, tf.int32),
      mtf.pool_tensor_1d(mtf.to_float(x), A),
      mtf.reduce_first(x, A),
      mtf.stride_tensor_1d(x, A),
    ]

  sums, rows, aligned, beyond, negative, off, hot, pooled, first, strided = run(build, layout)
  assert sums[-1].tolist() == [112, 120, 128, 136]
  assert rows.tolist() == [[12, 13, 14, 15], [4, 5, 6, 7]]
  assert aligned.tolist() == [0, 5, 10, 15]
  assert not beyond.any() and not negative.any() and not off.any()
  assert hot.tolist() == [[-1, -1, -1, 5], [-1, 5, -1, -1]]
  assert pooled[:, 0].tolist() == [2, 10, 18, 26] and pooled[0].tolist() == [2, 3, 4, 5]
  assert first.tolist() == [0, 1, 2, 3]
  assert strided[:, 0].tolist() == [0, 8, 16, 24]


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.int32, tf.bool])
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64, np.uint8, np.int16])
def test_one_hot_dtypes(dtype, index_dtype):
  indices = np.array([[0, 3], [5, 1]], index_dtype)
  for layout in ("", "d:r", "x:r,d:c"):
    (value,) = run(
      lambda m: [mtf.one_hot(mtf.import_tf_tensor(m, indices, "x:2,y:2"), D, dtype=dtype)], layout
    )
    np.testing.assert_array_equal(value.astype(np.float32), np.eye(6)[indices])


def test_gather_rows():
  check(
    lambda w, i: mtf.gather(w, i, A),
    lambda w, i: tf.gather(w, i),
    [(rand(8, 4), [A, B]), (ints(0, 8, 6, 2), [D, C])],
    ["", "a:r", "b:r", "d:r", "c:c,d:r", "a:r,c:c", "a:r,b:c", "b:c,d:r"],
  )


def test_gather_along_a_later_dimension_in_any_order():
  def transposed(w, i):
    return mtf.gather(w, i, A, output_shape=[B, D, C])

  for mtf_fn, order in ((lambda w, i: mtf.gather(w, i, A), [1, 0, 2]), (transposed, [0, 1, 2])):
    check(
      mtf_fn,
      lambda w, i, order=order: tf.transpose(tf.gather(w, i, axis=1), order),
      [(rand(4, 8, 2), [B, A, C]), (ints(0, 8, 6), [D])],
      ["", "a:r", "b:r,c:c", "d:c", "a:c,d:r"],
    )


def test_gather_with_aligned_dimensions():
  # weights [b, a, c], indices [d, b]: one set of indices for each position of b.
  check(
    lambda w, i: mtf.gather(w, i, A),
    lambda w, i: tf.transpose(tf.gather(w, tf.transpose(i), batch_dims=1), [1, 0, 2]),
    [(rand(4, 8, 2), [B, A, C]), (ints(0, 8, 6, 4), [D, B])],
    ["", "b:r", "a:r", "a:r,b:c", "c:r,d:c", "b:r,d:c"],
  )


def test_gather_with_a_number():
  check(lambda w: mtf.gather(w, 2, A), lambda w: w[:, 2], [(rand(4, 8), [B, A])], LAYOUTS)


def test_gather_out_of_range_gives_zeros_also_next_to_nan():
  weights = rand(8, 4)
  weights[[0, 7]] = [[np.nan] * 4, [np.inf] * 4]
  indices = np.array([-1, 8, 3, 100, -(2**31), 2**31 - 1], np.int32)
  for layout in LAYOUTS + ["d:r,a:c"]:
    (value,) = run(
      lambda m: [
        mtf.gather(
          mtf.import_tf_tensor(m, weights, [A, B]), mtf.import_tf_tensor(m, indices, [D]), A
        )
      ],
      layout,
    )
    expected = np.zeros([6, 4], np.float32)
    expected[2] = weights[3]
    np.testing.assert_array_equal(value, expected)


def test_gradient_of_gather_drops_what_is_out_of_range():
  def expected(w, i):
    inside = (i >= 0) & (i < 8)
    return tf.where(inside[..., None], tf.gather(w, tf.where(inside, i, 0)), 0.0)

  check(
    lambda w, i: mtf.gather(w, i, A),
    expected,
    [(rand(8, 4), [A, B]), (ints(-5, 12, 6, 2), [D, C])],
    ["", "a:r", "d:r", "a:c,d:r"],
  )


@pytest.mark.parametrize("dtype", [tf.int32, tf.bool, tf.bfloat16])
def test_gather_of_other_dtypes(dtype):
  weights = tf.cast(ints(0, 2, 8, 4), dtype)
  indices = ints(-1, 9, 6)
  for layout in LAYOUTS:
    (value,) = run(
      lambda m: [
        mtf.gather(
          mtf.import_tf_tensor(m, weights, [A, B]), mtf.import_tf_tensor(m, indices, [D]), A
        )
      ],
      layout,
    )
    padded = np.concatenate([weights.numpy(), np.zeros([1, 4])]).astype(np.float32)
    assert value.dtype == dtype.as_numpy_dtype
    np.testing.assert_array_equal(
      value.astype(np.float32), padded[np.where(indices < 0, 8, indices)]
    )


def test_second_gradient_of_gather():
  weights, cotangent, indices = rand(8, 4), rand(6, 4, seed=1), ints(0, 8, 6)

  def build(m):
    w = mtf.import_tf_tensor(m, weights, [A, B])
    dy = mtf.import_tf_tensor(m, cotangent, [D, B])
    y = mtf.gather(w, mtf.import_tf_tensor(m, indices, [D]), A)
    (dw,) = mtf.gradients([y], [w], grad_ys=[dy])
    return mtf.gradients([mtf.reduce_sum(mtf.square(dw))], [dy])

  dense = np.zeros([8, 4])
  np.add.at(dense, indices, cotangent)
  for layout in ("", "a:r", "d:r", "a:c,d:r"):
    np.testing.assert_allclose(run(build, layout)[0], 2 * dense[indices], rtol=1e-5)


def test_the_gradient_of_gather_waits_with_its_sum_over_the_mesh():
  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")
  w = mtf.import_tf_tensor(m, rand(8, 4), [A, B])
  i = mtf.import_tf_tensor(m, ints(0, 8, 6), [D])
  (dw,) = mtf.gradients([mtf.reduce_sum(mtf.gather(w, i, A))], [w])
  lowering = mtf.Lowering(graph, {m: placement("d:r")})
  assert isinstance(lowering.tensors[dw], mtf.LazyAllreduceSum)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.slow
def test_cumsum(exclusive):
  for shape, axis in (([A, B], 0), ([B, A], 1)):
    x = rand(*[d.size for d in shape])
    check(
      lambda x: mtf.cumsum(x, A, exclusive),
      lambda x, axis=axis: tf.cumsum(x, axis, exclusive=exclusive),
      [(x, shape)],
      ["", "a:r", "b:r", "a:r,b:s"],
      mesh="r:4,s:2",
    )


@pytest.mark.parametrize("dtype", [tf.int32, tf.float32, tf.bfloat16, tf.int64])
def test_range(dtype):
  for layout in ("", "a:r"):
    (value,) = run(lambda m: [mtf.range(m, ("a", 8), dtype)], layout)
    assert value.dtype == dtype.as_numpy_dtype
    np.testing.assert_array_equal(value.astype(np.int64), np.arange(8))


@pytest.mark.parametrize(
  "reduce_fn, expected",
  [(mtf.reduce_mean, np.mean), (mtf.reduce_max, np.max), (mtf.reduce_min, np.min)],
)
def test_pool_tensor_1d(reduce_fn, expected):
  x = rand(4, 8, 2)
  for layout in LAYOUTS:
    (value,) = run(
      lambda m: [mtf.pool_tensor_1d(mtf.import_tf_tensor(m, x, [B, A, C]), A, reduce_fn, 4)], layout
    )
    np.testing.assert_allclose(value, expected(x.reshape(4, 2, 4, 2), axis=2), rtol=1e-6)


def test_reduce_first_selects_exactly():
  x = rand(8, 4)
  x[1:] = np.nan
  for layout in LAYOUTS:
    (value,) = run(lambda m: [mtf.reduce_first(mtf.import_tf_tensor(m, x, [A, B]), A)], layout)
    np.testing.assert_array_equal(value, x[0])
  check(lambda x: mtf.reduce_first(x, B), lambda x: x[:, 0], [(rand(8, 4), [A, B])], LAYOUTS)


def test_wrong_use_is_told_when_the_graph_is_built():
  m = mtf.Mesh(mtf.Graph(), "m")
  w = mtf.import_tf_tensor(m, *NUMBERS)
  i = mtf.zeros(m, [C], tf.int32)
  with pytest.raises(mtf.DTypeError, match="must be integers"):
    mtf.one_hot(mtf.to_float(i), A)
  with pytest.raises(mtf.DTypeError, match="must be integers"):
    mtf.gather(w, mtf.to_float(i), A)
  with pytest.raises(mtf.DimensionError, match="weights: there is no dimension d=6"):
    mtf.gather(w, i, D)
  with pytest.raises(mtf.ShapeError, match="leaves out c=2"):
    mtf.gather(w, i, A, output_shape=[B])
  with pytest.raises(mtf.ShapeError, match="have the dimension a=8 that is indexed"):
    mtf.gather(w, mtf.zeros(m, [A], tf.int32), A)
  with pytest.raises(mtf.DimensionError, match="no dimension d=6"):
    mtf.cumsum(w, D)
  with pytest.raises(mtf.ShapeError, match="does not divide"):
    mtf.pool_tensor_1d(w, A, pool_size=3)


def test_indices_and_weights_must_not_share_a_mesh_axis():
  def build(m):
    w = mtf.import_tf_tensor(m, *NUMBERS)
    return [mtf.gather(w, mtf.zeros(m, [C], tf.int32), A)]

  with pytest.raises(mtf.LayoutError, match="a:8|a=8"):
    run(build, "a:r,c:r")


def test_a_longer_output_shape_broadcasts():
  (value,) = run(
    lambda m: [mtf.gather(mtf.import_tf_tensor(m, *NUMBERS), 1, A, output_shape=[C, B])], "c:r"
  )
  assert value.tolist() == [[4, 5, 6, 7]] * 2
