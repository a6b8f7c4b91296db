"""Gradients of the convolutions, which are convolutions themselves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mesh_tensorflow.errors import SizeError
from mesh_tensorflow.operations.convolution_base import (
  FEATURES,
  FILTER,
  IMAGE,
  Convolution,
  share_frames,
)
from mesh_tensorflow.operations.convolution_slices import Window
from mesh_tensorflow.program.dimensions import Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Tensor

__all__ = [
  "Conv2or3dBackpropFilterOperation",
  "Conv2or3dBackpropInputOperation",
  "conv2d_backprop_filter",
  "conv2d_backprop_input",
  "conv2d_transpose_backprop_filter",
  "conv2d_transpose_backprop_input",
  "conv3d_backprop_filter",
  "conv3d_backprop_input",
  "conv3d_transpose_backprop_filter",
  "conv3d_transpose_backprop_input",
]


def gradients_of(op: Convolution, dy: Tensor) -> list[Tensor]:
  """Gradients of the two inputs: each a convolution of dy and the other input."""
  grads = []
  rank, strides, padding = op.window.rank, op.window.strides, str(op.window.padding)
  for i, role in enumerate(op.roles[:2]):
    # Each of image, filter and features is bilinear in the others, so the gradient of one is
    # computed from the other input and dy, which stands in the place of the result.
    known = {op.roles[2]: dy, op.roles[1 - i]: op.inputs[1 - i]}
    shape = op.inputs[i].shape
    grad: Convolution
    if role == FILTER:
      # The input of a transposed convolution is the features.
      transposed = op.roles[0] == FEATURES
      first, second = (FEATURES, IMAGE) if transposed else (IMAGE, FEATURES)
      x, given = known[first], known[second]
      grad = Conv2or3dBackpropFilterOperation(rank, transposed, x, shape, given, strides, padding)
    else:
      transposed = role == FEATURES
      kernel, given = known[FILTER], known[IMAGE if transposed else FEATURES]
      grad = Conv2or3dBackpropInputOperation(
        rank, transposed, shape, kernel, given, strides, padding
      )
    grads.append(grad.outputs[0])
  share_frames(*grads)
  return grads


class _Backprop(Convolution):
  """Base class of the gradients of the two inputs of a convolution.

  Args:
    inputs: the other input, and the gradient of the output, in the order of `roles`.
    roles: `IMAGE`, `FILTER` or `FEATURES` for each of them and for the result, as in a convolution
      that is not transposed; a transposed one swaps image and features.
    conv_dimension: number of spatial dimensions, 2 or 3.
    is_transpose: whether the convolution is a transposed one.
    output_shape: of the result.
    strides: of the convolution, [1, ..., 1] with the spatial strides in between; None for ones.
    padding: of the convolution, "SAME" or "VALID".
    name: of the operation.
    names: suffixes to the name of the convolution, of the default name of the operation and of
      the names of its two counters.
  """

  def __init__(
    self,
    inputs: list[Tensor],
    roles: Sequence[str],
    conv_dimension: int,
    is_transpose: bool,
    output_shape: Shape,
    strides: Sequence[int] | None,
    padding: str,
    name: str | None,
    names: tuple[str, str, str],
  ):
    family = f"conv{conv_dimension}d_trans" if is_transpose else f"conv{conv_dimension}d"
    default, work, reduced = (family + n for n in names)
    name = name or default
    if conv_dimension not in (2, 3):
      raise SizeError(f"{name}: conv_dimension must be 2 or 3, got {conv_dimension!r}")
    if is_transpose:
      swapped = {IMAGE: FEATURES, FEATURES: IMAGE}
      roles = [swapped.get(role, role) for role in roles]
    window = functools.partial(Window, rank=conv_dimension, strides=strides, padding=padding)
    super().__init__(inputs, roles, window, name, (work, reduced))
    self._finish(output_shape, inputs[0].dtype)
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return gradients_of(self, grad_ys[0])


class Conv2or3dBackpropInputOperation(_Backprop):
  """Gradient of the input of a convolution; see `conv2d_backprop_input`.

  Args:
    conv_dimension: number of spatial dimensions, 2 or 3.
    is_transpose: whether the convolution is a transposed one.
    input_shape: `Shape` of its input, and of the result.
    conv_filter: its filter.
    dy: gradient of its output.
    strides: of the convolution, [1, ..., 1] with the spatial strides in between; None for ones.
    padding: of the convolution, "SAME" or "VALID".
    name: of the operation.
  """

  def __init__(
    self,
    conv_dimension: int,
    is_transpose: bool,
    input_shape: Shape,
    conv_filter: Tensor,
    dy: Tensor,
    strides: Sequence[int] | None,
    padding: str,
    name: str | None = None,
  ):
    names = ("_backprop", "/backprop_input", "_op")
    roles = (FEATURES, FILTER, IMAGE)
    super().__init__(
      [dy, conv_filter], roles, conv_dimension, is_transpose, input_shape, strides, padding, name,
      names,
    )  # fmt: skip


class Conv2or3dBackpropFilterOperation(_Backprop):
  """Gradient of the filter of a convolution; see `conv2d_backprop_filter`.

  Args:
    conv_dimension: number of spatial dimensions, 2 or 3.
    is_transpose: whether the convolution is a transposed one.
    conv_input: its input.
    filter_shape: `Shape` of its filter, and of the result.
    dy: gradient of its output.
    strides: of the convolution, [1, ..., 1] with the spatial strides in between; None for ones.
    padding: of the convolution, "SAME" or "VALID".
    name: of the operation.
  """

  def __init__(
    self,
    conv_dimension: int,
    is_transpose: bool,
    conv_input: Tensor,
    filter_shape: Shape,
    dy: Tensor,
    strides: Sequence[int] | None,
    padding: str,
    name: str | None = None,
  ):
    names = ("_backprop_filter", "/backprop_filter", "_backprop_filter")
    roles = (IMAGE, FEATURES, FILTER)
    super().__init__(
      [conv_input, dy], roles, conv_dimension, is_transpose, filter_shape, strides, padding, name,
      names,
    )  # fmt: skip


def _backprop_input(rank: int, transposed: bool, input_shape: ShapeLike, *arguments: Any) -> Tensor:
  shape = convert_to_shape(input_shape)
  return Conv2or3dBackpropInputOperation(rank, transposed, shape, *arguments).outputs[0]


def _backprop_filter(
  rank: int, transposed: bool, conv_input: Tensor, filter_shape: ShapeLike, *arguments: Any
) -> Tensor:
  shape = convert_to_shape(filter_shape)
  return Conv2or3dBackpropFilterOperation(rank, transposed, conv_input, shape, *arguments).outputs[
    0
  ]


def conv2d_backprop_input(
  input_shape: ShapeLike,
  conv_filter: Tensor,
  dy: Tensor,
  strides: Sequence[int] | None,
  padding: str,
  name: str | None = None,
) -> Tensor:
  """Gradient of the input of a convolution in two dimensions.

  Args:
    input_shape: shape of the input, [batch..., h, w, in].
    conv_filter: the filter, [fh, fw, in, out].
    dy: gradient of the output, [batch..., h, w, out]. If `out` is split, the result is a
      pending sum over that mesh axis.
    strides: of the convolution, [1, s_h, s_w, 1]; None for ones.
    padding: of the convolution, "SAME" or "VALID".
    name: of the operation.

  Returns:
    A `Tensor` of the shape `input_shape`.

  Raises:
    ShapeError: the shapes do not fit together.
    DTypeError: the filter and dy differ in dtype, or are not floating.
  """
  return _backprop_input(2, False, input_shape, conv_filter, dy, strides, padding, name)


def conv2d_transpose_backprop_input(
  input_shape: ShapeLike,
  conv_filter: Tensor,
  dy: Tensor,
  strides: Sequence[int] | None,
  padding: str,
  name: str | None = None,
) -> Tensor:
  """Gradient of the input of a transposed convolution in two dimensions.

  Arguments as `conv2d_backprop_input`; the filter is [fh, fw, out, in].
  """
  return _backprop_input(2, True, input_shape, conv_filter, dy, strides, padding, name)


def conv3d_backprop_input(
  input_shape: ShapeLike,
  conv_filter: Tensor,
  dy: Tensor,
  strides: Sequence[int] | None,
  padding: str,
  name: str | None = None,
) -> Tensor:
  """Gradient of the input of a convolution in three dimensions.

  Arguments as `conv2d_backprop_input`; the filter is [fd, fh, fw, in, out].
  """
  return _backprop_input(3, False, input_shape, conv_filter, dy, strides, padding, name)


def conv3d_transpose_backprop_input(
  input_shape: ShapeLike,
  conv_filter: Tensor,
  dy: Tensor,
  strides: Sequence[int] | None,
  padding: str,
  name: str | None = None,
) -> Tensor:
  """Gradient of the input of a transposed convolution in three dimensions.

  Arguments as `conv2d_backprop_input`; the filter is [fd, fh, fw, out, in].
  """
  return _backprop_input(3, True, input_shape, conv_filter, dy, strides, padding, name)


def conv2d_backprop_filter(
  conv_input: Tensor,
  filter_shape: ShapeLike,
  dy: Tensor,
  strides: Sequence[int] | None,
  padding: str,
  name: str | None = None,
) -> Tensor:
  """Gradient of the filter of a convolution in two dimensions.

  Args:
    conv_input: the input, [batch..., h, w, in]. If batch dimensions are split, the result
      is a pending sum over their mesh axes.
    filter_shape: shape of the filter, [fh, fw, in, out].
    dy: gradient of the output, [batch..., h, w, out].
    strides: of the convolution, [1, s_h, s_w, 1]; None for ones.
    padding: of the convolution, "SAME" or "VALID".
    name: of the operation.

  Returns:
    A `Tensor` of the shape `filter_shape`.

  Raises:
    ShapeError: the shapes do not fit together.
    DTypeError: the input and dy differ in dtype, or are not floating.
  """
  return _backprop_filter(2, False, conv_input, filter_shape, dy, strides, padding, name)


def conv2d_transpose_backprop_filter(
  conv_input: Tensor,
  filter_shape: ShapeLike,
  dy: Tensor,
  strides: Sequence[int] | None,
  padding: str,
  name: str | None = None,
) -> Tensor:
  """Gradient of the filter of a transposed convolution in two dimensions.

  Arguments as `conv2d_backprop_filter`; the filter is [fh, fw, out, in].
  """
  return _backprop_filter(2, True, conv_input, filter_shape, dy, strides, padding, name)


def conv3d_backprop_filter(
  conv_input: Tensor,
  filter_shape: ShapeLike,
  dy: Tensor,
  strides: Sequence[int] | None,
  padding: str,
  name: str | None = None,
) -> Tensor:
  """Gradient of the filter of a convolution in three dimensions.

  Arguments as `conv2d_backprop_filter`; the filter is [fd, fh, fw, in, out].
  """
  return _backprop_filter(3, False, conv_input, filter_shape, dy, strides, padding, name)


def conv3d_transpose_backprop_filter(
  conv_input: Tensor,
  filter_shape: ShapeLike,
  dy: Tensor,
  strides: Sequence[int] | None,
  padding: str,
  name: str | None = None,
) -> Tensor:
  """Gradient of the filter of a transposed convolution in three dimensions.

  Arguments as `conv2d_backprop_filter`; the filter is [fd, fh, fw, out, in].
  """
  return _backprop_filter(3, True, conv_input, filter_shape, dy, strides, padding, name)
