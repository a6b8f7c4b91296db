"""The language model's forward pass in NumPy, written from its formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def bucket(relative: np.ndarray, bidirectional: bool, num_buckets: int) -> np.ndarray:
  """Bucket of memory position minus query position; at most 128 apart count."""
  n = -relative
  offset = np.zeros_like(n)
  if bidirectional:
    num_buckets //= 2
    offset = np.where(n < 0, num_buckets, 0)
    n = np.abs(n)
  else:
    n = np.maximum(n, 0)
  exact = num_buckets // 2
  ratio = np.log(np.maximum(n, 1) / exact) / math.log(128 / exact)
  large = np.minimum(exact + (ratio * (num_buckets - exact)).astype(np.int64), num_buckets - 1)
  return offset + np.where(n < exact, n, large)


def softmax(x: np.ndarray) -> np.ndarray:
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def rms_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def self_attention(
  x: np.ndarray, w: dict[str, np.ndarray], allowed: np.ndarray, options: dict[str, Any]
) -> np.ndarray:
  """Attention with variables `w`; `allowed` is [batch, query, memory]."""
  batch, length, d_model = x.shape
  heads, d_kv = options["num_heads"], options["d_kv"]
  memory_heads = options.get("num_memory_heads", 0) or heads
  names = ("q", "kv", "kv") if options.get("shared_kv") else ("q", "k", "v")
  q, k, v = (x @ w[n].reshape(d_model, -1) for n in names)
  if not options.get("fold_scaling_into_initializer", True):
    q = q * d_kv**-0.5
  q = q.reshape(batch, length, heads, d_kv)
  k, v = (
    np.repeat(t.reshape(batch, length, memory_heads, d_kv), heads // memory_heads, axis=2)
    for t in (k, v)
  )
  logits = np.einsum("blhk,bmhk->bhlm", q, k)
  position = np.arange(length)
  relative = position[None, :] - position[:, None]
  buckets = bucket(relative, False, options.get("buckets", 32))
  kind = options.get("relative_attention_type")
  if kind in ("bias", "bias_shared"):
    logits += w["relative_attention_bias"].reshape(heads, -1)[:, buckets]
  elif kind == "contextual":
    table = w["relative_attention_ak/kernel"].reshape(heads, d_kv, -1)
    by_bucket = np.einsum("blhk,hkr->bhlr", q, table)
    logits += np.take_along_axis(by_bucket, np.broadcast_to(buckets, logits.shape), axis=-1)
  logits = np.where(allowed[:, None], logits, -1e9)
  out = np.einsum("bhlm,bmhk->blhk", softmax(logits), v)
  return out.reshape(batch, length, heads * d_kv) @ w["o"].reshape(-1, d_model)


def logits(
  w: dict[str, np.ndarray],
  inputs: np.ndarray,
  num_layers: int,
  options: dict[str, Any],
  sequence_id: np.ndarray | None = None,
  position: np.ndarray | None = None,
) -> np.ndarray:
  """Logits of a decoder-only model with the packaged sublayers.

  Args:
    w: variables by full name.
    inputs: [batch, length].
    num_layers: number of blocks.
    options: of the attention layers.
    sequence_id: [batch, length], or None.
    position: [batch, length], or None.
  """
  length = inputs.shape[1]
  embedding = w["transformer/embedding"]
  x = embedding[inputs]
  if "transformer/positional_embedding" in w:
    table = w["transformer/positional_embedding"]
    x = x + (table[:length] if position is None else table[position])
  allowed = np.broadcast_to(np.tri(length, dtype=bool), (inputs.shape[0], length, length))
  mask = 1.0
  if sequence_id is not None:
    allowed = allowed & (sequence_id[:, :, None] == sequence_id[:, None, :])
    mask = (sequence_id != 0)[..., None].astype(np.float64)
  for block in range(num_layers):
    first, second = (f"transformer/block_{block:03d}/layer_{n:03d}/" for n in (0, 1))
    here = {k[len(first + "SelfAttention/") :]: v for k, v in w.items() if k.startswith(first)}
    if options.get("relative_attention_type") == "bias_shared":
      name = "transformer/block_000/layer_000/SelfAttention/relative_attention_bias"
      here["relative_attention_bias"] = w[name]
    h = rms_norm(x, w[first + "rms_norm/scale"]) * mask
    x = x + self_attention(h, here, allowed, options)
    h = rms_norm(x, w[second + "rms_norm/scale"]) * mask
    h = np.maximum(h @ w[second + "DenseReluDense/wi/kernel"], 0)
    x = x + h @ w[second + "DenseReluDense/wo/kernel"]
  x = rms_norm(x, w["transformer/rms_norm/scale"]) * mask
  if "transformer/logits/kernel" in w:
    return x @ w["transformer/logits/kernel"]
  return (x * x.shape[-1] ** -0.5) @ embedding.T
