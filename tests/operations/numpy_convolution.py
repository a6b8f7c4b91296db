"""Convolutions and pooling in NumPy: sums over the positions of the filter or window."""

from __future__ import annotations

import itertools

import numpy as np


def _taps(kernel, strides, sizes):
  """Each position in the filter, and the places in a padded image that it meets."""
  for offset in itertools.product(*(range(k) for k in kernel)):
    places = [slice(o, o + (n - 1) * s + 1, s) for o, s, n in zip(offset, strides, sizes)]
    yield offset, (..., *places, slice(None))


def conv(x, w, strides=None, padding="SAME"):
  """[batch..., space..., i] with [space..., i, o] to [batch..., space..., o]."""
  rank = w.ndim - 2
  strides = strides or [1] * rank
  out, edges = _places(x, w, strides, padding)
  x = np.pad(x, edges)
  return sum(x[places] @ w[offset] for offset, places in _taps(w.shape[:rank], strides, out))


def _places(x, w, strides, padding):
  """Sizes of the features, and the zeros around each axis of the image."""
  rank = w.ndim - 2
  kernel, sizes = w.shape[:rank], x.shape[-rank - 1 : -1]
  if padding == "VALID":
    return [(n - k) // s + 1 for n, k, s in zip(sizes, kernel, strides)], [(0, 0)] * x.ndim
  out = [-(-n // s) for n, s in zip(sizes, strides)]
  zeros = [max((m - 1) * s + k - n, 0) for m, s, k, n in zip(out, strides, kernel, sizes)]
  edges = [(0, 0)] * (x.ndim - rank - 1) + [(z // 2, z - z // 2) for z in zeros] + [(0, 0)]
  return out, edges


def conv_gradients(x, w, dy, strides, padding):
  """Gradients of x [batch, space..., i] and w, for the gradient dy of `conv`."""
  out, edges = _places(x, w, strides, padding)
  padded = np.pad(x, edges)
  dx, dw = np.zeros_like(padded), np.zeros_like(w)
  rows = dy.reshape([-1, dy.shape[-1]])
  for offset, places in _taps(w.shape[:-2], strides, out):
    dx[places] += dy @ w[offset].T
    dw[offset] = padded[places].reshape([-1, x.shape[-1]]).T @ rows
  return dx[tuple(slice(b, b + n) for (b, _), n in zip(edges, x.shape))], dw


def conv_transpose(x, w, strides, padding="SAME"):
  """[batch..., space..., i] with [space..., o, i] to [batch..., larger space..., o]."""
  rank = w.ndim - 2
  kernel, sizes = w.shape[:rank], x.shape[-rank - 1 : -1]
  full = [n * s + max(k - s, 0) for n, k, s in zip(sizes, kernel, strides)]
  y = np.zeros([*x.shape[: -rank - 1], *full, w.shape[-2]])
  for offset, places in _taps(kernel, strides, sizes):
    y[places] += x @ w[offset].T
  if padding == "SAME":
    cuts = [max(k - s, 0) // 2 for k, s in zip(kernel, strides)]
    y = y[(..., *(slice(c, c + n * s) for c, n, s in zip(cuts, sizes, strides)), slice(None))]
  return y


def windows(x, ksize):
  """The positions of each window [..., windows..., channels, positions]; no remainders."""
  rank, batch = len(ksize), x.ndim - len(ksize) - 1
  out = [n // k for n, k in zip(x.shape[batch:-1], ksize)]
  taps = [x[places] for _, places in _taps(ksize, ksize, out)]
  assert all(t.ndim == batch + rank + 1 for t in taps)
  return np.stack(taps, -1)


def max_pool(x, ksize):
  return windows(x, ksize).max(-1)


def avg_pool(x, ksize):
  return windows(x, ksize).mean(-1)


def join(x, blocks, positions):
  """Makes an axis of blocks and the axis of the positions in a block one."""
  x = np.moveaxis(x, blocks, positions - 1)
  return x.reshape([*x.shape[: positions - 1], -1, *x.shape[positions + 1 :]])


def cut(y, axis, blocks, to):
  """Cuts an axis into blocks, whose axis goes to the place `to`: what `join` undoes."""
  y = y.reshape([*y.shape[:axis], blocks, -1, *y.shape[axis + 1 :]])
  return np.moveaxis(y, axis, to)
