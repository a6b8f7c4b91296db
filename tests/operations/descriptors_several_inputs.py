"""Functions of several inputs of one shape, most of which can be one tensor."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)
AB, ABC = "a:4 b:8", "a:4 b:8 c:12"
POSITIVE = T(AB, 0.3, 3.0)


class _Product(mtf.Operation):
  """An operation of a user's own: x1 * x2 * x2."""

  def __init__(self, x1, x2):
    super().__init__([x1, x2], name="product")
    self._outputs = [mtf.Tensor(self, x1.shape, x1.dtype)]

  def gradient(self, grad_ys):
    x1, x2 = self.inputs
    return [grad_ys[0] * x2 * x2, grad_ys[0] * x1 * x2 * 2.0]

  def lower(self, lowering):
    slices = [lowering.tensors[x] for x in self.inputs]
    y = lowering.mesh_impl(self).slicewise(lambda a, b: a * b * b, *slices)
    lowering.set_tensor_lowering(self.outputs[0], y)


def _sum_and_product(x, y):
  return mtf.slicewise(
    lambda s, t: (s + t, tf.reduce_sum(s * t, 1)),
    [x, y],
    output_shape=[x.shape, x.shape[:1]],
    output_dtype=[x.dtype, x.dtype],
    splittable_dims=x.shape[:1],
  )


def _custom(x, y):
  """exp(x * y), whose gradient is made of its output."""

  def gradient(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
    return [output_grads[0] * outputs[0] * v for v in reversed(explicit_inputs)]

  return mtf.custom_gradient(lambda x, y: mtf.exp(mtf.log(mtf.exp(x * y))), gradient, [x, y])


def _reversible(x, y):
  state = (x, None, y, None)
  for f in (mtf.tanh, lambda v: mtf.tanh(v * v)):
    state = mtf.layers.reversible_half_residual_and_swap(*state, f)
  return [state[0], state[2]]


def _reversible_expected(x, y):
  x, y = y, x + np.tanh(y)
  return [y, x + np.tanh(y * y)]


def _taken_besides(x, y):
  """A function that uses one of its arguments besides, as a tensor from outside."""
  return mtf.recompute_grad(lambda v: mtf.sin(v) * y + x * v, [x])


def _weighted(x, w):
  """A function of slices along whose split dimension one input is whole."""
  return mtf.slicewise(
    lambda s, t: s * t * t, [x, w], output_shape=x.shape, splittable_dims=x.shape.dims
  )


def _weighted_and_summed(x, w):
  """As `_weighted`, with a second output that does not have that dimension."""
  return mtf.slicewise(
    lambda s, t: (s * t * t, tf.sin(t)),
    [x, w],
    output_shape=[x.shape, w.shape],
    output_dtype=[x.dtype, x.dtype],
    splittable_dims=x.shape.dims,
  )


def _lrn(x):
  return mtf.slicewise(
    lambda t: tf.nn.local_response_normalization(t, 1, 1.0, 1.0, 0.5),
    [x],
    splittable_dims=x.shape.dims[:-1],
  )


def _lrn_expected(x):
  padded = np.pad(x * x, [(0, 0)] * 3 + [(1, 1)])
  return x / np.sqrt(1.0 + padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:])


def _slicewise(fn):
  return lambda *xs: mtf.slicewise(fn, list(xs), splittable_dims=xs[0].shape.dims)


DESCRIPTORS = [
  op(
    "cwise_scalar",
    lambda x, s: mtf.cwise(lambda p, q: tf.exp(p) * tf.sin(q), [x, s]),
    lambda x, s: np.exp(x) * np.sin(s),
    AB,
    "",
  ),
  op("cwise_product", lambda x, y: mtf.cwise(lambda p, q: p * q, [x, y]), np.multiply, AB, AB),
  op(
    "cwise_three",
    lambda x, y, z: mtf.cwise(lambda p, q, r: p * tf.sin(q) + r, [x, y, z]),
    lambda x, y, z: x * np.sin(y) + z,
    AB,
    AB,
    AB,
  ),
  op(
    "cwise_pow",
    lambda x, y: mtf.cwise(tf.pow, [x, y]),
    lambda x, y: x**y,
    POSITIVE,
    POSITIVE,
  ),
  op("slicewise_first", _slicewise(lambda s, t: tf.identity(s)), lambda x, y: x, AB, AB),
  op("slicewise_given_back", _slicewise(lambda s, t: t), lambda x, y: y, AB, AB),
  op(
    "slicewise_two_outputs",
    _sum_and_product,
    lambda x, y: [x + y, (x * y).sum(1)],
    AB,
    AB,
    unsplit="b",
  ),
  op("slicewise_weighted", _weighted, lambda x, w: x * w * w, AB, "b:8", replica_tolerance=1e-6),
  op(
    "slicewise_weighted_several",
    _weighted_and_summed,
    lambda x, w: [x * w * w, np.sin(w)],
    AB,
    "b:8",
    replica_tolerance=1e-6,
  ),
  op("slicewise_lrn", _lrn, _lrn_expected, "a:4 b:2 e:2 c:12", unsplit="c"),
  op(
    "own_operation",
    lambda x, y: _Product(x, y).outputs[0],
    lambda x, y: x * y * y,
    AB,
    AB,
    replica_tolerance=1e-6,
  ),
  op("dot", lambda x, y: mtf.einsum([x, y], [A]), lambda x, y: (x * y).sum(1), AB, AB),
  op(
    "einsum_three_in_one_dim",
    lambda x, y, z: mtf.einsum([x, y, z], [B]),
    lambda x, y, z: (x * y * z).sum(0),
    AB,
    AB,
    AB,
  ),
  op(
    "stack_two",
    lambda x, y: mtf.stack([x, y], "n"),
    lambda x, y: np.stack([x, y]),
    AB,
    AB,
    unsplit="n",
  ),
  op(
    "concat_two",
    lambda x, y: mtf.concat([x, y], "b"),
    lambda x, y: np.concatenate([x, y], 1),
    AB,
    AB,
    unsplit="b",
  ),
  op("divide_two", mtf.divide, np.divide, POSITIVE, POSITIVE),
  op("pow_two", mtf.pow, lambda x, y: x**y, POSITIVE, POSITIVE),
  op(
    "squared_difference",
    lambda x, y: mtf.reduce_mean(mtf.square(x - y * y)),
    lambda x, y: ((x - y * y) ** 2).mean(),
    ABC,
    ABC,
  ),
  op(
    "where_of_comparison",
    lambda x, y: mtf.where(mtf.less(x, 0.5), x * y, y),
    lambda x, y: np.where(x < 0.5, x * y, y),
    AB,
    AB,
  ),
  op(
    "softmax_of_product",
    lambda x, y: mtf.softmax(x * y, B),
    lambda x, y: np.exp(x * y) / np.exp(x * y).sum(1, keepdims=True),
    AB,
    AB,
  ),
  op(
    "attention_of_one",
    lambda q, k, v: mtf.einsum(
      [
        mtf.softmax(mtf.einsum([q, mtf.rename_dimension(k, "a", "d")]), mtf.Dimension("d", 4)),
        mtf.rename_dimension(v, "a", "d"),
      ],
      q.shape,
    ),
    lambda q, k, v: np.exp(q @ k.T) / np.exp(q @ k.T).sum(1, keepdims=True) @ v,
    T(AB, -0.5, 0.5),
    T(AB, -0.5, 0.5),
    T(AB, -0.5, 0.5),
    together="a:4 d:4 b:8",
  ),
  op("custom_gradient_of_output", _custom, lambda x, y: np.exp(x * y), AB, AB, tolerance=1e-4),
  op(
    "recompute_grad_two",
    lambda x, y: mtf.recompute_grad(lambda u, v: mtf.tanh(u * v) * v, [x, y]),
    lambda x, y: np.tanh(x * y) * y,
    AB,
    AB,
  ),
  op(
    "recompute_grad_nested_two",
    lambda x, y: mtf.recompute_grad(
      lambda u, v: mtf.recompute_grad(lambda p, q: mtf.sin(p) * q, [u, v]) * v, [x, y]
    ),
    lambda x, y: np.sin(x) * y * y,
    AB,
    AB,
  ),
  op("recompute_grad_besides", _taken_besides, lambda x, y: np.sin(x) * y + x * x, AB, AB),
  op("reversible_two", _reversible, _reversible_expected, AB, AB),
  op(
    "reversible_besides",
    lambda x, y: mtf.layers.reversible_half_residual_and_swap(x, None, y, None, lambda v: v * x)[2],
    lambda x, y: x + y * x,
    AB,
    AB,
  ),
  op(
    "while_loop_two",
    lambda x, y: mtf.while_loop(
      lambda i, u, v: mtf.less(i, 2),
      lambda i, u, v: [i + 1, v, u * v],
      [mtf.constant(x.mesh, 0, dtype=tf.int32), x, y],
    )[1:],
    lambda x, y: [x * y, y * (x * y)],
    AB,
    AB,
    differentiable=False,
  ),
  op(
    "gradients_of_x_twice",
    lambda x: mtf.gradients([mtf.tanh(x)], [x, x], grad_ys=[x]),
    lambda x: [x * (1 - np.tanh(x) ** 2)] * 2,
    AB,
  ),
  op(
    "gradients_of_itself",
    lambda x: mtf.gradients([y := mtf.tanh(x)], [x], grad_ys=[y])[0],
    lambda x: np.tanh(x) * (1 - np.tanh(x) ** 2),
    AB,
  ),
]
