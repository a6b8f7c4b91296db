"""Selection between two tensors by a condition."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import DTypeError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.slices import align
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.broadcasting import (
  binary_arguments_to_tensors,
  infer_binary_broadcast_shape,
)
from mesh_tensorflow.operations.constants import import_tf_tensor
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.reduction import reduce_sum
from mesh_tensorflow.program.argument_kinds import CastableTensor, TensorOrScalar
from mesh_tensorflow.program.dimensions import Shape, ShapeLike
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["where"]


class WhereOperation(Operation):
  """condition ? if_true : if_false, elementwise, aligned by dimension name."""

  lowers_uneven_slices = True

  def __init__(
    self,
    condition: Tensor,
    if_true: Tensor,
    if_false: Tensor,
    output_shape: Shape,
    name: str | None = None,
  ):
    super().__init__([condition, if_true, if_false], name=name or "where")
    if if_true.dtype != if_false.dtype:
      raise DTypeError(f"{self.name}: {if_true} and {if_false} have different dtypes")
    if condition.dtype != tf.bool:
      raise DTypeError(f"{self.name}: the condition must be bool, got {condition}")
    for x in self._inputs:
      for d in x.shape:
        if d not in output_shape:
          raise ShapeError(
            f"{self.name}: dimension {d.name}={d.size} of {x} is not in the output shape "
            f"{output_shape}"
          )
    self._outputs = [Tensor(self, output_shape, if_true.dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    condition, if_true, if_false = self.inputs
    dy = grad_ys[0]
    # One scalar, which the selection broadcasts, in place of two tensors of zeros.
    zero = import_tf_tensor(dy.mesh, tf.constant(0, dy.dtype), Shape([]))
    to_true = WhereOperation(condition, dy, zero, dy.shape).outputs[0]
    to_false = WhereOperation(condition, zero, dy, dy.shape).outputs[0]
    return [
      None,
      reduce_sum(to_true, output_shape=if_true.shape),
      reduce_sum(to_false, output_shape=if_false.shape),
    ]

  def lower(self, lowering: LoweringInProgress) -> None:
    out = self.outputs[0]
    shapes = [x.shape.dims for x in self._inputs]
    impl = lowering.mesh_impl(self)
    sizes = impl.slice_shape(out.shape)

    def select(*slices: tf.Tensor) -> tf.Tensor:
      aligned = [align(t, dims, out.shape.dims) for t, dims in zip(slices, shapes)]
      result = kernels.where(*aligned)
      # Three operands may broadcast to less than the output shape only if it was given.
      return result if result.shape == sizes else kernels.broadcast_to(result, sizes)

    lowering.set_tensor_lowering(
      out, impl.slicewise(select, *[lowering.tensors[x] for x in self._inputs])
    )


def where(
  condition: CastableTensor,
  if_true: TensorOrScalar,
  if_false: TensorOrScalar,
  output_shape: ShapeLike | None = None,
) -> Tensor:
  """if_true where the condition holds, else if_false.

  An exact selection: NaN or infinity on the side not taken has no effect.

  Args:
    condition: a `Tensor`; what is not bool counts as true unless zero.
    if_true: a `Tensor`, or a scalar if `if_false` is a `Tensor`.
    if_false: a `Tensor` or a scalar.
    output_shape: the broadcast of the three by default.
  """
  if_true, if_false = binary_arguments_to_tensors(if_true, if_false, name="where")
  condition = cast(condition, tf.bool)
  shape = infer_binary_broadcast_shape(
    infer_binary_broadcast_shape(if_true.shape, condition.shape),
    infer_binary_broadcast_shape(if_false.shape, condition.shape),
    output_shape,
  )
  return WhereOperation(condition, if_true, if_false, shape).outputs[0]
