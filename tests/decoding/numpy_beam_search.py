"""Beam search as it is told in words, on Python lists: what the package's must be equal to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

INF = 1e7


def penalty(length: int, alpha: float, name: str = "gnmt") -> float:
  """By what the log probability of a sequence is divided."""
  return {"gnmt": (5.0 + length) / 6.0, "power": float(max(length, 1))}[name] ** alpha


def padded(
  found: Sequence[tuple[float, tuple[int, ...]]], beam: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Ids and scores of (score, sequence) pairs; empty places as the search gives them."""
  found = [*found[:beam], *[(-INF, ())] * (beam - len(found))]
  ids = [list(s) + [0] * (length - len(s)) for _, s in found]
  return np.array(ids, np.int32), np.array([score for score, _ in found])


def search(
  log_probs: Callable[[int, tuple[int, ...]], np.ndarray],
  batch: int,
  beam: int,
  length: int,
  alpha: float,
  end: int = 1,
  limit: int | None = None,
  stop_early: bool = True,
  length_penalty: str = "gnmt",
) -> tuple[np.ndarray, np.ndarray, int]:
  """Searches.

  Args:
    log_probs: (row of the batch, tokens so far) -> log probabilities of the next token.
    batch: number of rows.
    beam: number of places.
    length: of the returned sequences.
    alpha: exponent of the length penalty.
    end: the token that ends a sequence.
    limit: number of steps, if less than the length.
    stop_early: whether to stop when no finished sequence can be surpassed.
    length_penalty: its name.

  Returns:
    Ids [batch, beam, length], scores [batch, beam], and the number of steps made.
  """
  limit = length if limit is None else limit
  alive = [[(0.0, ())] for _ in range(batch)]
  finished = [[] for _ in range(batch)]
  steps = 0

  def settled(row):
    best = alive[row][0][0] / penalty(limit, alpha, length_penalty) if alive[row] else -np.inf
    return len(finished[row]) == beam and finished[row][-1][0] > best

  while steps < limit and not (stop_early and all(settled(r) for r in range(batch))):
    for row in range(batch):
      extended = [
        (score + p, (*sequence, token))
        for score, sequence in alive[row]
        for token, p in enumerate(log_probs(row, sequence))
      ]
      extended = sorted(extended, key=lambda x: -x[0])[: 2 * beam]
      complete = [
        (s / penalty(len(seq), alpha, length_penalty), seq) for s, seq in extended if seq[-1] == end
      ]
      finished[row] = sorted(finished[row] + complete, key=lambda x: -x[0])[:beam]
      alive[row] = [x for x in extended if x[1][-1] != end][:beam]
    steps += 1
  rows = [padded(f or a, beam, length) for f, a in zip(finished, alive)]
  return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows]), steps
