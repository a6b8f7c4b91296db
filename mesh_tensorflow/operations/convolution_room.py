"""The room that TensorFlow's kernels for CPUs take while they compute a convolution of slices.

Forward kernels take none to speak of. Of the gradients of plane convolutions each copies what the
windows see, a few images at a time (TensorFlow 2.21, `Conv2DBackpropFilter` and
`Conv2DBackpropInput`); volumes are computed by these, or by forward kernels (`convolution_slices`).
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.operations.convolution_slices import Window, copies_windows
from mesh_tensorflow.program.dimensions import list_product

# So many bytes the kernels want to have at hand: what they take as the size of a third cache.
_AT_HAND = 30 * 2**20


def room_of_image(
  window: Window,
  image: Sequence[int],
  kernel: Sequence[int],
  features: Sequence[int],
  dtype: tf.DType,
) -> int:
  """Bytes besides operands and result, for an image computed of features and filter.

  Args:
    window: how the filter moves.
    image: sizes of the slice.
    kernel: those of the filter's.
    features: those of the features'.
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


def room_of_filter(
  window: Window,
  image: Sequence[int],
  kernel: Sequence[int],
  features: Sequence[int],
  dtype: tf.DType,
) -> int:
  """Bytes besides operands and result, for the gradient of a filter; arguments likewise."""
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
  """What the windows of some images see at once."""
  if window.grouped:
    return 0
  windows, seen, made = list_product(space), list_product(kernel[:-1]), int(kernel[-1])
  each = windows * seen + windows * made + seen * made
  at_once = -(-(_AT_HAND // dtype.size) // max(each, 1))
  return int(min(images, at_once) * windows * seen * dtype.size)
