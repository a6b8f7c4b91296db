"""Record of the files that a data set reads, for the manifest of a run."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator

_NOTED: contextvars.ContextVar[dict[str, None] | None] = contextvars.ContextVar(
  "files_read", default=None
)


def note(paths: Iterable[str]) -> None:
  """Records files as read, inside a block of `noted`; else does nothing.

  To be called while a data set function is called, not later, in its generators and maps.
  """
  noted = _NOTED.get()
  if noted is not None:
    noted.update(dict.fromkeys(paths))


@contextlib.contextmanager
def noted() -> Iterator[dict[str, None]]:
  """Context manager that records files; yields a dict whose keys are their paths, in order."""
  found: dict[str, None] = {}
  token = _NOTED.set(found)
  try:
    yield found
  finally:
    _NOTED.reset(token)
