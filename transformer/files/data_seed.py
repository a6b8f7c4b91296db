"""The seed of what readers of data put into a random order, if they are given none of their own."""

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
  """The seed that a reader was given; else `current()`."""
  return current() if seed is None else int(seed)


@contextlib.contextmanager
def used(seed: int) -> Iterator[None]:
  """Inside it, `current()` is this seed: around the call of a data set function."""
  token = _SEED.set(seed)
  try:
    yield
  finally:
    _SEED.reset(token)
