"""Convolution of slices in TensorFlow, and the sizes that it makes. No mesh here.

A convolution relates three tensors: an image [batch, space..., image channels], a filter
[space..., image channels, feature channels] and features [batch, space..., feature channels].
Features come from an image and a filter. The gradients, the transposed convolution, and the
gradients of all these compute one of the three from the two others.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.dimensions import list_product
from mesh_tensorflow.errors import ShapeError


class Window:
  """How a filter moves over an image: its strides, and what lies beyond the border.

  Args:
    what: the operation, for messages.
    rank: number of spatial dimensions, 2 or 3.
    strides: as TensorFlow's: [1, ..., 1] with the spatial strides in between; None for ones.
    padding: "SAME" (zeros around the image) or "VALID" (the filter stays inside).

  Raises:
    ShapeError: the strides or the padding are something else.
  """

  def __init__(self, what: str, rank: int, strides: Sequence[int] | None, padding: str):
    strides = [1] * (rank + 2) if strides is None else [operator.index(s) for s in strides]
    if len(strides) != rank + 2 or strides[0] != 1 or strides[-1] != 1 or min(strides) < 1:
      example = ", ".join(["1", *(f"stride {i}" for i in range(rank)), "1"])
      raise ShapeError(f"{what}: strides must be a list [{example}] of numbers, got {strides}")
    if padding not in ("SAME", "VALID"):
      raise ShapeError(f"{what}: padding must be 'SAME' or 'VALID', got {padding!r}")
    self.rank, self.padding = rank, padding
    self.strides, self.spatial_strides = strides, strides[1:-1]

  def feature_sizes(self, image: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Spatial sizes of the features of an image, as TensorFlow has them; at least 0."""
    inside = image
    if self.padding == "VALID":
      inside = [max(n - k + 1, 0) for n, k in zip(image, kernel)]
    return [-(-n // s) for n, s in zip(inside, self.spatial_strides)]

  def image_sizes(self, features: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Spatial sizes of the image that a transposed convolution makes."""
    sizes = [n * s for n, s in zip(features, self.spatial_strides)]
    if self.padding == "VALID":
      sizes = [n + max(k - s, 0) for n, k, s in zip(sizes, kernel, self.spatial_strides)]
    return sizes


def features_of(
  window: Window, image: tf.Tensor, kernel: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  """The convolution: features of the shape `sizes`."""
  convolve = tf.raw_ops.Conv2D if window.rank == 2 else tf.raw_ops.Conv3D
  y = convolve(
    input=_one_batch_axis(window, image),
    filter=kernel,
    strides=window.strides,
    padding=window.padding,
  )
  return _reshape(y, sizes)


def image_of(
  window: Window, features: tf.Tensor, kernel: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  """What `features_of` is transposed to: an image of the shape `sizes`."""
  convolve = (
    tf.raw_ops.Conv2DBackpropInput if window.rank == 2 else tf.raw_ops.Conv3DBackpropInputV2
  )
  y = convolve(
    input_sizes=_flat_sizes(window, sizes),
    filter=kernel,
    out_backprop=_one_batch_axis(window, features),
    strides=window.strides,
    padding=window.padding,
  )
  return _reshape(y, sizes)


def filter_of(
  window: Window, image: tf.Tensor, features: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  """The gradient of a filter of the shape `sizes`, summed over the batch."""
  convolve = (
    tf.raw_ops.Conv2DBackpropFilter if window.rank == 2 else tf.raw_ops.Conv3DBackpropFilterV2
  )
  return convolve(
    input=_one_batch_axis(window, image),
    filter_sizes=list(sizes),
    out_backprop=_one_batch_axis(window, features),
    strides=window.strides,
    padding=window.padding,
  )


def _flat_sizes(window: Window, sizes: Sequence[int]) -> list[int]:
  """The sizes with those of all batch axes multiplied."""
  sizes = list(sizes)
  first = len(sizes) - window.rank - 1
  return [list_product(sizes[:first]), *sizes[first:]]


def _one_batch_axis(window: Window, t: tf.Tensor) -> tf.Tensor:
  return _reshape(t, _flat_sizes(window, t.shape.as_list()))


def _reshape(t: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
  return t if t.shape.as_list() == list(sizes) else tf.reshape(t, sizes)
