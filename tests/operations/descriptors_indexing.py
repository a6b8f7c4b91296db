"""one_hot, gather, top_k and its relatives, range, dynamic_shift."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)
LONG = mtf.Dimension("long", 4096)  # `kernels.top_k` looks at groups of these.
K = {k: mtf.Dimension("k", k) for k in (1, 2, 3, 6, 8)}
AB, ABC = "a:4 b:8", "a:4 b:8 c:12"
INTEGERS = T(AB, -9, 10, "int32")
TIES = T(AB, values=np.arange(32) // 2 % 3)
IN_C = T(AB, -2, 15, "int32")  # Indices of c, some of them outside.
IN_B = T("a:4", 0, 8, "int32")


def _one_hot(indices, size, on=1.0, off=0.0):
  return np.where(indices[..., None] == np.arange(size), on, off)


def _top_k(k, axis=-1):
  def top(x):
    order = np.argsort(-np.moveaxis(x, axis, -1), -1, kind="stable")[..., :k]
    values = np.take_along_axis(np.moveaxis(x, axis, -1), order, -1)
    return [values, order.astype(np.int32)]

  return top


def _gather(weights, indices):
  """Rows of `weights`; zeros for indices outside."""
  inside = (indices >= 0) & (indices < len(weights))
  rows = weights[np.where(inside, indices, 0)]
  return np.where(inside.reshape(inside.shape + (1,) * (weights.ndim - 1)), rows, 0)


def _dynamic_shift(wrap):
  def shift(x, offset):
    y = np.zeros_like(x)
    for i, j in np.ndindex(y.shape):
      source = i - offset[j]
      if wrap or 0 <= source < len(x):
        y[i, j] = x[source % len(x), j]
    return y

  return shift


def _top_k_case(k):
  return op(f"top_{k}_of_b", lambda x: list(mtf.top_k(x, B, K[k])), _top_k(k, 1), ABC, unsplit="k",
            gradient_together=f"{ABC} k:{k}")  # fmt: skip


DESCRIPTORS = [
  op("one_hot", lambda i: mtf.one_hot(i, C), lambda i: _one_hot(i, 12), IN_C),
  op("one_hot_values", lambda i: mtf.one_hot(i, C, 5, -1, tf.int32),
     lambda i: _one_hot(i, 12, 5, -1), IN_C),
  op("one_hot_bool", lambda i: mtf.one_hot(i, C, True, False, tf.bool),
     lambda i: _one_hot(i, 12, True, False), IN_C),
  op("gather", lambda w, i: mtf.gather(w, i, C), _gather, "c:12 d:4", IN_C,
     together="a:4 b:8 c:12 d:4"),
  op("gather_inner", lambda w, i: mtf.gather(w, i, C), lambda w, i: _gather(w.T, i), "d:4 c:12",
     T("a:4", 0, 12, "int32"), together="a:4 c:12 d:4"),
  op("gather_aligned", lambda w, i: mtf.gather(w, i, B), lambda w, i: w[np.arange(4), i], AB, IN_B,
     together=AB),
  op("gather_number", lambda w: mtf.gather(w, 2, A), lambda w: w[2], ABC),
  op("gather_outside", lambda w: mtf.gather(w, 99, A), lambda w: 0 * w[0], AB),
  op("gather_output_shape", lambda w, i: mtf.gather(w, i, C, output_shape="d:4 a:4"),
     lambda w, i: w[i].T, "c:12 d:4", T("a:4", 0, 12, "int32"), together="a:4 c:12 d:4"),
  op("gather_int", lambda w, i: mtf.gather(w, i, C), _gather, T("c:12 d:4", -9, 10, "int32"), IN_C,
     together="a:4 b:8 c:12 d:4"),
  op("gather_bool", lambda w, i: mtf.gather(w, i, C), lambda w, i: w[i],
     T("c:12 d:4", dtype="bool"), T("a:4", 0, 12, "int32"), together="a:4 c:12 d:4"),
  op("embedding_twice", lambda w, i: mtf.gather(w, i, C) + mtf.gather(w, i + 1, C),
     lambda w, i: w[i] + w[i + 1], "c:12 d:4", T("a:4", 0, 11, "int32"),
     together="a:4 c:12 d:4"),
  *[_top_k_case(k) for k in (1, 2, 3, 6, 8)],
  op("top_6_ties", lambda x: list(mtf.top_k(x, B, K[6])), _top_k(6), TIES, unsplit="k",
     differentiable=False),
  op("top_3_ties", lambda x: list(mtf.top_k(x, B, K[3])), _top_k(3), TIES, unsplit="k",
     differentiable=False),
  op("top_6_int", lambda x: list(mtf.top_k(x, B, K[6])), _top_k(6), INTEGERS, unsplit="k"),
  op("top_8_of_4096", lambda x: list(mtf.top_k(x, LONG, K[8])), _top_k(8), "a:2 long:4096",
     unsplit="k", differentiable=False),
  op("top_8_of_4096_ties", lambda x: list(mtf.top_k(x, LONG, K[8])), _top_k(8, 0),
     T("long:4096 a:2", -5, 6, "int32"), unsplit="k", differentiable=False),
  op("top_1", lambda x: list(mtf.top_1(x, B)), lambda x: [x.max(1), x.argmax(1)], ABC),
  op("argmax", lambda x: mtf.argmax(x, B), lambda x: x.argmax(1), ABC, differentiable=False),
  op("argmax_ties", lambda x: mtf.argmax(x, B), lambda x: x.argmax(1), TIES, differentiable=False),
  op("argmax_int", lambda x: mtf.argmax(x, A), lambda x: x.argmax(0), INTEGERS),
  op("nth_largest", lambda x: mtf.nth_largest_element(x, 2, B), lambda x: np.sort(x, 1)[:, -3],
     ABC),
  op("nth_smallest", lambda x: mtf.nth_smallest_element(x, 0, B), lambda x: x.min(1), ABC),
  op("nth_largest_5", lambda x: mtf.nth_largest_element(x, 5, B), lambda x: np.sort(x, 1)[:, 2],
     AB),
  op("range", lambda mesh: mtf.range(mesh, C, tf.int32), lambda: np.arange(12)),
  op("range_float", lambda mesh: mtf.range(mesh, B, tf.float32), lambda: np.arange(8.0)),
  op("range_bfloat16", lambda mesh: mtf.range(mesh, B, tf.bfloat16), lambda: np.arange(8.0)),
  op("positions", lambda x: x + mtf.range(x.mesh, B, tf.float32), lambda x: x + np.arange(8), AB),
  op("causal_mask",
     lambda mesh: mtf.less_equal(mtf.range(mesh, B, tf.int32), mtf.range(mesh, C, tf.int32)),
     lambda: np.arange(8)[:, None] <= np.arange(12)),
  op("dynamic_shift", lambda x, o: mtf.dynamic_shift(x, o, B, False),
     lambda x, o: _dynamic_shift(False)(x.T, o).T, AB, T("a:4", -9, 10, "int32"), together=AB),
  op("dynamic_shift_wrapped", lambda x, o: mtf.dynamic_shift(x, o, A, True), _dynamic_shift(True),
     AB, T("b:8", -9, 10, "int32"), together=AB),
  op("sample_temperature_0", lambda x: mtf.sample_with_temperature(x, B, 0.0),
     lambda x: x.argmax(1), ABC, differentiable=False),
]  # fmt: skip
