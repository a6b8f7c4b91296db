"""Convolutions of drawn geometries against NumPy; also a program, for TensorFlow's other kernels.

Which kernels TensorFlow takes on a CPU, oneDNN's or Eigen's, depends on the CPU and on the
environment variable TF_ENABLE_ONEDNN_OPTS when it starts, and each kind is wrong somewhere else.
"""

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf

from mesh_tensorflow.operations import convolution_slices
from mesh_tensorflow.operations.convolution_slices import Window
from tests.operations import numpy_convolution


def draw(rng, rank):
  """A geometry that has something left of the image: often one channel, often one place."""
  kernel = rng.integers(1, 5, rank)
  strides = rng.integers(1, 5, rank)
  padding = str(rng.choice(["SAME", "VALID"]))
  image = kernel + rng.integers(0, 5, rank) if padding == "VALID" else rng.integers(1, 8, rank)
  channels, features = rng.choice([1, 1, 1, 2, 8, 17], 2)
  x = rng.normal(size=[int(rng.integers(1, 4)), *image, channels])
  w = rng.normal(size=[*kernel, channels, features])
  return x, w, [int(s) for s in strides], padding


def check(rank, draws, traced):
  """Compares the convolution and both gradients, in float32."""
  rng = np.random.default_rng(rank)
  for _ in range(draws):
    x, w, strides, padding = draw(rng, rank)
    y = numpy_convolution.conv(x, w, strides, padding)
    dy = rng.normal(size=y.shape)
    window = Window("conv", rank, [1, *strides, 1], padding)

    def compute(image, kernel, features, window=window, sizes=y.shape):
      return (
        convolution_slices.features_of(window, image, kernel, sizes),
        convolution_slices.image_of(window, features, kernel, image.shape.as_list()),
        convolution_slices.filter_of(window, image, features, kernel.shape.as_list()),
      )

    compute = tf.function(compute) if traced else compute
    single = [tf.constant(a, tf.float32) for a in (x, w, dy)]
    expected = y, *numpy_convolution.conv_gradients(x, w, dy, strides, padding)
    names = "convolution", "gradient of the image", "gradient of the filter"
    for name, got, value in zip(names, compute(*single), expected):
      geometry = f"{name}: image {x.shape}, filter {w.shape}, strides {strides}, {padding}"
      np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-4, err_msg=geometry)


if __name__ == "__main__":
  for drawn_rank in (2, 3):
    check(drawn_rank, int(sys.argv[1]), traced=False)
    check(drawn_rank, int(sys.argv[1]) // 10, traced=True)
