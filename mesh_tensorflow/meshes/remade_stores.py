"""Notices a training step that makes its mesh implementation, and so its variables, anew each time.

Such a program trains nothing: every step begins with the initial values. Watched are the stores
that implementations make for themselves. A warning is given where the same line of a program

- makes one the third time, and of each of the two before one run changed the variables, nobody
  looked at them, and they are gone; or
- makes one inside a `tf.function` that is traced again, while the variables of the trace before
  are still there.

It does not concern programs that make many implementations in order to compare them: those run a
program several times, look at the variables, or make implementation and variables in different
places (the one eagerly, the others when a tf.function is traced).
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from mesh_tensorflow.program.dimensions import Shape


class _MeshImpl(Protocol):
  @property
  def shape(self) -> Shape: ...

  @property
  def layout_rules(self) -> Any: ...


class _Stored(Protocol):
  """Structural type: the part of `StoredVariable` used here."""

  @property
  def name(self) -> str: ...

  @property
  def trainable(self) -> bool: ...

  @property
  def slices(self) -> Sequence[Any]: ...


_LOG = logging.getLogger("mesh_tensorflow")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LOCK = threading.RLock()


@dataclasses.dataclass
class _Line:
  """A line of a program that makes implementations of one kind.

  Attributes:
    lives: of the stores that it made, as long as all of them look as if nothing were trained.
    in_order: whether that cannot be, or was told.
  """

  lives: list[Life] = dataclasses.field(default_factory=list)
  in_order: bool = False


_lines: dict[Any, _Line] = {}


class Life:
  """Usage history of the variables of one store.

  Args:
    mesh_impl: the implementation that made it.
    store: the `VariableStore`.
  """

  def __init__(self, mesh_impl: _MeshImpl, store: Any):
    self.where = _line_of_caller()
    self.kind = type(mesh_impl).__name__
    key = (self.where, self.kind, mesh_impl.shape.to_string, str(mesh_impl.layout_rules))
    self._traced = not tf.executing_eagerly()
    with _LOCK:
      self._line = _lines.setdefault(key, _Line())
    self._store = weakref.ref(store)
    self._handle: Any = None
    self._per_run = 1
    self._asked: dict[str, int] = {}
    self._changed = self._looked_at = False

  def made(self, stored: _Stored, lowerings_per_run: int) -> None:
    """The first lowering makes a variable.

    Args:
      stored: the variable.
      lowerings_per_run: number of times that one run of a program asks for a variable.
    """
    if self._line.in_order or not stored.trainable or not stored.slices:
      return
    self._per_run = lowerings_per_run
    if self._traced == tf.executing_eagerly():
      self._line.in_order = True
    self._asked[stored.name] = 1
    if len(self._asked) == 1:
      # Of the handle: a traced function keeps no more of a variable.
      self._handle = weakref.ref(stored.slices[0].handle)
      self._compare(stored.name)

  def asked_for(self, name: str) -> None:
    """A lowering asks for a variable that exists."""
    if name in self._asked:
      self._asked[name] += 1

  def changed(self, stored: _Stored) -> None:
    """A program assigns to a variable."""
    self._changed = self._changed or stored.trainable

  def looked_at(self) -> None:
    """Somebody reads the variables, or saves them."""
    self._looked_at = True

  @property
  def is_trained_once(self) -> bool:
    """True if only one run used the variables, changed them, and nothing read them."""
    once = max(self._asked.values(), default=0) <= self._per_run
    return self._changed and once and not self._looked_at

  def _compare(self, name: str) -> None:
    line = self._line
    with _LOCK:
      before = [life for life in line.lives if life is not self]
      if not all(life.is_trained_once and name in life._asked for life in before):
        line.in_order = True
        line.lives.clear()
        return
      line.lives.append(self)
      if len(before) < (1 if self._traced else 2):
        return
      line.in_order = True  # Looked into once.
      line.lives.clear()
    gc.collect()  # What only garbage holds is gone.
    if self._traced:
      again = any(life._handle() is not None for life in before)
    else:
      again = all(life._store() is None for life in before)
    if again:
      _LOG.warning(
        "%s at %s is made anew for each %s, and with it the variables (%s, ...): each begins with "
        "the initial values, and nothing is trained. Make it once, outside; or give each the same "
        "variable_store=, an mtf.VariableStore made outside",
        self.kind,
        self.where,
        "trace of its tf.function" if self._traced else "step",
        name,
      )


def _line_of_caller() -> str:
  """The first place outside this package from which it was called."""
  frame: types.FrameType | None = sys._getframe(1)
  while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
    frame = frame.f_back
  return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
