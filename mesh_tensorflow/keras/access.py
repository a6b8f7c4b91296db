"""Observation of accesses to variables: reads get the current value, and writes are noticed.

A watched tf.Variable is of a subclass of its class, which tells the mirrors of the variable before
its resource is reached: by `numpy()`, an operation, an assignment, a trace, whoever holds it, the
keras.Variable, a layer or the tf.Variable itself. A tf.function that was traced before reaches the
resource without that, so calls of such functions are noticed, too. A variable that nobody watches
any longer has its own class again, and so have functions when there is none.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import tensorflow as tf

_R = TypeVar("_R")


class Watcher(Protocol):
  """Observer of accesses to variables."""

  def accessed(self, variable: tf.Variable) -> None:
    """Called before the value of a variable is read or written.

    Args:
      variable: one of the variables that it watches.
    """


class _Thread(threading.local):
  unnoticed = 0


_THREAD = _Thread()
# Watched variables and their watchers, by id; holding the variable keeps its id valid.
_WATCHED: dict[int, tuple[tf.Variable, list[Watcher]]] = {}
# The same variables by the ids of their resources, which functions capture.
_RESOURCES: dict[int, tf.Variable] = {}
_CLASSES: dict[Any, Any] = {}
# Whether a tf.function uses a watched variable.
_USES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
  """Context manager: this thread's accesses notify no watcher."""
  _THREAD.unnoticed += 1
  try:
    yield
  finally:
    _THREAD.unnoticed -= 1


def eagerly(fn: Callable[[], _R]) -> _R:
  """Runs a function eagerly, outside of any trace, without notifying watchers; returns its result.

  Args:
    fn: the function.
  """
  with unnoticed(), tf.init_scope():
    if tf.executing_eagerly():
      return fn()
  # Inside of a tf.Graph, as while a model is exported: another thread is not.
  results: list[_R] = []

  def run() -> None:
    with unnoticed():
      results.append(fn())

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  return results[0]


def watch(variable: tf.Variable, watcher: Watcher) -> None:
  """Registers a watcher of accesses to a variable.

  Args:
    variable: the variable.
    watcher: is notified before each access; a variable may have several.
  """
  if not _WATCHED:
    _notice_calls()
  if id(variable) not in _WATCHED:
    _WATCHED[id(variable)] = variable, []
    _RESOURCES[id(variable.handle)] = variable
    variable.__class__ = _watched_class(type(variable))
    _USES.clear()
  _WATCHED[id(variable)][1].append(watcher)


def unwatch(variable: tf.Variable, watcher: Watcher) -> None:
  """Unregisters a watcher of a variable; the inverse of `watch`.

  Args:
    variable: the variable.
    watcher: the watcher.
  """
  _, watchers = _WATCHED[id(variable)]
  watchers.remove(watcher)
  if not watchers:
    variable.__class__ = type(variable).__mro__[1]
    del _WATCHED[id(variable)], _RESOURCES[id(variable.handle)]
  if not _WATCHED:
    _notice_no_calls()


def tell(variables: Iterable[tf.Variable], but: Watcher | None = None) -> None:
  """Notifies the watchers of variables of an access.

  Args:
    variables: the accessed variables; those without watchers are ignored.
    but: a watcher that is not notified.
  """
  for variable in variables:
    for watcher in list(_WATCHED.get(id(variable), (variable, ()))[1]):
      if watcher is not but:
        watcher.accessed(variable)


def _watched_class(kind: Any) -> Any:
  """Subclass of a kind of tf.Variable whose instances notify watchers of accesses."""
  if kind not in _CLASSES:
    plain = kind.__getattribute__

    def get(self: tf.Variable, name: str) -> Any:
      # So TensorFlow's Python and C code reach the resource, whatever they do with it.
      if name.lstrip("_") == "handle" and not _THREAD.unnoticed:
        with unnoticed():
          tell([self])
        if tf.inside_function():  # Which is being traced for other arguments, perhaps.
          _USES.clear()
      return plain(self, name)

    body = {"__getattribute__": get, "__module__": kind.__module__, "__doc__": kind.__doc__}
    _CLASSES[kind] = type(kind)(kind.__name__, (kind,), body)
  return _CLASSES[kind]


@functools.cache
def _function_classes() -> list[tuple[Any, Callable[..., Any]]]:
  """The classes of functions of TensorFlow, polymorphic and concrete, with their `__call__`."""
  function = tf.function(lambda: tf.zeros([]))
  kinds = [type(function), type(function.get_concrete_function())]
  return [(kind, kind.__call__) for kind in kinds]


def _notice_calls() -> None:
  """Patches calls of TensorFlow functions to notify the watchers of the variables they use."""
  for kind, plain in _function_classes():

    def call(self: Any, *args: Any, plain: Callable[..., Any] = plain, **kwargs: Any) -> Any:
      if not (_THREAD.unnoticed or tf.inside_function() or tf.config.functions_run_eagerly()):
        with unnoticed():
          tell(_used(self, args, kwargs))
      return plain(self, *args, **kwargs)

    functools.update_wrapper(call, plain)
    kind.__call__ = call


def _notice_no_calls() -> None:
  for kind, plain in _function_classes():
    kind.__call__ = plain
  _USES.clear()


def _used(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tf.Variable]:
  """The watched variables that a call of a function reads or writes."""
  if not hasattr(function, "get_concrete_function"):
    return _captured(function)
  if _USES.get(function, True):
    # What is traced here is not traced again by the call.
    used = _captured(function.get_concrete_function(*args, **kwargs))
    _USES[function] = bool(used)
    return used
  return []


def _captured(concrete: Any) -> list[tf.Variable]:
  """The watched variables of a concrete function, those of functions that it calls included."""
  ids = map(id, concrete.captured_inputs)
  return [_RESOURCES[key] for key in ids if key in _RESOURCES]
