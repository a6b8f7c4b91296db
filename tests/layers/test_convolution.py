"""Convolution and pooling layers: variables, sizes, exchanges, errors, blocks of an image."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.errors import (
  DimensionError,
  DTypeError,
  LayoutError,
  ShapeError,
  SizeError,
  UnsupportedError,
)
from tests.kinds import kept
from tests.operations.comparing import placement, rand, run, simd

O = mtf.Dimension("o", 4)  # noqa: E741
HB, WB, DB = mtf.Dimension("hb", 2), mtf.Dimension("wb", 2), mtf.Dimension("db", 2)
PHOTO = "b:2 hb:2 wb:2 h:4 w:4 i:3"


@pytest.fixture
def mesh():
  return mtf.Mesh(mtf.Graph(), "m")


def zeros(mesh, dims):
  return mtf.zeros(mesh, dims)


def variables(mesh):
  return {v.full_name: v.shape.to_string[6:-1] for v in mesh.graph.all_variables}


def says(error, *words):
  missing = [w for w in words if w not in str(error.value)]
  assert not missing, f"{missing} not in: {error.value}"


# --------------------------------------------------------------------- variables


def test_kernels(mesh):
  flat, solid = zeros(mesh, "b:2 h:4 w:6 i:3"), zeros(mesh, "b:2 d:2 h:4 w:6 i:3")
  layers.conv2d(flat, O, (5, 3))
  layers.conv2d(flat, O)
  layers.conv3d(solid, O, (1, 2, 3), name="first")
  layers.conv2d_transpose(flat, O)
  layers.conv3d_transpose(solid, O, (4, 2, 2))
  layers.conv1d(zeros(mesh, "b:2 l:6 i:3"), O, 5)
  blocks = zeros(mesh, PHOTO)
  layers.conv2d_with_blocks(blocks, O, (3, 5), h_blocks_dim=HB, w_blocks_dim=WB)
  layers.conv2d_transpose_with_blocks(blocks, O, h_blocks_dim=HB)
  assert variables(mesh) == {
    "conv2d/kernel": "fh=5, fw=3, i=3, o=4",
    "conv2d_1/kernel": "fh=3, fw=3, i=3, o=4",
    "first/kernel": "fd=1, fh=2, fw=3, i=3, o=4",
    "conv2d_transpose/kernel": "fh=2, fw=2, o=4, i=3",
    "conv3d_transpose/kernel": "fd=4, fh=2, fw=2, o=4, i=3",
    "conv2d_2/kernel": "fh=1, fw=5, i=3, o=4",
    "conv2d_3/kernel": "fh=3, fw=5, i=3, o=4",
    "conv2d_transpose_1/kernel": "fh=2, fw=2, o=4, i=3",
  }


def test_one_name_is_one_kernel(mesh):
  x = zeros(mesh, "b:2 h:4 w:6 i:3")
  layers.conv2d(x, O, name="shared")
  layers.conv2d(x, O, name="shared")
  assert list(variables(mesh)) == ["shared/kernel"]


def test_separable_variables(mesh):
  x = zeros(mesh, "b:2 l:6 i:3")
  layers.separable_conv1d(x, O)
  hack = "separable_conv1d/depthwise_conv_hack/depthwise_dense_"
  assert variables(mesh) == {
    f"{hack}0/kernel": "i=3",
    f"{hack}0/bias": "i=3",
    f"{hack}1/kernel": "i=3",
    f"{hack}2/kernel": "i=3",
    "separable_conv1d/pointwise_dense/kernel": "i=3, o=4",
    "separable_conv1d/pointwise_dense/bias": "o=4",
  }


def test_separable_variables_when_kernels_are_given(mesh):
  x, w = zeros(mesh, "b:2 l:6 i:3"), zeros(mesh, "i:3")
  layers.separable_conv1d(x, O, 0, 1, name="s", kernel_depth_weights=[w, w])
  assert variables(mesh) == {
    "s/depthwise_conv_hack/depthwise_dense_0/bias": "i=3",
    "s/pointwise_dense/kernel": "i=3, o=4",
    "s/pointwise_dense/bias": "o=4",
  }


def test_separable_to_the_own_dimension(mesh):
  y = layers.separable_conv1d(zeros(mesh, "b:2 l:6 i:3"), ("i", 3), use_bias=False)
  assert y.shape == mtf.convert_to_shape("b:2 l:6 i:3")
  assert variables(mesh)["separable_conv1d/pointwise_dense/kernel"] == "_i=3, i=3"


def test_initial_values():
  wide = mtf.Dimension("o", 50)

  def build(m):
    x = zeros(m, "b:1 h:4 w:4 i:30")
    layers.conv2d(x, wide, (3, 5))
    layers.separable_conv1d(
      zeros(m, "b:1 l:4 i:900"), wide, -1, 2, 0.5, 3.0, name="s", use_bias=False
    )
    return [v.outputs[0] for v in m.graph.all_variables]

  kernel, *depthwise, pointwise = run(build)
  bound = math.sqrt(6.0 / (15 * (30 + 50)))
  assert 0.98 * bound < np.abs(kernel).max() <= bound
  # Cut at two standard deviations, which takes a factor of 0.88.
  assert len(depthwise) == 4
  for w in depthwise:
    assert np.abs(w).max() <= 2 * math.sqrt(0.5 / 4)
    assert abs(w.std() / (0.8796 * math.sqrt(0.5 / 4)) - 1) < 0.1
  assert abs(pointwise.std() / (0.8796 * math.sqrt(3.0 / 900)) - 1) < 0.05


def test_dtypes():
  def build(m):
    x = mtf.cast(mtf.import_tf_tensor(m, rand(1, 4, 4, 2), "b:1 h:4 w:4 i:2"), tf.bfloat16)
    y = layers.conv2d(x, O)
    (kernel,) = m.graph.all_variables
    assert (kernel.master_dtype, kernel.activation_dtype) == (tf.float32, tf.bfloat16)
    own = mtf.VariableDType(tf.bfloat16, tf.bfloat16, tf.bfloat16)
    layers.conv2d(x, O, variable_dtype=own, name="own")
    assert m.graph.all_variables[1].master_dtype == tf.bfloat16
    return [y]

  assert run(build)[0].dtype == tf.bfloat16.as_numpy_dtype


def test_filter_initializer_is_called_as_tensorflow_calls_it():
  calls = []

  def init(shape, dtype, **kwargs):
    calls.append((list(shape), dtype))
    return np.full(shape, 0.5, np.float32)

  def build(m):
    return [layers.conv1d(mtf.ones(m, "b:1 l:4 i:2"), O, filter_initializer=init)]

  assert run(build)[0][0, :, 0].tolist() == [2.0, 3.0, 3.0, 2.0]
  assert calls and calls[0] == ([1, 3, 2, 4], tf.float32)


# ------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
  "layer,x,kwargs,shape",
  [
    (layers.conv1d, "b:2 l:7 i:3", {"stride": 2}, "b:2 l:4 o:4"),
    (layers.conv1d, "a:3 b:2 l:7 i:3", {"padding": "VALID"}, "a:3 b:2 l:5 o:4"),
    (layers.conv2d, "b:2 h:7 w:5 i:3", {"strides": (2, 3)}, "b:2 h:4 w:2 o:4"),
    (layers.conv2d, "h:7 w:5 i:3", {"strides": (2, 2), "padding": "VALID"}, "h:3 w:2 o:4"),
    (layers.conv2d_transpose, "b:2 h:7 w:5 i:3", {}, "b:2 h:14 w:10 o:4"),
    (
      layers.conv2d_transpose,
      "b:2 h:7 w:5 i:3",
      {"filter_size": (3, 2), "padding": "VALID"},
      "b:2 h:15 w:10 o:4",
    ),
    (layers.conv3d, "b:2 d:3 h:7 w:5 i:3", {"strides": (2, 1, 2)}, "b:2 d:2 h:7 w:3 o:4"),
    (layers.conv3d_transpose, "b:2 d:3 h:7 w:5 i:3", {}, "b:2 d:6 h:14 w:10 o:4"),
    (
      layers.conv2d_with_blocks,
      PHOTO,
      {"strides": (2, 4), "h_blocks_dim": HB, "w_blocks_dim": WB},
      "b:2 hb:2 wb:2 h:2 w:1 o:4",
    ),
    (
      layers.conv2d_transpose_with_blocks,
      PHOTO,
      {"filter_size": (4, 4), "h_blocks_dim": HB},
      "b:2 hb:2 wb:2 h:8 w:8 o:4",
    ),
  ],
)
def test_shapes(mesh, layer, x, kwargs, shape):
  assert layer(zeros(mesh, x), O, **kwargs).shape == mtf.convert_to_shape(shape)


def test_pools(mesh):
  x, solid = zeros(mesh, "a:2 b:2 h:7 w:4 i:3"), zeros(mesh, "b:2 d:4 h:7 w:4 i:3")
  for flat in (layers.max_pool2d, layers.avg_pool2d):
    assert flat(x).shape == mtf.convert_to_shape("a:2 b:2 h:3 w:2 i:3")
    assert flat(x, (7, 1)).shape == mtf.convert_to_shape("a:2 b:2 h:1 w:4 i:3")
    assert flat(x, (1, 1)) is x
  for deep in (layers.max_pool3d, layers.avg_pool3d):
    assert deep(solid).shape == mtf.convert_to_shape("b:2 d:2 h:3 w:2 i:3")
    assert deep(solid, (1, 1, 1)) is solid
  names = [op.name for op in mesh.graph.operations[2:]]
  assert names == [f"{k}_pool{n}d{i}" for n, k, i in (
    (2, "max", ""), (2, "max", "_1"), (2, "avg", ""), (2, "avg", "_1"), (3, "max", ""),
    (3, "avg", ""))]  # fmt: skip


# ------------------------------------------------- blocks against the whole image


PHOTOS = list(itertools.product([1, 3, 5, 9, 11], [placement, simd], [False, True]))


# In `make test` each size once, and the largest, which reaches furthest, traced on both.
@pytest.mark.parametrize(
  ("size", "make_impl", "in_function"), kept(PHOTOS, [PHOTOS[i] for i in (0, 6, 9, 14, 17, 19)])
)
def test_a_split_photo_is_convolved_as_a_whole_one(size, make_impl, in_function):
  """Blocks of 2 x 3, so that the larger filters reach beyond the neighbour."""
  photo, kernel, dy = rand(2, 8, 6, 3), rand(size, size, 3, 4, seed=1), rand(2, 8, 6, 4, seed=2)
  x, w = tf.constant(photo), tf.constant(kernel)
  with tf.GradientTape() as tape:
    tape.watch([x, w])
    y = tf.nn.conv2d(x, w, 1, "SAME")
  expected = [y, *tape.gradient(y, [x, w], dy)]
  hb = mtf.Dimension("hb", 4)

  def in_blocks(m, array):
    whole = mtf.import_tf_tensor(m, array, f"b:2 H:8 W:6 c:{array.shape[-1]}")
    cut = mtf.reshape(whole, f"b:2 hb:4 h:2 wb:2 w:3 c:{array.shape[-1]}")
    return mtf.transpose(cut, f"b:2 hb:4 wb:2 h:2 w:3 c:{array.shape[-1]}")

  def joined(t, channels):
    t = mtf.transpose(t, f"b:2 hb:4 h:2 wb:2 w:3 {channels}")
    return mtf.reshape(t, f"b:2 H:8 W:6 {channels}")

  def build(m):
    x = in_blocks(m, photo)
    y = layers.conv2d_with_blocks(
      x, O, (size, size), h_blocks_dim=hb, w_blocks_dim=WB, filter_initializer=kernel
    )
    seen = mtf.rename_dimension(in_blocks(m, dy), "c", "o")
    (kernel_variable,) = m.graph.trainable_variables
    dx, dw = mtf.gradients([y], [x, kernel_variable.outputs[0]], [seen])
    return [joined(y, "o:4"), joined(dx, "c:3"), dw]

  for layout in ("", "hb:r,wb:c", "hb:c,b:r") if make_impl is placement else ("hb:r,wb:c",):
    values = run(build, impl=make_impl(layout), in_function=in_function)
    for value, want in zip(values, expected):
      np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_blocks_exchange_only_their_margins(mesh):
  layers.conv2d_with_blocks(
    zeros(mesh, "b:1 hb:2 wb:2 h:8 w:8 i:1"), O, h_blocks_dim=HB, w_blocks_dim=WB
  )
  lowering = mtf.Lowering(mesh.graph, {mesh: placement("hb:r,wb:c")})
  moved = [(k, v) for k, v in lowering.counters if k.startswith("shift")]
  # On 4 processors: rows of 8, then columns of 10.
  assert sorted(moved) == [("shift[-1]", 32), ("shift[-1]", 40), ("shift[1]", 32), ("shift[1]", 40)]
  assert not [k for k, _ in lowering.counters if k.startswith(("allreduce", "allconcat"))]


def test_a_2x2_upscaling_in_blocks_needs_no_exchange(mesh):
  layers.conv2d_transpose_with_blocks(zeros(mesh, PHOTO), O, h_blocks_dim=HB, w_blocks_dim=WB)
  names = [type(op).__name__ for op in mesh.graph.operations]
  assert names == ["Constant", "Variable", "Conv2dTransposeOperation"]


def test_separable_convolution_of_a_split_length_exchanges_margins(mesh):
  x = zeros(mesh, "b:1 l:8 i:3")
  layers.separable_conv1d(x, O, -2, 1)
  lowering = mtf.Lowering(mesh.graph, {mesh: placement("l:r")})
  moved = [(k, v) for k, v in lowering.counters if k.startswith("shift")]
  # On 4 processors (2 of them hold the same): 2 positions, 1 position, 1 position, of 3 channels.
  assert sorted(moved) == [("shift[-1]", 12), ("shift[1]", 12), ("shift[1]", 24)]


# ------------------------------------------------------------------------- errors


def test_a_split_image_without_equal_parts_is_refused(mesh):
  layers.conv2d(zeros(mesh, "b:2 h:4 w:6 i:3"), O, padding="VALID", name="conv", filter_size=(2, 2))
  with pytest.raises(LayoutError) as e:
    mtf.Lowering(mesh.graph, {mesh: placement("h:r")})
  says(e, "conv/conv2d", "h:3", "r:2")


@pytest.mark.parametrize(
  "provoke,error,old,words",
  [
    (
      lambda m: layers.conv2d(zeros(m, "b:2 h:4 w:6 o:4"), O),
      DimensionError,
      ValueError,
      ["conv2d", "o=4", "give it another name"],
    ),
    (
      lambda m: layers.conv2d(zeros(m, "b:2 h:4 w:6 i:3"), O, (3, 3, 3)),
      ShapeError,
      ValueError,
      ["conv2d", "filter_size", "[3, 3, 3]", "h=4"],
    ),
    (
      lambda m: layers.conv2d(zeros(m, "b:2 h:4 w:6 i:3"), O, strides=(1, 0)),
      ShapeError,
      ValueError,
      ["conv2d", "strides", "[1, 0]"],
    ),
    (
      lambda m: layers.conv3d(zeros(m, "h:4 w:6 i:3"), O),
      ShapeError,
      ValueError,
      ["conv3d", "3 spatial", "h=4"],
    ),
    (lambda m: layers.conv1d(zeros(m, "i:3"), O), ShapeError, ValueError, ["conv1d", "i=3"]),
    (
      lambda m: layers.conv2d(
        zeros(m, "b:2 h:4 w:6 i:3"),
        O,
        variable_dtype=mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16),
      ),
      DTypeError,
      ValueError,
      ["float32", "bfloat16"],
    ),
    (
      lambda m: layers.conv2d_with_blocks(zeros(m, PHOTO), O, padding="VALID", h_blocks_dim=HB),
      UnsupportedError,
      NotImplementedError,
      ["conv2d_with_blocks", "SAME", "VALID"],
    ),
    (
      lambda m: layers.conv2d_with_blocks(zeros(m, PHOTO), O, (2, 3), h_blocks_dim=HB),
      SizeError,
      AssertionError,
      ["conv2d_with_blocks", "odd", "[2, 3]"],
    ),
    (
      lambda m: layers.conv2d_transpose_with_blocks(zeros(m, PHOTO), O, (2, 3), h_blocks_dim=HB),
      SizeError,
      AssertionError,
      ["conv2d_transpose_with_blocks", "even", "[2, 3]"],
    ),
    (
      lambda m: layers.conv2d_with_blocks(zeros(m, PHOTO), O, strides=(3, 1), h_blocks_dim=HB),
      ShapeError,
      ValueError,
      ["stride 3", "h=4", "hb=2"],
    ),
    (
      lambda m: layers.conv2d_with_blocks(zeros(m, PHOTO), O, h_blocks_dim=("hb", 3)),
      DimensionError,
      ValueError,
      ["hb=3", "hb=2"],
    ),
    (
      lambda m: layers.conv3d_transpose_with_blocks(zeros(m, "w:2 i:3"), O, d_blocks_dim=DB),
      ShapeError,
      ValueError,
      ["conv3d_transpose_with_blocks", "3 spatial", "w=2"],
    ),
    (
      lambda m: layers.separable_conv1d(zeros(m, "b:2 l:4 i:3"), O, 1, -1),
      ShapeError,
      ValueError,
      ["min_relative_pos 1", "max_relative_pos -1"],
    ),
    (
      lambda m: layers.separable_conv1d(
        zeros(m, "b:2 l:4 i:3"), O, kernel_depth_weights=[zeros(m, "i:3")]
      ),
      ShapeError,
      ValueError,
      ["1 kernel_depth_weights", "3 offsets"],
    ),
    (
      lambda m: layers.separable_conv1d(zeros(m, "i:3"), O),
      ShapeError,
      ValueError,
      ["separable_conv1d", "i=3"],
    ),
    (
      lambda m: layers.max_pool2d(zeros(m, "b:2 h:4 w:6 i:3"), (2, 2, 2)),
      SizeError,
      AssertionError,
      ["max_pool2d", "[2, 2, 2]"],
    ),
  ],
)
def test_wrong_use_is_told_at_once(mesh, provoke, error, old, words):
  with pytest.raises(error) as e:
    provoke(mesh)
  assert isinstance(e.value, old)
  says(e, *words)
