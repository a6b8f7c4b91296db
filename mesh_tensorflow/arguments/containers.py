"""Kinds of containers, and unions of kinds."""

from __future__ import annotations

import collections.abc
from collections.abc import Sequence
from typing import Any

from mesh_tensorflow.arguments.kind import Kind, SymbolicTensor, is_record, plural, shown
from mesh_tensorflow.errors import ArgumentError, MeshError


class SequenceOf(Kind):
  """Lists and other re-iterable containers; iterators are accepted unchecked."""

  def __init__(self, element: Kind | None):
    self.element = element
    self.words = f"a list of {plural(element.words)}" if element else "a list"
    self.error = element.error if element else ArgumentError

  def accepts(self, value: Any) -> bool:
    if type(value) is not list and type(value) is not tuple:
      if isinstance(value, collections.abc.Iterator):
        return True
      if isinstance(value, (str, bytes, SymbolicTensor)):
        return False
      if not isinstance(value, collections.abc.Iterable):
        return False
    if self.element is None:
      return not hasattr(value, "dtype")
    types_, accepts = self.element.types, self.element.accepts
    try:
      for v in value:
        if type(v) not in types_ and not accepts(v):
          return False
      return True
    except TypeError:  # A symbolic tf.Tensor, which cannot be gone through.
      return False

  def refuse(self, function: str, name: str, value: Any) -> MeshError:
    if isinstance(value, (list, tuple)) and not is_record(value):
      for i, v in enumerate(value):
        if self.element and type(v) not in self.element.types and not self.element.accepts(v):
          return self.element.refuse(function, f"{name}[{i}]", v)
    return super().refuse(function, name, value)

  def advice(self, name: str, value: Any) -> str:
    one = self.element is not None and self.element.accepts(value)
    return f"write [{name}]" if one else ""


class MappingOf(Kind):
  """Mappings; a kind of None accepts anything."""

  def __init__(self, key: Kind | None, element: Kind | None):
    self.parts = (key, element)
    words = [plural(k.words) if k else "anything" for k in self.parts]
    self.words = f"a dict from {words[0]} to {words[1]}"

  def accepts(self, value: Any) -> bool:
    return isinstance(value, collections.abc.Mapping) and all(
      k is None or type(v) in k.types or k.accepts(v)
      for item in value.items()
      for k, v in zip(self.parts, item)
    )

  def refuse(self, function: str, name: str, value: Any) -> MeshError:
    if isinstance(value, collections.abc.Mapping):
      for key, v in value.items():
        for kind, part in zip(self.parts, (key, v)):
          if kind is not None and type(part) not in kind.types and not kind.accepts(part):
            return kind.refuse(function, f"{name}[{shown(key)}]", part)
    return super().refuse(function, name, value)


class UnionOf(Kind):
  """Values of any one of several kinds."""

  def __init__(self, kinds: Sequence[Kind]):
    self.kinds = list(kinds)
    self.words = " or ".join(k.words for k in kinds)
    self.types = frozenset(t for k in kinds for t in k.types)
    self.error = next((k.error for k in kinds if k.error is not ArgumentError), ArgumentError)

  def accepts(self, value: Any) -> bool:
    return any(k.accepts(value) for k in self.kinds)

  def refuse(self, function: str, name: str, value: Any) -> MeshError:
    containers = [k for k in self.kinds if isinstance(k, (SequenceOf, MappingOf))]
    if isinstance(value, (list, dict)) and len(containers) == 1:
      return containers[0].refuse(function, name, value)
    nearest = next((k for k in self.kinds if k.is_near(value)), None)
    if nearest is not None:
      return nearest.refuse(function, name, value)
    return super().refuse(function, name, value)

  def advice(self, name: str, value: Any) -> str:
    return next(filter(None, (k.advice(name, value) for k in self.kinds)), "")
