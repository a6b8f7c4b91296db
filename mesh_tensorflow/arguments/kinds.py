"""Kinds of arguments by annotation: the values accepted, and the error for others."""

from __future__ import annotations

import collections.abc
import copy
import inspect
import operator
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, DTypeError, MeshError


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

  def accepts(self, value: object) -> bool:
    """True if a value is of this kind."""
    raise NotImplementedError

  def is_near(self, value: object) -> bool:
    """True if a rejected value is almost of this kind: a tensor of another dtype, say."""
    del value
    return False

  def refuse(self, function: str, name: str, value: object) -> MeshError:
    """The error about a value that is not accepted.

    Args:
      function: its name.
      name: of the argument.
      value: what came.
    """
    advice = self.advice(name, value)
    tail = f"; {advice}" if advice else ""
    return self.error(f"{function}: {name} must be {self.words}, got {shown(value)}{tail}")

  def advice(self, name: str, value: object) -> str:
    """Hint at an acceptable value, for the error message; "" for none."""
    del name, value
    return ""


def shown(value: object) -> str:
  """Short text of a value: class, shape and dtype of arrays and tensors."""
  if value is None or isinstance(value, (SymbolicTensor, ShownWhole)):
    return repr(value)
  if hasattr(value, "shape") and hasattr(value, "dtype"):
    kind = "tf.Tensor" if tf.is_tensor(value) else type(value).__name__
    return f"{kind} of shape {value.shape} and dtype {tf.as_dtype(value.dtype).name}"
  text = repr(value)
  text = text if len(text) <= 80 else text[:77] + "..."
  return text if is_record(value) or isinstance(value, type) else f"{type(value).__name__} {text}"


def is_record(value: object) -> bool:
  """True if it is a named tuple, as a Dimension is."""
  return isinstance(value, tuple) and hasattr(value, "_fields")


def converts(convert: Callable[[Any], object], value: object) -> bool:
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
  if rest[0].startswith("list of "):
    return f"lists of {rest[0].removeprefix('list of ')}"
  noun, *more = rest[0].split(" or ", 1)
  noun += "e" if noun.endswith(("h", "s")) else ""
  return " or ".join([f"{noun}s", *(plural(m) for m in more)])


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

  def accepts(self, value: object) -> bool:
    array = hasattr(value, "shape") and hasattr(value, "dtype")
    array = array and not isinstance(value, SymbolicTensor)
    return array or Number(whole=False).accepts(value)


class Bool(Kind):
  """Truth values: bools, numbers and None; strings, containers and symbolic tensors are refused."""

  words = "True or False"
  types = frozenset([bool, int, type(None)])

  def accepts(self, value: object) -> bool:
    return Number(whole=False).accepts(value)


class Text(Kind):
  """A str."""

  words = "a string"
  types = frozenset([str])

  def accepts(self, value: object) -> bool:
    return isinstance(value, str)


class DType(Kind):
  """Values that `tf.as_dtype` accepts, except None, tensors and arrays."""

  words = "a dtype"
  error = DTypeError
  types = frozenset([tf.DType])

  def accepts(self, value: object) -> bool:
    if value is None or isinstance(value, (SymbolicTensor, np.ndarray)) or tf.is_tensor(value):
      return False
    return converts(tf.as_dtype, value)

  def advice(self, name: str, value: object) -> str:
    del value
    return "as tf.float32 or tf.int32"


class FloatDType(DType):
  """A floating dtype."""

  words = "a floating dtype"
  types = frozenset()

  def accepts(self, value: object) -> bool:
    return super().accepts(value) and tf.as_dtype(value).is_floating


class Function(Kind):
  """Callables."""

  words = "a function"

  def accepts(self, value: object) -> bool:
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

  def accepts(self, value: object) -> bool:
    return isinstance(value, self.cls)


class SequenceOf(Kind):
  """Lists and other re-iterable containers; iterators are accepted unchecked."""

  def __init__(self, element: Kind | None):
    self.element = element
    self.words = f"a list of {plural(element.words)}" if element else "a list"
    self.error = element.error if element else ArgumentError

  def accepts(self, value: object) -> bool:
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

  def refuse(self, function: str, name: str, value: object) -> MeshError:
    if isinstance(value, (list, tuple)) and not is_record(value):
      for i, v in enumerate(value):
        if self.element and type(v) not in self.element.types and not self.element.accepts(v):
          return self.element.refuse(function, f"{name}[{i}]", v)
    return super().refuse(function, name, value)

  def advice(self, name: str, value: object) -> str:
    one = self.element is not None and self.element.accepts(value)
    return f"write [{name}]" if one else ""


class MappingOf(Kind):
  """Mappings; a kind of None accepts anything."""

  def __init__(self, key: Kind | None, element: Kind | None):
    self.parts = (key, element)
    words = [plural(k.words) if k else "anything" for k in self.parts]
    self.words = f"a dict from {words[0]} to {words[1]}"

  def accepts(self, value: object) -> bool:
    return isinstance(value, collections.abc.Mapping) and all(
      k is None or type(v) in k.types or k.accepts(v)
      for item in value.items()
      for k, v in zip(self.parts, item)
    )

  def refuse(self, function: str, name: str, value: object) -> MeshError:
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

  def accepts(self, value: object) -> bool:
    return any(k.accepts(value) for k in self.kinds)

  def refuse(self, function: str, name: str, value: object) -> MeshError:
    containers = [k for k in self.kinds if isinstance(k, (SequenceOf, MappingOf))]
    if isinstance(value, (list, dict)) and len(containers) == 1:
      return containers[0].refuse(function, name, value)
    nearest = next((k for k in self.kinds if k.is_near(value)), None)
    if nearest is not None:
      return nearest.refuse(function, name, value)
    return super().refuse(function, name, value)

  def advice(self, name: str, value: object) -> str:
    return next(filter(None, (k.advice(name, value) for k in self.kinds)), "")


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


def register(annotation: object, make: Callable[[], Kind]) -> None:
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


def kind_of(annotation: object) -> Kind | None:
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


def _kind_of_union(given: Sequence[object]) -> Kind | None:
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
