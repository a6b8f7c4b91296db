"""Convolutions of drawn geometries, and what TensorFlow's kernels must not be given."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.operations import convolution_slices
from mesh_tensorflow.operations.convolution_slices import Window
from tests.conformance import numpy_convolution
from tests.operations.comparing import run

DRAWS = 150


def draw(rng, rank):
  """A geometry that has something left of the image: often one channel, often one place."""
  kernel = rng.integers(1, 4, rank)
  strides = rng.integers(1, 4, rank)
  image = kernel + rng.integers(0, 5, rank)
  channels, features = rng.choice([1, 1, 1, 2, 8], 2)
  padding = str(rng.choice(["SAME", "VALID"]))
  x = rng.normal(size=[int(rng.integers(1, 4)), *image, channels])
  w = rng.normal(size=[*kernel, channels, features])
  return x, w, [int(s) for s in strides], padding


def reference(x, w, strides, padding):
  """Features in NumPy; the gradients in TensorFlow's float64, which has kernels of its own."""
  y = numpy_convolution.conv(x, w, strides, padding)
  dy = np.random.default_rng(1).normal(size=y.shape)
  given = dict(strides=[1, *strides, 1], padding=padding, out_backprop=dy)
  two = len(strides) == 2
  image = tf.raw_ops.Conv2DBackpropInput if two else tf.raw_ops.Conv3DBackpropInputV2
  kernel = tf.raw_ops.Conv2DBackpropFilter if two else tf.raw_ops.Conv3DBackpropFilterV2
  dx = image(input_sizes=list(x.shape), filter=w, **given)
  return y, dy, dx, kernel(input=x, filter_sizes=list(w.shape), **given)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("rank", [2, 3])
def test_drawn_geometries(rank, traced):
  rng = np.random.default_rng(rank)
  for _ in range(DRAWS // 10 if traced else DRAWS):
    x, w, strides, padding = draw(rng, rank)
    window = Window("conv", rank, [1, *strides, 1], padding)
    y, dy, *gradients = reference(x, w, strides, padding)

    def compute(image, kernel, features, window=window, sizes=y.shape):
      return (
        convolution_slices.features_of(window, image, kernel, sizes),
        convolution_slices.image_of(window, features, kernel, image.shape.as_list()),
        convolution_slices.filter_of(window, image, features, kernel.shape.as_list()),
      )

    compute = tf.function(compute) if traced else compute
    single = [tf.constant(a, tf.float32) for a in (x, w, dy)]
    geometry = f"image {x.shape}, filter {w.shape}, strides {strides}, {padding}"
    for got, expected in zip(compute(*single), (y, *gradients)):
      np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4, err_msg=geometry)


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


def test_gradient_of_a_filter_of_one_pixel_has_no_strides():
  """With strides, oneDNN writes beyond the filter, and the process dies some time later."""
  window = Window("conv", 2, [1, 2, 2, 1], "SAME")
  fn = lambda x, dy: convolution_slices.filter_of(window, x, dy, [1, 1, 4, 8])  # noqa: E731
  made = operations(fn, [2, 5, 5, 4], [2, 3, 3, 8])
  assert made == ({"Conv2DBackpropFilter": [1, 1, 1, 1]}, ["StridedSlice"])
