"""Kinds of arguments by annotation: the values accepted, and the error for others.

The annotations are read by `checking`. Here is which of them stands for which kind; the kinds of
what Python, NumPy and TensorFlow have are in `values` and `containers`. Rooms above register what
is theirs: `program.argument_kinds` tensors and dimensions, `meshes.layout` layouts.
"""

from __future__ import annotations

import collections.abc
import copy
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import tensorflow as tf

from mesh_tensorflow.arguments.containers import MappingOf, SequenceOf, UnionOf
from mesh_tensorflow.arguments.kind import Kind
from mesh_tensorflow.arguments.values import (
  Bool,
  DType,
  FloatDType,
  Function,
  Instance,
  Number,
  Numbers,
  Text,
  error_of,
)
from mesh_tensorflow.errors import DTypeError, MeshError

_UNIONS = (typing.Union, types.UnionType)
_Class = TypeVar("_Class", bound=type)

# Annotation -> what makes its kind. Rooms above add theirs with `register`.
_EXACT: dict[Any, Callable[[], Kind]] = {
  int: lambda: Number(whole=True),
  float: lambda: Number(whole=False),
  bool: Bool,
  str: Text,
  tf.DType: DType,
}
# Members of a union that are one kind together, and what makes it.
_TOGETHER: list[tuple[frozenset[Any], Callable[[], Kind]]] = []
_named: dict[str, type] = {}


def register(annotation: Any, make: Callable[[], Kind]) -> None:
  """Registers the kind of an annotation, also where it is part of another one.

  Args:
    annotation: a class, an alias, or a union, also recognized inside a larger union.
    make: makes the `Kind`.
  """
  _EXACT[annotation] = make
  members = typing.get_args(annotation)
  if typing.get_origin(annotation) in _UNIONS and type(None) not in members:
    _TOGETHER.append((frozenset(members), make))


def register_class(cls: _Class, error: type[MeshError] | None = None) -> _Class:
  """Class decorator: lets annotations in lower packages name a class they cannot import.

  Args:
    cls: the class.
    error: raised where an argument is not of the class; by default `ArgumentError`.

  Returns:
    The class.
  """
  _named[cls.__name__] = cls
  if error is not None:
    error_of[cls] = error
  return cls


def class_named(name: str) -> type:
  """The class that was registered under a name; a KeyError if there is none."""
  return _named[name]


def kind_of(annotation: Any) -> Kind | None:
  """The kind that an annotation stands for; None if everything is accepted."""
  if annotation in (Any, inspect.Parameter.empty, object):
    return None
  if annotation in _EXACT:
    return _EXACT[annotation]()
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Annotated:
    for a in args[1:]:
      if isinstance(a, Kind):
        return a
    # Another error than that of the type alone.
    kind = copy.copy(kind_of(args[0]))
    if kind is not None:
      kind.error = args[1]
    return kind
  if origin in _UNIONS:
    return _kind_of_union(args)
  if origin is collections.abc.Callable or annotation is collections.abc.Callable:
    return Function()
  if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
    return MappingOf(*(kind_of(a) for a in args))
  if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
    elements = [a for a in args if a is not Ellipsis]
    return SequenceOf(kind_of(elements[0]) if len(elements) == 1 else None)
  return Instance(annotation) if isinstance(annotation, type) else None


def _kind_of_union(given: Sequence[Any]) -> Kind | None:
  members = [m for m in given if m is not type(None)]
  kinds: list[Kind] = []
  rest = list(members)
  for together, make in _TOGETHER:
    if together <= set(rest):
      kinds.append(make())
      rest = [m for m in rest if m not in together]
  for m in rest:
    kind_of_member = kind_of(m)
    if kind_of_member is None:
      return None
    kinds.append(kind_of_member)
  kind = kinds[0] if len(kinds) == 1 else UnionOf(kinds)
  if len(members) < len(given):
    kind = copy.copy(kind)
    kind.types = kind.types | {type(None)}
  return kind


# Texts too, and no dicts.
AnySequence: TypeAlias = Annotated[Sequence[Any], Instance(Sequence)]
# What `tf.as_dtype` takes; the second: if the dtype is floating.
DTypeLike: TypeAlias = Annotated[Any, DType()]
FloatDTypeLike: TypeAlias = Annotated[Any, FloatDType()]
# A number, or an array or tf.Tensor of no dimensions.
Scalar: TypeAlias = Annotated[Any, Number(whole=False, error=DTypeError, real=False)]
# Besides, arrays and tf.Tensors of any shape.
ArrayOrScalar: TypeAlias = Annotated[Any, Numbers()]
