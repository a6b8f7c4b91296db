"""Workspace bytes of TensorFlow's CPU kernels for convolutions of slices.

Forward kernels take almost none. Both gradients of 2-D convolutions copy the windows (im2col), a
few images at a time (TensorFlow 2.21, `Conv2DBackpropFilter` and `Conv2DBackpropInput`); 3-D ones
are computed by these, or by forward kernels (`convolution_slices`).
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.operations.convolution_slices import Window, copies_windows
from mesh_tensorflow.program.dimensions import list_product

# Bytes that the kernels' workspace targets: what they take as the size of the L3 cache.
_AT_HAND = 30 * 2**20


def of_image(
  window: Window,
  image: Sequence[int],
  kernel: Sequence[int],
  features: Sequence[int],
  dtype: tf.DType,
) -> int:
  """Workspace bytes of computing an image from features and a filter.

  Args:
    window: how the filter moves.
    image: sizes of the slice.
    kernel: sizes of the filter's slice.
    features: sizes of the features' slice.
    dtype: of all three.
  """
  batch, space = list_product(window.batch_of(features)), window.space_of(features)
  if not copies_windows(window, dtype):
    return _windows(window, batch, space, kernel, dtype) if window.rank == 2 else 0
  if max(window.strides) > 1:
    # Of one volume the kernel makes what all windows see; of several it goes another way.
    seen = int(list_product(space) * list_product(kernel[:-1]))
    return seen * int(dtype.size) if batch == 1 else 0
  if window.padding == "SAME" and all(k % 2 for k in kernel[:3]):
    return 0
  around = [n + k - 1 for n, k in zip(window.space_of(image), kernel)]
  return int(batch * list_product(around) * int(features[-1]) * dtype.size)


def of_filter(
  window: Window,
  image: Sequence[int],
  kernel: Sequence[int],
  features: Sequence[int],
  dtype: tf.DType,
) -> int:
  """Workspace bytes of the gradient of a filter; arguments as of `of_image`."""
  batch, space = list_product(window.batch_of(features)), window.space_of(features)
  if not copies_windows(window, dtype):
    return _windows(window, batch, space, kernel, dtype) if window.rank == 2 else 0
  depth, planes = window.space_of(image)[0], space[0]
  plane = Window("", 2, [1, *window.strides[2:]], window.padding)
  # The planes that one plane of the filter meets are cut out.
  whole = kernel[0] == 1 and depth == planes
  cut = 0 if whole else list_product(image) // depth * planes + list_product(features)
  return int(cut * dtype.size) + _windows(plane, batch * planes, space[1:], kernel[1:], dtype)


def _windows(
  window: Window, images: int, space: Sequence[int], kernel: Sequence[int], dtype: tf.DType
) -> int:
  """Bytes of the copied windows (im2col buffer) of the images processed at once."""
  if window.grouped:
    return 0
  windows, seen, made = list_product(space), list_product(kernel[:-1]), int(kernel[-1])
  each = windows * seen + windows * made + seen * made
  at_once = -(-(_AT_HAND // dtype.size) // max(each, 1))
  return int(min(images, at_once) * windows * seen * dtype.size)
