"""File accesses by the chief alone: it reads or writes, and broadcasts the result or the error."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mesh_tensorflow import errors, workers
from mesh_tensorflow.checkpoint.meeting import of_chief, told_to_all

# Seconds between meetings of workers that wait.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 5.0


def by_chief(function: Callable[[], Any]) -> Any:
  """Calls a function in the chief and broadcasts its result; a collective call of all workers.

  The function may take hours. It must not wait for other workers itself.

  Args:
    function: returns a JSON-like value.

  Returns:
    The function's result, in every worker.

  Raises:
    MeshError: the chief's error; the others raise one of the same kind, which names the chief.
  """
  cluster = workers.current()
  if cluster.size == 1:
    return function()
  value, error = None, None
  try:
    if cluster.is_chief:
      with _others_waiting():
        try:
          value = function()
        except Exception as e:  # noqa: BLE001 - raised when the others know of it.
          error = e
    else:
      _wait_for_chief()
    said = of_chief({"value": value, "error": None if error is None else _in_words(error)})
  except errors.WorkerLostError:
    if error is None:
      raise
    raise error from None  # Another worker had it, and left, before this one had heard from all.
  if said["error"] is None:
    return said["value"]
  workers.all_have_heard()
  if error is not None:
    raise told_to_all(error)
  kind, text = said["error"]
  same: errors.MeshError = getattr(errors, kind)(f"{cluster.name(0)}: {text}")
  raise told_to_all(same)


@contextlib.contextmanager
def _others_waiting() -> Iterator[None]:
  """In the chief: a periodic rendezvous with the waiting workers while the block runs.

  In one long rendezvous a waiting worker would be taken for stuck, and a lost one would not be
  noticed.
  """
  done = threading.Event()
  failures: list[errors.WorkerLostError] = []

  def meet() -> None:
    pause = _SHORTEST_PAUSE
    try:
      while not workers.any_worker(done.wait(pause)):
        pause = min(2 * pause, _LONGEST_PAUSE)
    except errors.WorkerLostError as e:
      failures.append(e)

  thread = threading.Thread(target=meet, daemon=True, name="mtf-by-chief")
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()
  for lost in failures:
    raise lost


def _wait_for_chief() -> None:
  while not workers.any_worker(False):
    pass  # The chief says when they meet.


def _in_words(error: Exception) -> tuple[str, str]:
  """Converts an error to (name of its class in the package, text)."""
  # Gin and subclasses elsewhere put classes in front of it.
  kind = next((c.__name__ for c in type(error).__mro__ if c.__module__ == errors.__name__), None)
  if kind is None:
    return errors.MeshError.__name__, f"{type(error).__name__}: {error}"
  return kind, str(error)
