"""Kinds of arguments: what an annotation accepts, and what the error says if it does not.

The language's annotations are read by `arguments`. Besides `Tensor`, `Dimension`, `ShapeLike`
and Python's types there are those below: tensors of certain dtypes.
"""

from __future__ import annotations

import collections.abc
import copy
import inspect
import operator
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np
import tensorflow as tf

from mesh_tensorflow.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  ShapeLike,
  convert_to_dimension,
  convert_to_shape,
)
from mesh_tensorflow.errors import (
  ArgumentError,
  DimensionTypeError,
  DTypeError,
  LayoutTypeError,
  MeshError,
  VariableError,
)
from mesh_tensorflow.layout import LayoutLike, LayoutRules
from mesh_tensorflow.tensor import Tensor


class DTypes:
  """The dtypes that a function takes.

  Args:
    words: for messages.
    legal: whether a tf.DType is among them.
    advice: how to get there; `{name}` is the argument.
  """

  def __init__(self, words: str, legal: Callable[[tf.DType], bool], advice: str):
    self.words = words
    self.advice = advice
    # Hashing a tf.DType costs less than asking it what it is.
    self.legal = frozenset(d for d in map(tf.as_dtype, _DTYPE_NAMES) if legal(d))


_DTYPE_NAMES = (
  "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64"
  " complex64 complex128 string"
).split()


class Kind:
  """What a parameter accepts.

  Attributes:
    types: exact types of which every value is accepted: a quick first look.
    is_about_lowering: whether what is wrong would come out in the lowering, not at once.
    words: what it is, for messages.
    error: the class of the error.
  """

  types: frozenset[type] = frozenset()
  is_about_lowering = False
  words = ""
  error: type[MeshError] = ArgumentError

  def accepts(self, value: Any) -> bool:
    """Whether a value is of this kind."""
    raise NotImplementedError

  def quick(self, name: str, bind: Callable[[Any], str]) -> str:
    """An expression that is true of what is plainly right; of the rest `accepts` is asked.

    Args:
      name: of the argument, as a variable.
      bind: gives an object a name that the expression may use.
    """
    return f"type({name}) in {bind(self.types)}" if self.types else f"{bind(self.accepts)}({name})"

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
    """What would do, or ""."""
    del name, value
    return ""


def shown(value: Any) -> str:
  """A value, short: class, shape and dtype of what has many elements."""
  if value is None or isinstance(value, (Tensor, Shape)):
    return repr(value)
  if hasattr(value, "shape") and hasattr(value, "dtype"):
    kind = "tf.Tensor" if tf.is_tensor(value) else type(value).__name__
    return f"{kind} of shape {value.shape} and dtype {tf.as_dtype(value.dtype).name}"
  text = repr(value)
  text = text if len(text) <= 80 else text[:77] + "..."
  return text if isinstance(value, (Dimension, type)) else f"{type(value).__name__} {text}"


class _Tensor(Kind):
  words = "an mtf.Tensor"
  types = frozenset([Tensor])

  def __init__(self, dtypes: DTypes | None = None):
    self.dtypes = dtypes
    if dtypes:
      self.types = frozenset()
      self.is_about_lowering = True

  def accepts(self, value: Any) -> bool:
    return isinstance(value, Tensor) and (self.dtypes is None or value.dtype in self.dtypes.legal)

  def quick(self, name: str, bind: Callable[[Any], str]) -> str:
    is_tensor = f"type({name}) is {bind(Tensor)}"
    if self.dtypes is None:
      return is_tensor
    # There is one object of each tf.DType; to hash it takes longer.
    return f"{is_tensor} and id({name}._dtype) in {bind(frozenset(map(id, self.dtypes.legal)))}"

  def refuse(self, function: str, name: str, value: Any) -> MeshError:
    if not isinstance(value, Tensor):
      return super().refuse(function, name, value)
    d = self.dtypes
    return DTypeError(
      f"{function}: {name} must be {d.words}, got {value}; {d.advice.format(name=name)}"
    )

  def advice(self, name: str, value: Any) -> str:
    if tf.is_tensor(value) or isinstance(value, (np.ndarray, np.generic, int, float, tf.Variable)):
      return f"use mtf.import_tf_tensor(mesh, {name}, shape) to bring it into the graph"
    outputs = getattr(value, "outputs", None)
    if isinstance(outputs, list) and outputs:
      return f"an operation is no tensor: take its outputs, {name}.outputs[0]"
    return ""


class _Dimension(Kind):
  words = "a dimension"
  error = DimensionTypeError

  def __init__(self, pairs: bool):
    self.pairs = pairs

  def accepts(self, value: Any) -> bool:
    if isinstance(value, Dimension):
      return isinstance(value[0], str) and type(value[1]) is int and value[1] >= 0
    return (
      self.pairs and isinstance(value, (tuple, list)) and _converts(convert_to_dimension, value)
    )

  def quick(self, name: str, bind: Callable[[Any], str]) -> str:
    return (
      f"type({name}) is {bind(Dimension)} and type({name}[0]) is str and type({name}[1]) is int "
      f"and {name}[1] >= 0"
    )

  def refuse(self, function: str, name: str, value: Any) -> MeshError:
    if isinstance(value, (tuple, list)) and (self.pairs or isinstance(value, Dimension)):
      try:
        convert_to_dimension(value)
      except MeshError as e:
        return type(e)(f"{function}: {name}: {e}")
    return super().refuse(function, name, value)

  def advice(self, name: str, value: Any) -> str:
    if isinstance(value, str):
      return f'write mtf.Dimension("{value}", size)'
    if isinstance(value, Shape) and len(value) == 1:
      return f"write {name}[0]"
    return "write mtf.Dimension(name, size)"


class _ShapeLike(Kind):
  words = "a shape"
  types = frozenset([Shape])

  def accepts(self, value: Any) -> bool:
    return value is not None and _converts(convert_to_shape, value)

  def quick(self, name: str, bind: Callable[[Any], str]) -> str:
    return f"type({name}) is {bind(Shape)} or {bind(_is_list_of_dimensions)}({name})"

  def refuse(self, function: str, name: str, value: Any) -> MeshError:
    if value is None or isinstance(value, Tensor) or not hasattr(value, "__len__"):
      error = DimensionTypeError
      what = f"write {name}.shape" if isinstance(value, Tensor) else 'write [dim, ...] or "a:2,b:3"'
      return error(f"{function}: {name} must be a shape, got {shown(value)}; {what}")
    try:
      convert_to_shape(value)
    except MeshError as e:
      return type(e)(f"{function}: {name}: {e}")
    except (TypeError, ValueError) as e:
      return DimensionTypeError(f"{function}: {name} must be a shape, got {shown(value)}: {e}")
    return super().refuse(function, name, value)


class _LayoutLike(Kind):
  words = "a layout"
  error = LayoutTypeError
  types = frozenset([LayoutRules, str, dict])

  def accepts(self, value: Any) -> bool:
    return isinstance(value, collections.abc.Iterable) and not hasattr(value, "dtype")

  def advice(self, name: str, value: Any) -> str:
    del name, value
    return "write it as 'batch:rows,d_ff:cols', or {} to split nothing"


def _is_list_of_dimensions(value: Any) -> bool:
  if type(value) is not list and type(value) is not tuple:
    return False
  for d in value:
    if type(d) is not Dimension:
      return False
  return True


def _converts(convert: Callable[[Any], Any], value: Any) -> bool:
  try:
    convert(value)
  except (TypeError, ValueError):  # Every error of dimensions is a ValueError, too.
    return False
  return True


class _Number(Kind):
  """An int or a float, or a complex; or an array or tf.Tensor of no dimensions."""

  def __init__(self, whole: bool, error: type[MeshError] = ArgumentError, real: bool = True):
    self.whole = whole
    self.real = real
    self.error = error
    self.is_about_lowering = not whole
    self.words = "an integer" if whole else "a number"
    self.types = frozenset([int, bool] if whole else [int, float, bool])

  def accepts(self, value: Any) -> bool:
    if self.whole:
      return _converts(operator.index, value)
    if getattr(value, "shape", None) is not None and hasattr(value, "dtype"):
      return not isinstance(value, Tensor) and len(value.shape) == 0
    if isinstance(value, complex):
      return not self.real
    return hasattr(value, "__float__") and not isinstance(value, (str, bytes))


class _Numbers(Kind):
  """A number, or an array or tf.Tensor of any shape."""

  words = "a number or an array"
  types = frozenset([int, float, bool])

  def accepts(self, value: Any) -> bool:
    array = hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, Tensor)
    return array or _Number(whole=False).accepts(value)


class _Bool(Kind):
  """Anything but what is always true, or means something else: a text, a container, a tensor."""

  words = "True or False"
  types = frozenset([bool, int, type(None)])

  def accepts(self, value: Any) -> bool:
    return _Number(whole=False).accepts(value)


class _Text(Kind):
  words = "a string"
  types = frozenset([str])

  def accepts(self, value: Any) -> bool:
    return isinstance(value, str)


class _DType(Kind):
  words = "a dtype"
  error = DTypeError
  types = frozenset([tf.DType])

  def accepts(self, value: Any) -> bool:
    if value is None or isinstance(value, (Tensor, np.ndarray)) or tf.is_tensor(value):
      return False
    return _converts(tf.as_dtype, value)

  def advice(self, name: str, value: Any) -> str:
    del value
    return "as tf.float32 or tf.int32"


class _FloatDType(_DType):
  words = "a floating dtype"
  types = frozenset()

  def accepts(self, value: Any) -> bool:
    return super().accepts(value) and tf.as_dtype(value).is_floating


class _Callable(Kind):
  words = "a function"
  is_about_lowering = True

  def accepts(self, value: Any) -> bool:
    return callable(value)

  def quick(self, name: str, bind: Callable[[Any], str]) -> str:
    return f"callable({name})"


# Errors about what is not of a class, by its name.
_ERRORS: dict[str, type[MeshError]] = {
  "Shape": DimensionTypeError,
  "LayoutRules": LayoutTypeError,
  "Variable": VariableError,
  "VariableDType": DTypeError,
}


class _Instance(Kind):
  def __init__(self, cls: type):
    self.cls = cls
    homes = {"mesh_tensorflow": "an mtf.", "tensorflow": "a tf."}
    self.words = homes.get(cls.__module__.split(".")[0], "a ") + cls.__name__
    self.error = _ERRORS.get(cls.__name__, ArgumentError)
    self.types = frozenset([cls])

  def quick(self, name: str, bind: Callable[[Any], str]) -> str:
    return f"isinstance({name}, {bind(self.cls)})"

  def accepts(self, value: Any) -> bool:
    return isinstance(value, self.cls)


class _Sequence(Kind):
  """A list, or what can be gone through more than once; of an iterator nothing is known."""

  def __init__(self, element: Kind | None):
    self.element = element
    self.words = f"a list of {plural(element.words)}" if element else "a list"
    self.error = element.error if element else ArgumentError

  def accepts(self, value: Any) -> bool:
    if type(value) is not list and type(value) is not tuple:
      if isinstance(value, collections.abc.Iterator):
        return True
      if isinstance(value, (str, bytes, Tensor)) or not isinstance(value, collections.abc.Iterable):
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

  def quick(self, name: str, bind: Callable[[Any], str]) -> str:
    if self.element is None:
      return f"{bind(self.accepts)}({name})"
    # As `accepts`, of lists and tuples; with the element's expression in its place.
    bound: dict[str, Any] = {}

    def bind_inside(value: Any) -> str:
      bound[f"_{len(bound)}"] = value
      return f"_{len(bound) - 1}"

    test = self.element.quick("v", bind_inside)
    exec(  # noqa: S102 - made of the line above
      "def all_right(value):\n"
      "  if type(value) is not list and type(value) is not tuple:\n    return False\n"
      f"  for v in value:\n    if not ({test}):\n      return False\n  return True\n",
      bound,
    )
    return f"{bind(bound['all_right'])}({name})"

  def refuse(self, function: str, name: str, value: Any) -> MeshError:
    if isinstance(value, (list, tuple)) and not isinstance(value, Dimension):
      for i, v in enumerate(value):
        if self.element and type(v) not in self.element.types and not self.element.accepts(v):
          return self.element.refuse(function, f"{name}[{i}]", v)
    return super().refuse(function, name, value)

  def advice(self, name: str, value: Any) -> str:
    one = self.element is not None and self.element.accepts(value)
    return f"write [{name}]" if one else ""


class _Mapping(Kind):
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


class _Union(Kind):
  def __init__(self, kinds: Sequence[Kind]):
    self.kinds = list(kinds)
    self.words = " or ".join(k.words for k in kinds)
    self.types = frozenset(t for k in kinds for t in k.types)
    self.error = next((k.error for k in kinds if k.error is not ArgumentError), ArgumentError)

  def accepts(self, value: Any) -> bool:
    return any(k.accepts(value) for k in self.kinds)

  def quick(self, name: str, bind: Callable[[Any], str]) -> str:
    return " or ".join(f"({k.quick(name, bind)})" for k in self.kinds)

  def refuse(self, function: str, name: str, value: Any) -> MeshError:
    containers = [k for k in self.kinds if isinstance(k, (_Sequence, _Mapping))]
    if isinstance(value, (list, dict)) and len(containers) == 1:
      return containers[0].refuse(function, name, value)
    if isinstance(value, Tensor):
      for k in self.kinds:
        if isinstance(k, _Tensor):
          return k.refuse(function, name, value)
    return super().refuse(function, name, value)

  def advice(self, name: str, value: Any) -> str:
    return next(filter(None, (k.advice(name, value) for k in self.kinds)), "")


def plural(words: str) -> str:
  """What stands for one, for several: of "an mtf.Tensor", "mtf.Tensors"."""
  first, *rest = words.split(" ", 1)
  if first not in ("a", "an") or not rest:
    return words
  noun, *more = rest[0].split(" or ", 1)
  noun += "e" if noun.endswith(("h", "s")) else ""
  return " or ".join([f"{noun}s", *(plural(m) for m in more)])


_PAIR = tuple[str, int]
_SIMPLE: dict[Any, Callable[[], Kind]] = {
  Tensor: _Tensor,
  Dimension: lambda: _Dimension(pairs=False),
  int: lambda: _Number(whole=True),
  float: lambda: _Number(whole=False),
  bool: _Bool,
  str: _Text,
  tf.DType: _DType,
}


def kind_of(annotation: Any) -> Kind | None:
  """The kind that an annotation stands for; None if everything is accepted."""
  if annotation in (Any, inspect.Parameter.empty, object):
    return None
  # ShapeLike has None in it, which only a parameter accepts whose default it is.
  if annotation == ShapeLike:
    return _ShapeLike()
  if annotation in (LayoutLike, LayoutLike | None):
    return _LayoutLike()
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is Annotated:
    for a in args[1:]:
      if isinstance(a, Kind):
        return a
    # Another error than that of the type alone.
    kind = copy.copy(kind_of(args[0]))
    kind.error = args[1]
    return kind
  if origin in (typing.Union, types.UnionType):
    return _kind_of_union(args)
  if origin is collections.abc.Callable or annotation is collections.abc.Callable:
    return _Callable()
  if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
    return _Mapping(*(kind_of(a) for a in args))
  if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
    args = [a for a in args if a is not Ellipsis]
    return _Sequence(kind_of(args[0]) if len(args) == 1 else None)
  if annotation in _SIMPLE:
    return _SIMPLE[annotation]()
  return _Instance(annotation) if isinstance(annotation, type) else None


def _kind_of_union(given: Sequence[Any]) -> Kind | None:
  members = [m for m in given if m is not type(None)]
  if set(typing.get_args(DimensionLike)) <= set(members):
    rest = [m for m in members if m not in (Dimension, _PAIR)]
    kinds: list[Kind | None] = [_Dimension(pairs=True), *map(kind_of, rest)]
  else:
    kinds = [kind_of(m) for m in members]
  if any(k is None for k in kinds):
    return None
  kind = kinds[0] if len(kinds) == 1 else _Union(kinds)
  if len(members) < len(given):
    kind = copy.copy(kind)
    kind.types = kind.types | {type(None)}
  return kind


def _tensor_of(words: str, legal: Callable[[tf.DType], bool], advice: str) -> Kind:
  return _Tensor(DTypes(words, legal, advice))


def _is_number(d: tf.DType) -> bool:
  return d.is_floating or d.is_complex or d.is_integer


_CAST = "cast it: mtf.to_float({name})"
FloatTensor: TypeAlias = Annotated[
  Tensor, _tensor_of("a floating tensor", lambda d: d.is_floating, _CAST)
]
FloatOrComplexTensor: TypeAlias = Annotated[
  Tensor, _tensor_of("a floating tensor", lambda d: d.is_floating or d.is_complex, _CAST)
]
NumberTensor: TypeAlias = Annotated[
  Tensor, _tensor_of("a tensor of numbers", _is_number, _CAST + " or mtf.to_int32({name})")
]
SignedTensor: TypeAlias = Annotated[
  Tensor,
  _tensor_of("a tensor of signed numbers", lambda d: _is_number(d) and not d.is_unsigned, _CAST),
]
RealTensor: TypeAlias = Annotated[
  Tensor,
  _tensor_of("a tensor of real numbers", lambda d: d.is_floating or d.is_integer, _CAST),
]
CastableTensor: TypeAlias = Annotated[
  Tensor,
  _tensor_of("a tensor of numbers or bools", lambda d: d != tf.string, "text has no value"),
]
BoolTensor: TypeAlias = Annotated[
  Tensor, _tensor_of("a bool tensor", lambda d: d == tf.bool, "cast it: mtf.cast({name}, tf.bool)")
]
IntTensor: TypeAlias = Annotated[
  Tensor, _tensor_of("an integer tensor", lambda d: d.is_integer, "cast it: mtf.to_int32({name})")
]
# What `tf.as_dtype` takes; the second: if the dtype is floating.
DTypeLike: TypeAlias = Annotated[Any, _DType()]
FloatDTypeLike: TypeAlias = Annotated[Any, _FloatDType()]
# A number, or an array or tf.Tensor of no dimensions.
Scalar: TypeAlias = Annotated[Any, _Number(whole=False, error=DTypeError, real=False)]
TensorOrScalar: TypeAlias = Tensor | Scalar
NumberOrScalar: TypeAlias = NumberTensor | Scalar
RealOrScalar: TypeAlias = RealTensor | Scalar
NumberOrTextTensor: TypeAlias = Annotated[
  Tensor, _tensor_of("a tensor of numbers or text", lambda d: d != tf.bool, _CAST)
]
# Besides, arrays and tf.Tensors of any shape.
ArrayOrScalar: TypeAlias = Annotated[Any, _Numbers()]
