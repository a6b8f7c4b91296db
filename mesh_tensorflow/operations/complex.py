"""Complex tensors: made of two real ones, and taken apart.

Gradients are TensorFlow's (`program.differentiable`): that of a real loss to z = a + ib is
dL/da + i dL/db. A linear map passes gradients back through its conjugate transpose, so a product
multiplies them by the conjugate of the other factor.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.errors import DTypeError, ShapeError
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.program.argument_kinds import FloatOrComplexTensor, FloatTensor
from mesh_tensorflow.program.graph import Tensor

__all__ = ["angle", "conj", "imag", "mtf_complex", "real"]

# What tf.complex makes numbers of.
_PARTS = {tf.float32: tf.complex64, tf.float64: tf.complex128}


def mtf_complex(
  real: FloatTensor, imag: FloatTensor | None = None, name: str = "complex"
) -> Tensor:
  """real + i imag, elementwise.

  Args:
    real: a float32 or float64 `Tensor`.
    imag: another of its shape and dtype; zeros by default.
    name: of the operation.

  Returns:
    A `Tensor` of dtype complex64 or complex128.

  Raises:
    DTypeError: a part is of another dtype, or the two differ.
    ShapeError: the shapes differ.
  """
  x = real
  if x.dtype not in _PARTS:
    raise DTypeError(f"{name}: the parts must be float32 or float64, got {x}; cast it (mtf.cast)")
  dtype = _PARTS[x.dtype]
  if imag is None:
    return _part(lambda t: tf.complex(t, tf.zeros_like(t)), x, dtype, lambda dy: _real(dy), name)
  if imag.dtype != x.dtype:
    raise DTypeError(f"{name}: {x} and {imag} have different dtypes; cast one of them (mtf.cast)")
  if imag.shape != x.shape:
    raise ShapeError(
      f"{name}: {imag} has not the shape of {x}; use mtf.broadcast, which also transposes"
    )
  return cwise(
    tf.complex,
    [x, imag],
    output_dtype=dtype,
    grad_function=lambda op, dy: [_real(dy), _imag(dy)],
    name=name,
  )


def real(x: FloatOrComplexTensor, name: str = "real") -> Tensor:
  """The real part, elementwise; x itself if it is real; arguments as `identity`."""
  return _real(x, name) if x.dtype.is_complex else x


def imag(x: FloatOrComplexTensor, name: str = "imag") -> Tensor:
  """The imaginary part, elementwise; zeros of a real tensor; arguments as `identity`."""
  if x.dtype.is_complex:
    return _imag(x, name)
  return cwise(tf.zeros_like, [x], grad_function=0, name=name)


def conj(x: FloatOrComplexTensor, name: str = "conj") -> Tensor:
  """The complex conjugate, elementwise; x itself if it is real; arguments as `identity`."""
  if not x.dtype.is_complex:
    return x
  return _part(tf.math.conj, x, x.dtype, conj, name)


def angle(x: FloatOrComplexTensor, name: str = "angle") -> Tensor:
  """The argument of a complex number in radians, in (-pi, pi]; arguments as `identity`.

  It is 0 or pi of a real number. The gradient is i dy / conj(x), and 0 at x = 0, where there is
  none.
  """
  if not x.dtype.is_complex:
    return cwise(tf.math.angle, [x], grad_function=0, name=name)
  return cwise(
    tf.math.angle,
    [x],
    output_dtype=x.dtype.real_dtype,
    grad_function=lambda op, dy: [cwise(_angle_gradient, [op.inputs[0], dy], name=f"{name}_grad")],
    name=name,
  )


def _angle_gradient(x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
  # The angle of a + ib has the derivatives (-b, a) / |x|^2.
  return tf.math.divide_no_nan(tf.complex(tf.zeros_like(dy), dy), tf.math.conj(x))


def _real(x: Tensor, name: str = "real") -> Tensor:
  return _part(tf.math.real, x, x.dtype.real_dtype, lambda dy: mtf_complex(dy), name)


def _imag(x: Tensor, name: str = "imag") -> Tensor:
  return _part(tf.math.imag, x, x.dtype.real_dtype, _times_i, name)


def _times_i(x: Tensor) -> Tensor:
  """i x, of a real x."""
  dtype = _PARTS[x.dtype]
  return _part(lambda t: tf.complex(tf.zeros_like(t), t), x, dtype, _imag, "times_i")


def _part(
  tf_fn: Callable[[tf.Tensor], tf.Tensor],
  x: Tensor,
  dtype: DTypeLike,
  gradient: Callable[[Tensor], Tensor],
  name: str,
) -> Tensor:
  """A function of each element that is linear in its real and imaginary part."""
  return cwise(
    tf_fn, [x], output_dtype=dtype, grad_function=lambda op, dy: [gradient(dy)], name=name
  )
