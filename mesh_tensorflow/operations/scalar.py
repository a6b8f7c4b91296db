"""Multiplication and addition of a tensor and a scalar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.kinds import Scalar
from mesh_tensorflow.errors import DTypeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.numerics import constants
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["ScalarAddOperation", "ScalarMultiplyOperation"]


class ScalarOperation(Operation):
  """Base class of operations of a tensor and a scalar."""

  lowers_uneven_slices = True

  _default_name: str

  def __init__(self, x: Tensor, scalar: Any, name: str | None = None):
    super().__init__([x], name=name or self._default_name)
    self._scalar = checked_scalar(scalar, x, self.name)
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def _operand(self, x: tf.Tensor) -> Any:
    """The scalar, beside a slice."""
    is_number = isinstance(self._scalar, (int, float))
    return constants.constant(self._scalar, x.dtype) if is_number else self._scalar


class ScalarMultiplyOperation(ScalarOperation):
  """x times a scalar (a Python or NumPy number, or a 0-d tf.Tensor of x's dtype).

  Args:
    x: a `Tensor`.
    scalar: the scalar.
    name: of the operation.
  """

  _default_name = "scalar_mul"

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    scalar = self._scalar
    if tf.is_tensor(scalar) or isinstance(scalar, tf.Variable):
      scalar = tf.math.conj(scalar)  # The tensor itself, if it is real.
    elif isinstance(scalar, complex):
      scalar = scalar.conjugate()
    return [ScalarMultiplyOperation(grad_ys[0], scalar).outputs[0]]

  def lower(self, lowering: LoweringInProgress) -> None:
    # A sum over the mesh that is pending may wait, as a factor can be applied before it. (A summand
    # cannot: each processor would add it.)
    lowering.set_tensor_lowering(
      self.outputs[0],
      lowering.mesh_impl(self).slicewise_delay_allreduce(
        lambda x: x * self._operand(x), lowering.tensors[self.inputs[0]]
      ),
    )


class ScalarAddOperation(ScalarOperation):
  """x plus a scalar; arguments as `ScalarMultiplyOperation`."""

  _default_name = "scalar_add"

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return grad_ys

  def lower(self, lowering: LoweringInProgress) -> None:
    lowering.set_tensor_lowering(
      self.outputs[0],
      lowering.mesh_impl(self).slicewise(
        lambda x: x + self._operand(x), lowering.tensors[self.inputs[0]]
      ),
    )


def checked_scalar(scalar: Scalar, x: Tensor, what: str) -> Any:
  """The scalar, checked to fit x's dtype.

  Raises:
    DTypeError: a float with an integer tensor, or no scalar.
  """
  if tf.is_tensor(scalar) or isinstance(scalar, tf.Variable):
    if scalar.shape.rank not in (0, None):
      raise DTypeError(
        f"{what}: expected a scalar to go with {x}, got a tf.Tensor of shape {scalar.shape}; "
        "use mtf.import_tf_tensor to give its dimensions names"
      )
    if scalar.dtype != x.dtype:
      raise DTypeError(f"{what}: scalar of dtype {scalar.dtype.name} with {x}; cast it first")
    return scalar
  if isinstance(scalar, Tensor):
    raise DTypeError(f"{what}: expected a scalar to go with {x}, got {scalar}; use the operators")
  if x.dtype == tf.string:
    raise DTypeError(f"{what}: {scalar!r} with {x}, which is text")
  if getattr(scalar, "ndim", 0):
    raise DTypeError(
      f"{what}: expected a scalar to go with {x}, got an array of shape {scalar.shape}; "
      "use mtf.import_tf_tensor to give its dimensions names"
    )
  numbers = (bool, int, float, complex) if x.dtype.is_complex else (bool, int, float)
  if isinstance(scalar, numbers) or hasattr(scalar, "dtype"):
    if not (x.dtype.is_floating or x.dtype.is_complex) and not hasattr(scalar, "__index__"):
      raise DTypeError(
        f"{what}: the float {scalar!r} with the {x.dtype.name} tensor {x}; "
        "use mtf.to_float, or an integer"
      )
    return scalar.item() if hasattr(scalar, "item") else scalar
  raise DTypeError(f"{what}: {type(scalar).__name__} is neither an mtf.Tensor nor a scalar")
