"""Keys of operations that are alike, so that one layer of a model stands for all."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.operations.variables import Variable, VariableDType
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor
from mesh_tensorflow.program.reachability import reads

# Attributes that say which operation it is, not what it does.
_NAMES = frozenset(
  "_name full_name _mesh _inputs _outputs _initializer _stored _life _trainable _splittable_dims"
  " _unsplittable_dims".split()
)


def kind_of(op: Operation) -> Hashable:
  """Key that is equal for operations with identical lowerings.

  It has the class, shapes and dtypes, which inputs are the same tensor, and every attribute. An
  attribute that cannot be compared by value makes the key unique to the operation.

  Args:
    op: an operation.
  """
  places: dict[Tensor, int] = {}
  for x in reads(op) + op.outputs:
    places.setdefault(x, len(places))
  tensors = tuple((places[x], x.shape, x.dtype) for x in reads(op) + op.outputs)
  attributes = tuple(
    (name, _value(value, places)) for name, value in sorted(vars(op).items()) if name not in _NAMES
  )
  return (type(op), len(op.inputs), tensors, attributes)


def _value(value: Any, places: Mapping[Tensor, int], depth: int = 0) -> Hashable:
  if value is None or isinstance(
    value, (bool, int, float, complex, str, bytes, Dimension, Shape, tf.DType, VariableDType, type)
  ):
    return (type(value).__name__, value)
  if depth > 8:
    return ("object", id(value))
  inside = functools.partial(_value, places=places, depth=depth + 1)
  if isinstance(value, Tensor):
    return ("tensor", places.get(value, -1), value.shape, value.dtype)
  if isinstance(value, Variable):
    return ("variable", value.shape, value.dtype)
  if isinstance(value, Mesh):
    return ("mesh",)
  if isinstance(value, (list, tuple)):
    return (type(value).__name__, *map(inside, value))
  if isinstance(value, (set, frozenset)):
    return ("set", frozenset(map(inside, value)))
  if isinstance(value, Mapping):
    return ("dict", frozenset((inside(k), inside(v)) for k, v in value.items()))
  if isinstance(value, np.ndarray):
    return (
      "array",
      value.shape,
      value.dtype.str,
      value.tobytes() if value.size < 100 else id(value),
    )
  if tf.is_tensor(value) and isinstance(getattr(value, "shape", None), tf.TensorShape):
    return ("tf", tuple(value.shape), value.dtype)  # No cost depends on what is in it.
  if isinstance(value, functools.partial):
    return ("partial", inside(value.func), inside(value.args), inside(value.keywords))
  if isinstance(value, types.MethodType):
    return ("method", inside(value.__func__), id(value.__self__))
  if isinstance(value, types.FunctionType):
    # One by one: a list made here is another object each time, which nothing is alike to.
    cells = [inside(c.cell_contents) for c in value.__closure__ or () if _is_filled(c)]
    defaults = [inside(x) for x in value.__defaults__ or ()]
    keywords = [(name, inside(x)) for name, x in (value.__kwdefaults__ or {}).items()]
    return ("function", value.__code__, tuple(cells), tuple(defaults), tuple(keywords))
  return ("object", id(value))


def _is_filled(cell: Any) -> bool:
  try:
    return cell.cell_contents is not cell
  except ValueError:  # A name that is not bound yet.
    return False
