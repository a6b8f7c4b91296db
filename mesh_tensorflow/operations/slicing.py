"""Concat, split, stack, unstack, slice and pad: one dimension, which must not be split."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, DTypeError, ShapeError, SizeError
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.constants import zeros_like
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = [
  "ConcatOperation",
  "PadOperation",
  "SliceOperation",
  "SplitOperation",
  "StackOperation",
  "UnstackOperation",
  "concat",
  "mtf_slice",
  "pad",
  "split",
  "stack",
  "unstack",
]


class _OneDimensionOperation(Operation):
  """Base class: an operation along one dimension, local if that is not split."""

  # Set by the constructor: the dimension, and what is done along it, for the message.
  _dim: Dimension
  _why: str

  def _set_unsplittable(self, dim: Dimension, why: str) -> None:
    self._dim, self._why = dim, why
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims("splittable", [dim.name])
    )

  def verify_layout(self, mesh_impl):
    self._require_unsplit(mesh_impl, self._dim, self._why)
    super().verify_layout(mesh_impl)

  def _lower_slicewise(self, lowering: Any, fn: Any) -> None:
    results = lowering.mesh_impl(self).slicewise(fn, *[lowering.tensors[x] for x in self._inputs])
    if not isinstance(results, tuple):
      results = (results,)
    for out, laid_out in zip(self._outputs, results):
      lowering.set_tensor_lowering(out, laid_out)


def _dim_and_axis(op: Operation, x: Tensor, dim: str | Dimension) -> tuple[Dimension, int]:
  """A dimension of x, and its axis.

  Args:
    op: the operation, for the message.
    x: a `Tensor`.
    dim: its name; or the dimension itself, as x may have another of the name.

  Raises:
    DimensionError: there is none.
  """
  dims = x.shape.dims if isinstance(dim, Dimension) else x.shape.dimension_names
  if dim not in dims:
    raise no_such_dimension(op.name, dim, x)
  axis = dims.index(dim)
  return x.shape[axis], axis


def _as_int(op: Operation, n: Any, what: str) -> int:
  """A Python int; raises `ArgumentError` for what is none."""
  try:
    return operator.index(n)
  except TypeError:
    raise ArgumentError(
      f"{op.name} of {op.inputs[0]}: {what} must be an integer, got {n!r}"
    ) from None


def _check_dtypes(op: Operation, xs: Sequence[Tensor]) -> None:
  for x in xs:
    if x.dtype != xs[0].dtype:
      raise DTypeError(
        f"{op.name}: all inputs must have one dtype, but {x} does not have that of {xs[0]}"
      )


def _resized(shape: Shape, axis: int, size: int) -> Shape:
  """The shape with another size at `axis`."""
  dims = shape.dims
  dims[axis] = Dimension(dims[axis].name, size)
  return Shape(dims)


class ConcatOperation(_OneDimensionOperation):
  """Joins tensors along a dimension; see `concat`."""

  def __init__(
    self, xs: Sequence[Tensor], concat_dim_name: str | Dimension, name: str | None = None
  ):
    if not xs:
      raise ShapeError(f"concat along {concat_dim_name!r} needs at least one tensor")
    super().__init__(list(xs), name=name or "concat")
    _check_dtypes(self, xs)
    dim, self._axis = _dim_and_axis(self, xs[0], concat_dim_name)
    self._sizes = []
    for x in xs:
      size = x.shape[self._axis].size if x.shape.ndims == xs[0].shape.ndims else None
      if size is None or x.shape != _resized(xs[0].shape, self._axis, size):
        raise ShapeError(
          f"{self.name}: inputs may differ in the size of {concat_dim_name!r} only; "
          f"{x} does not fit {xs[0]}"
        )
      self._sizes.append(size)
    shape = _resized(xs[0].shape, self._axis, sum(self._sizes))
    self._outputs = [Tensor(self, shape, xs[0].dtype)]
    self._set_unsplittable(dim, "tensors are concatenated along it")

  def gradient(self, grad_ys):
    return split(grad_ys[0], grad_ys[0].shape[self._axis], self._sizes)

  def lower(self, lowering):
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


class SplitOperation(_OneDimensionOperation):
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
      self._sizes = [_as_int(self, n, "a size") for n in num_or_size_splits]
      if sum(self._sizes) != split_dim.size or min(self._sizes, default=-1) < 0:
        raise SizeError(
          f"{self.name}: the sizes {self._sizes} do not add up to {split_dim.name}="
          f"{split_dim.size} of {x}"
        )
    else:
      n = _as_int(self, num_or_size_splits, "the number of parts")
      if n < 1 or split_dim.size % n:
        legal = [k for k in range(1, min(split_dim.size, 4096) + 1) if split_dim.size % k == 0]
        raise SizeError(
          f"{self.name}: {split_dim.name}={split_dim.size} of {x} cannot be cut into {n} equal "
          f"parts; legal: {', '.join(map(str, legal[:12]))} parts, or a list of sizes"
        )
      self._sizes = [split_dim.size // n] * n
    self._outputs = [
      Tensor(self, _resized(x.shape, self._axis, size), x.dtype, index=i)
      for i, size in enumerate(self._sizes)
    ]
    self._set_unsplittable(split_dim, "the tensor is cut along it")

  def gradient(self, grad_ys):
    given = [i for i, dy in enumerate(grad_ys) if dy is not None]
    if len(given) == 1:
      before = sum(self._sizes[: given[0]])
      after = sum(self._sizes[given[0] + 1 :])
      dy = grad_ys[given[0]]
      return PadOperation(dy, [before, after], dy.shape[self._axis]).outputs
    parts = _with_zeros(grad_ys, self._outputs)
    return ConcatOperation(parts, parts[0].shape[self._axis]).outputs

  def lower(self, lowering):
    equal = len(set(self._sizes)) == 1
    parts = len(self._sizes) if equal else self._sizes
    self._lower_slicewise(lowering, lambda t: tuple(tf.split(t, parts, self._axis)))


def _with_zeros(grad_ys: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> list[Tensor]:
  """The gradients, zeros for those that are missing."""
  return [zeros_like(y) if dy is None else dy for dy, y in zip(grad_ys, outputs)]


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


class StackOperation(_OneDimensionOperation):
  """Joins tensors along a new dimension; see `stack`."""

  def __init__(self, xs: Sequence[Tensor], dim_name: str, axis: int = 0, name: str | None = None):
    if not xs:
      raise ShapeError(f"stack along a new {dim_name!r} needs at least one tensor")
    super().__init__(list(xs), name=name or "stack")
    _check_dtypes(self, xs)
    for x in xs:
      if x.shape != xs[0].shape:
        raise ShapeError(f"{self.name}: inputs must have one shape, {x} does not fit {xs[0]}")
    ndims = xs[0].shape.ndims
    self._axis = axis + ndims + 1 if axis < 0 else axis
    if not 0 <= self._axis <= ndims:
      raise ShapeError(
        f"{self.name}: axis {axis} of the new dimension {dim_name}={len(xs)} is not in "
        f"{-ndims - 1} to {ndims}, the places among the dimensions of {xs[0]}"
      )
    dim = Dimension(dim_name, len(xs))
    dims = xs[0].shape.dims
    dims.insert(self._axis, dim)
    self._outputs = [Tensor(self, Shape(dims), xs[0].dtype)]
    self._set_unsplittable(dim, "tensors are stacked along it")

  def gradient(self, grad_ys):
    return unstack(grad_ys[0], self._dim)

  def lower(self, lowering):
    self._lower_slicewise(lowering, lambda *ts: kernels.stack(ts, self._axis))


def stack(xs: Sequence[Tensor], dim_name: str, axis: int = 0, name: str | None = None) -> Tensor:
  """Joins tensors of one shape along a new dimension of size len(xs).

  Args:
    xs: a list of `Tensor`s of the same shape.
    dim_name: name of the new dimension; it must not be split over the mesh.
    axis: where the new dimension goes; a negative one counts from the end.
    name: of the operation.

  Raises:
    ShapeError: the shapes differ.
  """
  return StackOperation(xs, dim_name, axis, name).outputs[0]


class UnstackOperation(_OneDimensionOperation):
  """One tensor for each position along a dimension; see `unstack`."""

  def __init__(self, x: Tensor, dim: DimensionLike, name: str | None = None):
    super().__init__([x], name=name or "unstack")
    dim = convert_to_dimension(dim)
    if dim not in x.shape:
      raise no_such_dimension(self.name, dim, x)
    self._axis = x.shape.dims.index(dim)
    shape = x.shape - dim
    self._outputs = [Tensor(self, shape, x.dtype, index=i) for i in range(dim.size)]
    self._set_unsplittable(dim, "the tensor is unstacked along it")

  def gradient(self, grad_ys):
    return [stack(_with_zeros(grad_ys, self._outputs), self._dim.name, self._axis)]

  def lower(self, lowering):
    self._lower_slicewise(lowering, lambda t: tuple(tf.unstack(t, axis=self._axis)))


def unstack(x: Tensor, dim: DimensionLike, name: str | None = None) -> list[Tensor]:
  """The `dim.size` tensors of shape x.shape - dim that x is a stack of.

  Args:
    x: a `Tensor`.
    dim: a `Dimension` of x; it must not be split over the mesh.
    name: of the operation.

  Raises:
    DimensionError: x has no such dimension.
  """
  return UnstackOperation(x, dim, name).outputs


class SliceOperation(_OneDimensionOperation):
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
    dim, self._axis = _dim_and_axis(self, x, slice_dim_name)
    self._begin = _as_int(self, begin, "the first position")
    self._size = _as_int(self, size, "the number of positions")
    if self._begin < 0 or self._size < 0 or self._begin + self._size > dim.size:
      raise ShapeError(
        f"{self.name}: positions {self._begin} to {self._begin + self._size} are not within "
        f"{dim.name}={dim.size} of {x}"
      )
    self._outputs = [Tensor(self, _resized(x.shape, self._axis, self._size), x.dtype)]
    self._set_unsplittable(dim, "the tensor is sliced along it")

  def gradient(self, grad_ys):
    after = self._dim.size - self._size - self._begin
    return PadOperation(grad_ys[0], [self._begin, after], grad_ys[0].shape[self._axis]).outputs

  def lower(self, lowering):
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


class PadOperation(_OneDimensionOperation):
  """Zeros before and after a dimension; see `pad`.

  Args:
    x: a `Tensor`.
    paddings: [number before, number after].
    pad_dim_name: the dimension, or its name.
    name: of the operation.
  """

  def __init__(
    self,
    x: Tensor,
    paddings: Sequence[int],
    pad_dim_name: str | Dimension,
    name: str | None = None,
  ):
    super().__init__([x], name=name or "pad")
    dim, self._axis = _dim_and_axis(self, x, pad_dim_name)
    self._paddings = [_as_int(self, n, "a padding") for n in paddings]
    if len(self._paddings) != 2 or min(self._paddings) < 0:
      raise SizeError(
        f"{self.name}: paddings of {dim.name}={dim.size} of {x} must be [before, after], two "
        f"numbers of at least 0, got {list(paddings)}"
      )
    shape = _resized(x.shape, self._axis, dim.size + sum(self._paddings))
    self._outputs = [Tensor(self, shape, x.dtype)]
    self._set_unsplittable(dim, "the tensor is padded along it")

  def gradient(self, grad_ys):
    dy = grad_ys[0]
    return SliceOperation(dy, self._paddings[0], self._dim.size, dy.shape[self._axis]).outputs

  def lower(self, lowering):
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
