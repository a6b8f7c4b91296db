"""Continuous batching: a scheduler that refills slots, and sliding context windows."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

from mesh_tensorflow.decoding.token_choice import row_keys
from mesh_tensorflow.transformer.generation.prefill_decode import Batch, DecodePrograms


@dataclasses.dataclass(eq=False)
class Row:
  """A request: a prompt and its continuation.

  Attributes:
    number: number of the row in this run; with the seed it determines the random draws.
    given: the ids of the prompt.
    limit: maximum number of new tokens.
    new: the new ids so far, without EOS.
    window: index into `ids` at which the model's context begins.
    ended: True if the row is complete.
  """

  number: int
  given: Sequence[int]
  limit: int
  new: list[int] = dataclasses.field(default_factory=list)
  window: int = 0
  ended: bool = False

  @property
  def ids(self) -> list[int]:
    """All ids: the prompt's and the new ones."""
    return [*self.given, *self.new]


# Called with a row that has new tokens or has ended; returns True to end the row here.
Listener = Callable[[Row], bool]


class BatchScheduler:
  """Scheduler of decoding: runs rows in as many slots as the programs have.

  *Slots.* A row that has ended leaves its slot empty until at least half of the slots are empty.
  Then waiting rows take the empty slots, and are prefilled together.

  *Sliding window.* The context has `length` tokens. A row that has filled it drops the first
  quarter and is prefilled again with the rest, at new positions. So learned positions stay within
  their table, and the cache never depends on tokens that have left the window.

  The result of a row depends on the seed, its number and its tokens. (The last bits of its logits
  may depend on the batch size of a program; how rows are batched depends on the rows alone.)

  Args:
    programs: a `DecodePrograms`.
    seed: the sampling seed.
    listener: called with a row whenever it has new tokens, and when it has ended.
  """

  def __init__(self, programs: DecodePrograms, seed: int, listener: Listener | None = None):
    self._programs, self._seed, self._listener = programs, seed, listener
    self._slots: list[Row | None] = [None] * programs.rows
    self._batch = Batch.empty(programs.rows, programs.length)
    self._seen = np.zeros([programs.rows, programs.vocab_size * programs.needs_seen], bool)
    self._cache: list[tf.Tensor] = []
    self._expected = 1

  def run(self, rows: Iterable[Row], most: Callable[[], int] | int) -> None:
    """Decodes all rows to their ends.

    Args:
      rows: rows whose prompts fit into the context.
      most: maximum number of tokens per row and decode call, or a function that returns it.
    """
    waiting = deque(rows)
    self._expected = max((len(row.given) for row in waiting), default=1)
    size = len(self._slots)
    while True:
      active = sum(row is not None for row in self._slots)
      if not active and not waiting:
        return
      new = self._slide()
      if waiting and active <= size // 2:
        new += self._fill(waiting)
      if new:
        self._prefill(new)
      active = sum(row is not None for row in self._slots)
      least = min(size // 2, active - 1) if waiting else 0
      self._decode(most() if callable(most) else most, least)

  def _fill(self, waiting: deque[Row]) -> list[int]:
    """Moves waiting rows into empty slots; returns these slots."""
    filled = [i for i, row in enumerate(self._slots) if row is None][: len(waiting)]
    for i in filled:
      self._slots[i] = waiting.popleft()
    return filled

  def _slide(self) -> list[int]:
    """Slides the windows that are full; returns their slots."""
    length, slid = self._programs.length, []
    for i, row in enumerate(self._slots):
      if row is not None and len(row.given) + len(row.new) - row.window >= length:
        row.window += max(1, length // 4)
        slid.append(i)
    return slid

  def _prefill(self, slots: list[int]) -> None:
    """Prefills the windows of the rows in some slots."""
    batch = self._batch
    for i in slots:
      row = self._slots[i]
      assert row is not None  # Only for the type checker: slots that were just filled or slid.
      ids = row.ids
      if self._programs.needs_seen:
        self._seen[i] = False
        self._seen[i, ids] = True
      ids = ids[row.window :]
      batch.ids[i] = 0
      batch.ids[i, : len(ids)] = ids
      batch.positions[i] = len(ids)
      batch.counts[i], batch.limits[i], batch.active[i] = len(row.new), row.limit, 1
      batch.keys[i : i + 1] = row_keys(self._seed, [row.number])
    self._cache = self._programs.prefill(batch, slots, self._cache, self._expected)

  def _decode(self, most: int, least_active: int) -> None:
    before = self._batch.positions.copy()
    self._cache = self._programs.decode(self._batch, self._cache, most, least_active, self._seen)
    eos = self._programs.options.eos_id
    batch = self._batch
    for i, row in enumerate(self._slots):
      if row is None:
        continue
      new = batch.ids[i, before[i] : batch.positions[i]].tolist()
      if new and new[-1] == eos:
        new.pop()
        row.ended = True
      row.new += new
      if self._programs.needs_seen:
        self._seen[i, new] = True
      row.ended |= len(row.new) >= row.limit
      if self._listener is not None and self._listener(row):
        row.ended = True
      if row.ended:
        self._slots[i] = None
        batch.active[i] = 0


def continue_rows(
  programs: DecodePrograms,
  rows: Sequence[Row],
  seed: int,
  most: Callable[[], int] | int,
  listener: Listener | None = None,
) -> None:
  """Decodes rows to their ends; see `BatchScheduler`.

  Args:
    programs: a `DecodePrograms`.
    rows: rows whose prompts are shorter than its length; their `new` is filled.
    seed: the sampling seed.
    most: maximum number of tokens per row and decode call, or a function that returns it.
    listener: see `BatchScheduler`.
  """
  BatchScheduler(programs, seed, listener).run([r for r in rows if r.limit > 0], most)
