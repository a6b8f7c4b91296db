"""Operations in other dtypes than float32."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)
AB, BC, ABC = "a:4 b:8", "b:8 c:12", "a:4 b:8 c:12"
HALF = {"bfloat16": 2e-2, "float16": 3e-3, "float64": 1e-9}
# Of what is computed in float32 and rounded once.
ROUNDED = {"bfloat16": 2.5e-3, "float16": 4e-4, "float64": 1e-9}
LARGE = 2**30 + 1  # Not a float32.


def _softmax(x):
  e = np.exp(x)
  return e / e.sum(1, keepdims=True)


def _log_softmax(x):
  return x - np.log(np.exp(x).sum(1, keepdims=True))


def _floating(dtype):
  """What a model does, in one dtype."""

  def x(dims=AB, low=-2.0, high=2.0):
    return T(dims, low, high, dtype)

  def case(name, build, reference, *inputs, **kwargs):
    kwargs.setdefault("tolerance", HALF[dtype])
    return op(f"{name}_{dtype}", build, reference, *inputs, **kwargs)

  rounded = {"tolerance": ROUNDED[dtype]}
  return [
    case("einsum", lambda x, w: mtf.einsum([x, w], [A, C]), lambda x, w: x @ w, x(), x(BC),
         together=ABC),
    case("add_broadcast", lambda x, y: x + y, lambda x, y: x + y, x(), x("b:8")),
    case("multiply", lambda x, y: x * y, lambda x, y: x * y, x(), x("b:8")),
    case("divide", lambda x, y: x / y, lambda x, y: x / y, x(), x(AB, 1, 2)),
    case("scalar", lambda x: (x + 1.5) * 0.5 - 2, lambda x: (x + 1.5) * 0.5 - 2, x()),
    case("tanh", mtf.tanh, np.tanh, x()),
    case("reduce_sum", lambda x: mtf.reduce_sum(x, reduced_dim=A), lambda x: x.sum(0), x()),
    case("reduce_mean", lambda x: mtf.reduce_mean(x, reduced_dim=B), lambda x: x.mean(1), x()),
    case("reduce_max", lambda x: mtf.reduce_max(x, reduced_dim=B), lambda x: x.max(1), x()),
    case("softmax", lambda x: mtf.softmax(x, B), _softmax, x(low=-8, high=8), **rounded),
    case("softmax_with_extra_logit", lambda x: mtf.softmax(x, B, extra_logit=0.5),
         lambda x: np.exp(x) / (np.exp(x).sum(1, keepdims=True) + np.exp(0.5)), x(), **rounded),
    case("log_softmax", lambda x: mtf.log_softmax(x, B), _log_softmax, x(low=-8, high=8),
         **rounded),
    case("logsumexp", lambda x: mtf.reduce_logsumexp(x, B),
         lambda x: np.log(np.exp(x).sum(1)), x(low=-8, high=8), **rounded),
    case("reshape", lambda x: mtf.reshape(x, "d:8 e:4"), lambda x: x.reshape(8, 4), x()),
    case("shift", lambda x: mtf.shift(x, 3, B, True), lambda x: np.roll(x, 3, 1), x()),
    case("gather", lambda w, i: mtf.gather(w, i, B), lambda w, i: w[i], x(BC),
         T("a:4", 0, 8, "int32"), together=ABC),
    case("where", mtf.where, np.where, T(AB, dtype="bool"), x(), x()),
    case("concat", lambda x, y: mtf.concat([x, y], "a"), lambda x, y: np.concatenate([x, y]),
         x(), x(), unsplit="a"),
    case("cumsum", lambda x: mtf.cumsum(x, B), lambda x: np.cumsum(x, 1), x()),
  ]  # fmt: skip


def _integers(dtype):
  big = T(AB, LARGE - 40, LARGE, dtype)
  small = T(AB, -9, 10, dtype)

  def case(name, build, reference, *inputs, **kwargs):
    return op(f"{name}_{dtype}", build, reference, *inputs, **kwargs)

  return [
    case("add", lambda x, y: x + y, lambda x, y: x + y, big, small),
    case("multiply", lambda x, y: x * y, lambda x, y: x * y, small, small),
    case("reduce_sum_large", lambda x: mtf.reduce_sum(x - LARGE, reduced_dim=A),
         lambda x: (x - LARGE).sum(0), big),
    case("reduce_max_large", lambda x: mtf.reduce_max(x, reduced_dim=B), lambda x: x.max(1), big),
    case("reduce_min_large", lambda x: mtf.reduce_min(x, reduced_dim=A), lambda x: x.min(0), big),
    case("einsum", lambda x, w: mtf.einsum([x, w], [A, C]), lambda x, w: x @ w, small,
         T(BC, -9, 10, dtype), together=ABC),
    case("reshape_large", lambda x: mtf.reshape(x, "b:8 a:4"), lambda x: x.reshape(8, 4), big),
    case("gather_large", lambda x: mtf.gather(x, 3, B), lambda x: x[:, 3], big),
    case("shift_large", lambda x: mtf.shift(x, -3, B, False),
         lambda x: np.pad(x[:, 3:], [(0, 0), (0, 3)]), big),
    case("top_k_large", lambda x: mtf.top_k(x, B, mtf.Dimension("k", 5))[0],
         lambda x: -np.sort(-x, 1)[:, :5], big, unsplit="k"),
    case("where_large", mtf.where, np.where, T(AB, dtype="bool"), big, small),
    case("cumsum", lambda x: mtf.cumsum(x, A), lambda x: np.cumsum(x, 0), small),
    case("one_hot", lambda i: mtf.one_hot(i, C), lambda i: np.eye(12)[i],
         T("a:4", 0, 12, dtype)),
    case("equal", mtf.equal, np.equal, big, big),
  ]  # fmt: skip


DESCRIPTORS = [
  *_floating("bfloat16"),
  *_floating("float16"),
  *_floating("float64"),
  *_integers("int32"),
  *_integers("int64"),
  op("bool_reshape", lambda x: mtf.reshape(x, "d:8 e:4"), lambda x: x.reshape(8, 4),
     T(AB, dtype="bool")),
  op("bool_concat", lambda x, y: mtf.concat([x, y], "b"), lambda x, y: np.concatenate([x, y], 1),
     T(ABC, dtype="bool"), T(ABC, dtype="bool"), unsplit="b"),
  op("bool_shift", lambda x: mtf.shift(x, 1, B, True), lambda x: np.roll(x, 1, 1),
     T(AB, dtype="bool")),
  op("bool_where", mtf.where, np.where, T(AB, dtype="bool"), T(AB, dtype="bool"),
     T(AB, dtype="bool")),
  op("mixed_precision",
     lambda x, w: mtf.to_float(mtf.einsum([mtf.to_bfloat16(x), mtf.to_bfloat16(w)], [A, C])),
     lambda x, w: x @ w, AB, BC, together=ABC, tolerance=3e-2),
  op("cast_between_integers", lambda x: mtf.cast(x, tf.int64) * LARGE,
     lambda x: x.astype(np.int64) * LARGE, T(AB, -9, 10, "int32")),
]  # fmt: skip
