"""Reductions, and softmax and its relatives."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op

AB, ABC = "a:4 b:8", "a:4 b:8 c:12"
A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 8)
INTEGERS = T(AB, -9, 10, "int32")
BOOLS = T(AB, dtype="bool")
TIES = T(AB, values=np.arange(32) // 2 % 4)


def _logsumexp(x, axis=-1):
  return np.log(np.exp(x).sum(axis))


def _softmax(x, axis=-1, extra=None):
  e = np.exp(x)
  total = e.sum(axis, keepdims=True)
  return e / (total if extra is None else total + np.exp(extra))


def _shared(fn):
  """Every one of the tied elements gets the whole gradient."""
  return lambda xs, dys: [(xs[0] == fn(xs[0], 1, keepdims=True)) * dys[0][:, None]]


DESCRIPTORS = [
  op("reduce_sum", lambda x: mtf.reduce_sum(x), lambda x: x.sum(), ABC),
  op("reduce_sum_first", lambda x: mtf.reduce_sum(x, reduced_dim=A), lambda x: x.sum(0), ABC),
  op("reduce_sum_pair", lambda x: mtf.reduce_sum(x, reduced_dim=("b", 8)), lambda x: x.sum(1), ABC),
  op(
    "reduce_sum_permuted",
    lambda x: mtf.reduce_sum(x, output_shape="c:12 a:4"),
    lambda x: x.sum(1).T,
    ABC,
  ),
  op("reduce_sum_same_shape", lambda x: mtf.reduce_sum(x, output_shape=AB), lambda x: x, AB),
  op("reduce_sum_int", lambda x: mtf.reduce_sum(x, reduced_dim=B), lambda x: x.sum(1), INTEGERS),
  op("reduce_mean", lambda x: mtf.reduce_mean(x), lambda x: x.mean(), ABC),
  op("reduce_mean_dim", lambda x: mtf.reduce_mean(x, reduced_dim=B), lambda x: x.mean(1), ABC),
  op(
    "reduce_mean_two",
    lambda x: mtf.reduce_mean(x, output_shape="c:12"),
    lambda x: x.mean((0, 1)),
    ABC,
  ),
  op("reduce_max", lambda x: mtf.reduce_max(x), lambda x: x.max(), AB),
  op("reduce_max_dim", lambda x: mtf.reduce_max(x, reduced_dim=B), lambda x: x.max(1), ABC),
  op("reduce_min", lambda x: mtf.reduce_min(x, reduced_dim=A), lambda x: x.min(0), ABC),
  op("reduce_max_int", lambda x: mtf.reduce_max(x, reduced_dim=B), lambda x: x.max(1), INTEGERS),
  op(
    "reduce_max_ties",
    lambda x: mtf.reduce_max(x, reduced_dim=B),
    lambda x: x.max(1),
    TIES,
    gradient=_shared(np.max),
  ),
  op(
    "reduce_min_ties",
    lambda x: mtf.reduce_min(x, reduced_dim=B),
    lambda x: x.min(1),
    TIES,
    gradient=_shared(np.min),
  ),
  op("reduce_all", lambda x: mtf.reduce_all(x, reduced_dim=A), lambda x: x.all(0), BOOLS),
  op("reduce_any", lambda x: mtf.reduce_any(x, reduced_dim=A), lambda x: x.any(0), BOOLS),
  op("reduce_any_everything", lambda x: mtf.reduce_any(x), lambda x: x.any(), BOOLS),
  op(
    "reduce_first",
    lambda x: mtf.reduce_first(x, reduced_dim=B),
    lambda x: x[:, 0],
    ABC,
  ),
  op("reduce_first_int", lambda x: mtf.reduce_first(x, reduced_dim=A), lambda x: x[0], INTEGERS),
  # Pending sums: added before they are reduced, or each forced.
  op(
    "pending_sums_added",
    lambda x, y: mtf.reduce_sum(x, reduced_dim=A) + mtf.reduce_sum(y, reduced_dim=A),
    lambda x, y: x.sum(0) + y.sum(0),
    AB,
    AB,
  ),
  op(
    "pending_sum_and_scaled",
    lambda x: mtf.reduce_sum(x, reduced_dim=A) * 2.0 + mtf.reduce_sum(x, reduced_dim=A) + 1.0,
    lambda x: 3 * x.sum(0) + 1,
    AB,
  ),
  op(
    "pending_sum_minus_itself",
    lambda x, y: mtf.reduce_sum(x, reduced_dim=A) - mtf.reduce_sum(y, reduced_dim=A),
    lambda x, y: x.sum(0) - y.sum(0),
    AB,
    AB,
  ),
  op(
    "pending_sums_of_different_axes",
    lambda x: mtf.reduce_sum(x, output_shape="c:12") + mtf.reduce_sum(x, output_shape="a:4"),
    lambda x: x.sum((0, 1))[:, None] + x.sum((1, 2)),
    ABC,
  ),
  op(
    "pending_sum_renamed",
    lambda x: mtf.rename_dimension(mtf.reduce_sum(x, reduced_dim=A), "b", "d"),
    lambda x: x.sum(0),
    AB,
  ),
  op(
    "pending_sum_nonlinear",
    lambda x: mtf.exp(mtf.reduce_mean(x, reduced_dim=A)),
    lambda x: np.exp(x.mean(0)),
    AB,
  ),
  op(
    "pending_sum_stopped",
    lambda x: (
      mtf.stop_gradient(mtf.reduce_sum(x, reduced_dim=A)) * mtf.reduce_sum(x, reduced_dim=A)
    ),
    lambda x: x.sum(0) ** 2,
    AB,
    gradient=lambda xs, dys: [np.repeat((xs[0].sum(0) * dys[0])[None], 4, 0)],
  ),
  op("reduce_logsumexp", lambda x: mtf.reduce_logsumexp(x, B), lambda x: _logsumexp(x, 1), ABC),
  op(
    "reduce_logsumexp_extra",
    lambda x: mtf.reduce_logsumexp(x, B, extra_logit=1.5),
    lambda x: np.log(np.exp(x).sum(1) + np.exp(1.5)),
    AB,
  ),
  op(
    "reduce_logsumexp_large",
    lambda x: mtf.reduce_logsumexp(x, B),
    lambda x: x.max(1) + _logsumexp(x - x.max(1, keepdims=True), 1),
    T(AB, 500, 1000),
  ),
  op("softmax", lambda x: mtf.softmax(x, B), lambda x: _softmax(x, 1), ABC),
  op("softmax_last", lambda x: mtf.softmax(x, mtf.Dimension("c", 12)), _softmax, ABC),
  op(
    "softmax_extra",
    lambda x: mtf.softmax(x, B, extra_logit=0.5),
    lambda x: _softmax(x, 1, 0.5),
    AB,
  ),
  op("log_softmax", lambda x: mtf.log_softmax(x, B), lambda x: np.log(_softmax(x, 1)), ABC),
  op(
    "softmax_extra_tensor",
    lambda x, e: mtf.softmax(x, B, extra_logit=e),
    lambda x, e: _softmax(x, 1, e[:, None]),
    AB,
    T("a:4", -1, 1),
    # No gradient reaches the extra logit.
    gradient=lambda xs, dys: [_softmax_grad(*xs, dys[0]), 0 * xs[1]],
  ),
]


def _softmax_grad(x, extra, dy):
  y = _softmax(x, 1, extra[:, None])
  return y * (dy - (dy * y).sum(1, keepdims=True))
