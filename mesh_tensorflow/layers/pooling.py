"""Pooling layers: the maximum or the average of windows that do not overlap."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_tensorflow.operations.pooling import PoolOperation
from mesh_tensorflow.program.argument_kinds import RealTensor
from mesh_tensorflow.program.graph import Tensor

__all__ = ["avg_pool2d", "avg_pool3d", "max_pool2d", "max_pool3d"]


def max_pool2d(x: RealTensor, ksize: Sequence[int] = (2, 2), name: str = "max_pool2d") -> Tensor:
  """Maximum of each window of an image.

  Where several positions of a window equal its maximum, each gets the whole gradient.

  Args:
    x: a `Tensor` [batch..., h, w, channels]. All dimensions may be split over the mesh; h and
      w if each part is a multiple of the window.
    ksize: (height, width) of the windows, which lie side by side. What is left over at the
      ends of the image is dropped.
    name: name of the operation.

  Returns:
    A `Tensor` [batch..., h // ksize[0], w // ksize[1], channels]; x itself if all sizes are 1.

  Raises:
    SizeError: not as many sizes as spatial dimensions.
    ShapeError: the image is smaller than a window.
  """
  return _pool(x, ksize, "MAX_2D", name)


def max_pool3d(x: RealTensor, ksize: Sequence[int] = (2, 2, 2), name: str = "max_pool3d") -> Tensor:
  """Maximum of each window of [batch..., d, h, w, channels]; otherwise as `max_pool2d`."""
  return _pool(x, ksize, "MAX_3D", name)


def avg_pool2d(x: RealTensor, ksize: Sequence[int] = (2, 2), name: str = "avg_pool2d") -> Tensor:
  """Average of each window of [batch..., h, w, channels]; otherwise as `max_pool2d`."""
  return _pool(x, ksize, "AVG_2D", name)


def avg_pool3d(x: RealTensor, ksize: Sequence[int] = (2, 2, 2), name: str = "avg_pool3d") -> Tensor:
  """Average of each window of [batch..., d, h, w, channels]; otherwise as `max_pool2d`."""
  return _pool(x, ksize, "AVG_3D", name)


def _pool(x: RealTensor, ksize: Sequence[int], kind: str, name: str) -> Tensor:
  if all(k == 1 for k in ksize):
    return x
  return PoolOperation(x, ksize, ksize, kind, name=name).outputs[0]
