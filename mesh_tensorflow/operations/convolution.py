"""Convolutions, transposed convolutions and their gradients, in one to three dimensions.

All are one operation, which computes one of image, filter and features from the two others. The
functions that own filters are in `mesh_tensorflow.layers`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments import families
from mesh_tensorflow.errors import DimensionError, DTypeError, LayoutError, ShapeError, SizeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations import convolution_kernels, workspace
from mesh_tensorflow.operations.convolution_frames import Frames, Reach, split_axis
from mesh_tensorflow.operations.convolution_slices import Window
from mesh_tensorflow.operations.einsum import transpose
from mesh_tensorflow.operations.reduction import mesh_axes_of
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.program.argument_kinds import FloatTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  ShapeLike,
  convert_to_dimension,
  convert_to_shape,
  list_product,
  no_such_dimension,
  shape_union,
)
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = [
  "Conv2dOperation",
  "Conv2dTransposeOperation",
  "Conv2or3dBackpropFilterOperation",
  "Conv2or3dBackpropInputOperation",
  "Conv3dOperation",
  "Conv3dTransposeOperation",
  "conv2d_backprop_filter",
  "conv2d_backprop_input",
  "conv2d_transpose_backprop_filter",
  "conv2d_transpose_backprop_input",
  "conv3d_backprop_filter",
  "conv3d_backprop_input",
  "conv3d_transpose_backprop_filter",
  "conv3d_transpose_backprop_input",
  "convolution",
]

IMAGE, FILTER, FEATURES = "image", "filter", "features"

# How each is computed from the two others, which stand in this order.
_COMPUTED = {
  FEATURES: (convolution_kernels.features_of, IMAGE, FILTER),
  IMAGE: (convolution_kernels.image_of, FEATURES, FILTER),
  FILTER: (convolution_kernels.filter_of, IMAGE, FEATURES),
}


class Convolution(Operation):
  """Base class: one of image, filter and features, computed from the two others.

  `convolution_slices` says what the three are. What is summed over is the image channels for
  features, the feature channels for an image, batch and space for a filter; where it is split, the
  sum over that mesh axis is pending. Where the space of image or features is split, processors
  exchange what the windows of their outputs reach (`convolution_frames`).

  Args:
    inputs: the two tensors.
    roles: what the first is, what the second is, what the output is.
    window: a function of the operation's name that makes its `Window`.
    name: of the operation.
    counters: names of the counters of its work and of its allreduce.
  """

  def __init__(
    self,
    inputs: list[Tensor],
    roles: Sequence[str],
    window: Callable[[str], Window],
    name: str,
    counters: tuple[str, str],
  ):
    super().__init__(inputs, name=name)
    self.window = window(self.name)
    self.roles = tuple(roles)
    self._work_counter, self._reduce_counter = counters
    # The gradient of the other input, whose frames the gradient of a filter reuses; and the frames
    # saved for that: by lowering in progress (tensor, frames).
    self._beside: Convolution | None = None
    self._kept: weakref.WeakKeyDictionary[LoweringInProgress, tuple[Tensor, Any]] | None = None
    for x in inputs:
      if not x.dtype.is_floating or x.dtype != inputs[0].dtype:
        raise DTypeError(
          f"{self.name}: a convolution needs two tensors of one floating dtype, got {inputs[0]} "
          f"and {inputs[1]}; cast one of them (mtf.cast)"
        )

  def _finish(self, output_shape: Shape, dtype: tf.DType) -> None:
    """Creates the output tensor and checks that the three shapes match."""
    self._outputs = [Tensor(self, output_shape, dtype)]
    image, kernel, features = self.shape_of(IMAGE), self.shape_of(FILTER), self.shape_of(FEATURES)
    rank = self.window.rank
    check_ndims(self.name, self.window, image, kernel, features)
    if (
      image[-1] != kernel[-2]
      or features[-1] != kernel[-1]
      or self.window.batch_of(image) != self.window.batch_of(features)
      or (self.window.grouped and not image[-2] == kernel[-3] == features[-2])
    ):
      g = "g, " if self.window.grouped else ""
      raise ShapeError(
        f"{self.name}: the shapes do not fit together: an image {image}, a filter {kernel} and "
        f"features {features}; they must be [batch..., {rank} of space, {g}i], "
        f"[{rank} of space, {g}i, o] and [batch..., {rank} of space, {g}o]"
      )
    if not kernel.size and image.size:
      raise ShapeError(f"{self.name}: the filter {kernel} has no elements")
    sizes = [d.size for d in self.window.space_of(image)]
    kernel_sizes = [d.size for d in kernel[:rank]]
    want = self.window.feature_sizes(sizes, kernel_sizes)
    if min(want) < 1 or want != [d.size for d in self.window.space_of(features)]:
      dilations = self.window.dilations
      dilated = f"dilations {dilations}, " if max(dilations) > 1 else ""
      raise ShapeError(
        f"{self.name}: a convolution of the image {image} with the filter {kernel}, {dilated}"
        f"strides {self.window.strides} and {self.window.padding} padding makes the spatial sizes "
        f"{want}, not those of {features}"
      )

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    grads = []
    for i, role in enumerate(self.roles[:2]):
      # Each of image, filter and features is bilinear in the others, so the gradient of one is
      # computed from the other input and dy, which stands in the place of the result.
      known = {self.roles[1 - i]: self._inputs[1 - i], self.roles[2]: grad_ys[0]}
      grads.append(self._compute(role, known, self._inputs[i].shape).outputs[0])
    share_frames(*grads)
    return grads

  def _compute(self, role: str, known: Mapping[str, Tensor], shape: Shape) -> Convolution:
    """A convolution with this window that computes `role`, of the given shape, from the others."""
    raise NotImplementedError

  def shape_of(self, role: str) -> Shape:
    """Shape of the image, the filter or the features."""
    return self.tensor_of(role).shape

  def tensor_of(self, role: str) -> Tensor:
    """The input or output that is the image, the filter or the features."""
    return (self._inputs + self._outputs)[self.roles.index(role)]

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    kernel = self.tensor_of(FILTER)
    for d in kernel.shape[: self.window.rank]:
      self._require_whole(mesh_impl, d, kernel)
    super().verify_layout(mesh_impl)
    # Each processor computes its block of the result from its part of what is summed over: one
    # mesh axis cannot be for both. It can be only if image and features name their space otherwise.
    summed = {split_axis(mesh_impl, d): d for d in self._summed_dims()}
    for d in self._outputs[0].shape:
      axis = split_axis(mesh_impl, d)
      if axis is not None and axis in summed:
        m, other = mesh_impl.shape[axis], summed[axis]
        raise LayoutError(
          f"{type(self).__name__} {self.name}: dimension {d.name}:{d.size} of {self._outputs[0]} "
          f"and {other.name}:{other.size}, which is summed over, are both split over mesh axis "
          f"{m.name}:{m.size}; drop the rule of one of them, or rename it "
          "(mtf.rename_dimension to a name without a rule)"
        )

  def _require_whole(self, mesh_impl: MeshImpl, dim: Dimension, kernel: Tensor) -> None:
    axis = split_axis(mesh_impl, dim)
    if axis is None:
      return
    m = mesh_impl.shape[axis]
    raise LayoutError(
      f"{type(self).__name__} {self.name}: spatial dimension {dim.name}:{dim.size} of the filter "
      f"{kernel} is split over mesh axis {m.name}:{m.size}, but a processor needs it whole; rename "
      f"it first (mtf.rename_dimension to a name without a rule), or drop the rule "
      f"{dim.name}:{m.name}"
    )

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    out, result = self._outputs[0], self.roles[2]
    frames = self._frames(impl)
    if any(f.is_split for f in frames):
      laid_out = self._lower_split(lowering, impl, frames)
    else:
      fn, *operands = _COMPUTED[result]
      sizes = impl.slice_shape(out.shape)
      laid_out = impl.slicewise(
        lambda a, b: fn(self.window, a, b, sizes),
        *[lowering.tensors[self.tensor_of(role)] for role in operands],
      )
    mesh_axes = mesh_axes_of(impl, self._summed_dims())
    if mesh_axes:
      key, size = f"allreduce/{mesh_axes}/{self._reduce_counter}", impl.laid_out_size(out.shape)
      laid_out = LazyAllreduceSum(
        impl, laid_out, mesh_axes, lambda: lowering.add_counter(key, size)
      )
    lowering.set_tensor_lowering(out, laid_out)
    features = self._inputs[1] if result == FILTER else out
    work = shape_union([self.shape_of(FILTER), features.shape])
    family, what = self._work_counter.split("/")
    lowering.add_counter(f"{family}/{what}", impl.laid_out_size(work))
    lowering.add_counter(f"{family}_unique/{what}", work.size)

  def _lower_split(
    self, lowering: LoweringInProgress, impl: MeshImpl, frames: Sequence[Frames]
  ) -> Any:
    """Lowers the operation if the space is split: computes the result from frames."""
    window, result = self.window.inside(), self.roles[2]
    fn, *operands = _COMPUTED[result]
    slices = [lowering.tensors[self.tensor_of(role)] for role in operands]
    sizes = impl.slice_shape(self._outputs[0].shape)
    if result == IMAGE and self._turns_filter:
      taken = self._take(lowering, FEATURES, self._frames_of_features(impl))
      return impl.slicewise(
        lambda y, w: convolution_kernels.features_of(
          window, y, convolution_kernels.turned(window, w), sizes
        ),
        taken,
        slices[1],
      )
    shared = self._shared_frames(lowering, impl) if result == FILTER else None
    if shared is not None and self._beside_turns_filter(impl):
      # Each pair of a position of the image and a window that meets it is where the position lies,
      # not where the window begins: frames of the features, turned around, stand for those of
      # the image.
      *space, i, o = sizes
      return impl.slicewise(
        lambda y, x: convolution_kernels.turned(
          window, convolution_kernels.filter_of(window, y, x, [*space, o, i])
        ),
        shared,
        slices[0],
      )
    if operands[0] == IMAGE:
      slices[0] = self._take(lowering, IMAGE, frames) if shared is None else shared
    if result == IMAGE:
      first = len(sizes) - window.rank - window.channel_dims
      sizes[first : first + window.rank] = [f.size for f in frames]
    laid_out = impl.slicewise(lambda a, b: fn(window, a, b, sizes), *slices)
    if result == IMAGE:
      for f in reversed(_split_first(frames)):
        laid_out = f.give(lowering, laid_out, self._reduce_counter)
    return laid_out

  def _take(self, lowering: LoweringInProgress, role: str, frames: Sequence[Frames]) -> Any:
    """Frames of an input along all axes; saved if the gradient of the filter reuses them."""
    x = lowering.tensors[self.tensor_of(role)]
    for f in _split_first(frames):
      x = f.take(lowering, x, self._reduce_counter)
    if self._kept is not None:
      self._kept[lowering] = self.tensor_of(role), x
    return x

  def _shared_frames(self, lowering: LoweringInProgress, impl: MeshImpl) -> Any:
    """Frames that the gradient of the other input has exchanged already; None without such."""
    if self._beside is None or self._beside._kept is None:
      return None
    of, taken = self._beside._kept.pop(lowering, (None, None))
    if self._beside.roles[2] == FEATURES:
      return taken if of is self.tensor_of(IMAGE) else None
    # A clone of the other gradient, which a recomputation makes, has frames of another tensor.
    turned = of is self.tensor_of(FEATURES) and self._beside_turns_filter(impl)
    return taken if turned else None

  @property
  def _turns_filter(self) -> bool:
    """True if the result is an image computed as a convolution with the reversed filter.

    Then processors exchange what they need of the features before they compute, and no positions
    are computed twice. With a stride above 1 zeros would stand between the features.
    """
    return (
      self.roles[2] == IMAGE
      and max(self.window.strides) == 1
      and not self.window.grouped
      and self.shape_of(FILTER).size > 0
    )

  def _beside_turns_filter(self, impl: MeshImpl) -> bool:
    """True if the filter's gradient can use the feature frames of the image's gradient.

    Pairs are summed where the positions of the image lie: the sum is pending over the mesh axes of
    the features, which must be the same.
    """
    if self._beside is None or not self._beside._turns_filter:
      return False
    space = [self.window.space_of(self.shape_of(role)) for role in (IMAGE, FEATURES)]
    return all(split_axis(impl, d) == split_axis(impl, e) for d, e in zip(*space))

  def workspace_of_slice(self, impl: MeshImpl) -> int:
    """Workspace bytes of a processor: besides the slices of operands and result.

    Frames of a split image, and the workspace of TensorFlow's CPU kernels.

    Args:
      impl: of the processor.
    """
    dtype, window = self._outputs[0].dtype, self.window
    image, kernel, features = (
      list(impl.slice_shape(self.shape_of(role))) for role in (IMAGE, FILTER, FEATURES)
    )
    if 0 in (*image, *kernel, *features):
      return 0
    frames, size = self._frames(impl), 0
    if any(f.is_split for f in frames):
      window = window.inside()
      first = len(image) - window.rank - window.channel_dims
      turns = self._turns_filter or self._beside_turns_filter(impl)
      if turns:
        frames, image, features = self._frames_of_features(impl), features, image
        kernel = [*kernel[: window.rank], kernel[-1], kernel[-2]]
      image[first : first + window.rank] = [f.size for f in frames]
      size = list_product(image) * dtype.size
      if turns and self.roles[2] == IMAGE:
        return int(size)
    sizes = window, image, kernel, features, dtype
    if self.roles[2] == IMAGE:
      size += workspace.of_image(*sizes)
    elif self.roles[2] == FILTER:
      # Nothing waits for the gradient of a filter but the update: another thread goes on meanwhile,
      # with the gradient of the image and what follows. As much as its operands is what was seen.
      together = workspace.of_filter(*sizes) + workspace.of_image(*sizes)
      size += together + (list_product(image) + list_product(features)) * dtype.size
    return size

  def _frames(self, impl: MeshImpl) -> list[Frames]:
    """For each spatial dimension the frames: positions under the windows of local features."""
    image = self.shape_of(IMAGE)
    first = image.ndims - self.window.rank - self.window.channel_dims
    return [Frames(impl, first + i, reach) for i, reach in enumerate(self._reaches())]

  def _frames_of_features(self, impl: MeshImpl) -> list[Frames]:
    """For each spatial dimension the frames of features whose windows meet the local image."""
    first = self.shape_of(IMAGE).ndims - self.window.rank - self.window.channel_dims
    return [Frames(impl, first + i, reach.turned()) for i, reach in enumerate(self._reaches())]

  def _reaches(self) -> list[Reach]:
    window = self.window
    image, kernel = self.shape_of(IMAGE), self.shape_of(FILTER)[: window.rank]
    space, outputs = window.space_of(image), window.space_of(self.shape_of(FEATURES))
    sizes, kernel_sizes = [d.size for d in space], [d.size for d in kernel]
    reach, before = window.reach(kernel_sizes), window.zeros_before(sizes, kernel_sizes)
    return list(map(Reach, space, outputs, window.spatial_strides, reach, before))

  def _summed_dims(self) -> list[Dimension]:
    if self.roles[2] == FILTER:
      features = self.shape_of(FEATURES)
      return self.window.batch_of(features) + self.window.space_of(features)
    return [self.shape_of(FILTER)[-2 if self.roles[2] == FEATURES else -1]]


def share_frames(first: Tensor, second: Tensor) -> None:
  """Lets two gradients of a convolution exchange the tensor that both use only once.

  Args:
    first: the gradient of an operand.
    second: the gradient of the other operand.
  """
  for made, other in ((first, second), (second, first)):
    op, beside = made.operation, other.operation
    assert isinstance(op, Convolution)
    assert isinstance(beside, Convolution)
    if op.roles[2] == FILTER:
      op._beside, beside._kept = beside, weakref.WeakKeyDictionary()


def _split_first(frames: Sequence[Frames]) -> list[Frames]:
  """Sorts split axes first, so that no padding of other axes is exchanged."""
  return sorted(frames, key=lambda f: not f.is_split)


def check_ndims(name: str, window: Window, image: Shape, kernel: Shape, features: Shape) -> None:
  """Checks the numbers of dimensions.

  Raises:
    ShapeError: one of the three shapes has too few, or the filter's too many.
  """
  rank, channels = window.rank, window.channel_dims
  what_channels = "a channel dimension" if channels == 1 else "dimensions of groups and channels"
  for what, shape in (("the image side", image), ("the feature side", features)):
    if shape.ndims < rank + channels:
      raise ShapeError(
        f"{name}: {what} needs batch dimensions, {rank} spatial dimensions and {what_channels}, "
        f"got {shape}"
      )
  if kernel.ndims != rank + channels + 1:
    of_channels = "two of channels" if channels == 1 else "one of groups and two of channels"
    raise ShapeError(
      f"{name}: the filter needs {rank} spatial dimensions and {of_channels}, got {kernel}"
    )


def check_operands(name: str, window: Window, x: Tensor, kernel: Tensor, transposed: bool) -> None:
  """Checks that the operands of a convolution, or a transposed one, have matching dimensions.

  Raises:
    ShapeError: too few or too many dimensions.
    DimensionError: the last dimension of x is not the filter's.
  """
  check_ndims(name, window, x.shape, kernel.shape, x.shape)
  taken = kernel.shape[-1 if transposed else -2]
  if x.shape[-1] != taken:
    raise DimensionError(
      f"{name}: the last dimension {x.shape[-1].name}={x.shape[-1].size} of {x} must be the "
      f"filter's input dimension {taken.name}={taken.size} of {kernel}"
    )
  if window.grouped and x.shape[-2] != kernel.shape[-3]:
    raise DimensionError(
      f"{name}: the dimension of groups {x.shape[-2].name}={x.shape[-2].size} of {x} must be the "
      f"filter's, {kernel.shape[-3].name}={kernel.shape[-3].size} of {kernel}"
    )


class _Plain(Convolution):
  """Base class: a convolution without dilations or groups, or a gradient of one."""

  def _compute(self, role: str, known: Mapping[str, Tensor], shape: Shape) -> Convolution:
    rank, strides, padding = self.window.rank, self.window.strides, str(self.window.padding)
    if role == FILTER:
      # The input of a transposed convolution is the features.
      transposed = self.roles[0] == FEATURES
      x, dy = (known[r] for r in ((FEATURES, IMAGE) if transposed else (IMAGE, FEATURES)))
      return Conv2or3dBackpropFilterOperation(rank, transposed, x, shape, dy, strides, padding)
    transposed = role == FEATURES
    dy = known[IMAGE if transposed else FEATURES]
    return Conv2or3dBackpropInputOperation(
      rank, transposed, shape, known[FILTER], dy, strides, padding
    )


class _Forward(_Plain):
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


class _Backprop(_Plain):
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

  Arguments as `Conv2or3dBackpropInputOperation`; `conv_input` is the convolution's input, and
  `filter_shape` the shape of its filter, and of the result.
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


@dataclasses.dataclass(frozen=True)
class _Gradient(families.Family):
  """A gradient of a convolution of a rank, or of a transposed one, as a public function."""

  rank: int
  transposed: bool = False

  @property
  def words(self) -> Mapping[str, str]:
    return {
      "convolution": "transposed convolution" if self.transposed else "convolution",
      "number": {2: "two", 3: "three"}[self.rank],
      "space": {2: "h, w", 3: "d, h, w"}[self.rank],
      "filter_space": {2: "fh, fw", 3: "fd, fh, fw"}[self.rank],
      "channels": "out, in" if self.transposed else "in, out",
      "strides": {2: "s_h, s_w", 3: "s_d, s_h, s_w"}[self.rank],
    }

  def of_input(
    self,
    input_shape: ShapeLike,
    conv_filter: Tensor,
    dy: Tensor,
    strides: Sequence[int] | None,
    padding: str,
    name: str | None = None,
  ) -> Tensor:
    """Gradient of the input of a {convolution} in {number} dimensions.

    Args:
      input_shape: shape of the input, [batch..., {space}, in].
      conv_filter: the filter, [{filter_space}, {channels}].
      dy: gradient of the output, [batch..., {space}, out]. If `out` is split, the result is a
        pending sum over that mesh axis.
      strides: of the convolution, [1, {strides}, 1]; None for ones.
      padding: of the convolution, "SAME" or "VALID".
      name: of the operation.

    Returns:
      A `Tensor` of the shape `input_shape`.

    Raises:
      ShapeError: the shapes do not fit together.
      DTypeError: the filter and dy differ in dtype, or are not floating.
    """
    shape = convert_to_shape(input_shape)
    return Conv2or3dBackpropInputOperation(
      self.rank, self.transposed, shape, conv_filter, dy, strides, padding, name
    ).outputs[0]

  def of_filter(
    self,
    conv_input: Tensor,
    filter_shape: ShapeLike,
    dy: Tensor,
    strides: Sequence[int] | None,
    padding: str,
    name: str | None = None,
  ) -> Tensor:
    """Gradient of the filter of a {convolution} in {number} dimensions.

    Args:
      conv_input: the input, [batch..., {space}, in]. If batch dimensions are split, the result
        is a pending sum over their mesh axes.
      filter_shape: shape of the filter, [{filter_space}, {channels}].
      dy: gradient of the output, [batch..., {space}, out].
      strides: of the convolution, [1, {strides}, 1]; None for ones.
      padding: of the convolution, "SAME" or "VALID".
      name: of the operation.

    Returns:
      A `Tensor` of the shape `filter_shape`.

    Raises:
      ShapeError: the shapes do not fit together.
      DTypeError: the input and dy differ in dtype, or are not floating.
    """
    shape = convert_to_shape(filter_shape)
    return Conv2or3dBackpropFilterOperation(
      self.rank, self.transposed, conv_input, shape, dy, strides, padding, name
    ).outputs[0]


conv2d_backprop_input = families.member(_Gradient("conv2d_backprop_input", 2).of_input)
conv2d_transpose_backprop_input = families.member(
  _Gradient("conv2d_transpose_backprop_input", 2, True).of_input
)
conv3d_backprop_input = families.member(_Gradient("conv3d_backprop_input", 3).of_input)
conv3d_transpose_backprop_input = families.member(
  _Gradient("conv3d_transpose_backprop_input", 3, True).of_input
)
conv2d_backprop_filter = families.member(_Gradient("conv2d_backprop_filter", 2).of_filter)
conv2d_transpose_backprop_filter = families.member(
  _Gradient("conv2d_transpose_backprop_filter", 2, True).of_filter
)
conv3d_backprop_filter = families.member(_Gradient("conv3d_backprop_filter", 3).of_filter)
conv3d_transpose_backprop_filter = families.member(
  _Gradient("conv3d_transpose_backprop_filter", 3, True).of_filter
)


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

  def _compute(self, role: str, known: Mapping[str, Tensor], shape: Shape) -> Convolution:
    roles = [r for r in (IMAGE, FEATURES, FILTER) if r != role]
    return ConvolutionOperation([*roles, role], [known[r] for r in roles], shape, self.window)


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
  name = name or ("convolution_transpose" if transposed else "convolution")
  convolve = functools.partial(
    _convolve, strides=strides, padding=padding, dilations=dilations, spatial_dims=spatial_dims,
    transposed=transposed, output_sizes=output_sizes, name=name,
  )  # fmt: skip
  if isinstance(groups, (tuple, list)):  # A Dimension is a tuple.
    group = convert_to_dimension(groups)
    x, kernel = _with_channels_of_groups(x, kernel, group, transposed)
    return convolve(x, kernel, group)
  groups = operator.index(groups)
  if groups == 1:
    return convolve(x, kernel, None)
  # Groups that are consecutive channels, as in Keras.
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
  y = convolve(x, kernel, group)
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


def _with_channels_of_groups(
  x: Tensor, kernel: Tensor, group: Dimension, transposed: bool
) -> tuple[Tensor, Tensor]:
  """x and the filter with a dimension of channels in each group; depthwise, one channel."""
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
  return x, kernel


def _convolve(
  x: Tensor,
  kernel: Tensor,
  group: Dimension | None,
  *,
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
