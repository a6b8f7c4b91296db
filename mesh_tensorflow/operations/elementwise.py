"""Unary elementwise functions and casts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.errors import DTypeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.operations.slicewise import (
  SlicewiseOperation,
  cwise,
  taking_all_integers,
)
from mesh_tensorflow.program.argument_kinds import (
  BoolTensor,
  CastableTensor,
  FloatOrComplexTensor,
  FloatTensor,
  NumberTensor,
  RealTensor,
  SignedTensor,
  TensorOrScalar,
)
from mesh_tensorflow.program.graph import Operation, Tensor
from mesh_tensorflow.program.operators import provide

__all__ = [
  "cast",
  "cos",
  "elu",
  "exp",
  "gelu",
  "identity",
  "leaky_relu",
  "log",
  "logical_not",
  "mtf_abs",
  "mtf_pow",
  "negative",
  "reciprocal",
  "relu",
  "rsqrt",
  "selu",
  "sigmoid",
  "sign",
  "sin",
  "softplus",
  "sqrt",
  "square",
  "squared_relu",
  "swish",
  "tanh",
  "to_bfloat16",
  "to_float",
  "to_int32",
]

_raw = tf.raw_ops
# The tensor itself, if it is real: gradients are those of TensorFlow (see `complex`).
_conj = tf.math.conj


def _of_input(tf_grad: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[..., list[Tensor]]:
  """A gradient computed from (dy, x)."""
  return lambda op, dy: [cwise(tf_grad, [dy, op.inputs[0]], name=f"{op.name}_grad")]


def _of_output(tf_grad: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[..., list[Tensor]]:
  """A gradient computed from (dy, y)."""
  # Of the output, where that will do: the input need not be kept for the backward pass.
  return lambda op, dy: [cwise(tf_grad, [dy, op.outputs[0]], name=f"{op.name}_grad")]


def _by_kernel(raw_grad: Callable[..., tf.Tensor]) -> Callable[..., list[Tensor]]:
  """A gradient that TensorFlow has an operation for, of (y, dy)."""
  return _of_output(lambda dy, y: raw_grad(y=y, dy=dy))


def _of_conj(raw_grad: Callable[..., tf.Tensor]) -> Callable[..., list[Tensor]]:
  """Like `_by_kernel`, but for kernels that take the conjugate of a complex y."""
  return _of_output(lambda dy, y: raw_grad(y=_conj(y), dy=dy))


def identity(x: Tensor, name: str = "identity") -> Tensor:
  """x itself, as a new tensor.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return taking_all_integers(cwise(tf.identity, [x], grad_function=lambda op, dy: [dy], name=name))


def sin(x: FloatOrComplexTensor, name: str = "sin") -> Tensor:
  """Sine of x (in radians), elementwise; arguments as `identity`."""
  return cwise(tf.sin, [x], name=name)


def cos(x: FloatOrComplexTensor, name: str = "cos") -> Tensor:
  """Cosine of x (in radians), elementwise; arguments as `identity`."""
  return cwise(tf.cos, [x], name=name)


def square(x: NumberTensor, name: str = "square") -> Tensor:
  """x ** 2, elementwise; arguments as `identity`."""
  return taking_all_integers(
    cwise(tf.square, [x], name=name, grad_function=_of_input(lambda dy, v: dy * _conj(v + v)))
  )


def sqrt(x: FloatOrComplexTensor, name: str = "sqrt") -> Tensor:
  """Square root, elementwise; arguments as `identity`."""
  return cwise(tf.sqrt, [x], name=name, grad_function=_by_kernel(_raw.SqrtGrad))


def rsqrt(x: FloatOrComplexTensor, name: str = "rsqrt") -> Tensor:
  """1 / sqrt(x), elementwise; arguments as `identity`."""
  return cwise(tf.math.rsqrt, [x], name=name, grad_function=_by_kernel(_raw.RsqrtGrad))


def log(x: FloatOrComplexTensor, name: str = "log") -> Tensor:
  """Natural logarithm, elementwise; arguments as `identity`."""
  return cwise(tf.math.log, [x], name=name, grad_function=_of_input(lambda dy, v: dy / _conj(v)))


def exp(x: FloatOrComplexTensor, name: str = "exp") -> Tensor:
  """e ** x, elementwise; arguments as `identity`."""
  return cwise(tf.exp, [x], name=name, grad_function=_of_output(lambda dy, y: dy * _conj(y)))


def sigmoid(x: FloatOrComplexTensor, name: str = "sigmoid") -> Tensor:
  """1 / (1 + exp(-x)), elementwise; arguments as `identity`."""
  return cwise(tf.sigmoid, [x], name=name, grad_function=_of_conj(_raw.SigmoidGrad))


def tanh(x: FloatOrComplexTensor, name: str = "tanh") -> Tensor:
  """Hyperbolic tangent, elementwise; arguments as `identity`."""
  return cwise(tf.tanh, [x], name=name, grad_function=_of_conj(_raw.TanhGrad))


def negative(x: SignedTensor, name: str = "negative") -> Tensor:
  """Minus x, elementwise; arguments as `identity`."""
  return taking_all_integers(
    cwise(tf.negative, [x], name=name, grad_function=lambda op, dy: [negative(dy)])
  )


def reciprocal(x: FloatOrComplexTensor, name: str = "reciprocal") -> Tensor:
  """1 / x, elementwise; arguments as `identity`."""
  return cwise(tf.math.reciprocal, [x], name=name, grad_function=_by_kernel(_raw.ReciprocalGrad))


def relu(x: RealTensor, name: str = "relu") -> Tensor:
  """max(x, 0), elementwise; the gradient at 0 is 0; arguments as `identity`."""
  return taking_all_integers(
    cwise(
      tf.nn.relu,
      [x],
      name=name,
      # ReluGrad looks only whether a feature is positive: the output is where the input is.
      grad_function=_of_output(lambda dy, y: _raw.ReluGrad(gradients=dy, features=y)),
    )
  )


def leaky_relu(x: FloatTensor, alpha: float = 0.2, name: str = "leaky_relu") -> Tensor:
  """X where positive, else alpha * x.

  Args:
    x: a `Tensor`.
    alpha: the slope where x is negative.
    name: of the operation.
  """
  return cwise(
    lambda v: tf.nn.leaky_relu(v, alpha),
    [x],
    name=name,
    grad_function=_of_input(
      lambda dy, v: _raw.LeakyReluGrad(gradients=dy, features=v, alpha=alpha)
    ),
  )


def elu(x: FloatTensor) -> Tensor:
  """Exponential linear unit, as `tf.nn.elu`.

  Args:
    x: a `Tensor`.
  """
  return cwise(tf.nn.elu, [x], name="elu")


def selu(x: FloatTensor) -> Tensor:
  """Scaled exponential linear unit, as `tf.nn.selu`.

  Args:
    x: a `Tensor`.
  """
  return cwise(tf.nn.selu, [x], name="selu")


def softplus(x: FloatTensor) -> Tensor:
  """log(1 + exp(x)), elementwise.

  Args:
    x: a `Tensor`.
  """
  return cwise(tf.math.softplus, [x], name="softplus")


def sign(x: SignedTensor, name: str = "sign") -> Tensor:
  """-1, 0 or 1; no gradient; arguments as `identity`."""
  return taking_all_integers(cwise(tf.sign, [x], name=name, grad_function=0))


def logical_not(x: BoolTensor, name: str = "logical_not") -> Tensor:
  """Not, elementwise, of a bool tensor; arguments as `identity`."""
  return cwise(tf.logical_not, [x], name=name, grad_function=0)


class CastBeforeSumOperation(Operation):
  """X as another floating dtype; where x is a sum over processors, its summands.

  Args:
    x: a floating `Tensor`.
    dtype: the dtype.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(self, x: Tensor, dtype: tf.DType, name: str | None = None):
    super().__init__([x], name=name or "cast_before_sum")
    self._outputs = [Tensor(self, x.shape, dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return [cast(grad_ys[0], self._inputs[0].dtype)]

  def lower(self, lowering: LoweringInProgress) -> None:
    dtype = self._outputs[0].dtype
    lowering.set_tensor_lowering(
      self._outputs[0],
      lowering.mesh_impl(self).slicewise_delay_allreduce(
        lambda x: tf.cast(x, dtype), lowering.tensors[self._inputs[0]]
      ),
    )


def cast_before_sum(x: Tensor, dtype: tf.DType) -> Tensor:
  """`cast`, before what is still to be summed over processors is exchanged: in that dtype then."""
  return x if x.dtype == dtype else CastBeforeSumOperation(x, dtype).outputs[0]


def cast(x: Tensor, dtype: DTypeLike, name: str = "cast") -> Tensor:
  """X as another dtype; x itself if it has the dtype.

  Gradients pass between floating and complex dtypes.
  Of a complex number the real part is cast, but for `tf.bool`: whether it is not zero.

  Args:
    x: a `Tensor`.
    dtype: a tf.DType.
    name: of the operation.
  """
  dtype = tf.as_dtype(dtype)
  if dtype == x.dtype:
    return x
  if tf.string in (dtype, x.dtype):
    raise DTypeError(f"{name}: {x} cannot be cast to {dtype.name}: text has no value as a number")
  drops_imaginary = x.dtype.is_complex and not dtype.is_complex and dtype != tf.bool
  return taking_all_integers(
    cwise(
      # By its real part, as TensorFlow's own cast, which warns about it.
      lambda v: tf.cast(tf.math.real(v) if drops_imaginary else v, dtype),
      [x],
      output_dtype=dtype,
      name=name,
      grad_function=lambda op, dy: [cast(dy, op.inputs[0].dtype)],
    )
  )


def to_float(x: CastableTensor, name: str = "to_float") -> Tensor:
  """X as float32; arguments as `identity`."""
  return cast(x, tf.float32, name=name)


def to_bfloat16(x: CastableTensor, name: str = "to_bfloat16") -> Tensor:
  """X as bfloat16; arguments as `identity`."""
  return cast(x, tf.bfloat16, name=name)


def to_int32(x: CastableTensor, name: str = "to_int32") -> Tensor:
  """X as int32; arguments as `identity`."""
  return cast(x, tf.int32, name=name)


def mtf_pow(x: FloatTensor, y: TensorOrScalar) -> Tensor:
  """exp(log(x) * y): NaN for negative x.

  Args:
    x: a `Tensor`.
    y: the exponent: a number or a `Tensor`.
  """
  return exp(log(x) * y)


def mtf_abs(x: SignedTensor) -> Tensor:
  """|x|, elementwise, real also of a complex x; the gradient is dy * sign(x), or dy * x / |x|.

  Args:
    x: a `Tensor`.
  """
  return taking_all_integers(
    cwise(
      tf.abs,
      [x],
      output_dtype=x.dtype.real_dtype,
      name="abs",
      grad_function=lambda op, dy: [
        cwise(
          lambda v, g: tf.cast(g, v.dtype) * tf.sign(v), [op.inputs[0], dy], name=f"{op.name}_grad"
        )
      ],
    )
  )


def swish(x: FloatOrComplexTensor) -> Tensor:
  """X * sigmoid(x).

  Args:
    x: a `Tensor`.
  """
  return cwise(_swish, [x], name="swish", grad_function=_of_input(_swish_grad))


def input_of_swish(y: Tensor) -> Tensor | None:
  """The tensor that y is the `swish` of; None if it is none."""
  op = y.operation
  return op.inputs[0] if isinstance(op, SlicewiseOperation) and op.tf_fn is _swish else None


def _swish(x: tf.Tensor) -> tf.Tensor:
  if x.dtype.is_complex:
    return tf.nn.silu(x)
  return _raw.SoftplusGrad(gradients=x, features=x)  # x / (1 + exp(-x)), in one pass.


def _swish_grad(dy: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  s = tf.sigmoid(x)
  # s' = s (1 - s), so (x s)' = s + x s (1 - s).
  return dy * _conj(s + _raw.SigmoidGrad(y=s, dy=x))


def gelu(x: FloatTensor) -> Tensor:
  """Gaussian error linear unit, tanh approximation.

  x * 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3))) (Hendrycks and Gimpel, 2016).

  Args:
    x: a `Tensor`.
  """
  return cwise(_gelu, [x], name="gelu", grad_function=_of_input(_gelu_grad))


_GELU_SCALE, _GELU_CUBIC = math.sqrt(2.0 / math.pi), 0.044715


def _gelu(x: tf.Tensor) -> tf.Tensor:
  # x factored out: a square and products instead of a power.
  inner = x * (_GELU_SCALE + (_GELU_SCALE * _GELU_CUBIC) * tf.square(x))
  return (0.5 * x) * (1.0 + tf.tanh(inner))


def _gelu_grad(dy: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  x2 = tf.square(x)
  t = tf.tanh(x * (_GELU_SCALE + (_GELU_SCALE * _GELU_CUBIC) * x2))
  # The derivative of what tanh is taken of.
  slope = _GELU_SCALE + (3.0 * _GELU_SCALE * _GELU_CUBIC) * x2
  return dy * (0.5 * (1.0 + t) + (0.5 * x) * (1.0 - tf.square(t)) * slope)


def squared_relu(x: RealTensor) -> Tensor:
  """max(x, 0) ** 2.

  Args:
    x: a `Tensor`.
  """
  return square(relu(x))


provide(negative=checked(negative))
