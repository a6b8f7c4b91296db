"""Unary functions, casts, scalars, slicewise."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.operations.gating import gated
from tests.conformance.framework import T, op

AB = "a:4 b:8"
POSITIVE = T(AB, 0.3, 3.0)
INTEGERS = T(AB, -5, 6, "int32")
BOOLS = T(AB, dtype="bool")


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _elu(x):
  return np.where(x > 0, x, np.exp(x) - 1)


def _selu(x):
  return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * (np.exp(x) - 1))


DESCRIPTORS = [
  op("identity", mtf.identity, lambda x: x, AB),
  op("sin", mtf.sin, np.sin, AB),
  op("cos", mtf.cos, np.cos, AB),
  op("square", mtf.square, lambda x: x * x, AB),
  op("sqrt", mtf.sqrt, np.sqrt, POSITIVE),
  op("rsqrt", mtf.rsqrt, lambda x: x**-0.5, POSITIVE),
  op("log", mtf.log, np.log, POSITIVE),
  op("exp", mtf.exp, np.exp, AB),
  op("sigmoid", mtf.sigmoid, _sigmoid, AB),
  op("tanh", mtf.tanh, np.tanh, AB),
  op("negative", mtf.negative, lambda x: -x, AB),
  op("negative_int", mtf.negative, lambda x: -x, INTEGERS),
  op("reciprocal", mtf.reciprocal, lambda x: 1 / x, POSITIVE),
  op("relu", mtf.relu, lambda x: np.maximum(x, 0), AB),
  op("leaky_relu", mtf.leaky_relu, lambda x: np.where(x > 0, x, 0.2 * x), AB),
  op("leaky_relu_3", lambda x: mtf.leaky_relu(x, 0.3), lambda x: np.where(x > 0, x, 0.3 * x), AB),
  op("elu", mtf.elu, _elu, AB),
  op("selu", mtf.selu, _selu, AB),
  op("softplus", mtf.softplus, lambda x: np.log1p(np.exp(x)), AB),
  op("swish", mtf.swish, lambda x: x * _sigmoid(x), AB),
  op("swish_gated", lambda x, g: gated(mtf.swish(x), g), lambda x, g: x * _sigmoid(x) * g, AB, AB),
  op("tanh_gated", lambda x, g: gated(mtf.tanh(x), g), lambda x, g: np.tanh(x) * g, AB, AB),
  op("gelu", mtf.gelu, _gelu, AB),
  op("squared_relu", mtf.squared_relu, lambda x: np.maximum(x, 0) ** 2, AB),
  op("sign", mtf.sign, np.sign, AB),
  op("sign_int", mtf.sign, np.sign, INTEGERS),
  op("abs", mtf.abs, np.abs, AB),
  op("abs_int", mtf.abs, np.abs, INTEGERS),
  op("pow", lambda x: mtf.pow(x, 2.5), lambda x: x**2.5, POSITIVE),
  op("pow_tensor", mtf.pow, lambda x, y: x**y, POSITIVE, AB),
  op("logical_not", mtf.logical_not, np.logical_not, BOOLS),
  op("cast_to_int", mtf.to_int32, lambda x: np.trunc(x).astype(np.int32), AB, differentiable=False),
  op("cast_from_int", mtf.to_float, lambda x: x.astype(np.float64), INTEGERS),
  op("cast_from_bool", mtf.to_float, lambda x: x.astype(np.float64), BOOLS),
  op("cast_to_bool", lambda x: mtf.cast(x, tf.bool), lambda x: x != 0, INTEGERS),
  op("cast_to_bfloat16", mtf.to_bfloat16, lambda x: x, AB, tolerance=5e-3),
  op("cast_same", lambda x: mtf.cast(x, tf.float32), lambda x: x, AB),
  op("square_bfloat16", mtf.square, lambda x: x * x, T(AB, dtype="bfloat16"), tolerance=1e-2),
  op("scalar_add", lambda x: x + 1.5, lambda x: x + 1.5, AB),
  op("scalar_add_left", lambda x: 1.5 + x, lambda x: x + 1.5, AB),
  op("scalar_add_int", lambda x: x + 3, lambda x: x + 3, INTEGERS),
  op("scalar_sub", lambda x: x - 1.5, lambda x: x - 1.5, AB),
  op("scalar_sub_left", lambda x: 1.5 - x, lambda x: 1.5 - x, AB),
  op("scalar_mul", lambda x: x * 1.5, lambda x: x * 1.5, AB),
  op("scalar_mul_left", lambda x: np.float32(1.5) * x, lambda x: x * 1.5, AB),
  op("scalar_mul_tf", lambda x: x * tf.constant(1.5), lambda x: x * 1.5, AB),
  op("scalar_div", lambda x: x / 1.5, lambda x: x / 1.5, AB),
  op("scalar_div_left", lambda x: 1.5 / x, lambda x: 1.5 / x, POSITIVE),
  op("zeros_like", mtf.zeros_like, np.zeros_like, INTEGERS),
  op("ones_like", mtf.ones_like, np.ones_like, AB, differentiable=False),
  op("cwise", lambda x: mtf.cwise(tf.math.log1p, [x]), np.log1p, POSITIVE),
  op(
    "cwise_two",
    lambda x, y: mtf.cwise(tf.math.atan2, [x, y]),
    np.arctan2,
    POSITIVE,
    T(AB, 0.5, 2.0),
  ),
  op(
    "slicewise_unsplit_dim",
    lambda x: mtf.slicewise(lambda t: tf.cumsum(t, 1), [x], splittable_dims=[x.shape[0]]),
    lambda x: np.cumsum(x, 1),
    AB,
    unsplit="b",
  ),
  op(
    "slicewise_several",
    lambda x: mtf.slicewise(
      lambda t: (tf.sin(t), tf.cast(t > 0, tf.int32)),
      [x],
      output_shape=[None, None],
      output_dtype=[tf.float32, tf.int32],
      splittable_dims=x.shape.dims,
    ),
    lambda x: [np.sin(x), (x > 0).astype(np.int32)],
    AB,
  ),
  op("stop_gradient", mtf.stop_gradient, lambda x: x, AB, gradient=lambda xs, dys: [0 * xs[0]]),
  op(
    "stop_gradient_times_x",
    lambda x: mtf.stop_gradient(x) * x,
    lambda x: x * x,
    AB,
    gradient=lambda xs, dys: [xs[0] * dys[0]],
  ),
]
