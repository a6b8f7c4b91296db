"""Default sizes of transposed convolutions, beside those of Keras and of the docstring."""

import itertools

import keras
import pytest

import mesh_tensorflow as mtf


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_default_sizes_of_transposed_convolutions_are_those_of_keras(padding):
  for n, k, stride, dilation in itertools.product((5, 6), (1, 2, 3, 4), (1, 2, 3), (1, 2)):
    if stride > 1 and dilation > 1:  # Keras has no such layer.
      continue
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.ones(mesh, [("batch", 1), ("rows", n), ("in", 2)])
    kernel = mtf.ones(mesh, [("filter", k), ("out", 3), ("in", 2)])
    y = mtf.convolution(
      x, kernel, strides=[stride], padding=padding, dilations=[dilation], transposed=True
    )
    layer = keras.layers.Conv1DTranspose(
      3, k, strides=stride, dilation_rate=dilation, padding=padding.lower()
    )
    assert y.shape.to_integer_list == list(layer.compute_output_shape((1, n, 2)))
    window = dilation * (k - 1) + 1
    more = max(window - stride, 0) if padding == "VALID" else 0
    assert y.shape.to_integer_list[1] == n * stride + more
