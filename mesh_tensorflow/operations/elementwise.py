"""Unary elementwise functions, casts, and multiplication or addition of a scalar."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import DTypeError
from mesh_tensorflow.graph import Operation, Tensor
from mesh_tensorflow.operations.slicewise import cwise

_raw = tf.raw_ops


def _of_input(tf_grad: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[..., list[Tensor]]:
  """A gradient computed from (dy, x)."""
  return lambda op, dy: [cwise(tf_grad, [dy, op.inputs[0]], name=f"{op.name}_grad")]


def _of_output(tf_grad: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Callable[..., list[Tensor]]:
  """A gradient computed from (dy, y)."""
  return lambda op, dy: [cwise(tf_grad, [dy, op.outputs[0]], name=f"{op.name}_grad")]


def identity(x: Tensor, name: str = "identity") -> Tensor:
  """x itself, as a new tensor.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(tf.identity, [x], grad_function=lambda op, dy: [dy], name=name)


def sin(x: Tensor, name: str = "sin") -> Tensor:
  """Sine of x (in radians), elementwise.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(tf.sin, [x], name=name)


def cos(x: Tensor, name: str = "cos") -> Tensor:
  """Cosine of x (in radians), elementwise.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(tf.cos, [x], name=name)


def square(x: Tensor, name: str = "square") -> Tensor:
  """x ** 2, elementwise.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(tf.square, [x], name=name, grad_function=_of_input(lambda dy, v: dy * (v + v)))


def sqrt(x: Tensor, name: str = "sqrt") -> Tensor:
  """Square root, elementwise.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(
    tf.sqrt, [x], name=name, grad_function=_of_output(lambda dy, y: _raw.SqrtGrad(y=y, dy=dy))
  )


def rsqrt(x: Tensor, name: str = "rsqrt") -> Tensor:
  """1 / sqrt(x), elementwise.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(
    tf.math.rsqrt,
    [x],
    name=name,
    grad_function=_of_output(lambda dy, y: _raw.RsqrtGrad(y=y, dy=dy)),
  )


def log(x: Tensor, name: str = "log") -> Tensor:
  """Natural logarithm, elementwise.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(tf.math.log, [x], name=name, grad_function=_of_input(lambda dy, v: dy / v))


def exp(x: Tensor, name: str = "exp") -> Tensor:
  """e ** x, elementwise.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(tf.exp, [x], name=name, grad_function=_of_output(lambda dy, y: dy * y))


def sigmoid(x: Tensor, name: str = "sigmoid") -> Tensor:
  """1 / (1 + exp(-x)), elementwise.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(
    tf.sigmoid,
    [x],
    name=name,
    grad_function=_of_output(lambda dy, y: _raw.SigmoidGrad(y=y, dy=dy)),
  )


def tanh(x: Tensor, name: str = "tanh") -> Tensor:
  """Hyperbolic tangent, elementwise.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(
    tf.tanh, [x], name=name, grad_function=_of_output(lambda dy, y: _raw.TanhGrad(y=y, dy=dy))
  )


def negative(x: Tensor, name: str = "negative") -> Tensor:
  """Minus x, elementwise.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(tf.negative, [x], name=name, grad_function=lambda op, dy: [negative(dy)])


def reciprocal(x: Tensor, name: str = "reciprocal") -> Tensor:
  """1 / x, elementwise.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(
    tf.math.reciprocal,
    [x],
    name=name,
    grad_function=_of_output(lambda dy, y: _raw.ReciprocalGrad(y=y, dy=dy)),
  )


def relu(x: Tensor, name: str = "relu") -> Tensor:
  """max(x, 0), elementwise; the gradient at 0 is 0.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(
    tf.nn.relu,
    [x],
    name=name,
    grad_function=_of_output(lambda dy, y: _raw.ReluGrad(gradients=dy, features=y)),
  )


def leaky_relu(x: Tensor, alpha: float = 0.2, name: str = "leaky_relu") -> Tensor:
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


def elu(x: Tensor) -> Tensor:
  """Exponential linear unit, as `tf.nn.elu`.

  Args:
    x: a `Tensor`.
  """
  return cwise(tf.nn.elu, [x], name="elu")


def selu(x: Tensor) -> Tensor:
  """Scaled exponential linear unit, as `tf.nn.selu`.

  Args:
    x: a `Tensor`.
  """
  return cwise(tf.nn.selu, [x], name="selu")


def softplus(x: Tensor) -> Tensor:
  """log(1 + exp(x)), elementwise.

  Args:
    x: a `Tensor`.
  """
  return cwise(tf.math.softplus, [x], name="softplus")


def sign(x: Tensor, name: str = "sign") -> Tensor:
  """-1, 0 or 1; no gradient.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(tf.sign, [x], name=name, grad_function=0)


def logical_not(x: Tensor, name: str = "logical_not") -> Tensor:
  """Not, elementwise, of a bool tensor.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cwise(tf.logical_not, [x], name=name, grad_function=0)


def cast(x: Tensor, dtype: Any, name: str = "cast") -> Tensor:
  """X as another dtype; x itself if it has the dtype. Gradients pass between floating dtypes.

  Args:
    x: a `Tensor`.
    dtype: a tf.DType.
    name: of the operation.
  """
  dtype = tf.as_dtype(dtype)
  if dtype == x.dtype:
    return x
  return cwise(
    lambda v: tf.cast(v, dtype),
    [x],
    output_dtype=dtype,
    name=name,
    grad_function=lambda op, dy: [cast(dy, op.inputs[0].dtype)],
  )


def to_float(x: Tensor, name: str = "to_float") -> Tensor:
  """X as float32.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cast(x, tf.float32, name=name)


def to_bfloat16(x: Tensor, name: str = "to_bfloat16") -> Tensor:
  """X as bfloat16.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cast(x, tf.bfloat16, name=name)


def to_int32(x: Tensor, name: str = "to_int32") -> Tensor:
  """X as int32.

  Args:
    x: a `Tensor`.
    name: of the operation.
  """
  return cast(x, tf.int32, name=name)


def mtf_pow(x: Tensor, y: Any) -> Tensor:
  """exp(log(x) * y): NaN for negative x.

  Args:
    x: a `Tensor`.
    y: the exponent: a number or a `Tensor`.
  """
  return exp(log(x) * y)


def mtf_abs(x: Tensor) -> Tensor:
  """|x|, elementwise; the gradient is dy * sign(x).

  Args:
    x: a `Tensor`.
  """
  return cwise(
    tf.abs,
    [x],
    name="abs",
    grad_function=_of_input(lambda dy, v: dy * tf.sign(v)),
  )


def swish(x: Tensor) -> Tensor:
  """X * sigmoid(x).

  Args:
    x: a `Tensor`.
  """
  return cwise(tf.nn.silu, [x], name="swish", grad_function=_of_input(_swish_grad))


def _swish_grad(dy: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  s = tf.sigmoid(x)
  return dy * (s * (1.0 + x * (1.0 - s)))


def gelu(x: Tensor) -> Tensor:
  """Gaussian error linear unit, tanh approximation.

  x * 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3))) (Hendrycks and Gimpel, 2016).

  Args:
    x: a `Tensor`.
  """
  return cwise(_gelu, [x], name="gelu", grad_function=_of_input(_gelu_grad))


_GELU_SCALE, _GELU_CUBIC = math.sqrt(2.0 / math.pi), 0.044715


def _gelu(x: tf.Tensor) -> tf.Tensor:
  inner = x * (_GELU_SCALE + (_GELU_SCALE * _GELU_CUBIC) * tf.square(x))
  return (0.5 * x) * (1.0 + tf.tanh(inner))


def _gelu_grad(dy: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  x2 = tf.square(x)
  t = tf.tanh(x * (_GELU_SCALE + (_GELU_SCALE * _GELU_CUBIC) * x2))
  slope = _GELU_SCALE + (3.0 * _GELU_SCALE * _GELU_CUBIC) * x2
  return dy * (0.5 * (1.0 + t) + (0.5 * x) * (1.0 - tf.square(t)) * slope)


def squared_relu(x: Tensor) -> Tensor:
  """max(x, 0) ** 2.

  Args:
    x: a `Tensor`.
  """
  return square(relu(x))


class ScalarMultiplyOperation(Operation):
  """x times a scalar (a Python or NumPy number, or a 0-d tf.Tensor of x's dtype).

  Args:
    x: a `Tensor`.
    scalar: the scalar.
    name: of the operation.
  """

  def __init__(self, x: Tensor, scalar: Any, name: str | None = None):
    super().__init__([x], name=name or "scalar_mul")
    self._scalar = checked_scalar(scalar, x, self.name)
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys):
    return [ScalarMultiplyOperation(grad_ys[0], self._scalar).outputs[0]]

  def lower(self, lowering):
    lowering.set_tensor_lowering(
      self.outputs[0],
      lowering.mesh_impl(self).slicewise_delay_allreduce(
        lambda x: x * self._scalar, lowering.tensors[self.inputs[0]]
      ),
    )


class ScalarAddOperation(Operation):
  """x plus a scalar (a Python or NumPy number, or a 0-d tf.Tensor of x's dtype).

  Args:
    x: a `Tensor`.
    scalar: the scalar.
    name: of the operation.
  """

  def __init__(self, x: Tensor, scalar: Any, name: str | None = None):
    super().__init__([x], name=name or "scalar_add")
    self._scalar = checked_scalar(scalar, x, self.name)
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys):
    return grad_ys

  def lower(self, lowering):
    lowering.set_tensor_lowering(
      self.outputs[0],
      lowering.mesh_impl(self).slicewise(
        lambda x: x + self._scalar, lowering.tensors[self.inputs[0]]
      ),
    )


def checked_scalar(scalar: Any, x: Tensor, what: str) -> Any:
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
