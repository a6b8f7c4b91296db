"""Layers of images and volumes: interpolation, norms of groups, attention to blocks around."""

from __future__ import annotations

import numpy as np

from mesh_tensorflow import layers
from tests.conformance.framework import T, op
from tests.layers.descriptors_local_attention import HEADS, KV, attention


def _linear(x, axis, factor):
  """By the place of each new center among the old ones."""
  n = x.shape[axis]
  place = np.clip((np.arange(n * factor) + 0.5) / factor - 0.5, 0, n - 1)
  left = np.floor(place).astype(int)
  right = np.minimum(left + 1, n - 1)
  shape = [1] * x.ndim
  shape[axis] = -1
  weight = (place - left).reshape(shape)
  return np.take(x, left, axis) * (1 - weight) + np.take(x, right, axis) * weight


def _group_norm(x, scale, bias, groups):
  y = x.reshape([x.shape[0], -1, groups, x.shape[-1] // groups])
  y = (y - y.mean((1, 3), keepdims=True)) / np.sqrt(y.var((1, 3), keepdims=True) + 1e-5)
  return y.reshape(x.shape) * scale + bias


def _blocks_around(x, weights):
  """[b, db, hb, wb, d, h, w, i]: all positions as one axis, and which blocks are next."""
  sizes = x.shape[1:7]
  place = np.indices(sizes)[:3].reshape(3, -1)
  near = (np.abs(place[:, :, None] - place[:, None]) <= 1).all(0)
  return attention(x.reshape(x.shape[0], -1, x.shape[-1]), weights, near).reshape(x.shape)


NORM = {"n/scale": T("c:4", 0.5, 2), "n/bias": "c:4"}

DESCRIPTORS = [
  op(
    "upsample_nearest",
    lambda x: layers.upsample(x, (2, 3)),
    lambda x: x.repeat(2, 1).repeat(3, 2),
    "b:2 h:4 w:2 c:4",
  ),
  op(
    "upsample_linear",
    lambda x: layers.upsample(x, (3, 2), "linear"),
    lambda x: _linear(_linear(x, 1, 3), 2, 2),
    "b:2 h:4 w:2 c:4",
  ),
  op(
    "upsample_linear_3d",
    lambda x: layers.upsample(x, (1, 2, 2), "linear"),
    lambda x: _linear(_linear(x, 2, 2), 3, 2),
    "b:2 d:2 h:1 w:4 c:2",
  ),
  op(
    "group_norm",
    lambda x: layers.group_norm(x, 2, name="n"),
    lambda x, s, b: _group_norm(x, s, b, 2),
    "b:2 h:4 w:2 c:4",
    variables=NORM,
    tolerance=3e-5,
  ),
  op(
    "group_norm_of_one",
    lambda x: layers.group_norm(x, 1, name="n"),
    lambda x, s, b: _group_norm(x, s, b, 1),
    "b:4 c:4",
    variables=NORM,
    tolerance=3e-5,
  ),
  op(
    "instance_norm",
    lambda x: layers.instance_norm(x, name="n"),
    lambda x, s, b: _group_norm(x, s, b, 4),
    "b:2 d:2 h:4 w:2 c:4",
    variables=NORM,
    tolerance=3e-5,
  ),
  op(
    "local_3d_attention",
    lambda x: layers.local_3d_self_attention_spatial_blocks(x, KV, HEADS, True, name="attention"),
    lambda x, w: _blocks_around(x, w),
    T("b:1 db:3 hb:2 wb:4 d:1 h:2 w:1 d_model:4", -1, 1),
    variables={"attention/qkvo": T("qkvo:4 heads:2 d_model:4 kv:2", -1, 1)},
    unsplit=("qkvo", "memory_d", "memory_h", "memory_w"),
    together=(
      "b:1 db:3 hb:2 wb:4 d:1 h:2 w:1 d_model:4 heads:2 kv:2",
      "b:1 db:3 hb:2 wb:4 memory_d:1 memory_h:2 memory_w:1 d_model:4 heads:2 kv:2",
      "b:1 db:3 hb:2 wb:4 d:1 h:2 w:1 memory_d_memory_h_memory_w:54 heads:2 kv:2",
    ),
    tolerance=3e-5,
  ),
]
