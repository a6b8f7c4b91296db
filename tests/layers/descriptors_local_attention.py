"""Attention to neighbourhoods, for the conformance suite: all against one dense mask."""

from __future__ import annotations

import functools

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from tests.conformance.framework import T, op

KV, HEADS = mtf.Dimension("kv", 2), mtf.Dimension("heads", 2)
WEIGHTS = {"attention/qkvo": T("qkvo:4 heads:2 d:4 kv:2", -1, 1)}
PARAMS = ("heads:2 d:4 kv:2",) * 4
SCORES = dict(tolerance=3e-5, differentiable=True)


def attention(x, weights, visible):
  """[batch, position, d], with a matrix of what each position sees."""
  wq, wk, wv, wo = weights
  q, k, v = (np.einsum("bld,hdk->bhlk", x, w) for w in (wq, wk, wv))
  e = np.where(visible, np.exp(q @ np.swapaxes(k, -1, -2)), 0.0)
  return np.einsum("bhlk,hdk->bld", e / e.sum(-1, keepdims=True) @ v, wo)


def window(length, size):
  query, memory = np.indices([length, length])
  return (memory <= query) & (query - memory < size)


def local(size, **kwargs):
  return lambda x: layers.masked_local_attention_1d(
    x, KV, HEADS, True, size, name="attention", **kwargs
  )


def local_with_params(x, *params):
  kv = []
  y = layers.masked_local_attention_1d(
    x, KV, HEADS, True, 3, length_per_split=2, return_kv=kv, params=params
  )
  return [y, *kv]


def local_with_params_reference(x, *params):
  k, v = (np.einsum("bld,hdk->bhlk", x, w) for w in params[1:3])
  return [attention(x, params, window(16, 3)), k, v]


def windowed(name, size, block, **kwargs):
  """A descriptor of `masked_local_attention_1d` with blocks of the given size."""
  blocks = 16 // block
  return op(
    name,
    local(size, **kwargs),
    lambda x, w: attention(x, w, window(16, size)),
    T("b:2 length:16 d:4", -1, 1),
    variables=WEIGHTS,
    # One block has no halo, and its memory may be split.
    unsplit=("qkvo",) if blocks == 1 else ("qkvo", "memory_block_length"),
    together=(
      "b:2 length:16 d:4 heads:2 kv:2",
      f"b:2 heads:2 length:{blocks} query_block_length:{block} memory_block_length:{block} kv:2",
    ),
    **SCORES,
  )


def step(x, prev_k, prev_v, step_num):
  return list(
    layers.masked_local_attention_1d_incremental(x, prev_k, prev_v, step_num, name="attention")
  )


def step_reference(x, prev_k, prev_v, step_num, weights):
  """Each example by itself."""
  results = []
  for i, now in enumerate(np.broadcast_to(step_num, [len(x)])):
    q, new_k, new_v = (np.einsum("d,hdk->hk", x[i], w) for w in weights[:3])
    k, v = prev_k[i].copy(), prev_v[i].copy()
    k[:, now % 4], v[:, now % 4] = new_k, new_v
    seen = min(now + 1, 4)
    e = np.exp(np.einsum("hk,hwk->hw", q, k[:, :seen]))
    o = np.einsum("hw,hwk->hk", e / e.sum(-1, keepdims=True), v[:, :seen])
    results.append([np.einsum("hk,hdk->d", o, weights[3]), k, v])
  return [np.stack(r) for r in zip(*results)]


def stepwise(name, step_num):
  return op(
    name,
    step,
    step_reference,
    T("b:4 d:4", -1, 1),
    T("b:4 heads:2 w:4 kv:2", -1, 1),
    T("b:4 heads:2 w:4 kv:2", -1, 1),
    step_num,
    variables=WEIGHTS,
    unsplit="qkvo",
    together=("b:4 d:4 heads:2 kv:2", "b:4 heads:2 w:4 kv:2"),
    **SCORES,
  )


def in_row(x):
  """[..., n, w, d] -> [batch, position, d]."""
  return x.reshape(-1, x.shape[-3] * x.shape[-2], x.shape[-1])


def row_visible(blocks, width, mask_right):
  query, memory = np.indices([blocks * width] * 2)
  distance = memory // width - query // width
  near = np.isin(distance, [-1, 0] if mask_right else [-1, 0, 1])
  return near & ((memory <= query) | (not mask_right))


def in_image(x):
  """[b, nh, nw, h, w, d] -> [b, position, d], rows of the whole image one after the other."""
  b, nh, nw, h, w, d = x.shape
  return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, nh * h * nw * w, d)


def in_blocks(y, nh, nw, h, w):
  return y.reshape(len(y), nh, h, nw, w, -1).transpose(0, 1, 3, 2, 4, 5)


def image_visible(nh, nw, h, w, mask_right):
  """By pairs of pixels: blocks that touch; with the mask those that are made before."""
  pixels = [(r, c) for r in range(nh * h) for c in range(nw * w)]

  def sees(query, memory):
    (r, c), (mr, mc) = query, memory
    dr, dc = mr // h - r // h, mc // w - c // w
    if not mask_right:
      return abs(dr) <= 1 and abs(dc) <= 1
    if (dr, dc) == (0, 0):
      return (mr, mc) <= (r, c)
    return dr in (-1, 0) and dc in (-1, 0)

  return np.array([[sees(q, m) for m in pixels] for q in pixels])


def row_attention(name, mask_right, batch="b:2"):
  visible = row_visible(4, 2, mask_right)
  return op(
    name,
    lambda x: layers.local_self_attention_spatial_blocks(
      x, KV, HEADS, True, mask_right=mask_right, name="attention"
    ),
    lambda x, weights: attention(in_row(x), weights, visible).reshape(x.shape),
    T(f"{batch} nw:4 w:2 d:4", -1, 1),
    variables=WEIGHTS,
    unsplit=("qkvo", "memory_w"),
    together=(
      f"{batch} nw:4 w:2 d:4 heads:2 kv:2",
      f"{batch} nw:4 memory_w:2 d:4 heads:2 kv:2",
      f"{batch} nw:4 w:2 memory_w:2 heads:2 kv:2",
    ),
    **SCORES,
  )


def image_attention(name, mask_right):
  visible = image_visible(2, 4, 2, 2, mask_right)
  memory = 16 if mask_right else 36
  return op(
    name,
    lambda x: layers.local_2d_self_attention_spatial_blocks(
      x,
      KV,
      HEADS,
      True,
      memory_h_dim=mtf.Dimension("mh", 2),
      mask_right=mask_right,
      name="attention",
    ),
    lambda x, weights: in_blocks(attention(in_image(x), weights, visible), 2, 4, 2, 2),
    T("b:2 nh:2 nw:4 h:2 w:2 d:4", -1, 1),
    variables=WEIGHTS,
    unsplit=("qkvo", "mh", "memory_w"),
    together=(
      "b:2 nh:2 nw:4 h:2 w:2 d:4 heads:2 kv:2",
      "b:2 nh:2 nw:4 mh:2 memory_w:2 d:4 heads:2 kv:2",
      f"b:2 nh:2 nw:4 h:2 w:2 mh_memory_w:{memory} heads:2 kv:2",
      "nh:2 nw:4 h:2 w:2 mh:2 memory_w:2" if mask_right else "",
    ),
    **SCORES,
  )


def neighbours(x, blocks_axis, axis, left_only):
  """The blocks before and after each along an axis; zeros at the ends, or where axis is None."""
  if blocks_axis is None:
    zero = np.zeros_like(x)
    return np.concatenate([zero, x] if left_only else [zero, x, zero], axis)
  blocks = np.moveaxis(x, blocks_axis, 0)
  zero = np.zeros_like(blocks[:1])
  parts = [np.concatenate([zero, blocks[:-1]]), blocks, np.concatenate([blocks[1:], zero])]
  parts = [np.moveaxis(p, 0, blocks_axis) for p in parts]
  return np.concatenate(parts[:2] if left_only else parts, axis)


def halo_1d(blocks, mask_right):
  dim = mtf.Dimension("nw", 4) if blocks else None
  return lambda k, v: list(
    layers.local_1d_halo_exchange(k, v, dim, mtf.Dimension("w", 2), mask_right)
  )


def halo_1d_reference(axis, mask_right, k, v):
  return [neighbours(k, axis, 2, mask_right), neighbours(v, axis, 2, mask_right)]


def halo_2d(h_blocks, w_blocks, mask_right):
  nh = mtf.Dimension("nh", 4) if h_blocks else None
  nw = mtf.Dimension("nw", 2) if w_blocks else None
  h, w = mtf.Dimension("h", 2), mtf.Dimension("w", 3)
  return lambda k, v: list(layers.local_2d_halo_exchange(k, v, nh, h, nw, w, mask_right))


def halo_2d_reference(h_blocks, w_blocks, mask_right, *kv):
  rows = [neighbours(t, 0 if h_blocks else None, 2, mask_right) for t in kv]
  return [neighbours(t, 1 if w_blocks else None, 3, mask_right) for t in rows]


def block_bias(mesh):
  return layers.attention_bias_local_block(
    mesh, mtf.Dimension("block", 4), mtf.Dimension("memory", 8)
  )


def block_2d_bias(mesh):
  dims = [mtf.Dimension(*d) for d in (("h", 2), ("w", 4), ("mh", 4), ("mw", 8))]
  return layers.attention_bias_local_2d_block(mesh, *dims)


def block_2d_bias_reference():
  """Both before the block, or in it and up to the query, row by row."""
  h, w, mh, mw = np.indices([2, 4, 4, 8])
  free = (mh < 2) | (mw < 4)
  before = (mh - 2 < h) | ((mh - 2 == h) & (mw - 4 <= w))
  return np.where(free | before, 0.0, -1e9)


DESCRIPTORS = [
  windowed("local_small_window", 3, 4, length_per_split=4),
  windowed("local_window_of_a_block", 4, 4, length_per_split=4),
  windowed("local_window_of_blocks", 7, 2, length_per_split=2),
  windowed("local_window_of_all", 100, 4, length_per_split=4),
  windowed("local_one_block", 5, 16),
  op(
    "local_params_and_kv",
    local_with_params,
    local_with_params_reference,
    T("b:2 length:16 d:4", -1, 1),
    *PARAMS,
    unsplit="memory_block_length",
    together=(
      "b:2 length:16 d:4 heads:2 kv:2",
      "b:2 heads:2 length:8 query_block_length:2 memory_block_length:2 kv:2",
    ),
    variables={},
    **SCORES,
  ),
  stepwise("local_step_first", T("", dtype="int32", values=0)),
  stepwise("local_step_around", T("", dtype="int32", values=9)),
  stepwise("local_steps_of_a_batch", T("b:4", dtype="int32", values=[0, 1, 3, 6])),
  row_attention("spatial_row", False),
  row_attention("spatial_row_masked", True),
  row_attention("spatial_row_batch", True, batch="b:2 c:2"),
  image_attention("spatial_image", False),
  image_attention("spatial_image_masked", True),
  *[
    op(
      f"halo_1d_{blocks}_{mask_right}",
      halo_1d(blocks, mask_right),
      functools.partial(halo_1d_reference, 1 if blocks else None, mask_right),
      "b:2 nw:4 w:2 d:4",
      "b:2 nw:4 w:2 d:4",
      unsplit="w",
    )
    for blocks in (True, False)
    for mask_right in (True, False)
  ],
  *[
    op(
      f"halo_2d_{h_blocks}_{w_blocks}_{mask_right}",
      halo_2d(h_blocks, w_blocks, mask_right),
      functools.partial(halo_2d_reference, h_blocks, w_blocks, mask_right),
      "nh:4 nw:2 h:2 w:3 d:2",
      "nh:4 nw:2 h:2 w:3 d:2",
      unsplit=("h", "w"),
    )
    for h_blocks, w_blocks in ((True, True), (False, True))
    for mask_right in (True, False)
  ],
  op(
    "bias_local_block",
    block_bias,
    lambda: np.where(np.arange(8) - 4 > np.arange(4)[:, None], -1e9, 0.0),
  ),
  op("bias_local_2d_block", block_2d_bias, block_2d_bias_reference),
]
