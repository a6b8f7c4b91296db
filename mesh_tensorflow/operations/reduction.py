"""Broadcast and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, GradientError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.slices import transpose_to
from mesh_tensorflow.numerics import padding
from mesh_tensorflow.operations.elementwise import cast, to_float
from mesh_tensorflow.operations.scalar import ScalarMultiplyOperation
from mesh_tensorflow.program.argument_kinds import (
  CastableTensor,
  FloatOrComplexTensor,
  NumberTensor,
  RealTensor,
)
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  ShapeLike,
  convert_to_dimension,
  convert_to_shape,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = [
  "BroadcastOperation",
  "ReduceOperation",
  "binary_reduction_fn",
  "broadcast",
  "reduce_all",
  "reduce_any",
  "reduce_max",
  "reduce_mean",
  "reduce_min",
  "reduce_sum",
  "reduction_fn",
]

_TF_REDUCTION = {"SUM": tf.reduce_sum, "MAX": tf.reduce_max, "MIN": tf.reduce_min}
# What of a slice does not change the result.
_IDENTITY = {"SUM": padding.zero, "MAX": padding.lowest, "MIN": padding.highest}
_TF_BINARY = {"SUM": tf.add, "MAX": tf.maximum, "MIN": tf.minimum}


def reduction_fn(reduction_fn_string: str) -> Any:
  """The TensorFlow reduction for "SUM", "MAX" or "MIN".

  Args:
    reduction_fn_string: "SUM", "MAX" or "MIN".
  """
  if reduction_fn_string not in _TF_REDUCTION:
    raise ArgumentError(f"reduction_fn: {reduction_fn_string!r} is not 'SUM', 'MAX' or 'MIN'")
  return _TF_REDUCTION[reduction_fn_string]


def binary_reduction_fn(reduction_fn_string: str) -> Any:
  """The elementwise TensorFlow function for "SUM", "MAX" or "MIN".

  Args:
    reduction_fn_string: "SUM", "MAX" or "MIN".
  """
  if reduction_fn_string not in _TF_BINARY:
    raise ArgumentError(
      f"binary_reduction_fn: {reduction_fn_string!r} is not 'SUM', 'MAX' or 'MIN'"
    )
  return _TF_BINARY[reduction_fn_string]


class BroadcastOperation(Operation):
  """x repeated along new dimensions.

  Args:
    x: a `Tensor`.
    output_shape: a `Shape` with all of x's dimensions.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(self, x: Tensor, output_shape: Shape, name: str | None = None):
    super().__init__([x], name=name or "broadcast")
    for d in x.shape:
      if d not in output_shape:
        raise ShapeError(
          f"{self.name}: dimension {d.name}={d.size} of {x} is not in the new shape {output_shape}"
        )
    self._outputs = [Tensor(self, output_shape, x.dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return [reduce_sum(grad_ys[0], output_shape=self.inputs[0].shape)]

  def lower(self, lowering: LoweringInProgress) -> None:
    x, out = self.inputs[0], self.outputs[0]
    lowering.set_tensor_lowering(
      out, lowering.mesh_impl(self).broadcast_impl(lowering.tensors[x], x.shape, out.shape)
    )


def broadcast(x: Tensor, new_shape: ShapeLike) -> Tensor:
  """X with more dimensions (and in another order); x itself if the shape is equal.

  Args:
    x: a `Tensor`.
    new_shape: dimensions of the result; all of x's are among them.
  """
  new_shape = convert_to_shape(new_shape)
  if x.shape == new_shape:
    return x
  return BroadcastOperation(x, new_shape).outputs[0]


# Kind of reduction -> the gradient of x, from those of the output, x, and the output. Those of
# maximum and minimum are made of operations that themselves reduce: `extremes` adds them.
_gradients: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
  "SUM": lambda dy, x, y: broadcast(dy, x.shape)
}


def add_gradient(reduction: str, gradient: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
  """Says what the gradient of a kind of reduction is.

  Args:
    reduction: "MAX", say.
    gradient: `fn(dy, x, y)`, a tensor of the shape of x.
  """
  _gradients[reduction] = gradient


class ReduceOperation(Operation):
  """Sum, maximum or minimum over the dimensions that the output leaves out.

  Args:
    x: a `Tensor`.
    output_shape: a `Shape` of dimensions of x, in any order.
    reduction_fn_string: "SUM", "MAX" or "MIN".
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(
    self, x: NumberTensor, output_shape: Shape, reduction_fn_string: str, name: str | None = None
  ):
    super().__init__([x], name=name or "reduce")
    for d in output_shape:
      if d not in x.shape:
        raise ShapeError(f"{self.name}: output dimension {d.name}={d.size} is not in {x}")
    self._outputs = [Tensor(self, output_shape, x.dtype)]
    reduction_fn(reduction_fn_string)  # Tells at once that there is none.
    self._reduction_fn_string = reduction_fn_string

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    if self._reduction_fn_string not in _gradients:
      raise GradientError(f"{self.name}: no gradient for {self._reduction_fn_string!r}")
    return [_gradients[self._reduction_fn_string](grad_ys[0], self.inputs[0], self.outputs[0])]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    x, out = self.inputs[0], self.outputs[0]
    fn = reduction_fn(self._reduction_fn_string)
    reduced = [d for d in x.shape if d not in out.shape]
    axes = [i for i, d in enumerate(x.shape) if d not in out.shape]
    kept = [d for d in x.shape if d in out.shape]

    def reduce(t: tf.Tensor) -> tf.Tensor:
      return transpose_to(fn(t, axis=axes) if axes else t, kept, out.shape.dims)

    identity = _IDENTITY[self._reduction_fn_string]
    slices = impl.without_padding(lowering.tensors[x], x.shape, identity, reduced)
    laid_out = impl.slicewise(reduce, slices)
    mesh_axes = mesh_axes_of(impl, reduced)
    if mesh_axes:
      key = f"allreduce/{mesh_axes}/reduce_op"
      size = lowering.laid_out_size(out)
      # A sum may wait: sums that are added meet in one exchange. A maximum has to be there now.
      if self._reduction_fn_string == "SUM":
        laid_out = LazyAllreduceSum(
          impl, laid_out, mesh_axes, lambda: lowering.add_counter(key, size)
        )
      else:
        laid_out = impl.allreduce(laid_out, mesh_axes, self._reduction_fn_string)
        lowering.add_counter(key, size)
    lowering.set_tensor_lowering(out, laid_out)


def mesh_axes_of(mesh_impl: MeshImpl, dims: list[Dimension]) -> list[int]:
  """The mesh axes over which some of the dimensions are split."""
  axes = [mesh_impl.tensor_dimension_to_mesh_axis(d) for d in dims]
  return [a for a in axes if a is not None]


def reduction_output_shape(
  x: Tensor, output_shape: Shape | None, reduced_dim: Dimension | None, *, name: str = "reduction"
) -> Shape:
  """The output shape of a reduction.

  Raises:
    DimensionError: x does not have `reduced_dim`.
    ShapeError: both are given and contradict each other.
  """
  if reduced_dim is not None and reduced_dim not in x.shape:
    raise no_such_dimension(f"{name}: reduced_dim", reduced_dim, x)
  if output_shape is None:
    return Shape([]) if reduced_dim is None else x.shape - reduced_dim
  if reduced_dim is not None and set(x.shape) - set(output_shape) != {reduced_dim}:
    raise ShapeError(
      f"{name} of {x} to {output_shape} does not reduce exactly the dimension "
      f"{reduced_dim.name}={reduced_dim.size}; give only one of output_shape and reduced_dim"
    )
  return output_shape


def _reduce(
  x: Tensor,
  disable_positional_args: object,
  output_shape: ShapeLike | None,
  reduced_dim: DimensionLike | None,
  reduction: str,
  name: str,
) -> Tensor:
  if disable_positional_args is not None:
    raise ArgumentError(
      f"{name} of {x}: give output_shape or reduced_dim as a keyword, not by position; got "
      f"{disable_positional_args!r}"
    )
  shape = reduction_output_shape(
    x, convert_to_shape(output_shape), convert_to_dimension(reduced_dim), name=name
  )
  if shape == x.shape:
    return x
  return ReduceOperation(x, shape, reduction, name=name).outputs[0]


def reduce_sum(
  x: NumberTensor,
  disable_positional_args: object = None,
  output_shape: ShapeLike | None = None,
  reduced_dim: DimensionLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Sum over `reduced_dim`, or over the dimensions that `output_shape` leaves out, or all.

  Args:
    x: a `Tensor`.
    disable_positional_args: must stay None; what follows is given by keyword.
    output_shape: dimensions to keep, in any order.
    reduced_dim: the one dimension to reduce.
    name: of the operation.

  Returns:
    A `Tensor`; x itself if nothing is to be done.
  """
  return _reduce(x, disable_positional_args, output_shape, reduced_dim, "SUM", name or "reduce")


def reduce_max(
  x: RealTensor,
  disable_positional_args: object = None,
  output_shape: ShapeLike | None = None,
  reduced_dim: DimensionLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Maximum over dimensions; arguments as `reduce_sum`.

  Tied elements each get the whole gradient.
  """
  return _reduce(x, disable_positional_args, output_shape, reduced_dim, "MAX", name or "reduce_max")


def reduce_min(
  x: RealTensor,
  disable_positional_args: object = None,
  output_shape: ShapeLike | None = None,
  reduced_dim: DimensionLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Minimum over dimensions; arguments as `reduce_sum`.

  Tied elements each get the whole gradient.
  """
  return _reduce(x, disable_positional_args, output_shape, reduced_dim, "MIN", name or "reduce_min")


def reduce_mean(
  x: FloatOrComplexTensor,
  disable_positional_args: object = None,
  output_shape: ShapeLike | None = None,
  reduced_dim: DimensionLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Mean over dimensions of a floating or complex tensor; arguments as `reduce_sum`."""
  total = reduce_sum(
    x, disable_positional_args, output_shape, reduced_dim, name=name or "reduce_mean"
  )
  # A product, not a mean of each slice: the sum may stay pending behind it.
  return ScalarMultiplyOperation(total, total.size / x.size).outputs[0]


def reduce_all(
  x: CastableTensor,
  disable_positional_args: object = None,
  output_shape: ShapeLike | None = None,
  reduced_dim: DimensionLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Logical AND of a bool tensor over dimensions; arguments as `reduce_sum`."""
  # tf.reduce_min and tf.reduce_max take no bools.
  return cast(
    reduce_min(
      to_float(x), disable_positional_args, output_shape, reduced_dim, name or "reduce_all"
    ),
    tf.bool,
  )


def reduce_any(
  x: CastableTensor,
  disable_positional_args: object = None,
  output_shape: ShapeLike | None = None,
  reduced_dim: DimensionLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Logical OR of a bool tensor over dimensions; arguments as `reduce_sum`."""
  return cast(
    reduce_max(
      to_float(x), disable_positional_args, output_shape, reduced_dim, name or "reduce_any"
    ),
    tf.bool,
  )
