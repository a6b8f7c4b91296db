"""The variables of a Keras model and those of the mesh: which copy is newer; accesses to them."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from mesh_tensorflow.meshes.store import VariableStore

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


class Mirror:
  """Variables with their copies on a mesh."""

  def __init__(self) -> None:
    self._store: VariableStore | None = None
    self._originals: dict[str, tf.Variable] = {}
    self._names: dict[int, str] = {}  # By the ids of the originals.
    self._seen: dict[str, tf.Tensor] = {}
    self._newer: set[str] = set()  # On the mesh.
    self._accessed: set[str] = set()  # Perhaps written to.
    self._closed = False

  def __contains__(self, name: str) -> bool:
    return name in self._originals

  @property
  def names(self) -> list[str]:
    """Names of the mesh's variables."""
    return list(self._originals)

  def attach(self, store: VariableStore) -> None:
    """Sets the store of the copies; pulls from, and drops, those in the store before it.

    Args:
      store: the variables of the mesh.
    """
    if self._store is not None:
      self.pull()
      self._store.forget(self.names)
    self._store = store

  def enter(self, variables: Mapping[str, tf.Variable]) -> None:
    """Enters variables whose copies a program is about to make.

    Args:
      variables: name on the mesh -> the original.
    """
    for name, variable in variables.items():
      if name not in self._originals:
        self._originals[name] = variable
        self._names[id(variable)] = name
        self._seen[name] = self._value(name)
        watch(variable, self)

  def forget(self, names: Iterable[str]) -> None:
    """Forgets variables and their copies.

    Args:
      names: on the mesh.
    """
    gone = [name for name in names if name in self._originals]
    for name in gone:
      self._leave(name)
    if self._store is not None:
      self._store.forget(gone)

  def close(self) -> None:
    """Ends mirroring, as no program will run again: originals that are up to date are unwatched.

    Nothing is computed, as Python may call this at any moment.
    """
    self._closed = True
    for name in [n for n in self._originals if n not in self._newer]:
      self._leave(name)

  def ran(self, names: Iterable[str]) -> None:
    """Marks the copies that a program has assigned as newer than their originals.

    Args:
      names: the variables that it assigns.
    """
    self._newer.update(names)
    # Models on other meshes may share them.
    tell((self._originals[name] for name in names), but=self)

  def accessed(self, variable: tf.Variable) -> None:
    """Brings an original up to date before it is read or written.

    Args:
      variable: the original.
    """
    name = self._names.get(id(variable))
    if name is None:
      return
    if name in self._newer:
      self._pull(name)
    self._accessed.add(name)
    if self._closed:
      self._leave(name)

  def pull(self) -> None:
    """Brings all originals up to date with their copies."""
    for name in list(self._newer):
      self._pull(name)

  def push(self) -> None:
    """Brings up to date the copies of originals that Python has assigned since they were equal."""
    for name in list(self._accessed):
      self._accessed.discard(name)
      now = self._value(name)
      if not _same(now, self._seen[name]):
        # The program that makes a copy takes the value of the original.
        if self._store is not None and name in self._store:
          self._store[name].assign(now)
        self._seen[name] = now

  def _leave(self, name: str) -> None:
    original = self._originals.pop(name)
    unwatch(original, self)
    del self._names[id(original)], self._seen[name]
    self._newer.discard(name)
    self._accessed.discard(name)

  def _value(self, name: str) -> tf.Tensor:
    """Reads the current value of an original variable."""
    original = self._originals[name]
    tell([original], but=self)
    return eagerly(original.read_value)

  def _pull(self, name: str) -> None:
    assert self._store is not None
    original, copy = self._originals[name], self._store[name]
    self._newer.discard(name)

    def assign() -> tf.Tensor:
      original.assign(copy.numpy())
      return original.read_value()

    self._seen[name] = eagerly(assign)
    tell([original], but=self)


def _same(now: tf.Tensor, seen: tf.Tensor) -> bool:
  """True if two tensors on the host share their memory, or are equal byte for byte."""
  if now is seen:
    return True
  a, b = _view(now), _view(seen)
  if a.ctypes.data == b.ctypes.data and a.nbytes:
    return True
  return a.tobytes() == b.tobytes()  # Bytes: NaN is the same as itself, and 0.0 is not -0.0.


def _view(x: tf.Tensor) -> np.ndarray:
  """The tensor as an array, without a copy where TensorFlow exposes its memory."""
  try:
    return np.asarray(memoryview(x))
  except (TypeError, ValueError, BufferError):
    return np.asarray(x.numpy())
