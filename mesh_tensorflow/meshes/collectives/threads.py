"""Eager execution of a per-device program: one Python thread per processor.

The threads meet at each collective, and take turns between them: one runs until it waits for
others. Eager TensorFlow (2.16 to 2.21) mixes up the inputs of operations that two threads run at
once on one device other than the first CPU, such as the shapes of two `tf.fill`; and the thread
that creates a variable works on the devices of all. Whatever goes wrong on one processor ends the
run on all of them, and says which processor it was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from mesh_tensorflow.errors import CollectiveError
from mesh_tensorflow.meshes.collectives.base import Collectives, Groups, fold

_LOG = logging.getLogger("mesh_tensorflow")

# Time limit for the other threads to end after one has failed.
_GRACE_SECONDS = 10.0

_T = TypeVar("_T")


class _Stopped(Exception):
  """Raised in a thread to end it after another one failed."""


class Meeting:
  """Rendezvous of the threads of one run: they take turns, and exchange values.

  Args:
    timeout_seconds: a thread that waits for others raises after so long without any progress.
  """

  def __init__(self, timeout_seconds: float):
    self._timeout = float(timeout_seconds)
    self._changed = threading.Condition()
    # The processor that runs; the others wait for their turn, or for values.
    self._running: int | None = None
    self._changed_at = time.monotonic()
    # (axes, group number, how many exchanges before) -> {pnum: (what, value)}
    self._posted: dict[Any, dict[int, tuple[str, Any]]] = {}
    self._read: dict[Any, int] = {}
    self._finished: set[int] = set()
    self.failure: tuple[int, BaseException] | None = None
    self.failed_at = 0.0

  def begin(self, pnum: int) -> None:
    """Waits for the first turn of a processor."""
    with self._changed:
      self._wait_for_turn(pnum)

  def fail(self, pnum: int, error: BaseException) -> None:
    """Ends the run on every processor."""
    with self._changed:
      if self.failure is None:
        self.failure = (pnum, error)
        self.failed_at = time.monotonic()
      self._end_turn(pnum)

  def finish(self, pnum: int) -> None:
    """Marks the program of a processor as finished."""
    with self._changed:
      self._finished.add(pnum)
      self._end_turn(pnum)

  def _end_turn(self, pnum: int) -> None:
    if self._running == pnum:
      self._running = None
    self._tell()

  def _tell(self) -> None:
    self._changed_at = time.monotonic()
    self._changed.notify_all()

  def _wait_for_turn(self, pnum: int) -> None:
    while self._running is not None and self.failure is None:
      left = self._changed_at + self._timeout - time.monotonic()
      if left <= 0:
        raise CollectiveError(
          f"processor {pnum} waits for its turn, but processor {self._running} did not come within "
          f"{self._timeout:g} s to a collective or to its end"
        )
      self._changed.wait(left)
    if self.failure:
      raise _Stopped
    self._running = pnum
    self._changed_at = time.monotonic()

  def exchange(self, pnum: int, groups: Groups, turn: int, what: str, value: _T) -> list[_T]:
    """Posts a value; returns those of all members of the group, in order of rank.

    Raises:
      CollectiveError: a member does something else, is finished, or does not come.
    """
    group = groups.group(pnum)
    key = (groups.axes, groups.number(pnum), turn)
    with self._changed:
      posted = self._posted.setdefault(key, {})
      posted[pnum] = (what, value)
      if len(posted) < len(group):
        self._end_turn(pnum)
        self._wait_for_others(pnum, groups, what, posted)
        self._wait_for_turn(pnum)
      else:
        self._tell()
      values = [posted[p] for p in group]
      self._read[key] = self._read.get(key, 0) + 1
      # The last reader clears up: values would stay in memory until the end of the run.
      if self._read[key] == len(group):
        del self._posted[key], self._read[key]
      for p, (other, _) in zip(group, values):
        if other != what:
          raise CollectiveError(
            f"processor {pnum} is in {what} along {groups.name}, but processor {p} is in {other}; "
            "every processor must run the same collectives in the same order"
          )
    return [v for _, v in values]

  def _wait_for_others(
    self, pnum: int, groups: Groups, what: str, posted: Mapping[int, tuple[str, object]]
  ) -> None:
    group = groups.group(pnum)
    while len(posted) < len(group):
      if self.failure:
        raise _Stopped
      missing = [p for p in group if p not in posted]
      gone = [p for p in missing if p in self._finished]
      left = self._changed_at + self._timeout - time.monotonic()
      if gone or left <= 0:
        why = "finished without it" if gone else f"did not come within {self._timeout:g} s"
        raise CollectiveError(
          f"processor {pnum} waits in {what} for the other processors along {groups.name}, "
          f"but {_list(gone or missing)} {why}; every processor must run the same collectives "
          "in the same order"
        )
      self._changed.wait(left)


def _list(pnums: Sequence[int]) -> str:
  return f"processor{'s' * (len(pnums) > 1)} " + ", ".join(map(str, pnums))


class ThreadCollectives(Collectives):
  """The collectives of one thread.

  Args:
    meeting: the `Meeting` of the run.
    pnum: the processor number.
  """

  def __init__(self, meeting: Meeting, pnum: int):
    super().__init__(pnum)
    self._meeting = meeting
    self._turns: dict[tuple[int, ...], int] = {}

  def _exchange(self, groups: Groups, what: str, value: _T) -> list[_T]:
    turn = self._turns.get(groups.axes, 0)
    # Pairs the k-th exchange of one processor with the k-th of the others, along the same axes.
    self._turns[groups.axes] = turn + 1
    return self._meeting.exchange(self.pnum, groups, turn, what, value)

  def all_reduce(self, x: tf.Tensor, groups: Groups, reduction: str) -> tf.Tensor:
    return fold(self._exchange(groups, f"allreduce {reduction} of {_kind(x)}", x), reduction)

  def all_gather(self, x: tf.Tensor, groups: Groups) -> list[tf.Tensor]:
    return self._exchange(groups, f"allconcat of {_kind(x)}", x)

  def all_to_all(self, parts: Sequence[tf.Tensor], groups: Groups) -> list[tf.Tensor]:
    rank = groups.rank(self.pnum)
    rows = self._exchange(groups, f"alltoall of {len(parts)} parts {_kind(parts[0])}", list(parts))
    return [row[rank] for row in rows]

  def permute(self, x: tf.Tensor, groups: Groups, source: Sequence[int | None]) -> tf.Tensor:
    values = self._exchange(groups, f"receive of {_kind(x)} from {list(source)}", x)
    wanted = source[groups.rank(self.pnum)]
    return tf.zeros_like(x) if wanted is None else tf.identity(values[wanted])


def _kind(x: tf.Tensor) -> str:
  return f"{x.dtype.name}{x.shape.as_list()}"


def run_in_threads(
  program: Callable[[int, Collectives], object], pnums: Sequence[int], timeout_seconds: float
) -> list[Any]:
  """Runs a program on every processor, each in a thread of its own.

  Args:
    program: `program(pnum, collectives)`.
    pnums: the processors.
    timeout_seconds: how long a processor may run between two collectives.

  Returns:
    What the program returned, for each processor.

  Raises:
    Exception: the first that the program raised on any processor, with a note that says
      on which.
  """
  meeting = Meeting(timeout_seconds)
  results: dict[int, Any] = {}

  def work(pnum: int) -> None:
    try:
      meeting.begin(pnum)
      results[pnum] = program(pnum, ThreadCollectives(meeting, pnum))
      meeting.finish(pnum)
    except _Stopped:
      pass
    except BaseException as e:  # Also KeyboardInterrupt and SystemExit: the others must end.
      meeting.fail(pnum, e)

  threads = [
    threading.Thread(target=work, args=(p,), name=f"mtf-processor-{p}", daemon=True) for p in pnums
  ]
  for t in threads:
    t.start()
  try:
    for t in threads:
      while t.is_alive():
        t.join(1.0)
        if meeting.failure and time.monotonic() > meeting.failed_at + _GRACE_SECONDS:
          break  # It is stuck outside the collectives.
  except BaseException as e:
    meeting.fail(-1, e)
    raise
  if meeting.failure:
    pnum, error = meeting.failure
    note = f"on processor {pnum} of {len(pnums)}"
    if hasattr(error, "add_note"):
      error.add_note(note)
    _LOG.error("%s: %s: %s", note, type(error).__name__, error)
    raise error
  return [results[p] for p in pnums]
