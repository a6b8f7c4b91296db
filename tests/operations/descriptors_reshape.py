"""Reshaping and renaming; concat, split, stack, slice, pad; shifts, halos and pools."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)
AB, ABC = "a:4 b:8", "a:4 b:8 c:12"
INTEGERS = T(AB, -9, 10, "int32")


def _shift(offset, axis, wrap):
  def shift(x):
    if wrap:
      return np.roll(x, offset, axis)
    y = np.zeros_like(x)
    for i in range(x.shape[axis]):
      if 0 <= i - offset < x.shape[axis]:
        np.moveaxis(y, axis, 0)[i] = np.moveaxis(x, axis, 0)[i - offset]
    return y

  return shift


def _halo(halo, left, right, wrap):
  """[blocks, block_size, ...] with the margins of the neighbours."""

  def exchange(x):
    n, size = x.shape[:2]
    flat = x.reshape((n * size,) + x.shape[2:])
    margin = [(halo, halo)] + [(0, 0)] * (flat.ndim - 1)
    flat = np.pad(flat, margin, mode="wrap" if wrap else "constant")
    begin, end = (0 if left else halo), size + halo + (halo if right else 0)
    return np.stack([flat[j * size + begin : j * size + end] for j in range(n)])

  return exchange


def _shift_case(offset, wrap, dims="n:12 b:8"):
  kind = "wrapped" if wrap else "filled"
  name = f"shift_{kind}_{'minus_' if offset < 0 else ''}{abs(offset)}"
  n = mtf.Dimension("n", 12)
  return op(name, lambda x: mtf.shift(x, offset, n, wrap), _shift(offset, 0, wrap), dims)


def _halo_case(halo, wrap, left=False):
  name = f"{'left_' if left else ''}halo_exchange_{halo}{'_wrapped' if wrap else ''}"
  blocks, size = mtf.Dimension("blocks", 8), mtf.Dimension("size", 4)
  exchange = mtf.left_halo_exchange if left else mtf.halo_exchange
  return op(
    name,
    lambda x: exchange(x, blocks, size, halo, wrap=wrap),
    _halo(halo, True, not left, wrap),
    "blocks:8 size:4 e:4",
    unsplit="size" if halo else (),
  )


def _pool(fn):
  return lambda x: fn(x.reshape(2, 2, 8), 1)


DESCRIPTORS = [
  op("reshape_split", lambda x: mtf.reshape(x, "a:4 d:2 e:4"), lambda x: x.reshape(4, 2, 4), AB),
  op("reshape_merge", lambda x: mtf.reshape(x, "ab:32 c:12"), lambda x: x.reshape(32, 12), ABC),
  op("reshape_merge_last", lambda x: mtf.reshape(x, "a:4 bc:96"), lambda x: x.reshape(4, 96), ABC),
  op("reshape_flatten", lambda x: mtf.reshape(x, "n:32"), lambda x: x.reshape(32), AB),
  op("reshape_regroup", lambda x: mtf.reshape(x, "d:8 e:4"), lambda x: x.reshape(8, 4), AB),
  op("reshape_unrelated", lambda x: mtf.reshape(x, "d:12 e:8 f:4"), lambda x: x.reshape(12, 8, 4),
     ABC),
  op("reshape_rename_both", lambda x: mtf.reshape(x, "d:4 e:8"), lambda x: x, AB),
  op("reshape_same", lambda x: mtf.reshape(x, AB), lambda x: x, AB),
  op("reshape_swap_names", lambda x: mtf.reshape(x, "b:8 a:8"), lambda x: x, "a:8 b:8"),
  op("reshape_int", lambda x: mtf.reshape(x, "b:8 a:4"), lambda x: x.reshape(8, 4), INTEGERS),
  op("reshape_bool", lambda x: mtf.reshape(x, "d:4 e:8"), lambda x: x, T(AB, dtype="bool")),
  op("reshape_add_one", lambda x: mtf.reshape(x, "a:4 one:1 b:8"), lambda x: x[:, None], AB),
  op("reshape_of_sum", lambda x: mtf.reshape(mtf.reduce_sum(x, reduced_dim=A), "bc:96"),
     lambda x: x.sum(0).reshape(96), ABC),
  op("rename_dimension", lambda x: mtf.rename_dimension(x, "b", "d"), lambda x: x, ABC),
  op("replace_dimensions", lambda x: mtf.replace_dimensions(x, [A, B], mtf.Dimension("d", 32)),
     lambda x: x.reshape(32, 12), ABC),
  op("replace_dimension_by_two",
     lambda x: mtf.replace_dimensions(x, C, [mtf.Dimension("d", 2), mtf.Dimension("e", 6)]),
     lambda x: x.reshape(4, 8, 2, 6), ABC),
  op("anonymize", mtf.anonymize, lambda x: x, ABC),
  op("reshape_anonymous", lambda x: mtf.reshape(mtf.anonymize(x), "d:4 e:8"), lambda x: x, AB,
     together="_anonymous_0:4 _anonymous_1:8"),

  op("concat", lambda x, y: mtf.concat([x, y], "b"), lambda x, y: np.concatenate([x, y], 1),
     AB, "a:4 b:4", unsplit="b"),
  op("concat_three", lambda x, y, z: mtf.concat([x, y, z], "a"), lambda *xs: np.concatenate(xs),
     AB, AB, "a:12 b:8", unsplit="a"),
  op("concat_int", lambda x, y: mtf.concat([x, y], "a"), lambda *xs: np.concatenate(xs),
     INTEGERS, INTEGERS, unsplit="a"),
  op("split", lambda x: mtf.split(x, B, 2), lambda x: np.split(x, 2, 1), AB, unsplit="b"),
  op("split_sizes", lambda x: mtf.split(x, B, [1, 5, 2]), lambda x: np.split(x, [1, 6], 1), AB,
     unsplit="b"),
  op("split_one_used", lambda x: mtf.split(x, B, 2)[1], lambda x: x[:, 4:], AB, unsplit="b"),
  op("stack", lambda x, y: mtf.stack([x, y], "d"), lambda x, y: np.stack([x, y]), AB, AB,
     unsplit="d"),
  op("stack_axis", lambda x, y, z: mtf.stack([x, y, z], "d", axis=1),
     lambda *xs: np.stack(xs, 1), AB, AB, AB, unsplit="d"),
  op("stack_last", lambda x, y: mtf.stack([x, y], "d", axis=-1), lambda *xs: np.stack(xs, -1),
     AB, AB, unsplit="d"),
  op("unstack", lambda x: mtf.unstack(x, A), lambda x: list(x), AB, unsplit="a"),
  op("unstack_one_used", lambda x: mtf.unstack(x, A)[2], lambda x: x[2], ABC, unsplit="a"),
  op("slice", lambda x: mtf.slice(x, 2, 5, "b"), lambda x: x[:, 2:7], ABC, unsplit="b"),
  op("slice_int", lambda x: mtf.slice(x, 1, 2, "a"), lambda x: x[1:3], INTEGERS, unsplit="a"),
  op("pad", lambda x: mtf.pad(x, [1, 3], "b"), lambda x: np.pad(x, [(0, 0), (1, 3)]), AB,
     unsplit="b"),
  op("pad_int", lambda x: mtf.pad(x, [0, 4], "a"), lambda x: np.pad(x, [(0, 4), (0, 0)]), INTEGERS,
     unsplit="a"),
  *[_shift_case(offset, wrap) for offset in (1, 3, -1, -5, 6) for wrap in (False, True)],
  _shift_case(0, False),
  _shift_case(12, True),
  _shift_case(13, True),
  _shift_case(-30, False),
  op("shift_last_dim", lambda x: mtf.shift(x, 2, B, False), _shift(2, 1, False), AB),
  op("shift_int", lambda x: mtf.shift(x, -1, B, True), _shift(-1, 1, True), INTEGERS),
  *[_halo_case(halo, wrap) for halo in (1, 4, 5) for wrap in (False, True)],
  _halo_case(0, False),
  _halo_case(1, False, left=True),
  _halo_case(6, True, left=True),
  op("halo_exchange_inner",
     lambda x: mtf.halo_exchange(x, B, mtf.Dimension("size", 3), 1),
     lambda x: np.moveaxis(_halo(1, True, True, False)(np.moveaxis(x, 0, 2)), 2, 0),
     "a:4 b:8 size:3", unsplit="size"),
  op("pool_mean", lambda x: mtf.pool_tensor_1d(x, A), _pool(np.mean), AB,
     illegal=lambda layout: not layout.suits(mtf.convert_to_shape("a:2 b:8"))),
  op("pool_max", lambda x: mtf.pool_tensor_1d(x, A, mtf.reduce_max), _pool(np.max), AB),
  op("pool_min", lambda x: mtf.pool_tensor_1d(x, A, mtf.reduce_min), _pool(np.min), AB),
  op("pool_size_4", lambda x: mtf.pool_tensor_1d(x, C, pool_size=4),
     lambda x: x.reshape(4, 3, 4).mean(2), "a:4 c:12"),
  op("stride_tensor", lambda x: mtf.stride_tensor_1d(x, B), lambda x: x[:, ::2], AB),
  op("stride_tensor_3", lambda x: mtf.stride_tensor_1d(x, C, pool_size=3), lambda x: x[:, ::3],
     "a:4 c:12"),
]  # fmt: skip
