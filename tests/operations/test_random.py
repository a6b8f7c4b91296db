"""Random tensors, dropout and sampling: the same numbers on every layout."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.numerics import random_bits
from mesh_tensorflow.numerics.random_bits import half_words
from tests.operations.comparing import placement, rand, run, simd

A, B, C = mtf.Dimension("a", 8), mtf.Dimension("b", 16), mtf.Dimension("c", 4)
SHAPE = mtf.Shape([A, B, C])
MESHES = ["", "r:2,s:2", "r:2,s:4", "r:4"]
LAYOUTS = ["", "a:r", "b:s", "a:r,b:s", "c:r,b:s", "b:r,c:s"]


def everywhere(build, seed=3):
  """The results on all meshes and layouts, which must be equal."""
  expected = run(build, "", "", seed=seed)
  for mesh in MESHES[1:]:
    for layout in LAYOUTS:
      for value, want in zip(run(build, layout, mesh, seed=seed), expected):
        np.testing.assert_array_equal(value, want, err_msg=f"{mesh} {layout}")
  for in_function in (False, True):
    values = run(build, impl=simd("a:r,b:s", "r:2,s:2"), seed=seed, in_function=in_function)
    for value, want in zip(values, expected):
      np.testing.assert_array_equal(value, want, err_msg=f"SIMD, {in_function}")
  return expected


def test_values_do_not_depend_on_the_layout():
  def build(m):
    x = mtf.random_uniform(m, SHAPE, minval=-2.0, maxval=3.0)
    return [
      x,
      mtf.random_normal(m, SHAPE, mean=1.0, stddev=2.0),
      mtf.random_uniform(m, SHAPE, minval=5, maxval=9, dtype=tf.int32),
      mtf.dropout(mtf.ones_like(x), True, keep_prob=0.5),
      mtf.dropout(mtf.ones_like(x), True, keep_prob=0.5, noise_shape=[A, C]),
      mtf.sample_with_temperature(x, B),
    ]

  uniform, normal, integers, noise, coarse, samples = everywhere(build)
  assert uniform.min() >= -2.0 and uniform.max() < 3.0
  assert abs(normal.mean() - 1.0) < 0.3 and abs(normal.std() - 2.0) < 0.3
  assert set(np.unique(integers)) == {5, 6, 7, 8}
  assert set(np.unique(noise)) == {0.0, 2.0} and len(np.unique(noise, axis=1)[0]) > 1
  np.testing.assert_array_equal(coarse, np.repeat(coarse[:, :1], 16, axis=1))
  assert samples.shape == (8, 4) and samples.min() >= 0 and samples.max() < 16


@pytest.mark.slow
def test_each_operation_each_seed_and_each_run_draw_their_own_numbers():
  def build(m):
    return [
      mtf.random_uniform(m, SHAPE),
      mtf.random_uniform(m, SHAPE),
      mtf.random_uniform(m, SHAPE, seed=1),
      mtf.random_uniform(m, SHAPE, name="named"),
    ]

  values = run(build, seed=1) + run(build, seed=2)
  assert len({v.tobytes() for v in values}) == 8
  np.testing.assert_array_equal(values[0], run(build, "a:r", seed=1, in_function=True)[0])
  impl = placement("a:r")
  runs = [run(build, impl=impl, seed=None) for _ in range(2)]
  assert runs[0][0].tobytes() != runs[1][0].tobytes()


@pytest.mark.parametrize("seed", [0, 5, -1, 2**31 + 5, 2**35 + 7])
def test_a_seed_is_the_same_as_a_number_and_as_a_tensor(seed):
  def build(m):
    start = [mtf.zeros(m, [A]), mtf.zeros(m, [], tf.int32)]
    drawn, _ = mtf.while_loop(
      lambda _, n: mtf.less(n, 2), lambda x, n: [x + mtf.random_uniform(m, [A]), n + 1], start
    )
    return [mtf.random_uniform(m, SHAPE), mtf.random_normal(m, [A], seed=2**40 + 3), drawn]

  want = run(build, seed=seed)
  given = [tf.constant(seed, tf.int64)]
  given += [tf.constant(seed, tf.int32)] if abs(seed) < 2**31 else []
  for tensor in given:
    for got, value in zip(run(build, seed=tensor), want):
      np.testing.assert_array_equal(got, value)


def test_a_seed_keyword_tells_operations_of_one_name_apart():
  def build(seed):
    return lambda m: [mtf.random_normal(m, SHAPE, seed=seed)]

  one, again, two = (run(build(s))[0] for s in (1, 1, 2))
  np.testing.assert_array_equal(one, again)
  assert (one != two).any()


@pytest.mark.parametrize("keep_prob", [0.1, 0.5, 0.9])
def test_dropout_statistics(keep_prob):
  dims = [("n", 512), ("m", 512)]
  (value,) = run(lambda m: [mtf.dropout(mtf.ones(m, dims), True, keep_prob)], "n:r,m:c")
  kept = value > 0
  n = kept.size
  assert abs(kept.mean() - keep_prob) < 5 * np.sqrt(keep_prob * (1 - keep_prob) / n)
  np.testing.assert_allclose(value[kept], 1.0 / keep_prob, rtol=1e-6)
  # Neighbours are independent.
  for pair in (kept[1:] & kept[:-1], kept[:, 1:] & kept[:, :-1]):
    assert abs(pair.mean() - keep_prob**2) < 0.01


def test_the_gradient_of_dropout_uses_the_same_mask():
  x = rand(8, 16)

  def build(m):
    t = mtf.import_tf_tensor(m, x, [A, B])
    y = mtf.dropout(t, True, rate=0.25)
    return [y] + mtf.gradients([mtf.reduce_sum(y)], [t])

  for layout in ("", "a:r,b:s"):
    y, dx = run(build, layout, "r:2,s:2")
    assert 0 < (dx == 0).sum() < dx.size
    np.testing.assert_array_equal(y, x * dx)
    np.testing.assert_allclose(dx[dx > 0], 1.0 / 0.75, rtol=1e-6)


def test_dropout_leaves_out_what_it_can():
  m = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.ones(m, SHAPE)
  assert mtf.dropout(x, False, keep_prob=0.5) is x
  assert mtf.dropout(x, True, keep_prob=1.0) is x
  assert mtf.dropout(x, True, rate=0.0) is x
  mtf.dropout(x, True, 0.5)
  mtf.dropout(x, True, 0.5, name="first")
  names = [op.name for op in m.graph.operations[1:]]
  assert names == ["dropout/random", "dropout/dropout", "first/random", "first/dropout"]


def test_dropout_of_integers_does_not_rescale():
  (value,) = run(lambda m: [mtf.dropout(mtf.constant(m, 3, SHAPE, tf.int32), True, 0.5)])
  assert value.dtype == np.int32 and set(np.unique(value)) == {0, 3}


def test_wrong_use_is_told():
  m = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.ones(m, SHAPE)
  for kwargs in ({}, {"keep_prob": 0.5, "rate": 0.5}):
    with pytest.raises(mtf.GraphError, match="exactly one"):
      mtf.dropout(x, True, **kwargs)
  for kwargs in ({"keep_prob": 0.0}, {"rate": 1.5}):
    with pytest.raises(mtf.GraphError, match="above 0"):
      mtf.dropout(x, True, **kwargs)
  with pytest.raises(mtf.ShapeError, match="dimension z=2 of the noise shape"):
    mtf.dropout(x, True, 0.5, noise_shape=[("z", 2)])
  with pytest.raises(mtf.DTypeError, match="need maxval"):
    mtf.random_uniform(m, SHAPE, dtype=tf.int32)
  with pytest.raises(mtf.UnsupportedError, match="slice by slice"):
    mtf.RandomOperation(m, SHAPE, tf.random.gamma)


def test_sampling_follows_the_softmax():
  logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
  n = mtf.Dimension("n", 40_000)

  def build(m):
    x = mtf.broadcast(mtf.import_tf_tensor(m, logits, [C]), mtf.Shape([n, C]))
    return [mtf.sample_with_temperature(x, C), mtf.sample_with_temperature(x, C, 0.0)]

  samples, greedy = run(build, "c:s", "s:2")
  np.testing.assert_allclose(np.bincount(samples) / n.size, np.exp(logits), atol=0.01)
  assert not greedy.any()


def test_temperature_multiplies_the_noise():
  logits = np.array([1.0, 0.0], np.float32)

  def build(m):
    x = mtf.broadcast(mtf.import_tf_tensor(m, logits, "k:2"), mtf.Shape([("n", 20_000), ("k", 2)]))
    return [mtf.sample_with_temperature(x, ("k", 2), 0.5)]

  # logits + t * g is t * (logits / t + g): the softmax of logits / t.
  assert abs(run(build)[0].mean() - 1.0 / (1.0 + np.exp(2.0))) < 0.01


def test_half_words_do_not_depend_on_how_rows_are_cut():
  whole = half_words(5, [3, 13], [0, 0], [3, 13]).numpy()
  for begin in range(13):
    for size in range(1, 14 - begin):
      part = half_words(5, [3, 13], [1, begin], [2, size])
      np.testing.assert_array_equal(part, whole[1:, begin : begin + size])
      if begin % size == 0:
        # As a SIMD program asks for it: the offset of a block is a tensor.
        part = half_words(tf.constant(5, tf.uint32), [3, 13], [1, tf.constant(begin)], [2, size])
        np.testing.assert_array_equal(part, whole[1:, begin : begin + size])


def test_half_words_are_uniform_and_independent():
  words = half_words(1, [64, 4096], [0, 0], [64, 4096]).numpy()
  assert len(np.unique(words)) > 64_000
  for bit in range(16):
    ones = words >> bit & 1
    assert abs(ones.mean() - 0.5) < 0.005
    for other in (words >> (bit + 1) % 16 & 1, np.roll(ones, 1, 1), np.roll(ones, 1, 0)):
      assert abs((ones ^ other).mean() - 0.5) < 0.005


@pytest.mark.parametrize(
  ("shape", "begin", "part"),
  [([64, 37], [3, 5], [4, 11]), ([7], [2], [5]), ([], [], []), ([3, 4, 5], [0, 1, 2], [3, 2, 3])],
)
def test_eager_numpy_words_equal_those_of_tensorflow(shape, begin, part):
  """Small slices are drawn in NumPy at the start of a program, others in TensorFlow."""
  draw = lambda: random_bits.bits(123, shape, begin, part)  # noqa: E731
  np.testing.assert_array_equal(draw().numpy(), tf.function(draw)().numpy())
