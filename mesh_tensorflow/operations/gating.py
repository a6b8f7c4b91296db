"""Gated units: products of an activation and another tensor, with one gradient for both."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.operations.elementwise import input_of_swish
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.program.graph import Operation, Tensor


def gated(y: Tensor, gate: Tensor) -> Tensor:
  """y * gate; where y is a `swish` (SwiGLU), the gradient takes half of the passes.

  With y = swish(x), p = y * gate and s = sigmoid(x):

    d gate = dp * y
    d x = dp * (p + s * (gate - p))

  Args:
    y: a `Tensor`.
    gate: a `Tensor` of its dtype.
  """
  x = input_of_swish(y)
  if x is None or y.dtype.is_complex or y.shape != gate.shape:
    return y * gate
  # y has no gradient of its own here: that of x is the one through y, too.
  return cwise(
    lambda y, gate, x: y * gate, [y, gate, x], grad_function=_swish_gradients, name="swish_gated"
  )


def _swish_gradients(op: Operation, dp: Tensor) -> list[Tensor | None]:
  y, gate, x = op.inputs
  dx = cwise(_swish_gated_grad, [dp, op.outputs[0], gate, x], name="swish_gated_grad")
  return [None, dp * y, dx]


def _swish_gated_grad(dp: tf.Tensor, p: tf.Tensor, gate: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  dtype = dp.dtype
  if dtype.size < 4:
    # An element-wise kernel of bfloat16 takes CPUs three times as long; and gate - p needs digits.
    dp, p, gate, x = (tf.cast(t, tf.float32) for t in (dp, p, gate, x))
  # The kernel divides by 1 + exp(-x): it multiplies by the sigmoid in one pass.
  through = tf.raw_ops.SoftplusGrad(gradients=gate - p, features=x)
  return tf.cast(dp * (p + through), dtype)
