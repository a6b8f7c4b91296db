"""Convolution layers: a filter variable and a convolution; no bias."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import DimensionError, ShapeError
from mesh_tensorflow.operations.convolution import (
  Conv2dOperation,
  Conv2dTransposeOperation,
  Conv3dOperation,
  Conv3dTransposeOperation,
)
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.operations.variables import VariableDType, VariableDTypeLike, get_variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.dimensions import Dimension, DimensionLike, Shape, convert_to_dimension
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["conv1d", "conv2d", "conv2d_transpose", "conv3d", "conv3d_transpose"]


def conv1d(
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: int = 3,
  stride: int = 1,
  **kw_args: Any,
) -> Tensor:
  """Convolution along one dimension: a `conv2d` of an image of height 1.

  Variable: `{name}/kernel` [fh=1, fw, in, out].

  Args:
    x: a `Tensor` [batch..., length, in].
    output_dim: the new last dimension.
    filter_size: along the length.
    stride: along the length.
    **kw_args: for `conv2d`: padding, filter_initializer, variable_dtype, name.

  Returns:
    A `Tensor` [batch..., length, out].

  Raises:
    ShapeError: x has no length and channels.
  """
  if x.shape.ndims < 2:
    raise ShapeError(f"conv1d needs dimensions [batch..., length, channels], got {x}")
  *batch, length, channels = x.shape.dims
  # A filter of height 1 sees this one row, and padding adds none.
  height = Dimension("fake_height", 1)
  image = reshape(x, Shape([*batch, height, length, channels]))
  y = conv2d(image, output_dim, (1, filter_size), (1, stride), **kw_args)
  return reshape(y, Shape([*batch, *y.shape[-2:]]))


def conv2d(
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: Sequence[int] = (3, 3),
  strides: Sequence[int] = (1, 1),
  padding: str = "SAME",
  filter_initializer: Any = None,
  variable_dtype: VariableDTypeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Convolution in two dimensions.

  Variable: `{name}/kernel` [fh, fw, in, out].

  Args:
    x: a `Tensor` [batch..., h, w, in], any number of batch dimensions. All dimensions may be split
      over the mesh; of h and w processors exchange what the filter reaches.
    output_dim: the new last dimension; not the dimension `in` itself.
    filter_size: (height, width).
    strides: (along h, along w).
    padding: "SAME" or "VALID"; sizes are TensorFlow's.
    filter_initializer: what `mtf.get_variable` takes; Glorot-uniform by default.
    variable_dtype: dtypes of the variable; float32 with x's activation dtype by default.
    name: name of the scope; `conv2d`, made unique, by default.

  Returns:
    A `Tensor` [batch..., h, w, out]; h and w keep their names and get new sizes.

  Raises:
    DimensionError: `output_dim` is the input's channel dimension.
    ShapeError: x has too few dimensions, or the image is smaller than a "VALID" filter.
    DTypeError: the variable's activation dtype is not x's.
  """
  return _convolution(
    Conv2dOperation, "conv2d", 2, x, output_dim, filter_size, strides, padding,
    filter_initializer, variable_dtype, name,
  )  # fmt: skip


def conv3d(
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: Sequence[int] = (3, 3, 3),
  strides: Sequence[int] = (1, 1, 1),
  padding: str = "SAME",
  filter_initializer: Any = None,
  variable_dtype: VariableDTypeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Convolution in three dimensions, [batch..., d, h, w, in] to [batch..., d, h, w, out].

  Variable: `{name}/kernel` [fd, fh, fw, in, out]. Otherwise as `conv2d`.
  """
  return _convolution(
    Conv3dOperation, "conv3d", 3, x, output_dim, filter_size, strides, padding,
    filter_initializer, variable_dtype, name,
  )  # fmt: skip


def conv2d_transpose(
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: Sequence[int] = (2, 2),
  strides: Sequence[int] = (2, 2),
  padding: str = "SAME",
  filter_initializer: Any = None,
  variable_dtype: VariableDTypeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Transposed convolution in two dimensions: h and w are multiplied by the strides.

  Variable: `{name}/kernel` [fh, fw, out, in]. With "VALID" padding and a filter larger than
  the stride, the output is larger by their difference. Otherwise as `conv2d`.
  """
  return _convolution(
    Conv2dTransposeOperation, "conv2d_transpose", 2, x, output_dim, filter_size, strides, padding,
    filter_initializer, variable_dtype, name,
  )  # fmt: skip


def conv3d_transpose(
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: Sequence[int] = (2, 2, 2),
  strides: Sequence[int] = (2, 2, 2),
  padding: str = "SAME",
  filter_initializer: Any = None,
  variable_dtype: VariableDTypeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Transposed convolution in three dimensions: d, h and w are multiplied by the strides.

  Variable: `{name}/kernel` [fd, fh, fw, out, in]. Otherwise as `conv2d_transpose`.
  """
  return _convolution(
    Conv3dTransposeOperation, "conv3d_transpose", 3, x, output_dim, filter_size, strides, padding,
    filter_initializer, variable_dtype, name,
  )  # fmt: skip


def spatial_numbers(what: str, rank: int, numbers: Sequence[int]) -> list[int]:
  """The numbers, one for each spatial dimension.

  Raises:
    ShapeError: there are more or fewer, or one is less than 1.
  """
  numbers = [operator.index(n) for n in numbers]
  if len(numbers) != rank or min(numbers) < 1:
    raise ShapeError(f"{what} must be {rank} numbers of at least 1, got {numbers}")
  return numbers


def _convolution(
  operation: Callable[..., Operation],
  layer: str,
  rank: int,
  x: Tensor,
  output_dim: DimensionLike,
  filter_size: Sequence[int],
  strides: Sequence[int],
  padding: str,
  filter_initializer: Any,
  variable_dtype: VariableDTypeLike | None,
  name: str | None,
) -> Tensor:
  output_dim = convert_to_dimension(output_dim)
  filter_size = spatial_numbers(f"{layer} of {x}: filter_size", rank, filter_size)
  strides = spatial_numbers(f"{layer} of {x}: strides", rank, strides)
  if x.shape.ndims and output_dim == x.shape[-1]:
    raise DimensionError(
      f"{layer}: the output dimension {output_dim.name}={output_dim.size} is the channel dimension "
      f"of {x}, and a filter cannot have it twice; give it another name"
    )
  if x.shape.ndims < rank + 1:
    raise ShapeError(
      f"{layer} needs {rank} spatial dimensions and one of channels, after those of the batch, "
      f"got {x}"
    )
  channels = x.shape[-1]
  space = [Dimension(n, k) for n, k in zip(("fd", "fh", "fw")[-rank:], filter_size)]
  transposed = layer.endswith("_transpose")
  made = [output_dim, channels] if transposed else [channels, output_dim]
  if variable_dtype is None:
    variable_dtype = VariableDType(tf.float32, tf.float32, x.dtype)
  with scope.variable_scope(name, default_name=layer, graph=x.graph):
    kernel = get_variable(
      x.mesh, "kernel", Shape(space + made), dtype=variable_dtype, initializer=filter_initializer
    )
    return operation(x, kernel, [1, *strides, 1], padding).outputs[0]
