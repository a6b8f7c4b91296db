"""Convolutions in one to three dimensions, with dilations, groups and zeros of any number."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from mesh_tensorflow.errors import DimensionError, ShapeError, SizeError
from mesh_tensorflow.operations.convolution_base import (
  FEATURES,
  FILTER,
  IMAGE,
  Convolution,
  check_operands,
  share_frames,
)
from mesh_tensorflow.operations.convolution_slices import Window
from mesh_tensorflow.operations.einsum import transpose
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.program.argument_kinds import FloatTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Tensor

__all__ = ["convolution"]


class ConvolutionOperation(Convolution):
  """One of image, filter and features of a convolution, from the two others; see `convolution`.

  Args:
    roles: what the first input is, what the second is, what the output is: each of "image",
      "filter" and "features" once.
    inputs: the two tensors.
    output_shape: of the third.
    window: how the filter moves: a `Window`, as of `self.window`.
    name: of the operation.
  """

  def __init__(
    self,
    roles: Sequence[str],
    inputs: Sequence[Tensor],
    output_shape: Shape,
    window: Window,
    name: str | None = None,
  ):
    what = {FEATURES: "", IMAGE: "_transpose", FILTER: "_filter"}[roles[2]]
    family = f"convolution{what}"
    counters = f"{family}/forward", f"{family}_op"
    super().__init__(list(inputs), roles, lambda _: window, name or family, counters)
    self._finish(output_shape, inputs[0].dtype)
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims(
        "splittable", [d.name for d in self.shape_of(FILTER)[: window.rank]]
      )
    )

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    grads: list[Tensor] = []
    for i, role in enumerate(self.roles[:2]):
      # Each of the three is bilinear in the two others: dy takes the place of the result.
      other = self.roles[1 - i]
      known = {other: self._inputs[1 - i], self.roles[2]: grad_ys[0]}
      roles = [r for r in (IMAGE, FEATURES, FILTER) if r != role]
      grad = ConvolutionOperation(
        [*roles, role], [known[r] for r in roles], self._inputs[i].shape, self.window
      )
      grads.append(grad.outputs[0])
    share_frames(*grads)
    return grads


def convolution(
  x: FloatTensor,
  kernel: FloatTensor,
  strides: Sequence[int] | None = None,
  padding: str | Sequence[Sequence[int]] = "SAME",
  dilations: Sequence[int] | None = None,
  *,
  groups: int | DimensionLike = 1,
  spatial_dims: Sequence[DimensionLike] | None = None,
  transposed: bool = False,
  output_sizes: Sequence[int] | None = None,
  name: str | None = None,
) -> Tensor:
  """A convolution in one to three dimensions, or a transposed one.

  All dimensions but the filter's space may be split over the mesh, those of space too: then
  processors exchange what the windows of their part of the output reach, which may be more than
  the blocks of their neighbours. A split dimension of the output must be divisible, as always.

  Args:
    x: [batch..., space..., in], or with `groups` a dimension [batch..., space..., groups, in].
    kernel: [filter space..., in, out], or [filter space..., groups, in, out]; of a transposed
      convolution that of the convolution whose gradient it is, [filter space..., out, in]. One
      to three dimensions of space, which must not be split.
    strides: for each spatial dimension; ones by default.
    padding: "SAME" or "VALID" as TensorFlow has them, or for each spatial dimension a pair
      (before, after) of numbers of zeros; [(k - 1, 0)] is a causal convolution.
    dilations: for each spatial dimension the distance of the filter's positions; ones by default.
    groups: convolutions side by side. A number g: channels [g * in] and a filter [filter
      space..., in, out], of whose `out` each group makes its part, as in Keras. Or a dimension of
      x and of the filter: of a depthwise convolution that of the channels, with x [batch...,
      space..., groups] and a filter [filter space..., groups, out]. A dimension can be split over
      the mesh; of a number the channels are brought together, unless it is that of all channels.
    spatial_dims: the dimensions of x that the filter moves along, in the order of the filter's,
      anywhere in x. The result has them where they are in the forms above, which is the default.
    transposed: whether each position of x makes a window of the output, not the reverse.
    output_sizes: spatial sizes of a transposed convolution. By default, as in Keras, the strides
      times those of x ("SAME"), and with "VALID" as many more as a window, of dilation * (filter
      - 1) + 1, is larger than the stride. A convolution of them must make the sizes of x.
    name: of the operation.

  Returns:
    A `Tensor` [batch..., new space..., out], or [batch..., new space..., groups, out]; the spatial
    dimensions keep their names.

  Raises:
    DimensionError: x lacks a dimension that the filter, `groups` or `spatial_dims` names.
    ShapeError: wrong numbers of dimensions, or of strides or of dilations, or other sizes than
      a convolution of the image makes, or nothing is left of the image.
    SizeError: `groups` does not divide the channels.
    DTypeError: the dtypes differ, or are not floating.
  """
  if isinstance(groups, (tuple, list)):  # A Dimension is a tuple.
    return _grouped(
      x, kernel, strides, padding, dilations, convert_to_dimension(groups), spatial_dims,
      transposed, output_sizes, name,
    )  # fmt: skip
  groups = operator.index(groups)
  if groups == 1:
    arguments = strides, padding, dilations, spatial_dims, transposed, output_sizes
    return _convolve(x, kernel, None, *arguments, name or _default_name(transposed))
  return _grouped_by_number(
    x, kernel, strides, padding, dilations, groups, spatial_dims, transposed, output_sizes,
    name or _default_name(transposed),
  )  # fmt: skip


def _default_name(transposed: bool) -> str:
  return "convolution_transpose" if transposed else "convolution"


def _grouped_by_number(
  x: Tensor,
  kernel: Tensor,
  strides: Sequence[int] | None,
  padding: str | Sequence[Sequence[int]],
  dilations: Sequence[int] | None,
  groups: int,
  spatial_dims: Sequence[DimensionLike] | None,
  transposed: bool,
  output_sizes: Sequence[int] | None,
  name: str,
) -> Tensor:
  """Grouped convolution whose groups are consecutive channels, as in Keras."""
  if kernel.shape.ndims < 3:
    raise ShapeError(f"{name} of {x}: a filter has dimensions of space before two of channels")
  made = kernel.shape.dims[-1]
  channels = made if transposed else _channels(x, kernel, groups, spatial_dims)
  if groups < 1 or channels.size % groups or made.size % groups:
    raise SizeError(
      f"convolution of {x}: groups must divide its channels {channels.name}={channels.size} and "
      f"the filter's last dimension {made.name}={made.size}, got {groups}"
    )
  # Each channel by itself stays where it is; parts of channels are anonymous, and so not split.
  group = channels if groups == channels.size else Dimension("_conv_groups", groups)
  part_in = Dimension("_conv_group_in", channels.size // groups)
  part_made = Dimension("_conv_group_out", made.size // groups)
  x = reshape(x, Shape([d for e in x.shape for d in ([group, part_in] if e == channels else [e])]))
  *space, first, _ = kernel.shape.dims
  if transposed:
    whole = Dimension(first.name, first.size * groups)
    kernel = reshape(kernel, Shape([*space, first, group, part_in]))
    kernel = transpose(kernel, Shape([*space, group, first, part_in]))
  else:
    whole = made
    kernel = reshape(kernel, Shape([*space, part_in, group, part_made]))
    kernel = transpose(kernel, Shape([*space, group, part_in, part_made]))
  y = _convolve(
    x, kernel, group, strides, padding, dilations, spatial_dims, transposed, output_sizes,
    name,
  )  # fmt: skip
  return reshape(y, Shape([*y.shape.dims[:-2], whole]))


def _channels(
  x: Tensor, kernel: Tensor, groups: int, spatial_dims: Sequence[DimensionLike] | None
) -> Dimension:
  """The dimension of all channels of x: the last that is not spatial."""
  space = [convert_to_dimension(d) for d in spatial_dims or ()]
  rest = [d for d in x.shape if d not in space]
  if not rest:
    raise ShapeError(f"convolution of {x}: a dimension of channels is needed besides {space}")
  wanted = kernel.shape.dims[-2].size * groups
  if rest[-1].size != wanted:
    raise SizeError(
      f"convolution of {x}: {groups} groups of {kernel.shape.dims[-2].size} channels, which is "
      f"the filter's {kernel.shape.dims[-2].name}, make {wanted}, not the "
      f"{rest[-1].name}={rest[-1].size} of x"
    )
  return rest[-1]


def _grouped(
  x: Tensor,
  kernel: Tensor,
  strides: Sequence[int] | None,
  padding: str | Sequence[Sequence[int]],
  dilations: Sequence[int] | None,
  group: Dimension,
  spatial_dims: Sequence[DimensionLike] | None,
  transposed: bool,
  output_sizes: Sequence[int] | None,
  name: str | None,
) -> Tensor:
  """Grouped convolution with the groups in a dimension of x and the filter.

  It is depthwise if there is no dimension of channels besides.
  """
  for t in (x, kernel):
    if group not in t.shape:
      raise no_such_dimension("convolution: groups", group, t)
  if kernel.shape.ndims < 3:
    raise ShapeError(
      f"convolution of {x}: a filter with groups has dimensions of space, groups and channels, got "
      f"{kernel}"
    )
  if kernel.shape.dims[-2] == group:
    if transposed:
      raise ShapeError(
        f"convolution of {x}: a transposed one with groups needs a filter [filter space..., "
        f"groups, out, in], got {kernel}"
      )
    one = Dimension("_conv_channel", 1)
    *space, last = kernel.shape.dims
    x = reshape(x, Shape([*(d for d in x.shape), one])) if x.shape.dims[-1] == group else x
    kernel = reshape(kernel, Shape([*space, one, last]))
  return _convolve(
    x, kernel, group, strides, padding, dilations, spatial_dims, transposed, output_sizes,
    name or _default_name(transposed),
  )  # fmt: skip


def _convolve(
  x: Tensor,
  kernel: Tensor,
  group: Dimension | None,
  strides: Sequence[int] | None,
  padding: str | Sequence[Sequence[int]],
  dilations: Sequence[int] | None,
  spatial_dims: Sequence[DimensionLike] | None,
  transposed: bool,
  output_sizes: Sequence[int] | None,
  name: str,
) -> Tensor:
  channels = [kernel.shape.dims[-1 if transposed else -2]] if kernel.shape.ndims > 1 else []
  channels = channels if group is None else [group, *channels]
  rank = kernel.shape.ndims - len(channels) - 1
  if not 1 <= rank <= 3:
    raise ShapeError(
      f"{name} of {x}: a filter has one to three dimensions of space, then two of channels, got "
      f"{kernel}"
    )
  whole = None if strides is None else [1, *strides, 1]
  window = Window(name, rank, whole, padding, dilations, grouped=group is not None)
  if spatial_dims is not None:
    x = _in_order(name, x, [convert_to_dimension(d) for d in spatial_dims], channels, rank)
  check_operands(name, window, x, kernel, transposed)
  space = window.space_of(x.shape.dims)
  sizes, kernel_sizes = [d.size for d in space], [d.size for d in kernel.shape.dims[:rank]]
  if not transposed:
    if output_sizes is not None:
      raise ShapeError(f"{name} of {x}: output_sizes are for a transposed convolution only")
    sizes = window.feature_sizes(sizes, kernel_sizes)
  elif output_sizes is None:
    sizes = window.image_sizes(sizes, kernel_sizes)
  else:
    sizes = [operator.index(n) for n in output_sizes]
  if len(sizes) != rank or min(sizes) < 1:
    raise ShapeError(
      f"{name} of {x} with {kernel}: the output needs {rank} spatial sizes of at least 1, got "
      f"{sizes}"
    )
  made = [*channels[:-1], kernel.shape.dims[-2 if transposed else -1]]
  dims = [*(Dimension(d.name, n) for d, n in zip(space, sizes)), *made]
  shape = Shape([*window.batch_of(x.shape.dims), *dims])
  roles = (FEATURES, FILTER, IMAGE) if transposed else (IMAGE, FILTER, FEATURES)
  return ConvolutionOperation(roles, [x, kernel], shape, window, name).outputs[0]


def _in_order(
  name: str, x: Tensor, space: list[Dimension], channels: list[Dimension], rank: int
) -> Tensor:
  """x with its dimensions in the order batch, space, channels."""
  for d in (*space, *channels):
    if d not in x.shape:
      raise no_such_dimension(name, d, x)
  if len(space) != rank or len({*space, *channels}) != rank + len(channels):
    raise DimensionError(
      f"{name} of {x}: spatial_dims must be {rank} dimensions, all different and none of channels, "
      f"got {Shape(space) if len(set(space)) == len(space) else space}"
    )
  batch = [d for d in x.shape if d not in space and d not in channels]
  order = Shape([*batch, *space, *channels])
  return x if order == x.shape else transpose(x, order)
