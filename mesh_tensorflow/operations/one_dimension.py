"""Base class of operations along one dimension, which the mesh must not split."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from mesh_tensorflow.errors import ArgumentError, DTypeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.constants import zeros_like
from mesh_tensorflow.program.dimensions import Dimension, Shape, no_such_dimension
from mesh_tensorflow.program.graph import Operation, Tensor


class OneDimensionOperation(Operation):
  """Base class: an operation along one dimension, local if that is not split."""

  # Set by the constructor: the dimension, and what is done along it, for the message.
  _dim: Dimension
  _why: str

  def _set_unsplittable(self, dim: Dimension, why: str) -> None:
    self._dim, self._why = dim, why
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims("splittable", [dim.name])
    )

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    self._require_unsplit(mesh_impl, self._dim, self._why)
    super().verify_layout(mesh_impl)

  def suits_uneven_slices(self, mesh_impl: MeshImpl) -> bool:
    tensors = self._inputs + self._outputs
    along = [d for t in tensors for d in t.shape if d.name in self._unsplittable_dims]
    return not any(map(mesh_impl.is_uneven, along))

  def _lower_slicewise(self, lowering: LoweringInProgress, fn: Callable[..., object]) -> None:
    results = lowering.mesh_impl(self).slicewise(fn, *[lowering.tensors[x] for x in self._inputs])
    if not isinstance(results, tuple):
      results = (results,)
    for out, laid_out in zip(self._outputs, results):
      lowering.set_tensor_lowering(out, laid_out)


def dim_and_axis(op: Operation, x: Tensor, dim: str | Dimension) -> tuple[Dimension, int]:
  """A dimension of x, and its axis.

  Args:
    op: the operation, for the message.
    x: a `Tensor`.
    dim: its name; or the dimension itself, as x may have another of the name.

  Raises:
    DimensionError: there is none.
  """
  dims: list[Any] = x.shape.dims if isinstance(dim, Dimension) else x.shape.dimension_names
  if dim not in dims:
    raise no_such_dimension(op.name, dim, x)
  axis = dims.index(dim)
  return x.shape[axis], axis


def as_int(op: Operation, n: Any, what: str) -> int:
  """A Python int; raises `ArgumentError` for what is none."""
  try:
    return operator.index(n)
  except TypeError:
    raise ArgumentError(
      f"{op.name} of {op.inputs[0]}: {what} must be an integer, got {n!r}"
    ) from None


def check_dtypes(op: Operation, xs: Sequence[Tensor]) -> None:
  """Raises `DTypeError` unless all have one dtype."""
  for x in xs:
    if x.dtype != xs[0].dtype:
      raise DTypeError(
        f"{op.name}: all inputs must have one dtype, but {x} does not have that of {xs[0]}"
      )


def resized(shape: Shape, axis: int, size: int) -> Shape:
  """The shape with another size at `axis`."""
  dims = shape.dims
  dims[axis] = Dimension(dims[axis].name, size)
  return Shape(dims)


def with_zeros(grad_ys: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> list[Tensor]:
  """The gradients, zeros for those that are missing."""
  return [zeros_like(y) if dy is None else dy for dy, y in zip(grad_ys, outputs)]
