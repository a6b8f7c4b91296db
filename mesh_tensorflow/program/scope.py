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
from typing import Any, Protocol, runtime_checkable

from mesh_tensorflow.errors import ArgumentError, GraphError

__all__ = [
  "get_variable_scope",
  "variable_scope",
]

AUTO_REUSE = "AUTO_REUSE"

# What to write in place of an argument that TensorFlow 1's `variable_scope` had.
_TF1_ARGUMENTS = {
  "initializer": "give it to each mtf.get_variable(..., initializer=...)",
  "dtype": "give it to each mtf.get_variable(..., dtype=...)",
  "regularizer": "add the penalty to the loss, as mtf.reduce_sum(mtf.square(w)) * rate",
  "constraint": "apply it to the value after the optimizer, with mtf.assign",
  "custom_getter": "call your function in place of mtf.get_variable",
  "partitioner": "leave it out: layout rules split variables",
  "caching_device": "leave it out: each device has its slices",
  "use_resource": "leave it out: variables are as with use_resource=True",
}
# These had no influence on variables.
_WITHOUT_EFFECT = ("auxiliary_name_scope", "values")


class VariableScope:
  """An open scope: its full name, and how often each name was opened inside it.

  Attributes:
    name: the full name.
    counts: by name the number of times that a scope of that name was opened inside.
    reuse: True, False, "AUTO_REUSE" or None; see `variable_scope`.
  """

  def __init__(self, name: str, reuse: bool | str | None = None):
    self.name = name
    self.reuse = reuse
    self.counts: dict[str, int] = {}

  def __repr__(self) -> str:
    return f"VariableScope({self.name!r})"


@runtime_checkable
class _Graph(Protocol):
  """Structural type: the part of `Graph` used here."""

  root_scope: VariableScope


class _Stack(threading.local):
  def __init__(self) -> None:
    self.frames: list[VariableScope] = []
    self.root = VariableScope("")


_STACK = _Stack()


def current_scope_name() -> str:
  """Full name of the innermost open variable scope, "" outside any."""
  return _STACK.frames[-1].name if _STACK.frames else ""


def current_reuse() -> bool | str | None:
  """`reuse` of the innermost open variable scope, None outside any; see `variable_scope`."""
  return _STACK.frames[-1].reuse if _STACK.frames else None


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
  graph: _Graph | None = None,
  reuse: object = None,
  **tf1_arguments: Any,
) -> Iterator[VariableScope]:
  """Opens a variable scope: variables created inside are called `<scope>/<name>`.

  Args:
    name_or_scope: the name, added to the scope around; or a `VariableScope`
      (as yielded by this function), which is entered again as it was; or None.
    default_name: with None as name, the name to make unique within the scope around.
    graph: the `mtf.Graph` whose counts decide uniqueness outside any scope.
    reuse: what `get_variable` does inside, and in scopes inside. True: all variables must exist;
      False: none may, as in TensorFlow 1 where nothing was said; "AUTO_REUSE" (or TensorFlow's
      constant of that name): it shares those that exist and makes those that do not. None: as
      the scope around says, and outside any as "AUTO_REUSE". As in TensorFlow 1, False changes
      nothing inside a scope that says True or "AUTO_REUSE".
    **tf1_arguments: TensorFlow 1's `values` and `auxiliary_name_scope`, which have no effect.

  Yields:
    The `VariableScope`.

  Raises:
    GraphError: neither a name nor a default name is given.
    ArgumentError: another argument of TensorFlow 1 is given; the text says what to write.
  """
  reuse = _checked_reuse(reuse, tf1_arguments)
  if isinstance(name_or_scope, VariableScope):
    given = name_or_scope.reuse
    frame = VariableScope(name_or_scope.name, given if not reuse and given is not None else reuse)
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
    # Given names count, too: a default name must differ from them.
    parent.counts[name] = parent.counts.get(name, 0) + 1
    prefix = current_scope_name()
    inside = bool(_STACK.frames) and (prefix != "")
    around = current_reuse()
    if not reuse and around is not None:
      reuse = around
    frame = VariableScope(f"{prefix}/{name}" if inside else name, reuse)
  _STACK.frames.append(frame)
  try:
    yield frame
  finally:
    _STACK.frames.pop()


def _checked_reuse(reuse: Any, tf1_arguments: dict[str, Any]) -> bool | str | None:
  """Normalizes `reuse`; rejects TensorFlow 1 arguments that are no longer supported."""
  for name, value in tf1_arguments.items():
    if name in _WITHOUT_EFFECT or name in _TF1_ARGUMENTS and value is None:
      continue
    if name not in _TF1_ARGUMENTS:
      raise ArgumentError(
        f"variable_scope has no argument {name!r}; it has name_or_scope, default_name, graph and "
        "reuse"
      )
    if not (name == "use_resource" and value is True):
      raise ArgumentError(f"variable_scope has no {name}= any more: {_TF1_ARGUMENTS[name]}")
  if reuse is None or isinstance(reuse, bool):
    return reuse
  name = getattr(reuse, "name", reuse)  # It may be an enumerator of TensorFlow's.
  if isinstance(name, str) and name == AUTO_REUSE:
    return AUTO_REUSE
  raise ArgumentError(
    f"variable_scope: reuse must be None, True, False or {AUTO_REUSE!r}, got {reuse!r}"
  )


@contextlib.contextmanager
def outside_all_scopes() -> Iterator[None]:
  """Leaves every open variable scope for the time of the block."""
  frames, _STACK.frames = _STACK.frames, []
  try:
    yield
  finally:
    _STACK.frames = frames


def snapshot() -> Callable[[], None]:
  """Captures this thread's open scopes; the result installs a copy in the calling thread."""
  frames, root = copy.deepcopy((_STACK.frames, _STACK.root))

  def install() -> None:
    _STACK.frames, _STACK.root = copy.deepcopy((frames, root))

  return install


def get_variable_scope() -> VariableScope:
  """The innermost open scope; pass it to `variable_scope` to enter it again."""
  return _STACK.frames[-1] if _STACK.frames else VariableScope("")
