"""Dtypes that have gradients."""

from __future__ import annotations

import tensorflow as tf


def is_differentiable(dtype: tf.DType) -> bool:
  """True if tensors of the dtype have gradients: if it is floating or complex.

  The gradient of a real y to a complex z = a + ib is dy/da + i dy/db, as in TensorFlow, so that
  a step against it descends; for w = f(z) with f holomorphic that is conj(f'(z)) times the
  gradient to w.

  Args:
    dtype: of the tensor.
  """
  return bool(dtype.is_floating or dtype.is_complex)
