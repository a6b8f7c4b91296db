"""Binary elementwise operations with broadcasting by dimension name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.dimensions import Shape, ShapeLike, convert_to_shape, is_subsequence
from mesh_tensorflow.errors import ArgumentError, DTypeError, GradientError, ShapeError
from mesh_tensorflow.graph import Operation, Tensor
from mesh_tensorflow.operations.constants import import_tf_tensor
from mesh_tensorflow.operations.einsum import check_sizes, einsum
from mesh_tensorflow.operations.elementwise import (
  ScalarAddOperation,
  ScalarMultiplyOperation,
  cast,
  checked_scalar,
  negative,
)
from mesh_tensorflow.operations.reduction import reduce_sum
from mesh_tensorflow.slices import align


def infer_binary_broadcast_shape(
  shape1: Shape, shape2: Shape, given_output_shape: ShapeLike = None
) -> Shape:
  """The output shape of a binary operation.

  The given shape; else the longer one if the other's dimensions are a subsequence
  of it; else the first one's dimensions and then the second's missing ones.
  """
  if given_output_shape is not None:
    return convert_to_shape(given_output_shape)
  if is_subsequence(shape1.dims, shape2.dims):
    return shape2
  if is_subsequence(shape2.dims, shape1.dims):
    return shape1
  return Shape(shape1.dims + [d for d in shape2 if d not in shape1])


def binary_arguments_to_tensors(
  x1: Any, x2: Any, *, name: str = "binary operation"
) -> tuple[Tensor, Tensor]:
  """Turns the one of two arguments that is a scalar into a `Tensor`.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    name: of the operation, for messages.

  Raises:
    GraphError: neither is a `Tensor`.
  """
  if not isinstance(x1, Tensor) and not isinstance(x2, Tensor):
    raise _no_tensor(name, x1, x2)
  if isinstance(x1, Tensor) and isinstance(x2, Tensor):
    return x1, x2
  if isinstance(x1, Tensor):
    return x1, _scalar_to_tensor(x2, x1, name)
  return _scalar_to_tensor(x1, x2, name), x2


def _no_tensor(name: str, x1: Any, x2: Any) -> ArgumentError:
  return ArgumentError(
    f"{name}: at least one of {x1!r} and {x2!r} must be an mtf.Tensor; use mtf.import_tf_tensor"
  )


def _scalar_to_tensor(scalar: Any, like: Tensor, name: str) -> Tensor:
  if like.dtype != tf.bool:
    scalar = checked_scalar(scalar, like, name)
  return import_tf_tensor(like.mesh, tf.convert_to_tensor(scalar, dtype=like.dtype), Shape([]))


def _check_operands(name: str, x1: Tensor, x2: Tensor, output_shape: Shape) -> None:
  """Raises a typed error if two tensors cannot be combined to the output shape."""
  if x1.dtype != x2.dtype:
    raise DTypeError(f"{name}: {x1} and {x2} have different dtypes; cast one of them (mtf.cast)")
  for x in (x1, x2):
    for d in x.shape:
      if d not in output_shape:
        same_name = [o for o in output_shape if o.name == d.name]
        hint = f"; {output_shape} has {same_name[0].name}={same_name[0].size}" if same_name else ""
        raise ShapeError(
          f"{name}: dimension {d.name}={d.size} of {x} is not in the output shape "
          f"{output_shape}{hint}"
        )
  for d in output_shape:
    if d not in x1.shape and d not in x2.shape:
      raise ShapeError(
        f"{name}: output dimension {d.name}={d.size} is neither in {x1} nor in {x2}; "
        "use mtf.broadcast to add dimensions"
      )
  check_sizes(name, [x1, x2])


class BinaryOpWithBroadcasting(Operation):
  """An elementwise function of two tensors, aligned by dimension name.

  Args:
    tf_fn: function of two slices.
    x1: a `Tensor`.
    x2: a `Tensor` of the same dtype.
    output_shape: a `Shape` of dimensions of x1 and x2.
    output_dtype: of the result.
    name: of the operation.
  """

  def __init__(
    self,
    tf_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    x1: Tensor,
    x2: Tensor,
    output_shape: Shape,
    output_dtype: tf.DType,
    name: str | None = None,
  ):
    super().__init__([x1, x2], name=name or "binary_op")
    _check_operands(self.name, x1, x2, output_shape)
    if not isinstance(output_dtype, tf.DType):
      raise DTypeError(f"{self.name}: output_dtype must be a tf.DType, got {output_dtype!r}")
    self._tf_fn = tf_fn
    self._outputs = [Tensor(self, output_shape, output_dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys):
    raise GradientError(
      f"{self.name} of {self._inputs[0]} and {self._inputs[1]}: this function has no gradient; use "
      "mtf.stop_gradient"
    )

  def lower(self, lowering):
    x1, x2 = self._inputs
    out = self.outputs[0]
    lowering.set_tensor_lowering(
      out,
      lowering.mesh_impl(self).slicewise(
        lambda a, b: self._tf_fn(
          align(a, x1.shape.dims, out.shape.dims), align(b, x2.shape.dims, out.shape.dims)
        ),
        lowering.tensors[x1],
        lowering.tensors[x2],
      ),
    )


class _LinearOperation(BinaryOpWithBroadcasting):
  """x1 + x2 or x1 - x2: sums that are pending stay pending."""

  def lower(self, lowering):
    x1, x2 = self._inputs
    out = self.outputs[0]
    if not x1.shape == x2.shape == out.shape:
      super().lower(lowering)
      return
    lowering.set_tensor_lowering(
      out,
      lowering.mesh_impl(self).slicewise_delay_allreduce(
        self._tf_fn, lowering.tensors[x1], lowering.tensors[x2]
      ),
    )


class AddOperation(_LinearOperation):
  """The sum of two tensors, whose sums over the mesh may be pending.

  Args:
    x1: a `Tensor`.
    x2: a `Tensor`.
    output_shape: a `Shape`.
    name: of the operation.
  """

  def __init__(self, x1: Tensor, x2: Tensor, output_shape: Shape, name: str | None = None):
    super().__init__(tf.add, x1, x2, output_shape, x1.dtype, name=name or "add")

  def gradient(self, grad_ys):
    dy = grad_ys[0]
    return [reduce_sum(dy, output_shape=x.shape) for x in self.inputs]


class SubOperation(_LinearOperation):
  """x1 - x2."""

  def __init__(self, x1: Tensor, x2: Tensor, output_shape: Shape, name: str | None = None):
    super().__init__(tf.subtract, x1, x2, output_shape, x1.dtype, name=name or "sub")

  def gradient(self, grad_ys):
    dy = grad_ys[0]
    return [
      reduce_sum(dy, output_shape=self.inputs[0].shape),
      negative(reduce_sum(dy, output_shape=self.inputs[1].shape)),
    ]


class DivideOperation(BinaryOpWithBroadcasting):
  """x1 / x2 of floating tensors."""

  def __init__(self, x1: Tensor, x2: Tensor, output_shape: Shape, name: str | None = None):
    super().__init__(tf.divide, x1, x2, output_shape, x1.dtype, name=name or "divide")
    if not x1.dtype.is_floating:
      raise DTypeError(f"{self.name}: divide needs floating tensors, got {x1}; use mtf.floordiv")

  def gradient(self, grad_ys):
    x1, x2 = self.inputs
    dx = divide(grad_ys[0], x2, output_shape=self.outputs[0].shape)
    return [
      reduce_sum(dx, output_shape=x1.shape),
      negative(einsum([dx, self.outputs[0]], output_shape=x2.shape)),
    ]


class MinMaxOperation(BinaryOpWithBroadcasting):
  """Elementwise minimum or maximum; at a tie both operands get the whole gradient.

  Args:
    tf_fn: tf.minimum or tf.maximum.
    x1: a `Tensor`.
    x2: a `Tensor`.
    output_shape: a `Shape`.
    name: of the operation.
  """

  def __init__(
    self,
    tf_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    x1: Tensor,
    x2: Tensor,
    output_shape: Shape,
    name: str | None = None,
  ):
    super().__init__(tf_fn, x1, x2, output_shape, x1.dtype, name=name or "min_max")

  def gradient(self, grad_ys):
    dy, y = grad_ys[0], self.outputs[0]
    return [
      reduce_sum(where(equal(x, y, output_shape=y.shape), dy, 0.0), output_shape=x.shape)
      for x in self.inputs
    ]


class WhereOperation(Operation):
  """condition ? if_true : if_false, elementwise, aligned by dimension name."""

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

  def gradient(self, grad_ys):
    condition, if_true, if_false = self.inputs
    dy = grad_ys[0]
    zero = import_tf_tensor(dy.mesh, tf.constant(0, dy.dtype), Shape([]))
    to_true = WhereOperation(condition, dy, zero, dy.shape).outputs[0]
    to_false = WhereOperation(condition, zero, dy, dy.shape).outputs[0]
    return [
      None,
      reduce_sum(to_true, output_shape=if_true.shape),
      reduce_sum(to_false, output_shape=if_false.shape),
    ]

  def lower(self, lowering):
    out = self.outputs[0]
    shapes = [x.shape.dims for x in self._inputs]
    impl = lowering.mesh_impl(self)
    sizes = impl.slice_shape(out.shape)

    def select(*slices):
      aligned = [align(t, dims, out.shape.dims) for t, dims in zip(slices, shapes)]
      result = tf.where(*aligned)
      # Three operands may broadcast to less than the output shape only if it was given.
      return result if result.shape == sizes else tf.broadcast_to(result, sizes)

    lowering.set_tensor_lowering(
      out, impl.slicewise(select, *[lowering.tensors[x] for x in self._inputs])
    )


def binary_op_with_broadcasting(
  tf_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
  x1: Any,
  x2: Any,
  output_shape: ShapeLike = None,
  output_dtype: Any = None,
) -> Tensor:
  """An elementwise function of two tensors, one of which may be a scalar.

  Args:
    tf_fn: function of two slices.
    x1: a `Tensor`, or a scalar if x2 is a `Tensor`.
    x2: likewise.
    output_shape: see `infer_binary_broadcast_shape`.
    output_dtype: x1's by default.
  """
  what = getattr(tf_fn, "__name__", "binary operation")
  x1, x2 = binary_arguments_to_tensors(x1, x2, name=what)
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  return BinaryOpWithBroadcasting(
    tf_fn, x1, x2, shape, x1.dtype if output_dtype is None else output_dtype
  ).outputs[0]


def less(x1: Any, x2: Any, output_shape: ShapeLike = None) -> Tensor:
  """x1 < x2, elementwise, as a bool tensor.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
  """
  return binary_op_with_broadcasting(tf.less, x1, x2, output_shape, tf.bool)


def greater(x1: Any, x2: Any, output_shape: ShapeLike = None) -> Tensor:
  """x1 > x2, elementwise, as a bool tensor.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
  """
  return binary_op_with_broadcasting(tf.greater, x1, x2, output_shape, tf.bool)


def less_equal(x1: Any, x2: Any, output_shape: ShapeLike = None) -> Tensor:
  """x1 <= x2, elementwise, as a bool tensor.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
  """
  return binary_op_with_broadcasting(tf.less_equal, x1, x2, output_shape, tf.bool)


def greater_equal(x1: Any, x2: Any, output_shape: ShapeLike = None) -> Tensor:
  """x1 >= x2, elementwise, as a bool tensor.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
  """
  return binary_op_with_broadcasting(tf.greater_equal, x1, x2, output_shape, tf.bool)


def equal(x1: Any, x2: Any, output_shape: ShapeLike = None) -> Tensor:
  """x1 == x2, elementwise (the operator == compares identity).

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
  """
  return binary_op_with_broadcasting(tf.equal, x1, x2, output_shape, tf.bool)


def not_equal(x1: Any, x2: Any, output_shape: ShapeLike = None) -> Tensor:
  """x1 != x2, elementwise.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
  """
  return binary_op_with_broadcasting(tf.not_equal, x1, x2, output_shape, tf.bool)


def logical_and(x1: Any, x2: Any, output_shape: ShapeLike = None) -> Tensor:
  """x1 and x2, elementwise.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
  """
  return binary_op_with_broadcasting(tf.logical_and, x1, x2, output_shape, tf.bool)


def logical_or(x1: Any, x2: Any, output_shape: ShapeLike = None) -> Tensor:
  """x1 or x2, elementwise.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
  """
  return binary_op_with_broadcasting(tf.logical_or, x1, x2, output_shape, tf.bool)


def floordiv(x1: Any, x2: Any, output_shape: ShapeLike = None) -> Tensor:
  """Quotient rounded down; no gradient.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
  """
  return binary_op_with_broadcasting(tf.math.floordiv, x1, x2, output_shape)


def mod(x1: Any, x2: Any, output_shape: ShapeLike = None) -> Tensor:
  """Remainder with the sign of the divisor; no gradient.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
  """
  return binary_op_with_broadcasting(tf.math.floormod, x1, x2, output_shape)


def minimum(x1: Any, x2: Any, output_shape: ShapeLike = None, name: str | None = None) -> Tensor:
  """The smaller one, elementwise.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
    name: of the operation.
  """
  x1, x2 = binary_arguments_to_tensors(x1, x2, name=name or "minimum")
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  return MinMaxOperation(tf.minimum, x1, x2, shape, name=name).outputs[0]


def maximum(x1: Any, x2: Any, output_shape: ShapeLike = None, name: str | None = None) -> Tensor:
  """The larger one, elementwise.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
    name: of the operation.
  """
  x1, x2 = binary_arguments_to_tensors(x1, x2, name=name or "maximum")
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  return MinMaxOperation(tf.maximum, x1, x2, shape, name=name).outputs[0]


def add(x1: Any, x2: Any, output_shape: ShapeLike = None, name: str | None = None) -> Tensor:
  """x1 + x2; one of them may be a scalar.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
    name: of the operation.
  """
  if not isinstance(x2, Tensor):
    return ScalarAddOperation(_tensor(name or "add", x1, x2), x2, name=name).outputs[0]
  if not isinstance(x1, Tensor):
    return ScalarAddOperation(x2, x1, name=name).outputs[0]
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  return AddOperation(x1, x2, shape, name=name).outputs[0]


def _tensor(name: str, x1: Any, x2: Any) -> Tensor:
  if not isinstance(x1, Tensor):
    raise _no_tensor(name, x1, x2)
  return x1


def add_n(xs: Sequence[Tensor]) -> Any:
  """The sum of a list of tensors; 0 for none.

  Args:
    xs: a list of `Tensor`s.
  """
  if not xs:
    return 0
  total = xs[0]
  for x in xs[1:]:
    total = add(total, x)
  return total


def sub(x1: Any, x2: Any, output_shape: ShapeLike = None, name: str | None = None) -> Tensor:
  """x1 - x2; one of them may be a scalar.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
    name: of the operation.
  """
  if not isinstance(x2, Tensor):
    return ScalarAddOperation(_tensor(name or "sub", x1, x2), -x2, name=name).outputs[0]
  x1, x2 = binary_arguments_to_tensors(x1, x2, name=name or "sub")
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  return SubOperation(x1, x2, shape, name=name).outputs[0]


def multiply(x1: Any, x2: Any, output_shape: ShapeLike = None, name: str | None = None) -> Tensor:
  """x1 * x2; one of them may be a scalar.

  An output shape may leave dimensions out (they are summed) or add some (broadcast).

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
    name: of the operation.
  """
  if not isinstance(x2, Tensor):
    return ScalarMultiplyOperation(_tensor(name or "multiply", x1, x2), x2, name=name).outputs[0]
  if not isinstance(x1, Tensor):
    return ScalarMultiplyOperation(x2, x1, name=name).outputs[0]
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  check_sizes(name or "multiply", [x1, x2], convert_to_shape(output_shape))
  return einsum([x1, x2], output_shape=shape, name=name or "multiply")


def divide(x1: Any, x2: Any, output_shape: ShapeLike = None, name: str | None = None) -> Tensor:
  """x1 / x2 of floating tensors; one of them may be a scalar.

  Args:
    x1: a `Tensor`, or a scalar.
    x2: a `Tensor`, or a scalar; at least one of the two is a `Tensor`.
    output_shape: dimensions of the result. By default those of the longer operand if it has all of
      the other's in order, else x1's and then those that only x2 has.
    name: of the operation.
  """
  if not isinstance(x2, Tensor):
    x1 = _tensor(name or "divide", x1, x2)
    return ScalarMultiplyOperation(x1, 1.0 / x2, name=name).outputs[0]
  x1, x2 = binary_arguments_to_tensors(x1, x2, name=name or "divide")
  shape = infer_binary_broadcast_shape(x1.shape, x2.shape, output_shape)
  return DivideOperation(x1, x2, shape, name=name).outputs[0]


def where(
  condition: Tensor, if_true: Tensor, if_false: Any, output_shape: ShapeLike = None
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
