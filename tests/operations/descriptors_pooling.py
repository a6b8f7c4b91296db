"""Pooling, its gradient (all ties get the whole of it), and the gradient of that."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op
from tests.operations.numpy_convolution import avg_pool, max_pool

X2, X3 = "b:4 h:8 w:4 c:4", "b:4 d:4 h:2 w:4 c:2"
# Few different numbers: most windows have their maximum more than once.
TIES = T(X2, -1, 2, "int32")


def _pool(kind, ksize):
  return lambda x: mtf.PoolOperation(x, ksize, ksize, f"{kind}_{len(ksize)}D").outputs[0]


def cuts(x, ksize):
  """Whether a layout splits a spatial dimension of x through its windows."""
  shape = mtf.convert_to_shape(x if isinstance(x, str) else x.dims)
  windows = list(zip(shape[-len(ksize) - 1 : -1], ksize))

  def illegal(layout):
    return any(d.size % (layout.axis(d.name).size * k) for d, k in windows if layout.splits(d.name))

  return illegal


def _max(name, x, ksize, **kwargs):
  fn = lambda a: max_pool(a, ksize)  # noqa: E731
  return op(name, _pool("MAX", ksize), fn, x, illegal=cuts(x, ksize), **kwargs)


def _avg(name, x, ksize, **kwargs):
  fn = lambda a: avg_pool(a, ksize)  # noqa: E731
  return op(name, _pool("AVG", ksize), fn, x, illegal=cuts(x, ksize), **kwargs)


def spread(y, ksize, sizes):
  """Each value repeated over its window, zeros after the last one."""
  first = y.ndim - len(ksize) - 1
  for i, k in enumerate(ksize):
    y = np.repeat(y, k, axis=first + i)
  return np.pad(y, [(0, n - m) for n, m in zip(sizes, y.shape)])


def max_gradient(x, dy, ksize):
  covered = spread(np.ones_like(dy), ksize, x.shape) == 1
  is_max = (x == spread(max_pool(x, ksize), ksize, x.shape)) & covered
  return is_max * spread(dy, ksize, x.shape)


def avg_gradient(x, dy, ksize):
  return spread(dy, ksize, x.shape) / np.prod(ksize)


def _backprop(name, kind, gradient, x, dy, ksize, **kwargs):
  """`mtf.pool_backprop` of a pooled x; of x itself no gradient is promised."""
  given = T(x) if isinstance(x, str) else x
  whole = f"{kind}_{len(ksize)}D"

  def build(x, dy):
    x = mtf.stop_gradient(mtf.cast(x, dy.dtype))
    y = mtf.PoolOperation(x, ksize, ksize, whole).outputs[0]
    return mtf.pool_backprop(x, y, dy, ksize, ksize, whole)

  def transposed(xs, dys):
    to_dy = np.zeros_like(xs[1])
    for position in np.ndindex(*to_dy.shape):
      e = np.zeros_like(to_dy)
      e[position] = 1.0
      to_dy[position] = np.sum(gradient(xs[0] * 1.0, e, ksize) * dys[0])
    return [np.zeros_like(xs[0]), to_dy] if given.floating else [to_dy]

  return op(
    name,
    build,
    lambda x, dy: gradient(x * 1.0, dy, ksize),
    given,
    dy,
    gradient=transposed,
    illegal=cuts(given, ksize),
    **kwargs,
  )


def _windows(name, kind, ksize, strides, x, **kwargs):
  """`mtf.pool` with "SAME" padding: maxima and means of what of each window lies in the image."""

  def reference(a):
    a = np.asarray(a)
    first = a.ndim - len(ksize) - 1
    for i, (k, s) in enumerate(zip(ksize, strides)):
      n = a.shape[first + i]
      m = -(-n // s)
      before = max((m - 1) * s + k - n, 0) // 2
      parts = []
      for j in range(m):
        here = range(max(j * s - before, 0), min(j * s - before + k, n))
        part = np.take(a, list(here), axis=first + i)
        # A mean of means: all windows of one place along the other axes are of one size.
        parts.append((np.max if kind == "MAX" else np.mean)(part, axis=first + i))
      a = np.stack(parts, first + i)
    return a

  return op(name, lambda x: mtf.pool(x, ksize, strides, "SAME", kind), reference, x, **kwargs)


DESCRIPTORS = [
  _windows("pool_max_1d", "MAX", [3], [1], "b:4 w:8 c:2"),
  _windows("pool_max_2d", "MAX", [3, 2], [2, 1], "b:2 h:8 w:4 c:4"),
  _windows("pool_avg_2d", "AVG", [3, 3], [1, 2], "b:2 h:4 w:8 c:4"),
  _windows("pool_avg_3d", "AVG", [2, 3, 2], [1, 2, 2], "b:2 d:4 h:4 w:2 c:2"),
  _windows("pool_max_2d_int", "MAX", [3, 2], [2, 1], T("b:2 h:8 w:4 c:4", -9, 9, "int32")),
  _max("max_pool2d", X2, [2, 2]),
  _max("max_pool2d_unequal", X2, [4, 1]),
  _max("max_pool2d_remainder", "b:4 h:5 w:8 c:2", [2, 3]),
  _max("max_pool2d_two_batch_dims", "b:4 e:2 h:4 w:4 c:2", [2, 2]),
  _max("max_pool2d_no_batch", "h:4 w:4 c:4", [2, 2]),
  _max("max_pool2d_int", TIES, [2, 2]),
  _max(
    "max_pool2d_bfloat16",
    T(X2, dtype="bfloat16", values=np.arange(512) % 101),
    [2, 2],
    tolerance=2e-2,
  ),
  _max("max_pool3d", X3, [2, 1, 2]),
  _max("max_pool3d_remainder", "b:4 d:3 h:5 w:4 c:2", [2, 2, 3]),
  _max("max_pool3d_float64", T(X3, dtype="float64"), [2, 2, 2], tolerance=1e-7),
  _max(
    "max_pool3d_float16",
    T(X3, dtype="float16", values=np.arange(256) % 97),
    [2, 2, 2],
    tolerance=2e-3,
  ),
  _max("max_pool3d_int", T(X3, -9, 9, "int32"), [2, 2, 2]),
  _avg("avg_pool2d", X2, [2, 2]),
  _avg("avg_pool2d_unequal", X2, [4, 1]),
  _avg("avg_pool2d_remainder", "b:4 h:5 w:8 c:2", [2, 3]),
  _avg("avg_pool2d_two_batch_dims", "b:4 e:2 h:4 w:4 c:2", [2, 2]),
  _avg("avg_pool2d_bfloat16", T(X2, dtype="bfloat16"), [2, 2], tolerance=2e-2),
  _avg("avg_pool3d", X3, [2, 2, 2]),
  _avg("avg_pool3d_two_batch_dims", "b:4 e:2 d:2 h:2 w:4 c:2", [2, 1, 2]),
  _avg("avg_pool3d_remainder", "b:4 d:3 h:5 w:4 c:2", [2, 2, 3]),
  _avg("avg_pool3d_float64", T(X3, dtype="float64"), [2, 2, 2], tolerance=1e-7),
  _avg(
    "avg_pool3d_float64_remainder",
    T("b:4 d:3 h:2 w:5 c:2", dtype="float64"),
    [2, 2, 2],
    tolerance=1e-7,
  ),
  _avg("avg_pool3d_float16", T(X3, dtype="float16"), [2, 2, 2], tolerance=2e-3),
  _backprop("max_pool_backprop", "MAX", max_gradient, X2, "b:4 h:4 w:2 c:4", [2, 2]),
  _backprop("max_pool_backprop_ties", "MAX", max_gradient, TIES, "b:4 h:4 w:2 c:4", [2, 2]),
  _backprop(
    "max_pool3d_backprop_ties",
    "MAX",
    max_gradient,
    T(X3, -1, 2, "int32"),
    "b:4 d:2 h:1 w:2 c:2",
    [2, 2, 2],
  ),
  _backprop(
    "max_pool_backprop_remainder",
    "MAX",
    max_gradient,
    T("b:4 h:5 w:8 c:2", -1, 2, "int32"),
    "b:4 h:2 w:2 c:2",
    [2, 3],
  ),
  _backprop("avg_pool_backprop", "AVG", avg_gradient, X2, "b:4 h:4 w:2 c:4", [2, 2]),
  _backprop("avg_pool3d_backprop", "AVG", avg_gradient, X3, "b:4 d:2 h:1 w:2 c:2", [2, 2, 2]),
]
