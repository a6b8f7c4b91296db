"""Depthwise convolutions of slices: each channel with filters of its own. No mesh here."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.convolution_slices import Window
from mesh_tensorflow.program.dimensions import list_product

# The dtypes for which TensorFlow has the kernels on every kind of device.
_DTYPES = (tf.float16, tf.float32, tf.float64)


def has_depthwise(window: Window, image: Sequence[int], dtype: tf.DType) -> bool:
  """True if TensorFlow's depthwise kernels can compute it: they have one stride per plane.

  Args:
    window: how the filter moves.
    image: sizes [batch, space..., groups, 1]; of one row the stride to the next does not matter.
    dtype: of all tensors.
  """
  *_, height, width = window.spatial_strides
  return dtype in _DTYPES and (height == width or image[-4] == 1)


class Depthwise:
  """A depthwise convolution of two or three spatial dimensions, "VALID", in all three directions.

  A volume is a sum over the depth of the filter: of each of its planes with every plane of the
  image that it meets.

  Args:
    window: how the filter moves.
    image: sizes [batch, space..., groups, 1].
    kernel: sizes [space..., groups, 1, made].
    features: sizes [batch, space..., groups, made].
  """

  def __init__(
    self, window: Window, image: Sequence[int], kernel: Sequence[int], features: Sequence[int]
  ):
    self._window = window
    self._image, self._kernel, self._features = list(image), list(kernel), list(features)
    self._groups, self._made = features[-2], features[-1]
    # Along a height of one row any stride is as good as that of the width.
    step = window.spatial_strides[-1]
    self._strides = {"strides": [1, step, step, 1], "padding": "VALID"}
    self._is_volume = window.rank == 3
    self._filter_plane = [*kernel[window.rank - 2 : window.rank], self._groups, self._made]
    planes = image[0] * (features[1] if self._is_volume else 1)
    self._image_planes = [planes, *image[window.rank - 1 : window.rank + 1], self._groups]
    space = features[window.rank - 1 : window.rank + 1]
    self._feature_planes = [planes, *space, self._groups * self._made]

  def features(self, x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """The convolution."""
    parts = [
      tf.raw_ops.DepthwiseConv2dNative(input=planes, filter=plane, **self._strides)
      for planes, plane in zip(self._planes_met(x), self._filter_planes(w))
    ]
    return tf.reshape(parts[0] if len(parts) == 1 else tf.add_n(parts), self._features)

  def image(self, y: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Computes the transpose: an image from features `y` and a filter `w`."""
    y = tf.reshape(y, self._feature_planes)
    parts = [
      tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
        input_sizes=self._image_planes, filter=plane, out_backprop=y, **self._strides
      )
      for plane in self._filter_planes(w)
    ]
    if not self._is_volume:
      return tf.reshape(parts[0], self._image)
    batch, depth, *rest = self._image
    met, step = self._features[1], self._window.spatial_strides[0]
    placed = []
    for first, part in enumerate(parts):
      # Back to the planes first, first + step, ...: zeros between and around them.
      part = tf.reshape(part, [batch, met, 1, list_product(rest)])
      part = tf.reshape(kernels.pad(part, 2, 0, step - 1), [batch, met * step, list_product(rest)])
      part = kernels.cut_axis(part, 1, 0, (met - 1) * step + 1)
      placed.append(kernels.pad(part, 1, first, depth - first - part.shape[1]))
    return tf.reshape(tf.add_n(placed), self._image)

  def filter(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """The gradient of the filter."""
    y = tf.reshape(y, self._feature_planes)
    parts = [
      tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
        input=planes, filter_sizes=self._filter_plane, out_backprop=y, **self._strides
      )
      for planes in self._planes_met(x)
    ]
    return tf.reshape(kernels.stack(parts), self._kernel)

  def _filter_planes(self, w: tf.Tensor) -> list[tf.Tensor]:
    if not self._is_volume:
      return [tf.reshape(w, self._filter_plane)]
    return list(tf.unstack(tf.reshape(w, [self._kernel[0], *self._filter_plane])))

  def _planes_met(self, x: tf.Tensor) -> list[tf.Tensor]:
    """For each plane of the filter the planes of the image under it, as a batch."""
    if not self._is_volume:
      return [tf.reshape(x, self._image_planes)]
    batch, _, *rest = self._image
    met, step = self._features[1], self._window.spatial_strides[0]
    planes = []
    for first in range(self._kernel[0]):
      end = first + (met - 1) * step + 1
      x_met = tf.strided_slice(
        tf.reshape(x, [batch, self._image[1], list_product(rest)]),
        [0, first, 0], [batch, end, list_product(rest)], [1, step, 1],
      )  # fmt: skip
      planes.append(tf.reshape(x_met, self._image_planes))
    return planes
