"""NumPy mirrors of memory, Fixup, Evolved and Universal Transformer layers."""

from __future__ import annotations

import itertools

import numpy as np

from tests.transformer.model.layers.numpy_embeddings import log_softmax, sigmoid


def layer_norm(x, scale, bias, epsilon=1e-6):
  centered = x - x.mean(-1, keepdims=True)
  return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def product_key_memory(x, keys, values, kernel, bias, scale, norm_bias, knn):
  """All pairs of keys are scored, then the best taken."""
  n_keys = keys.shape[2]
  query = layer_norm(np.einsum("bld,dhpk->blhpk", x, kernel) + bias, scale, norm_bias)
  halves = np.einsum("blhpk,hpnk->blhpn", query, keys)
  scores = halves[..., 0, :, None] + halves[..., 1, None, :]
  scores = scores.reshape(*scores.shape[:3], n_keys**2)
  best = np.argsort(-scores, -1, kind="stable")[..., :knn]
  weights = np.exp(log_softmax(np.take_along_axis(scores, best, -1)))
  return np.einsum("blhk,blhkd->bld", weights, values[best])


def self_attention(x, q, k, v, o, heads):
  """Causal, head by head; the queries are scaled here."""
  size = q.shape[-1] // heads
  length = x.shape[1]
  hidden = np.where(np.arange(length)[:, None] < np.arange(length), -1e9, 0.0)
  y = 0.0
  for h in range(heads):
    part = slice(h * size, (h + 1) * size)
    logits = (x @ q[:, part]) @ np.swapaxes(x @ k[:, part], 1, 2) / np.sqrt(size) + hidden
    y = y + np.exp(log_softmax(logits)) @ (x @ v[:, part]) @ o[part]
  return y


def convolution(x, taps, offsets):
  """y[p] = sum over offsets of tap * x[p + offset]; a tap is a number per channel."""
  y = np.zeros_like(x)
  length = x.shape[1]
  for tap, offset in zip(taps, offsets):
    for p in range(length):
      if 0 <= p + offset < length:
        y[:, p] += x[:, p + offset] * tap
  return y


def separable(x, offsets, weights):
  """Weights: a tap for each offset, of which the first is followed by its bias; then the dense."""
  *depthwise, kernel, bias = weights
  taps, depthwise_bias = [depthwise[0], *depthwise[2:]], depthwise[1]
  return (convolution(x, taps, offsets) + depthwise_bias) @ kernel + bias


def pad(x, size):
  return np.concatenate([x, np.zeros([*x.shape[:-1], size - x.shape[-1]])], -1)


def relu(x):
  return np.maximum(x, 0.0)


class Universal:
  """A stack of one feed-forward layer."""

  def __init__(self, norm, wi, wo, final_norm, passes=1, mask=None, gate=None):
    self.norm, self.wi, self.wo, self.final_norm = norm, wi, wo, final_norm
    self.passes = passes
    self.mask = 1.0 if mask is None else mask[..., None]
    self.gate = gate

  def step(self, x):
    for _ in range(self.passes):
      y = relu(layer_norm(x * self.mask, *self.norm) @ self.wi) @ self.wo
      if self.gate:
        y = self.gate(x, y)
      x = x + y
    return x

  def final(self, x):
    return layer_norm(x, *self.final_norm) * self.mask


def act(universal, x, kernel, bias, table, epsilon, accumulated):
  """Adaptive computation time, position by position."""
  steps = len(table) + 1
  states, probabilities = [], []
  for i in range(steps):
    if i < len(table):
      x = x + table[i] * np.sqrt(x.shape[-1])
    probabilities.append(sigmoid(x @ kernel + bias)[..., 0])
    x = universal.step(x)
    states.append(x)
  result = np.zeros_like(x)
  for b, p in itertools.product(*map(range, x.shape[:2])):
    total, halted = 0.0, False
    for i in range(steps):
      weight = 0.0
      if not halted:
        weight = probabilities[i][b, p]
        if total + weight > 1 - epsilon:
          weight, halted = 1 - total, True
        total += weight
      kept = 1.0 if accumulated else 1 - weight
      result[b, p] = result[b, p] * kept + states[i][b, p] * weight
  return result
