"""Metaclass of operations: checks the arguments, and enters the operation into its graph."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mesh_tensorflow.arguments import checking


class _Watching(threading.local):
  """Thread-local observer of created operations.

  Attributes:
    watcher: called with the graph after an operation has entered it; None for no observer.
  """

  watcher: Callable[[Any], None] | None = None


_WATCHING = _Watching()


@contextlib.contextmanager
def watched(watcher: Callable[[Any], None] | None) -> Iterator[None]:
  """Context manager: calls `watcher(graph)` for each operation that this thread creates."""
  outer, _WATCHING.watcher = _WATCHING.watcher, watcher
  try:
    yield
  finally:
    _WATCHING.watcher = outer


def unwatched() -> contextlib.AbstractContextManager[None]:
  """Context manager without an observer: for graphs and loop bodies that are lowered whole."""
  return watched(None)


class OperationType(type):
  """Enters an operation into its graph once its constructor has succeeded."""

  @property
  def __signature__(cls) -> inspect.Signature:
    """That of the constructor, for `inspect.signature`, `help` and editors."""
    constructor = inspect.signature(checking.constructor_of(cls)[1])
    return constructor.replace(
      parameters=list(constructor.parameters.values())[1:],
      return_annotation=inspect.Signature.empty,
    )

  def __call__(cls, *args: Any, **kwargs: Any) -> Any:
    signature = checking.signature_of_class(cls)
    if signature is not None:
      signature.check((cls, *args), kwargs)
    op = super().__call__(*args, **kwargs)
    op.graph._operations.append(op)
    if _WATCHING.watcher is not None:
      _WATCHING.watcher(op.graph)
    return op
