"""Kinds of arguments that only this language has: tensors of certain dtypes, dimensions, shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias, cast

import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments import kinds
from mesh_tensorflow.arguments.kinds import Kind, Scalar, converts, shown
from mesh_tensorflow.errors import DimensionTypeError, DTypeError, MeshError
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  ShapeLike,
  convert_to_dimension,
  convert_to_shape,
)
from mesh_tensorflow.program.graph import Tensor


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


class _Tensor(Kind):
  words = "an mtf.Tensor"
  types = frozenset([Tensor])

  def __init__(self, dtypes: DTypes | None = None):
    self.dtypes = dtypes
    if dtypes:
      self.types = frozenset()

  def accepts(self, value: object) -> bool:
    return isinstance(value, Tensor) and (self.dtypes is None or value.dtype in self.dtypes.legal)

  def is_near(self, value: object) -> bool:
    return isinstance(value, Tensor)

  def refuse(self, function: str, name: str, value: object) -> MeshError:
    d = self.dtypes
    if not isinstance(value, Tensor) or d is None:
      return super().refuse(function, name, value)
    advice = d.advice.format(name=name) if value.dtype != tf.string else "text has no value"
    return DTypeError(f"{function}: {name} must be {d.words}, got {value}; {advice}")

  def advice(self, name: str, value: object) -> str:
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

  def accepts(self, value: object) -> bool:
    if isinstance(value, Dimension):
      return isinstance(value[0], str) and type(value[1]) is int and value[1] >= 0
    return self.pairs and isinstance(value, (tuple, list)) and converts(convert_to_dimension, value)

  def refuse(self, function: str, name: str, value: object) -> MeshError:
    if isinstance(value, (tuple, list)) and (self.pairs or isinstance(value, Dimension)):
      try:
        convert_to_dimension(cast(DimensionLike, value))  # It says what is wrong with others.
      except MeshError as e:
        return type(e)(f"{function}: {name}: {e}")
    return super().refuse(function, name, value)

  def advice(self, name: str, value: object) -> str:
    if isinstance(value, str):
      return f'write mtf.Dimension("{value}", size)'
    if isinstance(value, Shape) and len(value) == 1:
      return f"write {name}[0]"
    return "write mtf.Dimension(name, size)"


class _ShapeLike(Kind):
  words = "a shape"
  types = frozenset([Shape])

  def accepts(self, value: object) -> bool:
    return value is not None and converts(convert_to_shape, value)

  def refuse(self, function: str, name: str, value: object) -> MeshError:
    if value is None or isinstance(value, Tensor) or not hasattr(value, "__len__"):
      error = DimensionTypeError
      what = f"write {name}.shape" if isinstance(value, Tensor) else 'write [dim, ...] or "a:2,b:3"'
      return error(f"{function}: {name} must be a shape, got {shown(value)}; {what}")
    try:
      convert_to_shape(cast(ShapeLike, value))
    except MeshError as e:
      return type(e)(f"{function}: {name}: {e}")
    except (TypeError, ValueError) as e:
      return DimensionTypeError(f"{function}: {name} must be a shape, got {shown(value)}: {e}")
    return super().refuse(function, name, value)


def _is_list_of_dimensions(value: object) -> bool:
  if type(value) is not list and type(value) is not tuple:
    return False
  for d in value:
    if type(d) is not Dimension:
      return False
  return True


kinds.register(Tensor, _Tensor)
kinds.register(Dimension, lambda: _Dimension(pairs=False))
kinds.register(DimensionLike, lambda: _Dimension(pairs=True))
# ShapeLike has None in it, which only a parameter accepts whose default it is.
kinds.register(ShapeLike, _ShapeLike)
kinds.register_class(Shape, DimensionTypeError)


def _tensor_of(words: str, legal: Callable[[tf.DType], bool], advice: str) -> Kind:
  return _Tensor(DTypes(words, legal, advice))


def _is_number(d: tf.DType) -> bool:
  return bool(d.is_floating or d.is_complex or d.is_integer)


_CAST = "cast it: mtf.to_float({name})"
FloatTensor: TypeAlias = Annotated[
  Tensor, _tensor_of("a floating tensor", lambda d: d.is_floating, _CAST)
]
FloatOrComplexTensor: TypeAlias = Annotated[
  Tensor, _tensor_of("a floating or complex tensor", lambda d: d.is_floating or d.is_complex, _CAST)
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
  _tensor_of("a tensor of numbers or bools", lambda d: d != tf.string, ""),
]
BoolTensor: TypeAlias = Annotated[
  Tensor, _tensor_of("a bool tensor", lambda d: d == tf.bool, "cast it: mtf.cast({name}, tf.bool)")
]
IntTensor: TypeAlias = Annotated[
  Tensor, _tensor_of("an integer tensor", lambda d: d.is_integer, "cast it: mtf.to_int32({name})")
]
TensorOrScalar: TypeAlias = Tensor | Scalar
NumberOrScalar: TypeAlias = NumberTensor | Scalar
RealOrScalar: TypeAlias = RealTensor | Scalar
NumberOrTextTensor: TypeAlias = Annotated[
  Tensor, _tensor_of("a tensor of numbers or text", lambda d: d != tf.bool, _CAST)
]
