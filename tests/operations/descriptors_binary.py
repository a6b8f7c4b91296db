"""Binary functions, with broadcasting; where; add_n."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op

AB, ABC = "a:4 b:8", "a:4 b:8 c:12"
POSITIVE = T(AB, 0.3, 3.0)
POSITIVE_B = T("b:8", 0.3, 3.0)
INTEGERS = T(AB, -9, 10, "int32")
DIVISORS = T(AB, 1, 5, "int32")
BOOLS, BOOLS_B = T(AB, dtype="bool"), T("b:8", dtype="bool")
# A tie where both are 1; otherwise no two values are near each other.
MULTIPLES = T(AB, -3, 4, "int32")


def _outer(fn):
  """[a, b] with [b, c] to [a, b, c]."""
  return lambda x, y: fn(x[:, :, None], y[None])


def _ties(fn):
  """Each operand gets the whole gradient where it is the result."""

  def gradient(xs, dys):
    y = fn(*xs)
    return [dys[0] * (x == y) for x in xs]

  return gradient


DESCRIPTORS = [
  op("add", lambda x, y: x + y, lambda x, y: x + y, AB, AB),
  op("add_broadcast_leading", mtf.add, lambda x, y: x + y, AB, "b:8"),
  op("add_broadcast_trailing", mtf.add, lambda x, y: x + y[:, None], AB, "a:4"),
  op("add_broadcast_left", mtf.add, lambda x, y: x[:, None] + y, "a:4", AB),
  op("add_transposed", mtf.add, lambda x, y: x + y.T, AB, "b:8 a:4"),
  op("add_outer", mtf.add, _outer(np.add), AB, "b:8 c:12"),
  op("add_scalar_tensor", mtf.add, lambda x, y: x + y, AB, ""),
  op("add_self", lambda x: x + x, lambda x: x + x, AB),
  op("add_int", mtf.add, lambda x, y: x + y, INTEGERS, INTEGERS),
  op(
    "add_output_shape",
    lambda x, y: mtf.add(x, y, output_shape=[("b", 8), ("a", 4)]),
    lambda x, y: (x + y).T,
    AB,
    "b:8",
  ),
  op("sub", lambda x, y: x - y, lambda x, y: x - y, AB, AB),
  op("sub_broadcast", mtf.sub, lambda x, y: x[:, None] - y, "a:4", AB),
  op("multiply", lambda x, y: x * y, lambda x, y: x * y, AB, AB),
  op("multiply_broadcast", mtf.multiply, lambda x, y: x * y, AB, "b:8"),
  op("multiply_outer", mtf.multiply, _outer(np.multiply), AB, "b:8 c:12"),
  op("multiply_self", lambda x: x * x, lambda x: x * x, AB),
  op("multiply_int", mtf.multiply, lambda x, y: x * y, INTEGERS, INTEGERS),
  op(
    "multiply_summed",
    lambda x, y: mtf.multiply(x, y, output_shape=[("a", 4)]),
    lambda x, y: (x * y).sum(1),
    AB,
    "b:8",
  ),
  op(
    "multiply_new_dim",
    lambda x, y: mtf.multiply(x, y, output_shape=ABC),
    lambda x, y: np.repeat((x * y)[:, :, None], 12, 2),
    AB,
    AB,
    gradient_together=ABC,
  ),
  op("divide", lambda x, y: x / y, lambda x, y: x / y, AB, POSITIVE),
  op("divide_broadcast", mtf.divide, lambda x, y: x / y, AB, POSITIVE_B),
  op("floordiv_int", lambda x, y: x // y, lambda x, y: x // y, INTEGERS, DIVISORS),
  op("floordiv", lambda x, y: x // y, lambda x, y: x // y, AB, POSITIVE, differentiable=False),
  op("floordiv_scalar", lambda x: x // 3, lambda x: x // 3, INTEGERS),
  op("floordiv_left", lambda x: 20 // x, lambda x: 20 // x, DIVISORS),
  op("mod_int", lambda x, y: x % y, lambda x, y: x % y, INTEGERS, DIVISORS),
  op("mod_negative", lambda x, y: x % -y, lambda x, y: x % -y, INTEGERS, DIVISORS),
  op("mod", lambda x, y: x % y, lambda x, y: x % y, AB, POSITIVE, differentiable=False),
  op("mod_scalar", lambda x: x % 3, lambda x: x % 3, INTEGERS),
  op("maximum", mtf.maximum, np.maximum, AB, AB, gradient=_ties(np.maximum)),
  op("minimum", mtf.minimum, np.minimum, AB, AB, gradient=_ties(np.minimum)),
  op("maximum_broadcast", mtf.maximum, np.maximum, AB, "b:8"),
  op("minimum_outer", mtf.minimum, _outer(np.minimum), AB, "b:8 c:12"),
  op("maximum_scalar", lambda x: mtf.maximum(x, 0.5), lambda x: np.maximum(x, 0.5), AB),
  op("maximum_int", mtf.maximum, np.maximum, INTEGERS, MULTIPLES),
  op(
    "maximum_ties",
    mtf.maximum,
    np.maximum,
    T(AB, values=np.arange(32) % 3),
    T(AB, values=np.arange(32) % 5),
    gradient=_ties(np.maximum),
  ),
  op(
    "minimum_ties",
    mtf.minimum,
    np.minimum,
    T(AB, values=np.arange(32) % 3),
    T(AB, values=np.arange(32) % 5),
    gradient=_ties(np.minimum),
  ),
  op("less", mtf.less, np.less, MULTIPLES, MULTIPLES),
  op("less_equal", mtf.less_equal, np.less_equal, MULTIPLES, MULTIPLES),
  op("greater", mtf.greater, np.greater, MULTIPLES, MULTIPLES),
  op("greater_equal", mtf.greater_equal, np.greater_equal, MULTIPLES, MULTIPLES),
  op("equal", mtf.equal, np.equal, MULTIPLES, MULTIPLES),
  op("not_equal", mtf.not_equal, np.not_equal, MULTIPLES, MULTIPLES),
  op("less_scalar", lambda x: mtf.less(x, 0.0), lambda x: x < 0, AB, differentiable=False),
  op("less_broadcast", mtf.less, _outer(np.less), AB, "b:8 c:12", differentiable=False),
  op(
    "equal_output_shape",
    lambda x, y: mtf.equal(x, y, output_shape=[("b", 8), ("a", 4)]),
    lambda x, y: (x == y).T,
    MULTIPLES,
    MULTIPLES,
  ),
  op("logical_and", mtf.logical_and, np.logical_and, BOOLS, BOOLS),
  op("logical_or", mtf.logical_or, np.logical_or, BOOLS, BOOLS),
  op("logical_and_broadcast", mtf.logical_and, np.logical_and, BOOLS, BOOLS_B),
  op("where", mtf.where, np.where, BOOLS, AB, AB),
  op(
    "where_scalar", lambda c, x: mtf.where(c, x, 2.5), lambda c, x: np.where(c, x, 2.5), BOOLS, AB
  ),
  op("where_int", mtf.where, np.where, BOOLS, INTEGERS, MULTIPLES),
  op("where_broadcast", mtf.where, lambda c, x, y: np.where(c, x, y), BOOLS_B, AB, "b:8"),
  op(
    "where_outer",
    mtf.where,
    lambda c, x, y: np.where(c.T[:, None], x[:, :, None], y[:, :, None]),
    BOOLS,
    "b:8 c:12",
    "b:8 c:12",
  ),
  op("add_n", lambda x, y, z: mtf.add_n([x, y, z]), lambda x, y, z: x + y + z, AB, AB, "b:8"),
  op("broadcast", lambda x: mtf.broadcast(x, AB), lambda x: np.repeat(x[None], 4, 0), "b:8"),
  op(
    "broadcast_permuted",
    lambda x: mtf.broadcast(x, "c:12 b:8 a:4"),
    lambda x: np.repeat(x.T[None], 12, 0),
    AB,
  ),
  op("broadcast_scalar", lambda x: mtf.broadcast(x, AB), lambda x: np.full((4, 8), x), ""),
  op("broadcast_bool", lambda x: mtf.broadcast(x, AB), lambda x: np.repeat(x[None], 4, 0), BOOLS_B),
]
