"""Concat, split, slice and pad: along one dimension, which must not be split."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError, SizeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.one_dimension import (
  OneDimensionOperation,
  as_int,
  check_dtypes,
  dim_and_axis,
  resized,
  with_zeros,
)
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Tensor

__all__ = [
  "ConcatOperation",
  "PadOperation",
  "SliceOperation",
  "SplitOperation",
  "concat",
  "mtf_slice",
  "pad",
  "split",
]


class ConcatOperation(OneDimensionOperation):
  """Joins tensors along a dimension; see `concat`."""

  def __init__(
    self, xs: Sequence[Tensor], concat_dim_name: str | Dimension, name: str | None = None
  ):
    if not xs:
      raise ShapeError(f"concat along {concat_dim_name!r} needs at least one tensor")
    super().__init__(list(xs), name=name or "concat")
    check_dtypes(self, xs)
    dim, self._axis = dim_and_axis(self, xs[0], concat_dim_name)
    self._sizes = []
    for x in xs:
      size = x.shape[self._axis].size if x.shape.ndims == xs[0].shape.ndims else None
      if size is None or x.shape != resized(xs[0].shape, self._axis, size):
        raise ShapeError(
          f"{self.name}: inputs may differ in the size of {concat_dim_name!r} only; "
          f"{x} does not fit {xs[0]}"
        )
      self._sizes.append(size)
    shape = resized(xs[0].shape, self._axis, sum(self._sizes))
    self._outputs = [Tensor(self, shape, xs[0].dtype)]
    self._set_unsplittable(dim, "tensors are concatenated along it")

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return split(grad_ys[0], grad_ys[0].shape[self._axis], self._sizes)

  def lower(self, lowering: LoweringInProgress) -> None:
    self._lower_slicewise(lowering, lambda *ts: tf.concat(ts, self._axis))


def concat(xs: Sequence[Tensor], concat_dim_name: str, name: str | None = None) -> Tensor:
  """Joins tensors along a dimension.

  Args:
    xs: a list of `Tensor`s with the same dimensions in the same order, except for the
      size of the named one.
    concat_dim_name: name of the dimension; it must not be split over the mesh.
    name: of the operation.

  Raises:
    DimensionError: `xs[0]` has no such dimension.
    ShapeError: the other dimensions differ.
  """
  return ConcatOperation(xs, concat_dim_name, name).outputs[0]


class SplitOperation(OneDimensionOperation):
  """Cuts a tensor along a dimension; see `split`."""

  def __init__(
    self,
    x: Tensor,
    split_dim: DimensionLike,
    num_or_size_splits: int | Sequence[int],
    name: str | None = None,
  ):
    super().__init__([x], name=name or "split")
    split_dim = convert_to_dimension(split_dim)
    if split_dim not in x.shape:
      raise no_such_dimension(self.name, split_dim, x)
    self._axis = x.shape.dims.index(split_dim)
    if isinstance(num_or_size_splits, (list, tuple)):
      self._sizes = [as_int(self, n, "a size") for n in num_or_size_splits]
      if sum(self._sizes) != split_dim.size or min(self._sizes, default=-1) < 0:
        raise SizeError(
          f"{self.name}: the sizes {self._sizes} do not add up to {split_dim.name}="
          f"{split_dim.size} of {x}"
        )
    else:
      n = as_int(self, num_or_size_splits, "the number of parts")
      if n < 1 or split_dim.size % n:
        legal = [k for k in range(1, min(split_dim.size, 4096) + 1) if split_dim.size % k == 0]
        raise SizeError(
          f"{self.name}: {split_dim.name}={split_dim.size} of {x} cannot be cut into {n} equal "
          f"parts; legal: {', '.join(map(str, legal[:12]))} parts, or a list of sizes"
        )
      self._sizes = [split_dim.size // n] * n
    self._outputs = [
      Tensor(self, resized(x.shape, self._axis, size), x.dtype, index=i)
      for i, size in enumerate(self._sizes)
    ]
    self._set_unsplittable(split_dim, "the tensor is cut along it")

  def gradient(self, grad_ys: list[Tensor | None]) -> Sequence[Tensor | None]:
    given = [(i, dy) for i, dy in enumerate(grad_ys) if dy is not None]
    if len(given) == 1:
      # One part alone, as after `split(...)[i]`: padding costs less than zeros for the others.
      ((i, dy),) = given
      before, after = sum(self._sizes[:i]), sum(self._sizes[i + 1 :])
      return PadOperation(dy, [before, after], dy.shape[self._axis]).outputs
    parts = with_zeros(grad_ys, self._outputs)
    return ConcatOperation(parts, parts[0].shape[self._axis]).outputs

  def lower(self, lowering: LoweringInProgress) -> None:
    equal = len(set(self._sizes)) == 1
    parts = len(self._sizes) if equal else self._sizes
    self._lower_slicewise(lowering, lambda t: tuple(tf.split(t, parts, self._axis)))


def split(
  x: Tensor,
  split_dim: DimensionLike,
  num_or_size_splits: int | Sequence[int],
  name: str | None = None,
) -> list[Tensor]:
  """Cuts a tensor along a dimension.

  Args:
    x: a `Tensor`.
    split_dim: a `Dimension` of x; it must not be split over the mesh.
    num_or_size_splits: the number of equal parts, or a list of sizes.
    name: of the operation.

  Returns:
    A list of `Tensor`s whose dimension has the same name and the sizes of the parts.

  Raises:
    DimensionError: x has no such dimension.
    ShapeError: the parts do not make up the dimension.
  """
  return SplitOperation(x, split_dim, num_or_size_splits, name).outputs


class SliceOperation(OneDimensionOperation):
  """A range of positions along a dimension; see `mtf_slice`."""

  def __init__(
    self,
    x: Tensor,
    begin: int,
    size: int,
    slice_dim_name: str | Dimension,
    name: str | None = None,
  ):
    super().__init__([x], name=name or "slice")
    dim, self._axis = dim_and_axis(self, x, slice_dim_name)
    self._begin = as_int(self, begin, "the first position")
    self._size = as_int(self, size, "the number of positions")
    if self._begin < 0 or self._size < 0 or self._begin + self._size > dim.size:
      raise ShapeError(
        f"{self.name}: positions {self._begin} to {self._begin + self._size} are not within "
        f"{dim.name}={dim.size} of {x}"
      )
    self._outputs = [Tensor(self, resized(x.shape, self._axis, self._size), x.dtype)]
    self._set_unsplittable(dim, "the tensor is sliced along it")

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    after = self._dim.size - self._size - self._begin
    return PadOperation(grad_ys[0], [self._begin, after], grad_ys[0].shape[self._axis]).outputs

  def lower(self, lowering: LoweringInProgress) -> None:
    self._lower_slicewise(
      lowering, lambda t: kernels.cut_axis(t, self._axis, self._begin, self._size)
    )


def mtf_slice(
  x: Tensor, begin: int, size: int, slice_dim_name: str, name: str | None = None
) -> Tensor:
  """Positions `begin` to `begin + size` along a dimension.

  Args:
    x: a `Tensor`.
    begin: first position.
    size: number of positions.
    slice_dim_name: name of the dimension; it must not be split over the mesh.
    name: of the operation.

  Raises:
    DimensionError: x has no such dimension.
    ShapeError: the range is not within the dimension.
  """
  return SliceOperation(x, begin, size, slice_dim_name, name).outputs[0]


class PadOperation(OneDimensionOperation):
  """Zeros before and after a dimension, pad_dim_name, or of that name; see `pad`."""

  def __init__(
    self,
    x: Tensor,
    paddings: Sequence[int],
    pad_dim_name: str | Dimension,
    name: str | None = None,
  ):
    super().__init__([x], name=name or "pad")
    dim, self._axis = dim_and_axis(self, x, pad_dim_name)
    self._paddings = [as_int(self, n, "a padding") for n in paddings]
    if len(self._paddings) != 2 or min(self._paddings) < 0:
      raise SizeError(
        f"{self.name}: paddings of {dim.name}={dim.size} of {x} must be [before, after], two "
        f"numbers of at least 0, got {list(paddings)}"
      )
    shape = resized(x.shape, self._axis, dim.size + sum(self._paddings))
    self._outputs = [Tensor(self, shape, x.dtype)]
    self._set_unsplittable(dim, "the tensor is padded along it")

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy = grad_ys[0]
    return SliceOperation(dy, self._paddings[0], self._dim.size, dy.shape[self._axis]).outputs

  def lower(self, lowering: LoweringInProgress) -> None:
    self._lower_slicewise(lowering, lambda t: kernels.pad(t, self._axis, *self._paddings))


def pad(x: Tensor, paddings: Sequence[int], dim_name: str, name: str | None = None) -> Tensor:
  """Zeros before and after the values along a dimension.

  Args:
    x: a `Tensor`.
    paddings: [number before, number after].
    dim_name: name of the dimension; it must not be split over the mesh.
    name: of the operation.

  Raises:
    DimensionError: x has no such dimension.
    ShapeError: `paddings` is not a pair of numbers of at least 0.
  """
  return PadOperation(x, paddings, dim_name, name).outputs[0]
