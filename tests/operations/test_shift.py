"""Shift, dynamic shift, and halo exchange."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.kinds import in_turns, kept
from tests.operations.comparing import check, placement, rand, run

A, B = mtf.Dimension("a", 8), mtf.Dimension("b", 4)
X = (rand(8, 4), [A, B])
NUMBERS = (np.arange(32, dtype=np.int32).reshape(8, 4), [A, B])


def _shifted(x, offset, wrap):
  rolled = tf.roll(x, offset, 0)
  if wrap:
    return rolled
  source = np.arange(8) - offset
  return tf.where(((source >= 0) & (source < 8))[:, None], rolled, 0.0)


SHIFTS = list(itertools.product([0, 1, 2, 3, 5, 8, 9, -1, -2, -7, -8, -20, 19], [False, True]))


@pytest.mark.parametrize(("offset", "wrap"), kept(SHIFTS, in_turns(SHIFTS)))
def test_shift(offset, wrap):
  check(
    lambda x: mtf.shift(x, offset, A, wrap),
    lambda x: _shifted(x, offset, wrap),
    [X],
    ["", "a:r"],
    mesh="r:4",
  )


def test_shift_exchanges_only_what_moves():
  counted = {}
  for offset in (3, -1, 2):
    graph = mtf.Graph()
    x = mtf.import_tf_tensor(mtf.Mesh(graph, "m"), *NUMBERS)
    mtf.shift(x, offset, A, wrap=False)
    lowering = mtf.Lowering(graph, {x.mesh: placement("a:r", "r:4")})
    counted[offset] = {k: v for k, v in lowering.counters if k.startswith("shift")}
  assert counted == {
    3: {"shift[1]": 16, "shift[2]": 16},
    -1: {"shift[-1]": 16},
    2: {"shift[1]": 32},
  }


@pytest.mark.parametrize("layout", ["", "a:r", "b:c", "a:c,b:r"])
def test_golden_dynamic_shift(layout):
  def build(m):
    x = mtf.import_tf_tensor(m, *NUMBERS)
    offset = mtf.import_tf_tensor(m, np.array([1, 0, 2, -1], np.int32), [B])
    return [mtf.dynamic_shift(x, offset, A, wrap) for wrap in (False, True)]

  zeros, ring = run(build, layout)
  assert zeros[0].tolist() == [0, 1, 0, 7] and zeros[-1].tolist() == [24, 29, 22, 0]
  assert ring[0].tolist() == [28, 1, 26, 7] and ring[-1].tolist() == [24, 29, 22, 3]


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("offset_dims", [[], [B], [("d", 2), B]])
def test_dynamic_shift(wrap, offset_dims):
  shape = mtf.Shape(offset_dims)
  x = rand(4, 8, 2)  # b, a, d
  offsets = np.random.RandomState(1).randint(-10, 11, shape.to_integer_list).astype(np.int32)
  letters = {"b": "b", "d": "d"}
  whole = np.einsum(
    "".join(letters[n] for n in shape.dimension_names) + ",bd->bd",
    offsets,
    np.ones([4, 2], np.int32),
  )
  matrix = np.zeros([4, 2, 8, 8], np.float32)  # b, d, to, from
  for b in range(4):
    for d in range(2):
      for to in range(8):
        source = to - whole[b, d]
        if wrap or 0 <= source < 8:
          matrix[b, d, to, source % 8] = 1.0
  check(
    lambda x, o: mtf.dynamic_shift(x, o, A, wrap),
    lambda x, o: tf.einsum("bafd,bfd->bad", np.transpose(matrix, [0, 2, 3, 1]), x),
    [(x, [B, A, ("d", 2)]), (offsets, offset_dims)],
    ["", "b:r", "d:r,b:c", "a:r", "a:r,b:c"],
  )


HALOS = list(itertools.product([False, True], [0, 1, 4, 5, 9], [False, True]))


@pytest.mark.parametrize(("left_only", "halo", "wrap"), kept(HALOS, in_turns(HALOS)))
def test_halo_exchange(halo, wrap, left_only):
  blocks, size = mtf.Dimension("blocks", 4), mtf.Dimension("size", 4)
  x = rand(4, 3, 4)
  right = 0 if left_only else halo
  source = np.arange(4)[:, None] * 4 + np.arange(-halo, 4 + right)
  inside = (source >= 0) & (source < 16)

  def expected(x):
    flat = tf.reshape(tf.transpose(x, [1, 0, 2]), [3, 16])
    y = tf.gather(flat, source % 16, axis=1)
    if not wrap:
      y = tf.where(inside, y, 0.0)
    return tf.transpose(y, [1, 0, 2])

  exchange = mtf.left_halo_exchange if left_only else mtf.halo_exchange
  check(
    lambda x: exchange(x, blocks, size, halo, wrap),
    expected,
    [(x, [blocks, ("m", 3), size])],
    ["", "blocks:r"],
    mesh="r:4",
  )


def test_wrong_use_is_told_when_the_graph_is_built():
  m = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.import_tf_tensor(m, *X)
  with pytest.raises(mtf.DimensionError, match="no dimension q=8"):
    mtf.shift(x, 1, ("q", 8), True)
  with pytest.raises(mtf.ShapeError, match="dimension a=8 of the offsets"):
    mtf.dynamic_shift(x, mtf.zeros(m, [A], tf.int32), A, True)
  with pytest.raises(mtf.DTypeError, match="must be integers"):
    mtf.dynamic_shift(x, mtf.zeros(m, [B]), A, True)
  with pytest.raises(mtf.DimensionError, match="no dimension q=8"):
    mtf.halo_exchange(x, mtf.Dimension("q", 8), B, 1)
  with pytest.raises(mtf.LayoutError, match="b:4"):
    run(lambda m: [mtf.halo_exchange(mtf.import_tf_tensor(m, *X), A, B, 1)], "b:c")
