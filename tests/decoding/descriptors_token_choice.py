"""Filters of logits and draws of tokens, against their formulas, on drawn layouts."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.decoding import token_choice
from mesh_tensorflow.decoding.token_choice import TokenChoice
from mesh_tensorflow.numerics import random_bits
from tests.conformance.framework import T, op

VOCAB = mtf.Dimension("vocab", 16)
LOGITS = T("batch:4 vocab:16", -4.0, 4.0)
SEEN = T("batch:4 vocab:16", 0, 2, "bool")
KEYS, COUNTS = T("batch:4", -(2**31), 2**31 - 1, "int32"), T("batch:4", 0, 50, "int32")
# Ties at the edge of what is kept: all of them stay, wherever they are.
TIES = T("batch:4 vocab:16", values=np.log([[4, 4, 2, 2, 2, 2] + [1] * 10] * 4).astype(np.float32))
GOLDEN = 0x9E3779B9


def finite(logits):
  """-inf as a number that can be compared."""
  return mtf.maximum(logits, -1e9)


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def keep(x, kept):
  return np.where(kept, x, -1e9)


def top_k(x, k):
  return keep(x, x >= np.sort(x, -1)[:, -k][:, None])


def top_p(x, p):
  """Sorted, the shortest beginning of at least p; and what is as likely as its last."""
  probabilities = softmax(x)
  result = np.full_like(x, -1e9)
  for row, values, logits in zip(result, probabilities, x):
    ordered = np.sort(values)[::-1]
    n = int(np.searchsorted(np.cumsum(ordered), p * (1 - 1e-9))) + 1
    kept = values >= ordered[n - 1] * (1 - 1e-9)
    row[kept] = logits[kept]
  return result


def min_p(x, p):
  probabilities = softmax(x)
  return keep(x, probabilities >= p * probabilities.max(-1, keepdims=True))


def repetition(x, seen, penalty=1.5):
  return np.where(seen, np.where(x > 0, x / penalty, x * penalty), x)


def mix(x):
  return np.array([random_bits.mix_int(int(i)) for i in np.ravel(x)], np.uint64).reshape(x.shape)


def gumbel(x, keys, counts):
  word = 0xFFFFFFFF
  row = keys.astype(np.int64) & word
  row = mix(row ^ (counts.astype(np.int64) * (3 * GOLDEN & word) & word)).astype(np.int64)
  row = mix((row + GOLDEN) & word).astype(np.int64)
  token = np.arange(x.shape[1]) * (5 * GOLDEN & word) & word
  bits = mix(row[:, None] ^ token).astype(np.int64) >> 9
  return -np.log(-np.log((bits + 0.5) * 2.0**-23))


CHOICE = TokenChoice(0.7, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.5)


def filtered(x, seen):
  """In this order; each filter sees what the ones before it left."""
  x = repetition(x, seen) / CHOICE.temperature
  return min_p(top_p(top_k(x, CHOICE.top_k), CHOICE.top_p), CHOICE.min_p)


def chosen(x, seen, keys, counts):
  return np.argmax(filtered(x, seen) + gumbel(x, keys, counts), -1).astype(np.int32)


def _filter(name, fn, reference, *inputs):
  return op(f"choice_{name}", lambda *xs: finite(fn(*xs)), reference, *inputs, differentiable=False)


DESCRIPTORS = [
  _filter("top_k", lambda x: token_choice.keep_top_k(x, VOCAB, 3), lambda x: top_k(x, 3), LOGITS),
  _filter("top_k_tie", lambda x: token_choice.keep_top_k(x, VOCAB, 3), lambda x: top_k(x, 3), TIES),
  _filter(
    "top_p", lambda x: token_choice.keep_top_p(x, VOCAB, 0.6), lambda x: top_p(x, 0.6), LOGITS,
  ),
  _filter(
    "min_p", lambda x: token_choice.keep_min_p(x, VOCAB, 0.1), lambda x: min_p(x, 0.1), LOGITS,
  ),
  _filter(
    "repetition_penalty", lambda x, s: token_choice.penalize_repetitions(x, s, 1.5), repetition,
    LOGITS, SEEN,
  ),
  _filter(
    "gumbel", lambda *xs: token_choice.gumbel_noise(xs[0], VOCAB, *xs[1:]), gumbel,
    LOGITS, KEYS, COUNTS,
  ),
  op(
    "choose_likeliest_token",
    lambda x, k, c: token_choice.choose_token(x, VOCAB, TokenChoice(0.0, top_k=3), k, c),
    lambda x, k, c: np.argmax(x, -1).astype(np.int32), LOGITS, KEYS, COUNTS, differentiable=False,
  ),
]  # fmt: skip
