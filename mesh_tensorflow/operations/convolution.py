"""Convolutions and transposed convolutions in two and three dimensions.

The functions that own filters are in `mesh_tensorflow.layers`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from mesh_tensorflow.operations.convolution_base import (
  FEATURES,
  FILTER,
  IMAGE,
  Convolution,
  check_operands,
)
from mesh_tensorflow.operations.convolution_gradients import gradients_of
from mesh_tensorflow.operations.convolution_slices import Window
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor

__all__ = [
  "Conv2dOperation",
  "Conv2dTransposeOperation",
  "Conv3dOperation",
  "Conv3dTransposeOperation",
]


class _Forward(Convolution):
  """A convolution or a transposed one; the output has the names of the input's dimensions."""

  _rank: int
  _transposed = False

  def __init__(
    self,
    conv_input: Tensor,
    conv_filter: Tensor,
    strides: Sequence[int] | None,
    padding: str,
    name: str | None = None,
  ):
    rank, transposed = self._rank, self._transposed
    family = f"conv{rank}d_transpose" if transposed else f"conv{rank}d"
    name = name or family
    roles = (FEATURES, FILTER, IMAGE) if transposed else (IMAGE, FILTER, FEATURES)
    counters = f"{family}/forward", f"{family}_op"
    window = functools.partial(Window, rank=rank, strides=strides, padding=padding)
    super().__init__([conv_input, conv_filter], roles, window, name, counters)
    check_operands(self.name, self.window, conv_input, conv_filter, transposed)
    space = conv_input.shape[-rank - 1 : -1]
    resize = self.window.image_sizes if transposed else self.window.feature_sizes
    sizes = resize([d.size for d in space], [d.size for d in conv_filter.shape[:rank]])
    # The filter of a transposed convolution is that of the convolution whose gradient it is, from
    # [..., made] to [..., taken].
    made = conv_filter.shape[-2 if transposed else -1]
    dims = [*(Dimension(d.name, n) for d, n in zip(space, sizes)), made]
    self._finish(Shape(conv_input.shape[: -rank - 1] + dims), conv_input.dtype)
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims(
        "splittable", [d.name for d in [*space, *conv_filter.shape[:rank]]]
      )
    )

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return gradients_of(self, grad_ys[0])


class Conv2dOperation(_Forward):
  """Convolution [batch..., h, w, in] with [fh, fw, in, out] to [batch..., h, w, out].

  The output's h and w have TensorFlow's sizes: divided by the stride and rounded up, after
  `filter size - 1` is taken off for "VALID" padding. Batch dimensions, `out`, h and w may be
  split: processors exchange what the windows of their part of the output reach. If `in` is split,
  the result is a pending sum over that mesh axis; the filter's space must not be split.

  Args:
    conv_input: a `Tensor` with any number of batch dimensions.
    conv_filter: a `Tensor` of the same dtype.
    strides: [1, s_h, s_w, 1]; None for ones.
    padding: "SAME" or "VALID".
    name: of the operation.

  Raises:
    DimensionError: the filter's third dimension is not the input's last.
    ShapeError: another number of dimensions, or nothing is left of the image.
    DTypeError: the dtypes differ, or are not floating.
  """

  _rank = 2


class Conv3dOperation(_Forward):
  """Convolution [batch..., d, h, w, in] with [fd, fh, fw, in, out] to [batch..., d, h, w, out].

  Otherwise as `Conv2dOperation`; strides are [1, s_d, s_h, s_w, 1].
  """

  _rank = 3


class Conv2dTransposeOperation(_Forward):
  """Transposed convolution [batch..., h, w, in] with [fh, fw, out, in] to [batch..., h, w, out].

  It is the gradient of a convolution from the larger image to the smaller one. The output's
  h and w are multiplied by the stride; with "VALID" padding, what a filter larger than the
  stride reaches beyond that is added (as in Keras). Arguments, and what may be split, are those
  of `Conv2dOperation`.

  Raises:
    DimensionError: the filter's last dimension is not the input's last.
    ShapeError: another number of dimensions.
    DTypeError: the dtypes differ, or are not floating.
  """

  _rank, _transposed = 2, True


class Conv3dTransposeOperation(_Forward):
  """Transposed convolution in three dimensions, with a filter [fd, fh, fw, out, in].

  Otherwise as `Conv2dTransposeOperation`; strides are [1, s_d, s_h, s_w, 1].
  """

  _rank, _transposed = 3, True
