"""Base class of convolutions: shapes, layout, lowering."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import DimensionError, DTypeError, LayoutError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations import convolution_kernels, workspace
from mesh_tensorflow.operations.convolution_frames import Frames, Reach, split_axis
from mesh_tensorflow.operations.convolution_slices import Window
from mesh_tensorflow.operations.reduction import mesh_axes_of
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product, shape_union
from mesh_tensorflow.program.graph import Operation, Tensor

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

  def shape_of(self, role: str) -> Shape:
    """Shape of the image, the filter or the features."""
    return self.tensor_of(role).shape

  def tensor_of(self, role: str) -> Tensor:
    """The input or output that is the image, the filter or the features."""
    return (self._inputs + self._outputs)[self.roles.index(role)]

  def verify_layout(self, mesh_impl: Any) -> None:
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

  def _require_whole(self, mesh_impl: Any, dim: Dimension, kernel: Tensor) -> None:
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
