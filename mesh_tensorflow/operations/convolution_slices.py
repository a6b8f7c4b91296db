"""Convolution of slices in TensorFlow, and the sizes that it makes. No mesh here.

A convolution relates three tensors: an image [batch, space..., image channels], a filter
[space..., image channels, feature channels] and features [batch, space..., feature channels].
Features come from an image and a filter. The gradients, the transposed convolution, and the
gradients of all these compute one of the three from the two others.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product


class Window:
  """Strides, padding and dilations of a convolution.

  Args:
    what: the operation, for messages.
    rank: number of spatial dimensions, 1 to 3.
    strides: as TensorFlow's: [1, ..., 1] with the spatial strides in between; None for ones.
    padding: "SAME" (zeros around the image), "VALID" (the filter stays inside), or for each
      spatial dimension a pair of numbers of zeros (before, after).
    dilations: for each spatial dimension the distance from one position of the filter to the next;
      None for ones.
    grouped: whether image and features have a dimension of groups before that of channels, and the
      filter one before those of channels: each group is a convolution of its own.

  Raises:
    ShapeError: the strides, the padding or the dilations are something else.
  """

  def __init__(
    self,
    what: str,
    rank: int,
    strides: Sequence[int] | None,
    padding: str | Sequence[Sequence[int]],
    dilations: Sequence[int] | None = None,
    grouped: bool = False,
  ):
    strides = [1] * (rank + 2) if strides is None else [operator.index(s) for s in strides]
    if len(strides) != rank + 2 or strides[0] != 1 or strides[-1] != 1 or min(strides) < 1:
      example = ", ".join(["1", *(f"stride {i}" for i in range(rank)), "1"])
      raise ShapeError(f"{what}: strides must be a list [{example}] of numbers, got {strides}")
    dilations = [1] * rank if dilations is None else [operator.index(d) for d in dilations]
    if len(dilations) != rank or min(dilations) < 1:
      raise ShapeError(f"{what}: dilations must be {rank} numbers of at least 1, got {dilations}")
    self.rank, self.padding = rank, _padding_of(what, rank, padding)
    self.strides, self.spatial_strides = strides, strides[1:-1]
    self.dilations, self.grouped = dilations, grouped

  @property
  def channel_dims(self) -> int:
    """Number of dimensions after the spatial ones of an image: groups, if any, and channels."""
    return 2 if self.grouped else 1

  @property
  def is_plain(self) -> bool:
    """True if this module computes it: TensorFlow's Conv2D or Conv3D, without dilations."""
    return (
      self.rank > 1
      and isinstance(self.padding, str)
      and max(self.dilations) == 1
      and not self.grouped
    )

  def inside(self) -> Window:
    """The same window over images that are already padded."""
    return Window("", self.rank, self.strides, "VALID", self.dilations, self.grouped)

  def space_of(self, shape: Sequence[int | Dimension] | Shape) -> list[Any]:
    """Spatial part of the sizes or dimensions of an image, or of features."""
    return list(shape[-self.rank - self.channel_dims : -self.channel_dims])

  def batch_of(self, shape: Sequence[int | Dimension] | Shape) -> list[Any]:
    """Batch part of the sizes or dimensions of an image, or of features."""
    return list(shape[: -self.rank - self.channel_dims])

  def reach(self, kernel: Sequence[int]) -> list[int]:
    """Extent of the dilated filter along each axis."""
    return [(k - 1) * d + 1 if k else 0 for k, d in zip(kernel, self.dilations)]

  def feature_sizes(self, image: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Spatial sizes of the features of an image, as TensorFlow has them; at least 0."""
    inside = list(image)
    if self.padding != "SAME":
      if isinstance(self.padding, list):
        inside = [n + before + after for n, (before, after) in zip(image, self.padding)]
      inside = [max(n - k + 1, 0) for n, k in zip(inside, self.reach(kernel))]
    return [-(-n // s) for n, s in zip(inside, self.spatial_strides)]

  def image_sizes(self, features: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Spatial sizes of the image that a transposed convolution makes."""
    reach = self.reach(kernel)
    if isinstance(self.padding, list):
      # The smallest image that has these features.
      return [
        (n - 1) * s + k - before - after
        for n, s, k, (before, after) in zip(features, self.spatial_strides, reach, self.padding)
      ]
    sizes = [n * s for n, s in zip(features, self.spatial_strides)]
    if self.padding == "VALID":
      sizes = [n + max(k - s, 0) for n, k, s in zip(sizes, reach, self.spatial_strides)]
    return sizes

  def zeros_before(self, image: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Zeros in front of the image, along each axis."""
    if isinstance(self.padding, list):
      return [before for before, _ in self.padding]
    if self.padding == "VALID":
      return [0] * self.rank
    return [max(z, 0) // 2 for z in _padding(self, image, kernel)]


def _padding_of(
  what: str, rank: int, padding: str | Sequence[Sequence[int]]
) -> str | list[tuple[int, int]]:
  if padding in ("SAME", "VALID"):
    return str(padding)
  pairs = []
  if not isinstance(padding, str):
    # AttributeError: how an element of a tf.Tensor of floats says that it is no integer.
    with contextlib.suppress(TypeError, ValueError, AttributeError):
      pairs = [(operator.index(before), operator.index(after)) for before, after in padding]
  if len(pairs) != rank or min(map(min, pairs)) < 0:
    raise ShapeError(
      f"{what}: padding must be 'SAME' or 'VALID', or {rank} pairs of numbers of zeros (before, "
      f"after), got {padding!r}"
    )
  return pairs


def features_of(
  window: Window, image: tf.Tensor, kernel: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  """The convolution: features of the shape `sizes`."""
  if _is_empty(image, kernel, sizes):
    return tf.zeros(sizes, image.dtype)
  convolve = tf.raw_ops.Conv2D if window.rank == 2 else tf.raw_ops.Conv3D
  image, kernel_sizes = _one_batch_axis(window, image), kernel.shape.as_list()
  strides, padding = window.strides, window.padding
  if image.shape[-1] == 1:
    image, strides, padding = _without_idle_strides(window, image, kernel_sizes)
  if window.rank == 3 and padding == "SAME":
    image = _without_skipped_ends(window, image, kernel_sizes)
  y = convolve(input=image, filter=kernel, strides=strides, padding=padding)
  return _reshape(y, sizes)


def _without_idle_strides(
  window: Window, image: tf.Tensor, kernel: Sequence[int]
) -> tuple[tf.Tensor, list[int], str | list[tuple[int, int]]]:
  """Sets the stride to 1 along axes that have one output position only.

  TensorFlow's Conv2D and Conv3D for CPUs (oneDNN, seen in 2.21) read beyond the end of an image
  that has one channel if a stride above 1 leads to one place along the last axis: the values are
  garbage, other ones each time. An image that is as long as the filter there needs no stride.

  Returns:
    (image, strides, padding): as given, if no stride is idle.
  """
  image_sizes, steps = image.shape.as_list()[1:-1], window.spatial_strides
  places = window.feature_sizes(image_sizes, kernel)
  idle = [n == 1 and s > 1 for n, s in zip(places, steps)]
  if not any(idle):
    return image, window.strides, window.padding
  before, after = [0] * window.rank, [0] * window.rank
  if window.padding == "SAME":
    around = [max(z, 0) for z in _padding(window, image_sizes, kernel)]
    before, after = [z // 2 for z in around], [z - z // 2 for z in around]
  if any(before + after):
    image = tf.pad(image, [(0, 0), *zip(before, after), (0, 0)])
  kept = [k if one else n for one, k, n in zip(idle, kernel, image.shape.as_list()[1:-1])]
  if kept != image.shape.as_list()[1:-1]:
    image = tf.slice(image, [0] * (window.rank + 2), [-1, *kept, -1])
  return image, [1, *(1 if one else s for one, s in zip(idle, steps)), 1], "VALID"


def _without_skipped_ends(window: Window, image: tf.Tensor, kernel: Sequence[int]) -> tf.Tensor:
  """The image without its last positions along axes where the last window ends early.

  TensorFlow's Conv3D for CPUs that do not use oneDNN (Eigen, seen in 2.21; in float64 on all)
  computes other values for "SAME" padding where the strides skip two or more positions at the
  end, along any axis: it begins each window too late. One position, as a stride of 2 skips, it
  treats right; its gradients too.
  """
  sizes = image.shape.as_list()
  around = _padding(window, sizes[1:-1], kernel)
  if min(around) >= -1:
    return image
  kept = [n + min(z, 0) for n, z in zip(sizes[1:-1], around)]
  return tf.slice(image, [0] * len(sizes), [-1, *kept, -1])


def _padding(window: Window, image: Sequence[int], kernel: Sequence[int]) -> list[int]:
  """Zeros that "SAME" padding adds along each axis; below 0: positions skipped at the end."""
  places, steps = window.feature_sizes(image, kernel), window.spatial_strides
  reach = window.reach(kernel)
  return [(m - 1) * s + k - n for m, s, k, n in zip(places, steps, reach, image)]


def image_of(
  window: Window, features: tf.Tensor, kernel: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  """Transpose of `features_of`: an image of the shape `sizes`."""
  if _is_empty(features, kernel, sizes):
    return tf.zeros(sizes, features.dtype)
  if copies_windows(window, features.dtype) and max(window.strides) == 1:
    return _image_of_reversed_filter(window, features, kernel, sizes)
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
  if _is_empty(image, features, sizes):
    return tf.zeros(sizes, image.dtype)
  image, features = _one_batch_axis(window, image), _one_batch_axis(window, features)
  if copies_windows(window, image.dtype):
    return _filter_of_planes(window, image, features, sizes)
  convolve = (
    tf.raw_ops.Conv2DBackpropFilter if window.rank == 2 else tf.raw_ops.Conv3DBackpropFilterV2
  )
  strides = window.strides
  if list_product(sizes[: window.rank]) == 1 and max(strides) > 1:
    # TensorFlow's Conv2DBackpropFilter for CPUs (oneDNN, seen in 2.21) writes beyond the end of a
    # filter of one pixel if a stride is above 1, and the process may die at any later time. The
    # pixels that such a filter skips have no part in its gradient.
    image = tf.strided_slice(image, [0] * len(strides), image.shape, strides)
    strides = [1] * len(strides)
  return convolve(
    input=image,
    filter_sizes=list(sizes),
    out_backprop=features,
    strides=strides,
    padding=window.padding,
  )


def copies_windows(window: Window, dtype: tf.DType) -> bool:
  """True if TensorFlow's gradients would copy all windows (im2col): 3-D on CPUs.

  Args:
    window: how the filter moves.
    dtype: of all tensors.
  """
  return window.rank == 3 and dtype in (tf.float32, tf.float64) and kernels.only_cpu_kernels()


def _image_of_reversed_filter(
  window: Window, features: tf.Tensor, kernel: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  """The image, for strides of 1: a convolution of the features with the filter turned around.

  TensorFlow's Conv3DBackpropInputV2 for CPUs (seen in 2.21) first makes what each window sees, a
  filter's size times the image if it is one, and takes twice the time of this.
  """
  reach, image = kernel.shape.as_list()[:3], window.space_of(sizes)
  before = [k - 1 - b for k, b in zip(reach, window.zeros_before(image, reach))]
  after = [
    n + k - 1 - m - b for n, k, m, b in zip(image, reach, window.space_of(features.shape), before)
  ]
  turned = tf.transpose(tf.reverse(kernel, [0, 1, 2]), [0, 1, 2, 4, 3])
  if window.padding == "SAME" and before == after:
    return features_of(Window("", 3, None, "SAME"), features, turned, sizes)
  features = _one_batch_axis(window, features)
  features = tf.pad(features, [(0, 0), *zip(before, after), (0, 0)])
  y = features_of(Window("", 3, None, "VALID"), features, turned, _flat_sizes(window, sizes))
  return _reshape(y, sizes)


def _filter_of_planes(
  window: Window, image: tf.Tensor, features: tf.Tensor, sizes: Sequence[int]
) -> tf.Tensor:
  """Gradient of a 3-D filter, plane by plane.

  TensorFlow's Conv3DBackpropFilterV2 for CPUs (seen in 2.21) first copies all windows, a filter's
  size times the image; this takes a half to a fifth of its time, and no such workspace.
  """
  volume, kernel = image.shape.as_list()[1:-1], list(sizes[: window.rank])
  places = features.shape[1]
  every_volume: tuple[slice, ...] = (slice(None),)
  if image.shape[0] == 1:
    # The planes of a single volume lie in a row: TensorFlow cuts a first axis without a copy.
    image, features = (_reshape(t, t.shape.as_list()[1:]) for t in (image, features))
    every_volume = ()
  step, before = window.spatial_strides[0], window.zeros_before(volume, kernel)[0]
  plane = Window("", 2, [1, *window.strides[2:]], window.padding)
  parts = []
  for i in range(kernel[0]):
    # The features whose window has its position i in the image.
    first = max(-((i - before) // step), 0)
    last = min((volume[0] - 1 + before - i) // step + 1, places)
    if last <= first:
      parts.append(tf.zeros(sizes[1:], image.dtype))
      continue
    begin = first * step - before + i
    end = begin + (last - first - 1) * step + 1
    # One after the other: each copies what its windows see.
    with tf.control_dependencies(parts[-1:]):
      met = image[every_volume + (slice(begin, end, step),)]
      made = features[every_volume + (slice(first, last),)]
      parts.append(filter_of(plane, met, made, list(sizes[1:])))
  return kernels.stack(parts)


def _is_empty(a: tf.Tensor, b: tf.Tensor, sizes: Sequence[int]) -> bool:
  """True if nothing is summed: some size is 0. Which of these a kernel refuses varies by kernel."""
  return 0 in (*a.shape.as_list(), *b.shape.as_list(), *sizes)


def _flat_sizes(window: Window, sizes: Sequence[int]) -> list[int]:
  """The sizes with those of all batch axes multiplied."""
  sizes = list(sizes)
  first = len(sizes) - window.rank - 1
  return [list_product(sizes[:first]), *sizes[first:]]


def _one_batch_axis(window: Window, t: tf.Tensor) -> tf.Tensor:
  return _reshape(t, _flat_sizes(window, t.shape.as_list()))


def _reshape(t: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
  return t if t.shape.as_list() == list(sizes) else tf.reshape(t, sizes)
