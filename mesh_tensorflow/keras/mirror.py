"""The variables of a Keras model and those of the mesh: two copies of a state, and which is newer.

Programs change the slices on the mesh; Python (callbacks, `set_weights`, `reset_metrics`, an
assignment) changes Keras' own variables. `pull` brings over what programs have changed, `push` what
Python has changed. A snapshot of a variable is the tensor that it held when both copies were equal:
TensorFlow shares its memory with the variable until that is assigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf

from mesh_tensorflow.meshes.store import VariableStore


class Mirror:
  """Variables with their copies on a mesh."""

  def __init__(self) -> None:
    self._store: VariableStore | None = None
    self._originals: dict[str, tf.Variable] = {}
    self._seen: dict[str, tf.Tensor] = {}
    self._newer: set[str] = set()

  def __contains__(self, name: str) -> bool:
    return name in self._originals

  @property
  def names(self) -> list[str]:
    """Names of the mesh's variables."""
    return list(self._originals)

  def attach(self, store: VariableStore) -> None:
    """Says where the copies are.

    Args:
      store: the variables of the mesh.
    """
    self._store = store

  def enter(self, variables: Mapping[str, tf.Variable]) -> None:
    """Enters variables whose copies a program is about to make.

    Args:
      variables: name on the mesh -> the original.
    """
    for name, variable in variables.items():
      if name not in self._originals:
        self._originals[name] = variable
        self._seen[name] = variable.read_value()

  def forget(self, names: Iterable[str]) -> None:
    """Forgets variables, and lets go of their copies.

    Args:
      names: on the mesh.
    """
    gone = [name for name in names if name in self._originals]
    for name in gone:
      del self._originals[name], self._seen[name]
      self._newer.discard(name)
    if self._store is not None:
      self._store.forget(gone)

  def ran(self, names: Iterable[str]) -> None:
    """Says that a program ran.

    Args:
      names: the variables that it assigns.
    """
    self._newer.update(names)

  def pull(self, variables: Iterable[tf.Variable] | None = None) -> None:
    """Sets the originals to what programs have made of their copies.

    Args:
      variables: of these only; of all by default.
    """
    for name in self._named(variables):
      if name not in self._newer:
        continue
      original = self._originals[name]
      assert self._store is not None
      if _same(original.read_value(), self._seen[name]):  # Else Python's assignment is the later.
        original.assign(self._store[name].numpy())
        self._seen[name] = original.read_value()
        self._newer.discard(name)

  def push(self, variables: Iterable[tf.Variable] | None = None) -> None:
    """Sets the copies of the originals that Python has assigned to since the two were equal.

    Args:
      variables: of these only; of all by default.
    """
    for name in self._named(variables):
      if self._store is None or name not in self._store:
        continue  # The program that makes it has not run; it will take the value of the original.
      now = self._originals[name].read_value()
      if _same(now, self._seen[name]):
        continue
      self._store[name].assign(now)
      self._seen[name] = now
      self._newer.discard(name)

  def _named(self, variables: Iterable[tf.Variable] | None) -> list[str]:
    if variables is None:
      return self.names
    wanted = {id(v) for v in variables}
    return [name for name, v in self._originals.items() if id(v) in wanted]


def _same(now: tf.Tensor, seen: tf.Tensor) -> bool:
  """Whether two tensors on the host are the same memory, or have the same values."""
  if now is seen:
    return True
  a, b = _view(now), _view(seen)
  if a.ctypes.data == b.ctypes.data and a.nbytes:
    return True
  return a.tobytes() == b.tobytes()  # Bytes: NaN is the same as itself, and 0.0 is not -0.0.


def _view(x: tf.Tensor) -> np.ndarray:
  """The values, without a copy where TensorFlow gives its memory."""
  try:
    return np.asarray(memoryview(x))
  except (TypeError, ValueError, BufferError):
    return np.asarray(x.numpy())
