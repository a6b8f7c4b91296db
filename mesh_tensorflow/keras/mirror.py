"""The variables of a Keras model and their slices on the mesh: who has the value; who asks for it.

A large variable has its value in one place: in its slices, or in itself while Python reads or
writes it. A variable that has none is filled before anybody accesses it: from its slices, or, if it
has none yet, by what draws its initial value.

Slices of several processes are gathered by all of them together, so whatever loops over variables
here has the same order in each process: sets of names are sorted.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from mesh_tensorflow.keras import spilling
from mesh_tensorflow.meshes.store import StoredVariable, VariableStore

_R = TypeVar("_R")
_Fetch = Callable[[], tf.Tensor]

# A variable of so many bytes is large.
LARGE = 1 << 20
# Large variables that single accesses have filled, and that are kept so: as many as an operation
# may take by their resources, and more while they have no more bytes than these. One that is read
# is not kept beyond the next access: who reads it has its value.
_KEPT, _KEPT_BYTES = 4, 64 << 20


class Watcher(Protocol):
  """Observer of accesses to variables."""

  def accessed(self, variable: tf.Variable) -> None:
    """Called before the value of a variable is read or written.

    Args:
      variable: one of the variables that it watches.
    """

  def release(self, variable: tf.Variable) -> None:
    """Takes the value of a variable, whose only watcher it is, to where else it belongs, if it can.

    Args:
      variable: a large one, which was accessed, and which nobody is using now.
    """

  def overwrite(self, variable: tf.Variable, value: tf.Tensor) -> None:
    """Sets the value of a variable, whose only watcher it is; the one before is not fetched.

    Args:
      variable: a large one.
      value: its value from now on.
    """


@dataclasses.dataclass
class _Watched:
  variable: Callable[[], tf.Variable | None]  # A weak reference.
  handle: int  # The id of its resource.
  size: int  # Bytes.
  watchers: list[Watcher]


# In `unnoticed`, in `resources_unnoticed`, in `traces_unnoticed`, in a call of a function, which is
# traced if it must be. The threads in which functions are imported have the context of those that
# wait for them.
_UNNOTICED = contextvars.ContextVar("unnoticed", default=False)
_RESOURCES_UNNOTICED = contextvars.ContextVar("resources_unnoticed", default=False)
_TRACES_UNNOTICED = contextvars.ContextVar("traces_unnoticed", default=False)
_IN_CALL = contextvars.ContextVar("in_call", default=False)
# In a method of a variable that reads it, after which nobody needs its resource.
_READS = contextvars.ContextVar("reads", default=False)

# Watched variables, by id.
_WATCHED: dict[int, _Watched] = {}
# Their ids, by those of their resources, which functions capture.
_RESOURCES: dict[int, int] = {}
_CLASSES: dict[Any, Any] = {}
# Whether a tf.function uses a watched variable.
_USES: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
# Large variables that single accesses have filled, by id, the last one last: their bytes, and
# whether they were read only.
_LATELY: collections.OrderedDict[int, tuple[int, bool]] = collections.OrderedDict()
# Of what fills variables and empties them.
_LOCK = threading.RLock()


@contextlib.contextmanager
def _within(flag: contextvars.ContextVar[bool]) -> Iterator[None]:
  token = flag.set(True)
  try:
    yield
  finally:
    flag.reset(token)


def unnoticed() -> contextlib.AbstractContextManager[None]:
  """Context manager: this thread's accesses notify no watcher."""
  return _within(_UNNOTICED)


def resources_unnoticed() -> contextlib.AbstractContextManager[None]:
  """Context manager: what this thread does with resources, but read values, notifies no watcher."""
  return _within(_RESOURCES_UNNOTICED)


def traces_unnoticed() -> contextlib.AbstractContextManager[None]:
  """Context manager: accesses of this thread in what it traces notify no watcher, as none runs."""
  return _within(_TRACES_UNNOTICED)


def eagerly(fn: Callable[[], _R]) -> _R:
  """Runs a function eagerly, outside of any trace, without notifying watchers; returns its result.

  Args:
    fn: the function.
  """
  with unnoticed():
    with tf.init_scope():
      if tf.executing_eagerly():
        return fn()
    # Inside of a tf.Graph, as while a model is exported: another thread is not.
    with futures.ThreadPoolExecutor(1) as thread:
      return thread.submit(contextvars.copy_context().run, fn).result()


def watch(variable: tf.Variable, watcher: Watcher) -> None:
  """Registers a watcher of accesses to a variable.

  Args:
    variable: the variable; it is held weakly.
    watcher: is notified before each access; a variable may have several.
  """
  key = id(variable)
  if not _WATCHED:
    _notice_calls()
  if key not in _WATCHED:
    with unnoticed():
      handle = id(variable.handle)
    gone = functools.partial(_gone, key, handle)
    _WATCHED[key] = _Watched(weakref.ref(variable, gone), handle, _bytes(variable), [])
    _RESOURCES[handle] = key
    variable.__class__ = _watched_class(type(variable))
    _USES.clear()
  _WATCHED[key].watchers.append(watcher)


def unwatch(variable: tf.Variable, watcher: Watcher) -> None:
  """Unregisters a watcher of a variable; the inverse of `watch`.

  Args:
    variable: the variable.
    watcher: the watcher.
  """
  watched = _WATCHED[id(variable)]
  watched.watchers.remove(watcher)
  if not watched.watchers:
    variable.__class__ = type(variable).__mro__[1]
    _gone(id(variable), watched.handle)


def _gone(key: int, handle: int, _: Any = None) -> None:
  """Forgets a variable that nobody watches, or that is no more."""
  del _WATCHED[key], _RESOURCES[handle]
  _LATELY.pop(key, None)
  if not _WATCHED:
    _notice_no_calls()


def tell(variables: Iterable[tf.Variable], but: Watcher | None = None) -> None:
  """Notifies the watchers of variables of an access.

  Args:
    variables: the accessed variables; those without watchers are ignored.
    but: a watcher that is not notified.
  """
  for variable in variables:
    watched = _WATCHED.get(id(variable))
    if watched is not None:
      with _LOCK:
        for watcher in list(watched.watchers):
          if watcher is not but:
            watcher.accessed(variable)


def _accessed(variable: tf.Variable) -> None:
  """Notifies of an access that Python or TensorFlow's Python code makes now."""
  watched = _WATCHED.get(id(variable))
  if watched is None:
    return
  with unnoticed():
    if tf.inside_function():
      # Which is being traced for other arguments, perhaps.
      _USES.clear()
      only_traced = not _IN_CALL.get()
      is_elsewhere = any(isinstance(w, Elsewhere) for w in watched.watchers)
      if only_traced and (_TRACES_UNNOTICED.get() or is_elsewhere):
        return  # As Keras does while it builds a model, and a call of the function will tell.
      tell([variable])
      return
    if watched.size >= LARGE:
      _make_room(id(variable), watched.size)
    tell([variable])


def _make_room(key: int, size: int) -> None:
  """Releases large variables that were accessed before, as one that is about to be filled is.

  Args:
    key: id of the latter.
    size: its bytes.
  """
  _, was_read = _LATELY.get(key, (0, True))
  _LATELY[key] = size, was_read and _READS.get()
  _LATELY.move_to_end(key)
  for other, (_, was_read) in list(_LATELY.items()):
    if sum(size for size, _ in _LATELY.values()) <= _KEPT_BYTES:
      break
    used = sum(not was_read for _, was_read in _LATELY.values())
    if other != key and (was_read or used > _KEPT):
      del _LATELY[other]
      _release(other)


def _release(key: int) -> None:
  watched = _WATCHED.get(key)
  variable = None if watched is None else watched.variable()
  if watched is not None and variable is not None and len(watched.watchers) == 1:
    with _LOCK:
      watched.watchers[0].release(variable)


def _overwritten(variable: tf.Variable, value: tf.Tensor) -> bool:
  """Sets the value of a large variable without fetching the one before, if that can be done."""
  watched = _WATCHED.get(id(variable))
  if watched is None or watched.size < LARGE or len(watched.watchers) != 1:
    return False
  with unnoticed(), _LOCK:
    watched.watchers[0].overwrite(variable, value)
  return True


def _watched_class(kind: Any) -> Any:
  """Subclass of a kind of tf.Variable whose instances notify watchers of accesses."""
  if kind not in _CLASSES:
    plain = kind.__getattribute__

    def get(self: tf.Variable, name: str) -> Any:
      # So TensorFlow's Python and C code reach the resource, whatever they do with it.
      if name.lstrip("_") == "handle" and not _UNNOTICED.get():
        if _READS.get() or not _RESOURCES_UNNOTICED.get():
          _accessed(self)
      return plain(self, name)

    def value(self: tf.Variable) -> tf.Tensor:
      with _within(_READS):
        return kind.value(self)

    def read_value(self: tf.Variable) -> tf.Tensor:
      with _within(_READS):
        return kind.read_value(self)

    def assign(self: tf.Variable, value: Any, *args: Any, **kwargs: Any) -> Any:
      if tf.executing_eagerly() and not _UNNOTICED.get():
        value = tf.convert_to_tensor(value, self.dtype)
        if value.shape == self.shape and _overwritten(self, value):
          return self  # As it has no value, a reader of its resource would find none.
      return kind.assign(self, value, *args, **kwargs)

    body = {
      "__getattribute__": get,
      "value": functools.wraps(kind.value)(value),
      "read_value": functools.wraps(kind.read_value)(read_value),
      "assign": functools.wraps(kind.assign)(assign),
      "__module__": kind.__module__,
      "__doc__": kind.__doc__,
    }
    _CLASSES[kind] = type(kind)(kind.__name__, (kind,), body)
  return _CLASSES[kind]


def _bytes(variable: tf.Variable) -> int:
  size = variable.shape.num_elements()
  return 0 if size is None else size * variable.dtype.size


def _put(variable: tf.Variable, value: tf.Tensor) -> None:
  """Sets the value of a variable that may have none; a value of other sizes leaves it without.

  As `tf.Variable.assign`, which compares the sizes with those of the value that is there.
  """
  with tf.device(variable.device):
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)


def _empty(variable: tf.Variable) -> None:
  """Frees the memory of a variable's value."""
  _put(variable, tf.zeros([0], variable.dtype))


class Elsewhere:
  """Watcher of a variable whose value is nowhere yet, or in slices that no model has any more.

  Args:
    fetch: draws or reads the value.
    again: whether it can do so again, and holds no memory for it: then a variable that was only
      read is emptied when others are read.
  """

  def __init__(self, fetch: _Fetch, again: bool = False):
    self.fetch, self.is_filled, self._again = fetch, False, again

  def accessed(self, variable: tf.Variable) -> None:
    """Fills the variable; see `Watcher`."""
    if not self.is_filled:
      eagerly(lambda: _put(variable, self.fetch()))
    self.is_filled = True
    if not (self._again and _READS.get()):
      unwatch(variable, self)

  def release(self, variable: tf.Variable) -> None:
    """Empties a variable that was only read; see `Watcher`."""
    if self.is_filled:
      eagerly(lambda: _empty(variable))
    self.is_filled = False

  def overwrite(self, variable: tf.Variable, value: tf.Tensor) -> None:
    """Sets the value, which goes to a file if there are several processes; see `Watcher`."""
    if spilling.is_wanted():
      self.fetch, self._again = spilling.Spilled(value), True
      self.release(variable)
      return
    eagerly(lambda: _put(variable, value))
    unwatch(variable, self)


@contextlib.contextmanager
def drawn_later(shape: Any, draw: Callable[[tf.DType], tf.Tensor]) -> Iterator[None]:
  """Context manager: the tf.Variable made inside has no value until somebody accesses it.

  Args:
    shape: its shape.
    draw: draws its initial value, of a dtype; always the same one.
  """

  def make(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    dtype = tf.as_dtype(kwargs["dtype"])
    # Memory that nobody touches is none.
    kwargs["initial_value"] = lambda: tf.raw_ops.Empty(shape=list(shape), dtype=dtype)
    variable = next_creator(**kwargs)
    _empty(variable)
    watch(variable, Elsewhere(functools.partial(draw, dtype), again=True))
    return variable

  with tf.variable_creator_scope(make):
    yield


@functools.cache
def _function_classes() -> list[tuple[Any, Callable[..., Any]]]:
  """The classes of functions of TensorFlow, polymorphic and concrete, with their `__call__`."""
  function = tf.function(lambda: tf.zeros([]), autograph=False)
  kinds = [type(function), type(function.get_concrete_function())]
  return [(kind, kind.__call__) for kind in kinds]


def _notice_calls() -> None:
  """Patches calls of TensorFlow functions to notify the watchers of the variables they use."""
  for kind, plain in _function_classes():

    def call(self: Any, *args: Any, plain: Callable[..., Any] = plain, **kwargs: Any) -> Any:
      if _UNNOTICED.get() or tf.inside_function() or tf.config.functions_run_eagerly():
        return plain(self, *args, **kwargs)
      with unnoticed():
        tell(_used(self, args, kwargs))
      with _within(_IN_CALL):
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
  keys = (_RESOURCES.get(id(x)) for x in concrete.captured_inputs)
  found = (_WATCHED[key].variable() for key in keys if key is not None)
  return [v for v in found if v is not None]


class Mirror:
  """Variables with their slices on a mesh."""

  def __init__(self) -> None:
    self._store: VariableStore | None = None
    self._originals: dict[str, tf.Variable] = {}
    self._names: dict[int, str] = {}  # By the ids of the originals.
    self._seen: dict[str, tf.Tensor] = {}
    self._newer: set[str] = set()  # On the mesh, or to be fetched.
    self._empty: set[str] = set()  # Of these the originals without a value.
    self._fetches: dict[str, _Fetch] = {}  # Of those that have no slices.
    self._filled: set[str] = set()  # Large originals that have a value.
    self._accessed: set[str] = set()  # Perhaps written to.
    # The last one whose slices are made, with what was fetched for them.
    self._last: tuple[str, tf.Tensor | None] | None = None

  def __contains__(self, name: str) -> bool:
    return name in self._originals

  @property
  def names(self) -> list[str]:
    """Names of the mesh's variables."""
    return list(self._originals)

  def attach(self, store: VariableStore) -> None:
    """Sets the store of the slices; values of the store before it move there, one by one.

    Args:
      store: the variables of the mesh.
    """
    if self._store is not None:
      for name in sorted(self._newer):
        if name not in self._empty:
          self._pull(name)
        elif name not in self._fetches:
          self._fetches[name] = functools.partial(_whole, self._store[name])
      self._store.forget(self.names)
    self._store = store

  def enter(self, variables: Mapping[str, tf.Variable]) -> list[str]:
    """Enters variables whose slices a program is about to make.

    Args:
      variables: name on the mesh -> the original.

    Returns:
      The names of those that were not entered before.
    """
    entered = [name for name in variables if name not in self._originals]
    for name, variable in variables.items():
      if name in self._originals:
        continue
      self._originals[name] = variable
      self._names[id(variable)] = name
      watched = _WATCHED.get(id(variable))
      before = watched.watchers[0] if watched is not None and len(watched.watchers) == 1 else None
      watch(variable, self)
      if isinstance(before, Elsewhere):
        before.release(variable)
        unwatch(variable, before)
        self._fetches[name] = before.fetch
        self._newer.add(name)
        self._empty.add(name)
      else:
        self._seen[name] = self._value(name)
        if _WATCHED[id(variable)].size >= LARGE:
          self._filled.add(name)
    return entered

  def digest(self, names: Iterable[str]) -> str:
    """Digest of the names of variables, and of the values that their originals had when entered."""
    found = 0
    for name in names:
      found = zlib.crc32(name.encode(), found)
      fetch = self._fetches.get(name)
      if name in self._seen:
        found = zlib.crc32(_view(self._seen[name]).tobytes(), found)
      elif isinstance(fetch, spilling.Spilled):
        found = zlib.crc32(str(fetch.digest).encode(), found)
    return f"{found:08x}"

  def initial(self, variable: tf.Variable) -> tf.Tensor:
    """The whole value of a variable whose slices are being made.

    Args:
      variable: an original.
    """
    name = self._names.get(id(variable), "")
    if self._last is None or self._last[0] != name:
      self._drop_last()
      self._last = name, eagerly(self._fetches[name]) if name in self._fetches else None
    if self._last[1] is not None:
      return self._last[1]
    with unnoticed():
      return variable.value()

  def _drop_last(self) -> None:
    """Lets go of the whole value of what has slices now, and of how to fetch it."""
    name = "" if self._last is None else self._last[0]
    self._last = None
    if self._store is not None and name in self._store:
      self._fetches.pop(name, None)
      if name in self._filled:
        self._release(name)

  def forget(self, names: Iterable[str]) -> None:
    """Forgets variables and their slices; somebody may hold the originals.

    Args:
      names: on the mesh.
    """
    gone = sorted(name for name in names if name in self._originals)
    for name in gone:
      if name in self._newer and name not in self._empty:
        self._pull(name)
      self._leave(name)
    if self._store is not None:
      self._store.forget(gone)

  def close(self) -> None:
    """Ends mirroring, as no program will run again; originals without a value know their slices.

    Nothing is computed, as Python may call this at any moment.
    """
    for name in list(self._originals):
      self._leave(name)

  def ran(self, names: Iterable[str]) -> None:
    """Marks the slices that a program has assigned as newer than their originals.

    Args:
      names: the variables that it assigns.
    """
    self._drop_last()
    self._newer.update(names)
    # Models on other meshes may share them.
    tell((self._originals[name] for name in sorted(names)), but=self)
    for name in list(self._filled):
      self._release(name)

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

  def release(self, variable: tf.Variable) -> None:
    """Writes what was assigned to an original to its slices, and empties it; see `Watcher`."""
    name = self._names.get(id(variable))
    if name is not None and name in self._filled:
      self._push(name)
      self._release(name)

  def overwrite(self, variable: tf.Variable, value: tf.Tensor) -> None:
    """Writes a value to the slices, or, if there are none yet, to the original; see `Watcher`."""
    name = self._names[id(variable)]
    self._accessed.discard(name)
    if self._store is not None and name in self._store:
      stored = self._store[name]
      eagerly(lambda: stored.assign(value))
      self._fetches.pop(name, None)  # Of slices that were made by a run that failed afterwards.
      self._release(name)
      return
    if name in self._fetches and spilling.is_wanted():
      self._fetches[name] = spilling.Spilled(value)
      return
    self._fetches.pop(name, None)
    self._newer.discard(name)
    self._empty.discard(name)
    self._filled.add(name)
    eagerly(lambda: _put(variable, value))
    self._seen[name] = value

  def pull(self) -> None:
    """Brings all originals up to date with their slices."""
    for name in sorted(self._newer):
      self._pull(name)

  def push(self) -> None:
    """Brings up to date the slices of originals that Python has assigned since they were equal."""
    for name in sorted(self._accessed):
      self._push(name)

  def _push(self, name: str) -> None:
    self._accessed.discard(name)
    now = self._value(name)
    if not _same(now, self._seen[name]):
      # The program that makes slices takes the value of the original.
      if self._store is not None and name in self._store:
        stored = self._store[name]
        eagerly(lambda: stored.assign(now))
      self._seen[name] = now

  def _release(self, name: str) -> None:
    """Empties a large original, if the slices have its value, and no other mesh shares it."""
    original = self._originals[name]
    has_slices = self._store is not None and name in self._store
    if name in self._accessed or not has_slices or len(_WATCHED[id(original)].watchers) > 1:
      return
    self._newer.add(name)
    self._empty.add(name)
    self._filled.discard(name)
    self._seen.pop(name, None)
    eagerly(lambda: _empty(original))

  def _leave(self, name: str) -> None:
    original = self._originals.pop(name)
    if name in self._newer:
      fetch = self._fetches.pop(name, None)
      if fetch is None:
        assert self._store is not None
        fetch = functools.partial(_whole, self._store[name])
      watch(original, Elsewhere(fetch))
    unwatch(original, self)
    del self._names[id(original)]
    self._seen.pop(name, None)
    for names in (self._newer, self._empty, self._filled, self._accessed):
      names.discard(name)

  def _value(self, name: str) -> tf.Tensor:
    """Reads the current value of an original variable."""
    original = self._originals[name]
    tell([original], but=self)
    return eagerly(original.read_value)

  def _pull(self, name: str) -> None:
    original = self._originals[name]
    fetch = self._fetches.get(name)
    if fetch is None:
      assert self._store is not None
      fetch = functools.partial(_whole, self._store[name])

    def assign() -> tf.Tensor:
      _put(original, fetch())
      return original.read_value()

    self._seen[name] = eagerly(assign)
    self._fetches.pop(name, None)
    self._newer.discard(name)
    self._empty.discard(name)
    if _WATCHED[id(original)].size >= LARGE:
      self._filled.add(name)
    tell([original], but=self)


def _whole(stored: StoredVariable) -> tf.Tensor:
  return tf.convert_to_tensor(stored.gathered())


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
