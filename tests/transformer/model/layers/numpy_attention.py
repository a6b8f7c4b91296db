"""Attention layers in NumPy, written from their formulas."""

from __future__ import annotations

import numpy as np

from tests.transformer.numpy_lm import bucket


def softmax(x, axis=-1):
  e = np.exp(x - x.max(axis, keepdims=True))
  return e / e.sum(axis, keepdims=True)


def relative(length, memory_length=None):
  """Memory position minus query position: [length, memory_length]."""
  memory_length = memory_length or length
  return np.arange(memory_length)[None, :] - np.arange(length)[:, None]


def causal(length):
  return np.where(relative(length) > 0, -1e9, 0.0)


def window(length, radius, right=0):
  r = relative(length)
  return np.where((r > -radius) & (r <= right), 0.0, -1e9)


def relative_bias(table, length, bidirectional=False):
  """[heads, length, length] of a table [heads, buckets]."""
  return table[:, bucket(relative(length), bidirectional, table.shape[1])]


def heads_of(x, w, heads):
  """[batch, length, heads, size] of a combined matrix."""
  y = x @ w
  return y.reshape(*y.shape[:-1], heads, -1)


def attend(q, k, v, bias=0.0):
  """[batch, length, heads, size] of such queries, keys and values."""
  logits = np.einsum("blhk,bmhk->bhlm", q, k) + bias
  return np.einsum("bhlm,bmhk->blhk", softmax(logits), v)


def self_attention(x, q, k, v, o, heads, bias, memory=None):
  memory = x if memory is None else memory
  a = attend(heads_of(x, q, heads), heads_of(memory, k, heads), heads_of(memory, v, heads), bias)
  return a.reshape(*x.shape[:-1], -1) @ o


def talking_heads(x, q, k, v, y, before, after, bias=0.0, memory=None):
  """Projections `before` and `after` the softmax: [in, out], or with leading batch and lengths."""
  memory = x if memory is None else memory
  q, k = np.einsum("bld,dhk->blhk", x, q), np.einsum("bmd,dhk->bmhk", memory, k)
  v = np.einsum("bmd,dhk->bmhk", memory, v)
  logits = np.einsum("blhk,bmhk->blmh", q, k)
  logits = (
    np.einsum("blmh,...hg->blmg", logits, before)
    if before.ndim == 2
    else (np.einsum("blmh,blmhg->blmg", logits, before))
  )
  weights = softmax(np.moveaxis(logits, 3, 1) + bias)
  if after.ndim == 2:
    weights = np.einsum("bglm,gh->bhlm", weights, after)
  else:
    weights = np.einsum("bglm,blmgh->bhlm", weights, after)
  return np.einsum("bhlm,bmhk,hkd->bld", weights, v, y)


def bilinear(x, q, y, bias=0.0, memory=None):
  memory = x if memory is None else memory
  logits = np.einsum("bld,dhe,bme->bhlm", x, q, memory) + bias
  u = np.einsum("bhlm,bme->blhe", softmax(logits), memory)
  return np.einsum("blhe,hed->bld", u, y)


def branched(x, q, k, v, o, kappa, alpha, wi, wo, bias=0.0, memory=None):
  memory = x if memory is None else memory
  q = np.einsum("bld,dhk->blhk", x, q)
  k, v = (np.einsum("bmd,dhk->bmhk", memory, w) for w in (k, v))
  heads = np.einsum("blhk,hkd->blhd", attend(q, k, v, bias), o) * kappa[:, None]
  return np.einsum("blhd,h->bld", np.maximum(heads @ wi, 0) @ wo, alpha)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def shifted(x, offset):
  """y[:, t] = x[:, t + offset], zeros beyond the ends."""
  y = np.zeros_like(x)
  n = x.shape[1]
  for t in range(n):
    if 0 <= t + offset < n:
      y[:, t] = x[:, t + offset]
  return y


def separable(x, taps, first, bias, pointwise, pointwise_bias):
  """Depthwise weights `taps` for the offsets from `first`; then a dense layer."""
  y = sum(shifted(x, first + i) * tap for i, tap in enumerate(taps)) + bias
  return y @ pointwise + pointwise_bias


def convolution(x, kernel):
  """Centered, as TensorFlow's SAME; kernel [1, width, in, out]."""
  width = kernel.shape[1]
  return sum(shifted(x, i - (width - 1) // 2) @ kernel[0, i] for i in range(width))
