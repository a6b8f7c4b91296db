"""Kinds of arguments: the values that each accepts, and the error for others.

The base classes of tensors, graph members and shapes are here so that the room can tell them apart
from values, without importing what is above it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, MeshError


class GraphMember:
  """Base class of members of a `graph`; all arguments of one call must have the same one."""

  @property
  def graph(self) -> object:
    """The graph, which is compared by identity."""
    raise NotImplementedError


class SymbolicTensor(GraphMember):
  """Base class of tensors without a value: no number, array or list, though it may look like it."""


class ShownWhole:
  """Base class of objects whose full `repr` is shown in messages, however long."""


class Kind:
  """Kind of the values that a parameter accepts.

  Attributes:
    types: exact types of which every value is accepted; checked first, for speed.
    words: name of the kind in error messages.
    error: class of the error for other values.
  """

  types: frozenset[type] = frozenset()
  words = ""
  error: type[MeshError] = ArgumentError

  def accepts(self, value: Any) -> bool:
    """True if a value is of this kind."""
    raise NotImplementedError

  def is_near(self, value: Any) -> bool:
    """True if a rejected value is almost of this kind: a tensor of another dtype, say."""
    del value
    return False

  def refuse(self, function: str, name: str, value: Any) -> MeshError:
    """The error about a value that is not accepted.

    Args:
      function: its name.
      name: of the argument.
      value: what came.
    """
    advice = self.advice(name, value)
    tail = f"; {advice}" if advice else ""
    return self.error(f"{function}: {name} must be {self.words}, got {shown(value)}{tail}")

  def advice(self, name: str, value: Any) -> str:
    """Hint at an acceptable value, for the error message; "" for none."""
    del name, value
    return ""


def shown(value: Any) -> str:
  """Short text of a value: class, shape and dtype of arrays and tensors."""
  if value is None or isinstance(value, (SymbolicTensor, ShownWhole)):
    return repr(value)
  if hasattr(value, "shape") and hasattr(value, "dtype"):
    kind = "tf.Tensor" if tf.is_tensor(value) else type(value).__name__
    return f"{kind} of shape {value.shape} and dtype {tf.as_dtype(value.dtype).name}"
  text = repr(value)
  text = text if len(text) <= 80 else text[:77] + "..."
  return text if is_record(value) or isinstance(value, type) else f"{type(value).__name__} {text}"


def is_record(value: Any) -> bool:
  """True if it is a named tuple, as a Dimension is."""
  return isinstance(value, tuple) and hasattr(value, "_fields")


def converts(convert: Callable[[Any], Any], value: Any) -> bool:
  """True if a conversion takes the value without TypeError, ValueError or AttributeError."""
  try:
    convert(value)
  # Every error of dimensions is a ValueError, too; a tf.Tensor of a float has no index by the last.
  except (TypeError, ValueError, AttributeError):
    return False
  return True


def plural(words: str) -> str:
  """Plural of a description with an article: of "an mtf.Tensor", "mtf.Tensors"."""
  first, *rest = words.split(" ", 1)
  if first not in ("a", "an") or not rest:
    return words
  noun, *more = rest[0].split(" or ", 1)
  noun += "e" if noun.endswith(("h", "s")) else ""
  return " or ".join([f"{noun}s", *(plural(m) for m in more)])
