"""Variable scopes: the naming of variables, as checkpoints know it. No TensorFlow here.

A scope opened by an explicit name may be opened again and shares its names. A
scope opened by `default_name` gets a name that is new within the scope around
it (`dense`, `dense_1`, ...); those counts start anew each time the scope around
is opened.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mesh_tensorflow.errors import GraphError


class VariableScope:
  """An open scope: its full name, and how often each name was opened inside it."""

  def __init__(self, name: str):
    self.name = name
    self.counts: dict[str, int] = {}

  def __repr__(self) -> str:
    return f"VariableScope({self.name!r})"


class _Stack(threading.local):
  def __init__(self):
    self.frames: list[VariableScope] = []
    self.root = VariableScope("")


_STACK = _Stack()


def current_scope_name() -> str:
  """Full name of the innermost open variable scope, "" outside any."""
  return _STACK.frames[-1].name if _STACK.frames else ""


def full_variable_name(name: str) -> str:
  """The name a variable called `name` has if it is created here."""
  scope = current_scope_name()
  return f"{scope}/{name}" if _STACK.frames and scope else name


def _unique(frame: VariableScope, name: str) -> str:
  if not frame.counts.get(name):
    return name
  i = 1
  while frame.counts.get(f"{name}_{i}"):
    i += 1
  return f"{name}_{i}"


@contextlib.contextmanager
def variable_scope(
  name_or_scope: str | VariableScope | None,
  default_name: str | None = None,
  *,
  graph: Any = None,
) -> Iterator[VariableScope]:
  """Opens a variable scope: variables created inside are called `<scope>/<name>`.

  Args:
    name_or_scope: the name, added to the scope around; or a `VariableScope`
      (as yielded by this function), which is entered again as it was; or None.
    default_name: with None as name, the name to make unique within the scope around.
    graph: the `mtf.Graph` whose counts decide uniqueness outside any scope.

  Yields:
    The `VariableScope`.

  Raises:
    GraphError: neither a name nor a default name is given.
  """
  if isinstance(name_or_scope, VariableScope):
    frame = VariableScope(name_or_scope.name)
  else:
    if _STACK.frames:
      parent = _STACK.frames[-1]
    else:
      parent = graph.root_scope if graph is not None else _STACK.root
    if name_or_scope is None:
      if default_name is None:
        raise GraphError("variable_scope needs a name or a default_name")
      name = _unique(parent, default_name)
    else:
      name = name_or_scope
    parent.counts[name] = parent.counts.get(name, 0) + 1
    prefix = current_scope_name()
    inside = bool(_STACK.frames) and (prefix != "")
    frame = VariableScope(f"{prefix}/{name}" if inside else name)
  _STACK.frames.append(frame)
  try:
    yield frame
  finally:
    _STACK.frames.pop()


@contextlib.contextmanager
def outside_all_scopes() -> Iterator[None]:
  """Leaves every open variable scope for the time of the block."""
  frames, _STACK.frames = _STACK.frames, []
  try:
    yield
  finally:
    _STACK.frames = frames


def snapshot() -> Callable[[], None]:
  """A function that installs a copy of this thread's open scopes in the thread that calls it."""
  frames, root = copy.deepcopy((_STACK.frames, _STACK.root))

  def install() -> None:
    _STACK.frames, _STACK.root = copy.deepcopy((frames, root))

  return install


def get_variable_scope() -> VariableScope:
  """The innermost open scope; pass it to `variable_scope` to enter it again."""
  return _STACK.frames[-1] if _STACK.frames else VariableScope("")
