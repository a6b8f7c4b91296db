"""Convolutions of slices that TensorFlow has no kernel for: made of those that it has. No mesh.

`features_of`, `image_of` and `filter_of` take any `Window`: one spatial dimension, dilations,
zeros of given numbers, groups. Each peels off one of these and leaves the rest to the next; as the
three are one trilinear form, what is done to an operand in one is, transposed, done to the result
in another. So the gradients run on every kind of device on which the convolution itself does:
TensorFlow has no gradients on CPUs for dilations, and none for groups. Depthwise convolutions have
kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations import convolution_slices as plain
from mesh_tensorflow.operations.convolution_frames import fitted
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


# A function (window, operand, operand, sizes of the result) as those of `convolution_slices`.
Computation = Callable[[Window, tf.Tensor, tf.Tensor, Sequence[int]], tf.Tensor]


def features_of(
  window: Window, image: tf.Tensor, kernel: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  """The convolution: features of the shape `sizes`."""
  if window.is_plain:
    return plain.features_of(window, image, kernel, sizes)
  if _is_empty(image, kernel, sizes):
    return tf.zeros(sizes, image.dtype)
  parts = _Parts(window, image.shape.as_list(), kernel.shape.as_list(), list(sizes))
  y = parts.features(parts.image_in(image), parts.filter_in(kernel))
  return tf.reshape(parts.features_out(y), sizes)


def image_of(
  window: Window, features: tf.Tensor, kernel: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  """Transpose of `features_of`: an image of the shape `sizes`."""
  if window.is_plain:
    return plain.image_of(window, features, kernel, sizes)
  if _is_empty(features, kernel, sizes):
    return tf.zeros(sizes, features.dtype)
  parts = _Parts(window, list(sizes), kernel.shape.as_list(), features.shape.as_list())
  x = parts.image(parts.features_in(features), parts.filter_in(kernel))
  return tf.reshape(parts.image_out(x), sizes)


def filter_of(
  window: Window, image: tf.Tensor, features: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  """The gradient of a filter of the shape `sizes`, summed over the batch."""
  if window.is_plain:
    return plain.filter_of(window, image, features, sizes)
  if _is_empty(image, features, sizes):
    return tf.zeros(sizes, image.dtype)
  parts = _Parts(window, image.shape.as_list(), list(sizes), features.shape.as_list())
  w = parts.filter(parts.image_in(image), parts.features_in(features))
  return tf.reshape(parts.filter_out(w), sizes)


def turned(window: Window, kernel: tf.Tensor) -> tf.Tensor:
  """Reverses the spatial axes of a filter and swaps its channels: the filter of the transpose."""
  space = list(range(window.rank))
  return tf.transpose(tf.reverse(kernel, space), [*space, window.rank + 1, window.rank])


def _is_empty(a: tf.Tensor, b: tf.Tensor, sizes: Sequence[int]) -> bool:
  return 0 in (*a.shape.as_list(), *b.shape.as_list(), *sizes)


class _Parts:
  """Converts the operands to those of TensorFlow's kernels (`_in`), and results back (`_out`).

  The batch becomes one axis; zeros are added, and what no window meets is cut off. An image with
  dilation d is d images that are interleaved (Yu and Koltun, 2016, arXiv:1511.07122), which join
  the batch, if the stride is 1; with another stride zeros come between the positions of the filter.
  A single spatial axis gets a second one of size 1.
  """

  def __init__(
    self, window: Window, image: list[int], kernel: list[int], features: list[int]
  ) -> None:
    self._window, rank = window, window.rank
    self._image, self._features = window.space_of(image), window.space_of(features)
    self._kernel = kernel[:rank]
    self._batch = list_product(window.batch_of(image))
    self._image_channels = image[-window.channel_dims :]
    self._feature_channels = features[-window.channel_dims :]
    self._filter_channels = kernel[rank:]
    steps, dilations = window.spatial_strides, window.dilations
    reach = window.reach(self._kernel)
    self._before = window.zeros_before(self._image, self._kernel)
    # Sizes of the padded image up to the end of the last window.
    self._long = [(m - 1) * s + r for m, s, r in zip(self._features, steps, reach)]
    self._phases = [d if s == 1 else 1 for s, d in zip(steps, dilations)]
    self._spread = [1 if s == 1 else d for s, d in zip(steps, dilations)]
    # Numbers of windows, rounded up so that the interleaved images have equally many.
    self._windows = [-(-m // p) * p for m, p in zip(self._features, self._phases)]
    self._rows = [n + w - m for n, w, m in zip(self._long, self._windows, self._features)]
    # Up to a whole number of rows of the interleaved images: reach - 1 is (k - 1) * d.
    self._rows = [-(-n // p) * p for n, p in zip(self._rows, self._phases)]
    idle = [1] if rank == 1 else []
    self._inner = Window("", max(rank, 2), [1, *idle, *steps, 1], "VALID", grouped=window.grouped)
    self._idle = idle
    self._compute = _grouped if window.grouped else _ungrouped

  def image_in(self, x: tf.Tensor) -> tf.Tensor:
    x = tf.reshape(x, [self._batch, *self._image, *self._image_channels])
    for i, (b, n, long) in enumerate(zip(self._before, self._image, self._rows)):
      x = fitted(x, i + 1, b, long - b - n)
    return self._to_phases(x, self._rows, self._image_channels)

  def image_out(self, x: tf.Tensor) -> tf.Tensor:
    x = self._from_phases(x, self._rows, self._image_channels)
    for i, (b, n, long) in enumerate(zip(self._before, self._image, self._rows)):
      x = fitted(x, i + 1, -b, n + b - long)
    return x

  def features_in(self, y: tf.Tensor) -> tf.Tensor:
    y = tf.reshape(y, [self._batch, *self._features, *self._feature_channels])
    for i, (m, w) in enumerate(zip(self._features, self._windows)):
      y = fitted(y, i + 1, 0, w - m)
    return self._to_phases(y, self._windows, self._feature_channels)

  def features_out(self, y: tf.Tensor) -> tf.Tensor:
    y = self._from_phases(y, self._windows, self._feature_channels)
    for i, (m, w) in enumerate(zip(self._features, self._windows)):
      y = fitted(y, i + 1, 0, m - w)
    return y

  def filter_in(self, w: tf.Tensor) -> tf.Tensor:
    for i, d in enumerate(self._spread):
      w = spread(w, i, d)
    return tf.reshape(w, self._filter_sizes())

  def filter_out(self, w: tf.Tensor) -> tf.Tensor:
    w = tf.reshape(w, self._filter_sizes()[len(self._idle) :])
    for i, (d, k) in enumerate(zip(self._spread, self._kernel)):
      w = gathered(w, i, d, k)
    return w

  def features(self, x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    sizes = self._inner_sizes(self._windows, self._feature_channels)
    return self._compute(plain.features_of, self._inner, x, w, sizes)

  def image(self, y: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    sizes = self._inner_sizes(self._rows, self._image_channels)
    return self._compute(plain.image_of, self._inner, y, w, sizes)

  def filter(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return self._compute(plain.filter_of, self._inner, x, y, self._filter_sizes())

  def _filter_sizes(self) -> list[int]:
    sizes = [(k - 1) * d + 1 for k, d in zip(self._kernel, self._spread)]
    return [*self._idle, *sizes, *self._filter_channels]

  def _inner_sizes(self, sizes: Sequence[int], channels: Sequence[int]) -> list[int]:
    here = [n // p for n, p in zip(sizes, self._phases)]
    return [self._batch * list_product(self._phases), *self._idle, *here, *channels]

  def _to_phases(self, t: tf.Tensor, sizes: Sequence[int], channels: Sequence[int]) -> tf.Tensor:
    if max(self._phases) > 1:
      rank = len(sizes)
      pairs = [n for size, p in zip(sizes, self._phases) for n in (size // p, p)]
      t = tf.reshape(t, [self._batch, *pairs, list_product(channels)])
      order = [*range(2, 2 * rank + 1, 2), 0, *range(1, 2 * rank, 2), 2 * rank + 1]
      t = tf.transpose(t, order)
    return tf.reshape(t, self._inner_sizes(sizes, channels))

  def _from_phases(self, t: tf.Tensor, sizes: Sequence[int], channels: Sequence[int]) -> tf.Tensor:
    if max(self._phases) > 1:
      rank = len(sizes)
      here = [n // p for n, p in zip(sizes, self._phases)]
      t = tf.reshape(t, [*self._phases, self._batch, *here, list_product(channels)])
      pairs = [n for i in range(rank) for n in (rank + 1 + i, i)]
      t = tf.transpose(t, [rank, *pairs, 2 * rank + 1])
    return tf.reshape(t, [self._batch, *sizes, *channels])


def spread(t: tf.Tensor, axis: int, distance: int) -> tf.Tensor:
  """A tensor whose positions lie `distance` apart, with zeros in between."""
  n = t.shape[axis]
  if distance == 1 or n == 1:
    return t
  sizes = t.shape.as_list()
  t = kernels.pad(tf.expand_dims(t, axis + 1), axis + 1, 0, distance - 1)
  t = tf.reshape(t, [*sizes[:axis], n * distance, *sizes[axis + 1 :]])
  return kernels.cut_axis(t, axis, 0, (n - 1) * distance + 1)


def gathered(t: tf.Tensor, axis: int, distance: int, n: int, begin: int = 0) -> tf.Tensor:
  """Slices `n` positions, `distance` apart, from `begin`: the transpose of `spread`."""
  if distance == 1:
    return kernels.cut_axis(t, axis, begin, n)
  ndims = t.shape.ndims
  begins, steps, ends = [0] * ndims, [1] * ndims, t.shape.as_list()
  begins[axis], steps[axis], ends[axis] = begin, distance, begin + (n - 1) * distance + 1
  return tf.strided_slice(t, begins, ends, steps)


def _ungrouped(
  compute: Computation, window: Window, a: tf.Tensor, b: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  return compute(window, a, b, sizes)


def _grouped(
  compute: Computation, window: Window, a: tf.Tensor, b: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  """Computes each group on its own; all at once, as depthwise, if groups have one channel."""
  shapes: dict[Any, list[list[int]]] = {
    plain.features_of: [a.shape.as_list(), b.shape.as_list(), list(sizes)],
    plain.image_of: [list(sizes), b.shape.as_list(), a.shape.as_list()],
    plain.filter_of: [a.shape.as_list(), list(sizes), b.shape.as_list()],
  }
  image, kernel, features = shapes[compute]
  if image[-1] == 1 and has_depthwise(window, image, a.dtype):
    depthwise = Depthwise(window, image, kernel, features)
    if compute is plain.features_of:
      return depthwise.features(a, b)
    return depthwise.image(a, b) if compute is plain.image_of else depthwise.filter(a, b)
  one = Window("", window.rank, window.strides, window.padding)
  second_is_filter = compute is not plain.filter_of
  axes = a.shape.ndims - 2, b.shape.ndims - (3 if second_is_filter else 2)
  result_axis = len(sizes) - (2 if second_is_filter else 3)
  result = [*sizes[:result_axis], *sizes[result_axis + 1 :]]
  groups = zip(tf.unstack(a, axis=axes[0]), tf.unstack(b, axis=axes[1]))
  return kernels.stack([compute(one, x, y, result) for x, y in groups], result_axis)
