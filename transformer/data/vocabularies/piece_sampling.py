"""Random cuts of texts into the pieces of a SentencePiece model, a function of the seed.

BPE-dropout (Provilkov et al., 2020) and samples of a unigram model (Kudo, 2018), as SentencePiece
draws them: its own random numbers differ from process to process, whatever seed it is given.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

_MARK = "\u2581"  # Stands for a blank in pieces and normalized texts.
_KEPT_WORDS = 1 << 15  # Of so many distinct words the work is kept,
_LONGEST_KEPT = 32  # if they have no more characters.
_DRAWS = 1 << 12  # Random numbers drawn at a time.
_UNKNOWN_PENALTY = 10.0  # An unknown character scores so much less than the least piece.

# Types of pieces in SentencePiece's model files.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class PieceSampler:
  """Cuts normalized texts into pieces at random.

  Args:
    pieces: text, score and type of each piece, in the order of ids.
    unigram: True for a unigram model, False for BPE.
  """

  def __init__(self, pieces: Sequence[tuple[str, float, int]], unigram: bool):
    def ids(*types: int) -> dict[str, int]:
      return {piece: i for i, (piece, _, kind) in enumerate(pieces) if kind in types}

    self._costs = {piece: -score for piece, score, _ in pieces}
    self._symbols, self._unused, self._bytes = ids(USER_DEFINED), ids(UNUSED), ids(BYTE)
    # BPE builds pieces of unused ones, and takes these apart in the end.
    self._ids = ids(NORMAL) if unigram else ids(NORMAL, UNUSED)
    (self._unknown,) = ids(UNKNOWN).values()
    self._longest = max(map(len, self._ids), default=1)
    self._unknown_score = min(s for _, s, kind in pieces if kind == NORMAL) - _UNKNOWN_PENALTY
    # The longest symbol that begins at a place is taken, and never cut.
    longest_first = sorted(self._symbols, key=len, reverse=True)
    self._symbol = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
    # A word with the marks before it is cut alone, if no piece reaches into the next one.
    by_words = not any(re.search(f"[^{_MARK}]{_MARK}", piece) for piece in self._ids)
    self._unit = re.compile(f"{_MARK}*[^{_MARK}]+|{_MARK}+" if by_words else "(?s).+")
    self._kept_best_cut, self._kept_lattice = _kept(self._best_cut), _kept(self._lattice)
    self._cutter = self._unigram_cutter if unigram else self._bpe_cutter

  def sample(self, texts: Sequence[str], alpha: float, seed: Sequence[int]) -> list[list[int]]:
    """Ids of the pieces of each text.

    Args:
      texts: normalized texts, with U+2581 for blanks.
      alpha: of BPE the probability that a merge is left out; of unigram pieces the exponent of the
        probabilities of cuts.
      seed: whole numbers from 0 on.
    """
    cut = self._cutter(alpha, np.random.default_rng(list(seed)))
    return [self._ids_of_text(text, cut) for text in texts]

  def _ids_of_text(self, text: str, cut: Callable[[str], list[int]]) -> list[int]:
    ids: list[int] = []
    # Behind each part without symbols is a symbol, but for the last part.
    for number, part in enumerate(self._symbol.split(text) if self._symbols else [text]):
      if number % 2:
        ids.append(self._symbols[part])
      else:
        for unit in self._unit.findall(part):
          ids += cut(unit)
    if self._unknown in ids:  # Of several in a row one is left.
      ids = [i for i, before in zip(ids, [None, *ids]) if not i == before == self._unknown]
    return ids

  def _ids_of_unknown(self, character: str) -> list[int]:
    if not self._bytes:
      return [self._unknown]
    return [self._bytes[f"<0x{byte:02X}>"] for byte in character.encode()]

  # ----------------------------------------------------------------------------------------- BPE

  def _bpe_cutter(self, alpha: float, rng: np.random.Generator) -> Callable[[str], list[int]]:
    merges_left = _MergesLeft(alpha, rng)

    def cut(unit: str) -> list[int]:
      ids, merges = self._kept_best_cut(unit)
      if merges > merges_left.until_dropped:
        return self._merged(unit, merges_left.drops_next)
      merges_left.until_dropped -= merges
      return ids

    return cut

  def _best_cut(self, unit: str) -> tuple[list[int], int]:
    """The ids of a unit with all merges, and the number of these."""
    merges = itertools.count()
    ids = self._merged(unit, lambda: next(merges) < 0)
    return ids, next(merges)

  def _merged(self, unit: str, drops_next: Callable[[], bool]) -> list[int]:
    """The ids of a unit: neighbours are merged, the best pair first, unless that is dropped."""
    parts = list(unit)  # A part that was merged into its left neighbour is "".
    end = len(parts)
    left_of, right_of = list(range(-1, end)), list(range(1, end + 1))
    agenda: list[tuple[float, int, int, str]] = []
    halves: dict[str, tuple[str, str]] = {}  # Of unused pieces.

    def add(left: int, right: int) -> None:
      if left < 0 or right == end:
        return
      piece = parts[left] + parts[right]
      if piece in self._ids:
        heapq.heappush(agenda, (self._costs[piece], left, right, piece))
        if piece in self._unused:
          halves[piece] = parts[left], parts[right]

    def ids_of(part: str) -> list[int]:
      if part in halves:
        return [i for half in halves[part] for i in ids_of(half)]
      return [self._ids[part]] if part in self._ids else self._ids_of_unknown(part)

    for right in range(1, end):
      add(right - 1, right)
    while agenda:
      _, left, right, piece = heapq.heappop(agenda)
      # One of the two may be part of another piece by now.
      if not parts[left] or not parts[right] or parts[left] + parts[right] != piece:
        continue
      if drops_next():
        continue
      parts[left], parts[right] = piece, ""
      right_of[left] = right_of[right]
      left_of[right_of[right]] = left
      add(left_of[left], left)
      add(left, right_of[left])
    return [i for part in parts if part for i in ids_of(part)]

  # ------------------------------------------------------------------------------------- unigram

  def _unigram_cutter(self, alpha: float, rng: np.random.Generator) -> Callable[[str], list[int]]:
    draws = _endless(rng.random)

    def cut(unit: str) -> list[int]:
      lattice = self._kept_lattice(unit, alpha)
      backwards: list[list[int]] = []
      at = len(unit)
      while at:
        starts, ids, cumulative = lattice[at]
        chosen = bisect.bisect_right(cumulative, next(draws), hi=len(starts) - 1)
        backwards.append(ids[chosen])
        at = starts[chosen]
      return [i for piece in reversed(backwards) for i in piece]

    return cut

  def _lattice(
    self, unit: str, alpha: float
  ) -> list[tuple[list[int], list[list[int]], list[float]]]:
    """The pieces that end at each place: where they start, their ids, cumulative probabilities.

    The probability is that of the last piece of a random cut of the unit up to there.
    """
    result = []
    forward = [0.0]  # Logarithm of the sum over all cuts up to each place.
    for end in range(1, len(unit) + 1):
      starts, ids, weights = [], [], []
      for start in range(max(0, end - self._longest), end):
        piece = unit[start:end]
        known = piece in self._ids
        if known or end - start == 1:
          score = -self._costs[piece] if known else self._unknown_score
          starts.append(start)
          ids.append([self._ids[piece]] if known else self._ids_of_unknown(piece))
          weights.append(forward[start] + alpha * score)
      most = max(weights)
      cumulative = list(itertools.accumulate(math.exp(w - most) for w in weights))
      forward.append(most + math.log(cumulative[-1]))
      result.append((starts, ids, [c / cumulative[-1] for c in cumulative]))
    return [([], [], []), *result]


class _MergesLeft:
  """Drops merges independently of each other with probability `alpha`.

  Attributes:
    until_dropped: number of merges that are made before the next one that is dropped.
  """

  def __init__(self, alpha: float, rng: np.random.Generator):
    never = itertools.repeat(math.inf)
    self._gaps = _endless(lambda size: rng.geometric(alpha, size) - 1) if alpha else never
    self.until_dropped = next(self._gaps)

  def drops_next(self) -> bool:
    """True if the next merge is dropped, which is counted."""
    if self.until_dropped:
      self.until_dropped -= 1
      return False
    self.until_dropped = next(self._gaps)
    return True


def _kept(of_unit: Callable[..., T]) -> Callable[..., T]:
  kept = functools.lru_cache(_KEPT_WORDS)(of_unit)
  return lambda unit, *args: (kept if len(unit) <= _LONGEST_KEPT else of_unit)(unit, *args)


def _endless(draw: Callable[[int], np.ndarray]) -> Iterator[float]:
  while True:
    yield from draw(_DRAWS).tolist()
