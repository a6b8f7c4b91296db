"""Keras' own `fit`, `evaluate` and `predict`, with the mesh's functions in the place of Keras'.

While a loop runs, the model has instance attributes that shadow the methods which make the
functions of a step. So the loop, the history, the progress bar, the adapters of data and the
callbacks are those of the installed Keras.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from mesh_tensorflow.keras import steps

_LOG = logging.getLogger("mesh_tensorflow")


@contextlib.contextmanager
def replaced(model: keras.Model, attributes: Mapping[str, Any]) -> Iterator[None]:
  """Sets attributes of a model, and in the end removes them, or sets them back.

  What somebody else has set meanwhile stays: `compile` in a callback forgets Keras' functions.

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
    for name, value in attributes.items():
      if model.__dict__.get(name) is not value:
        continue
      if name in before:
        setattr(model, name, before[name])
      else:
        delattr(model, name)


def without_distribution(method: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps a method that would ask Keras' backend to distribute tensors; TensorFlow's cannot.

  Args:
    method: is called while no `keras.distribution` is set.
  """

  @functools.wraps(method)
  def call(*args: Any, **kwargs: Any) -> Any:
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
      return method(*args, **kwargs)
    finally:
      keras.distribution.set_distribution(before)

  return call


class Unsplit:
  """Wraps methods of a model that do not run on the mesh: the first call of each logs a warning.

  Args:
    model: the model.
  """

  # Of keras-hub's models that generate images.
  NAMES = ("generate",)

  def __init__(self, model: keras.Model):
    self._model = model
    self._told: set[str] = set()

  def methods(self) -> dict[str, Callable[..., Any]]:
    """The wrapped methods that the model has, by name."""
    if steps.generates(self._model):
      return {}
    return {name: self.method(name) for name in self.NAMES if hasattr(self._model, name)}

  def method(self, name: str) -> Callable[..., Any]:
    """Wraps a method.

    Args:
      name: its name, one of `NAMES`.
    """
    plain = getattr(self._model, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
      if name not in self._told:
        self._told.add(name)
        _LOG.warning(
          "mtf.keras: %s.%s() is not split over the mesh: it runs in Keras alone, on one device, "
          "with all weights whole; fit, evaluate and predict are split",
          *(self._model.name, name),
        )
      return plain(*args, **kwargs)

    return call
