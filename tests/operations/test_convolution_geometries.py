"""Every geometry of convolutions and pooling, on space that is split, against TensorFlow's."""

from __future__ import annotations

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import DimensionError, DTypeError, GraphError, ShapeError, SizeError
from tests.operations import convolution_geometries, pooling_geometries
from tests.operations.comparing import placement, rand, run


@pytest.mark.slow
def test_drawn_convolutions():
  counts = convolution_geometries.check_drawn(0, 30, simd_every=15)
  assert counts[None] >= 24
  # Margins, from beyond the neighbour too; output blocks that are not those of the image.
  assert min(counts[trait] for trait in ("halo", "wide", "unaligned")) >= 3


@pytest.mark.long
def test_many_drawn_convolutions():
  counts = convolution_geometries.check_drawn(0, 2000, simd_every=40)
  print(f"\nconvolutions: {counts}")
  assert sum(counts[key] for key in (None, *convolution_geometries.CAUSES)) == 2000
  assert counts[None] >= 1700


def test_drawn_poolings():
  assert pooling_geometries.check_drawn(0, 16, simd_every=8)[None] >= 10


@pytest.mark.long
def test_many_drawn_poolings():
  counts = pooling_geometries.check_drawn(0, 400, simd_every=40)
  print(f"\npoolings: {counts}")
  assert counts[None] >= 280


# ------------------------------------------------------------------ what is moved


def _counters(layout, mesh, x, w, **kwargs):
  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")
  x, w = mtf.zeros(m, x), mtf.zeros(m, w)
  y = mtf.convolution(x, w, **kwargs)
  gradients = mtf.gradients([y], [x, w])
  lowering = mtf.Lowering(graph, {m: placement(layout, mesh)})
  for t in (y, *gradients):
    lowering.tensors[t].to_laid_out_tensor()
  moved = collections.Counter()
  for key, value in lowering.counters:
    moved[key] += value
  return moved


def test_only_the_halo_is_moved():
  moved = _counters("h:r", "r:4", "b:2 h:32 w:8 i:3", "fh:3 fw:3 i:3 o:5")
  halo = moved["halo/[0]/convolution_op"]
  # One row from each side to each of four processors.
  assert halo == 4 * 2 * (2 * 1 * 8 * 3)
  assert not any(k.startswith(("allconcat", "allreduce/[0]/convolution_op")) for k in moved)


def test_a_stride_of_the_size_of_the_filter_moves_nothing():
  moved = _counters("h:r,w:c", "r:2,c:2", "b:2 h:8 w:8 i:3", "fh:2 fw:2 i:3 o:5", strides=(2, 2))
  assert not any(k.startswith("halo") for k in moved)


def test_a_filter_wider_than_all_blocks_brings_them_together():
  moved = _counters("h:r", "r:4", "b:2 h:8 w:2 i:3", "fh:15 fw:1 i:3 o:5")
  # Each of four processors gets all four blocks of two rows.
  assert moved["allconcat/[0]/convolution_op"] == 4 * (2 * 8 * 2 * 3)
  assert "halo/[0]/convolution_op" not in moved


def test_both_gradients_exchange_the_gradient_of_the_output_once():
  shapes = "b:2 h:32 w:8 i:3", "fh:3 fw:3 i:3 o:5"
  moved = _counters("h:r", "r:4", *shapes)
  # Of each of five channels one row from each side to each of four processors.
  assert moved["halo/[0]/convolution_transpose_op"] == 4 * 2 * (2 * 8) * 5
  assert "halo/[0]/convolution_filter_op" not in moved
  # With a stride the image's is computed of no frames, and the filter's of those of the image.
  assert _counters("h:r", "r:4", *shapes, strides=(2, 1))["halo/[0]/convolution_filter_op"] > 0


def test_gradients_of_split_images_copy_a_slice_once_for_each_dimension():
  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")
  dims = "b:2 h:8 w:8 c:3", "fh:3 fw:3 c:3 d:3", "b:2 h:8 w:8 d:3"
  x, w, dy = (mtf.ones(m, d) for d in dims)
  gradients = mtf.gradients([mtf.convolution(x, w)], [x, w], grad_ys=[dy])

  def program():
    lowering = mtf.Lowering(graph, {m: placement("h:r,w:c")})
    return [lowering.tensors[t].to_laid_out_tensor().tensor_list for t in gradients]

  operations = tf.function(program, autograph=False).get_concrete_function().graph.get_operations()
  count = collections.Counter(op.type for op in operations)
  # On each of four processors: the frames of the convolution, which are those of height joined and
  # those of width, and the frames of both gradients.
  assert count["ConcatV2"] == 4 * 2 * 2
  # The one sum is that of the filter's gradients: nothing of the image's is computed twice.
  assert count["AddN"] == 1 and not count["Pad"]


def test_recomputed_convolutions_take_frames_of_their_own():
  x, w = rand(2, 8, 4, 3), rand(3, 3, 3, 3, seed=1)

  def build(m, recompute):
    x_, w_ = (
      mtf.import_tf_tensor(m, x, "b:2 h:8 w:4 c:3"),
      mtf.import_tf_tensor(m, w, "p:3 q:3 c:3 o:3"),
    )

    def twice(t, k):
      for _ in range(2):
        t = mtf.tanh(mtf.rename_dimension(mtf.convolution(t, k), "o", "c"))
      return t

    y = mtf.recompute_grad(twice, [x_, w_]) if recompute else twice(x_, w_)
    first = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x_, w_])
    return [*first, *mtf.gradients([mtf.reduce_sum(mtf.square(first[0]))], [x_, w_])]

  want = run(lambda m: build(m, False))
  for recompute in (False, True):
    made = run(functools.partial(build, recompute=recompute), "h:r,w:c")
    for got, expected in zip(made, want):
      np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- named forms


@pytest.mark.parametrize("layout", ["", "c:r", "h:r,c:c", "w:c,b:r"])
def test_depthwise_by_a_dimension_of_groups(layout):
  x, w = rand(2, 4, 6, 4), rand(3, 3, 4, 2, seed=1)

  def build(m):
    X, K = (
      mtf.import_tf_tensor(m, x, "b:2 h:4 w:6 c:4"),
      mtf.import_tf_tensor(m, w, "fh:3 fw:3 c:4 k:2"),
    )
    y = mtf.convolution(X, K, groups=X.shape[-1])
    assert y.shape == mtf.convert_to_shape("b:2 h:4 w:6 c:4 k:2")
    return [y, *mtf.gradients([mtf.reduce_sum(mtf.square(y))], [X, K])]

  xt, wt = tf.constant(x), tf.constant(w)
  with tf.GradientTape() as tape:
    tape.watch([xt, wt])
    y = tf.reshape(tf.nn.depthwise_conv2d(xt, wt, [1, 1, 1, 1], "SAME"), [2, 4, 6, 4, 2])
    loss = tf.reduce_sum(y**2)
  for got, want in zip(run(build, layout), [y, *tape.gradient(loss, [xt, wt])]):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_spatial_dimensions_may_stand_anywhere():
  x, w = rand(4, 2, 3, 6), rand(3, 2, 3, 5, seed=1)

  def build(m):
    X, K = (
      mtf.import_tf_tensor(m, x, "h:4 b:2 i:3 w:6"),
      mtf.import_tf_tensor(m, w, "fh:3 fw:2 i:3 o:5"),
    )
    y = mtf.convolution(X, K, spatial_dims=[X.shape[0], X.shape[3]])
    straight = mtf.convolution(mtf.transpose(X, "b:2 h:4 w:6 i:3"), K)
    return [y, straight]

  y, straight = run(build, "h:r,w:c")
  assert y.shape == (2, 4, 6, 5)
  np.testing.assert_array_equal(y, straight)


def test_output_sizes_of_a_transposed_convolution():
  def build(m):
    x, w = mtf.ones(m, "b:1 w:4 o:2"), mtf.ones(m, "fw:3 i:2 o:2")
    return [
      mtf.convolution(x, w, [2], transposed=True, output_sizes=[n]) for n in (7, 8)
    ]  # fmt: skip

  small, large = run(build)
  assert small.shape == (1, 7, 2) and large.shape == (1, 8, 2)


# --------------------------------------------------------------------------- errors


def _t(m, dims):
  return mtf.zeros(m, dims)


@pytest.mark.parametrize(
  "provoke,error,words",
  [
    (lambda x, w, m: mtf.convolution(x, w, [1, 2, 3]), ShapeError, ["strides", "[1, 1, 2, 3, 1]"]),
    (lambda x, w, m: mtf.convolution(x, w, dilations=[0, 1]), ShapeError, ["dilations", "[0, 1]"]),
    (lambda x, w, m: mtf.convolution(x, w, padding=[(1, 1)]), ShapeError, ["padding", "2 pairs"]),
    (lambda x, w, m: mtf.convolution(x, w, padding=[(1, -1), (0, 0)]), ShapeError, ["padding"]),
    (lambda x, w, m: mtf.convolution(x, w, padding="FULL"), ShapeError, ["FULL", "SAME"]),
    (lambda x, w, m: mtf.convolution(x, w, groups=3), SizeError, ["3 groups", "i=4"]),
    (lambda x, w, m: mtf.convolution(x, w, groups=0), SizeError, ["groups"]),
    (lambda x, w, m: mtf.convolution(x, w, groups=("g", 2)), DimensionError, ["g"]),
    (lambda x, w, m: mtf.convolution(x, w, output_sizes=[2, 2]), ShapeError, ["output_sizes"]),
    (lambda x, w, m: mtf.convolution(x, w, transposed=True), DimensionError, ["i=4", "o=6"]),
    (lambda x, w, m: mtf.convolution(x, w, spatial_dims=[("h", 4), ("h", 4)]), DimensionError,
     ["spatial_dims"]),
    (lambda x, w, m: mtf.convolution(x, w, spatial_dims=[("h", 4), ("z", 4)]), DimensionError,
     ["z"]),
    (lambda x, w, m: mtf.convolution(x, _t(m, "i:4 o:6")), ShapeError, ["one to three"]),
    (lambda x, w, m: mtf.convolution(x, _t(m, "i:4"), groups=("i", 4)), ShapeError,
     ["space, groups and channels"]),
    (lambda x, w, m: mtf.convolution(x, _t(m, "i:4"), groups=4), ShapeError, ["space"]),
    (lambda x, w, m: mtf.convolution(x, _t(m, "a:1 c:1 d:1 e:1 i:4 o:6")), ShapeError,
     ["one to three"]),
    (lambda x, w, m: mtf.convolution(x, w, padding="VALID", dilations=[2, 1]), ShapeError,
     ["at least 1", "[0, 2]"]),
    (lambda x, w, m: mtf.pool(x, [2, 2], [1]), ShapeError, ["ksize", "strides"]),
    (lambda x, w, m: mtf.pool(x, [5, 2]), ShapeError, ["[5, 2]", "h=4"]),
    (lambda x, w, m: mtf.pool(x, [2, 2], kind="MIN"), GraphError, ["MIN"]),
    (lambda x, w, m: mtf.pool(mtf.cast(x, "int32"), [2, 2], kind="AVG"), DTypeError, ["mtf.cast"]),
  ],
)  # fmt: skip
def test_wrong_use_is_told_at_once(provoke, error, words):
  m = mtf.Mesh(mtf.Graph(), "m")
  x, w = _t(m, "b:2 h:4 w:4 i:4"), _t(m, "fh:3 fw:3 i:4 o:6")
  with pytest.raises(error) as e:
    provoke(x, w, m)
  missing = [w for w in words if w not in str(e.value)]
  assert not missing, f"{missing} not in: {e.value}"
  assert "\n" not in str(e.value)
