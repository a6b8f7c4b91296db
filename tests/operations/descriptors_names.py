"""Dimensions that share a name: of two sizes in one tensor, or a new one as the one it replaces."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op

# Both called n; a tensor that has both is split along neither.
N4, N6, B = mtf.Dimension("n", 4), mtf.Dimension("n", 6), mtf.Dimension("b", 8)
TWO = "b:8 n:4 n:6"


def _top(k, axis):
  def top(x):
    x = np.moveaxis(x, axis, -1)
    order = np.argsort(-x, -1, kind="stable")[..., :k]
    return [np.take_along_axis(x, order, -1), order]

  return top


def _two(name, fn, reference, *inputs, **kwargs):
  return op(name, fn, reference, *(inputs or (TWO,)), unsplit="n", **kwargs)


def _sorted_gradient_again(x):
  """The gradient of a sum of squares of sorted values: each is 2 x at its place."""
  y = mtf.top_k(x, B, B)[0]
  return mtf.gradients([mtf.reduce_sum(mtf.square(y) * y)], [x])[0]


def _halos(x):
  """Blocks of four, with the two positions before and behind each."""
  flat = np.pad(x.reshape(24, 4), [(2, 2), (0, 0)])
  return np.stack([flat[4 * j : 4 * j + 8] for j in range(6)])


DESCRIPTORS = [
  op("top_k_same", lambda x: list(mtf.top_k(x, B, B)), _top(8, 1), "a:4 b:8", unsplit="b"),
  op("top_k_same_first", lambda x: list(mtf.top_k(x, B, B)), _top(8, 0), "b:8 a:4 c:2",
     unsplit="b"),
  op("top_k_same_name", lambda x: list(mtf.top_k(x, B, mtf.Dimension("b", 3))), _top(3, 1),
     "a:4 b:8", unsplit="b"),
  op("top_k_same_twice", _sorted_gradient_again, lambda x: 3 * x * x, "a:4 b:8", unsplit="b"),
  _two("top_k_of_two_sizes", lambda x: list(mtf.top_k(x, N6, N6)), _top(6, 2)),
  _two("top_1_of_two_sizes", lambda x: list(mtf.top_1(x, N6)), lambda x: [x.max(2), x.argmax(2)]),
  op("one_hot_same_name", lambda i: mtf.one_hot(i, N6),
     lambda i: (i[..., None] == np.arange(6)) * 1.0, T("b:8 n:4", 0, 6, "int32"), unsplit="n"),
  _two("gather_same_name", lambda w, i: mtf.gather(w, i, N6), lambda w, i: w[i], "n:6 b:8",
       T("n:4", 0, 6, "int32"), together="n:6 n:4 b:8"),
  _two("stack_same_name", lambda x, y: mtf.stack([x, y], "n", axis=1),
       lambda x, y: np.stack([x, y], 1), "b:8 n:4", "b:8 n:4"),
  _two("unstack_of_two_sizes", lambda x: mtf.unstack(x, N6), lambda x: list(np.moveaxis(x, 2, 0))),
  _two("split_of_two_sizes", lambda x: mtf.split(x, N6, [1, 5]), lambda x: np.split(x, [1], 2)),
  _two("split_of_two_sizes_one_used", lambda x: mtf.split(x, N6, 2)[1], lambda x: x[:, :, 3:]),
  _two("concat_of_two_sizes", lambda x, y: mtf.concat([x, y], "n"),
       lambda x, y: np.concatenate([x, y], 1), TWO, "b:8 n:3 n:6"),
  _two("slice_of_two_sizes", lambda x: mtf.slice(x, 1, 2, "n"), lambda x: x[:, 1:3]),
  _two("pad_of_two_sizes", lambda x: mtf.pad(x, [1, 2], "n"),
       lambda x: np.pad(x, [(0, 0), (1, 2), (0, 0)])),
  _two("halo_of_two_sizes", lambda x: mtf.halo_exchange(x, N6, N4, 2), _halos, "n:6 n:4 e:4"),
  _two("softmax_of_two_sizes", lambda x: mtf.softmax(x, N6),
       lambda x: np.exp(x) / np.exp(x).sum(2, keepdims=True)),
  _two("cumsum_of_two_sizes", lambda x: mtf.cumsum(x, N6), lambda x: x.cumsum(2)),
  _two("shift_of_two_sizes", lambda x: mtf.shift(x, 1, N6, True), lambda x: np.roll(x, 1, 2)),
  _two("reduce_of_two_sizes", lambda x: mtf.reduce_max(x, reduced_dim=N4), lambda x: x.max(1)),
  _two("einsum_of_two_sizes", lambda x, w: mtf.einsum([x, w], output_shape=mtf.Shape([B, N6])),
       lambda x, w: x @ w, "b:8 n:4", "n:4 n:6", together=TWO),
]  # fmt: skip
