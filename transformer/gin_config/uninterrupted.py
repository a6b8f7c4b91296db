"""Reading gin's texts so that no other thread runs in the middle of a value."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
  """A context without garbage collection; as a decorator, for a function that reads gin's texts.

  Gin reads each value by `ast.literal_eval`. Before Python 3.12 a collection may start in the
  middle of it, and a finalizer that it calls may give way to another thread; if that one parses
  Python too, the first fails with "AST constructor recursion depth mismatch" (CPython issue
  106905), which gin reports as an error of syntax.
  """
  if not gc.isenabled():
    yield
    return
  gc.disable()
  try:
    yield
  finally:
    gc.enable()
