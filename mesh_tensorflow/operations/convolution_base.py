"""What all convolutions have in common: shapes, layout, lowering."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import DimensionError, DTypeError, LayoutError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.operations import convolution_slices
from mesh_tensorflow.operations.convolution_slices import Window
from mesh_tensorflow.operations.reduction import mesh_axes_of
from mesh_tensorflow.program.dimensions import Dimension, Shape, shape_union
from mesh_tensorflow.program.graph import Operation, Tensor

IMAGE, FILTER, FEATURES = "image", "filter", "features"

# How each is computed from the two others, which stand in this order.
_COMPUTED = {
  FEATURES: (convolution_slices.features_of, IMAGE, FILTER),
  IMAGE: (convolution_slices.image_of, FEATURES, FILTER),
  FILTER: (convolution_slices.filter_of, IMAGE, FEATURES),
}


class Convolution(Operation):
  """Base class: one of image, filter and features, computed from the two others.

  `convolution_slices` says what the three are. Each processor holds the spatial dimensions
  whole. What is summed over is the image channels for features, the feature channels for an
  image, the batch for a filter; where it is split, the sum over that mesh axis is pending.

  Args:
    inputs: the two tensors.
    roles: what the first is, what the second is, what the output is.
    rank: number of spatial dimensions, 2 or 3.
    strides: see `Window`.
    padding: see `Window`.
    name: of the operation.
    counters: names of the counters of its work and of its allreduce.
  """

  def __init__(
    self,
    inputs: list[Tensor],
    roles: Sequence[str],
    rank: int,
    strides: Sequence[int] | None,
    padding: str,
    name: str,
    counters: tuple[str, str],
  ):
    super().__init__(inputs, name=name)
    self.window = Window(self.name, rank, strides, padding)
    self.roles = tuple(roles)
    self._work_counter, self._reduce_counter = counters
    for x in inputs:
      if not x.dtype.is_floating or x.dtype != inputs[0].dtype:
        raise DTypeError(
          f"{self.name}: a convolution needs two tensors of one floating dtype, got {inputs[0]} "
          f"and {inputs[1]}; cast one of them (mtf.cast)"
        )

  def _finish(self, output_shape: Shape, dtype: tf.DType) -> None:
    """Makes the output, checks that the three shapes fit together."""
    self._outputs = [Tensor(self, output_shape, dtype)]
    image, kernel, features = self.shape_of(IMAGE), self.shape_of(FILTER), self.shape_of(FEATURES)
    rank = self.window.rank
    _check_ndims(self.name, rank, image, kernel, features)
    if (
      image[-1] != kernel[-2]
      or features[-1] != kernel[-1]
      or image[: -rank - 1] != features[: -rank - 1]
    ):
      raise ShapeError(
        f"{self.name}: the shapes do not fit together: an image {image}, a filter {kernel} and "
        f"features {features}; they must be [batch..., {rank} of space, i], "
        f"[{rank} of space, i, o] and [batch..., {rank} of space, o]"
      )
    if not kernel.size and image.size:
      raise ShapeError(f"{self.name}: the filter {kernel} has no elements")
    sizes = [d.size for d in _spatial(self.window, image)]
    kernel_sizes = [d.size for d in kernel[:rank]]
    want = self.window.feature_sizes(sizes, kernel_sizes)
    if min(want) < 1 or want != [d.size for d in _spatial(self.window, features)]:
      raise ShapeError(
        f"{self.name}: a convolution of the image {image} with the filter {kernel}, strides "
        f"{self.window.strides} and {self.window.padding} padding makes the spatial sizes "
        f"{want}, not those of {features}"
      )

  def shape_of(self, role: str) -> Shape:
    """Shape of the image, the filter or the features."""
    return self.tensor_of(role).shape

  def tensor_of(self, role: str) -> Tensor:
    """The input or output that is the image, the filter or the features."""
    return (self._inputs + self._outputs)[self.roles.index(role)]

  def verify_layout(self, mesh_impl: Any) -> None:
    for role in self.roles:
      x = self.tensor_of(role)
      dims = x.shape[: self.window.rank] if role == FILTER else _spatial(self.window, x.shape)
      for d in dims:
        self._require_whole(mesh_impl, d, x, role)
    super().verify_layout(mesh_impl)

  def _require_whole(self, mesh_impl: Any, dim: Dimension, x: Tensor, role: str) -> None:
    axis = mesh_impl.tensor_dimension_to_mesh_axis(dim)
    if axis is None or mesh_impl.shape[axis].size == 1:
      return
    m = mesh_impl.shape[axis]
    instead = ""
    if role != FILTER:
      instead = (
        "to split an image, give it a dimension of blocks and use mtf.layers."
        f"conv{self.window.rank}d_with_blocks; else "
      )
    raise LayoutError(
      f"{type(self).__name__} {self.name}: spatial dimension {dim.name}:{dim.size} of {x} is "
      f"split over mesh axis {m.name}:{m.size}, but a processor needs it whole; {instead}rename "
      f"it first (mtf.rename_dimension to a name without a rule), or drop the rule "
      f"{dim.name}:{m.name}"
    )

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    out, result = self._outputs[0], self.roles[2]
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

  def _summed_dims(self) -> list[Dimension]:
    result = self.roles[2]
    if result == FEATURES:
      return self.shape_of(FILTER)[-2:-1]
    if result == IMAGE:
      return self.shape_of(FILTER)[-1:]
    return self.shape_of(IMAGE)[: -self.window.rank - 1]


def _spatial(window: Window, shape: Shape) -> list[Dimension]:
  return shape[-window.rank - 1 : -1]


def _check_ndims(name: str, rank: int, image: Shape, kernel: Shape, features: Shape) -> None:
  for what, shape in (("the image side", image), ("the feature side", features)):
    if shape.ndims < rank + 1:
      raise ShapeError(
        f"{name}: {what} needs batch dimensions, {rank} spatial dimensions and a channel "
        f"dimension, got {shape}"
      )
  if kernel.ndims != rank + 2:
    raise ShapeError(
      f"{name}: the filter needs {rank} spatial dimensions and two of channels, got {kernel}"
    )


def check_operands(name: str, rank: int, x: Tensor, kernel: Tensor, transposed: bool) -> None:
  """Checks what a convolution, or a transposed one, needs to know its output shape.

  Raises:
    ShapeError: too few or too many dimensions.
    DimensionError: the last dimension of x is not the filter's.
  """
  _check_ndims(name, rank, x.shape, kernel.shape, x.shape)
  taken = kernel.shape[-1 if transposed else -2]
  if x.shape[-1] != taken:
    raise DimensionError(
      f"{name}: the last dimension {x.shape[-1].name}={x.shape[-1].size} of {x} must be the "
      f"filter's input dimension {taken.name}={taken.size} of {kernel}"
    )
