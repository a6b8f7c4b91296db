"""Convolutions of drawn geometries, and what TensorFlow's kernels must not be given."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.operations import convolution_slices
from mesh_tensorflow.operations.convolution_slices import Window
from tests.operations import convolution_draws, numpy_convolution
from tests.operations.comparing import rand, run


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("rank", [2, 3])
def test_drawn_geometries(rank, traced):
  convolution_draws.check(rank, 8 if traced else 100, traced)


@pytest.mark.long
@pytest.mark.parametrize("onednn", ["0", "1"])
def test_drawn_geometries_of_each_kind_of_kernels(run_subprocess, onednn):
  run_subprocess(
    ["-m", "tests.operations.convolution_draws", "2000"],
    env={"TF_ENABLE_ONEDNN_OPTS": onednn},
    timeout=1200,
  )


def test_channels_of_a_volume_split_to_one_each(cpu_devices):
  """One input channel, one place along the last axis, stride 2: garbage of oneDNN's until now."""
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=[2, 3, 4, 4, 8]), rng.normal(size=[2, 1, 3, 8, 3])

  def build(mesh):
    image = mtf.import_tf_tensor(mesh, tf.constant(x, tf.float32), "b:2 d:3 h:4 w:4 i:8")
    kernel = mtf.import_tf_tensor(mesh, tf.constant(w, tf.float32), "fd:2 fh:1 fw:3 i:8 o:3")
    return mtf.Conv3dOperation(image, kernel, [1, 1, 1, 2, 1], "VALID").outputs

  expected = numpy_convolution.conv(x, w, [1, 1, 2], "VALID")
  for layout in ("", "i:all"):
    impl = mtf.PlacementMeshImpl("all:8", layout, cpu_devices)
    np.testing.assert_allclose(run(build, impl=impl)[0], expected, rtol=1e-4, atol=1e-4)


def operations(fn, *shapes):
  """The operations of a traced function: name of the kind -> attribute `strides`, where it has."""
  specs = [tf.TensorSpec(s, tf.float32) for s in shapes]
  nodes = tf.function(fn).get_concrete_function(*specs).graph.get_operations()
  return {op.type: list(op.get_attr("strides")) for op in nodes if op.type.startswith("Conv")}, [
    op.type for op in nodes if op.type in ("Pad", "PadV2", "Slice", "StridedSlice")
  ]


def test_idle_strides_of_one_channel_are_left_out():
  window = Window("conv", 2, [1, 1, 2, 1], "VALID")
  fn = lambda x, w: convolution_slices.features_of(window, x, w, [3, 2, 1, 5])  # noqa: E731
  assert operations(fn, [3, 2, 4, 1], [1, 3, 1, 5]) == ({"Conv2D": [1, 1, 1, 1]}, ["Slice"])


@pytest.mark.parametrize("channels,width", [(2, 4), (1, 5)])
def test_other_convolutions_are_given_as_they_are(channels, width):
  window = Window("conv", 2, [1, 1, 2, 1], "VALID")
  sizes = [3, 2, (width - 3) // 2 + 1, 5]
  fn = lambda x, w: convolution_slices.features_of(window, x, w, sizes)  # noqa: E731
  made = operations(fn, [3, 2, width, channels], [1, 3, channels, 5])
  assert made == ({"Conv2D": [1, 1, 2, 1]}, [])


@pytest.mark.parametrize(
  "width,stride,given",
  [(6, 3, 4), (7, 3, 7), (6, 2, 6), (5, 2, 5), (4, 4, 1), (5, 5, 1)],
)
def test_positions_that_strides_skip_at_the_end_of_a_volume_are_left_out(width, stride, given):
  """Two or more of them make Eigen's kernels begin each window of "SAME" padding too late."""
  window = Window("conv", 3, [1, 1, 1, stride, 1], "SAME")
  sizes = [3, 4, 4, -(-width // stride), 5]
  fn = lambda x, w: convolution_slices.features_of(window, x, w, sizes)  # noqa: E731
  made = operations(fn, [3, 4, 4, width, 2], [2, 3, 1, 2, 5])
  assert made == ({"Conv3D": [1, 1, 1, stride, 1]}, [] if given == width else ["Slice"])
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=[3, 4, 4, width, 2]), rng.normal(size=[2, 3, 1, 2, 5])
  expected = numpy_convolution.conv(x, w, [1, 1, stride])
  np.testing.assert_allclose(fn(tf.constant(x), tf.constant(w)), expected, rtol=1e-9)


@pytest.mark.parametrize(
  "batch,channels,features", [(0, 2, 3), (2, 0, 3), (2, 2, 0)], ids=["batch", "image", "features"]
)
@pytest.mark.parametrize("rank", [2, 3])
def test_dimensions_of_size_zero(rank, batch, channels, features):
  """Some kernels refuse them, others not: the values, all of them zeros, need none."""
  window = Window("conv", rank, None, "SAME")
  image, kernel = [batch, *[4] * rank, channels], [*[3] * rank, channels, features]
  x, w, dy = tf.ones(image), tf.ones(kernel), tf.ones([*image[:-1], features])
  made = [
    (convolution_slices.features_of(window, x, w, dy.shape.as_list()), dy.shape),
    (convolution_slices.image_of(window, dy, w, image), image),
    (convolution_slices.filter_of(window, x, dy, kernel), kernel),
  ]
  for value, shape in made:
    np.testing.assert_array_equal(value, np.zeros(shape))


def test_gradient_of_a_filter_of_one_pixel_has_no_strides():
  """With strides, oneDNN writes beyond the filter, and the process dies some time later."""
  window = Window("conv", 2, [1, 2, 2, 1], "SAME")
  fn = lambda x, dy: convolution_slices.filter_of(window, x, dy, [1, 1, 4, 8])  # noqa: E731
  made = operations(fn, [2, 5, 5, 4], [2, 3, 3, 8])
  assert made == ({"Conv2DBackpropFilter": [1, 1, 1, 1]}, ["StridedSlice"])


@pytest.mark.parametrize("padding,depth", [("SAME", 6), ("VALID", 4)])
def test_gradient_of_a_filter_of_one_volume_cuts_its_first_axis(padding, depth):
  """There TensorFlow makes no copies of the planes; of several volumes the second must be cut."""
  window = Window("conv", 3, None, padding)
  fn = lambda x, dy: convolution_slices.filter_of(window, x, dy, [3, 1, 1, 2, 4])  # noqa: E731
  x, dy = tf.constant(rand(2, 6, 5, 4, 2)), tf.constant(rand(2, depth, 5, 4, 4, seed=1))
  both, *single = (fn(x[n], dy[n]) for n in (slice(None), slice(0, 1), slice(1, 2)))
  np.testing.assert_allclose(both, single[0] + single[1], rtol=1e-4, atol=1e-4)
  program = tf.function(fn).get_concrete_function(x[:1], dy[:1])
  cut = [op for op in program.graph.get_operations() if op.type == "StridedSlice"]
  assert cut and all(op.inputs[0].shape.ndims == 4 for op in cut)
