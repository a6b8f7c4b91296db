"""The variables of a Keras model and those of the mesh: two copies of a state, and which is newer.

Programs change the slices on the mesh; Python (callbacks, `set_weights`, `reset_metrics`, an
assignment) changes Keras' own variables. Neither is copied before somebody asks: who accesses one
of Keras' variables first gets what programs have made of it (`accessed`), and a program first gets
what was written to those that somebody has accessed (`push`). A snapshot of a variable is the
tensor that it held when both copies were equal: TensorFlow shares its memory with the variable
until that is assigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf

from mesh_tensorflow.keras import access
from mesh_tensorflow.meshes.store import VariableStore


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
        access.watch(variable, self)

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
    access.tell((self._originals[name] for name in names), but=self)

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
    access.unwatch(original, self)
    del self._names[id(original)], self._seen[name]
    self._newer.discard(name)
    self._accessed.discard(name)

  def _value(self, name: str) -> tf.Tensor:
    """Reads the current value of an original variable."""
    original = self._originals[name]
    access.tell([original], but=self)
    return access.eagerly(original.read_value)

  def _pull(self, name: str) -> None:
    assert self._store is not None
    original, copy = self._originals[name], self._store[name]
    self._newer.discard(name)

    def assign() -> tf.Tensor:
      original.assign(copy.numpy())
      return original.read_value()

    self._seen[name] = access.eagerly(assign)
    access.tell([original], but=self)


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
