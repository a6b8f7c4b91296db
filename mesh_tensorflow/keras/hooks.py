"""Keras' own `fit`, `evaluate` and `predict`, with the mesh's functions in the place of Keras'.

While a loop runs, the model has instance attributes that shadow methods: those that make the
functions of a step, and those that read or write the state. So the loop, the history, the progress
bar, the adapters of data and the callbacks are those of the installed Keras, and a callback that
calls `self.model.save` saves what the mesh has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from mesh_tensorflow.keras.mirror import Mirror


@contextlib.contextmanager
def replaced(model: keras.Model, attributes: Mapping[str, Any]) -> Iterator[None]:
  """Sets attributes of a model, and in the end removes them, or sets them back.

  Args:
    model: the model.
    attributes: by name.
  """
  before = {name: model.__dict__[name] for name in attributes if name in model.__dict__}
  try:
    for name, value in attributes.items():
      setattr(model, name, value)
    yield
  finally:
    for name in attributes:
      if name in before:
        setattr(model, name, before[name])
      elif name in model.__dict__:
        delattr(model, name)


def after_pull(method: Callable[..., Any], mirror: Mirror) -> Callable[..., Any]:
  """A method that reads the state: what the mesh has is brought over before.

  Args:
    method: of the model.
    mirror: of its variables.
  """

  def call(*args: Any, **kwargs: Any) -> Any:
    mirror.pull()
    return method(*args, **kwargs)

  return call


def before_push(method: Callable[..., Any], mirror: Mirror) -> Callable[..., Any]:
  """A method that writes the state: what it writes is brought to the mesh.

  Args:
    method: of the model.
    mirror: of its variables.
  """

  def call(*args: Any, **kwargs: Any) -> Any:
    mirror.pull()  # It may write a part only.
    result = method(*args, **kwargs)
    mirror.push()
    return result

  return call


class FirstCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras says nothing of types.
  """Before those of the user: they find in Keras' variables what the mesh has.

  Args:
    mirror: of the variables.
  """

  def __init__(self, mirror: Mirror):
    super().__init__()
    self._mirror = mirror

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    self._mirror.pull()

  def on_train_end(self, logs: Any = None) -> None:
    self._mirror.pull()

  def on_test_begin(self, logs: Any = None) -> None:
    self._mirror.pull()

  def on_test_end(self, logs: Any = None) -> None:
    self._mirror.pull()


class LastCallback(keras.callbacks.Callback):  # type: ignore[misc]
  """After those of the user: what they assigned to Keras' variables is brought to the mesh.

  Args:
    mirror: of the variables.
    of_batches: the variables that are looked at after each batch, too: what no program assigns,
      as a learning rate.
  """

  def __init__(self, mirror: Mirror, of_batches: Callable[[], list[Any]]):
    super().__init__()
    self._mirror = mirror
    self._of_batches = of_batches

  def on_train_begin(self, logs: Any = None) -> None:
    self._mirror.push()

  def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
    self._mirror.push()

  def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
    self._mirror.push()

  def on_train_end(self, logs: Any = None) -> None:
    self._mirror.push()

  def on_test_begin(self, logs: Any = None) -> None:
    self._mirror.push()

  def on_test_end(self, logs: Any = None) -> None:
    self._mirror.push()

  def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
    self._mirror.push(self._of_batches())


@contextlib.contextmanager
def around(callbacks: Any, first: Any, last: Any) -> Iterator[Any]:
  """Callbacks of a user between two others.

  Args:
    callbacks: None, a callback, a list, or a `keras.callbacks.CallbackList`.
    first: a callback.
    last: a callback.

  Yields:
    What to give to `fit`.
  """
  if isinstance(callbacks, keras.callbacks.CallbackList):
    for own in (first, last):
      own.set_model(callbacks.callbacks[0].model if callbacks.callbacks else None)
      own.set_params(callbacks.params)
    callbacks.callbacks.insert(0, first)
    callbacks.callbacks.append(last)
    try:
      yield callbacks
    finally:
      callbacks.callbacks.remove(first)
      callbacks.callbacks.remove(last)
  elif callbacks is None:
    yield []
  else:
    theirs = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    yield [first, *theirs, last]
