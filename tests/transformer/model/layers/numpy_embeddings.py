"""NumPy mirrors of the embeddings of tokens and of their logits."""

from __future__ import annotations

import numpy as np


def rows(table, ids):
  """Rows of a table; zeros for ids out of range."""
  inside = (ids >= 0) & (ids < len(table))
  return np.where(inside[..., None], table[np.where(inside, ids, 0)], 0.0)


def log_softmax(x, axis=-1):
  x = x - x.max(axis, keepdims=True)
  return x - np.log(np.exp(x).sum(axis, keepdims=True))


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def scaled(hidden):
  return hidden / np.sqrt(hidden.shape[-1])


def mixture_of_softmaxes(hidden, embedding, mixture, context):
  """Log of a weighted sum of probabilities."""
  h = scaled(hidden)
  weights = np.exp(log_softmax(h @ mixture.T))
  total = 0.0
  for k in range(len(mixture)):
    probs = np.exp(log_softmax(np.tanh(h @ context[k]) @ embedding.T))
    total = total + weights[..., k : k + 1] * probs
  return np.log(total)


def mixtape(
  hidden, embedding, context, context_bias, prior, prior_bias, vocab_vector, gates_vector, bias,
  extra_ids=0,
):  # fmt: skip
  """Token by token."""
  h = scaled(hidden)
  vectors = [np.tanh(h @ context[k] + context_bias[k]) for k in range(4)]
  hidden_gates = [np.tanh(h @ prior[k].T + prior_bias[k]) for k in range(3)]
  logits = []
  for token, row in enumerate(embedding):
    gates = []
    for k in range(3):
      gate = h @ gates_vector[k]
      if token < len(vocab_vector):
        gate = gate + hidden_gates[k] @ vocab_vector[token] + bias[token, k]
      gates.append(sigmoid(gate))
    g0, g1, g2 = gates
    weights = [g0 * g1, g0 * (1 - g1), (1 - g0) * g2, (1 - g0) * (1 - g2)]
    logits.append(sum(w * (v @ row) for w, v in zip(weights, vectors)))
  return np.stack(logits[extra_ids:] + logits[:extra_ids], -1)


def head_and_tails(hidden, head, tails, head_ids):
  """Log probabilities of all tokens: those of the head, then tail after tail."""
  in_head = log_softmax(scaled(hidden) @ head.T)
  parts = [in_head[..., :head_ids]]
  for i, tail in enumerate(tails):
    node = in_head[..., head_ids + i]
    parts.append(node[..., None] + log_softmax(scaled(hidden) @ tail.T))
  return np.concatenate(parts, -1)


def adaptive_loss(hidden, targets, head, tails, head_ids, z_loss=0.0, factors=None):
  """The sum over clusters of mean losses, target by target."""
  factors = factors or [1.0] * len(tails)
  batch, length = targets.shape

  def loss(table, h, row):
    logits = scaled(h) @ table.T
    log_z = np.log(np.exp(logits).sum())
    return log_z - logits[row] + z_loss * log_z**2

  starts = np.cumsum([head_ids] + [len(t) for t in tails])
  total = 0.0
  for i, (tail, factor) in enumerate(zip(tails, factors)):
    room = int(np.ceil(factor * length))
    summed = 0.0
    for b in range(batch):
      positions = [p for p in range(length) if starts[i] <= targets[b, p] < starts[i + 1]]
      for p in positions[:room]:
        summed = summed + loss(tail, hidden[b, p], targets[b, p] - starts[i])
    total = total + summed / (batch * room)
  summed = 0.0
  for b in range(batch):
    for p in range(length):
      target = targets[b, p]
      if target > 0:
        tail = int(np.searchsorted(starts, target, side="right"))
        summed = summed + loss(head, hidden[b, p], target if tail == 0 else head_ids + tail - 1)
  return total + summed / (batch * length)
