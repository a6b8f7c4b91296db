"""Kinds of what Python, NumPy and TensorFlow have: numbers, texts, dtypes, functions, objects."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.kind import Kind, SymbolicTensor, converts
from mesh_tensorflow.errors import ArgumentError, DTypeError, MeshError


class Number(Kind):
  """An int or a float, or a complex; or an array or tf.Tensor of no dimensions."""

  def __init__(self, whole: bool, error: type[MeshError] = ArgumentError, real: bool = True):
    self.whole = whole
    self.real = real
    self.error = error
    self.words = "an integer" if whole else "a number"
    self.types = frozenset([int, bool] if whole else [int, float, bool])

  def accepts(self, value: Any) -> bool:
    if self.whole:
      return converts(operator.index, value)
    if getattr(value, "shape", None) is not None and hasattr(value, "dtype"):
      return not isinstance(value, SymbolicTensor) and len(value.shape) == 0
    if isinstance(value, complex):
      return not self.real
    return hasattr(value, "__float__") and not isinstance(value, (str, bytes))


class Numbers(Kind):
  """A number, or an array or tf.Tensor of any shape."""

  words = "a number or an array"
  types = frozenset([int, float, bool])

  def accepts(self, value: Any) -> bool:
    array = hasattr(value, "shape") and hasattr(value, "dtype")
    array = array and not isinstance(value, SymbolicTensor)
    return array or Number(whole=False).accepts(value)


class Bool(Kind):
  """Truth values: bools, numbers and None; strings, containers and symbolic tensors are refused."""

  words = "True or False"
  types = frozenset([bool, int, type(None)])

  def accepts(self, value: Any) -> bool:
    return Number(whole=False).accepts(value)


class Text(Kind):
  """A str."""

  words = "a string"
  types = frozenset([str])

  def accepts(self, value: Any) -> bool:
    return isinstance(value, str)


class DType(Kind):
  """Values that `tf.as_dtype` accepts, except None, tensors and arrays."""

  words = "a dtype"
  error = DTypeError
  types = frozenset([tf.DType])

  def accepts(self, value: Any) -> bool:
    if value is None or isinstance(value, (SymbolicTensor, np.ndarray)) or tf.is_tensor(value):
      return False
    return converts(tf.as_dtype, value)

  def advice(self, name: str, value: Any) -> str:
    del value
    return "as tf.float32 or tf.int32"


class FloatDType(DType):
  """A floating dtype."""

  words = "a floating dtype"
  types = frozenset()

  def accepts(self, value: Any) -> bool:
    return super().accepts(value) and tf.as_dtype(value).is_floating


class Function(Kind):
  """Callables."""

  words = "a function"

  def accepts(self, value: Any) -> bool:
    return callable(value)


# Errors about what is not of a class.
error_of: dict[type, type[MeshError]] = {}


class Instance(Kind):
  """An object of a class."""

  def __init__(self, cls: type):
    self.cls = cls
    homes = {"mesh_tensorflow": "an mtf.", "tensorflow": "a tf."}
    self.words = homes.get(cls.__module__.split(".")[0], "a ") + cls.__name__.lstrip("_")
    self.error = error_of.get(cls, ArgumentError)
    self.types = frozenset([cls])

  def accepts(self, value: Any) -> bool:
    return isinstance(value, self.cls)
