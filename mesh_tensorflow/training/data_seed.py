"""The default seed of the data readers' random orders."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_SEED: contextvars.ContextVar[int] = contextvars.ContextVar("data_seed", default=0)


def current() -> int:
  """The seed; 0 outside of a training.

  To be asked for while a data set function is called (not later, in its generators and maps).
  """
  return _SEED.get()


def chosen(seed: int | None) -> int:
  """The seed given to a reader, or `current()` if it is None."""
  return current() if seed is None else int(seed)


@contextlib.contextmanager
def used(seed: int) -> Iterator[None]:
  """Context manager that sets `current()` around the call of a data set function."""
  token = _SEED.set(seed)
  try:
    yield
  finally:
    _SEED.reset(token)
