"""Einsum: products of tensors, summed over dimensions; and transposition."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import DimensionTypeError, DTypeError, GraphError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import padding
from mesh_tensorflow.operations.complex import conj
from mesh_tensorflow.operations.contraction import contract
from mesh_tensorflow.operations.reduction import mesh_axes_of
from mesh_tensorflow.program.argument_kinds import NumberTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  Shape,
  ShapeLike,
  convert_to_shape,
  no_such_dimension,
  shape_union,
)
from mesh_tensorflow.program.graph import Operation, Tensor, is_differentiable

__all__ = ["EinsumOperation", "einsum", "matmul", "transpose"]


class EinsumOperation(Operation):
  """Product of the inputs, summed over the dimensions that the output leaves out.

  Dimensions of the output that no input has are new: the result is repeated along
  them.

  Args:
    inputs: a list of `Tensor`s of one dtype.
    output_shape: a `Shape`.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(self, inputs: list[Tensor], output_shape: Shape, name: str | None = None):
    super().__init__(inputs, name=name or "einsum")
    if not inputs:
      raise GraphError(f"{name or 'einsum'} to {output_shape} needs at least one input")
    computes = len(inputs) > 1 or any(d not in output_shape for d in inputs[0].shape)
    if computes and inputs[0].dtype in (tf.bool, tf.string):
      raise DTypeError(f"{self.name}: {inputs[0]} has no products; cast it: mtf.to_float(x)")
    for x in inputs[1:]:
      if x.dtype != inputs[0].dtype:
        raise DTypeError(
          f"{self.name}: {inputs[0]} and {x} have different dtypes; cast one of them (mtf.cast)"
        )
    self._outputs = [Tensor(self, output_shape, inputs[0].dtype)]
    self._union = shape_union([x.shape for x in inputs])

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy, xs = grad_ys[0], self.inputs
    return [
      einsum([dy] + [conj(x) for j, x in enumerate(xs) if j != i], output_shape=xs[i].shape)
      if is_differentiable(xs[i].dtype)
      else None
      for i in range(len(xs))
    ]

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    super().verify_layout(mesh_impl)
    # The product, before it is summed, has all dimensions at once.
    mesh_impl.verify_layout(
      self._union, f"{type(self).__name__} {self.name}: the product of its inputs"
    )

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    out = self.outputs[0]
    present = Shape([d for d in out.shape if d in self._union])
    dims = [x.shape.dims for x in self._inputs]

    def product(*slices: tf.Tensor) -> tf.Tensor:
      return contract(slices, dims, present.dims)

    reduced = [d for d in self._union if d not in out.shape]
    # Of every input that has it: zero times what may be in the padding of another need not be zero.
    slices = [
      impl.without_padding(lowering.tensors[x], x.shape, padding.zero, reduced)
      for x in self._inputs
    ]
    laid_out = impl.slicewise(product, *slices)
    mesh_axes = mesh_axes_of(impl, reduced)
    if mesh_axes:
      key, size = f"allreduce/{mesh_axes}/einsum_op", impl.laid_out_size(present)
      laid_out = LazyAllreduceSum(
        impl, laid_out, mesh_axes, lambda: lowering.add_counter(key, size)
      )
    if present != out.shape:
      # This executes a pending sum, before it is repeated: fewer elements are exchanged.
      laid_out = impl.broadcast_impl(laid_out, present, out.shape)
    lowering.set_tensor_lowering(out, laid_out)
    # Multiplications on all processors, and how many there are without those done more than once.
    lowering.add_counter("einsum", impl.laid_out_size(self._union))
    lowering.add_counter("einsum_unique", self._union.size)


def einsum(
  xs: Sequence[NumberTensor],
  output_shape: ShapeLike | None = None,
  reduced_dims: Sequence[Dimension] | None = None,
  name: str | None = None,
) -> Tensor:
  """Product of tensors, summed over dimensions.

  Args:
    xs: `Tensor`s of one dtype.
    output_shape: dimensions of the result. Dimensions of the inputs that it leaves
      out are summed; dimensions that no input has are broadcast.
    reduced_dims: dimensions to sum. Without an output shape the default is those
      that occur in more than one input, and the result has the others in order of
      first appearance.
    name: of the operation.

  Returns:
    A `Tensor`.

  Raises:
    DTypeError: the dtypes differ.
    DimensionError: a reduced dimension is in no input.
    ShapeError: `output_shape` and `reduced_dims` contradict each other.
  """
  xs = list(xs)
  output_shape = convert_to_shape(output_shape)
  if not xs:
    raise GraphError(f"{name or 'einsum'} to {output_shape} needs at least one input")
  counts: dict[Dimension, int] = {}
  for x in xs:
    for d in x.shape:
      counts[d] = counts.get(d, 0) + 1
  check_sizes(name or "einsum", xs, output_shape)
  if reduced_dims is not None:
    for d in reduced_dims:
      if not isinstance(d, Dimension):
        raise DimensionTypeError(
          f"{name or 'einsum'} of {xs}: reduced_dims must be mtf.Dimensions, got {d!r}"
        )
      if d not in counts:
        raise no_such_dimension(f"{name or 'einsum'}: reduced_dims", d, Shape(list(counts)))
  if output_shape is None:
    reduced = set(d for d, n in counts.items() if n > 1) if reduced_dims is None else reduced_dims
    output_shape = Shape([d for d in counts if d not in reduced])
  elif reduced_dims is not None:
    summed = {d for d in counts if d not in output_shape}
    if summed != set(reduced_dims):
      raise ShapeError(
        f"{name or 'einsum'} of {xs}: output_shape {output_shape} sums over "
        f"{Shape(sorted(summed))}, reduced_dims says {Shape(list(reduced_dims))}; give only one"
      )
  return EinsumOperation(xs, output_shape, name=name).outputs[0]


def check_sizes(name: str, xs: Sequence[Tensor], output_shape: Shape | None = None) -> None:
  """Raises `ShapeError` if two inputs have a dimension of one name and two sizes.

  It is no mistake if one input holds both, or if the given output shape does (as
  the gradient of a kernel from `d_model=8` to `d_model=32`).
  """
  seen: dict[str, tuple[Dimension, Tensor]] = {}
  for x in xs:
    for d in x.shape:
      other, y = seen.setdefault(d.name, (d, x))
      if other == d or y is x or d in y.shape or other in x.shape:
        continue
      if output_shape is not None and d in output_shape and other in output_shape:
        continue
      raise ShapeError(
        f"{name}: dimension {d.name} has size {other.size} in {y} and size {d.size} in {x}; "
        "make them equal, or rename one (mtf.rename_dimension)"
      )


def matmul(
  a: NumberTensor,
  b: NumberTensor,
  output_shape: ShapeLike | None = None,
  reduced_dims: Sequence[Dimension] | None = None,
  name: str | None = None,
) -> Tensor:
  """`einsum` of two tensors.

  Args:
    a: a `Tensor`.
    b: a `Tensor`.
    output_shape: dimensions of the result; see `einsum`.
    reduced_dims: dimensions to sum; see `einsum`.
    name: of the operation.
  """
  return einsum([a, b], output_shape=output_shape, reduced_dims=reduced_dims, name=name)


def transpose(x: Tensor, new_shape: ShapeLike, name: str = "transpose") -> Tensor:
  """X with its dimensions in another order.

  Args:
    x: a `Tensor`.
    new_shape: the dimensions of x in the order wanted.
    name: of the operation.
  """
  new_shape = convert_to_shape(new_shape)
  if set(x.shape) != set(new_shape):
    differ = Shape(sorted(set(x.shape) ^ set(new_shape)))
    raise ShapeError(
      f"{name}: {x} cannot be transposed to {new_shape}: only one of the two has {differ}; to "
      "rename use mtf.rename_dimension, to sum mtf.reduce_sum, to repeat mtf.broadcast"
    )
  return einsum([x], output_shape=new_shape, name=name)
