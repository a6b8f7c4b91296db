"""Infinity and NaN: they stay where they are, through selections and collectives."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)
AB = "a:4 b:8"

_FINITE = np.random.default_rng(0).uniform(-2, 2, [4, 8])
_EVERY_THIRD = np.arange(32).reshape(4, 8) % 3 == 0
_ROW_2 = np.arange(4)[:, None] == 2
MIXED = T(AB, values=np.where(_EVERY_THIRD, [np.inf, -np.inf, np.nan, np.inf] * 2, _FINITE))
INFINITE = T(AB, values=np.where(_EVERY_THIRD, [np.inf, -np.inf] * 4, _FINITE))
LOW = T(AB, values=np.where(_EVERY_THIRD, -np.inf, _FINITE))
BAD_ROW = T(AB, values=np.where(_ROW_2, [np.nan, np.inf] * 4, _FINITE))
FINITE = T(AB, values=_FINITE)
CONDITION = T(AB, dtype="bool", values=~_EVERY_THIRD)


def case(name, build, reference, *inputs, **kwargs):
  kwargs.setdefault("differentiable", False)
  return op(f"nonfinite_{name}", build, reference, *inputs, **kwargs)


def _softmax(x):
  e = np.exp(x - x.max(1, keepdims=True))
  return e / e.sum(1, keepdims=True)


DESCRIPTORS = [
  case("export", lambda x: x, lambda x: x, MIXED),
  case("rename", lambda x: mtf.rename_dimension(x, "b", "d"), lambda x: x, MIXED),
  case("regroup", lambda x: mtf.reshape(x, "d:8 e:4"), lambda x: x.reshape(8, 4), MIXED),
  case("move", lambda x: mtf.reshape(x, "b:4 a:8"), lambda x: x, MIXED),
  case("shift", lambda x: mtf.shift(x, 3, B, True), lambda x: np.roll(x, 3, 1), MIXED),
  case(
    "shift_fills_with_zeros",
    lambda x: mtf.shift(x, 8, B, False),
    lambda x: np.zeros_like(x),
    MIXED,
  ),
  case("concat", lambda x, y: mtf.concat([x, y], "a"), lambda *xs: np.concatenate(xs), MIXED,
       FINITE, unsplit="a"),
  case("reduce_max", lambda x: mtf.reduce_max(x, reduced_dim=B), lambda x: x.max(1), INFINITE),
  case("reduce_min", lambda x: mtf.reduce_min(x, reduced_dim=A), lambda x: x.min(0), INFINITE),
  case("reduce_max_low", lambda x: mtf.reduce_max(x, reduced_dim=A), lambda x: x.max(0), LOW),
  case("reduce_sum", lambda x: mtf.reduce_sum(x, reduced_dim=A), lambda x: x.sum(0), LOW),
  case("argmax", lambda x: mtf.argmax(x, B), lambda x: x.argmax(1), LOW),
  case("top_k", lambda x: mtf.top_k(x, B, mtf.Dimension("k", 4))[0],
       lambda x: -np.sort(-x, 1)[:, :4], LOW, unsplit="k"),
  case("softmax", lambda x: mtf.softmax(x, B), _softmax, LOW),
  case("reduce_first", lambda x: mtf.reduce_first(x, reduced_dim=A), lambda x: x[0], BAD_ROW),
  case("gather", lambda w, i: mtf.gather(w, i, A), lambda w, i: w[i], BAD_ROW,
       T("c:12", dtype="int32", values=[0, 1, 3] * 4), together="a:4 b:8 c:12"),
  case("gather_bad_row", lambda w: mtf.gather(w, 2, A), lambda w: w[2], BAD_ROW),
  case("gather_outside", lambda w: mtf.gather(w, -1, A), lambda w: np.zeros(8), BAD_ROW),
  case("slice", lambda x: mtf.slice(x, 0, 2, "a"), lambda x: x[:2], BAD_ROW, unsplit="a"),
  # The side that is not taken has no effect, on the gradient neither.
  case(
    "where",
    mtf.where,
    np.where,
    CONDITION,
    FINITE,
    MIXED,
    differentiable=True,
    gradient=lambda xs, dys: [np.where(xs[0], dys[0], 0), np.where(xs[0], 0, dys[0])],
  ),
  case(
    "where_of_log",
    lambda x: mtf.where(mtf.greater(x, 0.0), mtf.stop_gradient(mtf.log(x)), x),
    lambda x: np.where(x > 0, np.log(np.abs(x)), x),
    FINITE,
  ),
]  # fmt: skip
