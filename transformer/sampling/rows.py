"""Many rows continued by one `Continuation`: places are filled again, and windows slide."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

from mesh_tensorflow.decoding.token_choice import row_keys
from mesh_tensorflow.transformer.programs.continuation import Batch, Continuation


@dataclasses.dataclass(eq=False)
class Row:
  """A prompt and what follows it.

  Attributes:
    number: tells rows of a run apart: with the seed it decides what is drawn.
    given: the ids of the prompt.
    limit: new tokens at most.
    new: the new ids so far; the end of sequence is not among them.
    window: the first of all ids that the model sees.
    ended: whether there will be no more.
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


# Told of new tokens of a row, or of its end; returns whether the row is to stop here.
Listener = Callable[[Row], bool]


class RowsInProgress:
  """Continues rows, as many at a time as the programs take.

  *Places.* A row that has ended leaves its place empty until half of all are empty, or none is
  active; then rows that wait take them, and the model looks at all of these at once.

  *Windows.* The model sees `length` tokens. A row that has filled them goes on with the last three
  quarters: its first tokens are forgotten, and the others, which have other positions now, are
  looked at anew. So learned positions end where the table ends, and keys of relative or rotary
  positions are never older than the tokens that made them.

  What a row gets depends on the seed, its number and its tokens. (The last bits of logits may
  depend on how many rows a program looks at; which ones meet depends on the rows alone.)

  Args:
    programs: a `Continuation`.
    seed: of the draws.
    listener: called with a row whenever it has new tokens, and when it has ended.
  """

  def __init__(self, programs: Continuation, seed: int, listener: Listener | None = None):
    self._programs, self._seed, self._listener = programs, seed, listener
    self._places: list[Row | None] = [None] * programs.rows
    self._batch = Batch.empty(programs.rows, programs.length)
    self._seen = np.zeros([programs.rows, programs.vocab_size * programs.needs_seen], bool)
    self._states: list[tf.Tensor] = []
    self._expected = 1

  def run(self, rows: Iterable[Row], most: Callable[[], int] | int) -> None:
    """Continues all rows to their ends.

    Args:
      rows: rows whose prompts fit.
      most: tokens of a row in one call at most, or a function that says it before each call.
    """
    waiting = deque(rows)
    self._expected = max((len(row.given) for row in waiting), default=1)
    size = len(self._places)
    while True:
      active = sum(row is not None for row in self._places)
      if not active and not waiting:
        return
      new = self._slide()
      if waiting and active <= size // 2:
        new += self._fill(waiting)
      if new:
        self._look(new)
      active = sum(row is not None for row in self._places)
      least = min(size // 2, active - 1) if waiting else 0
      self._call(most() if callable(most) else most, least)

  def _fill(self, waiting: deque[Row]) -> list[int]:
    """Puts rows that wait into empty places, and says which these were."""
    filled = [i for i, row in enumerate(self._places) if row is None][: len(waiting)]
    for i in filled:
      self._places[i] = waiting.popleft()
    return filled

  def _slide(self) -> list[int]:
    """Moves the windows that are full, and says at which places."""
    length, slid = self._programs.length, []
    for i, row in enumerate(self._places):
      if row is not None and len(row.given) + len(row.new) - row.window >= length:
        row.window += max(1, length // 4)
        slid.append(i)
    return slid

  def _look(self, places: list[int]) -> None:
    """Has the model see the windows of the rows at some places."""
    batch = self._batch
    for i in places:
      row = self._places[i]
      assert row is not None  # Only for the type checker: places that were just filled or slid.
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
    self._states = self._programs.start(batch, places, self._states, self._expected)

  def _call(self, most: int, least_active: int) -> None:
    before = self._batch.positions.copy()
    self._states = self._programs.go_on(self._batch, self._states, most, least_active, self._seen)
    eos = self._programs.options.eos_id
    batch = self._batch
    for i, row in enumerate(self._places):
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
        self._places[i] = None
        batch.active[i] = 0


def continue_rows(
  programs: Continuation,
  rows: Sequence[Row],
  seed: int,
  most: Callable[[], int] | int,
  listener: Listener | None = None,
) -> None:
  """Continues rows to their ends; see `RowsInProgress`.

  Args:
    programs: a `Continuation`.
    rows: rows whose prompts are shorter than its length; their `new` is filled.
    seed: of the draws.
    most: tokens of a row between two looks at all of them, or a function that says it.
    listener: see `RowsInProgress`.
  """
  RowsInProgress(programs, seed, listener).run([r for r in rows if r.limit > 0], most)
