"""Halo reduction, scatter-add, segments, sorting, and linear algebra on whole matrices."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op
from tests.operations.descriptors_complex import in_numpy, of_parts

A, B, C, D = (mtf.Dimension(n, s) for n, s in (("a", 4), ("b", 8), ("c", 12), ("d", 4)))
M, N = mtf.Dimension("m", 3), mtf.Dimension("n", 3)
AB = "a:4 b:8"
IN_C = T(AB, -2, 15, "int32")  # Positions along c, some of them outside.
GOOD = T("a:4 m:3 n:3", values=np.eye(3) * 4 + np.random.default_rng(0).uniform(-1, 1, (4, 3, 3)))


def _halo_reduce(halo, wrap):
  """Blocks a, each with `halo` positions of its neighbours, along axis 1."""

  def reduce(x):
    n, size = x.shape[0], x.shape[1] - 2 * halo
    line = np.zeros([n * size, *x.shape[2:]], x.dtype)
    for j, i in np.ndindex(x.shape[:2]):
      at = j * size + i - halo
      if wrap or 0 <= at < n * size:
        line[at % (n * size)] += x[j, i]
    return line.reshape(n, size, *x.shape[2:])

  return reduce


def _halo_case(block, halo, wrap):
  dim = mtf.Dimension("h", block + 2 * halo)
  return op(
    f"halo_reduce_{block}_{halo}{'_wrapped' * wrap}",
    lambda x: mtf.halo_reduce(x, A, dim, halo, wrap),
    _halo_reduce(halo, wrap),
    f"a:4 h:{dim.size} e:2",
    unsplit="h",
  )


def _scatter(size):
  """Sums over all positions of the indices, which are the first axes."""

  def scatter(x, i):
    y = np.zeros([size, *x.shape[i.ndim :]], x.dtype)
    for at in np.ndindex(i.shape):
      if 0 <= i[at] < size:
        y[i[at]] += x[at]
    return y

  return scatter


def _scatter_aligned(x, i):
  return np.stack([_scatter(12)(row, at) for row, at in zip(x, i)])


def _gather(w, i):
  inside = (i >= 0) & (i < len(w))
  rows = w[np.where(inside, i, 0)]
  return np.where(inside.reshape(inside.shape + (1,) * (w.ndim - 1)), rows, 0)


def _mean(x, i):
  return _scatter(12)(x, i) / np.maximum(_scatter(12)(np.ones(i.shape), i), 1).reshape(12, 1)


def _positive(x):
  """Positive definite matrices [..., m, n]: x x^T + I."""
  return x @ np.swapaxes(x, -1, -2) + np.eye(3)


def _made_positive(x):
  other = mtf.rename_dimension(mtf.rename_dimension(x, "n", "k"), "m", "n")
  mine = mtf.rename_dimension(x, "n", "k")
  identity = mtf.import_tf_tensor(x.mesh, np.eye(3, dtype=np.float32), [M, N])
  return mtf.einsum([mine, other], output_shape=x.shape) + identity


def _triangular(lower, adjoint):
  def solved(a, b):
    a = np.tril(a) if lower else np.triu(a)
    return np.linalg.solve(np.swapaxes(a, -1, -2) if adjoint else a, b)

  return solved


DESCRIPTORS = [
  *[_halo_case(*case) for case in ((3, 1, False), (2, 2, True), (2, 5, False),
                                   (2, 5, True), (1, 3, True))],
  op("halo_reduce_int", lambda x: mtf.halo_reduce(x, A, B, 2, wrap=True), _halo_reduce(2, True),
     T(AB, -9, 9, "int32"), unsplit="b"),
  op("scatter_add", lambda x, i: mtf.scatter_add(x, i, C), _scatter(12), "a:4 b:8 e:2", IN_C),
  op("scatter_add_values", lambda x, i: mtf.scatter_add(x, i, mtf.Dimension("d", 64)),
     _scatter(64), "a:4 e:2", T("a:4", 0, 64, "int32")),
  op("scatter_add_aligned", lambda x, i: mtf.scatter_add(x, i, C, [A, C]), _scatter_aligned, AB,
     IN_C),
  op("gather_split", lambda w, i: mtf.gather_split(w, i, C), _gather, "c:12 e:2", IN_C),
  op("gather_split_large", lambda w, i: mtf.gather_split(w, i, ("c", 48)), _gather, "c:48",
     T("a:4", 0, 48, "int32")),
  op("gather_split_aligned", lambda w, i: mtf.gather_split(w, i, B),
     lambda w, i: np.take_along_axis(w, i, 1), AB, T("a:4 d:4", 0, 8, "int32")),
  op("segment_sum", lambda x, i: mtf.segment_sum(x, i, C), _scatter(12), "b:8 e:2",
     T("b:8", 0, 12, "int32")),
  op("segment_mean", lambda x, i: mtf.segment_mean(x, i, C), _mean, "b:8 e:2",
     T("b:8", 0, 5, "int32")),
  op("sort", lambda x: mtf.sort(x, B), lambda x: np.sort(x, 1), "a:4 b:8 e:2"),
  op("sort_descending", lambda x: mtf.sort(x, A, descending=True),
     lambda x: -np.sort(-x, 0), AB),
  op("sort_alone", lambda x: mtf.sort(x, B), np.sort, "b:8"),
  op("argsort", lambda x: mtf.argsort(x, B), lambda x: np.argsort(x, 1, kind="stable"), AB,
     differentiable=False),
  op("argsort_ties", lambda x: mtf.argsort(x, A, descending=True),
     lambda x: np.argsort(-x, 0, kind="stable"), T(AB, 0, 3, "int32")),
  op("cholesky", lambda x: mtf.cholesky(_made_positive(x), M, N),
     lambda x: np.linalg.cholesky(_positive(x)), "a:4 m:3 n:3", unsplit=("m", "n")),
  # First: the wrong arguments of `solve` are tried in this one, which cannot become singular.
  op("solve_complex",
     lambda a, b, x, y: of_parts(lambda m, r: mtf.solve(m, r, M, N))(a, b, x, y),
     lambda a, b, x, y: in_numpy(lambda m, r: np.linalg.solve(m, r[..., None])[..., 0])(a, b, x, y),
     GOOD, "a:4 m:3 n:3", "a:4 m:3", "a:4 m:3", unsplit=("m", "n"), tolerance=3e-5,
     replica_tolerance=1e-6),
  op("solve", lambda a, b: mtf.solve(a, b, M, N), lambda a, b: np.linalg.solve(a, b),
     GOOD, "a:4 m:3 b:8", unsplit=("m", "n"), tolerance=3e-5, replica_tolerance=1e-6),
  op("solve_one_matrix", lambda a, b: mtf.solve(a, b, M, N),
     lambda a, b: np.linalg.solve(a, b.T).T, T("m:3 n:3", values=GOOD.values[0]), "b:8 m:3",
     unsplit=("m", "n"), tolerance=3e-5, replica_tolerance=1e-6),
  op("solve_adjoint", lambda a, b: mtf.solve(a, b, M, N, adjoint=True),
     lambda a, b: np.linalg.solve(np.swapaxes(a, 1, 2), b), GOOD, "a:4 n:3 b:8",
     unsplit=("m", "n"), tolerance=3e-5, replica_tolerance=1e-6),
  op("triangular_solve", lambda a, b: mtf.triangular_solve(a, b, M, N),
     _triangular(True, False), GOOD, "a:4 m:3 b:8", unsplit=("m", "n"), tolerance=3e-5,
     replica_tolerance=1e-6),
]  # fmt: skip
