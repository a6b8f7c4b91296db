"""Layers without random initial values, for the conformance suite's framework."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.layers.masks import masked_logit
from tests.conformance.framework import T, op

BATCH, LENGTH, VOCAB = mtf.Dimension("b", 4), mtf.Dimension("length", 8), mtf.Dimension("v", 16)
D, E, F = mtf.Dimension("d", 4), mtf.Dimension("e", 4), mtf.Dimension("f", 8)
MEMORY, KV, HEADS = (mtf.Dimension(n, s) for n, s in (("m", 8), ("kv", 4), ("heads", 4)))
LOGITS = T("b:4 length:8 v:16", -5, 5)
TARGETS = T("b:4 length:8", -3, 20, "int32")  # Also negative ones and ones that are too large.
IDS = T("b:4 length:8", 0, 3, "int32")


def cross_entropy(logits, targets, z_loss=0.0, on=1.0, off=0.0, num_classes=None):
  """The formula, by a one-hot tensor; the vocabulary is the last axis."""
  ids = np.arange(logits.shape[-1])
  soft = np.where(ids == targets[..., None], on, off)
  if num_classes is not None:
    soft = np.where(ids < num_classes, soft, 0.0)
  log_z = np.log(np.exp(logits).sum(-1))
  return (soft * (log_z[..., None] - logits)).sum(-1) + z_loss * log_z**2


def soft_cross_entropy(logits, targets, z_loss=0.0):
  log_z = np.log(np.exp(logits).sum(-1))
  return (targets * (log_z[..., None] - logits)).sum(-1) + z_loss * log_z**2


def normalize(x, axis=-1, epsilon=1e-6):
  centered = x - x.mean(axis, keepdims=True)
  return centered / np.sqrt((centered**2).mean(axis, keepdims=True) + epsilon)


def batch_normalize(x):
  centered = x - x.mean((0, 1))
  return centered / np.sqrt((centered**2).mean((0, 1)) + 1e-9)


def softmax(x, extra=None):
  e = np.exp(x)
  return e / (e.sum(-1, keepdims=True) + (0.0 if extra is None else np.exp(extra)))


def attention(q, k, v, mask=0.0, extra=None):
  return softmax(q @ np.swapaxes(k, -1, -2) + mask, extra) @ v


def correlation(x):
  return np.corrcoef(x.transpose(1, 0, 2).reshape(8, -1))


def segments(x):
  return np.where(x[:, :, None] != x[:, None, :], -1e9, 0.0)


def masked_ce(logits, targets):
  """Padded ids of the vocabulary hidden by -1e9."""
  return cross_entropy(logits + np.where(np.arange(16) < 5, 0.0, -1e9), targets)


def hide_padding(logits):
  ids = mtf.range(logits.mesh, VOCAB, tf.int32)
  return logits + mtf.cast(mtf.greater_equal(ids, 5), logits.dtype) * masked_logit(logits.dtype)


DESCRIPTORS = [
  op(
    "ce",
    lambda x, t: layers.softmax_cross_entropy_with_logits(x, t, VOCAB),
    cross_entropy,
    LOGITS,
    TARGETS,
    tolerance=2e-5,
  ),
  op(
    "ce_z_loss",
    lambda x, t: layers.softmax_cross_entropy_with_logits(x, t, VOCAB, 0.1),
    lambda x, t: cross_entropy(x, t, 0.1),
    LOGITS,
    TARGETS,
    tolerance=2e-5,
  ),
  op(
    "ce_smoothed",
    lambda x, t: layers.softmax_cross_entropy_with_logits(
      x, t, VOCAB, 0.01, on_value=0.9, off_value=0.02
    ),
    lambda x, t: cross_entropy(x, t, 0.01, 0.9, 0.02),
    LOGITS,
    TARGETS,
    tolerance=2e-5,
  ),
  *[
    op(
      f"ce_smoothed_{classes}_classes",
      lambda x, t, n=classes: layers.softmax_cross_entropy_with_logits(
        x, t, VOCAB, 0.01, on_value=0.9, off_value=0.02, num_classes=n
      ),
      lambda x, t, n=classes: cross_entropy(x, t, 0.01, 0.9, 0.02, n),
      LOGITS,
      TARGETS,
      tolerance=2e-5,
    )
    for classes in (1, 11)
  ],
  op(
    "ce_vocab_first",
    lambda x, t: layers.softmax_cross_entropy_with_logits(x, t, VOCAB, 0.1),
    lambda x, t: cross_entropy(x.transpose(1, 2, 0), t.T, 0.1),
    T("v:16 length:8 b:4", -5, 5),
    TARGETS,
    tolerance=2e-5,
  ),
  op(
    "ce_hidden_part",
    lambda x, t: layers.softmax_cross_entropy_with_logits(hide_padding(x), t, VOCAB),
    masked_ce,
    LOGITS,
    T("b:4 length:8", 0, 5, "int32"),
    tolerance=2e-5,
  ),
  op(
    "ce_int64",
    lambda x, t: layers.softmax_cross_entropy_with_logits(x, t, VOCAB),
    cross_entropy,
    LOGITS,
    T("b:4 length:8", -3, 20, "int64"),
    tolerance=2e-5,
  ),
  op(
    "ce_bfloat16",
    lambda x, t: layers.softmax_cross_entropy_with_logits(x, t, VOCAB, 0.01),
    lambda x, t: cross_entropy(x, t, 0.01),
    T("b:4 length:8 v:16", -5, 5, "bfloat16"),
    TARGETS,
    tolerance=2e-2,
  ),
  op(
    "ce_soft",
    lambda x, t: layers.softmax_cross_entropy_with_logits(x, t, VOCAB, 0.1),
    lambda x, t: soft_cross_entropy(x, t, 0.1),
    LOGITS,
    T("b:4 length:8 v:16", 0, 1),
    tolerance=2e-5,
  ),
  op(
    "sigmoid_ce",
    layers.sigmoid_cross_entropy_with_logits,
    lambda x, z: np.log1p(np.exp(x)) - x * z,
    T("b:4 v:16"),
    T("b:4 v:16", 0, 1),
  ),
  op(
    "weights_nonzero",
    lambda t: layers.weights_nonzero(t),
    lambda t: (t != 0) * 1.0,
    T("b:4 length:8", -2, 3, "int32"),
  ),
  op("standardize", lambda x: layers.standardize(x, VOCAB), normalize, "b:4 v:16"),
  op(
    "standardize_first",
    lambda x: layers.standardize(x, BATCH, 0.1),
    lambda x: normalize(x, 0, 0.1),
    "b:4 v:16",
  ),
  op(
    "rms_normalize",
    lambda x: layers.rms_normalize(x, VOCAB, 0.01),
    lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.01),
    "b:4 v:16",
  ),
  op(
    "rms_normalize_bfloat16",
    lambda x: layers.rms_normalize(x, VOCAB),
    lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6),
    T("b:4 v:16", dtype="bfloat16"),
    tolerance=2e-2,
  ),
  op("layer_norm", lambda x: layers.layer_norm(x, VOCAB), normalize, "b:4 length:8 v:16"),
  op(
    "layer_norm_bfloat16",
    lambda x: layers.layer_norm(x, VOCAB),
    normalize,
    T("b:4 v:16", dtype="bfloat16"),
    tolerance=2e-2,
  ),
  op(
    "batch_norm",
    lambda x: layers.batch_norm(x, True, 0.9)[0],
    batch_normalize,
    "b:4 length:8 v:16",
    tolerance=2e-5,
    differentiable=False,
  ),
  op(
    "corr",
    lambda x: layers.corr(x, ("length", 8)),
    correlation,
    "b:4 length:8 v:16",
    together=("length_1:8 length_2:8 b:4 v:16",),
    gradient_together=("length_1:8 length_2:8 b:4 v:16",),
  ),
  op(
    "compress_mean",
    lambda x: layers.compress_mean(x, LENGTH, 4),
    lambda x: x.reshape(4, 2, 4, 16).mean(2),
    "b:4 length:8 v:16",
  ),
  op(
    "mask_padding",
    lambda x: layers.attention_mask_ignore_padding(x),
    lambda x: np.where(x == 0, -1e9, 0.0),
    IDS,
  ),
  op(
    "mask_autoregressive",
    lambda x: layers.attention_mask_autoregressive(x),
    lambda x: np.where(x[:, :, None] < x[:, None, :], -1e9, 0.0),
    T("b:4 length:8", 0, 9, "int32"),
  ),
  op("mask_segments", lambda x: layers.attention_mask_same_segment(x), segments, IDS),
  op(
    "mask_two_segments",
    lambda x, y: layers.attention_mask_same_segment(x, y),
    lambda x, y: np.where(x[:, :, None] != y[:, None, :], -1e9, 0.0),
    IDS,
    T("b:4 memory_length:4", 0, 3, "int32"),
  ),
  op(
    "attention",
    lambda q, k, v: layers.dot_product_attention(q, k, v, None, False),
    attention,
    "b:4 heads:4 length:8 kv:4",
    "b:4 heads:4 m:8 kv:4",
    "b:4 heads:4 m:8 kv:4",
    together=("b:4 heads:4 length:8 m:8 kv:4",),
    tolerance=2e-5,
  ),
  op(
    "attention_extra_logit",
    lambda q, k, v, m: layers.dot_product_attention(q, k, v, m, False, extra_logit=0.5),
    lambda q, k, v, m: attention(q, k, v, m, 0.5),
    "b:4 heads:4 length:8 kv:4",
    "b:4 heads:4 m:8 kv:4",
    "b:4 heads:4 m:8 kv:4",
    "length:8 m:8",
    together=("b:4 heads:4 length:8 m:8 kv:4",),
    tolerance=2e-5,
  ),
  op(
    "dense",
    lambda x, w: layers.dense(x, F, reduced_dims=[D], kernel_weights=w, activation=mtf.relu),
    lambda x, w: np.maximum(x @ w, 0.0),
    "b:4 d:4",
    "d:4 f:8",
    together=("b:4 d:4 f:8",),
  ),
  op(
    "dense_experts",
    lambda x, w: layers.dense(
      x, [F], reduced_dims=[D], expert_dims=[E], kernel_weights=w, use_bias=True
    ),
    lambda x, w: np.einsum("bed,edf->bef", x, w),
    "b:4 e:4 d:4",
    "e:4 d:4 f:8",
    together=("b:4 e:4 d:4 f:8",),
  ),
]
