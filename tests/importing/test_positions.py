"""Gathers, scatters, cutting and joining, and operations along one axis, beside TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.importing.families.slicing import strided_slice_cuts
from tests.importing import comparing

RNG = np.random.default_rng(2)


def floats(*shape: int) -> np.ndarray:
  return RNG.normal(size=shape).astype(np.float32)


X = floats(4, 6, 8)
IDS = RNG.integers(0, 10, (4, 6)).astype(np.int32)
PLACES = RNG.integers(0, 4, (4, 6, 2)).astype(np.int32)
ONES, NONE = np.ones([6], np.float32), np.zeros([0], np.float32)
TABLE = tf.Variable(floats(10, 8), name="table")
TABLES = tf.Variable(floats(4, 10, 8), name="tables")
DIMS = {"x": ["batch", "length", "d"]}

CASES: dict[str, Callable[[Any, Any], Any]] = {
  "gather": lambda x, i: tf.gather(TABLE, i) * tf.gather(x[:, 0], [0, 3, 1, 1], axis=-1)[0, 0],
  "gather_axis": lambda x, i: tf.gather(TABLES, i[0], axis=1),
  "gather_batch": lambda x, i: tf.gather(TABLES, i, axis=1, batch_dims=1),
  "gather_of_reshaped": lambda x, i: tf.gather(tf.reshape(x, [24, 8]), i * 2),
  "gather_one_row": lambda x, i: tf.gather(x[:1], i * 0)[:, :, 0],
  "gather_nd": lambda x, i: (
    tf.gather_nd(x, PLACES) + tf.gather_nd(x, tf.stack([i % 4], -1))[:, :, 0]
  ),
  "scatter_nd": lambda x, i: tf.scatter_nd(PLACES, x, [4, 4, 8]),
  "scatter_update": lambda x, i: tf.tensor_scatter_nd_update(x, [[0], [2]], x[1:3] * 2.0),
  "scatter_add": lambda x, i: tf.tensor_scatter_nd_sub(
    tf.tensor_scatter_nd_add(x, [[0, 1], [0, 1]], x[2, :2]), [[3]], x[:1]
  ),
  "segments": lambda x, i: tf.math.unsorted_segment_sum(x, i, 10),
  "one_hot": lambda x, i: (
    tf.one_hot(i, 10) * tf.reduce_sum(x), tf.one_hot(i, 10, 3.0, -1.0, axis=1),
    tf.one_hot(i, 4, dtype=tf.int32), tf.one_hot(i, 4, x[0, 0, 0], x[1, 0, 0]),
  ),
  "counts": lambda x, i: (
    tf.raw_ops.DenseBincount(input=i, size=10, weights=NONE, binary_output=False),
    tf.raw_ops.DenseBincount(input=i[0], size=8, weights=ONES, binary_output=False),
    tf.raw_ops.Bincount(arr=i[1], size=10, weights=NONE.astype(np.int32)),
  ),
  "concat": lambda x, i: tf.concat([x, x * 2.0, tf.ones([4, 6, 3])], -1),
  "split": lambda x, i: (tf.split(x, 4, -1), tf.split(x, [1, 5], 1)),
  "slice": lambda x, i: tf.slice(x, [0, 1, 2], [4, 3, 4]),
  "slice_at": lambda x, i: (
    x[:, i[0, 0] // 2], tf.slice(x, tf.stack([0, i[0, 1] // 3, 0]), [4, 2, 8]),
    x[i[0, 1] // 9 - 1]
  ),
  "brackets": lambda x, i: (
    x[:, 1:5:2, None, ::-1], x[..., -1], x[1:, ..., tf.newaxis, :4], x[-1, ::-2], x[:, :0]
  ),
  "pad": lambda x, i: (
    tf.pad(x, [[0, 0], [1, 2], [0, 0]]), tf.pad(x, [[0, 0], [1, 2], [0, 0]], constant_values=2.0),
    tf.pad(x, [[0, 0], [1, 2], [3, 1]], "REFLECT"),
    tf.pad(x, [[0, 0], [0, 2], [3, 1]], "SYMMETRIC"),
  ),
  "turned": lambda x, i: (tf.reverse(x, [1]), tf.roll(x, [1, -2], [1, 2]), tf.roll(x, i[0, 0], 0)),
  "running": lambda x, i: (
    tf.cumsum(x, 1), tf.cumsum(x, -1, exclusive=True, reverse=True),
    tf.cumsum(tf.reshape(x, [24, 8]), 0),
    tf.math.cumprod(x, 1), tf.math.cumulative_logsumexp(x, -1),
  ),
  "extremes": lambda x, i: (
    tf.argmax(x, 1), tf.argmin(x, -1, output_type=tf.int32), tf.argmin(i, 1),
    tf.argmin(tf.cast(i, tf.uint8), 0),
  ),
  "largest": lambda x, i: (
    tf.math.top_k(x, 3), tf.math.top_k(x, 1), tf.math.in_top_k(i[:, 0] % 8, x[:, 0], 3)
  ),
  "bands": lambda x, i: (tf.linalg.band_part(x, 1, 0), tf.linalg.diag_part(x)),
}  # fmt: skip
LAYOUTS = ("batch:r,d:c", "length:r,batch:c", "d:r,length:c")
FIRST = [(name, LAYOUTS[i % len(LAYOUTS)]) for i, name in enumerate(CASES)]
OTHERS = [(n, layout) for n in CASES for layout in LAYOUTS if (n, layout) not in FIRST]


@pytest.mark.parametrize(
  ("name", "layout"), [*FIRST, *(pytest.param(*c, marks=pytest.mark.long) for c in OTHERS)]
)
def test_positions_on_layouts(name: str, layout: str, cpu_devices: list[str]) -> None:
  both = comparing.compare(
    lambda x, i: CASES[name](x, i), [X, IDS], layout, cpu_devices[:4], dims=DIMS
  )
  assert both.difference < 5e-6
  assert not both.imported.fallbacks


def test_tables_split_as_their_indices_are(cpu_devices: list[str]) -> None:
  """Along the axis that is looked up, over the mesh axis of the indices; on both kinds of mesh."""
  dims = {**DIMS, "table": ["rows", "d"]}
  fn = lambda x, i: tf.gather(TABLE, i) * x  # noqa: E731
  imported = comparing.imported_of(fn, [X, IDS], dims)
  layout = "batch:r,rows:r,d:c"
  for simd in (False, True):
    both = comparing.compare(
      fn, [X, IDS], layout, cpu_devices[:4], imported=imported, simd=simd, traced=True
    )
    assert both.difference < 5e-6


def test_brackets_as_numpy_has_them() -> None:
  """Drawn masks: begin, end, ellipsis, new axes, numbers, steps."""
  rng = np.random.default_rng(5)
  x = np.arange(4 * 5 * 3).reshape(4, 5, 3)
  for _ in range(300):
    entries: list[Any] = []
    for n in x.shape[: rng.integers(0, 4)]:
      kind = rng.integers(0, 3)
      if kind == 0:
        entries.append(int(rng.integers(-3, 3)))
      else:
        first, last = (None if rng.random() < 0.3 else int(rng.integers(-n, n + 1)) for _ in "ab")
        entries.append(slice(first, last, int(rng.choice([-2, -1, 1, 2]))))
    for extra in (None, Ellipsis):
      if rng.random() < 0.4:
        entries.insert(rng.integers(0, len(entries) + 1), extra)
    masks = {f"{m}_mask": 0 for m in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    begin, end, strides = [], [], []
    for i, e in enumerate(entries):
      first, last, step = (e.start, e.stop, e.step) if isinstance(e, slice) else (e, 0, 1)
      if e is None or e is Ellipsis:
        masks["new_axis_mask" if e is None else "ellipsis_mask"] |= 1 << i
        first = 0
      elif not isinstance(e, slice):
        masks["shrink_axis_mask"] |= 1 << i
      masks["begin_mask"] |= (first is None) << i
      masks["end_mask"] |= (last is None) << i
      begin.append(first or 0)
      end.append(last or 0)
      strides.append(step)
    cuts = strided_slice_cuts(x.shape, begin, end, strides, masks)
    np.testing.assert_array_equal(x[tuple(c.as_slice for c in cuts)], x[tuple(entries)])


def test_what_must_be_known_while_tracing_is_named() -> None:
  with pytest.raises(mtf.UnsupportedError, match="axis must be known while tracing"):
    comparing.imported_of(lambda x, i: tf.cumsum(x, i[0, 0] % 2), [X, IDS], fallback="error")


@tf.custom_gradient
def clipped(x: Any) -> Any:
  return 2.0 * x, lambda dy: tf.clip_by_value(dy, -0.1, 0.1) * tf.cumsum(x, 1)


@tf.custom_gradient
def rounded(x: Any) -> Any:
  return tf.round(x), lambda dy: dy


def test_gradients_of_their_own_are_kept(cpu_devices: list[str]) -> None:
  fn = lambda x, i: tf.nn.silu(x) + clipped(x) * rounded(tf.reduce_sum(x, 2, keepdims=True))  # noqa: E731
  for layout in ("batch:r,length:c", "length:r,d:c"):
    both = comparing.compare(fn, [X, IDS], layout, cpu_devices[:4], dims=DIMS)
    assert both.difference < 5e-6
